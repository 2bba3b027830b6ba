"""Activations in the host's memory: the same numbers, the bytes that were named, copied ahead."""

import dataclasses
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals

import shardlib as sl
from models import gpt, moe
from shardlib.compiled._host_copies import host_copies
from shardlib.layouts._host import is_on_host, to_device, to_host
from shardlib.tracing._copied_ahead import with_copies
from shardlib.tracing._jaxpr import every_equation

LAYERS, WIDTH, ROWS = 6, 32, 16
RULES = sl.AxisRules(batch="data", embed=None, mlp="model", layers=None)
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f")
BOTH = sl.Remat.offload("block_in", "hidden")


def make(layers=LAYERS, width=WIDTH):
    keys = jax.random.split(jax.random.key(0))
    model = {
        "up": jax.random.normal(keys[0], (layers, width, 2 * width)) / width**0.5,
        "down": jax.random.normal(keys[1], (layers, 2 * width, width)) / width**0.5,
    }
    names = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
    return sl.annotate(model, names)


@sl.remat
def block(x, w):
    x = sl.checkpoint_name(x, "block_in")
    hidden = sl.checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
    return x + jnp.tanh(hidden @ w["down"])


def loss_fn(model, x, rng):
    stacks = {name: model[name] for name in ("up", "down")}
    y, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, stacks)
    return jnp.mean(y.astype("float32") ** 2)


def loss_one_by_one(model, x, rng):
    for layer in range(LAYERS):
        x = block(x, {name: model[name][layer] for name in ("up", "down")})
    return jnp.mean(x**2)


def stepped(loss=loss_fn, mesh="data=1,model=1", **options):
    """The loss and the parameters after a step."""
    devices = int(np.prod([int(axis.split("=")[1]) for axis in mesh.split(",")]))
    mesh = sl.make_mesh(mesh, devices=jax.devices()[:devices])
    strategy = sl.Strategy(mesh=mesh, rules=RULES, **options)
    state = sl.init(make, optax.sgd(0.1), strategy)
    state, metrics = sl.train_step(loss, strategy)(state, X)
    return metrics["loss"].item(), jax.tree.map(np.asarray, state.params)


@cache
def plain():
    return stepped()


ZERO = {"zero": sl.Zero(3, small=0), "mesh": "data=4,model=2"}
CASES = {
    "one device": {},
    "one by one": {"loss": loss_one_by_one},
    "data": {"mesh": "data=8,model=1"},
    "stage 1 microbatches": {
        "mesh": "data=8,model=1", "zero": sl.Zero(1, small=0), "accumulate": 2,
    },
    "stage 3": ZERO,
    "stage 3 microbatches": ZERO | {"accumulate": 2},
    "products": ZERO | {"remat": sl.Remat.offload("block_in") | sl.Remat(products="all")},
    "layers": ZERO | {
        "remat": sl.Remat.layers(
            (2, "full"), (2, BOTH), rest=sl.Remat.save("hidden") | sl.Remat.offload("block_in"),
        ),
    },
    "state on the host": ZERO | {"offload": "all"},
    "by offload": ZERO | {
        "remat": "full", "offload": sl.Offload(parameters=True, activations=("block_in",)),
    },
}  # fmt: skip


@pytest.mark.representative(
    "one by one", "stage 3 microbatches", "products", "state on the host", "by offload"
)
@pytest.mark.long
@pytest.mark.sentinel("stage 3")
@pytest.mark.parametrize("case", CASES)
def test_activations_on_the_host_change_no_number(case):
    loss, params = stepped(**{"remat": BOTH} | CASES[case])
    expected_loss, expected = plain()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [loss_fn, loss_one_by_one])
def test_activations_on_the_host_of_a_gpu_change_no_number(loss):
    with jax.default_matmul_precision("highest"):
        found_loss, params = stepped(loss, remat=BOTH)
        expected_loss, expected = stepped(loss)
    np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)


@pytest.mark.gpu
def test_a_gpu_spares_what_is_on_the_host():
    """Of the program for the GPU that is there: the bytes on the host, and those it spares."""

    def memory(remat):
        mesh = sl.make_mesh("data=1,model=1", devices=jax.devices()[:1])
        strategy = sl.Strategy(mesh=mesh, rules=RULES, remat=remat)
        state = sl.init(lambda: make(width=1024), optax.sgd(0.1), strategy)
        x = np.zeros((4096, 1024), "f")
        return sl.train_step(loss_fn, strategy).lower(state, x).compile().memory_analysis()

    found, on_device = memory(BOTH), memory(sl.Remat.save("hidden"))
    size = 4096 * 1024 * 4
    assert found.host_temp_size_in_bytes == LAYERS * 3 * size
    # Two layers' are on the device, of six.
    spared = on_device.temp_size_in_bytes - found.temp_size_in_bytes
    assert spared >= (LAYERS - 2) * 3 * size


