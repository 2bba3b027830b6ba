"""Buffers of a stage: lists of arrays with a slot for everything that waits, read and written.

A buffer is a list of arrays. The first dim of each is the slot; in buffers that hold something of
every layer of a part, the second is the layer:

    activations, gradients    [slot, ...]
    kept, left                [slot, layer, ...]

Everything here returns new lists, as JAX has it; within a program that is compiled the writes are
in place.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardlib.pipeline._loop import Arrays

Buffers = dict[str, Any]


def empty(shapes: Sequence[Any], slots: int, *more: int) -> Arrays:
    """A buffer of so many slots for arrays of some shapes, with `more` dims after the slots.

    A buffer of no slots has no arrays.
    """
    if not slots:
        return []
    buffer = []
    for shape in shapes:
        buffer.append(jnp.zeros((slots, *more, *shape.shape), shape.dtype))
    return buffer


def zeros(shapes: Sequence[Any]) -> Arrays:
    """Zeros of some shapes and dtypes."""
    return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]


def read_slot(buffer: Arrays, slot: Any) -> Arrays:
    """What a slot holds."""
    return [lax.dynamic_index_in_dim(x, slot, keepdims=False) for x in buffer]


def with_slot(buffer: Arrays, slot: Any, values: Arrays) -> Arrays:
    """The buffer with values in a slot."""
    updated = []
    for x, new in zip(buffer, values, strict=True):
        updated.append(lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, 0))
    return updated


def read_layer(buffer: Arrays, slot: Any, layer: Any) -> Arrays:
    """What a slot holds of one layer."""
    # Slot and layer are traced numbers: one slice for both, rather than a slot first, which would
    # be copied whole.
    values = []
    for x in buffer:
        start = (slot, layer, *([0] * (x.ndim - 2)))
        values.append(lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]))[0, 0])
    return values


def with_layer(buffer: Arrays, slot: Any, layer: Any, values: Arrays) -> Arrays:
    """The buffer with the values of one layer in a slot.

    Args:
        buffer: arrays of slots, and within a slot of layers.
        slot: the slot of a microbatch.
        layer: the number of the layer within its part.
        values: the layer's arrays.
    """
    updated = []
    for x, new in zip(buffer, values, strict=True):
        start = (slot, layer, *([0] * (x.ndim - 2)))
        updated.append(lax.dynamic_update_slice(x, new.astype(x.dtype)[None, None], start))
    return updated


def with_loop(buffers: Buffers, name: str, loop: int, buffer: Arrays) -> Buffers:
    """All buffers, with another one for one of the loops; `name` has a buffer for each loop.

    Args:
        buffers: the buffers of a stage, by name.
        name: `kept` or `left`, of which each loop has its own.
        loop: the number of the loop.
        buffer: its new buffer.
    """
    return buffers | {name: [*buffers[name][:loop], buffer, *buffers[name][loop + 1 :]]}


def rows_of(arrays: Arrays, first: Any, count: int) -> Arrays:
    """So many rows of each array, from a first one on."""
    return [lax.dynamic_slice_in_dim(x, first, count) for x in arrays]


def with_rows(arrays: Arrays, first: Any, rows: Arrays) -> Arrays:
    """The arrays with other rows from a first one on."""
    updated = []
    for x, new in zip(arrays, rows, strict=True):
        updated.append(lax.dynamic_update_slice_in_dim(x, new, first, 0))
    return updated


def replaced(arrays: Sequence[Any], positions: Sequence[int], values: Arrays) -> Arrays:
    """The arrays as a list, with other values at some positions."""
    updated = list(arrays)
    for k, value in zip(positions, values, strict=True):
        updated[k] = value
    return updated


def split_differentiable(
    arrays: Arrays, differentiable: Sequence[bool]
) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
    """The differentiable ones of some arrays, and a function that puts others in their place.

    The function gives the whole list again. It is for `jax.vjp`, which takes no integers.
    """
    # The others, integers, are captured by the function as they are.
    positions = [k for k, flag in enumerate(differentiable) if flag]
    return [arrays[k] for k in positions], partial(replaced, arrays, positions)
