"""The plan of a step: every byte has a kind, every collective a line, whatever machine it is
for.
"""

import concurrent.futures
import dataclasses
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from benchmarks._steps import HAND_WRITTEN
from models import gpt
from shardlib import testing
from shardlib.compiled._compile import _words
from shardlib.compiled._memory import KINDS, Memory
from shardlib.machine._chips import CHIPS
from shardlib.planning._advice import advice_for

WIDTH, LAYERS, ROWS = 256, 3, 64
MATRIX = WIDTH * WIDTH * 4
CONFIG = gpt.tiny(layers=4, width=512, heads=8, context=256, vocab=2048)
HERE = Path(__file__).name

TARGETS = [
    "cpu:8",
    pytest.param("tpu:v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("gpu:h200:1x1x8", marks=pytest.mark.gpu_compiler),
]


def loss_of_layers(model, x, rng):
    def layer(x, w):
        return jnp.sin(x @ w), None

    return jnp.mean(jax.lax.scan(layer, x, model["w"])[0] ** 2)


def layers_step(mesh, **options):
    """Layers of one matrix each, trained by Adam over `data`."""
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, nonfinite="count", **options)
    state = sl.init(
        lambda: {"w": jnp.zeros((LAYERS, WIDTH, WIDTH))}, optax.adam(1e-3), strategy, abstract=True
    )
    batch = jax.ShapeDtypeStruct((strategy.device_mesh.size * ROWS, WIDTH), "float32")
    return sl.train_step(loss_of_layers, strategy), state, batch


def decoder_step(mesh, rules, **options):
    # Where a step may be skipped, the CPU's compiler copies the optimizer's state and has gradients
    # in its place.
    strategy = sl.Strategy(mesh=mesh, rules=rules, nonfinite="count", **options)
    state = sl.init(
        lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.adamw(1e-3), strategy, abstract=True
    )
    return (
        sl.train_step(gpt.loss, strategy),
        state,
        {"tokens": jax.ShapeDtypeStruct((32, 257), "int32")},
    )


@pytest.fixture(scope="module")
def on_cpu():
    return sl.plan(*layers_step("data=8"), "cpu:8")


def test_plan_knows_the_memory_of_arguments_exactly(on_cpu):
    kinds = on_cpu.memory.kinds
    assert kinds["parameters"] == LAYERS * MATRIX
    assert kinds["optimizer state"] == 2 * LAYERS * MATRIX + 4  # and the count
    assert kinds["inputs"] == ROWS * WIDTH * 4
    assert kinds["other state"] in (8, 16)  # two counts, and the key where the compiler keeps it
    assert on_cpu.memory.aliased_bytes >= 3 * LAYERS * MATRIX


def test_plan_attributes_the_heap_by_kind(on_cpu):
    kinds, most = on_cpu.memory.kinds, on_cpu.memory.most
    # Forward, each layer keeps its input and the derivative of the sine.
    assert most["activations"] == pytest.approx(2 * LAYERS * ROWS * WIDTH * 4, rel=0.01)
    # All matrices' gradients, before and after they are added up.
    assert most["gradients"] in (LAYERS * MATRIX, 2 * LAYERS * MATRIX)
    assert kinds["unattributed"] == 0
    pieces = sum(piece.size for piece in on_cpu.memory.pieces)
    assert pieces + kinds["fragmentation"] == on_cpu.memory.heap_bytes


@pytest.mark.parametrize(
    "name", ["head's", 'the "head"', "a\\b", "注意", "a, metadata={b}", "a\nb"]
)
def test_plan_knows_parameters_by_whatever_name(name):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {name: jnp.ones((8, 16))}, optax.adam(1e-2), strategy)
    step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model[name]) ** 2), strategy)
    kinds = sl.plan(step, state, jax.ShapeDtypeStruct((16, 8), "float32")).memory.kinds
    assert (kinds["parameters"], kinds["optimizer state"]) == (512, 1028)


