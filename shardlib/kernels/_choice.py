"""Which implementation of an op runs, and why not the others.

An op has a reference, plain JAX, which is its specification and runs anywhere, and kernels, each
for one kind of machine. Asked for none, an op takes what was measured to be the fastest on the
device it is traced for, of rows about as long, and the reference where nothing was. Asked for one
by name, it takes that or says why it cannot.
"""

import functools
import importlib
import importlib.resources
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shardlib._text import table
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays

SIMULATED = "_simulated"


@dataclass(frozen=True)
class Task:
    """What one device is asked to do: the op, its arrays there by name, and what else matters to a
    choice.
    """

    op: str
    arrays: Mapping[str, Any]  # of shape and dtype
    # No names were given, and an axis is automatic: only what XLA can take apart will do.
    partitioned: bool = False
    summed: tuple[str, ...] = ()  # axes over which devices add up within the op
    # Axes over which JAX keeps account that the arrays differ.
    differing: frozenset[str] = frozenset()
    device: "Device | None" = None

    def __str__(self) -> str:
        return ", ".join(f"{name}: {x.dtype}{list(x.shape)}" for name, x in self.arrays.items())


@dataclass(frozen=True)
class Device:
    """What a function is traced for: the device of the mesh in scope, or JAX's default."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as JAX names it


@dataclass(frozen=True)
class Implementation:
    """One way to do an op on one device: its name, where it runs, and the module, which is loaded
    no sooner than it is needed.

    The module has `forward`, `backward`, and, if it does not take every task, `refuses`, which says
    why.
    """

    name: str
    platform: str | None  # None: anywhere
    module: str
    ours: bool = True  # a kernel of ours can be simulated

    @property
    def simulates(self) -> bool:
        """Whether there is an interpreter for it."""
        return self.platform is not None and self.ours

    @property
    def forward(self) -> Callable[..., Any]:
        return importlib.import_module(self.module).forward

    @property
    def backward(self) -> Callable[..., Any]:
        return importlib.import_module(self.module).backward

    def why_not(self, task: Task, simulated: bool = False) -> str | None:
        """Why it cannot do a task, if it cannot."""
        device = task.device
        assert device is not None
        if self.platform is not None and not simulated and device.platform != self.platform:
            return (
                f"is a kernel for {self.platform.upper()}s, and this is traced for {device.kind} "
                f"({device.platform})"
                + f"; `{self.name}{SIMULATED}` runs it anywhere, slowly"
                * self.simulates
            )
        if self.platform is not None and task.partitioned:
            return (
                "the mesh in scope has automatic axes and the op was given no names: XLA cannot "
                "take a kernel apart. Name the dims, `names=(...)`"
            )
        refuses = getattr(importlib.import_module(self.module), "refuses", None)
        return refuses and refuses(task)


@dataclass(frozen=True)
class Chosen:
    """An implementation, and whether an interpreter runs it."""

    implementation: Implementation
    simulated: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """What its functions are told besides."""
        return {"simulated": self.simulated} if self.implementation.simulates else {}


@dataclass(frozen=True)
class Explained:
    """One call of an op: what was asked on each device, what runs, and why the others do not."""

    op: str
    task: str
    device: str
    runs: str
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Explanation:
    """What runs for each call of an op in a function, in order."""

    calls: tuple[Explained, ...]

    def __str__(self) -> str:
        rows = [("op", "on one device", "runs", "others")]
        for call in self.calls:
            others = [f"`{name}`: {reason}" for name, reason in call.others] or [""]
            rows.append((call.op, call.task, f"{call.runs} on {call.device}", others[0]))
            rows += [("", "", "", other) for other in others[1:]]
        return table(rows) if self.calls else "No op of `shardlib.kernels` was called."


# Each its own key: what is traced under one notebook is traced again under another.
@dataclass(frozen=True, eq=False)
class Notebook:
    """The choices made while it is open."""

    calls: list[Explained] = field(default_factory=list)


_notebook = jax.make_user_context(None)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Trace a function and say for each op in it which implementation would run here.

    It also says why the others would not.

    Nothing is computed; arrays may be `jax.ShapeDtypeStruct`s. "Here" is the mesh in scope, which
    may be of a machine that is not there: `with sl.use(rules,
    sl.Target("tpu:v5e:4x4").mesh("data=4,model=4")):`.

    >>> import jax.numpy as jnp, shardlib as sl
    >>> explanation = sl.kernels.explain(sl.kernels.softmax, jnp.zeros((8, 128)))
    >>> [call.runs for call in explanation.calls]
    ['reference']
    """
    check.function("explain", "function", function)
    notebook = Notebook()
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [
        k
        for k, leaf in enumerate(leaves)
        if hasattr(leaf, "shape") and check_arrays.holds(leaf.dtype)
    ]

    def called(given: list[Any]) -> None:  # what it gives may be anything
        for k, x in zip(arrays, given, strict=True):
            leaves[k] = x
        args, kwargs = treedef.unflatten(leaves)
        function(*args, **kwargs)

    with _notebook(notebook):
        jax.eval_shape(called, [leaves[k] for k in arrays])
    return Explanation(tuple(notebook.calls))