GPT = gpt.tiny(layers=4, width=64, heads=4, context=32, norm="rms", mlp="swiglu", bias=False)
TOKENS = np.random.default_rng(0).integers(0, GPT.vocab, (ROWS, 33), dtype=np.int32)
STREAM = (GPT.layers, ROWS, 32, GPT.width)


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_decoder_with_its_inputs_on_the_host_computes_the_same():
    def stepped(**options):
        strategy = sl.Strategy(**options)
        state = sl.init(lambda: gpt.GPT(GPT, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
        state, metrics = sl.train_step(gpt.loss, strategy)(state, {"tokens": TOKENS})
        return metrics["loss"], jax.tree.map(np.asarray, state.params)

    loss, params = stepped(mesh="data=8,model=1", rules=sl.rules.data)
    remat = sl.Remat.offload("block_in", "mlp_up") | sl.Remat.save("context")
    rules = sl.rules.data | sl.rules.tensor_sequence
    found = stepped(mesh="data=2,model=4", rules=rules, remat=remat, zero=sl.Zero(3, small=0))
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found[1], params)


def kept(remat, config=GPT):
    """Shapes of what a decoder keeps for its backward pass, on the device and on the host."""
    experts = isinstance(config, moe.MoEConfig)
    make, loss_of = (moe.MoE, moe.loss) if experts else (gpt.GPT, gpt.loss)

    def loss(params):
        total = loss_of(nnx.merge(graph, params), {"tokens": TOKENS})
        return (total[0] if experts else total).total

    with sl.use(sl.rules.data, sl.make_mesh("data=8"), remat=remat):
        graph, params = nnx.split(nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0))))
        residuals = saved_residuals(loss, params)
    places = {space: Counter() for space in jax.memory.Space}
    for aval, _ in residuals:
        places[aval.memory_space][aval.shape] += 1
    return places[jax.memory.Space.Device], places[jax.memory.Space.Host]


def test_the_host_keeps_what_is_named_and_the_device_no_longer_does():
    device, host = kept("full")
    assert device[STREAM] == 1 and not host
    device, host = kept(sl.Remat.offload("block_in"))
    assert device[STREAM] == 0 and host == {STREAM: 1}
    # The other names are where they were.
    saved, _ = kept(sl.Remat.save("query", "mlp_up"))
    mixed, host = kept(sl.Remat.save("query") | sl.Remat.offload("mlp_up", "block_in"))
    hidden = (*STREAM[:3], GPT.dims["mlp"])
    assert host == {STREAM: 1, hidden: 1}
    assert saved - mixed == {STREAM: 1, hidden: 1} and not mixed - saved


def test_every_model_names_the_inputs_of_its_blocks():
    experts = moe.tiny(layers=2, width=64, heads=4, context=32, every=2)
    _, host = kept(sl.Remat.offload("block_in"), experts)
    assert host == {(1, *STREAM[1:]): 1}


