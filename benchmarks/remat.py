"""What is kept for the backward pass, recomputed and offloaded, by theory and in compiled programs.

Five parts, all of them or those that `--part` names. Each needs the TPU's compiler and no
accelerator, `pip install -e ".[tpu-plan]"`, and has the time it takes on two idle cores.
`formulas` has programs for H200 besides, where the GPU's compiler is installed, `".[gpu-plan]"`.

`formulas`, some forty minutes, less with `--only`: what each word of `Strategy(remat=...)` keeps of
a layer (the terms are in `_remat_formulas.py`), and the floating-point operations it recomputes.

- `formula_ratio_max`, `_min`: what is compiled over the formula, the worst of all programs.
- `flops_error_max`: floating-point operations of products in the compiled program beside those that
  `sl.planning.flops` counts in the traced step.
- `..._recomputes`: the share of the forward pass that runs again.
- `..._bytes`, `..._ratio`: of each program.

`chains`, some seconds.

- `treeverse_wrong`: of all chains of up to 64 layers and 8 slots, those whose table evaluates more
  layers than the closed formula, or uses more slots than it may.

`budget`, some ten minutes: Llama 2 7B on 16 v5e under budgets of memory (`BUDGETS`), one of which
is too small without the host's memory.

- `budget_peak_max`, `_min`: what the step takes over its budget. The minimum leaves out steps that
  keep all that spares anything, and have memory to spare.
- `budget_seconds`: to find what blocks keep, the longest; `budget_seconds_with_host` with the host,
  where each run of layers has a backward pass of its own to compile.
- `budget_again_...`: what is computed again, over what is where blocks keep their inputs alone.
- `budget_regret`: operations computed again over those of an exhaustive search, the worst of small
  models and budgets.

`offload`, some ten minutes: 13 billion parameters on one v6e, with all state on the host; and eight
layers of width 2048 on one v5e and one v6e, with the inputs of blocks and `mlp_up` on the host.

- `gb_13b`: what the step takes of the device, of its 31.25 GiB, and `host_gb_13b` of the host.
- `offloaded_ratio`: bytes on the host over those that were asked for, of state and of activations.
- `hidden_copies_...`: of the bytes that loops over layers copy from and to the host, those that are
  under way while matrices are multiplied, as the compiler has scheduled them.
- `spared_ratio_...`: what the device holds less, over what the host holds. There are two layers'
  activations on the device, so that of eight layers six are spared.

`compressed`, some ten minutes: a small decoder whose activations are kept in fewer bits.

- `kept_...`: bytes of the codes and scales over those of the exact activations.
- `gradient_error_...`: how far the gradient of a parameter is off, as norms, the worst of all.
- `loss_...`: after training, over that with exact ones, the mean and the worst of three seeds.

    python -m benchmarks.remat --json [--part budget] [--only v5e_tensor1_fused_none]
"""

import argparse
import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import optax
from flax import nnx

import shardlib as sl
from benchmarks import _remat_compressed, _remat_formulas
from benchmarks._report import report
from models import gpt
from shardlib.compiled._host_copies import host_copies
from shardlib.compiled._memory import peak_bytes
from shardlib.layouts._chain_schedules import Binomial, least_evaluations
from shardlib.step._remat_budget import fit_remat, loops_of
from shardlib.tracing._block_costs import choices_of

BOUNDS = {
    "formula_ratio_max": 1.1,
    "flops_error_max": 0.02,
    "treeverse_wrong": 0,
    "budget_peak_max": 1.0,
    "budget_seconds": 120.0,
    "budget_regret": 1.01,
    "gb_13b": 32.0,
    "gradient_error_int8": 0.02,
    "offloaded_ratio_max": 1.0,
}
AT_LEAST = {
    "formula_ratio_min": 0.9,
    "budget_peak_min": 0.95,
    "offloaded_ratio": 1.0,
    "hidden_copies": 0.9,
    "spared_ratio": 0.75,
}
# The first is less than blocks take that keep their inputs, which the host may have.
BUDGETS = {"7400MiB": ("block_in",), "9GiB": (), "11GiB": (), "14GiB": ()}
PRECISION = sl.Precision("bf16", accumulate="bf16", reduce="bf16")
LLAMA2_13B = dataclasses.replace(
    gpt.llama2_7b(context=2048), layers=40, width=5120, heads=40, hidden=13824
)


