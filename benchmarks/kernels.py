"""Kernels: how near the truth, whether the real compilers take them, what they move, and on a GPU
how fast they are.

Of every op and implementation, forward, and there and back:

- `error`: the worst against float64, over the greatest number there. Kernels that no device here
  runs are simulated.
- `compiled`: by the compilers of TPU v4, v5e, v5p and v6e and of H100, H200 and B200, as far as
  these are installed; `compile_failures` counts what they refuse.
- `bytes`: what the compiled program reads and writes over the least that it must, and the same of
  the kernel's own loads and stores; `bytes_ratio_max` is the worst of all kernels. The least is
  each array once, each way; for a head, if that is more, what passes while the matrix unit makes
  its products. `fast`: bytes of fast memory that a kernel's blocks take.
- `refused`: what a kernel says it cannot take, with its reason.

On a GPU also the median `time`, the bandwidth over that of a large copy in the same run
(`of_copy`), a head's FLOP/s over those of a large product (`of_product`; there and back eight for
each row, number of it, and row of the kernel), and the time of plain XLA and of `torch.compile`
over ours (`over_xla`, `over_torch`), and that of Tokamax's norms where it is installed. With
`--save` the times go into the table by which ops choose, by the length of rows.

    python -m benchmarks.kernels --json
"""

import argparse
import datetime
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants some of it

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import mosaic_gpu as plgpu

import shardlib as sl
from benchmarks._kernel_bytes import touched
from benchmarks._picture import bar, line, svg, text
from benchmarks._report import report
from shardlib import kernels, testing
from shardlib.machine._targets import COMPILE_ONLY, COMPILERS, installed

BOUNDS = {"compile_failures": 0, "bytes_ratio_max": 1.1}
TARGETS = {
    "tpu": ("tpu:v4:1x1x1", "tpu:v5e:1x1", "tpu:v5p:1x1x1", "tpu:v6e:1x1"),
    "gpu": ("gpu:h100:1x1x1", "gpu:h200:1x1x1", "gpu:b200:1x1x1"),
}
ROWS = {
    "bfloat16": ((16_384, 4096), (100_001, 1001), (1_048_576, 64), (65_536, 1024), (4096, 16_384)),
    "float32": ((8192, 8192),),
}
HEADS = {
    "bfloat16": ((8192, 4096, 32_000), (10_001, 1001, 50_257)),
    "float32": ((8192, 2048, 32_000),),
}
COLOURS = {"reference": "#c8cdd6", "kernel": "#247"}
TABLE = Path(kernels.__file__).parent / "measured.json"


@dataclass(frozen=True)
class Op:
    """A call of four arrays and an implementation; how many arrays like the first it moves,
    forward, and there and back.
    """

    call: Callable[..., Any]
    moves: tuple[int, int]
    shapes: dict[str, Any] = field(default_factory=lambda: ROWS)
    outs: int = 1


# Of rows: the first array, what is added to it, a scale. Of a head: what it reads, its kernel,
# targets.
HEAD, SUM = "linear_cross_entropy", "rms_norm of a sum"
OPS = {
    "softmax": Op(lambda x, residual, scale, **how: kernels.softmax(x, **how), (2, 5)),
    "rms_norm": Op(lambda x, residual, scale, **how: kernels.rms_norm(x, scale, **how), (2, 5)),
    "layer_norm": Op(
        lambda x, residual, scale, **how: kernels.layer_norm(x, scale, scale, **how), (2, 5)
    ),
    SUM: Op(
        lambda x, residual, scale, **how: kernels.rms_norm(x, scale, residual=residual, **how),
        (4, 8),
        outs=2,
    ),
    HEAD: Op(
        lambda x, kernel, targets, **how: kernels.linear_cross_entropy(x, kernel, targets, **how),
        (1, 3),
        HEADS,
    ),
}


