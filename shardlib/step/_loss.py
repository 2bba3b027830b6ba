"""Calling a loss function: what it is given of the batch and of randomness, and what may come of
it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.modeling._batch import WeightedMean
from shardlib.modeling._random import is_key, plain_keys, row_keys
from shardlib.step._state import Layout

LossFunction = Callable[[Any, Any, jax.Array], Any]


OWN_METRICS = (
    *("loss", "weight", "grad_norm", "compressed"),
    *("first_nonfinite", "nonfinite_losses", "nonfinite_microbatch"),
    *("step", "note", "crc32"),
)
"""Names of what a step returns beside the metrics of a loss, and of what the records of a run have
beside these.
"""


class Returned(NamedTuple):
    """What a loss function returned, and the model's state after it."""

    out: Any  # as returned
    means: dict[str, WeightedMean]
    streams: Any
    rest: Any


def call_loss(
    loss_fn: LossFunction,
    layout: Layout,
    params: Any,
    streams: Any,
    rest: Any,
    key: jax.Array,
    batch: Any,
) -> Returned:
    """Put the model together and call the loss function with it."""
    model = layout.definition.merge(params, streams, rest)
    out = check.called("train_step", "loss_fn", loss_fn, model, batch, key)
    means = as_means(out, jax.tree.leaves(batch)[0].shape[0])
    after = layout.definition.state_of(model)
    _check_structure((streams, rest), after)
    streams, rest = jax.tree.map(lambda x: plain_keys(x) if is_key(x) else x, after)
    return Returned(out, means, streams, rest)


def check_arguments(loss_fn: LossFunction) -> None:
    """Refuse a loss that does not take a model, a batch and a key."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # of some functions that are not written in Python
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise ValueError(
            "A loss takes three arguments, `loss_fn(model, batch, rng)`; "
            f"`{getattr(loss_fn, '__name__', loss_fn)}{signature}` does not ({error}). What it has "
            "no use for it may ignore: `lambda model, batch, rng: ...`."
        ) from error


NONFINITE = "nonfinite_losses"
"""Among the means of a loss, how many microbatches have a total that is not finite, and the sum of
their numbers.
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
    """The sum over these examples that is differentiated, with what else the loss returns.

    `number` is that of the microbatch among those of all devices, if it is to be told where the sum
    is not finite.
    """
    returned = call(params, streams, rest, key, batch)
    total, means = returned.means["loss"].total, returned.means
    if number is not None:
        is_bad = ~jnp.isfinite(lax.stop_gradient(total))
        means = means | {
            NONFINITE: WeightedMean(jnp.where(is_bad, number, 0.0), is_bad.astype(jnp.float32))
        }
    return total, (means, returned.streams, returned.rest)


def nonfinite_metrics(found: WeightedMean) -> dict[str, jax.Array]:
    """How many microbatches had a loss that is not finite, over all devices; and which one, if it
    was a single one, or -1.

    Both come of sums, which are taken over devices together with that of the loss.
    """
    count = found.weight.astype(jnp.int32)
    number = jnp.where(count == 1, found.total.astype(jnp.int32), -1)
    return {NONFINITE: count, "nonfinite_microbatch": number}


def every_nth(batch: Any, count: int, number: Any = ...) -> Any:
    """All microbatches of a batch, or one: every `count`-th example, so that one holds the same
    examples on every mesh.
    """
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)[number], batch
    )


def with_row_keys(tree: Any, **where: Any) -> Any:
    return jax.tree.map(lambda leaf: row_keys(leaf, **where) if is_key(leaf) else leaf, tree)


def as_means(out: Any, rows: int) -> dict[str, WeightedMean]:
    loss, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ValueError(
            f"`loss_fn` returned a pair whose second part is {_kind(metrics)}; it takes a dict of "
            "metrics by name. A total with its weight is `sl.weighted_mean(total, weight)`."
        )
    if taken := [name for name in metrics if name in OWN_METRICS]:
        raise ValueError(f"The metric `{taken[0]}` is the step's own; call yours something else.")
    return {name: _as_mean(name, value, rows) for name, value in {"loss": loss, **metrics}.items()}


def _as_mean(name: str, value: Any, rows: int) -> WeightedMean:
    weighted = isinstance(value, WeightedMean)
    for part in (value.total, value.weight) if weighted else (value,):
        an_array = weighted and part is value.total and name != "loss"
        if not isinstance(part, jax.Array | np.ndarray | np.generic | int | float) or (
            jnp.shape(part) != () and not an_array
        ):
            raise ValueError(
                f"`{name}` of `loss_fn` is {_kind(part)}; it takes a scalar, a mean over equally "
                "many examples everywhere, or `sl.weighted_mean(total, weight)`: the sum over the "
                "examples at hand and how much they weigh."
                + (" Of a metric the sum may be an array." if name != "loss" else "")
            )
        if jnp.issubdtype(jnp.result_type(part), jnp.complexfloating):
            raise ValueError(
                f"`{name}` of `loss_fn` is complex; a loss is real. Take its absolute "
                "value or real part."
            )
    if not weighted:  # every example weighs the same
        return WeightedMean(jnp.asarray(value, jnp.float32) * rows, jnp.float32(rows))
    return WeightedMean(
        jnp.asarray(value.total, jnp.float32),
        lax.stop_gradient(jnp.asarray(value.weight, jnp.float32)),
    )


def _kind(value: Any) -> str:
    return f"an array of shape {value.shape}" if hasattr(value, "shape") else f"{value!r}"


def _check_structure(before: Any, after: Any) -> None:
    shapes = [
        {path: (leaf.shape, leaf.dtype) for path, leaf in named_leaves(tree)}
        for tree in (before, after)
    ]
    if shapes[0] != shapes[1]:
        changed = sorted(path for path, _ in set(shapes[0].items()) ^ set(shapes[1].items()))
        raise ValueError(
            "The loss changed the structure of the model's state: "
            f"{', '.join(f'`{path}`' for path in changed)}. The state has the same paths, shapes "
            "and dtypes after a step as before it; return intermediate values as metrics."
        )
