"""What fusing elementwise steps saves of a block's bytes, by the compilers' programs.

Four blocks of a model, scanned over, forward and backward in bfloat16, with all activations kept
and with full recomputation, compiled for one chip of each kind:

    llama    Llama 3 of 8 billion parameters, one sequence of 4,096 tokens
    gpt2     GPT-2 of 1.6 billion parameters, four sequences of 1,024 tokens

- `activation`: the MLP's activation as `sl.kernels` has it, over autodiff of the formula.
- `norm`: norms as `sl.kernels` chooses them, over norms of plain JAX; `kernel`: the kernel of the
  machine, by name, over norms of plain JAX, both with the addition before them; `kernel_added`: the
  kernel over itself with the addition apart.
- `rotary`: the block over one whose queries and keys are not rotated, which is at least what an
  attention that rotates would have to move.
- `layout`: projections with heads before positions, over those with positions before heads;
  `layout_copies`: what is copied or transposed between projections and attention, over all.

Each ratio is one of bytes that a block reads and writes, by `sl.testing.memory_traffic`; its
`_temp` is one of temporaries, and on TPUs its `_cycles` one of the compiler's own estimates, in
which custom kernels have none.

Without `--target` the chips are a TPU v5p and an H100. It needs the compilers and no accelerator,
and takes ten minutes for a TPU and two for a GPU on two cores: `pip install -e ".[tpu-plan]"`, and
in an environment of its own `".[gpu-plan]"`.

    python -m benchmarks.fusions --json
"""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from benchmarks.pods import cycles
from models import gpt, layers
from shardlib import kernels, testing
from shardlib.compiled._hlo import Program, arrays, size_bytes
from shardlib.machine._targets import COMPILERS, installed

