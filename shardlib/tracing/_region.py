"""Weights, and the regions of a computation in which they are whole.

A *region* makes weights whole, uses and drops them; its backward pass makes them whole again, and
turns their gradients at once into the form in which gradients are added up. It keeps for its
backward pass what JAX would, except weights and what is made of weights alone. A weight that is
whole all the time needs no region: it *enters* a computation once, and its gradient leaves there,
when all that uses it is done.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from shardlib.tracing._jaxpr import made_of, relocated, variables


@dataclass(frozen=True, eq=False)
class Weight:
    """How a weight is made whole, and what becomes of its gradient.

    `whole(stored, taken)` makes it; None if it is stored whole. `reduced(taken, gradient)` makes of
    its gradient what is to be given for the zero that is held for it, or, if it `adds`, to be added
    to the sums that are; None is a frozen weight. `taken` is how many leading dims loops have taken
    off, at most `stacked`. Weights of one `group` are made whole together.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    whole: Callable[[Any, int], jax.Array] | None
    reduced: Callable[[int, jax.Array], jax.Array] | None
    stacked: int
    group: Hashable = None
    adds: bool = False


class StoredWeight(NamedTuple):
    """What stands for a weight.

    What is stored of it, a zero to which the derivative is taken (of a frozen one, None), and a
    reference to the sums of its gradients before this one. If the weight adds to them, the zero is
    a scalar, and its derivative is zero.
    """

    stored: Any
    zero: Any
    sums: Any = None


@dataclass(frozen=True, eq=False)
class WeightSlice:
    """A weight, less the dims that loops have taken off: which of each is `where`."""

    weight: Weight
    stored: Any
    zero: Any
    sums: Any
    where: tuple[Any, ...] = ()

    @property
    def taken(self) -> int:
        return len(self.where)

    def whole(self, stored: Any) -> jax.Array:
        return stored if self.weight.whole is None else self.weight.whole(stored, self.taken)

    def reduced(self, gradient: jax.Array, reader: Any) -> jax.Array:
        """What its gradient comes to, because of the equation that reads the weight."""
        assert self.weight.reduced is not None
        return with_source_of(reader, functools.partial(self.weight.reduced, self.taken), gradient)

    @property
    def target(self) -> Any:
        """The zero to which the derivative is taken; what it comes to is added to the sums of what
        `adds`.
        """
        if not self.weight.adds:
            return self.zero

        @jax.custom_vjp
        def target(zero: Any, sums: Any, where: Any) -> Any:
            del zero
            return jnp.zeros(sums.shape[len(where) :], sums.dtype)

        def forwards(zero: Any, sums: Any, where: Any) -> Any:
            return target(zero, sums, where), (sums, where)

        def backwards(saved: Any, gradient: Any) -> Any:
            sums, where = saved
            sums[where or ...] += gradient
            return jnp.float32(0), None, None

        target.defvjp(forwards, backwards)
        return target(self.zero, self.sums, self.where)

    def at(self, index: int) -> "WeightSlice":
        return self.layer(
            self.stored[index], self.zero if self._scalar else self.zero[index], index
        )

    def layer(self, stored: Any, zero: Any, index: Any) -> "WeightSlice":
        return WeightSlice(self.weight, stored, zero, self.sums, (*self.where, index))

    @property
    def scanned(self) -> tuple[Any, Any]:
        """What a loop over layers takes one by one."""
        return self.stored, None if self._scalar else self.zero

    @property
    def _scalar(self) -> bool:
        return self.zero is None or self.weight.adds


def bind_whole_weight(root: WeightSlice, reader: Any) -> jax.Array:
    """A weight that is stored whole, whose gradient is reduced when all of it is there; `reader` is
    to blame for it.
    """

    @jax.custom_vjp
    def entered(stored: Any, zero: Any, sums: Any, where: Any) -> Any:
        del zero, sums, where
        return stored

    def forwards(stored: Any, zero: Any, sums: Any, where: Any) -> Any:
        del zero
        return stored, (sums, where)

    def backwards(saved: Any, gradient: Any) -> Any:
        sums, where = saved
        if sums is not None:  # taken out, so that they count once however often the weight enters
            before = sums[where or ...]
            sums[where or ...] = jnp.zeros_like(before)
            gradient = gradient.astype(sums.dtype) + before
        return None, root.reduced(gradient, reader), None, None

    entered.defvjp(forwards, backwards)
    return entered(root.stored, root.target, None if root.weight.adds else root.sums, root.where)


