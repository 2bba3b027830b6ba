"""The state of a run: arrays with their shardings, and what they are the state of."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib._tree import map_named, named_leaves
from shardlib.checks import _arrays as check_arrays
from shardlib.collectives._exact import Parameter
from shardlib.collectives._meetings import Meeting, wide
from shardlib.collectives._server import ParameterServer, split_of_server
from shardlib.collectives._zero_split import Split, split_further
from shardlib.layouts._host import HOST, to_device
from shardlib.layouts._placement import Placement, by_names, like_parameters, place
from shardlib.layouts._relate import Relation
from shardlib.layouts._rules import AxisRules
from shardlib.layouts._specs import axes_within, axes_without, parts_over, spec_axes
from shardlib.modeling._flax import Definition, Names
from shardlib.modeling._random import is_key
from shardlib.optimizers._local import Apart
from shardlib.step._exchange import ErrorsByPath
from shardlib.step._first_optimizer_state import with_first_optimizer_state
from shardlib.step._layer_order import place_layers, reordered
from shardlib.step._offload import parameters_on_host, state_on_host
from shardlib.step._strategy import Strategy
from shardlib.step._workers import (
    Workers,
    mean_of_workers,
    repeated,
    shapes_of_one,
    specs_with_dim,
    with_dim,
)
from shardlib.tracing._region import StoredWeight


@dataclass(frozen=True)
class Layout:
    """What a state is besides arrays.

    It says how to rebuild the model, which optimizer and strategy the run has, how the dims of the
    leaves are named, and how leaves of the optimizer relate to parameters. As static data of
    `State` it is hashed and compared at every call of a compiled step.
    """

    definition: Definition
    optimizer: Any
    strategy: Strategy
    names: tuple[tuple[str, Names], ...]
    variable_rules: AxisRules
    """Rules of the model's own variables, besides the strategy's."""
    relations: tuple[tuple[str, Relation], ...] = ()

    @cached_property
    def _hash(self) -> int:
        # A model of a thousand parameters has as many names and relations to hash.
        values = (
            self.definition,
            self.optimizer,
            self.strategy,
            self.names,
            self.variable_rules,
            self.relations,
        )
        return hash(values)

    @cached_property
    def rules(self) -> AxisRules:
        """The rules by which parameters are laid out."""
        return self.strategy.rules | self.variable_rules

    @property
    def named(self) -> Placement:
        """How names lay out what has them."""
        return by_names(dict(self.names), self.rules, self.strategy.device_mesh.shape)

    def splits(self, params: Any) -> dict[str, Split]:
        """How each parameter is stored, by its path.

        Its names give a layout, which ZeRO splits further over its own axes.
        """
        names, strategy = dict(self.names), self.strategy
        splits: dict[str, Split] = {}
        for path, leaf in named_leaves(params):
            named = self.named(path, leaf.shape, PartitionSpec())
            splits[path] = split_further(
                strategy.sharding,
                strategy.zero_axes,
                strategy.device_mesh.shape,
                leaf.shape,
                named,
                names.get(path),
                strategy.sequence_axes,
            )
        return splits

    def splits_of_server(self, params: Any) -> dict[str, Split]:
        """How a server's copy of each parameter is stored, by its path.

        It is split over the workers besides.
        """
        names, strategy = dict(self.names), self.strategy
        of_worker = self.splits(params)
        splits: dict[str, Split] = {}
        for path, leaf in named_leaves(params):
            splits[path] = split_of_server(
                strategy.sharding,
                self.apart,
                strategy.device_mesh.shape,
                leaf.shape,
                of_worker[path],
                names.get(path),
            )
        return splits

    def parameters(self, params: Any) -> dict[str, Parameter]:
        """What an exchange is told of each parameter, by its path."""
        splits = self.splits(params)
        described: dict[str, Parameter] = {}
        for path, leaf in named_leaves(params):
            named = self.named(path, leaf.shape, PartitionSpec())
            # Along an axis that splits a parameter, devices have gradients of different parts of
            # it, and there is nothing to add up.
            own_axes = spec_axes(named)
            summed = axes_without(self.strategy.manual_axes, own_axes)
            dtype = self.strategy.dtypes.reduced(leaf.dtype)
            split = splits[path]
            described[path] = Parameter(
                path,
                leaf.shape,
                split.contributed,
                summed,
                split.spec,
                dtype,
                stacked=split.stacked,
            )
        return described

    def parameters_of(self, params: Any) -> Any:
        """The same, as a tree like the parameters."""
        described = self.parameters(params)
        return map_named(lambda path, _: described[path], params)

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which workers have parameters of their own; none if all have the same.

        Either the exchange wants it, or the optimizer does, over the axes of the exchange.
        """
        strategy = self.strategy
        if isinstance(self.optimizer, Apart):
            return axes_within(strategy.data_axes, strategy.exchange.axes)
        return strategy.apart

    @property
    def has_server(self) -> bool:
        """Whether workers are around a server, which has the state of the optimizer."""
        return isinstance(self.strategy.exchange, ParameterServer)

    @property
    def workers(self) -> int:
        """How many workers have parameters of their own; 1 if all have the same."""
        return parts_over(self.strategy.device_mesh.shape, self.apart)

    def first_workers(self, params: Any, opt_state: Any, rest: Any) -> Workers | None:
        """The arrays of each worker before the first step, when all workers have the same.

        None if all devices share one state.
        """
        if not self.apart:
            return None
        exchange = self.strategy.exchange
        kept: dict[str, Any] = {}
        if isinstance(exchange, Meeting):
            for name in exchange.keeps:
                kept[name] = jax.tree.map(lambda x: jnp.zeros_like(wide(x)), params)
        versions: Any = ()
        if self.has_server:
            opt_state, versions = (), jnp.zeros(self.workers, jnp.int32)
        return Workers(
            params=repeated(params, self.workers),
            opt_state=repeated(opt_state, self.workers),
            rest=repeated(rest, self.workers),
            kept=kept,
            versions=versions,
        )

    def no_errors(self, params: Any) -> ErrorsByPath:
        """What a compressed exchange has left over before the first step: zeros.

        There is an entry for each parameter that the exchange takes, with the errors of every
        device along dim 0. An exchange that keeps no errors has no entries.
        """
        exchange, mesh = self.strategy.exchange, self.strategy.device_mesh
        if not exchange.keeps_errors:
            return {}
        shapes: dict[str, Any] = {}
        for path, parameter in self.parameters(params).items():
            if exchange.over(parameter):
                shapes[path] = exchange.first_errors(parameter, mesh.shape)
        return jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape), x.dtype), shapes)

    def __getstate__(self) -> dict[str, Any]:
        """Only the fields, without cached values: hashes of text differ from process to process."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __hash__(self) -> int:  # computed once: every call of a step hashes the layout
        return self._hash


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The state of a run between two steps: a pytree of global arrays, each with its sharding.

    `init` makes it. `state.model` is the model with its values, `state.weights` all parameters, in
    the model's order.

    - `step`: how many steps were taken.
    - `params`: the parameters that the optimizer updates; a frozen parameter is None here.
    - `frozen`: the frozen parameters; a trained parameter is None here.
    - `opt_state`: the optimizer's state, as optax makes it.
    - `errors`: the errors of a compressed exchange (error feedback), by the path of the parameter.
      Dim 0 counts the devices, each of which has errors of its own.
    - `workers`: the arrays that each worker has of its own if workers train apart (`LocalSGD`,
      `DiLoCo`), otherwise None. With workers, `params` are the parameters of their last meeting,
      and `opt_state` and `rest` are empty. With a `ParameterServer`, `params` and `opt_state` are
      the server's.
    - `streams`: the random streams inside the model, such as those of dropout.
    - `rest`: the other arrays of the model, such as the statistics of a batch norm.
    - `key`: from which each step derives its randomness.
    - `nonfinite`: how many steps had a gradient that was not finite.
    - `layout`: the strategy, the optimizer and the names; static.
    """

    step: Any
    params: Any
    frozen: Any
    opt_state: Any
    errors: ErrorsByPath
    workers: Workers | None
    streams: Any
    rest: Any
    key: Any
    nonfinite: Any
    layout: Layout = field(metadata={"static": True}, repr=False)

    @property
    def program_key(self) -> tuple[Any, ...]:
        """What states have in common that one compiled step takes: their layout and shapes.

        Models of different sizes may have the same layout.
        """
        leaves = jax.tree.leaves((self.params, self.frozen, self.rest))
        return (self.layout, *[leaf.shape for leaf in leaves])

    @property
    def model(self) -> Any:
        """The model with this state's values, for evaluation and sampling.

        Use it under `strategy.scope()`. Its layers are in the model's own order. Where workers have
        parameters of their own, it has their mean, or what their server has.
        """
        state = self._in_order
        parameters = combine(state.params, state.frozen)
        if self.layout.strategy.offloaded is not None:
            # A model computes with its parameters, which only a device can.
            parameters = jax.tree.map(to_device, parameters)
        return self.layout.definition.merge(parameters, state.streams, state.rest)

    @property
    def weights(self) -> Any:
        """The parameters, trained and frozen, as a tree with layers in the model's own order.

        Where workers have parameters of their own, it has their mean, or what their server has.
        """
        state = self._in_order
        return combine(state.params, state.frozen)

    @property
    def _in_order(self) -> "State":
        """The state of one worker with layers in the model's order, without the optimizer's state.

        No model has that, and it may be larger than the parameters, and on the host.
        """
        return reordered(mean_over_workers(self).replaced(opt_state=None, errors={}), natural=True)

    def with_weights(self, weights: Any) -> "State":
        """The state with these parameters, cast and sharded as its own.

        `weights` is a tree like the property `weights`; its arrays may be on the host or on
        devices. Assigning to `params` is not equivalent: under some pipelines, `params` has the
        layers in another order than the model. If workers have parameters of their own, all workers
        get these weights, and their optimizers keep what they have accumulated, so call this right
        after a meeting. If the optimizer keeps copies of parameters, its state is made anew from
        these weights; after the first step this is refused.
        """
        check_arrays.values("with_weights", "state", self.step)
        parameters = combine(self.params, self.frozen)
        given = dict(named_leaves(weights))
        _check_weights(given, dict(named_leaves(parameters)))
        leaves: list[Any] = []
        # By path: a plain dict may stand for a tree of another class.
        for path, leaf in named_leaves(parameters):
            leaves.append(jax.device_put(given[path].astype(leaf.dtype), leaf.sharding))
        on_mesh = jax.tree.unflatten(jax.tree.structure(parameters), leaves)
        # Weights are given in the model's order, and stored in that of the pipeline's stages.
        on_mesh = place_layers(self.layout.strategy, on_mesh, dict(self.layout.names))

        def new_values(old: Any) -> Any:
            # Each of the two trees keeps its leaves that are None.
            return jax.tree.map(
                lambda old, new: None if old is None else new, old, on_mesh, is_leaf=_is_none
            )

        params = new_values(self.params)
        state = self.replaced(params=params, frozen=new_values(self.frozen))
        state = with_first_optimizer_state(state)
        if state.workers is None:
            return state
        shardings = jax.tree.map(lambda x: x.sharding, state.workers.params)
        count = self.layout.workers
        own = jax.jit(lambda params: repeated(params, count), out_shardings=shardings)(params)
        return state.replaced(workers=state.workers._replace(params=own))

    def replaced(self, **changes: Any) -> "State":
        """The same with some of its fields changed."""
        return replace(self, **changes)