@pytest.mark.representative("2-full-cpu:8", "2-full-gpu:h200:1x1x8")
@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("accumulate, remat", [(1, "none"), (2, "full")])
def test_plan_memory_kinds_add_up_to_the_compilers_total(target, accumulate, remat):
    if target.startswith("tpu") and accumulate == 1:
        pytest.skip("a minute's compilation: microbatches and recomputation are the harder case")
    mesh = sl.Target(target).mesh("data=2,model=4")
    step, state, batch = decoder_step(
        mesh, sl.rules.data | sl.rules.tensor, accumulate=accumulate, remat=remat
    )
    found = sl.plan(step, state, batch, target)
    memory = found.memory
    analysis = (
        step.lower(state, batch)
        .compile(compiler_options=sl.Target(target).compiler_options)
        .memory_analysis()
    )
    total = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    if target.startswith("tpu"):  # whose temporaries count fragmentation twice
        assert total + memory.heap_bytes + memory.kinds["program"] == pytest.approx(
            memory.total_bytes, rel=1e-3
        )
        assert memory.heap_bytes <= analysis.temp_size_in_bytes + 2**20
    else:
        assert total + analysis.temp_size_in_bytes == pytest.approx(memory.total_bytes, rel=1e-3)
        assert memory.stated_bytes == total + analysis.temp_size_in_bytes
    assert memory.unattributed < 0.05
    parameters = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(state.params)
    )
    assert parameters <= memory.kinds["parameters"] < 1.02 * parameters  # tiles of a TPU are padded
    assert memory.most["gradients"] <= (1 + accumulate) * 1.1 * parameters + 2**20
    if not target.startswith("tpu"):  # on whose chips some of this fits, beside the memory
        assert memory.most["gradients"] >= parameters
    if remat == "full" and not target.startswith("tpu"):
        stream = 32 // 2 // accumulate * 256 * 512 * 4
        assert CONFIG.layers * stream <= memory.most["activations"] < (CONFIG.layers + 8) * stream


@pytest.mark.representative(
    "accumulation-tpu:v5e:2x4",
    "gathered_in_the_loop-cpu:8",
    "gathered_in_the_loop-gpu:h200:1x1x8",
    "optimizer_in_shards-gpu:h200:1x1x8",
    "data_and_tensor-tpu:v5e:2x4",
    "recomputed-tpu:v5e:2x4",
    "sequence_parallel-gpu:h200:1x1x8",
    "ring-gpu:h200:1x1x8",
    "all_to_all-cpu:8",
    "all_to_all-gpu:h200:1x1x8",
    "nested_loops-gpu:h200:1x1x8",
    "hierarchical-cpu:8",
    "hierarchical-tpu:v5e:2x4",
)
@pytest.mark.long(
    "data_parallel-cpu:8",
    "gathered_in_the_loop-cpu:8",
    "tensor_parallel-cpu:8",
    "data_and_tensor-cpu:8",
    "all_to_all-cpu:8",
    "hierarchical-cpu:8",
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("step", HAND_WRITTEN, ids=lambda step: step.name)
def test_plan_of_handwritten_steps_sends_the_bytes_of_theory(target, step):
    """The benchmark holds all to theory at sizes that fill memory; here those that every compiler
    compiles at once.
    """
    if target.startswith("tpu") and step.name not in ("accumulation", "nested_loops"):
        pytest.skip("the benchmark compiles it")
    if step.dcn and target.startswith("gpu"):
        target = "gpu:h200:2x1x4"
    mesh = sl.Target(target).mesh(step.mesh, dcn=step.dcn)
    with jax.default_matmul_precision("highest"):
        found = testing.assert_collectives(*step.build(mesh), sends=step.sends, target=target)
    assert all(
        line.rpartition(":")[0].endswith("_steps.py")
        for one in found.collectives
        for line in one.sources
    )
    assert found.memory.unattributed < 0.05
    slow = {one.axes for one in found.collectives if one.slow}
    assert slow == ({("pod",)} if step.dcn and target.startswith("gpu") else set())


@pytest.mark.tpu_compiler
def test_plan_marks_collectives_between_slices_as_slow():
    target = "tpu:v5e:2x2:slices=2"
    step = layers_step(sl.Target(target).mesh("pod=2,data=4", dcn="pod"))[0]
    rules = sl.rules.data | sl.AxisRules(batch=("pod", "data"))
    strategy = dataclasses.replace(step.strategy, rules=rules)
    state = sl.init(
        lambda: {"w": jnp.zeros((LAYERS, WIDTH, WIDTH))}, optax.adam(1e-3), strategy, abstract=True
    )
    found = sl.plan(
        sl.train_step(loss_of_layers, strategy),
        state,
        jax.ShapeDtypeStruct((8 * ROWS, WIDTH), "float32"),
        target,
    )
    assert found.slow_axes == ("pod",)
    assert any(one.slow for one in found.collectives)
    assert "slow" in str(found) and "on the slow network: pod" in str(found)


@pytest.mark.long
def test_plan_collectives_name_the_users_source_line(on_cpu):
    [exchange] = on_cpu.collectives
    # The step's own: no line of a user's asks for it.
    assert any("_sums.py" in line for line in exchange.sources)
    mesh = sl.Target("cpu:8").mesh("data=2,model=4")
    found = sl.plan(*decoder_step(mesh, sl.rules.data | sl.rules.tensor), "cpu:8")
    of_model = [
        one for one in found.collectives if one.axes == ("model",) and one.sent_bytes > 1024
    ]
    lines = {line for one in of_model for line in one.sources}
    assert lines
    assert all("models/" in line for line in lines)


def test_plan_keeps_a_real_state_and_refuses_another_device_count():
    """The state may hold real arrays; they are not donated."""
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.zeros((LAYERS, WIDTH, WIDTH))}, optax.adam(1e-3), strategy)
    step = sl.train_step(loss_of_layers, strategy)
    batch = np.zeros((8 * ROWS, WIDTH), "f")
    found = sl.plan(step, state, batch)
    assert found.target == "8 cpu devices" and found.memory.kinds["parameters"] == LAYERS * MATRIX
    assert not state.step.is_deleted()
    with pytest.raises(ValueError, match="`data=8` is 8 devices, and `cpu:4` has 4"):
        sl.plan(step, state, batch, "cpu:4")


