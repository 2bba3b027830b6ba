"""Rows and what lies beside them in a mask, in as few dims as tell them apart."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Role: TypeAlias = Literal["rows", "beside", "same"]


class Rows(NamedTuple):
    """An array of rows and its mask, both reshaped: `(..., rows, numbers of a row)`."""

    x: tuple[int, ...]
    where: tuple[int, ...] | None


def rows(x: tuple[int, ...], where: tuple[int, ...] | None, *, apart: bool = False) -> Rows:
    """Merge neighbouring dims of rows along which the mask either changes or does not; `apart`
    leaves the last of them alone.

    >>> rows((2, 8, 16, 128), None)
    Rows(x=(256, 128), where=None)
    >>> rows((2, 8, 16, 128), (2, 1, 16, 128))
    Rows(x=(2, 8, 16, 128), where=(2, 1, 16, 128))
    >>> rows((2, 8, 16, 128), (2, 1, 1, 128))
    Rows(x=(2, 128, 128), where=(2, 1, 128))
    """
    *lead, row = x
    of_where = [1] * len(lead) if where is None else list(where[:-1])
    groups: list[tuple[int, int]] = []  # size, size in the mask
    for dim, (size, masked) in enumerate(zip(lead, of_where, strict=True)):
        alone = apart and dim >= len(lead) - 1
        if size == 1 and not alone:
            continue
        if groups and not alone and (groups[-1][1] == 1) == (masked == 1):
            groups[-1] = (groups[-1][0] * size, groups[-1][1] * masked)
        else:
            groups.append((size, masked))
    groups = groups or [(1, 1)]
    shape = tuple(size for size, _ in groups)
    if where is None:
        return Rows((*shape, row), None)
    return Rows((*shape, row), (*(masked for _, masked in groups), where[-1]))


def batched(function: Callable[..., Any], *roles: Role, depth: int = 0) -> Callable[..., Any]:
    """A function of rows whose `vmap` is the same function of more rows: `function(depth, *args)`,
    with so many dims more.

    The role of each argument says what becomes of it: `"rows"` get the new dim, first; what lies
    `"beside"` rows gets it too, of size one if it is the same for all; what is `"same"` for all
    must be. Results get the dim.
    """

    @jax.custom_batching.custom_vmap
    def called(*args: Any) -> Any:
        return function(depth, *args)

    @called.def_vmap
    def _(size: int, differs: Any, *args: Any) -> Any:
        def more(x: Any, differs: Any, role: Role) -> Any:
            if x is None or (differs and role != "same"):
                return x
            if role == "same":
                assert not differs
                return x
            return jnp.broadcast_to(x, (size, *x.shape)) if role == "rows" else x[None]

        results = batched(function, *roles, depth=depth + 1)(*map(more, args, differs, roles))
        return results, jax.tree.map(lambda _: True, results)

    return called


def merged(function: Callable[..., Any], *roles: Role) -> Callable[..., Any]:
    """A function of `"rows"` and of what is the `"same"` for all, whose `vmap` is it of more rows,
    or else a loop.
    """

    @jax.custom_batching.custom_vmap
    def called(*args: Any) -> Any:
        return function(*args)

    @called.def_vmap
    def _(size: int, differs: Any, *args: Any) -> Any:
        if any(differs[k] for k, role in enumerate(roles) if role == "same"):
            results = lax.map(
                lambda some: called(*[some.get(k, x) for k, x in enumerate(args)]),
                {k: x for k, x in enumerate(args) if differs[k]},
            )
        else:
            more = [
                (x if differs[k] else jnp.broadcast_to(x, (size, *x.shape))).reshape(
                    -1, *x.shape[1 + differs[k] :]
                )
                if role == "rows"
                else x
                for k, (x, role) in enumerate(zip(args, roles, strict=True))
            ]
            results = jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), called(*more))
        return results, jax.tree.map(lambda _: True, results)

    return called


def grouped(
    depth: int, rows: jax.Array, *beside: jax.Array | None
) -> tuple[int, list[jax.Array | None]]:
    """How many groups of rows there are, and what lies beside them, one for each group or one for
    all: `(groups or 1, row)`.
    """
    lead = rows.shape[:depth]

    def of_groups(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        same = all(size == 1 for size in x.shape[:depth])
        return (
            x.reshape(1, -1)
            if same
            else jnp.broadcast_to(x, (*lead, x.shape[-1])).reshape(-1, x.shape[-1])
        )

    return math.prod(lead), [of_groups(x) for x in beside]


def wide(dtype: Any) -> Any:
    """In which dtype to compute."""
    return jnp.promote_types(dtype, jnp.float32)
