"""How fast the steps of a run go, and profiles of some of them.

The host gives steps to the devices ahead of time, and learns late that one has ended. It therefore
looks after every step which of those under way are ready, and notes the time. A step's time is
that from the end of the step before it to its own:

    begun(1)  begun(2)  begun(3)  count(1)  begun(4)  count(2) ...     in the host's order
                  |         |
                  `- 1 ready `- 2 ready: step 2 took the time between
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardlib.machine._chips import chip_of


@dataclass
class _UnderWay:
    """A step that the devices have been given, with an array that is ready when it has ended."""

    result: Any
    ended: float | None = None  # when it was first seen to be ready


class Speed:
    """How fast a run trains, from the moments at which its steps have ended.

    `begun` is called for every step in order, later `count` for each in the same order, and `read`
    gives the speed since the last `read`. The first step, which is compiled, does not count, nor
    does what happens between a `pause` and the end of the next step. `peak` is the FLOPs a second
    of all devices together, by their datasheet, or None where that is not known.
    """

    def __init__(self, unit: str, flops_per_unit: float | None, strategy: Any) -> None:
        self.unit, self.flops = unit, flops_per_unit
        devices = strategy.device_mesh.devices
        chip = chip_of(devices.flat[0].device_kind)
        dtype = "f32" if strategy.dtypes.compute is None else "bf16"
        self.peak: float | None = None
        if chip is not None:
            self.peak = chip.flops[dtype] * devices.size
        self.started = False
        # When the step before the next to be counted ended; None if that says nothing of its time.
        self.since: float | None = None
        # Since the speed was last read.
        self.units, self.seconds, self.steps = 0.0, 0.0, 0
        self.under_way: deque[_UnderWay] = deque()

    def begun(self, result: Any) -> None:
        """Note a step that was given to the devices, and which of those before it have ended.

        `result` is an array of the step, ready when it has ended. Steps are counted later, several
        at a time; their ends are known best from looking after every step.
        """
        self.under_way.append(_UnderWay(result))
        now = time.perf_counter()
        for step in self.under_way:
            if step.ended is None and step.result.is_ready():
                step.ended = now

    def count(self, units: float) -> None:
        """Count the oldest step under way, which has ended, with the weight of its batch.

        The time of the first step, and of one after a pause, is not counted.
        """
        ended = None
        if self.under_way:
            ended = self.under_way.popleft().ended
        if ended is None:  # nobody has looked since it ended, which was hence just now
            ended = time.perf_counter()
        self.started = True
        # Steps that were seen to have ended together with the first took no time after it.
        if self.since is not None and (ended > self.since or self.steps):
            self.seconds += ended - self.since
            self.units += units
            self.steps += 1
        self.since = ended

    def pause(self) -> None:
        """Leave out the time since the last step, in which something else was done."""
        self.since = None

    def read(self, left: int) -> dict[str, float]:
        """The speed since it was last read, by the names that records have.

        `left` steps are to come, and the seconds they will take are among the numbers. The result
        is empty if no step was counted.
        """
        # Steps that ended within one tick of the clock have no speed either.
        if not self.seconds:
            return {}
        rate, per_step = self.units / self.seconds, self.seconds / self.steps
        self.units, self.seconds, self.steps = 0.0, 0.0, 0
        speed = {f"{self.unit}_per_second": rate}
        if self.flops and self.peak:
            speed["mfu"] = rate * self.flops / self.peak
        speed["seconds_left"] = left * per_step
        return speed


class Profile:
    """A profile of some steps, for `xprof`, in the folder of the run.

    `steps` is the first step and the number of them, or None for no profile. It is a context
    manager, so that a profile under way is written even if the run ends within it.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None) -> None:
        if steps is not None and folder is None:
            raise ValueError(
                f"`Loop(profile={steps})` needs a folder for what it writes: "
                "`fit(..., folder=...)`."
            )
        # Steps are counted from one, so none is step 0.
        self.first, self.last = 0, 0
        if steps is not None:
            self.first, self.last = steps[0], steps[0] + steps[1] - 1
        self.folder: Path | None = None
        if folder is not None:
            self.folder = folder / "profile"
        self.running = False

    def before(self, step: int) -> None:
        """Begin the profile, if this step is its first."""
        if step == self.first and self.folder is not None:
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def after(self, step: int, metrics: Any) -> None:
        """End the profile if this step is its last, once the devices have taken it."""
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
