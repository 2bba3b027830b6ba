"""A loss as a step traces it, to look at what it does before the step compiles."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardlib._tree import named_leaves
from shardlib.modeling._batch import WeightedMean
from shardlib.step._loss import Returned
from shardlib.step._state import combine


@dataclass(frozen=True)
class LossCall:
    """A loss with everything that it is called with.

    - `call`: the loss, adapted to the step.
    - `arguments`: `(rest, number, examples)` to the arguments of `call` after the parameters.
    - `trained`: a `StepParameter` for each trained parameter.
    - `frozen`: the same for each frozen one.
    - `rest`: the model's state that is neither parameter nor random stream.
    - `number`: the number of a microbatch.
    - `examples`: the examples of that microbatch.
    """

    call: Callable[..., Returned]
    arguments: Callable[..., Any]
    trained: Any
    frozen: Any
    rest: Any
    number: Any
    examples: Any

    @property
    def state(self) -> list[tuple[str, Any]]:
        """The model's random streams and its other state, with paths."""
        streams = self.arguments(self.rest, self.number, self.examples)[0]
        return [*named_leaves(streams), *named_leaves(self.rest)]

    def with_twice_the_examples(self) -> "LossCall":
        """The same loss of the examples, followed by the same again."""
        return replace(self, examples=jax.tree.map(_twice, self.examples))

    def trace(self) -> "LossTrace":
        """Trace the loss with whole parameters."""

        def after(params: Any, frozen_params: Any, rest: Any, examples: Any) -> Any:
            arguments = self.arguments(rest, self.number, examples)
            returned = self.call(combine(params, frozen_params), *arguments)
            return (
                (returned.streams, returned.rest),
                _values_returned(returned.out),
                returned.means["loss"].total,
                returned.reassigned,
            )

        # Under the mesh of the step, so that the step need not trace the loss again.
        mesh = jax.sharding.get_abstract_mesh()
        parameters = self.trained, self.frozen
        whole = jax.tree.map(lambda parameter: _on(mesh, parameter.whole), parameters)
        jaxpr, (_, values, _, reassigned) = jax.make_jaxpr(after, return_shape=True)(
            *whole, self.rest, self.examples
        )
        return LossTrace(
            loss=self,
            jaxpr=jaxpr,
            parameters=jax.tree.leaves(parameters),
            rest=named_leaves(self.rest),
            examples=jax.tree.leaves(self.examples),
            state=self.state,
            values=values,
            reassigned=list(reassigned),
        )


@dataclass(frozen=True)
class LossTrace:
    """A traced loss, and what the inputs and outputs of the trace are.

    Its inputs are the parameters, `rest` and the examples, in this order; its outputs `state`,
    `values`, the total, and each parameter of `reassigned` as it is after the loss.
    """

    loss: LossCall
    jaxpr: Any
    parameters: list[Any]
    rest: list[tuple[str, Any]]
    examples: list[Any]
    state: list[tuple[str, Any]]
    values: list["_Value"]
    reassigned: list[str]


def _twice(examples: jax.Array) -> jax.Array:
    """Examples along dim 0, and the same again."""
    return jnp.concatenate([examples, examples]) if examples.ndim else examples


def _on(mesh: AbstractMesh, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of an array on a mesh, of whose axes none splits it explicitly."""
    # Without a mesh, in a plain evaluation, there is nothing to put the array on.
    if mesh.empty:
        return shape
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Value:
    """A number that a loss function returned: the loss or a metric, its total or its weight."""

    value: Any
    name: str = field(metadata={"static": True})
    weighted: bool = field(metadata={"static": True})


def _values_returned(out: Any) -> list[_Value]:
    """The numbers of the loss and of each metric, as a loss function returned them."""
    # As the step itself reads the result, see `as_means`.
    loss, metrics = out if isinstance(out, tuple) else (out, {})
    values: list[_Value] = []
    for name, value in {"loss": loss, **metrics}.items():
        weighted = isinstance(value, WeightedMean)
        parts = (value.total, value.weight) if weighted else (value,)
        values += [_Value(jnp.asarray(part), name, weighted) for part in parts]
    return values
