"""A layer of experts: tokens to the devices that hold their experts, and back.

    tokens (groups, tokens, width)                on the devices of the groups
      | router: which experts                     `_routing`, `_choose`
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
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.experts._choose import Given, by_token, choose, see, take
from shardlib.experts._dispatch import FORMS, Dispatch, Form, dispatch, dispatch_taken
from shardlib.experts._moe_checks import (
    check_functions,
    check_real,
    check_tokens,
    check_weights,
    stored_experts,
)
from shardlib.experts._moe_stats import Load, MoEStats, load_of_choices, load_of_taken, stats_of
from shardlib.experts._routing import Choices, Router, Seen, places
from shardlib.experts._token_exchange import exchange_of
from shardlib.layouts._annotate import shard
from shardlib.layouts._checkpoint_policies import BY_EXAMPLE

Experts = Callable[[Any, jax.Array], jax.Array]


class DispatchOptions(TypedDict, total=False):
    """How tokens are dispatched to their experts, as keywords of `moe`.

    - `group`: how many consecutive tokens share the places of the experts; by default the tokens of
      one example.
    - `form`: `"scatter"`, the default, moves rows; `"einsum"` is GShard's products with masks. The
      results are equal.
    - `padded_to`: how many experts the weights have, if more than the gate. The additional experts
      come last and are never chosen: they make the number divisible by a mesh axis.
    """

    group: int | None
    form: Form
    padded_to: int | None


def moe(
    x: jax.Array,
    router: Router,
    experts: Experts,
    *,
    gate: jax.Array,
    weights: Any,
    key: jax.Array | None = None,
    real: jax.Array | None = None,
    bias: jax.Array | None = None,
    noise_gate: jax.Array | None = None,
    ids: jax.Array | None = None,
    causal: bool = True,
    names: tuple[str | None, ...] = ("batch", "seq", "act_embed"),
    **options: Unpack[DispatchOptions],
) -> tuple[jax.Array, MoEStats]:
    """Send each token to the experts that a router chooses, and add up their outputs.

    A token that finds no place gets zeros, so add the outputs to a residual stream. Returns
    `(y, stats)`: the outputs, (batch, ..., width) in the dtype of `x`, and `MoEStats`.

    Args:
        x: the tokens, (batch, ..., width).
        router: chooses experts for each token: `Top2()`, `TopK(2)`, `Switch()`, or your own.
            `ExpertChoice()` lets experts choose tokens.
        experts: a function of the weights and of tokens (experts, tokens, width), those of each
            expert; `jax.vmap` makes such a function from one of a single expert. It is called with
            the experts that are on the device.
        gate: (width, experts), whole on every device.
        weights: a tree of arrays with a dim for the experts first, which the rule `experts` splits.
        key: given while training, for the router's draws.
        real: bools (batch, ...), false for padding, which goes to no expert and is not counted.
        bias: (experts,), added to the scores by which `SigmoidTopK` chooses. It is a parameter,
            whole on every device, and `balanced` moves it.
        noise_gate: (width, experts), from which `NoisyTopK` computes how large its noise is.
        ids: the ids of the tokens, (batch, ...), for `Hash`.
        causal: whether a token must not depend on later ones, as in a decoder.
        names: a name for each dim of `x`.
        options: how tokens are dispatched, see `DispatchOptions`: `group`, how many tokens share
            places, by default those of an example; `form`, `"scatter"` or `"einsum"`; `padded_to`,
            how many experts the weights have, if more than the gate's.

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
    check_tokens("moe", x, gate, names)
    check.keywords("moe", options, DispatchOptions)
    form = check.choice("moe", "form", options.get("form", "scatter"), FORMS)
    check_real("moe", x, real)
    check_functions("moe", router, experts, key)
    count = gate.shape[1]
    stored = stored_experts("moe", options.get("padded_to"), count)
    exchange = exchange_of(stored, names, x)
    check_weights("moe", weights, stored, exchange.experts.parts, exchange.experts.manual)
    if real is not None:
        # Padding may hold anything, and times a weight of zero that may be no number.
        x = jnp.where(real[..., None], x, 0)
    x = shard(x, *names)
    group = group_size("moe", x, options.get("group"), exchange.rows)
    groups = math.prod(x.shape[:-1]) // group
    # Each group has so many places of each expert, whether they are taken or not.
    capacity = places(router, group, count)

    def by_group(array: jax.Array) -> jax.Array:
        trailing = array.shape[x.ndim - 1 :]
        entries = [None] * (1 + len(trailing))
        array = array.reshape(groups, group, *trailing)
        # A group may be of several examples, and is then what is told apart of the batch.
        array = checkpoint_name(array, BY_EXAMPLE)
        return exchange.lay_out(array, exchange.batch, *entries)

    given = Given(gate, key, bias, noise_gate, ids, real, causal)
    seen = by_token(see(x, router, given), by_group)
    choices, dispatched, load = _dispatched(router, seen, capacity, form, stored)

    # Out to the experts and back, by the same places.
    x_GECM = exchange.to_experts(dispatched.to_experts(by_group(x)))
    y_GECM = exchange.to_tokens(_apply_experts(experts, weights, x_GECM))
    y = dispatched.from_experts(y_GECM).reshape(*x.shape[:-1], -1).astype(x.dtype)
    return checkpoint_name(shard(y, *names), BY_EXAMPLE), stats_of(router, seen, choices, load)


