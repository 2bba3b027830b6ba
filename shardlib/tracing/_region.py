"""Weights, and the regions of a computation in which they are whole.

A *region* makes weights whole, uses them and drops them. Its backward pass makes them whole again
and at once turns their gradients into the form in which gradients are added up. It keeps for its
backward pass what JAX would keep, except weights and what is computed from weights only:

    forward     stored --whole()--> weights ---+--> outputs          weights are dropped here
                inputs ------------------------+--> residuals        kept for the backward pass

    backward    stored --whole()--> weights ---+--> gradients of inputs
                residuals, d outputs ----------+--> gradients of weights --reduced()--> anchors

A weight that is stored whole needs no region. It is *bound* once, before all that uses it. The
backward pass gets there last, when all uses have added to the gradient, and reduces it.

The derivative is taken with respect to a *gradient anchor* for each weight, an array of zeros in
the form in which gradients are wanted, which may be another shape and dtype than the weight has.
The anchor adds nothing to a value; whatever a backward pass returns as its cotangent is what
`jax.grad` hands out in the end. A weight that accumulates in place has a scalar anchor instead,
whose derivative is zero: see `StoredWeight`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from shardlib.layouts._host import is_on_host
from shardlib.tracing._jaxpr import picked, readers_of, relocated, shapes_of
from shardlib.tracing._linearize import Partition, derivative, instantiated
from shardlib.tracing._reduced_sums import Further, OfShard, is_summed_inside, summing_inside


@dataclass(frozen=True, eq=False)
class Weight:
    """How a weight is made whole, and what becomes of its gradient.

    - `whole(stored, consumed_dims)` makes it whole; None if it is stored whole.
    - `reduced(gradient, consumed_dims)` turns its gradient into the cotangent of its anchor or, if
      it `accumulates_in_place`, into what is added to the sums of its gradients; None for a frozen
      weight.
    - `stacked`: how many leading dims count layers, at most, and may be consumed by loops or picks.
    - `group`: weights of one group, a layer that `Zero(layers=...)` finds by path, are made whole
      together.
    - `accumulates_in_place`: gradients are added to sums that are held by reference.
    - `axes`: the manual axes over which `whole` and `reduced` take collectives.

    `consumed_dims` is how many leading dims the loops around a use, or picks by number, have taken
    off.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    whole: Callable[[Any, int], jax.Array] | None
    reduced: Callable[[jax.Array, int], jax.Array] | None
    stacked: int
    group: Hashable = None
    accumulates_in_place: bool = False
    axes: tuple[str, ...] = ()

    @property
    def is_stored_whole(self) -> bool:
        """Whether every device stores all of it, so that nothing is gathered."""
        return self.whole is None


class StoredWeight(NamedTuple):
    """The arrays that stand for a weight while a step runs.

    If the weight accumulates in place, its anchor is a scalar whose derivative is zero, since the
    gradient itself goes into `sums`. Another weight may have sums only if it is stored whole: those
    of earlier microbatches, which are added to the last gradient before it is reduced.
    """

    stored: Any  # the weight in the form it is stored in
    # Zeros with respect to which the derivative is taken; None for a frozen weight.
    gradient_anchor: Any
    sums: Any = None  # a reference to the sum of its gradients so far


