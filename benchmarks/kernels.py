"""Kernels: how near the truth, whether the real compilers take them, what they move, and on a GPU how fast they are.

Of every op and implementation, forward, and there and back:

- `error`: the worst against float64, over the greatest number there. Kernels that no device here runs are simulated.
- `compiled`: by the compilers of TPU v4, v5e, v5p and v6e and of H100, H200 and B200, as far as these are installed;
  `compile_failures` counts what they refuse.
- `bytes`: what the compiled program reads and writes over the least that it must, and the same of the kernel's own loads and
  stores; `bytes_ratio_max` is the worst of all kernels. `fast`: bytes of fast memory that a kernel's blocks take.

On a GPU also the median `time`, the bandwidth over that of a large copy in the same run (`of_copy`), and the time of plain XLA
and of `torch.compile` over ours (`over_xla`, `over_torch`). With `--save` the times go into the table by which ops choose.

    python -m benchmarks.kernels --json
"""

import argparse
import datetime
import functools
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
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
from benchmarks._report import report
from shardlib import kernels, testing
from shardlib.planning._targets import COMPILE_ONLY

BOUNDS = {"compile_failures": 0, "bytes_ratio_max": 1.1}
TARGETS = {
    "tpu": ("tpu:v4:1x1x1", "tpu:v5e:1x1", "tpu:v5p:1x1x1", "tpu:v6e:1x1"),
    "gpu": ("gpu:h100:1x1x1", "gpu:h200:1x1x1", "gpu:b200:1x1x1"),
}
COMPILERS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
SHAPES = {"bfloat16": ((16_384, 4096), (10_001, 1001)), "float32": ((8192, 8192),)}
TABLE = Path(kernels.__file__).parent / "measured.json"

# An op of `x`, what is added to it, and a scale: the call, and how many arrays like x it has to read and write, forward, and
# there and back.
SUM = "rms_norm of a sum"
OPS: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "softmax": (lambda x, residual, scale, **how: kernels.softmax(x, **how), (2, 5)),
    "rms_norm": (lambda x, residual, scale, **how: kernels.rms_norm(x, scale, **how), (2, 5)),
    "layer_norm": (lambda x, residual, scale, **how: kernels.layer_norm(x, scale, scale, **how), (2, 5)),
    SUM: (lambda x, residual, scale, **how: kernels.rms_norm(x, scale, residual=residual, **how), (4, 8)),
}


def forward(op: str, implementation: str | None) -> Callable[..., Any]:
    """The op alone."""
    return functools.partial(OPS[op][0], implementation=implementation)


def there_and_back(op: str, implementation: str | None) -> Callable[..., Any]:
    """What it gives, and its gradients to `x` and the scale from those to what it gives, of which there may be two."""

    def both(x: jax.Array, residual: jax.Array, scale: jax.Array, gradient: jax.Array, other: jax.Array) -> Any:
        y, back = jax.vjp(lambda x, scale: forward(op, implementation)(x, residual, scale), x, scale)
        return y, back((gradient, other) if op == SUM else gradient)

    return both


def error(op: str, implementation: str, dtype: str) -> float | None:
    """The worst of values and gradients against float64."""
    random = np.random.default_rng(0)
    x, residual, gradient, other = (np.asarray(random.normal(size=(24, 260)), dtype) for _ in range(4))
    scale = np.asarray(random.normal(size=260), "float32")
    name = implementation
    if implementation != "reference" and jax.default_backend() != implementation:
        name += "_simulated"
    if name == "gpu_simulated" and not hasattr(plgpu, "InterpretGPUParams"):
        return None
    found = jax.jit(there_and_back(op, name))(x, residual, scale, gradient, other)
    with jax.enable_x64():
        wide = (np.asarray(one, "float64") for one in (x, residual, scale, gradient, other))
        truth = jax.tree.map(np.asarray, jax.jit(there_and_back(op, "reference"))(*wide))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    return max(float(np.abs(np.float64(one) - other).max() / np.abs(other).max()) for one, other in pairs)


def compiled(op: str, implementation: str, target: str, dtype: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Bytes over the least, of the program and of the kernel's own loads and stores, forward and there and back."""
    machine, found = sl.Target(target), {}
    mesh, options = machine.mesh("data=1"), machine.compiler_options
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[1:], "float32")
    least = x.size * x.dtype.itemsize
    ways = {"forward": (forward, (x, x, scale)), "back": (there_and_back, (x, x, scale, x, x))}

    def by_rows(array: Any) -> Format:  # as within a program; at its entry a compiler may choose another layout
        return Format(Layout(tuple(range(array.ndim))), jax.NamedSharding(mesh, jax.P()))

    for k, (way, (make, arrays)) in enumerate(ways.items()):
        with sl.use(sl.AxisRules(batch="data"), mesh):
            outs = jax.tree.map(by_rows, jax.eval_shape(make(op, implementation), *arrays))
            jitted: Any = jax.jit(
                make(op, implementation), in_shardings=jax.tree.map(by_rows, arrays), out_shardings=outs
            )
            program = jitted.lower(*arrays).compile(compiler_options=options)
            traced = jax.make_jaxpr(make(op, implementation))(*arrays)
        of_kernel = touched(traced)
        minimum = OPS[op][1][k] * least
        found[way] = {"program": testing.memory_traffic(program).total / minimum}
        if implementation != "reference":
            found[way] |= {"kernel": (of_kernel.read + of_kernel.written) / minimum, "fast": of_kernel.fast}
    return found


