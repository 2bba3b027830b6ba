"""Rematerialization: what a block keeps for its backward pass.

The model marks its blocks, and the strategy decides what becomes of them, so that the same model
runs on a machine with much memory and on one with little. A block that is recomputed keeps only its
inputs, and is run once more in the backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import Remat, current_scope
from shardlib.tracing._layer_uses import MARK

Block = TypeVar("Block", bound=Callable)
REMATS: tuple[Remat, ...] = ("none", "full", "stage")


def remat(
    block: Block,
    policy: Remat | None = None,
    *,
    checkpoint: Callable[[Block], Block] = jax.checkpoint,
) -> Block:
    """Mark a block whose activations may be dropped and recomputed in the backward pass.

    The strategy in force decides. A block may be marked where it is called or where it is defined:
    `remat` is a decorator too.

    `policy` settles it here instead: `"none"` keeps everything, `"full"` keeps only the block's
    inputs. Outside any strategy, and without a policy, everything is kept. A block that takes Flax
    NNX modules passes `checkpoint=nnx.remat`; with `graph_updates=False`, where it changes nothing
    in them, a model may be closed over by `jax.jit`.

    >>> jax.grad(remat(jax.numpy.sin, "full"))(0.0).item()
    1.0
    """
    check.function("remat", "block", block)
    check.choice("remat", "policy", policy, (None, "none", "full"))
    check.function(
        "remat",
        "checkpoint",
        checkpoint,
        "a function that makes of a block one that is computed again",
    )
    # Wrapped once, so that the same block is traced once for all its calls.
    recomputed = checkpoint(block)

    @functools.wraps(block)
    def marked(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()  # of the call: a block may be marked where it is defined
        in_force = scope.remat if scope else "none"
        if (policy or in_force) == "none":
            return block(*args, **kwargs)
        return recomputed(*args, **kwargs)

    return marked  # type: ignore[return-value]


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
