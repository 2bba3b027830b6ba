"""Which implementation of an op the compilers' programs speak for, where no clock has spoken.

Each op is compiled inside what surrounds it in a model, forward and backward, by the real compilers
for one chip of each kind, once with each implementation:

    attention, rms_norm      two layers of Llama 3 of 8 billion parameters, recomputed in backward
    softmax                  an attention that writes its scores
    linear_cross_entropy     Llama 3's last norm and its head
    grouped_matmul           the last product of eight experts of Mixtral's, evenly loaded

Of each program: `moved_gb`, what it reads and writes, where a kernel's operands and results count
once; `temp_gb`, its temporaries; and `seconds`.

- The TPU compiler estimates cycles of every instruction but kernels. Seconds are these cycles, by
  the cycles of a large product that runs at the peak, and for each kernel what it moves over the
  memory's bandwidth and its products over the peak, as if one waited for the other.
- The GPU compiler estimates nothing that can be read. Seconds are what the program moves over the
  bandwidth, and all its products over the peak.

With `--save` the lines go into `shardlib/kernels/compiled.json`, by which an op without a measured
implementation chooses: the fewest seconds, or, where two are within six hundredths, the fewest
temporaries.

It needs the compilers and no accelerator, and takes some ten minutes on two cores:
`pip install -e ".[tpu-plan]"`, and in an environment of its own `".[gpu-plan]"`. A process makes
kernels for one generation of GPUs: name Hopper's and Blackwell's apart, by `--target`.

    python -m benchmarks.kernel_choice --save
"""

import argparse
import dataclasses
import datetime
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib as sl
from benchmarks.pods import cycles
from models import gpt
from shardlib import kernels, testing
from shardlib.compiled._hlo import Program, arrays, size_bytes
from shardlib.machine._targets import COMPILERS, installed