@dataclass(frozen=True, eq=False)
class WeightSlice:
    """A weight, or one layer of it, which a loop takes or a number picks.

    Two slices are equal only if they are the same object, so they can be keys of dictionaries.
    """

    weight: Weight
    stored: Any
    gradient_anchor: Any
    sums: Any  # always those of the whole stack: a reference cannot be cut
    where: tuple[Any, ...] = ()  # the index of the layer in each consumed dim

    @property
    def consumed_dims(self) -> int:
        """How many leading dims of the weight loops and picks have taken off."""
        return len(self.where)

    def whole(self, stored: Any) -> jax.Array:
        """The whole weight, made from what is `stored` of it unless that is whole already."""
        if self.weight.whole is None:
            return stored
        return self.weight.whole(stored, self.consumed_dims)

    def reduced(self, gradient: jax.Array, reader: Any) -> jax.Array:
        """The gradient in the form in which it is added up.

        The operations that this takes blame the line of `reader`, the equation that reads the
        weight.
        """
        reduced = self.weight.reduced
        assert reduced is not None
        return with_source_of(reader, lambda g: reduced(g, self.consumed_dims), gradient)

    @property
    def target(self) -> Any:
        """What a region differentiates with respect to.

        That is the anchor. For a weight that accumulates in place it is an array of zeros that adds
        its cotangent to the sums.
        """
        if not self.weight.accumulates_in_place:
            return self.gradient_anchor
        return _accumulating_target(self.gradient_anchor, self.sums, self.where)

    def at(self, index: int) -> "WeightSlice":
        """The layer with a number that is known while tracing."""
        stored = self.stored[index]
        if self.has_stacked_anchor:
            return self.layer(stored, self.gradient_anchor[index], index)
        return self.layer(stored, self.gradient_anchor, index)

    def layer(self, stored: Any, gradient_anchor: Any, index: Any) -> "WeightSlice":
        """One layer, from its parts of the stored weight and of the anchor, and its number."""
        where = (*self.where, index)
        return WeightSlice(self.weight, stored, gradient_anchor, self.sums, where)

    @property
    def scanned(self) -> tuple[Any, Any]:
        """The arrays of which a loop over layers gets one layer each time: stored, and anchor.

        An anchor that has no dim for the layers is no input of the loop, and None here.
        """
        if self.has_stacked_anchor:
            return self.stored, self.gradient_anchor
        return self.stored, None

    @property
    def with_gradients_added_at_once(self) -> "WeightSlice":
        """The same weight, whose layers do not add their gradients to the sums themselves.

        Those of all layers are added together, and take memory until then.
        """
        if not self.weight.accumulates_in_place:
            return self
        weight = replace(self.weight, accumulates_in_place=False)
        return replace(self, weight=weight, gradient_anchor=self.target, sums=None)

    @property
    def has_stacked_anchor(self) -> bool:
        """Whether the anchor has the leading dims of the weight; else it is a scalar or None."""
        return self.gradient_anchor is not None and not self.weight.accumulates_in_place


def _accumulating_target(gradient_anchor: Any, sums: Any, where: tuple[Any, ...]) -> Any:
    """Zeros like a layer of the sums, whose cotangent is added to that layer in the backward pass.

    The scalar anchor is only there so that the derivative reaches this function; its own is zero.
    """

    @jax.custom_vjp
    def target(gradient_anchor: Any, sums: Any, where: Any) -> Any:
        del gradient_anchor
        return jnp.zeros(sums.shape[len(where) :], sums.dtype)

    def forwards(gradient_anchor: Any, sums: Any, where: Any) -> Any:
        return target(gradient_anchor, sums, where), (sums, where)

    def backwards(saved: Any, gradient: Any) -> Any:
        sums, where = saved
        sums[_index_of_layer(where)] += gradient
        # The gradient has been added already: the anchor's is zero. The sums and the index of a
        # layer have none.
        return jnp.float32(0), None, None

    target.defvjp(forwards, backwards)
    return target(gradient_anchor, sums, where)


def _index_of_layer(where: tuple[Any, ...]) -> Any:
    """An index into a reference: of one layer, or of everything where no dim is consumed."""
    return where if where else ...


