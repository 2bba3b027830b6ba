"""What kernels for TPUs share: sizes of tiles and of fast memory, blocks of whole rows, simulators.

A core computes on tiles in its fast memory (VMEM): 128 lanes wide, and 8 rows high for float32, 16
for bfloat16, 32 for int8. Pallas walks over a kernel's grid step by step. While one block is
computed, the next is copied in and the one before out, so every block has two buffers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from shardlib.kernels._choice import Task, device_here
from shardlib.kernels._shards import on_one_device, varying

MIB = 2**20
# MiB of one core's fast memory that a kernel may ask for; the rest is the compiler's. A core of v3
# and v4 has 16 MiB, of v5p and 7x 64, of v5e and v6e 128: get_tpu_info_for_chip of
# jax.experimental.pallas.tpu. Keys are the kinds of devices as JAX names them.
VMEM = {
    "TPU v3": 14,
    "TPU v4": 14,
    "TPU v5": 56,
    "TPU7x": 56,
    "TPU v5 lite": 100,
    "TPU v6 lite": 100,
}
# Cores of a device, which divide a grid among them; all other kinds have one.
CORES = {"TPU v4": 2, "TPU v5": 2}
LANES = 128
# Bytes for blocks and what is computed from them. Larger blocks would not run faster: those of this
# size hide the latency of memory already.
COMFORTABLE = 12 * MIB


def vmem_bytes(kind: str) -> int:
    """The bytes of a core's fast memory that a kernel may take.

    A kind of TPU that is not known here is taken to have as little as the smallest.
    """
    return VMEM.get(kind, 14) * MIB


def cores() -> int:
    """How many cores share a grid on the device for which the program is traced."""
    return CORES.get(device_here().kind, 1)


def tile_rows(*dtypes: Any) -> int:
    """The height of a tile, the greatest of those for these dtypes.

    Smaller numbers are packed along rows: a tile always has 32 bytes of each column.
    """
    return max(32 // jnp.dtype(dtype).itemsize for dtype in dtypes)


def has_padded_rows(x: jax.Array) -> bool:
    """Whether the rows of an array are padded in memory, since they do not fill their tiles.

    A reshape that merges them with the dim before would then copy the array.
    """
    return x.ndim > 2 and x.shape[-2] % tile_rows(x.dtype) != 0


def rows_at_once(rows: int, row_bytes: int, tile: int) -> int:
    """How many rows a block should have, in whole tiles.

    As many as fit in `COMFORTABLE`, but no more than there are and no more than 512; at least one
    tile.
    """
    comfortable = max(COMFORTABLE // row_bytes // tile, 1)
    tiles = min(comfortable, math.ceil(rows / tile), max(512 // tile, 1))
    return tiles * tile


def refuses_long_rows(row_bytes: int, tile: int, row: int, task: Task) -> str | None:
    """Why the smallest block of whole rows is too large for a core; None if it fits.

    The text continues a sentence that begins with the kernel's name.

    Args:
        row_bytes: the fast memory that a row takes, with all that is computed from it.
        tile: how many rows the smallest block has.
        row: how many numbers a row has.
        task: what the kernel is asked to do.
    """
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
    """How Pallas should interpret a kernel of `x`; False where it is to be compiled.

    On one device it is the simulator of TPUs, which finds races, and gives nan where memory was
    never written. It calls back to Python, where the devices of a `shard_map` would wait for each
    other, and XLA for CPUs may never run them all at once. So on several devices it is Pallas's
    plain interpreter, which finds neither, and does not track over which axes arrays vary.
    """
    if not simulated:
        return False
    if varying(x):
        raise ValueError(
            "A kernel is simulated on one device or in a `shard_map(..., check_vma=False)`; here "
            f"`{jax.typeof(x)}` is known to differ over `{', '.join(sorted(varying(x)))}`."
        )
    if on_one_device():
        return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    return True


def parameters(semantics: tuple[Any, ...], used: int) -> Any:
    """The compiler's parameters: the semantics of the grid's dims, and the limit of fast memory.

    `used` is the bytes that a step takes, with both buffers of each block. Up to `COMFORTABLE` the
    compiler's default limit is enough.
    """
    limit = None
    if used > COMFORTABLE:
        limit = used + 4 * MIB  # the compiler needs some itself
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)


def shaped(shape: tuple[int, ...], dtype: Any, source: jax.Array) -> Any:
    """The type of a kernel's result, which varies over the same manual axes as `source`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(source).manual_axis_type)


def refuses_dtypes(task: Task) -> str | None:
    """Why a TPU cannot compute with the dtypes of a task; None if it can.

    The text continues a sentence that begins with the kernel's name.
    """
    # Masks come as bools and go to the kernel as int8.
    known = {"float32", "bfloat16", "bool", "int32", "int8"}
    unknown = {str(x.dtype) for x in task.arrays.values()} - known
    if unknown:
        return (
            f"takes float32 and bfloat16, which a TPU computes in; not {', '.join(sorted(unknown))}"
        )
    return None
