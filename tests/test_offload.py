"""State in the host's memory: the same numbers, and the bytes where they were asked for."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib._tree import named_leaves
from shardlib.compiled._memory import peak_bytes
from shardlib.step import _streamed_update
from shardlib.tracing._row_rules import MixesRowsError, Part, Rows
from shardlib.tracing._rows import evaluate_rows

RULES = sl.AxisRules(batch="data", embed=None, mlp="model", layers=None, vocab=None)
X = np.random.default_rng(0).normal(size=(32, 16)).astype("f")


def make():
    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "emb": jax.random.normal(keys[0], (16, 32)) / 8,
        "up": jax.random.normal(keys[1], (4, 32, 64)) / 8,
        "down": jax.random.normal(keys[2], (4, 64, 32)) / 8,
        "bias": jnp.zeros((4, 32)),
    }
    names = {
        "emb": ("vocab", "embed"),
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "bias": ("layers", "embed"),
    }
    return sl.annotate(model, names)


def loss_fn(model, x, rng):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"] + w["bias"], None

    stacks = {name: model[name] for name in ("up", "down", "bias")}
    h, _ = jax.lax.scan(layer, x @ model["emb"], stacks)
    # The table is used twice.
    return jnp.mean((h @ model["emb"].T - 1.0) ** 2)


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-3, 10), weight_decay=0.1),
    "lion": optax.lion(1e-3),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-3)),
    "clipped updates": optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.01)),
    "lamb": optax.lamb(1e-3),
    "adafactor": optax.adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=16),
    "muon": optax.contrib.muon(1e-3),
    "several": optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
        {"emb": "a", "up": "a", "down": "b", "bias": "b"},
    ),
    "masked": optax.masked(
        optax.adam(1e-3), {"emb": True, "up": True, "down": False, "bias": True}
    ),
    "by layer": sl.optimizers.per_layer_and_expert(
        optax.lamb(1e-3), lambda path, parameter: 0 if path == "emb" else 1
    ),
}


@cache
def three_steps(optimizer, mesh, zero, accumulate=1, offload=None, nudged=False):
    """The state after three steps, and the last loss; `nudged`, of other examples by rounding."""
    devices = int(np.prod([int(axis.split("=")[1]) for axis in mesh.split(",")]))
    strategy = sl.Strategy(
        mesh=sl.make_mesh(mesh, devices=jax.devices()[:devices]),
        rules=RULES,
        zero=sl.Zero(zero, small=64),
        accumulate=accumulate,
        clip=1.0,
        offload=offload,
    )
    state = sl.init(make, OPTIMIZERS[optimizer], strategy)
    step = sl.train_step(loss_fn, strategy)
    for _ in range(3):
        state, metrics = step(state, np.nextafter(X, np.inf) if nudged else X)
    return state, metrics["loss"].item()


def check_same(optimizer, mesh, zero, accumulate=1, offload="all"):
    expected, loss = three_steps(optimizer, mesh, zero, accumulate)
    found, found_loss = three_steps(optimizer, mesh, zero, accumulate, offload)
    nudged = expected
    # Its iteration amplifies rounding: by how much is measured.
    if optimizer == "muon":
        nudged, _ = three_steps(optimizer, mesh, zero, accumulate, nudged=True)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    leaves = dict(named_leaves((found.params, found.opt_state)))
    nudged_leaves = jax.tree.leaves((nudged.params, nudged.opt_state))
    wanted = named_leaves((expected.params, expected.opt_state))
    for (path, leaf), other in zip(wanted, nudged_leaves, strict=True):
        scale = np.abs(leaf).max(initial=1e-30)
        atol = max(3e-6, 4 * np.abs(other - leaf).max(initial=0) / scale)
        np.testing.assert_allclose(leaves[path] / scale, leaf / scale, atol=atol, err_msg=path)
    return found


def on_host(tree):
    """The paths of the arrays that are in the host's memory."""
    return {path for path, leaf in named_leaves(tree) if leaf.sharding.memory_kind == "pinned_host"}


