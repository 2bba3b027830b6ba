"""Experts that drop nothing: exact under any load, and what compilers make of them.

On eight simulated devices, for every router, layout and form of sending, drawn loads and the worst,
all tokens to the same experts:

- `dropped_tokens`, and `worst_error` of outputs and gradients from one device that computes every
  expert for every token, over the largest entry of each or one.
- `rows_sent_ratio_...`: rows that a device sends in a round of an even load, by the offsets that
  the collective is told, over those that are needed.
- `rows_across_ratio`: with two levels, rows that cross the slow network by these offsets, over the
  distinct nodes that the experts of each token are on, for DeepSeek-V3's router on 8 nodes; and
  `rows_across_of_direct`, over the rows that cross where each is sent to its expert at once.
- `expert_flops_ratio_sizes`: rows of all tiles that a kernel computes then, by the sizes of groups,
  over those that there are.
- `buffer_ratio_max`: rows that a device has room for, over those of an even load, of the shapes of
  Mixtral, Qwen3 and DeepSeek-V3 on 8 to 256 devices.

By the compiler for v5p, a layer of Mixtral's experts on 8 devices, forward and backward:

- `expert_flops_ratio`: products of grouped rows, of the shapes that are compiled, over those of the
  active experts. Kernels leave out tiles without rows, so that this is the most.
- `all_to_alls`, `all_to_alls_full`: collectives that send rows, of one round; the latter where the
  layer is computed again.

With `--trained`, the model of `examples/experts.py` on eight simulated devices, three seeds, some
half an hour:

- `loss_ratio`: the loss on held-out text of a model that drops nothing over that of one whose
  experts take 1.25 times their share, both of two experts a token and with the loss of balance that
  the Switch Transformer has; each is the mean of three seeds, and `loss_ratio_worst` is that of the
  worst seed. The same of routers without such a loss: `loss_ratio_bias` of sigmoid gates with a
  bias, and `loss_ratio_choice` of experts that choose tokens, for which they look at later ones
  too.

With `--pods`, by the compilers, some ten minutes:

- `mixtral_..._ratio`: the row of `benchmarks.pods`, dropless over capacity 1.25: cycles, bytes
  sent, and temporaries. Compilers do not estimate kernels, whose products are counted as if they
  ran at the peak: in `cycle` those of an even load, as kernels leave out tiles without rows, and in
  `cycle_full` those of a full buffer, 1.25 times as many.
- `deepseek_...`: DeepSeek-V3's training step on 128 chips of 7x, 4,096 tokens a sequence and 8
  sequences on each of 256 devices, first moments in bfloat16, in two layouts: `fsdp` splits all
  weights over all devices and gathers them, and has the inputs of blocks in the host's memory;
  `experts` has an expert on each device, and takes the sequences in two microbatches.
  `deepseek_hbm_gib` is the better one's arguments and temporaries.

    python -m benchmarks.dropless --json [--trained] [--pods]
"""

import argparse
import itertools
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import shardlib as sl
from benchmarks import kernel_choice, pods
from benchmarks._compiled import Compiled, compile_for
from benchmarks._report import report
from examples import experts as example
from models import moe
from shardlib.compiled._hlo import Program, arrays
from shardlib.experts import ExpertChoice, NoisyTopK, SigmoidTopK, TopK, dropless
from shardlib.experts._rows import RowExchange
from shardlib.experts._two_levels import nodes_of

