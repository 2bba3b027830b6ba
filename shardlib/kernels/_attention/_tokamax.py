"""Attention on GPUs of the generations Hopper and Blackwell by Tokamax's kernels in Mosaic GPU.

They mask by the first and the last key that each query sees, two numbers for it. So positions may
start anywhere, and only the running program need know where. They give the highest score of each
query and the sum of its exponentials, from which the log-sum-exp is computed. Backward they take
the same two arrays, and are given the log-sum-exp as the highest score, and one as the sum. Around
them, this module does three things:

    a query that sees nothing gets arbitrary numbers, which are replaced by zeros
    backward they take no gradient to the log-sum-exp: see `_with_lse_gradient`
    they are tuned for JAX's default device, which is therefore set to a GPU of the kind for which
    the program is traced, be it present or only known to the compiler

Tokamax's public function gives no log-sum-exp and takes no positions. The class that is called here
is what it calls itself; it is private, and may move from one version to the next.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.kernels._attention._mask import Mask
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
# The versions that are known to be right. From `RENEWED` on, kernels need `RENEWED_FOR_JAX` or a
# later JAX, and those for Blackwell take longer heads backward. `BEFORE` is for an earlier JAX.
RENEWED, RENEWED_FOR_JAX = (0, 0, 17), (0, 11, 2)
BEFORE = (0, 0, 12)


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
    fits = version() == BEFORE
    if jax.__version_info__ >= RENEWED_FOR_JAX:
        fits = version() >= RENEWED
    if not fits:
        return (
            "takes Tokamax 0.0.12 with JAX before 0.11.2, and with others 0.0.17 or later; here "
            f"are Tokamax {version_text()} and JAX {jax.__version__}"
        )
    return None


def _refuses_arrays(task: Task) -> str | None:
    """Why the kernels cannot take arrays of such dtypes and shapes; None if they can."""
    q = task.arrays["q"]
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"attends in bfloat16 or float16; not {q.dtype}"
    # Keys are gathered before the kernels run.
    assert task.length is not None
    for what, length in (("queries", q.shape[1]), ("keys", task.length)):
        if length % BLOCK:
            return f"takes lengths that {BLOCK} divides, and there are {length} {what} on a device"
    return _refuses_sizes(task)


def _refuses_sizes(task: Task) -> str | None:
    """Why the kernels cannot take so many numbers of a key or a value; None if they can."""
    attention: Attention = task.definition
    assert task.device is not None
    gpus = generation(task.device.kind)
    largest, largest_value = _largest_sizes(gpus)
    size, value_size = task.arrays["q"].shape[3], task.arrays["v"].shape[3]
    # The gradient to the log-sum-exp takes one number of each value: see `_with_lse_gradient`.
    if size <= largest and value_size + attention.with_lse <= largest_value:
        return None
    return (
        f"of version {version_text()} takes keys of at most {largest} numbers and values of "
        f"{largest_value}, with the log-sum-exp one less, on {gpus.capitalize()}; here they have "
        f"{size} and {value_size}"
    )


def _largest_sizes(gpus: str) -> tuple[int, int]:
    """How many numbers a key and a value may have at most, backward too.

    More do not fit a GPU's shared memory, or are more than its matrix unit takes at once.

    Args:
        gpus: the generation.
    """
    if gpus == "hopper":
        return 256, 256
    if version() < RENEWED:
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
    y, lse = results
    y_gradient, values = gradients[0], v
    # All scores of a query that sees nothing are masked. Relative to zero, instead of to minus
    # infinity, their exponentials are zero.
    highest = jnp.where(lse == -jnp.inf, 0, lse).swapaxes(1, 2)
    if attention.with_lse:
        y = _with_lse_gradient(results, gradients[1])
        y_gradient, values = _with_number(y_gradient, 1), _with_number(v, 0)
    operation, seen = _operation(), _seen(q, k, side, attention)
    with jax.default_device(_device(device_here().kind)):
        bound = operation.bind(q, k, values, **_options(seen, attention))
        options = dict(bound.kwargs)
        # Only forward is asked whether to return residuals.
        options.pop("return_residuals")
        residuals = highest, jnp.ones_like(highest)
        found = operation.vjp(residuals, y, y_gradient, *bound.args, **options)
    return found["q"], found["k"], found["v"][..., : v.shape[3]], None


def _with_lse_gradient(results: tuple[jax.Array, jax.Array], lse_gradient: jax.Array) -> jax.Array:
    """The output with one more number at its end: the negative gradient to the log-sum-exp.

    The kernels subtract `dy . y` where `dy . y - dlse` is wanted. With one more number in `dy`,
    which is one, and in each value, which is zero, their `dy . y` is `dy . y - dlse`, and nothing
    else changes.
    """
    y, lse = results
    # The gradient to a log-sum-exp of minus infinity may be nan, which must reach no key.
    further = jnp.where(lse == -jnp.inf, 0, -lse_gradient)[..., None]
    return jnp.concatenate([y.astype(further.dtype), further], -1)


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
    """Which keys each query sees, by their indices in the array; None is no bound."""

    first: jax.Array | None = None  # (1, queries)
    end: jax.Array | None = None  # (1, queries), the index after the last one
    causal: bool = False  # up to the query's own index
    nothing: jax.Array | None = None  # (queries,), which see no key; None if each sees some


def _seen(q: jax.Array, k: jax.Array, side: SideInputs, attention: Attention) -> _Seen:
    """Which keys each query sees."""
    mask, keys = attention.mask, k.shape[1]
    if mask.everything and generation(device_here().kind) == "hopper":
        return _Seen()
    starts = attention.starts
    same = starts is not None and starts[0] == starts[1] and q.shape[1] == keys
    if same and mask.left is None and mask.right == 0:
        return _Seen(causal=True)
    first_query, first_key = side.starts if starts is None else starts
    query = jnp.arange(q.shape[1], dtype=jnp.int32) + (first_query - first_key)
    first, end = _band(query, keys, mask)
    nothing = end <= first
    # On Blackwell the end is always given: otherwise keys that the kernels pad would be seen.
    if mask.left is None:
        return _Seen(end=end[None], nothing=nothing)
    return _Seen(first[None], end[None], nothing=nothing)


def _band(query: jax.Array, keys: int, mask: Mask) -> tuple[jax.Array, jax.Array]:
    """The index of the first key that each query sees by the band, and that after the last one.

    Args:
        query: the position of each query, less that of the first key.
        keys: how many there are.
        mask: the mask that has the band.
    """
    first, end = jnp.zeros_like(query), jnp.full_like(query, keys)
    # Positions are clipped before a bound is added, so that no sum overflows.
    if mask.left is not None:
        first = jnp.minimum(jnp.maximum(query, mask.left) - mask.left, keys)
    if mask.right is not None:
        last = jnp.minimum(query, keys - 1 - mask.right) + mask.right
        end = jnp.maximum(last + 1, 0)
    return first, end
