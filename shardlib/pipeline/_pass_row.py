"""What a program says of one pass: the columns of a stage's row in a tick, as traced numbers.

All stages run one program, and only these numbers tell them what to do. They choose slots by
indexing, and they choose between loops over layers, which differ in code, by a branch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax import lax

from shardlib.pipeline._program import Program


@dataclass(frozen=True, eq=False)
class PassRow:
    """The columns of one kind of pass (`F`, `B` or `W`) in this stage's row for this tick.

    They are meaningful only where `happens()`. `row` has all columns by name, such as
    `F.microbatch`.
    """

    row: dict[str, Any]
    kind: str

    def __getitem__(self, name: str) -> Any:
        """A column of the pass, such as its `microbatch`, or its slot in a buffer."""
        return self.row[f"{self.kind}.{name}"]

    def happens(self) -> Any:
        """Whether this stage has such a pass in this tick."""
        return self.row[self.kind] == 1


def switch_loop(program: Program, at: PassRow, do: Callable[..., Any], *operands: Any) -> Any:
    """`do(loop, at, *operands)` for the loop that the pass's part belongs to.

    The number of the loop is an ordinary integer in `do`. With several loops, the program has a
    branch for each.
    """
    # A `switch` of one branch would still be a branch in the program.
    if program.loops == 1:
        return do(0, at, *operands)
    # Parts are numbered through all loops, so that the quotient is the number of the loop.
    branches = [partial(do, loop, at) for loop in range(program.loops)]
    return lax.switch(at["part"] // program.parts_per_loop, branches, *operands)
