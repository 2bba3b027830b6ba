"""Attention: how near the truth, whether the real compilers take it, and how its memory grows.

Over masks and implementations, forward and backward:

- `worst_error`: in float32 against float64, over the greatest number there. What no device here
  runs is simulated.
- `worst_error_bf16`: the same in bfloat16, over the reference's own error on the same arrays, both
  averaged over eight draws: of one draw, either is the luck of a single rounding.
- `compile_failures`: programs that the compilers of TPU v4, v5e, v5p, v6e and 7x refuse, over masks
  and sizes of heads.
- `memory_growth`: arguments, results and temporaries together at 65,536 tokens over those at 8,192,
  divided by 8: the worst of the implementations, compiled for a v5p.
- `bytes_ratio_max`: what the kernels for TPUs read and write, over what they must where blocks are
  as large as fast memory holds: queries, outputs and statistics once, and for each block of 1,024
  queries the keys and values that its mask lets it see, in tiles of 128; backward also the other
  way round.

It needs the TPU compiler and no TPU, and takes some ten minutes on two cores:
`pip install -e ".[tpu-plan]"`.

    python -m benchmarks.attention --json
"""

import argparse
import itertools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np

import shardlib as sl
from benchmarks._kernel_bytes import touched
from benchmarks._report import report
from shardlib.kernels._tpu import LANES

BOUNDS = {
    "worst_error": 1e-5,
    "worst_error_bf16": 1.2,
    "compile_failures": 0,
    "memory_growth": 1.05,
    "bytes_ratio_max": 1.1,
}
TARGETS = ("tpu:v4:1x1x1", "tpu:v5e:1x1", "tpu:v5p:1x1x1", "tpu:v6e:1x1", "tpu:7x:1x1x1")
KERNELS = ("tpu",)
BLOCK = 1024  # queries, or keys, of a block that stays in fast memory
SIZES = (64, 80, 96, 128, 256)
LENGTH = 512
MASKS: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, None)},
    "two sides": {"window": (50, 200)},
    "segments": {"causal": True, "segment_ids": np.arange(LENGTH)[None] // 150},
    "capped": {"causal": True, "soft_cap": 5.0},
    "blocks": {"block_mask": sl.kernels.bigbird_blocks(LENGTH, 64)},
}
Results = dict[str, np.ndarray]


def visible(options: dict[str, Any], length: int = LENGTH) -> np.ndarray:
    """Which keys each query sees, `(queries, keys)`."""
    position = np.arange(length)
    distance = position[None, :] - position[:, None]
    kept = np.ones((length, length), bool)
    if options.get("causal"):
        kept &= distance <= 0
    left, right = options.get("window", (None, None))
    if left is not None:
        kept &= distance >= -left
    if right is not None:
        kept &= distance <= right
    if "segment_ids" in options:
        ids = options["segment_ids"][0]
        kept &= ids[:, None] == ids[None, :]
    if "block_mask" in options:
        blocks = options["block_mask"]
        number = position // blocks.size
        kept &= blocks.pattern[np.ix_(number, number)]
    return kept


