"""What a compiled program reads and writes of a device's memory, counted from its text.

It is an estimate from shapes: an instruction reads each operand and writes its result once. What
XLA fuses counts as one instruction, and its intermediate values are never in memory.
"""

import re
from dataclasses import dataclass
from typing import Any

from shardlib._text import human_bytes
from shardlib.compiled._hlo import Instruction, Program, Scope, arrays, size_bytes, text_of


@dataclass(frozen=True)
class Moved:
    """Bytes that a device reads from its memory and writes to it.

    They are those of one run of a program, on one device.
    """

    read: int
    written: int

    @property
    def total(self) -> int:
        """Bytes read and written together."""
        return self.read + self.written

    def __str__(self) -> str:
        return f"reads {human_bytes(self.read)}, writes {human_bytes(self.written)}"


# What moves nothing: values by another name, and parts of what another instruction makes.
_STILL = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
    "iota",
}
# What reads a part of its first operand, as large as the result.
_SLICES = ("slice", "dynamic-slice", "gather")


def memory_traffic(compiled: Any) -> Moved:
    """What a device reads and writes of its memory in a run of a compiled program.

    The program is what `jitted.lower(...).compile()` gives.

    Each instruction reads its operands and writes its result, once, in the bytes of their shapes;
    those in a loop count as often as it runs, and of branches the one that moves most counts. What
    a fusion only slices counts by its slices. What a TPU keeps in fast memory between two
    instructions counts for nothing. A custom call counts as any instruction: a kernel that reads an
    operand twice has to be looked at by itself.

    >>> import jax, jax.numpy as jnp
    >>> print(memory_traffic(jax.jit(lambda x, y: x * y + 1).lower(*[jnp.ones((256,
    ...     1024))] * 2).compile()))
    reads 2.0 MiB, writes 1.0 MiB
    """
    program = Program(text_of("memory_traffic", "compiled", compiled))
    return _moved(program, program.entry_scope())


def _moved(program: Program, scope: Scope) -> Moved:
    """What the instructions of a computation read and write, with all that they run."""
    read = written = 0
    for made in scope.instructions.values():
        if made.opcode in _STILL:
            continue
        if made.opcode in ("while", "call", "conditional"):
            times, called = _moved_by_calls(program, scope, made)
            read += times * called.read
            written += times * called.written
            continue
        # A `-start` reads and its `-done` writes.
        if not made.opcode.endswith("-done"):
            read += _read(program, scope, made)
        if not made.opcode.endswith("-start"):
            written += _written(program, scope, made)
    return Moved(read, written)


def _moved_by_calls(program: Program, scope: Scope, made: Instruction) -> tuple[int, Moved]:
    """How often an instruction runs what it calls, and what that reads and writes each time.

    Of the branches of a conditional it is the one that moves most. A loop of unknown length counts
    as once.
    """
    dearest = Moved(0, 0)
    for name in program.calls(scope, made):
        moved = _moved(program, program.called(scope, made, name))
        if moved.total > dearest.total:
            dearest = moved
    times = None
    if made.opcode == "while":
        times = program.trip_count(scope, made)
    if times is None:
        times = 1
    return times, dearest


def _read(program: Program, scope: Scope, made: Instruction) -> int:
    """The bytes that an instruction reads from main memory, each operand once."""
    if made.opcode in _SLICES:
        sliced = scope.instructions[made.operands[0]]
        # Nothing is read of an array in fast memory, which has no bytes here.
        if not _bytes(sliced.result):
            return 0
        # A slice reads only its own part of what it is taken from.
        return _bytes(made.result)
    if made.opcode == "dynamic-update-slice":
        # The update; what is updated in place is not read.
        return _bytes(scope.instructions[made.operands[1]].result)
    return _read_of_operands(program, scope, made)


def _read_of_operands(program: Program, scope: Scope, made: Instruction) -> int:
    """The bytes of all operands of an instruction, as far as they are read.

    A fusion may read a part of an operand, where all that it does with it is to slice it.
    """
    total = 0
    inner = _inside(program, scope, made)
    for number, name in enumerate(made.operands):
        # An operand that comes twice is read once.
        is_repeated = name in made.operands[:number]
        if is_repeated or name not in scope.instructions:
            continue
        operand_bytes = _bytes(scope.instructions[name].result)
        if inner and operand_bytes:
            operand_bytes = _read_by_fusion(inner, number, operand_bytes)
        total += operand_bytes
    return total


def _read_by_fusion(inner: Scope, operand: int, operand_bytes: int) -> int:
    """The bytes that a fusion reads of an operand of this many bytes in main memory."""
    sliced_bytes = _sliced(inner, operand)
    if sliced_bytes is None:
        return operand_bytes
    # Slices may overlap, but what a device has read once it need not read again.
    return min(operand_bytes, sliced_bytes)


def _written(program: Program, scope: Scope, made: Instruction) -> int:
    """The bytes of the result that an instruction writes to main memory.

    Of an update in place it is what is updated, also where a fusion ends with it.
    """
    result_bytes = _bytes(made.result)
    last = made
    if inner := _inside(program, scope, made):
        scope, last = inner, inner.root()
    if last.opcode != "dynamic-update-slice":
        return result_bytes
    update = scope.instructions[last.operands[1]]
    return min(result_bytes, _bytes(update.result))


def _inside(program: Program, scope: Scope, made: Instruction) -> Scope | None:
    """The computation inside a fusion, and None for any other instruction."""
    if made.opcode != "fusion":
        return None
    return program.called(scope, made, "calls")


def _sliced(inner: Scope, operand: int) -> int | None:
    """The bytes that a fusion reads of an operand that it only slices or updates in place.

    `operand` is its number. The result is None where the fusion does anything else with it.
    """
    parameter = next(
        instruction
        for instruction in inner.instructions.values()
        if instruction.opcode == "parameter" and instruction.argument == str(operand)
    )
    total = 0
    for reader in inner.instructions.values():
        if parameter.name not in reader.operands:
            continue
        # The other operands of these are indices and updates, which are read in full.
        is_first = reader.operands[0] == parameter.name
        if reader.opcode in _SLICES and is_first:
            total += _bytes(reader.result)
        elif reader.opcode != "dynamic-update-slice" or not is_first:
            return None
    return total


def _bytes(type_: str) -> int:
    """The bytes of a type, or of the parts of a tuple, that are in the device's main memory.

    A layout names the memory it is in: `{1,0:S(1)}` is not the main one, which has number 0 or
    none.
    """
    total = 0
    for element in re.findall(r"[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?", type_):
        if not re.search(r"S\([1-9]", element):
            total += size_bytes(arrays(element))
    return total
