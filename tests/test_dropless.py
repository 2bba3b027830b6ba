"""A layer of experts that drops nothing, against one device that computes every expert."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from machines import compile_for, mesh_on

import shardlib as sl
from models import moe as decoder
from shardlib.experts import TopK, _rows, dropless
from shardlib.experts._rows import RowExchange

P = jax.P
BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS, CHOICES = 8, 4, 8, 16, 8, 2
RULES = sl.rules.experts
TENSOR = RULES | sl.rules.tensor
BOTH = sl.rules.data | sl.AxisRules(experts=("data", "expert"))
MESHES = {
    "one device": ("data=1", RULES),
    "two experts each": ("data=4", RULES),
    "one expert each": ("data=8", RULES),
    "tensor": ("data=2,model=4", TENSOR),
    "tensor, sequences": ("data=2,context=2,model=2", TENSOR | sl.rules.context("ring")),
    "pods": ("pod=2,data=4", RULES | sl.AxisRules(batch=("pod", "data"))),
    "pods of experts": (
        "pod=2,data=2,model=2",
        TENSOR | sl.AxisRules(batch=("pod", "data"), experts=("pod", "data")),
    ),
    "no axis of the batch": ("data=2,model=4", RULES | sl.AxisRules(experts="model")),
    "one of two axes of the batch": ("data=2,expert=4", BOTH),
}


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = drawn(BATCH, LENGTH, WIDTH)
WEIGHTS = {
    "up": drawn(EXPERTS, WIDTH, HIDDEN, seed=1),
    "gate": drawn(EXPERTS, WIDTH, HIDDEN, seed=2),
    "down": drawn(EXPERTS, HIDDEN, WIDTH, seed=3),
}
GATES = {
    "drawn": drawn(WIDTH, EXPERTS, seed=4),
    # All logits are equal, and all tokens go to the first experts.
    "all to the same": jnp.zeros((WIDTH, EXPERTS)),
}


def mesh_of(text):
    count = int(np.prod([int(part.split("=")[1]) for part in text.split(",")]))
    return sl.make_mesh(text, devices=jax.devices()[:count])


def experts(weights, x, groups):
    names = ("act_embed", "act_mlp")
    inward = [weights["up"], weights["gate"]]
    up, gate = sl.kernels.grouped_matmul(x, inward, groups, names=names)
    h = jax.nn.silu(gate) * up
    return sl.kernels.grouped_matmul(h, weights["down"], groups, names=names[::-1])


def layer(x, gate, weights, router=None, **options):
    router = router or TopK(CHOICES)
    return dropless(x, router, experts, gate=gate, weights=weights, **options)


def plain(x, gate, weights):
    """Every expert of every token, of which a token takes those that it wants."""
    largest, chosen = lax.top_k(x @ gate, CHOICES)
    wanted = jax.nn.one_hot(chosen, EXPERTS) * jax.nn.softmax(largest)[..., None]
    up = jnp.einsum("bsm,emf->bsef", x, weights["up"])
    h = up * jax.nn.silu(jnp.einsum("bsm,emf->bsef", x, weights["gate"]))
    y = jnp.einsum("bsef,efm->bsem", h, weights["down"])
    return jnp.einsum("bsem,bse->bsm", y, wanted.sum(-2))


def with_gradients(function, *arrays):
    """The outputs, and the gradients of a sum in which each counts differently."""
    y, back = jax.vjp(function, *arrays)
    return y, back(jnp.broadcast_to(jnp.arange(1.0, y.shape[-1] + 1), y.shape))


def assert_near(found, expected, tolerance=1e-6):
    def check(a, b):
        scale = max(float(np.abs(b).max()), 1)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)

    jax.tree.map(check, found, expected)


@pytest.mark.representative(
    "two experts each-all to the same",
    "tensor, sequences-drawn",
    "pods of experts-drawn",
    "no axis of the batch-all to the same",
)
@pytest.mark.long
@pytest.mark.sentinel(
    "one device-all to the same",
    "tensor-drawn",
)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("mesh", MESHES)
def test_outputs_and_gradients_equal_one_device(mesh, gate):
    text, rules = MESHES[mesh]
    arrays = X, GATES[gate], WEIGHTS
    expected = with_gradients(plain, *arrays)
    with sl.use(rules, mesh_of(text)):
        found = jax.jit(partial(with_gradients, lambda *a: layer(*a)[0]))(*arrays)
        _, stats = jax.jit(layer)(*arrays)
    assert_near(found, expected)
    assert float(stats.dropped.total) == 0
    assert float(stats.load.weight) == BATCH * LENGTH * CHOICES


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("devices", [2, 8])
def test_rounds_are_as_many_as_the_fullest_pair_of_devices_needs(devices, gate):
    with sl.use(RULES, mesh_of(f"data={devices}")):
        _, stats = jax.jit(layer)(X, GATES[gate], WEIGHTS)
    chosen = np.asarray(lax.top_k(X @ GATES[gate], CHOICES)[1]).reshape(devices, -1)
    of_device = EXPERTS // devices
    of_pairs = [np.bincount(row // of_device, minlength=devices) for row in chosen]
    room = _rows._room(BATCH * LENGTH * CHOICES // devices**2, 1.25)
    further = -(-room // _rows.FURTHER_ROUNDS)
    left = max(np.max(of_pairs) - room, 0)
    assert float(stats.rounds.total) == 1 + np.ceil(left / further)


def test_an_even_load_takes_one_round():
    x = jnp.tile(jnp.eye(EXPERTS)[None], (8, 1, 1))
    with sl.use(RULES, mesh_of("data=4")):
        _, stats = jax.jit(partial(layer, router=TopK(1)))(x, jnp.eye(EXPERTS), WEIGHTS)
    assert float(stats.rounds.total) == 1


@pytest.mark.parametrize("devices", [1, 4])
def test_bytes_are_counted_of_rows_that_leave_their_device(devices):
    real = jnp.asarray(np.random.default_rng(5).random((BATCH, LENGTH)) < 0.6)
    with sl.use(RULES, mesh_of(f"data={devices}")):
        _, stats = jax.jit(layer)(X, GATES["drawn"], WEIGHTS, real=real)
    chosen = np.asarray(lax.top_k(X @ GATES["drawn"], CHOICES)[1])
    home = np.arange(BATCH)[:, None, None] // (BATCH // devices)
    leaves = (chosen // (EXPERTS // devices) != home) & np.asarray(real)[..., None]
    # There and back, in float32.
    assert float(stats.sent_within.total) == leaves.sum() * 2 * WIDTH * 4
    assert float(stats.sent_within.weight) == real.sum()
    assert set(stats.sending) == {"rounds", "sent_within"}


def test_padding_goes_to_no_expert():
    real = jnp.asarray(np.random.default_rng(5).random((BATCH, LENGTH)) < 0.6)
    x = jnp.where(real[..., None], X, jnp.nan)
    expected = plain(X, GATES["drawn"], WEIGHTS) * real[..., None]
    with sl.use(RULES, mesh_of("data=4")):
        y, stats = jax.jit(layer)(x, GATES["drawn"], WEIGHTS, real=real)
    assert_near(y, expected)
    assert float(stats.load.weight) == CHOICES * int(real.sum())


@pytest.mark.parametrize("devices", [1, 4])
def test_what_experts_make_of_rows_of_no_expert_is_added_to_no_token(devices):
    """Of padding and of choices that are not wanted there are such rows, on one device too."""
    real = jnp.asarray(np.random.default_rng(5).random((BATCH, LENGTH)) < 0.6)
    weights, router, options = WEIGHTS["up"][..., :WIDTH], sl.experts.Top2(), {"real": real}
    options["key"] = jax.random.key(0)

    def in_rows(bias, x, gate):
        def of_rows(weights, x, groups):
            return sl.kernels.grouped_matmul(x, weights, groups) + bias

        limitless = replace(router, capacity=None)
        return dropless(x, limitless, of_rows, gate=gate, weights=weights, **options)[0]

    def in_places(bias, x, gate):
        def of_places(weights, x):
            return x @ weights + bias

        return sl.experts.moe(
            x, replace(router, capacity=8.0), of_places, gate=gate, weights=weights, **options
        )[0]

    arrays = jnp.ones(()), X, GATES["drawn"]
    with sl.unsharded():
        expected = jax.jit(partial(with_gradients, in_places))(*arrays)
    with sl.use(RULES, mesh_of(f"data={devices}")):
        found = jax.jit(partial(with_gradients, in_rows))(*arrays)
    assert not found[0][~np.asarray(real)].any()
    assert_near(found, expected)


@pytest.mark.parametrize("layer", ["moe", "dropless"])
def test_layers_in_a_shard_map_that_checks_what_differs_have_gradients(layer):
    """The gate and the bias are whole on every device, and the tokens are not."""
    router, weights = sl.experts.SigmoidTopK(CHOICES), WEIGHTS["up"][..., :WIDTH]
    bias = jnp.linspace(0.0, 0.1, EXPERTS)

    def total(x, gate, bias, weights):
        options = {"gate": gate, "bias": bias, "weights": weights}
        with sl.unsharded():
            if layer == "moe":
                y, _ = sl.experts.moe(x, router, lambda w, x: x @ w, **options)
            else:
                product = lambda w, x, groups: sl.kernels.grouped_matmul(x, w, groups)
                y, _ = dropless(x, router, product, **options)
        return (y**2).sum()

    def over_devices(*arrays):
        def of_device(*arrays):
            return lax.psum(total(*arrays), "data")

        specs = (P("data"), P(), P(), P())
        mesh = mesh_of("data=2")
        return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=P())(*arrays)

    arrays = X, GATES["drawn"], bias, weights
    found = jax.jit(jax.grad(over_devices, (0, 1, 2, 3)))(*arrays)
    assert_near(found, jax.jit(jax.grad(total, (0, 1, 2, 3)))(*arrays))
    assert found[2].any()


@pytest.mark.long
def test_a_function_of_experts_may_read_other_arrays():
    """Rounds after the first one are traced again when they are differentiated."""
    scale = jnp.linspace(0.5, 2.0, WIDTH)

    def scaled(scale, x, gate, weights):
        def of_rows(weights, x, groups):
            return experts(weights, x * scale, groups)

        return dropless(x, TopK(CHOICES), of_rows, gate=gate, weights=weights)[0]

    def expected(scale, x, gate, weights):
        return plain(x * scale, jnp.zeros_like(gate), weights)

    arrays = scale, X, GATES["all to the same"], WEIGHTS
    with sl.use(RULES, mesh_of("data=4")):
        _, found = jax.jit(partial(with_gradients, scaled))(*arrays)
    _, by_hand = with_gradients(expected, *arrays)
    # The gate has a gradient by the weights of choices.
    assert_near((found[0], found[3]), (by_hand[0], by_hand[3]))


@pytest.mark.representative("3-minimal")
@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full", "minimal"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_of_a_model_equals_one_device(stage, remat):
    config = decoder.tiny(
        width=16, heads=2, context=8, vocab=32, hidden=32, layers=2, every=1, mlp="swiglu"
    )
    tokens = {"tokens": np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)}

    def after_steps(mesh, rules, **options):
        strategy = sl.Strategy(mesh=mesh_of(mesh), rules=rules, **options)
        make_model = lambda: decoder.MoE(config, rngs=nnx.Rngs(0))
        state = sl.init(make_model, optax.sgd(0.5), strategy)
        step = sl.train_step(decoder.loss, strategy)
        for _ in range(2):
            state, metrics = step(state, tokens)
        return state.params, metrics

    params, metrics = after_steps(
        "data=4,model=2", TENSOR, zero=sl.Zero(stage, small=0), remat=remat, accumulate=2
    )
    expected, expected_metrics = after_steps("data=1", RULES)
    assert float(metrics["dropped"]) == 0
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)
    assert_near(jax.tree.leaves(params), jax.tree.leaves(expected), 5e-6)


def emulated(operand, output, starts, sizes, places, received, *, axis_name):
    """`lax.ragged_all_to_all` as its documentation has it, for backends without it."""
    del received
    # What a buffer holds before rows arrive is anything.
    output = jnp.full_like(output, jnp.nan)
    told = [lax.all_gather(x, axis_name) for x in (operand, starts, sizes, places)]
    operands, starts, sizes, places = told
    me, devices = lax.axis_index(axis_name), operands.shape[0]
    each = starts.shape[1] // devices
    row = jnp.arange(output.shape[0])
    for device in range(devices):
        for k in range(each):
            at = me * each + k
            within = row - places[device, at]
            arrives = (within >= 0) & (within < sizes[device, at])
            source = jnp.clip(starts[device, at] + within, 0, operand.shape[0] - 1)
            output = jnp.where(arrives[:, None], operands[device][source], output)
    return output


@pytest.mark.representative("all to the same-1.0")
@pytest.mark.long
@pytest.mark.parametrize("buffer", [1.0, 1.25])
@pytest.mark.parametrize("gate", GATES)
def test_ragged_and_dense_sending_give_the_same(gate, buffer, monkeypatch):
    """All rounds of both, by hand: each row is at its expert once, and outputs come back."""
    monkeypatch.setattr(_rows.lax, "ragged_all_to_all", emulated)
    monkeypatch.setattr(_rows, "FURTHER_ROUNDS", 2)  # with fewer rounds to compile
    most = 7 if buffer == 1.25 else 8
    mesh, tokens = mesh_of("data=4"), BATCH * LENGTH // 4
    chosen = lax.top_k(X @ GATES[gate], CHOICES)[1].reshape(-1, CHOICES)
    wanted = jnp.asarray(np.random.default_rng(6).random(chosen.shape) < 0.9)
    weight = jnp.abs(drawn(*chosen.shape, seed=7))
    x = X.reshape(-1, WIDTH)
    number_of_expert = jnp.arange(1.0, EXPERTS + 1)

    def run(form, x, chosen, wanted, weight):
        first_exchange = RowExchange(("data",), 4, EXPERTS, tokens, CHOICES, form, buffer)
        plan = first_exchange.plan(chosen, wanted)
        rounds, y = first_exchange.rounds(plan), jnp.zeros_like(x)
        taken = jnp.zeros(2, jnp.int32)
        for k in range(most):
            exchange = first_exchange.further if k else first_exchange
            where = exchange.round(plan, k)
            rows = exchange.to_experts(x, where)
            # Experts multiply by their number, by where their rows are.
            first = lax.axis_index("data") * exchange.local_experts
            ends = jnp.cumsum(where.sizes_L)
            expert = (jnp.arange(exchange.rows)[:, None] >= ends).sum(-1)
            times = jnp.where(expert < 2, number_of_expert[(first + expert) % EXPERTS], jnp.nan)
            made = jnp.where(expert[:, None] < 2, rows * times[:, None], 0)
            y = y + exchange.to_tokens(made, weight, where)
            taken = taken + jnp.stack([where.sizes_L.sum(), (k < rounds).astype(jnp.int32)])
        return y, taken[:1][None], rounds[None]

    def loss(form, x, weight):
        mapped = jax.shard_map(
            partial(run, form),
            mesh=mesh,
            in_specs=(P("data"),) * 4,
            out_specs=(P("data"), P("data"), P("data")),
            check_vma=False,
        )
        y, taken, rounds = mapped(x, chosen, wanted, weight)
        return (y * jnp.arange(1.0, WIDTH + 1)).sum(), (y, taken.sum(), rounds.max())

    counts = (weight * wanted * number_of_expert[chosen]).sum(1)
    for form in ("ragged", "dense"):
        of = jax.jit(jax.value_and_grad(partial(loss, form), argnums=(0, 1), has_aux=True))
        (_, (y, taken, rounds)), gradients = of(x, weight)
        assert_near(y, x * counts[:, None])
        assert int(taken) == int(wanted.sum()) and int(rounds) <= most
        by_x = counts[:, None] * jnp.arange(1.0, WIDTH + 1)
        by_weight = wanted * number_of_expert[chosen]
        by_weight = by_weight * (x * jnp.arange(1.0, WIDTH + 1)).sum(1, keepdims=True)
        assert_near(gradients, (by_x, by_weight))


@pytest.mark.parametrize("even", [1, 3, 8, 100, 512, 4096, 5000])
def test_buffers_are_within_a_quarter_of_an_even_load(even):
    rows = _rows._room(even, 1.25)
    assert even <= rows <= max(1.25 * even, even)
    assert even < 512 or rows % 128 == 0


@pytest.mark.representative("none-4")
@pytest.mark.tpu_compiler
@pytest.mark.long("full-6")
@pytest.mark.parametrize(("remat", "times"), [("none", 4), ("full", 6)])
def test_rows_are_sent_four_times_a_layer(remat, times):
    """Six times where a layer is computed again, in the first round; each further round is in a
    loop that runs as often as it takes.
    """
    mesh = mesh_on("v5e:2x2", "data=4")
    config = decoder.tiny(
        layers=2, every=1, width=256, heads=2, context=128, vocab=256, hidden=256, mlp="swiglu"
    )
    strategy = sl.Strategy(mesh=mesh, rules=RULES, precision="bf16", remat=remat)
    make_model = lambda: decoder.MoE(config, rngs=nnx.Rngs(0))
    state = sl.init(make_model, optax.sgd(0.1), strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 129), "int32")}
    with pytest.warns(sl.ShardingWarning, match="is multiplied in a wider dtype"):
        lowered = sl.train_step(decoder.loss, strategy).lower(state, batch)
    found = sl.testing.collectives(compile_for(mesh, lowered), mesh)
    ragged = [one for one in found if one.kind == "ragged-all-to-all"]
    first = [one for one in ragged if one.times_known]
    assert sum(one.times for one in first) == times * config.layers
    # Plans are made for loads that one round is enough for.
    further = [one for one in ragged if not one.times_known]
    assert further and not any(one.times for one in further)
    # A round's backward pass computes it again.
    assert sum(one.further_times for one in further) == 6 * config.layers
    assert not [one for one in found if one.kind == "all-to-all"]


@pytest.mark.long("options5-does not divide the 32 tokens")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": sl.experts.Top2()}, "a capacity of 1.0 times an even share: set"),
        ({"router": TopK(9)}, "sends each token to 9 experts, and there are 8"),
        ({"buffer": 0.5}, "buffer=0.5"),
        ({"sending": "ragged"}, "CPUs have no ragged all-to-all"),
        ({"sending": "dens"}, "takes one of 'ragged', 'dense'"),
        ({"group": 5}, "does not divide the 32 tokens"),
        ({"real": 3}, r"`dropless\(real="),
        ({"key": 3}, r"`dropless\(key="),
        ({"x": X[:0]}, r"`dropless` of `x` of shape \[0, 4, 8\]: there are no tokens"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with sl.unsharded(), pytest.raises(ValueError, match=message):
        layer(**{"x": X, "gate": GATES["drawn"], "weights": WEIGHTS} | options)


@pytest.mark.long
def test_a_function_that_gives_other_rows_is_refused():
    with sl.unsharded(), pytest.raises(ValueError, match=r"made \(64, 4\) of them"):
        dropless(
            X,
            TopK(2),
            lambda w, x, groups: experts(w, x, groups)[:, :4],
            gate=GATES["drawn"],
            weights=WEIGHTS,
        )


def test_tokens_that_the_axes_of_the_experts_do_not_divide_are_refused():
    rules = RULES | sl.AxisRules(experts="model")
    with (
        sl.use(rules, mesh_of("data=1,model=8")),
        pytest.raises(ValueError, match="`model` divides no dim of them"),
    ):
        jax.jit(layer)(X[:3, :3], GATES["drawn"], WEIGHTS)


@pytest.mark.long
def test_a_model_with_a_capacity_has_places_instead():
    config = replace(decoder.tiny(), router=TopK(2, capacity=1.25))
    model = decoder.MoE(config, rngs=nnx.Rngs(0))
    with sl.unsharded():
        _, stats = model.routed(jnp.zeros((2, 16), int))
    assert float(stats.dropped.total) > 0
