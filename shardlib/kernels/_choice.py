"""Which implementation of an op runs, and why not the others.

An op has a reference in plain JAX, which is its specification and runs anywhere, and kernels, each
for one kind of machine.

    no name is given      the implementation that was measured to be the fastest on the device that
                          is traced for, on rows of about that length; where nothing was measured,
                          that whose program, inside a model and by the device's own compiler, moves
                          and multiplies least; where nothing was compiled, the reference
    a name is given       that implementation, or an error that says why it cannot do the task
    "..._simulated"       a kernel, run by an interpreter on any machine

Each candidate is asked whether it can do the `Task`, which describes what one device would do.
"""

import functools
import importlib
import importlib.resources
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shardlib._text import listed, table
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays

SIMULATED = "_simulated"


@dataclass(frozen=True)
class Task:
    """What one device is asked to do, as far as it matters to the choice of an implementation.

    Arrays are described by their shape and dtype on one device, by the names of their arguments.
    """

    op: str
    arrays: Mapping[str, Any]
    # No names were given, and an axis is automatic: only what XLA can partition will do.
    partitioned: bool = False
    summed: tuple[str, ...] = ()  # mesh axes over which devices add up within the op
    # Mesh axes over which JAX tracks that the arrays vary.
    differing: frozenset[str] = frozenset()
    device: "Device | None" = None
    # By which measurements are compared; where it is None, the last dim of the first array.
    length: int | None = None
    definition: Any = None  # what is asked for besides arrays, of the op's own type

    def __str__(self) -> str:
        return ", ".join(f"{name}: {x.dtype}{list(x.shape)}" for name, x in self.arrays.items())


