"""Several processes on one machine: `python -m shardlib.launch -n 2 -- python train.py`.

The script calls `sl.initialize_distributed()` first, and is the one that a cluster runs. When a
process dies, it is named last on the screen, with its traceback, after the others have ended.
"""

import argparse
import contextlib
import io
import itertools
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from shardlib._text import lines_as_they_come
from shardlib.machine._processes import (
    BIND_ADDRESS,
    COORDINATOR,
    HEARTBEAT_TIMEOUT,
    PROCESS,
    PROCESSES,
)

_SECONDS_OF_GRACE = 3  # between SIGTERM and SIGKILL
_STOPPED = "state T: by SIGSTOP, Ctrl-Z or a debugger"
_LAST_LINES, _MAX_LINES = 20, 200  # kept of standard error; of a traceback
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
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot start `{sys.argv[2]}`: {error.strerror}")
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
    """Run the command line.

    The exit code is 0 if that of all processes is, otherwise that of the first one to die.
    """
    arguments, command = _parse(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        # Processes may print what the encoding of this terminal does not have.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    launch = _Launch()
    previous_handlers = {}
    for signum in (signal.SIGTERM, signal.SIGINT):
        previous_handlers[signum] = signal.signal(signum, launch.pass_on)
    # On this machine only: nobody else is to reach the processes.
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
        # Also what processes have started and left behind.
        launch.signal(signal.SIGKILL)
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def _ending_with(launcher: int, command: Sequence[str]) -> list[str]:
    """The command, to be killed by the kernel when its launcher dies; on Linux only.

    A launcher that is killed by SIGKILL can pass nothing on to its processes, which would go on
    without it. `launcher` is its process id.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _ENDING_WITH, str(launcher), *command]


def environment_of(
    index: int, arguments: argparse.Namespace, address: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one process.

    It is the launcher's, with what `initialize_distributed` finds the others by, and with which
    devices the process has.
    """
    # Later entries replace those of the launcher's environment.
    variables = dict(environment) | {
        COORDINATOR: address,
        PROCESSES: str(arguments.n),
        PROCESS: str(index),
        BIND_ADDRESS: address,  # reachable from this machine only
        "PYTHONUNBUFFERED": "1",
    }
    if arguments.devices:
        variables["XLA_FLAGS"] = _flags_for(variables.get("XLA_FLAGS", ""), arguments.devices)
        variables["JAX_PLATFORMS"] = "cpu"
        variables.pop("JAX_NUM_CPU_DEVICES", None)
    if arguments.gpus:
        first = index * arguments.gpus
        gpus = range(first, first + arguments.gpus)
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, gpus))
        variables.setdefault("JAX_PLATFORMS", "cuda")  # or it would go on without, on the CPU
    return variables


def _flags_for(flags: str, devices: int) -> str:
    """Flags of XLA with a number of simulated devices, in place of one that they may have."""
    option = "--xla_force_host_platform_device_count="
    other_flags = re.sub(rf"\s*{option}\S*", "", flags)
    return f"{other_flags} {option}{devices}".strip()


@dataclass
class _Process:
    """A process, and what it last wrote to its standard error.

    `traceback` is the last one that Python wrote, `last` the last lines of any kind, and
    `heard_nothing_from` the numbers of the processes that it says send no heartbeats.
    """

    index: int
    popen: subprocess.Popen[bytes]
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    traceback: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    heard_nothing_from: set[int] = field(default_factory=set)
    lists_silent: bool = False  # the lines that come now hold numbers of silent processes

    def note(self, line: str) -> None:
        """Keep what matters of a line of its standard error.

        That is the line itself, among the last ones and in the traceback if it belongs to one, and
        which processes it says to be silent.
        """
        self._note_silent(line)
        if _TRACEBACK in line and not self._continues_traceback():
            self.traceback.clear()
        in_traceback = self.traceback and len(self.traceback) < _MAX_LINES
        if _TRACEBACK in line or in_traceback:
            self.traceback.append(line)
        self.last.append(line)

    def _note_silent(self, line: str) -> None:
        """Note the numbers of processes that a line says to be silent.

        JAX says that there are some in one line, and has a number in each of those that follow.
        """
        task = _TASK.fullmatch(line) if self.lists_silent else None
        if task:
            self.heard_nothing_from.add(int(task[1]))
        else:
            self.lists_silent = _OTHERS_SILENT.search(line) is not None
        if _PROCESS_0_SILENT.search(line):
            self.heard_nothing_from.add(0)

    def _continues_traceback(self) -> bool:
        """Whether a traceback that begins now is of the same error as the one before.

        If so, Python has said in one of the last two lines how the two exceptions are chained.
        """
        return any(line.startswith(_CHAINED) for line in list(self.last)[-2:])

    def obituary(self) -> str:
        """How it died, and of what: its last traceback, or else its last lines."""
        # What is logged after a traceback, as it ends, does not belong to it.
        lines = list(itertools.takewhile(lambda line: not _LOG.match(line), self.traceback))
        if not lines:
            lines = list(self.last)
        elif len(self.traceback) == _MAX_LINES:
            # So much came after it that it may be of an error that was handled.
            lines += ["...", *self.last]
        if not lines:
            return f"process {self.index} {self.end()}, and said nothing."
        return f"process {self.index} {self.end()}:\n{_indented(lines)}"

    def end(self) -> str:
        """How it died, as a verb: `was killed by SIGKILL`, `died with exit code 1`."""
        code = self.popen.returncode
        if code < 0:
            # Most real-time signals have no name.
            names = {one.value: one.name for one in signal.Signals}
            return f"was killed by {names.get(-code, f'signal {-code}')}"
        return f"died with exit code {code}"

    def is_stopped(self) -> bool:
        """Whether it is stopped now, by SIGSTOP, Ctrl-Z or a debugger; known on Linux only."""
        try:
            stat = Path(f"/proc/{self.popen.pid}/stat").read_text()
        except OSError:
            return False
        # The state follows the name, which is in parentheses and may hold anything.
        return stat.rpartition(")")[2].split()[0] in ("T", "t")


