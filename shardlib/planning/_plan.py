"""The plan of a step: compiled for a machine that is not there, and read.

A plan needs no device and runs nothing. It is made in four stages:

    shapes and shardings --trace, lower--> StableHLO --compile--> program --read--> memory,
                                                                                    collectives

The compiler is the target's own, so what it says is what the step will take there. Where the step
does not fit, the plan adds advice, sorted by the bytes that it could save; and where much memory is
left that would spare recomputation, what to spend it on.
"""

import dataclasses
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from shardlib._notebook import Shown
from shardlib.checks import _arguments as check
from shardlib.compiled._collectives import Collective, collectives
from shardlib.compiled._memory import Memory
from shardlib.machine._chips import Chip
from shardlib.machine._mesh import format_mesh, slow_axes
from shardlib.machine._targets import Target
from shardlib.planning._activations import Activation, activation_values, activations_of
from shardlib.planning._advice import advice_for, host_has_room
from shardlib.planning._compiled_step import Machine, compile_step
from shardlib.planning._estimate import Estimate
from shardlib.planning._lower import check_traceable
from shardlib.planning._machine import checked_target, mesh_of, on_target
from shardlib.planning._prices import Price, prices
from shardlib.planning._remat_advice import Planned, remat_advice
from shardlib.planning._report import report
from shardlib.step._pipelined import check_branches
from shardlib.step._step import Step
from shardlib.step._strategy import Strategy
from shardlib.tracing._flops import Flops


