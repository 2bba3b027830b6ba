"""What kernels for TPUs share: sizes of tiles and of fast memory, blocks of whole rows, the
simulator.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from shardlib.kernels._choice import Task, device_here
from shardlib.kernels._shards import alone, varying

MIB = 2**20
# Of one core's fast memory (VMEM), what a kernel may ask for: some is the compiler's. v4: 16 MiB;
# v5p and 7x: 64 MiB; v5e and v6e: 128 MiB (jax.experimental.pallas.tpu.get_tpu_info_for_chip).
VMEM = {
    "TPU v3": 14,
    "TPU v4": 14,
    "TPU v5": 56,
    "TPU7x": 56,
    "TPU v5 lite": 100,
    "TPU v6 lite": 100,
}
# That a device has and a grid is shared out to; of all others one.
CORES = {"TPU v4": 2, "TPU v5": 2}
LANES = 128
# For blocks and what is computed of them: more hides no more of the memory's latency.
COMFORTABLE = 12 * MIB


def vmem_bytes(kind: str) -> int:
    """What a kernel may take of the fast memory of a core; of a TPU that is not known, what all
    have.
    """
    return VMEM.get(kind, 14) * MIB


def cores() -> int:
    """How many cores share a grid where this is traced."""
    return CORES.get(device_here().kind, 1)


def tile_rows(*dtypes: Any) -> int:
    """How many rows a tile has at least: numbers of fewer bytes are packed along them."""
    return max(32 // jnp.dtype(dtype).itemsize for dtype in dtypes)


def padded(x: jax.Array) -> bool:
    """Whether rows do not fill their tiles, so that to merge them with the dim before would move
    them.
    """
    return x.ndim > 2 and x.shape[-2] % tile_rows(x.dtype) != 0


def rows_at_once(rows: int, row_bytes: int, tile: int) -> int:
    """How many rows a block should have: whole tiles, as many as are comfortable, and no more than
    there are.
    """
    return (
        min(max(COMFORTABLE // row_bytes // tile, 1), math.ceil(rows / tile), max(512 // tile, 1))
        * tile
    )


def fits(row_bytes: int, tile: int, row: int, task: Task) -> str | None:
    """Why the least block of whole rows is too much for a core, if it is."""
    assert task.device is not None
    room = vmem_bytes(task.device.kind)
    if row_bytes * tile <= room:
        return None
    return (
        f"holds whole rows in a core's fast memory: {tile} of {row} numbers take "
        f"{row_bytes * tile / MIB:.0f} MiB, and a core of {task.device.kind} has {room / MIB:.0f} "
        f"for a kernel; a row may be of {room // tile * row // row_bytes}"
    )


def interpreted(simulated: bool, x: jax.Array) -> Any:
    """How a simulator should run a kernel of `x`: one that tells races, and in which memory that
    was never written is nan.

    It calls back to Python and has the devices of a `shard_map` wait for each other there, where
    XLA for CPUs may never get them all; on several devices Pallas's plain interpreter runs, which
    tells neither, and keeps no account of what differs.
    """
    if not simulated:
        return False
    if varying(x):
        raise ValueError(
            "A kernel is simulated on one device or in a `shard_map(..., check_vma=False)`; here "
            f"`{jax.typeof(x)}` is known to differ over `{', '.join(sorted(varying(x)))}`."
        )
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan") if alone() else True


def parameters(semantics: tuple[Any, ...], used: int) -> Any:
    """How a grid may be walked, and how much fast memory a block takes, if it is more than all
    kernels get.
    """
    return pltpu.CompilerParams(
        dimension_semantics=semantics,
        vmem_limit_bytes=None if used <= COMFORTABLE else used + 4 * MIB,
    )


def shaped(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> Any:
    """What a kernel gives, which differs between devices as what it is given does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def supported(task: Task) -> str | None:
    """Why a TPU cannot take numbers of these dtypes, if it cannot."""
    odd = {str(x.dtype) for x in task.arrays.values()} - {
        "float32",
        "bfloat16",
        "bool",
        "int32",
        "int8",
    }
    return (
        f"takes float32 and bfloat16, which a TPU computes in; not {', '.join(sorted(odd))}"
        if odd
        else None
    )