def arrays_of(op: str, dtype: str, shape: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    """The three arrays of a call, and the gradients to what it gives."""
    like = jax.ShapeDtypeStruct
    if op == HEAD:
        rows, width, vocab = shape
        return [
            like((rows, width), dtype),
            like((vocab, width), dtype),
            like((rows,), "int32"),
            like((rows,), "float32"),
        ]
    x = like(shape, dtype)
    return [x, x, like(shape[1:], "float32"), *[x] * OPS[op].outs]


def numbers(arrays: list[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """Numbers for arrays: of whole ones, zeros and ones."""
    random = np.random.default_rng(0)
    return [
        random.integers(0, 2, one.shape, one.dtype)
        if jnp.issubdtype(one.dtype, jnp.integer)
        else np.asarray(random.standard_normal(one.shape, "float32"), one.dtype)
        for one in arrays
    ]


def least(
    op: str, way: int, arrays: list[jax.ShapeDtypeStruct], flops: float, bandwidth: float
) -> float:
    """Bytes that must be moved, forward or there and back, by a device of so many FLOP/s and bytes
    a second.
    """
    x, kernel = (one.size * one.dtype.itemsize for one in arrays[:2])
    if op != HEAD:
        return OPS[op].moves[way] * x
    return max(OPS[op].moves[way] * (x + kernel), products(way, arrays) / flops * bandwidth)


def products(way: int, arrays: list[jax.ShapeDtypeStruct]) -> float:
    """FLOPs of a head: logits, and backward these again, and the gradients to what it reads and to
    its kernel.
    """
    return (2, 8)[way] * arrays[0].size * arrays[1].shape[0]


def forward(op: str, implementation: str | None) -> Callable[..., Any]:
    """The op alone."""
    return functools.partial(OPS[op].call, implementation=implementation)


def there_and_back(op: str, implementation: str | None) -> Callable[..., Any]:
    """What it gives, and its gradients to `x` and to the scale, or a head's kernel, from those to
    what it gives.
    """

    def both(x: jax.Array, other: jax.Array, beside: jax.Array, *gradients: jax.Array) -> Any:
        run = forward(op, implementation)
        if op == HEAD:
            y, back = jax.vjp(lambda x, other: run(x, other, beside), x, other)
        else:
            y, back = jax.vjp(lambda x, beside: run(x, other, beside), x, beside)
        return y, back(gradients if OPS[op].outs > 1 else gradients[0])

    return both


def error(op: str, implementation: str, dtype: str) -> float | None:
    """The worst of values and gradients against float64."""
    arrays = numbers(arrays_of(op, dtype, (24, 260, 300) if op == HEAD else (24, 260)))
    name = implementation
    if implementation != "reference" and jax.default_backend() != implementation:
        name += "_simulated"
    if name == "gpu_simulated" and not hasattr(plgpu, "InterpretGPUParams"):
        return None
    found = jax.jit(there_and_back(op, name))(*arrays)
    with jax.enable_x64():
        wide = (one if one.dtype == np.int32 else np.asarray(one, "float64") for one in arrays)
        truth = jax.tree.map(np.asarray, jax.jit(there_and_back(op, "reference"))(*wide))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    return max(
        float(np.abs(np.float64(one) - other).max() / np.abs(other).max()) for one, other in pairs
    )


def compiled(
    op: str, implementation: str, target: str, dtype: str, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Bytes over the least, of the program and of the kernel's own loads and stores, forward and
    there and back.
    """
    machine, found = sl.Target(target), {}
    mesh, options, chip = machine.mesh("data=1"), machine.compiler_options, machine.chip
    flops = chip.flops["bf16" if dtype == "bfloat16" else "f32"]
    arrays = arrays_of(op, dtype, shape)

    # As within a program; at its entry a compiler may choose another layout.
    def by_rows(array: Any) -> Format:
        return Format(Layout(tuple(range(array.ndim))), jax.NamedSharding(mesh, jax.P()))

    for k, (way, make) in enumerate({"forward": forward, "back": there_and_back}.items()):
        given = arrays[:3] if k == 0 else arrays
        with sl.use(sl.AxisRules(batch="data"), mesh):
            outs = jax.tree.map(by_rows, jax.eval_shape(make(op, implementation), *given))
            jitted: Any = jax.jit(
                make(op, implementation),
                in_shardings=jax.tree.map(by_rows, given),
                out_shardings=outs,
            )
            program = jitted.lower(*given).compile(compiler_options=options)
            traced = jax.make_jaxpr(make(op, implementation))(*given)
        minimum = least(op, k, arrays, flops, chip.hbm_bandwidth)
        found[way] = {"program": testing.memory_traffic(program).total / minimum}
        if implementation != "reference":
            of_kernel = touched(traced)
            found[way]["fast"] = of_kernel.fast
            # Whose tiles share operands in the cache.
            if not (op == HEAD and implementation == "gpu"):
                found[way]["kernel"] = (of_kernel.read + of_kernel.written) / minimum
    return found


def timed(function: Callable[..., Any], *arrays: Any) -> float:
    """Seconds of a call, of many in a row: the median of seven turns."""
    run = jax.jit(function)
    jax.block_until_ready(run(*arrays))
    turns = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(19):
            run(*arrays)
        jax.block_until_ready(run(*arrays))
        turns.append((time.perf_counter() - begin) / 20)
    return statistics.median(turns)


def on_gpu(
    op: str, implementation: str, dtype: str, shape: tuple[int, ...], copy: float, product: float
) -> dict[str, float]:
    """Times of an implementation, and its bandwidth over that of a copy, or its FLOP/s over those
    of a product.
    """
    like = arrays_of(op, dtype, shape)
    arrays, found = [jnp.asarray(one) for one in numbers(like)], {}
    for k, (way, make) in enumerate({"forward": forward, "back": there_and_back}.items()):
        found[way] = timed(make(op, implementation), *(arrays[:3] if k == 0 else arrays))
        if op == HEAD:
            found[f"{way}_flops"] = products(k, like) / found[way]
            found[f"{way}_of_product"] = found[f"{way}_flops"] / product
        else:
            found[f"{way}_of_copy"] = OPS[op].moves[k] * arrays[0].nbytes / found[way] / copy
    return found


def by_torch(op: str, dtype: str, shape: tuple[int, ...]) -> dict[str, float] | None:
    """Times of the same by `torch.compile`, where PyTorch is."""
    if importlib.util.find_spec("torch") is None or op == SUM:
        return None
    torch: Any = importlib.import_module("torch")
    torch.set_float32_matmul_precision("high")
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    of_x = shape[:2]
    x = torch.randn(of_x, dtype=kind, device="cuda", requires_grad=True)
    scale = torch.randn(
        (shape[2], shape[1]) if op == HEAD else of_x[1:],
        dtype=kind,
        device="cuda",
        requires_grad=True,
    )
    targets = torch.randint(0, 2, of_x[:1], device="cuda")
    functional = torch.nn.functional
    plain = {
        HEAD: lambda: functional.cross_entropy(
            functional.linear(x, scale).float(), targets, reduction="none"
        ),
        "softmax": lambda: torch.softmax(x, -1),
        "rms_norm": lambda: functional.rms_norm(x, of_x[1:], scale, 1e-6),
        "layer_norm": lambda: functional.layer_norm(x, of_x[1:], scale, scale, 1e-5),
    }[op]
    torch._dynamo.reset()  # or it would compile the second shape for any
    run = torch.compile(plain, dynamic=False)
    gradient = torch.randn_like(run())

    def back() -> None:
        x.grad = scale.grad = None
        run().backward(gradient)

    found = {}
    for way, function in (("forward", run), ("back", back)):
        for _ in range(3):
            function()
        turns = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                function()
            end.record()
            torch.cuda.synchronize()
            turns.append(begin.elapsed_time(end) / 20 / 1e3)
        found[way] = statistics.median(turns)
    return found


def plot(results: list[dict[str, Any]]) -> str:
    """What the first shape of each op moves in bfloat16, there and back, over the least: the
    reference and the kernels.
    """
    left, right, top, row, shown = 120, 700, 64, 13, 4.0
    moved: dict[str, dict[str, dict[str, float]]] = {op: {} for op in OPS}
    for one in results:
        if one["dtype"] == "bfloat16":
            shape = "x".join(map(str, OPS[one["op"]].shapes["bfloat16"][0]))
            for target, found in one.get("compiled", {}).items():
                if target.endswith(" " + shape):
                    kind = "reference" if one["implementation"] == "reference" else "kernel"
                    platform, name = target.split(":")[:2]
                    machine = f"TPU {name}" if platform == "tpu" else name.upper()
                    ratios = (
                        found["back"][of] for of in ("program", "kernel") if of in found["back"]
                    )
                    moved[one["op"]].setdefault(machine, {})[kind] = max(ratios)
    at, parts = float(top), []
    for op, machines in moved.items():
        parts.append(text(left, at + 8, op))
        at += 14
        for machine, ratios in machines.items():
            parts.append(text(left - 8, at + 9, machine, "end", "#555"))
            for kind, height in (("reference", 10), ("kernel", 5)):
                wide = (right - left) * min(ratios[kind], shown) / shown
                told = f"{op}, {machine}, {kind}: {ratios[kind]:.2f}"
                parts.append(bar(left, at + (10 - height) / 2, wide, height, COLOURS[kind], told))
            end = left + (right - left) * min(max(1, *ratios.values()), shown) / shown
            parts.append(
                text(
                    end + 6,
                    at + 9,
                    f"{ratios['kernel']:.2f} for {ratios['reference']:.2f}",
                    colour="#555",
                )
            )
            at += row
        at += 8
    one = left + (right - left) / shown
    head = [bar(left, 32, 12, 12, COLOURS["kernel"], "kernel"), text(left + 18, 42, "the kernels")]
    head += [
        bar(left + 110, 32, 12, 12, COLOURS["reference"], "reference"),
        text(left + 128, 42, "plain JAX, as compiled"),
    ]
    head += [text(left + 290, 42, "| the least")]
    parts.append(line([(one, top), (one, at - 8)], "black"))
    return svg(
        800,
        int(at) + 4,
        left,
        "What each op reads and writes there and back, over the least that it must",
        [*head, *parts],
    )


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the times of this device into the table of the ops",
    )
    parser.add_argument("--plot", type=Path, help="write a picture of what they move")
    parser.add_argument(
        "--targets",
        default="",
        help="some of the machines to compile for; by default all that can be",
    )
    parser.add_argument("--ops", nargs="+", choices=tuple(OPS), default=tuple(OPS), help="some ops")
    parser.add_argument(
        "--times", action="store_true", help="on a GPU only the times: no errors against float64"
    )
    arguments = parser.parse_args()
    gpu = jax.default_backend() == "gpu" if importlib.util.find_spec("jax_plugins") else False
    if not gpu:
        os.environ.update(COMPILE_ONLY)  # before a compiler is loaded
    here = [name for name, module in COMPILERS.items() if installed(module) and not gpu]
    targets = [
        one
        for name in here
        for one in TARGETS[name]
        if not arguments.targets or one in arguments.targets
    ]
    results: list[dict[str, Any]] = []
    failures, refused, worst = [], [], None
    for op in () if gpu and arguments.times else arguments.ops:
        for implementation in ("reference", "tpu", "gpu"):
            for dtype, shapes in OPS[op].shapes.items():
                line: dict[str, Any] = {"op": op, "implementation": implementation, "dtype": dtype}
                if not (gpu and implementation == "tpu"):
                    line["error"] = _tried(
                        failures,
                        f"{op}, {implementation}, {dtype}",
                        error,
                        op,
                        implementation,
                        dtype,
                    )
                for target in targets:
                    if implementation not in ("reference", target.split(":")[0]):
                        continue
                    for shape in shapes:
                        try:
                            found = on_its_own(target, op, implementation, target, dtype, shape)
                        except (
                            Exception
                        ) as reason:  # whatever a compiler raises, and what ours refuses
                            said = (
                                f"{op}, {implementation}, {dtype}{list(shape)}, {target}: "
                                f"{str(reason)[:500]}"
                            )
                            (refused if "Here `reference` can" in said else failures).append(said)
                            continue
                        line.setdefault("compiled", {})[f"{target} {'x'.join(map(str, shape))}"] = (
                            found
                        )
                        if implementation != "reference":
                            ratios = [
                                way[of]
                                for way in found.values()
                                for of in ("program", "kernel")
                                if of in way
                            ]
                            worst = max(worst or 0.0, *ratios)
                results.append(line)
                print(json.dumps(line), file=sys.stderr, flush=True)
    figures: dict[str, Any] = {"compile_failures": len(failures), "bytes_ratio_max": worst}
    figures |= {"targets": targets, "failures": failures, "refused": refused, "results": results}
    if gpu:
        figures |= _measured(arguments.ops, arguments.save, failures)
        figures["compile_failures"] = len(failures)
    if arguments.plot:
        arguments.plot.write_text(plot(results))
    report("kernels", figures, BOUNDS, arguments.json)


def _measured(ops: Sequence[str], save: bool, failures: list[str]) -> dict[str, Any]:
    """Times of some ops on this GPU beside plain XLA and PyTorch, and the ceiling of its memory.

    With `save` they replace those in the table of ops of the same names on the same device.
    """
    device, big = jax.devices()[0].device_kind, jnp.ones((2**15, 2**14), jnp.bfloat16)
    copy = 2 * big.nbytes / timed(lambda x: x + 1, big)
    squares = {dtype: big[:8192, :8192].astype(dtype) for dtype in HEADS}
    product = {dtype: 2 * 8192**3 / timed(jnp.matmul, one, one) for dtype, one in squares.items()}
    del big, squares
    about = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "by": "benchmarks.kernels --save",
    }
    lines, table = [], []
    for op in ops:
        names = ["reference", "gpu", *["tokamax"] * ("norm" in op and installed("tokamax"))]
        for dtype, shapes in OPS[op].shapes.items():
            for shape in shapes:
                what = f"{op}, {dtype}{list(shape)}"
                times = {
                    name: _tried(
                        failures,
                        f"{what}, {name}",
                        on_gpu,
                        op,
                        name,
                        dtype,
                        shape,
                        copy,
                        product[dtype],
                    )
                    for name in names
                }
                torch = _tried(failures, f"{what}, PyTorch", by_torch, op, dtype, shape)
                line: dict[str, Any] = {
                    "op": op,
                    "dtype": dtype,
                    "shape": shape,
                    **times,
                    "torch": torch,
                }
                ours = times["gpu"]
                for over, other in (("over_xla", times["reference"]), ("over_torch", torch)):
                    line[over] = (
                        ours
                        and other
                        and {way: other[way] / ours[way] for way in ("forward", "back")}
                    )
                lines.append(line)
                if op != SUM and shape[1] % 2 == 0:  # ragged rows say nothing of others
                    of_row = {"op": op, "device": device, "dtype": dtype, "row": shape[1], **about}
                    table += [
                        {**of_row, "implementation": name, "time": found["back"]}
                        for name, found in times.items()
                        if found
                    ]
                print(json.dumps(line), file=sys.stderr, flush=True)
    if save:
        others = [
            line
            for line in json.loads(TABLE.read_text())
            if line["device"] != device or line["op"] not in ops
        ]
        TABLE.write_text(
            "[\n" + ",\n".join(f"  {json.dumps(line)}" for line in [*others, *table]) + "\n]\n"
        )
    return {
        "device": device,
        "copy_bytes_per_second": copy,
        "product_flops": product,
        "times": lines,
    }


def _tried(failures: list[str], what: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a function gives; a failure is noted, and is none of the others'."""
    try:
        return function(*args)
    except Exception as reason:  # whatever a compiler raises, or a GPU
        failures.append(f"{what}: {str(reason)[:500]}")
        return None


def on_its_own(target: str, *args: Any) -> dict[str, Any]:
    """`compiled`, for GPUs in a process for each kind: Mosaic assembles all of a process's kernels
    for the first kind there.
    """
    return (
        compiled(*args)
        if target.startswith("tpu")
        else _process(target).submit(compiled, *args).result()
    )


@functools.cache
def _process(target: str) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


if __name__ == "__main__":
    main()