@dataclass(frozen=True)
class Plan(Shown):
    """What a step will do on a machine: its memory, its collectives, and whether it fits.

    `plan` makes it. It prints as a report; `as_dict()` is the same for machines. `fits` says
    whether the program was compiled, and has room on the device and its host.

    - `name`: what the report calls the step.
    - `target`: the machine that the step was compiled for, in words.
    - `mesh`: the axes of its mesh and their sizes, as text.
    - `slow_axes`: the axes that cross the slow network.
    - `devices`: how many devices the mesh has.
    - `chip`: the datasheet of a device.
    - `memory`: bytes of each device, by kind and in all.
    - `collectives`: each with its axes, its bytes and its lines of source.
    - `remarks`: what else there is to say, such as compiler options that were left out.
    - `advice`: what to change, most bytes first.
    - `prices`: what each stage of ZeRO would send and hold, by formula.
    - `estimate`: the estimate that `plan` was given, or None.
    - `refusal`: what the compiler said if it refused the program, or an empty text.
    - `flops`: operations of a step's products, and how many of them are computed again; None for a
      pipeline, of which they cannot be counted.
    - `lower_seconds`: how long it took to trace and lower the step.
    - `compile_seconds`: how long it took to compile it.
    - `compiled_before`: whether an earlier plan has compiled it, whose answer was kept.
    - `activations`: a row for each named activation of blocks that are marked with `sl.remat`.
    """

    name: str
    target: str
    mesh: str
    slow_axes: tuple[str, ...]
    devices: int
    chip: Chip
    memory: Memory
    collectives: tuple[Collective, ...]
    remarks: tuple[str, ...]
    advice: tuple[str, ...]
    prices: tuple[Price, ...]
    estimate: Estimate | None
    refusal: str
    flops: Flops | None
    lower_seconds: float
    compile_seconds: float
    compiled_before: bool = False
    activations: tuple[Activation, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a device has the memory that the program needs, and its host too.

        What the host has is left out where that is unknown, `chip.host_bytes`.
        """
        if self.refusal or self.memory.total_bytes > self.chip.usable_bytes:
            return False
        return host_has_room(self.memory, self.chip)

    @property
    def sent_bytes(self) -> dict[tuple[tuple[str, ...] | None, bool], int]:
        """Bytes that a device sends in a step, by mesh axes and network.

        A key is the axes that collectives run over, `None` where their groups follow no axes, and
        whether the slow network between slices carries them.
        """
        # The same axes may be crossed over both networks, as an all-reduce in two stages does.
        totals: dict[tuple[tuple[str, ...] | None, bool], int] = defaultdict(int)
        for collective in self.collectives:
            totals[collective.axes, collective.slow] += collective.total_bytes
        return dict(totals)

    @property
    def further_round_bytes(self) -> int:
        """What a device sends besides if all layers of experts take one round more than one.

        It is 0 for a step without `sl.experts.dropless`. See `Collective.further_bytes`.
        """
        return sum(collective.further_bytes for collective in self.collectives)

    @property
    def overlapped_fraction(self) -> float:
        """The share of the sent bytes that is under way while matrices are multiplied.

        It is what the compiler has scheduled, by bytes and not by time, and 0 where a step sends
        nothing.
        """
        # Weighed by bytes: a hundred small collectives matter less than one large.
        sent = overlapped = 0
        for collective in self.collectives:
            sent += collective.total_bytes
            if collective.overlapped:
                overlapped += collective.total_bytes
        return overlapped / max(1, sent)

    def __str__(self) -> str:
        return report(self)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON.

        Sizes are in bytes. `usable_bytes` is null where a device's memory has no bound, which JSON
        cannot express; of the arrays at the fullest moment only the 20 largest are listed.
        """
        # JSON has no infinity, which stands for memory that nobody knows.
        usable: int | None = None
        if not math.isinf(self.chip.usable_bytes):
            usable = int(self.chip.usable_bytes)
        return {
            "name": self.name,
            "target": self.target,
            "mesh": self.mesh,
            "slow_axes": list(self.slow_axes),
            "devices": self.devices,
            "fits": self.fits,
            "usable_bytes": usable,
            "usable_host_bytes": self.chip.host_bytes,
            "memory": _memory_values(self.memory),
            "collectives": [_collective_values(collective) for collective in self.collectives],
            "sent_bytes": _sent_values(self.sent_bytes),
            "further_round_bytes": self.further_round_bytes,
            "overlapped_fraction": self.overlapped_fraction,
            "remarks": list(self.remarks),
            "advice": list(self.advice),
            "zero": [dataclasses.asdict(price) for price in self.prices],
            "estimate": _estimate_values(self.estimate),
            "flops": _flops_values(self.flops),
            "activations": [activation_values(one) for one in self.activations],
            "refusal": self.refusal,
            "lower_seconds": self.lower_seconds,
            "compile_seconds": self.compile_seconds,
            "compiled_before": self.compiled_before,
        }


def _estimate_values(estimate: Estimate | None) -> dict[str, Any] | None:
    """An estimate as plain values, without its modules."""
    if estimate is None:
        return None
    return {
        "kinds": estimate.kinds,
        "total_bytes": estimate.total_bytes,
        "flops": estimate.flops,
    }


def _flops_values(flops: Flops | None) -> dict[str, Any] | None:
    """The count of a step's products as plain values."""
    if flops is None:
        return None
    values = dataclasses.asdict(flops)
    values["unknown"] = dict(flops.unknown)
    values["recomputed_fraction"] = flops.recomputed_fraction
    return values


def _memory_values(memory: Memory) -> dict[str, Any]:
    """The memory of a plan as plain values, with its 20 largest arrays."""
    return {
        "kinds": memory.kinds,
        "most": memory.most,
        "total_bytes": memory.total_bytes,
        "stated_bytes": memory.stated_bytes,
        "heap_bytes": memory.heap_bytes,
        "aliased_bytes": memory.aliased_bytes,
        "host_bytes": memory.host_bytes,
        "largest": [dataclasses.asdict(piece) for piece in memory.pieces[:20]],
    }


def _collective_values(collective: Collective) -> dict[str, Any]:
    """The fields of a collective and the bytes that follow from them, as plain values."""
    values = dataclasses.asdict(collective)
    # These are properties, which `asdict` leaves out.
    values["sent_bytes"] = collective.sent_bytes
    values["total_bytes"] = collective.total_bytes
    values["further_bytes"] = collective.further_bytes
    return values


def _sent_values(
    sent_bytes: dict[tuple[tuple[str, ...] | None, bool], int],
) -> list[dict[str, Any]]:
    """`Plan.sent_bytes` as a list, since the keys of a JSON object can only be text."""
    values = []
    for (axes, slow), sent in sent_bytes.items():
        listed_axes: list[str] | None = None
        if axes is not None:
            listed_axes = list(axes)
        values.append({"axes": listed_axes, "slow": slow, "bytes": sent})
    return values


def plan(
    step: Any,
    state: Any,
    batch: Any,
    target: str | Target | None = None,
    *,
    estimate: Estimate | None = None,
    name: str = "",
    cache: str | os.PathLike[str] | None = None,
) -> Plan:
    """Compile a step for a machine that need not be there, and say what it will do.

    That is what memory it takes, which collectives it runs, and whether it fits. Nothing is
    executed.

    - `step`: what `sl.train_step` or `sl.evaluation` gives, or any `jax.jit`-ed function of a state
      and a batch.
    - `state`: its state, which may be abstract: `sl.init(..., abstract=True)`.
    - `batch`: its batch, or the shapes of one, `jax.ShapeDtypeStruct`s.
    - `target`: a machine, as a `Target` or its text, such as `"tpu:v5e:16x16"`, onto which a step
      of `sl.train_step` is laid out with the axes it has; by default the devices of its mesh.
    - `estimate`: of `sl.estimate`, to be printed next to what the compiler says.
    - `name`: what the report calls the step; by default the name of its function.
    - `cache`: a folder that keeps what the compiler says of a step of `sl.train_step`, so that the
      same step is not compiled for the same machine again; by default nothing is kept.

    Where the step does not fit, up to four more programs are compiled to say what its blocks may
    keep, with a line on standard error for each.

    >>> import jax, jax.numpy as jnp, optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> make = lambda: {"w": jnp.zeros((64, 64))}
    >>> state = sl.init(make, optax.adam(1e-3), strategy, abstract=True)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
    >>> plan = sl.plan(step, state, jax.ShapeDtypeStruct((16, 64), "float32"))
    >>> plan.memory.kinds["parameters"], plan.memory.kinds["optimizer state"]
    (16384, 32772)
    """
    # Arguments are checked first: the compiler may take minutes.
    machine = checked_target("plan", target)
    check.kind("plan", "estimate", estimate, Estimate, "what `sl.estimate` gives", optional=True)
    check.text("plan", "name", name)
    if cache is not None:
        _check_cache(cache, step)
    strategy: Strategy | None = None
    remarks: tuple[str, ...] = ()
    if isinstance(step, Step):
        step, state = on_target(step, state, machine)
        remarks = step.remarks
        strategy = step.strategy
        mesh: Mesh | None = step.strategy.device_mesh
    else:
        check_traceable("plan", step)
        mesh = mesh_of((state, batch))
    # Nothing is put on a device, neither here nor below: shapes will do.
    made = compile_step(step, state, batch, Machine.of(mesh, machine), cache)
    compiled, memory, chip = made.compiled, made.memory, made.machine.chip
    step_collectives = collectives(compiled.program, mesh)
    # Only a step of ours says how its state would be split otherwise.
    stage_prices: tuple[Price, ...] = ()
    if strategy is not None:
        stage_prices = prices(state, strategy)
        if strategy.pipeline is not None:
            check_branches(step_collectives)
    activations = activations_of(step, state, batch)
    about_remat = remat_advice(Planned(step, state, batch, made, activations, cache))
    advice = tuple(text for _, text in about_remat)
    if not made.fits:
        advice = advice_for(memory, chip, strategy, about_remat)
    place = _Place.of(mesh, machine, chip)
    return Plan(
        name=name or getattr(getattr(step, "loss_fn", step), "__name__", "the step"),
        target=place.target,
        mesh=place.mesh,
        slow_axes=place.slow_axes,
        devices=place.devices,
        chip=chip,
        memory=memory,
        collectives=step_collectives,
        remarks=(*remarks, *compiled.remarks),
        advice=advice,
        prices=stage_prices,
        estimate=estimate,
        refusal=compiled.refusal,
        flops=made.flops,
        lower_seconds=made.lowered.seconds,
        compile_seconds=compiled.seconds,
        compiled_before=compiled.was_kept,
        activations=activations,
    )


def _check_cache(cache: Any, step: Any) -> None:
    """Refuse a cache that is no folder, or of what cannot be told from another step."""
    check.kind("plan", "cache", cache, str | os.PathLike, "a folder")
    if not isinstance(step, Step):
        raise ValueError(
            "`plan(cache=...)` keeps what the compiler says of a step of `sl.train_step`. The "
            "compiler options of another `jax.jit`, on which that depends, cannot be read: "
            "leave `cache` out."
        )


@dataclass(frozen=True)
class _Place:
    """Where a step would run, in words: the machine, its mesh, and how many devices there are."""

    target: str
    mesh: str
    slow_axes: tuple[str, ...]
    devices: int

    @classmethod
    def of(cls, mesh: Mesh | None, machine: Target | None, chip: Chip) -> "_Place":
        """The place of a mesh on a machine; without a mesh it is a single device."""
        text, slow, devices = "one device", (), 1
        if mesh is not None:
            text, slow, devices = format_mesh(mesh), slow_axes(mesh), mesh.size
        return cls(str(machine or f"{devices} {chip.name} devices"), text, slow, devices)
