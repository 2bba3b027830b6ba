"""When an exchange that sends less pays, by formula.

    step seconds = seconds to compute + bytes sent / bandwidth + bytes packed / memory bandwidth

Such an exchange sends less, or less often, and to make what it sends it reads and writes more.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardlib._notebook import Shown
from shardlib._text import human_bytes
from shardlib.checks import _arguments as check
from shardlib.collectives._compressed import pmean_bytes
from shardlib.collectives._exact import Exact, Exchange
from shardlib.collectives._exchanges import Compressed, OneBit
from shardlib.collectives._largest import TopK
from shardlib.collectives._low_rank import PowerSGD
from shardlib.collectives._meetings import Meeting
from shardlib.collectives._server import ParameterServer
from shardlib.optimizers._local import Apart, Local
from shardlib.optimizers._rounds import rounds_of

# Bytes of its memory that a device could read and write while it packs and unpacks a number, by
# the seconds that an H200 takes for it: `benchmarks.packing`.
CODE_BYTES = 17.0  # as a code, sent to a server and back
ERROR_BYTES = 17.0  # what codes leave out, where it is kept
FACTOR_BYTES = 50.0  # as a part of a product of factors
# Among which the largest are found. A GPU sorts all of them; a TPU takes a pass.
LARGEST_BYTES = 200.0
# Of a number that is float32 whatever gradients are, unless it is wider.
WIDE_BYTES = 4
# Bytes of a meeting: own parameters, center and momentum, each read and written.
MEETING_BYTES = 24.0


@dataclass(frozen=True)
class BreakEven(Shown):
    """What `break_even` has found of a step, as a mean over steps.

    - `compute_seconds`: of the step without its exchange.
    - `exact_seconds`: of an exact sum.
    - `compressed_seconds`: of the exchange that was asked about, with packing.
    - `bandwidth`: bytes per second of a device below which the latter is faster; 0 if it never is,
      infinite if it always is.
    - `sent_bytes`: what a device sends in a step.
    - `most_bytes`: what it sends in a step that sends most.
    """

    compute_seconds: float
    exact_seconds: float
    compressed_seconds: float
    bandwidth: float
    sent_bytes: float = 0.0
    most_bytes: float = 0.0

    @property
    def speedup(self) -> float:
        """How much faster a compressed step is than one whose exchange is exact."""
        exact = self.compute_seconds + self.exact_seconds
        compressed = self.compute_seconds + self.compressed_seconds
        if exact == compressed:  # both may take no time at all
            return 1.0
        return exact / compressed if compressed else math.inf

    def __str__(self) -> str:
        where = "whatever the network"
        if self.bandwidth == 0:
            return (
                f"{1e3 * self.compute_seconds:.1f} ms to compute; exchanged in "
                f"{1e3 * self.exact_seconds:.1f} ms exactly, {1e3 * self.compressed_seconds:.1f} "
                "ms so: it sends more than an exact sum, and is faster on no network"
            )
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
    exchange: Exchange | None = None,
    memory_bandwidth: float = math.inf,
    itemsize: int = 4,
    width: int | None = None,
    optimizer: Any = None,
    steps: int | None = None,
) -> BreakEven:
    """What an exchange that sends less saves in a step.

    Neither exchange is assumed to overlap with computation.

    Args:
        parameters: the number of parameters of the model.
        workers: the number of workers that exchange gradients.
        bandwidth: the network bandwidth of each device, in bytes per second.
        shards: the number of devices of a worker, each of which sends a part of the gradient.
        compute_seconds: how long the rest of the step takes, measured or estimated: the matrix
            products of a decoder take `6 * parameters * tokens` FLOPs.
        exchange: how gradients are sent, or the moves of workers that train apart; by default in
            one bit. Its axis does not matter.
        memory_bandwidth: the memory bandwidth of a device, in bytes per second, from which the time
            for packing is computed, as measured on a GPU. By default packing costs nothing.
        itemsize: bytes of each number in an exact sum of gradients. Workers that train apart send
            exact moves in float32, or in a wider dtype if `itemsize` is larger.
        width: the number of rows and columns of a matrix, for exchanges that send factors.
        optimizer: an optimizer that decides what is sent in each step, such as
            `sl.optimizers.zero_one_adam`: steps with exact gradients and steps that send nothing
            are then counted. By default every step uses `exchange`.
        steps: the number of steps of the run, for such an optimizer.

    >>> import shardlib as sl
    >>> of = dict(parameters=1e9, workers=8, shards=8, bandwidth=3e9, memory_bandwidth=8e11)
    >>> print(break_even(**of))
    0.0 ms to compute; exchanged in 291.7 ms exactly, 14.6 ms compressed: 20.02 times as fast,
    and faster below 148.5 GiB/s
    >>> apart = break_even(**of, exchange=sl.collectives.DiLoCo("pod", every=500))
    >>> apart.most_bytes / apart.sent_bytes
    500.0
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
    takes = 'an exchange, such as `sl.collectives.OneBit("pod")`, or None'
    if exchange is None:
        exchange = OneBit("data")
    check.kind(name, "exchange", exchange, Exchange, takes)
    width = check.whole(name, "width", width, "a number of rows", least=1, optional=True)

    # Each device of a worker exchanges its own part of the gradient.
    elements = math.ceil(parameters / shards)
    exact_bytes = _summed(elements, workers, itemsize)
    cost = _cost(exchange, elements, workers, itemsize, width)
    often = _how_often(exchange, optimizer, steps)
    exact_round = exact_bytes
    if isinstance(optimizer, Apart):
        exact_round = _summed(elements, workers, max(itemsize, WIDE_BYTES))
    sent = often.coded * cost.sent + often.exact * exact_round
    packed = often.coded * cost.packed
    packing_seconds = packed / memory_bandwidth
    # At this bandwidth, what is saved on the wire is what packing costs.
    equal_at = math.inf
    is_exact = sent == exact_bytes and not packed
    if sent >= exact_bytes and not is_exact:
        equal_at = 0.0
    elif packing_seconds:
        equal_at = (exact_bytes - sent) / packing_seconds
    portions = exchange.fragments if isinstance(exchange, Meeting) else 1
    return BreakEven(
        compute_seconds=compute_seconds,
        exact_seconds=exact_bytes / bandwidth,
        compressed_seconds=sent / bandwidth + packing_seconds,
        bandwidth=equal_at,
        sent_bytes=sent,
        most_bytes=max(cost.sent / portions, exact_round if often.exact else 0.0),
    )


