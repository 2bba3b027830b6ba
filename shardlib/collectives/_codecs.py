"""Codecs: rows of numbers as rows of bytes, and back.

A codec is pure, and treats each row by itself: whoever has the bytes of a row can decode it. They
are those of the numbers followed by those of the scales, float32, one for each block of numbers:

    Signs       | signs, a bit each, 8 in a byte         | scales |
    Integers    | integers of 8 bits, or 2 of 4 in one   | scales |
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
_LANES = 128  # the width of a tile of a TPU, which is eight rows high
_BIT_POSITIONS = np.arange(8, dtype=np.uint8)[:, None]  # in a byte, along the height of a tile


class Encoded(NamedTuple):
    """A code, and what `decode` makes of it: whoever encodes has that already."""

    code: jax.Array
    decoded: jax.Array


class Codec(Protocol):
    """What turns the last dim of an array of rows into bytes and back.

    Rows are `(n, elements)` of real numbers, and codes `(n, size(elements))` of uint8.
    """

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """Rows `(n, elements)` as bytes `(n, size(elements))`. Elements that are not `alive` need
        not be recovered by `decode`.
        """
        ...

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """An approximation of the rows that were encoded, in float32.

        `elements` is how many there were in a row: codes are padded to whole bytes and blocks.
        """
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
        """The bytes of a row of so many elements.

        Signs fill up whole tiles, which are of 1,024 where there are as many.
        """
        elements = check.whole("Signs.size", "elements", elements, "a number of elements", least=0)
        tiling = self._tiling(elements)
        blocks = -(-tiling.tiles // tiling.tiles_in_block)
        return tiling.tiles * tiling.lanes + blocks * _SCALE

    def _tiling(self, elements: int) -> "_Tiling":
        """How a row of so many elements is cut into tiles, and these into blocks."""
        lanes = max(1, min(_LANES, self.block // 8, -(-elements // 8)))
        return _Tiling(-(-elements // (8 * lanes)), lanes, max(1, self.block // (8 * lanes)))

    def _tiles(self, rows: jax.Array, alive: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Rows in tiles, zero where they always are; and in tiles too, where they may not be."""
        if alive is None:
            everywhere = jnp.ones((1, rows.shape[1]), bool)
            return self._tiled(rows), self._tiled(everywhere)
        return self._tiled(jnp.where(alive, rows, 0)), self._tiled(alive)

    def _tiled(self, rows: jax.Array) -> jax.Array:
        """Rows as `(row, tile, 8, lane)`.

        The eight signs of a byte are one above the other, since that is how a TPU keeps a tile in
        memory: packing them then moves nothing between lanes.
        """
        lanes = self._tiling(rows.shape[1]).lanes
        return _padded(rows, 8 * lanes).reshape(rows.shape[0], -1, 8, lanes)

    def _by_block(self, by_tile: jax.Array, elements: int) -> jax.Array:
        """Sums over the tiles that share a scale."""
        together = self._tiling(elements).tiles_in_block
        return jnp.sum(_padded(by_tile, together).reshape(by_tile.shape[0], -1, together), 2)

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """Eight signs in a byte, and the scales.

        Numbers that are not `alive` count as zero, and not at all in the mean of their block.
        """
        _check_rows("Signs.encode", rows, alive)
        count, elements = rows.shape
        tiles, living = self._tiles(rows.astype(jnp.float32), alive)
        scale = self._scales(tiles, living, elements)
        # Eight signs along the sublanes become the bits of a byte; lanes stay where they are.
        packed = jnp.sum((tiles >= 0).astype(jnp.uint8) << _BIT_POSITIONS, 2, dtype=jnp.uint8)
        code = jnp.concatenate([packed.reshape(count, -1), _bytes(scale)], 1)
        return Encoded(code, self._signed(tiles >= 0, scale, elements))

    def _scales(self, tiles: jax.Array, living: jax.Array, elements: int) -> jax.Array:
        """The scale of each block: the mean, or the root of the mean square, of what is alive."""
        size = jnp.abs(tiles) if self.scale == "mean" else jnp.square(tiles)
        number = self._by_block(jnp.sum(living, (2, 3), dtype=jnp.float32), elements)
        mean = self._by_block(jnp.sum(size, (2, 3)), elements) / jnp.maximum(number, 1)
        return mean if self.scale == "mean" else jnp.sqrt(mean)

    def _signed(self, positive: jax.Array, scale: jax.Array, elements: int) -> jax.Array:
        """Rows of scales, plus where a tile is `positive` and minus elsewhere.

        It undoes `_tiles`: what the last tile has beyond the row is cut off.
        """
        together = self._tiling(elements).tiles_in_block
        scale = jnp.repeat(scale, together, 1)[:, : positive.shape[1], None, None]
        return jnp.where(positive, scale, -scale).reshape(positive.shape[0], -1)[:, :elements]

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """The scales of the blocks, with the signs of the numbers.

        All numbers of a block come out equal but for their signs. What that loses is the error
        that a compressed exchange carries over.
        """
        _check_code("Signs.decode", code, self.size(elements))
        tiling = self._tiling(elements)
        end = tiling.tiles * tiling.lanes
        packed = code[:, :end].reshape(code.shape[0], tiling.tiles, 1, tiling.lanes)
        return self._signed((packed >> _BIT_POSITIONS) & 1 == 1, _floats(code[:, end:]), elements)


