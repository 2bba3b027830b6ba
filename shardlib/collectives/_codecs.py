"""Codecs: rows of numbers as rows of bytes, and back. Pure, and each row by itself, its scales in its bytes."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SCALE = 4  # bytes of a float32
_LANES = 128  # of a tile of a TPU, which has eight rows of them
_PLACES = np.arange(8, dtype=np.uint8)[:, None]  # of bits in a byte


class Encoded(NamedTuple):
    """A code, and what `decode` makes of it: whoever encodes has that already."""

    code: jax.Array
    decoded: jax.Array


class Codec(Protocol):
    """What turns the last dim of an array of rows into bytes and back."""

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """Rows `(n, elements)` as bytes `(n, size(elements))`; of what is not `alive` nothing need come back."""
        ...

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """What the rows were, about, in float32."""
        ...

    def size(self, elements: int) -> int:
        """The bytes of a row."""
        ...


@dataclass(frozen=True)
class Signs:
    """A bit for each number, its sign, and a scale for each block of numbers.

    - `scale`: `"mean"` of the absolute values, which is closest to the block and never further from it than zero is; or
      `"rms"`, the root of the mean square, as the 1-bit Adam of DeepSpeed has it.
    - `block`: how many numbers share a scale.

    Zero has no sign: it comes back as the scale. What is always zero is to be left out, by `alive`.

    >>> row = jnp.array([[1.0, -2.0, 3.0, -2.0]])
    >>> Signs().decode(Signs().encode(row).code, 4).tolist(), Signs().size(2**20) / 2**20 * 8
    ([[2.0, -2.0, 2.0, -2.0]], 1.015625)
    """

    scale: Literal["mean", "rms"] = "mean"
    block: int = 2048

    def __post_init__(self) -> None:
        if self.scale not in ("mean", "rms"):
            raise ValueError(f'`Signs(scale={self.scale!r})`: choose "mean" or "rms".')
        if type(self.block) is not int or self.block < 8 or self.block % 8:
            raise ValueError(f"`Signs(block={self.block!r})` takes a multiple of 8 elements.")

    def size(self, elements: int) -> int:
        """The bytes of a row."""
        block = self._block(elements)
        return -(-elements // block) * (block // 8 + _SCALE)

    def _block(self, elements: int) -> int:
        return min(self.block, elements + -elements % 8)

    def _tiled(self, rows: jax.Array, elements: int) -> jax.Array:
        """Rows as `(row, block, tile, 8, lane)`: the eight signs of a byte lie across, as a TPU's tiles do in memory."""
        block = self._block(elements)
        lanes = _LANES if block % (8 * _LANES) == 0 else block // 8
        return _padded(rows, block).reshape(rows.shape[0], -1, block // (8 * lanes), 8, lanes)

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """Eight signs in a byte, and the scales."""
        count, elements = rows.shape
        rows = rows.astype(jnp.float32)
        tiles = self._tiled(rows if alive is None else jnp.where(alive, rows, 0), elements)
        living = self._tiled(jnp.ones((1, elements), bool) if alive is None else alive, elements)
        size = jnp.abs(tiles) if self.scale == "mean" else jnp.square(tiles)
        number = jnp.maximum(jnp.sum(living, (2, 3, 4), dtype=jnp.float32), 1)
        mean = jnp.sum(size, (2, 3, 4)) / number
        scale = mean if self.scale == "mean" else jnp.sqrt(mean)
        packed = jnp.sum((tiles >= 0).astype(jnp.uint8) << _PLACES, 3, dtype=jnp.uint8)
        code = jnp.concatenate([packed.reshape(count, -1), _bytes(scale)], 1)
        return Encoded(code, self._signed(tiles >= 0, scale, elements))

    def _signed(self, positive: jax.Array, scale: jax.Array, elements: int) -> jax.Array:
        scale = scale[:, :, None, None, None]
        return jnp.where(positive, scale, -scale).reshape(positive.shape[0], -1)[:, :elements]

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """The scales, with signs."""
        count, scales = code.shape[0], _SCALE * -(-elements // self._block(elements))
        shape = jax.eval_shape(lambda: self._tiled(jnp.zeros((count, elements)), elements)).shape
        packed = code[:, :-scales].reshape(*shape[:3], 1, shape[4])
        return self._signed((packed >> _PLACES) & 1 == 1, _floats(code[:, -scales:]), elements)


@dataclass(frozen=True)
class Integers:
    """Integers of 8 or 4 bits, and a scale for each block of numbers: the largest of them is the largest integer.

    >>> row = jnp.array([[0.0, 1.0, -7.0, 3.4]])
    >>> Integers(4).decode(Integers(4).encode(row).code, 4).tolist(), Integers(4).size(1024), Integers(8).size(1024)
    ([[0.0, 1.0, -7.0, 3.0]], 528, 1040)
    """

    bits: Literal[8, 4] = 8
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"`Integers(bits={self.bits!r})`: there are integers of 8 and of 4 bits.")
        if type(self.block) is not int or self.block < 2 or self.block % 2:
            raise ValueError(f"`Integers(block={self.block!r})` takes an even number of elements.")

    def size(self, elements: int) -> int:
        """The bytes of a row."""
        block = self._block(elements)
        return -(-elements // block) * (block * self.bits // 8 + _SCALE)

    def _block(self, elements: int) -> int:
        return min(self.block, elements + elements % 2)

    def encode(self, rows: jax.Array, alive: jax.Array | None = None) -> Encoded:
        """All integers, then all scales."""
        rows = rows.astype(jnp.float32) if alive is None else jnp.where(alive, rows.astype(jnp.float32), 0)
        (count, elements), block, most = rows.shape, self._block(rows.shape[1]), 2 ** (self.bits - 1) - 1
        blocks = _padded(rows, block).reshape(count, -1, block)
        scale = jnp.max(jnp.abs(blocks), 2) / most
        whole = jnp.round(blocks * jnp.where(scale == 0, 0.0, 1 / scale)[..., None])
        # What is not finite has no integer, and its scale says so.
        whole = jnp.nan_to_num(whole, posinf=0, neginf=0).astype(jnp.int8)
        packed = lax.bitcast_convert_type(whole, jnp.uint8).reshape(count, -1)
        if self.bits == 4:
            halves = packed.reshape(count, 2, -1)
            packed = (halves[:, 0] & 15) | (halves[:, 1] << 4)
        code = jnp.concatenate([packed, _bytes(scale)], 1)
        return Encoded(code, self._scaled(whole, scale, elements))

    def _scaled(self, whole: jax.Array, scale: jax.Array, elements: int) -> jax.Array:
        found = whole.astype(jnp.float32) * scale[..., None]
        return found.reshape(whole.shape[0], -1)[:, :elements]

    def decode(self, code: jax.Array, elements: int) -> jax.Array:
        """Each integer times its scale."""
        count, block = code.shape[0], self._block(elements)
        blocks = -(-elements // block)
        packed, scale = code[:, : -_SCALE * blocks], _floats(code[:, -_SCALE * blocks :])
        whole = lax.bitcast_convert_type(packed, jnp.int8)
        if self.bits == 4:  # shifted up and down again, with their signs
            whole = jnp.concatenate([(whole << 4) >> 4, whole >> 4], 1)
        return self._scaled(whole.reshape(count, blocks, block), scale, elements)


def _padded(rows: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)))


def _bytes(scales: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(scales, jnp.uint8).reshape(scales.shape[0], -1)


def _floats(code: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(code.reshape(code.shape[0], -1, _SCALE), jnp.float32)
