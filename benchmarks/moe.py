"""Experts on eight devices against one, and eight experts against one MLP of equal compute.

First, for every router, form of dispatch and form of the step: what the layer of experts makes of
the tokens, its losses, and the gradients to tokens, gate and experts, on eight devices against one;
`worst_error` is relative to the largest entry of each. Then `examples/experts.py`, three seeds: the
loss of the model with experts on held-out text over that of the dense model; `loss_ratio` is the
worst of the three. Some twelve minutes on two cores.

    python -m benchmarks.moe --json [--plot docs/experts.svg]
"""

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardlib as sl
from benchmarks._report import report
from examples import experts as example
from shardlib.experts import Switch, Top2, TopK, moe

BOUNDS = {"worst_error": 1e-5, "loss_ratio": 1.0}
ROUTERS = (
    Top2(),
    Top2(capacity=2.0),
    Switch(),
    TopK(2),
    TopK(2, capacity=1.25),
    TopK(4, renormalize=False),
)
DEVICES, BATCH, SEQUENCE, WIDTH, EXPERTS = 8, 16, 32, 24, 16


def layer(
    router: Any, form: Any, key: Any, x: jax.Array, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, Any]:
    """A sum over the layer's output, in which every entry counts, and the output."""
    y, told = moe(
        x, router, lambda up, x: jnp.tanh(x @ up), gate=gate, weights=up, key=key, form=form
    )
    scale = 1 + jnp.arange(WIDTH) / WIDTH
    return (y * scale).sum() + told.balance.total + 0.1 * told.z.total, (y, told)


def on_devices(manual: bool, mesh: Any, total: Any, *arrays: jax.Array) -> Any:
    """Value and gradients: the partitioner's, or the step's form, a `shard_map` in which each
    device has its own experts.
    """
    P = jax.P
    with sl.use(sl.rules.experts, mesh):
        gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)
        if not manual:
            return jax.jit(gradients)(*arrays)

        def summed(x: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
            (value, (y, told)), (to_x, to_gate, to_up) = gradients(x, gate, up)
            value, told, to_gate = jax.lax.psum((value, told, to_gate), "data")
            return (value, (y, told)), (to_x, to_gate, to_up)

        split, whole = P("data"), P()
        specs = {
            "in_specs": (split, whole, split),
            "out_specs": ((whole, (split, whole)), (split, whole, split)),
        }
        return jax.jit(jax.shard_map(summed, **specs, axis_names={"data"}, check_vma=False))(
            *arrays
        )


def worst_error() -> tuple[float, int]:
    """Over every router, dispatch and form, and how many there were."""
    random = np.random.default_rng(0)
    shapes = (BATCH, SEQUENCE, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, WIDTH)
    arrays = [jnp.asarray(random.normal(size=shape).astype(np.float32)) for shape in shapes]
    one, eight = sl.make_mesh("data=1", devices=jax.devices()[:1]), sl.make_mesh(f"data={DEVICES}")
    worst, count = 0.0, 0
    for router in ROUTERS:
        expected = None
        for form, manual in itertools.product(("scatter", "einsum"), (True, False)):
            # Without a key: what is drawn on a part of the batch is the step's business, and tested
            # there.
            total = partial(layer, router, form, None)
            expected = expected or jax.device_get(on_devices(False, one, total, *arrays))
            found = jax.device_get(on_devices(manual, eight, total, *arrays))
            errors = jax.tree.map(
                lambda a, b: np.abs(a - b).max() / max(np.abs(b).max(), 1e-6), found, expected
            )
            worst, count = max(worst, *map(float, jax.tree.leaves(errors))), count + 1
        print(f"{router}: {worst:.1e} so far", file=sys.stderr, flush=True)
    return worst, count


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument(
        "--plot", type=Path, help="draw the load of the first seed's experts into this file"
    )
    parser.add_argument("--steps", type=int, default=example.STEPS)
    arguments = parser.parse_args()
    sl.simulate_devices(DEVICES)
    worst, count = worst_error()
    strategy = sl.Strategy(mesh=f"data={DEVICES}", rules=sl.rules.experts, clip=1.0)
    losses: dict[str, list[float]] = {"dense": [], "experts": []}
    dropped = []
    for seed in range(3):
        for name, config in (("dense", example.DENSE), ("experts", example.SPARSE)):
            loss, records = example.train(config, arguments.steps, seed, strategy)
            losses[name].append(loss)
            print(f"seed {seed}, {name}: {loss:.4f} nats a byte", file=sys.stderr, flush=True)
        dropped.append(float(np.mean([record["dropped"] for record in records[-10:]])))
        if arguments.plot and seed == 0:
            arguments.plot.write_text(sl.experts.load_picture(records, "Eight experts, two layers"))
    ratios = [sparse / dense for dense, sparse in zip(*losses.values(), strict=True)]
    figures = {
        "worst_error": worst,
        "combinations": count,
        "loss_ratio": max(ratios),
        "loss_ratios": ratios,
        "dense_loss": losses["dense"],
        "experts_loss": losses["experts"],
        "dropped_at_the_end": dropped,
        "steps": arguments.steps,
    }
    report("moe", figures, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