def chains() -> dict[str, Any]:
    """Tables of chains against the closed formula."""
    wrong = 0
    for layers, slots in itertools.product(range(1, 65), range(1, 9)):
        table = Binomial(slots).table(layers)
        best = table.evaluations == least_evaluations(layers, slots)
        wrong += not best or table.slots > slots
    return {"treeverse_wrong": wrong}


def step_of(
    config: gpt.GPTConfig, target: str, axes: str, **options: Any
) -> tuple[sl.Step, sl.State, Any]:
    """A training step of a model, with its state and batch in shapes: a sequence per device."""
    mesh = sl.Target(target).mesh(axes)
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, precision=PRECISION, **options)
    optimizer = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optimizer, strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, config.context + 1), "int32")}
    return sl.train_step(gpt.loss, strategy), state, batch


def budget() -> dict[str, Any]:
    """Llama 2 under budgets of memory, and small models under all of them."""
    figures: dict[str, Any] = {}
    seconds, full = [], []
    for memory, on_host in BUDGETS.items():
        step, state, batch = step_of(
            gpt.llama2_7b(context=2048),
            "tpu:v5e:4x4",
            "data=16",
            zero=3,
            remat=sl.Remat.budget(memory, offload=on_host),
        )
        started = time.perf_counter()
        fitted = step.fitted_remat(state, batch)
        took = time.perf_counter() - started
        if on_host:
            figures["budget_seconds_with_host"] = round(took, 1)
        else:
            seconds.append(took)
        share = fitted.best.peak / fitted.budget
        figures[f"budget_peak_{memory}"] = round(share, 4)
        figures[f"budget_again_{memory}"] = round(fitted.best.flops / fitted.most_flops, 4)
        figures[f"budget_programs_{memory}"] = len(fitted.tried)
        print(f"{memory}: {took:.1f} s, {share:.4f} of it", file=sys.stderr, flush=True)
        if isinstance(fitted.best.remat, sl.Remat):
            continue
        full.append(share)
    peaks = [figures[f"budget_peak_{memory}"] for memory in BUDGETS]
    return figures | {
        "budget_peak_max": max(peaks),
        "budget_peak_min": round(min(full), 4),
        "budget_seconds": round(max(seconds), 1),
        "budget_regret": max(regret(layers) for layers in (2, 3, 4, 6)),
    }


def regret(layers: int) -> float:
    """The worst, over budgets, of what is computed again over an exhaustive search's.

    Peaks are the sums of what layers keep, so that all combinations can be tried.
    """
    config = gpt.tiny(
        layers=layers, width=64, heads=4, context=32, norm="rms", mlp="swiglu", bias=False
    )
    with sl.use(sl.rules.data, sl.make_mesh("data=1"), remat="full"):
        graph, params = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
        batch = {"tokens": jax.ShapeDtypeStruct((16, 33), "int32")}
        traced = jax.make_jaxpr(
            lambda params, batch: gpt.loss(nnx.merge(graph, params), batch).total
        )(params, batch)
    loops = loops_of(traced.jaxpr)
    choices = choices_of(loops[0].blocks[0])
    by_value = {sl.Remat(choice.names): choice for choice in choices}

    def kept(remat: Any) -> list[Any]:
        if isinstance(remat, sl.Remat):
            return [by_value[remat]] * layers
        return [by_value[value] for value in remat.of_blocks([frozenset()] * layers)]

    def size(some: Any) -> int:
        return sum(choice.size for choice in some)

    every = []
    for some in itertools.combinations_with_replacement(choices, layers):
        # A choice of one layer alone is no loop, and is not taken.
        if all(some.count(one) > 1 for one in some):
            every.append((size(some), sum(choice.flops for choice in some)))
    worst = 1.0
    for tenth in range(11):
        limit = layers * choices[-1].size * tenth // 10
        found = fit_remat(limit + 1, loops, lambda remat: size(kept(remat)) + 1)
        least = min(flops for bytes_kept, flops in every if bytes_kept <= limit)
        if found.best.flops > least:
            # Infinite where nothing need be computed again.
            worst = math.inf if least == 0 else max(worst, found.best.flops / least)
    return worst


