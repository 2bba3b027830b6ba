"""Calling a loss function: the model that it is given, and what it may return.

A user's loss is `loss_fn(model, batch, rng) -> loss` or `-> (loss, metrics)`. `call_loss` puts the
model together from the trees that a step holds and takes it apart again afterwards; `forward` turns
the result into what is differentiated:

    (params, streams, rest, key, batch)  ->  total, (means, streams, rest)

where `streams` are the model's random streams and `rest` is its other state that is not a
parameter, such as the statistics of a batch norm.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib._text import listed
from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.modeling._batch import WeightedMean
from shardlib.modeling._random import is_key, plain_keys
from shardlib.step._precision import wider
from shardlib.step._state import Layout

LossFunction = Callable[[Any, Any, jax.Array], Any]


OWN_METRICS = (
    # Metrics of a step.
    *("loss", "weight", "grad_norm", "compressed", "met"),
    *("first_nonfinite", "nonfinite_losses", "nonfinite_microbatch"),
    # What the records of a run hold besides metrics.
    *("step", "note", "crc32"),
)
"""Names that the metrics of a loss may not have: a step or the record of a run uses them."""


class Returned(NamedTuple):
    """What a loss function returned, and the model's state after it.

    Attributes:
        out: the result as the function returned it.
        means: the loss and the metrics by name, each as a total with its weight.
        streams: the model's random streams after the call.
        rest: the model's other state after the call.
        reassigned: the parameters that are other arrays after the call, by path.
    """

    out: Any
    means: dict[str, WeightedMean]
    streams: Any
    rest: Any
    reassigned: dict[str, Any]


def call_loss(
    loss_fn: LossFunction,
    layout: Layout,
    params: Any,
    streams: Any,
    rest: Any,
    key: jax.Array,
    batch: Any,
) -> Returned:
    """Put the model together and call the loss function with it.

    Args:
        loss_fn: the user's function.
        layout: the layout of the state, which holds the definition of the model.
        params: the parameters, trained and frozen ones together, whole.
        streams: the model's random streams.
        rest: the model's other state.
        key: the key that the loss is given.
        batch: the examples.
    """
    # A module is made anew for each call: what the loss does to it is seen only in `after`.
    model = layout.definition.merge(params, streams, rest)
    out = check.called("train_step", "loss_fn", loss_fn, model, batch, key)
    means = as_means(out, jax.tree.leaves(batch)[0].shape[0])
    parts = layout.definition.taken_apart(model)
    after = parts.streams, parts.rest
    # The state of a step is the argument of the next, and of one compiled program.
    _check_structure((streams, rest), after)
    # Keys know which examples they draw for only inside the step: the state holds ordinary ones.
    streams, rest = jax.tree.map(lambda x: plain_keys(x) if is_key(x) else x, after)
    return Returned(out, means, streams, rest, _reassigned(params, parts.params))


def _reassigned(before: Any, after: Any) -> dict[str, Any]:
    """The leaves of a tree that are other arrays afterwards, by path."""
    now = dict(named_leaves(after))
    changed = {}
    for path, leaf in named_leaves(before):
        if path in now and now[path] is not leaf:
            changed[path] = now[path]
    return changed


def check_arguments(loss_fn: LossFunction) -> None:
    """Refuse a loss that does not take a model, a batch and a key."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return  # some functions that are not written in Python have no signature
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise ValueError(
            "A loss takes three arguments, `loss_fn(model, batch, rng)`; "
            f"`{getattr(loss_fn, '__name__', loss_fn)}{signature}` does not ({error}). What it has "
            "no use for it may ignore: `lambda model, batch, rng: ...`."
        ) from error


NONFINITE = "nonfinite_losses"
"""The mean, among those of a loss, that counts microbatches whose loss is not finite.

Its weight is their count, its total the sum of their numbers. So if there is one, the total is its
number, and both add up over devices together with the loss.
"""


def forward(
    call: Callable[..., Returned],
    params: Any,
    streams: Any,
    rest: Any,
    key: Any,
    batch: Any,
    number: Any = None,
) -> Any:
    """The sum over some examples that is differentiated, and what else the loss returned.

    Args:
        call: `call_loss` of a user's function, adapted to the step.
        params: the parameters, whole.
        streams: the model's random streams.
        rest: the model's other state.
        key: the key that the loss is given.
        batch: the examples.
        number: the microbatch's number among those of all devices, to report where the sum is not
            finite; None to report nothing.
    """
    returned = call(params, streams, rest, key, batch)
    means = returned.means
    total = means["loss"].total
    if number is not None:
        # The report is no part of what is differentiated.
        is_bad = ~jnp.isfinite(lax.stop_gradient(total))
        means = means | {
            NONFINITE: WeightedMean(jnp.where(is_bad, number, 0.0), is_bad.astype(jnp.float32))
        }
    return total, (means, returned.streams, returned.rest)


