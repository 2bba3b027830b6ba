"""A list of layers that are alike, as one that loops.

    list:   x -> layer 0 -> layer 1 -> ... -> layer n-1       each compiled by itself
    loop:   for w in stacked: x = layer(w, x)                 compiled once

The loop is what ZeRO gathers a layer at a time in, and what a pipeline can cut.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.layouts._rules import LAYERS
from shardlib.modeling._remat import remat


class Layers(nnx.Module):
    """NNX modules that are alike, called one after the other.

    Their variables are stacked along a first dim named `layers`.

    `layers(x, *same)` hands `x`, any tree, from layer to layer, and gives each of them `same` too.
    It is one loop, so that it compiles in the time of one layer, ZeRO gathers a layer at a time, a
    pipeline cuts it, and `Strategy(remat="full")` keeps only the inputs of layers. Parameters keep
    the names they have. `name` is that of the new dim.

    >>> blocks = Layers([nnx.Linear(4, 4, rngs=nnx.Rngs(number)) for number in range(3)])
    >>> blocks(jnp.ones((2,
    ...     4))).shape, blocks.stacked.kernel.shape, blocks.stacked.kernel.out_sharding
    ((2, 4), (3, 4, 4), ('layers', None, None))
    """

    def __init__(self, layers: Sequence[Any], *, name: str = LAYERS) -> None:
        check.kind("Layers", "layers", layers, Iterable, "NNX modules, in a list")
        check.text("Layers", "name", name, "the name of a dim")
        layers = list(layers)
        _check_modules(layers)
        graph, states = _split_alike(layers)
        self.count = len(layers)
        stack = functools.partial(_stack_variables, name)
        self.stacked = nnx.merge(graph, jax.tree.map(stack, *states, is_leaf=_is_variable))

    def __len__(self) -> int:
        """How many layers there are."""
        return self.count

    def __call__(self, x: Any, *same: Any) -> Any:
        """Hand `x` through all layers, in a loop of blocks that may be recomputed."""
        # What changes nothing in itself may be closed over by `jax.jit`, and is said to.
        changes = False
        for _, variable in nnx.to_flat_state(nnx.state(self.stacked)):
            if not isinstance(variable, nnx.Param):
                changes = True
        # The loop keeps XLA from merging the two computations of a block, so no barrier is needed.
        checkpoint = functools.partial(nnx.remat, prevent_cse=False, graph_updates=changes)
        block = remat(lambda layer, x, *same: layer(x, *same), checkpoint=checkpoint)
        # One layer for each turn, `x` from turn to turn, and what is the same for all.
        in_axes = (0, nnx.Carry, *[None] * len(same))
        loop = nnx.scan(block, in_axes=in_axes, out_axes=nnx.Carry, graph_updates=changes)
        return loop(self.stacked, x, *same)


def _check_modules(layers: list[Any]) -> None:
    """Refuse a list that is empty, or that holds anything but NNX modules."""
    if layers and all(isinstance(layer, nnx.Module) for layer in layers):
        return
    kinds = ", ".join(dict.fromkeys(map(_kind, layers))) or "none"
    raise ValueError(
        f"`Layers` takes NNX modules, at least one; got {kinds}. Trees of arrays are "
        "stacked by `jax.tree.map(lambda *of_each: jnp.stack(of_each), *layers)` and "
        "looped over by `jax.lax.scan`."
    )


def _split_alike(layers: list[Any]) -> tuple[Any, list[Any]]:
    """The graph of the first layer, which stands for all, and the state of each."""
    graph, first = nnx.split(layers[0])
    states = [first]
    for number, layer in enumerate(layers[1:], 1):
        other_graph, state = nnx.split(layer)
        _check_alike(number, first, state, same_graph=graph == other_graph)
        states.append(state)
    _check_apart(states)
    return graph, states


def _kind(layer: Any) -> str:
    return type(layer).__name__


def _stack_variables(name: str, *variables: nnx.Variable) -> nnx.Variable:
    """One variable for those of all layers, with the first's names behind that of the new dim.

    Without names, the other dims have None. Specs of mesh axes are refused: the new dim has a name,
    and an array has names or axes for its dims, not both.
    """
    values = [variable.get_value() for variable in variables]
    names = variables[0].get_metadata().get("out_sharding")
    if isinstance(names, PartitionSpec):
        raise ValueError(
            f"`Layers`: a variable of shape {values[0].shape} is laid out by {names}, which speaks "
            f"of mesh axes, so that the new dim cannot have the name `{name}`. Name its dims "
            "instead: `sl.logical(initializer, ...)`."
        )
    stacked = variables[0].replace(jnp.stack(values))
    stacked.set_metadata(out_sharding=(name, *(names or [None] * values[0].ndim)))
    return stacked


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def _check_alike(number: int, first: Any, state: Any, *, same_graph: bool) -> None:
    """Refuse a layer that is not like the first: in its variables, or in anything else.

    `same_graph` says whether the definitions of the two are equal, which hold all that is not in a
    variable.
    """
    first_shapes, shapes = _shapes_by_path(first), _shapes_by_path(state)
    # Shapes are compared first: an error about these says more than one about settings.
    for path in dict.fromkeys([*first_shapes, *shapes]):
        first_shape, shape = first_shapes.get(path, "missing"), shapes.get(path, "missing")
        if first_shape != shape:
            raise ValueError(
                f"`Layers`: `{path}` is {first_shape} in layer 0 and {shape} in layer {number}. "
                "Layers of one loop are alike; where kinds take turns, make a module of one of "
                "each, and a list of these."
            )
    if not same_graph:
        raise ValueError(
            f"`Layers`: layer {number} is of another kind than layer 0, or has other settings; a "
            "loop calls one function. Where kinds take turns, make a module of one of each, and a "
            "list of these; what is a number, keep in a variable."
        )


def _shapes_by_path(state: Any) -> dict[str, str]:
    """The kind, dtype and shape of each variable, as `Param float32[4, 8]`, by path."""
    shapes = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        kind = type(variable).__name__
        shapes["/".join(map(str, path))] = f"{kind} {value.dtype}{list(value.shape)}"
    return shapes


def _check_apart(states: Sequence[Any]) -> None:
    """Refuse layers that share a parameter: stacked, each would have its own.

    A parameter is shared if two layers hold the same array object.
    """
    seen: dict[int, tuple[int, str]] = {}  # layer and path, by the identity of the array
    for number, state in enumerate(states):
        for path, variable in nnx.to_flat_state(state):
            key, name = id(variable.get_value()), "/".join(map(str, path))
            if isinstance(variable, nnx.Param) and key in seen and seen[key][0] != number:
                raise ValueError(
                    f"`Layers`: layers {seen[key][0]} and {number} share `{name}`. Stacked, each "
                    "would have its own: give what they share to each call, `layers(x, shared)`."
                )
            seen[key] = number, name
