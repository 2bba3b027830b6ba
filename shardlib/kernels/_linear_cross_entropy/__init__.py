"""The cross-entropy of a linear head, whose logits are never in memory.

The public function checks its arguments, finds out how they are laid out, chooses an implementation
and calls it on each device's own shard. What devices exchange, where they have different rows of
the kernel or of `x`:

    forward     four numbers for each row of `x`, over the axes of the vocabulary
    backward    the gradient to `x`, over the axes of the vocabulary
                the gradient to the kernel, over the axes of the rows
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack, cast

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
    shard_offset,
    varying,
    varying_alike,
)

OP = "linear_cross_entropy"
IMPLEMENTATIONS = (
    Implementation("reference", None, f"{__name__}._reference"),
    Implementation("tpu", "tpu", f"{__name__}._tpu"),
    Implementation("gpu", "gpu", f"{__name__}._gpu"),
)


class LossOptions(TypedDict, total=False):
    """What defines a cross-entropy besides its arrays, as keywords of `linear_cross_entropy`.

    - `vocab`: the size of the vocabulary, if the kernel has more rows, as padding.
    - `z_loss`: the factor of the z-loss, the square of the logits' log-sum-exp.
    - `smoothing`: the share of each target that is spread evenly over the vocabulary.
    - `cap`: limits logits smoothly, `cap * tanh(logit / cap)`.
    - `ignored`: a target whose loss and gradient are zero, by default -1.
    """

    vocab: int | None
    z_loss: float
    smoothing: float
    cap: float | None
    ignored: int


def linear_cross_entropy(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    names: Names | None = None,
    vocab_name: str | None = None,
    implementation: str | None = None,
    **options: Unpack[LossOptions],
) -> jax.Array:
    """The cross-entropy of each row's target under `softmax(kernel @ row)`, in float32.

    Rows are those of `x`.

    Args:
        x: what the head reads, `(..., width)`. Products are taken in its dtype.
        kernel: of the head, `(vocabulary, width)`.
        targets: for each row of `x`, the number of a row of the kernel. Any other number makes the
            loss nan, except `ignored`.
        names: the names of the dims of `x`, if they are split over devices; its width must be
            whole.
        vocab_name: the name of the kernel's rows. If these are split, devices exchange four numbers
            for each row of `x`, and in the backward pass the gradient to `x`.
        implementation: None chooses the fastest one here. A name chooses that one, or raises an
            error if it cannot run. See `explain`.
        options: see `LossOptions`: `vocab` (by default all of the kernel's rows), `z_loss` (0),
            `smoothing` (0), `cap` (none) and `ignored` (-1), the target without a loss.

    Between the passes it keeps one number for each row. The backward pass recomputes the logits.

    >>> kernel = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> linear_cross_entropy(jnp.array([[9.0, 0.0], [0.0, 0.0]]), kernel, jnp.array([0,
    ...     -1])).round(3)
    Array([0., 0.], dtype=float32)
    """
    x, kernel = check_arrays.as_array(OP, "x", x), check_arrays.as_array(OP, "kernel", kernel)
    targets = check_arrays.as_array(OP, "targets", targets, "an array of whole numbers")
    _check(x, kernel, targets)
    check.text(OP, "vocab_name", vocab_name, "the name of the kernel's rows", optional=True)
    # A row has its loss wherever it is.
    x_layout = layout_of(OP, x, names, in_any_order=tuple(range(x.ndim - 1)))
    kernel_names: Names | None = None
    if names is not None:
        kernel_names = (vocab_name, names[-1])
    kernel_layout = layout_of(OP, kernel, kernel_names, "kernel")
    # There is a target for each row: all dims but the width.
    targets_layout = x_layout.select(*range(x.ndim - 1))
    rows = kernel_layout.global_shape[0]
    loss = _checked_loss(rows, options)
    _check_whole_width(x_layout)
    targets = _narrow(targets, loss.ignored)
    local = {
        "x": x_layout.local(x.dtype),
        "kernel": kernel_layout.local(kernel.dtype),
        "targets": targets_layout.local(targets.dtype),
    }
    task = Task(
        OP,
        local,
        partitioned=partitioned(x_layout),
        summed=kernel_layout.axes[0],
        device=device_here(),
    )
    chosen = choose(IMPLEMENTATIONS, task, implementation)
    call = Call(chosen, x_layout, kernel_layout, targets_layout, loss)
    if targets.size == 0:
        return jnp.zeros(targets.shape, jnp.float32)  # no kernel takes arrays without numbers
    return cast(jax.Array, _losses(call, *varying_alike(x, kernel), targets))


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are: the static argument of the `custom_vjp`."""

    chosen: Chosen
    x_layout: ArrayLayout
    kernel_layout: ArrayLayout
    targets_layout: ArrayLayout
    loss: Loss

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """The axes over which devices have different rows of the kernel."""
        return self.kernel_layout.axes[0]

    def vocab_offset(self, kernel: Any) -> jax.Array:
        """The row of the whole kernel at which this device's shard begins."""
        return shard_offset(self.vocab_axes, kernel.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(call: Call, x: Any, kernel: Any, targets: Any) -> Any:
    """The loss of each row."""
    return _forward(call, x, kernel, targets)[0]


def _forward(call: Call, x: Any, kernel: Any, targets: Any) -> tuple[Any, Any]:
    """The loss of each row, and what backward needs: the arguments and each row's `log Z`."""
    options: dict[str, Any] = dict(call.chosen.options)
    if call.vocab_axes:
        options["axes"] = call.vocab_axes

    def run_shard(x: Any, kernel: Any, targets: Any) -> tuple[Any, Any]:
        rows = x.reshape(-1, x.shape[-1])
        offset = call.vocab_offset(kernel)
        losses, log_z = call.chosen.implementation.forward(
            rows, kernel, targets.reshape(-1), offset, loss=call.loss, **options
        )
        return losses.reshape(targets.shape), log_z.reshape(targets.shape)

    losses, log_z = per_shard(
        run_shard,
        (x, kernel, targets),
        (call.x_layout, call.kernel_layout, call.targets_layout),
        (call.targets_layout, call.targets_layout),
        # Every device ends with the loss over the whole vocabulary.
        unvarying=call.vocab_axes,
    )
    return losses, (x, kernel, targets, log_z)


def _backward(call: Call, saved: Any, gradient: Any) -> tuple[Any, Any, None]:
    """The gradients to `x` and to the kernel, added up over devices; targets have none.

    Each device makes its part of both from its own logits. The sums are taken inside the
    `shard_map`.
    """
    x, kernel, targets, log_z = saved
    vocab_axes = _axes_to_sum(call, x)
    rows_axes = call.x_layout.automatic_axes(*range(x.ndim - 1))

    def run_shard(x: Any, kernel: Any, targets: Any, log_z: Any, gradient: Any) -> tuple[Any, Any]:
        # Kernels take rows in one dim.
        rows, offset = x.reshape(-1, x.shape[-1]), call.vocab_offset(kernel)
        # A row without a loss may hold anything, and zero times that may be nan.
        is_ignored = targets.reshape(-1) == call.loss.ignored
        rows = jnp.where(is_ignored[:, None], 0, rows)
        log_z = jnp.where(is_ignored, 0, log_z.reshape(-1))
        columns = (targets.reshape(-1), offset, log_z, gradient.reshape(-1))
        x_gradient, kernel_gradient = call.chosen.implementation.backward(
            rows, kernel, *columns, loss=call.loss, **call.chosen.options
        )
        if vocab_axes:
            x_gradient = lax.psum(x_gradient, vocab_axes)
        if rows_axes:
            kernel_gradient = lax.psum(kernel_gradient, rows_axes)
        # The gradient to `x` comes wide: it is rounded after it was added up.
        return x_gradient.reshape(x.shape).astype(x.dtype), kernel_gradient

    # Targets, `log Z` and the gradient have one number for each row, and one layout.
    layouts = (call.x_layout, call.kernel_layout, *[call.targets_layout] * 3)
    operands = varying_alike(x, kernel, targets, log_z, gradient)
    results = (call.x_layout, call.kernel_layout)
    x_gradient, kernel_gradient = per_shard(run_shard, operands, layouts, results)
    return x_gradient, kernel_gradient, None


def _axes_to_sum(call: Call, x: Any) -> tuple[str, ...]:
    """The axes of the vocabulary over which the op itself adds up the gradient to `x`.

    Where JAX tracks over which axes arrays vary, it sums over a manual axis itself what
    `varying_alike` made to vary over it in forward.
    """
    automatic = call.kernel_layout.automatic_axes(0)
    axes = []
    for axis in call.vocab_axes:
        if axis in automatic or axis not in varying(x):
            axes.append(axis)
    return tuple(axes)


_losses.defvjp(_forward, _backward)


def _checked_loss(rows: int, options: LossOptions) -> Loss:
    """The loss that options define, if they make sense for a kernel of so many rows."""
    check.keywords(OP, options, LossOptions)
    takes = f"a number of the kernel's rows, of which there are {rows}"
    vocab = options.get("vocab")
    if vocab is None:
        vocab = rows
    vocab = check.whole(OP, "vocab", vocab, takes, least=1, most=rows)
    ignored = options.get("ignored", -1)
    ignored = check.whole(OP, "ignored", ignored, "a target", least=-(2**31), most=2**31 - 1)
    # A real token of that number would be left out of the loss without a word.
    if 0 <= ignored < vocab:
        raise ValueError(
            f"`{OP}(ignored={ignored})` is a token of the {vocab}: choose one that is none."
        )
    z_loss = check.number(OP, "z_loss", options.get("z_loss", 0.0), "a factor", least=0)
    smoothing = options.get("smoothing", 0.0)
    smoothing = check.number(OP, "smoothing", smoothing, "a share", least=0, below=1)
    cap = check.number(OP, "cap", options.get("cap"), "a largest logit", above=0, optional=True)
    if cap is not None:
        cap = float(cap)
    return Loss(vocab, float(z_loss), float(smoothing), cap, ignored)


def _narrow(targets: jax.Array, ignored: int) -> jax.Array:
    """The targets in 32 bits; those that do not fit are none of the kernel's rows, nor ignored."""
    limits, own = jnp.iinfo(jnp.int32), jnp.iinfo(targets.dtype)
    if own.min >= limits.min and own.max <= limits.max:
        return targets.astype(jnp.int32)
    # No kernel has as many rows.
    none = limits.max - (ignored == limits.max)
    fits = (targets >= max(own.min, limits.min)) & (targets <= limits.max)
    return jnp.where(fits, targets, none).astype(jnp.int32)


def _check(x: Any, kernel: Any, targets: Any) -> None:
    """Refuse arrays whose shapes or dtypes do not make a head and its targets."""
    floats = check_arrays.is_float(x.dtype) and check_arrays.is_float(kernel.dtype)
    if x.ndim < 1 or kernel.ndim != 2 or x.shape[-1] != kernel.shape[1] or not floats:
        raise ValueError(
            f"`{OP}`: `x` is {_described(x)}, `kernel` {_described(kernel)}; they are "
            "floats of 16 bits or more, `(..., width)` and `(vocabulary, width)`."
        )
    if not x.shape[-1]:
        raise ValueError(
            f"`{OP}`: `x` is {_described(x)}, `kernel` {_described(kernel)}: their width is 0, and "
            "should be 1 at least."
        )
    if targets.shape != x.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"`{OP}`: `targets` is {_described(targets)}; it has an integer for "
            f"each of the rows {list(x.shape[:-1])} of `x`."
        )


def _described(x: Any) -> str:
    """The dtype and shape of an array, for a message."""
    return f"{x.dtype}{list(x.shape)}"


def _check_whole_width(x_layout: ArrayLayout) -> None:
    """Refuse an `x` whose width is split over devices."""
    if x_layout.axes[-1]:
        raise ValueError(
            f"`{OP}`: the width of `x` is split over `{', '.join(x_layout.axes[-1])}`, and every "
            "logit would be a sum over devices. Lay it out whole: give its name no axis."
        )
