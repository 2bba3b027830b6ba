"""A step on many meshes against one device: the oracle of every parallelism."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

from shardlib._tree import map_named, named_leaves
from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import unsharded
from shardlib.layouts._rules import LAYERS, AxisRules, as_tuple, spec_axes
from shardlib.machine._mesh import format_mesh, make_mesh, parse_axes
from shardlib.modeling._batch import weighted_mean
from shardlib.modeling._flax import building, take_apart
from shardlib.modeling._random import is_key
from shardlib.step._init import init
from shardlib.step._layer_order import reordered
from shardlib.step._state import State
from shardlib.step._step import Step, train_step
from shardlib.step._strategy import Strategy

Arrays = dict[str, np.ndarray]
"""What a step gave, of one kind, by path."""

KINDS: tuple[str, ...] = ("randomness", "loss", "gradients", "optimizer_state", "state")
"""In the order in which a step comes to them: what differs first is to blame for what differs
later.
"""

OF_GRADIENTS = ("grad_norm", "first_nonfinite")
"""Metrics that are made of the gradients, which are to blame if these differ."""

FLOAT32_TOLERANCE = 1e-5
_MOST_AXES, _MOST_DEVICES = 8, 2**16  # of the meshes that `mesh_shapes` lists
PERTURBED = 3  # how often all parameters are changed as rounding would
MARGIN = 4  # how many times as far as that moves a result it may be from one device


@dataclass(frozen=True)
class Comparison:
    """How far a mesh was from one device.

    It has the largest difference of each kind, relative as `check_step` says.
    """

    mesh: str
    accumulate: int
    loss: float
    gradients: float
    optimizer_state: float
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
    accumulate: Sequence[int] = (1,),
    steps: int = 2,
    tolerance: float | None = None,
    trainable: Any = None,
    **options: Any,
) -> list[Comparison]:
    """Compare a step on each mesh with one device that takes the whole batch.

    Each mesh is tried with each number of microbatches.

    Compared after every step: the loss and metrics, the gradients, the optimizer's state, the
    model's other state, and what the loss function's key and the model's own random streams draw.
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
    first in it, by how much, with its worst entries. `meshes` are by default all ways to arrange
    the devices along the axes that the rules, or the parameters' own specs, mention, with as many
    stages as a `pipeline` has; `options` are other fields of `Strategy`, such as `remat`,
    `exchange` or `pipeline`. With `draws="by_mesh"` random numbers are not compared, and what is
    made of them may differ.

    >>> rules = AxisRules(batch="data", embed=None, mlp="model")
    >>> loss = lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2)
    >>> make = lambda: {"w": jnp.ones((3, 4))}
    >>> check_step(make, optax.adam(0.1), loss, np.ones((8, 3), "f"), rules,
    ...     meshes=["data=8,model=1"])
    ... # doctest: +ELLIPSIS
    [Comparison(mesh='data=8,model=1', accumulate=1, loss=0.0, ...)]
    """
    if isinstance(meshes, str) or isinstance(accumulate, int) or steps < 1:
        raise ValueError(
            "`check_step` takes lists of meshes and of numbers of microbatches, and takes at least "
            "one step."
        )
    if tolerance is not None and not (
        type(tolerance) in (int, float) and 0 <= tolerance < math.inf
    ):
        raise ValueError(
            f"`check_step(tolerance={tolerance!r})` takes a number from 0 up, or None."
        )
    shapes = None if meshes is None else list(meshes)
    axes = _axes(make_model, trainable, rules, shapes)
    if shapes is None:
        shapes = mesh_shapes(axes) if axes else []
        if (schedule := options.get("pipeline")) is not None:
            axis = next(as_tuple(axes)[0] for name, (axes, *_) in rules.items() if name == LAYERS)
            shapes = [shape for shape in shapes if parse_axes(shape)[axis] == schedule.stages]
    if not shapes or not axes:
        raise ValueError(
            "`check_step` has no mesh to compare: no rule and no parameter mentions an axis, or "
            "`meshes` is empty."
        )
    left_out = (
        "exchange",
        "dcn",
        "zero",
        "pipeline",
        *(["remat"] if options.get("remat") == "stage" else []),
    )
    alone = {name: value for name, value in options.items() if name not in left_out}
    single = Strategy(
        mesh=make_mesh(dict.fromkeys(axes, 1), devices=jax.devices()[:1]), rules=rules, **alone
    )
    expected = _reference(
        _Run(make_model, optimizer, loss_fn, batch, single, steps, trainable), tolerance
    )
    comparisons = []
    for shape, count in itertools.product(shapes, accumulate):
        sizes = parse_axes(shape).values()
        mesh = make_mesh(shape, devices=None if -1 in sizes else jax.devices()[: math.prod(sizes)])
        on = shape if options.get("dcn") else mesh
        strategy = Strategy(mesh=on, rules=rules, accumulate=count, **options)
        run = _Run(make_model, optimizer, loss_fn, batch, strategy, steps, trainable)
        found = _compared(run.records(), expected, by_mesh=strategy.draws == "by_mesh")
        if found.wrong:
            where = f"on the mesh `{format_mesh(mesh)}` with accumulate={count}"
            raise AssertionError(_describe(found.wrong, where, by_mesh=strategy.draws == "by_mesh"))
        comparisons.append(Comparison(format_mesh(mesh), count, **found.largest))
    return comparisons


def mesh_shapes(axes: Sequence[str], devices: int | None = None) -> list[str]:
    """Every way to arrange all devices along the axes.

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
    count = len(jax.devices()) if devices is None else int(devices)
    return [",".join(sizes) for sizes in _arrangements(tuple(axes), count)]


