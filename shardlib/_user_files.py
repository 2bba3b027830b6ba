"""Files and modules of a user's, by the names that a command line has for them."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


def split_name(what: str, default: str) -> tuple[str, str]:
    """The file or module in `FILE.py:NAME`, `MODULE:NAME` or `FILE.py`, and the name in it.

    A file alone is asked for the name `default`. What is none of the three is a `ValueError`.

    >>> split_name("models/hub.py:weights", ""), split_name("models/hub.py", "weights")
    (('models/hub.py', 'weights'), ('models/hub.py', 'weights'))
    """
    if what.endswith(".py"):
        return what, default
    # The last colon, since a path may have one of its own.
    where, colon, name = what.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise ValueError("write `FILE.py:NAME`, `MODULE:NAME` or `FILE.py`.")
    return where, name


def load_module(where: str) -> Any:
    """A module by its name, or that of a file: a part of its package if the file is in one.

    Otherwise it gets a name that shadows no other module.
    """
    # As `python -m` has it, so that modules of the folder are found.
    sys.path.insert(0, str(Path.cwd()))
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).resolve()
    if not path.is_file():
        raise ValueError(f"There is no file `{where}`.")
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").exists():
        root, parts = root.parent, [root.name, *parts]
    sys.path.insert(0, str(root))
    # A file whose name has a dot cannot be imported as part of a package.
    if len(parts) > 1 and all(map(str.isidentifier, parts)):
        module = importlib.import_module(".".join(parts))
        if Path(module.__file__ or "").resolve() != path:
            raise ValueError(
                f"`{where}` is `{module.__name__}` of its package, and so is "
                f"`{module.__file__}`, which Python finds first: rename one of the two packages."
            )
        return module
    spec = importlib.util.spec_from_file_location(f"_of_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickle look their module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def check_can_write(option: str, file: str) -> None:
    """Refuse a file that an option of a command names, where none can be written.

    It is for files that come at the end of long work, which would be lost with them.
    """
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"`{option} {file}` is a folder: name a file in it.")
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"`{option} {file}`: there is no folder `{folder}` to write it into.")
    # A file that is there is written over, and needs no new entry in its folder.
    written_to = path if path.exists() else folder
    if not os.access(written_to, os.W_OK):
        raise ValueError(f"`{option} {file}`: you may not write to `{written_to}`.")
