"""Attention on GPUs of the generations Hopper and Blackwell by Tokamax's kernels in Mosaic GPU.

They mask by the first and the last key that each query sees, two numbers for it, so that positions
may start anywhere and the running program alone may know where. Forward they skip blocks of keys
outside. They give the highest score and the sum of exponentials of each query, of which the
log-sum-exp is made, and backward they take the log-sum-exp for the highest score, with sums of one.

What is done around them:

    a query that sees nothing gets arbitrary numbers, which are replaced by zeros here
    backward they add up `dy . y` of each query, and take no gradient to the log-sum-exp: where
    there is one, a further number of each value, zero for every key, brings it into that sum
    they look at JAX's default device for the GPU that they are for, which here is one of the kind
    that is traced for, be it present or only known to the compiler

The classes that are called are private in Tokamax, and are its own way to its public function,
which gives no log-sum-exp and takes no positions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.kernels._attention._reference import Attention, SideInputs
from shardlib.kernels._choice import Task, device_here
from shardlib.kernels._gpu import generation, refuses_device
from shardlib.kernels._tokamax import (
    has_module,
    imported,
    refuses_absence,
    version,
    version_text,
)
from shardlib.machine._chips import chip_of
from shardlib.machine._targets import Target

MODULE = "tokamax._src.ops.attention.pallas_mosaic_gpu"
BLOCK = 128  # lengths are whole blocks of keys, and of two warpgroups' queries
# From this version on, kernels for Blackwell take longer heads backward, and JAX has to be as new.
LONGER_HEADS = (0, 0, 17)
JAX_FOR_LONGER_HEADS = (0, 11, 2)


def refuses(task: Task) -> str | None:
    """Why Tokamax cannot do a task; None if it can.

    The text continues a sentence that begins with the implementation's name.
    """
    return (
        refuses_absence()
        or refuses_device(task)
        or _refuses_version()
        or _refuses_arrays(task)
        or _refuses_definition(task)
        or _refuses_kind(task)
    )


def _refuses_version() -> str | None:
    """Why the Tokamax that is installed cannot be called; None if it can."""
    if not has_module(MODULE):
        return f"is called by `{MODULE}`, which Tokamax {version_text()} does not have"
    if version() >= LONGER_HEADS and jax.__version_info__ < JAX_FOR_LONGER_HEADS:
        return f"of version {version_text()} is written for JAX 0.11.2 and later; here it is {jax.__version__}"
    return None


def _refuses_arrays(task: Task) -> str | None:
    """Why the kernels cannot take arrays of such dtypes and shapes; None if they can."""
    q, v = task.arrays["q"], task.arrays["v"]
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"attends in bfloat16 or float16; not {q.dtype}"
    # Keys are gathered before the kernels run.
    assert task.length is not None
    for what, length in (("queries", q.shape[1]), ("keys", task.length)):
        if length % BLOCK:
            return f"takes lengths that {BLOCK} divides, and there are {length} {what} on a device"
    assert task.device is not None
    gpus = generation(task.device.kind)
    largest, largest_value = _largest_sizes(gpus)
    attention: Attention = task.definition
    # The gradient to the log-sum-exp takes a number of each value.
    value_size = v.shape[3] + attention.with_lse
    if q.shape[3] > largest or value_size > largest_value:
        return (
            f"of version {version_text()} takes keys of at most {largest} numbers and values of "
            f"{largest_value}, with the log-sum-exp one less, on {gpus.capitalize()}; here they "
            f"have {q.shape[3]} and {v.shape[3]}"
        )
    return None


def _largest_sizes(gpus: str) -> tuple[int, int]:
    """How many numbers a key and a value may have at most, backward too.

    More do not fit a GPU's shared memory, or are more than its matrix unit takes at once.

    Args:
        gpus: the generation.
    """
    if gpus == "hopper":
        return 256, 256
    if version() < LONGER_HEADS:
        return 64, 128
    return 192, 192


def _refuses_definition(task: Task) -> str | None:
    """Why the kernels cannot mask scores as they are asked to; None if they can."""
    attention: Attention = task.definition
    asked = {
        "segments": "query_segments" in task.arrays,
        "sinks": "sinks" in task.arrays,
        "patterns of blocks": attention.mask.block_mask is not None,
    }
    lacking = [name for name, wanted in asked.items() if wanted]
    if lacking:
        return f"has no {' and no '.join(lacking)}"
    if task.differing:
        return (
            "keeps no account of what differs between devices, and here that is known over "
            f"`{', '.join(sorted(task.differing))}`: `shard_map(..., check_vma=False)` wants none"
        )
    return None


def _refuses_kind(task: Task) -> str | None:
    """Why kernels cannot be fitted to the kind of GPU; None if they can."""
    assert task.device is not None
    kind = task.device.kind
    if _device(kind) is None:
        return f"fits its kernels to a GPU, and JAX has no {kind} here, nor its compiler"
    return None


def _device(kind: str) -> Any:
    """A GPU of a kind: one that is here, or one that the compiler knows; None without either."""
    for device in jax.local_devices():
        if device.device_kind == kind:
            return device
    chip = chip_of(kind)
    if chip is None:
        return None
    try:
        return Target(f"gpu:{chip.name}:1x1x1").devices[0]
    except ValueError:  # the compiler is not installed, or was not loaded
        return None


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, side: SideInputs, *, attention: Attention
) -> tuple[jax.Array, jax.Array]:
    """The output of each query and head, and its log-sum-exp; arguments as in the reference."""
    seen = _seen(q, k, side, attention)
    with jax.default_device(_device(device_here().kind)):
        y, (highest, total) = _operation()(
            q, k, v, return_residuals=True, **_options(seen, attention)
        )
    lse = (highest + jnp.log(total)).swapaxes(1, 2)
    if seen.nothing is not None:
        sees_nothing = seen.nothing[:, None]
        y, lse = jnp.where(sees_nothing[..., None], 0, y), jnp.where(sees_nothing, -jnp.inf, lse)
    return y, lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    side: SideInputs,
    results: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
    *,
    attention: Attention,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """The gradients to queries, keys and values; arguments as in the reference."""
    (y, lse), (y_gradient, lse_gradient) = results, gradients
    seen = _seen(q, k, side, attention)
    sees_nothing = lse == -jnp.inf
    # All scores of such a query are masked: the kernels make zeros of them beside a zero.
    highest = jnp.where(sees_nothing, 0, lse).swapaxes(1, 2)
    values = v
    if attention.with_lse:
        # The kernels subtract `dy . y` where `dy . y - dlse` is wanted. So an output that is
        # `-dlse`, of gradient one, stands behind the others, for a value that is zero.
        further = jnp.where(sees_nothing, 0, -lse_gradient)[..., None]
        y = jnp.concatenate([y.astype(further.dtype), further], -1)
        y_gradient = _with_number(y_gradient, 1)
        values = _with_number(v, 0)
    operation = _operation()
    with jax.default_device(_device(device_here().kind)):
        bound = operation.bind(q, k, values, **_options(seen, attention))
        options = dict(bound.kwargs)
        # Of this op, not of its derivative.
        options.pop("return_residuals")
        residuals = highest, jnp.ones_like(highest)
        found = operation.vjp(residuals, y, y_gradient, *bound.args, **options)
    return found["q"], found["k"], found["v"][..., : v.shape[3]], None


def _with_number(x: jax.Array, number: int) -> jax.Array:
    """The array with a further number at the end of its last dim."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)], constant_values=number)