def test_gathered_weights_are_never_copied_to_the_host():
    strategy = sl.Strategy(mesh="data=4,model=2", rules=RULES, remat=BOTH, zero=sl.Zero(3, small=0))
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    traced = sl.train_step(loss_fn, strategy).trace(state, X)
    shapes = Counter()
    for equation in every_equation(traced.jaxpr.jaxpr):
        on_host = equation.outvars[0].aval.memory_space == jax.memory.Space.Host
        if equation.primitive.name == "device_put" and on_host:
            shapes[equation.outvars[0].aval.shape] += 1
    # Of the examples of a device; over the automatic axis they are whole in the trace.
    assert set(shapes) == {(ROWS // 4, WIDTH), (ROWS // 4, 2 * WIDTH)}


def test_a_function_takes_copies_of_what_it_only_copies():
    def inner(x, y):
        return to_device(x) * 2 + y

    def function(arrays):
        x, y = arrays
        z = jax.jit(inner)(x, jax.checkpoint(inner)(x, 1.0))
        return {"z": z, "y": y, "copied": to_device(y)}

    @jax.jit
    def run(x, y):
        arrays = to_host(x), to_host(y)
        return with_copies(function, arrays, [to_device(x) + 1, to_device(y) + 1])

    results = run(jnp.ones(3), jnp.ones(2))
    # `y` is returned, so that it is taken as it is.
    np.testing.assert_array_equal(results["z"], np.full(3, 9.0))
    np.testing.assert_array_equal(results["copied"], np.ones(2))
    assert is_on_host(results["y"])


def test_values_say_once_where_an_activation_is_kept():
    united = sl.Remat.offload("b") | sl.Remat.save("c") | sl.Remat.offload("a", "b")
    assert united == sl.Remat(("c",), offloaded=("b", "a", "a"))
    assert hash(united) == hash(sl.Remat(("c",), offloaded=("a", "b")))
    given = {"mesh": "data=8", "rules": sl.rules.data}
    offload = sl.Offload(activations=("context",))
    by_offload = sl.Strategy(**given, remat="minimal", offload=offload).kept_by_blocks
    assert by_offload.offloaded == ("context",) and "context" not in by_offload.names
    assert by_offload.names == tuple(
        name for name in sl.Strategy(**given, remat="minimal").kept_by_blocks.names
        if name != "context"
    )  # fmt: skip
    full = sl.Strategy(**given, remat="full", offload=offload).kept_by_blocks
    assert full == sl.Remat.offload("context")


@pytest.mark.parametrize(
    "refused, message",
    [
        (lambda: sl.Remat.offload(), "without a name offloads nothing"),
        (lambda: sl.Remat.save("a") | sl.Remat.offload("a"), "`a` is to be kept on the device"),
        (lambda: sl.Remat(offloaded="a"), "offloaded"),
        (lambda: sl.Remat.slots(2) | sl.Remat.offload("a"), "Take one of the two"),
        (lambda: sl.Offload(activations="a"), "activations"),
    ],
)
def test_values_refuse_what_is_in_two_places(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()


@pytest.mark.parametrize(
    "remat, message",
    [
        ("none", 'all activations on the device: recompute blocks, `remat="full"`'),
        (sl.Remat.layers((1, "full"), rest="none"), "say it there"),
        (sl.Remat.budget("1GiB"), "what fits: say there what may go"),
        ("sublinear", "Take one of the two"),
    ],
    ids=str,
)
def test_activations_to_offload_need_blocks_that_keep_names(remat, message):
    with pytest.raises(ValueError, match=message):
        sl.Strategy(
            mesh="data=8", rules=sl.rules.data, remat=remat,
            offload=sl.Offload(activations=("hidden",)),
        )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"remat": sl.Remat.offload("hiden")},
        {"remat": sl.Remat.offload("hidden", "hiden")},
        {"remat": "full", "offload": sl.Offload(False, activations=("hiden",))},
        {"remat": sl.Remat.layers((1, sl.Remat.offload("hiden")), rest="full")},
    ],
    ids=["remat", "beside another", "offload", "layers"],
)
def test_a_name_that_no_activation_has_is_refused(options):
    with pytest.raises(ValueError, match="offloads `hiden`.*called `block_in`, `hidden`"):
        stepped(**options)


def test_pipelines_refuse_activations_on_the_host():
    with pytest.raises(ValueError, match="offloads `block_in`.*buffers of the device"):
        sl.Strategy(
            mesh="stage=2,data=4", rules=sl.rules.data | sl.rules.pipeline,
            pipeline=sl.pipeline.OneFOneB(2, 2), remat=sl.Remat.offload("block_in"),
        )  # fmt: skip


# Programs for TPUs

# Stacks that are larger than what a chip has beside its memory.
DEEP, WIDE, MANY = 8, 1024, 4096


@cache
def program(target, remat, zero=0):
    """The compiled step of a model in bfloat16, with `MANY` rows on each device."""
    target = sl.Target(target)
    strategy = sl.Strategy(
        mesh=target.mesh(f"data={target.size}"),
        rules=RULES | sl.AxisRules(mlp=None),
        zero=sl.Zero(zero, small=0),
        precision="bf16",
        remat=remat,
    )
    state = sl.init(lambda: make(DEEP, WIDE), optax.sgd(0.1), strategy, abstract=True)
    rows = jax.ShapeDtypeStruct((MANY * target.size, WIDE), "bfloat16")
    return sl.train_step(loss_fn, strategy).lower(state, rows).compile()