BOUNDS = {
    "dropped_tokens": 0,
    "worst_error": 1e-5,
    "rows_sent_ratio_ragged": 1.05,
    "rows_sent_ratio_dense": 1.27,
    "rows_across_ratio": 1.0,
    "buffer_ratio_max": 1.25,
    "expert_flops_ratio_sizes": 1.05,
    "expert_flops_ratio": 1.27,
    "all_to_alls": 4,
    "all_to_alls_full": 6,
    "mixtral_cycle_ratio": 1.0,
    "mixtral_wire_ratio": 1.0,
    "mixtral_temp_ratio": 1.0,
    "loss_ratio": 1.0,
    "deepseek_hbm_gib": 96.0,
    "deepseek_compile_s": 120.0,
}
BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS = 8, 8, 16, 32, 8
ROUTERS = (
    TopK(1),
    TopK(2),
    TopK(3, renormalize=False),
    TopK(2, groups=4, groups_taken=2),
    SigmoidTopK(2, scale=2.5, groups=4, groups_taken=2),
    NoisyTopK(2),
)
TENSOR = sl.rules.experts | sl.rules.tensor
LAYOUTS = {
    "data=2": sl.rules.experts,
    "data=8": sl.rules.experts,
    "data=2,model=4": TENSOR,
    "data=2,context=2,model=2": TENSOR | sl.rules.context("ring"),
    "pod=2,data=4": sl.rules.experts | sl.AxisRules(batch=("pod", "data")),
}
# With the experts over both axes, and a token sent once to each node.
OVER_NODES = sl.rules.experts | sl.AxisRules(batch=("pod", "data"), experts=("pod", "data"))
TWO_LEVELS = {
    "pod=2,data=4": OVER_NODES,
    "pod=4,data=2": OVER_NODES,
    "pod=2,data=2,model=2": OVER_NODES | sl.rules.tensor,
}
# What routes is computed in float32.
KEPT = (".*/router", ".*/router_bias")
# Tokens of a device, choices of a token, experts.
SHAPES = {"mixtral": (4096, 2, 8), "qwen3": (4096, 8, 128), "deepseek": (32_768, 8, 256)}


def of_rows(weights: dict[str, jax.Array], x: jax.Array, groups: sl.kernels.Groups) -> jax.Array:
    """A gated MLP of each row's expert."""
    names = ("act_embed", "act_mlp")
    inward = [weights["up"], weights["gate"]]
    up, gate = sl.kernels.grouped_matmul(x, inward, groups, names=names)
    h = jax.nn.silu(gate) * up
    return sl.kernels.grouped_matmul(h, weights["down"], groups, names=names[::-1])


def every_expert(router: Any, x: jax.Array, gate: jax.Array, weights: Any) -> jax.Array:
    """The output of every expert for every token, of which each takes its own."""
    seen = sl.experts.Seen(x @ gate, bias=jnp.zeros(EXPERTS) if reads_bias(router) else None)
    choices = router.choose(seen)
    of_token = (jax.nn.one_hot(choices.expert, EXPERTS) * choices.weight[..., None]).sum(-2)
    h = jax.nn.silu(jnp.einsum("bsm,emf->bsef", x, weights["gate"]))
    h = h * jnp.einsum("bsm,emf->bsef", x, weights["up"])
    return jnp.einsum("bsef,efm,bse->bsm", h, weights["down"], of_token)


def reads_bias(router: Any) -> bool:
    """Whether a router chooses by a bias."""
    return "bias" in getattr(router, "reads", ())


def with_gradients(function: Any, *arrays: Any) -> Any:
    """The outputs, and the gradients of a sum in which each column counts differently."""
    y, back = jax.vjp(function, *arrays)
    return y, back(jnp.broadcast_to(jnp.arange(1.0, WIDTH + 1), y.shape))


