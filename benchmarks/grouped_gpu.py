"""Grouped products on the GPU of the machine: their speed over that of one dense product.

Rows of bfloat16 that are sorted by group are multiplied with the matrices of their groups, forward,
and forward and backward, for the shapes of the experts of three models and three loads:

- `even`: every group has as many rows;
- `drawn`: sizes by a gamma distribution of shape 4, about as uneven as trained routers leave them;
- `one`: a single group has all rows.

`of_product` is the FLOP/s of the products that are needed over those of one product of two square
matrices of 8,192 in the same run. `torch` is PyTorch's `torch._grouped_mm`, if PyTorch is there.
`worst_error` is the largest difference from float64, over the largest number.

    python -m benchmarks.grouped_gpu --json
    python -m benchmarks.grouped_gpu --tiny      # to try the path on a CPU
"""

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some of it

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._report import report
from benchmarks._timing import TURNS, seconds
from shardlib import kernels
from shardlib.kernels import grouped_matmul

IMPLEMENTATIONS = ("reference", "gpu", "ragged_dot")
LOADS = ("even", "drawn", "one")
OP = "grouped_matmul"
TABLE = Path(kernels.__file__).parent / "measured.json"
CALLS, SQUARE = 10, 8192


@dataclass(frozen=True)
class Shape:
    """Rows of a number of features, which become columns by the matrix of one of the groups."""

    rows: int
    features: int
    columns: int
    groups: int

    @property
    def flops(self) -> int:
        """Of the products that are needed forward."""
        return 2 * self.rows * self.features * self.columns


SHAPES = {
    "mixtral_8x7b": Shape(16_384, 4096, 14_336, 8),
    "deepseek_v3, an eighth": Shape(16_384, 7168, 2048, 32),
    "qwen3_30b_a3b": Shape(32_768, 2048, 768, 128),
}
TINY = {"tiny": Shape(256, 32, 16, 4)}


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; speeds mean nothing")
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=IMPLEMENTATIONS[:2],
        help="of `grouped_matmul`; by default not `ragged_dot`, which multiplies all rows with all "
        "matrices here",
    )
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the times of drawn loads into the table by which the op chooses",
    )
    arguments = parser.parse_args()
    side = 64 if arguments.tiny else SQUARE
    square = jnp.ones((side, side), jnp.bfloat16)
    product_flops = 2 * side**3 / seconds(jnp.matmul, square, square, calls=CALLS)
    implementations = arguments.implementations
    figures: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "product_flops": product_flops,
        "worst_error": max(error(one, load) for one in implementations for load in LOADS),
    }
    shapes = TINY if arguments.tiny else SHAPES
    for name, shape in shapes.items():
        found = {}
        for load in LOADS:
            found[load] = measured(shape, load, implementations, product_flops)
            print(name, load, json.dumps(found[load]), file=sys.stderr, flush=True)
        figures[name] = found
    if arguments.save:
        drawn = {shapes[name].features: figures[name]["drawn"]["seconds"] for name in shapes}
        save(figures["device"], drawn, implementations)
    report("grouped_gpu", figures, {"worst_error": 2**-7}, arguments.json)


def save(
    device: str, seconds_by_row: dict[int, dict[str, Any]], implementations: list[str]
) -> None:
    """Write times, by the features of a row, into the table by which the op chooses."""
    about = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "by": "benchmarks.grouped_gpu --save",
    }
    kept = []
    for line in json.loads(TABLE.read_text()):
        if (line["op"], line["device"]) != (OP, device):
            kept.append(line)
    for row, found in seconds_by_row.items():
        of_row = {"op": OP, "device": device, "dtype": "bfloat16", "row": row, **about}
        for name in implementations:
            kept.append({**of_row, "implementation": name, "time": found[name]["back"]})
    lines = ",\n".join(f"  {json.dumps(line)}" for line in kept)
    TABLE.write_text(f"[\n{lines}\n]\n")


