"""What blocks keep where a budget says how much memory there is, found by compiling.

    traced loss  -> marked blocks, and what each of their choices takes and computes again
                 -> the best choices for all layers that should fit, by an integer program
                 -> compiled: what the step really takes
                 -> what should fit is corrected, and so on

The size of an activation is what it is in the trace. The compiler may split it, share its place, or
keep more beside it, so that only compiled programs say what fits.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from shardlib._progress import say
from shardlib._text import human_bytes, table
from shardlib.layouts._remat_policy import Remat, RematLayers
from shardlib.layouts._remat_text import plain_remat, remat_code
from shardlib.machine._chips import chip_of
from shardlib.step._strategy import Strategy
from shardlib.tracing._block_costs import NO_HOST, Choice, Costs, HostRoom
from shardlib.tracing._block_places import PlacedLoop, TracedLoss, placed_blocks

# So many programs are compiled at most, and none after one that fills this share of the budget.
_MOST_PROGRAMS = 6
_FULL = 0.97
# What is aimed at once a program was too large: the middle of what counts as full.
_AIM = 0.985
# Of choices that compute the same again, the one is better that copies less to the host: all bytes
# that could be copied count as much as this share of all operations.
_TIE = 1e-5
# Each kind of layers has passes of its own to compile. Fewer kinds are taken where they compute no
# more than this share more again.
_FEWER_KINDS = 0.009


def loops_of(loss: TracedLoss, weights: int | None = None) -> list[PlacedLoop]:
    """The marked blocks of a traced loss, by the loops that they are called in, in order.

    So many of its first inputs are `weights`, or all. A block that is called once is a loop of one
    turn.
    """
    return placed_blocks(loss, len(loss.jaxpr.invars) if weights is None else weights)


def host_room(strategy: Strategy, names: tuple[str, ...], loops: Sequence[PlacedLoop]) -> HostRoom:
    """What blocks may keep in the memory of the host, by the datasheet of the devices.

    A trace has the operations of all devices that share a layer, which are those of the mesh axes
    that are not data axes.
    """
    mesh = strategy.device_mesh
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if not names or chip is None:
        return HostRoom(names)
    per_flop = per_block = math.inf
    if chip.host_bandwidth is not None:
        sharing = mesh.size // math.prod(mesh.shape[axis] for axis in strategy.data_axes)
        per_flop = chip.host_bandwidth / (chip.flops["bf16"] * sharing)
    if chip.host_bytes is not None:
        blocks = sum(loop.times * len(loop.blocks) for loop in loops)
        per_block = chip.host_bytes / max(1, blocks)
    return HostRoom(names, per_flop, per_block)


@dataclass(frozen=True)
class Tried:
    """A program that was compiled.

    - `remat`: what its blocks keep.
    - `estimate`: the bytes of named activations on the device, as they are traced, less those of
      inputs that the host has.
    - `flops`: operations of products that its blocks compute again in a backward pass.
    - `peak`: the bytes that it takes of a device.
    """

    remat: Remat | RematLayers
    estimate: int
    flops: int
    peak: int


@dataclass(frozen=True)
class FittedRemat:
    """What a step keeps within a budget, and the programs that were compiled to find it.

    It prints as a table. `most_flops` are the operations that blocks compute again where they keep
    nothing but their inputs.
    """

    budget: int
    tried: tuple[Tried, ...]
    most_flops: int

    @property
    def best(self) -> Tried:
        """Of the programs that fit, the one that computes the least again."""
        fitting = [one for one in self.tried if one.peak <= self.budget]
        return min(fitting, key=lambda one: (one.flops, one.peak))

    def __str__(self) -> str:
        rows = [("peak", "of the budget", "computed again", "blocks keep")]
        for one in sorted(self.tried, key=lambda one: one.peak):
            share = f"{one.peak / self.budget:.1%}"
            again = f"{one.flops / max(1, self.most_flops):.1%} of full"
            rows.append((human_bytes(one.peak), share, again, remat_code(plain_remat(one.remat))))
        return table(rows, right=(0, 1, 2))


def fit_remat(
    budget: int,
    loops: Sequence[PlacedLoop],
    peak_of: Callable[[Remat | RematLayers], int],
    programs: int = _MOST_PROGRAMS,
    host: HostRoom = NO_HOST,
) -> FittedRemat:
    """Find what blocks keep so that a step takes no more than a budget, and computes little again.

    Args:
        budget: the bytes that the step may take of a device.
        loops: the marked blocks of its loss.
        peak_of: compiles the step for a value, and says what it takes of a device.
        programs: how many are compiled at most.
        host: what may be kept in the memory of the host.
    """
    layers = Layers.of(loops, host)
    tried: list[Tried] = []

    def attempt(limit: float) -> Tried | None:
        remat, estimate, flops = layers.best(limit, spare=_FEWER_KINDS)
        if any(remat == one.remat for one in tried):
            return None
        tried.append(Tried(remat, estimate, flops, peak_of(remat)))
        _say(tried[-1], budget)
        return tried[-1]

    first = attempt(layers.least)
    assert first is not None
    if first.peak > budget:
        raise _beyond_budget(budget, first, host.names)
    while len(tried) < programs and attempt(_next_limit(tried, budget)) is not None:
        if max(one.peak for one in tried if one.peak <= budget) >= _FULL * budget:
            break
    return FittedRemat(budget, tuple(tried), layers.most_flops)


def _beyond_budget(budget: int, least: Tried, names: tuple[str, ...]) -> ValueError:
    """The error for a budget that nothing meets, though the host may have some names."""
    memory = human_bytes(budget)
    if names:
        asked = f'`Remat.budget("{memory}", offload={names!r})`'
        keeps = f"the least, `{remat_code(plain_remat(least.remat))}`"
        to_host = ""
    else:
        asked = f'`Remat.budget("{memory}")`'
        keeps = "their inputs alone"
        to_host = (
            "let the host keep what has a name, inputs of blocks for example, "
            f'`Remat.budget("{memory}", offload=("block_in",))`; '
        )
    return ValueError(
        f"{asked}: the step takes {human_bytes(least.peak)} where blocks keep {keeps}. Take fewer "
        f"examples at once, `Strategy(accumulate=...)`; {to_host}split more, `Strategy(zero=3)`; "
        "or mark smaller blocks."
    )


def _next_limit(tried: list[Tried], budget: int) -> float:
    """The estimate at which a step should nearly fill its budget, from what was compiled.

    Between the largest that fits and the smallest that does not, peaks are taken to grow evenly;
    where all fit, as they did so far.
    """
    low = max((one for one in tried if one.peak <= budget), key=lambda one: one.estimate)
    too_large = [one for one in tried if one.peak > budget]
    aim, slope = 1.0, 1.0
    if too_large:
        aim, slope = _AIM, _slope(low, min(too_large, key=lambda one: one.estimate))
    elif low is not tried[0]:
        # The first program keeps the least.
        slope = _slope(tried[0], low)
    # What takes nothing may grow without bounds.
    if slope <= 0:
        return float("inf")
    return low.estimate + max(0.0, aim * budget - low.peak) / slope


def _slope(low: Tried, high: Tried) -> float:
    """By how many bytes a step grows for each byte that more activations take, as they are traced.

    It is one where the compiler keeps just what it is told to.
    """
    return (high.peak - low.peak) / max(1, high.estimate - low.estimate)


def _say(tried: Tried, budget: int) -> None:
    """A line about a program that was compiled, which may have taken minutes."""
    if jax.process_index() == 0:
        peak, whole = human_bytes(tried.peak), human_bytes(budget)
        value = remat_code(plain_remat(tried.remat))
        say(f"{peak} of a budget of {whole} with {value}")


@dataclass(frozen=True, eq=False)
class Layers:
    """All marked blocks of a loss, with the choices for each kind of block."""

    loops: Sequence[PlacedLoop]
    kinds: list[list[int]]  # by loop, the kind of each of its blocks
    choices: list[list[Choice]]  # by kind
    counts: list[int]  # how often each kind is called
    # The operations that all blocks compute again where they keep nothing but inputs.
    most_flops: int

    @classmethod
    def of(cls, loops: Sequence[PlacedLoop], host: HostRoom = NO_HOST) -> "Layers":
        """The choices for all blocks; blocks that compute the same are of one kind."""
        numbers: dict[Any, int] = {}
        choices: list[list[Choice]] = []
        counts: list[int] = []
        every_flop: list[int] = []
        most_flops = 0
        kinds = []
        for loop in loops:
            of_loop = []
            for block in loop.blocks:
                if block.key not in numbers:
                    numbers[block.key] = len(choices)
                    costs = Costs.of(block, host)
                    choices.append(costs.choices())
                    every_flop.append(sum(costs.flops))
                    counts.append(0)
                of_loop.append(numbers[block.key])
                counts[numbers[block.key]] += loop.times
                most_flops += loop.times * every_flop[numbers[block.key]]
            kinds.append(of_loop)
        return cls(loops, kinds, choices, counts, most_flops)

    @property
    def most(self) -> int:
        """The bytes of the largest choice for every layer."""
        return sum(count * of[-1].size for count, of in zip(self.counts, self.choices, strict=True))

    @property
    def least(self) -> int:
        """The bytes of the smallest choice for every layer."""
        return sum(count * of[0].size for count, of in zip(self.counts, self.choices, strict=True))

    def best(self, limit: float, spare: float = 0.0) -> tuple[Remat | RematLayers, int, int]:
        """What computes the least again and takes at most so many bytes: its value, its bytes as
        they are traced, and its operations.

        Fewer kinds of layers are taken where they compute at most this share more again, `spare`.
        """
        columns: list[tuple[int, Choice]] = []
        for kind, choices in enumerate(self.choices):
            for choice in choices:
                columns.append((kind, choice))
        numbers = self._solved(columns, limit, spare)
        size = flops = 0
        chosen: list[list[Choice]] = [[] for _ in self.choices]
        for (kind, choice), number in zip(columns, numbers, strict=True):
            chosen[kind] += [choice] * number
            size += choice.size * number
            flops += choice.flops * number
        return self._value(chosen), size, flops

    def _solved(
        self, columns: Sequence[tuple[int, Choice]], limit: float, spare: float
    ) -> list[int]:
        """How many layers have each choice for a kind of block, by the integer program.

        Args:
            columns: the choices, each with its kind of block.
            limit: the bytes that all of them may take, infinity for any.
            spare: the share more that fewer kinds may compute again.
        """
        count = len(columns)
        sizes = np.array([choice.size for _, choice in columns])
        flops = np.array([choice.flops for _, choice in columns])
        on_host = np.array([choice.host_size for _, choice in columns])
        per_layer = flops / max(1, flops.max()) + _TIE * on_host / max(1, on_host.max())
        # First how many layers have each choice, then whether any has it.
        costs = np.concatenate([per_layer, np.zeros(count)])
        most = np.array([self.counts[kind] for kind, _ in columns])
        constraints = [self._all_chosen(columns), *self._none_alone(most)]
        if np.isfinite(limit):
            room = np.concatenate([sizes, np.zeros(count)])
            constraints.append(LinearConstraint(room[None], -np.inf, limit))
        found = _minimum(costs, most, constraints)
        if spare:
            enough = costs @ found * (1 + spare) + _TIE
            constraints.append(LinearConstraint(costs[None], -np.inf, enough))
            kinds = np.concatenate([np.zeros(count), np.ones(count)])
            # All costs together weigh less than one kind.
            found = _minimum(kinds + costs / (2 * max(1.0, enough)), most, constraints)
        return found[:count].tolist()

    def _all_chosen(self, columns: Sequence[tuple[int, Choice]]) -> LinearConstraint:
        """That every layer has one of the choices for its kind."""
        rows = np.zeros((len(self.choices), 2 * len(columns)))
        for place, (kind, _) in enumerate(columns):
            rows[kind, place] = 1
        counts: Any = self.counts
        return LinearConstraint(rows, counts, counts)

    def _none_alone(self, most: Any) -> list[LinearConstraint]:
        """That no choice has one layer alone, where there are more.

        A loop of one turn is no loop to XLA, which then orders its operations among all others, and
        keeps more at a time.
        """
        each = np.eye(len(most))
        least = np.minimum(most, 2)
        return [
            LinearConstraint(np.hstack([each, -least * each]), 0, np.inf),
            LinearConstraint(np.hstack([each, -most * each]), -np.inf, 0),
        ]

    def _value(self, chosen: list[list[Choice]]) -> Remat | RematLayers:
        """The value that gives the blocks of each kind their choices, the largest ones last.

        What the last layers keep is read first in the backward pass. It is gone when the layers
        that compute more again, and take more room for it, are reached.
        """
        remaining = [iter(of_kind) for of_kind in chosen]
        values = []
        for loop, kinds in zip(self.loops, self.kinds, strict=True):
            for _ in range(loop.times):
                for kind in kinds:
                    choice = next(remaining[kind])
                    values.append(Remat(choice.names, offloaded=choice.offloaded))
        # One value for all keeps a loop over layers one loop.
        if len(set(values)) == 1:
            return values[0]
        runs = [(len(list(run)), value) for value, run in itertools.groupby(values)]
        return RematLayers(tuple(runs))


def _minimum(costs: Any, most: Any, constraints: Sequence[LinearConstraint]) -> Any:
    """The whole numbers of least cost: as many as `most` of each choice, and whether any has it."""
    upper: Any = np.concatenate([most, np.ones(len(most))])
    solution = milp(
        costs,
        integrality=np.ones(len(costs)),
        bounds=Bounds(0, upper),
        constraints=constraints,
        # The default gap would let a worse choice pass for the best one.
        options={"mip_rel_gap": 0.0},
    )
    assert solution.success, solution.message
    # The solver's whole numbers are floats, right up to its tolerance.
    return np.rint(solution.x).astype(int)
