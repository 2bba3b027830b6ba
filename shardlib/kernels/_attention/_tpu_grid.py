"""The grids of our kernels for attention on TPUs: which blocks each step computes and fetches.

A grid has four dims: sequences, heads, and two that walk over blocks, the last of them the inner
loop. `Steps` says for which block of queries and which of keys a step is. The index maps of a grid
are called with the four indices of a step, and then with what is prefetched, `Prefetched`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardlib.kernels._attention._mask import Mask
from shardlib.kernels._attention._reference import Attention, SideInputs
from shardlib.kernels._attention._tpu_blocks import (
    Lengths,
    block_size,
    fitting_blocks,
    pattern_blocks,
    used_bytes,
)
from shardlib.kernels._attention._tpu_pattern import (
    KeyBlocks,
    PatternBits,
    next_seen,
    packed,
    pattern_bits,
    seen_pairs,
    unpacked,
)
from shardlib.kernels._choice import device_here
from shardlib.kernels._shards import as_varying, varying
from shardlib.kernels._tpu import (
    LANES,
    interpreted,
    parameters,
    shaped,
)
from shardlib.tracing._flops import STEPS, UNKNOWN

# What the innermost dim of a grid walks over.
KEYS, QUERIES = "keys", "queries"


class Prefetched(NamedTuple):
    """What is in scalar memory before a grid's first step, or references to it.

    Attributes:
        starts: the positions of the first query and of the first key.
        next_seen: for each pair of blocks of a head, the index in its row of the pair whose blocks
            are fetched, or -1 in a row where nothing is seen; `packed`. A pair is computed if this
            is its own index. None without a pattern.
    """

    starts: Any
    next_seen: Any = None


@dataclass(frozen=True)
class Operand:
    """An operand or a result of a kernel, and the block of it that a pair of blocks needs.

    Attributes:
        x: the array, or its shape and dtype.
        block: the shape of a block.
        place: the index of the block, from `(batch, head, query block, key block)`.
    """

    x: Any
    block: tuple[int, ...]
    place: Callable[..., Any]

    def spec(self, pair: Callable[..., Any]) -> pl.BlockSpec:
        """The spec of the blocks, where `pair` gives the arguments of `place` for a step."""
        return pl.BlockSpec(self.block, lambda *step: self.place(*pair(*step)))


class KernelCall:
    """The arrays of an attention, heads first, and the blocks that a kernel walks over."""

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        side: SideInputs,
        attention: Attention,
        simulated: bool,
        inner: str,
    ) -> None:
        """Put the heads of the arrays first, and choose blocks.

        Args:
            q: queries.
            k: keys.
            v: values.
            side: the other arrays.
            attention: which attention.
            simulated: whether an interpreter runs the kernel.
            inner: what the innermost dim of the grid walks over, keys or queries.
        """
        self.inner = inner
        self.q, self.k, self.v = (heads_first(x) for x in (q, k, v))
        self.side, self.attention, self.simulated = side, attention, simulated
        # How many heads of queries share a head of keys and values.
        self.group = q.shape[2] // k.shape[2]
        fitting = fitting_blocks(q, v, attention.mask, device_here().kind)
        assert fitting, "see `refuses`"
        blocks = fitting[0]
        # With a pattern, other blocks may be faster, or the only ones whose table has room.
        if attention.mask.block_mask is not None:
            lengths = Lengths(q.shape[1], k.shape[1])
            chosen = pattern_blocks(fitting, lengths, attention, q.shape[2])
            assert chosen is not None, "see `refuses`"
            blocks = chosen
        self.used = used_bytes(blocks, q, v, attention.mask)
        of_queries, of_keys = blocks if inner == KEYS else reversed(blocks)
        self.query_block = block_size(q.shape[1], of_queries)
        self.key_block = block_size(k.shape[1], of_keys)
        self.pattern = self._pattern_bits()

    def _pattern_bits(self) -> PatternBits | None:
        """The pattern of blocks as kernels read it; None without one."""
        block_mask = self.attention.mask.block_mask
        if block_mask is None:
            return None
        pattern = as_varying(self.side.pattern, varying(self.side.starts))
        queries, keys = self.q.shape[2], self.k.shape[2]
        key_blocks = KeyBlocks(keys // self.key_block, self.key_block)
        return pattern_bits(pattern, block_mask.size, self.side.starts, queries, key_blocks)

    def in_band(self, distance: Any) -> Any:
        """Whether the band leaves anything of a pair of blocks, as an array even without a band.

        `distance` is the position of its first key less that of its first query.
        """
        return jnp.bool_(True) & _pair_in_band(self, distance)

    def query_rows(self, x: Any) -> Operand:
        """An array `(batch, heads, queries, size)`, whose blocks have queries as rows."""
        block = (1, 1, self.query_block, x.shape[3])
        return Operand(x, block, lambda b, h, i, j: (b, h, i, 0))

    def query_columns(self, x: Any) -> Operand:
        """An array `(batch, heads, size, queries)`, whose blocks have queries as columns."""
        block = (1, 1, x.shape[2], self.query_block)
        return Operand(x, block, lambda b, h, i, j: (b, h, 0, i))

    def result(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The type of an array that is to be made."""
        return shaped(shape, dtype, self.q)

    def key_rows(self, x: Any) -> Operand:
        """An array `(batch, key heads, keys, size)`, whose blocks have keys as rows."""
        block = (1, 1, self.key_block, x.shape[3])
        return Operand(x, block, lambda b, h, i, j: (b, h // self.group, j, 0))

    def run(
        self,
        run_pair: Callable[..., None],
        body: Callable[..., None],
        *,
        operands: list[Operand],
        results: list[Operand],
        scratch: list[tuple[int, int]],
    ) -> Any:
        """Run a kernel over all pairs of blocks.

        Args:
            run_pair: calls the kernel with what it knows of a step's pair, and with references.
            body: the kernel.
            operands: what it reads.
            results: what it writes.
            scratch: the shapes of what it keeps in fast memory, in float32.
        """
        steps = Steps(self)
        side = self._side_operands()
        prefetched = [x for x in steps.prefetched() if x is not None]
        out_shapes = [shaped(x.x.shape, x.x.dtype, self.q) for x in results]
        call = pl.pallas_call(
            partial(run_pair, body, steps, list(side), len(prefetched)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(prefetched),
                grid=steps.grid,
                in_specs=[x.spec(steps.fetched) for x in (*side.values(), *operands)],
                out_specs=[x.spec(steps.at_outer) for x in results],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=out_shapes,
            compiler_params=parameters(
                ("parallel", "parallel", "parallel", "arbitrary"), self.used
            ),
            interpret=interpreted(self.simulated, self.q),
            name=body.__name__,
        )
        # A count of operations reads from this name how many steps compute something.
        with jax.named_scope(f"{STEPS}_{steps.computing()}"):
            return call(*prefetched, *(x.x for x in side.values()), *(x.x for x in operands))

    def _side_operands(self) -> dict[str, Operand]:
        """Segments as rows of lanes, sinks and the pattern's bits, as far as there are any."""
        side, operands = self.side, {}
        if side.query_segments is not None:
            queries, keys = side.query_segments[:, None], side.key_segments[:, None]
            block = (1, 1, self.query_block)
            operands["query_segments"] = Operand(queries, block, lambda b, h, i, j: (b, 0, i))
            block = (1, 1, self.key_block)
            operands["key_segments"] = Operand(keys, block, lambda b, h, i, j: (b, 0, j))
        if side.sinks is not None:
            sinks = jnp.broadcast_to(
                side.sinks.astype(jnp.float32)[:, None, None], (side.sinks.size, 1, LANES)
            )
            operands["sinks"] = Operand(sinks, (1, 1, LANES), lambda b, h, i, j: (h, 0, 0))
        if self.pattern is not None:
            words, bits = self.pattern
            block = (1, 1, words.shape[2], self.query_block)
            # All heads have the first pattern where there is only one.
            has_own = int(words.shape[0] > 1)
            operands["words"] = Operand(words, block, lambda b, h, i, j: (h * has_own, j, 0, i))
            block = (1, 1, self.key_block)
            operands["bits"] = Operand(bits[None, None], block, lambda b, h, i, j: (0, 0, j))
        return operands


@dataclass(frozen=True, eq=False)
class Steps:
    """Which pair of blocks each step of a grid is for."""

    call: KernelCall

    @property
    def query_blocks(self) -> int:
        """How many blocks of queries a head has.

        Blocks divide the length, so that none is cut off.
        """
        return self.call.q.shape[2] // self.call.query_block

    @property
    def key_blocks(self) -> int:
        """How many blocks of keys a key head has.

        Blocks divide the length, so that none is cut off.
        """
        return self.call.k.shape[2] // self.call.key_block

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the grid's dims."""
        batch, heads = self.call.q.shape[:2]
        if self.call.inner == KEYS:
            return batch, heads, self.query_blocks, self.key_blocks
        # The inner loop of a key head has the queries of all heads that it serves, head by head.
        group = self.call.group
        return batch, heads // group, self.key_blocks, group * self.query_blocks

    def computing(self) -> str:
        """How many steps compute something, as text; `UNKNOWN` if only the running program knows.

        That is so where arrays say at which positions queries and keys start, or which blocks are
        seen.
        """
        starts = self.call.attention.starts
        if starts is None or self.call.pattern is not None:
            return UNKNOWN
        i, j = np.arange(self.query_blocks)[:, None], np.arange(self.key_blocks)
        seen = _pair_in_band(self.call, distance_of(starts, i, j, self.call))
        pairs = int(np.broadcast_to(seen, (self.query_blocks, self.key_blocks)).sum())
        return str(math.prod(self.call.q.shape[:2]) * pairs)

    def pair(self, *step: Any) -> tuple[Any, Any, Any, Any]:
        """The indices of a step's sequence, head, block of queries and block of keys."""
        b, h, outer, inner = step
        if self.call.inner == KEYS:
            return b, h, outer, inner
        head = h * self.call.group + inner // self.query_blocks
        return b, head, inner % self.query_blocks, outer

    def prefetched(self) -> Prefetched:
        """The arrays that are in scalar memory before the first step."""
        starts = self.call.side.starts
        if self.call.pattern is None:
            return Prefetched(starts)
        i = jnp.arange(self.query_blocks)[:, None]
        j = jnp.arange(self.key_blocks)[None, :]
        # A pair that both touch counts as seen, even if they have no key in common there.
        seen = seen_pairs(self.call.pattern.words, self.query_blocks)
        seen = jnp.logical_and(seen, self.call.in_band(distance_of(starts, i, j, self.call)))
        if self.call.inner == QUERIES:
            seen = seen.swapaxes(1, 2)
        return Prefetched(starts, packed(next_seen(seen)))

    def is_seen(self, prefetched: Prefetched, *step: Any) -> Any:
        """Whether the mask leaves anything of a step's pair."""
        _, _, i, j = self.pair(*step)
        if self.call.pattern is None:
            return self.call.in_band(distance_of(prefetched.starts, i, j, self.call))
        own_index = j if self.call.inner == KEYS else i
        return self._next_seen(prefetched, *step) == own_index

    def _next_seen(self, prefetched: Prefetched, *step: Any) -> Any:
        """The entry of `Prefetched.next_seen` for a step."""
        assert self.call.pattern is not None
        _, h, i, j = self.pair(*step)
        # Heads that share a pattern share its table.
        if self.call.pattern.words.shape[0] == 1:
            h = 0
        if self.call.inner == KEYS:
            entry = (h * self.query_blocks + i) * self.key_blocks + j
        else:
            entry = (h * self.key_blocks + j) * self.query_blocks + i
        return unpacked(prefetched.next_seen, entry)

    def at_outer(self, *step: Any) -> tuple[Any, Any, Any, Any]:
        """The pair of a step, for results, whose blocks change with the outer loop only.

        The first four arguments are the step's indices; what was prefetched follows.
        """
        return self.pair(*step[:4])

    def fetched(self, *step: Any) -> tuple[Any, Any, Any, Any]:
        """The pair whose blocks are in fast memory in a step: the step's own one if it is seen.

        Where the band leaves nothing of that, it is the nearest pair of the same row of which it
        leaves something, or one at the edge if there is none. With a pattern, it is the next pair
        of the row of which something is seen, and behind the last such pair, the last.
        """
        prefetched = Prefetched(*step[4:])
        b, h, i, j = self.pair(*step[:4])
        mask, call = self.call.attention.mask, self.call
        if call.pattern is not None:
            # In a row where nothing is seen the index is -1, and any block will do.
            inner = jnp.maximum(self._next_seen(prefetched, *step[:4]), 0)
            return (b, h, i, inner) if call.inner == KEYS else (b, h, inner, j)
        starts = prefetched.starts
        # With very large bounds `first` and `last` may overflow. They decide only for pairs that
        # are not seen, for which any block will do.
        is_seen = call.in_band(distance_of(starts, i, j, call))
        if call.inner == KEYS:
            first, last = _seen_keys(mask, starts, i, call)
            nearest = jnp.clip(jnp.clip(j, first, last), 0, self.key_blocks - 1)
            return b, h, i, jnp.where(is_seen, j, nearest)
        first, last = _seen_by_queries(mask, starts, j, call)
        nearest = jnp.clip(jnp.clip(i, first, last), 0, self.query_blocks - 1)
        return b, h, jnp.where(is_seen, i, nearest), j


def _pair_in_band(call: KernelCall, distance: Any) -> Any:
    """Whether the band leaves anything of a pair of blocks; the plain bool `True` without a band.

    Args:
        call: whose mask and blocks.
        distance: the position of the first key of a pair, less that of its first query. It may be
            traced, or of NumPy, and then so is the result.
    """
    # A pair touches the band if its smallest `key - query` is within the right bound, and its
    # largest within the left one.
    mask, is_seen = call.attention.mask, True
    if mask.right is not None:
        is_seen &= distance - (call.query_block - 1) <= mask.right
    if mask.left is not None:
        is_seen &= distance + call.key_block - 1 >= -mask.left
    return is_seen


def distance_of(starts: Any, i: Any, j: Any, call: KernelCall) -> Any:
    """The position of the first key of a pair of blocks, less that of its first query."""
    return (starts[1] + j * call.key_block) - (starts[0] + i * call.query_block)


def _seen_keys(mask: Mask, starts: Any, i: Any, call: KernelCall) -> tuple[Any, Any]:
    """The first and the last block of keys that a block of queries sees by the band.

    Without a bound on the right, the last is one beyond all there are.
    """
    first_query = starts[0] - starts[1] + i * call.query_block
    first, last = jnp.int32(0), jnp.int32(2**30)
    if mask.left is not None:
        first = jnp.floor_divide(first_query - mask.left, call.key_block)
    if mask.right is not None:
        last_query = first_query + call.query_block - 1
        last = jnp.floor_divide(last_query + mask.right, call.key_block)
    return first, last


def _seen_by_queries(mask: Mask, starts: Any, j: Any, call: KernelCall) -> tuple[Any, Any]:
    """The first and the last block of queries that see a block of keys by the band.

    Without a bound on the left, the last is one beyond all there are.
    """
    first_key = starts[1] - starts[0] + j * call.key_block
    first, last = jnp.int32(0), jnp.int32(2**30)
    if mask.right is not None:
        first = jnp.floor_divide(first_key - mask.right, call.query_block)
    if mask.left is not None:
        last_key = first_key + call.key_block - 1
        last = jnp.floor_divide(last_key + mask.left, call.query_block)
    return first, last


def heads_first(x: jax.Array) -> jax.Array:
    """The array with its second and third dims, positions and heads, exchanged."""
    return x.swapaxes(1, 2)