def nonfinite_metrics(found: WeightedMean) -> dict[str, jax.Array]:
    """How many microbatches had a loss that is not finite, over all devices, and which one.

    The number is -1 unless it was a single microbatch.
    """
    count = found.weight.astype(jnp.int32)
    # The sum of several numbers says nothing of any of them.
    number = jnp.where(count == 1, found.total.astype(jnp.int32), -1)
    return {NONFINITE: count, "nonfinite_microbatch": number}


def as_means(out: Any, rows: int) -> dict[str, WeightedMean]:
    """The loss and the metrics that a loss function returned, each as a total with its weight.

    A scalar is a mean over `rows` examples that weigh the same: its total is the scalar times
    their number.
    """
    loss, metrics = out, {}
    # A `WeightedMean` is no tuple, so that a loss may return one by itself.
    if isinstance(out, tuple) and len(out) == 2:
        loss, metrics = out
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ValueError(
            f"`loss_fn` returned a pair whose second part is {_kind(metrics)}; it takes a dict of "
            "metrics by name. A total with its weight is `sl.weighted_mean(total, weight)`."
        )
    for name in metrics:
        if name in OWN_METRICS:
            raise ValueError(f"The metric `{name}` is the step's own; call yours something else.")
    return {name: _as_mean(name, value, rows) for name, value in {"loss": loss, **metrics}.items()}


def _as_mean(name: str, value: Any, rows: int) -> WeightedMean:
    if isinstance(value, WeightedMean):
        # Metrics may have a total for each expert, say; a loss is a number.
        _check_number(name, value.total, may_be_array=name != "loss")
        _check_differentiable(name, value.total)
        _check_number(name, value.weight)
        dtype = _wide_dtype(value.total, value.weight)
        return WeightedMean(
            jnp.asarray(value.total, dtype),
            lax.stop_gradient(jnp.asarray(value.weight, dtype)),
        )
    _check_number(name, value)
    _check_differentiable(name, value)
    dtype = _wide_dtype(value)
    return WeightedMean(jnp.asarray(value, dtype) * rows, jnp.asarray(rows, dtype))


def _wide_dtype(*parts: Any) -> Any:
    """The dtype in which a total and its weight are added up: float32, or a wider one of theirs.

    A Python number has no dtype of its own, and a whole number is promoted to float32.
    """
    dtype: Any = jnp.dtype(jnp.float32)
    for part in parts:
        if isinstance(part, jax.Array | np.ndarray | np.generic):
            # Without `jax_enable_x64`, JAX has no array of NumPy's float64.
            dtype = wider(dtype, jnp.result_type(part))
    return dtype


def _check_number(name: str, part: Any, *, may_be_array: bool = False) -> None:
    """Refuse a total or a weight that is not a real number."""
    is_number = isinstance(part, jax.Array | np.ndarray | np.generic | int | float)
    if not is_number or (jnp.shape(part) != () and not may_be_array):
        hint = "" if name == "loss" else " Of a metric the sum may be an array."
        raise ValueError(
            f"`{name}` of `loss_fn` is {_kind(part)}; it takes a scalar, a mean over equally "
            "many examples everywhere, or `sl.weighted_mean(total, weight)`: the sum over the "
            f"examples at hand and how much they weigh.{hint}"
        )
    # JAX would refuse it too, in the words of its own gradient.
    if jnp.issubdtype(jnp.result_type(part), jnp.complexfloating):
        raise ValueError(
            f"`{name}` of `loss_fn` is complex; a loss is real. Take its absolute "
            "value or real part."
        )


def _check_differentiable(name: str, value: Any) -> None:
    """Refuse a loss of whole numbers or bools, whose gradient would be zero."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if name == "loss" and is_array and not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"`loss` of `loss_fn` is {value.dtype}, which has no gradient: a loss is a "
            "floating-point number. A count may be a metric."
        )


def _kind(value: Any) -> str:
    """What a value is, for a message."""
    return f"an array of shape {value.shape}" if hasattr(value, "shape") else f"{value!r}"


def _check_structure(before: Any, after: Any) -> None:
    """Refuse a loss that changes the paths, shapes or dtypes of the model's state."""
    leaves_before, leaves_after = _described_leaves(before), _described_leaves(after)
    if leaves_before == leaves_after:
        return
    # The symmetric difference has what was added, removed, and both sides of what changed.
    changed = {path for path, _ in leaves_before ^ leaves_after}
    raise ValueError(
        "The loss changed the structure of the model's state: "
        f"{listed(sorted(changed))}. The state has the same paths, "
        "shapes and dtypes after a step as before it; return intermediate values as metrics."
    )


def _described_leaves(tree: Any) -> set[tuple[str, Any]]:
    """The path, shape and dtype of each leaf."""
    return {(path, (leaf.shape, leaf.dtype)) for path, leaf in named_leaves(tree)}
