"""A step on many meshes against one device: the oracle of every parallelism.

Whatever a strategy does, it may change how a step is computed and not what. So `check_step` runs
the step on one device, which knows nothing of parallelism, then on each mesh from the same start,
and compares all that a step gives, in the order in which a step comes to it. How far a mesh may be
from one device is measured in `_oracle`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import unsharded
from shardlib.layouts._rules import LAYERS, AxisRules
from shardlib.layouts._specs import as_tuple, spec_axes
from shardlib.machine._mesh import format_mesh, make_mesh, parse_axes
from shardlib.modeling._flax import building, take_apart
from shardlib.step._strategy import Strategy
from shardlib.testing._oracle import (
    KINDS,
    Expected,
    Experiment,
    Record,
    Reference,
    Run,
    differences,
    reference,
    wide,
)

MADE_OF_GRADIENTS = ("grad_norm", "first_nonfinite")
"""Metrics that are made of the gradients, which are to blame if these differ."""

_MOST_AXES, _MOST_DEVICES = 8, 2**16  # of the meshes that `mesh_shapes` lists
_OTHERS_NAMED = 6  # arrays that differ besides the first
_ENTRIES_SHOWN = 3  # of the array that differs first


@dataclass(frozen=True)
class Comparison:
    """How far a step on a mesh was from one device, as `check_step` returns it.

    Differences are the largest of an entry over all steps, as a fraction of its array's scale.

    - `mesh`: the axes of the mesh and their sizes, as text.
    - `accumulate`: how many microbatches a step had.
    - `loss`: the difference of the loss and the metrics.
    - `gradients`: that of the gradients.
    - `optimizer_state`: that of the optimizer's state.
    - `parameters`: that of the parameters after the update.
    - `state`: that of the model's other state, such as running means.
    - `randomness`: that of random numbers, which must be 0 unless draws depend on the mesh.
    """

    mesh: str
    accumulate: int
    loss: float
    gradients: float
    optimizer_state: float
    parameters: float
    state: float
    randomness: float


def check_step(
    make_model: Callable[[], Any],
    optimizer: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    batch: Any,
    rules: AxisRules,
    *,
    meshes: Iterable[str] | None = None,
    steps: int = 2,
    tolerance: float | None = None,
    **options: Any,
) -> list[Comparison]:
    """Compare a step on each mesh with one device that takes the whole batch.

    Compared after every step: the loss and metrics, the gradients, the optimizer's state, the
    parameters, the model's other state, and what the loss function's key and the model's own random
    streams draw.
    Random numbers and whole numbers must be equal; of any other array the largest difference of an
    entry may be

    - 1e-5 of the array's scale; where the step computes in 16 bits, a unit in their last place,
      2^-7 in bfloat16 and 2^-10 in float16. The scale is the array's largest entry, or a hundredth
      of the largest of all arrays of its kind where that is more, since what is zero but for
      rounding has no scale;
    - or, where that is more, four times as far as rounding moves the array on one device. That is
      measured: one device takes the same steps three times more, from parameters changed at random
      as rounding to the narrowest dtype in which the step computes would change them, by half a
      unit in its last place, or by a unit of their own.

    With `tolerance` it is that much of the scale, and nothing is measured: for what is inexact on
    purpose, such as a compressed exchange.

    An `AssertionError` names the mesh, the first step at which anything differs, and what differs
    first in it, by how much, with its worst entries.

    Args:
        make_model: makes the model, as for `init`.
        optimizer: the optimizer.
        loss_fn: the loss, as for `train_step`.
        batch: the batch of every step.
        rules: the rules of every mesh.
        meshes: by default all ways to arrange the devices along the axes that the rules, or the
            parameters' own specs, mention, with as many stages as a `pipeline` has.
        steps: how many steps are taken and compared.
        tolerance: see above.
        options: `trainable`, as `init` takes it, and other fields of `Strategy`, such as `remat`,
            `exchange` or `pipeline`. `accumulate` may be a list of numbers, each of which is tried
            on each mesh; statistics of the batch, as of a batch norm, differ then, since each
            microbatch is a batch of its own. With `draws="by_mesh"` random numbers are not
            compared, and what is made of them may differ.

    >>> import jax.numpy as jnp
    >>> rules = AxisRules(batch="data", embed=None, mlp="model")
    >>> loss = lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2)
    >>> make = lambda: {"w": jnp.ones((3, 4))}
    >>> check_step(make, optax.adam(0.1), loss, np.ones((8, 3), "f"), rules,
    ...     meshes=["data=8,model=1"])
    ... # doctest: +ELLIPSIS
    [Comparison(mesh='data=8,model=1', accumulate=1, loss=...)]
    """
    if not callable(make_model):
        takes = "a function that makes the model"
        raise check.refusal("check_step", "make_model", make_model, takes)
    check.function("check_step", "loss_fn", loss_fn, "a function of model, batch and key")
    check.kind("check_step", "rules", rules, AxisRules, "`AxisRules`, such as `sl.rules.data`")
    if not hasattr(optimizer, "update"):
        raise check.refusal("check_step", "optimizer", optimizer, "an optax optimizer")
    steps = check.whole("check_step", "steps", steps, "a number of steps", least=1)
    takes = 'a list of meshes, such as `["data=8"]`, or None for all of them'
    if isinstance(meshes, str):
        raise check.refusal("check_step", "meshes", meshes, takes)
    check.kind("check_step", "meshes", meshes, Iterable, takes, optional=True)
    _check_options(options)
    trainable = options.pop("trainable", None)
    microbatches = options.pop("accumulate", 1)
    if isinstance(microbatches, int | np.integer):
        microbatches = [int(microbatches)]
    takes = "a number of microbatches, or a list of such numbers"
    check.kind("check_step", "accumulate", microbatches, Iterable, takes)
    microbatches = list(microbatches)
    if not microbatches:
        raise check.refusal("check_step", "accumulate", microbatches, takes)
    if tolerance is not None and not _is_tolerance(tolerance):
        raise ValueError(
            f"`check_step(tolerance={tolerance!r})` takes a number from 0 up, or None."
        )
    shapes: list[str] | None = None
    if meshes is not None:
        shapes = list(meshes)
    axes = _mentioned_axes(make_model, trainable, rules, shapes)
    if shapes is None:
        shapes = _default_shapes(axes, rules, options.get("pipeline"))
    if not shapes or not axes:
        raise ValueError(
            "`check_step` has no mesh to compare: no rule and no parameter mentions an axis, or "
            "`meshes` is empty."
        )

    if getattr(options.get("exchange"), "apart", ()):
        raise ValueError(
            f"`check_step(exchange={options['exchange']})`: workers that train apart do not take "
            "the steps of one device. Compare one worker, by leaving `exchange` out."
        )
    # One device first: what it gives is the reference for every mesh.
    experiment = Experiment(make_model, optimizer, loss_fn, batch, steps, trainable)
    expected = reference(Run(experiment, _single_device(axes, rules, options)), tolerance)
    comparisons = []
    for shape, count in itertools.product(shapes, microbatches):
        strategy = _strategy_of(shape, rules, {**options, "accumulate": count})
        comparisons.append(_compared(experiment, strategy, expected))
    return comparisons


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that are no fields of a strategy, and `mesh` in place of `meshes`."""
    if "mesh" in options:
        raise ValueError(
            f"`check_step(mesh={check.shown(options['mesh'])})`: name the meshes to compare in a "
            "list, `meshes=[...]`."
        )
    known = {field.name for field in fields(Strategy)} | {"trainable"}
    for name in options:
        if name not in known:
            raise TypeError(
                f"check_step() got an unexpected keyword argument {name!r}; options are "
                "`trainable` and fields of `sl.Strategy`."
            )


