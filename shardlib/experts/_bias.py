"""A bias that evens the load of experts without a loss, as DeepSeek-V3 has it.

The rule: after each step, the bias of an expert that was chosen more often than the mean goes down
by a fixed speed, and that of one chosen less often goes up. The load is that of the whole batch.

Here the bias is a parameter whose gradient is *defined* as the error of its load. So a step sums it
over devices and microbatches as it sums any gradient, and evaluation, which has no gradients, never
moves it. Its optimizer is descent by sign:

    layer, backward      gradient = (experts x choices of the expert - all choices) x 2^-40
    step                 sums gradients over devices and microbatches
    `balanced`           bias -= speed x sign(gradient)

The gradient is whole numbers times a power of two, so that sums in any order are the same, and an
even load is exactly zero. It is tiny, so that norms and clipping see nothing of it.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardlib._tree import map_named, named_leaves
from shardlib.checks import _arguments as check
from shardlib.collectives._exchanges import ROUTER_BIAS
from shardlib.experts._routing import Choices
from shardlib.kernels._shards import varying_alike
from shardlib.optimizers._local import check_wrapped

_SCALE = 2.0**-40


def with_load_error(choices: Choices, bias: jax.Array) -> Choices:
    """The same choices; where their weights are differentiated, the bias gets its load error.

    If the bias is not finite, weights are nan, so that a step notices.
    """
    weight = jnp.where(jnp.isfinite(bias).all(), choices.weight, jnp.nan)
    error = _load_error(choices, bias.shape[0]).astype(bias.dtype)
    # Choices differ between devices, and the bias does not: JAX adds up the errors of all.
    return choices._replace(weight=_attached(*varying_alike(weight, bias, error)))


def _load_error(choices: Choices, experts: int) -> jax.Array:
    """How many more choices than the mean each expert has, (E,), times experts and the scale."""
    is_chosen = choices.expert[..., None] == jnp.arange(experts)
    is_chosen = is_chosen & choices.wanted[..., None]
    count = is_chosen.sum(tuple(range(is_chosen.ndim - 1)), dtype=jnp.int32)
    # The mean is a quotient and a rest, since the product of two counts may not fit in 32 bits.
    quotient, rest = jnp.divmod(count.sum(), experts)
    error = (count - quotient).astype(jnp.float32) * experts - rest.astype(jnp.float32)
    return error * _SCALE


@jax.custom_vjp
def _attached(weight: jax.Array, bias: jax.Array, error: jax.Array) -> jax.Array:
    """The weight as it is. The gradient of the bias is `error`, whatever that of the weight is."""
    return weight


def _forward(weight: jax.Array, bias: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
    return weight, error


def _backward(error: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return gradient, error, jnp.zeros_like(error)


_attached.defvjp(_forward, _backward)

_BIAS, _REST = "bias", "rest"


def balanced(
    optimizer: optax.GradientTransformation,
    speed: float | Callable[[Any], Any] = 1e-3,
    *,
    pattern: str = ROUTER_BIAS,
) -> optax.GradientTransformationExtraArgs:
    r"""Let the biases of routers follow the load, and an optimizer update all other parameters.

    A bias is a parameter with a number for each expert, which a layer gives to `moe(bias=...)`. In
    each step each number moves by `speed`: down if its expert had more than the mean load of the
    whole batch, up if it had less. `optimizer` never sees the bias, so its weight decay and norms
    leave it out.

    Args:
        optimizer: updates everything else.
        speed: by how much a bias moves in a step, or a schedule, a function of the step's number.
        pattern: a regular expression, which the whole path of a bias matches.

    >>> adam = balanced(optax.adam(0.1), speed=0.5)
    >>> params = {"mlp": {"router_bias": jnp.zeros(3), "up": jnp.ones(1)}}
    >>> gradients = {"mlp": {"router_bias": jnp.array([2.0, 0.0, -1.0]), "up": jnp.ones(1)}}
    >>> updates, _ = adam.update(gradients, adam.init(params), params)
    >>> optax.apply_updates(params, updates)["mlp"]["router_bias"].tolist()
    [-0.5, 0.0, 0.5]
    """
    check_wrapped("balanced", optimizer)
    if not callable(speed):
        speed = check.number("balanced", "speed", speed, "a number, or a schedule", least=0)
    check.pattern("balanced", "pattern", pattern)
    matches = re.compile(pattern).fullmatch

    def labels(params: Any) -> Any:
        return map_named(lambda path, leaf: _BIAS if matches(path) else _REST, params)

    by_sign = optax.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(speed))
    both = optax.partition({_BIAS: by_sign, _REST: optimizer}, labels)

    def init(params: Any) -> Any:
        _check_matches(params, pattern)
        return both.init(params)

    return optax.GradientTransformationExtraArgs(init, both.update)


def _check_matches(params: Any, pattern: str) -> None:
    """Refuse a pattern that matches no parameter: the biases would be left to the optimizer."""
    paths = [path for path, _ in named_leaves(params)]
    if not any(re.fullmatch(pattern, path) for path in paths):
        raise ValueError(
            f"`balanced(pattern={pattern!r})` matches the path of no parameter, so that no bias "
            "would follow the load. It is to match the whole path; those here are "
            f"{check.shown(paths)}."
        )
