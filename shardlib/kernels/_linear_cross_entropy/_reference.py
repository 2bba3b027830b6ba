"""The cross-entropy of a linear head without its logits, in plain JAX: the specification.

Of each row, with `z = x . kernel`, softly capped to `cap * tanh(z / cap)`, and
`log Z = log sum exp z`:

    loss = log Z - (1 - smoothing) * z[target] - smoothing * mean(z) + z_loss * (log Z)^2

Products are taken in the dtype of `x` and added up in float32 or wider, in which all else is. The
rows of the kernel come in chunks, and of a chunk's logits nothing is kept: backward makes them
again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._rows import wide

CHUNK_BYTES = 2**26  # of the logits that are there at a time


class Loss(NamedTuple):
    """What a loss is, but for its arrays."""

    vocab: int  # rows of the kernel that count, on all devices together
    z_loss: float = 0.0
    smoothing: float = 0.0
    cap: float | None = None
    ignored: int = -1


def forward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    first: jax.Array,
    *,
    loss: Loss,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """The loss of each row of `x`, (rows, width), and its `log Z`.

    `kernel` is (vocabulary, width), from row `first` of it on; over `axes` devices have other rows.
    """

    def of_chunk(sums: Sums, part: jax.Array, begin: jax.Array) -> Sums:
        at = first + begin
        z, counts = _logits(x, part, at, loss)
        now = jnp.where(counts, z, -jnp.inf).max(-1)
        of_target = jnp.where(_places(part, at) == targets[:, None], z, 0).sum(-1)
        total = jnp.where(counts, jnp.exp(z - now[:, None]), 0).sum(-1)
        sum_z = jnp.where(counts, z, 0).sum(-1)
        return together(sums, Sums(now, total, of_target, sum_z))

    zeros = like(x, jnp.zeros(x.shape[0], wide(x.dtype)), kernel, targets)
    sums = over_chunks(of_chunk, Sums(zeros - jnp.inf, zeros, zeros, zeros), kernel, _at_once(x))
    return of_sums(sums, targets, loss, axes)


class Sums(NamedTuple):
    """Of each row's logits: the highest, the sum of `exp(z - highest)`, that of the target, or
    zero, and the sum of `z`.
    """

    highest: jax.Array
    total: jax.Array
    of_target: jax.Array
    sum_z: jax.Array


def together(one: Sums, other: Sums) -> Sums:
    """Of all logits, from those of two parts."""
    highest = jnp.maximum(one.highest, other.highest)
    total = one.total * scale(one.highest, highest) + other.total * scale(other.highest, highest)
    return Sums(highest, total, one.of_target + other.of_target, one.sum_z + other.sum_z)


def of_sums(
    sums: Sums, targets: jax.Array, loss: Loss, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """The loss of each row and its `log Z`, where over `axes` devices have other logits."""
    highest, total, of_target, sum_z = sums
    if axes:
        highest = lax.pmax(highest, axes)
        total = lax.psum(total * scale(sums.highest, highest), axes)
        of_target, sum_z = lax.psum(of_target, axes), lax.psum(sum_z, axes)
    log_z = highest + jnp.log(total)
    losses = log_z - (1 - loss.smoothing) * of_target - loss.smoothing / loss.vocab * sum_z
    losses += loss.z_loss * log_z**2
    # A target that is none is a mistake.
    losses = jnp.where((targets >= 0) & (targets < loss.vocab), losses, jnp.nan)
    return jnp.where(targets == loss.ignored, 0, losses), log_z


def backward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    first: jax.Array,
    log_z: jax.Array,
    gradient: jax.Array,
    *,
    loss: Loss,
) -> tuple[jax.Array, jax.Array]:
    """The gradients to `x`, of the rows of the kernel here alone, and to the kernel, of the rows of
    `x` here alone.
    """
    gradient, of_log_z = of_rows(targets, log_z, gradient, loss)

    def of_chunk(gradients: Any, part: jax.Array, begin: jax.Array) -> Any:
        (of_x, of_kernel), at = gradients, first + begin
        z, counts = _logits(x, part, at, loss)
        is_target = _places(part, at) == targets[:, None]
        columns = (log_z[:, None], of_log_z[:, None], gradient[:, None])
        of_z = jnp.where(counts, of_logits(z, is_target, *columns, loss), 0).astype(x.dtype)
        of_part = product(of_z, x, 0, 0).astype(kernel.dtype)
        of_x += product(of_z, part.astype(x.dtype), 1, 0)
        return of_x, lax.dynamic_update_slice_in_dim(of_kernel, of_part, begin, 0)

    begin = tuple(
        like(x, jnp.zeros(one.shape, kind), kernel, targets)
        for one, kind in ((x, log_z.dtype), (kernel, kernel.dtype))
    )
    return over_chunks(of_chunk, begin, kernel, _at_once(x))


def of_rows(
    targets: jax.Array, log_z: jax.Array, gradient: jax.Array, loss: Loss
) -> tuple[jax.Array, jax.Array]:
    """The gradient to each row's loss, none where it is ignored, and to its `log Z`."""
    gradient = jnp.where(targets == loss.ignored, 0, gradient).astype(log_z.dtype)
    return gradient, gradient * (1 + 2 * loss.z_loss * log_z)


