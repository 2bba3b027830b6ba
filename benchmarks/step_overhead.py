"""What the library's step costs over the same step written by hand with `jax.jit`: nothing one could measure.

The same model, mesh, batch and optimizer. The two steps take turns in one process, pair by pair, and the figure is the
median of the ratios; compile times likewise, tracing and lowering included.

    python -m benchmarks.step_overhead --json
"""

import argparse
import statistics
import time

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import shardlib as sl
from benchmarks._report import report
from models import gpt

BOUNDS = {"ratio_median": 1.02, "compile_ratio": 1.1}


def by_hand(state: sl.State, strategy: sl.Strategy):
    """The step as one would write it: automatic axes alone, a mean over the whole batch, donation."""
    optimizer, mesh = state.layout.optimizer, strategy.device_mesh
    graph, params, rest = nnx.split(state.model, nnx.Param, ...)
    params = nnx.to_pure_dict(params)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state.opt_state))
    whole = NamedSharding(mesh, PartitionSpec())

    def step(params, opt_state, batch):
        def loss_fn(params):
            out = gpt.loss(nnx.merge(graph, params, rest), batch)
            return out.total / out.weight

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    compiled = jax.jit(
        step,
        in_shardings=(*shardings, NamedSharding(mesh, PartitionSpec("data"))),
        out_shardings=(*shardings, whole),
        donate_argnums=(0, 1),
    )
    return compiled, params, state.opt_state


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--mesh", default="data=2,model=4")
    parser.add_argument("--pairs", type=int, default=60, help="measured pairs of steps")
    parser.add_argument("--compilations", type=int, default=7, help="measured pairs of compilations")
    arguments = parser.parse_args()
    sl.simulate_devices(8)

    strategy = sl.Strategy(mesh=arguments.mesh, rules=sl.rules.data | sl.rules.tensor)
    config = gpt.tiny(layers=4, width=128, heads=8, context=128)
    batch = {"tokens": np.random.default_rng(0).integers(0, config.vocab, (32, config.context + 1), dtype=np.int32)}

    def make_state() -> sl.State:
        return sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adamw(1e-3), strategy)

    sharding = NamedSharding(strategy.device_mesh, PartitionSpec("data"))
    placed = jax.device_put(batch, sharding)
    ours, theirs = [], []
    for _ in range(arguments.compilations + 1):
        state = make_state()
        step, (hand, params, opt_state) = sl.train_step(gpt.loss, strategy), by_hand(make_state(), strategy)
        jax.clear_caches()
        ours.append(timed(lambda: step.lower(state, placed).compile()))
        jax.clear_caches()
        with strategy.scope():
            theirs.append(timed(lambda: hand.lower(params, opt_state, placed).compile()))
    compile_ratio = statistics.median(a / b for a, b in zip(ours[1:], theirs[1:], strict=True))

    steps_ours, steps_theirs = [], []
    for pair in range(arguments.pairs + 5):
        def take_ours():
            nonlocal state
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))

        def take_theirs():
            nonlocal params, opt_state
            with strategy.scope():
                params, opt_state, loss = hand(params, opt_state, jax.device_put(batch, sharding))
            jax.block_until_ready((params, opt_state, loss))

        # Whoever goes first may find the caches cold: take turns at that too.
        order = ((take_ours, steps_ours), (take_theirs, steps_theirs))
        for take, times in order if pair % 2 else reversed(order):
            times.append(timed(take))
    difference = jax.tree.map(lambda a, b: float(abs(a - b).max()), state.params, params)
    report(
        "step_overhead",
        {
            "ratio_median": statistics.median(a / b for a, b in zip(steps_ours[5:], steps_theirs[5:], strict=True)),
            "compile_ratio": compile_ratio,
            "step_milliseconds": 1e3 * statistics.median(steps_ours[5:]),
            "compile_seconds": statistics.median(ours[1:]),
            "largest_difference": max(jax.tree.leaves(difference)),
            "mesh": arguments.mesh,
        },
        BOUNDS,
        arguments.json,
    )


def timed(f) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    f()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
