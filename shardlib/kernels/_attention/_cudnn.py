"""Attention on NVIDIA's GPUs by cuDNN, which comes with JAX for GPUs.

Forward gives the log-sum-exp too, and backward is called by itself with what forward gave. JAX has
both as a derivative of one function; its parameters, which versions of JAX have more or fewer of,
are filled in by their names.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from shardlib.kernels._attention._reference import Attention, Beside
from shardlib.kernels._choice import Task

# What cuDNN takes of a head in backward on every GPU since Hopper.
LARGEST = 128


def refuses(task: Task) -> str | None:
    """Why cuDNN cannot do a task; None if it can.

    The text continues a sentence that begins with the implementation's name.
    """
    attention: Attention = task.definition
    q, k, v = (task.arrays[name] for name in ("q", "k", "v"))
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"attends in bfloat16 or float16; not {q.dtype}"
    if max(q.shape[3], v.shape[3]) > LARGEST or q.shape[3] % 8 or v.shape[3] % 8:
        return (
            f"takes heads whose size 8 divides, of at most {LARGEST}; here {q.shape[3]}, and "
            f"values of {v.shape[3]}"
        )
    if attention.starts is None or attention.starts[0] != attention.starts[1]:
        return (
            "takes queries and keys that start at one position, which is known before the program "
            "runs"
        )
    absent = {
        "segments": "query_segments" in task.arrays,
        "sinks": "sinks" in task.arrays,
        "a soft cap": attention.cap is not None,
        "patterns of blocks": attention.mask.blocks is not None,
        "a gradient to the log-sum-exp": attention.with_lse,
    }
    lacking = [name for name, asked in absent.items() if asked]
    if lacking:
        return f"has no {' and no '.join(lacking)}"
    mask = attention.mask
    if mask.right not in (None, 0) or (mask.left is not None and mask.right is None):
        return "takes a causal mask or none, and a window to the left of a causal one"
    if mask.left is not None and q.shape[1] != k.shape[1]:
        return "takes a window of as many queries as keys"
    return None


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, beside: Beside, *, attention: Attention
) -> tuple[jax.Array, jax.Array]:
    """What each query takes from the values, and its log-sum-exp; arguments as in the reference."""
    mask = attention.mask
    results: Any = cudnn.dot_product_attention(
        q,
        k,
        v,
        scale=attention.scale,
        mask_type=_mask_type(attention),
        # cuDNN counts the query's own position.
        sliding_window_length=None if mask.left is None else mask.left + 1,
        return_residual=True,
    )
    y, lse = results
    return y, lse.swapaxes(1, 2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beside: Beside,
    results: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
    *,
    attention: Attention,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """The gradients to queries, keys and values; arguments as in the reference.

    Nobody was given the log-sum-exp, so that there is none to it.
    """
    mask = attention.mask
    none = jnp.zeros(0, q.dtype)
    rule: Any = cudnn._dot_product_attention_bwd_rule
    parameters = inspect.signature(rule).parameters
    values = {
        "scale": attention.scale,
        "seed": 42,  # of a dropout that is not asked for
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient to one
        "mask_type": _mask_type(attention),
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None if mask.left is None else mask.left + 1,
        "score_mod": None,
        "is_training": True,
        "cudnn_version": None,
        "return_residual": False,
    }
    static = [values[name] for name in parameters if name in values]
    y, lse = results
    # Seven arrays that are left out: a bias, lengths, offsets and tables of pages.
    saved: list[Any] = [q, k, v, *[none] * 7]
    if "score_mod" in parameters:
        saved.append(())
    saved += [lse.swapaxes(1, 2), y]
    q_gradient, k_gradient, v_gradient, *_ = rule(*static, tuple(saved), gradients[0])
    return q_gradient, k_gradient, v_gradient, None


def _mask_type(attention: Attention) -> Any:
    """The mask as cuDNN calls it."""
    if attention.mask.right == 0:
        return cudnn.MaskType.CAUSAL
    return cudnn.MaskType.NO_MASK
