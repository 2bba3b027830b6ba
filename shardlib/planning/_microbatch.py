"""The largest microbatch that fits a machine, found by compiling.

A device takes `memory = a + b * microbatch`, nearly: arrays of the state do not depend on the
examples, and activations have a dim of them. So two programs say where the limit should be, and
compiling on both sides of it says where it is:

    tried    1      2      4      8     16     32       examples at a time
             fits   fits                  fits   too much
             first  second                line   next larger
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardlib._notebook import Shown
from shardlib._text import human_bytes, table
from shardlib.layouts._specs import parts_over
from shardlib.machine._targets import Target
from shardlib.planning._compiled_step import Machine, compile_step
from shardlib.planning._frontier import say_on_first_process
from shardlib.planning._machine import check_planned, checked_target, memory_limit, on_target
from shardlib.step._state import State
from shardlib.step._step import Step


@dataclass(frozen=True)
class TriedMicrobatch:
    """A size of microbatch for which a program was compiled, and what that takes.

    - `microbatch`: how many examples a device takes at a time.
    - `accumulate`: how many microbatches that makes, `Strategy(accumulate=...)`.
    - `total_bytes`: the bytes that the step takes of a device.
    """

    microbatch: int
    accumulate: int
    total_bytes: int


@dataclass(frozen=True)
class LargestMicrobatch(Shown):
    """The largest `microbatch` that fits, and the programs that were compiled to find it.

    It prints as a table.

    - `memory`: what a step may take of a device, in bytes.
    - `tried`: the sizes that were tried, in the order in which they were.
    """

    memory: int
    tried: tuple[TriedMicrobatch, ...]

    @property
    def best(self) -> TriedMicrobatch:
        """The largest of those that fit."""
        fitting = [one for one in self.tried if one.total_bytes <= self.memory]
        return max(fitting, key=lambda one: one.microbatch)

    @property
    def microbatch(self) -> int:
        """How many examples a device takes at a time."""
        return self.best.microbatch

    @property
    def accumulate(self) -> int:
        """The value of `Strategy(accumulate=...)`."""
        return self.best.accumulate

    @property
    def total_bytes(self) -> int:
        """What the step then takes of a device."""
        return self.best.total_bytes

    def __str__(self) -> str:
        rows = [("examples at a time", "accumulate=", "memory", f"of {human_bytes(self.memory)}")]
        for one in sorted(self.tried, key=lambda one: one.microbatch):
            verdict = "fits" if one.total_bytes <= self.memory else "too much"
            if one == self.best:
                verdict = "the largest that fits"
            size = human_bytes(one.total_bytes)
            rows.append((str(one.microbatch), str(one.accumulate), size, verdict))
        return table(rows, right=(0, 1, 2))


def largest_microbatch(
    step: Step,
    state: State,
    batch: Any,
    target: "str | Target | None" = None,
    *,
    memory: "int | str | None" = None,
    cache: "str | os.PathLike[str] | None" = None,
) -> LargestMicrobatch:
    """How many examples of a batch a device can take at a time, by the compiler for it.

    The batch does not change: a device takes its examples in more or in fewer microbatches,
    `Strategy(accumulate=...)`. The `accumulate` of the step's own strategy is ignored. If not even
    one example at a time fits, an error says what to change.

    Args:
        step: what `sl.train_step` gives.
        state: its state, which may be abstract.
        batch: its batch, or the shapes of one.
        target: a machine, as for `sl.plan`; by default the devices of the step's mesh.
        memory: what a step may take of a device, in bytes or as `"14GiB"`; by default all that the
            target has for one.
        cache: a folder that keeps what compilers say.
    """
    check_planned("largest_microbatch", step, state, cache)
    machine = checked_target("largest_microbatch", target)
    if step.strategy.pipeline is not None:
        raise ValueError(
            "`largest_microbatch` is of steps without `Strategy(pipeline=...)`, whose schedule "
            "says how many microbatches there are: plan schedules with more of them."
        )
    step, state = on_target(step, state, machine)
    compiled_for = Machine.of(step.strategy.device_mesh, machine)
    device_bytes = compiled_for.chip.hbm_bytes
    limit = memory_limit("largest_microbatch", memory, device_bytes) or _limit(compiled_for)
    examples = _examples_of_device(step, batch)

    # The batch stays as it is: what differs is only in how many parts a device takes its examples.
    def total_of(microbatch: int) -> int:
        accumulating = _with_accumulate(step, examples // microbatch)
        laid_out = _laid_out(state, accumulating)
        made = compile_step(accumulating, laid_out, batch, compiled_for, cache)
        size = made.memory.total_bytes
        say_on_first_process(
            f"{human_bytes(size)} of {human_bytes(limit)} with {microbatch} examples at a time"
        )
        return size

    tried = search(_divisors(examples), limit, total_of)
    found = []
    for microbatch, size in tried.items():
        found.append(TriedMicrobatch(microbatch, examples // microbatch, size))
    # The smallest size is always tried. If that does not fit, none does.
    if min(tried.values()) > limit:
        raise ValueError(_nothing_fits(step, found[0], limit))
    return LargestMicrobatch(limit, tuple(found))


def search(sizes: Sequence[int], limit: float, total_of: Callable[[int], int]) -> dict[int, int]:
    """What was tried until the largest of some sizes that fits is known: sizes with their totals.

    Sizes grow, and so do their totals, as on a line. If the smallest does not fit, it is the only
    one that was tried.

    >>> search([1, 2, 4, 8, 16, 32], 100, lambda examples: 10 + 7 * examples)
    {1: 17, 8: 66, 16: 122}
    """
    tried = {sizes[0]: total_of(sizes[0])}
    if tried[sizes[0]] > limit:
        return tried
    # Places of sizes: those up to `low` fit, those from `high` on do not.
    low, high = 0, len(sizes)
    # The second one is in the middle: a line through two neighbours would say little.
    place = len(sizes) // 2
    while high - low > 1:
        tried[sizes[place]] = total_of(sizes[place])
        if tried[sizes[place]] <= limit:
            low = place
        else:
            high = place
        # Totals are only nearly on a line. The next place lies between the bounds all the same, so
        # that each program brings them closer together.
        place = min(max(_on_line(sizes, tried, limit), low + 1), high - 1)
    return tried


def _on_line(sizes: Sequence[int], tried: dict[int, int], limit: float) -> int:
    """The place of the largest size that fits if totals are on a line.

    It is one through the two largest that were tried: more of them is activations.
    """
    first, second = sorted(tried)[-2:]
    slope = (tried[second] - tried[first]) / (second - first)
    # Padding can hide a few examples. Then the largest size is tried.
    if slope <= 0:
        return len(sizes) - 1
    most = first + (limit - tried[first]) / slope
    return max([place for place, size in enumerate(sizes) if size <= most], default=0)


def _limit(machine: Machine) -> int:
    """What a step may take of a device, by its datasheet.

    Where there is none, the caller is asked for it: a guess would be believed.
    """
    usable = machine.chip.usable_bytes
    if usable == float("inf"):
        raise ValueError(
            f"`largest_microbatch` does not know what memory a device of `{machine.chip.name}` "
            'has: say what a step may take, `memory="14GiB"`.'
        )
    return int(usable)


def _examples_of_device(step: Step, batch: Any) -> int:
    """How many examples of a batch each device has.

    Arrays that do not agree in their first dim are refused, for it is not known then what a part of
    the batch is; so are batches that devices cannot share evenly.
    """
    leaves = jax.tree.leaves(batch)
    rows = {leaf.shape[0] for leaf in leaves if getattr(leaf, "shape", ())}
    if len(rows) != 1 or 0 in rows:
        raise ValueError(
            "`largest_microbatch(batch=...)` takes a tree of arrays with the examples along dim 0; "
            f"got {sorted(rows) or 'none'} along it."
        )
    axes = step.strategy.batch_axes
    devices = parts_over(step.strategy.device_mesh.shape, axes)
    (examples,) = rows
    if examples % devices:
        raise ValueError(
            f"`largest_microbatch`: {examples} examples cannot be shared out over {devices} "
            f"devices of {', '.join(axes)}: take a multiple of {devices}."
        )
    return examples // devices


def _divisors(number: int) -> list[int]:
    """The sizes that equal microbatches of so many examples may have, in order.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _with_accumulate(step: Step, accumulate: int) -> Step:
    """The same step, whose devices take their examples in so many microbatches."""
    strategy = dataclasses.replace(step.strategy, accumulate=accumulate)
    return Step(step.loss_fn, strategy)


def _laid_out(state: State, step: Step) -> State:
    """The same state for a step of another strategy that lays it out alike."""
    layout = dataclasses.replace(state.layout, strategy=step.strategy)
    return dataclasses.replace(state, layout=layout)


def _nothing_fits(step: Step, least: TriedMicrobatch, limit: float) -> str:
    """That not even one example fits, and what to change.

    Of the ways out, those are left out that the strategy has taken already.
    """
    changes = []
    if step.strategy.remat == "none":
        changes.append('compute activations again, `Strategy(remat="full")`')
    if step.strategy.sharding.stage < 3:
        changes.append("split the state further, `Strategy(zero=3)`")
    changes.append("split each example over more devices, `sl.rules.tensor_sequence`")
    changes.append("or keep the state on the host, `Strategy(offload=...)`")
    return (
        f"`largest_microbatch`: with {least.microbatch} example at a time, "
        f"`accumulate={least.accumulate}`, the step takes {human_bytes(least.total_bytes)} of "
        f"{human_bytes(limit)}. To fit it, {'; '.join(changes)}."
    )
