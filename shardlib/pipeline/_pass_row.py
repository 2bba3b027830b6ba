"""What a program says of one pass of a stage in a tick, in traced numbers.

All stages run one program, and only these numbers tell a stage what to do. A slot is a number to
index a buffer with. Loops over layers differ in code, so a branch of the program chooses the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax

from shardlib.compiled._runs import taken_scope
from shardlib.pipeline._program import Program


@dataclass(frozen=True, eq=False)
class PassRow:
    """The pass of one kind (`F`, `B` or `W`) that this stage does in this tick, if there is one.

    `numbers` has one number, of this tick and stage, out of each array of `Program.rows`. Where no
    pass of this kind `happens`, the others of its numbers mean nothing.
    """

    numbers: dict[str, Any]
    kind: str

    @property
    def happens(self) -> Any:
        """Whether this stage has a pass of this kind in this tick."""
        return self.numbers[self.kind] == 1

    @property
    def microbatch(self) -> Any:
        """The number of the microbatch."""
        return self.numbers[f"{self.kind}.microbatch"]

    @property
    def part(self) -> Any:
        """The number of the part, counted through all loops and stages."""
        return self.numbers[f"{self.kind}.part"]

    @property
    def chunk(self) -> Any:
        """The number of the part among the parts of its stage.

        Like parts, chunks are numbered through all loops.
        """
        return self.numbers[f"{self.kind}.chunk"]

    def slot(self, buffer: str) -> Any:
        """The slot that the pass reads or writes in a buffer, such as `kept`.

        Where nothing waits for the pass, the number means nothing. Part 0, to which nothing is
        sent, still reads `activations` at it, and does not use what it finds.
        """
        return self.numbers[f"{self.kind}.{buffer}"]


def cond_told(times: int, of: int, *given: Any) -> Any:
    """`lax.cond(*given)`, with a name that tells plans how often its first branch is taken.

    That is `times` out of `of` times that a stage comes here, the stage that takes it most often.
    Otherwise a plan counts what a pass sends as if there were such a pass in every tick.
    """
    with jax.named_scope(taken_scope(times, of=of)):
        return lax.cond(*given)


def switch_loop(program: Program, pass_row: PassRow, do: Callable[..., Any], *operands: Any) -> Any:
    """`do(loop, pass_row, *operands)` for the loop that the pass's part belongs to.

    In `do`, the number of the loop is an ordinary integer and not a traced one. With several loops,
    the program has a branch for each.
    """
    if program.loops == 1:
        return do(0, pass_row, *operands)
    # All loops have the same number of parts, and parts are numbered through all loops.
    loop_number = pass_row.part // program.parts_per_loop
    branches = [partial(do, loop, pass_row) for loop in range(program.loops)]
    # Every stage has as many parts of each loop, and so as many passes.
    with jax.named_scope(taken_scope(1, of=program.loops)):
        return lax.switch(loop_number, branches, *operands)
