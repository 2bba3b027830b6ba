"""Anybody's kernel on each device's own shard, with the layouts said by names."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._shards import ArrayLayout, Names, layout_of, per_shard, varying_alike

OP = "on_shards"


def on_shards(
    function: Callable[..., Any], in_names: Sequence[Names], out_names: Names | list[Names]
) -> Callable[..., Any]:
    """A function of whole arrays that runs a function on each device's own shard of them.

    To XLA's partitioner a kernel is a single operation, which it cannot take apart: without names
    it would gather what the kernel reads. The function sees what one device has. It is called under
    a `shard_map` over all axes that are automatic where it is called, and as it is where there are
    none; JAX differentiates it, so that a kernel needs a derivative of its own.

    Args:
        function: of arrays, one for each of `in_names`. Collectives in it are its own affair.
        in_names: for each argument the names of its dims, in a list: `[("batch", None), ...]`.
        out_names: the names of the result's dims, or a list of such for several results. A name is
            one of an argument's, and splits the result over the same axes; None is a whole dim,
            the same on all devices that its other dims do not split.

    >>> import jax.numpy as jnp, shardlib as sl
    >>> rows = ("batch", None)
    >>> double = sl.kernels.on_shards(lambda x: 2 * x, [rows], rows)
    >>> with sl.unsharded():
    ...     double(jnp.ones((2, 2)))
    Array([[2., 2.],
           [2., 2.]], dtype=float32)
    """
    check.function(OP, "function", function)
    takes = 'the names of each argument\'s dims, in a list: `[("batch", None)]`'
    check.kind(OP, "in_names", in_names, list, takes)
    # A tuple is the names of one result, so that several come in a list.
    several = isinstance(out_names, list)
    results: list[Any] = list(out_names) if several else [out_names]
    for argument, names in (("in_names", in_names), ("out_names", results)):
        for each in names:
            check.kind(OP, argument, each, tuple, "a tuple of names, with None for a whole dim")

    @functools.wraps(function)
    def on_each_shard(*arrays: Any) -> Any:
        return _run(function, arrays, in_names, results, several)

    return on_each_shard


def _run(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    in_names: Sequence[Names],
    out_names: Sequence[Names],
    several: bool,
) -> Any:
    """The function on each device's shards of the arrays; see `on_shards`."""
    if len(arrays) != len(in_names):
        raise ValueError(
            f"`{OP}`: the function is called with {len(arrays)} arrays, and `in_names` has names "
            f"for {len(in_names)}."
        )
    given, layouts = [], []
    for number, (array, names) in enumerate(zip(arrays, in_names, strict=True)):
        what = f"argument {number}"
        given.append(check_arrays.as_array(OP, what, array))
        layouts.append(layout_of(OP, given[-1], names, what))
    by_name = _layouts_by_name(in_names, layouts)
    results = [_layout_of_result(names, by_name) for names in out_names]

    def checked(*shards: Any) -> Any:
        # Only here is it known how many dims a result has: collectives in the function cannot be
        # traced outside the `shard_map`.
        made = function(*shards)
        _check_results(list(made) if several else [made], out_names)
        return tuple(made) if several else made

    expected = tuple(results) if several else results[0]
    return per_shard(checked, varying_alike(*given), layouts, expected)


def _check_results(results: Sequence[Any], out_names: Sequence[Names]) -> None:
    """Refuse names that are not one for each dim of each result."""
    if len(results) != len(out_names):
        raise ValueError(
            f"`{OP}`: the function gives {len(results)} results, and `out_names` has names for "
            f"{len(out_names)}."
        )
    for x, names in zip(results, out_names, strict=True):
        if len(names) != len(jnp.shape(x)):
            raise ValueError(
                f"`{OP}`: a result of shape {jnp.shape(x)} on one device has {len(jnp.shape(x))} "
                f"dims and was given {len(names)} names {names}."
            )


def _layouts_by_name(
    in_names: Sequence[Names], layouts: Sequence[ArrayLayout]
) -> dict[str, ArrayLayout]:
    """For each name, the layout of the one dim that has it; refuses two that differ."""
    # A result can only be split as something is: its own size is not known yet.
    by_name: dict[str, ArrayLayout] = {}
    for names, layout in zip(in_names, layouts, strict=True):
        for dim, name in enumerate(names):
            if name is None:
                continue
            one = layout.select(dim)
            # Sizes may differ: a name may be that of one position, and of all.
            if by_name.setdefault(name, one).axes != one.axes:
                raise ValueError(
                    f"`{OP}`: `{name}` is split over {listed(by_name[name].axes[0])} in one "
                    f"argument and over {listed(one.axes[0])} in another, of {one.shape[0]}."
                )
    return by_name


def _layout_of_result(names: Names, by_name: dict[str, ArrayLayout]) -> ArrayLayout:
    """The layout of a result, as far as it is known before there is one: how its dims are split."""
    entries, axes = [], []
    # Where nothing is sharded on purpose, no argument's layout says anything.
    known = True
    for name in names:
        if name is None:
            entries.append(None)
            axes.append(())
            continue
        if name not in by_name:
            raise ValueError(
                f"`{OP}`: a result's dim is named `{name}`, which no argument's is; they have "
                f"{listed(by_name)}. Name a dim that no argument has None."
            )
        like = by_name[name]
        known = known and like.spec is not None
        entries.append(None if like.spec is None else like.spec[0])
        axes.append(like.axes[0])
    spec = PartitionSpec(*entries) if known else None
    return ArrayLayout((), spec, tuple(axes))
