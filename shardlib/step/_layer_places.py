"""Whether an optimizer treats all layers alike, wherever a state stores them.

Under a schedule with several parts on a stage, an optimizer is given layers in the order of the
state, see `_layer_order`. Most optimizers do the same to each. One whose rates decay from layer to
layer, or that holds arrays of the model's shapes, a mask or weights that it stays close to, would
take each layer for another, and nothing would fail.

So it is tried before a state is made, on a model of random numbers, in both orders:

    numbers in the model's order  -> the optimizer -> updates
    numbers as a state has them   -> the optimizer -> updates, put in the model's order

Both are the same but for rounding: a norm of all layers is a sum in another order. What rounding
may do to an optimizer is found by trying it on numbers that are changed a little.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from shardlib._tree import map_named, named_leaves
from shardlib.step._layer_order import orders, place_layers, stacked_dim
from shardlib.step._optimizer_call import updated
from shardlib.step._state import Layout
from shardlib.step._strategy import Strategy
from shardlib.tracing._jaxpr import every_equation

# Parameters are made about so small; there are as many layers as in the model.
_ELEMENTS = 2**15
# A model with no more elements is tried as it is, where the optimizer takes no smaller one.
_MOST_ELEMENTS = 2**21
# A schedule may begin with a learning rate of zero.
_STEPS = 2
# By how much numbers are changed, by the bits of the optimizer's narrowest arrays.
_NUDGES = {64: 1e-9, 32: 1e-4}
_NUDGE_OF_FEWER_BITS = 1e-2
# Updates of parameters of about one that differ by less are the same.
_SMALLEST = 1e-12
# It runs a few times only, on little, so that compiling it is what takes time.
_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# What draws random numbers: by place, and as well in one order as in another.
_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


def check_places(layout: Layout, params: Any) -> None:
    """Refuse an optimizer, or a transformation that clips, that would take layers for others.

    One that cannot be tried, or that draws random numbers, is taken.

    Args:
        layout: the layout of the state.
        params: the trained parameters, or their shapes.
    """
    strategy, names = layout.strategy, dict(layout.names)
    shapes = [(path, leaf.shape) for path, leaf in named_leaves(params)]
    # In most states layers are in the model's order.
    if not orders(strategy, names, shapes):
        return
    transformations = {
        "`Strategy(clip=...)`": strategy.clip,
        "`init(optimizer=...)`": layout.optimizer,
    }
    for argument, transformation in transformations.items():
        if not isinstance(transformation, optax.GradientTransformation):
            continue
        misplaced = _misplaced(transformation, strategy, names, params)
        if misplaced:
            schedule: Any = strategy.pipeline
            raise ValueError(
                f"{argument}: under `{schedule}` layers are stored stage after stage, "
                f"and what is done to a layer depends on its place: {misplaced} would be updated "
                "as another layer is. Learning rates or masks by layer, and arrays that the "
                "optimizer holds for the model's parameters, do that. Use a schedule with one "
                "part on a stage, which has layers in the model's order, such as "
                f"`sl.pipeline.Eager1F1B({schedule.stages}, {schedule.microbatches})`."
            )


def _misplaced(
    transformation: optax.GradientTransformation,
    strategy: Strategy,
    names: dict[str, Any],
    params: Any,
) -> str | None:
    """The parameter that is updated otherwise in another order, in words; None if none is.

    Args:
        transformation: the optimizer.
        strategy: the strategy, which says in which order layers are stored.
        names: the names of the dims of each parameter, by its path.
        params: the trained parameters, or their shapes.
    """
    for shapes in _trial_shapes(names, params):
        for context in (_in_float64, _on_cpu, nullcontext):
            try:
                # Products of matrices must not round more than other operations do.
                with context(), jax.default_matmul_precision("highest"):
                    return _Trial(transformation, strategy, names, shapes).misplaced()
            except Exception:  # whatever an optimizer may raise for what is not the user's
                continue
    return None


@contextmanager
def _on_cpu() -> Iterator[None]:
    """The context in which functions run on one CPU; an error where JAX may not use any."""
    cpu = np.array(jax.local_devices(backend="cpu")[:1])
    # The mesh in scope would have all of its devices take part.
    with jax.set_mesh(Mesh(cpu, ("trial",))):
        yield


@contextmanager
def _in_float64() -> Iterator[None]:
    """The same in float64, where rounding is least; not every optimizer takes it."""
    with _on_cpu(), jax.enable_x64(True):
        yield


def _trial_shapes(names: dict[str, Any], params: Any) -> Iterator[Any]:
    """The shapes of the models to try, one after another: a small one, then perhaps this one."""
    small = map_named(lambda path, leaf: _smaller(leaf, stacked_dim(names.get(path))), params)
    yield small
    leaves = jax.tree.leaves(params)
    # An optimizer that holds arrays of the model's shapes takes no other.
    is_small = all(a.shape == b.shape for a, b in zip(jax.tree.leaves(small), leaves, strict=True))
    if not is_small and sum(leaf.size for leaf in leaves) <= _MOST_ELEMENTS:
        yield params


def _smaller(leaf: Any, stacked: int | None) -> jax.ShapeDtypeStruct:
    """The shape of a parameter, with other dims than that of layers halved until it is small."""
    sizes = list(leaf.shape)
    # Halves of a layer leave what is done to blocks of its elements at the bounds of layers.
    while np.prod(sizes) > _ELEMENTS:
        others = [dim for dim, size in enumerate(sizes) if dim != stacked and size > 1]
        if not others:
            break
        longest = max(others, key=lambda dim: sizes[dim])
        sizes[longest] = (sizes[longest] + 1) // 2
    return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)


class _Trial(NamedTuple):
    """An optimizer that is tried on random numbers of some shapes."""

    transformation: optax.GradientTransformation
    strategy: Strategy
    names: dict[str, Any]
    shapes: Any

    def misplaced(self) -> str | None:
        """The first parameter that is updated otherwise in another order, or None."""
        random = np.random.default_rng(0)
        # Small gradients leave it visible what an optimizer does to weights.
        numbers = [self._drawn(random, 1.0)]
        for _ in range(_STEPS):
            numbers.append(self._drawn(random, 1e-2))
        init, step = _fast(self.transformation.init), _fast(self._step)
        nudge = _nudge_of(init, step, numbers)
        if nudge is None:
            return None
        nudged = jax.tree.map(lambda x: x * (1 + nudge * random.choice((-1, 1), x.shape)), numbers)
        stored = [self._placed(tree, natural=False) for tree in numbers]

        expected = _updates(init, step, numbers)
        others = _updates(init, step, nudged)
        found = [self._placed(tree, natural=True) for tree in _updates(init, step, stored)]
        for path in expected[0]:
            rows = self._differing(path, expected, others, found, nudge)
            if len(rows) and stacked_dim(self.names.get(path)) is None:
                return f"`{path}`"
            if len(rows):
                return f"layer {rows[0]} of `{path}`"
        return None

    def _step(self, params: Any, state: Any, gradient: Any) -> Any:
        """A step of the optimizer: its updates, and what they make of parameters and state."""
        updates, state = updated(self.transformation, gradient, state, params, jnp.ones(()), {})
        # By path, since an optimizer may give another class of tree than it was given.
        return dict(named_leaves(updates)), optax.apply_updates(params, updates), state

    def _drawn(self, random: np.random.Generator, scale: float) -> Any:
        """A tree of random numbers."""

        def draw(leaf: Any) -> np.ndarray:
            x = random.normal(scale=scale, size=leaf.shape)
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                x = x + 1j * random.normal(scale=scale, size=leaf.shape)
            return x

        return jax.tree.map(draw, self.shapes)

    def _placed(self, tree: Any, natural: bool) -> Any:
        """Numbers in the model's order put in that of the state, or back into the `natural` one."""
        return place_layers(self.strategy, tree, self.names, natural=natural)

    def _differing(
        self, path: str, expected: Any, nudged: Any, found: Any, nudge: float
    ) -> np.ndarray:
        """The layers of a parameter whose updates differ by more than rounding explains.

        Without layers, the parameter counts as one.

        Args:
            path: the path of the parameter.
            expected: the updates of each step, by path.
            nudged: those for numbers that are changed a little.
            found: those for layers in another order.
            nudge: by how much numbers were changed.
        """
        dim = stacked_dim(self.names.get(path))
        mine = [updates[path] for updates in expected]
        by_nudge = _row_norms([a - b[path] for a, b in zip(mine, nudged, strict=True)], dim)
        by_order = _row_norms([a - b[path] for a, b in zip(mine, found, strict=True)], dim)
        # What is not finite is not known to differ.
        bound = nudge * _row_norms(mine, dim) + 10 * by_nudge + _SMALLEST
        return np.flatnonzero(by_order > bound)


