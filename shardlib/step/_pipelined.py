"""What takes the place of microbatches one after the other where layers are the stages of a
pipeline.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from shardlib._text import human_bytes
from shardlib._tree import named_leaves
from shardlib.compiled._collectives import Collective, collectives
from shardlib.layouts._rules import LAYERS, spec_axes
from shardlib.pipeline._cut import cut
from shardlib.pipeline._execute import Executor
from shardlib.pipeline._program import program_of
from shardlib.step._layer_order import loops_of, stacked_dim
from shardlib.step._strategy import Strategy


class Pipelined:
    """A loss, cut into the parts of a strategy's pipeline; made while a step is traced, manual over
    data and stages.

    `uses` are those of all parameters, `held` what is held of each all through, `names` of their
    dims by path; `inputs(number)` is what `total(params, ...)` takes besides for a microbatch.
    """

    def __init__(
        self,
        total: Callable[..., Any],
        strategy: Strategy,
        uses: Any,
        params: Any,
        names: dict[str, Any],
        inputs: Callable[[Any], tuple[Any, ...]],
    ) -> None:
        assert strategy.stage_axis is not None and strategy.pipeline is not None
        self.strategy, self.axis, self.schedule = strategy, strategy.stage_axis, strategy.pipeline
        self.uses, treedef = jax.tree.flatten(uses)
        self.stored = treedef.flatten_up_to(params)
        self.held = [use.start(one) for use, one in zip(self.uses, self.stored, strict=True)]
        self.leaves, of_inputs = jax.tree.flatten(inputs(0))
        self.rest = of_inputs.unflatten(self.leaves)[1]
        self.inputs = lambda number: jax.tree.leaves(inputs(number))
        structures: list[Any] = []

        def function(weights: list[Any], given: list[Any]) -> list[Any]:
            found, structure = jax.tree.flatten(
                total(treedef.unflatten(weights), *of_inputs.unflatten(given))
            )
            structures.append(structure)
            return found

        self.cut = cut(
            function,
            [use.whole for use in self.uses],
            self.leaves,
            [use.path for use in self.uses],
            [_stacked_by(use, names.get(use.path), self.axis) for use in self.uses],
            [not use.frozen for use in self.uses],
            loops_of(strategy, names),
        )
        numbers = jax.tree.unflatten(structures[0], list(range(structures[0].num_leaves)))
        self.means, self.streams, rest = numbers[1]
        of_rest = dict(named_leaves(of_inputs.unflatten(range(len(self.leaves)))[1]))
        for path, output in named_leaves(rest):
            if not self.cut.unchanged(output, of_rest[path]):
                raise ValueError(
                    f"The loss changes `{path}` of the model, as a batch norm does its statistics. "
                    "Under a pipeline microbatches overlap, so that there is no order in which to "
                    "change it: leave it as it is, or use what needs no state, a layer norm say."
                )

    def gradient(self) -> tuple[Any, list[Any]]:
        """What all microbatches give together on this stage, and the gradients of what it holds of
        trained parameters.
        """
        each = zip(self.uses, self.stored, self.held, strict=True)
        sums = [None if use.frozen else use.sums(one, whole) for use, one, whole in each]
        totals, sums = self._executor().gradient(sums)
        outer = [self.held[k] for k in self.cut.outer]
        streams = self.cut.aside(outer, self.leaves, jax.tree.leaves(self.streams))
        if streams is None:
            raise ValueError(
                "The layers change a random stream of the model, and a pipeline has none to hand "
                "from layer to layer. Give them keys made from one, `jax.random.fold_in(key, "
                "number)`."
            )
        found = _like(self.means, totals), _like(self.streams, streams), self.rest
        return found, [one for one, use in zip(sums, self.uses, strict=True) if not use.frozen]

    def value(self) -> Any:
        """What all microbatches give together on this stage, without gradients."""
        return _like(self.means, self._executor(trains=False).measure())

    def _executor(self, trains: bool = True) -> Executor:
        recompute = trains and self.strategy.remat == "stage"
        program = program_of(
            self.schedule, loops=len(self.cut.loops), recompute=recompute, trains=trains
        )
        return Executor(
            self.cut, program, self.axis, self.held, self.inputs, jax.tree.leaves(self.means)
        )


def _like(tree: Any, leaves: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def refuse_if_it_would_hang(compiled: Any) -> Any:
    """A compiled program, unless it would hang."""
    check_branches(collectives(compiled))
    return compiled


def check_branches(found: Iterable[Collective]) -> None:
    """Refuse a program in which a stage's own work has a permute: devices that do other work would
    never join it.
    """
    for one in found:
        if (
            one.kind == "collective-permute"
            and one.conditional
            and ("loss" in one.op_name or not one.op_name)
        ):
            where = f"`{one.sources[0]}`" if one.sources else f"`{one.op_name.rsplit('/', 1)[-1]}`"
            raise ValueError(
                f"The compiled step has a permute within the work of one stage, from {where}, of "
                f"{human_bytes(one.operand_bytes)} among {one.group_size} devices: something there "
                "shifts along a dim that is split, as `jnp.roll` and slices do. While one stage "
                "goes forward another goes backward, and a permute waits for both: the step would "
                "hang. Lay that dim out whole before it, `sl.shard(x, ...)` with a name that no "
                "rule splits."
            )


def _stacked_by(use: Any, names: Any, axis: str) -> str | None:
    """The name of the dim along which a weight is stacked over the stages, if it is."""
    if axis not in spec_axes(use.named):
        return None
    dim = stacked_dim(names)
    if dim != 0:
        raise ValueError(
            f"`{use.path}` of shape {use.shape} is laid out as {use.named}: the stages' axis "
            f"`{axis}` splits the first dim of stacked weights, which is named `{LAYERS}`, and no "
            "other."
        )
    return names[dim]
