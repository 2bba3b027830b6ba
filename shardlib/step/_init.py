"""Making a state on the mesh: shapes first, then shardings, then values in their places.

    make_model, optimizer.init          traced with `jax.eval_shape`: nothing is computed
      -> names, shapes, relations       checked, with errors before any memory is taken
      -> a `PartitionSpec` of each array
      -> the same function, compiled with these as the shardings of its results

So no device ever holds the whole model, not even for a moment.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
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
from shardlib.step._layer_places import check_places
from shardlib.step._precision import check_patterns
from shardlib.step._state import Layout, State, combine, drop_weak_types, state_shardings
from shardlib.step._strategy import Strategy
from shardlib.step._workers import shapes_of_one


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

    Args:
        make_model: a function that returns an NNX module or any tree of arrays, such as Linen's
            variables. It is traced, never run.
        optimizer: any optax transformation, or None for a state that is only evaluated.
        strategy: the mesh, the rules, and all else about how to train.
        seed: the seed of the key that the state carries, from which each step draws.
        trainable: which leaves the optimizer updates. For an NNX module this is a filter, by
            default `nnx.Param`. For any other tree it is a function of a path and a leaf, which by
            default selects Linen's collection `params`, or, if there is no such collection, every
            floating-point leaf.
        abstract: compute nothing. The leaves are then `jax.ShapeDtypeStruct`s with shardings, from
            which a step can be compiled for machines that are not present.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=2,model=4", rules=sl.AxisRules(batch="data", embed=None,
    ...     mlp="model"))
    >>> make = lambda: sl.annotate({"w": jnp.ones((4, 8))}, {"w": ("embed", "mlp")})
    >>> sl.init(make, optax.adam(1e-3), strategy).params["w"].sharding.spec
    P(None, 'model')
    """
    _check_arguments(make_model, optimizer, strategy)
    seed = check.whole("init", "seed", seed)
    abstract = check.boolean("init", "abstract", abstract)
    check_sender(optimizer, strategy)
    build = _StateBuilder(make_model, optimizer, strategy, seed, trainable)
    with strategy.scope():
        shapes = jax.eval_shape(build)
        layout = _checked_layout(shapes, build.first_trace, strategy)
        shardings = _fields_of(state_shardings(State(*shapes, layout=layout)))
        if abstract:
            # The shapes and shardings that the arrays would have: a step compiles for them alike.
            leaves = jax.tree.map(_with_sharding, shapes, shardings)
        else:
            # XLA computes each shard on its own device, so that initializers run in parts too.
            leaves = jax.jit(build, out_shardings=shardings)()
    return State(*leaves, layout=layout)


def _check_arguments(make_model: Any, optimizer: Any, strategy: Any) -> None:
    # An NNX module is callable too, and a tree: what is wanted is a function that makes one.
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


def _fields_of(state: State) -> tuple[Any, ...]:
    """The fields of a state in the order in which they are given to `State`, but its layout."""
    return tuple(getattr(state, each.name) for each in fields(State) if each.name != "layout")


