"""Floating-point operations of the products in a traced function, and which of them run again.

Only products of matrices and convolutions count, a multiplication and an addition each: of a
decoder's step they are all but a percent. Loops count as often as they run, of branches the one
with the most. What runs on each device by itself, in a `shard_map`, counts for all of them.

Forward, backward and recomputed products are told apart by the names that JAX leaves on equations:

    jvp(...)/checkpoint                          forward
    transpose(jvp(...))/rematted_computation     recomputed
    transpose(jvp(...))                          backward
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval

from shardlib.compiled._source_lines import is_if_uneven
from shardlib.layouts._checkpoint_policies import CUDNN_ATTENTION
from shardlib.tracing._jaxpr import held_functions, open_jaxpr

# The scope of names in which a kernel says how many steps of its grid compute something:
# `computing_steps_48`. Pallas' own metadata would break the program's text into further lines.
STEPS, UNKNOWN = "computing_steps", "unknown"
# Where JAX says that an equation is one of a block that is computed again, or of a backward pass.
_AGAIN, _BACKWARD = "rematted_computation", "transpose("
# What runs a kernel whose products are not equations of ours.
_OPAQUE = ("custom_call", "ffi_call", CUDNN_ATTENTION)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a step's products, on all devices.

    A multiplication and an addition count each.

    - `forward`: those of the forward pass.
    - `backward`: those of the backward pass, without what is computed again.
    - `recomputed`: what is computed again of the forward pass during the backward pass, in blocks
      and parts that are recomputed.
    - `in_kernels`: what kernels of Pallas do of all these.
    - `unknown`: what has products that are not counted, such as a loop of unknown length, with how
      many there are of each.
    """

    forward: int
    backward: int
    recomputed: int
    in_kernels: int = 0
    unknown: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        """All of them."""
        return self.forward + self.backward + self.recomputed

    @property
    def recomputed_fraction(self) -> float:
        """The share of the forward pass that is computed again."""
        return self.recomputed / max(1, self.forward)


def flops_of(function: Any) -> Flops:
    """The products of a traced function, without those whose results nothing reads.

    Args:
        function: a `ClosedJaxpr`.
    """
    jaxpr = function.jaxpr
    # A compiler leaves out what nothing reads, and so does a count of what runs.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    count = _Count()
    _walk(jaxpr, _Place(), count)
    by_pass = count.by_pass
    unknown = tuple(sorted(count.unknown.items()))
    passes = (by_pass["forward"], by_pass["backward"], by_pass["recomputed"])
    return Flops(*passes, in_kernels=count.in_kernels.total(), unknown=unknown)


@dataclass(frozen=True)
class _Place:
    """Where equations are: how often they run, on all devices, and in which scopes of names."""

    times: int = 1
    scopes: str = ""

    def inside(self, equation: Any, times: int = 1) -> "_Place":
        """The place of what an equation runs so many times."""
        return _Place(self.times * times, f"{self.scopes}/{_scope_of(equation)}")

    def pass_of(self, equation: Any) -> str:
        """Which pass an equation at this place is of."""
        scopes = f"{self.scopes}/{_scope_of(equation)}"
        if _AGAIN in scopes:
            return "recomputed"
        if _BACKWARD in scopes:
            return "backward"
        return "forward"


@dataclass(frozen=True)
class _Count:
    """What is counted so far, by pass, and what could not be counted, by what it is.

    What is counted in kernels is counted by pass too, and here by their names.
    """

    by_pass: Counter[str] = field(default_factory=Counter)
    in_kernels: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Of all passes."""
        return sum(self.by_pass.values())

    def add(self, other: "_Count") -> None:
        """Add what was counted elsewhere."""
        self.by_pass.update(other.by_pass)
        self.in_kernels.update(other.in_kernels)
        self.unknown.update(other.unknown)


def _scope_of(equation: Any) -> str:
    """The scopes of names that an equation is in, within the function that it is of."""
    return str(equation.source_info.name_stack)


def _walk(jaxpr: Jaxpr, place: _Place, count: _Count) -> None:
    """Add the products of a jaxpr at a place to a count."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _PRODUCTS:
            count.by_pass[place.pass_of(equation)] += place.times * _PRODUCTS[name](equation)
        elif name in _OPAQUE:
            count.unknown[name] += 1
        elif name in _WALKS:
            _WALKS[name](equation, place, count)
        else:
            _walk_held(equation, place.inside(equation), count)


def _walk_held(equation: Any, place: _Place, count: _Count) -> None:
    """Add what an equation holds, all of which runs as often as `place` says."""
    for function in held_functions(equation):
        _walk(open_jaxpr(function), place, count)


def _walk_scan(equation: Any, place: _Place, count: _Count) -> None:
    """Add a loop of known length."""
    _walk_held(equation, place.inside(equation, equation.params["length"]), count)


def _walk_while(equation: Any, place: _Place, count: _Count) -> None:
    """Add a loop whose length is not known, which counts as one round.

    If it has products, it is noted as unknown, so that nobody takes the count for all there is. One
    that does not run where loads are even counts for nothing.
    """
    if is_if_uneven(str(equation.source_info.name_stack)):
        return
    inner = _Count()
    _walk_held(equation, place.inside(equation), inner)
    if inner.total:
        count.unknown["loop"] += 1
    count.add(inner)


