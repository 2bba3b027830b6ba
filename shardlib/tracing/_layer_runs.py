"""Loops over layers in which not all layers keep the same for the backward pass.

A loop that JAX differentiates keeps the same of every layer. Here it is run as several loops, one
after the other, whose bodies differ only in the policy of their marked blocks:

    forward     layers 0..8, which keep much  ->  layers 8..32, which keep little
    backward    layers 32..8, recomputed      ->  layers 8..0

Loops over parts of stacked arrays would copy those parts. So each iteration picks its layer from
the whole stack by number, and the derivative is written by hand: every backward loop puts the
gradients of its layers into the same stack, in place.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, custom_vjp_primal_tree_values
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardlib.tracing._jaxpr import values_of, variables
from shardlib.tracing._linearize import Partition, instantiated

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""One iteration: `(constants, carry, layer) -> (carry, outputs)`, all of them trees."""


class Run(NamedTuple):
    """Layers that follow each other and are evaluated by the same function, up to `stop`."""

    stop: int
    step: Step


def loop_in_runs(
    runs: Sequence[Run], consts: Any, init: Any, xs: Any, *, reverse: bool
) -> tuple[Any, Any]:
    """The last carry and the stacked outputs of a loop, as `lax.scan` returns them.

    The steps of all runs compute the same. They are differentiated each by its own policies.

    Args:
        runs: the functions of the iterations, in the order of the layers.
        consts: what every iteration gets.
        init: the first carry.
        xs: arrays of which each iteration gets one layer.
        reverse: whether the last layer comes first.
    """
    inputs = consts, init, xs
    # All runs return the same trees, so that the first one says which.
    results = jax.eval_shape(runs[0].step, consts, init, jax.tree.map(lambda x: x[0], xs))
    loop = _Loop(_flattened(runs, inputs), reverse)
    leaves = loop.run(*map(jax.tree.leaves, inputs))
    carry, outputs = map(jax.tree.unflatten, map(jax.tree.structure, results), leaves)
    return carry, outputs


def _flattened(runs: Sequence[Run], inputs: tuple[Any, Any, Any]) -> tuple[Run, ...]:
    """The runs with steps of lists of arrays, for inputs of the structures of these."""
    structures = tuple(map(jax.tree.structure, inputs))
    return tuple(Run(run.stop, _FlatStep(run.step, structures)) for run in runs)