def _with_sharding(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


@dataclass(frozen=True)
class _FirstTrace:
    """What the first trace of a model tells, besides shapes.

    Attributes:
        names: the names of the dims of each array, by its path.
        layout: how the state is laid out, without the relations of the optimizer's state.
    """

    names: dict[str, Names]
    layout: Layout


class _StateBuilder:
    """The function that makes the fields of a state, for `jax.eval_shape` and then for `jax.jit`.

    It is traced twice, while names and rules are found only once: finding them may trace the model
    once more.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        optimizer: optax.GradientTransformation | None,
        strategy: Strategy,
        seed: int,
        trainable: Any,
    ) -> None:
        self.make_model, self.optimizer, self.strategy = make_model, optimizer, strategy
        self.seed, self.trainable = seed, trainable
        self._first_trace: _FirstTrace | None = None

    # The name that the compiled program has, and that messages of the compiler quote.
    __name__ = "build"

    @property
    def first_trace(self) -> _FirstTrace:
        """What the first trace told; there must have been one."""
        assert self._first_trace is not None
        return self._first_trace

    def __call__(self) -> tuple[Any, ...]:
        """The fields of the state, in the order of `State`, without its layout."""
        with building():
            model = check.called("init", "make_model", self.make_model)
            # Names come with variables, or were given by `annotate`.
            parts, names = take_apart(model, self.trainable)
            if self._first_trace is None:
                self._first_trace = self._traced(model, parts, names)
        layout, names = self.first_trace.layout, self.first_trace.names
        # Before layers are moved, which needs them to divide evenly into the parts.
        check_layers(self.strategy, names, dict(named_leaves(parts.params)))
        # The layers of a pipeline are stacked in the order in which its stages hold them.
        params = place_layers(self.strategy, parts.params, names)
        params, frozen = _frozen_apart(params, self.strategy.frozen)
        opt_state: Any = ()
        errors: Any = {}
        if self.optimizer is not None:
            check_trainable(params, frozen, parts.rest, self.trainable, self.strategy)
            opt_state = _first_state(self.optimizer, params)
        key = jax.random.key(self.seed, impl=self._generator)
        count = jnp.int32(0)
        if self.optimizer is not None:
            # A compressed exchange begins with nothing left over.
            errors = layout.no_errors(params)
        workers, rest = None, parts.rest
        if self.optimizer is not None:
            workers = layout.first_workers(params, opt_state, rest)
        if workers is not None:
            # All but the parameters is each worker's own, and a server has the optimizer's state.
            rest = ()
            if not workers.has_server:
                opt_state = ()
        # A weak type would become a strong one in the first step, and the second be compiled anew.
        return drop_weak_types(
            (count, params, frozen, opt_state, errors, workers, parts.streams, rest, key, count)
        )

    @property
    def _generator(self) -> str | None:
        """The random generator of the state's key; None is JAX's default."""
        return THREEFRY if self.strategy.draws == "same" else None

    def _traced(self, model: Any, parts: Any, names: dict[str, Names]) -> _FirstTrace:
        """Complete the names of a traced model, and find the rules that it brings along."""
        shapes: dict[str, tuple[int, ...]] = {}
        for tree in (parts.params, parts.rest):
            for path, leaf in named_leaves(tree):
                shapes[path] = leaf.shape
        # This may make the model once more, hence only in the first trace.
        names = complete_names(self.make_model, model, names, shapes)
        rules = _rules_of_variables(model, names, self.strategy.rules, self.strategy.device_mesh)
        by_path = tuple(sorted(names.items()))
        layout = Layout(parts.definition, self.optimizer, self.strategy, by_path, rules)
        return _FirstTrace(names, layout)


def _first_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """The optimizer's state before the first step."""
    try:
        return optimizer.init(params)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"`init(optimizer=...)`: `optimizer.init(params)` of the model's trained parameters "
            f"failed, {type(error).__name__}: {error}. An optimizer must take them in the tree "
            "that the model has, and be one that `jax.jit` can trace."
        ) from error


def _checked_layout(
    shapes: tuple[Any, ...], first_trace: _FirstTrace, strategy: Strategy
) -> Layout:
    """The layout of a state of these shapes, once all is known to be right with it.

    What cannot be laid out as asked is refused, and what is legal but hardly meant, such as a large
    parameter that nothing splits, is warned of.
    """
    state = State(*shapes, layout=first_trace.layout)
    params, frozen, opt_state, rest = state.params, state.frozen, state.opt_state, state.rest
    if state.workers is not None:
        rest = shapes_of_one(state.workers.rest)
        if not state.workers.has_server:
            opt_state = shapes_of_one(state.workers.opt_state)
    names, layout = first_trace.names, first_trace.layout
    # Checks speak of parameters by their paths, whether they are trained or not.
    parameters = combine(params, frozen)
    named_parameters = dict(named_leaves(parameters))
    named_arrays = {**named_parameters, **dict(named_leaves(rest))}
    check_names(names, named_arrays, layout.rules)
    check_patterns("Precision(keep=...)", strategy.dtypes.keep, named_parameters)
    layout = _related_layout(layout, params, dict(named_leaves(opt_state)))
    check_places(layout, params)

    for path, leaf in named_arrays.items():
        warn(remarks(path, leaf, names.get(path), layout.rules, strategy.device_mesh.shape))
    placed = place(layout.named, parameters)
    check_data_axes(dict(named_leaves(placed, is_leaf=_is_spec)), names, strategy)
    check_layer_pattern(strategy, list(named_parameters))
    check_stacked(strategy, names)
    warn(describe_nothing_split(strategy, layout.splits(parameters)))
    return layout


