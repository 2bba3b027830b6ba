"""What the library's step costs over the same step written by hand with `jax.jit`: nothing one
could measure.

The same model, mesh, batch and optimizer, and by default the same guard: a step whose gradient is
not finite leaves parameters and optimizer state unchanged. With `--nonfinite count` neither step
has it. The library's step takes turns with two written by hand, round by round in one process, and
each figure is the median of the ratios of a round:

    ratio_median               the time of a step, over that of one with automatic axes only
    compile_ratio              tracing, lowering and compiling, over one that is manual over the
                               data axis, as the library's is
    compile_ratio_automatic    the same over the one with automatic axes only
    manual_over_automatic      the two that are written by hand: what JAX and XLA take longer for
                               any function that is manual over an axis

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


def by_hand(state: sl.State, strategy: sl.Strategy, *, manual: bool):
    """The same step as one would write it, with donation. It skips what the strategy skips.

    Its gradient is of a mean over the whole batch, with automatic axes only. Where `manual`, it is
    that of each device's part of the batch, added up over the data axis.
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

    def mean_and_gradients(params, batch, rng):
        def loss_fn(params):
            out = gpt.loss(nnx.merge(graph, params, rest), batch, rng)
            return out.total / out.weight, out.weight

        (loss, weight), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return loss, weight, gradients

    def summed_over_data(params, batch, rng):
        def loss_fn(params):
            out = gpt.loss(nnx.merge(graph, params, rest), batch, rng)
            return out.total, out.weight

        (total, weight), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        total, weight, gradients = jax.lax.psum((total, weight, gradients), "data")
        return total / weight, weight, jax.tree.map(lambda g: g / weight, gradients)

    differentiated = mean_and_gradients
    if manual:
        whole = PartitionSpec()
        differentiated = jax.shard_map(
            summed_over_data,
            mesh=mesh,
            in_specs=(whole, PartitionSpec("data"), whole),
            out_specs=whole,
            axis_names={"data"},
            check_vma=False,
        )

    def step(training, batch):
        rng = jax.random.fold_in(training["key"], training["step"])
        params = training["params"]
        loss, weight, gradients = differentiated(params, batch, rng)
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
        "--compilations", type=int, default=9, help="measured rounds of compilations"
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

    def compile_by_hand(manual: bool) -> None:
        jax.clear_caches()
        hand, training = by_hand(abstract, strategy, manual=manual)
        with strategy.scope():
            hand.lower(training, placed).compile()

    compilations = {
        "ours": compile_ours,
        "manual": lambda: compile_by_hand(manual=True),
        "automatic": lambda: compile_by_hand(manual=False),
    }
    compiling = in_turns(compilations, arguments.compilations, warm_up=1)

    state, step = make_state(), sl.train_step(gpt.loss, strategy)
    hand, training = by_hand(make_state(), strategy, manual=False)

    def take_ours() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    def take_by_hand() -> None:
        nonlocal training
        with strategy.scope():
            training, metrics = hand(training, jax.device_put(batch, sharding))
        jax.block_until_ready((training, metrics))

    steps = in_turns({"ours": take_ours, "automatic": take_by_hand}, arguments.pairs, warm_up=5)
    difference = jax.tree.map(
        lambda a, b: float(abs(a - b).max()), state.params, training["params"]
    )
    report(
        "step_overhead",
        {
            "ratio_median": median_ratio(steps, "ours", "automatic"),
            "compile_ratio": median_ratio(compiling, "ours", "manual"),
            "compile_ratio_automatic": median_ratio(compiling, "ours", "automatic"),
            "manual_over_automatic": median_ratio(compiling, "manual", "automatic"),
            "step_milliseconds": 1e3 * statistics.median(steps["ours"]),
            "compile_seconds": statistics.median(compiling["ours"]),
            "largest_difference": max(jax.tree.leaves(difference)),
            "mesh": arguments.mesh,
            "nonfinite": arguments.nonfinite,
        },
        BOUNDS,
        arguments.json,
    )


def in_turns(
    functions: dict[str, Callable[[], None]], rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Seconds of each call of functions that take turns.

    Whoever goes first may find caches cold: turns are taken at that too.
    """
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + warm_up):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            functions[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: taken[warm_up:] for name, taken in seconds.items()}


def median_ratio(seconds: dict[str, list[float]], name: str, other: str) -> float:
    """The median over all rounds of the time of one function over that of another."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))


if __name__ == "__main__":
    main()
