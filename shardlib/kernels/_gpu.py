"""What kernels for GPUs share: rows in the registers of a warpgroup, the simulator.

They are written in Pallas's Mosaic GPU, in which a thread is a warpgroup: 128 lanes in step. A row is cut into pieces of which
each lane holds `vector` neighbouring numbers, loaded at once; the last piece reaches back where they do not fill it, and what
it repeats is counted once. Nothing is padded, and no load reaches beyond the row.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._choice import Task
from shardlib.kernels._shards import alone, as_varying, varying

LANES = 128
LONGEST = 32 * 2**10  # bytes of a row that a warpgroup's registers hold, and what is computed of it
WIDEST = 16  # bytes that a lane loads at once
ENOUGH = 2**12  # numbers that keep a warpgroup's loads busy
MOST = 8  # rows that are written out one after the other in a program


# `plgpu.load` takes an index of its own up to JAX 0.10.
_OF_LOAD = inspect.signature(plgpu.load).parameters
INDEX: list[Any] = [()] if "idx" in _OF_LOAD and _OF_LOAD["idx"].default is inspect.Parameter.empty else []


GENERATIONS = {
    "hopper": ("NVIDIA H1", "NVIDIA H2", "NVIDIA H8", "NVIDIA GH"),
    "blackwell": ("NVIDIA B", "NVIDIA GB2", "NVIDIA GB3"),
}  # by names of devices


def generation(kind: str) -> str:
    """Of which generation a GPU is; what is no GPU simulates Hopper's."""
    return next((name for name, kinds in GENERATIONS.items() if kind.startswith(kinds)), "hopper")


def refuses_device(task: Task) -> str | None:
    """Why a kernel is not for a GPU, if it is not."""
    assert task.device is not None
    known = any(task.device.kind.startswith(kinds) for kinds in GENERATIONS.values())
    if known or task.device.platform != "gpu":
        return None
    return f"is for GPUs of the generations Hopper and Blackwell, and this is {task.device.kind}"


class Piece(NamedTuple):
    """A part of a row: where it begins, how many numbers it has, how many of the first an earlier piece has too."""

    begin: int
    size: int
    again: int


class Cut(NamedTuple):
    """A row in pieces, of which each lane loads `vector` numbers at once."""

    vector: int
    pieces: tuple[Piece, ...]


def cut(row: int, *dtypes: Any) -> Cut:
    """Pieces of a row that all these dtypes' loads are aligned for.

    >>> cut(1001, jnp.float32).pieces[-1]
    Piece(begin=873, size=128, again=23)
    """
    vector = WIDEST // max(jnp.dtype(dtype).itemsize for dtype in dtypes)
    while vector > 1 and (row % vector or LANES * vector > row):
        vector //= 2
    size = LANES * vector
    pieces = [Piece(begin, size, 0) for begin in range(0, row - size + 1, size)]
    if rest := row % size:
        pieces.append(Piece(row - size, size, size - rest))
    return Cut(vector, tuple(pieces))


def load(ref: Any, index: int | jax.Array, piece: Piece, vector: int, simulated: bool) -> jax.Array:
    """A piece of a row of an array in the GPU's memory."""
    where = (index, pl.ds(piece.begin, piece.size))
    if simulated:  # it knows no layouts
        return ref[where]
    return plgpu.load(ref.at[where], *INDEX, layout=layout(piece, vector), optimized=False)


def store(ref: Any, index: int | jax.Array, piece: Piece, x: jax.Array) -> None:
    """Write a piece of a row."""
    ref[index, pl.ds(piece.begin, piece.size)] = x.astype(ref.dtype)


def numbers(piece: Piece, vector: int, simulated: bool) -> jax.Array:
    """The places of a piece in its row."""
    here = lax.broadcasted_iota(jnp.int32, (piece.size,), 0)
    return (here if simulated else plgpu.layout_cast(here, layout(piece, vector))) + piece.begin


def layout(piece: Piece, vector: int) -> Any:
    """How a piece lies in the registers of a warpgroup."""
    return plgpu.Layout.WG_STRIDED((piece.size,), vec_size=vector)


def once(x: jax.Array, piece: Piece, vector: int, simulated: bool) -> jax.Array:
    """What of a piece no earlier one has, and zeros."""
    if not piece.again:
        return x
    return jnp.where(numbers(piece, vector, simulated) < piece.begin + piece.again, jnp.zeros_like(x), x)


def total(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum of all numbers of a row."""
    return jnp.sum(sum(parts[1:], parts[0]))


def rows_at_once(rows: int, row: int) -> int:
    """How many rows a warpgroup should load before it computes."""
    return min(max(ENOUGH // row, 1), MOST, rows)


def over_rows(kernel: Any, rows: int, row: int, outs: Any, simulated: bool) -> Any:
    """Call `kernel(indices, *refs)` for blocks of rows, the last of which may have some of the one before."""
    block = rows_at_once(rows, row)
    blocks = -(-rows // block)

    def of_block(*refs: Any) -> None:
        begin = jnp.minimum(lax.axis_index("block") * block, rows - block)
        kernel([begin + k for k in range(block)], *refs)

    return call(of_block, kernel.__name__, outs, simulated, grid=(blocks,), grid_names=("block",))


def call(body: Any, name: str, outs: Any, simulated: bool, rough: bool = False, **options: Any) -> Any:
    """A kernel by its name, compiled, or simulated: that tells races, and memory that was never written is nan.

    Its results are known to differ between devices as what it is given does. `rough` takes exponentials from the GPU's own unit,
    exact to some 22 bits, and hyperbolic tangents, to 11.
    """
    compiler = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=rough)
    if simulated:
        options["interpret"] = _simulator()
    kernel = plgpu.kernel(body, out_type=outs, kernel_name=name, compiler_params=compiler, **options)

    def called(*operands: jax.Array) -> Any:
        axes = frozenset().union(*map(varying, operands))
        return jax.tree.map(lambda y: as_varying(y, axes), kernel(*operands))

    return called


def _simulator() -> Any:
    if not (simulator := getattr(plgpu, "InterpretGPUParams", None)) or not alone():
        raise ValueError(
            "A kernel for GPUs is simulated on one device, and this is traced for several. Those for TPUs can be on several."
            if simulator
            else f"JAX {jax.__version__} has no public simulator of GPUs; 0.12 has."
        )
    return simulator(detect_races=True)


def full(piece: Piece, vector: int, value: float, simulated: bool) -> jax.Array:
    """A piece of equal numbers."""
    same = jnp.full((piece.size,), value, jnp.float32)
    return same if simulated else plgpu.layout_cast(same, layout(piece, vector))


def refuses_rows(task: Task, row: int, *dtypes: Any) -> str | None:
    """Why a row does not go into the registers of a warpgroup, if it does not."""
    if reason := refuses_device(task):
        return reason
    odd = {str(x.dtype) for x in task.arrays.values()} - {"float32", "bfloat16", "float16", "bool", "int32", "int8"}
    if odd:
        return f"takes float32, bfloat16 and float16; not {', '.join(sorted(odd))}"
    size = max(jnp.dtype(dtype).itemsize for dtype in dtypes)
    if row < LANES:
        return f"gives each of {LANES} lanes a part of a row, and a row has {row} numbers; at least {LANES}"
    if row * size > LONGEST:
        return f"holds a row in registers, of at most {LONGEST // size} numbers of {size} bytes, and one has {row}"
    return None
