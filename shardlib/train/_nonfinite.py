"""Where a loss or a batch is not finite, in words for notes and errors.

What is named is what a person needs to find the cause: the example, the microbatch, the devices
and their processes. A *worker* is what has examples of its own: one device, or several which
compute the same examples together. Each worker cuts its part of the batch into microbatches.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib._tree import named_leaves
from shardlib.layouts._specs import axes_without, parts_over
from shardlib.machine._agreement import gather_texts
from shardlib.step._strategy import Strategy

_MOST_DEVICES = 8
"""So many devices are listed; a worker may have thousands."""


class NonfiniteError(FloatingPointError):
    """A run ends since gradients were not finite, and not for an error of the user's functions."""


def describe_losses(count: int, number: int, strategy: Strategy) -> str:
    """In how many microbatches the loss is not finite, and on which devices a single one was.

    `count` is that number of microbatches. `number` says which, if it is one: they are counted
    worker by worker.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data, accumulate=2)
    >>> describe_losses(1, 5, strategy)
    'the loss is not finite in microbatch 1 on devices 4, 5 of process 0'
    >>> describe_losses(3, -1, strategy)
    'the loss is not finite in 3 of the 8 microbatches of all devices'
    >>> describe_losses(0, -1, strategy)
    'the loss itself is finite on all devices'
    """
    workers = _count_workers(strategy)
    microbatches = workers * strategy.microbatches
    if not count:
        return "the loss itself is finite on all devices"
    if microbatches == 1:
        return "the loss is not finite"
    if count > 1:
        return (
            f"the loss is not finite in {count} of the {microbatches} microbatches of all devices"
        )
    # Microbatches are counted worker by worker, so that a quotient names the worker.
    worker, microbatch = divmod(number, strategy.microbatches)
    part = "the examples on "
    if strategy.microbatches > 1:
        part = f"microbatch {microbatch} on "
    return f"the loss is not finite in {part}{_listed_by_process(_devices_of(worker, strategy))}"


def _count_workers(strategy: Strategy) -> int:
    """How many workers a strategy's mesh has: the product of its data axes."""
    sizes = strategy.device_mesh.shape
    return parts_over(sizes, strategy.data_axes)


def _devices_of(worker: int, strategy: Strategy) -> Sequence[Any]:
    """The devices that compute the examples of one worker.

    The data axes are moved before the others, so that the mesh becomes a table with a row for each
    worker.
    """
    mesh = strategy.device_mesh
    other_axes = axes_without(mesh.axis_names, strategy.data_axes)
    dims = [mesh.axis_names.index(axis) for axis in (*strategy.data_axes, *other_axes)]
    return mesh.devices.transpose(dims).reshape(_count_workers(strategy), -1)[worker]


def _listed_by_process(devices: Sequence[Any]) -> str:
    """The numbers of devices, grouped by their processes; of many devices the first few."""
    # In the order of the mesh, in which the devices of one process follow each other.
    shown = devices[:_MOST_DEVICES]
    by_process: dict[int, list[str]] = {}
    for device in shown:
        by_process.setdefault(device.process_index, []).append(str(device.id))
    parts: list[str] = []
    for process, numbers in by_process.items():
        kind = "device" if len(numbers) == 1 else "devices"
        parts.append(f"{kind} {', '.join(numbers)} of process {process}")
    if len(devices) > len(shown):
        parts.append(f"{len(devices) - len(shown)} more")
    return " and ".join(parts)


def gather_nonfinite(batch: Any, strategy: Strategy) -> str:
    """What each process sees of a batch that is not finite, each text after a semicolon.

    It is the end of a note, and empty if all is finite. Every process calls it.
    """
    remark = ""
    for text in gather_texts(describe_nonfinite(batch, strategy)):
        if text:
            remark += f"; {text}"
    return remark


def describe_nonfinite(batch: Any, strategy: Strategy) -> str:
    """The first example of a batch that is not finite, with its microbatch and device.

    Each process looks at the shards that it holds, in the order of the batch's leaves. The text is
    empty if all their numbers are finite.

    >>> import jax.numpy as jnp, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, accumulate=2)
    >>> describe_nonfinite({"x": jnp.zeros((16, 4)).at[3, 1].set(jnp.nan)}, strategy)
    '`x` of the batch is not finite in example 3, microbatch 1 on device 0 of process 0'
    """
    for path, leaf in named_leaves(batch):
        # Whole numbers, tokens for instance, are always finite.
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        for shard in leaf.addressable_shards:
            row = _first_nonfinite_row(shard.data)
            if row is None:
                continue
            # A shard that is not split has a slice without a start.
            example = (shard.index[0].start or 0) + row
            where = _place_of(example, len(leaf), shard.device, strategy)
            what = "the batch"
            if path:
                what = f"`{path}` of the batch"
            return f"{what} is not finite in example {example}, {where}"
    return ""


def _place_of(example: int, examples: int, device: Any, strategy: Strategy) -> str:
    """Where an example of a batch of so many is: its device, and its microbatch of several.

    Args:
        example: its number in the batch.
        examples: how many the batch has.
        device: the device that holds it, by number.
        strategy: it says how many microbatches there are.
    """
    where = f"device {device.id} of process {device.process_index}"
    if strategy.microbatches == 1:
        return where
    # A worker deals its examples to its microbatches in turn.
    in_worker = example % (examples // _count_workers(strategy))
    return f"microbatch {in_worker % strategy.microbatches} on {where}"


def _first_nonfinite_row(data: jax.Array) -> int | None:
    """The first index along the first dim at which some number is not finite, or None."""
    numbers = np.asarray(data)
    # Small dtypes, bfloat16 say, become float32, which holds their values exactly. It does not hold
    # those of 64 bits: a large one would become infinite.
    if numbers.dtype.itemsize < 4:
        numbers = numbers.astype(np.float32)
    finite = np.isfinite(numbers)
    rows = np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1))
    if not rows.size:
        return None
    return int(rows[0])


def describe_bad_end(count: int, done: int, strategy: Strategy) -> str:
    """Why a run ended whose last `count` gradients, up to that of step `done`, were not finite.

    Its parameters may be to blame, since nobody has seen a finite gradient of them.
    """
    steps = f"{count} steps, up to {done},"
    if count == 1:
        steps = f"step, {done}"
    what = f"The run ended badly: the last {steps} had a gradient that is not finite"
    if strategy.skips:
        why = (
            " and left the parameters as they were, which may be no good either. If a batch is "
            f"to blame and not they, let the run have another step, `Loop(steps={done + 1})`."
        )
    else:
        why = (
            ' and went into the parameters all the same: `Strategy(nonfinite="skip")` leaves '
            "such steps out."
        )
    return what + why
