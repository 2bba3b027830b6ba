"""What each stage of ZeRO would cost a step, by formula: what it sends, against what it holds.

    stage    sends per step, over n devices            holds besides what is at rest
    1        (n - 1) / n (weights + gradients)         weights, sums of gradients
    2        (n - 1) / n (weights + M gradients)       weights, its part of the sums
    3        (n - 1) / n M (2 weights + gradients)     its part of the sums

for M microbatches. Stage 3 gathers weights for the forward pass, and again for the backward pass.

Over axes of sequences gradients are scattered in every microbatch, whatever the stage, in the dtype
of computation: n devices are then those along the axes of data, which exchange the part that is
left of a gradient.
"""

from dataclasses import dataclass

import jax

from shardlib._tree import named_leaves
from shardlib.layouts._specs import axes_without, parts_over, spec_axes
from shardlib.step._state import State
from shardlib.step._strategy import Strategy


@dataclass(frozen=True)
class Price:
    """What a stage of ZeRO costs a device in a step, by formula.

    - `stage`: the stage, 1 to 3.
    - `sent_bytes`: what the device sends over the axes that ZeRO splits over.
    - `held_bytes`: what it holds besides what is at rest: copies of parameters and sums of
      gradients. In addition, stage 3 holds the parameters of one layer at a time.
    - `chosen`: whether it is the stage of the step that was planned.
    """

    stage: int
    sent_bytes: int
    held_bytes: int
    chosen: bool


@dataclass(frozen=True)
class _Sizes:
    """What stages of ZeRO send and hold for one parameter that they split.

    It is split over so many devices along axes of data, and so many along those of sequences. The
    others are bytes of what a device has of the parameter before it is split: of its weights and
    its gradient in the dtype in which it is used, of the gradient as it is sent, and of the sums of
    gradients before and after they are sent. A frozen parameter has weights alone.
    """

    over_data: int
    over_sequences: int
    weight: float
    gradient: float = 0
    wire: float = 0
    summed: float = 0
    summed_part: float = 0

    def sent(self, stage: int, count: int) -> float:
        """What a device sends in a step of `count` microbatches, under a stage of ZeRO.

        An exchange sends all but the device's own share. Stage 1 sends weights and gradients once a
        step, stage 2 gradients for each microbatch, and stage 3 weights twice for each besides.
        """
        # A ring sends each part to all others, and a device has one part already.
        gathers = 2 * count if stage == 3 else 1
        gathered = gathers * _others(self.over_data * self.over_sequences) * self.weight
        # The partitioner scatters what the backward pass gives, and the exchange what is left.
        by_partitioner = count * _others(self.over_sequences) * self.gradient
        exchanges = 1 if stage == 1 else count
        exchanged = exchanges * _others(self.over_data) * self.wire / self.over_sequences
        return gathered + by_partitioner + exchanged

    def held(self, stage: int) -> float:
        """What a device holds besides what is at rest: copies of weights, sums of gradients."""
        summed_part = self.summed_part / (self.over_data * self.over_sequences)
        if stage == 1:
            return self.weight + self.summed / self.over_sequences
        if stage == 2:
            return self.weight + summed_part
        return summed_part


def _others(devices: int) -> float:
    """The share that all but one of some devices have."""
    return (devices - 1) / devices


def prices(state: State, strategy: Strategy) -> tuple[Price, ...]:
    """What each stage of ZeRO would cost a step, its own stage among them.

    The result is empty for a step without ZeRO. Parameters that are not split, since they are small
    or their dims do not allow it, cost the same under every stage and are left out.
    """
    zero = strategy.sharding
    if not zero.stage:
        return ()
    sizes = _sizes_of_split(state, strategy)
    # Under a pipeline the others would send in every tick, and are refused.
    # All three are listed, so that they can be compared.
    stages = (1, 2, 3) if strategy.pipeline is None else (1,)
    result = []
    for stage in stages:
        sent = held = 0.0
        for size in sizes:
            sent += size.sent(stage, strategy.microbatches)
            held += size.held(stage)
        result.append(Price(stage, round(sent), round(held), chosen=stage == zero.stage))
    return tuple(result)


def _sizes_of_split(state: State, strategy: Strategy) -> list[_Sizes]:
    """The sizes of those parameters that ZeRO splits."""
    dtypes, count = strategy.dtypes, strategy.microbatches
    mesh_shape = strategy.device_mesh.shape
    parameters = [*named_leaves(state.params), *named_leaves(state.frozen)]
    splits = {**state.layout.splits(state.params), **state.layout.splits(state.frozen)}
    trained = {path for path, _ in named_leaves(state.params)}
    sizes = []
    for path, leaf in parameters:
        split = splits[path]
        if not split.is_split:
            continue
        sequence_axes = tuple(further.axis for further in split.further)
        axes = (*split.axes, *sequence_axes)
        # Other axes, such as those of tensor parallelism, split the parameter already.
        others = axes_without(spec_axes(split.spec), axes)
        size = leaf.size / parts_over(mesh_shape, others)
        compute, reduced = dtypes.of(path, leaf.dtype), dtypes.reduced(leaf.dtype)
        if path not in trained:
            over = parts_over(mesh_shape, split.axes), parts_over(mesh_shape, sequence_axes)
            sizes.append(_Sizes(*over, weight=size * compute.itemsize))
            continue
        # Only over several microbatches are gradients summed up in a dtype of their own.
        summed, summed_part = jax.numpy.dtype(compute), reduced
        if count > 1:
            summed, summed_part = dtypes.accumulated(compute), dtypes.accumulated(reduced)
        sizes.append(
            _Sizes(
                parts_over(mesh_shape, split.axes),
                parts_over(mesh_shape, sequence_axes),
                weight=size * compute.itemsize,
                gradient=size * compute.itemsize,
                wire=size * dtypes.sent(leaf.dtype).itemsize,
                summed=size * summed.itemsize,
                summed_part=size * summed_part.itemsize,
            )
        )
    return sizes
