"""Attention on NVIDIA's GPUs by cuDNN, which comes with JAX for GPUs.

JAX's function has a derivative of its own, which keeps the log-sum-exp between forward and backward
and does not return it at full precision. So there is no `backward` here: JAX differentiates
`forward`.
"""

import jax
import jax.numpy as jnp

from shardlib.kernels._attention._reference import Attention, SideInputs
from shardlib.kernels._choice import Task
from shardlib.kernels._shards import automatic_axes

# The largest head that cuDNN takes in backward on every GPU since Hopper.
LARGEST = 128


def refuses(task: Task) -> str | None:
    """Why cuDNN cannot do a task; None if it can.

    The text continues a sentence that begins with the implementation's name.
    """
    attention: Attention = task.definition
    q, v = task.arrays["q"], task.arrays["v"]
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"attends in bfloat16 or float16; not {q.dtype}"
    if q.shape[3] > LARGEST or q.shape[3] % 8:
        return f"takes heads whose size 8 divides, of at most {LARGEST}; here {q.shape[3]}"
    if v.shape[3] != q.shape[3]:
        return f"takes values of the size of keys; here {v.shape[3]} and {q.shape[3]}"
    if task.differing and automatic_axes():
        # JAX's transpose of a `shard_map` inside another one does not know what varies.
        return (
            "is differentiated by JAX, which cannot do that here: what differs is kept account of "
            f"over `{', '.join(sorted(task.differing))}`, and other axes are automatic. "
            "`shard_map(..., check_vma=False)` keeps none"
        )
    return _refuses_definition(task, attention)


def _refuses_definition(task: Task, attention: Attention) -> str | None:
    """Why cuDNN cannot make or mask its scores as it is asked to; None if it can."""
    if attention.starts is None or attention.starts[0] != attention.starts[1]:
        return (
            "takes queries and keys that start at one position, which is known before the program "
            "runs"
        )
    lacking = _lacking(task, attention)
    if lacking:
        return f"has no {' and no '.join(lacking)}"
    mask = attention.mask
    if mask.right not in (None, 0) or (mask.left is not None and mask.right is None):
        return "takes a causal mask or none, and a window to the left of a causal one"
    # Queries far behind the last key would see nothing, for which cuDNN's result is not defined.
    if mask.left is not None and task.arrays["q"].shape[1] != task.arrays["k"].shape[1]:
        return "takes a window of as many queries as keys"
    return None


def _lacking(task: Task, attention: Attention) -> list[str]:
    """The names of what is asked for and cuDNN does not have."""
    asked = {
        "segments": "query_segments" in task.arrays,
        "sinks": "sinks" in task.arrays,
        "soft cap": attention.cap is not None,
        "patterns of blocks": attention.mask.block_mask is not None,
        "log-sum-exp that it gives": attention.with_lse,
    }
    return [name for name, wanted in asked.items() if wanted]


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, side: SideInputs, *, attention: Attention
) -> tuple[jax.Array, jax.Array]:
    """The output of each query and head; arguments as in the reference.

    Zeros are in the place of the log-sum-exp, which no caller asks for: see `_lacking`.
    """
    window = None
    if attention.mask.left is not None:
        window = (attention.mask.left, 0)
    y = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=attention.scale,
        is_causal=attention.mask.right == 0,
        local_window_size=window,
        implementation="cudnn",
    )
    return y, jnp.zeros(q.shape[:3], jnp.float32)
