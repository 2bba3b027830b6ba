"""The activations of a step by name: what each takes of a device, and what it costs not to keep it.

    traced loss  ->  its marked blocks  ->  what each keeps by its policy  ->  a row for each name

Sizes are those of the arrays, which a compiler may pad. They are of one microbatch, for that is
what is alive at a time; operations are of a whole step on all devices.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardlib._tree import named_leaves
from shardlib.layouts._checkpoint_policies import LayersPolicy, policy_of
from shardlib.layouts._remat_policy import Remat, RematBudget, RematByBlock
from shardlib.step._state import State, combine
from shardlib.step._step import Step, traced_loss, with_remat
from shardlib.step._strategy import Strategy
from shardlib.tracing._block_activations import INPUT, ON_HOST, BlockActivations
from shardlib.tracing._block_paths import paths_of_blocks
from shardlib.tracing._block_places import Placed, PlacedLoop, loops_with_parts, placed_blocks
from shardlib.tracing._jaxpr import is_block

KEPT, RECOMPUTED = "kept", "recomputed"


@dataclass(frozen=True)
class Activation:
    """An activation of the marked blocks of a step.

    - `name`: the one that the model gave it, `block input`, or `others` for all without a name.
    - `layer_bytes`: what it takes in one layer for a device, the most of any.
    - `held_bytes`: what it takes of the device in all layers that keep it there.
    - `states`: what becomes of it, and in how many layers: `kept` or `recomputed`, or it is kept
      `on the host` or in an encoding such as `int8`.
    - `spared_flops`: operations that keeping it saves in a step, on all devices, given everything
      else that is kept.
    - `again_flops`: operations that would also be saved by keeping it in the other layers.
    """

    name: str
    layer_bytes: int
    held_bytes: int
    states: tuple[tuple[str, int], ...]
    spared_flops: int
    again_flops: int

    @property
    def layers(self) -> int:
        """How many blocks have it.

        >>> Activation("mlp_up", 64, 128, (("kept", 2), ("recomputed", 6)), 0, 0).layers
        8
        """
        return sum(count for _, count in self.states)

    @property
    def state(self) -> str:
        """What becomes of it, in words.

        >>> Activation("mlp_up", 64, 128, (("kept", 2), ("recomputed", 6)), 0, 0).state
        'kept in 2, recomputed in 6'
        """
        if len(self.states) == 1:
            return self.states[0][0]
        return ", ".join(f"{state} in {count}" for state, count in self.states)


def activation_values(activation: Activation) -> dict[str, Any]:
    """A row as plain values, for JSON.

    Its states become a dict, since JSON would make a list of each pair.

    >>> activation_values(Activation("context", 64, 128, (("kept", 2),), 512, 0))["states"]
    {'kept': 2}
    """
    return dataclasses.asdict(activation) | {"states": dict(activation.states)}


def activations_of(step: Any, state: Any, batch: Any) -> tuple[Activation, ...]:
    """The activations of a step of ours, in the order in which its blocks make them.

    There are none of a step without marked blocks, and of a pipeline, where the schedule says how
    many microbatches are alive.
    """
    if not isinstance(step, Step) or step.strategy.pipeline is not None:
        return ()
    # A budget says how much, and not yet what: the step finds that first, as when it runs.
    if isinstance(step.strategy.remat, RematBudget):
        step = with_remat(step, step.fitted_remat(state, batch).best.remat)
    # Sizes are of one microbatch, products of a whole step on all devices.
    rows = _Rows(products_scale(step.strategy))
    kept = step.strategy.kept_by_blocks
    if kept is None:
        # Such a step has no marks in its trace, so that another one is traced for it. Its policy is
        # that of the step.
        rows.add_all(_loops_that_keep_all(step, state, batch), policy_of(None))
    elif kept.dropped:
        # Where parts are dropped, blocks have no mark of their own in the trace, only the parts do.
        loss = traced_loss(step, state, batch)
        rows.add_all(loops_with_parts(loss, weights_of(state)), policy_of(None))
    elif kept.chain is not None:
        rows.add_chain(placed_of(step, state, batch), kept.chain)
    else:
        values = _values_by_block(step, state, batch, kept)
        rows.add_each(placed_of(step, state, batch), values)
    return rows.activations()


def _values_by_block(step: Step, state: State, batch: Any, kept: Any) -> list[Any]:
    """What each block keeps, in the order of calls, where they do not all keep the same.

    There are none where all blocks keep the same: then each has it as its own policy in the trace.
    """
    if not isinstance(kept, RematByBlock):
        return []
    paths = [path for path, _ in named_leaves(combine(state.params, state.frozen))]
    jaxpr = traced_loss(step, state, batch).jaxpr
    return kept.of_blocks(paths_of_blocks(jaxpr, paths, _is_told_by_place))


def _is_told_by_place(equation: Any) -> bool:
    return is_block(equation) and isinstance(equation.params["policy"], LayersPolicy)


def placed_of(step: Step, state: Any, batch: Any) -> list[PlacedLoop]:
    """The marked blocks of a step, in the order of their calls."""
    return placed_blocks(traced_loss(step, state, batch), weights_of(state))


def loops_of_step(step: Step, state: Any, batch: Any) -> list[PlacedLoop]:
    """The marked blocks of a step, whatever they keep; refused if there are none.

    With `remat="none"` a step marks no block in its trace. So it is traced as if each kept its
    inputs, which marks all of them.
    """
    return placed_of(with_remat(step, Remat()), state, batch)


def weights_of(state: Any) -> int:
    """How many parameters a state has: trained and frozen ones.

    A traced loss takes them as its first inputs, so that the number says which inputs they are.
    """
    return len(jax.tree.leaves((state.params, state.frozen)))


def _loops_that_keep_all(step: Step, state: Any, batch: Any) -> list[PlacedLoop]:
    """The blocks of a step that marks none, since they keep everything."""
    try:
        return placed_of(with_remat(step, "full"), state, batch)
    except ValueError:
        # The step itself was traced. So what is refused is to compute its blocks again: it has
        # none, or none that can be.
        return []


def products_scale(strategy: Strategy) -> int:
    """How often a step computes a block that the trace calls once, on all devices.

    A trace is of one microbatch on one device of the data axes. Other axes do not count: their
    devices share the products of a layer, and the trace has these whole.
    """
    sizes = strategy.device_mesh.shape
    return strategy.microbatches * math.prod(sizes[axis] for axis in strategy.data_axes)


class _Row:
    """A name, while the layers that have it are gone through."""

    def __init__(self) -> None:
        self.layer_bytes = self.held_bytes = self.spared_flops = self.again_flops = 0
        self.states: dict[str, int] = {}

    def add(self, state: str, layers: int, size: int, flops: int) -> None:
        """Add layers of one state.

        An activation on the host spares as much computing as one on the device, and takes nothing
        of the device.
        """
        self.layer_bytes = max(self.layer_bytes, size)
        self.states[state] = self.states.get(state, 0) + layers
        if state == RECOMPUTED:
            self.again_flops += layers * flops
        else:
            self.held_bytes += layers * size * (state != ON_HOST)
            self.spared_flops += layers * flops


class _Rows:
    """The rows of a table while they are made; `scale` is how often a block counts in a step."""

    def __init__(self, scale: int) -> None:
        self.scale = scale
        self.rows: dict[str, _Row] = {}
        self.kinds: dict[Any, BlockActivations] = {}

    def _kind(self, placed: Placed) -> BlockActivations:
        """The activations of a block; those that compute the same are looked at once."""
        if placed.key not in self.kinds:
            self.kinds[placed.key] = BlockActivations(placed)
        return self.kinds[placed.key]

    def _add(self, name: str, state: str, layers: int, size: int, flops: int) -> None:
        self.rows.setdefault(name, _Row()).add(state, layers, size, self.scale * flops)

    def add_policy(self, placed: Placed, policy: Any, layers: int) -> None:
        """Add blocks of one kind that keep the same."""
        for held in self._kind(placed).held(policy):
            state = (held.form or KEPT) if held.kept else RECOMPUTED
            self._add(held.name, state, layers, held.size, held.flops)

    def add_all(self, loops: Sequence[PlacedLoop], policy: Any) -> None:
        """Add blocks that all keep the same, whatever they say, and their parts that do not."""
        for block in _blocks(loops):
            self.add_policy(block, policy, block.times)
            for part in self._kind(block).parts():
                name = f"part {part.name}"
                self._add(name, RECOMPUTED, block.times, part.size, part.flops)

    def add_each(self, loops: Sequence[PlacedLoop], values: Sequence[Any]) -> None:
        """Add blocks that keep what they say, or the next of some values."""
        remaining = iter(values)
        for loop in loops:
            # Values are in the order of calls, turn by turn. Turns that keep the same are counted,
            # so that each kind of block is looked at once, and not once for each of a hundred
            # layers.
            counts: dict[tuple[int, Any], int] = {}
            for _ in range(loop.times):
                for number, block in enumerate(loop.blocks):
                    policy = block.policy
                    if isinstance(policy, LayersPolicy):
                        policy = policy_of(next(remaining))
                    counts[number, policy] = counts.get((number, policy), 0) + 1
            for (number, policy), layers in counts.items():
                self.add_policy(loop.blocks[number], policy, layers)

    def add_chain(self, loops: Sequence[PlacedLoop], chain: Any) -> None:
        """Add loops that keep the inputs of few of their blocks."""
        for loop in loops:
            table = chain.table(loop.times)
            for block in loop.blocks:
                self._add_of_chain(self._kind(block), loop.times, table)

    def _add_of_chain(self, kind: BlockActivations, times: int, table: Any) -> None:
        for held in kind.held(None):
            # A chain keeps inputs only, and all else runs again in every layer.
            if held.name != INPUT:
                self._add(held.name, RECOMPUTED, times, held.size, held.flops)
                continue
            kept = len(table.kept)
            self._add(INPUT, KEPT, kept, held.size, 0)
            if kept < times:
                # Inputs that are not kept are made again by other blocks, some more than once.
                again = table.evaluations * kind.forward_flops // (times - kept)
                self._add(INPUT, RECOMPUTED, times - kept, held.size, again)

    def activations(self) -> tuple[Activation, ...]:
        """The rows as they are told."""
        found = []
        for name, row in self.rows.items():
            sizes = row.layer_bytes, row.held_bytes
            flops = row.spared_flops, row.again_flops
            found.append(Activation(name, *sizes, tuple(row.states.items()), *flops))
        return tuple(found)


def _blocks(loops: Sequence[PlacedLoop]) -> list[Placed]:
    blocks: list[Placed] = []
    for loop in loops:
        blocks += loop.blocks
    return blocks
