"""What is refused of a new state, and what is warned of: names, rules, ZeRO, the exchange, the
optimizer.

All of it is checked on shapes, before any memory is taken. An error names the parameter, what was
asked of it, and the way out.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardlib._text import listed
from shardlib._tree import named_leaves
from shardlib.collectives._exact import Exact, Exchange
from shardlib.collectives._exchanges import Compressed, Lossy
from shardlib.collectives._low_rank import PowerSGD
from shardlib.collectives._zero_split import Split
from shardlib.layouts._relate import Relation
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import EXPERTS, LAYERS, AxisRules
from shardlib.layouts._specs import axes_within, product_text, spec_axes
from shardlib.modeling._flax import Names
from shardlib.optimizers._local import Apart, Local
from shardlib.step._exchange_checks import check_apart
from shardlib.step._precision import check_patterns
from shardlib.step._state import Layout
from shardlib.step._strategy import Strategy

# An optimizer's steps are about a thousandth of what they move: fewer bits round them away.
_FEWEST_BITS = 16


def check_exchange(exchange: Exchange, layout: Layout, params: Any) -> None:
    """Refuse an exchange that has nothing to send, or that cannot send what it has.

    Args:
        exchange: the exchange of the strategy, which has workers.
        layout: the layout of the state.
        params: the trained parameters, or their shapes.
    """
    leaves = dict(named_leaves(params))
    by = exchange.by
    # Workers that train apart may average all of their parameters exactly.
    if isinstance(by, Exact):
        return
    if isinstance(by, Lossy):
        for argument, patterns in by.patterns.items():
            check_patterns(f"{argument}=...", patterns, list(leaves))
    # A parameter that is split over all the axes of the exchange has nobody to exchange it with.
    exchanged: list[str] = []
    for path, parameter in layout.parameters(params).items():
        if by.over(parameter):
            exchanged.append(path)
    # An optimizer that lets workers differ has them average what is exact as well.
    if not exchanged and not isinstance(layout.optimizer, Apart):
        too_small = ""
        if isinstance(by, PowerSGD):
            too_small = f", or has no matrix of which factors of rank {by.rank} would be smaller"
        instead = "Use `sl.Exact()`."
        if exchange.apart:
            instead = "Leave out the `exchange` of the meeting, which then is exact."
        raise ValueError(
            f"`Strategy(exchange={exchange})` takes the gradient of no parameter: each is exact by "
            f"a pattern, or split over {', '.join(map(repr, exchange.axes))}{too_small}. {instead}"
        )
    for path in exchanged:
        # Codes are signs or levels of real numbers; a complex sign has infinitely many values.
        if isinstance(by, Lossy) and jnp.iscomplexobj(leaves[path]):
            raise ValueError(
                f"`Strategy(exchange={exchange})` compresses real numbers, and `{path}` is "
                f"{leaves[path].dtype}: have it summed exactly, `exact=({path!r},)`."
            )


def check_sender(optimizer: Any, strategy: Strategy) -> None:
    """Refuse an optimizer that needs workers' own gradients where it would be given others."""
    if not isinstance(optimizer, Local | Apart):
        return
    if strategy.apart:
        raise ValueError(
            "The optimizer says itself what workers send in each step, and "
            f"`Strategy(exchange={strategy.exchange})` has them send nothing between meetings. Use "
            "an exchange that sends codes, `exchange=sl.collectives.OneBit(axis=...)`; or, apart, "
            "an optimizer of averaged gradients, `optax.adamw`."
        )
    if strategy.offloaded is not None:
        raise ValueError(
            f"`Strategy(offload={strategy.offload!r})`: the optimizer makes what it sends of its "
            "state, on the device, so that all of it would be copied there in every step. Leave "
            "`offload` out, or use an optimizer of averaged gradients, `optax.adamw`."
        )
    if strategy.exchange.axes and not isinstance(strategy.exchange, Compressed):
        # Its messages say where they are always zero, which factors and places do not keep so.
        raise ValueError(
            "The optimizer says itself what workers send, and where that is always zero, and "
            f"`Strategy(exchange={strategy.exchange})` does not keep it so. Use an exchange that "
            "sends codes, `exchange=sl.collectives.OneBit(axis=...)`, or another optimizer."
        )
    if not strategy.exchange.axes:
        raise ValueError(
            "The optimizer makes what it sends of each worker's own gradient, and "
            f"`Strategy(exchange={strategy.exchange})` gives it only averaged ones. Use an "
            "exchange that sends codes, `exchange=sl.collectives.OneBit(axis=...)`; or for "
            "averaged gradients `optax.adamw`."
        )
    if isinstance(optimizer, Apart):
        check_apart(strategy, axes_within(strategy.data_axes, strategy.exchange.axes))
    # A norm can be computed of workers' own gradients; what a transformation needs is unknown.
    if isinstance(strategy.clip, optax.GradientTransformation):
        raise ValueError(
            "`Strategy(clip=...)` has a transformation that looks at the averaged gradient, which "
            "nobody has once the optimizer sends something else: clip by the global norm, "
            "`clip=1.0`."
        )


