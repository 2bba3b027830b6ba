"""A ring of buffers in a GPU's shared memory, to which operands are copied ahead of their use.

The operands of a program's step `k` are in buffer `k % stages`. One warpgroup copies, others
compute, and for each buffer there are two barriers:

    ready   copies arrive at it when they are complete; those that compute wait for it
    free    those that have computed arrive at it; the copying warpgroup waits for it
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Registers of a thread: copying needs few, and computing takes those that are left.
FEW_REGISTERS, MANY_REGISTERS = 40, 232


@dataclass(frozen=True)
class Ring:
    """Buffers in shared memory through which operands come, and their barriers."""

    buffers: Sequence[Any]  # for each operand, with the stages first
    ready: Any  # barriers: all copies of a step have arrived
    free: Any  # barriers: a step has been computed
    stages: int

    def copy_in(
        self, steps: Any, parts: Callable[[jax.Array], Sequence[Any]], before: Any = 0
    ) -> None:
        """Copy operands to shared memory step by step, as far ahead as buffers are free.

        Args:
            steps: how many there are, a number or a traced one.
            parts: called with the index of a step; gives the part of each operand that it needs.
            before: how many steps were copied before these.
        """

        @pl.loop(0, steps)
        def _(k: jax.Array) -> None:
            slot = self.slot(before + k)
            # The first copy to each buffer has nothing to wait for.
            is_refilled = before + k >= self.stages
            pl.when(is_refilled)(lambda: plgpu.barrier_wait(self.free.at[slot]))
            for part, buffer in zip(parts(k), self.buffers, strict=True):
                plgpu.copy_gmem_to_smem(part, buffer.at[slot], self.ready.at[slot])

    def slot(self, k: jax.Array) -> jax.Array:
        """Which buffer a step is in."""
        return lax.rem(k, self.stages)


def set_registers(simulated: bool, count: int) -> None:
    """Give each thread of this warpgroup so many registers.

    The three warpgroups of a program start with an even share of the processor's 65,536, which is
    168 for each thread.
    """
    if simulated:
        return
    action = "decrease" if count < 128 else "increase"
    plgpu.set_max_registers(count, action=action)
