"""A layer of experts: tokens to the devices that hold their experts, and back.

    tokens (groups, tokens, width)                on the devices of the groups
      | router: which experts                     `_routing`
      | dispatch: a place of each expert          `_dispatch`
    (groups, experts, places, width)              on the devices of the groups
      | exchange
    (groups, experts, places, width)              on the devices of the experts
      | each expert's function, exchange back, combine by weight
    tokens (groups, tokens, width)                on the devices of the groups

Where the step is manual over the axis that the experts are split over, the layer exchanges tokens
itself, by an all-to-all. Where the partitioner lays everything out, the layer constrains the tokens
to be split by group and then by expert, which is GShard's annotation, and the partitioner makes the
exchange. Both are the same program.

Shape suffixes: B batch, M width, G groups, S tokens of a group, E experts, C places of an expert.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.experts._dispatch import FORMS, Form, dispatch
from shardlib.experts._moe_checks import (
    check_functions,
    check_real,
    check_tokens,
    check_weights,
)
from shardlib.experts._routing import Choices, Router, places, z_loss
from shardlib.experts._token_exchange import TokenExchange, exchange_of
from shardlib.layouts._annotate import shard
from shardlib.modeling._batch import WeightedMean

Experts = Callable[[Any, jax.Array], jax.Array]
# What a `Remat` calls the logits of the router.
ROUTER = "router"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEStats:
    """Statistics of a layer of experts: sums over local tokens, with what to divide them by.

    - `balance`: the router's loss of uneven load, a mean over groups.
    - `z`: the square of the logarithm of the softmax's sum, a mean over tokens.
    - `load`: by expert, the choices that want it, in even shares: 1 each where all are wanted
      alike.
    - `dropped`: the share of wanted choices that found no place.
    - `entropy`: of a token's softmax over the experts, in nats.
    - `nonfinite`: the share of tokens whose logits are not all finite.
    """

    balance: WeightedMean
    z: WeightedMean
    load: WeightedMean
    dropped: WeightedMean
    entropy: WeightedMean
    nonfinite: WeightedMean

    @property
    def metrics(self) -> dict[str, WeightedMean]:
        """The statistics that are worth watching, for a loss to return besides its value."""
        return {
            "balance": self.balance,
            "load": self.load,
            "dropped": self.dropped,
            "entropy": self.entropy,
            "nonfinite": self.nonfinite,
        }


class DispatchOptions(TypedDict, total=False):
    """How tokens are dispatched to their experts, as keywords of `moe`.

    - `group`: so many consecutive tokens share the places of the experts; by default those of one
      example.
    - `form`: `"scatter"`, the default, moves rows; `"einsum"` is GShard's products with masks. The
      results are equal.
    """

    group: int | None
    form: Form


def moe(
    x: jax.Array,
    router: Router,
    experts: Experts,
    *,
    gate: jax.Array,
    weights: Any,
    key: jax.Array | None = None,
    real: jax.Array | None = None,
    names: tuple[str | None, ...] = ("batch", "seq", "act_embed"),
    **options: Unpack[DispatchOptions],
) -> tuple[jax.Array, MoEStats]:
    """Send each token to the experts that a router chooses, and add up their outputs.

    A token that finds no place gives zeros: add the layer to a residual stream.

    Args:
        x: the tokens, (batch, ..., width).
        router: chooses experts for each token: `Top2()`, `TopK(2)`, `Switch()`, or your own.
        experts: a function of weights and of tokens (experts, tokens, width), each expert's own;
            `jax.vmap` makes one of a function of a single expert. It sees those experts that are
            on the device.
        gate: (width, experts), whole on every device.
        weights: a tree of arrays with a dim for the experts first, which the rule `experts` splits.
        key: given while training, for the router's draws.
        real: false for padding, (batch, ...), which goes to no expert and counts for nothing.
        names: a name for each dim of `x`.
        options: how tokens are dispatched, see `DispatchOptions`: `group`, how many tokens share
            places, by default those of an example; `form`, `"scatter"` or `"einsum"`.

    >>> import shardlib as sl
    >>> weights = jnp.stack([jnp.eye(4), 2 * jnp.eye(4)])
    >>> gate = jnp.zeros((4, 2)).at[0, 1].set(9.0)
    >>> with sl.unsharded():
    ...     y, stats = moe(
    ...         jnp.ones((1, 3,
    ...     4)), sl.experts.TopK(1), lambda w, x: x @ w, gate=gate, weights=weights
    ...     )
    >>> y[0, 0].tolist(), stats.load.total.tolist()
    ([2.0, 2.0, 2.0, 2.0], [0.0, 6.0])
    """
    check_tokens(x, gate, names)
    check.keywords("moe", options, DispatchOptions)
    form = check.choice("moe", "form", options.get("form", "scatter"), FORMS)
    check_real(x, real)
    check_functions(router, experts, key)
    count = gate.shape[1]
    exchange = exchange_of(count, names, x)
    check_weights(weights, count, exchange.experts.parts, exchange.experts.manual)
    if real is not None:
        # Padding may hold anything, and times a weight of zero that may be no number.
        x = jnp.where(real[..., None], x, 0)
    x = shard(x, *names)
    group, groups = _group_sizes(x, options.get("group"), exchange)
    # Each group has so many places of each expert, whether they are taken or not.
    capacity = places(router, group, count)

    def by_group(array: jax.Array, *trailing: Any) -> jax.Array:
        entries = [None] * (1 + len(trailing))
        return exchange.lay_out(array.reshape(groups, group, *trailing), exchange.batch, *entries)

    logits, drawn = _gate_logits(x, gate, router, key)
    logits_GSE = by_group(logits, count)
    real_GS = jnp.ones((groups, group), bool) if real is None else by_group(real)
    drawn_GS = None
    if drawn is not None:
        drawn_GS = by_group(drawn)
    choices = _checked_choices(router.choose(logits_GSE, drawn_GS), real_GS, count)
    dispatched = dispatch(choices, count, capacity, form)

    # Out to the experts and back, by the same places.
    x_GECM = exchange.to_experts(dispatched.to_experts(by_group(x, x.shape[-1])))
    y_GECM = exchange.to_tokens(_apply_experts(experts, weights, x_GECM))
    y = dispatched.from_experts(y_GECM).reshape(*x.shape[:-1], -1).astype(x.dtype)
    stats = _Routed(choices, dispatched.kept_GSK, logits_GSE, real_GS)
    return shard(y, *names), _stats(router, stats)


def _gate_logits(
    x: jax.Array, gate: jax.Array, router: Router, key: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The router's logits of all tokens, and a number in [0, 1) for each token while training.

    While training, what the gate sees is jittered. Both are drawn from keys of their own.
    """
    gate_input = x.astype(jnp.float32)
    if key is not None and router.jitter:
        jitter_key = jax.random.fold_in(key, 0)
        gate_input = _jittered(gate_input, jitter_key, router.jitter)
    logits = checkpoint_name(_logits(gate_input, gate.astype(jnp.float32)), ROUTER)
    drawn = None
    if key is not None:
        drawn = jax.random.uniform(jax.random.fold_in(key, 1), x.shape[:-1])
    return logits, drawn