def check_trainable(
    params: Any, frozen: Any, rest: Any, trainable: Any, strategy: Strategy
) -> None:
    """Refuse a model without parameters, and parameters of so few bits that updates are lost.

    Args:
        params: the trained parameters.
        frozen: the frozen ones.
        rest: the other arrays of the model.
        trainable: what `init` was given, which the error quotes.
        strategy: the strategy of the state.
    """
    if not jax.tree.leaves(params):
        paths = [path for path, _ in (*named_leaves(frozen), *named_leaves(rest))]
        others = "`make_model` returned a model without arrays."
        if paths:
            others = f"There are: {', '.join(paths)}."
        raise ValueError(
            "The optimizer has nothing to move: no leaf of the model is a parameter "
            f"(`trainable={trainable!r}`, `frozen={strategy.frozen!r}`). {others}"
        )
    for path, leaf in named_leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"`{path}` is {leaf.dtype}, which has no gradient, and cannot be trained: leave it "
                f"out of `trainable`, or as it is, `Strategy(frozen=({re.escape(path)!r},))`."
            )
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        if is_float and jnp.finfo(leaf.dtype).bits < _FEWEST_BITS:
            raise ValueError(
                f"`{path}` is {leaf.dtype}, of so few bits that an optimizer's steps would be "
                "rounded away. Store it in a wider dtype and narrow it in the model, or leave it "
                f"as it is: `Strategy(frozen=({re.escape(path)!r},))`."
            )


def check_relations(
    relations: dict[str, Relation], leaves: dict[str, Any], strategy: Strategy
) -> None:
    """Under `Zero(strict=True)`, refuse optimizer state that is held whole by every device.

    Args:
        relations: to which parameter each array of the optimizer's state belongs, by its path.
        leaves: these arrays, or their shapes.
        strategy: the strategy of the state.
    """
    if not strategy.sharding.strict:
        return
    unrelated: list[str] = []
    for path, relation in relations.items():
        # Scalars, such as counts of steps, have a relation of their own kind, and may be whole.
        if relation.kind in ("none", "ambiguous"):
            unrelated.append(f"`{path}` of shape {leaves[path].shape}: {relation.reason}")
    if unrelated:
        raise ValueError(
            "`Zero(strict=True)`: some of the optimizer's state is whole on every device, since it "
            f"can be related to no parameter: {'; '.join(unrelated)}. Choose another optimizer, or "
            "leave `strict` out."
        )


def check_layer_pattern(strategy: Strategy, paths: list[str]) -> None:
    """Refuse a pattern for layers, `Zero(layers=...)`, that no parameter's path contains."""
    zero = strategy.sharding
    if zero.layers and not any(zero.group(path) for path in paths):
        raise ValueError(
            f"`Zero(layers={zero.layers!r})`: the pattern is found in no parameter's path. The "
            f"paths are: {', '.join(paths)}."
        )


def check_stacked(strategy: Strategy, names: dict[str, Names]) -> None:
    """Refuse a name for stacked layers that no parameter has, but for the default."""
    used: set[str] = set()
    for dim_names in names.values():
        # Arrays that are laid out by a spec have no names.
        if dim_names is not None and not isinstance(dim_names, PartitionSpec):
            used.update(filter(None, dim_names))
    for name in strategy.sharding.stacked:
        if name not in used and name != LAYERS:
            raise ValueError(
                f"`Zero(stacked={strategy.sharding.stacked})`: no parameter has a dim of the name "
                f"`{name}`. Names of the parameters' dims are: {listed(sorted(used)) or 'none'}."
            )


def describe_nothing_split(strategy: Strategy, splits: dict[str, Split]) -> tuple[str, ...]:
    """What to warn of where ZeRO was asked for and every parameter stays whole.

    Args:
        strategy: the strategy of the state.
        splits: how ZeRO splits each parameter, by path; one that it could not split has a reason.
    """
    zero = strategy.sharding
    whole: dict[str, Split] = {}
    for path, split in splits.items():
        if split.is_split:
            return ()
        if split.reason:
            whole[path] = split
    if not zero.stage or not whole:
        return ()
    # The largest says most about why: small ones are left whole on purpose.
    largest = max(whole, key=lambda path: whole[path].layer)
    sizes = strategy.device_mesh.shape
    over = product_text(sizes, strategy.zero_axes)
    advice = "Have a dim that divides, or another mesh, or leave `zero` out."
    if whole[largest].layer <= zero.small:
        advice = (
            f"`Zero(small={zero.small})` leaves whole what has no more elements than that: to "
            f"split smaller ones too, `zero=sl.Zero({zero.stage}, small=0)`; for a model of this "
            "size `zero=0` does as well."
        )
    return (
        f"`Strategy(zero={strategy.zero!r})` splits nothing over {over}, and every device holds "
        f"all parameters. The largest is `{largest}` ({whole[largest].reason}). {advice}",
    )


