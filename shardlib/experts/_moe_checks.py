"""What a layer of experts refuses: tokens, gates, masks, functions and weights that do not fit."""

from typing import Any

import jax.numpy as jnp

from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.modeling._random import is_key


def check_tokens(op: str, x: Any, gate: Any, names: Any) -> None:
    """Refuse tokens, names and a gate that do not fit each other.

    Args:
        op: the function that is called, for errors.
        x: the tokens, of any number of dims before their width.
        gate: the router's weights, a vector of the tokens' width for each expert.
        names: one for each dim of the tokens.
    """
    check_arrays.array(op, "x", x, "an array of tokens, (batch, ..., width)")
    check.kind(op, "names", names, tuple | list, "a name for each dim of the tokens, in a tuple")
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if x.ndim < 2 or len(names) != x.ndim or not is_float:
        raise ValueError(
            f"`{op}(x, ...)` takes tokens (batch, ..., width), real numbers, and a name for each "
            f"dim; got {x.dtype}{list(x.shape)} and `names={check.shown(names)}`."
        )
    if not x.size:
        raise ValueError(
            f"`{op}` of `x` of shape {list(x.shape)}: there are no tokens, or they have no width. "
            "Leave the layer out where a batch is empty."
        )
    _check_gate(op, gate, x.shape)


def _check_gate(op: str, gate: Any, shape: tuple[int, ...]) -> None:
    """Refuse what is no gate for tokens of this shape."""
    check_arrays.array(op, "gate", gate, "an array, (width, experts)")
    is_matrix = gate.ndim == 2 and jnp.issubdtype(gate.dtype, jnp.floating)
    if not is_matrix or gate.shape[0] != shape[-1]:
        raise ValueError(
            f"`{op}(gate=...)` is of shape (width, experts), ({shape[-1]}, ...) for tokens of "
            f"shape {shape}; got {gate.shape}."
        )


def check_real(op: str, x: Any, real: Any) -> None:
    """Refuse a mask of padding that is not one of bools for the tokens.

    One of numbers might mean weights, and one of another shape would be broadcast to some meaning.
    """
    shape, dtype = getattr(real, "shape", None), getattr(real, "dtype", type(real).__name__)
    if real is not None and (shape != x.shape[:-1] or str(dtype) != "bool"):
        raise ValueError(
            f"`{op}(real=...)` says of each token whether it is one, shape {x.shape[:-1]}, true or "
            f"false; got {shape} of {dtype}."
        )


def check_functions(op: str, router: Any, experts: Any, key: Any) -> None:
    """Refuse what is no router, no function of experts, or no key.

    A router may be anyone's: it is known by what it can do, and not by its class.
    """
    needed = ("choices", "capacity", "jitter", "choose", "balance")
    if isinstance(router, type) or not all(hasattr(router, name) for name in needed):
        raise check.refusal(op, "router", router, "a router, such as `sl.experts.Top2()`")
    check.function(op, "experts", experts, "a function of weights and tokens")
    if key is not None:
        takes = "a key, such as `jax.random.key(0)`, or None"
        check_arrays.array(op, "key", key, takes)
        # `jax.random.PRNGKey` gives plain uint32.
        if not is_key(key) and key.dtype != jnp.uint32:
            raise check.refusal(op, "key", key, takes)


def stored_experts(op: str, padded_to: Any, count: int) -> int:
    """How many experts the weights have: the gate's, or these and others that nobody chooses.

    >>> stored_experts("moe", None, 6), stored_experts("moe", 8, 6)
    (6, 8)

    Args:
        op: the function that is called, for errors.
        padded_to: as the caller has it.
        count: how many experts the gate tells.
    """
    if padded_to is None:
        return count
    takes = f"how many experts the weights have, no fewer than the {count} of the gate"
    return int(check.whole(op, "padded_to", padded_to, takes, least=count))


def check_weights(op: str, weights: Any, count: int, parts: int, axes: tuple[str, ...]) -> None:
    """Refuse weights whose first dim is not the experts of this device, or that are none.

    Args:
        op: the function that is called, for errors.
        weights: what it was given.
        count: how many experts the gate tells.
        parts: into how many parts the experts are split where the layer is called.
        axes: the manual axes that split them.
    """
    local_count = count // parts
    leaves = named_leaves(weights)
    for path, leaf in leaves:
        check_arrays.array(
            op, "weights", leaf, "a tree of arrays, with a dim for the experts first"
        )
        if leaf.ndim and leaf.shape[0] == local_count:
            continue
        split = whole = ""
        if parts > 1:
            split = f", which the axes {axes} split into {parts}"
            if leaf.ndim and leaf.shape[0] == count:
                whole = (
                    " All of them are here: name the parameter's first dim `experts`, so that each "
                    "device holds its own."
                )
        raise ValueError(
            f"`{path or 'weights'}` of shape {getattr(leaf, 'shape', None)} should have "
            f"{local_count} experts along dim 0: the gate tells {count}{split}.{whole}"
        )
    if not leaves:
        raise ValueError(f"`{op}(weights=...)` holds no arrays.")
