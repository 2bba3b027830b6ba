"""Rows, and the masks and scales that belong to them, in as few dims as tell them apart.

A kernel takes rows `(rows, length)` and an array that broadcasts to them. This file brings both to
that form, and says how `vmap` acts on a kernel: by adding rows, where that is possible, rather than
by a kernel with one more grid dim.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

# What an argument of a kernel is to its rows: the rows themselves; an array that broadcasts to
# them; or an array that is the same for all rows, whatever `vmap` does.
Role: TypeAlias = Literal["rows", "broadcast", "shared"]


class RowShapes(NamedTuple):
    """The shapes `(..., rows, length)` in which a kernel sees rows and their mask.

    Both have the same number of dims; those of the mask are of the same size or one.
    """

    x: tuple[int, ...]
    where: tuple[int, ...] | None


def row_shapes(
    x: tuple[int, ...], where: tuple[int, ...] | None, *, keep_last: bool = False
) -> RowShapes:
    """Merge neighbouring dims of rows along which the mask either changes or is constant.

    The shapes that are returned have the same number of elements in the same order, so that both
    arrays can be reshaped to them. With `keep_last` the last dim before the numbers of a row is
    merged with no other.

    >>> row_shapes((2, 8, 16, 128), None)
    RowShapes(x=(256, 128), where=None)
    >>> row_shapes((2, 8, 16, 128), (2, 1, 16, 128))
    RowShapes(x=(2, 8, 16, 128), where=(2, 1, 16, 128))
    >>> row_shapes((2, 8, 16, 128), (2, 1, 1, 128))
    RowShapes(x=(2, 128, 128), where=(2, 1, 128))
    """
    *lead, length = x
    where_lead = [1] * len(lead)
    if where is not None:
        where_lead = list(where[:-1])
    merged_dims: list[tuple[int, int]] = []  # size, and size in the mask
    for dim, (size, where_size) in enumerate(zip(lead, where_lead, strict=True)):
        # For kernels that compute positions along the last dim, as causal ones do.
        by_itself = keep_last and dim >= len(lead) - 1
        if size == 1 and not by_itself:
            continue
        # Two dims can be one if the mask has both of them whole, or neither.
        constant = where_size == 1
        if merged_dims and not by_itself and (merged_dims[-1][1] == 1) == constant:
            last_size, last_where_size = merged_dims[-1]
            merged_dims[-1] = (last_size * size, last_where_size * where_size)
        else:
            merged_dims.append((size, where_size))
    if not merged_dims:
        merged_dims = [(1, 1)]  # a single row
    shape = tuple(size for size, _ in merged_dims)
    if where is None:
        return RowShapes((*shape, length), None)
    where_shape = tuple(where_size for _, where_size in merged_dims)
    return RowShapes((*shape, length), (*where_shape, where[-1]))


def batched(function: Callable[..., Any], *roles: Role, depth: int = 0) -> Callable[..., Any]:
    """Make `vmap` of a function of rows the same function of more rows.

    The function is called as `function(depth, *args)`, where arguments have `depth` more dims in
    front than they had without `vmap`. Their roles say what becomes of them under `vmap`: `"rows"`
    get the new dim; a `"broadcast"` argument gets it too, of size one if it is the same for all;
    and a `"shared"` one must be the same for all. All results have the new dim.
    """

    @jax.custom_batching.custom_vmap
    def called(*args: Any) -> Any:
        return function(depth, *args)

    @called.def_vmap
    def _(size: int, differs: Any, *args: Any) -> Any:
        deeper = []
        for x, x_differs, role in zip(args, differs, roles, strict=False):
            deeper.append(_with_batch_dim(x, x_differs, role, size))
        results = batched(function, *roles, depth=depth + 1)(*deeper)
        return results, jax.tree.map(lambda _: True, results)

    return called


def _with_batch_dim(x: Any, differs: Any, role: Role, size: int) -> Any:
    """An argument of a `vmap` with the new dim first; see `batched`.

    Args:
        x: the argument.
        differs: whether it has a dim of the `vmap`, which is then its first.
        role: what the function takes it for.
        size: how long the new dim is.
    """
    if role == "shared" and x is not None:
        assert not differs, "what all rows share differs along a dim of vmap"
        return x
    if x is None or differs:
        return x  # the dim is there already
    if role == "rows":
        return jnp.broadcast_to(x, (size, *x.shape))
    return x[None]


def merged(function: Callable[..., Any], *roles: Role) -> Callable[..., Any]:
    """Make `vmap` of a function of `"rows"` and `"shared"` arguments one call with more rows.

    Unlike with `batched`, the function sees no new dim: rows of the whole batch are concatenated.
    Where a shared argument differs along the dim of the `vmap`, the function is called in a loop.
    """

    @jax.custom_batching.custom_vmap
    def called(*args: Any) -> Any:
        return function(*args)

    @called.def_vmap
    def _(size: int, differs: Any, *args: Any) -> Any:
        shared_differ = [differs[k] for k, role in enumerate(roles) if role == "shared"]
        # With one shared array for all, more rows are all that the `vmap` means.
        if any(shared_differ):
            results = _map_over_batch(called, differs, args)
        else:
            results = _call_with_merged_rows(called, roles, size, differs, args)
        return results, jax.tree.map(lambda _: True, results)

    return called


def _map_over_batch(function: Callable[..., Any], differs: Any, args: tuple[Any, ...]) -> Any:
    """Call a function for each element of a batch in a loop; what does not differ is shared."""
    # What is the same for all elements is closed over, and not stacked.
    varying = {k: x for k, x in enumerate(args) if differs[k]}

    def call_with(element: dict[int, Any]) -> Any:
        return function(*[element.get(k, x) for k, x in enumerate(args)])

    return lax.map(call_with, varying)


def _call_with_merged_rows(
    function: Callable[..., Any],
    roles: tuple[Role, ...],
    size: int,
    differs: Any,
    args: tuple[Any, ...],
) -> Any:
    """Call a function once with the rows of a whole batch, one element's after the other's.

    Args:
        function: of rows and of shared arrays, whose results have a dim for the rows first.
        roles: of its arguments.
        size: of the batch.
        differs: for each argument, whether it has the dim of the batch.
        args: its arguments.
    """
    operands = []
    for k, (x, role) in enumerate(zip(args, roles, strict=True)):
        if role == "rows":
            batch = x if differs[k] else jnp.broadcast_to(x, (size, *x.shape))
            # The shape of one row's part is that behind the batch (if any) and the rows.
            x = batch.reshape(-1, *x.shape[1 + differs[k] :])
        operands.append(x)
    return jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), function(*operands))


def grouped(
    depth: int, rows: jax.Array, *aligned: jax.Array | None
) -> tuple[int, list[jax.Array | None]]:
    """The number of groups of rows, and what belongs to each group as `(groups or 1, length)`.

    A group is an element of the first `depth` dims, those that `vmap` added. Arrays that are the
    same for all groups come back with a single row, None as None.
    """
    lead = rows.shape[:depth]

    def by_group(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        if all(size == 1 for size in x.shape[:depth]):
            return x.reshape(1, -1)
        return jnp.broadcast_to(x, (*lead, x.shape[-1])).reshape(-1, x.shape[-1])

    return math.prod(lead), [by_group(x) for x in aligned]


def compute_dtype(dtype: Any) -> Any:
    """The dtype in which to compute with numbers of a dtype: float32, or wider if they are."""
    return jnp.promote_types(dtype, jnp.float32)
