"""The order of layers in a state: under some pipelines a stage holds parts of the model that do not
follow each other.

At rest layers lie stage after stage, and of each stage part after part, so that no stage ever asks
another for weights. To whoever reads a state, a model or a checkpoint, they lie as the model has
them.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardlib._tree import map_named
from shardlib.layouts._rules import LAYERS, counts_layers
from shardlib.pipeline._program import table_of
from shardlib.step._strategy import Strategy


def loops_of(strategy: Strategy, names: dict[str, Any]) -> tuple[str, ...]:
    """The names of stacked dims, of each of a model's loops over layers one, in order."""
    present = {name for of in names.values() if type(of) is tuple for name in of}
    return tuple(name for name in strategy.layer_names if name in present)


def order_of(
    strategy: Strategy, layers: int, loop: int = 0, loops: int = 1
) -> tuple[int, ...] | None:
    """Which layer of a loop lies where: of each place the number of the layer; None if they lie as
    the model has them.
    """
    if strategy.pipeline is None:
        return None
    table = table_of(strategy.pipeline)
    parts = table.parts // loops
    per = layers // parts
    mine = table.placement[loop * parts : (loop + 1) * parts]
    by_stage = [
        part for stage in range(table.stages) for part, on in enumerate(mine) if on == stage
    ]
    order = tuple(part * per + k for part in by_stage for k in range(per))
    return None if order == tuple(range(layers)) else order