class _HowOften(NamedTuple):
    """In which part of the steps something is sent: as the exchange has it, and exactly."""

    coded: float
    exact: float


def _how_often(exchange: Exchange, optimizer: Any, steps: Any) -> _HowOften:
    """How often something is sent, as the exchange or an optimizer says it."""
    if optimizer is None:
        if steps is not None:
            raise ValueError(
                f"`break_even(steps={check.shown(steps)})` is for an optimizer whose steps differ, "
                "such as `optimizer=sl.optimizers.zero_one_adam(...)`. Leave it out."
            )
        return _HowOften(1 / exchange.every if isinstance(exchange, Meeting) else 1.0, 0.0)
    takes = "one that says what is sent, such as `sl.optimizers.zero_one_adam(...)`, or None"
    check.kind("break_even", "optimizer", optimizer, Local | Apart, takes)
    takes = "the steps of the run, of which the optimizer's freeze is a part"
    steps = check.whole("break_even", "steps", steps, takes, least=1)
    if not isinstance(exchange, Compressed):
        raise ValueError(
            f"`break_even(optimizer=..., exchange={exchange})`: such an optimizer goes with an "
            'exchange of codes, `exchange=sl.collectives.OneBit("pod")`.'
        )
    rounds = rounds_of(optimizer, steps)
    return _HowOften((rounds.coded + rounds.both) / steps, (rounds.exact + rounds.both) / steps)


class _Cost(NamedTuple):
    """What an exchange of all parameters costs a device, in bytes."""

    sent: float
    packed: float  # read and written


def _summed(elements: float, workers: int, itemsize: int) -> float:
    """What a device sends for an exact sum: a scatter and a gather, of (n - 1) / n each."""
    return 2 * itemsize * elements * (workers - 1) / workers


def _cost(
    exchange: Exchange, elements: int, workers: int, itemsize: int, width: int | None
) -> _Cost:
    """What an exchange costs each time, of a device's part of all parameters."""
    match exchange:
        case Meeting():
            # What is sent exactly is how far workers have moved, and no gradient.
            cost = _cost(exchange.by, elements, workers, max(itemsize, WIDE_BYTES), width)
            return _Cost(cost.sent, cost.packed + MEETING_BYTES * elements)
        case Exact() | ParameterServer():
            # A server is sent a gradient, and sends parameters, but for a device's own part.
            return _Cost(_summed(elements, workers, itemsize), 0.0)
        case Compressed():
            sent = pmean_bytes(elements, workers, exchange.codec)
            packed = CODE_BYTES + ERROR_BYTES * exchange.feedback
            return _Cost(sent, packed * elements)
        case TopK():
            sent = (workers - 1) * 8 * exchange.count(elements)
            return _Cost(sent, LARGEST_BYTES * elements)
        case PowerSGD():
            if width is None:
                raise ValueError(
                    f"`break_even(exchange={exchange})` depends on how large matrices are: say how "
                    "many rows and columns they have, `width=4096`."
                )
            if exchange.rank * 2 * width >= width**2:
                # Factors would not be smaller than the matrix, which is then summed exactly.
                return _Cost(_summed(elements, workers, itemsize), 0.0)
            # Factors are float32 whatever gradients are.
            sent = _summed(elements * 2 * exchange.rank / width, workers, WIDE_BYTES)
            return _Cost(sent, FACTOR_BYTES * elements)
    raise ValueError(
        f"`break_even(exchange={exchange})`: it is not known what it sends. A plan of a "
        "step reads that off the compiled program: `sl.plan`."
    )
