"""The state of a run, born sharded: shapes first, then shardings, then values in place."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib import _arguments as check
from shardlib import _arrays as check_arrays
from shardlib._annotate import say
from shardlib._flax import (
    Brought,
    Definition,
    Names,
    brought_along,
    building,
    completed,
    is_nnx_state,
    named_variables,
    take_apart,
    with_values,
)
from shardlib._placement import Placement, by_names, like_parameters, place
from shardlib._precision import check_patterns
from shardlib._random import THREEFRY, is_key
from shardlib._region import Held
from shardlib._relate import Relation, relate
from shardlib._rules import EXPERTS, LAYERS, AxisRules, resolve, spec_axes
from shardlib._tree import map_named, named_leaves
from shardlib._zero import Split, split_further
from shardlib.collectives._exact import Exchange, Parameter
from shardlib.collectives._exchanges import Compressed
from shardlib.optimizers._local import Local
from shardlib.train._exchange import ErrorsByPath, pieces
from shardlib.train._order import check_layers, check_state, place_layers, reordered
from shardlib.train._strategy import Strategy


@dataclass(frozen=True)
class Layout:
    """What a state is besides arrays: how to rebuild its model, its optimizer, its strategy, the names of its leaves."""

    definition: Definition
    optimizer: Any
    strategy: Strategy
    names: tuple[tuple[str, Names], ...]
    relations: tuple[tuple[str, Relation], ...] = ()
    brought: AxisRules = field(default_factory=AxisRules)
    """Rules that parameters bring along, beside the strategy's."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.definition, self.optimizer, self.strategy, self.names, self.relations, self.brought))

    @cached_property
    def rules(self) -> AxisRules:
        """What the names of parameters come to."""
        return self.strategy.rules | self.brought

    @property
    def named(self) -> Placement:
        """How names lay out what has them."""
        return by_names(dict(self.names), self.rules, self.strategy.device_mesh.shape)

    def splits(self, params: Any) -> dict[str, Split]:
        """How each parameter lies by its names, split further by ZeRO; by its path."""
        names, strategy = dict(self.names), self.strategy
        shape_of_mesh = strategy.device_mesh.shape
        return {
            path: split_further(
                strategy.sharding, strategy.zero_axes, shape_of_mesh, leaf.shape,
                self.named(path, leaf.shape, PartitionSpec()), names.get(path),
            )
            for path, leaf in named_leaves(params)
        }  # fmt: skip

    def parameters(self, params: Any) -> dict[str, Parameter]:
        """What an exchange is told of each parameter, by its path."""
        manual, dtypes = self.strategy.manual_axes, self.strategy.dtypes
        leaves = dict(named_leaves(params))
        named = {path: self.named(path, leaf.shape, PartitionSpec()) for path, leaf in leaves.items()}
        return {
            path: Parameter(
                path, leaf.shape, named[path], tuple(axis for axis in manual if axis not in spec_axes(named[path])),
                split.spec, dtypes.reduced(leaf.dtype),
            )
            for (path, leaf), split in zip(leaves.items(), self.splits(params).values(), strict=True)
        }  # fmt: skip

    def no_errors(self, params: Any) -> ErrorsByPath:
        """What the exchange has left over before the first step: nothing, of each parameter that it takes."""
        exchange, mesh = self.strategy.exchange, self.strategy.device_mesh
        if not exchange.keeps_errors:
            return {}
        taken = {path: one for path, one in self.parameters(params).items() if exchange.over(one)}
        none = {path: pieces(exchange, one, mesh.shape).errors() for path, one in taken.items()}
        return jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape), x.dtype), none)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: hashes of text differ from process to process."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def __hash__(self) -> int:  # computed once: every call of a step hashes the layout
        return self._hash


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A run between two steps: a pytree of global arrays, each with its sharding.

    `params` are the parameters that the optimizer moves, `frozen` those that stay as they are; where one tree has a leaf,
    the other has None. `errors` is what a compressed exchange has left over, by the paths of parameters, each device's own
    along dim 0; a checkpoint has it by worker and in the parameter's shape. `rest` is whatever else the model carries,
    `streams` the random streams inside it, `key` the key from which each step derives its randomness. `nonfinite` counts the
    steps whose gradient was not finite.
    """

    step: Any
    params: Any
    frozen: Any
    opt_state: Any
    errors: ErrorsByPath
    streams: Any
    rest: Any
    key: Any
    nonfinite: Any
    layout: Layout = field(metadata={"static": True}, repr=False)

    @property
    def model(self) -> Any:
        """The model with this state's values, for evaluation and sampling: use it under `strategy.scope()`."""
        state = reordered(self, natural=True)
        return self.layout.definition.merge(united(state.params, state.frozen), state.streams, state.rest)

    def with_weights(self, weights: Any) -> "State":
        """The state with these parameters, each put in its place: a tree as `model` has it, of arrays on the host or anywhere.

        Assigning to `params` is not the same: under some pipelines layers lie there in another order than the model's.
        """
        of = united(self.params, self.frozen)
        given, here = (dict(named_leaves(tree)) for tree in (weights, of))
        if lost := [path for path in here if path not in given] or [path for path in given if path not in here]:
            raise ValueError(f"`with_weights` takes a tree as the model's parameters are; `{lost[0]}` is in one alone.")
        for path, leaf in here.items():
            check_arrays.array("with_weights", path, given[path])
            if given[path].shape != leaf.shape:
                raise ValueError(
                    f"`{path}` is of shape {leaf.shape}, and the weights given for it {given[path].shape}."
                )
        put = jax.tree.map(lambda leaf, one: jax.device_put(one.astype(leaf.dtype), leaf.sharding), of, weights)
        put = place_layers(self.layout.strategy, put, dict(self.layout.names))
        mine = lambda tree: jax.tree.map(lambda old, new: None if old is None else new, tree, put, is_leaf=_is_none)  # noqa: E731
        return self.replaced(params=mine(self.params), frozen=mine(self.frozen))

    def replaced(self, **changes: Any) -> "State":
        """The same with some of its fields changed."""
        return replace(self, **changes)


