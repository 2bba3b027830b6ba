"""Calls of a step: what is refused before it is compiled, and how JAX's errors are explained."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.layouts._rules import BATCH, EXPERTS
from shardlib.layouts._specs import as_tuple, spec_axes
from shardlib.step._init_checks import check_sender
from shardlib.step._layer_order import check_order
from shardlib.step._precision import check_patterns
from shardlib.step._state import Layout, State
from shardlib.step._strategy import Strategy


def check_compiles() -> None:
    """Refuse to run without a compiler."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "`jax_disable_jit` is on, and a step is a compiled program on a mesh: turn it off. To "
            "look inside, print by `jax.debug.print` in the loss, or call the loss alone, "
            "`loss_fn(state.model, batch, rng)`, under `sl.unsharded()`."
        )


def check_call(state: Any, batch: Any) -> None:
    """Refuse to take a step with a state or a batch that has no values."""
    check.kind("Step", "state", state, State, "the `State` that `sl.init` makes")
    # The count of steps is in every state, and is abstract where all of it is.
    if isinstance(state.step, jax.ShapeDtypeStruct):
        raise ValueError(
            "The state is abstract, of shapes alone: make it by `sl.init` without `abstract`."
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
        raise ValueError(
            "The batch has no values, but shapes alone: `step.trace(state, batch)` takes these."
        )
    # A donated state is deleted. A traced one has no memory of its own that could be.
    is_deleted = isinstance(state.step, jax.Array) and not is_traced(state.step)
    if is_deleted and state.step.is_deleted():
        raise ValueError(
            "This state has been through a step already, and its memory was given to the new one: "
            "use the state that the step returned."
        )


def check_layout(layout: Layout, strategy: Strategy) -> None:
    """Refuse a state that was made for another strategy than the step's.

    Parts of a strategy that the state does not depend on, such as `accumulate` or `clip`, may
    differ.
    """
    if layout.optimizer is None:
        raise ValueError("The state has no optimizer: `sl.init(make_model, optimizer, strategy)`.")
    made_for = layout.strategy
    # Of one mesh, another exchange may put other axes first: that is told below.
    same_fields = (made_for.mesh, made_for.dcn) == (strategy.mesh, strategy.dcn)
    same_mesh = same_fields or made_for.device_mesh == strategy.device_mesh
    if not same_mesh or made_for.rules != strategy.rules:
        difference = _describe_difference(made_for, strategy, same_mesh)
        raise ValueError(
            f"The state was made for another strategy than the step's: {difference}. Use one "
            "strategy; a checkpoint may be read into another."
        )
    if made_for.exchange.axes or strategy.exchange.axes:
        # How the errors of an exchange are laid out depends on all of these.
        for name in ("exchange", "zero_axes", "every_axis"):
            theirs, ours = getattr(made_for, name), getattr(strategy, name)
            if theirs != ours:
                raise ValueError(
                    f"The state was made for another exchange than the step's: `{name}` is "
                    f"{theirs} there and {ours} here. Use one strategy; a checkpoint may be read "
                    "into another."
                )
    for name in ("data_axes", "zero_axes", "sharding", "frozen", "offloaded", "draws"):
        theirs, ours = getattr(made_for, name), getattr(strategy, name)
        if theirs != ours:
            raise ValueError(
                f"The state was made for another strategy than the step's: `{name}` is {theirs} "
                f"there and {ours} here. Use one strategy; a checkpoint may be read into another."
            )
    check_sender(layout.optimizer, strategy)
    check_order(made_for, strategy, dict(layout.names))


def _describe_difference(made_for: Strategy, strategy: Strategy, same_mesh: bool) -> str:
    """How the meshes of two strategies differ, or else their rules."""
    if not same_mesh:
        there, here = (check.shown(each.mesh) for each in (made_for, strategy))
        if there == here:
            return f"`dcn` is {made_for.dcn!r} there and {strategy.dcn!r} here"
        return f"`mesh` is {there} there and {here} here"
    theirs, ours = made_for.rules, strategy.rules
    for name in (*theirs, *ours):
        if name not in theirs or name not in ours or theirs[name] != ours[name]:
            there = check.shown(theirs[name]) if name in theirs else "missing"
            here = check.shown(ours[name]) if name in ours else "missing"
            return f"the rule for `{name}` is {there} there and {here} here"
    return "the order of `rules` differs, or what is done with dims that they do not divide"


def check_kept(params: Any, strategy: Strategy) -> None:
    """Refuse `Precision(keep=...)` with a pattern that matches none of these parameters.

    The strategy that the state was made with may have had another precision.
    """
    paths = [path for path, _ in named_leaves(params)]
    check_patterns("Precision(keep=...)", strategy.dtypes.keep, paths)


def check_experts(layout: Layout, strategy: Strategy, used: set[str]) -> None:
    """Refuse experts of whose weights none is split as the rule for experts says.

    A layer of experts cannot see that itself if the partitioner lays everything out. `used` holds
    the names that annotations of the traced loss have used.
    """
    # The rule is there for all models: only one that has experts can have them unsplit.
    if EXPERTS not in used:
        return
    sizes = strategy.device_mesh.shape
    axes: list[str] = []
    for candidate in strategy.rules[EXPERTS]:
        axes += [axis for axis in as_tuple(candidate) if sizes[axis] > 1]
    for _, names in layout.names:
        if isinstance(names, PartitionSpec):
            if not set(axes).isdisjoint(spec_axes(names)):
                return
        elif EXPERTS in (names or ()):
            return
    if axes:
        raise ValueError(
            f"The loss has a layer of experts, which the rule `{EXPERTS}` splits over "
            f"`{axes[0]}`, and no parameter has a dim of that name: every device would hold "
            f"all of them. Name the first dim of their weights `{EXPERTS}`, or have them "
            f"whole: `rules | sl.AxisRules({EXPERTS}=None)`."
        )


def unused_rules(strategy: Strategy, layouts: Iterable[Layout], used: set[str]) -> tuple[str, ...]:
    """Rules that split something and that no parameter and no annotation uses.

    A rule is left over where a name is misspelt, in the rules or in the model.
    """
    used = used | {BATCH}
    for layout in layouts:
        for _, names in layout.names:
            used |= {name for name in names or () if isinstance(name, str)}
    unused: list[str] = []
    for name, candidates in strategy.rules.items():
        splits_something = any(as_tuple(axes) for axes in candidates)
        if splits_something and name not in used:
            unused.append(name)
    return tuple(unused)


def is_traced(*trees: Any) -> bool:
    """Whether any leaf is a tracer: the caller is itself traced, by `jax.jit` say."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Translate an error about what JAX has not implemented into what to do about it."""
    try:
        yield
    except NotImplementedError as error:
        # JAX has one class for all that it has not implemented, so that the text has to tell.
        if "callbacks are only supported" not in str(error):
            raise
        raise ValueError(
            "The loss calls back into Python (`jax.pure_callback`, "
            "`jax.experimental.io_callback`), and JAX has that only where a step is manual over "
            "every axis of its mesh, or over none. Leave all axes to the partitioner, "
            "`Strategy(manual=())`; use a mesh of data axes alone; or print by `jax.debug.print`, "
            "which works everywhere."
        ) from error
