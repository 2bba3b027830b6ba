"""Encodings of activations that wait for a backward pass, in fewer bits than they have.

    int8, int4   integers, a scale for each block     | integers, int4 two to a byte | scales |
    fp8          floats of 8 bits, a scale per block  | floats                       | scales |
    bf16         rounded                              | floats |
    sign         whether a number is above zero       | bits, eight to a byte |

The codes keep the dims of an activation, so that they are split over devices as it is, and blocks
lie along its last dim within what one device may have of it. Then no device needs another's numbers
to encode its own. (The codecs of messages, which make one row of bytes of all, would.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.layouts._remat_parts import Encoding

MOST_IN_BLOCK = 128
_LARGEST = {"int8": 127, "int4": 7, "fp8": 448}
_BITS = {"int4": 4, "sign": 1}  # of what is packed into bytes


@dataclass(frozen=True)
class Encoded:
    """How an activation of a shape and dtype is encoded.

    - `parts`: over how many devices its last dim may be split. Only those count that divide it.
    """

    encoding: Encoding
    shape: tuple[int, ...]
    dtype: Any
    parts: int = 1

    @property
    def local(self) -> int:
        """How much of the last dim one device is sure to have of what it has.

        >>> Encoded("int8", (8, 512), jnp.float32, parts=4).local
        128
        """
        last = self._rows[-1]
        return last // max(1, math.gcd(last, self.parts))

    @property
    def block(self) -> int:
        """How many numbers share a scale: the most that divide what a device has, up to 128.

        If that were less than half of what there could be, the last block is filled up instead.

        >>> [Encoded("int8", (8, last), jnp.float32).block for last in (64, 256, 300, 257)]
        [64, 128, 100, 86]
        """
        most = max(1, min(self.local, MOST_IN_BLOCK))
        exact = max(size for size in range(1, most + 1) if self.local % size == 0)
        if 2 * exact >= most:
            return exact
        # As many blocks as full ones would be, and equal ones: little is filled up then.
        return -(-self.local // -(-self.local // MOST_IN_BLOCK))

    @property
    def share(self) -> float:
        """The bytes of the codes over those of the activation itself.

        >>> [Encoded(kind, (8, 512), jnp.float32).share for kind in ("bf16", "int8", "sign")]
        [0.5, 0.2578125, 0.03125]
        """
        shape = jax.ShapeDtypeStruct(self.shape, self.dtype)
        codes = jax.eval_shape(self.encode, shape)
        of_codes = sum(code.size * code.dtype.itemsize for code in codes)
        return of_codes / (shape.size * shape.dtype.itemsize)

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """The codes of an activation.

        Encodings with scales return these as a second array.

        >>> codes, scales = Encoded("int8", (4, 256), jnp.float32).encode(jnp.ones((4, 256)))
        >>> codes.dtype.name, codes.shape, scales.shape
        ('int8', (4, 256), (2, 4))
        """
        x = x.reshape(self._rows)
        # An empty array has no largest number to make a scale of.
        if not x.size:
            return (x,)
        if self.encoding == "bf16":
            return (x.astype(jnp.bfloat16),)
        if self.encoding == "sign":
            return (self._packed((x > 0).astype(jnp.uint8), self.local),)
        blocks = self._in_blocks(x.astype(self._wide))
        scales = jnp.max(jnp.abs(blocks), -1) / _LARGEST[self.encoding]
        # What is smaller than any normal number has no inverse, and is zero.
        tiny = scales < jnp.finfo(scales.dtype).tiny
        numbers = blocks * jnp.where(tiny, 0, 1 / scales)[..., None]
        return self._codes(numbers), self._turned(scales)

    def decode(self, codes: Sequence[jax.Array]) -> jax.Array:
        """What the codes tell of the activation, in its shape and dtype.

        >>> form = Encoded("sign", (3,), jnp.float32)
        >>> form.decode(form.encode(jnp.array([-2.0, 0.0, 3.0]))).tolist()
        [nan, nan, 1.0]
        """
        return self._decoded(*codes).reshape(self.shape).astype(self.dtype)

    def _decoded(self, codes: jax.Array, scales: jax.Array | None = None) -> jax.Array:
        if self.encoding == "sign" and codes.size:
            # No number, where it is not above zero: whatever but a comparison reads it shows that.
            return jnp.where(self._unpacked(codes, self.local) == 1, 1.0, jnp.nan)
        if scales is None:
            return codes
        numbers = self._numbers(codes).astype(self._wide)
        blocks = numbers * self._turned_back(scales)[..., None]
        return self._out_of_blocks(blocks)

    @property
    def _rows(self) -> tuple[int, ...]:
        """The shape with a last dim, which a scalar lacks."""
        return self.shape or (1,)

    @property
    def _wide(self) -> Any:
        """The dtype to compute in, and of scales."""
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def _filled(self) -> int:
        """What a device has of the last dim, filled up to whole blocks."""
        return -(-self.local // self.block) * self.block

    def _by_part(self, x: jax.Array, size: int) -> jax.Array:
        """The last dim by devices, of which each has so much."""
        return x.reshape(*x.shape[:-1], -1, size)

    def _in_blocks(self, x: jax.Array) -> jax.Array:
        """The last dim as blocks, filled up with zeros."""
        if self._filled > self.local:
            x = _padded(self._by_part(x, self.local), self._filled)
            x = x.reshape(*x.shape[:-2], -1)
        return self._by_part(x, self.block)

    def _out_of_blocks(self, blocks: jax.Array) -> jax.Array:
        """The inverse of `_in_blocks`, in the shape that `Encoded` is of."""
        if self._filled > self.local:
            blocks = blocks.reshape(*blocks.shape[:-2], -1, self._filled)[..., : self.local]
        return blocks.reshape(self._rows)

    def _codes(self, numbers: jax.Array) -> jax.Array:
        """Blocks of numbers, each within what the encoding can tell, as codes."""
        flat = numbers.reshape(*numbers.shape[:-2], -1)
        if self.encoding == "fp8":
            return flat.astype(jnp.float8_e4m3fn)
        # What is not finite has no integer, and its scale says so.
        integers = jnp.nan_to_num(jnp.round(flat), posinf=0, neginf=0).astype(jnp.int8)
        if self.encoding == "int8":
            return integers
        # The lower half of a byte in two's complement is the number in four bits.
        return self._packed(integers.astype(jnp.uint8) & 15, self._filled)

    def _numbers(self, codes: jax.Array) -> jax.Array:
        """The inverse of `_codes`."""
        if self.encoding == "int4":
            # Shifted up and down again, which copies the sign into the upper half.
            codes = (self._unpacked(codes, self._filled).astype(jnp.int8) << 4) >> 4
        return self._by_part(codes, self.block)

    def _packed(self, values: jax.Array, local: int) -> jax.Array:
        """Small numbers of a last dim of which each device has `local`, several to a byte.

        Those of a byte are an eighth or half of that apart, so that whole registers are combined.
        """
        in_byte = 8 // _BITS[self.encoding]
        values = _padded(self._by_part(values, local), -(-local // in_byte) * in_byte)
        values = values.reshape(*values.shape[:-1], in_byte, -1)
        packed = jnp.sum(values << self._shifts(in_byte), -2, dtype=jnp.uint8)
        return packed.reshape(*packed.shape[:-2], -1)

    def _unpacked(self, codes: jax.Array, local: int) -> jax.Array:
        """The inverse of `_packed`."""
        bits = _BITS[self.encoding]
        in_byte = 8 // bits
        codes = self._by_part(codes, -(-local // in_byte))[..., None, :]
        values = (codes >> self._shifts(in_byte)) & (2**bits - 1)
        values = values.reshape(*values.shape[:-2], -1)[..., :local]
        return values.reshape(*values.shape[:-2], -1)

    def _shifts(self, in_byte: int) -> jax.Array:
        return jnp.arange(in_byte, dtype=jnp.uint8)[:, None] * _BITS[self.encoding]

    @property
    def _longest(self) -> int:
        """The longest dim of the scales, the number of blocks being the last."""
        shape = (*self._rows[:-1], self._rows[-1] // self.local * (self._filled // self.block))
        return shape.index(max(shape))

    def _turned(self, scales: jax.Array) -> jax.Array:
        """The scales with their longest dim last.

        TPUs fill up the last dim of an array in memory, and of blocks there are few.
        """
        return jnp.moveaxis(scales, self._longest, -1)

    def _turned_back(self, scales: jax.Array) -> jax.Array:
        """The inverse of `_turned`."""
        return jnp.moveaxis(scales, -1, self._longest)


def _padded(x: jax.Array, size: int) -> jax.Array:
    """The last dim filled up with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