def init(
    make_model: Callable[[], Any],
    optimizer: optax.GradientTransformation | None,
    strategy: Strategy,
    *,
    seed: int = 0,
    trainable: Any = None,
    abstract: bool = False,
) -> State:
    """Make a model and its optimizer's state on the mesh, each array in its place: no device ever holds the whole model.

    `make_model` returns an NNX module or any tree of arrays (Linen's variables, say), and is traced, never run.
    `trainable` says which leaves the optimizer moves, see `take_apart`. With `abstract` nothing is computed and the
    leaves are `jax.ShapeDtypeStruct`s with shardings, to compile a step for machines that are not there.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=2,model=4", rules=sl.AxisRules(batch="data", embed=None, mlp="model"))
    >>> make = lambda: sl.annotate({"w": jnp.ones((4, 8))}, {"w": ("embed", "mlp")})
    >>> sl.init(make, optax.adam(1e-3), strategy).params["w"].sharding.spec
    P(None, 'model')
    """
    if not callable(make_model) or not jax.tree_util.all_leaves([make_model]):  # an NNX module is callable, and a tree
        raise ValueError(
            f"`init` takes a function that makes the model, so that it can be made in place; got {type(make_model).__name__}: "
            "`sl.init(lambda: MyModel(...), optimizer, strategy)`."
        )
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"`init(optimizer=...)` takes an optax transformation, such as `optax.adam(1e-3)`, or None; got "
            f"{check.shown(optimizer)}."
            " `optax.MultiSteps` is `Strategy(accumulate=...)` here."
        )
    check.kind("init", "strategy", strategy, Strategy, "a `sl.Strategy`")
    seed = check.whole("init", "seed", seed)
    abstract = check.boolean("init", "abstract", abstract)
    check_sender(optimizer, strategy)
    mesh = strategy.device_mesh
    found: dict[str, Any] = {}

    def build() -> tuple[Any, ...]:
        with building():
            model = check.called("init", "make_model", make_model)
            parts, names = take_apart(model, trainable)
            if "names" not in found:  # `completed` may trace the model once more; once is enough
                shapes = {path: x.shape for tree in (parts.params, parts.rest) for path, x in named_leaves(tree)}
                found.update(names=completed(make_model, model, names, shapes), brought=brought_along(model))
            names = found["names"]
        check_layers(strategy, names, dict(named_leaves(parts.params)))
        parts = parts._replace(params=place_layers(strategy, parts.params, names))
        params, frozen = _frozen_apart(parts.params, strategy.frozen)
        if optimizer is not None and not jax.tree.leaves(params):
            paths = [path for path, _ in (*named_leaves(frozen), *named_leaves(parts.rest))]
            raise ValueError(
                f"The optimizer has nothing to move: no leaf of the model is a parameter (`trainable={trainable!r}`, "
                f"`frozen={strategy.frozen!r}`). "
                + (f"There are: {', '.join(paths)}." if paths else "`make_model` returned a model without arrays.")
            )
        if optimizer is not None:
            _check_dtypes(params)
        found.update(definition=parts.definition)
        opt_state = optimizer.init(params) if optimizer is not None else ()
        key = jax.random.key(seed, impl=THREEFRY if strategy.draws == "same" else None)
        count = jnp.int32(0)
        brought = _brought_rules(found["brought"], names, strategy.rules, mesh)
        layout = Layout(parts.definition, optimizer, strategy, tuple(sorted(names.items())), brought=brought)
        errors = {} if optimizer is None else layout.no_errors(params)
        return strong((count, params, frozen, opt_state, errors, parts.streams, parts.rest, key, count))

    with strategy.scope():
        shapes = jax.eval_shape(build)
        _, params, frozen, opt_state, _, _, rest, *_ = shapes
        names = found["names"]
        brought = _brought_rules(found["brought"], names, strategy.rules, mesh)
        rules = strategy.rules | brought
        parameters = united(params, frozen)
        _check_names(names, {**dict(named_leaves(parameters)), **dict(named_leaves(rest))}, rules)
        check_patterns("Precision(keep=...)", strategy.dtypes.keep, [path for path, _ in named_leaves(parameters)])
        relations = relate(optimizer.init, params) if optimizer is not None else {}
        if optimizer is not None and strategy.exchange.axes:
            _check_exchange(
                strategy.exchange,
                Layout(found["definition"], optimizer, strategy, tuple(names.items()), brought=brought),
                params,
            )
        layout = Layout(
            found["definition"], optimizer, strategy, tuple(sorted(names.items())), tuple(sorted(relations.items())),
            brought,
        )  # fmt: skip
        _check_relations(relations, dict(named_leaves(opt_state)), strategy)
        check_state(strategy, names, relations, dict(named_leaves(opt_state)))
        for path, leaf in (*named_leaves(parameters), *named_leaves(rest)):
            say(_remarks(path, leaf, names.get(path), rules, mesh.shape))
        _check_data_axes(dict(named_leaves(place(layout.named, parameters), is_leaf=_is_spec)), names, strategy)
        _check_layers(strategy, [path for path, _ in named_leaves(parameters)])
        _check_stacked(strategy, names)
        say(_nothing_split(strategy, layout.splits(parameters)))
        specs = state_specs(State(*shapes, layout=layout))
        shardings = tuple(
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), getattr(specs, one.name))
            for one in fields(State) if one.name != "layout"
        )  # fmt: skip
        if abstract:
            leaves = jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, shardings)
        else:
            leaves = jax.jit(build, out_shardings=shardings)()
    return State(*leaves, layout=layout)


