"""`shardlib plan`, in two processes: one that talks to the user, and a child that may be told
anything about the machine.

The child sees no accelerator, writes its noise to a file, and may be taken down by a compiler
without taking the message with it. Either a whole report is printed, or one message and exit code
2.
"""

import argparse
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
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardlib._progress import say
from shardlib._text import CLEAR_LINE, coloured, encodable, listed, terminal_width
from shardlib._user_files import load_module, split_name
from shardlib.compiled._source_lines import is_of_user
from shardlib.data._store import cache_folder
from shardlib.machine._targets import COMPILE_ONLY, LOUD, Target
from shardlib.planning._estimate import Estimate
from shardlib.planning._lower import line_of_user
from shardlib.planning._questions import add_questions, answer_of, check_questions
from shardlib.step._step import Step

# The variable by which a child knows that it is one, and where it writes its answer.
_CHILD = "SHARDLIB_PLAN_ANSWER"
_BARS = re.compile("[█-▏]+")
# What is planned of a file where nothing else is named: what the trainer trains.
_RUN = "run"

_EXAMPLE = """\
WHAT is FILE.py:NAME, MODULE:NAME, or FILE.py, which is FILE.py:run. The name is that of a
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
    """The command.

    The exit code is 0 for a report, 1 for one that says it does not fit, 2 for a mistake.
    """
    # The command runs itself once more: a compiler that dies takes its process with it.
    answer = os.environ.get(_CHILD)
    if answer:
        return _child(arguments, Path(answer))
    try:
        Target(arguments.target)
        _split(arguments.make_step)
        check_questions(arguments)
        _check_cache(arguments.cache)
    except ValueError as error:
        return _refuse(str(error))
    # What can be refused at once has been: the process below takes seconds to start.
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
    caches = command.add_mutually_exclusive_group()
    caches.add_argument(
        "--cache",
        metavar="FOLDER",
        help="where what compilers say is kept, so that the same step is not compiled again "
        "(default: ~/.cache/shardlib/plans)",
    )
    caches.add_argument(
        "--no-cache", action="store_true", help="compile in any case, and keep nothing"
    )
    add_questions(command)
    command.set_defaults(run=run)


def _split(make_step: str) -> tuple[str, str]:
    """The file or module that is named, and what is named of it."""
    try:
        return split_name(make_step, _RUN)
    except ValueError as error:
        raise ValueError(f"`{make_step}` names no step and no run: {error}") from error


def _refuse(message: str) -> int:
    """Say what is wrong, and return the exit code for it."""
    print(f"shardlib plan: {message}", file=sys.stderr)
    return 2


def _parent(argv: list[str], arguments: argparse.Namespace, folder: Path) -> int:
    """Have a child make the plan, and print what it answers.

    Args:
        argv: the command line, which the child is given once more.
        arguments: the same, parsed.
        folder: an empty folder for what the child writes.
    """
    target, answer = Target(arguments.target), folder / "answer.json"
    noise = folder / "noise.txt"
    try:
        code = _run_child(argv, target, _environment(target, folder, answer), noise)
    # As shells do it: 128 and the number of the signal.
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _StoppedError:
        return 128 + signal.SIGTERM
    content = {}
    if answer.exists():
        content = json.loads(answer.read_text())
    if "report" in content:
        _print(content["report"])
        return int(not content["fits"])
    if "refused" in content:
        return _refuse(content["refused"])
    # Without an answer, the process was ended by the compiler or by what the user wrote.
    end = f"ended the process (exit code {code})"
    if code < 0:
        end = f"died (signal {signal.Signals(-code).name})"
    return _refuse(f"the step or the compiler for `{target}` {end}{_last_words(noise, folder)}")


def _environment(target: Target, folder: Path, answer: Path) -> dict[str, str]:
    """The environment of the child, in which it sees no accelerator."""
    environment = os.environ | COMPILE_ONLY | LOUD | {"JAX_PLATFORMS": "cpu", "TMPDIR": str(folder)}
    # The child finds this, and makes the plan instead of starting another child.
    environment[_CHILD] = str(answer)
    if target.platform == "cpu":
        flags = os.environ.get("XLA_FLAGS", "")
        count = f"--xla_force_host_platform_device_count={target.size}"
        environment["XLA_FLAGS"] = f"{flags} {count}".strip()
    # The child writes into a file, and cannot see how wide the terminal is.
    width = terminal_width()
    if width:
        environment["COLUMNS"] = str(width)
    return environment


def _run_child(argv: list[str], target: Target, environment: dict[str, str], noise: Path) -> int:
    """Run the child until it ends, with its output in the file `noise`; returns its exit code.

    SIGTERM and Ctrl-C kill the child, and are raised.
    """
    with noise.open("wb") as log, _Progress(target, noise):
        child = subprocess.Popen(
            [sys.executable, "-m", "shardlib", *argv], env=environment, stdout=log, stderr=log
        )
        # A signal to this process is meant for the compiler too, which may run for minutes.
        before = signal.signal(signal.SIGTERM, _stop)
        try:
            return child.wait()
        except (KeyboardInterrupt, _StoppedError):
            child.kill()
            child.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _last_words(noise: Path, folder: Path) -> str:
    """The last lines that the child, and the processes of its compilers, have written."""
    lines: list[str] = []
    for file in (noise, *folder.glob("*/stderr.txt")):
        lines += file.read_text(errors="replace").splitlines()
    if not lines:
        return ""
    return ". Its last words:\n  " + "\n  ".join(lines[-12:])


class _StoppedError(Exception):
    """Somebody has asked the command to end."""


def _stop(*_: object) -> None:
    raise _StoppedError


def _print(report: str) -> None:
    """Print a report, also where the terminal knows no bars or stops reading."""
    try:
        print(_in_colours(encodable(report, sys.stdout)), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_colours(report: str) -> str:
    """A report as a terminal shows it: titles of sections in heavy type, bars in green, and what
    does not fit in red.

    Whatever is not written to a terminal stays plain.
    """
    sections: list[str] = []
    for section in report.split("\n\n"):
        title, newline, rows = section.partition("\n")
        # A single line is a sentence, and JSON has no titles.
        if rows and not title.startswith("{"):
            title = coloured(title, "bold", sys.stdout)
        rows = _BARS.sub(lambda found: coloured(found[0], "green", sys.stdout), rows)
        sections.append(title + newline + rows)
    refused = "DOES NOT FIT"
    return "\n\n".join(sections).replace(refused, coloured(refused, "red", sys.stdout))


def _child(arguments: argparse.Namespace, answer: Path) -> int:
    """Make the plan, and write it or what is wrong into the file `answer`."""
    warnings.showwarning = _show_warning
    try:
        content = _answer(arguments)
    except (ValueError, ModuleNotFoundError) as error:
        content = {"refused": str(error)}
    answer.write_text(json.dumps(content))
    return 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    *_: Any,
) -> None:
    """Say a warning in one line, which the parent hands on: see `_Progress`."""
    text = f"{category.__name__}: {' '.join(str(message).split())}"
    # A line of a library is of no use; what it warns of is in the text.
    say(f"{filename}:{lineno}: {text}" if is_of_user(filename) else text)


def _answer(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report of a plan, and whether the step fits."""
    target = Target(arguments.target)
    where, name = _split(arguments.make_step)
    subject = _named(where, name)
    title, result = _of_user(
        lambda: _step_of(subject, target, arguments), f"`{arguments.make_step}`"
    )
    _check_result(arguments.make_step, result)
    return _of_user(
        lambda: answer_of(arguments, result, title or name, _cache(arguments, result[0])),
        "the step",
    )


