"""Several processes on one machine: `python -m shardlib.launch -n 2 -- python examples/train_lm.py
...`.

The script calls `sl.initialize_distributed()` first, and is the one that a cluster runs. When a
process dies, it is named with its last traceback, after the others have ended, so that it is the
last thing on the screen.
"""

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from shardlib.machine._processes import (
    BIND_ADDRESS,
    COORDINATOR,
    HEARTBEAT_TIMEOUT,
    PROCESS,
    PROCESSES,
)

_SECONDS_OF_GRACE = 3
_STOPPED = "state T: by SIGSTOP, Ctrl-Z or a debugger"
_LAST_LINES, _MAX_LINES = 20, 200
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LOG = re.compile(r"[IWEF]\d{4} |\*\*\* Check failure")  # what XLA says when the others are gone

# What JAX's processes say before they end because others send no heartbeats: of process 0; of any
# others, with a number in each of the lines that follow.
_PROCESS_0_SILENT = re.compile(r"RPC: /\S*CoordinationService/Heartbeat")
_ENDED_BY_OTHERS = "JAX distributed service detected fatal errors"
_OTHERS_SILENT = re.compile(r"stopped sending heartbeats\):\s*$")
_TASK = re.compile(r"\s*(?:/\S*task:)?(\d+)\s*")

# Between fork and exec Python may run nothing of ours where other threads are, so a Python of its
# own asks the kernel.
_ENDING_WITH = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # else the launcher was quicker to end
    os.execvp(sys.argv[2], sys.argv[2:])
"""

_EXAMPLE = """\
examples:
  # 2 processes with 4 simulated devices each; a process for each of 8 GPUs:
  python -m shardlib.launch -n 2 --devices 4 -- python train.py
  python -m shardlib.launch -n 8 --gpus 1 -- python train.py

The script calls `sl.initialize_distributed()` before anything else. Ctrl-C and SIGTERM go to all
processes; a second one kills them.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 if that of all processes is, otherwise that of the
    first one to die.
    """
    arguments, command = _parse(list(sys.argv[1:] if argv is None else argv))
    launch = _Launch()
    handled = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(one, launch.pass_on) for one in handled]
    address = f"127.0.0.1:{_free_port()}"
    try:
        for index in range(arguments.n):
            launch.start(command, environment_of(index, arguments, address, os.environ))
        return launch.wait()
    except OSError as error:
        reason = f"cannot start `{command[0]}`: {error}"
        print(f"python -m shardlib.launch: {reason}", file=sys.stderr)  # noqa: T201
        return 2
    finally:
        launch.signal(signal.SIGKILL)
        for one, handler in zip(handled, before, strict=True):
            signal.signal(one, handler)


def _ending_with(launcher: int, command: Sequence[str]) -> list[str]:
    """The command, to be killed by the kernel when its launcher is, which can then pass nothing on;
    on Linux alone.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _ENDING_WITH, str(launcher), *command]