def _strategy_of(shape: str, rules: AxisRules, options: Mapping[str, Any]) -> Strategy:
    """The strategy on a mesh, which has the first devices if it needs fewer than there are."""
    # A strategy that is given a mesh takes no `dcn`: it lays its own text out over slices.
    mesh: Any = shape
    if not options.get("dcn"):
        mesh = make_mesh(shape, devices=_first_devices(shape))
    return Strategy(mesh=mesh, rules=rules, **options)


def _compared(experiment: Experiment, strategy: Strategy, expected: Any) -> Comparison:
    """Run an experiment on a strategy's mesh, and compare what it gives with the reference.

    A difference is an `AssertionError` that says where it is.
    """
    mesh, count = format_mesh(strategy.device_mesh), strategy.accumulate
    by_mesh = strategy.draws == "by_mesh"
    records = Run(experiment, strategy).records()
    largest, mismatches = _compare(records, expected, by_mesh=by_mesh)
    if mismatches:
        where = f"on the mesh `{mesh}` with accumulate={count}"
        raise AssertionError(_describe(mismatches, where, by_mesh=by_mesh))
    return Comparison(mesh, count, **largest)


def _is_tolerance(value: Any) -> bool:
    """Whether something is a finite number from zero up, and no bool."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_number and bool(0 <= value < math.inf)


def _default_shapes(axes: tuple[str, ...], rules: AxisRules, schedule: Any) -> list[str]:
    """All meshes of all devices along these axes; with a pipeline, those with as many stages."""
    if not axes:
        return []
    shapes = mesh_shapes(axes)
    if schedule is None:
        return shapes
    # The axis over which the rules split the stacked layers.
    first_choice, *_ = dict(rules.items())[LAYERS]
    stages_axis = as_tuple(first_choice)[0]
    fitting: list[str] = []
    for shape in shapes:
        if parse_axes(shape)[stages_axis] == schedule.stages:
            fitting.append(shape)
    return fitting


def _single_device(axes: tuple[str, ...], rules: AxisRules, options: Mapping[str, Any]) -> Strategy:
    """The strategy of the oracle: the same on a mesh of one device, where nothing is exchanged.

    Options that say how devices divide the work among them are left out. What the others mean for
    the numbers, such as a precision, they mean on one device too.
    """
    left_out = {"exchange", "dcn", "zero", "pipeline", "combine_passes"}
    if options.get("remat") == "stage":  # of a pipeline
        left_out.add("remat")
    kept: dict[str, Any] = {}
    for name, value in options.items():
        if name not in left_out:
            kept[name] = value
    mesh = make_mesh(dict.fromkeys(axes, 1), devices=jax.devices()[:1])
    return Strategy(mesh=mesh, rules=rules, **kept)


def _first_devices(shape: str) -> list[Any] | None:
    """As many devices as a mesh has; None, which is all of them, where it has a -1 to fill in."""
    sizes = parse_axes(shape).values()
    if -1 in sizes:
        return None
    return jax.devices()[: math.prod(sizes)]


def mesh_shapes(axes: Sequence[str], devices: int | None = None) -> list[str]:
    """Every way to arrange all devices along the axes.

    Each is text that `make_mesh` takes. Without `devices` it is as many as JAX has.

    >>> mesh_shapes(["data", "model"], devices=4)
    ['data=1,model=4', 'data=2,model=2', 'data=4,model=1']
    """
    takes = f"a list of axes' names, of one to {_MOST_AXES}"
    if not isinstance(axes, list | tuple) or not 0 < len(axes) <= _MOST_AXES:
        raise check.refusal("mesh_shapes", "axes", axes, takes)
    for axis in axes:
        check.text("mesh_shapes", "axes", axis, takes)
    check.whole(
        "mesh_shapes",
        "devices",
        devices,
        "a number of devices",
        least=1,
        most=_MOST_DEVICES,
        optional=True,
    )
    # All devices there are, unless a number is asked for.
    count = len(jax.devices()) if devices is None else int(devices)
    return [",".join(sizes) for sizes in _arrangements(tuple(axes), count)]


def _arrangements(axes: tuple[str, ...], devices: int) -> Iterator[tuple[str, ...]]:
    """All sizes of axes whose product is the number of devices, each as texts `name=size`.

    The first axis takes each divisor in turn, and the other axes what is left.
    """
    # By recursion over the axes: the last one takes whatever is left.
    first, *others = axes
    if not others:
        yield (f"{first}={devices}",)
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            for remaining in _arrangements(tuple(others), devices // size):
                yield f"{first}={size}", *remaining


def _mentioned_axes(
    make_model: Any, trainable: Any, rules: AxisRules, shapes: Sequence[str] | None
) -> tuple[str, ...]:
    """All mesh axes that anything mentions, each once.

    First those of the rules, then those of parameters whose names are a `PartitionSpec`, then those
    of the meshes that were asked for. The model is traced for its names, and not built.
    """
    names_by_path: dict[str, Any] = {}

    def build() -> None:
        names_by_path.update(take_apart(make_model(), trainable)[1])

    with building(), unsharded():
        jax.eval_shape(build)
    # Axes of rules come first, in the order in which the rules name them.
    axes = list(rules.axes)
    for names in names_by_path.values():
        if isinstance(names, PartitionSpec):
            axes.extend(spec_axes(names))
    # A mesh that is asked for may have axes that nothing mentions.
    for shape in shapes or ():
        axes.extend(parse_axes(shape))
    return tuple(dict.fromkeys(axes))


class _Mismatch(NamedTuple):
    """An array of a step on a mesh beside that on one device, and by how much entries differ."""

    step: int
    expected: Expected
    actual: np.ndarray
    differences: np.ndarray

    @property
    def name(self) -> str:
        """The kind and the path of the array, for messages."""
        return f"{self.expected.kind.replace('_', ' ')} `{self.expected.path}`"

    @property
    def relative(self) -> float:
        """The largest difference of an entry, as a fraction of the array's scale."""
        return float(np.max(self.differences)) / self.expected.scale

    @property
    def is_too_far(self) -> bool:
        """Whether an entry is farther from one device than rounding allows; nan is too far."""
        return not np.max(self.differences) <= self.expected.allowed

    @property
    def order(self) -> tuple[int, bool, float]:
        """What sorts mismatches of a step by what is to blame.

        What comes first in a step is first. Of one kind, metrics that are made of it are last, and
        what is farthest off is first, with nan before all.
        """
        kind = self.expected.kind
        made_of_gradients = kind == "loss" and self.expected.path in MADE_OF_GRADIENTS
        if made_of_gradients:
            kind = "gradients"
        return KINDS.index(kind), made_of_gradients, -np.nan_to_num(self.relative, nan=np.inf)


