"""What a compiled program reads and writes of a device's memory, counted from its text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardlib._text import human_bytes
from shardlib.compiled._hlo import Instruction, Program, Scope, arrays, size_bytes, text_of


@dataclass(frozen=True)
class Moved:
    """Bytes that a device reads from its memory and writes to it."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written

    def __str__(self) -> str:
        return f"reads {human_bytes(self.read)}, writes {human_bytes(self.written)}"


# What moves nothing: values by another name, and parts of what another instruction makes.
_STILL = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
    ),
    *("opt-barrier", "add-dependency", "iota"),
}
_SLICES = ("slice", "dynamic-slice", "gather")


def memory_traffic(compiled: Any) -> Moved:
    """What a device reads and writes of its memory in a run of a compiled program.

    The program is what `jitted.lower(...).compile()` gives.

    Each instruction reads its operands and writes its result, once, in the bytes of their shapes;
    those in a loop count as often as it runs, and of branches the dearest. What a fusion only
    slices counts by its slices. What a TPU keeps in fast memory between two instructions counts for
    nothing. A custom call counts as any instruction: a kernel that reads an operand twice has to be
    looked at by itself.

    >>> import jax, jax.numpy as jnp
    >>> print(memory_traffic(jax.jit(lambda x, y: x * y + 1).lower(*[jnp.ones((256,
    ...     1024))] * 2).compile()))
    reads 2.0 MiB, writes 1.0 MiB
    """
    program = Program(text_of("memory_traffic", "compiled", compiled))
    return _of(program, Scope(program.entry, program.computations[program.entry]))


def _of(program: Program, scope: Scope) -> Moved:
    read = written = 0
    for made in scope.instructions.values():
        if made.opcode in _STILL:
            continue
        if made.opcode in ("while", "call", "conditional"):
            inner = [
                _of(program, program.called(scope, made, name))
                for name in program.calls(scope, made)
            ]
            times = (program.trip_count(scope, made) or 1) if made.opcode == "while" else 1
            dearest = max(inner, key=lambda one: one.total, default=Moved(0, 0))
            read, written = read + times * dearest.read, written + times * dearest.written
            continue
        if not made.opcode.endswith("-done"):
            read += sum(_read(program, scope, made))
        if not made.opcode.endswith("-start"):
            written += _written(program, scope, made)
    return Moved(read, written)


def _read(program: Program, scope: Scope, made: Instruction) -> Iterator[int]:
    if made.opcode in _SLICES:
        yield _bytes(made.result) if _bytes(scope.instructions[made.operands[0]].result) else 0
        return
    if made.opcode == "dynamic-update-slice":
        yield _bytes(scope.instructions[made.operands[1]].result)
        return
    inner = _inside(program, scope, made)
    for k, name in enumerate(made.operands):
        if name not in scope.instructions or name in made.operands[:k]:
            continue
        whole = _bytes(scope.instructions[name].result)
        sliced = _sliced(inner, k) if inner and whole else None
        yield whole if sliced is None else min(whole, sliced)


def _written(program: Program, scope: Scope, made: Instruction) -> int:
    """The bytes of the result; of an update in place, of what is updated."""
    whole = _bytes(made.result)
    inner = _inside(program, scope, made)
    last = inner.root() if inner else made
    if last.opcode != "dynamic-update-slice":
        return whole
    return min(whole, _bytes((inner or scope).instructions[last.operands[1]].result))


def _inside(program: Program, scope: Scope, made: Instruction) -> Scope | None:
    return program.called(scope, made, "calls") if made.opcode == "fusion" else None


def _sliced(inner: Scope, k: int) -> int | None:
    """What a fusion reads of its k-th operand, if it only slices it or updates it in place."""
    parameter = next(
        one
        for one in inner.instructions.values()
        if one.opcode == "parameter" and one.argument == str(k)
    )
    total = 0
    for reader in (one for one in inner.instructions.values() if parameter.name in one.operands):
        first = reader.operands[0] == parameter.name
        if reader.opcode in _SLICES and first:
            total += _bytes(reader.result)
        elif reader.opcode != "dynamic-update-slice" or not first:
            return None
    return total


def _bytes(type_: str) -> int:
    """The size of a type, or of the parts of a tuple, that lie in the device's main memory."""
    apart = re.findall(r"[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?", type_)
    return sum(size_bytes(arrays(one)) for one in apart if not re.search(r"S\([1-9]", one))