def _fast(function: Any) -> Any:
    """The function, compiled in the shortest time."""
    return jax.jit(function, compiler_options=_FAST)


def _updates(init: Any, step: Any, numbers: list[Any]) -> list[dict[str, jax.Array]]:
    """The updates of each step, by path; `numbers` are parameters and then a gradient for each."""
    params, *gradients = numbers
    state, made = init(params), []
    for gradient in gradients:
        updates, params, state = step(params, state, gradient)
        made.append(jax.device_get(updates))
    return made


def _nudge_of(init: Any, step: Any, numbers: list[Any]) -> float | None:
    """By how much to change numbers, to see what rounding may do; None for what is not tried."""
    params, gradient, *_ = numbers
    state = jax.eval_shape(init, params)
    bits = 64
    for traced in (init.trace(params), step.trace(params, state, gradient)):
        # To print once more than was asked for would be worse than not to know.
        if traced.jaxpr.effects:
            return None
        for equation in every_equation(traced.jaxpr.jaxpr):
            if equation.primitive.name in _DRAWS:
                return None
            bits = min([bits, *(_bits_of(var.aval) for var in equation.outvars)])
    return _NUDGES.get(bits, _NUDGE_OF_FEWER_BITS)


def _bits_of(aval: Any) -> int:
    """The bits of the numbers of an array, as far as they round; 64 of what does not."""
    if not getattr(aval, "shape", ()):
        return 64
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.finfo(aval.dtype).bits
    # Codes, such as of moments in blocks. Wider integers count.
    if jnp.issubdtype(aval.dtype, jnp.integer) and jnp.iinfo(aval.dtype).bits <= 8:
        return 8
    return 64


def _row_norms(arrays: list[Any], dim: int | None) -> np.ndarray:
    """The norm of all arrays together, for each entry of a dim; without one, of all of them."""
    squares = np.zeros(1)
    for array in arrays:
        values = np.abs(np.asarray(array))
        rows = values.reshape(1, -1) if dim is None else np.moveaxis(values, dim, 0)
        squares = squares + np.square(rows.reshape(len(rows), -1)).sum(1)
    return np.sqrt(squares)