def of_logits(
    z: jax.Array,
    is_target: jax.Array,
    log_z: jax.Array,
    of_log_z: jax.Array,
    gradient: jax.Array,
    loss: Loss,
) -> jax.Array:
    """The gradient to logits, before the cap."""
    of_z = of_log_z * jnp.exp(z - log_z) - jnp.where(is_target, gradient * (1 - loss.smoothing), 0)
    if loss.smoothing:
        of_z -= gradient * (loss.smoothing / loss.vocab)
    return of_z if loss.cap is None else of_z * (1 - (z / loss.cap) ** 2)


def _logits(
    x: jax.Array, part: jax.Array, at: jax.Array, loss: Loss
) -> tuple[jax.Array, jax.Array]:
    """The logits of some rows of the kernel, and which of these count."""
    return capped(product(x, part.astype(x.dtype), 1, 1), loss), _places(part, at) < loss.vocab


def capped(z: jax.Array, loss: Loss) -> jax.Array:
    """Logits softly kept within the cap."""
    return z if loss.cap is None else loss.cap * jnp.tanh(z / loss.cap)


def _at_once(x: jax.Array) -> int:
    return CHUNK_BYTES // (4 * x.shape[0])


def _places(part: jax.Array, at: jax.Array) -> jax.Array:
    return at + jnp.arange(part.shape[0])


def product(a: jax.Array, b: jax.Array, of_a: int, of_b: int) -> jax.Array:
    """The sum over a dim of each, in float32 or wider."""
    return lax.dot_general(
        a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=wide(a.dtype)
    )


def scale(part: jax.Array, highest: jax.Array) -> jax.Array:
    """What a sum of `exp(z - part)` counts in one of `exp(z - highest)`: nothing where it has no
    logits.
    """
    return jnp.where(part == -jnp.inf, 0, jnp.exp(part - highest))


def over_chunks(
    of_chunk: Callable[[Any, jax.Array, jax.Array], Any],
    carry: Any,
    kernel: jax.Array,
    at_once: int,
) -> Any:
    """Carry something through chunks of the kernel's rows in turn:
    `of_chunk(carry, rows, where they begin)`.

    A chunk has about as many of them as are wanted `at_once`, and 128 at least; the last may be
    smaller.
    """
    vocab = kernel.shape[0]
    chunk = min(vocab, max(128, at_once // 128 * 128))
    whole, rest = divmod(vocab, chunk)

    def at(carry: Any, k: jax.Array) -> tuple[Any, None]:
        return of_chunk(carry, lax.dynamic_slice_in_dim(kernel, k * chunk, chunk), k * chunk), None

    if whole == 1:
        carry, _ = at(carry, jnp.int32(0))
    else:
        carry, _ = lax.scan(at, carry, jnp.arange(whole, dtype=jnp.int32))
    return of_chunk(carry, kernel[whole * chunk :], jnp.int32(whole * chunk)) if rest else carry


def like(x: jax.Array, zeros: jax.Array, *others: jax.Array) -> jax.Array:
    """Zeros that differ between devices as arrays do, where JAX keeps account of that."""
    for other in (x, *others):
        zeros += jnp.zeros_like(other[(0,) * other.ndim]).astype(zeros.dtype)
    return zeros
