"""What each stage of ZeRO would cost a step, by formula: what it sends, against what it holds."""

import math
from dataclasses import dataclass

import jax

from shardlib._tree import named_leaves
from shardlib.layouts._rules import spec_axes
from shardlib.step._state import State
from shardlib.step._strategy import Strategy


@dataclass(frozen=True)
class Price:
    """What a stage of ZeRO costs in a step.

    That is the bytes that a device sends over the axes of data, and what it holds besides what is
    at rest.

    `held_bytes` are of copies of parameters and sums of gradients; stage 3 holds a layer at a time
    besides.
    """

    stage: int
    sent_bytes: int
    held_bytes: int
    chosen: bool


def prices(state: State, strategy: Strategy) -> tuple[Price, ...]:
    """Of a step under ZeRO, what its own stage costs, and what the other stages would."""
    zero, dtypes, count = strategy.sharding, strategy.dtypes, strategy.microbatches
    if not zero.stage:
        return ()
    mesh_shape = strategy.device_mesh.shape
    sent, held = dict.fromkeys((1, 2, 3), 0.0), dict.fromkeys((1, 2, 3), 0.0)
    splits = state.layout.splits(state.params)
    for path, leaf in named_leaves(state.params):
        split = splits[path]
        if split.dim is None:
            continue
        devices = math.prod(mesh_shape[axis] for axis in split.axes)
        others = math.prod(
            mesh_shape[axis] for axis in spec_axes(split.spec) if axis not in split.axes
        )
        size = leaf.size / others
        compute = dtypes.of(path, leaf.dtype)
        weight, wire = size * compute.itemsize, size * dtypes.reduced(leaf.dtype).itemsize
        summed = dtypes.accumulated(compute) if count > 1 else jax.numpy.dtype(compute)
        travelled = (devices - 1) / devices
        sent[1] += travelled * (weight + wire)
        sent[2] += travelled * (weight + count * wire)
        sent[3] += travelled * count * (2 * weight + wire)
        held[1] += weight + size * summed.itemsize
        part = (
            wire if count == 1 else size * dtypes.accumulated(dtypes.reduced(leaf.dtype)).itemsize
        )
        held[2] += weight + part / devices
        held[3] += part / devices
    # The others would send in every tick, and are refused.
    stages = (1, 2, 3) if strategy.pipeline is None else (1,)
    return tuple(
        Price(stage, round(sent[stage]), round(held[stage]), stage == zero.stage)
        for stage in stages
    )