def offload() -> dict[str, Any]:
    """State and activations in the memory of the host."""
    figures = offloaded_state()
    ratios = [figures["offloaded_ratio"]]
    hidden, spared = [], []
    for chip in ("v5e", "v6e"):
        for names in (("block_in",), ("block_in", "mlp_up")):
            found = offloaded_activations(chip, names)
            name = f"{chip}_{'_'.join(names)}"
            ratios.append(found.pop("offloaded_ratio"))
            hidden.append(found["hidden_copies"])
            spared.append(found["spared_ratio"])
            figures |= {f"{figure}_{name}": value for figure, value in found.items()}
    return figures | {
        "offloaded_ratio": min(ratios),
        "offloaded_ratio_max": max(ratios),
        "hidden_copies": min(hidden),
        "spared_ratio": min(spared),
    }


def offloaded_activations(chip: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Layers of Llama's kind with activations on the host, beside the same kept on the device."""
    config = dataclasses.replace(
        gpt.llama2_7b(context=2048), layers=8, width=2048, heads=16, hidden=5632, vocab=4096
    )
    sizes = {"block_in": config.width, "mlp_up": config.dims["mlp"]}
    asked = 2 * config.layers * config.context * sum(sizes[name] for name in names)

    def compiled(remat: sl.Remat) -> Any:
        step, state, batch = step_of(config, f"tpu:{chip}:1x1", "data=1", remat=remat)
        return step.lower(state, batch).compile()

    # Inputs of blocks are kept without a name, too.
    others = [name for name in names if name != "block_in"]
    on_host, on_device = compiled(sl.Remat.offload(*names)), compiled(sl.Remat.save(*others))
    in_loops = [copy for copy in host_copies(on_host) if copy.times == config.layers]
    hidden = sum(copy.total_bytes for copy in in_loops if copy.overlapped)
    memory, before = on_host.memory_analysis(), on_device.memory_analysis()
    spared = before.temp_size_in_bytes - memory.temp_size_in_bytes
    return {
        "offloaded_ratio": memory.host_temp_size_in_bytes / asked,
        "hidden_copies": round(hidden / sum(copy.total_bytes for copy in in_loops), 3),
        "spared_ratio": round(spared / asked, 3),
    }


def offloaded_state() -> dict[str, Any]:
    """Thirteen billion parameters on one chip."""
    step, state, batch = step_of(
        LLAMA2_13B, "tpu:v6e:1x1", "data=1", remat="full", clip=1.0, offload="all"
    )
    started = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    asked = 0
    for leaf in jax.tree.leaves(state):
        if leaf.sharding.memory_kind == "pinned_host":
            asked += leaf.size * leaf.dtype.itemsize
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return {
        "parameters_13b": parameters,
        "gb_13b": round(peak_bytes(compiled, "tpu") / 1e9, 2),
        "host_gb_13b": round(memory.host_argument_size_in_bytes / 1e9, 2),
        "offloaded_ratio": memory.host_argument_size_in_bytes / asked,
        "compile_s_13b": round(time.perf_counter() - started, 1),
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "chains": chains,
    "budget": budget,
    "offload": offload,
    "compressed": _remat_compressed.figures,
}


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--part", choices=("formulas", *PARTS), action="append")
    names = [case.name for case in _remat_formulas.cases()]
    parser.add_argument("--only", choices=names, action="append", metavar="CASE")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for part in arguments.part or ("formulas", *PARTS):
        if part == "formulas":
            figures |= _remat_formulas.figures(arguments.only or ())
        else:
            figures |= PARTS[part]()
    report("remat", figures, BOUNDS, arguments.json, at_least=AT_LEAST)


if __name__ == "__main__":
    main()
