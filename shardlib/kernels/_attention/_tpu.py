"""Attention on a TPU by kernels of our own, for what JAX's splash kernel does not take.

Positions of queries and keys may be known to the running program only, as where devices have
different parts of a sequence. What is known to differ between devices may be kept account of, and
values may have another size than keys. Scores are made block by block in fast memory, with the
queries along the lanes, so that what each query has is a vector of lanes:

                queries ->
      keys    +------------+
        |     |   scores   |     sums down the columns: one number for each query
        v     +------------+

Three kernels walk over pairs of blocks. The operand of the inner loop is fetched again for each
step of the outer one:

    kernel              outer loop         inner loop                    keeps in fast memory
    attention_forward   blocks of queries  blocks of keys                sums of each query
    attention_dq        blocks of queries  blocks of keys                the gradient to queries
    attention_dkv       blocks of keys     heads and blocks of queries   gradients to keys, values

A pair in which the band of the mask leaves nothing is neither computed nor fetched: its step asks
for a block that is there already.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardlib.kernels._attention._mask import Mask
from shardlib.kernels._attention._reference import (
    Attention,
    SideInputs,
    sink_gradient,
    softmax_residuals,
)
from shardlib.kernels._choice import Task, device_here
from shardlib.kernels._rows import Role, merged
from shardlib.kernels._tpu import (
    LANES,
    MIB,
    interpreted,
    parameters,
    shaped,
    supported,
    vmem_bytes,
)

SCORE = 20  # bytes of fast memory for each score of a block, and for what is computed of it


def refuses(task: Task) -> str | None:
    """Why the kernels cannot do a task; None if they can.

    The text continues a sentence that begins with the implementation's name.
    """
    wrong_dtype = supported(task)
    if wrong_dtype is not None:
        return wrong_dtype
    attention: Attention = task.definition
    if attention.mask.block_mask is not None:
        return "has no patterns of blocks"
    q, k, v = (task.arrays[name] for name in ("q", "k", "v"))
    for what, length in (("queries", q.shape[1]), ("keys", k.shape[1])):
        if length % LANES:
            return (
                f"takes lengths that {LANES} divides, and there are {length} {what} on a device; "
                f"pad them to {length + -length % LANES}, with a segment of their own"
            )
    largest = 512
    if max(q.shape[3], v.shape[3]) > largest or not v.shape[3]:
        return f"takes heads of up to {largest} numbers; here {q.shape[3]} and {v.shape[3]}"
    return None


# What `vmap` does with the arrays of an attention: it adds sequences. What is not of a sequence is
# the same for all, or the kernels run in a loop.
_ROLES: dict[str, Role] = {
    "query_segments": "rows",
    "key_segments": "rows",
    "sinks": "shared",
    "starts": "shared",
}


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    side: SideInputs,
    *,
    attention: Attention,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The output of each query and head, and its log-sum-exp; arguments as in the reference."""
    given = _given(side, attention)
    run = merged(partial(_outputs, tuple(given), attention, simulated), *_roles(3, given))
    return run(q, k, v, *given.values())


def _given(side: SideInputs, attention: Attention) -> dict[str, jax.Array]:
    """The arrays besides queries, keys and values that there are, and where positions start."""
    starts = side.starts
    if attention.starts is not None:
        starts = jnp.array(attention.starts, jnp.int32)
    named = side._replace(starts=starts)._asdict()
    return {name: named[name] for name in _ROLES if named[name] is not None}


def _roles(of_sequences: int, given: Iterable[str]) -> list[Role]:
    """What `vmap` does with so many arrays that have sequences, and with the others."""
    roles: list[Role] = ["rows"] * of_sequences
    return roles + [_ROLES[name] for name in given]