def _dispatched(
    router: Router, seen: Seen, capacity: int, form: Form, stored: int
) -> tuple[Choices | None, Dispatch, Load]:
    """The places of tokens by group, with their choices, unless experts choose, and the load.

    There are places of all experts that are `stored`, also of those that nobody chooses.
    """
    tokens, count = seen.logits.shape[1:]
    if hasattr(router, "take"):
        taken = take(router, seen, capacity)
        more = [(0, 0), (0, stored - count), (0, 0)]
        padded = jax.tree.map(lambda x: jnp.pad(x, more), taken)
        return None, dispatch_taken(padded, tokens, form), load_of_taken(seen, taken)
    choices = choose(router, seen)
    dispatched = dispatch(choices, stored, capacity, form)
    return choices, dispatched, load_of_choices(seen, choices, dispatched.kept_GSK)


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
    # A dim that is missing would be broadcast when the layer is added to its input.
    if outputs.ndim != 3 or outputs.shape[:2] != tokens.shape[:2]:
        raise ValueError(
            f"`experts` was given tokens of shape {tokens.shape}, (experts, tokens, width), and "
            f"made {outputs.shape} of them: it gives (experts, tokens, width) too."
        )
    return outputs.reshape(local_count, groups, capacity, -1).swapaxes(0, 1)


def group_size(function: str, x: jax.Array, group: int | None, rows: int = 1) -> int:
    """How many consecutive tokens are a group: those of one example, where it is not said.

    A group is whole on one device: groups are as many as the devices' parts of the batch, or a
    multiple of that.

    Args:
        function: that is called, for errors.
        x: an array of tokens, with one more dim.
        group: as the caller has it.
        rows: into how many parts the partitioner splits the batch.
    """
    tokens = math.prod(x.shape[:-1])
    if group is None:
        group = _tokens_of_example(x)
    check.whole(function, "group", group, "a number of tokens", least=1)
    if tokens % (group * rows):
        over = ""
        if rows > 1:
            over = f" on each of {rows} devices"
        raise ValueError(
            f"`{function}(group={group!r})` does not divide the {tokens // rows} tokens{over}, "
            f"of {x.shape[:-1]} here in all: a group is a whole number of consecutive tokens, and "
            "lies on one device."
        )
    return int(group)


def _tokens_of_example(x: jax.Array) -> int:
    """The tokens of one example, which are a group where none is asked for."""
    if x.ndim == 2:
        raise ValueError(
            f"Of {x.shape[0]} tokens without a dim for the sequence, say how many share the places "
            "of the experts: `group=...`."
        )
    return math.prod(x.shape[1:-1])