def specs(model: Any, rules: AxisRules | None = None, mesh: Any = None) -> Any:
    """How every array of a model or a state lies on the mesh: a tree of `PartitionSpec`s.

    Of a `State`, a state of specs. Of anything else, the specs that its names come to under `rules` on `mesh`:

    - of an `nnx.State`, as `nnx.split` gives it, one of specs, to hand to `jax.device_put` or `jax.jit`, under the mesh;
    - of an NNX module or any tree, real or from `jax.eval_shape`, the specs of its parameters, in a dict or in the same tree;
    - of a function that makes a model, likewise. That it is one matters where Flax's layers have fewer names than dims.

    >>> import shardlib as sl
    >>> model = sl.annotate({"w": jnp.ones((4, 8))}, {"w": ("embed", "mlp")})
    >>> sl.specs(model, sl.AxisRules(embed=None, mlp="model"), sl.make_mesh("data=2,model=4"))
    {'w': P(None, 'model')}
    """
    if isinstance(model, State):
        return jax.tree.map(lambda leaf: leaf.sharding.spec, model)
    if rules is None or mesh is None:
        raise ValueError("`specs(model, rules, mesh)` needs the rules and the mesh; of a `State` it needs neither.")
    check.kind("specs", "rules", rules, AxisRules, "`AxisRules`, such as `sl.rules.data`")
    check.kind("specs", "mesh", mesh, Mesh | AbstractMesh, "a mesh: `sl.make_mesh(...)`")
    if is_nnx_state(model):
        return _specs_of_nnx_state(model, rules, mesh)
    found: dict[str, Any] = {}

    def build() -> Any:
        with building():
            made = model() if is_function else model
            parts, names = take_apart(made)
            shapes = {path: leaf.shape for path, leaf in named_leaves(parts.params)}
            names = completed(model, made, names, shapes) if is_function else names
        found.update(names=names, brought=brought_along(made))
        return parts.params

    is_function = callable(model) and jax.tree_util.all_leaves([model])
    params = jax.eval_shape(build) if is_function else build()
    names = found["names"]
    rules = rules | _brought_rules(found["brought"], names, rules, mesh)
    _check_names(names, dict(named_leaves(params)), rules)
    for path, leaf in named_leaves(params):
        say(_remarks(path, leaf, names.get(path), rules, mesh.shape))
    return place(by_names(names, rules, mesh.shape), params)


