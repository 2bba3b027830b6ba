"""What a step gives on one device, and how far from it a mesh may be.

A step on one device with the whole batch is the oracle of `check_step`. No mesh gives exactly the
same numbers, since each adds up in another order. How much that matters is a property of the model:
one divides by what is nearly zero, another does not. So it is measured. One device takes the same
steps a few times more, from parameters that are changed at random by about as much as rounding
would change them, and a mesh may be a few times as far from it as these runs are:

    allowed = max(tolerance * scale, MARGIN * max over perturbed runs of |perturbed - reference|)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr

from shardlib._tree import map_named, named_leaves
from shardlib.modeling._batch import weighted_mean
from shardlib.modeling._random import is_key
from shardlib.step._init import init
from shardlib.step._layer_order import reordered
from shardlib.step._state import State
from shardlib.step._step import Step, train_step
from shardlib.step._strategy import Strategy
from shardlib.tracing._jaxpr import every_equation

Arrays = dict[str, np.ndarray]
"""What a step gave, of one kind, by path."""

KINDS: tuple[str, ...] = (
    "randomness",
    "loss",
    "gradients",
    "optimizer_state",
    "parameters",
    "state",
)
"""The kinds of results, in the order in which a step comes to them.

What differs first is to blame for what differs later.
"""

FLOAT32_TOLERANCE = 1e-5
PERTURBED = 3  # how often all parameters are changed as rounding would
MARGIN = 4  # how many times as far as that moves a result it may be from one device

_DRAWN = "drawn by the key"  # the metric with what the key of the loss draws


@dataclass(frozen=True)
class Experiment:
    """What `check_step` is given, and runs under one strategy after the other."""

    make_model: Any
    optimizer: optax.GradientTransformation
    loss_fn: Any
    batch: Any
    steps: int
    trainable: Any


@dataclass(frozen=True)
class Record:
    """What a step gave, by kind: the fields are named as in `KINDS`."""

    randomness: Arrays
    loss: Arrays
    gradients: Arrays
    optimizer_state: Arrays
    parameters: Arrays
    state: Arrays


class Run:
    """A model, its state and its step under a strategy, to be run from the start more than once.

    The optimizer is the user's behind one that keeps the gradients in its state, and the loss also
    reports what its key draws, so that both can be compared.
    """

    def __init__(self, experiment: Experiment, strategy: Strategy) -> None:
        self.batch = experiment.batch
        self.steps = experiment.steps
        self.start = init(
            experiment.make_model,
            # Gradients are compared too, so the optimizer's state keeps those of the last step.
            optax.chain(_remember_gradients(), experiment.optimizer),
            strategy,
            trainable=experiment.trainable,
        )
        self.step: Step = train_step(_drawing(experiment.loss_fn), strategy)

    def records(self, start: State | None = None) -> list[Record]:
        """Take all steps, from `start` or from the state that was initialized; a record a step."""
        # A step donates the buffers of its state, and this one is needed again.
        state = jax.tree.map(lambda leaf: leaf.copy(), start or self.start)
        records = []
        for _ in range(self.steps):
            state, metrics = self.step(state, self.batch)
            records.append(_record(state, jax.device_get(metrics)))
        return records


def _drawing(loss_fn: Any) -> Any:
    """The same loss, with a metric more: a sum of what its key draws for the examples."""

    def drawing(model: Any, batch: Any, rng: jax.Array) -> Any:
        out = loss_fn(model, batch, rng)
        loss, metrics = out if isinstance(out, tuple) else (out, {})
        rows = jax.tree.leaves(batch)[0].shape[0]
        # Whole numbers add up exactly, whichever device draws which.
        drawn = jax.random.randint(jax.random.fold_in(rng, 0xD1CE), (rows, 16), 0, 1000)
        return loss, {**metrics, _DRAWN: weighted_mean(jnp.sum(drawn), rows)}

    return drawing


def _remember_gradients() -> optax.GradientTransformation:
    """An optimizer that changes nothing, and whose state is the gradients of the last step."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )


def _record(state: State, metrics: Mapping[str, Any]) -> Record:
    """The record of a step, from the state after it and its metrics on the host."""
    # A pipeline may store layers in an order of its own; paths and indices are the model's.
    gradients, opt_state = reordered(state, natural=True).opt_state
    loss = {name: np.asarray(value) for name, value in metrics.items()}
    drawn = loss.pop(_DRAWN)
    return Record(
        randomness={"rng": drawn, **_numbers(state.streams)},
        loss=loss,
        gradients=_numbers(gradients),
        optimizer_state=_numbers(opt_state),
        parameters=_numbers(state.weights),
        state=_numbers(state.rest),
    )


def _numbers(tree: Any) -> Arrays:
    """Every leaf as numbers on the host, by path; a key as the words it is made of."""
    numbers = {}
    for path, leaf in named_leaves(tree):
        # Keys are compared by their words, which are whole numbers and must be equal.
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        numbers[path] = np.asarray(leaf)
    return numbers


