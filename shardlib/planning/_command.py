"""`shardlib plan`, in two processes: one that talks to the user, and a child that may be told
anything about the machine.

The child sees no accelerator, writes its noise to a file, and may be taken down by a compiler
without taking the message with it. Either a whole report is printed, or one message and exit code
2.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardlib._text import terminal_width
from shardlib.machine._targets import COMPILE_ONLY, LOUD, Target
from shardlib.planning._estimate import Estimate
from shardlib.planning._lower import line_of_user
from shardlib.planning._plan import plan

_CHILD = "SHARDLIB_PLAN_ANSWER"  # where the child writes what it found

_RUN = "run"  # what is planned of a file where nothing else is named: what the trainer trains

_EXAMPLE = """\
WHAT is FILE.py:NAME, MODULE:NAME, or FILE.py alone, which is FILE.py:run. The name is that of a
function that takes a mesh, and returns a step with its state and batch, which may be abstract:

    def make_step(mesh):
        strategy = sl.Strategy(mesh=mesh, rules=...)
        state = sl.init(make_model, optimizer, strategy, abstract=True)
        batch = {"tokens": jax.ShapeDtypeStruct((256, 4097), "int32")}
        return sl.train_step(loss_fn, strategy), state, batch

Or it is a run of a trainer, or a function without arguments that returns one: an object with a
method `planned(target, mesh, dcn)`, which returns the same of a `sl.Target` and the texts of
--mesh and --dcn, empty where they are not given. The runs of examples/configs are such objects.

targets: tpu:v5e:16x16, tpu:v5p:4x4x8:slices=2, gpu:h200:64x1x8 (slices x hosts x GPUs), cpu:8
"""


def run(arguments: argparse.Namespace) -> int:
    """The command; the exit code is 0 for a report, 1 for one that says it does not fit, 2 for a
    mistake.
    """
    if answer := os.environ.get(_CHILD):
        return _child(arguments, Path(answer))
    try:
        Target(arguments.target)
        _split(arguments.make_step)
    except ValueError as error:
        return _refuse(str(error))
    with tempfile.TemporaryDirectory(prefix="shardlib-plan-") as folder:
        return _parent(arguments.given, arguments, Path(folder))


def add_command(commands: Any) -> None:
    """Add `plan` to the commands of a parser."""
    command = commands.add_parser(
        "plan",
        help="what a training step will do on a machine that is not there",
        description="Compile a step with the real compiler of a machine that need not be there, "
        "and say what it will do: whether it fits, what it sends over which network, "
        "and which lines of yours are to blame.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "make_step", metavar="WHAT", help="FILE.py:NAME, MODULE:NAME or FILE.py: a step, or a run"
    )
    command.add_argument(
        "--target", required=True, help="the machine, such as tpu:v5e:16x16 or gpu:h200:64x1x8"
    )
    command.add_argument(
        "--mesh",
        default="",
        help="its axes, such as data=16,model=16 (default: those of the run, or data=-1)",
    )
    command.add_argument(
        "--dcn", default="", help="of several slices: the axes between them, such as data or data=4"
    )
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.set_defaults(run=run)


def _split(make_step: str) -> tuple[str, str]:
    if make_step.endswith(".py"):
        return make_step, _RUN
    where, colon, name = make_step.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise ValueError(
            f"`{make_step}` names no step and no run: write `FILE.py:NAME`, "
            "`MODULE:NAME` or `FILE.py`."
        )
    return where, name


def _refuse(message: str) -> int:
    print(f"shardlib plan: {message}", file=sys.stderr)
    return 2


def _parent(argv: list[str], arguments: argparse.Namespace, folder: Path) -> int:
    target, answer = Target(arguments.target), folder / "answer.json"
    environment = os.environ | COMPILE_ONLY | LOUD | {"JAX_PLATFORMS": "cpu", "TMPDIR": str(folder)}
    environment[_CHILD] = str(answer)
    if target.platform == "cpu":
        flags = os.environ.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = (
            f"{flags} --xla_force_host_platform_device_count={target.size}".strip()
        )
    if width := terminal_width():  # which the child, that writes into a file, does not see
        environment["COLUMNS"] = str(width)
    noise = folder / "noise.txt"
    with noise.open("wb") as log, _Progress(target):
        child = subprocess.Popen(
            [sys.executable, "-m", "shardlib", *argv], env=environment, stdout=log, stderr=log
        )
        before = signal.signal(signal.SIGTERM, _stop)
        try:
            code = child.wait()
        except (KeyboardInterrupt, _Stopped) as error:
            child.kill()
            child.wait()
            return 130 if isinstance(error, KeyboardInterrupt) else 143
        finally:
            signal.signal(signal.SIGTERM, before)
    found = json.loads(answer.read_text()) if answer.exists() else {}
    if "report" in found:
        _print(found["report"])
        return 0 if found["fits"] else 1
    if "refused" in found:
        return _refuse(found["refused"])
    last = [
        line
        for file in (noise, *folder.glob("*/stderr.txt"))
        for line in file.read_text(errors="replace").splitlines()
    ]
    died = (
        f"died (signal {signal.Signals(-code).name})"
        if code < 0
        else f"ended the process (exit code {code})"
    )
    words = ". Its last words:\n  " + "\n  ".join(last[-12:]) if last else ""
    return _refuse(f"the step or the compiler for `{target}` {died}{words}")


class _Stopped(Exception):  # noqa: N818  not a mistake
    """Somebody has asked the command to end."""


def _stop(*_: object) -> None:
    raise _Stopped


def _print(report: str) -> None:
    """The report, also where the terminal knows no bars or stops reading."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        report.encode(encoding)
    except UnicodeEncodeError:
        report = re.sub("[▏-█]", "#", report).encode(encoding, "replace").decode(encoding)
    try:
        print(report, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _child(arguments: argparse.Namespace, answer: Path) -> int:
    try:
        found = _answer(arguments)
    except (ValueError, ModuleNotFoundError) as error:
        found = {"refused": str(error)}
    answer.write_text(json.dumps(found))
    return 0


def _answer(arguments: argparse.Namespace) -> dict[str, Any]:
    target = Target(arguments.target)
    where, name = _split(arguments.make_step)
    found = _named(where, name)
    title, made = _of_user(lambda: _made(found, target, arguments), f"`{arguments.make_step}`")
    if (
        not isinstance(made, tuple)
        or len(made) not in (3, 4)
        or not isinstance((*made, None)[3], Estimate | None)
    ):
        raise ValueError(
            f"`{arguments.make_step}` must return a step, its state and its batch, and may add a "
            f"`sl.planning.Estimate`; it returned {_described(made)}."
        )
    step, state, batch, *estimate = made
    planned = _of_user(
        lambda: plan(
            step,
            state,
            batch,
            target,
            estimate=estimate[0] if estimate else None,
            name=title or name,
        ),
        "the step",
    )
    return {
        "report": json.dumps(planned.as_dict()) if arguments.json else str(planned),
        "fits": planned.fits,
    }


def _made(found: Any, target: Target, arguments: argparse.Namespace) -> tuple[str, Any]:
    """What is to be planned, with its own name if it has one: of a run, or of a function that gives
    one or takes a mesh.
    """
    if not _is_run(found) and _takes_nothing(found):
        made = found()
        if not _is_run(made):
            raise ValueError(
                f"`{arguments.make_step}` takes no mesh, so it must return a run, an object with a "
                f"method `planned(target, mesh, dcn)`; it returned {_described(made)}. A function "
                "of a step takes a mesh."
            )
        found = made
    if not _is_run(found):
        return "", found(target.mesh(arguments.mesh or "data=-1", dcn=arguments.dcn))
    name = getattr(found, "name", "")
    return name if isinstance(name, str) else "", found.planned(
        target, arguments.mesh, arguments.dcn
    )


def _is_run(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "planned", None))


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function is one of no arguments, and so of no mesh."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = (
        one.default is one.empty or one.name == "mesh"
        for one in parameters
        if one.kind != one.VAR_KEYWORD
    )
    return not any(needed)