def _walk_branches(equation: Any, place: _Place, count: _Count) -> None:
    """Add the branch with the most products."""
    counts = []
    for branch in equation.params["branches"]:
        inner = _Count()
        _walk(open_jaxpr(branch), place.inside(equation), inner)
        counts.append(inner)
    count.add(max(counts, key=lambda inner: inner.total))


def _walk_devices(equation: Any, place: _Place, count: _Count) -> None:
    """Add what runs on each device by itself, as often as there are devices of its axes."""
    sizes = equation.params["mesh"].shape
    # Over axes that are manual already, each device counts as it is.
    devices = math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"])
    _walk_held(equation, place.inside(equation, devices), count)


def _walk_kernel(equation: Any, place: _Place, count: _Count) -> None:
    """Add a kernel of Pallas: what each step of its grid does, as often as it has steps.

    Branches of a step, such as those for pairs of blocks with and without a mask, exclude each
    other. A kernel whose steps do nothing where a mask leaves nothing says how many do something.
    """
    grid = equation.params["grid_mapping"].grid
    steps = _computing_steps(equation, place, grid)
    if steps is None:
        count.unknown[f"kernel {_kernel_name(equation)}"] += 1
        return
    body = open_jaxpr(equation.params["jaxpr"])
    branches = [inner for inner in body.eqns if inner.primitive.name == "cond"]
    always = [inner for inner in body.eqns if inner.primitive.name != "cond"]
    inside = place.inside(equation, steps)
    # A kernel without branches has an empty one, so that there always is a largest.
    found, counts = _Count(), [_Count()]
    _walk(body.replace(eqns=always), inside, found)
    for branch in branches:
        inner = _Count()
        _walk_branches(branch, inside, inner)
        counts.append(inner)
    found.add(max(counts, key=lambda inner: inner.total))
    found.in_kernels[_kernel_name(equation)] = found.total
    count.add(found)


def _computing_steps(equation: Any, place: _Place, grid: tuple[Any, ...]) -> int | None:
    """How many steps of a kernel's grid compute something; None if that is not known."""
    # A kernel knows better than its grid, of which a mask may leave little.
    said = re.findall(rf"{STEPS}_(\w+)", f"{place.scopes}/{_scope_of(equation)}")
    if said:
        return int(said[-1]) if said[-1] != UNKNOWN else None
    # A grid may depend on values that only the running program has.
    if not all(isinstance(size, int) for size in grid):
        return None
    return math.prod(grid)


def _walk_gpu_kernel(equation: Any, place: _Place, count: _Count) -> None:
    """Note a kernel whose products are instructions of a GPU, and no equations with shapes."""
    del place
    count.unknown[f"kernel {_kernel_name(equation)}"] += 1


def _kernel_name(equation: Any) -> str:
    """The name that a kernel was given."""
    params = equation.params
    # Versions of JAX keep it in different places.
    name = params.get("name") or getattr(params.get("name_and_src_info"), "name", "")
    return str(name or equation.primitive.name)


def _of_dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * equation.outvars[0].aval.size * math.prod(shape[dim] for dim in contracted)


def _of_convolution(equation: Any) -> int:
    """Each result is a sum over the kernel's inputs and taps, those beside the array too.

    Taps at the zeros that dilation puts between elements of the array do not count: the gradient of
    a convolution with strides has many.
    """
    kernel, out = equation.invars[1].aval, equation.outvars[0].aval
    params = equation.params
    numbers = params["dimension_numbers"]
    flops = 2 * out.size * kernel.shape[numbers.rhs_spec[1]]
    if not flops:
        return 0
    for k, (kernel_dim, out_dim) in enumerate(
        zip(numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        # A tap meets an element where `result + tap - padding` is a multiple of the dilation.
        dilation = params["lhs_dilation"][k]
        results = np.arange(out.shape[out_dim]) * params["window_strides"][k]
        taps = np.arange(kernel.shape[kernel_dim]) * params["rhs_dilation"][k]
        wanted = (params["padding"][k][0] - results) % dilation
        of_residue = np.bincount(taps % dilation, minlength=dilation)
        flops = flops * int(of_residue[wanted].sum()) // out.shape[out_dim]
    return flops


def _of_ragged_dot(equation: Any) -> int:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    shape = equation.invars[0].aval.shape
    rows = math.prod(shape[dim] for dim in contracted)
    flops = 2 * equation.outvars[0].aval.size * rows
    # Where groups are what is summed over, each is a product of its own rows.
    if set(numbers.lhs_ragged_dimensions) & set(contracted):
        flops //= equation.invars[2].aval.shape[-1]
    return flops


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
    "ragged_dot_general": _of_ragged_dot,
}
_WALKS: dict[str, Callable[[Any, _Place, _Count], None]] = {
    "scan": _walk_scan,
    "while": _walk_while,
    "cond": _walk_branches,
    "shard_map": _walk_devices,
    "pallas_call": _walk_kernel,
    "mpmd_map": _walk_gpu_kernel,
}
