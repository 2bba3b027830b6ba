"""What is looked for in a loss before it is compiled: what a step cannot do right, and what was not
meant.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardlib._tree import named_leaves
from shardlib.layouts._annotate import say
from shardlib.layouts._rules import EXPERTS, spec_axes
from shardlib.modeling._batch import WeightedMean
from shardlib.modeling._random import describe_raw_keys, raw_keys
from shardlib.step._coupled import describe_coupled, facts
from shardlib.step._examples import CONSTANT, with_examples
from shardlib.step._loss import Returned
from shardlib.step._promoted_products import describe_widened, widened
from shardlib.step._state import combine
from shardlib.step._strategy import Strategy
from shardlib.step._varying import describe_varying, sends_between, varying_outputs
from shardlib.tracing._jaxpr import REMATS, every_equation


def check_loss(
    call: Callable[..., Returned],
    inputs: Any,
    trained: Any,
    fixed: Any,
    rest: Any,
    scanned: Any,
    strategy: Strategy,
) -> None:
    """Trace the loss once and look for what a step cannot do right, or what was not meant.

    Refused is state that would differ between devices: made from the examples or parameters of one,
    or drawn for it. Refused too is `remat="full"` where no block is marked. Warned of are losses
    that are no mean over examples, and products that are not taken in the dtype that was asked for.
    """
    index, examples = scanned
    axes = strategy.data_axes
    compute = strategy.dtypes.compute
    streams = inputs(rest, index, examples)[0]
    state = [*named_leaves(streams), *named_leaves(rest)]
    split_axes = [axis for axis in axes if strategy.device_mesh.shape[axis] > 1]
    batch_is_split = bool(split_axes) or strategy.microbatches > 1
    uses = jax.tree.leaves((trained, fixed))
    # `experts` is the one name that may be split over these axes unless `manual` says that parts
    # are meant, see `init`.
    in_parts = [use for use in uses if strategy.manual is None and _is_split(use, split_axes)]
    if not (axes and state) and compute is None and not batch_is_split and strategy.remat != "full":
        return

    def after(params: Any, frozen: Any, rest: Any, examples: Any) -> Any:
        returned = call(combine(params, frozen), *inputs(rest, index, examples))
        return (
            (returned.streams, returned.rest),
            _values_returned(returned.out),
            returned.means["loss"].total,
        )

    # Under the mesh of the step, so that the step need not trace the loss again to differentiate it.
    mesh = jax.sharding.get_abstract_mesh()
    whole = jax.tree.map(lambda use: _on(mesh, use.whole), (trained, fixed))
    jaxpr, (_, values, _) = jax.make_jaxpr(after, return_shape=True)(*whole, rest, examples)
    if strategy.remat == "full":
        _check_marked(jaxpr)
    others = len(jax.tree.leaves(rest)), len(jax.tree.leaves(examples))
    if in_parts and not sends_between(jaxpr, split_axes):
        raise ValueError(_describe_part(in_parts[0], split_axes, strategy))
    if axes and state:
        own = [not set(spec_axes(use.named)).isdisjoint(axes) for use in uses]
        found = varying_outputs(jaxpr, own + [False] * others[0] + [True] * others[1], axes)
        differing = [path for (path, _), differs in zip(state, found, strict=False) if differs]
        if differing:
            raise ValueError(describe_varying(differing))
        paths = [path if leaf.dtype == jnp.uint32 else None for path, leaf in named_leaves(rest)]
        if raw := raw_keys(jaxpr.jaxpr, [None] * len(uses) + paths + [None] * others[1]):
            raise ValueError(describe_raw_keys(raw))
    if compute is not None:
        narrowed = [use.path if use.whole.dtype == compute != use.dtype else None for use in uses]
        wide = widened(jaxpr, narrowed + [None] * sum(others), jnp.dtype(compute).itemsize)
        if wide:
            say((describe_widened(wide, compute),))
    if batch_is_split:
        given = [CONSTANT] * (len(uses) + others[0])
        given += [with_examples(leaf.shape) for leaf in jax.tree.leaves(examples)]
        known = facts(jaxpr, given, split_axes)[len(state) :]
        for value, fact in zip(values, known, strict=False):
            if remark := describe_coupled(value.name, fact, value.weighted, strategy.microbatches):
                say((remark,))
                break  # what else there is has the same cause, more often than not


def _on(mesh: AbstractMesh, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of an array on a mesh, of whose axes none splits it explicitly."""
    if mesh.empty:
        return shape
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _is_split(use: Any, axes: Sequence[str]) -> bool:
    return not set(spec_axes(use.named)).isdisjoint(axes)


def _describe_part(use: Any, split_axes: Sequence[str], strategy: Strategy) -> str:
    """The error for a parameter of which the loss would see each device's own part, and take it for
    the whole.
    """
    axes = ", ".join(f"`{axis}`" for axis in spec_axes(use.named) if axis in split_axes)
    return (
        f"`{use.path}` of shape {use.shape} is laid out as {use.named}, split over {axes}, over "
        "which each device has its own part: the loss would see an array of shape "
        f"{use.whole.shape}, and sends nothing along that axis to the other parts. Use it in a "
        "layer of experts, `sl.experts.moe`; or lay it out whole, `rules | "
        f"sl.AxisRules({EXPERTS}=None)`, and split it by ZeRO, `zero=3`; or if each device is "
        f"meant to use its own part alone, say so: `Strategy(manual={strategy.data_axes})`."
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Value:
    """A number that a loss function returned: the loss or a metric, its total or its weight."""

    value: Any
    name: str = field(metadata={"static": True})
    weighted: bool = field(metadata={"static": True})


def _values_returned(out: Any) -> list[_Value]:
    loss, metrics = out if isinstance(out, tuple) else (out, {})
    found: list[_Value] = []
    for name, value in {"loss": loss, **metrics}.items():
        weighted = isinstance(value, WeightedMean)
        parts = (value.total, value.weight) if weighted else (value,)
        found += [_Value(jnp.asarray(part), name, weighted) for part in parts]
    return found


def _check_marked(jaxpr: Any) -> None:
    if not any(equation.primitive.name in REMATS for equation in every_equation(jaxpr.jaxpr)):
        raise ValueError(
            '`Strategy(remat="full")` keeps the inputs alone of blocks marked with `sl.remat`, and '
            "the loss calls none: the program would be the same. Mark the model's blocks, `block = "
            "sl.remat(block)`; or leave `remat` out."
        )
