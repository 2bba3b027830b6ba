"""Stacked parameters, taken by an optimizer one by one."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check


def per_layer_and_expert(
    optimizer: optax.GradientTransformation, stacked: Callable[[str, Any], int]
) -> optax.GradientTransformationExtraArgs:
    """Let an optimizer see each layer of a stack, and each expert, as a parameter of its own.

    Blocks that are scanned, and experts, are one array with leading dims for them. An optimizer
    that looks at a whole parameter then looks at all of them: Adafactor factors its second moments
    over the two longest dims, of which one may be that of the experts, and LAMB has one norm for
    all layers. `stacked(path, parameter)` says how many leading dims of a parameter count its
    members. What an optimizer does across parameters, clipping by the global norm say, goes
    outside.

    >>> import jax.numpy as jnp
    >>> lamb = per_layer_and_expert(optax.lamb(0.1), lambda path,
    ...     parameter: 1 if path == "blocks" else 0)
    >>> params = {"blocks": jnp.array([[1.0, 0.0], [100.0, 0.0]]), "head": jnp.ones(2)}
    >>> updates, _ = lamb.update(params, lamb.init(params), params)
    >>> [round(float(update), 2) for update in updates["blocks"][:, 0]]
    [-0.1, -10.0]
    """
    check.kind(
        "per_layer_and_expert",
        "optimizer",
        optimizer,
        optax.GradientTransformation,
        "an optax transformation",
    )
    check.function(
        "per_layer_and_expert", "stacked", stacked, "a function of a path and a parameter"
    )
    optimizer = optax.with_extra_args_support(optimizer)

    def one_by_one(path: str, leaf: Any, function: Callable) -> Callable:
        dims = stacked(path, leaf)
        if type(dims) is not int or not 0 <= dims <= leaf.ndim:
            raise ValueError(
                f"`per_layer_and_expert`: `{path}` of shape {leaf.shape} cannot have "
                f"{check.shown(dims)} leading dims, as `stacked` says."
            )
        for _ in range(dims):
            function = jax.vmap(function)
        return function

    def init(params: Any) -> Any:
        states = [
            one_by_one(path, leaf, optimizer.init)(leaf) for path, leaf in named_leaves(params)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), states)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        structure = jax.tree.structure(updates)
        of_params = (
            [None] * structure.num_leaves if params is None else structure.flatten_up_to(params)
        )
        found = []
        for (path, leaf), before, parameter in zip(
            named_leaves(updates), structure.flatten_up_to(state), of_params, strict=True
        ):
            function = one_by_one(path, leaf, lambda u, s, p: optimizer.update(u, s, p, **extra))
            found.append(function(leaf, before, parameter))
        return structure.unflatten([u for u, _ in found]), structure.unflatten(
            [s for _, s in found]
        )

    return optax.GradientTransformationExtraArgs(init, update)