TABLE = Path(kernels.__file__).parent / "compiled.json"
TARGETS = {
    "tpu": ("tpu:v4:1x1x1", "tpu:v5e:1x1", "tpu:v5p:1x1x1", "tpu:v6e:1x1", "tpu:7x:1x1x1"),
    "gpu": ("gpu:h100:1x1x1", "gpu:h200:1x1x1", "gpu:b200:1x1x1"),
}
IMPLEMENTATIONS = {
    "attention": {
        "tpu": ("reference", "tpu"),
        "gpu": ("reference", "cudnn", "tokamax", "gpu"),
    },
    "rms_norm": {"tpu": ("reference", "tpu"), "gpu": ("reference", "gpu")},
    "softmax": {"tpu": ("reference", "tpu"), "gpu": ("reference", "gpu")},
    "linear_cross_entropy": {"tpu": ("reference", "tpu"), "gpu": ("reference", "gpu")},
    "grouped_matmul": {"tpu": ("reference", "ragged_dot", "tpu"), "gpu": ("reference",)},
}
# How many products a kernel takes, by what its name begins with; others take none. Of attention
# they are of queries with keys, or of these shares with values, and backward their transposes.
PRODUCTS = {
    "attention_forward": 2,
    "attention_dkv": 4,
    "attention_dq": 3,
    "head_forward": 1,
    "head_backward": 3,
    "gmm": 1,
    "tgmm": 1,
    "ragged-dot": 1,
    "ragged-dot-metadata": 0,
}
LENGTHS = (2048, 8192)
LLAMA = gpt.llama3_8b(layers=2, vocab=1024)
RULES = sl.rules.data


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
        lower: lowers it, for a mesh of one axis, `data`. A chip of a TPU 7x is two devices.
        flops: of all its products on one device.
        row: the length by which lines of the table are compared.
        product: FLOPs of one product of the op, as its kernels take it: see `PRODUCTS`.
    """

    lower: Callable[[Any], Any]
    flops: float
    row: int
    product: float = 0.0


def layers(length: int, **options: Any) -> Case:
    """A training step of two layers, of one sequence on each device."""
    config = dataclasses.replace(LLAMA, context=length, **options)

    def lower(mesh: Any) -> Any:
        strategy = sl.Strategy(mesh=mesh, rules=RULES, precision="bf16", remat="full")
        state = sl.init(
            lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy, abstract=True
        )
        batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, length + 1), "int32")}
        return sl.train_step(gpt.loss, strategy).lower(state, batch)

    weights = config.width * (3 * config.dims["mlp"] + 2 * config.width)
    scores = 2 * length * config.width
    # Forward, forward again, and two products for each in backward.
    flops = 8 * length * config.layers * (weights + scores)
    row = length if "attention" in options else config.width
    # Of causal scores kernels make half.
    return Case(lower, flops, row, product=length * length * config.width)


def head(implementation: str) -> Case:
    """The last norm and the head with its loss, of 8,192 tokens on each device."""
    tokens, width, vocab = 8192, LLAMA.width, 128_256

    def loss(x: jax.Array, scale: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
        h = kernels.rms_norm(x, scale, implementation="reference")
        losses = kernels.linear_cross_entropy(
            h, kernel, targets, names=("batch", None), implementation=implementation
        )
        return losses.mean()

    def lower(mesh: Any) -> Any:
        whole, split = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))
        return _lowered(
            mesh,
            jax.grad(loss, (0, 1, 2)),
            jax.ShapeDtypeStruct((tokens * mesh.size, width), "bfloat16", sharding=split),
            jax.ShapeDtypeStruct((width,), "bfloat16", sharding=whole),
            jax.ShapeDtypeStruct((vocab, width), "bfloat16", sharding=whole),
            jax.ShapeDtypeStruct((tokens * mesh.size,), "int32", sharding=split),
        )

    product = 2 * tokens * width * vocab
    return Case(lower, 4 * product, width, product)


def scores(implementation: str) -> Case:
    """Attention that writes its scores, of a sequence of 2,048 tokens on each device."""
    length, heads, size = 2048, 32, 128
    names = ("batch", None, None, None)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        z = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        p = kernels.softmax(
            z, causal=True, scale=size**-0.5, names=names, implementation=implementation
        )
        return jnp.einsum("bhqk,bkhd->bqhd", p, v).astype(jnp.float32).sum()

    def lower(mesh: Any) -> Any:
        split = jax.NamedSharding(mesh, jax.P("data"))
        shape = (mesh.size, length, heads, size)
        array = jax.ShapeDtypeStruct(shape, "bfloat16", sharding=split)
        return _lowered(mesh, jax.grad(loss, (0, 1, 2)), array, array, array)

    return Case(lower, 12 * length * length * heads * size, length)


def experts(implementation: str) -> Case:
    """A product of the rows of eight experts, 8,192 in all on each device, and its gradients."""
    rows, hidden, width, count = 8192, 14_336, 4096, 8

    def both(x: jax.Array, w: jax.Array, sizes: jax.Array, gradient: jax.Array) -> Any:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            groups = kernels.Groups(sizes, ("data",))
            names = (None, None)
            return kernels.grouped_matmul(x, w, groups, names=names, implementation=implementation)

        y, back = jax.vjp(product, x, w)
        return y, back(gradient)

    def lower(mesh: Any) -> Any:
        whole, split = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))
        return _lowered(
            mesh,
            both,
            jax.ShapeDtypeStruct((rows * mesh.size, hidden), "bfloat16", sharding=split),
            jax.ShapeDtypeStruct((count, hidden, width), "bfloat16", sharding=whole),
            jax.ShapeDtypeStruct((mesh.size, count), "int32", sharding=split),
            jax.ShapeDtypeStruct((rows * mesh.size, width), "bfloat16", sharding=split),
        )

    product = 2 * rows * hidden * width
    return Case(lower, 3 * product, hidden, product)


def _lowered(mesh: Any, function: Callable[..., Any], *arrays: jax.ShapeDtypeStruct) -> Any:
    """A function of arrays that are placed on a mesh, lowered for it."""
    with sl.use(RULES, mesh):
        return jax.jit(function).lower(*arrays)


def cases(op: str, implementation: str) -> list[Case]:
    """The programs of an op with an implementation."""
    if op == "attention":
        return [layers(length, attention=implementation) for length in LENGTHS]
    if op == "rms_norm":
        return [layers(LENGTHS[0], kernels=implementation)]
    if op == "softmax":
        return [scores(implementation)]
    if op == "grouped_matmul":
        return [experts(implementation)]
    return [head(implementation)]


def line_of(target: str, op: str, implementation: str, case: Case) -> dict[str, Any]:
    """What the compiler's program of a case comes to; `failed` says why there is none.

    An implementation may refuse a device, and the compiler a program.
    """
    machine = sl.Target(target)
    line: dict[str, Any] = {
        "op": op,
        "device": machine.chip.kind,
        "dtype": "bfloat16",
        "row": case.row,
        "implementation": implementation,
    }
    mesh = machine.mesh("data=-1")
    try:
        lowered = case.lower(mesh)
        compiled = lowered.compile(compiler_options=machine.compiler_options)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return line | {"failed": " ".join(str(error).split())[:200]}
    moved = testing.memory_traffic(compiled).total
    chip = machine.chip
    if target.startswith("tpu"):
        text = compiled.as_text()
        seconds = cycles(text) / cycles_per_second(target) + kernel_seconds(text, case, chip)
    else:
        seconds = moved / chip.hbm_bandwidth + case.flops / chip.flops["bf16"]
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return line | {
        "seconds": float(f"{seconds:.4g}"),
        "moved_gb": round(moved / 1e9, 2),
        "temp_gb": round(temporaries / 1e9, 3),
    }


@functools.cache
def cycles_per_second(target: str) -> float:
    """The cycles of a TPU's second, by the compiler's estimate of a large product at the peak."""
    machine, size = sl.Target(target), 16_384
    mesh = machine.mesh("data=-1")
    x = jax.ShapeDtypeStruct((size, size), "bfloat16", sharding=jax.NamedSharding(mesh, jax.P()))
    lowered = _lowered(mesh, jnp.dot, x, x)
    compiled = lowered.compile(compiler_options=machine.compiler_options)
    return cycles(compiled.as_text()) / (2 * size**3 / machine.chip.flops["bf16"])


def kernel_seconds(text: str, case: Case, chip: Any) -> float:
    """What the kernels of a TPU's program take at least."""
    seconds = 0.0
    for scope, instruction, run in Program(text).walk():
        if "tpu_custom_call" not in instruction.attributes:
            continue
        moved = size_bytes(arrays(instruction.result))
        for operand in instruction.operands:
            if operand in scope.instructions:
                moved += size_bytes(arrays(scope.instructions[operand].result))
        products = 0
        for name, count in PRODUCTS.items():
            if instruction.name.startswith(name):
                products = count
        once = moved / chip.hbm_bandwidth + products * case.product / chip.flops["bf16"]
        seconds += run.times * once
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write the table of the chooser")
    known = [target for targets in TARGETS.values() for target in targets]
    parser.add_argument("--target", choices=known, action="append", help="only this device")
    parser.add_argument("--op", choices=list(IMPLEMENTATIONS), action="append", help="only this op")
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for platform, targets in TARGETS.items():
        if not installed(COMPILERS[platform]):
            print(f"the compiler for {platform.upper()}s is not installed")
            continue
        for op in arguments.op or IMPLEMENTATIONS:
            for implementation in IMPLEMENTATIONS[op][platform]:
                for case in cases(op, implementation):
                    for target in targets:
                        if arguments.target and target not in arguments.target:
                            continue
                        lines.append(line_of(target, op, implementation, case))
                        print(json.dumps(lines[-1]), flush=True)
    if arguments.save:
        save(lines)


def save(lines: list[dict[str, Any]]) -> None:
    """Put lines into the table in the place of older ones of the same op and device."""
    stamp = {"jax": jax.__version__, "date": datetime.date.today().isoformat()}
    renewed = {(line["op"], line["device"]) for line in lines}
    table = [line for line in json.loads(TABLE.read_text())
             if (line["op"], line["device"]) not in renewed]  # fmt: skip
    table += [line | stamp for line in lines]
    rows = ",\n".join(json.dumps(line) for line in table)
    TABLE.write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    main()
