"""A step compiled for a machine, and what it takes of it: what all plans have in common."""

import os
import re
import traceback
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from shardlib.compiled._compile import Compiled, compile_apart
from shardlib.compiled._memory import Memory, attribute
from shardlib.compiled._written import Kept
from shardlib.machine._absent import is_absent
from shardlib.machine._chips import Chip
from shardlib.machine._targets import LOUD, Target
from shardlib.planning._advice import host_has_room
from shardlib.planning._flops import flops_of_planned
from shardlib.planning._lower import Lowered, lower
from shardlib.planning._machine import machine_of
from shardlib.step._step import Step
from shardlib.tracing._flops import Flops

# Settings of `jax.config` that change how a program is compiled without being a part of its text.
# No version of JAX has all of them.
_COMPILER_SETTINGS = (
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations",
)
_NO_HOST_MEMORY = (
    "Some arrays of this step are in the host's memory (`pinned_host`), which the compiler ignores "
    "for GPUs that are not there: it would count them as the device's. Plan for a TPU, or for the "
    "GPUs at hand."
)


@dataclass(frozen=True)
class Machine:
    """What a step is compiled for: the mesh that it has, if any, and the compiler's options."""

    mesh: Mesh | None
    platform: Any
    chip: Chip
    options: dict[str, Any]

    @classmethod
    def of(cls, mesh: Mesh | None, target: Target | None) -> "Machine":
        """That of a target, or of the devices of a mesh.

        Without a target, the devices of the mesh tell their kind, and that tells their datasheet.
        """
        return cls(mesh, *machine_of(mesh, target))


@dataclass(frozen=True)
class CompiledStep:
    """A step as a compiler has it."""

    machine: Machine
    lowered: Lowered
    compiled: Compiled
    memory: Memory
    flops: Flops | None

    @property
    def fits(self) -> bool:
        """Whether the machine has the memory that it needs, on the device and on the host.

        A compiler may refuse a program before it says what that takes, which counts as too much.
        """
        chip = self.machine.chip
        if self.compiled.refusal or self.memory.total_bytes > chip.usable_bytes:
            return False
        return host_has_room(self.memory, chip)


def compile_step(
    step: Any,
    state: Any,
    batch: Any,
    machine: Machine,
    cache: str | os.PathLike[str] | None = None,
) -> CompiledStep:
    """Trace and compile a step, and say whose memory it takes.

    In the folder `cache`, if there is one, what the compiler says is kept.
    """
    _check_state_on_host(step, machine)
    traced = lower(step, state, batch)
    kept = None
    # Of a function that is not ours it is not known what else the answer depends on.
    if cache is not None and isinstance(step, Step) and machine.mesh is not None:
        key = _key(step, traced.lowered, machine.mesh, machine.options)
        kept = Kept.of(Path(cache), key)
    compiled = compile_apart(traced.lowered, machine.platform, machine.options, kept)
    kinds = kinds_of(traced.paths, len(jax.tree.leaves(state)))
    memory = attribute(compiled, machine.platform, kinds)
    offloads = isinstance(step, Step) and bool(step.strategy.offloaded_activations)
    _check_host_memory(machine.platform, memory, (state, batch), offloads)
    flops = flops_of_planned(step, traced.jaxpr)
    return CompiledStep(machine, traced, compiled, memory, flops)


def _key(step: Step, lowered: Any, mesh: Mesh, options: dict[str, Any]) -> list[str]:
    """Texts that say all that a compiler's answer depends on.

    The program has its lines of Python with it, so that what is kept never blames a line that has
    moved.
    """
    devices = list(mesh.devices.flat)
    # Another version of a compiler gives another answer to the same program, and so do flags.
    parts = [_text_of(lowered), devices[0].client.platform_version]
    for package in ("jax", "jaxlib"):
        parts.append(version(package))
    # Their places on a torus, too.
    for device in devices:
        parts.append(f"{device!r} {device.device_kind}")
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", *LOUD):
        parts.append(os.environ.get(variable, ""))
    for setting in _COMPILER_SETTINGS:
        # Flags are in `values` alone; what a context sets is in the attribute alone.
        parts.append(str(getattr(jax.config, setting, jax.config.values.get(setting))))
    for given in (options, step.compiler_options):
        parts.append(repr(sorted(given.items())))
    return parts


def _text_of(lowered: Any) -> str:
    """The program with its lines of Python, but for those that have asked for the plan.

    JAX notes for each operation which functions called each other on the way to it, from the start
    of the process on. Where a plan is asked for makes no difference to it.
    """
    callers = {f'"{frame.filename}":{frame.lineno}' for frame in traceback.extract_stack()}
    kept = []
    for line in lowered.as_text(debug_info=True).splitlines():
        place = re.match(r'#loc\d+ = loc\((".*":\d+):', line)
        if place is None or place[1] not in callers:
            kept.append(line)
    return "\n".join(kept)


def kinds_of(paths: tuple[str, ...], leaves_of_state: int) -> dict[str, str]:
    """The kind of memory that each argument is, by its path.

    The leaves of the state come first, and are told apart by the first known name in their paths:
    the fields of a `State` come before any names of the model. All leaves after them are inputs.
    """
    kinds = {}
    for number, path in enumerate(paths):
        # The arguments of a step are the leaves of its state, and then those of the batch.
        if number >= leaves_of_state:
            kinds[path] = "inputs"
        else:
            name = re.search(rf"\b({'|'.join(_KIND_OF_FIELD)})\b", path)
            kinds[path] = _KIND_OF_FIELD[name[1]] if name else "other state"
    return kinds


_KIND_OF_FIELD = {
    "params": "parameters",
    "frozen": "parameters",
    "opt_state": "optimizer state",
    "errors": "optimizer state",
    "kept": "optimizer state",
    "rest": "other state",
    "streams": "other state",
}


def _check_state_on_host(step: Any, machine: Machine) -> None:
    """Refuse a state in the host's memory for GPUs that are not there.

    JAX drops the memory kind of shardings over such devices, so that the arrays do not tell.
    """
    if not isinstance(step, Step) or step.strategy.offloaded is None:
        return
    if machine.platform != "gpu" or machine.mesh is None:
        return
    device = machine.mesh.devices.flat[0]
    # Simulated devices stand for GPUs that are not there, too.
    if device.platform != "gpu" or is_absent(device):
        raise ValueError(f"`Strategy(offload={step.strategy.offload!r})`: {_NO_HOST_MEMORY}")


def _check_host_memory(platform: str, memory: Memory, arguments: Any, offloads: bool) -> None:
    """Refuse arrays in the host's memory where the compiler counts them as the device's.

    Those are arguments, and activations if the step `offloads` some.
    """
    # Arrays of NumPy have no sharding.
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    on_host = any(getattr(each, "memory_kind", None) == "pinned_host" for each in shardings)
    if platform == "gpu" and (on_host or offloads) and not memory.host_bytes:
        raise ValueError(_NO_HOST_MEMORY)
