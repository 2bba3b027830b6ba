"""A loss whose layers are the stages of a pipeline.

Where microbatches of a plain step follow each other, those of a pipeline overlap: the loss is cut
at its loop over layers (`pipeline/_cut`), and its parts are run by the table of a schedule
(`pipeline/_execute`). This file connects both to the parameters of a step, and refuses compiled
programs that would hang.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from shardlib._text import human_bytes
from shardlib._tree import named_leaves
from shardlib.compiled._collectives import Collective, collectives
from shardlib.layouts._rules import LAYERS
from shardlib.layouts._specs import spec_axes
from shardlib.pipeline._cut import cut
from shardlib.pipeline._execute import Executor
from shardlib.pipeline._loop import Weight
from shardlib.pipeline._program import program_of
from shardlib.step._layer_order import loops_of, stacked_dim
from shardlib.step._scopes import may_be_in_loss
from shardlib.step._state import State
from shardlib.step._strategy import Strategy
from shardlib.tracing._jaxpr import picked


class Pipelined:
    """A loss that is cut into the parts of a strategy's pipeline.

    It is made while a step is traced, in the region that is manual over the data and the stages.

    Args:
        total: `(params, *arguments) -> total, (means, streams, rest)`.
        strategy: a strategy with a pipeline.
        parameters: a `StepParameter` for each parameter, trained or frozen.
        params: what is stored of each.
        names: the names of each parameter's dims, by path.
        arguments: from the number of a microbatch to the arguments of `total` after `params`. The
            second of them is the model's state that is neither parameter nor random stream.
    """

    def __init__(
        self,
        total: Callable[..., Any],
        strategy: Strategy,
        parameters: Any,
        params: Any,
        names: dict[str, Any],
        arguments: Callable[[Any], tuple[Any, ...]],
    ) -> None:
        assert strategy.stage_axis is not None and strategy.pipeline is not None
        self.strategy, self.axis, self.schedule = strategy, strategy.stage_axis, strategy.pipeline
        self.parameters, treedef = jax.tree.flatten(parameters)
        self.stored = treedef.flatten_up_to(params)
        self.held: list[Any] = []
        for parameter, stored in zip(self.parameters, self.stored, strict=True):
            self.held.append(parameter.start(stored))
        # Microbatch 0 stands for all of them: their arguments have the same shapes.
        self.leaves, argument_tree = jax.tree.flatten(arguments(0))
        self.rest = argument_tree.unflatten(self.leaves)[1]
        self.inputs = lambda number: jax.tree.leaves(arguments(number))
        structures: list[Any] = []

        def function(weights: list[Any], inputs: list[Any]) -> list[Any]:
            results = total(treedef.unflatten(weights), *argument_tree.unflatten(inputs))
            leaves, structure = jax.tree.flatten(results)
            # The cut traces a function of lists; the structure of the results goes past the trace.
            structures.append(structure)
            return leaves

        self.cut = cut(
            function,
            [self._described(parameter, names) for parameter in self.parameters],
            self.leaves,
            loops_of(strategy, names),
        )
        # Trees of the positions that outputs have in the list that the cut function returns.
        _, (self.means, self.streams, rest) = _positions_in(structures[0])
        self._check_unchanged(rest, _positions_in(argument_tree)[1])

    def _described(self, parameter: Any, names: dict[str, Any]) -> Weight:
        """A parameter as the cut of a loss sees it."""
        return Weight(
            parameter.whole,
            parameter.path,
            _stacked_by(parameter, names, self.axis),
            trained=not parameter.frozen,
        )

    def _check_unchanged(self, outputs: Any, inputs: Any) -> None:
        """Refuse a loss that changes the model's state other than random streams."""
        before = dict(named_leaves(inputs))
        for path, output in named_leaves(outputs):
            if not self.cut.unchanged(output, before[path]):
                raise ValueError(
                    f"The loss changes `{path}` of the model, as a batch norm does its statistics. "
                    "Under a pipeline microbatches overlap, so that there is no order in which to "
                    "change it: leave it as it is, or use what needs no state, a layer norm say."
                )

    def gradient(self) -> tuple[Any, list[Any]]:
        """Differentiate the loss of all microbatches, on this stage.

        Returns `(means, streams, rest)`, and the gradients of what this device holds of the trained
        parameters.
        """
        sums: list[Any] = []
        for parameter, stored, held in zip(self.parameters, self.stored, self.held, strict=True):
            sums.append(None if parameter.frozen else parameter.empty_sums(stored, held.shape))
        totals, sums = self._executor().gradient(sums)
        outer = picked(self.held, self.cut.outer)
        # A stream that no layer draws from can be computed next to the pipeline, once.
        streams = self.cut.aside(outer, self.leaves, jax.tree.leaves(self.streams))
        if streams is None:
            raise ValueError(
                "The layers change a random stream of the model, and a pipeline has none to hand "
                "from layer to layer. Give them keys made from one, `jax.random.fold_in(key, "
                "number)`."
            )
        results = _in_tree(self.means, totals), _in_tree(self.streams, streams), self.rest
        gradients = []
        for gradient, parameter in zip(sums, self.parameters, strict=True):
            if not parameter.frozen:
                gradients.append(gradient)
        return results, gradients

    def value(self) -> Any:
        """The means of all microbatches on this stage, without gradients."""
        return _in_tree(self.means, self._executor(trains=False).measure())

    def _executor(self, trains: bool = True) -> Executor:
        """What runs the schedule, with its backward passes if it `trains`."""
        combines = trains and self.strategy.combine_passes
        if combines and len(self.cut.loops) > 1:
            raise ValueError(
                f"`Strategy(combine_passes=True)`: the loss has {len(self.cut.loops)} loops over "
                "layers, and passes of different loops are not combined. Leave it out, or write "
                "the layers as one loop."
            )
        program = program_of(
            self.schedule,
            loops=len(self.cut.loops),
            recompute=trains and self.strategy.remat == "stage",
            trains=trains,
        )
        return Executor(
            self.cut,
            program,
            self.axis,
            self.held,
            self.inputs,
            jax.tree.leaves(self.means),
            combines=combines,
        )