LARGE = {"emb", "up", "down"}


@pytest.mark.representative("muon", "by layer")
@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=pytest.mark.long) for name in OPTIMIZERS],
)
def test_any_optimizer_moves_state_on_the_host_as_on_the_device(optimizer):
    state = check_same(optimizer, "data=1,model=1", 0)
    assert on_host(state.params) == LARGE
    for path, leaf in named_leaves(state.opt_state):
        # Counts and what belongs to the bias are small.
        follows = leaf.shape in {(16, 32), (4, 32, 64), (4, 64, 32)}
        assert (path in on_host(state.opt_state)) == follows, path


@pytest.mark.representative("data=4,model=2-3-2-all", "data=8,model=1-2-1-parameters")
@pytest.mark.long
@pytest.mark.sentinel("data=8,model=1-3-1-optimizer")
@pytest.mark.parametrize(
    ("mesh", "zero", "accumulate", "offload"),
    [
        ("data=4,model=2", 3, 2, "all"),
        ("data=8,model=1", 0, 1, "all"),
        ("data=8,model=1", 1, 2, "all"),
        ("data=8,model=1", 2, 1, "parameters"),
        pytest.param("data=8,model=1", 3, 1, "optimizer", marks=pytest.mark.sentinel),
        ("data=4,model=2", 1, 1, "optimizer"),
    ],
)
def test_on_every_mesh(mesh, zero, accumulate, offload):
    state = check_same("adamw", mesh, zero, accumulate, offload)
    assert on_host(state.params) == (set() if offload == "optimizer" else LARGE)
    assert bool(on_host(state.opt_state)) == (offload != "parameters")


BY_HOST = sl.Offload(parameters=True, update="host")


@pytest.mark.representative(
    "clipped updates-data=8,model=1-3-1-offload2", "masked-data=8,model=1-2-1-offload3"
)
@pytest.mark.long
@pytest.mark.sentinel("adamw-data=4,model=2-3-2-offload0")
@pytest.mark.parametrize(
    ("optimizer", "mesh", "zero", "accumulate", "offload"),
    [
        pytest.param("adamw", "data=4,model=2", 3, 2, BY_HOST, marks=pytest.mark.sentinel),
        ("adamw", "data=4,model=2", 1, 1, sl.Offload(update="host")),
        ("clipped updates", "data=8,model=1", 3, 1, BY_HOST),
        ("masked", "data=8,model=1", 2, 1, BY_HOST),
        ("several", "data=1,model=1", 0, 1, BY_HOST),
        ("adafactor", "data=1,model=1", 0, 1, BY_HOST),
        ("lion", "data=8,model=1", 0, 1, BY_HOST),
    ],
)
def test_the_host_updates_what_it_has(optimizer, mesh, zero, accumulate, offload):
    state = check_same(optimizer, mesh, zero, accumulate, offload)
    assert on_host(state.params) == (LARGE if offload.parameters else set())
    assert on_host(state.opt_state)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["all", "optimizer", "parameters"])
def test_a_gpu_moves_state_on_the_host_as_on_itself(offload):
    with jax.default_matmul_precision("highest"):
        state = check_same("adamw", "data=1,model=1", 0, offload=offload)
    assert on_host(state.params) == (set() if offload == "optimizer" else LARGE)
    assert bool(on_host(state.opt_state)) == (offload != "parameters")


@pytest.mark.gpu
def test_the_host_of_a_gpu_updates_what_it_has():
    with jax.default_matmul_precision("highest"):
        state = check_same("adamw", "data=1,model=1", 0, offload=BY_HOST)
    assert on_host(state.params) == LARGE and on_host(state.opt_state)


