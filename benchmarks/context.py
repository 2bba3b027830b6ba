"""Attention over a sequence that is split over devices: what compilers make of each form.

Forward and backward of one attention, causal, in bfloat16, with 32 heads of 128 numbers and 8 key
heads, and 1,024 tokens on each device, compiled for 8 v5e, 8 v5p and 8 H200:

    gather, ring    over one axis of 8
    zigzag          a ring whose devices have an early and a late stretch each
    ulysses         over one axis of 8
    usp             a ring, in zigzag order, of 4 groups of 2

- `worst_ratio`: bytes that a device sends over those of the formula (`docs/kernels.md`), the worst
  of all programs. Each is in `..._ratio`. On v5p the axis lies along three dims of the torus, and
  the compiler makes all-reduces of the gathers of `gather`, which send twice as much. Where it
  keeps what was gathered forward, which a single attention allows, `gather` sends less.
- `..._temp_mb`: temporaries of a device.
- `..._hidden`: of the bytes that a device sends, the share that is under way while matrices are
  multiplied, as it is scheduled; a kernel of attention counts. `hidden_min` is the least of a ring
  on v5e and H200, in either order, and `hidden_v5p` that on v5p. What a ring sends last, the
  gradients that go home, has nothing beside it in a program of one attention: 1/14 of all.
- `memory_growth_...`: temporaries of a device on 512 v5p over those on 32, where tokens grow with
  devices.
- `load_max_...`: of devices that compute under a causal mask, pairs of tokens of the one with most
  over the mean, counted by the blocks that it does not leave out.
- `million_...`: `examples/long.py:llama3_8b_1m` on 64 v5p, one sequence of 1,048,576 tokens:
  arguments and temporaries of a device, what it sends and what of that is hidden, and the seconds
  that compiling takes. `long_70b_...`: Llama 3.1 70B at 131,072 tokens on 256 chips of 7x, with
  `--large`, and so a ring in zigzag order on 8 devices of 7x: some ten minutes more.
- `worst_error`: of values and gradients of all forms from plain attention in float32, over the
  scale of an array or one: so many drawn cases of each form, on simulated devices.

It needs compilers and no accelerator, and takes some seven minutes on two cores:
`pip install -e ".[tpu-plan,gpu-plan]"`. Targets whose compiler is not installed are left out.

    python -m benchmarks.context --json [--large] [--only v5e_ring]
"""

import argparse
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp

import shardlib as sl
from benchmarks._compiled import Compiled, compile_for
from benchmarks._context_errors import worst_errors
from benchmarks._report import report
from shardlib.rules import context

AT_LEAST = {"hidden_min": 0.9}
BOUNDS = {
    "worst_error": 1e-5,
    "worst_ratio": 1.02,
    "load_max_zigzag": 1.02,
    "memory_growth_zigzag": 1.05,
    "memory_growth_usp": 1.05,
    "million_hbm_gib": 40.0,
    "million_compile_s": 120.0,
}
HEADS, KEY_HEADS, SIZE, TOKENS = 32, 8, 128, 1024
NAMES = ("batch", "seq", "act_heads", "head_dim")
KEY_NAMES = ("batch", "seq", "act_kv_heads", "head_dim")
TARGETS = {"v5e": "tpu:v5e:2x4", "v5p": "tpu:v5p:2x2x2", "h200": "gpu:h200:1x1x8"}
# Whose compiler takes minutes for the smallest program: one form, and 8 devices on 4 chips.
SLOW_TARGET, SLOW_PROGRAM = "tpu:7x:2x2x1", "7x_zigzag"
# The slices on which memory is compared.
SMALL, LARGE = "tpu:v5p:2x4x4", "tpu:v5p:8x8x8"
# Steps of whole models: what `examples/long.py` calls them, the slice, and the mesh.
STEPS = {
    "million": ("llama3_8b_1m", "tpu:v5p:4x4x4", "data=1,context=64"),
    "long_70b": ("llama31_70b_128k", "tpu:7x:4x8x8", "data=64,context=8"),
}


class Form(NamedTuple):
    """A form, over so many devices in a ring and so many that exchange heads."""

    rules: sl.AxisRules
    mesh: str
    ring: int
    ulysses: int


def form_of(name: str, devices: int) -> Form:
    """A form over so many devices, all of one mesh."""
    if name == "usp":
        rules = context("usp", axis=("ring", "ulysses"))
        return Form(rules, f"ring={devices // 2},ulysses=2", devices // 2, 2)
    mesh = f"context={devices}"
    if name == "ulysses":
        return Form(context("ulysses"), mesh, 1, devices)
    if name == "gather":
        return Form(context("gather"), mesh, devices, 1)
    order = "zigzag" if name == "zigzag" else "sequence"
    return Form(context("ring", order=order), mesh, devices, 1)


FORMS = ("gather", "ring", "zigzag", "ulysses", "usp")


def program(form: Form, target: sl.Target) -> Compiled:
    """One attention, forward and backward, compiled for the devices of a target."""
    mesh = target.mesh(form.mesh)
    axes = tuple(mesh.axis_names)

    def both(q: Any, k: Any, v: Any, gradient: Any) -> Any:
        named = {"names": NAMES, "kv_names": KEY_NAMES, "arranged": True}
        y, back = jax.vjp(partial(sl.kernels.attention, causal=True, **named), q, k, v)
        return y, back(gradient)

    def shape(heads: int) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, jax.P(None, axes))
        dims = (1, TOKENS * mesh.size, heads, SIZE)
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=sharding)

    shapes = shape(HEADS), shape(KEY_HEADS), shape(KEY_HEADS), shape(HEADS)
    with sl.use(form.rules, mesh):
        lowered = jax.jit(both).lower(*shapes)
    return compile_for(target, mesh, lowered)


