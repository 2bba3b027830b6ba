"""Pipeline schedules: in the simulator against their papers, executed against the simulator,
compiled, and timed.

- Every schedule, over 2 to 32 stages and once to eight times as many microbatches, in the
  simulator: the share of the bubble against the closed formula, what stages hold against the
  promise, the bubble in ticks beside it; and the zero-bubble paper's Table 5 from its measured
  costs. `worst_difference` is the largest of all differences of shares, `worst_held` of all
  excesses of what is held.
- Every schedule executed over 2, 4 and 8 stages of simulated devices, with axes of data, tensors
  and experts: `ticks_differ` counts those whose compiled loop has another number of ticks,
  `stash_differs` those whose compiled buffer is not the fullest stage's, and `worst_error` is the
  largest difference of loss and gradients from one stage's, relative to the largest entry of each.
- `memory_ratio`: temporaries of the compiled step of four stages, 32 microbatches over 8, the worst
  of the compilers that are installed.
- `efficiency_2_stages`: a data-parallel step over the two-stage step of the same model and
  microbatches, on two simulated devices in turns; the median. 16/17 is the limit.

    python -m benchmarks.pipeline --json                   # some six minutes on two cores
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from models import gpt
from shardlib.compiled._collectives import collectives
from shardlib.machine._targets import COMPILE_ONLY, installed
from shardlib.pipeline import SCHEDULES, UNIT, Costs, pack, simulate
from shardlib.pipeline._program import program_of
from shardlib.pipeline.schedules._published import COSTED
from shardlib.step._layer_order import reordered

BOUNDS = {
    "worst_difference": 0.005, "worst_held": 0.0, "ticks_differ": 0, "stash_differs": 0,
    "worst_error": 1e-5,
    "memory_ratio": 1.02,
}  # fmt: skip
LEAST = {"efficiency_2_stages": 0.85}

# Zero bubble (2401.10241), Table 9: milliseconds of F, B and W, and of sending; Table 5: the share
# of bubbles of 1F1B, 1F1B-I, ZB-H1, ZB-H2, ZB-1p, ZB-2p. By stages, microbatches, parts of a stage
# in 1F1B-I, and heads and width, from which follows what share of a microbatch's activations the
# gradients of weights need: 32 of 34 + 5 a s / h bytes of a layer, s = 1024.
PUBLISHED = [
    (8, 24, 3, (24, 2304), (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083, 0.1585,
    0.0433)),
    (8, 32, 3, (24, 2304), (18.513, 18.086, 9.331, 0.626), (0.1985, 0.0818, 0.1242, 0.0837, 0.1242,
    0.0039)),
    (8, 64, 3, (24, 2304), (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674, 0.0444, 0.0674,
    0.0026)),
    (8, 24, 4, (32, 4096), (29.718, 29.444, 19.927, 0.527), (0.2347, 0.0808, 0.1323, 0.0698,
    0.1323, 0.0029)),
    (8, 32, 4, (32, 4096), (29.802, 29.428, 19.530, 0.577), (0.1898, 0.0628, 0.1045, 0.0559,
    0.1045, 0.0022)),
    (8, 64, 4, (32, 4096), (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0320, 0.0554, 0.0294,
    0.0554, 0.0010)),
    (16, 48, 3, (40, 5120), (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1104, 0.1397, 0.0672,
    0.1397, 0.0066)),
    (16, 64, 3, (40, 5120), (11.307, 11.254, 8.101, 0.379), (0.2082, 0.0852, 0.1088, 0.0516,
    0.1088, 0.0054)),
    (16, 128, 3, (40, 5120), (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0445, 0.0576, 0.0266,
    0.0576, 0.0028)),
    (32, 96, 2, (48, 6144), (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1493, 0.1421, 0.0641,
    0.1421, 0.0038)),
    (32, 128, 2, (48, 6144), (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1164, 0.1106, 0.0490,
    0.1106, 0.0029)),
]  # fmt: skip
COLUMNS = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
WIDTH, TOKENS, EXPERTS, ROWS = 8, 4, 4, 4


def made(name: str, stages: int, microbatches: int, costs: Costs = UNIT, **more: Any) -> Any:
    """A schedule by its name."""
    return SCHEDULES[name](
        stages, microbatches, **({"costs": costs} if name in COSTED else {}), **more
    )


def published(row: tuple[Any, ...]) -> list[tuple[str, float, float]]:
    """Of each column of a row of Table 5, the share that is found and that of the paper."""
    stages, count, chunks, (heads, width), times, shares = row
    costs = Costs(*times, kept=32 / (34 + 5 * heads * 1024 / width))
    found = []
    for name, share in zip(COLUMNS, shares, strict=True):
        schedule = made(
            name, stages, count, costs, **({"chunks": chunks} if name == "interleaved" else {})
        )
        found.append((name, simulate(schedule.table(), costs).bubble, share))
    return found


def simulated() -> dict[str, Any]:
    """Every schedule against its closed formula and its promise."""
    worst, held, cases, lockstep = 0.0, 0.0, 0, {}
    for name in SCHEDULES:
        for stages in (2, 4, 8, 16, 32):
            for times in (1, 2, 4, 8):
                try:
                    schedule = made(name, stages, times * stages)
                except ValueError:
                    continue  # it takes more
                table = schedule.table()
                for costs in (Costs(), Costs(1.0, 1.1, 0.6)):
                    timeline = simulate(table, costs)
                    for stage, live in enumerate(timeline.live):
                        held = max(held, live - schedule.live(stage))
                    try:
                        gap = schedule.gap(costs)
                    except (AttributeError, ValueError):
                        continue  # searched, or the formula is for other numbers
                    cases += 1
                    worst = max(worst, abs(timeline.bubble - gap / (gap + timeline.work)))
                if (stages, times) == (8, 4):
                    ticks = pack(table, schedule.paired)
                    lockstep[name] = [round(simulate(table).bubble, 4), round(ticks.bubble(), 4)]
    table5: dict[str, float] = dict.fromkeys(COLUMNS, 0.0)
    for row in PUBLISHED:
        for name, found, share in published(row):
            # What is searched may be better.
            over = abs(found - share) if name not in COSTED else max(0.0, found - share)
            table5[name] = max(table5[name], over)
    return {
        "worst_difference": max(worst, *table5.values()),
        "worst_held": max(0.0, held),
        "formulas": cases,
        "formulas_worst": worst,
        "table5_worst": {name: round(one, 5) for name, one in table5.items()},
        "bubble_and_in_ticks_8_32": lockstep,
    }


def toy(layers: int) -> Any:
    """Layers of two products and of experts."""
    keys = jax.random.split(jax.random.key(0), 5)
    normal = lambda key, *shape: jax.random.normal(key, shape) / math.sqrt(WIDTH)  # noqa: E731
    up, down = normal(keys[0], layers, WIDTH, 2 * WIDTH), normal(keys[1], layers, 2 * WIDTH, WIDTH)
    gate = normal(keys[3], layers, WIDTH, EXPERTS)
    experts = normal(keys[4], layers, EXPERTS, WIDTH, WIDTH)
    names = {
        "up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "gate": ("layers",
        "embed", None),
        "experts": ("layers", "experts", "embed", None), "enter": ("embed", None),
    }  # fmt: skip
    weights = {
        "up": up,
        "down": down,
        "gate": gate,
        "experts": experts,
        "enter": normal(keys[2], WIDTH, WIDTH),
    }
    return sl.annotate(weights, names)


def toy_loss(model: Any, x: jax.Array, rng: jax.Array) -> sl.WeightedMean:
    """Enter, layer by layer, and out by the same weight. Branches are scaled as deep models scale
    theirs: else one stage on another mesh differs by more than rounding, which layers would
    amplify.
    """
    scale = 1 / model["up"].shape[0]

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        x += scale * jnp.tanh(sl.shard(x @ w["up"], "batch", None, "act_mlp")) @ w["down"]
        router = sl.experts.TopK(2)
        y, told = sl.experts.moe(
            x,
            router,
            lambda w, x: jnp.tanh(x @ w),
            gate=w["gate"],
            weights=w["experts"],
            names=("batch", None, None),
        )
        return x + scale * y, told.balance

    stack = {name: model[name] for name in ("up", "down", "gate", "experts")}
    x, balance = jax.lax.scan(layer, x @ model["enter"], stack)
    y = x @ model["enter"].T
    return sl.weighted_mean(jnp.sum(y * y), y.size) + 0.01 * jax.tree.map(
        lambda of: of.mean(0), balance
    )


def executed() -> dict[str, Any]:
    """Every schedule on simulated devices, against one stage."""
    rules = sl.rules.data | sl.rules.tensor | sl.rules.pipeline | sl.AxisRules(experts="data")
    error, ticks, stash, runs = 0.0, [], [], 0
    for stages in (2, 4, 8):
        count, layers = 2 * stages, 2 * stages
        x = np.random.default_rng(0).normal(size=(ROWS * count, TOKENS, WIDTH)).astype("f")
        mesh = {
            2: "stage=2,data=2,model=2",
            4: "stage=4,data=2,model=1",
            8: "stage=8,data=1,model=1",
        }[stages]

        def stepped(strategy: sl.Strategy, layers: int = layers, x: np.ndarray = x) -> Any:
            # Whose state is the gradient.
            state = sl.init(lambda: toy(layers), optax.trace(0.0), strategy)
            step = sl.train_step(toy_loss, strategy)
            with jax.default_matmul_precision("highest"):
                text = step.lower(state, x).compile().as_text() if strategy.pipeline else ""
                state, metrics = step(state, x)
            return jax.device_get(
                (reordered(state, natural=True).opt_state.trace, metrics["loss"])
            ), text

        alone, _ = stepped(
            sl.Strategy(mesh="stage=1,data=4,model=2", rules=rules, accumulate=count)
        )
        for name in SCHEDULES:
            schedule = made(name, stages, count)
            found, text = stepped(sl.Strategy(mesh=mesh, rules=rules, pipeline=schedule))
            runs += 1
            differences = jax.tree.map(
                lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), found, alone
            )
            error = max(error, *jax.tree.leaves(differences))
            made_ticks = len(pack(schedule.table(), schedule.paired).rows)
            loops = {
                one.times
                for one in collectives(text)
                if one.kind == "collective-permute" and not one.conditional
            }
            if loops - {1} != {made_ticks}:
                ticks.append(f"{name} over {stages}: {loops} for {made_ticks}")
            timeline, program = simulate(schedule.table()), program_of(schedule)
            promised = max(timeline.live) * program.table.parts / program.table.stages
            per, rows = layers // program.table.parts, ROWS // int(mesh[mesh.index("data=") + 5])
            (slots,) = program.slots["kept"]
            held = f"f32[{slots},{per},{rows},{TOKENS},{WIDTH}]"
            # A paired tick goes forward first, so that a stage may hold one part more while it
            # does.
            if slots not in (promised, promised + schedule.paired) or held not in text:
                stash.append(f"{name} over {stages}: {slots} for {promised:g}")
            print(
                f"{name} over {stages}: {made_ticks} ticks, {slots} parts held",
                file=sys.stderr,
                flush=True,
            )
    for complaint in (*ticks, *stash):
        print(complaint, file=sys.stderr)
    return {
        "executed": runs,
        "ticks_differ": len(ticks),
        "stash_differs": len(stash),
        "worst_error": error,
    }


MACHINES = {"v5e": ("tpu:v5e:2x4", "libtpu"), "h200": ("gpu:h200:1x1x8", "jax_plugins.xla_cuda13")}


def compiled_memory(machine: str, microbatches: int) -> dict[str, Any]:
    """Temporaries of a step of four stages, and its permutes."""
    target = sl.Target(MACHINES[machine][0])
    mesh = sl.make_mesh("stage=4,data=2", devices=target.devices)
    schedule = sl.pipeline.OneFOneB(4, microbatches)
    strategy = sl.Strategy(
        mesh=mesh, rules=sl.rules.data | sl.rules.pipeline, pipeline=schedule, precision="bf16"
    )
    config = gpt.tiny(layers=8, width=512, heads=4, context=512, vocab=4096)
    state = sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adam(1e-3), strategy, abstract=True
    )
    batch = {"tokens": jax.ShapeDtypeStruct((2 * microbatches, config.context + 1), "int32")}
    step = sl.train_step(gpt.loss, strategy).lower(state, batch)
    compiled = step.compile(compiler_options=target.compiler_options)
    permutes = [
        one
        for one in collectives(compiled, mesh)
        if one.kind == "collective-permute" and one.operand_bytes > 1024
    ]
    return {
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "permutes": [(one.times, one.operand_bytes, one.conditional) for one in permutes],
    }


def efficiency(rounds: int) -> dict[str, Any]:
    """Seconds of steps on two devices, by how they are parallel, in turns."""
    sl.simulate_devices(2)
    config, count = gpt.tiny(layers=4, width=256, heads=4, context=128, vocab=256), 16
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (2 * count, config.context + 1))}
    rules = sl.rules.data | sl.rules.pipeline
    kinds = {
        "data": sl.Strategy(mesh="data=2", rules=sl.rules.data, accumulate=count),
        **{
            name: sl.Strategy(mesh="stage=2,data=1", rules=rules, pipeline=schedule)
            for name, schedule in {
                "eager-1f1b": sl.pipeline.Eager1F1B(2, count),
                "1f1b": sl.pipeline.OneFOneB(2, count),
                "gpipe": sl.pipeline.GPipe(2, count),
                "zb-h1": sl.pipeline.ZBH1(2, count),
            }.items()
        },
    }
    steps: dict[str, list[Any]] = {}
    for name, strategy in kinds.items():
        state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adamw(1e-3), strategy)
        steps[name] = [sl.train_step(gpt.loss, strategy), state]
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, run in steps.items():
            started = time.perf_counter()
            run[1], metrics = run[0](run[1], batch)
            jax.block_until_ready((run[1].params, metrics))
            if turn:
                seconds[name].append(time.perf_counter() - started)
    of = {
        name: statistics.median(a / b for a, b in zip(seconds["data"], seconds[name], strict=True))
        for name in kinds
    }
    return {
        "of": of,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
    }


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--rounds", type=int, default=15, help="turns of the timed steps")
    # In a process of two devices.
    parser.add_argument("--only-efficiency", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_efficiency:
        print(json.dumps(efficiency(arguments.rounds)))
        return
    os.environ.update(COMPILE_ONLY)  # before a compiler is loaded
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.pipeline",
        "--only-efficiency",
        "--rounds",
        str(arguments.rounds),
    ]
    timed = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    timed = json.loads(timed.splitlines()[-1])
    sl.simulate_devices(8)
    figures: dict[str, Any] = {
        "efficiency_2_stages": timed["of"]["eager-1f1b"],
        **simulated(),
        **executed(),
    }
    ratios, permutes = {}, {}
    for machine, (_, module) in MACHINES.items():
        if not installed(module):
            print(f"{machine}: its compiler ({module}) is not installed; left out", file=sys.stderr)
            continue
        few, many = (compiled_memory(machine, count) for count in (8, 32))
        ratios[machine] = many["temporaries"] / few["temporaries"]
        permutes[machine] = many["permutes"]
    if ratios:
        figures["memory_ratio"] = max(ratios.values())
    figures |= {
        "memory_ratios": ratios, "permutes_32": permutes, "efficiency_of": timed["of"],
        "seconds_of_a_step": timed["seconds"]
    }  # fmt: skip
    report(
        "pipeline",
        figures,
        {name: bound for name, bound in BOUNDS.items() if name in figures},
        arguments.json,
    )
    if figures["efficiency_2_stages"] < LEAST["efficiency_2_stages"]:
        print(f"efficiency_2_stages is below {LEAST['efficiency_2_stages']}", file=sys.stderr)


if __name__ == "__main__":
    main()
