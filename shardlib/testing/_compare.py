"""A step on many meshes against one device: the oracle of every parallelism."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardlib._batch import mean
from shardlib._mesh import format_mesh, make_mesh, parse_axes
from shardlib._random import is_key
from shardlib._rules import LAYERS, AxisRules, as_tuple
from shardlib._tree import named_leaves
from shardlib.train._order import reordered
from shardlib.train._state import init
from shardlib.train._step import train_step
from shardlib.train._strategy import Strategy


@dataclass(frozen=True)
class Comparison:
    """How far a mesh was from one device: the largest difference of each kind, relative as `check_step` says."""

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
    tolerance: float = 1e-5,
    trainable: Any = None,
    **options: Any,
) -> list[Comparison]:
    """Run a step on each mesh, with each number of microbatches, and hold it to one device that takes the batch whole.

    Compared after every step: the loss and metrics, the gradients, the optimizer's state, the model's other state, and
    what the loss function's key and the model's own random streams draw. A difference counts relative to the largest
    entry of its array, or to a hundredth of the largest entry of all arrays of its kind where that is more, since what
    is zero but for rounding has no scale. An `AssertionError` names the mesh, the array and the difference. `meshes` are
    by default all ways to arrange the devices along the axes that the rules mention, with as many stages as a `pipeline` has;
    `options` are other fields of `Strategy`, such as `remat`, `exchange` or `pipeline`.

    >>> rules = AxisRules(batch="data", embed=None, mlp="model")
    >>> loss = lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2)
    >>> make = lambda: {"w": jnp.ones((3, 4))}
    >>> check_step(make, optax.adam(0.1), loss, np.ones((8, 3), "f"), rules, meshes=["data=8,model=1"])
    ... # doctest: +ELLIPSIS
    [Comparison(mesh='data=8,model=1', accumulate=1, loss=0.0, ...)]
    """
    if isinstance(meshes, str) or isinstance(accumulate, int) or steps < 1:
        raise ValueError(
            "`check_step` takes lists of meshes and of numbers of microbatches, and takes at least one step."
        )
    shapes = list(mesh_shapes(rules.axes) if meshes is None else meshes)
    if meshes is None and (schedule := options.get("pipeline")) is not None:
        axis = next(as_tuple(axes)[0] for name, (axes, *_) in rules.items() if name == LAYERS)
        shapes = [shape for shape in shapes if parse_axes(shape)[axis] == schedule.stages]
    if not shapes or not rules.axes:
        raise ValueError("`check_step` has no mesh to compare: no rule mentions an axis, or `meshes` is empty.")
    left_out = ("exchange", "dcn", "zero", "pipeline", *(["remat"] if options.get("remat") == "stage" else []))
    alone = {name: value for name, value in options.items() if name not in left_out}
    single = Strategy(mesh=make_mesh(dict.fromkeys(rules.axes, 1), devices=jax.devices()[:1]), rules=rules, **alone)
    expected = _run(make_model, optimizer, loss_fn, batch, single, steps, trainable)
    comparisons = []
    for shape, count in itertools.product(shapes, accumulate):
        sizes = parse_axes(shape).values()
        mesh = make_mesh(shape, devices=None if -1 in sizes else jax.devices()[: math.prod(sizes)])
        on = shape if options.get("dcn") else mesh
        strategy = Strategy(mesh=on, rules=rules, accumulate=count, **options)
        found = _run(make_model, optimizer, loss_fn, batch, strategy, steps, trainable)
        where = f"on the mesh `{format_mesh(mesh)}` with accumulate={count}"
        differences = {kind: _difference(kind, found, expected, tolerance, where) for kind in expected[0]}
        comparisons.append(Comparison(format_mesh(mesh), count, **differences))
    return comparisons


def mesh_shapes(axes: Sequence[str], devices: int | None = None) -> list[str]:
    """Every way to arrange all devices along the axes.

    >>> mesh_shapes(["data", "model"], devices=4)
    ['data=1,model=4', 'data=2,model=2', 'data=4,model=1']
    """
    count = len(jax.devices()) if devices is None else devices
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    sizes = (sizes for sizes in itertools.product(divisors, repeat=len(axes)) if np.prod(sizes) == count)
    return [",".join(f"{axis}={size}" for axis, size in zip(axes, these, strict=True)) for these in sizes]


def _run(
    make_model: Any, optimizer: Any, loss_fn: Any, batch: Any, strategy: Strategy, steps: int, trainable: Any
) -> list[dict[str, dict[str, np.ndarray]]]:
    def drawing(model: Any, batch: Any, rng: jax.Array) -> Any:
        out = loss_fn(model, batch, rng)
        loss, metrics = out if isinstance(out, tuple) else (out, {})
        rows = jax.tree.leaves(batch)[0].shape[0]
        drawn = jax.random.randint(jax.random.fold_in(rng, 0xD1CE), (rows, 16), 0, 1000)  # whole numbers add up exactly
        return loss, {**metrics, "drawn by the key": mean(jnp.sum(drawn), rows)}

    state = init(make_model, optax.chain(_remember_gradients(), optimizer), strategy, trainable=trainable)
    step = train_step(drawing, strategy)
    records = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        gradients, opt_state = reordered(state, natural=True).opt_state
        metrics = jax.device_get(metrics)
        records.append(
            {
                "loss": {name: value for name, value in metrics.items() if name != "drawn by the key"},
                "gradients": _numbers(gradients),
                "optimizer_state": _numbers(opt_state),
                "state": _numbers(state.rest),
                "randomness": {"rng": metrics["drawn by the key"], **_numbers(state.streams)},
            }
        )
    return records


def _numbers(tree: Any) -> dict[str, np.ndarray]:
    """Every leaf as numbers: of keys their words."""
    leaves = {path: jax.random.key_data(leaf) if is_key(leaf) else leaf for path, leaf in named_leaves(tree)}
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.complex128 if np.iscomplexobj(leaf) else np.float64)


def _remember_gradients() -> optax.GradientTransformation:
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )


def _difference(kind: str, found: Any, expected: Any, tolerance: float, where: str) -> float:
    largest = 0.0
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        theirs = {path: _wide(leaf) for path, leaf in theirs[kind].items() if np.size(leaf)}
        scale = max((np.abs(leaf).max() for leaf in theirs.values()), default=0.0)
        for path, leaf in theirs.items():
            difference = np.abs(_wide(ours[kind][path]) - leaf).max()
            relative = difference / (max(np.abs(leaf).max(), 1e-2 * scale) or 1.0)
            if not relative <= tolerance:
                raise AssertionError(
                    f"{kind.replace('_', ' ')} `{path}` of step {step} {where} differs from one device by {relative:.1e}, "
                    f"which is more than {tolerance:.0e}: {_sample(ours[kind][path])} against {_sample(leaf)}."
                )
            largest = max(largest, float(relative))
    return largest


def _sample(leaf: Any) -> str:
    return np.array2string(np.ravel(_wide(leaf))[:3], precision=6, separator=", ")
