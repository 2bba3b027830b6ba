"""The state of a run: arrays with their shardings, and what they are the state of."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib._tree import named_leaves
from shardlib.checks import _arrays as check_arrays
from shardlib.collectives._exact import Parameter
from shardlib.collectives._zero import Split, split_further
from shardlib.layouts._placement import Placement, by_names, like_parameters, place
from shardlib.layouts._relate import Relation
from shardlib.layouts._rules import AxisRules, spec_axes
from shardlib.modeling._flax import Definition, Names
from shardlib.modeling._random import is_key
from shardlib.step._exchange import ErrorsByPath, pieces
from shardlib.step._layer_order import place_layers, reordered
from shardlib.step._strategy import Strategy
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
        return hash(
            (
                self.definition,
                self.optimizer,
                self.strategy,
                self.names,
                self.variable_rules,
                self.relations,
            )
        )

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
        named = {
            path: self.named(path, leaf.shape, PartitionSpec()) for path, leaf in leaves.items()
        }
        return {
            path: Parameter(
                path,
                leaf.shape,
                named[path],
                tuple(axis for axis in manual if axis not in spec_axes(named[path])),
                split.spec,
                dtypes.reduced(leaf.dtype),
            )
            for (path, leaf), split in zip(
                leaves.items(), self.splits(params).values(), strict=True
            )
        }

    def no_errors(self, params: Any) -> ErrorsByPath:
        """What a compressed exchange has left over before the first step: zeros.

        There is an entry for each parameter that the exchange takes, with the errors of every
        device along dim 0. An exchange that keeps no errors has no entries.
        """
        exchange, mesh = self.strategy.exchange, self.strategy.device_mesh
        if not exchange.keeps_errors:
            return {}
        taken = {path: one for path, one in self.parameters(params).items() if exchange.over(one)}
        none = {path: pieces(exchange, one, mesh.shape).errors() for path, one in taken.items()}
        return jax.tree.map(lambda x: jnp.zeros((mesh.size, *x.shape), x.dtype), none)

    def __getstate__(self) -> dict[str, Any]:
        """Only the fields, without cached values: hashes of text differ from process to process."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __hash__(self) -> int:  # computed once: every call of a step hashes the layout
        return self._hash


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A run between two steps: a pytree of global arrays, each with its sharding.

    `params` are the parameters that the optimizer moves, `frozen` those that stay as they are;
    where one tree has a leaf, the other has None. `errors` is what a compressed exchange has left
    over, by the paths of parameters, each device's own along dim 0; a checkpoint has it by worker
    and in the parameter's shape. `rest` is whatever else the model carries, `streams` the random
    streams inside it, `key` the key from which each step derives its randomness. `nonfinite` counts
    the steps whose gradient was not finite.
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
        """The model with this state's values, for evaluation and sampling.

        Use it under `strategy.scope()`. Its layers are in the model's own order.
        """
        state = reordered(self, natural=True)
        return self.layout.definition.merge(
            combine(state.params, state.frozen), state.streams, state.rest
        )

    def with_weights(self, weights: Any) -> "State":
        """The state with these parameters, cast and sharded as its own.

        `weights` is a tree of parameters as `model` has it, of arrays on the host or anywhere.
        Assigning to `params` is not the same: under some pipelines layers lie there in another
        order than the model's.
        """
        of = combine(self.params, self.frozen)
        given, here = (dict(named_leaves(tree)) for tree in (weights, of))
        if lost := [path for path in here if path not in given] or [
            path for path in given if path not in here
        ]:
            raise ValueError(
                "`with_weights` takes a tree as the model's parameters are; "
                f"`{lost[0]}` is in one alone."
            )
        for path, leaf in here.items():
            check_arrays.array("with_weights", path, given[path])
            if given[path].shape != leaf.shape:
                raise ValueError(
                    f"`{path}` is of shape {leaf.shape}, and the weights given for it "
                    f"{given[path].shape}."
                )
        put = jax.tree.map(
            lambda leaf, one: jax.device_put(one.astype(leaf.dtype), leaf.sharding), of, weights
        )
        put = place_layers(self.layout.strategy, put, dict(self.layout.names))

        def new_values(old: Any) -> Any:
            return jax.tree.map(
                lambda old, new: None if old is None else new, old, put, is_leaf=_is_none
            )

        return self.replaced(params=new_values(self.params), frozen=new_values(self.frozen))

    def replaced(self, **changes: Any) -> "State":
        """The same with some of its fields changed."""
        return replace(self, **changes)


def state_specs(state: State) -> State:
    """The specs of a state, from only its layout and shapes.

    Unlike the shardings of its arrays they are known while the state is traced. The result is a
    `State` whose leaves are specs.
    """
    layout = state.layout
    named = layout.named
    stored = {
        path: split.spec
        for tree in (state.params, state.frozen)
        for path, split in layout.splits(tree).items()
    }
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
