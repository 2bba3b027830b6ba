"""How the cost of GShard's four collectives grows with the machine: the claims of its section 5.3,
and the plot in the docs.

Each device holds one MiB. For TPU v3 slices of 16 to 2,048 cores, each collective is compiled over
all of them, and two things are said about it:

- from the plan and the datasheet, the time on the links of a closed torus: what must cross a link,
  over what links carry;
- the compiler's own estimate, `optimal_seconds`, which knows the memory that is read and written
  and no links.

It needs the TPU compiler and no TPU: `pip install -e ".[tpu-plan]"`. A minute on two cores.

    python -m benchmarks.collective_costs --json [--plot docs/collective_costs.svg]
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
import shardlib.testing
from benchmarks._picture import dot, level, line, svg, text
from benchmarks._report import report
from shardlib.machine._targets import quietly

MIB = 2**20
SLICES = [(2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)]
AXES = ("a", "b")
BOUNDS = {
    "all_reduce_growth": 1.2,
    "permute_growth": 1.01,
    "all_to_all_over_sqrt": 1.2,
    "all_gather_over_linear": 1.2,
}


def ring(x: jax.Array) -> jax.Array:
    size = lax.axis_size(AXES)
    return lax.ppermute(x, AXES, [(place, (place + 1) % size) for place in range(size)])


COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "AllReduce": lambda x: lax.psum(x, AXES),
    "AllToAll": lambda x: lax.all_to_all(x, AXES, 0, 0, tiled=True),
    "AllGather": lambda x: lax.all_gather(x, AXES, tiled=True),
    "CollectivePermute": ring,
}


def compiled(name: str, shape: tuple[int, int]) -> tuple[int, float]:
    """Bytes that a device sends, as the plan has it, and the compiler's own estimate in seconds."""
    target = sl.Target(f"tpu:v3:{shape[0]}x{shape[1]}")
    mesh = target.mesh(f"a={2 * shape[0]},b={shape[1]}")
    rows = jax.ShapeDtypeStruct(
        (mesh.size * 2048, 128), "float32", sharding=NamedSharding(mesh, P(AXES))
    )
    mapped = jax.shard_map(
        COLLECTIVES[name], mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False
    )
    with quietly():
        program = jax.jit(mapped).lower(rows).compile()
    [sent] = {one.sent_bytes for one in shardlib.testing.collectives(program, mesh)}
    costs = program.cost_analysis() or {}
    return sent, costs["optimal_seconds"]


def on_links(name: str, shape: tuple[int, int]) -> float:
    """Seconds on a torus of x times y chips, closed in both dims, for a MiB of each of its
    cores.
    """
    chip = sl.Target(f"tpu:v3:{shape[0]}x{shape[1]}").chip
    link = chip.link_bandwidth * chip.devices  # of a chip
    chips, (_, longer) = math.prod(shape), sorted(shape)
    match name:
        case "AllReduce":  # added up on each chip; then two rings in each dim carry it round twice
            return 2 * MIB * (chips - 1) / chips / (4 * link)
        # A quarter of everything crosses the middle of the longer dim each way, on two cuts.
        case "AllToAll":
            return chip.devices * longer * MIB / (8 * link)
        case "AllGather":  # everybody else's comes in over four links
            return chip.devices * (chips - 1) * MIB / (4 * link)
    return MIB / link  # to the next chip


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="where to write the plot")
    arguments = parser.parse_args()
    sl.simulate_devices(1)
    cores = [2 * math.prod(shape) for shape in SLICES]
    links = {name: [on_links(name, shape) for shape in SLICES] for name in COLLECTIVES}
    found = {name: [compiled(name, shape) for shape in SLICES] for name in COLLECTIVES}
    growth = {name: times[-1] / times[0] for name, times in links.items()}
    more = cores[-1] / cores[0]
    figures: dict[str, Any] = {
        "cores": f"{cores[0]} to {cores[-1]}",
        "all_reduce_growth": growth["AllReduce"],
        "permute_growth": growth["CollectivePermute"],
        "all_to_all_growth": growth["AllToAll"],
        "all_gather_growth": growth["AllGather"],
        # Per dim the slices grow 16-fold in one and 8-fold in the other; the square root of 128
        # lies between.
        "all_to_all_over_sqrt": growth["AllToAll"] / math.sqrt(more),
        "all_gather_over_linear": growth["AllGather"] / more,
        **{f"sent_growth_{name}": found[name][-1][0] / found[name][0][0] for name in COLLECTIVES},
        **{
            f"compiler_growth_{name}": found[name][-1][1] / found[name][0][1]
            for name in COLLECTIVES
        },
    }
    if arguments.plot:
        arguments.plot.write_text(
            plot(cores, links, {name: [pair[1] for pair in found[name]] for name in found})
        )
    report("collective_costs", figures, BOUNDS, arguments.json)


COLOURS = {
    "AllReduce": "#4269d0",
    "AllToAll": "#e15759",
    "AllGather": "#3a8a5f",
    "CollectivePermute": "#8a6d3b",
}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 70, 40, 170, 50


def plot(cores: list[int], links: dict[str, list[float]], estimates: dict[str, list[float]]) -> str:
    """Both estimates over the number of cores, in logarithms: lines for the links, dots for the
    compiler's.
    """
    everything = [time for times in (*links.values(), *estimates.values()) for time in times]
    low, high = math.floor(math.log10(min(everything))), math.ceil(math.log10(max(everything)))

    def x(count: float) -> float:
        share = math.log2(count / cores[0]) / math.log2(cores[-1] / cores[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(seconds: float) -> float:
        return TOP + (high - math.log10(seconds)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    words = {-6: "1 µs", -5: "10 µs", -4: "0.1 ms", -3: "1 ms", -2: "10 ms", -1: "0.1 s", 0: "1 s"}
    parts = [
        level(LEFT, WIDTH - RIGHT, y(10.0**power), words.get(power, f"1e{power} s"))
        for power in range(low, high + 1)
    ]
    parts += [
        text(x(count), HEIGHT - BOTTOM + 18, f"{count:,}", "middle", "#555") for count in cores
    ]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "cores", "middle", "#555"))
    for name, times in links.items():
        parts.append(
            line(
                [(x(count), y(time)) for count, time in zip(cores, times, strict=True)],
                COLOURS[name],
                2,
            )
        )
        parts += [
            dot(x(count), y(time), COLOURS[name])
            for count, time in zip(cores, estimates[name], strict=True)
        ]
        order = {"AllGather": "O(D)", "AllToAll": "O(√D)"}.get(name, "O(1)")
        parts.append(
            text(WIDTH - RIGHT + 10, y(times[-1]) + 4, f"{name} {order}", colour=COLOURS[name])
        )
    title = (
        "One MiB on each core of a TPU v3: lines, time on the links; dots, the compiler's estimate"
    )
    return svg(WIDTH, HEIGHT, LEFT, title, parts)


if __name__ == "__main__":
    main()