@dataclass(frozen=True)
class Device:
    """The device that a function is traced for, which need not be present."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as JAX names it


@dataclass(frozen=True)
class Implementation:
    """One way to do an op on one device.

    The module is imported no sooner than it is needed. It has `forward`, `backward`, and, if it
    does not take every task, `refuses`, which says why it does not take one, or returns None.
    """

    name: str
    platform: str | None  # None: anywhere
    module: str
    has_simulator: bool = True  # without one, a kernel runs only where its device is
    differentiable: bool = False  # JAX differentiates its `forward`, and it has no `backward`

    @property
    def simulates(self) -> bool:
        """Whether an interpreter can run it on any machine."""
        return self.platform is not None and self.has_simulator

    @property
    def forward(self) -> Callable[..., Any]:
        """The op's result, of arrays on one device; the op's reference says of which."""
        return importlib.import_module(self.module).forward

    @property
    def backward(self) -> Callable[..., Any]:
        """The op's gradients, of arrays on one device; the op's reference says of which."""
        return importlib.import_module(self.module).backward

    def why_not(self, task: Task, simulated: bool = False) -> str | None:
        """Why it cannot do a task; None if it can.

        The text continues a sentence that begins with the implementation's name. A kernel that is
        `simulated` runs on any device.
        """
        device = task.device
        assert device is not None
        if self.platform is not None and not simulated and device.platform != self.platform:
            reason = (
                f"is a kernel for {self.platform.upper()}s, and this is traced for {device.kind} "
                f"({device.platform})"
            )
            if self.simulates:
                reason += f"; `{self.name}{SIMULATED}` runs it anywhere, slowly"
            return reason
        # XLA splits what it knows; a kernel is a single operation to it.
        if self.platform is not None and task.partitioned:
            return (
                "the mesh in scope has automatic axes and the op was given no names: XLA cannot "
                "take a kernel apart. Name the dims, `names=(...)`"
            )
        refuses = getattr(importlib.import_module(self.module), "refuses", None)
        if refuses is None:
            return None
        return refuses(task)


@dataclass(frozen=True)
class Chosen:
    """An implementation, and whether an interpreter runs it.

    It is hashable, and part of the static argument of each op's `custom_vjp`.
    """

    implementation: Implementation
    simulated: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """The keyword arguments that its functions take besides those of the op.

        Kernels with a simulator take `simulated`; the reference and other kernels do not.
        """
        if self.implementation.simulates:
            return {"simulated": self.simulated}
        return {}


@dataclass(frozen=True)
class Explained:
    """One call of an op: what each device was asked to do, what runs, and why the others do not.

    - `op`: the name of the op.
    - `task`: the arrays on one device, as text.
    - `device`: the kind of the device.
    - `runs`: the name of the implementation that runs.
    - `decided_by`: `"name"`, it was asked for; `"measured"`, by times on such a device;
      `"compiled"`, by its compiler's estimates; `"default"`, nothing is known.
    - `others`: for each other implementation its name, and why it does not run.
    """

    op: str
    task: str
    device: str
    runs: str
    decided_by: str
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Explanation:
    """What runs for each call of an op in a function; printed, it is a table.

    - `calls`: an `Explained` for each call, in order.
    """

    calls: tuple[Explained, ...]

    def __str__(self) -> str:
        if not self.calls:
            return "No op of `shardlib.kernels` was called."
        rows = [("op", "on one device", "runs", "others")]
        for call in self.calls:
            others = [f"`{name}`: {reason}" for name, reason in call.others] or [""]
            # The first of the others is in the row of the call, and each further one has its own.
            runs = f"{call.runs} on {call.device} ({call.decided_by})"
            rows.append((call.op, call.task, runs, others[0]))
            rows += [("", "", "", other) for other in others[1:]]
        return table(rows)


@dataclass(frozen=True, eq=False)
class Notebook:
    """The choices that are made while it is open.

    It is part of the key of JAX's caches, and equal only to itself: what was traced under one
    notebook is traced again under another, and its choices are noted again.
    """

    calls: list[Explained] = field(default_factory=list)


_notebook = jax.make_user_context(None)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Trace a function: which implementation of each op in it would run here, and why no other.

    Nothing is computed: arrays among its arguments may be `jax.ShapeDtypeStruct`s. "Here" is the
    mesh in scope, which may be of a machine that is not there: `with sl.use(rules,
    sl.Target("tpu:v5e:4x4").mesh("data=4,model=4")):`.

    >>> import jax.numpy as jnp, shardlib as sl
    >>> explanation = sl.kernels.explain(sl.kernels.softmax, jnp.zeros((8, 128)))
    >>> [call.runs for call in explanation.calls]
    ['reference']
    """
    check.function("explain", "function", function)
    notebook = Notebook()
    leaves, treedef = jax.tree.flatten((args, kwargs))
    # Other arguments than arrays are handed to the function as they are.
    arrays = _numbers_of_arrays(leaves)

    def called(traced: list[Any]) -> None:
        # Nothing is returned: the function's result may be anything, not only arrays.
        for k, x in zip(arrays, traced, strict=True):
            leaves[k] = x
        args, kwargs = treedef.unflatten(leaves)
        function(*args, **kwargs)

    with _notebook(notebook):
        jax.eval_shape(called, [leaves[k] for k in arrays])
    return Explanation(tuple(notebook.calls))


def _numbers_of_arrays(leaves: Sequence[Any]) -> list[int]:
    """Which leaves of the arguments are arrays, by number."""
    numbers: list[int] = []
    for number, leaf in enumerate(leaves):
        if hasattr(leaf, "shape") and check_arrays.holds(leaf.dtype):
            numbers.append(number)
    return numbers


def choose(candidates: Sequence[Implementation], task: Task, requested: str | None) -> Chosen:
    """The implementation that was requested, or the first of the ranking that can do a task.

    Where nothing is known of the device, or none of those can, it is the reference, which can do
    any. A choice is noted in the notebook that is open, if one is.
    """
    device = task.device
    assert device is not None
    reasons = {candidate.name: candidate.why_not(task) for candidate in candidates}
    ranked = Ranking("name", ())
    if requested is None:
        ranked = ranking(task)
        if ranked.decided_by == "compiled":
            ranked = _kernels_in_order(ranked, candidates)
        chosen = _fastest(candidates, ranked, reasons)
    else:
        chosen = _requested(candidates, task, requested, reasons)
    notebook = _notebook.value
    if notebook is not None:
        notebook.calls.append(_explain_choice(chosen, task, ranked, reasons))
    return chosen


