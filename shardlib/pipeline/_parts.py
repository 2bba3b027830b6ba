"""What the passes of a stage read of the part that they run, and of the loop that it is in."""

from dataclasses import dataclass
from typing import Any

from shardlib.pipeline._layer import Layer
from shardlib.pipeline._loop import Arrays


@dataclass(frozen=True, eq=False)
class LocalInputs:
    """What a stage computes for itself for one pass.

    - `first_layer` is the number of the part's first layer within the loop.
    - `inputs` are those of the cut function, for the microbatch.
    - `shared` is the same for all layers: frozen constants, then shared inputs.
    - `per_layer` has a row for each layer of the part.
    """

    first_layer: Any
    inputs: Arrays
    shared: Arrays
    per_layer: Arrays

    def of_layer(self, slices: Arrays) -> Arrays:
        """The local inputs of one layer, given its slices of `per_layer`."""
        # The arguments of `Loop.layer` end with the frozen constants, the shared inputs and the
        # slices. Before these come those that `StageLoop.layer_weights` gives.
        return [*self.shared, *slices]


@dataclass(frozen=True, eq=False)
class ArrivedGradients:
    """The gradients that arrive at a part going backward, by what they are gradients of.

    - `entering` are those of what the part's last layer handed on. They go backward through the
      layers.
    - `forwarded` are those of passing arrays, and of all rows of stacked outputs. They are sent on
      unchanged: earlier parts read the rows of their own layers. The start of the loop made the
      stacked outputs as zeros, and drops their gradients.
    - `rows` are the rows of the stacked outputs' gradients that belong to the part's own layers.
    """

    entering: Arrays
    forwarded: Arrays
    rows: Arrays


@dataclass(frozen=True, eq=False)
class BackwardPart:
    """What a pass `B` reads for its part, whether it makes all gradients or only those of inputs.

    - `weights` are those of the part's layers.
    - `first_row` is the row of the part's first layer in the stage's stacks, and in their sums.
    - `residual_buffer` and `residual_slot` say where the residuals are.
    """

    loop: int
    local: LocalInputs
    arrived: ArrivedGradients
    weights: Arrays
    first_row: Any
    residual_buffer: Arrays
    residual_slot: Any


@dataclass(frozen=True, eq=False)
class StageLoop:
    """What a stage has of a loop over layers.

    - `layer` is the function of one layer, with its derivatives.
    - `stacks` are the loop's stacked weights. Each has a row for each layer of this stage, part
      after part.
    - `layers_per_part` is how many layers a part has.
    - `trained_constants` and `frozen_constants` are the same for all layers and microbatches, and
      are computed from outer weights. Only the former have gradients.
    """

    layer: Layer
    stacks: Arrays
    layers_per_part: int
    trained_constants: Arrays
    frozen_constants: Arrays

    def layer_weights(self, weights: Arrays) -> Arrays:
        """What a layer takes as weights: the loop's trained constants, and then its own weights."""
        return [*self.trained_constants, *weights]