def _outputs(
    names: tuple[str, ...],
    attention: Attention,
    simulated: bool,
    q: Any,
    k: Any,
    v: Any,
    *given: Any,
) -> tuple[jax.Array, jax.Array]:
    """The outputs and log-sum-exps of some sequences.

    Args:
        names: of the last arguments.
        attention: which attention.
        simulated: whether an interpreter runs the kernel.
        q: queries.
        k: keys.
        v: values.
        given: the other arrays.
    """
    side = SideInputs(**dict(zip(names, given, strict=True)))
    call = _Call(q, k, v, side, attention, simulated, wide_queries=True)
    batch, heads, queries, _ = call.q.shape
    y, lse = call.run(
        attention_forward,
        inner=_KEYS,
        operands=[call.query_rows(call.q), call.key_rows(call.k), call.key_rows(call.v)],
        results=[
            call.query_columns((batch, heads, v.shape[3], queries), q.dtype),
            call.query_columns((batch, heads, 1, queries), jnp.float32),
        ],
        scratch=[(1, call.query_block), (1, call.query_block), (v.shape[3], call.query_block)],
    )
    return y.transpose(0, 3, 1, 2), lse[:, :, 0].swapaxes(1, 2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    side: SideInputs,
    results: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
    *,
    attention: Attention,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients to queries, keys, values and sinks; arguments as in the reference."""
    lse, delta = softmax_residuals(results, gradients)
    given = _given(side, attention)
    run = merged(partial(_gradients, tuple(given), attention, simulated), *_roles(6, given))
    q_gradient, k_gradient, v_gradient = run(q, k, v, gradients[0], lse, delta, *given.values())
    return q_gradient, k_gradient, v_gradient, sink_gradient(side.sinks, lse, delta)


def _gradients(
    names: tuple[str, ...], attention: Attention, simulated: bool, *arrays: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients to the queries, keys and values of some sequences.

    Args:
        names: of the arrays from the seventh on.
        attention: which attention.
        simulated: whether an interpreter runs the kernels.
        arrays: queries, keys, values, the gradient to the outputs, log-sum-exps, `dy . y - dlse`
            of each query, and the other arrays.
    """
    q, k, v, y_gradient, lse, delta, *given = arrays
    side = SideInputs(**dict(zip(names, given, strict=True)))
    y_gradient = _heads_first(y_gradient)
    rows = [x.swapaxes(1, 2)[:, :, None] for x in (lse, delta)]

    def operands(call: "_Call") -> list["_Operand"]:
        of_queries = [call.query_rows(call.q), call.query_rows(y_gradient)]
        of_queries += [call.query_columns_of(x) for x in rows]
        return [*of_queries, call.key_rows(call.k), call.key_rows(call.v)]

    call = _Call(q, k, v, side, attention, simulated, wide_queries=True)
    batch, heads, queries, size = call.q.shape
    (q_gradient,) = call.run(
        attention_dq,
        inner=_KEYS,
        operands=operands(call),
        results=[call.query_columns((batch, heads, size, queries), q.dtype)],
        scratch=[(size, call.query_block)],
    )
    call = _Call(q, k, v, side, attention, simulated, wide_queries=False)
    k_gradient, v_gradient = call.run(
        attention_dkv,
        inner=_QUERIES,
        operands=operands(call),
        results=[call.key_rows(call.k), call.key_rows(call.v)],
        scratch=[(call.key_block, x.shape[3]) for x in (call.k, call.v)],
    )
    q_gradient = q_gradient.transpose(0, 3, 1, 2)
    return q_gradient, _heads_first(k_gradient), _heads_first(v_gradient)


# What the innermost dim of a grid walks over.
_KEYS, _QUERIES = "keys", "queries"


@dataclass(frozen=True)
class _Operand:
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
        """How the blocks are fetched, where `pair` gives what `place` takes of a grid's step."""
        return pl.BlockSpec(self.block, lambda *step: self.place(*pair(*step)))


class _Call:
    """The arrays of an attention with their heads first, and the blocks that kernels walk over."""

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        side: SideInputs,
        attention: Attention,
        simulated: bool,
        *,
        wide_queries: bool,
    ) -> None:
        self.q, self.k, self.v = (_heads_first(x) for x in (q, k, v))
        self.side, self.attention, self.simulated = side, attention, simulated
        self.group = q.shape[2] // k.shape[2]
        # The block that stays while others pass by is the larger: the larger it is, the less often
        # the others are fetched.
        staying, passing = 1024, 512
        if vmem_bytes(device_here().kind) < 16 * MIB:
            staying = 512
        # Of a narrow band, small blocks pass by less that nobody sees.
        mask = attention.mask
        if mask.left is not None and mask.right is not None and mask.left + mask.right < staying:
            passing = 256
        query_limit, key_limit = (staying, passing) if wide_queries else (passing, staying)
        self.query_block = _block(q.shape[1], query_limit)
        self.key_block = _block(k.shape[1], key_limit)

    def query_rows(self, x: Any) -> _Operand:
        """Of `(batch, heads, queries, size)`, the queries of a block as rows."""
        block = (1, 1, self.query_block, x.shape[3])
        return _Operand(x, block, lambda b, h, i, j: (b, h, i, 0))

    def query_columns_of(self, x: Any) -> _Operand:
        """Of `(batch, heads, size, queries)`, the queries of a block as columns."""
        block = (1, 1, x.shape[2], self.query_block)
        return _Operand(x, block, lambda b, h, i, j: (b, h, 0, i))

    def query_columns(self, shape: tuple[int, ...], dtype: Any) -> _Operand:
        """The same of an array that is to be made."""
        return self.query_columns_of(shaped(shape, dtype, self.q))

    def key_rows(self, x: Any) -> _Operand:
        """Of `(batch, key heads, keys, size)`, the keys of a block as rows."""
        block = (1, 1, self.key_block, x.shape[3])
        return _Operand(x, block, lambda b, h, i, j: (b, h // self.group, j, 0))

    def run(
        self,
        body: Callable[..., None],
        *,
        inner: str,
        operands: list[_Operand],
        results: list[_Operand],
        scratch: list[tuple[int, int]],
    ) -> Any:
        """Run a kernel over all pairs of blocks.

        Args:
            body: the kernel, of a `Pair` and of references.
            inner: what the innermost dim of the grid walks over, keys or queries.
            operands: what it reads.
            results: what it writes.
            scratch: the shapes of what it keeps in fast memory, in float32.
        """
        batch, heads, queries, _ = self.q.shape
        query_blocks, key_blocks = queries // self.query_block, self.k.shape[2] // self.key_block
        grid: tuple[int, ...] = (batch, heads, query_blocks, key_blocks)
        if inner == _QUERIES:
            # Each key head is served the queries of its whole group, one head after the other.
            grid = (batch, heads // self.group, key_blocks, self.group * query_blocks)
        pairs = _Pairs(self, inner, query_blocks, key_blocks)
        side = self._side_operands()
        out_shapes = [shaped(x.x.shape, x.x.dtype, self.q) for x in results]
        return pl.pallas_call(
            partial(_run_pair, body, pairs, self.attention, len(side), self._names()),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[x.spec(pairs.fetched) for x in (*side, *operands)],
                out_specs=[x.spec(pairs.at_outer) for x in results],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=out_shapes,
            compiler_params=parameters(
                ("parallel", "parallel", "parallel", "arbitrary"), self._used()
            ),
            interpret=interpreted(self.simulated, self.q),
            name=body.__name__,
        )(self.side.starts, *(x.x for x in side), *(x.x for x in operands))

    def _used(self) -> int:
        """The bytes of fast memory that blocks and scores take."""
        sizes = self.q.shape[3] + self.v.shape[3]
        # In and out, twice each, and sums in float32.
        blocks = (self.query_block + self.key_block) * max(sizes, 2 * LANES) * 12
        return SCORE * self.query_block * self.key_block + blocks

    def _names(self) -> tuple[str, ...]:
        """Which arrays `_side_operands` gives, in its order."""
        names = []
        if self.side.query_segments is not None:
            names += ["query_segments", "key_segments"]
        if self.side.sinks is not None:
            names.append("sinks")
        return tuple(names)

    def _side_operands(self) -> list[_Operand]:
        """Segments as rows of lanes, and sinks, as far as there are any."""
        side, operands = self.side, []
        if side.query_segments is not None:
            queries, keys = side.query_segments[:, None], side.key_segments[:, None]
            block = (1, 1, self.query_block)
            operands.append(_Operand(queries, block, lambda b, h, i, j: (b, 0, i)))
            block = (1, 1, self.key_block)
            operands.append(_Operand(keys, block, lambda b, h, i, j: (b, 0, j)))
        if side.sinks is not None:
            sinks = jnp.broadcast_to(
                side.sinks.astype(jnp.float32)[:, None, None], (side.sinks.size, 1, LANES)
            )
            operands.append(_Operand(sinks, (1, 1, LANES), lambda b, h, i, j: (h, 0, 0)))
        return operands


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Which pair of blocks each step of a grid is for."""

    call: _Call
    inner: str
    query_blocks: int
    key_blocks: int

    def pair(self, *step: Any) -> tuple[Any, Any, Any, Any]:
        """The sequence, the head, the block of queries and the block of keys of a step."""
        b, h, outer, inner = step
        if self.inner == _KEYS:
            return b, h, outer, inner
        head = h * self.call.group + inner // self.query_blocks
        return b, head, inner % self.query_blocks, outer

    def at_outer(self, *step: Any) -> tuple[Any, Any, Any, Any]:
        """The pair of a step, for what only the outer loop moves on."""
        return self.pair(*step[:-1])

    def fetched(self, *step: Any) -> tuple[Any, Any, Any, Any]:
        """The pair whose blocks are in fast memory in a step.

        Where the band leaves nothing of the step's own pair, it is the nearest of which it leaves
        something: that was fetched before, or is fetched next.
        """
        starts = step[-1]
        b, h, i, j = self.pair(*step[:-1])
        mask = self.call.attention.mask
        if self.inner == _KEYS:
            first, last = _seen_keys(mask, starts, i, self.call)
            return b, h, i, jnp.clip(jnp.clip(j, first, last), 0, self.key_blocks - 1)
        first, last = _seen_by_queries(mask, starts, j, self.call)
        return b, h, jnp.clip(jnp.clip(i, first, last), 0, self.query_blocks - 1), j


def _seen_keys(mask: Mask, starts: Any, i: Any, call: _Call) -> tuple[Any, Any]:
    """The first and the last block of keys that a block of queries sees by the band."""
    first_query = starts[0] - starts[1] + i * call.query_block
    first, last = jnp.int32(0), jnp.int32(2**30)
    if mask.left is not None:
        first = jnp.floor_divide(first_query - mask.left, call.key_block)
    if mask.right is not None:
        last_query = first_query + call.query_block - 1
        last = jnp.floor_divide(last_query + mask.right, call.key_block)
    return first, last


def _seen_by_queries(mask: Mask, starts: Any, j: Any, call: _Call) -> tuple[Any, Any]:
    """The first and the last block of queries that see a block of keys by the band."""
    first_key = starts[1] - starts[0] + j * call.key_block
    first, last = jnp.int32(0), jnp.int32(2**30)
    if mask.right is not None:
        first = jnp.floor_divide(first_key - mask.right, call.query_block)
    if mask.left is not None:
        last_key = first_key + call.key_block - 1
        last = jnp.floor_divide(last_key + mask.left, call.query_block)
    return first, last


class Pair:
    """What a kernel knows of the pair of blocks in one of its steps.

    Attributes:
        attention: which attention.
        is_first: whether it is the first of the inner loop.
        is_last: whether it is the last.
        is_seen: whether the band leaves anything of it.
        sink: of its head, or None.
    """

    def __init__(
        self, attention: Attention, pairs: _Pairs, starts_ref: Any, side: dict[str, Any]
    ) -> None:
        step = [pl.program_id(dim) for dim in range(4)]
        inner_steps = pl.num_programs(3)
        self.attention = attention
        self.is_first, self.is_last = step[3] == 0, step[3] == inner_steps - 1
        _, _, i, j = pairs.pair(*step)
        call = pairs.call
        self._shape = call.key_block, call.query_block
        # The distance of the first key to the first query.
        self._distance = starts_ref[1] + j * call.key_block
        self._distance -= starts_ref[0] + i * call.query_block
        self._segments = None
        if "query_segments" in side:
            self._segments = side["query_segments"], side["key_segments"]
        self.sink = side["sinks"][0, :, :1] if "sinks" in side else None
        mask = attention.mask
        self.is_seen = jnp.bool_(True)
        if mask.right is not None:
            self.is_seen &= self._distance - (call.query_block - 1) <= mask.right
        if mask.left is not None:
            self.is_seen &= self._distance + call.key_block - 1 >= -mask.left

    def scores(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The scores `(keys, queries)`, and which of them count; None if all do."""
        z = _product(k, q, 1, 1) * self.attention.scale
        if self.attention.cap is not None:
            z = self.attention.cap * jnp.tanh(z / self.attention.cap)
        return z, self._seen()

    def _seen(self) -> jax.Array | None:
        """Which keys each query sees, `(keys, queries)`; None if that is all."""
        mask, seen = self.attention.mask, None
        if mask.left is not None or mask.right is not None:
            key = lax.broadcasted_iota(jnp.int32, self._shape, 0)
            query = lax.broadcasted_iota(jnp.int32, self._shape, 1)
            distance = key - query + self._distance
            if mask.right is not None:
                seen = distance <= mask.right
            if mask.left is not None:
                within = distance >= -mask.left
                seen = within if seen is None else seen & within
        if self._segments is not None:
            queries, keys = self._segments
            # Keys are along the rows of scores: their ids are turned into a column.
            column = jnp.broadcast_to(keys[0], (LANES, self._shape[0])).T[:, :1]
            same = column == queries[0]
            seen = same if seen is None else seen & same
        return seen

    def score_gradients(
        self, q: Any, y_gradient: Any, lse: Any, delta: Any, k: Any, v: Any
    ) -> tuple[jax.Array, jax.Array]:
        """The shares of keys in queries, and the gradients to their products, `(keys, queries)`.

        Args:
            q: the queries, as rows.
            y_gradient: the gradient to their outputs.
            lse: a row of their log-sum-exps.
            delta: a row of `dy . y - dlse`.
            k: the keys, as rows.
            v: their values.
        """
        z, seen = self.scores(q, k)
        p = jnp.exp(z - lse)
        if seen is not None:
            p = jnp.where(seen, p, 0)
        dz = p * (_product(v, y_gradient, 1, 1) - delta)
        cap = self.attention.cap
        if cap is not None:
            dz *= 1 - (z / cap) ** 2
        return p, dz * self.attention.scale


def _run_pair(
    body: Callable[..., None],
    pairs: _Pairs,
    attention: Attention,
    side_count: int,
    names: tuple[str, ...],
    starts_ref: Any,
    *refs: Any,
) -> None:
    """Call a kernel's body with what it knows of its pair, and with its references.

    Args:
        body: the kernel.
        pairs: which pair each step is for.
        attention: which attention.
        side_count: how many of the references are to segments and sinks.
        names: which these are.
        starts_ref: to the positions of the first query and of the first key.
        refs: to operands, results and scratch.
    """
    side = dict(zip(names, (ref[...] for ref in refs[:side_count]), strict=True))
    body(Pair(attention, pairs, starts_ref, side), *refs[side_count:])


def attention_forward(
    pair: Pair,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    y_ref: Any,
    lse_ref: Any,
    highest_ref: Any,
    total_ref: Any,
    sum_ref: Any,
) -> None:
    """Add a block of keys to the sums of a block of queries; see the reference.

    Args:
        pair: of blocks.
        q_ref: to the queries, as rows.
        k_ref: to the keys, as rows.
        v_ref: to the values, as rows.
        y_ref: to the outputs, as columns.
        lse_ref: to the log-sum-exps, a row.
        highest_ref: to the highest scores so far, a row.
        total_ref: to the sums of exponentials, a row.
        sum_ref: to the sums of values, as columns.
    """

    @pl.when(pair.is_first)
    def _() -> None:
        highest, total = jnp.full_like(highest_ref, -jnp.inf), jnp.zeros_like(total_ref)
        # A sink is a score that was seen before all others, and has no value.
        if pair.sink is not None:
            highest, total = jnp.broadcast_to(pair.sink, highest.shape), total + 1
        highest_ref[...], total_ref[...] = highest, total
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(pair.is_seen)
    def _() -> None:
        z, seen = pair.scores(q_ref[0, 0], k_ref[0, 0])
        if seen is not None:
            z = jnp.where(seen, z, -jnp.inf)
        before = highest_ref[...]
        highest = jnp.maximum(before, z.max(0, keepdims=True))
        # Where nothing was seen yet, the difference of two infinities would be no number.
        reference = jnp.where(highest == -jnp.inf, 0, highest)
        rescale = jnp.exp(before - reference)
        e = jnp.exp(z - reference)
        v = v_ref[0, 0]
        highest_ref[...] = highest
        total_ref[...] = total_ref[...] * rescale + e.sum(0, keepdims=True)
        sum_ref[...] = sum_ref[...] * rescale + _product(v, e.astype(v.dtype), 0, 0)

    @pl.when(pair.is_last)
    def _() -> None:
        total = total_ref[...]
        divisor = jnp.where(total == 0, 1, total)
        y_ref[0, 0] = (sum_ref[...] / divisor).astype(y_ref.dtype)
        lse_ref[0, 0] = jnp.where(total == 0, -jnp.inf, highest_ref[...] + jnp.log(divisor))


def attention_dq(
    pair: Pair,
    q_ref: Any,
    y_gradient_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_gradient_ref: Any,
    sum_ref: Any,
) -> None:
    """Add a block of keys to the gradient to a block of queries.

    Args:
        pair: of blocks.
        q_ref: to the queries, as rows.
        y_gradient_ref: to the gradient to their outputs, as rows.
        lse_ref: to their log-sum-exps, a row.
        delta_ref: to `dy . y - dlse`, a row.
        k_ref: to the keys, as rows.
        v_ref: to the values, as rows.
        q_gradient_ref: to the gradient to queries, as columns.
        sum_ref: to the same, so far.
    """

    @pl.when(pair.is_first)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(pair.is_seen)
    def _() -> None:
        refs = (q_ref, y_gradient_ref, lse_ref, delta_ref, k_ref, v_ref)
        _, dz = pair.score_gradients(*(ref[0, 0] for ref in refs))
        k = k_ref[0, 0]
        sum_ref[...] += _product(k, dz.astype(k.dtype), 0, 0)

    @pl.when(pair.is_last)
    def _() -> None:
        q_gradient_ref[0, 0] = sum_ref[...].astype(q_gradient_ref.dtype)


def attention_dkv(
    pair: Pair,
    q_ref: Any,
    y_gradient_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    k_ref: Any,
    v_ref: Any,
    k_gradient_ref: Any,
    v_gradient_ref: Any,
    k_sum_ref: Any,
    v_sum_ref: Any,
) -> None:
    """Add a block of queries of a head to the gradients to a block of keys and values.

    Args:
        pair: of blocks.
        q_ref: to the queries, as rows.
        y_gradient_ref: to the gradient to their outputs, as rows.
        lse_ref: to their log-sum-exps, a row.
        delta_ref: to `dy . y - dlse`, a row.
        k_ref: to the keys, as rows.
        v_ref: to the values, as rows.
        k_gradient_ref: to the gradient to keys, as rows.
        v_gradient_ref: to the gradient to values, as rows.
        k_sum_ref: to the gradient to keys, so far.
        v_sum_ref: to the gradient to values, so far.
    """

    @pl.when(pair.is_first)
    def _() -> None:
        k_sum_ref[...] = jnp.zeros_like(k_sum_ref)
        v_sum_ref[...] = jnp.zeros_like(v_sum_ref)

    @pl.when(pair.is_seen)
    def _() -> None:
        refs = (q_ref, y_gradient_ref, lse_ref, delta_ref, k_ref, v_ref)
        p, dz = pair.score_gradients(*(ref[0, 0] for ref in refs))
        q, dy = q_ref[0, 0], y_gradient_ref[0, 0]
        k_sum_ref[...] += _product(dz.astype(q.dtype), q, 1, 0)
        v_sum_ref[...] += _product(p.astype(dy.dtype), dy, 1, 0)

    @pl.when(pair.is_last)
    def _() -> None:
        k_gradient_ref[0, 0] = k_sum_ref[...].astype(k_gradient_ref.dtype)
        v_gradient_ref[0, 0] = v_sum_ref[...].astype(v_gradient_ref.dtype)


def _product(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
    """The product of two blocks over a dim of each, in float32."""
    dims = (((x_dim,), (y_dim,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _block(length: int, limit: int) -> int:
    """How many of so many queries or keys a block has, in whole tiles that divide the length."""
    tiles = length // LANES
    for count in range(limit // LANES, 1, -1):
        if tiles % count == 0:
            return count * LANES
    return LANES


def _heads_first(x: jax.Array) -> jax.Array:
    """The array with its second dim and its third exchanged: positions and heads."""
    return x.swapaxes(1, 2)
