"""From tokens to choices of experts: what a router is shown, and the check of what it chooses.

    tokens, gate, key ...  --- see --->  Seen  --- by group --->  Seen  --- choose --->  Choices

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.experts._bias import with_load_error
from shardlib.experts._gate import logits
from shardlib.experts._routing import Choices, Router, Seen, Taken

# What a `Remat` calls the logits of the router.
ROUTER = "router"


class Given(NamedTuple):
    """What a layer of experts is given for its router, see `moe`."""

    gate: jax.Array
    key: jax.Array | None = None
    bias: jax.Array | None = None
    noise_gate: jax.Array | None = None
    ids: jax.Array | None = None
    real: jax.Array | None = None
    causal: bool = True


def reads(router: Router) -> tuple[str, ...]:
    """What a router looks at besides logits and `uniform`: names of fields of `Seen`."""
    return getattr(router, "reads", ())


def see(x: jax.Array, router: Router, given: Given) -> Seen:
    """What a router may look at for tokens `x`, (..., width).

    While training, what the gate sees is jittered. Each draw has a key of its own.
    """
    check_given(x, router, given)
    key, gate = given.key, given.gate.astype(jnp.float32)
    gate_input = x.astype(jnp.float32)
    if key is not None and router.jitter:
        gate_input = _jittered(gate_input, jax.random.fold_in(key, 0), router.jitter)
    of_gate = checkpoint_name(logits(gate_input, gate), ROUTER)
    uniform = normal = noise_logits = None
    if key is not None:
        uniform = jax.random.uniform(jax.random.fold_in(key, 1), x.shape[:-1])
    if key is not None and "normal" in reads(router):
        normal = jax.random.normal(jax.random.fold_in(key, 2), of_gate.shape)
    if given.noise_gate is not None:
        noise_logits = logits(gate_input, given.noise_gate.astype(jnp.float32))
    return Seen(of_gate, uniform, normal, noise_logits, given.bias, given.real, given.ids)


def by_token(seen: Seen, function: Callable[[jax.Array], jax.Array]) -> Seen:
    """`Seen` with a function applied to all that is by token, such as one that groups them."""
    changed = {}
    for name, value in seen._asdict().items():
        if value is not None and name != "bias":
            changed[name] = function(value)
    return seen._replace(**changed)


def choose(router: Router, seen: Seen) -> Choices:
    """A router's choices of tokens by group, checked; those of padding are not wanted.

    An expert that does not exist is an error where numbers are known, and so is a token whose
    logits are not finite. Where numbers are traced, the weights of such choices are nan, and so is
    the output of the token, unless it is dropped.
    """
    count = seen.logits.shape[-1]
    choices = router.choose(without_gradient(seen))
    weight = _checked(choices.expert, choices.weight, count, "expert")
    finite = _finite(seen)
    weight = jnp.where(finite[..., None], weight, jnp.nan)
    wanted = choices.wanted
    if seen.real is not None:
        wanted = wanted & seen.real[..., None]
    expert = jnp.clip(choices.expert, 0, count - 1).astype(jnp.int32)
    checked = Choices(expert, weight, wanted, choices.probability)
    if seen.bias is None:
        return checked
    return with_load_error(checked, seen.bias)


def take(router: Any, seen: Seen, places: int) -> Taken:
    """What experts take of tokens by group, checked as choices are."""
    tokens = seen.logits.shape[-2]
    token, weight, wanted = router.take(without_gradient(seen), places)
    weight = _checked(token, weight, tokens, "token")
    token = jnp.clip(token, 0, tokens - 1).astype(jnp.int32)
    # Of the token in each place; an empty place may have the number of any.
    finite_GEC = jax.vmap(lambda finite_S, token_EC: finite_S[token_EC])(_finite(seen), token)
    return Taken(token, jnp.where(finite_GEC | ~wanted, weight, jnp.nan), wanted)


def without_gradient(seen: Seen) -> Seen:
    """The same without a gradient of the bias, which has one of its own."""
    if seen.bias is None:
        return seen
    return seen._replace(bias=lax.stop_gradient(seen.bias))


def finite_logits(seen: Seen) -> jax.Array:
    """Whether the logits of each token are all finite."""
    return jnp.isfinite(seen.logits).all(-1)


def _jittered(x: jax.Array, key: jax.Array, jitter: float) -> jax.Array:
    """The input with each number multiplied by a random one close to 1.

    Args:
        x: the input of the gate, in float32.
        key: the key to draw the factors with.
        jitter: how far a factor may be from 1.
    """
    factors = jax.random.uniform(key, x.shape, jnp.float32, 1 - jitter, 1 + jitter)
    return x * factors


def _checked(chosen: jax.Array, weight: jax.Array, count: int, what: str) -> jax.Array:
    """The weights of what a router chose of `count` experts or tokens, where these exist.

    What does not exist is an error where it is known. Where it is traced, no error can be raised,
    and the weight is nan, which is noticed.
    """
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise ValueError(
            f"A router chose {what}s of dtype {chosen.dtype}; {what}s are whole numbers."
        )
    within = (chosen >= 0) & (chosen < count)
    if not isinstance(within, Tracer) and not bool(within.all()):
        raise ValueError(
            f"A router chose {what} {int(chosen[~within][0])}, and there are {count}, counted from "
            f"0: {int((~within).sum())} of {within.size} choices are out of range."
        )
    return jnp.where(within, weight.astype(jnp.float32), jnp.nan)


def _finite(seen: Seen) -> jax.Array:
    """Whether each token's logits are finite, or it is padding; an error if one's are known not to
    be.
    """
    finite_GS = finite_logits(seen)
    fits_GS = finite_GS | (seen.counts == 0)
    bad_GS = ~fits_GS
    if not isinstance(bad_GS, Tracer) and bool(bad_GS.any()):
        group, token = map(int, jnp.argwhere(bad_GS)[0])
        raise ValueError(
            f"The router's logits are not finite for {int(bad_GS.sum())} of "
            f"{finite_GS.size} tokens, the first being token {token} of group {group}: the gate or "
            "what it is given is not."
        )
    return fits_GS


def check_given(x: jax.Array, router: Router, given: Given) -> None:
    """Refuse what does not fit the tokens, and what the router reads and was not given.

    What is given to a router that does not look at it is refused too: nothing is ignored.
    """
    check.boolean("moe", "causal", given.causal)
    _check_sight(router, given.causal)
    noise = "noise_logits" in reads(router)
    _check_read("noise_gate", given.noise_gate, router, noise, needed=noise)
    _check_read("ids", given.ids, router, "ids" in reads(router), needed="ids" in reads(router))
    _check_read("bias", given.bias, router, "bias" in reads(router), needed=False)
    if given.noise_gate is not None:
        _check_shape("noise_gate", given.noise_gate, given.gate.shape, jnp.floating)
    if given.ids is not None:
        _check_shape("ids", given.ids, x.shape[:-1], jnp.integer)
    if given.bias is not None:
        _check_shape("bias", given.bias, given.gate.shape[1:], jnp.floating)
        _check_bias(given.bias)


def _check_sight(router: Router, causal: bool) -> None:
    """Refuse experts that choose among later tokens too, for a model that must not see these."""
    if not causal or not hasattr(router, "take") or getattr(router, "sees_later_tokens", False):
        return
    raise ValueError(
        f"With {router} experts choose among all tokens of a group, so the output of a token "
        "depends on later ones, which a causal model does not have when it writes. If the model is "
        "not causal, say so: `moe(causal=False)`. If it is, and may see later tokens in training, "
        f"allow it: `{type(router).__name__}(sees_later_tokens=True)`. Or let tokens choose: "
        "`TopK(2)`."
    )


def _check_read(name: str, value: Any, router: Router, read: bool, *, needed: bool) -> None:
    """Refuse an argument that a router needs and was not given, or that it does not read."""
    if value is None and needed:
        raise ValueError(f"{router} needs `moe({name}=...)`, and was given none.")
    if value is not None and not read:
        raise ValueError(
            f"`moe({name}=...)` was given, and {router} does not read it: leave it out, or choose "
            "a router that does."
        )


def _check_shape(name: str, value: Any, shape: tuple[int, ...], kind: Any) -> None:
    """Refuse an argument that is no array of this shape, of real or of whole numbers."""
    words = "whole numbers" if kind is jnp.integer else "real numbers"
    takes = f"an array of {words}, of shape {shape}"
    check_arrays.array("moe", name, value, takes)
    if value.shape != shape or not jnp.issubdtype(value.dtype, kind):
        raise ValueError(
            f"`moe({name}=...)` takes {takes}; got {value.dtype}{list(value.shape)}. It is whole "
            "on every device, as the gate is."
        )


def _check_bias(bias: jax.Array) -> None:
    """Refuse a bias that is known not to be finite; a traced one makes the output nan."""
    finite = jnp.isfinite(bias)
    if isinstance(finite, Tracer) or bool(finite.all()):
        return
    expert = int(jnp.argmin(finite))
    raise ValueError(
        f"`moe(bias=...)` is not finite for {int((~finite).sum())} of {bias.size} experts, the "
        f"first being expert {expert}: {float(bias[expert])}. Start with zeros, and let "
        "`sl.experts.balanced` move it."
    )
