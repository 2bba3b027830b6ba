"""How fast the steps of a run go, and profiles of some of them."""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardlib.machine._chips import chip_of


@dataclass
class _UnderWay:
    """A step that the devices have been given."""

    result: Any
    ended: float | None = None  # when it was first seen to be ready


class Speed:
    """How fast it goes, from the moments at which steps have ended; what is not training does not
    count.
    """

    def __init__(self, unit: str, flops_per_unit: float | None, strategy: Any) -> None:
        self.unit, self.flops = unit, flops_per_unit
        devices = strategy.device_mesh.devices
        chip = chip_of(devices.flat[0].device_kind)
        dtype = "f32" if strategy.dtypes.compute is None else "bf16"
        self.peak = None if chip is None else chip.flops[dtype] * devices.size
        self.started = False
        self.since: float | None = None
        self.units, self.seconds, self.steps = 0.0, 0.0, 0
        self.under_way: deque[_UnderWay] = deque()

    def begun(self, result: Any) -> None:
        """A step is on the devices, with an array that is ready when it has ended; of those before
        it, note which have.

        Steps are counted later, several at a time; their ends are known best from looking after
        every step.
        """
        self.under_way.append(_UnderWay(result))
        now = time.perf_counter()
        for one in self.under_way:
            if one.ended is None and one.result.is_ready():
                one.ended = now

    def count(self, units: float) -> None:
        """A step has ended; the time of the first, and of one after a pause, is not counted."""
        ended = self.under_way.popleft().ended if self.under_way else None
        now, self.started = time.perf_counter() if ended is None else ended, True
        # Steps that were seen to have ended together with the first took no time after it.
        if self.since is not None and (now > self.since or self.steps):
            self.seconds += now - self.since
            self.units += units
            self.steps += 1
        self.since = now

    def pause(self) -> None:
        """Something else was done since the last step."""
        self.since = None

    def read(self, left: int) -> dict[str, float]:
        """The speed since it was last read."""
        if not self.seconds:
            return {}
        rate, per_step = self.units / self.seconds, self.seconds / self.steps
        self.units, self.seconds, self.steps = 0.0, 0.0, 0
        mfu = {"mfu": rate * self.flops / self.peak} if self.flops and self.peak else {}
        return {f"{self.unit}_per_second": rate, **mfu, "seconds_left": left * per_step}


class Profile:
    """A profile of some steps, for `xprof`, in the folder of the run."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None) -> None:
        if steps is not None and folder is None:
            raise ValueError(
                f"`Loop(profile={steps})` needs a folder for what it writes: "
                "`fit(..., folder=...)`."
            )
        self.first, self.last = (0, 0) if steps is None else (steps[0], steps[0] + steps[1] - 1)
        self.folder = None if folder is None else folder / "profile"
        self.running = False

    def before(self, step: int) -> None:
        if step == self.first and self.folder is not None:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def after(self, step: int, metrics: Any) -> None:
        if self.running and step >= self.last:
            jax.block_until_ready(metrics)
            self._stop()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.running:
            self._stop()

    def _stop(self) -> None:
        self.running = False
        jax.profiler.stop_trace()