class _Launch:
    """The processes of one command, from the start of the first to the end of the last.

    A thread for each process waits for its end and puts it into the queue `ended`; two more pass on
    what it writes. The main thread takes what has ended from the queue.
    """

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.ended: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self.received: list[int] = []  # signals that were sent to the launcher, in order
        self.writing = threading.Lock()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one more process, and the threads that watch it.

        It gets a session of its own: Ctrl-C reaches it through `pass_on` only, and its children end
        with it.
        """
        popen = subprocess.Popen(
            _ending_with(os.getpid(), command), env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        process = _Process(len(self.processes), popen)
        self.processes.append(process)
        self._forward_in_thread(process, popen.stdout, sys.stdout, None)
        self._forward_in_thread(process, popen.stderr, sys.stderr, process.note)
        threading.Thread(target=self._await, args=(process,), daemon=True).start()
        # A signal that came meanwhile has been passed on to the others only.
        if self.received:
            popen.send_signal(self.received[-1])

    def wait(self) -> int:
        """Wait for all to end; if one dies, end the others and say which one it was."""
        first_dead, ended = self._wait_for_death()
        if first_dead is None:
            self._drain()
            return 0
        # Read before the others are ended: one that is stopped may be why the first one died.
        living = [process for process in self.processes if process.popen.poll() is None]
        stopped = [process for process in living if process.is_stopped()]
        self._end_others(len(self.processes) - ended)

        if len(self.received) > 1:  # it was we who killed them
            return 128 + self.received[0]
        code = _exit_code(first_dead)
        # Nothing is to be explained to a user who has ended the run by a signal.
        if code not in [128 + signum for signum in self.received]:
            report = _report(first_dead, self.processes, living, stopped)
            self._write(sys.stderr, f"\nshardlib.launch: {report}\n")
        return code

    def _wait_for_death(self) -> tuple[_Process | None, int]:
        """The first process to end with an error, or None, and how many have ended by then."""
        ended = 0
        while ended < len(self.processes):
            # Processes come in the order in which they end.
            process = self.ended.get()
            ended += 1
            if process.popen.returncode:
                return process, ended
        return None, ended

    def _end_others(self, count: int) -> None:
        """Ask `count` processes to end, kill them if they take long, and wait for their output."""
        if count:
            self.signal(signal.SIGTERM)
            until = time.monotonic() + _SECONDS_OF_GRACE  # of all together
            with contextlib.suppress(queue.Empty):
                for _ in range(count):
                    self.ended.get(timeout=max(0, until - time.monotonic()))
        # In any case, since SIGKILL also reaches what processes started.
        self.signal(signal.SIGKILL)
        self._drain()

    def pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Pass a signal on to all processes; after the first one, any other kills them."""
        self.signal(signal.SIGKILL if self.received else signum)
        self.received.append(signum)

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
        """Wait until all processes have ended, and what they wrote has been passed on."""
        for process in self.processes:
            process.popen.wait()
        # It takes longer only if what the processes started goes on writing.
        until = time.monotonic() + _SECONDS_OF_GRACE
        for process in self.processes:
            for reader in process.readers:
                reader.join(timeout=max(0, until - time.monotonic()))

    def _forward_in_thread(
        self,
        process: _Process,
        source: IO[bytes] | None,
        target: IO[str],
        note: Callable[[str], None] | None,
    ) -> None:
        """Start a thread that passes lines of a process on, and hands each to `note`."""
        reader = threading.Thread(
            target=self._forward, args=(process.index, source, target, note), daemon=True
        )
        process.readers.append(reader)
        reader.start()

    def _forward(
        self, index: int, source: IO[bytes], target: IO[str], note: Callable[[str], None] | None
    ) -> None:
        """Write each line of a stream to another, behind the number of its process."""
        with source:
            for line in lines_as_they_come(source):
                if note is not None:
                    note(line)
                self._write(target, f"[{index}] {line}\n")

    def _write(self, target: IO[str], text: str) -> None:
        """Write text as a whole: several threads write to the same terminal."""
        with self.writing:
            try:
                target.write(text)
                target.flush()
            except OSError as error:
                # Nothing more goes there, and the processes need not know.
                os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
                if isinstance(error, BrokenPipeError):  # nobody reads any more, as behind `| head`
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                with contextlib.suppress(OSError):  # a full disk, behind `> log`
                    sys.stderr.write(f"shardlib.launch: output is lost from here on: {error}\n")