@pytest.mark.long
def test_an_update_that_reads_other_shards_is_refused():
    with pytest.raises(ValueError, match="`emb`, of shape .*no dim of it has rows"):
        three_steps("muon", "data=8,model=1", 3, 1, BY_HOST)
    # Each layer is orthogonalized by itself, but the layers' rows are split.
    with pytest.raises(ValueError, match="the mesh splits dim 1 into 8 parts"):
        three_steps("by layer", "data=8,model=1", 3, 1, BY_HOST)


def updated(optimizer, params, bytes_at_a_time, monkeypatch):
    """How each parameter's arrays are updated: in loops of how many iterations, with how many
    totals; None for arrays that are copied whole.
    """
    monkeypatch.setattr(_streamed_update, "BYTES_AT_A_TIME", bytes_at_a_time)
    ways = {}
    find = _streamed_update._Streaming._loop

    def found(self, owner, positions):
        loop = find(self, owner, positions)
        ways[owner.path] = loop and (loop.function.dim, loop.function.times, len(loop.totals))
        return loop

    monkeypatch.setattr(_streamed_update._Streaming, "_loop", found)
    strategy = sl.Strategy(
        mesh=sl.make_mesh("data=1", devices=jax.devices()[:1]),
        rules=RULES | sl.AxisRules(mlp=None),
        zero=sl.Zero(0, small=64),
        offload="all",
    )
    state = sl.init(params, optimizer, strategy, abstract=True)
    sl.train_step(loss_fn, strategy).trace(state, jax.ShapeDtypeStruct(X.shape, "float32"))
    return ways


def test_arrays_are_updated_some_rows_at_a_time(monkeypatch):
    # Four float32 arrays of 2048 elements for each layer.
    one_layer = 4 * 4 * 2048
    ways = updated(OPTIMIZERS["adam"], make, one_layer, monkeypatch)
    assert ways["up"] == ways["down"] == (0, 4, 0)
    ways = updated(OPTIMIZERS["adam"], make, 2 * one_layer, monkeypatch)
    assert ways["up"] == (0, 2, 0)


def test_a_norm_of_all_rows_is_a_total_of_its_own(monkeypatch):
    ways = updated(OPTIMIZERS["clipped updates"], make, 4 * 4 * 2048, monkeypatch)
    assert ways["up"] == (0, 4, 1)
    # A norm of the gradient, which is on the device, is computed there.
    ways = updated(OPTIMIZERS["clipped"], make, 4 * 4 * 2048, monkeypatch)
    assert ways["up"] == (0, 4, 0)


