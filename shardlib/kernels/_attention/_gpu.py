"""Attention on a GPU of the Hopper generation by kernels of our own, for what cuDNN does not take.

They take segments, sinks, soft caps, windows on both sides and values of another size than keys,
and give the log-sum-exp. Positions of queries and keys may be known to the running program only,
for example where devices have different parts of a sequence. The kernels run under
`shard_map(..., check_vma=True)` too. Lengths and sizes of heads are padded to what the matrix unit
takes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.kernels._attention._gpu_kernels import DK, DKV, DQ, DV, FORWARD
from shardlib.kernels._attention._gpu_rows import Body, run
from shardlib.kernels._attention._gpu_walk import KEYS, QUERIES, TILE, WIDTH, Result, Walk
from shardlib.kernels._attention._merged import run_merged
from shardlib.kernels._attention._reference import (
    Attention,
    SideInputs,
    sink_gradient,
    softmax_residuals,
)
from shardlib.kernels._choice import Task
from shardlib.kernels._gpu import generation, refuses_device

LARGEST_HEAD = 256  # numbers of a head or value: registers hold the sums of no more


def refuses(task: Task) -> str | None:
    """Why the kernels cannot do a task; None if they can.

    The text continues a sentence that begins with the implementation's name.
    """
    wrong_device = refuses_device(task)
    if wrong_device is not None:
        return wrong_device
    assert task.device is not None
    if generation(task.device.kind) != "hopper":
        return f"is for GPUs of the generation Hopper, and this is {task.device.kind}"
    return _refuses_arrays(task) or _refuses_sizes(task)


def _refuses_arrays(task: Task) -> str | None:
    """Why the kernels cannot take dtypes or the mask of a task; None if they can."""
    q = task.arrays["q"]
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"attends in bfloat16 or float16; not {q.dtype}"
    if "query_segments" in task.arrays:
        ids = {str(task.arrays[name].dtype) for name in ("query_segments", "key_segments")}
        if ids != {"int32"}:
            return f"compares segment ids of 32 bits; not {', '.join(sorted(ids))}"
    attention: Attention = task.definition
    if attention.mask.block_mask is not None:
        return "has no patterns of blocks"
    return None


def _refuses_sizes(task: Task) -> str | None:
    """Why the kernels cannot take the sizes of heads and values; None if they can."""
    size, value_size = task.arrays["q"].shape[3], task.arrays["v"].shape[3]
    if not value_size:
        return "takes values of at least one number, and these have none"
    if max(size, value_size) > LARGEST_HEAD:
        return (
            f"takes heads and values of at most {LARGEST_HEAD} numbers; here {size} and "
            f"{value_size}"
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
    batch, queries, heads, _ = q.shape
    arrays = {"q": _padded(q), "k": _padded(k), "v": _padded(v)} | _side_arrays(side)
    if side.sinks is not None:
        arrays["sinks"] = side.sinks.astype(jnp.float32)
    length, size = arrays["q"].shape[1], arrays["v"].shape[3]
    y_result = Result((batch, length, heads, size), q.dtype, "q")
    lse_result = Result((batch, heads, length), jnp.float32)
    # For larger heads and values, scores of 128 columns would leave too few registers for the sums.
    block = 128 if _largest_size(arrays) <= 128 else 64
    results = (y_result, lse_result)
    walk = Walk(attention, arrays, QUERIES, block, k.shape[1], results, simulated)
    y, lse = run(FORWARD, walk)
    return y[:, :queries, :, : v.shape[3]], lse[:, :, :queries].swapaxes(1, 2)


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
    q, k, v, y_gradient, lse, delta = sequences
    # Names decide which arrays belong to queries, and which to keys; see `_gpu_walk`.
    matrices = {"q": q, "y_gradient": y_gradient, "k": k, "v": v}
    arrays = {name: _padded(x) for name, x in matrices.items()}
    # With an infinite log-sum-exp, a query that is padding adds nothing to any gradient.
    arrays["lse"] = _padded_vector(lse.swapaxes(1, 2), jnp.inf)
    arrays["delta"] = _padded_vector(delta.swapaxes(1, 2), 0)
    arrays |= _side_arrays(side)

    def gradients(body: Body, rows: str, *names: str) -> list[jax.Array]:
        columns = q.shape[1] if rows == KEYS else k.shape[1]
        results = [Result(arrays[name].shape, q.dtype, name) for name in names]
        walk = Walk(attention, arrays, rows, 64, columns, results, simulated)
        made = zip(names, run(body, walk), strict=True)
        return [_without_padding(x, matrices[name]) for name, x in made]

    (q_gradient,) = gradients(DQ, QUERIES, "q")
    # If registers cannot hold the sums of both gradients, there is a kernel for each.
    if arrays["k"].shape[3] + arrays["v"].shape[3] <= LARGEST_HEAD:
        k_gradient, v_gradient = gradients(DKV, KEYS, "k", "v")
    else:
        (k_gradient,) = gradients(DK, KEYS, "k")
        (v_gradient,) = gradients(DV, KEYS, "v")
    return q_gradient, k_gradient, v_gradient


def _largest_size(arrays: dict[str, jax.Array]) -> int:
    """The larger one of the sizes of a head and of a value."""
    return max(arrays["q"].shape[3], arrays["v"].shape[3])


def _side_arrays(side: SideInputs) -> dict[str, jax.Array]:
    """The start positions, and segments if there are any, by name."""
    arrays = {"starts": side.starts}
    if side.query_segments is not None:
        arrays["query_segments"] = _padded_vector(side.query_segments, 0)
        arrays["key_segments"] = _padded_vector(side.key_segments, 0)
    return arrays


def _padded(x: jax.Array) -> jax.Array:
    """An array `(batch, positions, heads, size)`, padded with zeros to whole tiles and steps."""
    return _pad(x, {1: -x.shape[1] % TILE, 3: -x.shape[3] % WIDTH}, 0)


def _padded_vector(x: jax.Array, value: Any) -> jax.Array:
    """An array whose last dim is positions, padded with a value to whole tiles."""
    return _pad(x, {x.ndim - 1: -x.shape[-1] % TILE}, value)


def _without_padding(x: jax.Array, like: jax.Array) -> jax.Array:
    """The array without the positions and numbers that padding added to the array `like`."""
    return x[:, : like.shape[1], :, : like.shape[3]]


def _pad(x: jax.Array, missing: dict[int, int], value: Any) -> jax.Array:
    """Append so many of a value to each of these dims.

    A pad of nothing would still be an operation in the program.
    """
    if not any(missing.values()):
        return x
    return jnp.pad(x, [(0, missing.get(dim, 0)) for dim in range(x.ndim)], constant_values=value)