@dataclass(frozen=True, eq=False)
class _FlatStep:
    """A step as a function of lists of arrays, as derivatives are taken of it.

    `structures` are those of the trees that the step itself takes.
    """

    step: Step
    structures: tuple[Any, ...]

    def __call__(self, *inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        carry, outputs = self.step(*map(jax.tree.unflatten, self.structures, inputs))
        return jax.tree.leaves(carry), jax.tree.leaves(outputs)


class _Moving(NamedTuple):
    """Which of the inputs of a loop are differentiated: those are called floats here."""

    consts: Partition
    init: Partition
    xs: Partition

    @classmethod
    def of(cls, primals: Sequence[Sequence[CustomVJPPrimal]]) -> "_Moving":
        """Those that the loss moves with, as JAX says of each input, and that have derivatives."""
        partitions = []
        for part in primals:
            values = Partition.by_dtype([primal.value for primal in part])
            perturbed = [primal.perturbed for primal in part]
            both = map(operator.and_, perturbed, values.is_float)
            partitions.append(Partition(tuple(both)))
        return cls(*partitions)

    def gradients(self, found: "_Gradients") -> tuple[list[Any], list[Any], list[Any]]:
        """The gradients of all inputs, None for those that are not differentiated."""
        return (
            self.consts.gradients(found.consts),
            self.init.gradients(found.carry),
            self.xs.gradients(found.xs),
        )


@dataclass(frozen=True, eq=False)
class _Loop:
    """The runs of a loop, in the order of the layers, as functions of lists of arrays."""

    runs: tuple[Run, ...]
    reverse: bool

    def run(self, *inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """The last carry and the stacked outputs, with a derivative that goes by the runs.

        Args:
            inputs: the leaves of what every iteration gets, of the first carry and of the stacks.
        """

        @jax.custom_vjp
        def evaluated(consts: list[Any], init: list[Any], xs: list[Any]) -> Any:
            return self.evaluate(consts, init, xs)

        def forwards(*primals: Any) -> Any:
            # With symbolic zeros, each primal comes with whether it is differentiated.
            consts, init, xs = custom_vjp_primal_tree_values(primals)
            return self.forward(consts, init, xs, _Moving.of(primals))

        def backwards(backward: Any, cotangents: Any) -> Any:
            return backward(*cotangents)

        evaluated.defvjp(forwards, backwards, symbolic_zeros=True)
        return evaluated(*inputs)

    def evaluate(self, consts: list[Any], init: list[Any], xs: list[Any]) -> Any:
        """The loop where nothing is differentiated: all runs compute the same."""
        # The first one will do, and a single loop is the smallest program.
        step = functools.partial(self.runs[0].step, consts)
        return lax.scan(step, init, xs, length=self.runs[-1].stop, reverse=self.reverse)

    def forward(
        self, consts: list[Any], init: list[Any], xs: list[Any], moving: _Moving
    ) -> tuple[tuple[list[Any], list[Any]], Any]:
        """The results, and the backward pass as a function of their cotangents.

        Each run is a loop of its own, which takes the carry of the run before.
        """
        # A carry that starts as a constant is differentiated once a layer has added to it.
        moving = moving._replace(init=Partition.by_dtype(init))
        carry, outputs, done, all_kept = init, [], [], []
        for run, start in self._in_order():
            layer = _Derivative.of(run.step, consts, carry, _layer_shapes(xs), moving)
            derivative = _RunDerivative(layer, start, run.stop, self.reverse)
            carry, stacked, kept = derivative.forward(consts, carry, xs)
            outputs.append(stacked)
            done.append(derivative)
            all_kept.append(kept)
        # JAX hands arrays alone from one pass to the other. How the runs are differentiated goes
        # along as a part of the function.
        backward = functools.partial(self._backward, moving, done)
        saved = jax.tree_util.Partial(backward, all_kept, consts, xs)
        return (carry, self._joined(outputs)), saved

    def _backward(
        self,
        moving: _Moving,
        done: list["_RunDerivative"],
        all_kept: list[Any],
        consts: list[Any],
        xs: list[Any],
        *cotangents: Any,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradients of all inputs; None for those that are not differentiated.

        Args:
            moving: which inputs are differentiated.
            done: the derivative of each run, in the order of evaluation.
            all_kept: what each of the runs has kept.
            consts: what every iteration got.
            xs: the stacks.
            cotangents: those of the last carry and of the stacked outputs.
        """
        last_carry, of_outputs = cotangents
        # Which outputs have derivatives, all runs agree on, since they compute the same.
        outputs = instantiated(done[0].layer.outputs.floats(of_outputs))
        carry = instantiated(moving.init.floats(last_carry))
        gradients = _Gradients.zeros(carry, moving, consts, xs)
        for derivative, kept in zip(reversed(done), reversed(all_kept), strict=True):
            gradients = derivative.backward(kept, consts, xs, outputs, gradients)
        return moving.gradients(gradients)

    def _in_order(self) -> list[tuple[Run, int]]:
        """The runs in the order in which they are evaluated, with the first layer of each."""
        starts = [0, *[run.stop for run in self.runs[:-1]]]
        in_order = list(zip(self.runs, starts, strict=True))
        if self.reverse:
            in_order.reverse()
        return in_order

    def _joined(self, outputs: list[list[Any]]) -> list[Any]:
        """The outputs of all layers, from those of each run in the order of evaluation."""
        if self.reverse:
            outputs = outputs[::-1]
        return [jnp.concatenate(parts) for parts in zip(*outputs, strict=True)]


class _Gradients(NamedTuple):
    """Gradients so far, of what is differentiated."""

    carry: list[Any]
    consts: list[Any]
    xs: list[Any]

    @classmethod
    def zeros(
        cls, carry: list[Any], moving: _Moving, consts: list[Any], xs: list[Any]
    ) -> "_Gradients":
        """Those behind the last layer, of whose carry they are known.

        Stacks start as zeros of their whole size, into which each layer puts its own.
        """
        zero_consts = map(jnp.zeros_like, moving.consts.floats(consts))
        zero_xs = map(jnp.zeros_like, moving.xs.floats(xs))
        return cls(carry, list(zero_consts), list(zero_xs))

    def with_layer(
        self, number: Any, carry: list[Any], added: list[Any], layer: list[Any]
    ) -> "_Gradients":
        """These after one more layer.

        Args:
            number: that of the layer.
            carry: the gradients of its carry.
            added: those of constants, which are sums over all layers.
            layer: those of its part of the stacks, which go into their place there.
        """
        consts = list(map(jnp.add, self.consts, added))
        stacks = []
        for stack, gradient in zip(self.xs, layer, strict=True):
            stacks.append(lax.dynamic_update_index_in_dim(stack, gradient, number, 0))
        return _Gradients(carry, consts, stacks)


def _layer_shapes(stacks: list[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of one layer of each stack."""
    return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacks]


def _layer(stacks: list[Any], number: Any) -> list[Any]:
    """One layer of each stack."""
    return [lax.dynamic_index_in_dim(x, number, 0, keepdims=False) for x in stacks]


@dataclass(frozen=True, eq=False)
class _RunDerivative:
    """The two passes of a run through its layers, by the derivative of one of them."""

    layer: "_Derivative"
    start: int
    stop: int
    reverse: bool

    def forward(
        self, consts: list[Any], carry: list[Any], xs: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The next run's carry, and the outputs and what is kept of each layer, stacked.

        Layers are picked from the whole stack by number: a part of the stack would be a copy.
        """

        def iteration(carry: Any, number: Any) -> Any:
            carry, outputs, kept = self.layer.forward(consts, carry, _layer(xs, number))
            return carry, (outputs, kept)

        numbers = jnp.arange(self.start, self.stop)
        carry, (outputs, kept) = lax.scan(iteration, carry, numbers, reverse=self.reverse)
        return carry, outputs, kept

    def backward(
        self,
        kept: list[Any],
        consts: list[Any],
        xs: list[Any],
        outputs: list[Any],
        gradients: _Gradients,
    ) -> _Gradients:
        """The gradients before these layers, from those behind them.

        Args:
            kept: what each of the layers has kept, stacked.
            consts: what every iteration got.
            xs: the stacks, of all layers.
            outputs: the cotangents of the outputs of all layers, of those that have any.
            gradients: those so far.
        """

        def iteration(gradients: _Gradients, at: Any) -> Any:
            number, kept = at
            carry, added, layer = self.layer.backward(
                kept, consts, _layer(xs, number), gradients.carry, _layer(outputs, number)
            )
            return gradients.with_layer(number, carry, added, layer), None

        numbers = jnp.arange(self.start, self.stop)
        gradients, _ = lax.scan(iteration, gradients, (numbers, kept), reverse=not self.reverse)
        return gradients


class _Linearization:
    """An iteration that returns all that its backward pass reads, to be traced once.

    A traced function returns arrays alone. The structure of JAX's backward function, and which of
    the results have derivatives, are known while it is traced, and are left here.
    """

    def __init__(self, step: Step, moving: _Moving) -> None:
        self.step, self.moving = step, moving
        self.tree: Any = None
        self.carries = self.outputs = Partition(())

    def evaluate(self, *inputs: list[Any]) -> tuple[Any, list[Any]]:
        """The results, and the leaves of the backward function.

        Args:
            inputs: constants, a carry and a layer of the stacks.
        """
        moved, fixed = zip(*map(Partition.split, self.moving, inputs), strict=True)
        step = functools.partial(self._floats, fixed)
        _, backward, results = jax.vjp(step, moved, has_aux=True)
        leaves, self.tree = jax.tree.flatten(backward)
        return results, leaves

    def _floats(self, fixed: Any, moved: Any) -> tuple[list[Any], tuple[Any, Any]]:
        """The results that have derivatives, and all results.

        Args:
            fixed: the inputs that are not differentiated.
            moved: those that are.
        """
        after, outputs = self.step(*map(Partition.merge, self.moving, moved, fixed))
        self.carries, self.outputs = Partition.by_dtype(after), Partition.by_dtype(outputs)
        return [self.carries.floats(after), self.outputs.floats(outputs)], (after, outputs)


@dataclass(frozen=True, eq=False)
class _Derivative:
    """One iteration with its linearization, traced.

    What its backward pass reads and every iteration has in any case, constants and layers of
    stacks, is not kept.
    """

    traced: ClosedJaxpr  # returns the results and then what the backward pass reads
    tree: Any  # the structure of JAX's backward function, whose leaves are the latter
    carries: Partition  # which carries have derivatives
    outputs: Partition  # the same of the outputs
    const_vars: list[Any]
    layer_vars: list[Any]
    kept: list[Any]  # the variables that are kept

    @classmethod
    def of(
        cls, step: Step, consts: list[Any], carry: list[Any], layer: list[Any], moving: _Moving
    ) -> "_Derivative":
        """Trace an iteration with its derivative. Shapes will do for its arguments.

        Args:
            step: the iteration.
            consts: what every iteration gets.
            carry: what the layer before returned.
            layer: one layer of the stacks.
            moving: which of these are differentiated.
        """
        # Traced once: both passes are parts of this one trace, so that they agree on what is kept.
        linearization = _Linearization(step, moving)
        traced = jax.make_jaxpr(linearization.evaluate)(consts, carry, layer)
        carries, outputs = linearization.carries, linearization.outputs
        jaxpr = traced.jaxpr
        const_vars = jaxpr.invars[: len(consts)]
        layer_vars = jaxpr.invars[len(consts) + len(carry) :]
        results = len(carries.is_float) + len(outputs.is_float)
        there = {*const_vars, *layer_vars, *jaxpr.constvars}
        # The backward pass may read a value more than once, which is kept once.
        read = dict.fromkeys(variables(jaxpr.outvars[results:]))
        kept = [var for var in read if var not in there]
        return cls(traced, linearization.tree, carries, outputs, const_vars, layer_vars, kept)

    @property
    def result_count(self) -> int:
        """How many carries and outputs there are, before what the backward pass reads."""
        return len(self.carries.is_float) + len(self.outputs.is_float)

    def forward(
        self, consts: list[Any], carry: list[Any], layer: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The next carry, the outputs, and what is kept for the backward pass.

        Residuals that every iteration has in any case are left out, so that no loop stacks them.
        """
        jaxpr, count = self.traced.jaxpr, self.result_count
        # What nothing reads of the rest is left out by XLA.
        wanted = jaxpr.replace(outvars=[*jaxpr.outvars[:count], *self.kept])
        results = jaxpr_as_fun(ClosedJaxpr(wanted, self.traced.consts))(*consts, *carry, *layer)
        carries = len(self.carries.is_float)
        return results[:carries], results[carries:count], results[count:]

    def backward(
        self,
        kept: list[Any],
        consts: list[Any],
        layer: list[Any],
        carry_cotangents: list[Any],
        output_cotangents: list[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradients of the carry, of constants and of the layer, of what is differentiated.

        Outputs that have no derivatives have no cotangents here either.
        """
        backward = self.tree.unflatten(self._residuals(kept, consts, layer))
        ((of_consts, of_carry, of_layer),) = backward([carry_cotangents, output_cotangents])
        return of_carry, of_consts, of_layer

    def _residuals(self, kept: list[Any], consts: list[Any], layer: list[Any]) -> list[Any]:
        """All that the backward pass reads: what was kept, and what is there in any case."""
        jaxpr = self.traced.jaxpr
        values = dict(zip(self.kept, kept, strict=True))
        values.update(zip(self.const_vars, consts, strict=True))
        values.update(zip(self.layer_vars, layer, strict=True))
        values.update(zip(jaxpr.constvars, self.traced.consts, strict=True))
        return values_of(jaxpr.outvars[self.result_count :], values)