def test_what_mixes_rows_is_copied_whole(monkeypatch):
    ways = updated(OPTIMIZERS["muon"], make, 4 * 4 * 2048, monkeypatch)
    # Each layer is orthogonalized by itself, the table as a whole.
    assert ways["emb"] is None
    assert ways["up"][:2] == (0, 4)
    # So is each layer updated that an optimizer is mapped over.
    ways = updated(OPTIMIZERS["by layer"], make, 4 * 4 * 2048, monkeypatch)
    assert ways["up"] == ways["down"] == (0, 4, 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / (jnp.sqrt(jnp.mean(x**2, (1, 2), keepdims=True)) + 1),
        lambda x: jnp.where(jnp.arange(6.0)[:, None, None] > 2, x, 2 * x),
        lambda x: jnp.einsum("lab,lcb->lac", x, x) @ x,
        lambda x: jnp.swapaxes(x.reshape(6, 20), 0, 1).T.reshape(6, 4, 5)[:, ::-1],
        lambda x: jnp.concatenate([jnp.cumsum(x, 1), jnp.sort(x, 2)], 1)[:, 2:6],
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ jnp.ones((5, 5)) + x), x),
        lambda x: jax.lax.scan(lambda c, y: (c + y[:, None], c), x, jnp.moveaxis(x, 1, 0))[0],
        lambda x: jax.lax.cond(x.shape[0] > 3, lambda: x, lambda: jnp.zeros_like(x)),
        lambda x: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x))[1],
        lambda x: jax.nn.relu(x) + jnp.linspace(0, 1, 6)[:, None, None] * jnp.ones((6, 4, 5)),
    ],
)
def test_rows_of_a_function(function):
    x = jax.random.normal(jax.random.key(1), (6, 4, 5))
    traced = jax.make_jaxpr(function)(x)
    whole = function(x)
    for start in (0, 2, 4):
        (part,) = evaluate_rows(
            traced.jaxpr, traced.consts, [Part(x[start : start + 2], 0)], Rows(start, 2, 6)
        )
        assert part.dim == 0
        np.testing.assert_allclose(part.value, whole[start : start + 2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / jnp.sum(x),
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.flip(x, 0),
        lambda x: x[1:],
        lambda x: x.reshape(12, 10),
        lambda x: jnp.einsum("lab,mab->lm", x, x),
        lambda x: jnp.einsum("lab,l->ab", x, jnp.ones(6)),
        lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0] * 0, x)[1],
        lambda x: jax.lax.cond(x[0, 0, 0] > 0, lambda: x, lambda: 2 * x),
        lambda x: x + jnp.moveaxis(jnp.broadcast_to(x[:, :1, :1], (6, 6, 5)), 0, 1)[:, :4],
        lambda x: x[jnp.array([1, 0, 2, 3, 4, 5])],
    ],
)
def test_a_function_that_mixes_rows_is_refused(function):
    x = jnp.ones((6, 4, 5))
    traced = jax.make_jaxpr(function)(x)
    with pytest.raises(MixesRowsError):
        evaluate_rows(traced.jaxpr, traced.consts, [Part(x[:2], 0)], Rows(0, 2, 6))