def errors() -> dict[str, float]:
    """The worst error, and how many choices were dropped, over all cases."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    x = draw(BATCH, LENGTH, WIDTH)
    weights = {
        "up": draw(EXPERTS, WIDTH, HIDDEN),
        "gate": draw(EXPERTS, WIDTH, HIDDEN),
        "down": draw(EXPERTS, HIDDEN, WIDTH),
    }
    gates = {"drawn": draw(WIDTH, EXPERTS), "worst": jnp.zeros((WIDTH, EXPERTS))}
    worst, dropped, rounds = 0.0, 0.0, 0.0
    for router, gate in itertools.product(ROUTERS, gates.values()):
        arrays = x, gate, weights
        expected = jax.jit(partial(with_gradients, partial(every_expert, router)))(*arrays)

        def layer(
            x: jax.Array, gate: jax.Array, weights: Any, across: Any, router: Any = router
        ) -> Any:
            more: dict[str, Any] = {"across": across}
            if reads_bias(router):
                more["bias"] = jnp.zeros(EXPERTS)
            if isinstance(router, NoisyTopK):
                more["noise_gate"] = jnp.zeros((WIDTH, EXPERTS))
            return dropless(x, router, of_rows, gate=gate, weights=weights, **more)

        layouts = [(text, rules, ()) for text, rules in LAYOUTS.items()]
        layouts += [(text, rules, "pod") for text, rules in TWO_LEVELS.items()]
        for text, rules, across in layouts:
            count = int(np.prod([int(part.split("=")[1]) for part in text.split(",")]))
            mesh = sl.make_mesh(text, devices=jax.devices()[:count])
            one = partial(layer, across=across)
            with sl.use(rules, mesh):
                found = jax.jit(partial(with_gradients, lambda *a, f=one: f(*a)[0]))(*arrays)
                _, stats = jax.jit(one)(*arrays)
            dropped += float(stats.dropped.total)
            rounds = max(rounds, float(stats.rounds.total / stats.rounds.weight))
            off = jax.tree.map(_relative, found, expected)
            worst = max(worst, *map(float, jax.tree.leaves(off)))
        print(f"{router}: {worst:.1e} so far", file=sys.stderr, flush=True)
    return {"dropped_tokens": dropped, "worst_error": worst, "rounds_max": rounds}


def _relative(found: jax.Array, expected: jax.Array) -> float:
    """The largest difference, over the largest number, or one."""
    scale = max(float(jnp.abs(expected).max()), 1)
    return float(jnp.abs(found - expected).max()) / scale


def rows_sent() -> dict[str, float]:
    """Rows that a device sends where all experts are wanted alike, over those that are needed."""
    tokens, choices, experts = SHAPES["mixtral"]
    mesh = sl.make_mesh("data=8")
    # Each expert is wanted equally often by each device.
    chosen = (jnp.arange(tokens * choices).reshape(tokens, choices)) % experts
    found = {}
    for form in ("ragged", "dense"):
        exchange = RowExchange(("data",), 8, experts, tokens, choices, form, 1.25)

        def sent(chosen: jax.Array, exchange: Any = exchange) -> tuple[jax.Array, ...]:
            plan = exchange.plan(chosen, jnp.ones(chosen.shape, bool))
            where = exchange.round(plan, 0)
            # What goes to a device itself is not sent.
            if exchange.form == "ragged":
                _, sizes, *_ = where.moves.to_experts.slices
                sizes = sizes.reshape(8, -1).sum(1)
                rows = sizes.sum() - sizes[lax.axis_index("data")]
            else:
                rows = jnp.int32(exchange.rows * 7 // 8)
            return rows[None], exchange.rounds(plan)[None], where.sizes_L

        mapped = jax.shard_map(
            sent, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False
        )
        rows, rounds, sizes = jax.jit(mapped)(jnp.tile(chosen, (8, 1)))
        assert int(rounds.max()) == 1
        needed = tokens * choices * 7 / 8
        found[f"rows_sent_ratio_{form}"] = round(float(rows.max()) / needed, 4)
        by_device = np.asarray(sizes).reshape(8, -1)
        computed = max(rows_of_tiles(groups) for groups in by_device)
        found["expert_flops_ratio_sizes"] = round(computed / (tokens * choices), 4)
    return found


def rows_across() -> dict[str, float]:
    """Rows that cross between 8 nodes, each token once for a node, by all offsets."""
    tokens, choices, experts = 1024, 8, 256
    router = SigmoidTopK(choices, groups=8, groups_taken=4)
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(8 * tokens, experts)), jnp.float32)
    chosen = router.choose(sl.experts.Seen(logits, bias=jnp.zeros(experts))).expert
    exchange = RowExchange(("pod",), 8, 8, tokens, 4, "ragged", 1.25)

    def sent(chosen: jax.Array) -> jax.Array:
        nodes, wanted = nodes_of(chosen // (experts // 8), 8, exchange.choices)
        plan, rows = exchange.plan(nodes, wanted), jnp.int32(0)
        for number in range(4):
            one = exchange.further if number else exchange
            _, sizes, *_ = one.round(plan, number).moves.to_experts.slices
            rows += sizes.sum() - sizes[lax.axis_index("pod")]
        return rows[None]

    mapped = jax.shard_map(
        sent,
        mesh=sl.make_mesh("pod=8"),
        in_specs=jax.P("pod"),
        out_specs=jax.P("pod"),
        check_vma=False,
    )
    rows = int(jax.jit(mapped)(chosen).sum())
    own = np.arange(8 * tokens) // tokens
    node = np.asarray(chosen) // (experts // 8)
    distinct = sum(len(set(of) - {mine}) for of, mine in zip(node, own, strict=True))
    direct = int((node != own[:, None]).sum())
    return {
        "rows_across_ratio": round(rows / distinct, 4),
        "rows_across_of_direct": round(rows / direct, 4),
    }


def rows_of_tiles(sizes: np.ndarray, tile: int = 512) -> int:
    """Rows of the tiles that a kernel computes, where groups share tiles once for each of them."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    tiles = -(-ends // tile) - starts // tile
    return int(tiles[sizes > 0].sum()) * tile