def _compare(
    records: list[Record], expected_by_step: Reference, *, by_mesh: bool
) -> tuple[dict[str, float], list[_Mismatch]]:
    """The largest relative difference of each kind, and what is too far off, the worst first.

    The comparison ends with the first step in which anything is too far off, since all later ones
    start from it. Under `by_mesh`, random numbers may differ.
    """
    largest = dict.fromkeys(KINDS, 0.0)
    for step, (record, arrays) in enumerate(zip(records, expected_by_step, strict=True)):
        mismatches = []
        for expected in arrays:
            actual = getattr(record, expected.kind)[expected.path]
            compared = _Mismatch(step, expected, actual, differences(actual, expected.values))
            # The largest difference is kept where all agree, too: it shows how far from the limit a
            # strategy is.
            largest[expected.kind] = max(largest[expected.kind], compared.relative)
            may_differ = by_mesh and expected.kind == "randomness"
            if compared.is_too_far and not may_differ:
                mismatches.append(compared)
        if mismatches:
            # Later steps start from other numbers, and differ for that alone.
            return largest, sorted(mismatches, key=lambda mismatch: mismatch.order)
    return largest, []


def _describe(mismatches: list[_Mismatch], where: str, *, by_mesh: bool) -> str:
    """What differs first and by how much, its worst entries, and what else differs in that step."""
    first, *others = mismatches
    expected = first.expected
    lines = [
        f"{first.name} of step {first.step} {where} differs from one device by "
        f"{first.relative:.1e} of its scale, {expected.scale:.3g}, where "
        f"{expected.allowed / expected.scale:.1e} is allowed for rounding. {_worst_entries(first)}"
    ]
    if others:
        lines.append(f"In the same step differ {_names_of(others)}.")
    # Where the oracle itself is nan, nothing can be compared.
    if not np.isfinite(wide(expected.values)).all():
        lines.append("On one device it is not finite either: compare a step that is.")
    if by_mesh:
        lines.append(
            'By `Strategy(draws="by_mesh")` random numbers may differ from mesh to mesh, and so '
            "may all that is made of them: compare with keys of threefry and without that choice, "
            "or without dropout."
        )
    return "\n".join(lines)