@pytest.mark.long
def test_a_state_on_the_host_evaluates_saves_and_resumes(tmp_path):
    state, _ = three_steps("adam", "data=8,model=1", 3, 1, "all")
    plain, _ = three_steps("adam", "data=8,model=1", 3, 1)
    evaluate = sl.evaluation(loss_fn, state.layout.strategy)
    expected = sl.evaluation(loss_fn, plain.layout.strategy)(plain, [X])
    assert evaluate(state, [X])["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        restored = checkpoints.restore(state).state
    assert on_host(restored) == on_host(state)
    for (path, found), leaf in zip(
        named_leaves(restored.opt_state), jax.tree.leaves(state.opt_state), strict=True
    ):
        np.testing.assert_array_equal(found, leaf, err_msg=path)
    # A model is there to be computed with.
    model = state.model
    assert jax.jit(lambda w: w * 2)(model["up"]).shape == (4, 32, 64)
    again = state.with_weights(model)
    assert on_host(again.params) == LARGE


@pytest.mark.long("Interleaved")
@pytest.mark.parametrize("schedule", ["Interleaved", "ZBV", "VHalf", "VMin", "DualPipeV"])
def test_layers_of_a_pipeline_on_the_host_are_saved_in_order_and_resumed(schedule, tmp_path):
    strategy = sl.Strategy(
        mesh="stage=2,data=2,model=2",
        rules=RULES | sl.rules.pipeline,
        pipeline=getattr(sl.pipeline, schedule)(2, 4),
        zero=sl.Zero(1, small=64),
        offload="optimizer",
    )
    state = sl.init(make, optax.adam(1e-3), strategy)
    assert on_host(state.opt_state) >= {"0/mu/up", "0/nu/up"}
    # Moments of zeros have no order: these are as the weights, which do.
    adam, *others = state.opt_state
    moment = jax.device_put(state.params["up"], adam.mu["up"].sharding)
    state = state.replaced(opt_state=(adam._replace(mu=adam.mu | {"up": moment}), *others))
    in_order = make()["up"].value
    assert not np.array_equal(moment, in_order)
    np.testing.assert_array_equal(state.model["up"], in_order)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        here = checkpoints.restore(sl.init(make, optax.adam(1e-3), strategy, abstract=True)).state
        alone = sl.Strategy(mesh="data=4,model=2", rules=RULES)
        there = checkpoints.restore(sl.init(make, optax.adam(1e-3), alone, abstract=True)).state
    assert on_host(here.opt_state) == on_host(state.opt_state)
    jax.tree.map(np.testing.assert_array_equal, here.opt_state, state.opt_state)
    np.testing.assert_array_equal(there.opt_state[0].mu["up"], in_order)


@pytest.mark.parametrize(("offload", "zero"), [("parameters", 0), ("all", 3)])
def test_a_scalar_goes_to_the_host_too(offload, zero):
    def scaled(model, x, rng):
        return jnp.mean((x @ model["w"] * model["scale"] - 1.0) ** 2)

    plain = {"mesh": "data=8", "rules": sl.rules.data, "zero": sl.Zero(zero, small=0)}
    model = {"w": jnp.ones((16, 8)), "scale": jnp.float32(2.0)}
    found = []
    for options in ({}, {"offload": offload}):
        strategy = sl.Strategy(**plain, **options)
        state = sl.init(lambda: model, optax.sgd(0.1), strategy)
        state, _ = sl.train_step(scaled, strategy)(state, X)
        found.append(state.params)
    assert on_host(found[1]) == {"w", "scale"}
    for name, wanted in found[0].items():
        np.testing.assert_allclose(found[1][name], wanted, rtol=1e-6)


def test_what_cannot_be_offloaded_is_refused():
    plain = {"mesh": "data=8", "rules": sl.rules.data}
    with pytest.raises(ValueError, match="leaves everything on the device"):
        sl.Offload(optimizer=False)
    with pytest.raises(ValueError, match="fetch the optimizer's state from the device"):
        sl.Offload(optimizer=False, parameters=True, update="host")
    with pytest.raises(ValueError, match="'device', 'host'"):
        sl.Offload(update="cpu")
    with pytest.raises(ValueError, match="'optimizer', 'parameters', 'all'"):
        sl.Strategy(**plain, offload="gradients")
    with pytest.raises(ValueError, match="overlap"):
        sl.Strategy(**plain, offload="all", exchange=sl.Exact(overlap=True))
    with pytest.raises(ValueError, match="each stage uses its layers in every tick"):
        sl.Strategy(
            mesh="stage=2,data=4",
            rules=sl.rules.data | sl.rules.pipeline,
            offload="parameters",
            pipeline=sl.pipeline.OneFOneB(stages=2, microbatches=4),
        )
    strategy = sl.Strategy(**plain, offload="optimizer", exchange=sl.collectives.OneBit("data"))
    with pytest.raises(ValueError, match="of averaged gradients"):
        sl.init(make, sl.optimizers.onebit_adam(1e-3, freeze=2), strategy)


# Programs for TPUs


def wide(layers):
    """A model whose layers are larger than what is small."""
    shapes = {"up": (layers, 256, 512), "down": (layers, 512, 256), "emb": (512, 256)}
    names = {
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "emb": ("vocab", "embed"),
    }
    return sl.annotate({name: jnp.zeros(shape) for name, shape in shapes.items()}, names)


def wide_loss(model, tokens, rng):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    stacks = {name: model[name] for name in ("up", "down")}
    h, _ = jax.lax.scan(layer, model["emb"][tokens], stacks)
    return jnp.mean((h @ model["emb"].T).astype("float32") ** 2)


@cache
def program(target, zero, offload, layers=4):
    """The compiled step of the wide model, with its state."""
    target = sl.Target(target)
    strategy = sl.Strategy(
        mesh=target.mesh(f"data={target.size}"),
        rules=RULES | sl.AxisRules(mlp=None),
        zero=zero,
        precision=sl.Precision("bf16", reduce="bf16"),
        offload=offload,
    )
    state = sl.init(lambda: wide(layers), optax.adam(1e-3), strategy, abstract=True)
    step = sl.train_step(wide_loss, strategy)
    return step.lower(state, jax.ShapeDtypeStruct((8, 16), "int32")).compile(), state


def bytes_on_host(state):
    """The bytes of a state that a device's share of the host's memory takes."""
    total = 0
    for leaf in jax.tree.leaves(state):
        if leaf.sharding.memory_kind == "pinned_host":
            total += np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


@pytest.mark.representative("tpu:v5e:2x2-3-offload3")
@pytest.mark.sentinel("tpu:v5e:2x2-3-all")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("target", "zero", "offload"),
    [
        pytest.param("tpu:v5e:2x2", 3, "all", marks=pytest.mark.sentinel),
        ("tpu:v5e:2x2", 1, "optimizer"),
        ("tpu:v6e:1x1", 0, "all"),
        ("tpu:v5e:2x2", 3, BY_HOST),
        ("tpu:v6e:1x1", 0, sl.Offload(update="host")),
    ],
)
def test_a_program_has_on_the_host_what_was_asked_for(target, zero, offload):
    compiled, state = program(target, zero, offload)
    memory = compiled.memory_analysis()
    expected = bytes_on_host(state)
    arrays = 3 if offload in ("all", BY_HOST) else 2
    assert expected == arrays * 4 * (8 * 256 * 512 + 512 * 256) // (4 if zero else 1)
    assert memory.host_argument_size_in_bytes == expected
    # The new state takes the place of the old one, and nothing else is there.
    assert memory.host_alias_size_in_bytes == expected
    assert memory.host_temp_size_in_bytes == 0
    # What is on the host takes nothing of the device.
    on_device = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert peak_bytes(compiled, "tpu") < 1.1 * on_device + memory.generated_code_size_in_bytes
    text = compiled.as_text()
    if isinstance(offload, str):
        # Rows are copied by the side of the computation.
        assert "dynamic-slice-start" in text
        assert "dynamic-update-slice-start" in text
    else:
        # The host reads and writes its own memory, and no state is copied.
        assert 'execution_thread="host"' in text
        assert "dynamic-update-slice-start" not in text
        copies = [line for line in text.splitlines() if " copy-start(" in line and "S(5)" in line]
        assert not copies


