"""Codecs: rows of numbers as rows of bytes, and back. Pure, and each row by itself, its scales in
its bytes.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays

_SCALE = 4  # bytes of a float32
_MOST_IN_BLOCK = 2**30  # rows are filled up to whole blocks, and counted in 32 bits
_LANES = 128  # of a tile of a TPU, which has eight rows of them
_PLACES = np.arange(8, dtype=np.uint8)[:, None]  # of bits in a byte


class Encoded(NamedTuple):
    """A code, and what `decode` makes of it: whoever encodes has that already."""

    code: jax.Array
    decoded: jax.Array


class Codec(Protocol):
    """What turns the last dim of an array of rows into bytes and back."""

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """Rows `(n, elements)` as bytes `(n, size(elements))`. Elements that are not `alive` need
        not be recovered by `decode`.
        """
        ...

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """An approximation of the rows that were encoded, in float32."""
        ...

    def size(self, elements: int) -> int:
        """The bytes of a row."""
        ...


@dataclass(frozen=True)
class Signs:
    """A bit for each number, its sign, and a scale for each block of numbers.

    - `scale`: `"mean"` of the absolute values, which is closest to the block and never further from
      it than zero is; or `"rms"`, the root of the mean square, as the 1-bit Adam of DeepSpeed has
      it.
    - `block`: how many numbers share a scale.

    Zero has no sign: it comes back as the scale. What is always zero is to be left out, by `alive`.

    >>> row = jnp.array([[1.0, -2.0, 3.0, -2.0]])
    >>> Signs().decode(Signs().encode(row).code, 4).tolist(), Signs().size(2**20) / 2**20 * 8
    ([[2.0, -2.0, 2.0, -2.0]], 1.015625)
    """

    scale: Literal["mean", "rms"] = "mean"
    block: int = 2048

    def __post_init__(self) -> None:
        check.choice("Signs", "scale", self.scale, ("mean", "rms"))
        tile = 8 * _LANES
        takes = f"a multiple of 8 up to {tile} elements, and of {tile} beyond"
        block = check.whole("Signs", "block", self.block, takes, least=8, most=_MOST_IN_BLOCK)
        if block % (tile if block > tile else 8):
            raise check.refusal("Signs", "block", self.block, takes)
        check.assign(self, block=block)

    def size(self, elements: int) -> int:
        """The bytes of a row: signs fill up a tile, of 1,024 where there are as many."""
        elements = check.whole("Signs.size", "elements", elements, "a number of elements", least=0)
        tiles, lanes, together = self._cut(elements)
        return tiles * lanes + -(-tiles // together) * _SCALE

    def _cut(self, elements: int) -> tuple[int, int, int]:
        """The tiles of a row, of eight rows of lanes each, and how many share a scale."""
        lanes = max(1, min(_LANES, self.block // 8, -(-elements // 8)))
        return -(-elements // (8 * lanes)), lanes, max(1, self.block // (8 * lanes))

    def _tiled(self, rows: jax.Array) -> jax.Array:
        """Rows as `(row, tile, 8, lane)`: the eight signs of a byte lie across, as a TPU's tiles do
        in memory.
        """
        _, lanes, _ = self._cut(rows.shape[1])
        return _padded(rows, 8 * lanes).reshape(rows.shape[0], -1, 8, lanes)

    def _by_block(self, of_tiles: jax.Array, elements: int) -> jax.Array:
        """Sums over the tiles that share a scale."""
        together = self._cut(elements)[2]
        return jnp.sum(_padded(of_tiles, together).reshape(of_tiles.shape[0], -1, together), 2)

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """Eight signs in a byte, and the scales."""
        _check_rows("Signs.encode", rows, alive)
        count, elements = rows.shape
        rows = rows.astype(jnp.float32)
        tiles = self._tiled(rows if alive is None else jnp.where(alive, rows, 0))
        living = self._tiled(jnp.ones((1, elements), bool) if alive is None else alive)
        size = jnp.abs(tiles) if self.scale == "mean" else jnp.square(tiles)
        number = self._by_block(jnp.sum(living, (2, 3), dtype=jnp.float32), elements)
        mean = self._by_block(jnp.sum(size, (2, 3)), elements) / jnp.maximum(number, 1)
        scale = mean if self.scale == "mean" else jnp.sqrt(mean)
        packed = jnp.sum((tiles >= 0).astype(jnp.uint8) << _PLACES, 2, dtype=jnp.uint8)
        code = jnp.concatenate([packed.reshape(count, -1), _bytes(scale)], 1)
        return Encoded(code, self._signed(tiles >= 0, scale, elements))

    def _signed(self, positive: jax.Array, scale: jax.Array, elements: int) -> jax.Array:
        scale = jnp.repeat(scale, self._cut(elements)[2], 1)[:, : positive.shape[1], None, None]
        return jnp.where(positive, scale, -scale).reshape(positive.shape[0], -1)[:, :elements]

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """The scales, with signs."""
        _check_code("Signs.decode", code, self.size(elements))
        tiles, lanes, _ = self._cut(elements)
        packed = code[:, : tiles * lanes].reshape(code.shape[0], tiles, 1, lanes)
        return self._signed(
            (packed >> _PLACES) & 1 == 1, _floats(code[:, tiles * lanes :]), elements
        )


@dataclass(frozen=True)
class Integers:
    """Integers of 8 or 4 bits, and a scale for each block of numbers.

    The largest number of a block becomes the largest integer.

    >>> row = jnp.array([[0.0, 1.0, -7.0, 3.4]])
    >>> Integers(4).decode(Integers(4).encode(row).code,
    ...     4).tolist(), Integers(4).size(1024), Integers(8).size(1024)
    ([[0.0, 1.0, -7.0, 3.0]], 528, 1040)
    """

    bits: Literal[8, 4] = 8
    block: int = 256

    def __post_init__(self) -> None:
        check.choice("Integers", "bits", self.bits, (8, 4))
        block = check.whole(
            "Integers",
            "block",
            self.block,
            "an even number of elements",
            least=2,
            most=_MOST_IN_BLOCK,
        )
        if block % 2:
            raise check.refusal("Integers", "block", self.block, "an even number of elements")
        check.assign(self, block=block)

    def size(self, elements: int) -> int:
        """The bytes of a row."""
        elements = check.whole(
            "Integers.size", "elements", elements, "a number of elements", least=0
        )
        return (elements + elements % 2) * self.bits // 8 + -(-elements // self.block) * _SCALE

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """All integers, then all scales."""
        _check_rows("Integers.encode", rows, alive)
        rows = (
            rows.astype(jnp.float32)
            if alive is None
            else jnp.where(alive, rows.astype(jnp.float32), 0)
        )
        (count, elements), most = rows.shape, 2 ** (self.bits - 1) - 1
        blocks = _padded(rows, self.block).reshape(count, -1, self.block)
        scale = jnp.max(jnp.abs(blocks), 2, initial=0) / most
        whole = jnp.round(blocks * jnp.where(scale == 0, 0.0, 1 / scale)[..., None])
        # What is not finite has no integer, and its scale says so.
        whole = jnp.nan_to_num(whole, posinf=0, neginf=0).astype(jnp.int8)
        packed = lax.bitcast_convert_type(whole, jnp.uint8).reshape(count, -1)[
            :, : elements + elements % 2
        ]
        if self.bits == 4:
            halves = packed.reshape(count, 2, -1)
            packed = (halves[:, 0] & 15) | (halves[:, 1] << 4)
        return Encoded(
            jnp.concatenate([packed, _bytes(scale)], 1), self._scaled(whole, scale, elements)
        )

    def _scaled(self, whole: jax.Array, scale: jax.Array, elements: int) -> jax.Array:
        found = whole.astype(jnp.float32) * scale[..., None]
        return found.reshape(whole.shape[0], -1)[:, :elements]

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """Each integer times its scale."""
        _check_code("Integers.decode", code, self.size(elements))
        integers = (elements + elements % 2) * self.bits // 8
        whole = lax.bitcast_convert_type(code[:, :integers], jnp.int8)
        scale = _floats(code[:, integers:])
        if self.bits == 4:  # shifted up and down again, with their signs
            whole = jnp.concatenate([(whole << 4) >> 4, whole >> 4], 1)
        return self._scaled(
            _padded(whole, self.block).reshape(code.shape[0], -1, self.block), scale, elements
        )


def _check_rows(function: str, rows: Any, alive: Any) -> None:
    check_arrays.array(function, "rows", rows, "an array of rows, (n, elements)")
    if rows.ndim != 2 or not rows.size or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(
            f"`{function}` takes rows of real numbers, (n, elements), at least one; got "
            f"{rows.dtype}{list(rows.shape)}."
        )
    if alive is None:
        return
    check_arrays.array(function, "alive", alive, "an array of bools, as many as there are numbers")
    fits = alive.ndim == 2 and all(
        one in (1, other) for one, other in zip(alive.shape, rows.shape, strict=True)
    )
    if alive.dtype != bool or not fits:
        raise ValueError(
            f"`{function}(alive=...)` takes bools that broadcast to the rows, {list(rows.shape)}; "
            f"got {alive.dtype}{list(alive.shape)}."
        )


def _check_code(function: str, code: Any, size: int) -> None:
    check_arrays.array(function, "code", code, "an array of codes, (n, bytes)")
    if code.ndim != 2 or code.shape[1] != size or code.dtype != jnp.uint8:
        raise ValueError(
            f"`{function}` takes codes of {size} bytes each, uint8; got "
            f"{code.dtype}{list(code.shape)}."
        )


def _padded(rows: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)))


def _bytes(scales: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(scales, jnp.uint8).reshape(scales.shape[0], -1)


def _floats(code: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(code.reshape(code.shape[0], -1, _SCALE), jnp.float32)
