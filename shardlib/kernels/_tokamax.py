"""What the ops by Tokamax share: whether it is installed, and how it is imported.

Tokamax is another library of kernels for JAX, an extra of this one, and is imported no sooner than
it is needed.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any


def refuses_absence() -> str | None:
    """Why Tokamax cannot be imported; None if it can.

    The text continues a sentence that begins with an implementation's name.
    """
    if importlib.util.find_spec("tokamax") is None:
        return 'is Tokamax\'s, which is not installed: `pip install "shardlib[tokamax]"`'
    return None


def version() -> tuple[int, ...]:
    """The version of Tokamax that is installed, as numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", version_text())[:3])


def version_text() -> str:
    """The version of Tokamax that is installed, as it spells it."""
    return importlib.metadata.version("tokamax")


def has_module(name: str) -> bool:
    """Whether the Tokamax that is installed has a module; nothing is imported.

    Args:
        name: of the module, with dots, which begins with `tokamax.`.
    """
    found = importlib.util.find_spec("tokamax")
    if found is None or found.origin is None:
        return False
    path = Path(found.origin).parent.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists()


def imported(name: str = "tokamax") -> Any:
    """Tokamax, or one of its modules."""
    flags: Any = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        # Tokamax would read the command line of whatever program this is.
        flags.mark_as_parsed()
    return importlib.import_module(name)