def bind_whole_weight(root: WeightSlice, reader: Any) -> jax.Array:
    """The array of a weight that is stored whole, whose gradient is reduced in the backward pass.

    It is reduced once, when all uses of the array have added to it. The operations that this takes
    blame the line of `reader`, an equation, if there is one.
    """

    @jax.custom_vjp
    def bound(stored: Any, gradient_anchor: Any, sums: Any, where: Any) -> Any:
        del gradient_anchor, sums, where
        return stored

    def forwards(stored: Any, gradient_anchor: Any, sums: Any, where: Any) -> Any:
        del gradient_anchor
        return stored, (sums, where)

    def backwards(saved: Any, gradient: Any) -> Any:
        sums, where = saved
        if sums is not None:
            # What was summed before is reduced along with the gradient. It is taken out of the
            # sums, so that it counts once however often the weight is bound.
            layer = _index_of_layer(where)
            before = sums[layer]
            sums[layer] = jnp.zeros_like(before)
            gradient = gradient.astype(sums.dtype) + before
        return None, root.reduced(gradient, reader), None, None

    bound.defvjp(forwards, backwards)
    # A weight that accumulates in place adds to the sums by its target instead.
    sums = None if root.weight.accumulates_in_place else root.sums
    return bound(root.stored, root.target, sums, root.where)


