"""Experts over a slow network and a fast one: a token crosses the slow one once for each node."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from test_dropless import (
    BATCH,
    CHOICES,
    EXPERTS,
    GATES,
    LENGTH,
    RULES,
    TENSOR,
    WEIGHTS,
    WIDTH,
    X,
    assert_near,
    drawn,
    emulated,
    experts,
    layer,
    mesh_of,
    plain,
    with_gradients,
)

import shardlib as sl
from benchmarks._compiled import compile_for
from models import moe as decoder
from shardlib.experts import SigmoidTopK, TopK, _dropless, _rows, dropless
from shardlib.experts._two_levels import Levels

P = jax.P
OVER_PODS = sl.AxisRules(batch=("pod", "data"), experts=("pod", "data"))
FLAT, SPLIT = RULES | OVER_PODS, TENSOR | OVER_PODS
MESHES = {
    "two nodes of two": ("pod=2,data=2", FLAT),
    "two nodes of four": ("pod=2,data=4", FLAT),
    "four nodes of two": ("pod=4,data=2", FLAT),
    "tensor": ("pod=2,data=2,model=2", SPLIT),
    "nodes by an axis of no data": (
        "pod=2,data=2,model=2",
        RULES | sl.AxisRules(experts=("pod", "model")),
    ),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.representative(
    "four nodes of two-all to the same", "tensor-drawn", "nodes by an axis of no data-drawn"
)
@pytest.mark.long
@pytest.mark.sentinel("two nodes of four-drawn")
def test_outputs_and_gradients_equal_one_device(mesh, gate):
    text, rules = MESHES[mesh]
    arrays = X, GATES[gate], WEIGHTS
    expected = with_gradients(plain, *arrays)
    with sl.use(rules, mesh_of(text)):
        two_levels = partial(layer, across="pod")
        found = jax.jit(partial(with_gradients, lambda *a: two_levels(*a)[0]))(*arrays)
        _, stats = jax.jit(two_levels)(*arrays)
    assert_near(found, expected)
    assert float(stats.dropped.total) == 0
    # A device that all tokens of a node go to has no room for them in the first round.
    assert float(stats.rounds.total) > 1


@pytest.mark.long
@pytest.mark.parametrize("buffer", [1.0, 1.25])
def test_further_rounds_across_are_taken(buffer):
    # All tokens go to one expert: a node gets those of all others.
    gate, router = jnp.zeros((WIDTH, EXPERTS)), TopK(1)
    arrays = X, gate, WEIGHTS
    found, rounds = {}, {}
    for text in ("data=1", "pod=4,data=2"):
        options = {} if text == "data=1" else {"across": "pod"}

        def one(*arrays, options=options):
            return layer(*arrays, router, buffer=buffer, **options)

        with sl.use(FLAT if options else RULES, mesh_of(text)):
            found[text] = jax.jit(partial(with_gradients, lambda *a, f=one: f(*a)[0]))(*arrays)
            rounds[text] = float(jax.jit(one)(*arrays)[1].rounds.total)
    assert_near(found["pod=4,data=2"], found["data=1"])
    assert rounds["data=1"] == 1 and rounds["pod=4,data=2"] > 4


@pytest.mark.long("2")
@pytest.mark.parametrize("choices", [2, 4])
def test_a_token_crosses_once_for_each_node_of_its_experts(choices):
    """What is sent across are the distinct nodes of each token, and each row knows its token."""
    nodes, devices, tokens = 4, 2, BATCH * LENGTH // 8
    levels = Levels(("pod",), ("data",), nodes, devices, EXPERTS, choices, choices, "dense", 1.25)
    chosen = lax.top_k(drawn(BATCH * LENGTH, EXPERTS, seed=9), choices)[1]
    wanted = jnp.asarray(np.random.default_rng(6).random(chosen.shape) < 0.8)
    weight = jnp.abs(drawn(*chosen.shape, seed=7))
    layout = sl.experts._row_rounds.TokenLayout((None,), (), ())
    rounds = levels.rounds(layout, tokens)

    def run(x, chosen, wanted, weight):
        choices = sl.experts.Choices(chosen, weight, wanted)
        plan, number = rounds.plan(choices)
        taken = jnp.zeros((BATCH * LENGTH, EXPERTS))
        crossing = jnp.int32(0)
        for k in range(8):
            one = rounds.further if k else rounds
            rows, _ = one.sender.send(jnp.int32(k), plan.across, x)
            told = one._choices_of_rows(jnp.int32(k), plan, weight)
            # A row holds the number of its token.
            token = rows[:, 0].astype(jnp.int32)
            expert = told.expert + lax.axis_index("pod") * levels.node_experts
            of = jnp.where(told.wanted, token[:, None], -1)
            taken = taken.at[of, expert].add(told.weight, mode="drop", wrap_negative_indices=False)
            is_row = told.wanted.any(-1)
            mine = token // (tokens * devices) == lax.axis_index("pod")
            crossing += (is_row & ~mine).sum()
        return lax.psum(taken, ("pod", "data")), lax.psum(crossing, ("pod", "data")), number

    mapped = jax.shard_map(
        run,
        mesh=mesh_of("pod=4,data=2"),
        in_specs=(P(("pod", "data")),) * 4,
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    numbers = jnp.broadcast_to(jnp.arange(BATCH * LENGTH)[:, None], (BATCH * LENGTH, 2))
    taken, crossing, number = jax.jit(mapped)(numbers.astype("float32"), chosen, wanted, weight)
    expected = np.zeros((BATCH * LENGTH, EXPERTS))
    distinct = 0
    for token in range(BATCH * LENGTH):
        own = token // (tokens * devices)
        to = set()
        for expert, is_wanted, w in zip(chosen[token], wanted[token], weight[token], strict=True):
            if is_wanted:
                expected[token, expert] += w
                to.add(int(expert) // 2)
        distinct += len(to - {own})
    np.testing.assert_allclose(taken, expected, rtol=1e-6)
    assert int(crossing) == distinct and int(number) <= 8


@pytest.mark.long
def test_ragged_and_dense_sending_give_the_same(monkeypatch):
    monkeypatch.setattr(_rows.lax, "ragged_all_to_all", emulated)
    monkeypatch.setattr("shardlib.experts._dropless._sending", lambda asked: "ragged")
    arrays = X, GATES["drawn"], WEIGHTS
    expected = with_gradients(plain, *arrays)
    with sl.use(FLAT, mesh_of("pod=2,data=2")):
        two_levels = lambda *a: layer(*a, across="pod")[0]
        found = jax.jit(partial(with_gradients, two_levels))(*arrays)
    assert_near(found, expected)


@pytest.mark.long("None")
@pytest.mark.parametrize("across", [None, ()])
def test_bytes_are_counted_by_the_network_that_they_take(across):
    """Of eight experts on two nodes of four devices, a token goes to all."""
    strategy = sl.Strategy(mesh="pod=2,data=4", dcn="pod", rules=FLAT)
    with strategy.scope():
        all_experts = partial(layer, router=TopK(EXPERTS), across=across)
        _, stats = jax.jit(all_experts)(X, GATES["drawn"], WEIGHTS)
    of_row = 2 * WIDTH * 4
    rows = {name: float(mean) / of_row for name, mean in means(stats.sending).items()}
    if across is None:
        # On each node one device has the token, and the three others get it from that one.
        assert (rows["sent_within"], rows["sent_across"]) == (2 * 3, 1)
    else:
        assert (rows["sent_within"], rows["sent_across"]) == (3, 4)


def means(metrics):
    return {name: metric.total / metric.weight for name, metric in metrics.items()}


@pytest.mark.long
def test_a_step_of_a_model_equals_one_device():
    config = decoder.tiny()
    batch = {"tokens": np.random.default_rng(1).integers(0, config.vocab, (8, 17))}
    strategies = {
        "one": sl.Strategy(mesh=mesh_of("data=1"), rules=RULES),
        "two levels": sl.Strategy(
            mesh="pod=2,data=2,model=2",
            dcn="pod",
            rules=SPLIT,
            zero=sl.Zero(3, small=0),
            remat="full",
        ),
    }
    results = {}
    for name, strategy in strategies.items():
        model = lambda: decoder.MoE(config, rngs=nnx.Rngs(0))
        state = sl.init(model, optax.sgd(0.5), strategy)
        step = sl.train_step(decoder.loss, strategy)
        for _ in range(2):
            state, metrics = step(state, batch)
        results[name] = jax.device_get((state.params, metrics["loss"]))
    assert_near(results["two levels"], results["one"], 1e-5)
    # There and back, of a token that goes to the other node at most once.
    assert 0 < metrics["sent_across"] < 2 * config.width * 4


def test_a_strategy_with_a_slow_axis_sends_across_it_once():
    strategy = sl.Strategy(mesh="pod=2,data=4", dcn="pod", rules=FLAT)
    with strategy.scope():
        text = jax.jit(layer).lower(X, GATES["drawn"], WEIGHTS).as_text()
    with sl.use(FLAT, mesh_of("pod=2,data=4")):
        once = jax.jit(partial(layer, across="pod")).lower(X, GATES["drawn"], WEIGHTS).as_text()
        each = jax.jit(layer).lower(X, GATES["drawn"], WEIGHTS).as_text()
    assert text == once != each


@pytest.mark.long
@pytest.mark.tpu_compiler
def test_fewer_bytes_cross_the_slow_network():
    """Of 8 choices among two slices, rows cross for two at most and not for eight."""
    target = sl.Target("tpu:v5e:2x2:slices=2")
    mesh = target.mesh("pod=2,data=4", dcn="pod")
    count, width, hidden, tokens = 16, 1024, 128, 256
    split, dtype = P(("pod", "data")), jnp.bfloat16
    shaped = lambda spec, *dims: jax.ShapeDtypeStruct(
        dims, dtype, sharding=jax.NamedSharding(mesh, spec)
    )
    weights = {
        "up": shaped(split, count, width, hidden),
        "gate": shaped(split, count, width, hidden),
        "down": shaped(split, count, hidden, width),
    }
    arrays = shaped(split, 8, tokens, width), shaped(P(), width, count), weights

    def crossing(**options):
        with sl.use(FLAT, mesh):
            lowered = jax.jit(partial(layer, router=TopK(8), **options)).lower(*arrays)
        rows = 0
        for one in compile_for(target, mesh, lowered).collectives:
            if one.slow and one.times and one.kind == "ragged-all-to-all" and "bf16" in one.dtypes:
                rows += max(one.operand_bytes, one.result_bytes)
        return rows / (2 * width)

    each, once = crossing(across=()), crossing()
    # There and back, with room for a quarter more one way.
    assert each == pytest.approx(2 * 1.25 * 8 * tokens, rel=0.01)
    assert once <= 2 * 1.25 * 2 * tokens


@pytest.mark.parametrize(
    ("across", "message"),
    [
        ("data", r"of the axes that the experts are split over.*these are `pod=2` x `data=4`"),
        (("pod", "data"), "with one left for the experts of a node"),
        (3, "across=3"),
    ],
)
def test_axes_that_cannot_be_crossed_once_are_refused(across, message):
    with sl.use(FLAT, mesh_of("pod=2,data=4")), pytest.raises(ValueError, match=message):
        jax.jit(partial(layer, across=across))(X, GATES["drawn"], WEIGHTS)


class Grouped(TopK):
    """A router of the user's own, which does not keep to its groups."""