def buffer_ratio_max() -> float:
    """The largest buffer over an even load's rows."""
    worst = 0.0
    for shape, devices, form in itertools.product(
        SHAPES.values(), (8, 16, 64, 256), ("ragged", "dense")
    ):
        tokens, choices, experts = shape
        if experts % devices:
            continue
        exchange = RowExchange(("data",), devices, experts, tokens, choices, form, 1.25)
        worst = max(worst, exchange.rows / (tokens * choices))
    return worst


def compiled_layer(remat: bool) -> tuple[Compiled, int]:
    """A layer of Mixtral's experts on 8 devices of v5p, and the tokens of a device."""
    target = sl.Target("tpu:v5p:2x2x2")
    mesh = target.mesh("data=8")
    config = moe.mixtral_8x7b(context=4096)
    width, hidden, tokens = config.width, config.dims["mlp"], config.context

    def both(x: jax.Array, gate: jax.Array, weights: Any, gradient: jax.Array) -> Any:
        def layer(x: jax.Array, gate: jax.Array, weights: Any) -> jax.Array:
            return dropless(x, TopK(2), of_rows, gate=gate, weights=weights)[0]

        if remat:
            layer = jax.checkpoint(layer)
        y, back = jax.vjp(layer, x, gate, weights)
        return y, back(gradient)

    def shape(*dims: int, spec: Any) -> jax.ShapeDtypeStruct:
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=sharding)

    x = shape(8, tokens, width, spec=jax.P("data"))
    weights = {
        "up": shape(8, width, hidden, spec=jax.P("data")),
        "gate": shape(8, width, hidden, spec=jax.P("data")),
        "down": shape(8, hidden, width, spec=jax.P("data")),
    }
    with sl.use(sl.rules.experts, mesh):
        lowered = jax.jit(both).lower(x, shape(width, 8, spec=jax.P()), weights, x)
    return compile_for(target, mesh, lowered), tokens


def layer_figures() -> dict[str, float]:
    """Products and collectives of a layer, by the compiler."""
    compiled, tokens = compiled_layer(remat=False)
    config = moe.mixtral_8x7b()
    active = 3 * 3 * 2 * 2 * tokens * config.width * config.dims["mlp"]
    products = grouped_products(compiled.program.as_text())
    full, _ = compiled_layer(remat=True)
    return {
        "expert_flops_ratio": round(products / active, 4),
        "all_to_alls": sends_of_first_round(compiled),
        "all_to_alls_full": sends_of_first_round(full),
    }


def sends_of_first_round(compiled: Compiled) -> int:
    """How many collectives send rows, but for those in rounds that an even load does not take."""
    return sum(one.times for one in compiled.collectives if one.kind == "ragged-all-to-all")


