"""Which run is meant: one by its name, by a file, by its `run.json`, or by a command line."""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from examples import values
from examples.fields import listed, override, show_help
from examples.run import Run
from models import gpt, moe

CONFIGS = Path(__file__).parent / "configs"
MODELS = (gpt.GPTConfig, moe.MoEConfig)  # that the field `model` may be
OF_TEXTS = ("train", "held out")  # in a `run.json` beside the fields: fingerprints of the tokens


def from_command_line(arguments: Sequence[str]) -> Run:
    """The run that a command line names, with its changes:
    `tiny --loop.steps 100 --strategy.mesh data=2,model=4`.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        names = ", ".join(sorted(path.stem for path in CONFIGS.glob("[!_]*.py")))
        print(
            f"usage: {Path(sys.argv[0]).name} RUN [--FIELD VALUE ...]\n\nRUN is one of {names}; or "
            "`path/to/file.py:function`, a function that returns a `Run`;\nor `path/to/run.json`, "
            "the same run as the one that wrote it.\nRUN --help lists its fields."
        )
        raise SystemExit(0 if arguments else 2)
    run = _named(arguments[0])
    if {"-h", "--help"} & set(arguments[1:]):
        show_help(run)
        raise SystemExit(0)
    try:
        changed = override(run, arguments[1:])
    except ValueError as error:
        raise SystemExit(f"{error}\n`{arguments[0]} --help` lists the fields.") from error
    if changed.name != run.name and run.folder and changed.folder == run.folder:
        raise SystemExit(
            f"`--name {changed.name}`: the run `{run.name}` is in the folder `{run.folder}`, and "
            "would go on there. Give another one too, `--folder`; or leave `--name` out."
        )
    return changed


def recorded(path: str | Path) -> Run:
    """The run that wrote a `run.json`, with every field as it was."""
    try:
        lines = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise SystemExit(f"There is no file `{path}`.") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"`{path}` cannot be read: {error}") from error
    if not isinstance(lines, dict) or not all(isinstance(text, str) for text in lines.values()):
        raise SystemExit(f"`{path}` is not the `run.json` of a run: it holds no fields as text.")
    lines = {name: text for name, text in lines.items() if name not in OF_TEXTS}
    try:
        run = _rebuilt(Run, lines)
    except ValueError as error:
        raise SystemExit(f"`{path}` cannot be taken up: {error}") from error
    now = run.lines()
    if differing := [name for name in {**lines, **now} if lines.get(name) != now.get(name)]:
        raise SystemExit(
            f"`{path}` cannot be taken up: this version of the program has other fields, or reads "
            f"them otherwise: {listed(differing)}."
        )
    return run


def _rebuilt(kind: type, lines: dict[str, str], prefix: str = "") -> Any:
    """A frozen dataclass from what `lines` wrote of it."""
    new: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name, below = prefix + field.name, f"{prefix}{field.name}."
        inner = {line.removeprefix(below) for line in lines if line.startswith(below)}
        if name in lines:
            new[field.name] = values.evaluated(name, lines[name])
        elif inner:
            of_fields = {line.partition(".")[0] for line in inner}
            hint = get_type_hints(kind)[field.name]
            new[field.name] = _rebuilt(_record(name, hint, of_fields), lines, below)
        else:
            raise ValueError(f"it has no `{name}`.")
    return kind(**new)


def _record(name: str, hint: Any, of_fields: set[str]) -> type:
    """The dataclass that has some fields, of those that the type of a field allows."""
    kinds = MODELS if hint is gpt.GPTConfig else get_args(hint) or (hint,)
    for kind in kinds:
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            continue
        if {field.name for field in dataclasses.fields(kind)} == of_fields:
            return kind
    raise ValueError(
        f"`{name}` has the fields {listed(sorted(of_fields))}, which this version does not know."
    )


def _named(name: str) -> Run:
    """The run of a `run.json`, of a file, or of a known name."""
    if name.endswith(".json"):
        return recorded(name)
    path, _, function = name.partition(":")
    module = _module_of_file(path) if path.endswith(".py") else _known_module(path)
    made = getattr(module, function or "run", None)
    if made is None:
        raise SystemExit(
            f"`{path}` has no function `{function or 'run'}`, which would return the run."
        )
    if callable(made) and not isinstance(made, Run):
        made = _called(path, function or "run", made)
    if not isinstance(made, Run):
        raise SystemExit(
            f"`{path}:{function or 'run'}` gives {type(made).__name__}, where a `Run` was "
            "expected: a function returns it."
        )
    return made


def _called(path: str, name: str, function: Callable[..., Any]) -> Any:
    """What a user's function returns, which takes no arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise SystemExit(
            f"`{path}:{name}` is called without arguments, and takes some: {error}."
        ) from error
    return function()


def _module_of_file(path: str) -> Any:
    """The module of a file of a user's."""
    spec = importlib.util.spec_from_file_location(f"_of_user_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).exists():
        raise SystemExit(f"There is no file `{path}`.")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses look their module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _known_module(name: str) -> Any:
    """A module of `configs/`."""
    known = sorted(one.stem for one in CONFIGS.glob("[!_]*.py"))
    if name in known:
        return importlib.import_module(f"examples.configs.{name}")
    near = difflib.get_close_matches(name, known, 1, 0.5)
    meant = f"; did you mean `{near[0]}`?" if near else "."
    raise SystemExit(
        f"There is no run `{name}`{meant} There are {', '.join(known)}; or name a function of a "
        "file of your own: `my_run.py:run`."
    )
