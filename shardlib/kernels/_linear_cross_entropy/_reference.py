"""The cross-entropy of a linear head without its logits, in plain JAX: the specification.

For each row, with `z = x . kernel`, softly capped to `cap * tanh(z / cap)`, and
`log Z = log sum exp z`:

    loss = log Z - (1 - smoothing) * z[target] - smoothing * mean(z) + z_loss * (log Z)^2

Products are taken in the dtype of `x` and added up in float32 or wider, in which everything else
is computed. The rows of the kernel come in chunks:

    kernel (vocabulary, width)      chunk 0 | chunk 1 | ... | last chunk
                                        |        |               |
    four numbers for each row:        Sums --> Sums --> ... --> Sums --> loss, log Z

All chunks have the same size, so that one loop is compiled for all of them: the last chunk may
begin within the one before it. Rows that both have are left out of the sums of the last one.

Nothing is kept of a chunk's logits, and backward makes them again. The sums of two parts of the
vocabulary, chunks or those of different devices, can be combined, since each comes with the highest
logit that its exponentials are relative to.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._rows import compute_dtype

CHUNK_BYTES = 2**26  # of the logits that are in memory at a time


class Loss(NamedTuple):
    """Everything that defines a loss, except for its arrays.

    It is hashable and static: a program is compiled for each. Kernels leave out what it does
    not ask for.
    """

    vocab: int  # rows of the kernel that count, on all devices together
    z_loss: float = 0.0
    smoothing: float = 0.0
    cap: float | None = None
    ignored: int = -1


class Sums(NamedTuple):
    """What a loss needs of each row's logits, which may be those of a part of the vocabulary.

    `log Z` is `highest + log(total)`: exponentials relative to the highest logit do not
    overflow.
    """

    highest: jax.Array  # -inf where there are no logits
    total: jax.Array  # the sum of `exp(z - highest)`
    of_target: jax.Array  # the target's logit, zero where it is not in this part
    sum_z: jax.Array


def forward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    vocab_offset: jax.Array,
    *,
    loss: Loss,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """The loss of each row of `x`, and its `log Z`, which backward needs.

    Args:
        x: (rows, width).
        kernel: (vocabulary, width), a part of the whole kernel.
        targets: a row of the whole kernel for each row of `x`.
        vocab_offset: the row of the whole kernel at which the part begins.
        loss: which loss.
        axes: the mesh axes over which devices have other parts of the kernel.
    """

    def add_chunk(sums: Sums, chunk: Chunk) -> Sums:
        offset = vocab_offset + chunk.begin
        z, counts = _logits(x, chunk.rows, offset, loss)
        counts &= chunk.is_new
        highest = jnp.where(counts, z, -jnp.inf).max(-1)
        is_target = (_tokens(chunk.rows, offset) == targets[:, None]) & chunk.is_new
        of_target = jnp.where(is_target, z, 0).sum(-1)
        total = jnp.where(counts, jnp.exp(z - highest[:, None]), 0).sum(-1)
        sum_z = jnp.where(counts, z, 0).sum(-1)
        return combine_sums(sums, Sums(highest, total, of_target, sum_z))

    zeros = varying_zeros(jnp.zeros(x.shape[0], compute_dtype(x.dtype)), x, kernel, targets)
    # The sums of no tokens: any token is more than the highest so far.
    empty = Sums(zeros - jnp.inf, zeros, zeros, zeros)
    sums = fold_chunks(add_chunk, empty, kernel, _wanted_chunk(x))
    return losses_of_sums(sums, targets, loss, axes)


def combine_sums(one: Sums, other: Sums) -> Sums:
    """The sums over all logits, from those over two parts of the vocabulary."""
    highest = jnp.maximum(one.highest, other.highest)
    total = one.total * rescaling(one.highest, highest) + other.total * rescaling(
        other.highest, highest
    )
    return Sums(highest, total, one.of_target + other.of_target, one.sum_z + other.sum_z)


def rescaling(old_highest: jax.Array, highest: jax.Array) -> jax.Array:
    """The factor that turns a sum of `exp(z - old_highest)` into one of `exp(z - highest)`.

    It is zero where the old sum has no logits, whose highest is -inf: the difference of two such
    would be nan.
    """
    return jnp.where(old_highest == -jnp.inf, 0, jnp.exp(old_highest - highest))


def losses_of_sums(
    sums: Sums, targets: jax.Array, loss: Loss, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """The loss of each row and its `log Z`, from the sums over this device's logits.

    Over `axes` devices have other parts of the vocabulary: they exchange four numbers for each
    row. The loss is zero where the target is ignored, and nan where it is no token.
    """
    highest, total, of_target, sum_z = sums
    if axes:
        highest = lax.pmax(highest, axes)
        total = lax.psum(total * rescaling(sums.highest, highest), axes)
        of_target, sum_z = lax.psum(of_target, axes), lax.psum(sum_z, axes)
    log_z = highest + jnp.log(total)
    losses = log_z - (1 - loss.smoothing) * of_target - loss.smoothing / loss.vocab * sum_z
    losses += loss.z_loss * log_z**2
    # A target outside the vocabulary is a mistake, which compiled code cannot raise.
    losses = jnp.where((targets >= 0) & (targets < loss.vocab), losses, jnp.nan)
    return jnp.where(targets == loss.ignored, 0, losses), log_z


def backward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    vocab_offset: jax.Array,
    log_z: jax.Array,
    gradient: jax.Array,
    *,
    loss: Loss,
) -> tuple[jax.Array, jax.Array]:
    """The gradients to `x` and to the kernel, of this device's part of the logits only.

    That to `x`, which is wide, is still to be added up over devices with other rows of the kernel,
    and that to the kernel over devices with other rows of `x`.

    Args:
        x: as in forward.
        kernel: as in forward.
        targets: as in forward.
        vocab_offset: as in forward.
        log_z: as forward returned it.
        gradient: that to the loss of each row.
        loss: which loss.
    """
    gradient, log_z_gradient = row_gradients(targets, log_z, gradient, loss)

    def add_chunk(gradients: Any, chunk: Chunk) -> Any:
        (x_gradient, kernel_gradient), offset = gradients, vocab_offset + chunk.begin
        z, counts = _logits(x, chunk.rows, offset, loss)
        is_target = _tokens(chunk.rows, offset) == targets[:, None]
        columns = (log_z[:, None], log_z_gradient[:, None], gradient[:, None])
        z_gradient = jnp.where(counts, logit_gradients(z, is_target, *columns, loss), 0).astype(
            x.dtype
        )
        # All rows of `x` are in this product: a chunk of the gradient to the kernel is complete.
        chunk_gradient = product(z_gradient, x, 0, 0).astype(kernel.dtype)
        x_gradient += product(z_gradient, chunk.new_rows.astype(x.dtype), 1, 0)
        return x_gradient, lax.dynamic_update_slice_in_dim(
            kernel_gradient, chunk_gradient, chunk.begin, 0
        )

    # The gradient to `x` is a sum over chunks, and wide; a chunk's part of the kernel's is final.
    zeros = (
        varying_zeros(jnp.zeros(x.shape, log_z.dtype), x, kernel, targets),
        varying_zeros(jnp.zeros(kernel.shape, kernel.dtype), x, kernel, targets),
    )
    return fold_chunks(add_chunk, zeros, kernel, _wanted_chunk(x))


def row_gradients(
    targets: jax.Array, log_z: jax.Array, gradient: jax.Array, loss: Loss
) -> tuple[jax.Array, jax.Array]:
    """For each row the gradient to its loss, zero where it is ignored, and that to its `log Z`.

    The loss contains `log Z` itself and `z_loss` times its square. A target that is ignored has
    no gradient of either.
    """
    gradient = jnp.where(targets == loss.ignored, 0, gradient).astype(log_z.dtype)
    return gradient, gradient * (1 + 2 * loss.z_loss * log_z)


def logit_gradients(
    z: jax.Array,
    is_target: jax.Array,
    log_z: jax.Array,
    log_z_gradient: jax.Array,
    gradient: jax.Array,
    loss: Loss,
) -> jax.Array:
    """The gradient to logits before the cap: a softmax, less the target's share.

    Args:
        z: logits after the cap.
        is_target: which of them is the row's target.
        log_z: for each row; this and the next two broadcast to the logits.
        log_z_gradient: the gradient to it.
        gradient: that to the row's loss.
        loss: which loss.
    """
    z_gradient = log_z_gradient * jnp.exp(z - log_z) - jnp.where(
        is_target, gradient * (1 - loss.smoothing), 0
    )
    if loss.smoothing:
        z_gradient -= gradient * (loss.smoothing / loss.vocab)
    if loss.cap is not None:
        # The derivative of `cap * tanh(z / cap)` in terms of its value.
        z_gradient = z_gradient * (1 - (z / loss.cap) ** 2)
    return z_gradient


def _logits(
    x: jax.Array, chunk: jax.Array, offset: jax.Array, loss: Loss
) -> tuple[jax.Array, jax.Array]:
    """The logits `(rows, chunk)` of a chunk of the kernel, and which of its tokens count.

    A kernel may have more rows than there are tokens, to be divisible.
    """
    z = capped(product(x, chunk.astype(x.dtype), 1, 1), loss)
    return z, _tokens(chunk, offset) < loss.vocab


def capped(z: jax.Array, loss: Loss) -> jax.Array:
    """Logits softly kept between the cap and its negative."""
    if loss.cap is None:
        return z
    return loss.cap * jnp.tanh(z / loss.cap)


def _wanted_chunk(x: jax.Array) -> int:
    """How many rows of the kernel make `CHUNK_BYTES` of logits in float32."""
    return CHUNK_BYTES // (4 * x.shape[0])


def _tokens(chunk: jax.Array, offset: jax.Array) -> jax.Array:
    """The token of each row of a chunk, which begins at an offset of the vocabulary."""
    return offset + jnp.arange(chunk.shape[0])


def product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """The product of two matrices summed over one dim of each, in float32 or wider."""
    return lax.dot_general(
        a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=compute_dtype(a.dtype)
    )


class Chunk(NamedTuple):
    """Some consecutive rows of the kernel.

    - `rows`: the rows.
    - `begin`: the number of the first one.
    - `repeated`: how many of them, at the start, are also in the chunk before this one.
    """

    rows: jax.Array
    begin: jax.Array
    repeated: jax.Array | int

    @property
    def is_new(self) -> jax.Array:
        """Which of the rows are in no chunk before this one."""
        return jnp.arange(self.rows.shape[0]) >= self.repeated

    @property
    def new_rows(self) -> jax.Array:
        """The rows, with zeros for those that are in a chunk before this one."""
        return jnp.where(self.is_new[:, None], self.rows, 0)


def chunk_size(vocab: int, wanted: int) -> int:
    """How many rows of a vocabulary are in a chunk, if about so many are wanted.

    Chunks that do not overlap are best, if they have at least three quarters as many rows.
    """
    most = max(128, wanted // 128 * 128)
    fewest = -(-vocab // most)
    for count in range(fewest, fewest * 4 // 3 + 1):
        if vocab % (128 * count) == 0:
            return vocab // count
    # As little overlap as multiples of 128 allow.
    return min(vocab, -(-vocab // (128 * fewest)) * 128)


def fold_chunks(
    function: Callable[[Any, Chunk], Any], carry: Any, kernel: jax.Array, wanted: int
) -> Any:
    """Carry something through chunks of the kernel's rows: `function(carry, chunk)`.

    A chunk has about as many rows as are `wanted`, in multiples of 128 and 128 at least.
    """
    vocab = kernel.shape[0]
    size = chunk_size(vocab, wanted)
    count = -(-vocab // size)

    def take_chunk(carry: Any, k: jax.Array) -> tuple[Any, None]:
        begin, repeated = k * size, 0
        if vocab % size:
            begin = jnp.minimum(begin, vocab - size)
            repeated = k * size - begin
        rows = lax.dynamic_slice_in_dim(kernel, begin, size)
        return function(carry, Chunk(rows, begin, repeated)), None

    if count == 1:
        # A loop of one step would only hide it from the compiler.
        return take_chunk(carry, jnp.int32(0))[0]
    return lax.scan(take_chunk, carry, jnp.arange(count, dtype=jnp.int32))[0]


def varying_zeros(zeros: jax.Array, *others: jax.Array) -> jax.Array:
    """Zeros that vary over the manual axes that other arrays vary over.

    Where JAX tracks that, a loop's carry must vary from the start as its results do.
    """
    for other in others:
        zeros += jnp.zeros_like(other[(0,) * other.ndim]).astype(zeros.dtype)
    return zeros
