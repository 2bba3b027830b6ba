"""When a compressed exchange pays, by formula.

    step seconds = seconds to compute + bytes sent / bandwidth + bytes packed / memory bandwidth

A compressed exchange sends less and, to pack its codes, reads and writes more.
"""

import math
from dataclasses import dataclass

from shardlib._text import human_bytes
from shardlib.checks import _arguments as check
from shardlib.collectives._codecs import Codec, Signs
from shardlib.collectives._compressed import check_codec, pmean_bytes

# Bytes of its memory that a device reads and writes for each number that it sends in bits, and not
# for an exact sum: what the compiler of TPU v5e counts for `pmean` with errors and a mask. It is an
# upper bound, part of which stays on the chip.
PACKED_BYTES = 150.0


@dataclass(frozen=True)
class BreakEven:
    """Seconds of a step and its exchange, exact and compressed.

    With them the bandwidth at which the two are equal.
    """

    compute_seconds: float
    exact_seconds: float
    compressed_seconds: float
    bandwidth: float  # bytes per second of a device, below which compression wins

    @property
    def speedup(self) -> float:
        """How much faster a compressed step is than one whose exchange is exact."""
        return (self.compute_seconds + self.exact_seconds) / (
            self.compute_seconds + self.compressed_seconds
        )

    def __str__(self) -> str:
        where = "whatever the network"
        if not math.isinf(self.bandwidth):
            where = f"below {human_bytes(round(self.bandwidth))}/s"
        return (
            f"{1e3 * self.compute_seconds:.1f} ms to compute; exchanged in "
            f"{1e3 * self.exact_seconds:.1f} ms exactly, {1e3 * self.compressed_seconds:.1f} ms "
            f"compressed: {self.speedup:.2f} times as fast, and faster {where}"
        )


def break_even(
    *,
    parameters: float,
    workers: int,
    bandwidth: float,
    shards: int = 1,
    compute_seconds: float = 0.0,
    codec: Codec | None = None,
    memory_bandwidth: float = math.inf,
    itemsize: int = 4,
) -> BreakEven:
    """What a compressed exchange saves in a step.

    Neither it nor the exact one is taken to overlap with anything.

    Args:
        parameters: of the model.
        workers: how many exchange gradients.
        bandwidth: bytes per second that the network gives each device.
        shards: devices of a worker, which send a part of the gradient each.
        compute_seconds: what the rest of the step takes, measured or estimated: a decoder's
            products take `6 * parameters * tokens` FLOPs.
        codec: how numbers are compressed, by default `Signs()`.
        memory_bandwidth: bytes per second of a device's memory; by default packing costs nothing.
        itemsize: bytes of each number in an exact sum.

    >>> print(break_even(parameters=1e9, workers=8, shards=8, bandwidth=3e9, memory_bandwidth=8e11))
    0.0 ms to compute; exchanged in 291.7 ms exactly, 32.7 ms compressed: 8.92 times as fast,
    and faster below 33.7 GiB/s
    """
    name = "break_even"
    takes = "a number of parameters"
    check.number(name, "parameters", parameters, takes, above=0, most=check.LARGEST)
    workers = check.whole(name, "workers", workers, "a number of workers", least=1)
    shards = check.whole(name, "shards", shards, "a number of devices", least=1)
    itemsize = check.whole(name, "itemsize", itemsize, "a number of bytes", least=1)
    check.number(name, "compute_seconds", compute_seconds, "a number of seconds", least=0)
    for argument, rate in (("bandwidth", bandwidth), ("memory_bandwidth", memory_bandwidth)):
        check.number(name, argument, rate, "a number per second", above=0, infinite=True)
    codec = Signs() if codec is None else codec
    check_codec(name, codec)

    # Each device of a worker exchanges its own part of the gradient.
    elements = math.ceil(parameters / shards)
    # A sum over n workers is a scatter and a gather, of (n - 1) / n of the array each.
    exact_bytes = 2 * itemsize * elements * (workers - 1) / workers
    compressed_bytes = pmean_bytes(elements, workers, codec)
    packing_seconds = PACKED_BYTES * elements / memory_bandwidth
    # At this bandwidth, what is saved on the wire is what packing costs.
    equal_at = math.inf
    if packing_seconds:
        equal_at = (exact_bytes - compressed_bytes) / packing_seconds
    return BreakEven(
        compute_seconds=compute_seconds,
        exact_seconds=exact_bytes / bandwidth,
        compressed_seconds=compressed_bytes / bandwidth + packing_seconds,
        bandwidth=equal_at,
    )