@pytest.mark.representative("inputs")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "target, zero, names",
    [
        ("tpu:v5e:1x1", 0, ("block_in",)),
        ("tpu:v6e:2x2", 3, ("block_in", "hidden")),
    ],
    ids=["inputs", "inputs and hidden"],
)
def test_a_program_keeps_on_the_host_what_was_named(target, zero, names):
    on_host = program(target, sl.Remat.offload(*names), zero)
    # Inputs are kept without a name, too.
    on_device = program(target, sl.Remat.save(*set(names) - {"block_in"}), zero)
    sizes = {"block_in": 2 * MANY * WIDE, "hidden": 2 * MANY * 2 * WIDE}
    size = sum(sizes[name] for name in names)
    memory, before = on_host.memory_analysis(), on_device.memory_analysis()
    assert memory.host_temp_size_in_bytes == DEEP * size
    # There are two layers' on the device: the one that is read, and the next one.
    assert before.temp_size_in_bytes - memory.temp_size_in_bytes >= (DEEP - 2) * size
    assert f"bf16[{DEEP},{MANY},{WIDE}]" in on_device.as_text()
    for line in on_host.as_text().splitlines():
        made = line.partition(f"= bf16[{DEEP},{MANY},{WIDE}]")[2]
        assert not made or "S(5)" in made.partition(" ")[0], line


@pytest.mark.tpu_compiler
def test_inputs_are_copied_while_other_layers_are_computed():
    copies = host_copies(program("tpu:v5e:1x1", sl.Remat.offload("block_in")))
    in_loops = [copy for copy in copies if copy.times == DEEP]
    # One to the host and one back, and before the backward pass the input of the last block.
    assert [copy.size for copy in in_loops] == 2 * [2 * MANY * WIDE]
    assert all(copy.overlapped for copy in in_loops)
    assert len(copies) == 3


@pytest.mark.tpu_compiler
def test_a_plan_says_whether_the_host_has_room():
    target = sl.Target("tpu:v5e:1x1")
    rules = RULES | sl.AxisRules(mlp=None)
    strategy = sl.Strategy(mesh=target.mesh("data=1"), rules=rules, remat=BOTH)
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    plan = sl.plan(sl.train_step(loss_fn, strategy), state, jnp.asarray(X), target)
    on_host = LAYERS * 4 * ROWS * 3 * WIDTH
    assert plan.memory.host_bytes >= on_host and plan.fits
    assert "of the host's memory, of 44.7 GiB for each device" in str(plan)
    small = dataclasses.replace(plan, chip=dataclasses.replace(plan.chip, host_bytes=on_host - 1))
    assert not small.fits and "DOES NOT FIT" in str(small)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("mesh", ["simulated", "of the target"])
@pytest.mark.parametrize("offload", ["optimizer", "parameters", "all"])
def test_a_plan_for_absent_gpus_refuses_a_state_on_the_host(offload, mesh):
    target = sl.Target("gpu:h100:1x1x8")
    devices = sl.make_mesh("data=8") if mesh == "simulated" else target.mesh("data=8")
    rules = RULES | sl.AxisRules(mlp=None)
    strategy = sl.Strategy(mesh=devices, rules=rules, remat=BOTH, offload=offload)
    state = sl.init(make, optax.adam(0.1), strategy, abstract=True)
    batch = jax.ShapeDtypeStruct(X.shape, "float32")
    with pytest.raises(ValueError, match=f"offload='{offload}'.*GPUs that are not there"):
        sl.plan(sl.train_step(loss_fn, strategy), state, batch, target)


@pytest.mark.gpu_compiler
def test_a_plan_for_absent_gpus_has_activations_on_the_host():
    target = sl.Target("gpu:h100:1x1x8")
    rules = RULES | sl.AxisRules(mlp=None)
    strategy = sl.Strategy(mesh=target.mesh("data=8"), rules=rules, remat=BOTH)
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    batch = jax.ShapeDtypeStruct(X.shape, "float32")
    plan = sl.plan(sl.train_step(loss_fn, strategy), state, batch, target)
    rows = {one.name: one for one in plan.activations}
    assert {one.state for one in rows.values()} >= {"on the host"}
    # Of each of two rows on a device, the input of a layer and what is twice as wide.
    assert plan.memory.host_bytes == LAYERS * (ROWS // 8) * (WIDTH + 2 * WIDTH) * 4