def _related_layout(layout: Layout, params: Any, named_state: dict[str, Any]) -> Layout:
    """The layout with the relations of the optimizer's state to parameters, all checked.

    Args:
        layout: the layout without relations.
        params: the shapes of the trained parameters.
        named_state: the shapes of the optimizer's state, by path.
    """
    strategy, optimizer = layout.strategy, layout.optimizer
    # Which parameter each array of the optimizer's state belongs to is read off `optimizer.init`.
    relations: dict[str, Any] = {}
    if optimizer is not None:
        relations = relate(optimizer.init, params)
    layout = replace(layout, relations=tuple(sorted(relations.items())))
    # A state that is only evaluated has no gradients to send.
    if optimizer is not None and strategy.exchange.axes:
        check_exchange(strategy.exchange, layout, params)
    check_relations(relations, named_state, strategy)
    check_state(strategy, dict(layout.names), relations, named_state)
    return layout


def specs(model: Any, rules: AxisRules | None = None, mesh: Any = None) -> Any:
    """How every array of a model or a state is laid out on the mesh: a tree of `PartitionSpec`s.

    For a `State` the result is a state of specs, and neither rules nor mesh are needed. For
    anything else the specs follow from the names of its dims, under `rules` on `mesh`:

    - for an `nnx.State`, as `nnx.split` gives it, a state of specs, to hand to `jax.device_put` or
      `jax.jit` under the mesh;
    - for an NNX module or any tree, real or from `jax.eval_shape`, the specs of its parameters, in
      a dict or in the same tree;
    - for a function that makes a model, the same. A function is needed if layers of Flax have fewer
      names than dims: the model is then made a second time, to see which dims were added.

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
    # An NNX module is callable too, and a tree.
    if callable(model) and jax.tree_util.all_leaves([model]):
        return _specs_of_function(model, rules, mesh)
    with building():
        parts, names = take_apart(model)
    return _specs_by_names(model, names, parts.params, rules, mesh)


def _specs_of_function(make_model: Callable[[], Any], rules: AxisRules, mesh: Any) -> Any:
    """The specs of the parameters of the model that a function makes.

    The function is only traced, so that a model of any size has specs.
    """
    # `eval_shape` returns only shapes: the model and its names are handed out by these lists.
    models: list[Any] = []
    completed: list[dict[str, Names]] = []

    def build() -> Any:
        with building():
            model = check.called("specs", "model", make_model)
            parts, names = take_apart(model)
            shapes = {path: leaf.shape for path, leaf in named_leaves(parts.params)}
            completed.append(complete_names(make_model, model, names, shapes))
        models.append(model)
        return parts.params

    params = jax.eval_shape(build)
    return _specs_by_names(models[0], completed[0], params, rules, mesh)


def _specs_by_names(
    model: Any, names: dict[str, Names], params: Any, rules: AxisRules, mesh: Any
) -> Any:
    """The specs of a model's parameters, a tree like them."""
    all_rules = rules | _rules_of_variables(model, names, rules, mesh)
    placement = _checked_placement(names, dict(named_leaves(params)), all_rules, mesh)
    return place(placement, params)


