"""Stacked parameters, of which an optimizer sees each member as a parameter of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.modeling._random import is_key
from shardlib.optimizers._local import check_wrapped


def per_layer_and_expert(
    optimizer: optax.GradientTransformation, stacked: Callable[[str, Any], int]
) -> optax.GradientTransformationExtraArgs:
    """Let an optimizer see each layer of a stack, and each expert, as a parameter of its own.

    Blocks that are scanned, and experts, are one array with leading dims for them. An optimizer
    that looks at a whole parameter then looks at all of them: Adafactor factors its second moments
    over the two longest dims, of which one may be that of the experts, and LAMB has one norm for
    all layers. What an optimizer does across parameters, clipping by the global norm say, goes
    outside.

    Args:
        optimizer: an optax transformation. It sees one member at a time; if its state has a random
            key, as that of `optax.noisy_sgd` does, each member has a key of its own.
        stacked: `(path, parameter) -> int`, how many leading dims of a parameter count its members;
            0 for a parameter by itself. A path is text such as `"blocks/mlp/up"`.

    >>> import jax.numpy as jnp
    >>> lamb = per_layer_and_expert(optax.lamb(0.1), lambda path,
    ...     parameter: 1 if path == "blocks" else 0)
    >>> params = {"blocks": jnp.array([[1.0, 0.0], [100.0, 0.0]]), "head": jnp.ones(2)}
    >>> updates, _ = lamb.update(params, lamb.init(params), params)
    >>> [round(float(update), 2) for update in updates["blocks"][:, 0]]
    [-0.1, -10.0]
    """
    check_wrapped("per_layer_and_expert", optimizer)
    check.function(
        "per_layer_and_expert", "stacked", stacked, "a function of a path and a parameter"
    )
    members = _ByMember(optax.with_extra_args_support(optimizer), stacked)
    return optax.GradientTransformationExtraArgs(members.init, members.update)


@dataclass(frozen=True, eq=False)
class _ByMember:
    """An optimizer that is mapped over the members of each parameter.

    Its state is a tree like the parameters, with the optimizer's state for each parameter as one
    array's; the arrays in it have the leading dims of the parameter in front of their own.
    """

    optimizer: optax.GradientTransformationExtraArgs
    stacked: Callable[[str, Any], int]

    def init(self, params: Any) -> Any:
        """The state of each parameter by itself."""
        states = []
        for number, (path, parameter) in enumerate(named_leaves(params)):
            state = self._mapped(path, parameter, self.optimizer.init)(parameter)
            # An optimizer begins with the same key for each member, and all would draw alike.
            states.append(jax.tree.map(partial(_own_keys, number), state))
        return jax.tree.unflatten(jax.tree.structure(params), states)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """The updates of each parameter by itself, and its next state.

        Args:
            updates: the gradients.
            state: for each parameter the state of the optimizer.
            params: the parameters, if the optimizer reads them.
            **extra: what else it takes, the same for all parameters.
        """
        structure = jax.tree.structure(updates)
        parameters = [None] * structure.num_leaves
        if params is not None:
            parameters = structure.flatten_up_to(params)
        # For each parameter there is a whole state, a tree, which is not to be flattened further.
        states = structure.flatten_up_to(state)

        def update_member(update: Any, state: Any, parameter: Any) -> tuple[Any, Any]:
            # The extra arguments are the same for all members.
            return self.optimizer.update(update, state, parameter, **extra)

        new_updates, new_states = [], []
        for (path, update), before, parameter in zip(
            named_leaves(updates), states, parameters, strict=True
        ):
            function = self._mapped(path, update, update_member)
            new_update, after = function(update, before, parameter)
            new_updates.append(new_update)
            new_states.append(after)
        return structure.unflatten(new_updates), structure.unflatten(new_states)

    def _mapped(self, path: str, leaf: Any, function: Callable) -> Callable:
        """A function of one member as one of all of them: mapped over each leading dim."""
        dims = self.stacked(path, leaf)
        # `True` is an `int` too, and no number of dims.
        if type(dims) is not int or not 0 <= dims <= leaf.ndim:
            raise ValueError(
                f"`per_layer_and_expert`: `{path}` of shape {leaf.shape} cannot have "
                f"{check.shown(dims)} leading dims, as `stacked` says."
            )
        # One `vmap` for each leading dim, which scalars of the optimizer's state get as well.
        for _ in range(dims):
            function = jax.vmap(function)
        return function


def _own_keys(number: int, leaf: Any) -> Any:
    """An array of the state of the parameter with a number; if of keys, each is another one."""
    if not is_key(leaf):
        return leaf

    def own_key(key: jax.Array, member: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, number), member)

    keys = leaf.reshape(-1)
    return jax.vmap(own_key)(keys, jnp.arange(keys.size)).reshape(leaf.shape)