def _specs_of_nnx_state(state: Any, rules: AxisRules, mesh: Any) -> Any:
    names, leaves = named_variables(state)
    rules = rules | _brought_rules(brought_along(state), names, rules, mesh)
    _check_names(names, leaves, rules)
    for path, leaf in leaves.items():
        say(_remarks(path, leaf, names[path], rules, mesh.shape))
    placement = by_names(names, rules, mesh.shape)
    return with_values(state, {path: placement(path, leaf.shape, PartitionSpec()) for path, leaf in leaves.items()})


def _brought_rules(brought: dict[str, Brought], names: dict[str, Names], rules: AxisRules, mesh: Any) -> AxisRules:
    """The rules that parameters bring along; and names that no rule knows, but the mesh: they are those axes, as in Flax."""
    found: dict[str, Any] = {}
    for path, own in brought.items():
        if own.mesh is not None and dict(own.mesh.shape) != dict(mesh.shape):
            raise ValueError(
                f"`{path}` brings the mesh {dict(own.mesh.shape)} along, and is to lie on {dict(mesh.shape)}: leave its "
                "`mesh` out, or make the strategy's the same."
            )
        of_dims = names.get(path) or ()
        for name, axes in own.rules:
            if name not in of_dims:
                continue
            others = list(rules[name]) if rules.says(name) else [found[name]] if name in found else [axes]
            if others != [axes]:
                whose = "the rules say" if rules.says(name) else "another parameter brings"
                raise ValueError(
                    f"`{path}` brings the rule `{name}={axes!r}` along (Flax's `sharding_rules`), and {whose} "
                    f"`{name}={others[0] if len(others) == 1 else others!r}`: leave one of them out."
                )
            found[name] = axes
    named: list[str] = []
    for of_dims in names.values():
        if isinstance(of_dims, tuple):
            named.extend(name for name in of_dims if name is not None)
    literal = {name: name for name in named if name in mesh.shape and name not in rules and name not in found}
    own_rules = AxisRules({**found, **literal})
    own_rules.check_mesh(mesh.shape)
    return own_rules