def _kernels_in_order(ranked: "Ranking", candidates: Sequence[Implementation]) -> "Ranking":
    """The ranking, where kernels that follow each other are in the order of the candidates.

    A compiler estimates what is around a kernel, and sees nothing of what is in it. So it can tell
    kernels from the reference, and hardly one kernel from another.
    """
    places = {candidate.name: place for place, candidate in enumerate(candidates)}
    names: list[str] = []
    for is_reference, group in itertools.groupby(ranked.names, lambda name: name == "reference"):
        known = [name for name in group if name in places]
        if not is_reference:
            known.sort(key=places.__getitem__)
        names += known
    return Ranking(ranked.decided_by, tuple(names))


def _fastest(
    candidates: Sequence[Implementation], ranked: "Ranking", reasons: Mapping[str, str | None]
) -> Chosen:
    """The first of the ranking that has no reason against it, or the reference."""
    by_name = {candidate.name: candidate for candidate in candidates}
    for name in ranked.names:
        # The table may know implementations that the op no longer has.
        if name in by_name and reasons[name] is None:
            return Chosen(by_name[name])
    return Chosen(by_name["reference"])


def _requested(
    candidates: Sequence[Implementation],
    task: Task,
    requested: str,
    reasons: Mapping[str, str | None],
) -> Chosen:
    """The implementation of a name, which ends in `_simulated` where an interpreter is to run it.

    Raises an error where there is none, or where it cannot do the task; `reasons` say for each
    candidate why it cannot, without a simulator.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    implementation, simulated = None, False
    if isinstance(requested, str):
        # The name may ask for a kernel to be run by an interpreter.
        simulated = requested.endswith(SIMULATED)
        implementation = by_name.get(requested.removesuffix(SIMULATED))
    if implementation is None or (simulated and not implementation.simulates):
        names = [*by_name]
        for candidate in candidates:
            if candidate.simulates:
                names.append(candidate.name + SIMULATED)
        raise ValueError(
            f"`{task.op}(implementation={check.shown(requested)})`: there are "
            f"{listed(names)}; None takes what is fastest here."
        )
    reason = implementation.why_not(task, simulated)
    if reason is not None:
        able = [f"`{name}`" for name, obstacle in reasons.items() if obstacle is None]
        raise ValueError(
            f"`{task.op}(implementation={requested!r})` on {task}: `{implementation.name}` "
            f"{reason}. Here {' and '.join(able)} can."
        )
    return Chosen(implementation, simulated)


# Why an implementation that can do a task does not run, by what decided.
_SLOWER = {
    "measured": "can; measured slower here",
    "compiled": "can; no faster here, by what the compiler estimates",
}


def _explain_choice(
    chosen: Chosen, task: Task, ranked: "Ranking", reasons: Mapping[str, str | None]
) -> Explained:
    """The record of a choice, from the reasons against each candidate.

    A candidate without a reason against it could have run: it was not named, or was slower, or
    nothing is known of it.
    """
    assert task.device is not None
    others = []
    for name, reason in reasons.items():
        if name == chosen.implementation.name:
            continue
        if reason is None and ranked.decided_by == "name":
            reason = "can; another was named"
        elif reason is None:
            reason = "can; neither measured nor compiled for this kind of device"
            if name in ranked.names:
                reason = _SLOWER[ranked.decided_by]
        others.append((name, reason))
    runs = chosen.implementation.name
    if chosen.simulated:
        runs += SIMULATED
    return Explained(task.op, str(task), task.device.kind, runs, ranked.decided_by, tuple(others))


def device_here() -> Device:
    """The device that is traced for: that of the mesh in scope, or JAX's default.

    A mesh may be of a machine that is not present, such as `sl.Target("tpu:v5e:4x4").mesh(...)`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is None:
        device = jax.devices()[0]
    # JAX tells makers of GPUs apart.
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(str(device.platform), str(device.platform))
    return Device(platform, str(device.device_kind))


@functools.cache
def measurements() -> tuple[Mapping[str, Any], ...]:
    """The checked-in table of measurements, which the benchmark of kernels writes.

    It has a line for each op, implementation, kind of device, dtype and length of rows that was
    measured, with the `time` that was taken.
    """
    return _lines_of("measured.json")


@functools.cache
def programs() -> tuple[Mapping[str, Any], ...]:
    """The checked-in table of compilers' programs, which the benchmark of the choice writes.

    It has a line for each op, implementation, kind of device and length of rows. `seconds` are what
    the program takes by its compiler's estimate, or, where that gives none, to move its bytes and
    for its products. A line without them has what the compiler `failed` for.
    """
    return _lines_of("compiled.json")


