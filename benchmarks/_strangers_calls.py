"""Public names called with arguments of other kinds: what refuses them must say what was wrong with
the call.

For each of many draws one or two arguments of a call that works are replaced by values drawn from
every kind there is. A draw is fine if the call works, or raises a `ValueError` of ours that names
something of the call. It is a *raw error* if anything else is raised, and *silent* if a call takes
what can never be right, such as an `object()` or nan for a number. Calls run in child processes, a
few hundred in each, so that an abort or a call that hangs is noticed and named.

    python -m benchmarks._strangers_calls --count 5000 --seed 0
    # One call, with its traceback:
    python -m benchmarks._strangers_calls --run "sl.Zero(3, small=object())"
"""

import argparse
import faulthandler
import inspect
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import shardlib as sl
from benchmarks._strangers import Outcome, Tally
from benchmarks._strangers_table import CALLS, NOT_CALLED, VALUES, Call, namespace
from shardlib.checks._arguments import shown

ROOT = Path(__file__).parent.parent
IN_A_CHILD = 1000
SECONDS = 30
"""After so many seconds a call hangs."""
MEMORY = 10 * 2**30
"""Bytes of address space that a child may ask for: a call that takes more fails, and the machine
goes on.
"""

KINDS = {
    "worked": "ran",
    "refused": "refused",
    "raw error": "raw_errors",
    "silent": "silent",
    "abort": "aborts",
    "hang": "hangs",
}
"""What came of a call, in the words of `Outcome`."""

ROOMS = (
    "",
    "collectives",
    "planning",
    "optimizers",
    "experts",
    "kernels",
    "lora",
    "pipeline",
    "rules",
    "data",
    "testing",
)
_SIGNATURE = re.compile(
    r"unexpected keyword argument|missing \d+ required|takes (from )?\d+ |multiple values for"
)


@dataclass(frozen=True)
class Draw:
    """A call with some of its arguments replaced: each by a value of a kind."""

    call: Call
    changed: dict[str, tuple[str, str]]

    @property
    def text(self) -> str:
        """The call as Python."""
        return self.call.written({name: value for name, (_, value) in self.changed.items()})


def run(count: int, seed: int, rooms: Sequence[str] = ROOMS) -> Outcome:
    """Draw so many calls of the public names in some rooms, and say what came of them."""
    tally, first = Tally("calls", count), 0
    while first < count:
        last = min(first + IN_A_CHILD, count)
        for number, kind, said in _of_child(seed, first, last, rooms):
            first = number + 1
            text = draw(seed, number, rooms).text
            tally.add(Outcome.of(KINDS[kind], text if len(text) < 300 else shown(text), said))
    return tally.total


def public_names() -> list[str]:
    """Every public name, without `sl.`."""
    names = []
    for room in ROOMS:
        module = getattr(sl, room) if room else sl
        for name, value in vars(module).items():
            if not name.startswith("_") and not isinstance(value, type(sl)):
                names.append(f"{room}.{name}".lstrip("."))
    return names


def not_covered() -> list[str]:
    """Public names that no call is of, and that are not said to be left out."""
    texts = " ".join(f"{call.name} {call.text}" for call in CALLS)
    called = {name for name in public_names() if re.search(rf"\bsl\.{re.escape(name)}\b", texts)}
    values = {name for name in public_names() if name.startswith("rules.")}
    schedules = {"pipeline.SCHEDULES"}
    return [
        name
        for name in public_names()
        if name not in called | values | schedules and name not in NOT_CALLED
    ]


def draw(seed: int, number: int, rooms: Sequence[str] = ROOMS) -> Draw:
    """The draw of a number: the same wherever and whenever it is asked for."""
    chance = random.Random(f"{seed}/{number}")
    calls = [call for call in CALLS if call.arguments and _room(call) in rooms]
    while True:
        call = chance.choice(calls)
        if not call.slow or chance.random() < 0.1:
            break
    several = 2 if len(call.arguments) > 1 and chance.random() < 0.3 else 1
    changed = {}
    for name in chance.sample(list(call.arguments), several):
        kind = chance.choice(list(VALUES))
        changed[name] = (kind, chance.choice(VALUES[kind]))
    return Draw(call, changed)


def _room(call: Call) -> str:
    parts = call.name.split(".")
    return parts[1] if parts[0] == "sl" and parts[1] in ROOMS else ""


