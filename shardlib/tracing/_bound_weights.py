"""Weights that are stored whole as arrays, bound where their gradients are to be reduced.

See `_stored_weights` for which of them are bound where.
"""

from collections.abc import Sequence

import jax
from jax.extend.core import Jaxpr

from shardlib.tracing._layer_uses import is_layered
from shardlib.tracing._region import WeightSlice, bind_whole_weight, reader_of
from shardlib.tracing._weight_values import Value, resolve, root_of, roots_of


def bind_replicated_weights(jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
    """Make arrays of the weights that are stored whole among the inputs of a jaxpr.

    Binding a stack here would reduce its gradient only after all layers. One that the jaxpr uses
    layer by layer stays as it is, and each layer is bound further inside.
    """
    bound: dict[WeightSlice, jax.Array] = {}
    values: list[Value] = []
    for var, value in zip(jaxpr.invars, inputs, strict=True):
        root = root_of(value)
        if root is None or not root.weight.is_stored_whole:
            values.append(value)
            continue
        # Only a weight itself has layers to pick. A derived value is a cast stack at best, and the
        # cast would be done to all of it before the pick.
        if is_layered(jaxpr, var, root, pickable=isinstance(value, WeightSlice)):
            values.append(value)
            continue
        if root not in bound:
            bound[root] = bind_whole_weight(root, reader_of(jaxpr, var))
        values.append(resolve(value, bound))
    return values


def bind_all_replicated(inputs: Sequence[Value]) -> list[Value]:
    """Make arrays of all weights that are stored whole, outside of the region that uses them.

    Those that are not bound yet are stacks that the region uses layer by layer: in the span of a
    group, or where the body of a loop picks layers. Inside the region they would be dropped, though
    they are there anyway, and what is made of them would be computed again.
    """
    bound: dict[WeightSlice, jax.Array] = {}
    for root in roots_of(inputs):
        if root.weight.is_stored_whole:
            # Its reader is not known: the function of the region is not traced yet.
            bound[root] = bind_whole_weight(root, None)
    values = []
    for value in inputs:
        values.append(resolve(value, bound) if root_of(value) in bound else value)
    return values