def choose(candidates: Sequence[Implementation], task: Task, asked: str | None) -> Chosen:
    """The implementation that was asked for, or the fastest measured of those that can, which may
    be the reference.
    """
    device = task.device
    assert device is not None
    reasons = {each.name: each.why_not(task) for each in candidates}
    if asked is None:
        fastest = [name for name in ranking(task) if reasons.get(name, "") is None]
        chosen = Chosen(
            next(
                each for each in candidates if each.name == (fastest[0] if fastest else "reference")
            )
        )
    else:
        chosen = _named(candidates, task, asked, reasons)
    if (notebook := _notebook.value) is not None:
        others = tuple(
            (name, reason or ("can; " + _unmeasured(task, name)))
            for name, reason in reasons.items()
            if name != chosen.implementation.name
        )
        runs = chosen.implementation.name + SIMULATED * chosen.simulated
        notebook.calls.append(Explained(task.op, str(task), device.kind, runs, others))
    return chosen


def _named(
    candidates: Sequence[Implementation], task: Task, asked: str, reasons: Mapping[str, str | None]
) -> Chosen:
    named = {each.name: each for each in candidates}
    simulated = isinstance(asked, str) and asked.endswith(SIMULATED)
    each = named.get(asked.removesuffix(SIMULATED)) if isinstance(asked, str) else None
    if each is None or (simulated and not each.simulates):
        names = [*named, *(name + SIMULATED for name, one in named.items() if one.simulates)]
        raise ValueError(
            f"`{task.op}(implementation={check.shown(asked)})`: there are "
            f"{', '.join(f'`{name}`' for name in names)}; None takes what is fastest here."
        )
    reason = each.why_not(task, simulated)
    if reason is not None:
        able = [f"`{name}`" for name, why in reasons.items() if why is None]
        raise ValueError(
            f"`{task.op}(implementation={asked!r})` on {task}: `{each.name}` {reason}. Here "
            f"{' and '.join(able)} can."
        )
    return Chosen(each, simulated)


def device_here() -> Device:
    """What is traced for: the device of the mesh in scope, which need not be there, or JAX's
    default.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is None:
        device = jax.devices()[0]
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(str(device.platform), str(device.platform))
    return Device(platform, str(device.device_kind))


@functools.cache
def measurements() -> tuple[Mapping[str, Any], ...]:
    """The checked-in table, by the benchmark: a line for an op, an implementation, a kind of device
    and a length of rows.
    """
    return tuple(
        json.loads(
            importlib.resources.files("shardlib.kernels").joinpath("measured.json").read_text()
        )
    )


def ranking(task: Task) -> list[str]:
    """Implementations measured on a kind of device, the fastest first, of those rows whose length
    is nearest to the task's.

    Of its dtype, if any was measured.
    """
    assert task.device is not None
    lines = [
        line
        for line in measurements()
        if (line["op"], line["device"]) == (task.op, task.device.kind)
    ]
    x = task.arrays["x"]
    lines = [line for line in lines if line["dtype"] == str(x.dtype)] or lines
    row = max(x.shape[-1], 1)
    nearest = min(
        (line["row"] for line in lines),
        key=lambda length: abs(math.log(length / row)),
        default=None,
    )
    return [
        line["implementation"]
        for line in sorted(lines, key=lambda line: line["time"])
        if line["row"] == nearest
    ]


def _unmeasured(task: Task, name: str) -> str:
    return (
        "measured slower here" if name in ranking(task) else "not measured on this kind of device"
    )
