"""Where a loss or a batch is not finite, in words: the example, the microbatch, the devices and
their processes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib._tree import named_leaves
from shardlib.step._strategy import Strategy

_MOST_DEVICES = 8
"""So many devices are listed; a worker may have thousands."""


def describe_losses(count: int, number: int, strategy: Strategy) -> str:
    """Of how many microbatches the loss is not finite, and on which devices a single one was
    computed.

    `number` counts microbatches worker by worker: a worker is what has examples of its own, a
    device or several.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data, accumulate=2)
    >>> describe_losses(1, 5, strategy)
    'the loss is not finite in microbatch 1 on devices 4, 5 of process 0'
    >>> describe_losses(3, -1, strategy)
    'the loss is not finite in 3 of the 8 microbatches of all devices'
    >>> describe_losses(0, -1, strategy)
    'the loss itself is finite on all devices'
    """
    axes, mesh = strategy.data_axes, strategy.device_mesh
    workers = math.prod(mesh.shape[axis] for axis in axes)
    microbatches = workers * strategy.microbatches
    if not count:
        return "the loss itself is finite on all devices"
    if microbatches == 1:
        return "the loss is not finite"
    if count > 1:
        return (
            f"the loss is not finite in {count} of the {microbatches} microbatches of all devices"
        )
    worker, microbatch = divmod(number, strategy.microbatches)
    others = [axis for axis in mesh.axis_names if axis not in axes]
    dims = [mesh.axis_names.index(axis) for axis in (*axes, *others)]
    devices = mesh.devices.transpose(dims).reshape(workers, -1)[worker]
    within = f"microbatch {microbatch} on " if strategy.microbatches > 1 else "the examples on "
    return f"the loss is not finite in {within}{_listed_by_process(devices)}"


def _listed_by_process(devices: Sequence[Any]) -> str:
    """The numbers of devices and their processes, the first of many."""
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


def describe_nonfinite(batch: Any, strategy: Strategy) -> str:
    """The first numbers of a batch, among those that this process holds, that are not finite;
    nothing if all are.

    >>> import jax.numpy as jnp, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, accumulate=2)
    >>> describe_nonfinite({"x": jnp.zeros((16, 4)).at[3, 1].set(jnp.nan)}, strategy)
    '`x` of the batch is not finite in example 3, microbatch 1 on device 0 of process 0'
    """
    sizes = strategy.device_mesh.shape
    workers = math.prod(sizes[axis] for axis in strategy.data_axes)
    for path, leaf in named_leaves(batch):
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        for shard in leaf.addressable_shards:
            finite = np.isfinite(
                np.asarray(shard.data, np.complex64 if jnp.iscomplexobj(leaf) else np.float32)
            )
            rows = np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1))
            if rows.size:
                example = (shard.index[0].start or 0) + int(rows[0])
                microbatch = example % (leaf.shape[0] // workers) % strategy.microbatches
                where = f"device {shard.device.id} of process {shard.device.process_index}"
                within = (
                    f"microbatch {microbatch} on {where}" if strategy.microbatches > 1 else where
                )
                what = f"`{path}` of the batch" if path else "the batch"
                return f"{what} is not finite in example {example}, {within}"
    return ""