class _Tiling(NamedTuple):
    """How a row is cut into tiles, of eight rows of lanes each."""

    tiles: int
    lanes: int
    tiles_in_block: int  # how many tiles share a scale


@dataclass(frozen=True)
class Integers:
    """Integers of 8 or 4 bits, and a scale for each block of numbers.

    The largest number of a block becomes the largest integer.

    - `bits`: 8 or 4.
    - `block`: how many numbers share a scale, an even number.

    >>> row = jnp.array([[0.0, 1.0, -7.0, 3.4]])
    >>> Integers(4).decode(Integers(4).encode(row).code,
    ...     4).tolist(), Integers(4).size(1024), Integers(8).size(1024)
    ([[0.0, 1.0, -7.0, 3.0]], 528, 1040)
    """

    bits: Literal[8, 4] = 8
    block: int = 256

    def __post_init__(self) -> None:
        check.choice("Integers", "bits", self.bits, (8, 4))
        takes = "an even number of elements"
        block = check.whole("Integers", "block", self.block, takes, least=2, most=_MOST_IN_BLOCK)
        if block % 2:
            raise check.refusal("Integers", "block", self.block, takes)
        check.assign(self, block=block)

    def size(self, elements: int) -> int:
        """The bytes of a row of so many elements; an odd number of them is filled up."""
        takes = "a number of elements"
        elements = check.whole("Integers.size", "elements", elements, takes, least=0)
        return self._bytes_of_integers(elements) + -(-elements // self.block) * _SCALE

    def _bytes_of_integers(self, elements: int) -> int:
        """The bytes of a row before its scales."""
        return _even(elements) * self.bits // 8

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """All integers of a row, then all scales.

        The first half of the integers of 4 bits are the lower halves of the bytes.
        """
        _check_rows("Integers.encode", rows, alive)
        rows = rows.astype(jnp.float32)
        if alive is not None:
            rows = jnp.where(alive, rows, 0)
        (count, elements), largest = rows.shape, 2 ** (self.bits - 1) - 1
        blocks = _padded(rows, self.block).reshape(count, -1, self.block)
        # The largest number of a block becomes the largest integer, so that none is cut off.
        scale = jnp.max(jnp.abs(blocks), 2, initial=0) / largest
        integers = jnp.round(blocks * jnp.where(scale == 0, 0.0, 1 / scale)[..., None])
        # What is not finite has no integer, and its scale says so.
        integers = jnp.nan_to_num(integers, posinf=0, neginf=0).astype(jnp.int8)
        packed = lax.bitcast_convert_type(integers, jnp.uint8).reshape(count, -1)
        packed = packed[:, : _even(elements)]
        if self.bits == 4:
            halves = packed.reshape(count, 2, -1)
            packed = (halves[:, 0] & 15) | (halves[:, 1] << 4)
        code = jnp.concatenate([packed, _bytes(scale)], 1)
        return Encoded(code, self._scaled(integers, scale, elements))

    def _scaled(self, integers: jax.Array, scale: jax.Array, elements: int) -> jax.Array:
        """Rows of numbers from blocks of integers, each times the scale of its block."""
        numbers = integers.astype(jnp.float32) * scale[..., None]
        return numbers.reshape(integers.shape[0], -1)[:, :elements]

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """Each integer times the scale of its block.

        A block of zeros has the scale zero. One with a number that is not finite has a scale that
        says so, which spoils this block and no other one.
        """
        _check_code("Integers.decode", code, self.size(elements))
        end = self._bytes_of_integers(elements)
        integers = lax.bitcast_convert_type(code[:, :end], jnp.int8)
        scale = _floats(code[:, end:])
        if self.bits == 4:  # shifted up and down again, which copies the sign into the upper half
            integers = jnp.concatenate([(integers << 4) >> 4, integers >> 4], 1)
        blocks = _padded(integers, self.block).reshape(code.shape[0], -1, self.block)
        return self._scaled(blocks, scale, elements)


def _even(elements: int) -> int:
    """A number of elements, filled up to an even one: integers of 4 bits go in pairs."""
    return elements + elements % 2


def _check_rows(function: str, rows: Any, alive: Any) -> None:
    """Refuse what is no array of rows of real numbers, and what says nothing of where it is alive.

    `function` is the one that an error speaks of.
    """
    check_arrays.array(function, "rows", rows, "an array of rows, (n, elements)")
    if rows.ndim != 2 or not rows.size or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(
            f"`{function}` takes rows of real numbers, (n, elements), at least one; got "
            f"{rows.dtype}{list(rows.shape)}."
        )
    if alive is None:
        return
    check_arrays.array(function, "alive", alive, "an array of bools, as many as there are numbers")
    # One row of bools may serve for all rows.
    if alive.dtype != bool or not _broadcasts_to(alive.shape, rows.shape):
        raise ValueError(
            f"`{function}(alive=...)` takes bools that broadcast to the rows, {list(rows.shape)}; "
            f"got {alive.dtype}{list(alive.shape)}."
        )


def _broadcasts_to(shape: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Whether a shape of two dims broadcasts to that of rows."""
    if len(shape) != 2:
        return False
    return all(size in (1, full) for size, full in zip(shape, rows, strict=True))


def _check_code(function: str, code: Any, size: int) -> None:
    """Refuse what is no array of codes of `size` bytes."""
    check_arrays.array(function, "code", code, "an array of codes, (n, bytes)")
    if code.ndim != 2 or code.shape[1] != size or code.dtype != jnp.uint8:
        raise ValueError(
            f"`{function}` takes codes of {size} bytes each, uint8; got "
            f"{code.dtype}{list(code.shape)}."
        )


def _padded(rows: jax.Array, multiple: int) -> jax.Array:
    """Rows filled up with zeros to a multiple of so many elements."""
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)))


def _bytes(scales: jax.Array) -> jax.Array:
    """Rows of scales as rows of bytes."""
    return lax.bitcast_convert_type(scales, jnp.uint8).reshape(scales.shape[0], -1)


def _floats(code: jax.Array) -> jax.Array:
    """Rows of scales from rows of bytes."""
    return lax.bitcast_convert_type(code.reshape(code.shape[0], -1, _SCALE), jnp.float32)