def _exit_code(process: _Process) -> int:
    """The exit code of a process that has ended; 128 and the signal's number, as shells have it."""
    code = process.popen.returncode
    return 128 - code if code < 0 else code


def _report(
    first_dead: _Process,
    processes: Sequence[_Process],
    living: Sequence[_Process],
    stopped: Sequence[_Process],
) -> str:
    """Why the run ended: who died first, and who was living and who was stopped at that time.

    A process that hears no heartbeat from another ends itself: then it is the other that is to be
    named.
    """
    heard_nothing_from = set(first_dead.heard_nothing_from)
    # JAX may have ended the first one without telling it who is silent, and have told others.
    if not heard_nothing_from and any(_ENDED_BY_OTHERS in line for line in first_dead.last):
        for process in processes:
            heard_nothing_from |= process.heard_nothing_from
    # Those of them that had died by then are not silent but dead.
    silent = [process for process in living if process.index in heard_nothing_from]
    if not silent:
        return _obituary(first_dead, stopped)

    sentences = [_describe_silent(process, process in stopped) for process in silent]
    sentences.append(
        f"Process {first_dead.index} {first_dead.end()} because of that, after the heartbeat "
        f"timeout, which `sl.initialize_distributed(heartbeat_timeout=...)` or "
        f"`{HEARTBEAT_TIMEOUT}` sets."
    )
    return "\n".join(sentences)


def _obituary(dead: _Process, stopped: Sequence[_Process]) -> str:
    """How a process died, and which others were stopped at that time."""
    sentences = [dead.obituary()]
    for process in stopped:
        sentences.append(f"Process {process.index} was stopped at that time ({_STOPPED}).")
    return "\n".join(sentences)


def _describe_silent(process: _Process, is_stopped: bool) -> str:
    """A process that sent no heartbeats: why, if it was stopped, and what it wrote last."""
    text = f"process {process.index} sent no heartbeats"
    if is_stopped:
        text += f": it was stopped ({_STOPPED})"
    if process.last:
        return f"{text}. It said last:\n{_indented(process.last)}"
    return f"{text}, and said nothing."


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the launcher, and the command after `--`, which must be one that can run."""
    parser = _parser()
    # Options of the command, behind `--`, are not the launcher's.
    options, command = argv, []
    if "--" in argv:
        separator = argv.index("--")
        options, command = argv[:separator], argv[separator + 1 :]
    arguments, unknown = parser.parse_known_args(options)
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
        parser.error(_not_a_program(command[0]))
    return arguments, command


def _not_a_program(name: str) -> str:
    """The message for a command that cannot run; for a script of Python's, how to run it."""
    way_out = "look at its spelling and at PATH"
    if name.endswith(".py") and Path(name).exists():
        way_out = f"write `-- python {name} ...`"
    return f"`{name}` is no command that this machine can run: {way_out}"


def _parser() -> argparse.ArgumentParser:
    """The launcher's own options; the command is not among them."""
    parser = argparse.ArgumentParser(
        prog="python -m shardlib.launch",
        usage="%(prog)s -n N [--devices K | --gpus K] -- COMMAND ...",
        description="Start several processes on this machine, as one run: prefix what they print, "
        "and when one dies, say which and why, and end the rest.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", type=_count, required=True, metavar="N", help="how many processes")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument(
        "--devices", type=_count, metavar="K", help="give each process K simulated CPU devices"
    )
    devices.add_argument(
        "--gpus", type=_count, metavar="K", help="give each process K GPUs of its own"
    )
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on is needed; got `{text}`")
    return int(text)


def _free_port() -> int:
    """A port on which nothing listens now; another program might take it before process 0 does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