def orders(
    strategy: Strategy, names: dict[str, Any], shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> tuple[str, ...]:
    """A line for each loop whose layers do not lie as the model has them."""
    loops, lines = loops_of(strategy, names), {}
    for path, shape in shapes:
        dim = stacked_dim(names.get(path))
        if dim is None or names[path][dim] not in loops:
            continue
        order = order_of(strategy, shape[dim], loops.index(names[path][dim]), len(loops))
        if order is not None:
            each = len(order) // table_of(strategy.pipeline).stages  # type: ignore[arg-type]
            stages = [" ".join(map(str, order[k : k + each])) for k in range(0, len(order), each)]
            lines[names[path][dim]] = (
                f"`{names[path][dim]}` lie stage after stage, not as the model has them: "
                f"{' | '.join(stages)} (`state.model` has them in order, `state.with_weights` "
                "takes them so)"
            )
    return tuple(lines.values())


def check_order(theirs: Strategy, mine: Strategy, names: dict[str, Any]) -> None:
    """Refuse a state whose layers lie otherwise than a strategy has them."""
    loops = loops_of(theirs, names) or loops_of(mine, names)
    count = math.lcm(
        *(table_of(one.pipeline).parts for one in (theirs, mine) if one.pipeline is not None)
    )
    for loop in range(len(loops)):
        if order_of(theirs, count, loop, len(loops)) != order_of(mine, count, loop, len(loops)):
            raise ValueError(
                f"The state was made for `pipeline={theirs.pipeline}`, and its layers lie in the "
                f"order of that; this is for `pipeline={mine.pipeline}`, which has another. Use "
                "the strategy that it was made with, `state.layout.strategy`; a checkpoint goes "
                "from one schedule to another: `sl.Checkpoints`."
            )


def check_state(
    strategy: Strategy, names: dict[str, Any], relations: dict[str, Any], shapes: dict[str, Any]
) -> None:
    """Refuse an optimizer's state of which it is unknown how it follows the layers, if these lie in
    an order of their own.
    """
    loops = loops_of(strategy, names)
    for path, relation in relations.items():
        of: Any = names.get(relation.parameter)
        dim = stacked_dim(of)
        if (
            relation.kind != "ambiguous"
            or dim is None
            or of[dim] not in loops
            or not shapes[path].ndim
        ):
            continue
        table = table_of(strategy.pipeline)  # type: ignore[arg-type]
        if (
            order_of(strategy, table.parts // len(loops), loops.index(of[dim]), len(loops))
            is not None
        ):
            raise ValueError(
                f"`{path}` of the optimizer's state, of shape {shapes[path].shape}, "
                f"{relation.reason}: under `{strategy.pipeline}` layers lie stage after stage, and "
                "it must be known which dim of it counts them. Make the number of layers other "
                "than the sizes beside it, or use a schedule with one part on a stage."
            )


def check_layers(strategy: Strategy, names: dict[str, Any], shapes: dict[str, Any]) -> None:
    """Refuse stacks that do not split evenly into the parts of a pipeline."""
    schedule = strategy.pipeline
    if schedule is None:
        return
    table = table_of(schedule)
    loops = loops_of(strategy, {path: names.get(path) for path in shapes})
    if not loops:
        raise ValueError(
            f"`Strategy(pipeline=...)`: no parameter has a dim named `{LAYERS}`, so there is "
            "nothing to cut into stages. `sl.Layers([...])` makes one loop of a list of modules; "
            "or stack layers that are alike, `nnx.vmap` with "
            f'`transform_metadata={{nnx.PARTITION_NAME: "{LAYERS}"}}`, and scan them.'
        )
    parts, on_stage = table.parts // len(loops), table.parts // schedule.stages
    if on_stage % len(loops) or any(
        table.placement[loop * parts : (loop + 1) * parts].count(stage) != on_stage // len(loops)
        for loop in range(len(loops))
        for stage in range(table.stages)
    ):
        raise ValueError(
            f"The model has {len(loops)} loops over layers "
            f"({', '.join(f'`{name}`' for name in loops)}), and every stage has parts of each; "
            f"`{schedule}` has {on_stage} on a stage. `sl.pipeline.Interleaved({schedule.stages}, "
            f"{schedule.microbatches}, chunks={len(loops)})` has {len(loops)}, and so have `ZBV` "
            "and `VHalf` two."
        )
    for path, leaf in shapes.items():
        dim = stacked_dim(names.get(path))
        if dim is None or names[path][dim] not in loops:
            continue
        if leaf.shape[dim] % parts:
            per_stage = (
                f", {parts // schedule.stages} on each stage" if parts != schedule.stages else ""
            )
            raise ValueError(
                f"`{path}` of shape {leaf.shape} stacks {leaf.shape[dim]} layers, which do not "
                f"split evenly into the {parts} parts of `{schedule}`{per_stage}: use a multiple "
                f"of {parts} layers, or fewer stages."
            )


def stacked_dim(names: Any) -> int | None:
    """Along which dim layers are stacked, by the names of a parameter."""
    return (
        next((k for k, name in enumerate(names) if counts_layers(name)), None)
        if type(names) is tuple
        else None
    )


def place_layers(strategy: Strategy, params: Any, names: dict[str, Any]) -> Any:
    """Parameters as a model has them, put where they lie at rest."""
    move = Mover(strategy, names, natural=False)
    return map_named(lambda path, leaf: move(leaf, path, stacked_dim(names.get(path))), params)


def reordered(state: Any, *, natural: bool) -> Any:
    """The state with its layers as the model has them, or, if not `natural`, from there to where
    they lie at rest.
    """
    layout = state.layout
    names, relations = dict(layout.names), dict(layout.relations)
    move = Mover(layout.strategy, names, natural)

    def of_parameter(path: str, leaf: Any) -> Any:
        return move(leaf, path, stacked_dim(names.get(path)))

    def of_state(path: str, leaf: Any) -> Any:
        relation = relations.get(path)
        if (
            relation is None
            or (dim := stacked_dim(names.get(relation.parameter))) is None
            or dim not in relation.dims
        ):
            return leaf
        return move(leaf, relation.parameter, relation.dims.index(dim))

    if layout.strategy.pipeline is None:
        return state
    return state.replaced(
        params=map_named(of_parameter, state.params),
        frozen=map_named(of_parameter, state.frozen),
        opt_state=map_named(of_state, state.opt_state),
    )


class Mover:
    """Moves layers from where the model has them to where they lie at rest, or, if `natural`,
    back.
    """

    def __init__(self, strategy: Strategy, names: dict[str, Any], natural: bool) -> None:
        self.strategy, self.names, self.natural = strategy, names, natural
        self.loops = loops_of(strategy, names)

    def __call__(self, leaf: Any, parameter: str, dim: int | None) -> Any:
        """A leaf whose `dim` counts the layers of a parameter."""
        if dim is None or not isinstance(leaf, jax.Array):
            return leaf
        name = self.names[parameter][stacked_dim(self.names[parameter])]
        if name not in self.loops:
            return leaf
        order = order_of(self.strategy, leaf.shape[dim], self.loops.index(name), len(self.loops))
        if order is None:
            return leaf
        places = np.argsort(order) if self.natural else np.array(order)
        if isinstance(leaf, Tracer):
            return jnp.take(leaf, places, axis=dim)
        return _taker(dim, leaf.sharding)(leaf, places)


@lru_cache(maxsize=1024)
def _taker(dim: int, sharding: Any) -> Any:
    return jax.jit(lambda leaf, places: jnp.take(leaf, places, axis=dim), out_shardings=sharding)