def state_specs(state: State) -> State:
    """The specs of a state from its layout and shapes alone, for use while it is traced."""
    layout = state.layout
    named = layout.named
    stored = {path: split.spec for tree in (state.params, state.frozen) for path, split in layout.splits(tree).items()}
    follow = like_parameters(dict(layout.relations), stored)
    whole = PartitionSpec()

    def at_rest(path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        return stored[path]

    return State(
        step=whole,
        params=place(at_rest, state.params),
        frozen=place(at_rest, state.frozen),
        opt_state=place(follow, state.opt_state),
        errors=jax.tree.map(lambda _: PartitionSpec(layout.strategy.every_axis), state.errors),
        streams=place(named, state.streams),
        rest=place(named, state.rest),
        key=whole,
        nonfinite=whole,
        layout=layout,
    )


def _is_none(leaf: Any) -> bool:
    return leaf is None


def united(params: Any, frozen: Any) -> Any:
    """All parameters of a model: those that move, and those that do not."""
    return jax.tree.map(
        lambda p, f: f if p is None else p, params, frozen, is_leaf=lambda leaf: leaf is None or isinstance(leaf, Held)
    )


def _check_exchange(exchange: Exchange, layout: Layout, params: Any) -> None:
    """Refuse an exchange that finds nothing to do, or what it cannot send."""
    leaves = dict(named_leaves(params))
    if isinstance(exchange, Compressed):
        check_patterns("exact=...", exchange.exact, list(leaves))
    taken = [path for path, one in layout.parameters(params).items() if exchange.over(one)]
    if not taken:
        raise ValueError(
            f"`Strategy(exchange={exchange})` takes the gradient of no parameter: each is exact by a pattern, or split over "
            f"{', '.join(map(repr, exchange.axes))}. Use `sl.Exact()`."
        )
    if isinstance(exchange, Compressed) and (odd := [path for path in taken if jnp.iscomplexobj(leaves[path])]):
        raise ValueError(
            f"`Strategy(exchange={exchange})` compresses real numbers, and `{odd[0]}` is {leaves[odd[0]].dtype}: have it summed "
            f"exactly, `exact=({odd[0]!r},)`."
        )


def check_sender(optimizer: Any, strategy: Strategy) -> None:
    """Refuse an optimizer that needs workers' own gradients where it would be given others."""
    if not isinstance(optimizer, Local):
        return
    if not strategy.exchange.axes:
        raise ValueError(
            f"The optimizer makes what it sends of each worker's own gradient, and `Strategy(exchange={strategy.exchange})` "
            "gives it averaged ones alone. Use an exchange that sends codes, `exchange=sl.collectives.OneBit(axis=...)`; or for "
            "averaged gradients `optax.adamw`."
        )
    if isinstance(strategy.clip, optax.GradientTransformation):
        raise ValueError(
            "`Strategy(clip=...)` has a transformation that looks at the averaged gradient, which nobody has once the optimizer "
            "sends something else: clip by the global norm, `clip=1.0`."
        )


def _check_dtypes(params: Any) -> None:
    """Refuse parameters of so few bits that what an optimizer adds to them is rounded away."""
    for path, leaf in named_leaves(params):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 16:
            raise ValueError(
                f"`{path}` is {leaf.dtype}, of so few bits that an optimizer's steps would be rounded away. Store it in a wider "
                f"dtype and narrow it in the model, or leave it as it is: `Strategy(frozen=({re.escape(path)!r},))`."
            )


def _frozen_apart(params: Any, patterns: tuple[str, ...]) -> tuple[Any, Any]:
    check_patterns("Strategy(frozen=...)", patterns, [path for path, _ in named_leaves(params)])

    def is_frozen(path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in patterns)

    return (
        map_named(lambda path, leaf: None if is_frozen(path) else leaf, params),
        map_named(lambda path, leaf: leaf if is_frozen(path) else None, params),
    )


def _check_relations(relations: dict[str, Relation], leaves: dict[str, Any], strategy: Strategy) -> None:
    if not strategy.sharding.strict:
        return
    if lost := [path for path, relation in relations.items() if relation.kind in ("none", "ambiguous")]:
        listed = "; ".join(f"`{path}` of shape {leaves[path].shape}: {relations[path].reason}" for path in lost)
        raise ValueError(
            f"`Zero(strict=True)`: of the optimizer's state there is what lies whole on every device, since it can be related "
            f"to no parameter: {listed}. Choose another optimizer, or leave `strict` out."
        )


def _check_layers(strategy: Strategy, paths: list[str]) -> None:
    zero = strategy.sharding
    if zero.layers and not any(zero.group(path) for path in paths):
        raise ValueError(
            f"`Zero(layers={zero.layers!r})`: the pattern is found in no parameter's path. The paths are: {', '.join(paths)}."
        )


def _check_stacked(strategy: Strategy, names: dict[str, Names]) -> None:
    """Refuse a name for stacked layers that no parameter has, but for the default."""
    here = {name for of_dims in names.values() if not isinstance(of_dims, PartitionSpec) for name in of_dims or ()}
    for name in strategy.sharding.stacked:
        if name not in here and name != LAYERS:
            listed = ", ".join(f"`{one}`" for one in sorted(filter(None, here))) or "none"
            raise ValueError(
                f"`Zero(stacked={strategy.sharding.stacked})`: no parameter has a dim of the name `{name}`. Names of the "
                f"parameters' dims are: {listed}."
            )


def _nothing_split(strategy: Strategy, splits: dict[str, Split]) -> tuple[str, ...]:
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
            f"`Zero(small={zero.small})` leaves whole what has no more elements than that: to split smaller ones too, "
            f"`zero=sl.Zero({zero.stage}, small=0)`; for a model of this size `zero=0` does as well."
        )
    return (
        f"`Strategy(zero={strategy.zero!r})` splits nothing over {over}, and every device holds all parameters. The largest is "
        f"`{path}` ({whole[path].reason}). {out}",
    )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def strong(tree: Any) -> Any:
    """The arrays with types of their own: of a weak type, as `jnp.asarray(2.0)` has it, a step would make another."""
    return jax.tree.map(lambda x: x if is_key(x) else jax.lax.convert_element_type(x, x.dtype), tree)