def _check_cache(cache: str | None) -> None:
    """Refuse what is no folder, before a compiler takes minutes and nothing can be kept."""
    if cache is None:
        return
    try:
        folder = Path(cache).expanduser()
    except RuntimeError as error:  # no such user
        raise ValueError(f"`--cache {cache}`: {error}") from error
    # What is not there yet is made, in the first of its parents that is.
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not cache or not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(
            f"`--cache {cache}` is no folder that can be written to: name one, which need not be "
            "there, or leave it out."
        )


def _cache(arguments: argparse.Namespace, step: Any) -> Path | None:
    """The folder that keeps what compilers say, or None.

    By default it is next to the tokens of the trainer, in the user's own cache, for steps of which
    it can be kept.
    """
    if arguments.no_cache or (arguments.cache is None and not isinstance(step, Step)):
        return None
    if arguments.cache is not None:
        return Path(arguments.cache).expanduser()
    return cache_folder() / "plans"


def _check_result(make_step: str, result: Any) -> None:
    """Refuse what a function has returned if it is no step with its state and its batch."""
    if not _is_step_with_inputs(result):
        raise ValueError(
            f"`{make_step}` must return a step, its state and its batch, and may add a "
            f"`sl.planning.Estimate`; it returned {_types_of(result)}."
        )


def _is_step_with_inputs(result: Any) -> bool:
    """Whether something is a step with its state and its batch, and perhaps an estimate."""
    if not isinstance(result, tuple) or len(result) not in (3, 4):
        return False
    return len(result) == 3 or isinstance(result[3], Estimate | None)


