"""The forward and backward half of a step whose layers are the stages of a pipeline."""

from collections.abc import Callable
from typing import Any

import jax

from shardlib._rules import LAYERS, as_tuple, spec_axes
from shardlib.pipeline._cut import cut
from shardlib.pipeline._execute import execute
from shardlib.pipeline._program import program_of
from shardlib.train._state import united
from shardlib.train._strategy import Strategy


def pipelined(
    total: Callable[..., Any],
    strategy: Strategy,
    uses: tuple[Any, Any],
    params: tuple[Any, Any],
    inputs: Callable[[Any], tuple[Any, ...]],
) -> tuple[Any, Any]:
    """What all microbatches give together on this stage, and the gradients of what it holds.

    Manual over the data axes and that of the stages. `uses` and `params` are of trained parameters and of frozen ones;
    `inputs(number)` is what `total` takes besides for a microbatch.
    """
    axis, schedule = strategy.stage_axis, strategy.pipeline
    assert axis is not None and schedule is not None
    every, treedef = jax.tree.flatten(united(*uses))
    stored = treedef.flatten_up_to(united(*params))
    held = [use.start(one) for use, one in zip(every, stored, strict=True)]
    stacked = [_is_stacked(use, axis) for use in every]
    leaves, of_inputs = jax.tree.flatten(inputs(0))
    outputs: list[Any] = []

    def function(weights: list[Any], given: list[Any]) -> list[Any]:
        found, structure = jax.tree.flatten(total(treedef.unflatten(weights), *of_inputs.unflatten(given)))
        outputs.append(structure)
        return found

    made = cut(
        function, [use.whole for use in every], leaves, [use.path for use in every], stacked,
        [not use.frozen for use in every],
    )  # fmt: skip
    steps = program_of(schedule)
    numbers = jax.tree.unflatten(outputs[0], list(range(outputs[0].num_leaves)))
    _, (means, streams, rest) = numbers
    first = len(every)
    of_rest = jax.tree.leaves(of_inputs.unflatten(range(len(leaves)))[1])
    for number, given in zip(jax.tree.leaves(rest), of_rest, strict=True):
        if made.jaxpr.outvars[number] is not made.jaxpr.invars[first + given]:
            raise ValueError(
                "The loss changes state of the model, such as the statistics of a batch norm. Under a pipeline microbatches "
                "overlap, so that there is no order in which to change it: leave the state as it is."
            )
    sums = [None if use.frozen else use.sums(one, whole) for use, one, whole in zip(every, stored, held, strict=True)]
    given = lambda number: jax.tree.leaves(inputs(number))  # noqa: E731
    of_means = jax.tree.leaves(means)
    totals, sums = execute(made, steps, axis, held, sums, given, of_means)
    outer = [held[k] for k in made.outer]
    of_streams = made.aside(outer, leaves, jax.tree.leaves(streams))
    if of_streams is None:
        raise ValueError(
            "The layers change a random stream of the model, and a pipeline has none to hand from layer to layer. Give them "
            "keys made from one, `jax.random.fold_in(key, number)`."
        )
    is_trained = jax.tree.structure(uses[0])
    gradient = is_trained.unflatten([one for one, use in zip(sums, every, strict=True) if not use.frozen])
    found = (
        jax.tree.unflatten(jax.tree.structure(means), totals),
        jax.tree.unflatten(jax.tree.structure(streams), of_streams),
        of_inputs.unflatten(leaves)[1],
    )
    return found, gradient


def _is_stacked(use: Any, axis: str) -> bool:
    if axis not in spec_axes(use.named):
        return False
    if axis not in as_tuple(use.named[0]):
        raise ValueError(
            f"`{use.path}` of shape {use.shape} is laid out as {use.named}: the stages' axis `{axis}` splits the first dim of "
            f"stacked weights, which is named `{LAYERS}`, and no other."
        )
    return True

