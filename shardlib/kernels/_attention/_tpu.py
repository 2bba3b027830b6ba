"""Attention on TPUs.

Scores are computed block by block in fast memory, with the queries along the lanes. So the numbers
of each query, such as its log-sum-exp, are a row of lanes:

                queries ->
      keys    +------------+
        |     |   scores   |     sums down the columns: one number for each query
        v     +------------+

Three kernels walk over pairs of blocks. The operands of the inner loop are fetched again for each
step of the outer one:

    kernel              outer loop         inner loop                    keeps in fast memory
    attention_forward   blocks of queries  blocks of keys                sums of each query
    attention_dq        blocks of queries  blocks of keys                the gradient to queries
    attention_dkv       blocks of keys     heads and blocks of queries   gradients to keys, values

A pair of which the mask hides everything is neither computed nor fetched. Pallas copies a block
only if the step before had another one. So the step of such a pair asks for the block of a pair of
the same row of which something is seen, the one before it or the one after.

Positions of queries and keys may be known to the running program only, for example where devices
have different parts of a sequence. So the index maps of the grid compute which pairs a band leaves.
Which pairs a pattern of blocks leaves is in a table that is made before; see `_tpu_pattern`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.kernels._attention._merged import run_merged
from shardlib.kernels._attention._reference import (
    Attention,
    SideInputs,
    sink_gradient,
    softmax_residuals,
)
from shardlib.kernels._attention._tpu_blocks import (
    MOST_BLOCKS,
    MOST_TABLE_ENTRIES,
    Lengths,
    fitting_blocks,
    pattern_blocks,
)
from shardlib.kernels._attention._tpu_grid import KEYS, QUERIES, KernelCall, Operand, heads_first
from shardlib.kernels._attention._tpu_kernels import (
    attention_dkv,
    attention_dq,
    attention_forward,
    run_pair,
)
from shardlib.kernels._choice import Task
from shardlib.kernels._tpu import LANES, refuses_dtypes


def refuses(task: Task) -> str | None:
    """Why the kernels cannot do a task; None if they can.

    The text continues a sentence that begins with the implementation's name.
    """
    wrong_dtype = refuses_dtypes(task)
    if wrong_dtype is not None:
        return wrong_dtype
    attention: Attention = task.definition
    q, v = task.arrays["q"], task.arrays["v"]
    # Keys are gathered before the kernels run.
    assert task.length is not None
    for what, length in (("queries", q.shape[1]), ("keys", task.length)):
        if length % LANES:
            return (
                f"takes lengths that {LANES} divides, and there are {length} {what} on a device; "
                f"pad them to {length + -length % LANES}, with a segment of their own"
            )
    if not v.shape[3]:
        return "takes values of at least one number, and these have none"
    assert task.device is not None
    fitting = fitting_blocks(q, v, attention.mask, task.device.kind)
    if not fitting:
        return (
            f"holds blocks of {LANES} queries and keys in a core's fast memory, and with heads of "
            f"{q.shape[3]} numbers and values of {v.shape[3]} they do not fit that of "
            f"{task.device.kind}"
        )
    if attention.mask.block_mask is not None:
        lengths, heads = Lengths(q.shape[1], task.length), q.shape[2]
        if pattern_blocks(fitting, lengths, attention, heads) is None:
            return (
                f"takes patterns of {MOST_TABLE_ENTRIES:,} pairs of blocks and {MOST_BLOCKS:,} "
                f"blocks in a row on a device, and that of {heads} heads, {lengths.queries} "
                f"queries and {lengths.keys} keys has more; split the heads or the queries, or "
                "give all heads one pattern"
            )
    return None


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
    return run_merged(partial(_outputs, attention, simulated), (q, k, v), side, attention)


def _outputs(
    attention: Attention, simulated: bool, side: SideInputs, q: Any, k: Any, v: Any
) -> tuple[jax.Array, jax.Array]:
    """The outputs and log-sum-exps of some sequences.

    Args:
        attention: which attention.
        simulated: whether an interpreter runs the kernel.
        side: the other arrays.
        q: queries.
        k: keys.
        v: values.
    """
    call = KernelCall(q, k, v, side, attention, simulated, KEYS)
    batch, heads, queries, _ = call.q.shape
    y, lse = call.run(
        run_pair,
        attention_forward,
        operands=[call.query_rows(call.q), call.key_rows(call.k), call.key_rows(call.v)],
        results=[
            call.query_rows(call.result((batch, heads, queries, v.shape[3]), q.dtype)),
            call.query_columns(call.result((batch, heads, 1, queries), jnp.float32)),
        ],
        scratch=[(1, call.query_block), (1, call.query_block), (v.shape[3], call.query_block)],
    )
    return heads_first(y), lse[:, :, 0].swapaxes(1, 2)


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
    sequences = (q, k, v, gradients[0], lse, delta)
    run = partial(_gradients, attention, simulated)
    return *run_merged(run, sequences, side, attention), sink_gradient(side.sinks, lse, delta)


def _gradients(
    attention: Attention, simulated: bool, side: SideInputs, *sequences: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients to the queries, keys and values of some sequences.

    Args:
        attention: which attention.
        simulated: whether an interpreter runs the kernels.
        side: the other arrays.
        sequences: queries, keys, values, the gradient to the outputs, log-sum-exps, and
            `dy . y - dlse` of each query.
    """
    q, k, v, *gradients_and_rows = sequences
    to_queries = KernelCall(q, k, v, side, attention, simulated, KEYS)
    to_keys = KernelCall(q, k, v, side, attention, simulated, QUERIES)
    q_gradient = _query_gradient(to_queries, _operands(to_queries, *gradients_and_rows))
    k_gradient, v_gradient = _key_gradients(to_keys, _operands(to_keys, *gradients_and_rows))
    return q_gradient, k_gradient, v_gradient


def _operands(
    call: KernelCall, y_gradient: jax.Array, lse: jax.Array, delta: jax.Array
) -> list[Operand]:
    """What both kernels of backward read, in the order of `BackwardRefs`.

    Args:
        call: the arrays of the attention.
        y_gradient: the gradient to the outputs, (batch, queries, heads, size of a value).
        lse: (batch, queries, heads).
        delta: likewise.
    """
    rows = [x.swapaxes(1, 2)[:, :, None] for x in (lse, delta)]
    of_queries = [call.query_rows(call.q), call.query_rows(heads_first(y_gradient))]
    of_queries += [call.query_columns(x) for x in rows]
    return [*of_queries, call.key_rows(call.k), call.key_rows(call.v)]


def _query_gradient(call: KernelCall, operands: list[Operand]) -> jax.Array:
    """The gradient to the queries, (batch, queries, heads, size)."""
    (gradient,) = call.run(
        run_pair,
        attention_dq,
        operands=operands,
        results=[call.query_rows(call.q)],
        scratch=[(call.q.shape[3], call.query_block)],
    )
    return heads_first(gradient)


def _key_gradients(call: KernelCall, operands: list[Operand]) -> list[jax.Array]:
    """The gradients to keys and values, (batch, keys, key heads, size).

    Each adds up those of all query heads that the key head serves, in fast memory.
    """
    gradients = call.run(
        run_pair,
        attention_dkv,
        operands=operands,
        results=[call.key_rows(call.k), call.key_rows(call.v)],
        scratch=[(call.key_block, x.shape[3]) for x in (call.k, call.v)],
    )
    return [heads_first(x) for x in gradients]
