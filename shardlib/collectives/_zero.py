"""ZeRO: which arrays of a run are split over axes of data and of sequences, and made whole again.

At rest everything is split, from stage 1 on: parameters, and optimizer state as its parameters are.
The stage says what is whole during a step:

    stage 1    parameters and gradients
    stage 2    parameters
    stage 3    one layer's parameters
"""

import re
from dataclasses import dataclass
from typing import Any

from shardlib.checks import _arguments as check
from shardlib.collectives._sums import BUCKET_BYTES
from shardlib.layouts._specs import axes_without

STAGES: dict[str, int] = {
    "NO_SHARD": 0,
    "SHARD_GRAD_OP": 2,
    "FULL_SHARD": 3,
    "HYBRID_SHARD": 3,
    "_HYBRID_SHARD_ZERO2": 2,
}
"""The stages by the names that FSDP has for them. The hybrid ones split within the fast network,
and repeat across the slow one.
"""


@dataclass(frozen=True)
class Zero:
    r"""ZeRO (FSDP): how the state of a run is split over the axes of data and of sequences.

    - `stage`: 0 splits nothing. 1 splits parameters and optimizer state at rest; in a step,
      parameters are gathered once and the summed gradient is scattered. 2 also never holds a whole
      gradient: each layer's is scattered as soon as it is there. 3 also gathers each layer's
      parameters only while it computes, forward and again backward.
    - `axes`: over which of the axes of data and of sequences; by default all of them that the
      exchange does not take. Over the others state is repeated.
    - `small`: parameters of at most so many elements, per layer where layers are stacked, stay
      whole.
    - `stacked`: names of dims along which layers are stacked, besides those that end in `layers`.
      They are not split.
    - `layers`: for layers that are not scanned, a pattern of paths such as `r"layers/\d+"`:
      parameters for which it finds the same text are gathered together.
    - `bucket_bytes`: of arrays that are larger, in bytes, stages 1 and 2 gather one layer after the
      other; 32 MiB unless given.
    - `strict`: refuse an optimizer with state, other than scalars, that can be related to no
      parameter.

    >>> Zero(3, axes=("data",)).stage
    3
    """

    stage: int
    axes: tuple[str, ...] | None = None
    small: int = 2**16
    stacked: tuple[str, ...] = ("layers",)
    layers: str | None = None
    bucket_bytes: int = BUCKET_BYTES
    strict: bool = False

    def __post_init__(self) -> None:
        if type(self.stage) is not int or not 0 <= self.stage <= 3:
            raise ValueError(
                f"`Zero(stage={check.shown(self.stage)})`: the stages are 0 (nothing is split), 1 "
                "(optimizer state), 2 (gradients too) and 3 (parameters too)."
            )
        check.texts("Zero", "axes", self.axes, 'a tuple of names, `axes=("data",)`', optional=True)
        check.texts("Zero", "stacked", self.stacked, 'a tuple of names, `stacked=("layers",)`')
        check.assign(
            self,
            small=check.whole("Zero", "small", self.small, "a number of elements", least=0),
            bucket_bytes=check.whole(
                "Zero", "bucket_bytes", self.bucket_bytes, "a number of bytes", least=1
            ),
            strict=check.boolean("Zero", "strict", self.strict),
        )
        self._check_layers()

    def _check_layers(self) -> None:
        """Refuse a pattern that cannot tell the layers of a model apart."""
        check.pattern("Zero", "layers", self.layers, optional=True)
        # What has no special character matches itself only.
        if self.layers is not None and re.escape(self.layers) == self.layers:
            raise ValueError(
                f"`Zero(layers={check.shown(self.layers)})` is plain text, and would find the same "
                "text in the path of every layer, so that all layers were gathered together. Write "
                r"a pattern that tells layers apart, `layers/\d+`."
            )

    def group(self, path: str) -> str | None:
        """The layer that a parameter belongs to by its path: the text that `layers` finds there.

        None where it finds none, or where there is no pattern.
        """
        if not self.layers:
            return None
        match = re.search(self.layers, path)
        if match is None:
            return None
        return match[0]


def resolve_zero(
    value: Any,
    crossing: tuple[str, ...],
    data_axes: tuple[str, ...],
    sequence_axes: tuple[str, ...] = (),
) -> Zero:
    """The `Zero` that `Strategy(zero=...)` stands for, checked against the axes there are.

    `value` is a stage, one of FSDP's names, or a `Zero`. `crossing` are the axes that cross the
    slow network; `data_axes` and `sequence_axes` are those over which state can be split.
    """
    if isinstance(value, str):
        zero = _zero_of_name(value, crossing, (*data_axes, *sequence_axes))
    elif isinstance(value, Zero):
        zero = value
    elif type(value) is int and value in range(4):
        zero = Zero(value)
    else:
        raise check.refusal(
            "Strategy", "zero", value, "a stage, 0 to 3, one of FSDP's names, or a `sl.Zero`"
        )
    if zero.stage and not data_axes:
        raise ValueError(
            f"`Strategy(zero={value!r})` splits state over the axes of data, and no axis splits "
            "the batch and nothing else: the partitioner has them all. Give `batch` an axis of its "
            "own in the rules."
        )
    for axis in zero.axes or ():
        if axis not in (*data_axes, *sequence_axes):
            of_sequences = ""
            if sequence_axes:
                of_sequences = f", nor of those of sequences {sequence_axes}"
            raise ValueError(
                f"`Zero(axes={zero.axes})`: `{axis}` is not one of the data axes "
                f"{data_axes}{of_sequences}."
            )
    return zero


def _zero_of_name(name: str, crossing: tuple[str, ...], axes: tuple[str, ...]) -> Zero:
    """The `Zero` that FSDP calls by a name; `axes` are those over which state can be split.

    A hybrid one needs both kinds of axes: some to split over, which stay within the fast network,
    and some to repeat over, which cross the slow one.
    """
    if name not in STAGES:
        raise ValueError(
            f"`Strategy(zero={check.shown(name)})`: FSDP's names are {', '.join(STAGES)}; or "
            "give a stage, 0 to 3."
        )
    if "HYBRID" not in name:
        return Zero(STAGES[name])
    # A hybrid splits within the fast network, and has a copy on each side of the slow one.
    within = axes_without(axes, crossing)
    if within in ((), axes):
        problem = "none stays within"
        if within:
            problem = "none crosses"
        raise ValueError(
            f"`Strategy(zero={name!r})` splits within the fast network and repeats across the "
            f"slow one, and of the axes {axes} {problem}. Say which cross, "
            f'`dcn="pod"`, or over which to split: `zero=sl.Zero({STAGES[name]}, axes=(...))`.'
        )
    return Zero(STAGES[name], axes=within)