def _jittered(x: jax.Array, key: jax.Array, jitter: float) -> jax.Array:
    """The input with each number multiplied by a random one close to 1.

    Args:
        x: the input of the gate, in float32.
        key: the key to draw the factors with.
        jitter: how far a factor may be from 1.
    """
    factors = jax.random.uniform(key, x.shape, jnp.float32, 1 - jitter, 1 + jitter)
    return x * factors


def _apply_experts(experts: Experts, weights: Any, x_GECM: jax.Array) -> jax.Array:
    """What the experts on this device make of the tokens in their places, group by group.

    The function sees the tokens of all groups together, (experts, tokens, width); empty places
    are zeros.
    """
    groups, local_count, capacity = x_GECM.shape[:3]
    tokens = x_GECM.swapaxes(0, 1).reshape(local_count, groups * capacity, -1)
    outputs = experts(weights, tokens)
    check_arrays.array(
        "moe", "experts", outputs, "a function that gives an array, (experts, tokens, width)"
    )
    if outputs.shape[:2] != tokens.shape[:2]:
        raise ValueError(
            f"`experts` was given tokens of shape {tokens.shape}, (experts, tokens, width), and "
            f"made {outputs.shape} of them."
        )
    return outputs.reshape(local_count, groups, capacity, -1).swapaxes(0, 1)


