"""Which axes of a mesh lie along several dims of a TPU's torus.

An axis of 256 devices on a slice of 16 x 16 chips goes along two dims: its index is two digits,

    index of a device on the axis = 16 * (place along one dim) + (place along the other)

and so are its neighbours: a collective over the axis can be one over each digit after the other.
"""

import functools
import math
from typing import Any

import numpy as np
from jax.sharding import Mesh

# For each axis, how many devices it has along each dim of the torus, the outermost first.
TorusDims = tuple[tuple[str, tuple[int, ...]], ...]


@functools.lru_cache(maxsize=256)
def torus_dims(mesh: Mesh) -> TorusDims:
    """The axes that lie along several dims of a torus, and how many devices along each.

    Axes that cross slices are left out, and so are those that go along a torus in no such order.
    Machines without a torus have none.

    >>> import shardlib as sl
    >>> torus_dims(sl.make_mesh("data=8"))
    ()
    """
    places = _places(mesh)
    if places is None:
        return ()
    found = []
    for dim, name in enumerate(mesh.axis_names):
        along = np.moveaxis(places, dim, -2)
        sizes = _digits(along.reshape(-1, *along.shape[-2:]))
        if sizes is not None and len(sizes) > 1:
            found.append((name, sizes))
    return tuple(found)


def has_torus(device: Any) -> bool:
    """Whether a device is one of a torus, and has a place on it.

    GPUs that are only compiled for have coordinates too, and no torus.
    """
    return device.platform == "tpu" and hasattr(device, "coords")


def _places(mesh: Mesh) -> np.ndarray | None:
    """Slice, coordinates and core of each device, `(*mesh, numbers)`; None without a torus."""
    if not has_torus(mesh.devices.flat[0]):
        return None
    places = [_place(device) for device in mesh.devices.flat]
    return np.array(places).reshape(*mesh.devices.shape, -1)


def _place(device: Any) -> tuple[int, ...]:
    """Slice, coordinates and core of a device."""
    slice_index = getattr(device, "slice_index", None) or 0
    return (slice_index, *device.coords, device.core_on_chip)


def _digits(lines: np.ndarray) -> tuple[int, ...] | None:
    """How many devices lines have along each dim, the outermost first; None in no such order.

    Args:
        lines: `(line, place on it, coordinates)`, with the slice as the first coordinate.
    """
    # Steps from the first device of each line; the same for all lines, or there is no order.
    steps = lines - lines[:, :1]
    if (steps != steps[:1]).any() or steps[:, :, 0].any():
        return None
    line, sizes = steps[0], []
    while len(line) > 1:
        size = _run(line)
        if size is None:
            return None
        sizes.append(size)
        line = line[::size]
    # The cores of a chip are no dim of the torus: they belong to that along which the chips lie.
    if len(sizes) > 1 and steps[0, 1, -1]:
        cores = sizes.pop(0)
        sizes[0] *= cores
    return tuple(reversed(sizes))


def _run(line: np.ndarray) -> int | None:
    """How many devices at the start of a line lie along one dim; None unless it repeats that.

    Args:
        line: `(place, coordinates)`, relative to the first place.
    """
    # The step to the second device says along which coordinate the run is.
    along = np.flatnonzero(line[1])
    if len(along) != 1:
        return None
    others = np.delete(line, along[0], axis=1)
    size = 1
    while size < len(line) and not others[size].any():
        size += 1
    if len(line) % size:
        return None
    starts = np.repeat(line[::size], size, axis=0)
    repeated = starts + np.tile(line[:size], (len(line) // size, 1))
    if (repeated != line).any():
        return None
    return size


def groups_along(sizes: tuple[int, ...], begin: int, end: int) -> list[list[int]]:
    """The devices of an axis in groups that differ in some neighbouring digits of their index.

    Args:
        sizes: how many devices the axis has along each dim, the outermost first.
        begin: the first of the digits in which devices of a group differ.
        end: the one behind the last of them.

    >>> groups_along((2, 3), 0, 1)
    [[0, 3], [1, 4], [2, 5]]
    >>> groups_along((2, 3), 1, 2)
    [[0, 1, 2], [3, 4, 5]]
    """
    inner = math.prod(sizes[end:])
    grid = np.arange(math.prod(sizes)).reshape(math.prod(sizes[:begin]), -1, inner)
    return np.moveaxis(grid, 1, 2).reshape(-1, grid.shape[1]).tolist()