def check_data_axes(
    specs: dict[str, PartitionSpec], names: dict[str, Names], strategy: Strategy
) -> None:
    """Refuse parameters that are split over an axis along which the step is manual.

    The loss would see one device's part of them. That is meant for `experts`, whose name says so,
    and where the strategy names its manual axes itself.
    """
    if strategy.manual is not None:
        return
    for path, spec in specs.items():
        # The dim of experts is the one that may be split over data axes: tokens are sent to it.
        split_over = spec_axes(_without_experts(spec, names.get(path)))
        for axis in split_over:
            if axis in strategy.data_axes:
                raise ValueError(
                    f"`{path}` is laid out as {spec}, and the step is manual over `{axis}`: the "
                    "loss would see one device's part of it. To have it gathered where it is used, "
                    "leave the axis to the partitioner, `manual=()`, or split parameters over an "
                    "axis of their own, as `sl.rules.fsdp` does. If each device is meant to use "
                    "its own part, as experts are, say so: "
                    f"`Strategy(manual={strategy.data_axes})`."
                )


def _without_experts(spec: PartitionSpec, names: Names) -> PartitionSpec:
    """The entries of a spec of dims that are not called `experts`."""
    if names is None or isinstance(names, PartitionSpec):
        return spec
    entries = []
    for dim, entry in enumerate(spec):
        if names[dim] != EXPERTS:
            entries.append(entry)
    return PartitionSpec(*entries)


def check_names(names: dict[str, Names], leaves: dict[str, Any], rules: AxisRules) -> None:
    """Refuse wrong ranks, and all unknown names at once, each with the parameters that carry it.

    Args:
        names: the names of the dims of each array, by its path.
        leaves: the arrays, or their shapes; names of others are not looked at.
        rules: the rules that must know every name.
    """
    # All unknown names are collected, so that one run tells the whole of what is missing.
    unknown: dict[str, list[str]] = {}
    for path, dim_names in names.items():
        if dim_names is None or isinstance(dim_names, PartitionSpec) or path not in leaves:
            continue
        _check_rank(path, leaves[path].shape, dim_names)
        for name in dim_names:
            if name is not None and name not in rules:
                unknown.setdefault(name, []).append(path)
    if unknown:
        raise ValueError(_describe_unknown(unknown, rules))


def _describe_unknown(unknown: dict[str, list[str]], rules: AxisRules) -> str:
    """The error for names without a rule, of which each has the paths that carry it."""
    carriers: list[str] = []
    for name, paths in unknown.items():
        carriers.append(f"`{name}` on {listed(paths)}")
    known = listed(rules.names)
    suggestion = ", ".join(f"{name}=None" for name in unknown)
    return (
        f"Parameters carry names that no rule knows: {'; '.join(carriers)}. The rules know "
        f"{known}. Add rules, `rules | AxisRules({suggestion})` with an axis or `None` for "
        "replicated."
    )


def _check_rank(path: str, shape: tuple[int, ...], dim_names: tuple[str | None, ...]) -> None:
    if len(dim_names) == len(shape):
        return
    # The message ends with the way out that is always there.
    stacked = ""
    # Too few names are most often those of one layer of a stack.
    if len(dim_names) < len(shape):
        stacked = (
            "Layers stacked by `nnx.vmap` or `nnx.scan` need "
            '`transform_metadata={nnx.PARTITION_NAME: "layers"}` to name the new dim. '
        )
    raise ValueError(
        f"`{path}` of shape {shape} has {len(shape)} dims and {len(dim_names)} names {dim_names}. "
        f"{stacked}Names that a layer gives are overridden by `sl.annotate(model, {{{path!r}: "
        "names})`, with one for every dim."
    )


def remarks(
    path: str, leaf: Any, dim_names: Names, rules: AxisRules, mesh_shape: Any
) -> tuple[str, ...]:
    """What to warn of about the layout of one array, such as a rule that was not applied.

    Args:
        path: the path of the array.
        leaf: the array, or its shape.
        dim_names: the names of its dims; a spec or None has nothing to be said about.
        rules: the rules that lay it out.
        mesh_shape: the sizes of the mesh's axes.
    """
    if dim_names is None or isinstance(dim_names, PartitionSpec):
        return ()
    resolution = resolve(rules, mesh_shape, dim_names, leaf.shape, what=path)
    # Activations may be padded to a size that divides, and sliced again. What is stored may not.
    if resolution.padded_shape != leaf.shape:
        raise ValueError(
            f"`{path}` of shape {leaf.shape} is a stored parameter, and `pad` would change what an "
            f"optimizer sees of it: {resolution.said[0]} Declare the parameter with shape "
            f"{resolution.padded_shape}, or use `drop` or `replicate`."
        )
    return resolution.said
