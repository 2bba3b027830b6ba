"""How large the buckets of an exchange should be: few collectives against constant memory.

A hundred and twenty-eight matrices of 2 MiB whose gradients are scattered, on eight devices (ZeRO's
stage 1), by buckets of 1 to 256 MiB. Seconds are of a step on simulated devices of the CPU, all
sizes taking turns in one process, as a multiple of the fastest; memory is what the program holds
beside what is at rest, as a multiple of the least, on the H200's compiler where there is one. The
best is the smallest size that is at most a twentieth slower than the fastest. What a network of
your own says is measured by `--real`, on all devices that JAX has.

    python -m benchmarks.buckets --json
"""

import argparse
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib as sl
from benchmarks._report import report
from shardlib.machine._targets import COMPILE_ONLY

MIB = 2**20
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COUNT, ROWS, WIDTH = 128, 512, 1024
RULES = sl.AxisRules(batch="data")


def make() -> dict[str, jax.Array]:
    """Parameters of which the gradient is all there is to do."""
    return {f"w{number}": jnp.zeros((ROWS, WIDTH)) for number in range(COUNT)}


def loss(model: dict[str, jax.Array], x: jax.Array, rng: jax.Array) -> jax.Array:
    """As cheap as can be, and of each matrix another gradient, lest a compiler sum one for all."""
    left, right = x[:, :ROWS], x[:, ROWS:]
    parts = [
        jnp.mean(jnp.roll(left, number, axis=1) @ w * right)
        for number, w in enumerate(model.values())
    ]
    return jnp.sum(jnp.stack(parts))


def step_of(
    size: int, target: sl.Target | None = None, abstract: bool = False
) -> tuple[sl.Step, sl.State]:
    """A step with buckets of so many bytes."""
    mesh = target.mesh("data=8") if target else f"data={len(jax.devices())}"
    strategy = sl.Strategy(mesh=mesh, rules=RULES, zero=1, exchange=sl.Exact(bucket_bytes=size))
    return sl.train_step(loss, strategy), sl.init(make, optax.sgd(0.1), strategy, abstract=abstract)


def seconds(rounds: int) -> dict[int, float]:
    """Of a step, by size: the median of rounds in which all take turns."""
    runs = {size: step_of(size * MIB) for size in SIZES}
    states = {size: state for size, (_, state) in runs.items()}
    batch = np.random.RandomState(0).randn(len(jax.devices()), ROWS + WIDTH).astype(np.float32)
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    for turn in range(rounds + 2):
        for size in SIZES if turn % 2 else SIZES[::-1]:
            started = time.perf_counter()
            states[size], metrics = runs[size][0](states[size], batch)
            jax.block_until_ready((states[size], metrics))
            if turn >= 2:
                found[size].append(time.perf_counter() - started)
    return {size: statistics.median(times) for size, times in found.items()}


def held(target: str) -> dict[int, tuple[int, int]]:
    """Bytes that the program holds beside what is at rest, and how many collectives it has, by
    size.
    """
    machine = sl.Target(target)
    batch = jax.ShapeDtypeStruct((8, ROWS + WIDTH), "float32")
    found = {}
    for size in SIZES:
        step, state = step_of(size * MIB, machine, abstract=True)
        planned = sl.plan(step, state, batch, machine)
        found[size] = (
            planned.memory.heap_bytes,
            sum(one.times for one in planned.collectives if one.kind == "reduce-scatter"),
        )
    return found


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--real", action="store_true", help="on all devices that JAX has, instead of simulated ones"
    )
    parser.add_argument("--target", default="gpu:h200:1x1x8", help="whose program's memory is read")
    arguments = parser.parse_args()
    if not arguments.real:
        os.environ.update(COMPILE_ONLY)  # before a compiler is loaded
        sl.simulate_devices(8)
    memory, times = held(arguments.target), seconds(arguments.rounds)
    fastest, least = min(times.values()), min(size for size, _ in memory.values())
    figures = {"target": arguments.target, "default_mib": sl.Exact().bucket_bytes // MIB}
    for size in SIZES:
        figures[f"time_ratio_{size}_mib"] = times[size] / fastest
        figures[f"memory_ratio_{size}_mib"] = memory[size][0] / least
        print(
            f"{size:4} MiB  {1e3 * times[size]:8.1f} ms ({times[size] / fastest:.3f})   "
            f"{memory[size][0] / 1e6:8.1f} MB ({memory[size][0] / least:.3f})   {memory[size][1]} "
            "scatters",
            file=sys.stderr,
        )
    fast = [size for size in SIZES if times[size] <= 1.05 * fastest]
    report("buckets", {**figures, "best_mib": min(fast)}, {}, arguments.json)


if __name__ == "__main__":
    main()
