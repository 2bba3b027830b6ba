"""A state is born sharded: shapes first, then shardings, then values in place."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib._tree import map_named, named_leaves
from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import warn
from shardlib.layouts._placement import Placement, by_names, place
from shardlib.layouts._relate import relate
from shardlib.layouts._rules import AxisRules
from shardlib.modeling._flax import (
    Names,
    building,
    flax_metadata,
    is_nnx_state,
    named_variables,
    take_apart,
    with_values,
)
from shardlib.modeling._flax_names import complete_names
from shardlib.modeling._random import THREEFRY
from shardlib.step._init_checks import (
    check_data_axes,
    check_exchange,
    check_layer_pattern,
    check_names,
    check_relations,
    check_sender,
    check_stacked,
    check_trainable,
    describe_nothing_split,
    remarks,
)
from shardlib.step._layer_order import check_layers, check_state, place_layers
from shardlib.step._precision import check_patterns
from shardlib.step._state import Layout, State, combine, drop_weak_types, state_specs
from shardlib.step._strategy import Strategy


def init(
    make_model: Callable[[], Any],
    optimizer: optax.GradientTransformation | None,
    strategy: Strategy,
    *,
    seed: int = 0,
    trainable: Any = None,
    abstract: bool = False,
) -> State:
    """Make a model and its optimizer's state on the mesh.

    Each array is made in its place: no device ever holds the whole model.

    `make_model` returns an NNX module or any tree of arrays (Linen's variables, say), and is
    traced, never run. `trainable` says which leaves the optimizer moves, see `take_apart`. With
    `abstract` nothing is computed and the leaves are `jax.ShapeDtypeStruct`s with shardings, to
    compile a step for machines that are not there.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=2,model=4", rules=sl.AxisRules(batch="data", embed=None,
    ...     mlp="model"))
    >>> make = lambda: sl.annotate({"w": jnp.ones((4, 8))}, {"w": ("embed", "mlp")})
    >>> sl.init(make, optax.adam(1e-3), strategy).params["w"].sharding.spec
    P(None, 'model')
    """
    # An NNX module is callable, and a tree.
    if not callable(make_model) or not jax.tree_util.all_leaves([make_model]):
        raise ValueError(
            "`init` takes a function that makes the model, so that it can be made in place; got "
            f"{type(make_model).__name__}: `sl.init(lambda: MyModel(...), optimizer, strategy)`."
        )
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            "`init(optimizer=...)` takes an optax transformation, such as `optax.adam(1e-3)`, or "
            f"None; got {check.shown(optimizer)}. `optax.MultiSteps` is `Strategy(accumulate=...)` "
            "here."
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
            # It is traced twice, and `complete_names` may trace the model once more: once is
            # enough.
            if not found:
                shapes = {
                    path: x.shape
                    for tree in (parts.params, parts.rest)
                    for path, x in named_leaves(tree)
                }
                names = complete_names(make_model, model, names, shapes)
                found.update(
                    names=names, rules=_rules_of_variables(model, names, strategy.rules, mesh)
                )
        names = found["names"]
        check_layers(strategy, names, dict(named_leaves(parts.params)))
        parts = parts._replace(params=place_layers(strategy, parts.params, names))
        params, frozen = _frozen_apart(parts.params, strategy.frozen)
        if optimizer is not None:
            check_trainable(params, frozen, parts.rest, trainable, strategy)
        opt_state = optimizer.init(params) if optimizer is not None else ()
        key = jax.random.key(seed, impl=THREEFRY if strategy.draws == "same" else None)
        count = jnp.int32(0)
        layout = Layout(
            parts.definition, optimizer, strategy, tuple(sorted(names.items())), found["rules"]
        )
        found.setdefault("layout", layout)
        errors = {} if optimizer is None else layout.no_errors(params)
        return drop_weak_types(
            (count, params, frozen, opt_state, errors, parts.streams, parts.rest, key, count)
        )

    with strategy.scope():
        shapes = jax.eval_shape(build)
        _, params, frozen, opt_state, _, _, rest, *_ = shapes
        names, layout = found["names"], found["layout"]
        parameters = combine(params, frozen)
        check_names(
            names, {**dict(named_leaves(parameters)), **dict(named_leaves(rest))}, layout.rules
        )
        check_patterns(
            "Precision(keep=...)",
            strategy.dtypes.keep,
            [path for path, _ in named_leaves(parameters)],
        )
        relations = relate(optimizer.init, params) if optimizer is not None else {}
        layout = replace(layout, relations=tuple(sorted(relations.items())))
        if optimizer is not None and strategy.exchange.axes:
            check_exchange(strategy.exchange, layout, params)
        check_relations(relations, dict(named_leaves(opt_state)), strategy)
        check_state(strategy, names, relations, dict(named_leaves(opt_state)))
        for path, leaf in (*named_leaves(parameters), *named_leaves(rest)):
            warn(remarks(path, leaf, names.get(path), layout.rules, mesh.shape))
        check_data_axes(
            dict(named_leaves(place(layout.named, parameters), is_leaf=_is_spec)), names, strategy
        )
        check_layer_pattern(strategy, [path for path, _ in named_leaves(parameters)])
        check_stacked(strategy, names)
        warn(describe_nothing_split(strategy, layout.splits(parameters)))
        specs = state_specs(State(*shapes, layout=layout))
        shardings = tuple(
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), getattr(specs, one.name))
            for one in fields(State) if one.name != "layout"
        )  # fmt: skip
        if abstract:
            leaves = jax.tree.map(
                lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, shardings
            )
        else:
            leaves = jax.jit(build, out_shardings=shardings)()
    return State(*leaves, layout=layout)


def specs(model: Any, rules: AxisRules | None = None, mesh: Any = None) -> Any:
    """How every array of a model or a state is laid out on the mesh: a tree of `PartitionSpec`s.

    Of a `State`, a state of specs. Of anything else, the specs that its names come to under `rules`
    on `mesh`:

    - of an `nnx.State`, as `nnx.split` gives it, one of specs, to hand to `jax.device_put` or
      `jax.jit`, under the mesh;
    - of an NNX module or any tree, real or from `jax.eval_shape`, the specs of its parameters, in a
      dict or in the same tree;
    - of a function that makes a model, likewise. That it is one matters where Flax's layers have
      fewer names than dims.

    >>> import shardlib as sl
    >>> model = sl.annotate({"w": jnp.ones((4, 8))}, {"w": ("embed", "mlp")})
    >>> sl.specs(model, sl.AxisRules(embed=None, mlp="model"), sl.make_mesh("data=2,model=4"))
    {'w': P(None, 'model')}
    """
    if isinstance(model, State):
        return jax.tree.map(lambda leaf: leaf.sharding.spec, model)
    if rules is None or mesh is None:
        raise ValueError(
            "`specs(model, rules, mesh)` needs the rules and the mesh; of a `State` "
            "it needs neither."
        )
    check.kind("specs", "rules", rules, AxisRules, "`AxisRules`, such as `sl.rules.data`")
    check.kind("specs", "mesh", mesh, Mesh | AbstractMesh, "a mesh: `sl.make_mesh(...)`")
    if is_nnx_state(model):
        return _specs_of_nnx_state(model, rules, mesh)
    found: dict[str, Any] = {}
    # An NNX module is callable, and a tree.
    is_function = callable(model) and jax.tree_util.all_leaves([model])

    def build() -> Any:
        with building():
            made = check.called("specs", "model", model) if is_function else model
            parts, names = take_apart(made)
            if is_function:
                shapes = {path: leaf.shape for path, leaf in named_leaves(parts.params)}
                names = complete_names(model, made, names, shapes)
        found.update(names=names, rules=_rules_of_variables(made, names, rules, mesh))
        return parts.params

    params = jax.eval_shape(build) if is_function else build()
    placement = _checked_placement(
        found["names"], dict(named_leaves(params)), rules | found["rules"], mesh
    )
    return place(placement, params)


def _specs_of_nnx_state(state: Any, rules: AxisRules, mesh: Any) -> Any:
    names, leaves = named_variables(state)
    placement = _checked_placement(
        names, leaves, rules | _rules_of_variables(state, names, rules, mesh), mesh
    )
    return with_values(
        state, {path: placement(path, leaf.shape, PartitionSpec()) for path, leaf in leaves.items()}
    )


def _checked_placement(
    names: dict[str, Names], leaves: dict[str, Any], rules: AxisRules, mesh: Any
) -> Placement:
    """How names lay out these leaves, once it is known that every name has a rule and every dim a
    name.
    """
    check_names(names, leaves, rules)
    for path, leaf in leaves.items():
        warn(remarks(path, leaf, names.get(path), rules, mesh.shape))
    return by_names(names, rules, mesh.shape)


def _rules_of_variables(
    model: Any, names: dict[str, Names], rules: AxisRules, mesh: Any
) -> AxisRules:
    """The rules beside `rules` by which the variables of a model are laid out.

    These are the rules that variables have of their own, Flax's `sharding_rules`; and for each name
    that has no rule and is an axis of the mesh, that axis, as in Flax.
    """
    own: dict[str, Any] = {}
    for path, metadata in flax_metadata(model).items():
        if metadata.mesh is not None and dict(metadata.mesh.shape) != dict(mesh.shape):
            raise ValueError(
                f"`{path}` was made for the mesh {dict(metadata.mesh.shape)} (Flax's `mesh`), and "
                f"is to be laid out on {dict(mesh.shape)}: leave its `mesh` out, or make the "
                "strategy's the same."
            )
        for name, axes in metadata.rules:
            if name in (names.get(path) or ()):
                _check_same_rule(path, name, axes, own, rules)
                own[name] = axes
    for of_dims in names.values():
        if not isinstance(of_dims, tuple):
            continue
        for name in of_dims:
            if name is not None and name in mesh.shape and name not in rules and name not in own:
                own[name] = name
    own_rules = AxisRules(own)
    own_rules.check_mesh(mesh.shape)
    return own_rules


def _check_same_rule(
    path: str, name: str, axes: Any, others: dict[str, Any], rules: AxisRules
) -> None:
    """Refuse a rule of a variable's own that is not the one there is for that name."""
    if rules.says(name):
        theirs, whose = list(rules[name]), "the rules say"
    else:
        theirs, whose = [others.get(name, axes)], "that of another variable is"
    if theirs != [axes]:
        other = theirs[0] if len(theirs) == 1 else theirs
        raise ValueError(
            f"`{path}` has a rule of its own, `{name}={axes!r}` (Flax's `sharding_rules`), and "
            f"{whose} `{name}={other!r}`: leave one of them out."
        )


def _frozen_apart(params: Any, patterns: tuple[str, ...]) -> tuple[Any, Any]:
    check_patterns("Strategy(frozen=...)", patterns, [path for path, _ in named_leaves(params)])

    def is_frozen(path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in patterns)

    return (
        map_named(lambda path, leaf: None if is_frozen(path) else leaf, params),
        map_named(lambda path, leaf: leaf if is_frozen(path) else None, params),
    )


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