TARGETS = {
    "tpu": ("tpu:v5p:1x1x1", "tpu:v5e:1x1"),
    "gpu": ("gpu:h100:1x1x1",),
}
LAYERS = 4
MODELS = {
    "llama": (gpt.llama3_8b(context=4096), 1),
    "gpt2": (gpt.gpt2_xl(), 4),
}
REMATS = ("none", "full")
# No activation may move more than what autodiff makes of its formula.
ACTIVATION_BOUND = 1.0
PLAIN = {
    "silu": jax.nn.silu,
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}
Figures = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A block in some form.

    Attributes:
        norms: `kernels` of the model's configuration; "kernel" is the machine's own.
        written: what of the library is written otherwise while it is traced.
        rotated: whether queries and keys are.
    """

    norms: Any = "xla"
    written: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    rotated: bool = True


def plain_activations() -> contextlib.AbstractContextManager[Any]:
    """Activations as plain JAX in the dtype of their arguments, derived by JAX."""

    def glu(gate: jax.Array, up: jax.Array, activation: str = "silu") -> jax.Array:
        return PLAIN[activation](gate) * up

    def activate(x: jax.Array, bias: Any = None, activation: str = "gelu_tanh") -> jax.Array:
        if bias is not None:
            x = (x + bias).astype(x.dtype)
        return PLAIN[activation](x)

    return mock.patch.multiple(kernels, glu=glu, activate=activate)


def additions_apart() -> contextlib.AbstractContextManager[Any]:
    """Norms that are given a sum in place of its terms."""

    def apart(norm: Callable[..., Any]) -> Callable[..., Any]:
        def of_sum(x: jax.Array, *rest: Any, residual: Any = None, **options: Any) -> Any:
            if residual is None:
                return norm(x, *rest, **options)
            h = x + residual
            return norm(h, *rest, **options), h

        return of_sum

    rms_norm, layer_norm = apart(kernels.rms_norm), apart(kernels.layer_norm)
    return mock.patch.multiple(kernels, rms_norm=rms_norm, layer_norm=layer_norm)


@contextlib.contextmanager
def heads_first() -> Iterator[None]:
    """Projections into and out of attention whose products have heads before positions."""
    project, call = layers.project, layers.Projection.__call__

    def into_heads(x: jax.Array, names: tuple[str, ...], *projections: Any) -> list[jax.Array]:
        if any(projection.kernel.ndim != 3 for projection, _ in projections):
            return project(x, names, *projections)
        products = []
        for projection, _ in projections:
            kernel = projection.kernel[...].astype(x.dtype)
            product = jnp.swapaxes(jnp.einsum("bsd,hkd->bhsk", x, kernel), 1, 2)
            products.append(projection.add_bias(product))
        return products

    def out_of_heads(self: Any, x: jax.Array, *layouts: tuple[str, ...]) -> jax.Array:
        if self.contracted != 2:
            return call(self, x, *layouts)
        kernel = self.kernel[...].astype(x.dtype)
        return self.add_bias(jnp.einsum("bhsk,dhk->bsd", jnp.swapaxes(x, 1, 2), kernel))

    with (
        mock.patch.object(layers, "project", into_heads),
        mock.patch.object(layers.Projection, "__call__", out_of_heads),
    ):
        yield


VARIANTS = {
    "plain": Variant(),
    "autodiff": Variant(written=plain_activations),
    "norm": Variant(norms=None),
    "kernel": Variant(norms="kernel"),
    "kernel_apart": Variant(norms="kernel", written=additions_apart),
    "unrotated": Variant(rotated=False),
    "heads_first": Variant(written=heads_first),
}
# Each ratio, and the variants that it is of.
RATIOS = {
    "activation": ("plain", "autodiff"),
    "norm": ("norm", "plain"),
    "kernel": ("kernel", "plain"),
    "kernel_added": ("kernel", "kernel_apart"),
    "rotary": ("plain", "unrotated"),
    "layout": ("heads_first", "plain"),
}


def compiled_blocks(name: str, variant: Variant, remat: str, machine: sl.Target) -> Any:
    """The program of the gradients of a stack of blocks."""
    config, examples = MODELS[name]
    norms = variant.norms
    if norms == "kernel":
        norms = "tpu" if machine.platform == "tpu" else "gpu"
    config = dataclasses.replace(
        config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, kernels=norms
    )
    mesh = machine.mesh("data=-1")
    with sl.unsharded():
        structure, shapes = nnx.split(nnx.eval_shape(lambda: gpt.Block(config, rngs=nnx.Rngs(0))))

    def absent(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    weights = jax.tree.map(
        lambda x: absent((LAYERS, *x.shape)), nnx.to_pure_dict(shapes), is_leaf=_is_variable
    )
    x = absent((examples * mesh.size, config.context, config.width), "data")

    def loss(weights: Any, x_BSD: jax.Array) -> jax.Array:
        rotation = None
        if config.positions == "rotary" and variant.rotated:
            positions = jnp.arange(config.context, dtype=jnp.float32)
            rotation = gpt.rotations(positions, config.dims["head_dim"], config.rope_theta)

        def layer(x_BSD: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            block = nnx.merge(structure, weights)
            return block(x_BSD, None, gpt.Seen(rotation=rotation))[0], None

        if remat == "full":
            layer = jax.checkpoint(layer, prevent_cse=False)
        return jax.lax.scan(layer, x_BSD, weights)[0].astype(jnp.float32).sum()

    with sl.use(sl.rules.data, mesh), variant.written():
        lowered: Any = jax.jit(jax.grad(loss, (0, 1))).lower(weights, x)
    return lowered.compile(compiler_options=machine.compiler_options)


def _is_variable(leaf: Any) -> bool:
    return hasattr(leaf, "shape")


def copied_bytes(text: str, heads: int, size: int) -> int:
    """What a program reads and writes to copy or transpose arrays of heads, as often as it does."""
    total = 0
    for _, made, run in Program(text).walk():
        if made.opcode not in ("copy", "transpose", "fusion"):
            continue
        of_result = arrays(made.result)
        moves_only = made.opcode != "fusion" or made.name.startswith(("copy", "transpose"))
        if moves_only and of_result and {heads, size} <= set(of_result[0][1]):
            total += run.times * 2 * size_bytes(of_result)
    return total


def figures_of(target: str, name: str, remat: str) -> Figures:
    """The ratios of a model on a machine."""
    machine = sl.Target(target)
    moved: Figures = {}
    temporaries: Figures = {}
    estimates: Figures = {}
    figures: Figures = {}
    config = MODELS[name][0]
    for form, variant in VARIANTS.items():
        if form == "unrotated" and config.positions != "rotary":
            continue
        compiled = compiled_blocks(name, variant, remat, machine)
        moved[form] = testing.memory_traffic(compiled).total
        temporaries[form] = compiled.memory_analysis().temp_size_in_bytes
        text = compiled.as_text()
        if target.startswith("tpu"):
            estimates[form] = cycles(text)
        if form == "plain":
            figures["moved_gb"] = moved[form] / LAYERS / 1e9
            copied = copied_bytes(text, config.heads, config.dims["head_dim"])
            figures["layout_copies"] = copied / moved[form]
    for ratio, (one, other) in RATIOS.items():
        if other in moved:
            figures[ratio] = moved[one] / moved[other]
            figures[f"{ratio}_temp"] = temporaries[one] / temporaries[other]
        if other in estimates:
            figures[f"{ratio}_cycles"] = estimates[one] / estimates[other]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    known = [target for targets in TARGETS.values() for target in targets]
    parser.add_argument("--target", choices=known, action="append", help="only this kind of chip")
    parser.add_argument("--model", choices=list(MODELS), action="append", help="only this model")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for platform, targets in TARGETS.items():
        if not installed(COMPILERS[platform]):
            print(f"the compiler for {platform.upper()}s is not installed")
            continue
        for target in arguments.target or targets[:1]:
            if not target.startswith(platform):
                continue
            for name in arguments.model or MODELS:
                for remat in REMATS:
                    prefix = f"{target.split(':')[1]}_{name}_{remat}"
                    for figure, value in figures_of(target, name, remat).items():
                        figures[f"{prefix}_{figure}"] = round(value, 3)
                        print(f"{prefix}_{figure}", round(value, 3), flush=True)
    bounds = {name: ACTIVATION_BOUND for name in figures if name.endswith("_activation")}
    report("fusions", figures, bounds, arguments.json)


if __name__ == "__main__":
    main()