def _described(made: Any) -> str:
    return (
        f"({', '.join(type(one).__name__ for one in made)})"
        if isinstance(made, tuple)
        else type(made).__name__
    )


def _named(where: str, name: str) -> Any:
    """What a file or a module calls by a name: a function, or a run."""
    sys.path.insert(0, str(Path.cwd()))
    if where.endswith(".py"):
        path = Path(where).resolve()
        if not path.exists():
            raise ValueError(f"There is no file `{where}`.")
        module = _of_user(lambda: _load(path), f"`{where}`")
    else:
        module = _of_user(lambda: importlib.import_module(where), f"`{where}`")
    found = getattr(module, name, None)
    if not callable(found) and not _is_run(found):
        there = ", ".join(
            f"`{other}`" for other, value in vars(module).items() if _is_own(value, module)
        )
        raise ValueError(
            f"`{where}` has no function and no run `{name}`; it has {there or 'none'}."
        )
    return found


def _is_own(value: Any, module: Any) -> bool:
    if _is_run(value):
        return True
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def _of_user(run: Callable[[], Any], what: str) -> Any:
    """Run what the user wrote; what it raises, with the line that did."""
    try:
        return run()
    except (SystemExit, KeyboardInterrupt) as error:
        raise ValueError(
            f"{what} ended the process{_at(error)}: {type(error).__name__}({error})."
        ) from error
    except Exception as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = Path(__file__).parent.parent in last.parents and last != Path(__file__)
        if isinstance(error, ValueError) and last == Path(__file__):
            raise
        if ours and isinstance(error, ValueError | ModuleNotFoundError):
            raise
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if ours:
            raise ValueError(
                f"This is a bug of shardlib, please report it: {said}\n{traceback.format_exc()}"
            ) from error
        raise ValueError(f"{what} failed{_at(error)}: {said}") from error


def _at(error: BaseException) -> str:
    line = line_of_user(error)
    return f" at {line}" if line else ""


def _load(path: Path) -> Any:
    """The module of a file: a part of its package if it is in one, else by a name that shadows no
    other.
    """
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").exists():
        root, parts = root.parent, [root.name, *parts]
    sys.path.insert(0, str(root))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    spec = importlib.util.spec_from_file_location(f"_planned_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _Progress:
    """Seconds on the terminal while a compiler works; elsewhere one line."""

    def __init__(self, target: Target) -> None:
        self.target, self.stopped = target, threading.Event()

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __exit__(self, *exception: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _run(self) -> None:
        started, terminal = time.monotonic(), sys.stderr.isatty()
        if not terminal:
            print(f"compiling for {self.target} ...", file=sys.stderr, flush=True)
        while not self.stopped.wait(0.5):
            if terminal:
                seconds = time.monotonic() - started
                print(
                    f"\rcompiling for {self.target} ... {seconds:.0f} s",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
