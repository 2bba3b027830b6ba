"""Blocks of decoders, and stacks of them that are compiled once.

The suffixes of shapes and the names of dims are those of `models/layers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models.attention import Attend, Attention
from models.gpt_config import GPTConfig
from models.latent_attention import attention
from models.layers import (
    MLP,
    RESIDUAL,
    Dropout,
    Norm,
    Rotation,
    fold_in,
    lay_out,
)


class Seen(NamedTuple):
    """What a block sees beside the residual stream: the same in all blocks."""

    rotation: Rotation | None = None  # of positions
    local_rotation: Rotation | None = None  # in layers with a window, where theirs is another
    segments_BS: jax.Array | None = None  # a token sees those of its own segment
    memory_BTD: jax.Array | None = None  # what an encoder made, for cross-attention
    memory_segments_BT: jax.Array | None = None
    real_BS: jax.Array | None = None  # false for padding, which no expert should have

    def arranged(self) -> "Seen":
        """The same in the order in which the rules lay tokens out over devices, laid out so. What
        an encoder made is so already.
        """

        def laid_out(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else sl.shard(sl.context.arrange(x), "batch", "seq")

        return self._replace(
            segments_BS=laid_out(self.segments_BS),
            memory_segments_BT=laid_out(self.memory_segments_BT),
            real_BS=laid_out(self.real_BS),
        )


class Block(nnx.Module):
    """Attention, then the MLP, each beside the residual stream, with its norm before (GPT-2) or
    after (GPT-1).

    With `cross`, a decoder's: between the two it attends to what an encoder made. One that is
    `local` has the configuration's window, as all have where `full_every` does not say otherwise.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        causal: bool = True,
        cross: bool = False,
        local: bool | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if local is None:
            local = config.window is not None and config.full_every is None
        self.local = local
        self.norm_first = config.norm_first
        self.attention_norm = Norm(config, rngs=rngs)
        self.attention = attention(config, causal=causal, local=local, rngs=rngs)
        post = config.post_norms
        self.attention_post_norm = Norm(config, rngs=rngs) if post else None
        self.cross_norm = Norm(config, rngs=rngs) if cross else None
        self.cross = Attention(config, causal=False, rngs=rngs) if cross else None
        self.mlp_norm = Norm(config, rngs=rngs)
        self.mlp = self._mlp(config, rngs)
        self.mlp_post_norm = Norm(config, rngs=rngs) if post else None
        self.dropout = Dropout(config.dropout)

    def _mlp(self, config: Any, rngs: nnx.Rngs) -> Any:
        return MLP(config, rngs=rngs)

    @property
    def blocks(self) -> list["Block"]:
        """The blocks that this is, one after the other: itself."""
        return [self]

    def __call__(
        self, x_BSD: jax.Array, key: jax.Array | None, seen: Seen
    ) -> tuple[jax.Array, Any]:
        x_BSD, read_BSD = self._attended(x_BSD, key, seen)
        return self._fed(x_BSD, read_BSD, key, seen)

    def by(self, attend: Attend, x_BSD: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
        """The residual stream after the block, whose tokens see what `attend` has them see, and
        what that gives besides. Nothing is dropped.
        """
        read_BSD = self.attention_norm(x_BSD) if self.norm_first else x_BSD
        y_BSD, kept = self.attention.by(attend, read_BSD, self._rotation(seen))
        y_BSD = self._after_attention(y_BSD)
        norms = self.attention_norm, self.mlp_norm
        return self._fed(*self._added(x_BSD, y_BSD, norms, None), None, seen)[0], kept

    def _fed(
        self, x_BSD: jax.Array, read_BSD: jax.Array, key: jax.Array | None, seen: Seen
    ) -> tuple[jax.Array, Any]:
        """The residual stream after the MLP, which reads `read_BSD`, and what it gives besides."""
        return self._returned(x_BSD, self.mlp(read_BSD), key), None

    def _attended(
        self, x_BSD: jax.Array, key: jax.Array | None, seen: Seen
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream after attention, and what the MLP reads of it."""
        read_BSD = self.attention_norm(x_BSD) if self.norm_first else x_BSD
        y_BSD = self.attention(read_BSD, self._rotation(seen), seen.segments_BS)
        y_BSD = self._after_attention(y_BSD)
        if self.cross is None or self.cross_norm is None:
            norms = self.attention_norm, self.mlp_norm
            return self._added(x_BSD, y_BSD, norms, fold_in(key, 0))
        norms = self.attention_norm, self.cross_norm
        x_BSD, read_BSD = self._added(x_BSD, y_BSD, norms, fold_in(key, 0))
        memory = seen.memory_BTD, seen.memory_segments_BT
        y_BSD = self.cross(read_BSD, None, seen.segments_BS, *memory)
        return self._added(x_BSD, y_BSD, (self.cross_norm, self.mlp_norm), fold_in(key, 3))

    def _rotation(self, seen: Seen) -> Rotation | None:
        """The rotation of positions in this layer."""
        own = self.local and seen.local_rotation is not None
        return seen.local_rotation if own else seen.rotation

    def _after_attention(self, y_BSD: jax.Array) -> jax.Array:
        """What attention returns, normed where that is so."""
        norm = self.attention_post_norm
        return y_BSD if norm is None else norm(y_BSD)

    def _added(
        self,
        x_BSD: jax.Array,
        y_BSD: jax.Array,
        norms: tuple[Norm, Norm],
        key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream with `y_BSD` added, and what is read of it next.

        The norms are those of what was added and of what comes next; one of them is taken here, in
        one with the addition.
        """
        own, following = norms
        y_BSD = self.dropout(y_BSD, rngs=key)
        if self.norm_first:
            read_BSD, x_BSD = following.of_sum(x_BSD, y_BSD)
            return lay_out(x_BSD, RESIDUAL), read_BSD
        x_BSD = lay_out(own.of_sum(x_BSD, y_BSD)[0], RESIDUAL)
        return x_BSD, x_BSD

    def _returned(self, x_BSD: jax.Array, y_BSD: jax.Array, key: jax.Array | None) -> jax.Array:
        """The residual stream with what the MLP adds."""
        if self.mlp_post_norm is not None:
            y_BSD = self.mlp_post_norm(y_BSD)
        y_BSD = self.dropout(y_BSD, rngs=fold_in(key, 1))
        if self.norm_first:
            return lay_out(x_BSD + y_BSD, RESIDUAL)
        return lay_out(self.mlp_norm.of_sum(x_BSD, y_BSD)[0], RESIDUAL)


class Period(nnx.Module):
    """Blocks that have a window, and one after them that sees all tokens."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        count = config.period - 1
        self.local = nnx.List([Block(config, local=True, rngs=rngs) for _ in range(count)])
        self.full = Block(config, local=False, rngs=rngs)

    @property
    def blocks(self) -> list[Block]:
        """The blocks that this is, one after the other."""
        return [*self.local, self.full]

    def __call__(
        self, x_BSD: jax.Array, key: jax.Array | None, seen: Seen
    ) -> tuple[jax.Array, None]:
        for number, block in enumerate(self.blocks):
            x_BSD, _ = block(x_BSD, fold_in(key, number), seen)
        return x_BSD, None


@dataclass(frozen=True)
class Stack:
    """Blocks, or periods of them, as one whose parameters have a leading dim, and how many."""

    blocks: Any
    count: int


def keys_of(key: jax.Array, count: int) -> jax.Array:
    """A key of its own for each of so many blocks."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def stack(make: Callable[[nnx.Rngs], Any], count: int, rngs: nnx.Rngs, name: str = "layers") -> Any:
    """Blocks as one block whose parameters have a leading dim of this name: compiled once, whatever
    the depth.
    """

    @nnx.split_rngs(splits=count)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: name})
    def blocks(rngs: nnx.Rngs) -> Any:
        return make(rngs)

    return blocks(rngs)