def sent_by_formula(name: str, form: Form) -> dict[str, float]:
    """The bytes that a device sends forward and backward, by kind of collective."""
    width, wide = 2, 4
    devices = form.ring * form.ulysses
    length = TOKENS * devices
    # Key heads that are too few to be split are repeated.
    key_heads = max(KEY_HEADS, form.ulysses)
    sent = {}
    if form.ulysses > 1:
        exchanged = (2 * HEADS + 2 * key_heads) * SIZE * TOKENS
        sent["all-to-all"] = 2 * width * exchanged * (form.ulysses - 1) / form.ulysses
    if form.ring > 1:
        block = 2 * key_heads // form.ulysses * SIZE * length
        passed = block * (form.ring - 1) / form.ring
        if name == "gather":
            sent["all-gather"] = 2 * width * passed
            sent["reduce-scatter"] = width * passed
        else:
            sent["collective-permute"] = (2 * width + wide) * passed
    return sent


def figures_of(name: str, target: sl.Target) -> dict[str, float]:
    """What a compiler makes of a form on a target."""
    form = form_of(name, 8)
    compiled = program(form, target)
    # Kinds that no formula speaks of count as well.
    by_formula = sum(sent_by_formula(name, form).values())
    temporaries = compiled.program.memory_analysis().temp_size_in_bytes
    return {
        "ratio": round(compiled.sent / by_formula, 4),
        "hidden": round(compiled.hidden, 4),
        "temp_mb": round(temporaries / 1e6, 1),
    }


def hidden_of(figures: dict[str, float]) -> dict[str, float]:
    """The least share of a ring's bytes that is hidden on v5e and H200, and the share on v5p."""
    found = {}
    for name, targets in (("hidden_min", ("v5e", "h200")), ("hidden_v5p", ("v5p",))):
        rings = [f"{target}_{form}_hidden" for target in targets for form in ("ring", "zigzag")]
        shares = [figures[ring] for ring in rings if ring in figures]
        if shares:
            found[name] = min(shares)
    return found


def step_figures(name: str) -> dict[str, float]:
    """What a compiler makes of a step of a whole model."""
    function, target_name, mesh_text = STEPS[name]
    target = sl.Target(target_name)
    mesh = target.mesh(mesh_text)
    path = Path(__file__).parent.parent / "examples" / "long.py"
    step, state, batch = runpy.run_path(str(path))[function](mesh)
    compiled = compile_for(target, mesh, step.lower(state, batch))
    return {
        f"{name}_hbm_gib": round(compiled.held / 2**30, 2),
        f"{name}_sent_gb": round(compiled.sent / 1e9, 1),
        f"{name}_hidden": round(compiled.hidden, 3),
        f"{name}_compile_s": round(compiled.seconds, 1),
    }


def memory_growth(name: str) -> float:
    """Temporaries of a device of a large slice over those of a small one."""
    sizes = []
    for slice_name in (SMALL, LARGE):
        target = sl.Target(slice_name)
        devices = len(target.devices)
        compiled = program(form_of(name, devices), target).program
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    return sizes[1] / sizes[0]


def load_max(name: str, devices: int = 8) -> float:
    """Pairs of blocks of the device that has most over the mean, under a causal mask."""
    form = form_of(name, devices)
    # Heads are alike: only the place in the ring counts, whose diagonal block is half a block.
    stretches = [[place] for place in range(form.ring)]
    if form.rules.zigzag_axes:
        stretches = [[place, 2 * form.ring - 1 - place] for place in range(form.ring)]
    pairs = [sum(number + 0.5 for number in numbers) for numbers in stretches]
    return max(pairs) * len(pairs) / sum(pairs)


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    names = [f"{target}_{form}" for target in TARGETS for form in FORMS]
    names += [*STEPS, "errors", SLOW_PROGRAM]
    parser.add_argument("--only", choices=names, action="append", metavar="PROGRAM")
    parser.add_argument("--cases", type=int, default=12, help="drawn for `worst_error`, each form")
    parser.add_argument("--large", action="store_true", help="the step on 7x, too")
    arguments = parser.parse_args()
    sl.simulate_devices(8)
    figures: dict[str, float] = {}
    if not arguments.large:
        names = [name for name in names if name not in ("long_70b", SLOW_PROGRAM)]
    for case in arguments.only or names:
        target_name, _, form = case.partition("_")
        try:
            if case == "errors":
                errors = worst_errors(arguments.cases)
                figures |= {f"error_{form}": error for form, error in errors.items()}
                figures["worst_error"] = max(errors.values())
                continue
            if case in STEPS:
                figures |= step_figures(case)
                print({name: figures[name] for name in figures if case in name}, file=sys.stderr)
                continue
            target = sl.Target(TARGETS.get(target_name, SLOW_TARGET))
            found = figures_of(form, target)
        except ImportError as error:
            print(f"{case}: left out. {error}", file=sys.stderr)
            continue
        print(case, found, file=sys.stderr, flush=True)
        figures |= {f"{case}_{figure}": value for figure, value in found.items()}
    ratios = {name: value for name, value in figures.items() if name.endswith("_ratio")}
    if ratios:
        figures["worst_ratio"] = max(ratios.values())
    figures |= hidden_of(figures)
    for form in ("ring", "zigzag", "ulysses", "usp"):
        figures[f"load_max_{form}"] = round(load_max(form), 3)
    if arguments.only is None:
        for form in ("zigzag", "usp"):
            figures[f"memory_growth_{form}"] = round(memory_growth(form), 3)
    bounds, least = (
        {name: bound for name, bound in some.items() if name in figures}
        for some in (BOUNDS, AT_LEAST)
    )
    report("context", figures, bounds, arguments.json, at_least=least)


if __name__ == "__main__":
    main()