def grouped_products(text: str) -> float:
    """FLOPs of the kernels of grouped products in the first round, of the shapes they are given."""
    total = 0.0
    for scope, made, run in Program(text).walk():
        if made.opcode != "custom-call" or not made.name.startswith(("gmm", "tgmm")):
            continue
        given = []
        for operand in made.operands:
            if operand in scope.instructions:
                given += [dims for _, dims in arrays(scope.instructions[operand].result)]
        (_, result), *_ = arrays(made.result)
        total += run.times * product_flops(result, given)
    return total


def product_flops(result: tuple[int, ...], given: list[tuple[int, ...]]) -> float:
    """Of a product of grouped rows and matrices, or of rows and gradients group by group."""
    if len(result) == 2:
        rows, columns = result
        matrices = next(dims for dims in given if len(dims) == 3)
        return 2.0 * rows * matrices[1] * matrices[2]
    _, features, columns = result
    rows = next(dims[0] for dims in given if len(dims) == 2 and dims[1] in (features, columns))
    return 2.0 * rows * features * columns


def mixtral() -> dict[str, float]:
    """The pod of `benchmarks.pods`, dropless over its capacity of 1.25."""
    pod = pods.PODS["mixtral_8x7b"]
    free = replace(pod, config=replace(pod.config, router=TopK(2)))
    found = {}
    for name, one in (("capacity", pod), ("dropless", free)):
        target = sl.Target(one.target)
        mesh = target.mesh(one.mesh)
        step, state, batch = pods.step_on(mesh, one)
        compiled = compile_for(target, mesh, step.lower(state, batch))
        text = compiled.program.as_text()
        # Kernels have no estimates: their products take what they take at the peak.
        per_second = kernel_choice.cycles_per_second(one.target)
        in_kernels = grouped_products(text) / target.chip.flops["bf16"] * per_second
        estimated = pods.cycles(text)
        found[name] = {
            "cycle": (estimated + share_of_even_load(one, mesh) * in_kernels) / 1e9,
            "cycle_full": (estimated + in_kernels) / 1e9,
            "wire": compiled.sent / 1e9,
            "temp": compiled.program.memory_analysis().temp_size_in_bytes / 1e9,
        }
        print(name, found[name], file=sys.stderr, flush=True)
    figures = {}
    for figure, value in found["dropless"].items():
        figures[f"mixtral_{figure}"] = round(value, 3)
        figures[f"mixtral_{figure}_ratio"] = round(value / found["capacity"][figure], 3)
    return figures


