"""ZB-V, made in rounds: each stage goes backward, then forward, and gradients of weights fill the
time that it would wait.

Two parts on each stage, part s and part 2S - 1 - s. A pass through a stage's first part, on the way
there, is said here with a 0, one through its second, on the way back, with a 1. `B1` is thus the
first to come backward.
"""

from collections import deque

from shardlib.pipeline.schedules._simulate import Costs
from shardlib.pipeline.schedules._table import Kind, Op, Table

_SLACK = 1e-9


def rounds(stages: int, microbatches: int, limit: float, costs: Costs) -> Table:
    """The schedule in which no stage ever holds more than `limit` microbatches' activations."""
    best = min(
        (
            _Rounds(stages, microbatches, limit, costs, *fills)
            for fills in ((True, True), (False, False))
        ),
        key=lambda made: max(now - first for now, first in zip(made.now, made.first, strict=True)),
    )
    return Table(tuple(map(tuple, best.orders)), best.placement)


class _Rounds:
    def __init__(
        self,
        stages: int,
        microbatches: int,
        limit: float,
        costs: Costs,
        backward: bool,
        forward: bool,
    ) -> None:
        self.stages, self.microbatches, self.limit, self.costs = stages, microbatches, limit, costs
        self.placement = (*range(stages), *reversed(range(stages)))
        shape: list[tuple[Op, ...]] = [
            tuple(
                Op(kind, 0, part)
                for part in (stage, 2 * stages - 1 - stage)
                for kind in ("F", "B", "W")
            )
            for stage in range(stages)
        ]
        # Of one microbatch: who waits for whom, and what takes how long.
        self.table = Table(tuple(shape), self.placement)
        self.orders: list[list[Op]] = [[] for _ in range(stages)]
        self.end: dict[Op, float] = {}
        self.now, self.held, self.waited = ([0.0] * stages for _ in range(3))
        self.first = [0.0] * stages
        self.pending: list[deque[Op]] = [deque() for _ in range(stages)]
        self.done = [{"F0": 0, "F1": 0, "B0": 0, "B1": 0} for _ in range(stages)]
        self._begin()
        self._even_out()
        for _ in range(2 * microbatches):
            self._backward_round(backward)
            self._forward_round(forward)
        for stage in range(stages):
            while self.pending[stage]:
                self._weights(stage)

    def _next(self, stage: int, name: str) -> Op | None:
        """The next pass of a name, if there is one more."""
        kind: Kind = "F" if name[0] == "F" else "B"
        part = stage if name[1] == "0" else 2 * self.stages - 1 - stage
        return (
            Op(kind, self.done[stage][name], part)
            if self.done[stage][name] < self.microbatches
            else None
        )

    def _can(self, stage: int, name: str) -> bool:
        """Whether it is known when the next pass of a name can start."""
        op = self._next(stage, name)
        return op is not None and all(one in self.end for one in self.table.before(op))

    def _arrival(self, op: Op) -> float:
        stage = self.placement[op.part]
        return max(
            (
                self.end[one] + self.costs.send * (self.placement[one.part] != stage)
                for one in self.table.before(op)
            ),
            default=0.0,
        )

    def _add(self, stage: int, op: Op, start: float) -> None:
        if not self.orders[stage]:
            self.first[stage] = start
        self.orders[stage].append(op)
        self.now[stage] = self.end[op] = start + self.costs.of(self.table, op)
        self.held[stage] += {"F": 1.0, "B": self.costs.kept - 1.0, "W": -self.costs.kept}[
            op.kind
        ] / 2

    def _put(self, stage: int, name: str) -> None:
        op = self._next(stage, name)
        assert op is not None
        start = max(self.now[stage], self._arrival(op))
        self.waited[stage] += start - self.now[stage] if self.orders[stage] else 0.0
        self._add(stage, op, start)
        self.done[stage][name] += 1
        if op.kind == "B":
            self.pending[stage].append(op)

    def _weights(self, stage: int) -> None:
        self._add(stage, self.pending[stage].popleft()._replace(kind="W"), self.now[stage])

    def _put_in_time(self, stage: int, name: str, fill: bool) -> None:
        """A pass, and before it gradients of weights: to make room, where it would wait as long, or
        nearly.
        """
        op = self._next(stage, name)
        assert op is not None
        takes = self.costs.of(self.table, Op("W", 0, op.part))
        while (
            self.pending[stage] and name[0] == "F" and self.held[stage] + 0.5 > self.limit + _SLACK
        ):
            self._weights(stage)
        arrival = self._arrival(op)
        while self.pending[stage] and arrival >= self.now[stage] + takes - _SLACK:
            self._weights(stage)
        most = max(self.waited) - self.waited[stage]
        if fill and self.pending[stage] and arrival - self.now[stage] > most + _SLACK:
            self._weights(stage)
        self._put(stage, name)

    def _begin(self) -> None:
        """The first microbatch there and back; meanwhile others go there, with room left for all to
        come back.
        """
        for stage in range(self.stages):
            self._put(stage, "F0")
        for stage in reversed(range(self.stages)):
            back = self._next(stage, "F1")
            assert back is not None
            takes = self.costs.of(self.table, Op("F", 0, stage))
            while (
                stage < self.stages - 1
                and self.held[stage] + 1 + stage <= self.limit + _SLACK
                and self.now[stage] + takes <= self._arrival(back) + _SLACK
                and self._next(stage, "F0")
            ):
                for one in range(stage + 1):
                    self._put(one, "F0")
            self._put(stage, "F1")

    def _even_out(self) -> None:
        """No stage has gone forward less often than the one before it, before any goes backward
        again.
        """
        turn = 0
        for stage in range(1, self.stages):
            behind = lambda stage=stage: (  # noqa: E731
                sum(self.done[stage][name] for name in ("F0", "F1"))
                < sum(self.done[stage - 1][name] for name in ("F0", "F1"))
                or self.done[stage]["F1"] <= self.done[stage - 1]["F1"] < self.microbatches
            )
            while behind():
                for one in reversed(range(stage, self.stages)):
                    if self._can(one, f"F{turn}"):
                        self._put(one, f"F{turn}")
                turn = 1 - turn

    def _backward_round(self, fill: bool) -> None:
        there, back = [], []
        for stage, done in enumerate(self.done):
            if done["B1"] < self.microbatches and not self._can(stage, "B0"):
                back.append(stage)
            elif done["B0"] < self.microbatches:
                there.append(stage)
        for stage in reversed(there):
            self._put_in_time(stage, "B0", fill)
        for stage in back:
            self._put_in_time(stage, "B1", fill)

    def _forward_round(self, fill: bool) -> None:
        for stage in range(self.stages):
            if self._can(stage, "F1"):
                self._put_in_time(stage, "F1", fill)
            elif self._can(stage, "F0"):
                self._put_in_time(stage, "F0", fill)
