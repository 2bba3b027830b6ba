"""What is refused of a new state, and what is said of it: names, rules, ZeRO, the exchange, the
optimizer.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from shardlib._tree import named_leaves
from shardlib.collectives._exact import Exchange
from shardlib.collectives._exchanges import Compressed
from shardlib.collectives._zero import Split
from shardlib.layouts._relate import Relation
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import EXPERTS, LAYERS, AxisRules, spec_axes
from shardlib.modeling._flax import Names
from shardlib.optimizers._local import Local
from shardlib.step._precision import check_patterns
from shardlib.step._state import Layout
from shardlib.step._strategy import Strategy


def check_exchange(exchange: Exchange, layout: Layout, params: Any) -> None:
    """Refuse an exchange that finds nothing to do, or what it cannot send."""
    leaves = dict(named_leaves(params))
    if isinstance(exchange, Compressed):
        check_patterns("exact=...", exchange.exact, list(leaves))
    taken = [path for path, one in layout.parameters(params).items() if exchange.over(one)]
    if not taken:
        raise ValueError(
            f"`Strategy(exchange={exchange})` takes the gradient of no parameter: each is exact by "
            f"a pattern, or split over {', '.join(map(repr, exchange.axes))}. Use `sl.Exact()`."
        )
    if isinstance(exchange, Compressed) and (
        odd := [path for path in taken if jnp.iscomplexobj(leaves[path])]
    ):
        raise ValueError(
            f"`Strategy(exchange={exchange})` compresses real numbers, and `{odd[0]}` is "
            f"{leaves[odd[0]].dtype}: have it summed exactly, `exact=({odd[0]!r},)`."
        )


def check_sender(optimizer: Any, strategy: Strategy) -> None:
    """Refuse an optimizer that needs workers' own gradients where it would be given others."""
    if not isinstance(optimizer, Local):
        return
    if not strategy.exchange.axes:
        raise ValueError(
            "The optimizer makes what it sends of each worker's own gradient, and "
            f"`Strategy(exchange={strategy.exchange})` gives it averaged ones alone. Use an "
            "exchange that sends codes, `exchange=sl.collectives.OneBit(axis=...)`; or for "
            "averaged gradients `optax.adamw`."
        )
    if isinstance(strategy.clip, optax.GradientTransformation):
        raise ValueError(
            "`Strategy(clip=...)` has a transformation that looks at the averaged gradient, which "
            "nobody has once the optimizer sends something else: clip by the global norm, "
            "`clip=1.0`."
        )