@pytest.mark.parametrize(
    ("router", "padded_to", "most"),
    [
        (TopK(CHOICES), EXPERTS, 2),
        (TopK(8), EXPERTS, 4),
        (SigmoidTopK(8, groups=8, groups_taken=3), EXPERTS, 3),
        (SigmoidTopK(8, groups=8, groups_taken=3), 2 * EXPERTS, 4),
        (Grouped(8, groups=8, groups_taken=3), EXPERTS, 4),
    ],
)
def test_tokens_go_to_as_many_nodes_as_the_router_allows(router, padded_to, most):
    assert _dropless._most_nodes(router, 4, EXPERTS, padded_to) == most


@pytest.mark.long
def test_padded_experts_over_two_nodes_equal_one_device():
    """A group of the router's, of three experts, is on two nodes."""
    router, count = TopK(2, groups=2, groups_taken=1), 6
    gate, own = drawn(WIDTH, count, seed=4), jax.tree.map(lambda w: w[:count], WEIGHTS)

    def outputs(weights, **options):
        return dropless(X, router, experts, gate=gate, weights=weights, **options)[0]

    with sl.unsharded():
        expected = jax.jit(partial(outputs, across="pod"))(own)
    with sl.use(FLAT, mesh_of("pod=2,data=2")):
        found = jax.jit(partial(outputs, across="pod", padded_to=EXPERTS))(WEIGHTS)
    assert_near(found, expected)


@pytest.mark.long
def test_experts_read_other_arrays_on_both_levels():
    """A captured array has its gradient from all rounds."""

    def by(scale):
        def of_rows(weights, x, groups):
            return experts(weights, x, groups) * scale

        y, _ = dropless(
            X, TopK(2), of_rows, gate=GATES["all to the same"], weights=WEIGHTS, across="pod"
        )
        return (y**2).sum()

    def expected(scale):
        return ((plain(X, GATES["all to the same"], WEIGHTS) * scale) ** 2).sum()

    with sl.use(FLAT, mesh_of("pod=2,data=4")):
        found = jax.jit(jax.value_and_grad(by))(jnp.float32(1.5))
    assert_near(found, jax.value_and_grad(expected)(jnp.float32(1.5)), 1e-5)