def _lines_of(name: str) -> tuple[Mapping[str, Any], ...]:
    """The lines of one of the tables beside this file."""
    path = importlib.resources.files("shardlib.kernels").joinpath(name)
    return tuple(json.loads(path.read_text()))


# Seconds of a kernel are what it takes at least, and those of XLA's instructions are what the
# compiler thinks they take. So a kernel has to be clearly better.
ABOUT_AS_FAST = 1.06


# How the names of devices begin whose chips are those of a device that was measured. An H100 has
# less memory than an H200, and a lower bandwidth.
ALIKE = {"NVIDIA H100": "NVIDIA H200"}


@dataclass(frozen=True)
class Ranking:
    """Implementations, the fastest first, and what says so: see `Explained.decided_by`."""

    decided_by: str
    names: tuple[str, ...]


def ranking(task: Task) -> Ranking:
    """The implementations for a task on its kind of device, the fastest first.

    Measured times decide. Where there are none for the device, its compiler's programs do: by the
    seconds that they take at least, or by their temporaries where these are about the same.
    """
    assert task.device is not None
    # Measured times show how well memory traffic and arithmetic overlap, which no count does.
    kind = task.device.kind
    measured = _nearest(measurements(), task, kind)
    for prefix, alike in ALIKE.items():
        if not measured and kind.startswith(prefix):
            measured = _nearest(measurements(), task, alike)
    if measured:
        return _ranked("measured", sorted(measured, key=lambda line: line["time"]))
    compiled = [line for line in _nearest(programs(), task, kind) if "failed" not in line]
    if compiled:
        return _ranked("compiled", _by_programs(compiled))
    return Ranking("default", ())


def _ranked(decided_by: str, lines: list[Mapping[str, Any]]) -> Ranking:
    """The implementations of some lines, in their order."""
    return Ranking(decided_by, tuple(line["implementation"] for line in lines))


def _by_programs(lines: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of programs, those of the fewest seconds first.

    Seconds that are hardly more than the fewest are about as few: then temporaries decide, and
    where these are about as few too, the reference is first.
    """
    fewest = min(line["seconds"] for line in lines)
    least = min(line["temp_gb"] for line in lines)

    def cost(line: Mapping[str, Any]) -> tuple[float, float, bool]:
        seconds, temporaries = line["seconds"], line["temp_gb"]
        if seconds <= ABOUT_AS_FAST * fewest:
            seconds = fewest
        if temporaries <= 1.01 * least:
            temporaries = least
        return seconds, temporaries, line["implementation"] != "reference"

    return sorted(lines, key=cost)


def _nearest(table: Sequence[Mapping[str, Any]], task: Task, kind: str) -> list[Mapping[str, Any]]:
    """The lines for a task's op on a kind of device whose length is nearest to the task's.

    Lengths are compared by their ratio. Lines of the task's dtype are taken if there are any.
    """
    x = next(iter(task.arrays.values()))
    lines = _lines_for(table, task.op, kind, str(x.dtype))
    if not lines:
        return []
    # Rows of twice the length are as far off as rows of half of it.
    length = max(x.shape[-1] if task.length is None else task.length, 1)
    nearest = min((line["row"] for line in lines), key=lambda row: abs(math.log(row / length)))
    return [line for line in lines if line["row"] == nearest]


def _lines_for(
    table: Sequence[Mapping[str, Any]], op: str, kind: str, dtype: str
) -> list[Mapping[str, Any]]:
    """The lines for an operation on a kind of device, of a dtype if there are any.

    Args:
        table: one of the tables.
        op: the name of the operation.
        kind: the kind of device, as JAX names it.
        dtype: the dtype of the array that the operation takes.
    """
    lines: list[Mapping[str, Any]] = []
    of_dtype: list[Mapping[str, Any]] = []
    for line in table:
        if line["op"] != op or line["device"] != kind:
            continue
        lines.append(line)
        if line["dtype"] == dtype:
            of_dtype.append(line)
    # Times of another dtype are a better guess than none.
    return of_dtype or lines
