"""Compiling a step for a machine that is not there, and reading what the compiler has written about
it.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from shardlib.compiled._hlo import Program, first
from shardlib.compiled._source_lines import stack_lines
from shardlib.machine._targets import Platform, quietly


@dataclass(frozen=True)
class Value:
    """A value of a program in its place in memory."""

    instruction: str
    index: tuple[int, ...]  # which part of the instruction's result
    size: int
    offset: int
    type: str
    born: int  # the first and the last instruction, by number, between which it is kept
    dies: int


@dataclass(frozen=True)
class Allocation:
    """A piece of a device's memory, with all the values that use it."""

    size: int
    parameter: int | None  # which argument of the program, or none
    what: str  # "output", "constant", "temporary"
    color: int  # which memory: 0 is the device's own
    aliased: bool  # an argument whose place an output takes
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of a step."""

    text: str  # of the scheduled program
    # Its instructions, by the numbers that `Value.born` and `Value.dies` give.
    order: tuple[str, ...]
    allocations: tuple[Allocation, ...]
    program_bytes: int  # of machine code and what its kernels set aside, where the compiler says
    remarks: tuple[str, ...]  # what the compiler said that a user should know
    seconds: float
    refusal: str = ""  # of a program that needs more memory than there is
    # What the compiler itself says that a device needs, where it does.
    stated_bytes: int | None = None
    analysis: Any = None  # `memory_analysis()`, of a program that was not refused

    @property
    def heapless(self) -> bool:
        """Whether the compiler has found out, after it laid out a heap of a few pointers, that
        nothing reads them.
        """
        return self.analysis is not None and self.analysis.temp_size_in_bytes == 0

    @cached_property
    def program(self) -> Program:
        return Program(self.text)


class CompilerError(ValueError):
    """A program that a compiler refuses, for another reason than that it does not fit."""


def compile_apart(lowered: Any, platform: Platform, options: dict[str, Any]) -> Compiled:
    """Compile what `lower` gave, in silence, and read the files the compiler writes about its
    program.
    """
    started = time.perf_counter()
    with quietly() as noise, _without_cache():
        folder = noise.parent / "dump"
        refusal, compiled = "", None
        try:
            compiled = lowered.compile(compiler_options={**options, "xla_dump_to": str(folder)})
        except jax.errors.JaxRuntimeError as error:
            # A program that is too large for the device's memory is a finding; for a chip's own, a
            # mistake in a kernel.
            if "RESOURCE_EXHAUSTED" not in str(error) or not re.search(
                r"\bhbm\b|device memory", str(error), re.I
            ):
                raise CompilerError(
                    f"The compiler refuses this program: {_words(str(error), folder)}"
                ) from error
            refusal = _words(str(error), folder)
        seconds = time.perf_counter() - started
        said = noise.read_text(errors="replace")
        assignment = max(
            folder.glob("*after_optimizations-buffer-assignment.txt"),
            key=lambda file: file.stat().st_size,
            default=None,
        )
        if assignment is None:
            raise CompilerError(refusal or "The compiler wrote no buffer assignment.")
        stem = str(assignment).removesuffix("-buffer-assignment.txt")
        order, lives = _live_ranges(Path(f"{stem}-live-range.txt").read_text())
        allocations = _allocations(assignment.read_text(), lives)
        text = Path(f"{stem}.txt").read_text()
    analysis = compiled.memory_analysis() if compiled is not None else None
    program_bytes, stated_bytes = _stated(said, analysis) if platform == "tpu" else (0, None)
    if platform != "tpu" and analysis is not None:
        stated_bytes = (
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
        )
    return Compiled(
        text,
        order,
        allocations,
        program_bytes,
        _remarks(said, text),
        seconds,
        refusal,
        stated_bytes,
        analysis,
    )


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compile in fact: a program out of JAX's cache on disk comes without the files that are read
    here.
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether to use it was decided at its first use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _stated(said: str, analysis: Any) -> tuple[int, int | None]:
    """The TPU compiler's own account, which it logs where `LOUD` is in force: of the program alone,
    and of all.

    `memory_analysis()` of a TPU counts fragmentation twice: its temporaries are the log's "HLO
    temp", which includes fragmentation, and the fragmentation once more. What does not fit is
    decided on the former.
    """
    section = first(r"Program hbm requirement [\d.]+\w+:\n((?: +.*\n?)*)", said)
    parts = {
        name.strip(): _size(size)
        for name, size in re.findall(r"(?m)^    ([\w ]+?)  +([\d.]+\w+)", section)
    }
    if not parts:
        return (analysis.generated_code_size_in_bytes if analysis is not None else 0), None
    outside = sum(_size(size) for size in re.findall(r"(?m)^    arguments +([\d.]+\w+)", said)[:1])
    own, shared = [*re.findall(r"Output size ([\d.]+\w+); shares ([\d.]+\w+)", said), ("0B", "0B")][
        0
    ]
    program = sum(size for name, size in parts.items() if name != "HLO temp")
    return program, program + parts.get("HLO temp", 0) + outside + _size(own) - _size(shared)


def _size(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([BKMGT]?)B?", text).groups()  # type: ignore[union-attr]
    return round(float(number) * 1024 ** "BKMGT".index(unit or "B"))


_LONGEST = 1500  # characters of a compiler's words: some list every buffer of a program
_TRACE = re.compile(r"\*\*\* (Begin|End) stack trace|^@? *0x[0-9a-f]+\b|^=+$|^-+$", re.I)


def _words(error: str, dump: Path | None = None) -> str:
    r"""What a compiler says of a program that it refuses: its own words, at most `_LONGEST`
    characters of them.

    A stack frame that they name is looked up in what the compiler has written of the program before
    it gave up.

    >>> said = "RESOURCE_EXHAUSTED: E1001: OutOfVmem:\nRan out of memory.\n\n  See the manual."
    >>> print(_words(said))
    E1001: OutOfVmem: Ran out of memory.
    See the manual.
    """
    text = re.sub(r"^[A-Z_]+: ", "", error.strip())
    lines = [line.strip().removesuffix(" -") for line in text.splitlines()]
    kept = [line for line in lines if line and not _TRACE.search(line)]
    if not kept:
        return "no reason was given"
    # A number and a name stand in a line of their own.
    if re.fullmatch(r"[\w: ]{1,80}:", kept[0]) and len(kept) > 1:
        kept[:2] = [f"{kept[0]} {kept[1]}"]
    words = "\n".join(kept)
    if len(words) > _LONGEST:
        words = words[: _LONGEST - 4].rstrip() + " ..."
    if blamed := _blamed(words, dump):
        words += f"\nThe line: {blamed}"
    return words


def _blamed(words: str, dump: Path | None) -> str:
    """The line of Python behind the stack frame that a compiler names, if it has written that
    down.
    """
    frame = first(r"\bstack_frame_id=(\d+)", words)
    if not frame or dump is None:
        return ""
    written = sorted(
        dump.glob("*_optimizations*.txt"), key=lambda file: file.stat().st_size, reverse=True
    )
    tables = (stack_lines(file.read_text(errors="replace")) for file in written)
    return next((lines[frame] for lines in tables if lines.get(frame)), "")


_INVOLUNTARY = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (\{.*?\}) to "
    r"(\{.*?\}) efficiently for HLO operation %\S+ = (\w+\[[\d,]*\])(.*)"
)


def _remarks(said: str, text: str) -> tuple[str, ...]:
    """What the partitioner gave up on: an array gathered whole because it knew no way from one
    layout to another.
    """
    lines = stack_lines(text)
    found = (
        f"The partitioner gathered {array} whole to go from {before} to {after}, because of "
        + (
            lines.get(first(r"\bstack_frame_id=(\d+)", rest))
            or first(r'op_name="([^"]*)"', rest)
            or "nothing it names"
        )
        for before, after, array, rest in _INVOLUNTARY.findall(said)
    )
    return tuple(dict.fromkeys(found))


def _live_ranges(text: str) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    sequence, _, ranges = text.partition("BufferLiveRange:\n")
    ranges = ranges.partition("  Live ranges at")[0]
    lives = {
        name: (int(a), int(b)) for name, a, b in re.findall(r"(?m)^    (\S+):(\d+)-(\d+)$", ranges)
    }
    numbered = {
        int(number): name for number, name in re.findall(r"(?m)^    (\d+):(\S+)$", sequence)
    }
    last = max([*numbered, *(end for _, end in lives.values())], default=0)
    return tuple(numbered.get(number, "") for number in range(last + 1)), lives


_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)


def _allocations(text: str, lives: dict[str, tuple[int, int]]) -> tuple[Allocation, ...]:
    found: list[tuple[int, str, list[Value]]] = []
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            found.append((int(match[1]), match[2], []))
        elif found and (match := _VALUE.match(line)):
            name, index = match[1], match[2] or ""
            born, dies = lives.get(f"{name}{{{index}}}", (0, 0))
            part = tuple(map(int, index.split(","))) if index else ()
            found[-1][2].append(
                Value(name, part, int(match[3]), int(match[4]), match[5], born, dies)
            )
    return tuple(
        Allocation(
            size=size,
            parameter=int(number[1]) if (number := re.search(r"\bparameter (\d+)", what)) else None,
            what="output" if "maybe-live-out" in what or "output shape" in what
            else "constant" if "constant" in what
            else "thread-local" if "thread-local" in what
            else "temporary",
            color=int(color[1]) if (color := re.search(r"\bcolor (\d+)", what)) else 0,
            aliased="parameter" in what and "maybe-live-out" in what,
            values=tuple(values),
        )
        for size, what, values in found
    )  # fmt: skip