def _arrangements(axes: tuple[str, ...], devices: int) -> Iterator[tuple[str, ...]]:
    """The sizes of axes, as text, whose product is the number of devices."""
    first, *others = axes
    if not others:
        yield (f"{first}={devices}",)
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            for rest in _arrangements(tuple(others), devices // size):
                yield f"{first}={size}", *rest


def _axes(
    make_model: Any, trainable: Any, rules: AxisRules, shapes: Sequence[str] | None
) -> tuple[str, ...]:
    """All mesh axes of which anything speaks: the rules, parameters that are given specs, the
    meshes asked for.
    """
    found: dict[str, Any] = {}

    def build() -> None:
        found.update(take_apart(make_model(), trainable)[1])

    with building(), unsharded():
        jax.eval_shape(build)
    specs = [names for names in found.values() if isinstance(names, PartitionSpec)]
    of_specs = [axis for spec in specs for axis in spec_axes(spec)]
    of_shapes = [axis for shape in shapes or () for axis in parse_axes(shape)]
    return tuple(dict.fromkeys([*rules.axes, *of_specs, *of_shapes]))


@dataclass(frozen=True)
class Record:
    """What a step gave, by kind."""

    randomness: Arrays
    loss: Arrays
    gradients: Arrays
    optimizer_state: Arrays
    state: Arrays


class _Run:
    """A model, its state and its step under a strategy, to be run from the start more than once."""

    def __init__(
        self,
        make_model: Any,
        optimizer: Any,
        loss_fn: Any,
        batch: Any,
        strategy: Strategy,
        steps: int,
        trainable: Any,
    ) -> None:
        self.batch, self.steps = batch, steps
        self.start = init(
            make_model, optax.chain(_remember_gradients(), optimizer), strategy, trainable=trainable
        )
        self.step: Step = train_step(_drawing(loss_fn), strategy)

    def records(self, start: State | None = None) -> list[Record]:
        # A step takes its state away.
        state = jax.tree.map(lambda leaf: leaf.copy(), start or self.start)
        records = []
        for _ in range(self.steps):
            state, metrics = self.step(state, self.batch)
            records.append(_record(state, jax.device_get(metrics)))
        return records


def _drawing(loss_fn: Any) -> Any:
    """The same loss, which also tells what its key draws for the examples."""

    def drawing(model: Any, batch: Any, rng: jax.Array) -> Any:
        out = loss_fn(model, batch, rng)
        loss, metrics = out if isinstance(out, tuple) else (out, {})
        rows = jax.tree.leaves(batch)[0].shape[0]
        # Whole numbers add up exactly.
        drawn = jax.random.randint(jax.random.fold_in(rng, 0xD1CE), (rows, 16), 0, 1000)
        return loss, {**metrics, "drawn by the key": weighted_mean(jnp.sum(drawn), rows)}

    return drawing


def _record(state: State, metrics: Mapping[str, Any]) -> Record:
    gradients, opt_state = reordered(state, natural=True).opt_state
    return Record(
        randomness={"rng": np.asarray(metrics["drawn by the key"]), **_numbers(state.streams)},
        loss={
            name: np.asarray(value) for name, value in metrics.items() if name != "drawn by the key"
        },
        gradients=_numbers(gradients),
        optimizer_state=_numbers(opt_state),
        state=_numbers(state.rest),
    )


def _numbers(tree: Any) -> Arrays:
    """Every leaf as numbers: of keys their words."""
    leaves = {
        path: jax.random.key_data(leaf) if is_key(leaf) else leaf
        for path, leaf in named_leaves(tree)
    }
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def _wide(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(
        np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64
    )


def _apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """By how much entries differ; nan where one is not finite."""
    with np.errstate(invalid="ignore"):
        return np.abs(_wide(one) - _wide(other))


def _remember_gradients() -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )


class Expected(NamedTuple):
    """An array that a step gave on one device."""

    kind: str
    path: str
    values: np.ndarray
    scale: float
    allowed: float  # how far an entry may be from it


Reference = list[list[Expected]]
"""Of every step, what it gave on one device."""


def _reference(run: _Run, tolerance: float | None) -> Reference:
    records = run.records()
    changed: list[list[Record]] = []
    if tolerance is None:
        unit = _unit(run.step.trace(run.start, run.batch).jaxpr.jaxpr)
        changed = [run.records(_perturbed(run.start, unit, seed)) for seed in range(PERTURBED)]
        tolerance = FLOAT32_TOLERANCE if unit <= np.finfo(np.float32).eps else unit
    return [
        _expected(records[step], [of[step] for of in changed], tolerance)
        for step in range(run.steps)
    ]


def _expected(record: Record, changed: Sequence[Record], tolerance: float) -> list[Expected]:
    """What a step gave, with how far from it a mesh may be, given what it gives from parameters
    that were changed.
    """
    expected = []
    for kind in KINDS:
        arrays = {path: values for path, values in getattr(record, kind).items() if values.size}
        largest = max((np.abs(_wide(values)).max() for values in arrays.values()), default=0.0)
        for path, values in arrays.items():
            scale = float(max(np.abs(_wide(values)).max(), 1e-2 * largest)) or 1.0
            moved = [float(_apart(getattr(other, kind)[path], values).max()) for other in changed]
            allowed = max([tolerance * scale, *(MARGIN * by for by in moved)])
            exact = kind == "randomness" or not jnp.issubdtype(values.dtype, jnp.inexact)
            expected.append(Expected(kind, path, values, scale, 0.0 if exact else allowed))
    return expected


def _perturbed(state: State, unit: float, seed: int) -> State:
    """The state with all parameters changed at random: as rounding to the narrowest dtype would,
    and by a unit of their own.
    """
    random = np.random.default_rng(seed)

    def changed(path: str, leaf: jax.Array) -> jax.Array:
        del path
        if not jnp.issubdtype(leaf.dtype, jnp.inexact) or leaf.dtype.itemsize < 2:
            return leaf
        values = np.asarray(leaf)
        signs = random.choice([-1.0, 1.0], values.shape)
        by = 1 + max(unit / 2, float(jnp.finfo(leaf.dtype).eps)) * signs
        return jax.device_put((_wide(values) * by).astype(values.dtype), leaf.sharding)

    return state.replaced(
        params=map_named(changed, state.params), frozen=map_named(changed, state.frozen)
    )


def _unit(jaxpr: Jaxpr) -> float:
    """A unit in the last place of the narrowest dtype of 16 bits or more in which a traced function
    computes.
    """
    units = [float(jnp.finfo(dtype).eps) for dtype in _floats(jaxpr) if jnp.finfo(dtype).bits >= 16]
    return max(units, default=float(np.finfo(np.float32).eps))


def _floats(jaxpr: Jaxpr) -> set[Any]:
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        dtypes = [getattr(var.aval, "dtype", None) for var in equation.outvars]
        found.update(
            dtype for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
        )
        is_jaxpr = lambda value: isinstance(value, Jaxpr | ClosedJaxpr)  # noqa: E731
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                found |= _floats(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
    return found


class Wrong(NamedTuple):
    """An array of a mesh that is too far from one device's."""

    step: int
    expected: Expected
    found: np.ndarray
    differences: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.expected.kind.replace('_', ' ')} `{self.expected.path}`"

    @property
    def relative(self) -> float:
        return float(np.max(self.differences)) / self.expected.scale

    @property
    def order(self) -> tuple[int, bool, float]:
        """What comes first in a step; of what comes at the same place, what is farthest off, nan
        before all.
        """
        made_of_gradients = self.expected.path in OF_GRADIENTS and self.expected.kind == "loss"
        kind = "gradients" if made_of_gradients else self.expected.kind
        return KINDS.index(kind), made_of_gradients, -np.nan_to_num(self.relative, nan=np.inf)


class Compared(NamedTuple):
    """The largest difference of each kind, and of the first step that has some, what is too far
    from one device.
    """

    largest: dict[str, float]
    wrong: list[Wrong]


def _compared(records: list[Record], reference: Reference, *, by_mesh: bool) -> Compared:
    largest = dict.fromkeys(KINDS, 0.0)
    for step, (record, of_one) in enumerate(zip(records, reference, strict=True)):
        wrong = []
        for expected in of_one:
            found = getattr(record, expected.kind)[expected.path]
            one = Wrong(step, expected, found, _apart(found, expected.values))
            largest[expected.kind] = max(largest[expected.kind], one.relative)
            if not np.max(one.differences) <= expected.allowed and not (
                by_mesh and expected.kind == "randomness"
            ):
                wrong.append(one)
        if wrong:
            return Compared(largest, sorted(wrong, key=lambda one: one.order))
    return Compared(largest, [])


def _describe(wrong: list[Wrong], where: str, *, by_mesh: bool) -> str:
    """What differs first and by how much, its worst entries, and what else differs in that step."""
    first, *others = wrong
    expected = first.expected
    lines = [
        f"{first.name} of step {first.step} {where} differs from one device by "
        f"{first.relative:.1e} of its scale, {expected.scale:.3g}, where "
        f"{expected.allowed / expected.scale:.1e} is allowed for rounding. {_worst(first)}"
    ]
    if others:
        named = ", ".join(f"{one.name} by {one.relative:.1e}" for one in others[:6])
        more = f", and {len(others) - 6} more" if len(others) > 6 else ""
        lines.append(f"In the same step differ {named}{more}.")
    if not np.isfinite(_wide(expected.values)).all():
        lines.append("On one device it is not finite either: compare a step that is.")
    if by_mesh:
        lines.append(
            'By `Strategy(draws="by_mesh")` random numbers may differ from mesh to mesh, and so '
            "may all that is made of them: compare with keys of threefry and without that choice, "
            "or without dropout."
        )
    return "\n".join(lines)


def _worst(wrong: Wrong) -> str:
    """The entries that differ most, each with its index."""
    values, found, differences = wrong.expected.values, wrong.found, wrong.differences
    if not values.ndim:
        return f"It is {_shown(found)}, and {_shown(values)} on one device."
    order = np.argsort(-np.nan_to_num(differences, nan=np.inf), axis=None)[:3]
    entries = []
    for flat in order:
        index = np.unravel_index(flat, values.shape)
        entries.append(
            f"{list(map(int, index))} is {_shown(found[index])}, and "
            f"{_shown(values[index])} on one device"
        )
    return f"The worst of {values.size:,} entries: {'; '.join(entries)}."


def _shown(value: Any) -> str:
    return f"{value.astype(np.float32) if value.dtype.itemsize < 4 else value:.8g}"
