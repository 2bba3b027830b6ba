"""When a compressed exchange pays: by formula, from what it sends and what it reads and writes for
that.
"""

import math
from dataclasses import dataclass

from shardlib._text import human_bytes
from shardlib.checks import _arguments as check
from shardlib.collectives._codecs import Codec, Signs
from shardlib.collectives._compressed import check_codec, pmean_bytes

TOUCHED = 150.0
"""Bytes of its memory that a device reads and writes for each number that it sends in bits, and not
for an exact sum: what the compiler of TPU v5e counts for `pmean` with errors and a mask. It is an
upper bound, part of which stays on the chip."""


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
        where = (
            "whatever the network"
            if math.isinf(self.bandwidth)
            else f"below {human_bytes(round(self.bandwidth))}/s"
        )
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
    tokens: float = 0.0,
    shards: int = 1,
    codec: Codec | None = None,
    flops: float = math.inf,
    memory_bandwidth: float = math.inf,
    itemsize: int = 4,
) -> BreakEven:
    """What a compressed exchange saves in a step.

    Neither it nor the exact one is taken to overlap with anything.

    - `parameters` of the model, of which a worker's `shards` devices (or as many as share the work)
      send a part each.
    - `workers` that exchange, over a network that gives each device `bandwidth` bytes per second.
    - `tokens` of a step on each worker, all microbatches together; they cost 6 FLOPs for each
      parameter.
    - `flops` that a device reaches per second, and `memory_bandwidth` its bytes.
    - `codec`: by default `Signs()`. `itemsize` bytes of what an exact sum sends.

    >>> print(break_even(parameters=1e9, workers=8, shards=8, bandwidth=3e9, memory_bandwidth=8e11))
    0.0 ms to compute; exchanged in 291.7 ms exactly, 32.7 ms compressed: 8.92 times as fast,
    and faster below 33.7 GiB/s
    """
    parameters = check.number(
        "break_even",
        "parameters",
        parameters,
        "a number of parameters",
        above=0,
        most=check.LARGEST,
    )
    workers = check.whole("break_even", "workers", workers, "a number of workers", least=1)
    shards = check.whole("break_even", "shards", shards, "a number of devices", least=1)
    itemsize = check.whole("break_even", "itemsize", itemsize, "a number of bytes", least=1)
    tokens = check.number("break_even", "tokens", tokens, "a number of tokens", least=0)
    rates = {"bandwidth": bandwidth, "flops": flops, "memory_bandwidth": memory_bandwidth}
    for name, value in rates.items():
        check.number("break_even", name, value, "a number per second", above=0, infinite=True)
    codec = Signs() if codec is None else codec
    check_codec("break_even", codec)
    elements = math.ceil(parameters / shards)
    exact = 2 * itemsize * elements * (workers - 1) / workers
    packed = pmean_bytes(elements, workers, codec)
    packing = TOUCHED * elements / memory_bandwidth
    compute = 6 * parameters * tokens / shards / flops
    return BreakEven(
        compute,
        exact / bandwidth,
        packed / bandwidth + packing,
        (exact - packed) / packing if packing else math.inf,
    )
