"""Devices in a grid with a dim for each mesh axis: neighbours in it are close on the wire."""

import math
import operator
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from shardlib.machine._absent import is_absent


def arrange(
    axes: dict[str, int], slow_factors: dict[str, int], devices: list[Any], split: bool
) -> np.ndarray:
    """The devices in a grid, a dim for each axis, so that neighbours in it are close on the wire.

    JAX knows how: on one slice for the torus, on several for slices and what is inside each. Of
    simulated devices, consecutive blocks stand in for slices. `split` lets axes share a dimension
    of the torus.
    """
    outer = [slow_factors.get(name, 1) for name in axes]
    inner = [size // factor for size, factor in zip(axes.values(), outer, strict=True)]
    if math.prod(outer) == 1:
        grid = mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=split)
        return _in_rows(grid)
    if not is_simulated(devices):
        # JAX takes its blocks by process or by slice.
        by_process = all(slice_index(device) == device.process_index for device in devices)
        return mesh_utils.create_hybrid_device_mesh(
            inner,
            outer,
            devices,
            process_is_granule=by_process,
            allow_split_physical_axes=split,
        )
    return _arrange_blocks(outer, inner, devices)


# The chips of a ring through several dims of a torus, by the kind of the device.
_CHIPS_IN_RINGS = {"TPU v5 lite": 16, "TPU v6 lite": 16, "TPU v4": 8, "TPU v5": 8}


def _in_rows(grid: np.ndarray) -> np.ndarray:
    """The devices in a grid, with a ring through 4 x 4 or 2 x 2 x 2 chips laid out in rows again.

    JAX orders 16 chips of a v5e or v6e along a ring where one axis has them all, and from 0.12 on 8
    chips of a v4 or v5p. Of a scatter over that ring the compiler makes an all-reduce, twice the
    bytes; over one dim of the torus after the other it does not.
    """
    kind = grid.flat[0].device_kind
    if grid.size != _CHIPS_IN_RINGS.get(kind) or max(grid.shape) != grid.size:
        return grid
    # Eight chips that are no cube have no such ring; a cube may be anywhere in a larger slice.
    coords = np.array([device.coords for device in grid.flat])
    if grid.size == 8 and (np.ptp(coords, axis=0) != 1).any():
        return grid
    rows = sorted(grid.flat, key=lambda device: device.coords)
    return np.array(rows, dtype=object).reshape(grid.shape)


def _arrange_blocks(outer: list[int], inner: list[int], devices: list[Any]) -> np.ndarray:
    """Devices in a grid, as if consecutive blocks of them were slices.

    `outer` are the sizes of axes across slices, `inner` those inside a slice; an axis of the grid
    has their product.
    """
    # The dims (outer..., inner...) of the blocks are interleaved to (outer, inner) of the first
    # axis, (outer, inner) of the second, ..., and each pair is merged.
    count = len(outer)
    interleaved: list[int] = []
    for axis in range(count):
        interleaved += [axis, axis + count]
    blocks = np.asarray(devices, dtype=object).reshape(outer + inner)
    return blocks.transpose(*interleaved).reshape(*map(operator.mul, outer, inner))


def slice_index(device: Any) -> int:
    """The number of the slice that a device is in: the devices that the fast network joins.

    For devices that know of no slice it is their process, but for TPUs.
    """
    # GPUs that are only compiled for are all of slice 0; those of one process are joined by NVLink.
    if device.platform == "gpu" and is_absent(device):
        return device.process_index
    # The devices of a TPU topology that is a single slice carry no `slice_index`, and their
    # processes share the torus.
    default = 0 if device.platform == "tpu" else device.process_index
    return getattr(device, "slice_index", default)


def is_simulated(devices: list[Any]) -> bool:
    """Whether the devices are those of a single CPU process, which any layout may be tried on."""
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) == 1


def way_out(error: Exception) -> str:
    """Why JAX cannot lay a mesh out, and what to do, by the kind and the text of its error."""
    # JAX has no classes of its own for these errors, so they are told apart by kind and text.
    if isinstance(error, NotImplementedError):
        return (
            "an axis would share a dimension of the torus with another. Pass "
            "`allow_split_physical_axes=True`."
        )
    if "megacore" in str(error):
        return (
            "JAX wants one device per chip here, and these are two. Use megacore; in "
            '`get_topology_desc` that is `chip_config_name="megacore"`.'
        )
    if isinstance(error, AssertionError):
        return (
            "they do not fill a box of the torus. Take whole slices, or all devices between two "
            "corners of a box."
        )
    return (
        f"JAX finds no way to divide the torus ({error}). Choose sizes that divide its dimensions."
    )