def _positions_in(structure: Any) -> Any:
    """A tree of this structure that has for each leaf its position among all leaves."""
    return jax.tree.unflatten(structure, list(range(structure.num_leaves)))


def _in_tree(tree: Any, leaves: Any) -> Any:
    """Leaves in the structure of a tree."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


class Programs:
    """Compiled programs of pipelines, which are checked before their first run.

    There are some that would hang. A program is known by the state's layout and shapes and by the
    shapes of the batch.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def of(self, jitted: Any, state: State, batch: Any) -> Any:
        """The program of a jitted function of a state and a batch, compiled if it is new."""
        leaves = [(path, leaf.shape, leaf.dtype) for path, leaf in named_leaves(batch)]
        key = (state.program_key, *leaves)
        if key not in self._compiled:
            self._compiled[key] = refuse_if_it_would_hang(jitted.lower(state, batch).compile())
        return self._compiled[key]


def refuse_if_it_would_hang(compiled: Any) -> Any:
    """A compiled program, unless it would hang."""
    check_branches(collectives(compiled))
    return compiled


def check_branches(found: Iterable[Collective]) -> None:
    """Refuse a program in which the work of one stage contains a permute.

    In a tick, stages take different branches of the program. A permute waits for all devices of its
    group, and those in another branch never join it.
    """
    # Collectives other than permutes have replica groups, in which a stage's devices meet.
    for collective in found:
        # The step's own permutes, between ticks, are outside of any branch.
        is_permute = collective.kind == "collective-permute"
        if not (is_permute and collective.conditional and may_be_in_loss(collective.op_name)):
            continue
        source = collective.op_name.rsplit("/", 1)[-1]
        if collective.sources:
            source = collective.sources[0]
        raise ValueError(
            f"The compiled step has a permute within the work of one stage, from `{source}`, of "
            f"{human_bytes(collective.operand_bytes)} among {collective.group_size} devices: "
            "something there shifts along a dim that is split, as `jnp.roll` and slices do. While "
            "one stage goes forward another goes backward, and a permute waits for both: the step "
            "would hang. Lay that dim out whole before it, `sl.shard(x, ...)` with a name that no "
            "rule splits."
        )


def _stacked_by(parameter: Any, names: dict[str, Any], axis: str) -> str | None:
    """The name of the dim along which a weight is stacked over the stages, if it is."""
    # A weight outside the layers, such as an embedding, is whole on every stage.
    if axis not in spec_axes(parameter.named):
        return None
    # The stages' axis may only split the dim that counts layers.
    dim = stacked_dim(names.get(parameter.path))
    if dim != 0:
        raise ValueError(
            f"`{parameter.path}` of shape {parameter.shape} is laid out as {parameter.named}: the "
            f"stages' axis `{axis}` splits the first dim of stacked weights, which is named "
            f"`{LAYERS}`, and no other."
        )
    return names[parameter.path][dim]