def _check_weights(given: dict[str, Any], parameters: dict[str, Any]) -> None:
    """Refuse weights, by path, that are not those of a model with these parameters."""
    takes = "`with_weights` takes a tree like the model's parameters"
    for path in parameters:
        if path not in given:
            raise ValueError(f"{takes}: the parameter `{path}` is not among the weights.")
    for path in given:
        if path not in parameters:
            raise ValueError(f"{takes}: the model has no parameter `{path}`.")
    for path, leaf in parameters.items():
        check_arrays.array("with_weights", path, given[path])
        if given[path].shape != leaf.shape:
            raise ValueError(
                f"`{path}` is of shape {leaf.shape}, and the weights given for it "
                f"{given[path].shape}."
            )


def mean_over_workers(state: State) -> State:
    """The state with the mean over workers, where they have parameters of their own.

    Its parameters and the model's other state are those of no worker; around a server, the
    parameters are the server's. There is no mean of the optimizer's state, which an evaluation does
    not read.
    """
    if state.workers is None:
        return state
    own = state.workers.params, state.workers.rest
    if state.workers.has_server:
        own = with_dim(state.params), state.workers.rest
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(own)):
        return shapes_without_workers(state).replaced(opt_state=())
    specs: Any = state_specs(state).workers
    mesh = state.layout.strategy.device_mesh

    def sharding(spec: PartitionSpec) -> NamedSharding:
        # Without the dim of workers, over which a mean is the same.
        return NamedSharding(mesh, PartitionSpec(*spec[1:]))

    shardings = jax.tree.map(sharding, (specs.params, specs.rest))
    params, rest = jax.jit(mean_of_workers, out_shardings=shardings)(own)
    return state.replaced(params=params, opt_state=(), rest=rest, workers=None)