def plain(q: Any, k: Any, v: Any, options: dict[str, Any]) -> jax.Array:
    """Attention by its definition, with all scores."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    z = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    if "soft_cap" in options:
        z = options["soft_cap"] * jnp.tanh(z / options["soft_cap"])
    p = jax.nn.softmax(jnp.where(visible(options), z, -jnp.inf), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def both_ways(function: Callable[..., Any], arrays: list[Any], cotangent: Any) -> Results:
    """The result of a function of queries, keys and values, and its gradients."""

    def run(*arrays: Any) -> Any:
        y, back = jax.vjp(function, *arrays)
        return y, *back(cotangent.astype(y.dtype))

    names = ("y", "q", "k", "v")
    results = jax.jit(run)(*arrays)
    return {name: np.asarray(x, np.float64) for name, x in zip(names, results, strict=True)}


def error(mask: str, implementation: str, dtype: str, draw: int = 0) -> float:
    """The worst of an implementation against float64, over the greatest number of each array."""
    random = np.random.default_rng(draw)
    shapes = ((1, LENGTH, 4, 64), (1, LENGTH, 2, 64), (1, LENGTH, 2, 64))
    arrays = [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]
    cotangent = jnp.asarray(random.normal(size=shapes[0]), dtype)
    options = MASKS[mask]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return sl.kernels.attention(q, k, v, **options, implementation=implementation)

    found = both_ways(attend, arrays, cotangent)
    with jax.enable_x64():
        wide = [np.asarray(x, np.float64) for x in arrays]
        truth = np.asarray(cotangent, np.float64)
        wanted = both_ways(lambda q, k, v: plain(q, k, v, options), wide, truth)
    errors = []
    for name, x in wanted.items():
        errors.append(abs(found[name] - x).max() / abs(x).max())
    return float(max(errors))


def half_error(mask: str, implementation: str) -> float:
    """The mean over draws of the worst error in bfloat16."""
    return float(np.mean([error(mask, implementation, "bfloat16", draw) for draw in range(8)]))


def compiled(target: str, implementation: str, length: int, size: int, **options: Any) -> Any:
    """The program of both ways on one device of a kind."""
    # A chip of a TPU 7x is two devices.
    mesh = sl.Target(target).mesh("data=-1")
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    names = ("batch", None, None, None)

    def loss(q: Any, k: Any, v: Any) -> Any:
        y = sl.kernels.attention(q, k, v, names=names, **options, implementation=implementation)
        return y.astype(jnp.float32).sum()

    arrays = []
    # So large, keys and values too, that no array is kept in fast memory between instructions: at
    # the shorter length it would be, and not at the longer one.
    for heads in (32, 8, 8):
        shape = (8, length, heads, size)
        arrays.append(jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding))
    with sl.use(sl.AxisRules(batch="data"), mesh):
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()


def failures() -> list[str]:
    """What the compilers refuse."""
    refused = []
    for target in TARGETS:
        # Every mask once, and every size of a head.
        programs = [(mask, 128) for mask in MASKS] + [("causal", size) for size in SIZES]
        for implementation, (mask, size) in itertools.product(KERNELS, programs):
            options = MASKS[mask]
            if "segment_ids" in options:
                options = {**options, "segment_ids": np.repeat(options["segment_ids"], 8, 0)}
            try:
                compiled(target, implementation, LENGTH, size, **options)
            except (ValueError, jax.errors.JaxRuntimeError) as failure:
                reason = str(failure)[:200]
                refused.append(f"{implementation}, {target}, {mask}, heads of {size}: {reason}")
    return refused


def growth(implementation: str) -> float:
    """How memory grows from 8,192 tokens to 65,536, over eight."""
    total = []
    for length in (8192, 65_536):
        memory = compiled(
            "tpu:v5p:1x1x1", implementation, length, 128, causal=True
        ).memory_analysis()
        total.append(
            memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
        )
    return total[1] / total[0] / 8


def bytes_ratio(implementation: str, mask: str) -> float:
    """What the kernels of both ways read and write on a v5e, over what they must."""
    length, heads, size = 4096, 2, 128
    options: Any = MASKS[mask]
    shape = (1, length, heads, size)
    x: Any = jax.ShapeDtypeStruct(shape, "bfloat16")

    def loss(q: Any, k: Any, v: Any) -> Any:
        names = (None,) * 4
        y = sl.kernels.attention(q, k, v, names=names, **options, implementation=implementation)
        return y.astype(jnp.float32).sum()

    with sl.use(sl.AxisRules(batch="data"), sl.Target("tpu:v5e:1x1").mesh("data=1")):
        traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)
    # Where queries and keys start.
    moved = touched(traced, [np.zeros(2, np.int32)])
    seen = visible(options, length)
    # Keys that some query of each block sees, and queries that see some key of each block.
    tiles = seen.reshape(length // LANES, LANES, length // LANES, LANES).any((1, 3))
    in_block = BLOCK // LANES
    keys = LANES * tiles.reshape(-1, in_block, length // LANES).any(1).sum()
    queries = LANES * tiles.reshape(length // LANES, -1, in_block).any(2).sum()
    row, number = 2 * size, 4
    forward = length * (2 * row + number) + keys * 2 * row
    to_queries = length * (3 * row + 2 * number) + keys * 2 * row
    to_keys = length * 4 * row + queries * (2 * row + 2 * number)
    return (moved.read + moved.written) / (heads * (forward + to_queries + to_keys))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    arguments = parser.parse_args()
    single, half = [], []
    for mask in MASKS:
        own = half_error(mask, "reference")
        for implementation in ("reference", "tpu_simulated"):
            single.append(error(mask, implementation, "float32"))
            half.append(half_error(mask, implementation) / own)
            print(f"{mask:12} {implementation:18} {single[-1]:.1e} {half[-1]:.2f}", flush=True)
    ratios = []
    for mask in ("everything", "causal", "two sides", "capped"):
        ratios += [bytes_ratio(implementation, mask) for implementation in KERNELS]
    refused = failures()
    for line in refused:
        print(line)
    figures = {
        "worst_error": max(single),
        "worst_error_bf16": max(half),
        "compile_failures": len(refused),
        "memory_growth": max(growth(name) for name in ("reference", *KERNELS)),
        "bytes_ratio_max": max(ratios),
    }
    report("attention", figures, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