@pytest.mark.sentinel
@pytest.mark.tpu_compiler
def test_plan_of_a_step_for_local_devices_may_target_a_tpu():
    step, state, batch = layers_step("data=8")
    found = sl.plan(step, state, batch, "tpu:v5e:2x4")
    assert found.chip.name == "v5e" and found.fits and found.devices == 8
    # The loss, its weight, and two numbers of what is not finite.
    assert sum(one.operand_bytes for one in found.collectives) == LAYERS * MATRIX + 16


def test_plan_remarks_on_arrays_the_partitioner_gathers_whole():
    mesh = sl.Target("cpu:8").mesh("a=2,b=2,c=2")
    lay_out = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    @jax.jit
    def step(state, x):
        y = lay_out(jnp.sin(x), "a", "b")
        return lay_out(jnp.concatenate([y, y[:, ::-1]], 1).reshape(48, 8), ("c", "a"))

    found = sl.plan(
        step,
        {},
        jax.ShapeDtypeStruct((16, 12), "float32", sharding=NamedSharding(mesh, P())),
        "cpu:8",
    )
    assert any("gathered f32[8,6] whole" in remark and HERE in remark for remark in found.remarks)
    assert "what the compiler remarked" in str(found)


def test_plan_accepts_plain_jitted_functions():
    mesh = sl.Target("cpu:8").mesh("data=8")
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    state = {"params": jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32", sharding=replicated)}
    rows = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), "float32", sharding=split)

    @jax.jit
    def step(state, rows):
        gradient = jax.grad(lambda w: jnp.mean((rows @ w) ** 2))(state["params"])
        return {"params": state["params"] - 0.1 * gradient}

    found = testing.assert_collectives(
        step, state, rows, target="cpu:8", sends={("all-reduce", "data"): MATRIX * 2 * 7 // 8}
    )
    assert (
        found.memory.kinds["parameters"] == MATRIX
        and found.memory.kinds["inputs"] == ROWS * WIDTH * 4
    )
    with pytest.raises(ValueError, match="are not on `cpu:4`"):
        sl.plan(step, state, rows, "cpu:4")
    with pytest.raises(ValueError, match=r"takes a step that can be traced.*got function"):
        sl.plan(lambda state, rows: state, state, rows)


def plain(f, rows=ROWS, **state):
    """The plan of a plain function of a replicated state and split rows."""
    mesh = sl.Target("cpu:8").mesh("data=8")
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    state = {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=replicated)
        for name, shape in state.items()
    }
    batch = jax.ShapeDtypeStruct((8 * rows, WIDTH), "float32", sharding=split)
    return sl.plan(jax.jit(f), state, batch, "cpu:8")


