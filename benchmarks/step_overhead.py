"""What the library's step costs over the same step written by hand with `jax.jit`: nothing one
could measure.

The same model, mesh, batch and optimizer, and by default the same guard: a step whose gradient is
not finite leaves parameters and optimizer state unchanged. With `--nonfinite count` neither step
has it. The two steps take turns in one process, pair by pair, and the figure is the median of the
ratios; compile times likewise, tracing and lowering included.

    python -m benchmarks.step_overhead --json
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import shardlib as sl
from benchmarks._report import report
from models import gpt

BOUNDS = {"ratio_median": 1.02, "compile_ratio": 1.05}


def by_hand(state: sl.State, strategy: sl.Strategy):
    """The same step as one would write it: automatic axes only, a mean over the whole batch, and
    donation. It skips what the strategy skips.
    """
    optimizer, mesh = state.layout.optimizer, strategy.device_mesh
    graph, params, rest = nnx.split(state.model, nnx.Param, ...)
    training = {
        "params": nnx.to_pure_dict(params),
        "opt_state": state.opt_state,
        "step": state.step,
        "key": state.key,
    }
    shardings = jax.tree.map(lambda x: x.sharding, training)

    def step(training, batch):
        rng = jax.random.fold_in(training["key"], training["step"])

        def loss_fn(params):
            out = gpt.loss(nnx.merge(graph, params, rest), batch, rng)
            return out.total / out.weight, out.weight

        params = training["params"]
        (loss, weight), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        norm = optax.global_norm(gradients)
        updates, opt_state = optimizer.update(gradients, training["opt_state"], params)
        after = optax.apply_updates(params, updates), opt_state
        if strategy.skips:
            before = params, training["opt_state"]
            after = jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(norm), a, b), after, before)
        training = training | {
            "params": after[0],
            "opt_state": after[1],
            "step": training["step"] + 1,
        }
        return training, {"loss": loss, "weight": weight, "grad_norm": norm}

    compiled = jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, PartitionSpec("data"))),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    return compiled, training


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--mesh", default="data=2,model=4")
    parser.add_argument("--nonfinite", choices=("skip", "count"), default="skip")
    parser.add_argument("--pairs", type=int, default=60, help="measured pairs of steps")
    parser.add_argument(
        "--compilations", type=int, default=7, help="measured pairs of compilations"
    )
    arguments = parser.parse_args()
    sl.simulate_devices(8)

    strategy = sl.Strategy(
        mesh=arguments.mesh,
        rules=sl.rules.data | sl.rules.tensor,
        nonfinite=arguments.nonfinite,
    )
    config = gpt.tiny(layers=4, width=128, heads=8, context=128)
    batch = {
        "tokens": np.random.default_rng(0).integers(
            0, config.vocab, (32, config.context + 1), dtype=np.int32
        )
    }

    def make_state(abstract: bool = False) -> sl.State:
        return sl.init(
            lambda: gpt.GPT(config, rngs=nnx.Rngs(0)),
            optax.adamw(1e-3),
            strategy,
            abstract=abstract,
        )

    sharding = NamedSharding(strategy.device_mesh, PartitionSpec("data"))
    placed = jax.device_put(batch, sharding)

    abstract = make_state(abstract=True)

    def compile_ours() -> None:
        jax.clear_caches()
        sl.train_step(gpt.loss, strategy).lower(abstract, placed).compile()

    def compile_theirs() -> None:
        jax.clear_caches()
        hand, training = by_hand(abstract, strategy)
        with strategy.scope():
            hand.lower(training, placed).compile()

    ours, theirs = in_turns(compile_ours, compile_theirs, arguments.compilations, warm_up=1)
    compile_ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    compile_seconds = statistics.median(ours)

    state, step = make_state(), sl.train_step(gpt.loss, strategy)
    hand, training = by_hand(make_state(), strategy)

    def take_ours() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    def take_theirs() -> None:
        nonlocal training
        with strategy.scope():
            training, metrics = hand(training, jax.device_put(batch, sharding))
        jax.block_until_ready((training, metrics))

    ours, theirs = in_turns(take_ours, take_theirs, arguments.pairs, warm_up=5)
    difference = jax.tree.map(
        lambda a, b: float(abs(a - b).max()), state.params, training["params"]
    )
    report(
        "step_overhead",
        {
            "ratio_median": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            "compile_ratio": compile_ratio,
            "step_milliseconds": 1e3 * statistics.median(ours),
            "compile_seconds": compile_seconds,
            "largest_difference": max(jax.tree.leaves(difference)),
            "mesh": arguments.mesh,
            "nonfinite": arguments.nonfinite,
        },
        BOUNDS,
        arguments.json,
    )


def in_turns(
    a: Callable[[], None], b: Callable[[], None], pairs: int, warm_up: int
) -> tuple[list[float], list[float]]:
    """Seconds of each call of two functions that take turns. Whoever goes first may find caches
    cold: turns at that too.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + warm_up):
        for which in (0, 1) if pair % 2 else (1, 0):
            started = time.perf_counter()
            (a, b)[which]()
            times[which].append(time.perf_counter() - started)
    return times[0][warm_up:], times[1][warm_up:]


if __name__ == "__main__":
    main()