def _specs_of_nnx_state(state: Any, rules: AxisRules, mesh: Any) -> Any:
    names, leaves = named_variables(state)
    all_rules = rules | _rules_of_variables(state, names, rules, mesh)
    placement = _checked_placement(names, leaves, all_rules, mesh)
    specs_by_path: dict[str, PartitionSpec] = {}
    for path, leaf in leaves.items():
        specs_by_path[path] = placement(path, leaf.shape, PartitionSpec())
    return with_values(state, specs_by_path)


def _checked_placement(
    names: dict[str, Names], leaves: dict[str, Any], rules: AxisRules, mesh: Any
) -> Placement:
    """How names lay out these leaves.

    It is refused if a name has no rule or a dim no name.
    """
    check_names(names, leaves, rules)
    for path, leaf in leaves.items():
        warn(remarks(path, leaf, names.get(path), rules, mesh.shape))
    return by_names(names, rules, mesh.shape)


def _rules_of_variables(
    model: Any, names: dict[str, Names], rules: AxisRules, mesh: Any
) -> AxisRules:
    """The rules besides `rules` by which the variables of a model are laid out.

    These are the rules that variables bring along themselves, Flax's `sharding_rules`; and for each
    name that has no rule and is an axis of the mesh, that axis, as in Flax.
    """
    own: dict[str, Any] = {}
    for path, metadata in flax_metadata(model).items():
        # A variable may be made for a mesh of its own, which must be the same.
        if metadata.mesh is not None and dict(metadata.mesh.shape) != dict(mesh.shape):
            raise ValueError(
                f"`{path}` was made for the mesh {dict(metadata.mesh.shape)} (Flax's `mesh`), and "
                f"is to be laid out on {dict(mesh.shape)}: leave its `mesh` out, or make the "
                "strategy's the same."
            )
        used_names = names.get(path) or ()
        for name, axes in metadata.rules:
            if name in used_names:
                _check_same_rule(path, name, axes, own, rules)
                own[name] = axes
    for name in _all_names(names):
        if name in mesh.shape and name not in rules and name not in own:
            own[name] = name
    own_rules = AxisRules(own)
    own_rules.check_mesh(mesh.shape)
    return own_rules


def _all_names(names: dict[str, Names]) -> Iterator[str]:
    """The names of the dims of all arrays, each as often as it occurs."""
    for dim_names in names.values():
        # Arrays that are laid out by a spec have no names.
        if not isinstance(dim_names, tuple):
            continue
        for name in dim_names:
            if name is not None:
                yield name


def _check_same_rule(
    path: str, name: str, axes: Any, others: dict[str, Any], rules: AxisRules
) -> None:
    """Refuse a rule that a variable brings along if there is another one for that name.

    Args:
        path: the variable.
        name: the name of some of its dims.
        axes: the axes that the variable's rule gives the name.
        others: the rules that other variables have brought along.
        rules: the rules of the strategy.
    """
    # The strategy's rules come first, then those of other variables.
    if rules.says(name):
        # A rule of the strategy may list several choices, of which the first possible is taken.
        choices = list(rules[name])
        source = "the rules say"
    else:
        choices = [others.get(name, axes)]
        source = "that of another variable is"
    if choices != [axes]:
        other = choices[0] if len(choices) == 1 else choices
        raise ValueError(
            f"`{path}` has a rule of its own, `{name}={axes!r}` (Flax's `sharding_rules`), and "
            f"{source} `{name}={other!r}`: leave one of them out."
        )


def _frozen_apart(params: Any, patterns: tuple[str, ...]) -> tuple[Any, Any]:
    """Divide a tree into trained and frozen parameters, with None in each for those of the other.

    `patterns` are regular expressions that match the whole path of what is frozen.
    """
    check_patterns("Strategy(frozen=...)", patterns, [path for path, _ in named_leaves(params)])

    def is_frozen(path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in patterns)

    # Each tree has all paths, so that the two can be combined leaf by leaf.
    trained = map_named(lambda path, leaf: None if is_frozen(path) else leaf, params)
    frozen = map_named(lambda path, leaf: leaf if is_frozen(path) else None, params)
    return trained, frozen


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