def test_plan_of_an_evaluation_counts_no_gradients():
    def evaluate(state, x):
        def layer(x, w):
            return jnp.tanh(jnp.sort(x, axis=-1) @ w), None

        return jnp.mean(jax.lax.scan(layer, jnp.sort(x) * 2, state["params"])[0])

    found = plain(evaluate, params=(LAYERS, WIDTH, WIDTH)).memory
    assert (
        not found.kinds["gradients"]
        and not found.most["gradients"]
        and not found.most["activations"]
    )
    assert found.kinds["temporaries"] >= ROWS * WIDTH * 4


def test_plan_counts_nothing_before_the_loss_as_gradients():
    def step(state, x):
        x = jnp.sort(x, axis=0)  # of the whole batch
        return {
            "params": state["params"] - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["params"])
        }

    found = plain(step, rows=8 * ROWS, params=(WIDTH, WIDTH)).memory
    assert 0 < found.most["gradients"] <= 2 * MATRIX + 1024


def test_plan_distinguishes_state_from_batch_by_argument_position():
    # Of whose state nothing is used, and whose batch has names like a state's.
    def step(state, batch):
        return state["opt_state"], jnp.sin(batch["params"]), batch["opt_state"]

    mesh = sl.Target("cpu:8").mesh("data=8")
    one = jax.ShapeDtypeStruct((WIDTH,), "float32", sharding=NamedSharding(mesh, P()))
    names = ("params", "opt_state", "other")
    found = sl.plan(
        jax.jit(step), dict.fromkeys(names, one), dict.fromkeys(names, one), "cpu:8"
    ).memory.kinds
    assert (found["parameters"], found["optimizer state"], found["inputs"]) == (
        0,
        WIDTH * 4,
        2 * WIDTH * 4,
    )


def test_plan_attributes_memory_of_optimizers_with_branches():
    """A conditional whose branches take different operands, each of which is one branch's alone."""
    step, state, batch = layers_step("data=8")
    optimizer = optax.apply_if_finite(optax.adam(1e-3), 3)
    state = sl.init(
        lambda: {"w": jnp.zeros((LAYERS, WIDTH, WIDTH))}, optimizer, step.strategy, abstract=True
    )
    found = sl.plan(step, state, batch).memory
    assert found.kinds["optimizer state"] >= 2 * LAYERS * MATRIX and not found.kinds["unattributed"]
    assert LAYERS * MATRIX <= found.most["gradients"] <= 2.1 * LAYERS * MATRIX


def test_plan_in_threads_keeps_standard_error_intact(capfd):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(
            pool.map(
                lambda _: plain(
                    lambda state, x: jnp.mean(x @ state["params"]), params=(WIDTH, WIDTH)
                ),
                range(4),
            )
        )
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def test_plan_is_the_same_for_a_program_in_jaxs_compilation_cache(tmp_path):
    before = {name: jax.config.values[name] for name in CACHE}
    for name, value in CACHE.items():
        jax.config.update(name, value if value is not None else str(tmp_path))
    try:
        plans = [
            plain(lambda state, x: jnp.mean(x @ state["params"]), params=(WIDTH, WIDTH))
            for _ in range(2)
        ]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert plans[0].memory == plans[1].memory