def _operation() -> Any:
    """Tokamax's attention, with its derivative."""
    return imported(MODULE).PallasMosaicGpuFlashAttention()


def _options(seen: "_Seen", attention: Attention) -> dict[str, Any]:
    """What Tokamax is told besides queries, keys and values."""
    mask = imported(MODULE).Mask(k_start=seen.first, k_end=seen.end, is_causal=seen.causal)
    return {
        "mask": mask,
        "logits_scale": attention.scale,
        "logits_soft_cap": attention.cap,
    }


class _Seen(NamedTuple):
    """Which keys each query sees, by their numbers in the array; None is no bound."""

    first: jax.Array | None = None  # (1, queries)
    end: jax.Array | None = None  # (1, queries), the number behind the last one
    causal: bool = False  # up to the query's own number
    nothing: jax.Array | None = None  # (queries,), which see no key; None if each sees some


def _seen(q: jax.Array, k: jax.Array, side: SideInputs, attention: Attention) -> _Seen:
    """Which keys each query sees."""
    mask, keys = attention.mask, k.shape[1]
    if mask.everything and generation(device_here().kind) == "hopper":
        return _Seen()
    starts = attention.starts
    same_start = starts is not None and starts[0] == starts[1]
    if same_start and mask.left is None and mask.right == 0:
        return _Seen(causal=True)
    first_query, first_key = side.starts if starts is None else starts
    # What is subtracted and added below cannot overflow, however large bounds and positions are.
    query = jnp.arange(q.shape[1], dtype=jnp.int32) + (first_query - first_key)
    first, end = jnp.zeros_like(query), jnp.full_like(query, keys)
    if mask.left is not None:
        first = jnp.minimum(jnp.maximum(query, mask.left) - mask.left, keys)
    if mask.right is not None:
        last = jnp.minimum(query, keys - 1 - mask.right) + mask.right
        end = jnp.maximum(last + 1, 0)
    nothing = end <= first
    # With a bound on Blackwell, no keys are padded in parts that would be counted as seen.
    if mask.left is None:
        return _Seen(end=end[None], nothing=nothing)
    return _Seen(first[None], end[None], nothing=nothing)