def wide(array: np.ndarray) -> np.ndarray:
    """An array in 64 bits, real or complex, so that differences of small floats are exact."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(np.complex128)
    return array.astype(np.float64)


def differences(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """By how much entries differ; nan where one is not finite."""
    with np.errstate(invalid="ignore"):
        return np.abs(wide(first) - wide(second))


class Expected(NamedTuple):
    """An array that a step gave on one device.

    An entry may be `allowed` from it; `scale` is what a difference is divided by when it is
    reported.
    """

    kind: str
    path: str
    values: np.ndarray
    scale: float
    allowed: float


Reference = list[list[Expected]]
"""What each step gave on one device: a list of arrays for every step."""


def reference(run: Run, tolerance: float | None) -> Reference:
    """Run one device's steps, and say how far from each result a mesh may be.

    Without a `tolerance` it is that of the narrowest dtype in which the step computes, and the
    steps are repeated from perturbed parameters. With one, that much of an array's scale is
    allowed, and nothing is repeated.
    """
    records = run.records()
    perturbed_runs: list[list[Record]] = []
    if tolerance is None:
        unit = _narrowest_unit(run.step.trace(run.start, run.batch).jaxpr.jaxpr)
        for seed in range(PERTURBED):
            perturbed_runs.append(run.records(_perturbed(run.start, unit, seed)))
        # A unit in the last place where that is one of 16 bits, else a fixed tolerance.
        tolerance = unit
        if unit <= np.finfo(np.float32).eps:
            tolerance = FLOAT32_TOLERANCE
    expected_by_step = []
    for step, record in enumerate(records):
        perturbed = [perturbed_run[step] for perturbed_run in perturbed_runs]
        expected_by_step.append(_expected(record, perturbed, tolerance))
    return expected_by_step


def _expected(record: Record, perturbed: Sequence[Record], tolerance: float) -> list[Expected]:
    """What a step gave on one device, each array with how far from it a mesh may be.

    `perturbed` are the same step's records from perturbed parameters. Random numbers and whole
    numbers must be equal.
    """
    expected = []
    for kind in KINDS:
        arrays = _nonempty(getattr(record, kind))
        largest = max(map(_largest_entry, arrays.values()), default=0.0)
        for path, values in arrays.items():
            # An array that is zero but for rounding has no scale: it gets a hundredth of the
            # largest of its kind. Where all of them are zero, differences are absolute.
            scale = float(max(_largest_entry(values), 1e-2 * largest)) or 1.0
            allowed = 0.0
            if kind != "randomness" and jnp.issubdtype(values.dtype, jnp.inexact):
                allowed = tolerance * scale
                for other in perturbed:
                    moved = float(differences(getattr(other, kind)[path], values).max())
                    allowed = max(allowed, MARGIN * moved)
            expected.append(Expected(kind, path, values, scale, allowed))
    return expected


def _nonempty(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays that have entries: an empty one has no largest, and nothing to compare."""
    kept: dict[str, np.ndarray] = {}
    for path, values in arrays.items():
        if values.size:
            kept[path] = values
    return kept


def _largest_entry(values: np.ndarray) -> np.floating:
    return np.abs(wide(values)).max()


def _perturbed(state: State, unit: float, seed: int) -> State:
    """The state with every entry of every parameter changed at random, up or down.

    Each is changed by half of `unit`, as rounding to the narrowest dtype of the step would, or by a
    unit in the last place of its own dtype where that is more. Whole numbers, and floats of 8 bits
    and fewer, stay.
    """
    # Each of the runs is changed otherwise, and the same in every test.
    random = np.random.default_rng(seed)

    def changed(path: str, leaf: jax.Array) -> jax.Array:
        del path
        if not jnp.issubdtype(leaf.dtype, jnp.inexact) or leaf.dtype.itemsize < 2:
            return leaf
        # In 64 bits, so that the change is not lost before the result is rounded.
        values = np.asarray(leaf)
        signs = random.choice([-1.0, 1.0], values.shape)
        factors = 1 + max(unit / 2, float(jnp.finfo(leaf.dtype).eps)) * signs
        return jax.device_put((wide(values) * factors).astype(values.dtype), leaf.sharding)

    return state.replaced(
        params=map_named(changed, state.params), frozen=map_named(changed, state.frozen)
    )


def _narrowest_unit(jaxpr: Jaxpr) -> float:
    """A unit in the last place of the narrowest dtype in which a traced function computes.

    Dtypes of fewer than 16 bits do not count, since what is computed in them has scales of its own.
    A function without floats has float32's.
    """
    largest = 0.0
    for dtype in _float_dtypes(jaxpr):
        if jnp.finfo(dtype).bits >= 16:
            largest = max(largest, float(jnp.finfo(dtype).eps))
    return largest or float(np.finfo(np.float32).eps)


def _float_dtypes(jaxpr: Jaxpr) -> set[Any]:
    """The real and complex dtypes of all results in a traced function, and in those it calls."""
    dtypes: set[Any] = set()
    for equation in every_equation(jaxpr):
        for var in equation.outvars:
            dtype = getattr(var.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                dtypes.add(dtype)
    return dtypes
