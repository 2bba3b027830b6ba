"""Compiling a step for a machine that is not there, and reading what the compiler says of it.

A compiler is asked to write files about each program. From these come

    *-after_optimizations.txt                       the program, in the order it runs in
    *-after_optimizations-buffer-assignment.txt     allocations, and the values in each of them
    *-after_optimizations-live-range.txt            when each value is made and last read

and from what it prints, the remarks of the partitioner and, for TPUs, its own account of memory.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from shardlib.compiled._hlo import Program, first
from shardlib.compiled._name_stacks import op_name_in
from shardlib.compiled._source_lines import stack_lines
from shardlib.compiled._written import Kept, Sizes, Written
from shardlib.machine._absent import without_cache
from shardlib.machine._targets import Platform, quietly

Key = tuple[str, tuple[int, ...]]  # an instruction and which part of its result


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


def last_reads(allocations: Iterable[Allocation]) -> dict[Key, int]:
    """When each value is last read, at whichever of its places that is later."""
    dies: dict[Key, int] = defaultdict(int)
    for allocation in allocations:
        for value in allocation.values:
            key = (value.instruction, value.index)
            dies[key] = max(dies[key], value.dies)
    return dies


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
    sizes: Sizes | None = None  # of a program that was not refused
    was_kept: bool = False  # whether an earlier plan had it compiled

    @property
    def heapless(self) -> bool:
        """Whether the program has no heap, although there is an allocation for one.

        The compiler has found out, after it laid out a heap of a few pointers, that nothing reads
        them.
        """
        return self.sizes is not None and self.sizes.temporaries == 0

    @cached_property
    def program(self) -> Program:
        return Program(self.text)


class CompilerError(ValueError):
    """A program that a compiler refuses, for another reason than that it does not fit."""


def compile_apart(
    lowered: Any, platform: Platform, options: dict[str, Any], kept: Kept | None = None
) -> Compiled:
    """Compile a lowered step, in silence, and read what the compiler writes about it.

    A program that does not fit into the device's memory is returned too, with the compiler's
    `refusal`. Any other refusal is a `CompilerError`. What `kept` has of the program is read
    instead; where it has nothing, it is filled.
    """
    written = kept.load() if kept is not None else None
    was_kept = written is not None
    if written is None:
        written = _write(lowered, options)
        if kept is not None:
            kept.save(written)
    order, lives = _live_ranges(written.live_ranges)
    program_bytes, stated_bytes = _stated_bytes(platform, written)
    return Compiled(
        written.text,
        order,
        _allocations(written.assignment, lives),
        program_bytes,
        _remarks(written.printed, written.text),
        written.seconds,
        written.refusal,
        stated_bytes,
        written.sizes,
        was_kept,
    )


def _write(lowered: Any, options: dict[str, Any]) -> Written:
    """Compile a lowered step, and collect what the compiler writes.

    It writes into a temporary folder, and what it prints goes there too.
    """
    started = time.perf_counter()
    with quietly() as noise, without_cache():
        folder = noise.parent / "dump"
        compiled, refusal = _compile(lowered, options, folder)
        seconds = time.perf_counter() - started
        printed = noise.read_text(errors="replace")
        # A step may consist of several programs; the largest is the step itself.
        assignment = max(
            folder.glob("*after_optimizations-buffer-assignment.txt"),
            key=lambda file: file.stat().st_size,
            default=None,
        )
        if assignment is None:
            raise CompilerError(refusal or "The compiler wrote no buffer assignment.")
        stem = str(assignment).removesuffix("-buffer-assignment.txt")
        return Written(
            text=Path(f"{stem}.txt").read_text(),
            assignment=assignment.read_text(),
            live_ranges=Path(f"{stem}-live-range.txt").read_text(),
            printed=printed,
            seconds=seconds,
            refusal=refusal,
            sizes=Sizes.of(compiled) if compiled is not None else None,
        )


def _compile(lowered: Any, options: dict[str, Any], folder: Path) -> tuple[Any, str]:
    """The compiled program and no refusal, or None and what the compiler says of its size.

    The compiler writes its files into `folder` in both cases.
    """
    try:
        compiled = lowered.compile(compiler_options={**options, "xla_dump_to": str(folder)})
    except jax.errors.JaxRuntimeError as error:
        # A program that is too large for the device's memory is a finding; for a chip's own, a
        # mistake in a kernel.
        is_too_large = "RESOURCE_EXHAUSTED" in str(error) and re.search(
            r"\bhbm\b|device memory", str(error), re.I
        )
        refusal = _words(str(error), folder)
        if not is_too_large:
            raise CompilerError(f"The compiler refuses this program: {refusal}") from error
        return None, refusal
    return compiled, ""


def _stated_bytes(platform: Platform, written: Written) -> tuple[int, int | None]:
    """The bytes of the program itself, and of all that a device needs, by the compiler's account.

    The second is None where the compiler does not say. Only TPUs' compilers count the first.
    """
    sizes = written.sizes
    if platform == "tpu":
        return _stated(written.printed, sizes)
    if sizes is None:
        return 0, None
    # Outputs that take the place of arguments are counted as both.
    return 0, sizes.arguments + sizes.outputs - sizes.aliased + sizes.temporaries


def _stated(printed: str, sizes: Sizes | None) -> tuple[int, int | None]:
    """The TPU compiler's own account, of the program only and of all that a device needs.

    It logs that where `LOUD` is in force. `memory_analysis()` of a TPU counts fragmentation twice:
    its temporaries are the log's "HLO temp", which includes fragmentation, and the fragmentation
    once more. What does not fit is decided on the log's account.
    """
    parts = _program_parts(printed)
    if not parts:
        program = sizes.program if sizes is not None else 0
        return program, None
    # What the program computes with is counted apart from the program itself.
    temporaries = parts.pop("HLO temp", 0)
    program = sum(parts.values())
    total = program + temporaries
    arguments = re.search(r"(?m)^    arguments +([\d.]+\w+)", printed)
    if arguments:
        total += _size(arguments[1])
    # Outputs share the place of arguments that are given away.
    outputs = re.search(r"Output size ([\d.]+\w+); shares ([\d.]+\w+)", printed)
    if outputs:
        total += _size(outputs[1]) - _size(outputs[2])
    return program, total


def _program_parts(printed: str) -> dict[str, int]:
    """The bytes of each part of a program, where the TPU compiler has logged them."""
    section = first(r"Program hbm requirement [\d.]+\w+:\n((?: +.*\n?)*)", printed)
    parts: dict[str, int] = {}
    for name, size in re.findall(r"(?m)^    ([\w ]+?)  +([\d.]+\w+)", section):
        parts[name.strip()] = _size(size)
    return parts


def _size(text: str) -> int:
    """A number of bytes as a compiler writes it, `1.5G` or `512B`."""
    number, unit = re.fullmatch(r"([\d.]+)([BKMGT]?)B?", text).groups()  # type: ignore[union-attr]
    return round(float(number) * 1024 ** "BKMGT".index(unit or "B"))


_LONGEST = 1500  # characters of a compiler's words: some list every buffer of a program
_TRACE = re.compile(r"\*\*\* (Begin|End) stack trace|^@? *0x[0-9a-f]+\b|^=+$|^-+$", re.I)


def _words(error: str, dump: Path | None = None) -> str:
    r"""What a compiler says of a program that it refuses, in its own words.

    Those are at most `_LONGEST` characters, without stack traces of the compiler. A stack frame
    that they name is looked up in what the compiler has written of the program before it gave up.

    >>> said = "RESOURCE_EXHAUSTED: E1001: OutOfVmem:\nRan out of memory.\n\n  See the manual."
    >>> print(_words(said))
    E1001: OutOfVmem: Ran out of memory.
    See the manual.
    """
    kept = _telling_lines(error)
    if not kept:
        return "no reason was given"
    words = "\n".join(kept)
    if len(words) > _LONGEST:
        words = words[: _LONGEST - 4].rstrip() + " ..."
    blamed = _blamed(words, dump)
    if blamed:
        words += f"\nThe line: {blamed}"
    return words


def _telling_lines(error: str) -> list[str]:
    r"""The lines of a compiler's message but for empty ones and stack traces.

    >>> _telling_lines("INTERNAL: Mosaic failed:\nno such layout\n\n=====")
    ['Mosaic failed: no such layout']
    """
    lines: list[str] = []
    for line in re.sub(r"^[A-Z_]+: ", "", error.strip()).splitlines():
        telling = line.strip().removesuffix(" -")
        if telling and not _TRACE.search(telling):
            lines.append(telling)
    # A number and a name stand in a line of their own.
    if len(lines) > 1 and re.fullmatch(r"[\w: ]{1,80}:", lines[0]):
        lines[:2] = [f"{lines[0]} {lines[1]}"]
    return lines


def _blamed(words: str, dump: Path | None) -> str:
    """The line of Python behind the stack frame that a compiler names; empty if it is not known.

    It is known if the compiler has written down its stack frames before it gave up.
    """
    frame = first(r"\bstack_frame_id=(\d+)", words)
    if not frame or dump is None:
        return ""
    # The largest first: that is the whole program, and the others are parts of it.
    written = sorted(
        dump.glob("*_optimizations*.txt"), key=lambda file: file.stat().st_size, reverse=True
    )
    for file in written:
        lines = stack_lines(file.read_text(errors="replace"))
        if lines.get(frame):
            return lines[frame]
    return ""


_INVOLUNTARY = re.compile(
    r"Involuntary full rematerialization\. The compiler cannot go from sharding (\{.*?\}) to "
    r"(\{.*?\}) efficiently for HLO operation %\S+ = (\w+\[[\d,]*\])(.*)"
)


def _remarks(printed: str, text: str) -> tuple[str, ...]:
    """What the partitioner gave up on, in words, each once.

    Where it knows no way from one layout to another it gathers the whole array. The line of Python
    that this is for is looked up in the program's `text`.
    """
    lines = stack_lines(text)
    remarks = []
    for before, after, array, operation in _INVOLUNTARY.findall(printed):
        cause = (
            lines.get(first(r"\bstack_frame_id=(\d+)", operation))
            or op_name_in(operation)
            or "nothing it names"
        )
        remarks.append(
            f"The partitioner gathered {array} whole to go from {before} to {after}, because of "
            f"{cause}"
        )
    return tuple(dict.fromkeys(remarks))


def _live_ranges(text: str) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    """The instructions in the order they run in, and when each value is alive.

    Values are named `instruction{index}`, and moments are positions in that order. It may have
    gaps, which are empty names.
    """
    sequence, _, ranges = text.partition("BufferLiveRange:\n")
    ranges = ranges.partition("  Live ranges at")[0]
    lives = {}
    for name, born, dies in re.findall(r"(?m)^    (\S+):(\d+)-(\d+)$", ranges):
        lives[name] = (int(born), int(dies))
    numbered = {}
    last = 0
    for number, name in re.findall(r"(?m)^    (\d+):(\S+)$", sequence):
        numbered[int(number)] = name
        last = max(last, int(number))
    # A value may die after the last instruction, where the program returns it.
    for _, end in lives.values():
        last = max(last, end)
    return tuple(numbered.get(number, "") for number in range(last + 1)), lives


_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)


def _allocations(text: str, lives: dict[str, tuple[int, int]]) -> tuple[Allocation, ...]:
    """The allocations of a buffer assignment, each with its values.

    A line says what an allocation is, and the lines after it have one value each.
    """
    headers: list[re.Match[str]] = []
    values: list[list[Value]] = []
    for line in text.splitlines():
        header, value = _ALLOCATION.match(line), _VALUE.match(line)
        if header:
            headers.append(header)
            values.append([])
        elif value and values:
            values[-1].append(_value(value, lives))
    return tuple(map(_allocation, headers, values))


def _value(match: re.Match[str], lives: dict[str, tuple[int, int]]) -> Value:
    """A value, from the line that describes it; one without a live range is alive at the start."""
    name, index = match[1], match[2] or ""
    born, dies = lives.get(f"{name}{{{index}}}", (0, 0))
    part = tuple(map(int, index.split(","))) if index else ()
    return Value(name, part, int(match[3]), int(match[4]), match[5], born, dies)


def _allocation(match: re.Match[str], values: list[Value]) -> Allocation:
    """An allocation, from the line that describes it, and from its values."""
    described = match[2]
    parameter = re.search(r"\bparameter (\d+)", described)
    color = re.search(r"\bcolor (\d+)", described)
    return Allocation(
        size=int(match[1]),
        parameter=int(parameter[1]) if parameter else None,
        what=_what_is_allocated(described),
        color=int(color[1]) if color else 0,
        aliased="parameter" in described and "maybe-live-out" in described,
        values=tuple(values),
    )


def _what_is_allocated(described: str) -> str:
    """What an allocation is for, in one word; the first that applies."""
    if "maybe-live-out" in described or "output shape" in described:
        return "output"
    for what in ("constant", "thread-local"):
        if what in described:
            return what
    return "temporary"
