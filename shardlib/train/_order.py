"""The order of layers in a state: under some pipelines a stage holds parts of the model that do not follow each other.

At rest layers lie stage after stage, and of each stage part after part, so that no stage ever asks another for weights. To
whoever reads a state, a model or a checkpoint, they lie as the model has them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardlib._rules import LAYERS
from shardlib._tree import map_named
from shardlib.pipeline._program import table_of
from shardlib.train._strategy import Strategy


def order_of(strategy: Strategy, layers: int) -> tuple[int, ...] | None:
    """Which layer lies where: of each place the number of the layer; None if they lie as the model has them."""
    if strategy.pipeline is None:
        return None
    table = table_of(strategy.pipeline)
    per = layers // table.parts
    parts = [part for stage in range(table.stages) for part, on in enumerate(table.placement) if on == stage]
    order = tuple(part * per + k for part in parts for k in range(per))
    return None if order == tuple(range(layers)) else order


def check_layers(strategy: Strategy, names: dict[str, Any], shapes: dict[str, Any]) -> None:
    """Refuse stacks that do not split evenly into the parts of a pipeline."""
    if strategy.pipeline is None:
        return
    parts = table_of(strategy.pipeline).parts
    stacks = {path: shapes[path].shape for path in names if path in shapes and stacked_dim(names.get(path)) is not None}
    if not stacks:
        raise ValueError(
            f"`Strategy(pipeline=...)`: no parameter has a dim named `{LAYERS}`, so there is nothing to cut into stages. Stack "
            f'layers that are alike, `nnx.vmap` with `transform_metadata={{nnx.PARTITION_NAME: "{LAYERS}"}}`, and scan them.'
        )
    for path, shape in stacks.items():
        dim = stacked_dim(names[path])
        assert dim is not None
        if shape[dim] % parts:
            per_stage = (
                f", {parts // strategy.pipeline.stages} on each stage" if parts != strategy.pipeline.stages else ""
            )
            raise ValueError(
                f"`{path}` of shape {shape} stacks {shape[dim]} layers, which do not split evenly into the {parts} parts of "
                f"`{strategy.pipeline}`{per_stage}: use a multiple of {parts} layers, or fewer stages."
            )


def stacked_dim(names: Any) -> int | None:
    """Along which dim layers are stacked, by the names of a parameter."""
    return names.index(LAYERS) if type(names) is tuple and LAYERS in names else None


def place_layers(strategy: Strategy, params: Any, names: dict[str, Any]) -> Any:
    """Parameters as a model has them, put where they lie at rest."""
    return map_named(lambda path, leaf: _moved(strategy, leaf, stacked_dim(names.get(path)), False), params)


def reordered(state: Any, *, natural: bool) -> Any:
    """The state with its layers as the model has them, or, if not `natural`, from there to where they lie at rest."""
    layout = state.layout
    names, relations = dict(layout.names), dict(layout.relations)

    def of_parameter(path: str, leaf: Any) -> Any:
        return _moved(layout.strategy, leaf, stacked_dim(names.get(path)), natural)

    def of_state(path: str, leaf: Any) -> Any:
        relation = relations.get(path)
        dim = stacked_dim(names.get(relation.parameter)) if relation is not None else None
        dims = relation.dims if relation is not None else ()
        return _moved(layout.strategy, leaf, dims.index(dim) if dim is not None and dim in dims else None, natural)

    if layout.strategy.pipeline is None:
        return state
    return state.replaced(
        params=map_named(of_parameter, state.params),
        frozen=map_named(of_parameter, state.frozen),
        opt_state=map_named(of_state, state.opt_state),
        rest=map_named(of_parameter, state.rest),
    )


def _moved(strategy: Strategy, leaf: Any, dim: int | None, natural: bool) -> Any:
    order = None if dim is None or not isinstance(leaf, jax.Array) else order_of(strategy, leaf.shape[dim])
    if order is None:
        return leaf
    places = np.argsort(order) if natural else np.array(order)
    if isinstance(leaf, Tracer):
        return _taken(leaf, places, dim)
    return jax.jit(partial(_taken, places=places, dim=dim), out_shardings=leaf.sharding)(leaf)


def _taken(leaf: jax.Array, places: np.ndarray, dim: int | None) -> jax.Array:
    return jnp.take(leaf, places, axis=dim)