def _group_sizes(x: jax.Array, group: int | None, exchange: TokenExchange) -> tuple[int, int]:
    """The size of a group of tokens, and how many groups there are here.

    A group is whole on one device: groups are as many as the devices' parts of the batch, or a
    multiple of that.
    """
    tokens = math.prod(x.shape[:-1])
    if group is None:
        group = _tokens_of_example(x)
    check.whole("moe", "group", group, "a number of tokens", least=1)
    if tokens % (group * exchange.rows):
        over = ""
        if exchange.rows > 1:
            over = f" on each of {exchange.rows} devices"
        raise ValueError(
            f"`moe(group={group!r})` does not divide the {tokens // exchange.rows} tokens{over}, "
            f"of {x.shape[:-1]} here in all: a group is a whole number of consecutive tokens, and "
            "lies on one device."
        )
    return int(group), tokens // int(group)


def _tokens_of_example(x: jax.Array) -> int:
    """The tokens of one example, which are a group where none is asked for."""
    if x.ndim == 2:
        raise ValueError(
            f"Of {x.shape[0]} tokens without a dim for the sequence, say how many share the places "
            "of the experts: `group=...`."
        )
    return math.prod(x.shape[1:-1])


# Experts whose logits are made at a time.
_COLUMNS = 256


@jax.custom_vjp
def _logits(x: jax.Array, gate_ME: jax.Array) -> jax.Array:
    """The product `x @ gate` in full float32; a TPU would round the factors to bfloat16.

    It takes some columns at a time: for a product with thousands of them the TPU's compiler makes
    several times the code, in several times the seconds, for each layer that is compiled. The
    gradient is defined, so that JAX does not differentiate the loop.
    """
    parts_PMC = _split_columns(gate_ME)
    parts = lax.map(lambda gate_MC: _product("...m,mc->...c", x, gate_MC), parts_PMC)
    return jnp.moveaxis(parts, 0, -2).reshape(*x.shape[:-1], gate_ME.shape[1])