def _step_of(subject: Any, target: Target, arguments: argparse.Namespace) -> tuple[str, Any]:
    """The step that is to be planned, with the name of its run if it has one.

    `subject` is a run, a function that returns one, or a function of a mesh that returns a step.
    """
    if not _is_run(subject) and _takes_nothing(subject):
        result = subject()
        if not _is_run(result):
            raise ValueError(
                f"`{arguments.make_step}` takes no mesh, so it must return a run, an object with a "
                f"method `planned(target, mesh, dcn)`; it returned {_types_of(result)}. A function "
                "of a step takes a mesh."
            )
        subject = result
    if not _is_run(subject):
        return "", subject(target.mesh(arguments.mesh or "data=-1", dcn=arguments.dcn))
    name = getattr(subject, "name", "")
    # A run may have an attribute of that name which is something else.
    if not isinstance(name, str):
        name = ""
    return name, subject.planned(target, arguments.mesh, arguments.dcn)


def _is_run(value: Any) -> bool:
    """Whether something is a run of a trainer, known by its method `planned`."""
    return not isinstance(value, type) and callable(getattr(value, "planned", None))


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function is one of no arguments, and so of no mesh."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    for parameter in parameters:
        if parameter.kind == parameter.VAR_KEYWORD:
            continue
        # A mesh may have a default, and is wanted all the same.
        if parameter.default is parameter.empty or parameter.name == "mesh":
            return False
    return True


def _types_of(result: Any) -> str:
    """What a function returned, for a message: the type, or the types in a tuple."""
    if not isinstance(result, tuple):
        return type(result).__name__
    return f"({', '.join(type(item).__name__ for item in result)})"


def _named(where: str, name: str) -> Any:
    """What a file or a module calls by a name: a function, or a run."""
    module = _of_user(lambda: load_module(where), f"`{where}`")
    value = getattr(module, name, None)
    if not callable(value) and not _is_run(value):
        others = listed(_own_names(module)) or "none"
        raise ValueError(f"`{where}` has no function and no run `{name}`; it has {others}.")
    return value


def _own_names(module: Any) -> list[str]:
    """The names of a module that may have been meant, those of its own functions and runs."""
    names: list[str] = []
    for name, value in vars(module).items():
        if _is_own(value, module):
            names.append(name)
    return names


def _is_own(value: Any, module: Any) -> bool:
    """Whether something in a module is a run, or a function that was written there."""
    if _is_run(value):
        return True
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def _of_user(run: Callable[[], Any], what: str) -> Any:
    """Run what the user wrote; what it raises becomes a `ValueError` with the line that did.

    Errors of ours about the user's arguments stay as they are, and others of ours are bugs.
    """
    try:
        return run()
    # No `Exception`s: `sys.exit()` at the end of a script, for one.
    except (SystemExit, KeyboardInterrupt) as error:
        raise ValueError(
            f"{what} ended the process{_at(error)}: {type(error).__name__}({error})."
        ) from error
    except Exception as error:
        # Whose fault it is shows in the file that raised it: ours, the user's, or a library's.
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = Path(__file__).parent.parent in last.parents and last != Path(__file__)
        # Raised in this file, it is about the command's own arguments.
        if isinstance(error, ValueError) and last == Path(__file__):
            raise
        if ours and isinstance(error, ValueError | ModuleNotFoundError):
            raise
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, ValueError):
            message = str(error)
        if ours:
            raise ValueError(
                f"This is a bug of shardlib, please report it: {message}\n{traceback.format_exc()}"
            ) from error
        raise ValueError(f"{what} failed{_at(error)}: {message}") from error


def _at(error: BaseException) -> str:
    """The user's line that an error came from, for a message."""
    line = line_of_user(error)
    if not line:
        return ""
    return f" at {line}"


class _Progress:
    """Seconds on the terminal while a compiler works, elsewhere one line; and what is done."""

    def __init__(self, target: Target, noise: Path) -> None:
        self.target, self.stopped = target, threading.Event()
        self.noise, self.told = noise, 0

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __exit__(self, *exception: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _run(self) -> None:
        text = f"compiling for {self.target} ..."
        if not sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
            while not self.stopped.wait(0.5):
                self._tell()
            self._tell()
            return
        started = time.monotonic()
        while not self.stopped.wait(0.5):
            self._tell()
            seconds = time.monotonic() - started
            print(f"{CLEAR_LINE}{text} {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
        self._tell()

    def _tell(self) -> None:
        """Hand on what the child has said of itself in the meantime, which is told in whole lines.

        The rest of its output is a compiler's.
        """
        lines = self.noise.read_text(errors="replace").split("\n")[:-1]
        new, self.told = lines[self.told :], len(lines)
        for line in new:
            if line.startswith("shardlib: "):
                clear = CLEAR_LINE if sys.stderr.isatty() else ""
                print(f"{clear}{line}", file=sys.stderr, flush=True)
