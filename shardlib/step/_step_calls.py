"""Calls of a step: what is refused before it is compiled, and how JAX's errors are explained."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer

from shardlib.checks import _arguments as check
from shardlib.step._state import State


def check_compiles() -> None:
    """Refuse to run without a compiler."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "`jax_disable_jit` is on, and a step is a compiled program on a mesh: turn it off. To "
            "look inside, print by `jax.debug.print` in the loss, or call the loss alone, "
            "`loss_fn(state.model, batch, rng)`, under `sl.unsharded()`."
        )


def check_call(state: Any, batch: Any) -> None:
    check.kind("Step", "state", state, State, "the `State` that `sl.init` makes")
    if isinstance(state.step, jax.ShapeDtypeStruct):
        raise ValueError(
            "The state is abstract, of shapes alone: make it by `sl.init` without `abstract`."
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
        raise ValueError(
            "The batch has no values, but shapes alone: `step.trace(state, batch)` takes these."
        )


def is_traced(*trees: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say of what JAX has not implemented what to do about it."""
    try:
        yield
    except NotImplementedError as error:
        if "callbacks are only supported" not in str(error):
            raise
        raise ValueError(
            "The loss calls back into Python (`jax.pure_callback`, "
            "`jax.experimental.io_callback`), and JAX has that only where a step is manual over "
            "every axis of its mesh, or over none. Leave all axes to the partitioner, "
            "`Strategy(manual=())`; use a mesh of data axes alone; or print by `jax.debug.print`, "
            "which works everywhere."
        ) from error