@pytest.mark.tpu_compiler
def test_what_the_device_holds_of_the_state_does_not_grow_with_layers(monkeypatch):
    # A layer has some two million bytes of moments, parameters and gradients.
    monkeypatch.setattr(_streamed_update, "BYTES_AT_A_TIME", 2**21)
    held = []
    for layers in (4, 8):
        compiled, _ = program.__wrapped__("tpu:v6e:1x1", 0, "all", layers)
        memory = compiled.memory_analysis()
        # Gradients, in bfloat16, are on the device, and rows of the state next to them.
        gradients = 2 * (layers * 2 * 256 * 512 + 512 * 256)
        held.append(memory.argument_size_in_bytes + memory.temp_size_in_bytes - gradients)
    assert held[1] < held[0] + 4 * 256 * 512


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("offload", ["all", BY_HOST])
def test_a_plan_shows_the_hosts_memory(offload):
    target = sl.Target("tpu:v5e:2x2")
    rules = RULES | sl.AxisRules(mlp=None)
    strategy = sl.Strategy(mesh=target.mesh("data=4"), rules=rules, zero=3, offload=offload)
    state = sl.init(lambda: wide(4), optax.adam(1e-3), strategy, abstract=True)
    step = sl.train_step(wide_loss, strategy)
    plan = sl.plan(step, state, jax.ShapeDtypeStruct((8, 16), "int32"), target)
    assert plan.memory.host_bytes == bytes_on_host(state)
    assert "of the host's memory" in str(plan)