def _backwards(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `_logits` to both factors, from the same columns at a time."""
    x, gate_ME = saved

    def add_columns(
        of_x: jax.Array, part: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        gate_MC, of_part = part
        of_x = of_x + _product("...c,mc->...m", of_part, gate_MC)
        return of_x, _product("...m,...c->mc", x, of_part)

    columns = _split_columns(gate_ME).shape[-1]
    # The gradient is split as the gate is.
    of_parts = jnp.moveaxis(gradient.reshape(*x.shape[:-1], -1, columns), -2, 0)
    of_x, of_gate_PMC = lax.scan(
        add_columns, jnp.zeros_like(x), (_split_columns(gate_ME), of_parts)
    )
    return of_x, of_gate_PMC.swapaxes(0, 1).reshape(gate_ME.shape)


_logits.defvjp(lambda x, gate_ME: (_logits(x, gate_ME), (x, gate_ME)), _backwards)


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(dims, x, y, precision="highest")


def _split_columns(gate_ME: jax.Array) -> jax.Array:
    """The gate as (parts, width, columns): whole if its columns are no multiple of the limit."""
    width, count = gate_ME.shape
    columns = count if count % _COLUMNS else _COLUMNS
    return gate_ME.reshape(width, -1, columns).swapaxes(0, 1)


def _checked_choices(choices: Choices, real_GS: jax.Array, count: int) -> Choices:
    """A router's choices, of which those of padding are not wanted.

    An expert that does not exist is an error where numbers are known; where they are traced, it
    makes the output of its token nan.
    """
    expert, weight, wanted = choices
    if not jnp.issubdtype(expert.dtype, jnp.integer):
        raise ValueError(
            f"A router chose experts of dtype {expert.dtype}; an expert is a whole number."
        )
    within = (expert >= 0) & (expert < count)
    if not isinstance(within, Tracer):
        _check_range(expert, within, count)
    # What is out of range is traced, and no error can be raised: nan is noticed.
    weight = jnp.where(within, weight.astype(jnp.float32), jnp.nan)
    return Choices(
        jnp.clip(expert, 0, count - 1).astype(jnp.int32), weight, wanted & real_GS[..., None]
    )


def _check_range(expert: jax.Array, within: jax.Array, count: int) -> None:
    """Refuse choices of experts that do not exist; `within` is true where one does.

    It is for choices that are known; what is traced becomes nan in the result.
    """
    if bool(within.all()):
        return
    raise ValueError(
        f"A router chose expert {int(expert[~within][0])}, and there are {count}, counted from "
        f"0: {int((~within).sum())} of {within.size} choices are out of range."
    )


class _Routed(NamedTuple):
    """What the statistics of a layer are made of.

    Each is of local tokens, by group; see the shape suffixes of this file.
    """

    choices: Choices
    kept_GSK: jax.Array  # which choices found a place
    logits_GSE: jax.Array
    real_GS: jax.Array  # false for padding


def _check_finite(finite_GS: jax.Array, real_GS: jax.Array) -> None:
    """Raise an error where a real token's logits are known not to be finite."""
    if not isinstance(finite_GS, Tracer) and not bool((finite_GS | ~real_GS).all()):
        group, token = map(int, jnp.argwhere(~finite_GS & real_GS)[0])
        raise ValueError(
            f"The router's logits are not finite for {int((~finite_GS & real_GS).sum())} of "
            f"{finite_GS.size} tokens, the first being token {token} of group {group}: the gate or "
            "what it is given is not."
        )


def _stats(router: Router, routed: _Routed) -> MoEStats:
    """The statistics of a layer; padding counts for nothing in any of them.

    Each is a sum with what to divide it by, so that means over devices and microbatches are
    exact.
    """
    choices, kept_GSK, logits_GSE, real_GS = routed
    count = logits_GSE.shape[-1]
    finite_GS = jnp.isfinite(logits_GSE).all(-1)
    _check_finite(finite_GS, real_GS)
    each_GS = real_GS.astype(jnp.float32)
    tokens_G = each_GS.sum(1)
    probability_GSE, shares = _shares(router, choices, logits_GSE, each_GS, tokens_G)
    # Over all groups, what routers want and what of it found no place.
    wanted = (choices.wanted * 1.0).sum()
    by_expert = (jax.nn.one_hot(choices.expert, count) * choices.wanted[..., None]).sum((0, 1, 2))
    logarithm_GSE = jax.nn.log_softmax(logits_GSE)
    # The limit of p log p at zero is zero, which the product is not.
    entropy_GS = -(jnp.where(probability_GSE > 0, probability_GSE * logarithm_GSE, 0)).sum(-1)
    return MoEStats(
        WeightedMean(router.balance(*shares).sum(), (tokens_G > 0).sum() * 1.0),
        WeightedMean((z_loss(logits_GSE) * each_GS).sum(), each_GS.sum()),
        WeightedMean(by_expert * count, wanted),
        WeightedMean((choices.wanted & ~kept_GSK).sum() * 1.0, wanted),
        WeightedMean((lax.stop_gradient(entropy_GS) * each_GS).sum(), each_GS.sum()),
        WeightedMean((~finite_GS * each_GS).sum(), each_GS.sum()),
    )


def _shares(
    router: Router,
    choices: Choices,
    logits_GSE: jax.Array,
    each_GS: jax.Array,
    tokens_G: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """The probability of each expert for each token, and what a balance loss is made of.

    That is, for each group and expert, the share of the group's tokens whose first choice it is,
    that of all choices, and the mean probability.

    Args:
        router: says how many choices a token has.
        choices: the choices of all tokens.
        logits_GSE: the router's logits.
        each_GS: one for a token, zero for padding.
        tokens_G: how many tokens each group has.
    """
    # A group of nothing but padding has no shares.
    share_G = 1 / jnp.maximum(tokens_G, 1)
    probability_GSE = jax.nn.softmax(logits_GSE)
    one_hot_GSKE = jax.nn.one_hot(choices.expert, logits_GSE.shape[-1])
    chosen_GSKE = one_hot_GSKE * each_GS[..., None, None]
    first_GE = chosen_GSKE[:, :, 0].sum(1) * share_G[:, None]
    every_GE = chosen_GSKE.sum((1, 2)) * share_G[:, None] / router.choices
    mean_GE = (probability_GSE * each_GS[..., None]).sum(1) * share_G[:, None]
    return probability_GSE, (first_GE, every_GE, mean_GE)