def shapes_without_workers(state: State) -> State:
    """The same of shapes and shardings, of arrays or of their shapes."""
    if state.workers is None:
        return state
    params, opt_state, rest = shapes_of_one(state.workers.own)
    if state.workers.has_server:
        opt_state = state.opt_state
    alone = state.replaced(params=params, opt_state=opt_state, rest=rest, workers=None)

    def described(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(described, alone, state_shardings(alone))


def state_specs(state: State) -> State:
    """The specs of a state, from only its layout and shapes.

    Unlike the shardings of its arrays they are known while the state is traced. The result is a
    `State` whose leaves are specs.
    """
    layout = state.layout
    named = layout.named
    of_worker: dict[str, PartitionSpec] = {}
    for tree in (state.params, state.frozen):
        for path, split in layout.splits(tree).items():
            of_worker[path] = split.spec
    stored = dict(of_worker)
    if state.workers is not None and state.workers.has_server:
        for path, split in layout.splits_of_server(state.params).items():
            stored[path] = split.spec
    # The state of the optimizer is split like the parameters that it belongs to.
    follow = like_parameters(dict(layout.relations), stored)
    whole = PartitionSpec()

    def at_rest(path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        return stored[path]

    def of_workers(workers: Workers) -> Workers:
        apart = layout.apart
        params, opt_state, rest = shapes_of_one(workers.own)
        params = place(lambda path, shape, spec: of_worker[path], params)
        return Workers(
            params=specs_with_dim(params, apart),
            opt_state=specs_with_dim(place(follow, opt_state), apart),
            rest=specs_with_dim(place(named, rest), apart),
            kept={name: place(at_rest, tree) for name, tree in workers.kept.items()},
            versions=jax.tree.map(lambda _: PartitionSpec(apart), workers.versions),
        )

    return State(
        step=whole,
        params=place(at_rest, state.params),
        frozen=place(at_rest, state.frozen),
        opt_state=place(follow, state.opt_state),
        errors=jax.tree.map(lambda _: PartitionSpec(layout.strategy.every_axis), state.errors),
        workers=None if state.workers is None else of_workers(state.workers),
        streams=place(named, state.streams),
        rest=place(named, state.rest),
        key=whole,
        nonfinite=whole,
        layout=layout,
    )


def state_shardings(state: State) -> State:
    """The shardings of a state, from only its layout and shapes, on the mesh of its strategy.

    They are its specs, and the memory in which each array is.
    """
    layout = state.layout
    strategy = layout.strategy
    small, splits = strategy.sharding.small, layout.splits(combine(state.params, state.frozen))
    parameters = parameters_on_host(strategy.offloaded, splits, small)
    relations = dict(layout.relations)
    opt_state = state_on_host(strategy.offloaded, splits, small, relations)

    def sharding(spec: PartitionSpec, on_host: bool = False) -> NamedSharding:
        memory = HOST if on_host else None
        return NamedSharding(strategy.device_mesh, spec, memory_kind=memory)

    def of_parameter(path: str, spec: PartitionSpec) -> NamedSharding:
        return sharding(spec, path in parameters)

    def of_state(path: str, spec: PartitionSpec) -> NamedSharding:
        return sharding(spec, path in opt_state)

    specs = state_specs(state)
    on_device = jax.tree.map(sharding, specs)
    return on_device.replaced(
        params=map_named(of_parameter, specs.params),
        frozen=map_named(of_parameter, specs.frozen),
        opt_state=map_named(of_state, specs.opt_state),
    )


def combine(params: Any, frozen: Any) -> Any:
    """All parameters of a model in one tree: those that move, and those that do not.

    Each leaf is None in one of the two trees, and is taken from the other.
    """
    return jax.tree.map(
        lambda p, f: f if p is None else p,
        params,
        frozen,
        is_leaf=lambda leaf: leaf is None or isinstance(leaf, StoredWeight),
    )


def drop_weak_types(tree: Any) -> Any:
    """The arrays of a tree with strong types; keys stay as they are.

    An array of a weak type, such as `jnp.asarray(2.0)`, would come out of the first step with a
    strong one, and the second step would be compiled anew.
    """
    return jax.tree.map(
        lambda x: x if is_key(x) else jax.lax.convert_element_type(x, x.dtype), tree
    )


def _is_none(leaf: Any) -> bool:
    return leaf is None
