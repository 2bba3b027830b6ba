"""The order of layers in a state.

Under some pipelines a stage holds parts of the model that do not follow each other. In a state,
layers are stored stage after stage, and in each stage part after part, so that no stage ever asks
another for weights. Eight layers in four parts on two stages, `Interleaved(2, chunks=2)`:

    the model's order    0 1 | 2 3 | 4 5 | 6 7        parts 0 1 2 3, on stages 0 1 0 1
    in the state         0 1   4 5 | 2 3   6 7        stage 0, stage 1

To whoever reads a state, a model or a checkpoint, layers have the model's order, called natural.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardlib._text import listed
from shardlib._tree import map_named
from shardlib.layouts._host import to_device
from shardlib.layouts._rules import LAYERS, counts_layers
from shardlib.pipeline._program import table_of
from shardlib.step._strategy import Strategy


def loops_of(strategy: Strategy, names: dict[str, Any]) -> tuple[str, ...]:
    """The names of the stacked dims of a model's loops over layers, in the order of the loops.

    `names` are those of the dims of each parameter, by its path.
    """
    present: set[str] = set()
    for dim_names in names.values():
        if type(dim_names) is tuple:
            # Only parameters decide: names of activations are not among these.
            present.update(dim_names)
    return tuple(name for name in strategy.layer_names if name in present)


def order_of(
    strategy: Strategy, layers: int, loop: int = 0, loops: int = 1
) -> tuple[int, ...] | None:
    """The layers of a loop in the order in which a state stores them.

    None if that is the model's order.

    Args:
        strategy: the strategy, of which the schedule says which stage has which parts.
        layers: the number of layers of the loop, a multiple of its parts.
        loop: the number of the loop in the model.
        loops: how many loops the model has; each has as many parts.
    """
    if strategy.pipeline is None:
        return None
    table = table_of(strategy.pipeline)
    parts = table.parts // loops
    layers_in_part = layers // parts
    stage_of_part = table.placement[loop * parts : (loop + 1) * parts]
    order = []
    for stage in range(table.stages):
        for part in range(parts):
            if stage_of_part[part] == stage:
                first = part * layers_in_part
                order.extend(range(first, first + layers_in_part))
    # With one part on each stage nothing moves, and no program needs to take anything.
    if order == list(range(layers)):
        return None
    return tuple(order)


def orders(
    strategy: Strategy, names: dict[str, Any], shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> tuple[str, ...]:
    """A line of text for each loop whose layers are not stored in the model's order.

    Args:
        strategy: the strategy.
        names: the names of the dims of each parameter, by its path.
        shapes: the paths and shapes of all parameters.
    """
    loops = loops_of(strategy, names)
    lines = {}
    for path, shape in shapes:
        stack = _stack_of(names.get(path), loops)
        if stack is None:
            continue
        order = order_of(strategy, shape[stack.dim], stack.loop, len(loops))
        if order is None:
            continue
        assert strategy.pipeline is not None
        # All parameters of a loop have the same line.
        lines[stack.name] = (
            f"`{stack.name}` are stored stage after stage, not in the model's order: "
            f"{_listed_by_stage(order, strategy.pipeline)} (`state.model` has them in order, "
            "`state.with_weights` takes them so)"
        )
    return tuple(lines.values())


def _listed_by_stage(order: tuple[int, ...], schedule: Any) -> str:
    """The numbers of layers in the order in which they are stored, with bars between stages."""
    # Each stage has as many layers as any other, which was checked before.
    in_stage = len(order) // table_of(schedule).stages
    stages: list[str] = []
    for first in range(0, len(order), in_stage):
        stages.append(" ".join(map(str, order[first : first + in_stage])))
    return " | ".join(stages)


def check_order(theirs: Strategy, mine: Strategy, names: dict[str, Any]) -> None:
    """Refuse a state whose layers are stored in another order than a strategy has them.

    Args:
        theirs: the strategy that the state was made with.
        mine: the strategy that is to use it.
        names: the names of the dims of each parameter of the state, by its path.
    """
    loops = loops_of(theirs, names) or loops_of(mine, names)
    # Orders are compared for a number of layers that both can divide.
    parts: list[int] = []
    for strategy in (theirs, mine):
        if strategy.pipeline is not None:
            parts.append(table_of(strategy.pipeline).parts)
    # Where one of them has no pipeline, its order is the model's, for any number of layers.
    layers = math.lcm(*parts)
    for loop in range(len(loops)):
        stored = order_of(theirs, layers, loop, len(loops))
        expected = order_of(mine, layers, loop, len(loops))
        if stored != expected:
            raise ValueError(
                f"The state was made for `pipeline={theirs.pipeline}`, and its layers are stored "
                f"in the order of that; this is for `pipeline={mine.pipeline}`, which has another. "
                "Use the strategy that it was made with, `state.layout.strategy`; a checkpoint "
                "goes from one schedule to another: `sl.Checkpoints`."
            )


def check_state(
    strategy: Strategy, names: dict[str, Any], relations: dict[str, Any], shapes: dict[str, Any]
) -> None:
    """Refuse an optimizer's state that must be reordered, if it is unknown along which dim.

    Args:
        strategy: the strategy.
        names: the names of the dims of each parameter, by its path.
        relations: to which parameter each array of the optimizer's state belongs, by its path.
        shapes: these arrays, or their shapes.
    """
    loops = loops_of(strategy, names)
    for path, relation in relations.items():
        stack = _stack_of(names.get(relation.parameter), loops)
        # Only an ambiguous relation leaves open which dim counts layers.
        if relation.kind != "ambiguous" or stack is None or not shapes[path].ndim:
            continue
        if _moves_layers(strategy, stack.loop, len(loops)):
            raise ValueError(
                f"`{path}` of the optimizer's state, of shape {shapes[path].shape}, "
                f"{relation.reason}: under `{strategy.pipeline}` layers are stored stage after "
                "stage, and it must be known which dim of it counts them. Make the number of "
                "layers other than the sizes beside it, or use a schedule with one part on a "
                "stage."
            )


def _moves_layers(strategy: Strategy, loop: int, loops: int) -> bool:
    """Whether a state stores the layers of a loop in another order than the model has them."""
    if strategy.pipeline is None:
        return False
    # With one layer in each part, which is enough to see it.
    parts = table_of(strategy.pipeline).parts // loops
    return order_of(strategy, parts, loop, loops) is not None


def check_layers(strategy: Strategy, names: dict[str, Any], shapes: dict[str, Any]) -> None:
    """Refuse a model whose loops over layers do not split evenly into the parts of a pipeline.

    Args:
        strategy: the strategy.
        names: the names of the dims of each parameter, by its path.
        shapes: the parameters, or their shapes.
    """
    if strategy.pipeline is None:
        return
    loops = loops_of(strategy, {path: names.get(path) for path in shapes})
    if not loops:
        raise ValueError(
            f"`Strategy(pipeline=...)`: no parameter has a dim named `{LAYERS}`, so there is "
            "nothing to cut into stages. `sl.Layers([...])` makes one loop of a list of modules; "
            "or stack layers that are alike, `nnx.vmap` with "
            f'`transform_metadata={{nnx.PARTITION_NAME: "{LAYERS}"}}`, and scan them.'
        )
    _check_loops(strategy.pipeline, loops)
    for path, leaf in shapes.items():
        stack = _stack_of(names.get(path), loops)
        if stack is not None:
            _check_divides(strategy.pipeline, path, leaf.shape, stack.dim, len(loops))


def _check_loops(schedule: Any, loops: tuple[str, ...]) -> None:
    """Refuse a schedule in which a stage does not have as many parts of each loop.

    All stages run one program, whose loops over layers are of one length.
    """
    table = table_of(schedule)
    parts = table.parts // len(loops)
    # The parts of the first loop come first in the table, then those of the next.
    on_stage = table.parts // schedule.stages
    evenly = on_stage % len(loops) == 0
    for loop in range(len(loops)):
        stage_of_part = table.placement[loop * parts : (loop + 1) * parts]
        counts = {stage_of_part.count(stage) for stage in range(table.stages)}
        if counts != {on_stage // len(loops)}:
            evenly = False
    if not evenly:
        raise ValueError(
            f"The model has {len(loops)} loops over layers "
            f"({listed(loops)}), and every stage has parts of each; "
            f"`{schedule}` has {on_stage} on a stage. `sl.pipeline.Interleaved({schedule.stages}, "
            f"{schedule.microbatches}, chunks={len(loops)})` has {len(loops)}, and so have `ZBV` "
            "and `VHalf` two."
        )


def _check_divides(schedule: Any, path: str, shape: tuple[int, ...], dim: int, loops: int) -> None:
    """Refuse a stack of layers that the parts of a pipeline cannot share evenly.

    Args:
        schedule: the schedule.
        path: the path of the parameter.
        shape: its shape.
        dim: along which dim its layers are stacked.
        loops: how many loops over layers the model has.
    """
    parts = table_of(schedule).parts // loops
    # No layers at all would split evenly, into parts that have none to scan.
    if not shape[dim]:
        raise ValueError(
            f"`{path}` of shape {shape} stacks no layers, and `{schedule}` cuts them into {parts} "
            f"parts: use a multiple of {parts} layers, or leave `pipeline` out."
        )
    if shape[dim] % parts == 0:
        return
    per_stage = ""
    if parts != schedule.stages:
        per_stage = f", {parts // schedule.stages} on each stage"
    raise ValueError(
        f"`{path}` of shape {shape} stacks {shape[dim]} layers, which do not split evenly into the "
        f"{parts} parts of `{schedule}`{per_stage}: use a multiple of {parts} layers, or fewer "
        "stages."
    )


class _Stack(NamedTuple):
    """The dim along which a parameter's layers are stacked, for one of the model's loops."""

    dim: int
    name: str
    loop: int  # the number of the loop in the model


def _stack_of(names: Any, loops: tuple[str, ...]) -> _Stack | None:
    """Where a parameter with these names stacks layers of one of the loops; None if nowhere."""
    dim = stacked_dim(names)
    if dim is None or names[dim] not in loops:
        return None
    return _Stack(dim, names[dim], loops.index(names[dim]))


def stacked_dim(names: Any) -> int | None:
    """Along which dim a parameter with these names stacks layers; None if along none."""
    if type(names) is not tuple:
        return None
    for dim, name in enumerate(names):
        if counts_layers(name):
            return dim
    return None


def place_layers(
    strategy: Strategy, params: Any, names: dict[str, Any], *, natural: bool = False
) -> Any:
    """Parameters with layers in the model's order, put in the order in which a state stores them.

    If `natural`, they are put from there into the model's order. `names` are those of the dims of
    each parameter, by its path.
    """
    move = Mover(strategy, names, natural)
    return map_named(lambda path, leaf: move(leaf, path, stacked_dim(names.get(path))), params)


def reordered(state: Any, *, natural: bool) -> Any:
    """The state with its layers in the model's order.

    If not `natural`, they are put from there into the order in which the state stores them.
    """
    layout = state.layout
    if layout.strategy.pipeline is None:
        return state
    names, relations = dict(layout.names), dict(layout.relations)
    move = Mover(layout.strategy, names, natural)

    def of_parameter(path: str, leaf: Any) -> Any:
        return move(leaf, path, stacked_dim(names.get(path)))

    def of_state(path: str, leaf: Any) -> Any:
        relation = relations.get(path)
        if relation is None:
            return leaf
        dim = stacked_dim(names.get(relation.parameter))
        # A factor of Adafactor may be a sum over the layers, and has no dim of them.
        if dim is None or dim not in relation.dims:
            return leaf
        return move(leaf, relation.parameter, relation.dims.index(dim))

    return state.replaced(
        params=map_named(of_parameter, state.params),
        frozen=map_named(of_parameter, state.frozen),
        opt_state=map_named(of_state, state.opt_state),
    )


class Mover:
    """Moves layers between the model's order and that of the state.

    Args:
        strategy: the strategy of the state.
        names: the names of the dims of each parameter, by its path.
        natural: whether they move into the model's order, or out of it.
    """

    def __init__(self, strategy: Strategy, names: dict[str, Any], natural: bool) -> None:
        self.strategy, self.names, self.natural = strategy, names, natural
        self.loops = loops_of(strategy, names)

    def __call__(self, leaf: Any, parameter: str, dim: int | None) -> Any:
        """An array with its layers moved, if it has any.

        Args:
            leaf: the parameter, or an array of the optimizer's state that belongs to it.
            parameter: the path of the parameter.
            dim: which dim of the array counts layers; None if none does.
        """
        # Shapes and other things that are no arrays have no order.
        if dim is None or not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        # A dim of layers that no loop of the pipeline goes over stays in order.
        stack = _stack_of(self.names[parameter], self.loops)
        if stack is None:
            return leaf
        order = order_of(self.strategy, leaf.shape[dim], stack.loop, len(self.loops))
        if order is None:
            return leaf
        # `order[k]` is the layer that the state stores at `k`; the inverse says where a layer is.
        indices = np.argsort(order) if self.natural else np.array(order)
        if isinstance(leaf, np.ndarray):
            return np.take(leaf, indices, axis=dim)
        # Inside `jit` the operation joins the program; outside it is compiled for the array's own
        # sharding, so that a device never holds the whole stack.
        if isinstance(leaf, Tracer):
            return jnp.take(leaf, indices, axis=dim)
        return _compiled_take(dim, leaf.sharding)(leaf, indices)


@lru_cache(maxsize=1024)
def _compiled_take(dim: int, sharding: Any) -> Any:
    """`jnp.take` along a dim, whose result is sharded, and in the memory, as its argument is."""

    def take(leaf: Any, indices: Any) -> Any:
        # Nothing computes with an array in the host's memory: the device has one at a time.
        return jnp.take(to_device(leaf), indices, axis=dim)

    return jax.jit(take, out_shardings=sharding)