def _names_of(mismatches: list[_Mismatch]) -> str:
    """The first few of some mismatches, and how many more there are."""
    named = [f"{other.name} by {other.relative:.1e}" for other in mismatches[:_OTHERS_NAMED]]
    if len(mismatches) > _OTHERS_NAMED:
        named.append(f"and {len(mismatches) - _OTHERS_NAMED} more")
    return ", ".join(named)


def _worst_entries(mismatch: _Mismatch) -> str:
    """The entries that differ most, each with its index, on the mesh and on one device."""
    expected, actual = mismatch.expected.values, mismatch.actual
    if not expected.ndim:
        return f"It is {_shown(actual)}, and {_shown(expected)} on one device."
    # What is not finite is the worst, and comes first.
    worst_first = np.argsort(-np.nan_to_num(mismatch.differences, nan=np.inf), axis=None)
    entries = []
    for flat in worst_first[:_ENTRIES_SHOWN]:
        index = np.unravel_index(flat, expected.shape)
        entries.append(
            f"{list(map(int, index))} is {_shown(actual[index])}, and "
            f"{_shown(expected[index])} on one device"
        )
    return f"The worst of {expected.size:,} entries: {'; '.join(entries)}."


def _shown(value: Any) -> str:
    """A number in eight digits; NumPy cannot format floats of fewer than 32 bits that way."""
    if value.dtype.itemsize < 4:
        value = value.astype(np.float32)
    return f"{value:.8g}"