def _check_data_axes(specs: dict[str, PartitionSpec], names: dict[str, Names], strategy: Strategy) -> None:
    """Refuse parameters of which a loss would see one device's part, unless that is said to be meant, as by `experts`."""
    for path, spec in specs.items():
        of_dims = names.get(path) or ()
        experts = () if isinstance(of_dims, PartitionSpec) else of_dims  # whose names say what is meant
        entries = [e for dim, e in enumerate(spec) if EXPERTS not in experts[dim : dim + 1]]
        if strategy.manual is None and (
            over := [axis for axis in spec_axes(PartitionSpec(*entries)) if axis in strategy.data_axes]
        ):
            raise ValueError(
                f"`{path}` is laid out as {spec}, and the step is manual over `{over[0]}`: the loss would see one device's "
                "part of it. To have it gathered where it is used, leave the axis to the partitioner, `manual=()`, or "
                "split parameters over an axis of their own, as `sl.rules.fsdp` does. If each device is meant to use its "
                f"own part, as experts are, say so: `Strategy(manual={strategy.data_axes})`."
            )


def _check_names(names: dict[str, Names], leaves: dict[str, Any], rules: AxisRules) -> None:
    """Refuse all unknown names and all wrong ranks at once, each with the parameters that carry it."""
    unknown: dict[str, list[str]] = {}
    for path, of_dims in names.items():
        if of_dims is None or isinstance(of_dims, PartitionSpec) or path not in leaves:
            continue
        shape = leaves[path].shape
        if len(of_dims) != len(shape):
            why = (
                'Layers stacked by `nnx.vmap` or `nnx.scan` need `transform_metadata={nnx.PARTITION_NAME: "layers"}` to name '
                "the new dim. "
            )
            raise ValueError(
                f"`{path}` of shape {shape} has {len(shape)} dims and {len(of_dims)} names {of_dims}. "
                + (why if len(of_dims) < len(shape) else "")
                + f"Names that a layer gives are overridden by `sl.annotate(model, {{{path!r}: names}})`, with one for every dim."
            )
        for name in of_dims:
            if name is not None and name not in rules:
                unknown.setdefault(name, []).append(path)
    if unknown:
        listed = "; ".join(f"`{name}` on {', '.join(f'`{p}`' for p in paths)}" for name, paths in unknown.items())
        known = ", ".join(f"`{name}`" for name in rules.names)
        suggestion = ", ".join(f"{name}=None" for name in unknown)
        raise ValueError(
            f"Parameters carry names that no rule knows: {listed}. The rules know {known}. Add rules, "
            f"`rules | AxisRules({suggestion})` with an axis or `None` for replicated."
        )


def _remarks(path: str, leaf: Any, of_dims: Names, rules: AxisRules, mesh_shape: Any) -> tuple[str, ...]:
    if of_dims is None or isinstance(of_dims, PartitionSpec):
        return ()
    resolution = resolve(rules, mesh_shape, of_dims, leaf.shape, what=path)
    if resolution.padded_shape != leaf.shape:
        raise ValueError(
            f"`{path}` of shape {leaf.shape} is a stored parameter, and `pad` would change what an optimizer sees of it: "
            f"{resolution.said[0]} Declare the parameter with shape {resolution.padded_shape}, or use `drop` or "
            "`replicate`."
        )
    return resolution.said
