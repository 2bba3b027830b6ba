"""Memory against recomputation: the choices that there are for what marked blocks keep.

    traced loss  ->  for each size of memory the best choice for all layers, by an integer program
                 ->  compiled at both ends, or all of them: what each really takes of a device
                 ->  the others on a line between those, by the sizes of what they keep
                 ->  those that no other one beats in both

`Remat.budget` finds one point of it.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from shardlib._notebook import Shown
from shardlib._progress import say
from shardlib._text import human_bytes, table
from shardlib.checks import _arguments as check
from shardlib.layouts._remat_text import plain_remat, remat_code, remat_words
from shardlib.machine._targets import Target
from shardlib.planning._activations import loops_of_step, products_scale
from shardlib.planning._compiled_step import Machine, compile_step
from shardlib.planning._frontier_picture import picture
from shardlib.planning._machine import check_planned, checked_target, on_target
from shardlib.step._remat_budget import Layers
from shardlib.step._remat_checks import NoMarkedBlocksError
from shardlib.step._state import State
from shardlib.step._step import Step, with_remat


@dataclass(frozen=True)
class FrontierPoint:
    """A choice of what blocks keep.

    - `remat`: the value of `Strategy(remat=...)`.
    - `total_bytes`: what the step takes of a device: as compiled, or predicted from the sizes of
      what it keeps and from programs that were compiled.
    - `compiled`: whether it was.
    - `again_flops`: operations of products that a step computes again, on all devices.
    - `again_fraction`: the same over those of a step that computes nothing again.
    """

    remat: Any
    total_bytes: int
    compiled: bool
    again_flops: int
    again_fraction: float


@dataclass(frozen=True)
class Frontier(Shown):
    """The choices that no other one beats both in memory and in what is computed again.

    It prints as a table, and `svg()` draws it. `fitting()` is the best choice that fits.

    - `target`: the machine, or how many devices, in words.
    - `usable_bytes`: what a step may take of a device of the target; infinite where nobody knows.
    - `points`: the choices, in the order of the memory that they take. The last one keeps
      everything. It also avoids recomputing norms and activation functions, which are not in
      `again_flops`.
    """

    target: str
    usable_bytes: float
    points: tuple[FrontierPoint, ...]

    def fitting(self, memory: "int | str | None" = None) -> FrontierPoint:
        """The choice that computes the least again of those that fit.

        `memory` is what it may take of a device, in bytes or as `"14GiB"`; by default all that the
        target has for a step.
        """
        most = self.usable_bytes
        if memory is not None:
            takes = 'the bytes that a step may take: a number, or text such as `"14GiB"`'
            most = check.size("Frontier.fitting", "memory", memory, takes)
        fitting = [point for point in self.points if point.total_bytes <= most]
        if not fitting:
            least = human_bytes(self.points[0].total_bytes)
            raise ValueError(
                f"`Frontier.fitting`: the step takes {least} of {human_bytes(most)} where blocks "
                "keep the least. Take fewer examples at once, `sl.planning.largest_microbatch`; or "
                "split more, `Strategy(zero=3)`."
            )
        # The last of equals keeps the most.
        return min(fitting[::-1], key=lambda point: point.again_flops)

    def __str__(self) -> str:
        rows = [("memory", "computed again", "", "", "remat=")]
        for point in self.points:
            rows.append(
                (
                    human_bytes(point.total_bytes),
                    f"{point.again_fraction:.1%}",
                    "compiled" if point.compiled else "predicted",
                    "fits" if point.total_bytes <= self.usable_bytes else "too much",
                    remat_code(point.remat),
                )
            )
        # Where nobody knows what memory there is, everything would fit.
        if math.isinf(self.usable_bytes):
            rows = [(*row[:3], row[4]) for row in rows]
        return table(rows, right=(0, 1))

    def svg(self, title: str = "") -> str:
        """A picture: memory along x, what is computed again along y, and the target's memory.

        The picture is the text of an SVG file, which browsers show. Points that are predicted are
        hollow.
        """
        check.text("Frontier.svg", "title", title)
        points = []
        for point in self.points:
            words = remat_words(point.remat)
            points.append((point.total_bytes, point.again_fraction, words, point.compiled))
        return picture(points, self.usable_bytes, title or f"What blocks keep on {self.target}")


def frontier(
    step: Step,
    state: State,
    batch: Any,
    target: "str | Target | None" = None,
    *,
    points: int = 8,
    compiled: bool = False,
    cache: "str | os.PathLike[str] | None" = None,
) -> Frontier:
    """What a step takes and computes again, for the best choices of what its blocks keep.

    The `remat` of the step's own strategy is ignored. Three programs are compiled: one in which
    blocks keep their inputs, one in which they keep every named activation that saves
    recomputation, and one in which they keep everything.

    Args:
        step: what `sl.train_step` gives.
        state: its state, which may be abstract.
        batch: its batch, or the shapes of one.
        target: a machine, as for `sl.plan`; by default the devices of the step's mesh.
        points: how many choices are looked for between the ends.
        compiled: whether all of them are compiled, and not only the ends.
        cache: a folder that keeps what compilers say.
    """
    check_planned("frontier", step, state, cache)
    check.whole("frontier", "points", points, "a number of choices", least=0, most=1000)
    check.boolean("frontier", "compiled", compiled)
    machine = checked_target("frontier", target)
    if step.strategy.pipeline is not None:
        raise ValueError(
            "`frontier` is of steps without `Strategy(pipeline=...)`: there the schedule says how "
            'many microbatches keep what. Plan it with `remat="full"` and `remat="stage"`.'
        )
    step, state = on_target(step, state, machine)
    found = _Search.of(step, state, batch, machine, cache).points(points, compiled)
    place = str(machine or f"{step.strategy.device_mesh.size} devices")
    return Frontier(place, found[0].usable, tuple(_undominated(found)))


class _Choice(NamedTuple):
    """What blocks keep, the bytes of it, and what they compute again in one call of the loss."""

    remat: Any
    estimate: int
    flops: int


class _Measured(NamedTuple):
    """A choice with what it takes, and what the target has."""

    point: FrontierPoint
    usable: float


@dataclass(frozen=True)
class _Search:
    """A step on its target, whose blocks may keep different things."""

    step: Step
    state: State
    batch: Any
    machine: Machine
    layers: Layers
    cache: Any

    @classmethod
    def of(
        cls, step: Step, state: State, batch: Any, target: Target | None, cache: Any
    ) -> "_Search":
        """The step, with the choices for its blocks.

        Choices come from the trace, so that a step without marked blocks is refused before anything
        is compiled.
        """
        try:
            layers = Layers.of(loops_of_step(step, state, batch))
        except NoMarkedBlocksError:
            raise ValueError(
                "`frontier` compares what blocks marked with `sl.remat` may keep, and the loss "
                "calls no such block. Mark the model's blocks, `block = sl.remat(block)`."
            ) from None
        machine = Machine.of(step.strategy.device_mesh, target)
        return cls(step, state, batch, machine, layers, cache)

    def points(self, count: int, compiled: bool) -> list[_Measured]:
        """All points, those that keep the least first.

        Bytes are compiled, or on a line between those that are. What is computed again is counted
        from the program that keeps everything, which comes last.
        """
        choices = self._choices(count)
        # Both ends are always compiled: all others are predicted between them.
        ends = {0, len(choices) - 1}
        known: dict[int, tuple[int, int]] = {}
        numbers = [n for n in range(len(choices)) if compiled or n in ends]
        for done, number in enumerate(numbers):
            known[number] = self._compiled(choices[number].remat, done, len(numbers) + 1)
        everything = self._compiled("none", len(numbers), len(numbers) + 1)
        # What a step computes where nothing runs again is the measure for all others.
        once = everything[1]
        measured = []
        for number, choice in enumerate(choices):
            if number in known:
                size, flops = known[number]
                again = flops - once
            else:
                size = _between(choices, known, choice.estimate)
                again = choice.flops * products_scale(self.step.strategy)
            point = FrontierPoint(choice.remat, size, number in known, again, again / max(1, once))
            measured.append(_Measured(point, self.machine.chip.usable_bytes))
        last = FrontierPoint("none", everything[0], True, 0, 0.0)
        return [*measured, _Measured(last, self.machine.chip.usable_bytes)]

    def _choices(self, count: int) -> list[_Choice]:
        """The best choices for sizes of memory between those of the ends.

        Several sizes may have the same best choice, which is then there once. The last size is
        infinite, so that the end which keeps all that spares anything is always among them.
        """
        most = self.layers.most
        # Even steps in bytes: what has to fit is known in these.
        limits = [most * number / (count + 1) for number in range(count + 1)]
        choices: list[_Choice] = []
        # The last limit is none, since a size at the very end could be missed by a rounding.
        for limit in [*limits, math.inf]:
            remat, estimate, flops = self.layers.best(limit)
            choice = _Choice(plain_remat(remat), estimate, flops)
            if not choices or choice.flops < choices[-1].flops:
                choices.append(choice)
        return choices

    def _compiled(self, remat: Any, number: int, count: int) -> tuple[int, int]:
        """The bytes that a step takes with a value, and its products on all devices."""
        step = with_remat(self.step, remat)
        made = compile_step(step, self.state, self.batch, self.machine, self.cache)
        assert made.flops is not None
        size = made.memory.total_bytes
        say_on_first_process(
            f"{human_bytes(size)} with {remat_code(remat)} ({number + 1} of {count} compiled)"
        )
        return size, made.flops.total


def _between(choices: Sequence[_Choice], known: dict[int, tuple[int, int]], estimate: int) -> int:
    """What a choice takes by the two compiled ones that keep less and more than it.

    >>> choices = [_Choice("full", 0, 9), _Choice("some", 50, 5), _Choice("all", 100, 0)]
    >>> _between(choices, {0: (1000, 0), 2: (1400, 0)}, 50)
    1200
    """
    below = max((n for n in known if choices[n].estimate <= estimate), default=min(known))
    above = min((n for n in known if choices[n].estimate >= estimate), default=max(known))
    low, high = choices[below].estimate, choices[above].estimate
    # At an end, the programs below and above are the same one.
    share = (estimate - low) / max(1, high - low)
    return round(known[below][0] + share * (known[above][0] - known[below][0]))


def _undominated(found: Sequence[_Measured]) -> list[FrontierPoint]:
    """The points that no other one beats, by what they take; with what keeps everything, last.

    Compiled sizes need not grow as estimates do, since compilers pad and copy. So a choice that was
    better by estimates may drop out here.
    """
    *named, everything = [one.point for one in found]
    best: list[FrontierPoint] = []
    for point in sorted(named, key=lambda point: (point.total_bytes, point.again_flops)):
        if not best or point.again_flops < best[-1].again_flops:
            best.append(point)
    return [*best, everything]


def say_on_first_process(text: str) -> None:
    """A line on standard error about work that takes long.

    Only one process of a job says it. Standard output is left to what commands print.
    """
    if jax.process_index() == 0:
        say(text)
