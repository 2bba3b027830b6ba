"""The derivative of a traced function whose weights are dropped between its two passes.

JAX's own derivative keeps arrays from the forward to the backward pass, its residuals. Some of them
are weights, or computed from weights only. These are not kept here: the backward pass is given the
weights once more, and computes what it needs from them. All other residuals are kept as they are.

    forward(inputs, weights)             -> results, kept residuals
    backward(kept, weights, cotangents)  -> gradients of inputs and of trained weights
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from shardlib.tracing._jaxpr import JITS, inlined, made_of, open_jaxpr, values_of, variables


@dataclass(frozen=True)
class Partition:
    """Which of a list of values have derivatives, to take such lists apart and to merge them.

    The values that have some are called floats here, and include complex ones; integers, bools and
    random keys are the others.
    """

    is_float: tuple[bool, ...]

    @classmethod
    def by_dtype(cls, values: Sequence[Any]) -> "Partition":
        """The partition of values, or of atoms of a jaxpr, by their dtypes."""
        is_float = []
        for value in values:
            aval = value.aval if hasattr(value, "aval") else jnp.asarray(value)
            is_float.append(jnp.issubdtype(aval.dtype, jnp.inexact))
        return cls(tuple(is_float))

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The floats and the others of a list.

        >>> Partition((True, False, True)).split(["weight", "step", "bias"])
        (['weight', 'bias'], ['step'])
        """
        floats: list[Any] = []
        others: list[Any] = []
        for value, is_float in zip(values, self.is_float, strict=True):
            if is_float:
                floats.append(value)
            else:
                others.append(value)
        return floats, others

    def floats(self, values: Sequence[Any]) -> list[Any]:
        """The floats of a list alone."""
        return self.split(values)[0]

    def gradients(self, of_floats: Sequence[Any]) -> list[Any]:
        """The gradients of all values, from those of the floats: the others have None.

        >>> Partition((True, False, True)).gradients([0.5, 0.25])
        [0.5, None, 0.25]
        """
        others = len(self.is_float) - len(of_floats)
        return self.merge(of_floats, [None] * others)

    def merge(self, floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """The list again, from its floats and its others.

        >>> partition = Partition((True, False, True))
        >>> partition.merge(*partition.split(["weight", "step", "bias"]))
        ['weight', 'step', 'bias']
        """
        next_float, next_other = iter(floats), iter(others)
        values = []
        for is_float in self.is_float:
            values.append(next(next_float) if is_float else next(next_other))
        return values


def instantiated(gradients: Sequence[Any]) -> list[Any]:
    """Cotangents as arrays: JAX leaves those that are known to be zero symbolic."""
    arrays = []
    for gradient in gradients:
        if not isinstance(gradient, jax.Array):
            gradient = jnp.zeros(gradient.shape, gradient.dtype)
        arrays.append(gradient)
    return arrays


def derivative(
    function: ClosedJaxpr,
    perturbed: Sequence[bool],
    trained: int,
    floats: list[Any],
    others: list[Any],
    shapes: list[Any],
) -> tuple[Callable[..., tuple[list[Any], list[Any]]], Callable[..., tuple[list[Any], list[Any]]]]:
    """The forward and the backward pass of a function of numbers and weights.

    `forward(*inputs)` returns the results, and those residuals that are not computed from weights
    only. `backward(residuals, weights, gradients)` takes these, the weights once more and the
    cotangents of the float results; it returns the gradients of the floats, None for those that are
    not `perturbed`, and of the trained weights.

    Args:
        function: takes floats, other values and whole weights, one after the other.
        perturbed: for each of the floats, whether it is differentiated.
        trained: how many of the weights are differentiated, the first ones.
        floats: the numbers that have derivatives, or their shapes.
        others: the values that have none, or their shapes.
        shapes: the shapes of the weights.
    """
    linearized = _linearize(function, perturbed, trained, floats, others, shapes)
    return linearized.forward, linearized.backward


@dataclass(frozen=True, eq=False)
class _Linearized:
    """A function traced along with its linearization, whose residuals are known by variable.

    The residuals fall into three kinds: literals; those that are `kept` from the forward to the
    backward pass; and those that are `recomputed` from weights only, when these are whole again.
    """

    traced: ClosedJaxpr  # returns the results and then all residuals
    tree: Any  # the structure of JAX's backward function, whose leaves are the residuals
    perturbed: Sequence[bool]
    result_count: int
    weight_vars: list[Any]
    kept: list[Any]
    recomputed: list[Any]

    def forward(self, *inputs: Any) -> tuple[list[Any], list[Any]]:
        """The results, and the residuals that are kept."""
        jaxpr, count = self.traced.jaxpr, self.result_count
        # Residuals that are recomputed are left out, and XLA drops what only they need.
        wanted = jaxpr.replace(outvars=[*jaxpr.outvars[:count], *self.kept])
        results = jaxpr_as_fun(ClosedJaxpr(wanted, self.traced.consts))(*inputs)
        return results[:count], results[count:]

    def backward(
        self, kept: list[Any], whole: list[Any], gradients: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The gradients of the floats and of the trained weights."""
        residuals = self._residuals(kept, whole)
        perturbed_gradients, weight_gradients = self.tree.unflatten(residuals)(gradients)
        # Floats that are not differentiated get None in place of a gradient.
        float_gradients = Partition(tuple(self.perturbed)).gradients(perturbed_gradients)
        return float_gradients, weight_gradients

    def _residuals(self, kept: list[Any], whole: list[Any]) -> list[Any]:
        """All residuals in order: those that were kept, and those that are computed again.

        The latter are computed from whole weights, which are there once more in the backward pass.
        """
        jaxpr = self.traced.jaxpr
        values = dict(zip(self.kept, kept, strict=True))
        weights = dict(zip(self.weight_vars, whole, strict=True))
        again = made_of(jaxpr, self.recomputed, weights)
        values.update(zip(self.recomputed, again, strict=True))
        return values_of(jaxpr.outvars[self.result_count :], values)


def _linearize(
    function: ClosedJaxpr,
    perturbed: Sequence[bool],
    trained: int,
    floats: list[Any],
    others: list[Any],
    shapes: list[Any],
) -> _Linearized:
    """Trace a function with its linearization, and tell apart what the backward pass needs.

    The arguments are those of `derivative`.
    """
    trees: list[Any] = []
    # What a call computes from weights would be kept: its residuals are results of the call, which
    # reads other values, too. Without the call they have equations that read weights only.
    function = _with_calls_opened(function, len(shapes))

    def forward(
        floats: list[Any], others: list[Any], whole: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        results, backward = _call_with_vjp(function, perturbed, trained, floats, others, whole)
        residuals, tree = jax.tree.flatten(backward)
        # Only arrays can be results of what is traced; the structure goes past the trace.
        trees.append(tree)
        return results, residuals

    traced = jax.make_jaxpr(forward)(floats, others, shapes)
    (tree,), count = trees, len(function.jaxpr.outvars)
    weight_vars = traced.jaxpr.invars[len(traced.jaxpr.invars) - len(shapes) :]
    from_weights = _computed_only_from(traced.jaxpr, weight_vars)
    kept, recomputed = [], []
    # A residual is kept once, however often it is used.
    for residual in dict.fromkeys(variables(traced.jaxpr.outvars[count:])):
        # What is made of weights only is made again of them, and takes no memory until then.
        if residual in from_weights:
            recomputed.append(residual)
        else:
            kept.append(residual)
    return _Linearized(
        traced,
        tree,
        perturbed,
        count,
        weight_vars,
        kept=kept,
        recomputed=recomputed,
    )


def _call_with_vjp(
    function: ClosedJaxpr,
    perturbed: Sequence[bool],
    trained: int,
    floats: list[Any],
    others: list[Any],
    whole: list[Any],
) -> tuple[list[Any], Any]:
    """All results of a function, and JAX's backward function of its float results.

    The arguments are those of `derivative`, with whole weights in place of their shapes.
    """
    outputs = Partition.by_dtype(function.jaxpr.outvars)

    def call(moving: list[Any], weights: list[Any]) -> tuple[list[Any], list[Any]]:
        next_moving, now = iter(moving), []
        for x, moves in zip(floats, perturbed, strict=True):
            now.append(next(next_moving) if moves else x)
        results = jaxpr_as_fun(function)(*now, *others, *weights, *whole[trained:])
        return outputs.split(results)[0], results

    # Inputs that are not differentiated are closed over, and leave no residuals of their own.
    moving = [x for x, moves in zip(floats, perturbed, strict=True) if moves]
    _, backward, results = jax.vjp(call, moving, whole[:trained], has_aux=True)
    return results, backward


def _with_calls_opened(function: ClosedJaxpr, weight_count: int) -> ClosedJaxpr:
    """The function with the bodies of calls in place of those that compute something from weights.

    The weights are its last arguments. Other calls stay as they are.
    """
    jaxpr = function.jaxpr
    calls: set[int] = set()
    _find_calls(jaxpr, jaxpr.invars[len(jaxpr.invars) - weight_count :], calls)
    if not calls:
        return function
    return inlined(function, lambda equation: id(equation) in calls)


def _find_calls(jaxpr: Jaxpr, weights: Iterable[Any], calls: set[int]) -> bool:
    """Add to `calls` the ids of calls in which something is computed from weights only.

    A call that reads nothing but weights is none of them: it runs again as it is. Returns whether
    the jaxpr itself computes something from weights only, in a call or not.
    """
    known = set(weights)
    found = False
    for equation in jaxpr.eqns:
        read = variables(equation.invars)
        if known.isdisjoint(read):
            continue
        if not equation.effects and known.issuperset(read):
            known.update(equation.outvars)
            found = True
        elif equation.primitive.name in JITS:
            inner = open_jaxpr(equation.params["jaxpr"])
            inner_weights = []
            for atom, var in zip(equation.invars, inner.invars, strict=True):
                if not isinstance(atom, Literal) and atom in known:
                    inner_weights.append(var)
            if _find_calls(inner, inner_weights, calls):
                calls.add(id(equation))
                found = True
    return found


def _computed_only_from(jaxpr: Jaxpr, inputs: Iterable[Any]) -> set[Any]:
    """Some inputs of a jaxpr, and all variables that are computed from them and from nothing else.

    An equation with effects is left out: it must not run a second time.
    """
    known = set(inputs)
    for equation in jaxpr.eqns:
        if not equation.effects and known.issuperset(variables(equation.invars)):
            known.update(equation.outvars)
    return known