def environment_of(
    index: int, arguments: argparse.Namespace, address: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one process: how `initialize_distributed` finds the others, and which
    devices it has.
    """
    made = dict(environment) | {
        COORDINATOR: address,
        PROCESSES: str(arguments.n),
        PROCESS: str(index),
        BIND_ADDRESS: address,  # reachable from this machine alone
        "PYTHONUNBUFFERED": "1",
    }
    if arguments.devices:
        flags = re.sub(
            r"\s*--xla_force_host_platform_device_count=\S*", "", made.get("XLA_FLAGS", "")
        )
        made["XLA_FLAGS"] = (
            f"{flags} --xla_force_host_platform_device_count={arguments.devices}".strip()
        )
        made["JAX_PLATFORMS"] = "cpu"
        made.pop("JAX_NUM_CPU_DEVICES", None)
    if arguments.gpus:
        made["JAX_LOCAL_DEVICE_IDS"] = ",".join(
            str(gpu) for gpu in range(index * arguments.gpus, (index + 1) * arguments.gpus)
        )
        made.setdefault("JAX_PLATFORMS", "cuda")  # or it would go on without, on the CPU
    return made


@dataclass
class _Process:
    """A process, and what it last wrote to its standard error."""

    index: int
    popen: subprocess.Popen[bytes]
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    traceback: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    heard_nothing_from: set[int] = field(default_factory=set)
    lists_silent: bool = False  # the lines that come now hold numbers of silent processes

    def note(self, line: str) -> None:
        """Keep the line, if it belongs to the last traceback or the last lines, and whom it says to
        be silent.
        """
        if self.lists_silent and (task := _TASK.fullmatch(line)):
            self.heard_nothing_from.add(int(task[1]))
        else:
            self.lists_silent = _OTHERS_SILENT.search(line) is not None
        if _PROCESS_0_SILENT.search(line):
            self.heard_nothing_from.add(0)
        if _TRACEBACK in line and not any(
            said.startswith(_CHAINED) for said in list(self.last)[-2:]
        ):
            self.traceback.clear()
        if _TRACEBACK in line or (self.traceback and len(self.traceback) < _MAX_LINES):
            self.traceback.append(line)
        self.last.append(line)

    def obituary(self) -> str:
        """How it died, and of what."""
        ends = [k for k, line in enumerate(self.traceback) if _LOG.match(line)]
        words = self.traceback[: ends[0] if ends else None] or list(self.last)
        said = ":\n" + _indented(words) if words else ", and said nothing."
        return f"process {self.index} {self.end()}{said}"

    def end(self) -> str:
        """How it died."""
        code = self.popen.returncode
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"died with exit code {code}"
        )

    def is_stopped(self) -> bool:
        """Whether it is stopped now, by SIGSTOP, Ctrl-Z or a debugger; on Linux alone."""
        try:
            stat = Path(f"/proc/{self.popen.pid}/stat").read_text()
        except OSError:
            return False
        # Behind the name, which may hold anything.
        return stat.rpartition(")")[2].split()[0] in ("T", "t")


class _Launch:
    """The processes of one command, from the start of the first to the end of the last."""

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.ended: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self.asked: list[int] = []
        self.writing = threading.Lock()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one more, in a session of its own: Ctrl-C reaches it through `pass_on` alone, its
        children end with it.
        """
        popen = subprocess.Popen(
            _ending_with(os.getpid(), command), env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        process = _Process(len(self.processes), popen)
        self.processes.append(process)
        for source, target, note in (
            (popen.stdout, sys.stdout, None),
            (popen.stderr, sys.stderr, process.note),
        ):
            reader = threading.Thread(
                target=self._forward, args=(process.index, source, target, note), daemon=True
            )
            process.readers.append(reader)
            reader.start()
        threading.Thread(target=self._await, args=(process,), daemon=True).start()
        if self.asked:  # meanwhile
            popen.send_signal(self.asked[-1])

    def wait(self) -> int:
        """Wait for all to end; if one dies, end the others and say which one it was."""
        first, ended = None, 0
        while first is None and ended < len(self.processes):
            process = self.ended.get()
            ended += 1
            first = process if process.popen.returncode else None
        if first is None:
            self._drain()
            return 0
        living = [process for process in self.processes if process.popen.poll() is None]
        stopped = [process for process in living if process.is_stopped()]
        if len(self.processes) > ended:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(queue.Empty):
                for _ in range(len(self.processes) - ended):
                    self.ended.get(timeout=_SECONDS_OF_GRACE)
        self.signal(signal.SIGKILL)
        self._drain()
        code = (
            first.popen.returncode if first.popen.returncode > 0 else 128 - first.popen.returncode
        )
        if len(self.asked) > 1:  # it was we who killed them
            return 128 + self.asked[0]
        if code not in [128 + one for one in self.asked]:
            self._write(
                sys.stderr,
                f"\nshardlib.launch: {_report(first, self.processes, living, stopped)}\n",
            )
        return code

    def pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Pass a signal on to all processes; a second one is an order."""
        self.signal(signal.SIGKILL if self.asked else signum)
        self.asked.append(signum)

    def signal(self, signum: int) -> None:
        """Send a signal to all processes; SIGKILL also to what they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if signum == signal.SIGKILL:
                    os.killpg(process.popen.pid, signum)
                else:
                    process.popen.send_signal(signum)

    def _await(self, process: _Process) -> None:
        process.popen.wait()
        self.ended.put(process)

    def _drain(self) -> None:
        for process in self.processes:
            process.popen.wait()
            for reader in process.readers:
                # Longer only if what it started goes on writing.
                reader.join(timeout=_SECONDS_OF_GRACE)

    def _forward(
        self, index: int, source: IO[bytes], target: IO[str], note: Callable[[str], None] | None
    ) -> None:
        with source:
            for line in _lines(source):
                if note is not None:
                    note(line)
                self._write(target, f"[{index}] {line}\n")

    def _write(self, target: IO[str], text: str) -> None:
        with self.writing:
            try:
                target.write(text)
                target.flush()
            except BrokenPipeError:  # nobody reads any more, as behind `| head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
                os.kill(os.getpid(), signal.SIGTERM)


def _report(
    first: _Process,
    processes: Sequence[_Process],
    living: Sequence[_Process],
    stopped: Sequence[_Process],
) -> str:
    """Why the run ended: who died first, and who was living and who stopped at that time.

    A process that hears no heartbeat from another ends itself: then it is the other that is to be
    named.
    """
    heard_nothing_from = set(first.heard_nothing_from)
    if not heard_nothing_from and any(_ENDED_BY_OTHERS in line for line in first.last):
        for process in processes:
            heard_nothing_from |= process.heard_nothing_from
    silent = [process for process in living if process.index in heard_nothing_from]
    told = []
    for process in silent:
        state = f": it was stopped ({_STOPPED})" if process in stopped else ""
        said = (
            ". It said last:\n" + _indented(process.last) if process.last else ", and said nothing."
        )
        told.append(f"process {process.index} sent no heartbeats{state}{said}")
    if silent:
        told.append(
            f"Process {first.index} {first.end()} because of that, after the heartbeat timeout, "
            f"which `sl.initialize_distributed(heartbeat_timeout=...)` or `{HEARTBEAT_TIMEOUT}` "
            "sets."
        )
        return "\n".join(told)
    told.append(first.obituary())
    for process in stopped:
        told.append(f"Process {process.index} was stopped at that time ({_STOPPED}).")
    return "\n".join(told)


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _lines(source: IO[bytes]) -> Iterator[str]:
    """Lines as they come. A carriage return ends one too: a progress bar has a line for each of its
    states.
    """
    pending, last = b"", b""
    while part := source.read1(1 << 16):  # pyright: ignore[reportAttributeAccessIssue]
        *whole, pending = re.split(rb"([\r\n])", pending + part)
        for line, end in zip(whole[::2], whole[1::2], strict=True):
            if line or (end == b"\n" and last != b"\r"):
                yield line.decode(errors="replace")
            last = end
    if pending:
        yield pending.decode(errors="replace")


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m shardlib.launch",
        usage="%(prog)s -n N [--devices K | --gpus K] -- COMMAND ...",
        description="Start several processes on this machine, as one run: prefix what they print, "
        "and when one dies, say which and why, and end the rest.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", type=_count, required=True, metavar="N", help="how many processes")
    each = parser.add_mutually_exclusive_group()
    each.add_argument(
        "--devices", type=_count, metavar="K", help="give each process K simulated CPU devices"
    )
    each.add_argument(
        "--gpus", type=_count, metavar="K", help="give each process K GPUs of its own"
    )
    own, command = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    )
    arguments, unknown = parser.parse_known_args(own)
    if not command:
        parser.error(
            "what to run goes after `--`: python -m shardlib.launch -n 2 -- python train.py"
        )
    if unknown:
        parser.error(
            f"`{' '.join(unknown)}` is no option; what the script is to get goes behind "
            "it, after `--`"
        )
    if shutil.which(command[0]) is None:
        script = command[0].endswith(".py") and Path(command[0]).exists()
        way_out = (
            f"write `-- python {command[0]} ...`" if script else "look at its spelling and at PATH"
        )
        parser.error(f"`{command[0]}` is no command that this machine can run: {way_out}")
    return arguments, command


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on is needed; got `{text}`")
    return int(text)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
