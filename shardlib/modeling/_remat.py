"""Rematerialization: what a block keeps for its backward pass.

The model marks its blocks, and the strategy decides what becomes of them, so that the same model
runs on a machine with much memory and on one with little. A block that is recomputed keeps its
inputs, and those activations that a `Remat` names, and is run once more in the backward pass. It
may have parts with names, which are recomputed by themselves where a `Remat` drops only them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._annotate import current_mesh, current_scope
from shardlib.layouts._checkpoint_policies import PolicyOfPart, policy_of
from shardlib.layouts._remat_policy import (
    Remat,
    RematBudget,
    RematByBlock,
    checked_remat,
    kept_by_blocks,
)
from shardlib.layouts._resolve import resolve
from shardlib.layouts._specs import as_tuple, axes_without, parts_over
from shardlib.tracing._compressed_saves import named
from shardlib.tracing._layer_uses import MARK

Block = TypeVar("Block", bound=Callable)


def remat(
    block: Block,
    policy: str | Remat | None = None,
    *,
    checkpoint: Callable[[Block], Block] = jax.checkpoint,
    part: str | None = None,
) -> Block:
    """Mark a block whose activations may be dropped and recomputed in the backward pass.

    The strategy in force decides, `Strategy(remat=...)`. Outside any strategy, and without a
    policy, everything is kept. The function that is returned computes the same as the block.

    - `block`: a function, such as a layer. It may be marked where it is called or where it is
      defined: `remat` is a decorator too.
    - `policy`: settles it here instead: `"none"` keeps everything, `"full"` keeps only the block's
      inputs, and a `Remat`, or `"dots"` or `"dots_without_batch"`, keeps what it says.
    - `checkpoint`: what makes of a block one that is recomputed. It takes a `policy=`, as
      `jax.checkpoint`, the default, does. A block that takes Flax NNX modules passes `nnx.remat`;
      with `graph_updates=False`, where it changes nothing in them, a model may be closed over by
      `jax.jit`.
    - `part`: a name, such as `"scores"`, for a part of a block that is marked itself. The part is
      recomputed by itself where a value drops parts of this name, `Remat.drop("scores")`, and with
      its block where that is recomputed. It takes no `policy` beside it.

    >>> jax.grad(remat(jax.numpy.sin, "full"))(0.0).item()
    1.0
    """
    check.function("remat", "block", block)
    own = None
    if part is not None:
        check.text("remat", "part", part, "the name of a part, as text", optional=True)
        if policy is not None:
            raise ValueError(
                f"`remat(policy={policy!r}, part={part!r})`: whether a part is recomputed is said "
                "by the strategy. Leave one of the two out."
            )
    if policy is not None:
        checked_remat("remat", "policy", policy)
        if policy == "stage":
            raise ValueError(
                '`remat(policy="stage")`: that is for the stages of a pipeline, '
                '`Strategy(remat="stage")`; a block has "full".'
            )
        if isinstance(policy, RematByBlock | RematBudget):
            raise ValueError(
                f"`remat(policy={policy!r})`: that is of all blocks, `Strategy(remat=...)`; a "
                'block by itself has `"full"` or a `Remat`.'
            )
        own = kept_by_blocks(policy)
        if own is not None and own.dropped:
            raise ValueError(
                f"`remat(policy={policy!r})` drops parts, which a strategy does of all blocks, "
                f"`Strategy(remat={policy!r})`. In one block mark the part itself, "
                '`sl.remat(part, "full")`.'
            )
        if own is not None and own.chain is not None:
            raise ValueError(
                f"`remat(policy={check.shown(policy)})`: a chain is of all blocks of a loop, "
                '`Strategy(remat=...)`; a block by itself has "full".'
            )
    check.function(
        "remat",
        "checkpoint",
        checkpoint,
        "a function that makes of a block one that is computed again",
    )

    # Wrapped once for each value, so that the same block is traced once for all its calls.
    @functools.cache
    def recomputed(kept: Remat) -> Any:
        policy = policy_of(kept)
        if part is not None:
            policy = PolicyOfPart(part, kept)
        if policy is None:
            return checkpoint(block)
        return checkpoint(block, policy=policy)  # type: ignore[call-arg]

    @functools.wraps(block)
    def marked(*args: Any, **kwargs: Any) -> Any:
        kept = own
        if policy is None:
            scope = current_scope()  # of the call: a block may be marked where it is defined
            kept = scope.remat if scope else None
        if kept is None or not _is_dropped(part, kept):
            return block(*args, **kwargs)
        return recomputed(kept)(*args, **kwargs)

    return marked  # type: ignore[return-value]


def _is_dropped(part: str | None, kept: Remat) -> bool:
    """Whether a block, or a part of one, is a unit that is recomputed by itself."""
    if part is None:
        return not kept.dropped
    return part in kept.dropped


def checkpoint_name(x: Any, name: str, dims: Sequence[Any] | None = None) -> Any:
    """Name an activation, so that a `Remat` can keep it: its numbers stay what they are.

    `x` may be a tree of arrays, which have the name in common. A name has an effect in blocks
    marked with `sl.remat`, under a strategy that keeps it; it is the one of `jax.ad_checkpoint`.

    `dims` are names of its dims, as for `sl.shard`. They say over what the last dim is split, and
    so which numbers may share a scale where it is compressed. Without them it may be split over
    all axes that are not manual, and fewer share one.

    >>> block = lambda x: jax.numpy.sin(checkpoint_name(jax.numpy.sin(x), "inner"))
    >>> jax.grad(remat(block, Remat.save("inner")))(0.0).item()
    1.0
    """
    check.text("checkpoint_name", "name", name, "the name of an activation, as text")
    leaves, treedef = jax.tree.flatten(x)
    result = []
    for leaf in leaves:
        array = check_arrays.as_array("checkpoint_name", "x", leaf, "an array, or a tree of arrays")
        result.append(named(array, name, _parts_of_last_dim(array, dims, name)))
    return treedef.unflatten(result)


def _parts_of_last_dim(x: jax.Array, names: Sequence[Any] | None, what: str) -> int:
    """Over how many devices the last dim of an array may be split, besides manual axes.

    `names` are those of its dims, or None where it could be any axes; `what` is the array's own.
    """
    scope, mesh = current_scope(), current_mesh()
    if mesh.empty or not x.ndim:
        return 1
    sizes, manual = mesh.shape, frozenset(mesh.manual_axes)
    axes = axes_without(sizes, manual)
    if names is not None and scope is not None and scope.rules is not None:
        manual = frozenset(mesh.manual_axes)
        spec = resolve(
            scope.rules, mesh.shape, tuple(names), x.shape, what=what, manual=manual
        ).spec
        if spec[x.ndim - 1] is not PartitionSpec.UNCONSTRAINED:
            axes = as_tuple(spec[x.ndim - 1])
    return parts_over(sizes, axes)


def zero3_layer(block: Block) -> Block:
    """Mark a block as one layer to stage 3 of ZeRO.

    Its weights are gathered together, used, and dropped.

    It is for layers that are not scanned; a scanned layer is found without it. A block may be
    marked where it is called or where it is defined. In a block that is not marked, each operation
    gathers its own weight, which holds less at a time and sends more and smaller messages. Other
    strategies ignore the mark. The block changes no state of modules it is given; arrays among its
    arguments are traced, anything else it gets as it is.

    >>> zero3_layer(lambda x, scale: x * scale)(jax.numpy.ones(2), scale=2.0)
    Array([2., 2.], dtype=float32)
    """
    check.function("zero3_layer", "block", block)

    @functools.wraps(block)
    def marked(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

        # The mark is a `jit` of a known name around the block, which the step finds in its trace.
        # What is no array is closed over, since `jit` takes arrays only.
        def layer(traced_arrays: list[Any]) -> Any:
            remaining = iter(traced_arrays)
            merged = []
            for leaf, array in zip(leaves, is_array, strict=True):
                merged.append(next(remaining) if array else leaf)
            args, kwargs = treedef.unflatten(merged)
            return block(*args, **kwargs)

        layer.__name__ = MARK
        return jax.jit(layer)(arrays)

    return marked  # type: ignore[return-value]