def share_of_even_load(pod: pods.Pod, mesh: jax.sharding.Mesh) -> float:
    """Rows of the tiles that a kernel computes of an even load, over those of its buffer.

    A kernel computes no tile without rows. Places of a capacity are multiplied whether they are
    taken or not.
    """
    config: Any = pod.config
    devices, experts = mesh.shape["expert"], config.experts
    tokens, choices = config.context, config.router.choices
    exchange = RowExchange(("expert",), devices, experts, tokens, choices, "ragged", 1.25)
    local = experts // devices
    return rows_of_tiles(np.full(local, tokens * choices // local)) / exchange.rows


def deepseek_step(mesh: jax.sharding.Mesh, layout: str) -> tuple[sl.Step, sl.State, Any]:
    """DeepSeek-V3's training step, its state and its batch, in shapes."""
    rules = sl.rules.experts if layout == "experts" else sl.rules.data
    # Eight sequences at once keep more inputs of blocks than the device has room for.
    remat = "full" if layout == "experts" else sl.Remat.offload("block_in")
    strategy = sl.Strategy(
        mesh=mesh,
        rules=rules,
        zero=3,
        precision=sl.Precision("bf16", accumulate="bf16", reduce="bf16", keep=KEPT),
        remat=remat,
        accumulate=2 if layout == "experts" else 1,
    )
    adam = optax.adamw(3e-4, b2=0.95, weight_decay=0.1, mu_dtype=jnp.bfloat16)
    config = moe.deepseek_v3(context=4096, fused_loss=True)
    make_model = lambda: moe.MoE(config, rngs=nnx.Rngs(0))  # noqa: E731
    optimizer = sl.experts.balanced(adam)
    state = sl.init(make_model, optimizer, strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((8 * mesh.size, config.context + 1), "int32")}
    return sl.train_step(moe.loss, strategy), state, batch


def deepseek() -> dict[str, float]:
    """DeepSeek-V3 on 128 chips of 7x in two layouts."""
    target = sl.Target("tpu:7x:4x4x8")
    mesh = target.mesh("data=256")
    figures = {}
    for layout in ("experts", "fsdp"):
        step, state, batch = deepseek_step(mesh, layout)
        try:
            compiled = compile_for(target, mesh, step.lower(state, batch))
        except jax.errors.JaxRuntimeError as error:
            print(f"{layout}: {' '.join(str(error).split())[:400]}", file=sys.stderr, flush=True)
            continue
        figures[f"deepseek_{layout}_hbm_gib"] = round(compiled.held / 2**30, 2)
        figures[f"deepseek_{layout}_sent_gb"] = round(compiled.sent / 1e9, 1)
        figures[f"deepseek_{layout}_compile_s"] = round(compiled.seconds, 1)
        print(figures, file=sys.stderr, flush=True)
    held = {layout: figures.get(f"deepseek_{layout}_hbm_gib") for layout in ("experts", "fsdp")}
    better = min((size, layout) for layout, size in held.items() if size is not None)[1]
    figures["deepseek_hbm_gib"] = figures[f"deepseek_{better}_hbm_gib"]
    figures["deepseek_compile_s"] = figures[f"deepseek_{better}_compile_s"]
    return figures


def trained() -> dict[str, float]:
    """Losses on held-out text over that of experts with a capacity, of three seeds."""
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.experts, clip=1.0)
    sigmoid, choice = SigmoidTopK(2), ExpertChoice(2.0, sees_later_tokens=True)
    # Two models that differ in what they drop, and in nothing else.
    balanced = replace(example.SPARSE, balance=0.01)
    configs = {
        "capacity": replace(balanced, router=TopK(2, capacity=1.25)),
        "": replace(balanced, router=TopK(2)),
        "_bias": replace(balanced, router=sigmoid, balance=1e-4, balance_bias=True),
        "_choice": replace(balanced, router=choice),
    }
    losses: dict[str, list[float]] = {name: [] for name in configs}
    for seed in range(3):
        for name, config in configs.items():
            loss, _ = example.train(config, example.STEPS, seed, strategy)
            losses[name].append(loss)
        latest = {name: round(of_seeds[-1], 4) for name, of_seeds in losses.items()}
        print(f"seed {seed}: {latest}", file=sys.stderr, flush=True)
    with_capacity = np.array(losses.pop("capacity"))
    figures = {}
    for name, of_seeds in losses.items():
        ratio = np.mean(of_seeds) / with_capacity.mean()
        figures[f"loss_ratio{name}"] = round(float(ratio), 4)
        worst = np.max(np.array(of_seeds) / with_capacity)
        figures[f"loss_ratio{name}_worst"] = round(float(worst), 4)
    return figures


PARTS = {
    "errors": errors,
    "rows": rows_sent,
    "across": rows_across,
    "buffers": lambda: {"buffer_ratio_max": buffer_ratio_max()},
    "layer": layer_figures,
    "trained": trained,
    "mixtral": mixtral,
    "deepseek": deepseek,
}
PODS = ("mixtral", "deepseek")


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="only this part")
    parser.add_argument("--trained", action="store_true", help="models that are trained, too")
    parser.add_argument("--pods", action="store_true", help="the steps on pods, too")
    arguments = parser.parse_args()
    sl.simulate_devices(8)
    figures: dict[str, float] = {}
    left_out: list[str] = []
    if not arguments.pods:
        left_out += PODS
    if not arguments.trained:
        left_out.append("trained")
    for part in arguments.only or [part for part in PARTS if part not in left_out]:
        try:
            figures |= PARTS[part]()
        except ImportError as error:
            print(f"{part}: left out. {error}", file=sys.stderr)
    bounds = {name: bound for name, bound in BOUNDS.items() if name in figures}
    report("dropless", figures, bounds, arguments.json)


if __name__ == "__main__":
    main()
