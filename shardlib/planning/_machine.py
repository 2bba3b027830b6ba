"""The machine that a step is planned for: its devices, its datasheet, and a step laid out on it."""

import dataclasses
import os
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardlib._text import human_bytes
from shardlib.checks import _arguments as check
from shardlib.machine._absent import options_for
from shardlib.machine._chips import CHIPS, Chip
from shardlib.machine._mesh import format_mesh, slow_axes
from shardlib.machine._targets import Target
from shardlib.step._state import State, state_shardings
from shardlib.step._step import Step
from shardlib.step._step_calls import check_layout
from shardlib.step._strategy import Strategy


def checked_target(function: str, target: Any) -> Target | None:
    """The machine that a plan is for, or None for that of the step's mesh.

    >>> checked_target("plan", 16)
    Traceback (most recent call last):
    ValueError: `plan(target=...)` takes a `sl.Target` or its text, such as `tpu:v5e:16x16`; got 16.
    """
    if isinstance(target, str):
        return Target(target)
    if target is None or isinstance(target, Target):
        return target
    raise ValueError(
        f"`{function}(target=...)` takes a `sl.Target` or its text, such as `tpu:v5e:16x16`; got "
        f"{check.shown(target)}."
    )


def check_planned(function: str, step: Any, state: Any, cache: Any) -> None:
    """Refuse what is no step of ours with its state, and a cache that is no folder."""
    check.kind(function, "step", step, Step, "a step of `sl.train_step`")
    check.kind(function, "state", state, State, "the `State` that `sl.init` makes")
    check.kind(function, "cache", cache, str | os.PathLike, "a folder", optional=True)


def memory_limit(function: str, memory: Any, device_bytes: float) -> int | None:
    """What a caller says that a step may take of a device, in bytes; None if nothing is said.

    More than a device of the target has is refused: a program that takes it does not fit.
    """
    if memory is None:
        return None
    takes = 'the bytes that a step may take: a number, or text such as `"14GiB"`'
    given = check.size(function, "memory", memory, takes)
    if given > device_bytes:
        raise ValueError(
            f"`{function}(memory={memory!r})`: a device of this target has "
            f"{human_bytes(device_bytes)}."
        )
    return given


def on_target(step: Step, state: State, target: Target | None) -> tuple[Step, State]:
    """The step and its abstract state, laid out on the target with the axes of the step's mesh.

    Without a target, or on the target's own devices, the step stays as it is and only its state
    becomes abstract. A target with another number of devices is refused.
    """
    if not isinstance(state, State):
        raise ValueError(
            "`plan` of a step of ours takes the `State` that `sl.init` makes; got "
            f"{type(state).__name__}."
        )
    strategy = step.strategy
    check_layout(state.layout, strategy)
    if target is not None and not _is_of(strategy, target):
        theirs = strategy.device_mesh
        if theirs.size != target.size:
            raise ValueError(
                f"The step's mesh `{format_mesh(theirs)}` is {theirs.size} devices, and `{target}` "
                f"has {target.size}. Make the step for a mesh of the target: "
                f"`sl.Strategy(mesh=sl.Target({str(target)!r}).mesh(...), ...)`."
            )
        # Between the slices of the target run the axes that the strategy says, or those that are
        # slow on its own mesh.
        crossing = ""
        if target.slices > 1:
            crossing = strategy.dcn or ",".join(slow_axes(theirs))
        mesh = target.mesh(format_mesh(theirs), dcn=crossing)
        # The mesh has its slow axes in the order of its devices now, and needs no word for them.
        strategy = dataclasses.replace(strategy, mesh=mesh, dcn="")
        step = Step(step.loss_fn, strategy)
        layout = dataclasses.replace(state.layout, strategy=strategy)
        state = dataclasses.replace(state, layout=layout)

    # Only shapes and shardings are needed, whatever the state was.
    def abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return step, jax.tree.map(abstract, state, state_shardings(state))


def _is_of(strategy: Strategy, target: Target) -> bool:
    """Whether the mesh of a strategy is made of exactly the target's devices.

    A mesh that is given as text is one of the devices at hand, which are only those of the target
    where that is made of CPUs.
    """
    if isinstance(strategy.mesh, str) and target.platform != "cpu":
        return False
    return set(strategy.device_mesh.devices.flat) == set(target.devices)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh of the first leaf of a tree that is sharded over one, or `None`.

    An abstract mesh does not count, because it has no devices to compile for.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def machine_of(mesh: Mesh | None, target: Target | None) -> tuple[Any, Chip, dict[str, Any]]:
    """The platform to compile for, the datasheet of its chip, and the compiler's options.

    They are those of the target if there is one, else those of the mesh's devices, or of the first
    device at hand where there is no mesh either.
    """
    if target is not None:
        if mesh is None or set(mesh.devices.flat) != set(target.devices):
            raise ValueError(
                f"The arrays of this step are not on `{target}`. A step that is not of "
                "`sl.train_step` takes shapes with shardings on its mesh: "
                "`jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))` with "
                f"`mesh = sl.Target({str(target)!r}).mesh(...)`."
            )
        return target.platform, target.chip, target.compiler_options
    device = jax.devices()[0]
    if mesh is not None:
        device = mesh.devices.flat[0]
    kind = device.device_kind
    chip = next((chip for chip in CHIPS.values() if chip.kind == kind), None)
    if chip is None:
        known = ", ".join(f"`{chip.kind}`" for chip in CHIPS.values())
        raise ValueError(f"`plan` knows no datasheet of `{kind}` devices; it knows {known}.")
    # JAX calls NVIDIA's platform by either name.
    platform = device.platform
    if platform == "cuda":
        platform = "gpu"
    return platform, chip, options_for(device)
