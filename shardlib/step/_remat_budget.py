"""What blocks keep where a budget says how much memory there is, found by compiling.

    traced loss  -> marked blocks, and what each of their choices takes and computes again
                 -> the best choices for all layers that should fit, by an integer program
                 -> compiled: what the step really takes
                 -> what should fit is corrected, and so on

The size of an activation is what it is in the trace. The compiler may split it, share its place, or
keep more beside it, so that only compiled programs say what fits.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from scipy.optimize import Bounds, LinearConstraint, milp

from shardlib._text import human_bytes, table
from shardlib.layouts._remat_policy import Remat, RematLayers
from shardlib.tracing._block_costs import Choice, choices_of
from shardlib.tracing._block_places import PlacedLoop, placed_blocks

# So many programs are compiled at most, and none after one that fills this share of the budget.
_MOST_PROGRAMS = 6
_FULL = 0.97
# What is aimed at once a program was too large: the middle of what counts as full.
_AIM = 0.985


def loops_of(jaxpr: Jaxpr, weights: int | None = None) -> list[PlacedLoop]:
    """The marked blocks of a traced loss, by the loops that they are called in, in order.

    So many of its first inputs are `weights`, or all. A block that is called once is a loop of one
    turn.
    """
    return placed_blocks(jaxpr, len(jaxpr.invars) if weights is None else weights)


@dataclass(frozen=True)
class Tried:
    """A program that was compiled.

    - `remat`: what its blocks keep.
    - `estimate`: the bytes of named activations in it, as they are traced.
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

    It prints as a table.
    """

    budget: int
    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        """Of the programs that fit, the one that computes the least again."""
        fitting = [one for one in self.tried if one.peak <= self.budget]
        return min(fitting, key=lambda one: (one.flops, one.peak))

    def __str__(self) -> str:
        most = self.tried[0].flops
        rows = [("peak", "of the budget", "computed again", "blocks keep")]
        for one in sorted(self.tried, key=lambda one: one.peak):
            share = f"{one.peak / self.budget:.1%}"
            again = f"{one.flops / max(1, most):.1%} of full"
            rows.append((human_bytes(one.peak), share, again, str(one.remat)))
        return table(rows, right=(0, 1, 2))


def fit_remat(
    budget: int,
    loops: Sequence[PlacedLoop],
    peak_of: Callable[[Remat | RematLayers], int],
    programs: int = _MOST_PROGRAMS,
) -> FittedRemat:
    """Find what blocks keep so that a step takes no more than a budget, and computes little again.

    `peak_of` compiles a step for a value, and says what it takes of a device; so many `programs`
    are compiled at most.
    """
    layers = Layers.of(loops)
    tried: list[Tried] = []

    def attempt(limit: float) -> Tried | None:
        remat, estimate, flops = layers.best(limit)
        if any(remat == one.remat for one in tried):
            return None
        tried.append(Tried(remat, estimate, flops, peak_of(remat)))
        _say(tried[-1], budget)
        return tried[-1]

    first = attempt(0)
    assert first is not None
    if first.peak > budget:
        raise ValueError(
            f'`Remat.budget("{human_bytes(budget)}")`: the step takes {human_bytes(first.peak)} '
            "where blocks keep their inputs alone. Take fewer examples at once, "
            "`Strategy(accumulate=...)`; split more, `Strategy(zero=3)`; or mark smaller blocks."
        )
    while len(tried) < programs and attempt(_next_limit(tried, budget)) is not None:
        if max(one.peak for one in tried if one.peak <= budget) >= _FULL * budget:
            break
    return FittedRemat(budget, tuple(tried))


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
    elif low.estimate:
        # The first program keeps nothing that has a name.
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
        sys.stderr.write(f"shardlib: {peak} of a budget of {whole} with {tried.remat}\n")


@dataclass(frozen=True, eq=False)
class Layers:
    """All marked blocks of a loss, with the choices for each kind of block."""

    loops: Sequence[PlacedLoop]
    kinds: list[list[int]]  # by loop, the kind of each of its blocks
    choices: list[list[Choice]]  # by kind
    counts: list[int]  # how often each kind is called

    @classmethod
    def of(cls, loops: Sequence[PlacedLoop]) -> "Layers":
        """The choices for all blocks; blocks that compute the same are of one kind."""
        numbers: dict[Any, int] = {}
        choices: list[list[Choice]] = []
        counts: list[int] = []
        kinds = []
        for loop in loops:
            of_loop = []
            for block in loop.blocks:
                if block.key not in numbers:
                    numbers[block.key] = len(choices)
                    choices.append(choices_of(block))
                    counts.append(0)
                of_loop.append(numbers[block.key])
                counts[numbers[block.key]] += loop.times
            kinds.append(of_loop)
        return cls(loops, kinds, choices, counts)

    @property
    def most(self) -> int:
        """The bytes of the largest choice for every layer."""
        return sum(count * of[-1].size for count, of in zip(self.counts, self.choices, strict=True))

    def best(self, limit: float) -> tuple[Remat | RematLayers, int, int]:
        """What computes the least again and takes at most so many bytes: its value, its bytes as
        they are traced, and its operations.
        """
        columns: list[tuple[int, Choice]] = []
        for kind, choices in enumerate(self.choices):
            for choice in choices:
                columns.append((kind, choice))
        numbers = self._solved(columns, limit)
        size = flops = 0
        chosen: list[list[Choice]] = [[] for _ in self.choices]
        for (kind, choice), number in zip(columns, numbers, strict=True):
            chosen[kind] += [choice] * number
            size += choice.size * number
            flops += choice.flops * number
        return self._value(chosen), size, flops

    def _solved(self, columns: Sequence[tuple[int, Choice]], limit: float) -> list[int]:
        """How many layers have each choice for a kind of block, by the integer program.

        Args:
            columns: the choices, each with its kind of block.
            limit: the bytes that all of them may take, infinity for any.
        """
        count = len(columns)
        sizes = np.array([choice.size for _, choice in columns])
        flops = np.array([choice.flops for _, choice in columns])
        # First how many layers have each choice, then whether any has it.
        costs = np.concatenate([flops / max(1, flops.max()), np.zeros(count)])
        most = np.array([self.counts[kind] for kind, _ in columns])
        upper: Any = np.concatenate([most, np.ones(count)])
        constraints = [self._all_chosen(columns), *self._none_alone(most)]
        if np.isfinite(limit):
            room = np.concatenate([sizes, np.zeros(count)])
            constraints.append(LinearConstraint(room[None], -np.inf, limit))
        solution = milp(
            costs,
            integrality=np.ones(2 * count),
            bounds=Bounds(0, upper),
            constraints=constraints,
            # The default gap would let a worse choice pass for the best one.
            options={"mip_rel_gap": 0.0},
        )
        assert solution.success, solution.message
        # The solver's whole numbers are floats, right up to its tolerance.
        return np.rint(solution.x[:count]).astype(int).tolist()

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
                    values.append(Remat(next(remaining[kind]).names))
        # One value for all keeps a loop over layers one loop.
        if len(set(values)) == 1:
            return values[0]
        runs = [(len(list(run)), value) for value, run in itertools.groupby(values)]
        return RematLayers(tuple(runs))
