"""Copies between a device and the memory of its host, and what is multiplied meanwhile.

A TPU copies by the side of its computation. A copy is two instructions, and what the compiler has
scheduled between the two runs while bytes are under way:

    dynamic-slice-start          a layer of a stack in the host's memory, `S(5)`
    fusion                       a product of matrices
    dynamic-slice-done
"""

import itertools
import re
from dataclasses import dataclass
from typing import Any

from shardlib.compiled._hlo import Instruction, Program, Scope, arrays, size_bytes, text_of
from shardlib.compiled._runs import Run

_HOST = "S(5)"
_MOVES = ("copy", "dynamic-slice", "dynamic-update-slice")
_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")


@dataclass(frozen=True)
class HostCopy:
    """A copy from or to the memory of the host.

    - `size`: its bytes, each time.
    - `times`: how often it runs in one execution of the program, as far as that is known.
    - `overlapped`: whether matrices are multiplied meanwhile.
    """

    size: int
    times: int
    overlapped: bool

    @property
    def total_bytes(self) -> int:
        """The bytes of all times.

        >>> HostCopy(size=1024, times=12, overlapped=True).total_bytes
        12288
        """
        return self.size * self.times


def host_copies(compiled: Any) -> tuple[HostCopy, ...]:
    """Every copy between a device and its host, of a compiled program or of its text.

    A copy in the body of a loop is there once, and says how often it runs.
    """
    program = Program(text_of("host_copies", "compiled", compiled))
    found = []
    for scope, made, run in program.walk():
        copy = _host_copy(program, scope, made, run)
        if copy is not None:
            found.append(copy)
    return tuple(found)


def _host_copy(program: Program, scope: Scope, made: Instruction, run: Run) -> HostCopy | None:
    """The copy that an instruction starts or does; None where it is none."""
    opcode = made.opcode.removesuffix("-start")
    if opcode not in _MOVES:
        return None
    parts = _ARRAY.findall(made.result)
    for name in made.operands:
        parts += _ARRAY.findall(scope.instructions[name].result)
    on_device = [size_bytes(arrays(part)) for part in parts if _HOST not in part]
    # Where all arrays are in one memory, nothing goes between a device and its host.
    if len(on_device) == len(parts) or not on_device:
        return None
    # All else on the device are numbers: where a slice starts, and what a copy waits for.
    return HostCopy(max(on_device), run.times, _is_overlapped(program, scope, made))


def _is_overlapped(program: Program, scope: Scope, start: Instruction) -> bool:
    """Whether matrices are multiplied between the start and the end of a copy.

    A copy that is a single instruction holds up all that comes after it.
    """
    if not start.opcode.endswith("-start"):
        return False
    # A scheduled program has its instructions in the order in which they run.
    in_order = scope.instructions.values()
    after_start = itertools.dropwhile(lambda other: other is not start, in_order)
    for instruction in after_start:
        if start.name in instruction.operands:
            return False
        if program.multiplies(scope, instruction):
            return True
    return False