def use(
    body: Callable[[list[Any], dict[WeightSlice, Any]], list[Any]],
    plain: list[Any],
    roots: list[WeightSlice],
) -> list[Any]:
    """`body(plain, weights)`, which keeps for its backward pass neither weights nor what is made of
    them alone.
    """
    trained = [root for root in roots if root.weight.reduced is not None]
    roots = trained + [root for root in roots if root.weight.reduced is None]
    floats, others, together = _parted(plain)

    def run(floats: list[Any], others: list[Any], whole: list[Any]) -> list[Any]:
        return body(together(floats, others), dict(zip(roots, whole, strict=True)))

    shapes = [
        jax.ShapeDtypeStruct(root.weight.shape[root.taken :], root.weight.dtype) for root in roots
    ]
    traced = jax.make_jaxpr(run)(floats, others, shapes)
    readers = [reader_of(traced.jaxpr, var) for var in traced.jaxpr.invars[len(plain) :]]
    parted = _parted(traced.jaxpr.outvars)[2]

    def make(stored: list[Any]) -> list[Any]:
        return [
            with_source_of(reader, root.whole, one)
            for root, reader, one in zip(roots, readers, stored, strict=True)
        ]

    def at_once(floats: list[Any], others: list[Any], stored: list[Any]) -> list[Any]:
        floats, others, stored = _barrier(floats, others, stored)
        return [*floats, *others, *make(stored)]

    @jax.custom_vjp
    def used(floats: Any, others: Any, stored: Any, zeros: Any) -> Any:
        del zeros
        return _parted(jaxpr_as_fun(traced)(*at_once(floats, others, stored)))[:2]

    def forwards(*primals: Any) -> Any:
        perturbed = [x.perturbed for x in primals[0]]
        floats, others, stored = jax.tree.map(
            lambda x: x.value, primals[:3], is_leaf=lambda x: hasattr(x, "value")
        )
        there, back = derivative(traced, perturbed, len(trained), floats, others, shapes)
        results, kept = there(*at_once(floats, others, stored))
        return _parted(results)[:2], (jax.tree_util.Partial(back, kept), stored)

    def backwards(saved: Any, gradients: Any) -> Any:
        back, stored = saved
        gradients = [
            g if isinstance(g, jax.Array) else jnp.zeros(g.shape, g.dtype) for g in gradients[0]
        ]
        gradients, stored = _barrier(gradients, stored)
        of_floats, of_trained = back(make(stored), gradients)
        reduced = [
            root.reduced(g, reader)
            for root, g, reader in zip(trained, of_trained, readers, strict=False)
        ]
        # Lest whole gradients wait: what comes before in the computation, and after this, waits for
        # them to be reduced.
        of_floats, reduced = _barrier(of_floats, reduced)
        return of_floats, None, None, reduced

    used.defvjp(forwards, backwards, symbolic_zeros=True)
    return parted(
        *used(floats, others, [root.stored for root in roots], [root.target for root in trained])
    )