def timed(function: Callable[..., Any], *arrays: Any) -> float:
    """Seconds of a call, of many in a row: the median of seven turns."""
    run = jax.jit(function)
    jax.block_until_ready(run(*arrays))
    turns = []
    for _ in range(7):
        begin = time.perf_counter()
        jax.block_until_ready([run(*arrays) for _ in range(20)][-1])
        turns.append((time.perf_counter() - begin) / 20)
    return statistics.median(turns)


def on_gpu(op: str, implementation: str, dtype: str, shape: tuple[int, int], copy: float) -> dict[str, float]:
    """Times of an implementation, and its bandwidth over that of a copy."""
    random = np.random.default_rng(0)
    x, residual, gradient, other = (jnp.asarray(random.normal(size=shape), dtype) for _ in range(4))
    scale = jnp.asarray(random.normal(size=shape[1:]), "float32")
    found = {}
    for k, (way, make, arrays) in enumerate(
        [("forward", forward, (x, residual, scale)), ("back", there_and_back, (x, residual, scale, gradient, other))]
    ):
        found[way] = timed(make(op, implementation), *arrays)
        found[f"{way}_of_copy"] = OPS[op][1][k] * x.nbytes / found[way] / copy
    return found


def by_torch(op: str, dtype: str, shape: tuple[int, int]) -> dict[str, float] | None:
    """Times of the same by `torch.compile`, where PyTorch is."""
    if importlib.util.find_spec("torch") is None or op == SUM:
        return None
    torch: Any = importlib.import_module("torch")
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    x = torch.randn(shape, dtype=kind, device="cuda", requires_grad=True)
    scale = torch.randn(shape[1:], dtype=kind, device="cuda", requires_grad=True)
    functional = torch.nn.functional
    plain = {
        "softmax": lambda: torch.softmax(x, -1),
        "rms_norm": lambda: functional.rms_norm(x, shape[1:], scale, 1e-6),
        "layer_norm": lambda: functional.layer_norm(x, shape[1:], scale, scale, 1e-5),
    }[op]
    run, gradient = torch.compile(plain), torch.randn(shape, dtype=kind, device="cuda")

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


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--save", action="store_true", help="write the times of this device into the table of the ops")
    parser.add_argument("--targets", default="", help="some of the machines to compile for; by default all that can be")
    arguments = parser.parse_args()
    gpu = jax.default_backend() == "gpu" if importlib.util.find_spec("jax_plugins") else False
    if not gpu:
        os.environ.update(COMPILE_ONLY)  # before a compiler is loaded
    here = [name for name, module in COMPILERS.items() if _installed(module) and not gpu]
    targets = [one for name in here for one in TARGETS[name] if not arguments.targets or one in arguments.targets]
    results: list[dict[str, Any]] = []
    failures, worst = [], 1.0
    for op in OPS:
        for implementation in ("reference", "tpu", "gpu"):
            for dtype, shapes in SHAPES.items():
                line: dict[str, Any] = {"op": op, "implementation": implementation, "dtype": dtype}
                if not (gpu and implementation == "tpu"):
                    line["error"] = error(op, implementation, dtype)
                for target in targets:
                    if implementation not in ("reference", target.split(":")[0]):
                        continue
                    for shape in shapes:
                        try:
                            found = compiled(op, implementation, target, dtype, shape)
                        except Exception as reason:  # whatever a compiler raises, and what ours refuses
                            failures.append(
                                f"{op}, {implementation}, {dtype}{list(shape)}, {target}: {str(reason)[:500]}"
                            )
                            continue
                        line.setdefault("compiled", {})[f"{target} {'x'.join(map(str, shape))}"] = found
                        if implementation != "reference":
                            worst = max(worst, *(way[of] for way in found.values() for of in ("program", "kernel")))
                results.append(line)
                print(json.dumps(line), file=sys.stderr, flush=True)
    figures: dict[str, Any] = {"compile_failures": len(failures), "bytes_ratio_max": worst}
    figures |= {"targets": targets, "failures": failures, "results": results}
    if gpu:
        figures |= _measured(arguments.save)
    report("kernels", figures, BOUNDS, arguments.json)


def _measured(save: bool) -> dict[str, Any]:
    """Times on this GPU beside plain XLA and PyTorch, and the ceiling of its memory."""
    device, big = jax.devices()[0].device_kind, jnp.ones((2**15, 2**14), jnp.bfloat16)
    copy = 2 * big.nbytes / timed(lambda x: x + 1, big)
    del big
    lines, table = [], []
    for op in OPS:
        for dtype, shapes in SHAPES.items():
            for shape in shapes:
                torch = by_torch(op, dtype, shape)
                times = {name: on_gpu(op, name, dtype, shape, copy) for name in ("reference", "gpu")}
                ours, xla = times["gpu"], times["reference"]
                line: dict[str, Any] = {"op": op, "dtype": dtype, "shape": shape, **times, "torch": torch}
                line["over_xla"] = {way: xla[way] / ours[way] for way in ("forward", "back")}
                line["over_torch"] = torch and {way: torch[way] / ours[way] for way in ("forward", "back")}
                lines.append(line)
                print(json.dumps(line), file=sys.stderr, flush=True)
        if " " not in op:
            for name in ("reference", "gpu"):
                spent = sum(line[name]["back"] for line in lines if line["op"] == op)
                about = {
                    "date": datetime.date.today().isoformat(),
                    "jax": jax.__version__,
                    "by": "benchmarks.kernels --save",
                }
                table.append({"op": op, "device": device, "implementation": name, "time": spent, **about})
    if save:
        others = [line for line in json.loads(TABLE.read_text()) if line["device"] != device]
        TABLE.write_text("[\n" + ",\n".join(f"  {json.dumps(line)}" for line in [*others, *table]) + "\n]\n")
    return {"device": device, "copy_bytes_per_second": copy, "times": lines}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