def check_trainable(
    params: Any, frozen: Any, rest: Any, trainable: Any, strategy: Strategy
) -> None:
    """Refuse a model without parameters, and parameters of so few bits that what an optimizer adds
    is rounded away.
    """
    if not jax.tree.leaves(params):
        paths = [path for path, _ in (*named_leaves(frozen), *named_leaves(rest))]
        raise ValueError(
            "The optimizer has nothing to move: no leaf of the model is a parameter "
            f"(`trainable={trainable!r}`, `frozen={strategy.frozen!r}`). "
            + (
                f"There are: {', '.join(paths)}."
                if paths
                else "`make_model` returned a model without arrays."
            )
        )
    for path, leaf in named_leaves(params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 16:
            raise ValueError(
                f"`{path}` is {leaf.dtype}, of so few bits that an optimizer's steps would be "
                "rounded away. Store it in a wider dtype and narrow it in the model, or leave it "
                f"as it is: `Strategy(frozen=({re.escape(path)!r},))`."
            )


def check_relations(
    relations: dict[str, Relation], leaves: dict[str, Any], strategy: Strategy
) -> None:
    if not strategy.sharding.strict:
        return
    if lost := [
        path for path, relation in relations.items() if relation.kind in ("none", "ambiguous")
    ]:
        listed = "; ".join(
            f"`{path}` of shape {leaves[path].shape}: {relations[path].reason}" for path in lost
        )
        raise ValueError(
            "`Zero(strict=True)`: of the optimizer's state there is what lies whole on every "
            f"device, since it can be related to no parameter: {listed}. Choose another optimizer, "
            "or leave `strict` out."
        )


def check_layer_pattern(strategy: Strategy, paths: list[str]) -> None:
    zero = strategy.sharding
    if zero.layers and not any(zero.group(path) for path in paths):
        raise ValueError(
            f"`Zero(layers={zero.layers!r})`: the pattern is found in no parameter's path. The "
            f"paths are: {', '.join(paths)}."
        )


def check_stacked(strategy: Strategy, names: dict[str, Names]) -> None:
    """Refuse a name for stacked layers that no parameter has, but for the default."""
    here = {
        name
        for of_dims in names.values()
        if not isinstance(of_dims, PartitionSpec)
        for name in of_dims or ()
    }
    for name in strategy.sharding.stacked:
        if name not in here and name != LAYERS:
            listed = ", ".join(f"`{one}`" for one in sorted(filter(None, here))) or "none"
            raise ValueError(
                f"`Zero(stacked={strategy.sharding.stacked})`: no parameter has a dim of the name "
                f"`{name}`. Names of the parameters' dims are: {listed}."
            )


def describe_nothing_split(strategy: Strategy, splits: dict[str, Split]) -> tuple[str, ...]:
    """What to say where ZeRO was asked for and every parameter stays whole."""
    zero = strategy.sharding
    whole = {path: split for path, split in splits.items() if split.reason}
    if not zero.stage or not whole or any(split.dim is not None for split in splits.values()):
        return ()
    path = max(whole, key=lambda path: whole[path].layer)
    over = " x ".join(f"`{axis}={strategy.device_mesh.shape[axis]}`" for axis in strategy.zero_axes)
    out = "Have a dim that divides, or another mesh, or leave `zero` out."
    if whole[path].layer <= zero.small:
        out = (
            f"`Zero(small={zero.small})` leaves whole what has no more elements than that: to "
            f"split smaller ones too, `zero=sl.Zero({zero.stage}, small=0)`; for a model of this "
            "size `zero=0` does as well."
        )
    return (
        f"`Strategy(zero={strategy.zero!r})` splits nothing over {over}, and every device holds "
        f"all parameters. The largest is `{path}` ({whole[path].reason}). {out}",
    )


def check_data_axes(
    specs: dict[str, PartitionSpec], names: dict[str, Names], strategy: Strategy
) -> None:
    """Refuse parameters of which a loss would see one device's part, unless that is said to be
    meant, as by `experts`.
    """
    for path, spec in specs.items():
        of_dims = names.get(path) or ()
        # Whose names say what is meant.
        experts = () if isinstance(of_dims, PartitionSpec) else of_dims
        entries = [e for dim, e in enumerate(spec) if EXPERTS not in experts[dim : dim + 1]]
        if strategy.manual is None and (
            over := [
                axis for axis in spec_axes(PartitionSpec(*entries)) if axis in strategy.data_axes
            ]
        ):
            raise ValueError(
                f"`{path}` is laid out as {spec}, and the step is manual over `{over[0]}`: the "
                "loss would see one device's part of it. To have it gathered where it is used, "
                "leave the axis to the partitioner, `manual=()`, or split parameters over an axis "
                "of their own, as `sl.rules.fsdp` does. If each device is meant to use its own "
                f"part, as experts are, say so: `Strategy(manual={strategy.data_axes})`."
            )


def check_names(names: dict[str, Names], leaves: dict[str, Any], rules: AxisRules) -> None:
    """Refuse all unknown names and all wrong ranks at once, each with the parameters that carry
    it.
    """
    unknown: dict[str, list[str]] = {}
    for path, of_dims in names.items():
        if of_dims is None or isinstance(of_dims, PartitionSpec) or path not in leaves:
            continue
        shape = leaves[path].shape
        if len(of_dims) != len(shape):
            why = (
                "Layers stacked by `nnx.vmap` or `nnx.scan` need "
                '`transform_metadata={nnx.PARTITION_NAME: "layers"}` to name the new dim. '
            )
            raise ValueError(
                f"`{path}` of shape {shape} has {len(shape)} dims and {len(of_dims)} names "
                f"{of_dims}. "
                + (why if len(of_dims) < len(shape) else "")
                + f"Names that a layer gives are overridden by `sl.annotate(model, {{{path!r}: "
                "names})`, with one for every dim."
            )
        for name in of_dims:
            if name is not None and name not in rules:
                unknown.setdefault(name, []).append(path)
    if unknown:
        listed = "; ".join(
            f"`{name}` on {', '.join(f'`{p}`' for p in paths)}" for name, paths in unknown.items()
        )
        known = ", ".join(f"`{name}`" for name in rules.names)
        suggestion = ", ".join(f"{name}=None" for name in unknown)
        raise ValueError(
            f"Parameters carry names that no rule knows: {listed}. The rules know {known}. Add "
            f"rules, `rules | AxisRules({suggestion})` with an axis or `None` for replicated."
        )


def remarks(
    path: str, leaf: Any, of_dims: Names, rules: AxisRules, mesh_shape: Any
) -> tuple[str, ...]:
    if of_dims is None or isinstance(of_dims, PartitionSpec):
        return ()
    resolution = resolve(rules, mesh_shape, of_dims, leaf.shape, what=path)
    if resolution.padded_shape != leaf.shape:
        raise ValueError(
            f"`{path}` of shape {leaf.shape} is a stored parameter, and `pad` would change what an "
            f"optimizer sees of it: {resolution.said[0]} Declare the parameter with shape "
            f"{resolution.padded_shape}, or use `drop` or `replicate`."
        )
    return resolution.said
