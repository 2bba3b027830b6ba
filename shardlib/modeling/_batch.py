"""What a loss or a layer may ask of the whole batch while it sees only its part of it.

Inside the train step each device holds its own examples. Sums over examples come out right by
themselves (`weighted_mean`); whatever is not a sum over examples, a contrastive loss, batch
statistics, Switch's balance loss, asks here. The whole batch is the whole microbatch: with
`accumulate`, each microbatch is a batch of its own, of the same examples on every mesh.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._annotate import current_mesh, current_scope, mesh_of_shards
from shardlib.layouts._resolve import resolve
from shardlib.layouts._specs import axes_within


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedMean:
    """A mean over the batch that a loss returns, as a sum with its weight; see `weighted_mean`.

    Means may be multiplied and divided by a number, and another may be added, whose own weight is
    another: its mean over the whole batch counts, or over the microbatch. A term that is the same
    for all examples, such as a penalty on weights, is a mean too: its total is the term times the
    weight.

    - `total`: the sum over this device's examples.
    - `weight`: what these examples weigh. The sum of all totals is divided by that of all weights.

    >>> weighted_mean(6.0, 3) + 0.5 * weighted_mean(8.0, 4)
    WeightedMean(total=9.0, weight=3)
    """

    total: Any
    weight: Any

    def __mul__(self, by: Any) -> "WeightedMean":
        _refuse_mean("*", by)
        return WeightedMean(self.total * by, self.weight)

    __rmul__ = __mul__

    def __truediv__(self, by: Any) -> "WeightedMean":
        _refuse_mean("/", by)
        return WeightedMean(self.total / by, self.weight)

    def __rtruediv__(self, other: Any) -> None:
        _refuse_mean("/", self)

    def __neg__(self) -> "WeightedMean":
        return -1 * self

    def __sub__(self, other: "WeightedMean") -> "WeightedMean":
        return self + _mean_to_add("-", other) * -1

    def __rsub__(self, other: Any) -> "WeightedMean":
        return _mean_to_add("-", other) - self

    def __add__(self, other: "WeightedMean") -> "WeightedMean":
        """Add another mean; the sum has this one's weight.

        With `w` and `v` for this and the other weight, and sums over devices,

            sum(total) / sum(w) + sum(other) / sum(v)
                = sum(total + w * sum(other) / sum(v)) / sum(w)

        so every device adds the other's whole mean times its own weight, and the sum over devices,
        divided once, has it once.
        """
        # `sum` of several means begins with zero.
        if isinstance(other, int | float) and other == 0:
            return self
        other = _mean_to_add("+", other)
        axes = split_axes()
        total, weight = other.total, other.weight
        if axes:
            total, weight = lax.psum((total, weight), axes)
        # Weights take no part in the gradient. A mean of nothing is zero, as it is by itself.
        if isinstance(weight, jax.Array | np.ndarray):
            weight = lax.stop_gradient(jnp.where(weight == 0, jnp.inf, weight))
        elif weight == 0:
            weight = math.inf
        return WeightedMean(
            self.total + total / weight * lax.stop_gradient(self.weight), self.weight
        )

    __radd__ = __add__


def _refuse_mean(sign: str, by: Any) -> None:
    """Refuse to multiply or divide by a mean, which gives none."""
    if isinstance(by, WeightedMean):
        raise ValueError(
            f"`... {sign} weighted_mean(...)`: a product or quotient of a mean is no sum over "
            "examples. Multiply or divide a mean by a number, or each example's term before they "
            "are summed."
        )


def _mean_to_add(sign: str, other: Any) -> WeightedMean:
    """A mean that is added to another one; all else is refused, which has no weight."""
    if not isinstance(other, WeightedMean):
        raise ValueError(
            f"`weighted_mean(...) {sign} other` takes another `weighted_mean`; got "
            f"{check.shown(other)}. A term that is the same for all examples, such as a penalty on "
            "weights, is a mean too: `sl.weighted_mean(term * weight, weight)`."
        )
    return other


def weighted_mean(total: Any, weight: Any) -> WeightedMean:
    """What a loss returns: a sum over the examples at hand, and what they weigh.

    - `total`: the sum over the examples at hand, a scalar; of a metric it may be an array.
    - `weight`: their weight, a scalar, such as the number of tokens that are not masked.

    The step adds up totals and weights over devices and microbatches and divides once, so unevenly
    masked tokens give the loss that one device would compute; a mean of means would not. The weight
    takes no part in the gradient.

    >>> weighted_mean(6.0, 3)
    WeightedMean(total=6.0, weight=3)
    """
    check_arrays.real("weighted_mean", "total", total)
    check_arrays.real("weighted_mean", "weight", weight)
    return WeightedMean(total, weight)


def split_axes() -> tuple[str, ...]:
    """The manual axes that split the batch where this is called; empty outside a `shard_map`.

    Which axes split the batch is what the rules in force say, so that without rules, inside a
    `shard_map` of the user's, it cannot be told and is refused.
    """
    # Outside a `shard_map` arrays are whole, and nothing has to be asked of other devices.
    manual = current_mesh().manual_axes
    scope = current_scope()
    if not manual:
        return ()
    if scope is None or scope.rules is None:
        raise ValueError(
            f"The whole batch was asked for inside a `shard_map` over {manual}, and no rules say "
            "which of these axes split it. Trace it under `with sl.use(rules, mesh):`."
        )
    return axes_within(scope.rules.batch_axes, manual)


def gather_batch(x: jax.Array, *names: str | None) -> jax.Array:
    """The examples of every device, along dim 0, in the order of the batch.

    Outside the step it is the array as it is. A number of each device, such as a largest one, is
    gathered as an array of one: `sl.gather_batch(x.max()[None]).max()`.

    `names` are those of the other dims. Name a dim that a mesh axis splits, or it is gathered
    whole.

    >>> gather_batch(jnp.ones((4, 2))).shape
    (4, 2)
    """
    check_arrays.array("gather_batch", "x", x)
    # Without a batch that is split nothing is gathered, and a step would be the first to refuse it.
    if not x.shape:
        takes = "an array with the examples along dim 0: of a largest number, `x.max()[None]`"
        raise check.refusal("gather_batch", "x", x, takes)
    for name in names:
        if not isinstance(name, str | None):
            raise check.refusal("gather_batch", "names", name, "names of dims, one by one, or None")
    axes, scope, mesh = split_axes(), current_scope(), current_mesh()
    if not axes or scope is None or scope.rules is None:
        return x
    if not names:
        names = (None,) * (x.ndim - 1)
    manual = frozenset(mesh.manual_axes)
    # The dims behind the examples may be split by name over automatic axes.
    other_dims = resolve(
        scope.rules, mesh.shape, names, x.shape[1:], what="the array to gather", manual=manual
    ).spec
    # A nested region takes dim 0 whole. Where automatic axes split the batch too, that would gather
    # it over these first, so the collective stays in the outer region.
    split_automatically = any(axis not in manual for axis in scope.rules.batch_axes)
    return manual_over_all(
        lambda shard: lax.all_gather(shard, axes, axis=0, tiled=True),
        PartitionSpec(None, *other_dims),
        nest=not split_automatically,
    )(x)


def batch_mean(x: jax.Array, axis: int | tuple[int, ...] = 0) -> jax.Array:
    """The mean over the whole batch.

    It is taken over `axis` of the local examples, and over every device that holds others.

    >>> batch_mean(jnp.array([1.0, 3.0])).item()
    2.0
    """
    check_arrays.array("batch_mean", "x", x)
    dims = axis if isinstance(axis, tuple) else (axis,)
    takes = f"dims of an array of shape {x.shape}"
    for dim in dims:
        check.whole("batch_mean", "axis", dim, takes, least=-x.ndim, most=x.ndim - 1)
    # -1 and the last dim are the same.
    if len({dim % x.ndim for dim in dims}) < len(dims):
        raise check.refusal("batch_mean", "axis", axis, "each dim once")
    local_mean = jnp.mean(x, axis)
    axes = split_axes()
    # Devices hold equally many examples, so that the mean of their means is the mean of all.
    if axes:
        return lax.pmean(local_mean, axes)
    return local_mean


def manual_over_all(body: Any, spec: Any, *, nest: bool = True) -> Any:
    """Run a collective on each device's own shard, in a `shard_map` over the other axes.

    These are the axes that are still automatic where it is called. A collective over a manual axis
    whose operand an automatic axis splits would gather the operand first and move as many times the
    bytes. `spec`, or a tree of them, says how the automatic axes split the operand, and the result.
    Without `nest`, or without automatic axes, it is `body` as it is.
    """
    # Over these the partitioner would lay the operand out as it likes.
    automatic = set(mesh_of_shards().auto_axes)
    if not automatic or not nest:
        return body
    return jax.shard_map(
        body, in_specs=(spec,), out_specs=spec, axis_names=automatic, check_vma=False
    )
