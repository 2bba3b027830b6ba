"""The buffers of a stage, in which arrays wait for later passes, and how they are read and written.

A buffer is a list of arrays. The first dim of each is the slot. In buffers that hold something for
every layer of a part, the second dim is the layer:

    activations, gradients    [slot, ...]
    kept, left                [slot, layer, ...]

Arrays of JAX cannot be written to, so these functions return new ones. In the compiled program the
writes are in place.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.pipeline._loop import Arrays
from shardlib.tracing._jaxpr import picked

# By name. `activations` and `gradients` are one buffer each, `kept` and `left` a list of one for
# each loop over layers.
Buffers = dict[str, Any]


def empty(shapes: Sequence[Any], slots: int, layers: int | None = None) -> Arrays:
    """A buffer of zeros, with `slots` slots for arrays of some shapes and dtypes.

    With `layers`, a slot has room for these arrays of so many layers. A buffer without slots is an
    empty list.
    """
    if not slots:
        return []
    dims = [slots]
    if layers is not None:
        dims.append(layers)
    buffer = []
    for shape in shapes:
        buffer.append(jnp.zeros((*dims, *shape.shape), shape.dtype))
    return buffer


def zeros(shapes: Sequence[Any]) -> Arrays:
    """Arrays of zeros, of some shapes and dtypes."""
    return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]


def read_slot(buffer: Arrays, slot: Any) -> Arrays:
    """What a slot holds."""
    return [lax.dynamic_index_in_dim(x, slot, keepdims=False) for x in buffer]


def slot_aside(buffer: Arrays, slot: Any) -> Arrays:
    """A buffer of one slot, with what a slot of another holds."""
    return [lax.dynamic_slice_in_dim(x, slot, 1) for x in buffer]


def with_slot(buffer: Arrays, slot: Any, values: Arrays) -> Arrays:
    """The buffer with other values in a slot."""
    updated = []
    for x, new in zip(buffer, values, strict=True):
        updated.append(lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, 0))
    return updated


def read_layer(buffer: Arrays, slot: Any, layer: Any) -> Arrays:
    """What a slot holds of one layer."""
    # One slice takes slot and layer at once. To take the slot first would copy all its layers.
    values = []
    for x in buffer:
        start = (slot, layer, *([np.int32(0)] * (x.ndim - 2)))
        values.append(lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]))[0, 0])
    return values


def with_layer(buffer: Arrays, slot: Any, layer: Any, values: Arrays) -> Arrays:
    """The buffer with other values for one layer in a slot.

    Args:
        buffer: A buffer with dims for slots and for layers.
        slot: The slot of a microbatch.
        layer: The number of the layer within its part.
        values: The layer's arrays, without these two dims.
    """
    updated = []
    for x, new in zip(buffer, values, strict=True):
        start = (slot, layer, *([np.int32(0)] * (x.ndim - 2)))
        updated.append(lax.dynamic_update_slice(x, new.astype(x.dtype)[None, None], start))
    return updated


def with_loop(buffers: Buffers, name: str, loop: int, buffer: Arrays) -> Buffers:
    """All buffers of a stage, with another `buffer` for a loop.

    The name is `kept` or `left`, under which each loop has a buffer of its own.
    """
    return buffers | {name: replaced(buffers[name], [loop], [buffer])}


def rows_of(arrays: Arrays, first: Any, count: int) -> Arrays:
    """Of each array `count` rows, from number `first` on."""
    return [lax.dynamic_slice_in_dim(x, first, count) for x in arrays]


def with_rows(arrays: Arrays, first: Any, rows: Arrays) -> Arrays:
    """The arrays with `rows` written over their own from number `first` on."""
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
    """The differentiable ones of some arrays, and a function that takes others in their place.

    The function returns the whole list, with the arrays that are not differentiable as they were
    given. `jax.vjp` differentiates by the first result only, for it takes no integers.
    """
    positions = [k for k, flag in enumerate(differentiable) if flag]
    return picked(arrays, positions), partial(replaced, arrays, positions)