def sizes_of(shape: Shape, load: str) -> np.ndarray:
    """How many rows each group has."""
    if load == "one":
        sizes = np.zeros(shape.groups, np.int32)
        sizes[shape.groups // 2] = shape.rows
        return sizes
    shares = np.ones(shape.groups)
    if load == "drawn":
        shares = np.random.default_rng(0).gamma(4, size=shape.groups)
    ends = np.round(np.cumsum(shares) / shares.sum() * shape.rows)
    return np.diff(ends, prepend=0).astype(np.int32)


def arrays_of(shape: Shape, load: str) -> tuple[jax.Array, ...]:
    """The rows, the matrices, the sizes and the gradient to the result."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (shape.rows, shape.features), jnp.bfloat16)
    w = jax.random.normal(keys[1], (shape.groups, shape.features, shape.columns), jnp.bfloat16)
    gradient = jax.random.normal(keys[2], (shape.rows, shape.columns), jnp.bfloat16)
    return x, w, jnp.asarray(sizes_of(shape, load)), gradient


def forward(implementation: str) -> Callable[..., Any]:
    """The product of rows, matrices, sizes and a gradient that it does not look at."""
    return lambda x, w, sizes, _: grouped_matmul(x, w, sizes, implementation=implementation)


def there_and_back(implementation: str) -> Callable[..., Any]:
    """The product, and the gradients to the rows and to the matrices."""

    def both(x: jax.Array, w: jax.Array, sizes: jax.Array, gradient: jax.Array) -> Any:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return grouped_matmul(x, w, sizes, implementation=implementation)

        y, back = jax.vjp(product, x, w)
        return y, back(gradient)

    return both


def measured(
    shape: Shape, load: str, implementations: list[str], product_flops: float
) -> dict[str, Any]:
    """Seconds and speed of each implementation under a load."""
    arrays, found = arrays_of(shape, load), {}
    for implementation in implementations:
        ways = {"forward": forward(implementation), "back": there_and_back(implementation)}
        found[implementation] = {
            way: seconds(run, *arrays, calls=CALLS) for way, run in ways.items()
        }
    del arrays
    if torch_is_there():
        found["torch"] = by_torch(shape, load)
    of_product = {}
    for name, times in found.items():
        of_product[name] = {
            "forward": shape.flops / times["forward"] / product_flops,
            "back": 3 * shape.flops / times["back"] / product_flops,
        }
    return {"seconds": found, "of_product": of_product}


def torch_is_there() -> bool:
    """Whether PyTorch is installed, and the device is one of its own."""
    return importlib.util.find_spec("torch") is not None and jax.default_backend() == "gpu"


def by_torch(shape: Shape, load: str) -> dict[str, float]:
    """Seconds of PyTorch's grouped product of the same shapes."""
    torch: Any = importlib.import_module("torch")
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(shape.rows, shape.features, requires_grad=True, **kind)
    w = torch.randn(shape.groups, shape.features, shape.columns, requires_grad=True, **kind)
    gradient = torch.randn(shape.rows, shape.columns, **kind)
    ends = torch.tensor(np.cumsum(sizes_of(shape, load)), dtype=torch.int32, device="cuda")

    def product() -> Any:
        return torch._grouped_mm(x, w, offs=ends)

    def both() -> None:
        x.grad = w.grad = None
        product().backward(gradient)

    found = {}
    for way, function in (("forward", product), ("back", both)):
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        turns = []
        for _ in range(TURNS):
            begin = time.perf_counter()
            for _ in range(CALLS):
                function()
            torch.cuda.synchronize()
            turns.append((time.perf_counter() - begin) / CALLS)
        found[way] = statistics.median(turns)
    return found


def error(implementation: str, load: str) -> float:
    """The largest difference from float64, over the largest number, of results and gradients."""
    shape = Shape(1024, 256, 384, 8)
    x, w, sizes, gradient = arrays_of(shape, load)
    found = jax.jit(there_and_back(implementation))(x, w, sizes, gradient)
    exact_x, exact_w, exact_gradient = (np.asarray(one, np.float64) for one in (x, w, gradient))
    y, of_x, of_w = np.zeros(gradient.shape), np.zeros(x.shape), np.zeros(w.shape)
    first = 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(first, first + size)
        y[rows] = exact_x[rows] @ exact_w[group]
        of_x[rows] = exact_gradient[rows] @ exact_w[group].T
        of_w[group] = exact_x[rows].T @ exact_gradient[rows]
        first += size
    worst = 0.0
    for one, exact in zip(jax.tree.leaves(found), (y, of_x, of_w), strict=True):
        difference = np.abs(np.asarray(one, np.float64) - exact).max()
        worst = max(worst, float(difference / np.abs(exact).max()))
    return worst


if __name__ == "__main__":
    main()