CACHE = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def test_plan_refuses_steps_that_need_concrete_values():
    def choosing(model, x, rng):
        return jnp.mean(x @ model["w"][0]) if jnp.sum(x) > 0 else 0.0

    big = jnp.ones((1024, 1024))

    def closing(model, x, rng):
        return jnp.mean((x @ model["w"][0]) ** 2) + jnp.mean(big)

    step, state, batch = layers_step("data=8")
    with pytest.raises(ValueError, match="needs values while it is traced"):
        sl.plan(sl.train_step(choosing, step.strategy), state, batch)
    with pytest.raises(
        ValueError, match=r"closes over concrete arrays, float32\[1024, 1024\] \(4.0 MiB\)"
    ):
        sl.plan(sl.train_step(closing, step.strategy), state, batch)
    hidden = jax.jit(lambda x: jnp.mean(x) + jnp.sum(big))
    with pytest.raises(ValueError, match="closes over concrete arrays"):
        sl.plan(
            sl.train_step(lambda model, x, rng: hidden(x @ model["w"][0]), step.strategy),
            state,
            batch,
        )
    with pytest.raises(ValueError, match=rf"{HERE}:\d+, and a plan has only shapes"):
        sl.plan(
            sl.train_step(lambda model, x, rng: jnp.mean(x[x > 0]), step.strategy), state, batch
        )
    with pytest.raises(ValueError, match=r"takes a `sl.Target` or its text.*got 3"):
        sl.plan(step, state, batch, 3)
    with pytest.raises(ValueError, match="takes the `State` that `sl.init` makes; got dict"):
        sl.plan(step, {"w": 1}, batch)


@pytest.mark.tpu_compiler
def test_plan_that_does_not_fit_is_a_complete_report():
    target = sl.Target("tpu:v5e:1x1")
    strategy = sl.Strategy(mesh=target.mesh("data=1"), rules=sl.rules.data)
    state = sl.init(
        lambda: {"w": jnp.zeros((4, 1024, 1024))}, optax.adam(1e-3), strategy, abstract=True
    )
    found = sl.plan(
        sl.train_step(loss_of_layers, strategy),
        state,
        jax.ShapeDtypeStruct((2**20, 1024), "float32"),
        target,
    )
    assert not found.fits and found.refusal and found.memory.total_bytes > found.chip.usable_bytes
    assert found.memory.unattributed < 0.05
    text = str(found)
    assert f"the compiler refuses it\n  {found.refusal.splitlines()[0]}\n" in text
    assert "hbm" in found.refusal.lower() and found.as_dict()["refusal"] == found.refusal
    assert (
        "DOES NOT FIT" in text
        and "mark the blocks of the model with `sl.remat`" in " ".join(text.split())
        and "too much" in text
        and HERE in text
    )
    assert found.advice[1].startswith(("Take fewer examples", "Recompute"))


@pytest.mark.tpu_compiler
def test_plan_raises_when_the_compiler_refuses_the_program():
    """A kernel that wants more of the chip's own memory than there is: no plan, and no question of
    fitting.
    """
    from jax.experimental import pallas as pl

    target = sl.Target("tpu:v5e:1x1")
    whole = NamedSharding(target.mesh("data=1"), P())
    rows = jax.ShapeDtypeStruct((16384, 4096), "float32", sharding=whole)

    def kernel(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    step = jax.jit(
        lambda state, x: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    )
    with pytest.raises(ValueError, match="The compiler refuses this program: .*vmem"):
        sl.plan(step, {}, rows, target)


@pytest.mark.tpu_compiler
def test_plan_quotes_the_compilers_refusal_and_the_users_line(monkeypatch):
    """XLA's own fusion that wants more of the chip's memory than there is: which, how much, the
    limit, and the line.
    """
    target = sl.Target("tpu:v5e:1x1")
    monkeypatch.setattr(sl.Target, "compiler_options", {"xla_tpu_scoped_vmem_limit_kib": 128})
    rows = jax.ShapeDtypeStruct(
        (8, 1024, 1024), "float32", sharding=NamedSharding(target.mesh("data=1"), P())
    )
    step = jax.jit(lambda state, x: jax.nn.softmax(x @ x))
    with pytest.raises(
        ValueError, match="The compiler refuses this program: E1001: .*[Vv]mem"
    ) as refused:
        sl.plan(step, {}, rows, target)
    said = str(refused.value)
    assert re.search(r"f32\[8,1024,1024\].*limit 128.0K exceeded scoped vmem limit by", said)
    assert re.search(rf"The line: .*{HERE}:\d+$", said) and len(said) < 2000


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("", "no reason was given"),
        ("INTERNAL: bad shape", "bad shape"),
        (
            "RESOURCE_EXHAUSTED: E1: Oom:\nRan out.\n=====\n  @ 0x7f00 main\n\nUsed 2 of 1. - \n",
            "E1: Oom: Ran out.\nUsed 2 of 1.",
        ),
        ("Ran out: one\ntwo", "Ran out: one\ntwo"),
    ],
)
def test_plan_shortens_and_cleans_compiler_errors(error, words):
    assert _words(error) == words
    long = _words(error + "\n" + "buffer " * 10_000)
    assert (
        len(long) <= 1500
        and long.endswith("...")
        and words.partition("\n")[0] in long + words * (not error)
    )