@dataclass(frozen=True, eq=False)
class _TracedRegion:
    """The body of a region, traced as a function of floats, other values and whole weights.

    The trained weights come before the frozen ones. `readers` has, for each weight, the first
    equation of the body that reads it: its line is blamed for making the weight whole.

    Weights whose gradients the body reduces itself, `summed`, come last, like frozen ones. Behind
    them the body takes their shards, and behind the floats their anchors, whose derivatives are the
    gradients.
    """

    body: ClosedJaxpr
    weights: list[WeightSlice]
    shapes: list[jax.ShapeDtypeStruct]  # of the whole weights, and of shards
    trained: list[WeightSlice]
    readers: list[Any]
    outputs: Partition  # the results by dtype: integers have no cotangents
    summed: list[WeightSlice]
    anchors: list[jax.ShapeDtypeStruct]  # of those

    def evaluate(
        self, floats: list[Any], others: list[Any], stored: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The results of the region where nothing is differentiated: floats, and others."""
        arguments = self.arguments(floats, others, stored)
        return self.outputs.split(jaxpr_as_fun(self.body)(*arguments))

    def forward(
        self, perturbed: list[bool], floats: list[Any], others: list[Any], stored: list[Any]
    ) -> tuple[tuple[list[Any], list[Any]], Any]:
        """The results, floats and others, and what is kept for the backward pass.

        `perturbed` says which of the floats are differentiated; the others leave no residuals.
        """
        trained, moves = len(self.trained), [*perturbed, *[True] * len(self.summed)]
        inputs = [*floats, *self.anchors]
        forward, backward = derivative(self.body, moves, trained, inputs, others, self.shapes)
        arguments = self.arguments(floats, others, stored)
        results, kept = forward(*arguments)
        # Inputs are kept as they were before the barrier: what is the same for all layers of a
        # loop, JAX keeps once, but what a layer has made of it, once for each layer.
        anchors = arguments[len(floats) : len(inputs)]
        before_barrier = [*floats, *anchors, *others]
        kept = _replaced(kept, arguments[: len(before_barrier)], before_barrier)
        leaves, treedef = jax.tree.flatten(kept)
        made = _smallest_made_here(leaves, [*before_barrier, *stored])

        def resume(leaves: list[Any], stored: list[Any], cotangents: list[Any]) -> Any:
            # Weights are not made whole again before the forward pass is done with them: cotangents
            # may be there early, such as those of a loss.
            waited_for = [] if made is None else [leaves[made]]
            cotangents, stored, waited_for = _barrier(cotangents, stored, waited_for)
            if made is not None:
                leaves = [*leaves[:made], *waited_for, *leaves[made + 1 :]]
            return backward(treedef.unflatten(leaves), self.make_whole(stored), cotangents)

        return self.outputs.split(results), (jax.tree_util.Partial(resume, leaves), stored)

    def backward(self, saved: Any, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The gradients of the floats, and the reduced ones of all weights that have some."""
        resume, stored = saved
        gradients, weight_gradients = resume(stored, instantiated(cotangents))
        count = len(gradients) - len(self.summed)
        float_gradients, of_summed = gradients[:count], gradients[count:]
        reduced = [*self.reduce(weight_gradients), *of_summed]
        # The backward pass of what comes before in the computation waits until the gradients of
        # the weights are reduced: otherwise whole gradients of many regions would wait in memory.
        return _barrier(float_gradients, reduced)

    def make_whole(self, stored: list[Any]) -> list[Any]:
        """All weights of the region, whole, and the shards that the body takes."""
        weights = []
        for root, reader, array in zip(self.weights, self.readers, stored, strict=True):
            weights.append(with_source_of(reader, root.whole, array))
        return [*weights, *stored[len(stored) - len(self.summed) :]]

    def arguments(self, floats: list[Any], others: list[Any], stored: list[Any]) -> list[Any]:
        """The arguments of the body.

        The barrier keeps the compiler from making weights whole before the other inputs are there,
        which would keep many regions' weights in memory at a time.
        """
        floats, others, stored = _barrier(floats, others, stored)
        # Nothing reads anchors, so that they take no memory. Behind the barrier they would.
        anchors = [jnp.zeros(anchor.shape, anchor.dtype) for anchor in self.anchors]
        return [*floats, *anchors, *others, *self.make_whole(stored)]

    def reduce(self, gradients: list[Any]) -> list[Any]:
        """The gradients of the trained weights, in the form in which they are added up."""
        reduced = []
        # Readers of frozen weights are left over.
        for root, gradient, reader in zip(self.trained, gradients, self.readers, strict=False):
            reduced.append(root.reduced(gradient, reader))
        return reduced


def _trace_region(
    body: Callable[[list[Any], dict[WeightSlice, Any]], list[Any]],
    partition: Partition,
    arrays: list[Any],
    roots: list[WeightSlice],
    targets: dict[WeightSlice, Any],
) -> _TracedRegion:
    """Trace `body(arrays, weights)` for whole weights, with the floats among the arrays first.

    `targets` are those of the trained weights.
    """
    # Trained weights come first, as `derivative` wants them.
    trained = [root for root in roots if root.weight.reduced is not None]
    roots = trained + [root for root in roots if root.weight.reduced is None]
    floats, others = partition.split(arrays)

    def run(floats: list[Any], others: list[Any], whole: list[Any]) -> list[Any]:
        return body(partition.merge(floats, others), dict(zip(roots, whole, strict=True)))

    traced = jax.make_jaxpr(run)(floats, others, _whole_shapes(roots))
    weights = dict(zip(roots, traced.jaxpr.invars[len(arrays) :], strict=True))
    readers = {root: reader_of(traced.jaxpr, var) for root, var in weights.items()}
    outputs = Partition.by_dtype(traced.jaxpr.outvars)
    summed = []
    for root in trained:
        # What is in the memory of the host is copied in the region.
        if is_summed_inside(traced.jaxpr, weights[root]) and not is_on_host(root.stored):
            summed.append(root)
    last = {root: Further(*map(_variable, (targets[root], root.stored))) for root in summed}
    trained = [root for root in trained if root not in last]
    roots = trained + [root for root in roots if root not in trained and root not in last] + summed
    anchors, shards = [one.anchor for one in last.values()], [one.shard for one in last.values()]
    of_shards = {weights[root]: (last[root], _of_shard(root, readers[root])) for root in summed}
    jaxpr = summing_inside(traced.jaxpr, of_shards)
    given, rest = jaxpr.invars[: len(floats)], jaxpr.invars[len(floats) : len(arrays)]
    inputs = [*given, *anchors, *rest, *picked(weights, roots), *shards]
    return _TracedRegion(
        traced.replace(jaxpr=jaxpr.replace(invars=inputs)),
        roots,
        _whole_shapes(roots) + shapes_of(shards),
        trained,
        picked(readers, roots),
        outputs,
        summed,
        shapes_of(anchors),
    )


def _whole_shapes(roots: Sequence[WeightSlice]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of weights, or layers of weights, that are whole."""
    shapes = []
    for root in roots:
        shape = root.weight.shape[root.consumed_dims :]
        shapes.append(jax.ShapeDtypeStruct(shape, root.weight.dtype))
    return shapes


def _of_shard(root: WeightSlice, reader: Any) -> OfShard:
    """What an operation inside of a region does to a weight and to its gradient."""
    return OfShard(
        lambda shard: with_source_of(reader, root.whole, shard),
        lambda gradient: root.reduced(gradient, reader),
        root.weight.axes,
    )


def _variable(array: Any) -> Var:
    """A variable for arrays like this one."""
    return Var(jax.typeof(array))


def evaluate_region(
    body: Callable[[list[Any], dict[WeightSlice, Any]], list[Any]],
    arrays: list[Any],
    roots: list[WeightSlice],
) -> list[Any]:
    """Evaluate `body(arrays, weights)` as a region: weights are whole only while it runs.

    For its backward pass it keeps neither weights nor what is computed from them only. `arrays` are
    the other inputs, of any dtype; the result is a list of arrays, as `body` returns it.
    """
    inputs = Partition.by_dtype(arrays)
    floats, others = inputs.split(arrays)
    targets = {root: root.target for root in roots if root.weight.reduced is not None}
    region = _trace_region(body, inputs, arrays, roots, targets)

    @jax.custom_vjp
    def evaluated(floats: Any, others: Any, stored: Any, anchors: Any) -> Any:
        del anchors
        return region.evaluate(floats, others, stored)

    def forwards(*primals: Any) -> Any:
        # With symbolic zeros, each primal comes with whether it is differentiated.
        perturbed = [primal.perturbed for primal in primals[0]]
        floats, others, stored = jax.tree.map(
            lambda x: x.value, primals[:3], is_leaf=lambda x: isinstance(x, CustomVJPPrimal)
        )
        return region.forward(perturbed, floats, others, stored)

    def backwards(saved: Any, cotangents: Any) -> Any:
        float_gradients, reduced = region.backward(saved, cotangents[0])
        return float_gradients, None, None, reduced

    evaluated.defvjp(forwards, backwards, symbolic_zeros=True)
    stored = [root.stored for root in region.weights]
    anchors = picked(targets, [*region.trained, *region.summed])
    return region.outputs.merge(*evaluated(floats, others, stored, anchors))


def _smallest_made_here(leaves: list[Any], inputs: list[Any]) -> int | None:
    """The position of the smallest array that a region has made, of those that it keeps.

    None if it keeps nothing but its inputs on the device.
    """
    given = set(map(id, inputs))
    made = []
    for position, leaf in enumerate(leaves):
        if id(leaf) not in given and not is_on_host(leaf):
            made.append(position)
    return min(made, key=lambda position: leaves[position].size, default=None)


def _replaced(tree: Any, arrays: list[Any], replacements: list[Any]) -> Any:
    """A tree in which a replacement stands wherever one of some arrays was."""
    by_id = dict(zip(map(id, arrays), replacements, strict=True))
    return jax.tree.map(lambda x: by_id.get(id(x), x), tree)


def reader_of(jaxpr: Jaxpr, var: Any) -> Any:
    """The first equation that reads a variable, or None if none does."""
    return next(iter(readers_of(jaxpr, var)), None)


def with_source_of(
    equation: Any, function: Callable[..., Any], *args: Any, deep: bool = True
) -> Any:
    """Call a function as if from the line of an equation, which is to blame for it.

    With `deep`, what it calls blames that line too. If the equation is None, this is a plain call.
    """
    if equation is None:
        return function(*args)
    traced, out = jax.make_jaxpr(function, return_shape=True)(*args)
    blamed = relocated(traced.jaxpr, equation.source_info.traceback, deep)
    results = jaxpr_as_fun(ClosedJaxpr(blamed, traced.consts))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _barrier(*trees: Any) -> Any:
    """The same trees. The compiler may compute nothing from any of them before all are there.

    Random keys pass beside the barrier, which takes arrays of numbers only.
    """
    leaves, treedef = jax.tree.flatten(trees)
    positions = []
    for position, leaf in enumerate(leaves):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            positions.append(position)
    behind = lax.optimization_barrier(picked(leaves, positions))
    for position, leaf in zip(positions, behind, strict=True):
        leaves[position] = leaf
    return treedef.unflatten(leaves)
