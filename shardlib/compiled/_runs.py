"""How often an instruction of a compiled program runs.

A program says how often a loop runs, and does not say how often a branch is taken. Whoever writes a
conditional into a loop, and knows how many of the rounds take which branch, says so by the name of
the scope that it is in, as a pipeline does of the passes in its loop over ticks:

    with jax.named_scope(taken_scope(16, of=36)):
        jax.lax.cond(...)
"""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Run:
    """How often an instruction runs in one execution of the program.

    `times` counts the loops around it whose length is `known`; an unknown one counts as once, or as
    never if it is only for uneven loads, whose rounds add `further` runs each. A `conditional`
    branch counts as taken, or as often as the scope of its conditional says.
    """

    times: int = 1
    further: int = 0
    known: bool = True
    conditional: bool = False

    def in_loop(self, count: int) -> "Run":
        """How often what is inside a loop runs that goes round `count` times."""
        return replace(self, times=self.times * count, further=self.further * count)

    def in_branch(self, op_name: str) -> "Run":
        """How often what is in the branches of a conditional with a name stack runs."""
        times, of = _taken(op_name)
        # Rounded up: in a loop of unknown length, which counts as one round, it still counts.
        return replace(
            self,
            times=-(-self.times * times // of),
            further=-(-self.further * times // of),
            conditional=True,
        )


def taken_scope(times: int, *, of: int) -> str:
    """The name of the scope of a conditional that takes a branch `times` out of `of` rounds."""
    return f"taken_{times}_of_{of}"


def _taken(op_name: str) -> tuple[int, int]:
    """How often a conditional takes a branch, and out of how many rounds; 1 of 1 if not told.

    >>> _taken("jit(f)/while/body/taken_16_of_36/cond"), _taken("jit(f)/taken_16_of_36/cond/mul")
    ((16, 36), (1, 1))
    """
    # The conditional itself, and none that is somewhere in a branch of it.
    found = re.search(r"\btaken_(\d+)_of_(\d+)/cond$", op_name)
    if found is None:
        return 1, 1
    return int(found[1]), int(found[2])