def outcome(drawn: Draw, names: dict[str, Any]) -> tuple[str, str]:
    """What comes of a draw: its kind, and what was said."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eval(drawn.text, dict(names))
    except Exception as error:
        return _of_error(drawn, error, names)
    for name, (kind, value) in drawn.changed.items():
        example = eval(drawn.call.arguments[name], {**names, "x": None})
        if not drawn.call.takes(name, kind, example):
            return "silent", f"`{name}` takes {value}"
    return "worked", ""


def _of_error(drawn: Draw, error: Exception, names: dict[str, Any]) -> tuple[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(frames[-1].filename).is_relative_to(ROOT / "shardlib")
    said = (
        f"{type(error).__name__} at {Path(frames[-1].filename).name}:{frames[-1].lineno}: "
        f"{shown(str(error))}"
    )
    if isinstance(error, ImportError) and ours:
        return "refused", said
    # Of the caller, whose own errors come as they are.
    if any(frame.name in ("_model", "_loss") for frame in frames):
        return "refused", said
    if (
        isinstance(error, TypeError)
        and _SIGNATURE.search(str(error))
        and "<string>" in frames[-1].filename
    ):
        return "refused", said
    if isinstance(error, ValueError) and ours and _names_the_call(drawn, str(error), names):
        return "refused", said
    return "raw error", said


def _parameters(call: Call, names: dict[str, Any]) -> list[str]:
    """The names of what a function takes."""
    try:
        return list(inspect.signature(eval(call.name, dict(names))).parameters)
    except (TypeError, ValueError):
        return []


def _names_the_call(drawn: Draw, message: str, names: dict[str, Any]) -> bool:
    """Whether a message names the function, one of its arguments, or a value of the call."""
    words = set(re.findall(r"[A-Za-z]\w+", drawn.call.written({}))) | set(
        _parameters(drawn.call, names)
    )
    words |= {"batch"} if "source" in words else set()
    words |= {part.removesuffix("s") for word in words for part in (word, *word.split("_"))}
    if (words - {"sl", "np", "the", "is", "x"}) & set(re.findall(r"\w+", message)):
        return True
    values = [value.strip("'\"") for _, value in drawn.changed.values()]
    return any(value and value in message for value in values)


def _of_child(
    seed: int, first: int, last: int, rooms: Sequence[str]
) -> Iterator[tuple[int, str, str]]:
    """What a child says of each of its draws; where it ends in one of them, how."""
    command = [
        sys.executable,
        "-m",
        "benchmarks._strangers_calls",
        "--child",
        str(first),
        str(last),
    ]
    return watched([*command, "--seed", str(seed), "--rooms", *rooms])


def watched(command: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """What a command says of each draw, lines of JSON: the number when it begins, and with what
    came of it when it ends.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+b") as noise:
        environment["XDG_CACHE_HOME"] = folder
        begun = None
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=noise, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                number, *found = json.loads(line)
                if found:
                    yield (number, *found)
                begun = None if found else number
        code = child.returncode
        noise.seek(0)
        last_words = noise.read().decode(errors="replace")[-2000:]
    if begun is not None:
        hung = code == 1 and "Timeout" in last_words
        yield begun, "hang" if hung else "abort", f"exit code {code}: {last_words}"
    elif code:
        raise RuntimeError(f"The calls could not be made, exit code {code}: {last_words}")


def _child(seed: int, first: int, last: int, rooms: Sequence[str]) -> None:
    """Make the calls of some draws, and say of each that it begins, and what came of it."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # calls may print
    # Or errors of JAX would seem to come from us.
    jax.config.update("jax_traceback_filtering", "off")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    names = namespace()
    for number in range(first, last):
        out.write(json.dumps([number]) + "\n")
        out.flush()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        kind, said = outcome(draw(seed, number, rooms), names)
        faulthandler.cancel_dump_traceback_later()
        out.write(json.dumps([number, kind, said]) + "\n")
        out.flush()
    os._exit(0)  # whatever threads a call has left behind


def main() -> None:
    """Draw, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", metavar="CALL", help="make one call")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        first, last = arguments.child
        _child(arguments.seed, first, last, arguments.rooms)
    if arguments.run:
        sl.simulate_devices(8)
        os.chdir(tempfile.mkdtemp())
        print(repr(eval(arguments.run, namespace())))
        return
    found = run(arguments.count, arguments.seed, arguments.rooms)
    for failure in found.failures:
        print(failure)
    print(json.dumps({name: value for name, value in asdict(found).items() if name != "failures"}))


if __name__ == "__main__":
    main()