def _parted(
    values: Sequence[Any],
) -> tuple[list[Any], list[Any], Callable[[Sequence[Any], Sequence[Any]], list[Any]]]:
    """What has derivatives, what has none, and how to put such two together again."""
    smooth = [
        jnp.issubdtype((x.aval if hasattr(x, "aval") else jnp.asarray(x)).dtype, jnp.inexact)
        for x in values
    ]

    def together(floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        of = {True: iter(floats), False: iter(others)}
        return [next(of[is_smooth]) for is_smooth in smooth]

    pairs = list(zip(values, smooth, strict=True))
    return (
        [x for x, is_smooth in pairs if is_smooth],
        [x for x, is_smooth in pairs if not is_smooth],
        together,
    )


def derivative(
    function: ClosedJaxpr,
    perturbed: Sequence[bool],
    trained: int,
    floats: list[Any],
    others: list[Any],
    shapes: list[Any],
) -> tuple[Callable[..., tuple[list[Any], list[Any]]], Callable[..., tuple[list[Any], list[Any]]]]:
    """A function of numbers and weights, and its derivative to the `perturbed` numbers and the
    trained weights.

    The first also gives what the second needs of it, which is neither weights nor made of weights
    alone.
    """
    trees: list[Any] = []

    def forward(
        floats: list[Any], others: list[Any], whole: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        def of(moving: list[Any], trained_whole: list[Any]) -> tuple[list[Any], list[Any]]:
            moved = iter(moving)
            now = [next(moved) if moves else x for x, moves in zip(floats, perturbed, strict=True)]
            results = jaxpr_as_fun(function)(*now, *others, *trained_whole, *whole[trained:])
            return _parted(results)[0], results

        moving = [x for x, moves in zip(floats, perturbed, strict=True) if moves]
        _, backward, results = jax.vjp(of, moving, whole[:trained], has_aux=True)
        residuals, tree = jax.tree.flatten(backward)
        trees.append(tree)
        return results, residuals

    traced = jax.make_jaxpr(forward)(floats, others, shapes)
    jaxpr, (tree,), count = traced.jaxpr, trees, len(function.jaxpr.outvars)
    residuals = jaxpr.outvars[count:]
    before = len(jaxpr.invars) - len(shapes)
    of_weights = set(jaxpr.invars[before:])
    for equation in jaxpr.eqns:
        if not equation.effects and of_weights.issuperset(variables(equation.invars)):
            of_weights.update(equation.outvars)
    kept = list(dict.fromkeys(var for var in variables(residuals) if var not in of_weights))
    again = list(dict.fromkeys(var for var in variables(residuals) if var in of_weights))

    def there(*inputs: Any) -> tuple[list[Any], list[Any]]:
        wanted = ClosedJaxpr(jaxpr.replace(outvars=[*jaxpr.outvars[:count], *kept]), traced.consts)
        results = jaxpr_as_fun(wanted)(*inputs)
        return results[:count], results[count:]

    def back(
        of_kept: list[Any], whole: list[Any], gradients: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        values = dict(zip(kept, of_kept, strict=True))
        values.update(zip(again, _again(jaxpr, again, before, whole), strict=True))
        backward = tree.unflatten(
            [atom.val if isinstance(atom, Literal) else values[atom] for atom in residuals]
        )
        of_moving, of_trained = backward(gradients)
        moved = iter(of_moving)
        return [next(moved) if moves else None for moves in perturbed], of_trained

    return there, back


def reader_of(jaxpr: Jaxpr, var: Any) -> Any:
    """The first equation that reads a value, if any does."""
    return next((equation for equation in jaxpr.eqns if var in variables(equation.invars)), None)


def with_source_of(reader: Any, function: Callable[..., Any], *args: Any, deep: bool = True) -> Any:
    """Call a function as if from the line of an equation, which is to blame for it; `deep`, for
    what it calls too.
    """
    if reader is None:
        return function(*args)
    traced, out = jax.make_jaxpr(function, return_shape=True)(*args)
    blamed = relocated(traced.jaxpr, reader.source_info.traceback, deep)
    results = jaxpr_as_fun(ClosedJaxpr(blamed, traced.consts))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _again(jaxpr: Jaxpr, wanted: list[Any], before: int, whole: list[Any]) -> list[Any]:
    """What is made of weights alone, made again."""
    return made_of(jaxpr, wanted, dict(zip(jaxpr.invars[before:], whole, strict=True)))


def _barrier(*trees: Any) -> Any:
    """Nothing of it before all of it is there. Keys are no arrays to a compiler."""
    leaves, treedef = jax.tree.flatten(trees)
    numbers = [
        k for k, leaf in enumerate(leaves) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    for k, leaf in zip(
        numbers, lax.optimization_barrier([leaves[k] for k in numbers]), strict=True
    ):
        leaves[k] = leaf
    return treedef.unflatten(leaves)
