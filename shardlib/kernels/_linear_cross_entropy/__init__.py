"""The cross-entropy of a linear head, whose logits are never in memory."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._choice import Chosen, Implementation, Task, choose, device_here
from shardlib.kernels._linear_cross_entropy._reference import Loss
from shardlib.kernels._shards import (
    ArrayLayout,
    Names,
    layout_of,
    partitioned,
    per_shard,
    place,
    varying,
    varying_alike,
)
from shardlib.layouts._rules import as_tuple

OP = "linear_cross_entropy"
IMPLEMENTATIONS = (
    Implementation("reference", None, f"{__name__}._reference"),
    Implementation("tpu", "tpu", f"{__name__}._tpu"),
    Implementation("gpu", "gpu", f"{__name__}._gpu"),
)


def linear_cross_entropy(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    names: Names | None = None,
    vocab_name: str | None = None,
    vocab: int | None = None,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    cap: float | None = None,
    ignored: int = -1,
    implementation: str | None = None,
) -> jax.Array:
    """The cross-entropy of each row's target under `softmax(kernel @ row)`, in float32.

    Rows are those of `x`.

    Args:
        x: what the head reads, `(..., width)`. Products are taken in its dtype.
        kernel: of the head, `(vocabulary, width)`.
        targets: a row of the kernel for each row of `x`. One that is none makes the loss nan, but
            `ignored`.
        names: of the dims of `x`, where they are split over devices; its width must be whole.
        vocab_name: of the kernel's rows. Where devices have different ones, they exchange four
            numbers for each row of `x`, and backward the gradient to `x`.
        vocab: how many of the kernel's rows count; all, unless the kernel has more to fill up.
        z_loss: by what the square of the logarithm of the softmax's divisor is added.
        smoothing: the share of each target that all of the vocabulary has evenly.
        cap: logits are softly kept between this and its negative.
        ignored: a target whose loss and gradient are zero.
        implementation: None takes what is fastest here; by name, that or an error. See `explain`.

    It keeps one number for each row for backward, which makes the logits again.

    >>> kernel = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> linear_cross_entropy(jnp.array([[9.0, 0.0], [0.0, 0.0]]), kernel, jnp.array([0,
    ...     -1])).round(3)
    Array([0., 0.], dtype=float32)
    """
    x, kernel = check_arrays.as_array(OP, "x", x), check_arrays.as_array(OP, "kernel", kernel)
    targets = check_arrays.as_array(OP, "targets", targets, "an array of whole numbers")
    _check(x, kernel, targets)
    check.text(OP, "vocab_name", vocab_name, "the name of the kernel's rows", optional=True)
    of_x = layout_of(OP, x, names)
    of_kernel = layout_of(OP, kernel, None if names is None else (vocab_name, names[-1]), "kernel")
    of_targets = of_x.of(*range(x.ndim - 1))
    rows = of_kernel.whole[0]
    loss = _loss(rows, vocab, z_loss, smoothing, cap, ignored)
    _check_whole_width(of_x)
    targets = targets.astype(jnp.int32)
    arrays = {"x": (x, of_x), "kernel": (kernel, of_kernel), "targets": (targets, of_targets)}
    here = {name: jax.ShapeDtypeStruct(of.here, one.dtype) for name, (one, of) in arrays.items()}
    task = Task(
        OP, here, partitioned=partitioned(of_x), summed=of_kernel.axes[0], device=device_here()
    )
    call = Call(choose(IMPLEMENTATIONS, task, implementation), of_x, of_kernel, of_targets, loss)
    if targets.size == 0:
        return jnp.zeros(targets.shape, jnp.float32)
    return cast(jax.Array, _losses(call, *varying_alike(x, kernel), targets))


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are."""

    chosen: Chosen
    of_x: ArrayLayout
    of_kernel: ArrayLayout
    of_targets: ArrayLayout
    loss: Loss

    @property
    def over_vocab(self) -> tuple[str, ...]:
        return self.of_kernel.axes[0]

    def automatic(self, of: ArrayLayout, *dims: int) -> tuple[str, ...]:
        """The automatic axes that split some dims of an array."""
        return (
            ()
            if of.spec is None
            else tuple(axis for dim in dims for axis in as_tuple(of.spec[dim]))
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(call: Call, x: Any, kernel: Any, targets: Any) -> Any:
    return _forward(call, x, kernel, targets)[0]


def _forward(call: Call, x: Any, kernel: Any, targets: Any) -> tuple[Any, Any]:
    def here(x: Any, kernel: Any, targets: Any) -> tuple[Any, Any]:
        rows = x.reshape(-1, x.shape[-1])
        first = place(call.over_vocab, kernel.shape[0])
        axes = {"axes": call.over_vocab} if call.over_vocab else {}
        forward = call.chosen.implementation.forward
        losses, log_z = forward(
            rows, kernel, targets.reshape(-1), first, loss=call.loss, **axes, **call.chosen.options
        )
        return losses.reshape(targets.shape), log_z.reshape(targets.shape)

    layouts = (call.of_x, call.of_kernel, call.of_targets)
    losses, log_z = per_shard(
        here, (x, kernel, targets), layouts, (call.of_targets,) * 2, same=call.over_vocab
    )
    return losses, (x, kernel, targets, log_z)


def _backward(call: Call, saved: Any, gradient: Any) -> tuple[Any, Any, None]:
    x, kernel, targets, log_z = saved
    automatic = call.automatic(call.of_kernel, 0)
    # Where JAX keeps account of what differs, it adds up itself what was made to differ before: see
    # `varying_alike`.
    over_vocab = tuple(
        axis for axis in call.over_vocab if axis in automatic or axis not in varying(x)
    )
    over_rows = call.automatic(call.of_x, *range(x.ndim - 1))

    def here(x: Any, kernel: Any, targets: Any, log_z: Any, gradient: Any) -> tuple[Any, Any]:
        rows, first = x.reshape(-1, x.shape[-1]), place(call.over_vocab, kernel.shape[0])
        flat = (targets.reshape(-1), first, log_z.reshape(-1), gradient.reshape(-1))
        of_x, of_kernel = call.chosen.implementation.backward(
            rows, kernel, *flat, loss=call.loss, **call.chosen.options
        )
        of_x = lax.psum(of_x, over_vocab) if over_vocab else of_x
        of_kernel = lax.psum(of_kernel, over_rows) if over_rows else of_kernel
        return of_x.reshape(x.shape).astype(x.dtype), of_kernel

    layouts = (call.of_x, call.of_kernel, call.of_targets, call.of_targets, call.of_targets)
    operands = varying_alike(x, kernel, targets, log_z, gradient)
    of_x, of_kernel = per_shard(here, operands, layouts, (call.of_x, call.of_kernel))
    return of_x, of_kernel, None


_losses.defvjp(_forward, _backward)


def _loss(rows: int, vocab: Any, z_loss: Any, smoothing: Any, cap: Any, ignored: Any) -> Loss:
    """What is asked for of the loss, checked."""
    takes = f"a number of the kernel's rows, of which there are {rows}"
    vocab = rows if vocab is None else check.whole(OP, "vocab", vocab, takes, least=1, most=rows)
    ignored = check.whole(OP, "ignored", ignored, "a target", least=-(2**31), most=2**31 - 1)
    if 0 <= ignored < vocab:
        raise ValueError(
            f"`{OP}(ignored={ignored})` is a token of the {vocab}: choose one that is none."
        )
    return Loss(
        vocab,
        float(check.number(OP, "z_loss", z_loss, "a factor", least=0)),
        float(check.number(OP, "smoothing", smoothing, "a share", least=0, below=1)),
        check.number(OP, "cap", cap, "a largest logit", above=0, optional=True),
        ignored,
    )


def _check(x: Any, kernel: Any, targets: Any) -> None:
    shapes = f"`x` is {x.dtype}{list(x.shape)}, `kernel` {kernel.dtype}{list(kernel.shape)}"
    if (
        x.ndim < 1
        or kernel.ndim != 2
        or x.shape[-1] != kernel.shape[1]
        or not all(check_arrays.is_float(one.dtype) for one in (x, kernel))
    ):
        raise ValueError(
            f"`{OP}`: {shapes}; they are floats of 16 bits or more, `(..., width)` and "
            "`(vocabulary, width)`."
        )
    if targets.shape != x.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"`{OP}`: `targets` is {targets.dtype}{list(targets.shape)}; it has an integer for "
            f"each of the rows {list(x.shape[:-1])} of `x`."
        )


def _check_whole_width(of_x: ArrayLayout) -> None:
    if of_x.axes[-1]:
        raise ValueError(
            f"`{OP}`: the width of `x` is split over `{', '.join(of_x.axes[-1])}`, and every logit "
            "would be a sum over devices. Lay it out whole: give its name no axis."
        )