def advised(target_mesh="data=8", **options):
    """What is advised where a step that has something of every kind does not fit."""
    strategy = sl.Strategy(mesh=target_mesh, **{"rules": sl.rules.data, "remat": "full", **options})
    kinds = dict.fromkeys(KINDS, 2**30)
    memory = Memory(kinds, dict(kinds), (), 0, 0, 0, None)
    return "\n".join(advice_for(memory, CHIPS["v5e"], strategy))


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({}, {1, 2}),
        ({"zero": 1}, {2, 3}),
        ({"zero": sl.Zero(1, small=0)}, {2, 3}),
        ({"zero": 2}, {3}),
        ({"zero": 3}, set()),
        ({"target_mesh": "data=1,model=8", "rules": sl.rules.data | sl.rules.tensor}, set()),
        ({"exchange": sl.collectives.OneBit("data")}, set()),
        ({"rules": sl.rules.data | sl.rules.pipeline, "target_mesh": "data=4,stage=2",
          "pipeline": sl.pipeline.GPipe(2, 4)}, {1}),
        ({"rules": sl.rules.data | sl.rules.pipeline, "target_mesh": "data=4,stage=2", "zero": 1,
          "pipeline": sl.pipeline.GPipe(2, 4)}, set()),
    ],
)  # fmt: skip
def test_plan_advice_proposes_only_what_is_possible_and_not_yet_done(options, stages):
    text = advised(**options)
    assert {int(stage) for stage in re.findall(r"zero=(\d)", text)} == stages
    assert ("splits them already" in text) == bool(options.get("zero"))
    assert ("accumulate=" in text) == ("pipeline" not in options)


def test_plan_is_frozen_and_converts_to_text_and_json(on_cpu):
    with pytest.raises(dataclasses.FrozenInstanceError):
        on_cpu.name = "other"
    text = str(on_cpu)
    for words in (
        "memory per device",
        "optimizer state",
        "communication per step",
        "all over data",
        "nothing was run",
    ):
        assert words in text
    again = json.loads(json.dumps(on_cpu.as_dict()))
    assert again["memory"]["kinds"] == on_cpu.memory.kinds and again["usable_bytes"] is None
    assert again["sent_bytes"] == [
        {"axes": ["data"], "slow": False, "bytes": on_cpu.sent_bytes[("data",), False]}
    ]


def sums_over(axes, where="once"):
    """The plan of a function that sums over axes of a mesh, with what a device sends each time."""
    mesh = sl.make_mesh("data=2,fsdp=4")
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, P()))
    total = jax.shard_map(
        lambda z: jax.lax.psum(z, axes), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    calls = {
        "once": total,
        "loop": lambda x: jax.lax.while_loop(lambda c: c[0] < 1e6, lambda c: total(c) + 1, x),
        "branch": lambda x: jax.lax.cond(x[0] > 0, total, lambda y: y, x),
    }
    plan = sl.plan(jax.jit(lambda state, batch: calls[where](state)), x, x)
    return plan, plan.collectives[0].sent_bytes


def test_assertions_take_axes_in_any_order_once_and_only_those_of_the_mesh():
    both, sent = sums_over(("data", "fsdp"))
    for axes in (("data", "fsdp"), ("fsdp", "data")):
        assert testing.assert_collectives(both, sends={("all-reduce", axes): sent}) is both
    one, sent = sums_over("data")
    right = {("all-reduce", ("data",)): sent}
    for sends, message in (
        ({("all-reduce", "data"): 999} | right, "has the all-reduce over data twice"),
        ({("all-gather", "fspd"): 0} | right, "`fspd` of `all-gather` is no axis of the mesh"),
        ({("all-reduce", ("data", "data")): 0}, "each once"),
        ({("all-reduce", ()): 0}, "one axis or several"),
        ({("all-reduce", None): 0}, r"sends\[\('all-reduce', None\)\]"),
    ):
        with pytest.raises(ValueError, match=message):
            testing.assert_collectives(one, sends=sends)


@pytest.mark.parametrize(
    ("where", "words"), [("loop", "in a loop of unknown length"), ("branch", "in a branch")]
)
def test_assertions_say_where_the_number_of_runs_is_not_known(where, words):
    plan, sent = sums_over("data", where)
    assert testing.assert_collectives(plan, sends={("all-reduce", "data"): sent}) is plan
    with pytest.raises(AssertionError, match=f"because of .*test_plan.py:.* {words}"):
        testing.assert_collectives(plan, sends={("all-reduce", "data"): 1})


@pytest.mark.gpu_compiler
def test_plan_names_the_line_of_a_callback():
    def loss(model, x, rng):
        jax.debug.print("{}", x[0])
        return jnp.mean((x @ model["w"]) ** 2)

    target = sl.Target("gpu:h200:1x1x8")
    strategy = sl.Strategy(mesh=target.mesh("data=8"), rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.ones((8, 8))}, optax.sgd(0.1), strategy, abstract=True)
    batch = jax.ShapeDtypeStruct((16, 8), "float32")
    with pytest.raises(ValueError, match=r"calls back into Python at .*test_plan\.py:\d+, by"):
        sl.plan(sl.train_step(loss, strategy), state, batch, target)


def test_plan_assertions_show_the_difference_on_failure(on_cpu):
    with pytest.raises(AssertionError) as failure:
        testing.assert_collectives(on_cpu, sends={("all-gather", "data"): 8})
    text = str(failure.value)
    assert re.search(r"all-gather +data +8 +0 +-8\n", text)
    assert "+1,376,284" in text and "_sums.py" in text  # 2 x 7/8 of the gradients and of four sums
    with pytest.raises(AssertionError, match="gradients .* 1,000 .*"):
        testing.assert_memory(on_cpu, at_most={"gradients": 1000, "total": 2**30})
    assert testing.assert_memory(on_cpu, at_most={"total": 2**30}) is on_cpu
    assert testing.assert_collectives(on_cpu, sends={}, ignore_below=2**30) is on_cpu
    with pytest.raises(ValueError, match="`all-sum` is no kind of collective"):
        testing.assert_collectives(on_cpu, sends={("all-sum", "data"): 8})
    with pytest.raises(ValueError, match="`heap` is no kind of memory"):
        testing.assert_memory(on_cpu, at_most={"heap": 8})


@pytest.mark.tpu_compiler
def test_plan_counts_offloaded_arrays_as_host_memory():
    """What is offloaded lies in the host's memory, and is counted there."""
    target = sl.Target("tpu:v5e:1x1")
    mesh = target.mesh("data=1")
    rows = jax.ShapeDtypeStruct((4096, 1024), "float32", sharding=NamedSharding(mesh, P()))
    weights = {
        "params": jax.ShapeDtypeStruct(
            (8, 1024, 1024), "float32", sharding=NamedSharding(mesh, P())
        )
    }
    keep = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(params, x):
        def layer(x, w):
            return jnp.tanh(checkpoint_name(x, "x") @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer, policy=keep), x, params)[0])

    step = jax.jit(
        lambda state, x: {"params": state["params"] - jax.grad(loss)(state["params"], x)}
    )
    found = sl.plan(step, weights, rows, target)
    assert found.memory.host_bytes >= 8 * 4096 * 1024 * 4
    assert "of the host's memory" in str(found)
