"""Experts: each router's rule by hand, two forms of dispatch alike, the layer on many meshes as on one device."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib as sl
from models import moe as decoder
from shardlib.experts import Switch, Top2, TopK, moe
from shardlib.experts._dispatch import dispatch
from shardlib.experts._routing import places, z_loss

ROUTERS = [Top2(), Top2(capacity=0.5), Switch(), Switch(capacity=0.5), TopK(2), TopK(3, capacity=1.0)]


def logits(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# The rules


def algorithm_1(gates, capacity, drawn):
    """GShard's paper, line by line, for one group: the weight of each token at each expert, and the auxiliary loss."""
    tokens, experts = gates.shape
    weight, count = np.zeros((tokens, experts)), np.zeros(experts, int)
    first, second = np.argsort(-gates, 1, kind="stable")[:, :2].T
    g1, g2 = (gates[np.arange(tokens), e] for e in (first, second))
    g1, g2 = g1 / (g1 + g2), g2 / (g1 + g2)
    for s in range(tokens):
        if count[first[s]] < capacity:
            weight[s, first[s]] = g1[s]
        count[first[s]] += 1
    loss = np.mean(count / tokens * gates.mean(0))
    for s in range(tokens):
        if count[second[s]] < capacity and 2 * g2[s] > drawn[s]:
            weight[s, second[s]] = g2[s]
            count[second[s]] += 1
    return weight, loss


@pytest.mark.parametrize("form", ["scatter", "einsum"])
@pytest.mark.parametrize("capacity", [0.25, 0.6, 1.0, 4.0])
def test_top2_is_algorithm_1(form, capacity):
    router, tokens, experts = Top2(capacity), 24, 5
    given, drawn = logits(3, tokens, experts), np.random.default_rng(1).random((3, tokens)).astype(np.float32)
    choices = router.choose(given, drawn)
    room = places(router, tokens, experts)
    sent = dispatch(choices, experts, room, form)
    # Experts that multiply by powers of ten tell who has met a token, and with what weight.
    identity = sent.to_experts(jnp.broadcast_to(jnp.eye(tokens), (3, tokens, tokens)))
    for g in range(3):
        weight, _ = algorithm_1(softmax(given[g].astype(np.float64)), room, drawn[g])
        of_expert = [
            sent.from_experts(identity.at[:, :e].set(0).at[:, e + 1 :].set(0))[g].diagonal() for e in range(experts)
        ]
        np.testing.assert_allclose(np.stack(of_expert, 1), weight, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(identity[g].sum((1, 2))) > 0, [True] * experts)
        assert identity[g].sum(-1).max() == 1  # a place has one token


def run(router, given, drawn=None, **options):
    """The layer whose gate gives these logits, and experts that multiply by their number and one."""
    count = given.shape[-1]
    x = jnp.concatenate([given, jnp.ones((*given.shape[:2], 1))], -1)
    gate = jnp.eye(count + 1, count)
    weights = jnp.arange(1.0, count + 1)
    with sl.unsharded():
        return moe(x, router, lambda w, x: w[:, None, None] * x, gate=gate, weights=weights, **options)


def test_losses_by_hand():
    given = logits(2, 16, 4)
    _, told = run(Top2(), given)
    by_hand = [algorithm_1(softmax(g), 8, np.zeros(16))[1] for g in given]
    np.testing.assert_allclose(told.balance.total / told.balance.weight, np.mean(by_hand), rtol=1e-6)

    _, told = run(Switch(), given)
    probability = softmax(given)
    share = np.stack([(given.argmax(-1) == e).mean(1) for e in range(4)], 1)
    np.testing.assert_allclose(told.balance.total / 2, (4 * (share * probability.mean(1)).sum(1)).mean(), rtol=1e-6)
    np.testing.assert_allclose(told.z.total / told.z.weight, (np.log(np.exp(given).sum(-1)) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(told.entropy.total / 32, -(probability * np.log(probability)).sum(-1).mean(), rtol=1e-5)
    np.testing.assert_allclose(told.load.total / told.load.weight, 4 * share.mean(0), rtol=1e-6)
    assert float(told.nonfinite.total) == 0 and float(z_loss(jnp.zeros(4))) == pytest.approx(math.log(4) ** 2)

    _, told = run(TopK(2), given)
    top = np.argsort(-given, -1)[..., :2]
    share = np.stack([(top == e).sum((1, 2)) for e in range(4)], 1) / 32
    np.testing.assert_allclose(told.balance.total / 2, (4 * (share * probability.mean(1)).sum(1)).mean(), rtol=1e-6)


def test_switch_weighs_by_the_probability_among_all():
    given = logits(2, 6, 4)
    y, told = run(Switch(capacity=None), given)
    best = given.argmax(-1)
    np.testing.assert_allclose(y[..., -1], (best + 1) * softmax(given).max(-1), rtol=1e-5)
    assert float(told.dropped.total) == 0


@pytest.mark.parametrize("renormalize", [True, False])
def test_top_k_without_a_limit_is_the_weighted_sum(renormalize):
    given = logits(2, 6, 4)
    y, _ = run(TopK(3, renormalize=renormalize), given)
    weight = np.where(given <= np.sort(given)[..., :1], 0, softmax(given))
    weight = weight / weight.sum(-1, keepdims=True) if renormalize else weight
    np.testing.assert_allclose(y[..., -1], (weight * np.arange(1, 5)).sum(-1), rtol=1e-5)


def test_who_finds_a_place():
    """Every token wants expert 0: the first four have it, the others nothing but what they bring."""
    given = np.zeros((1, 8, 4), np.float32)
    given[..., 0] = 5
    y, told = run(Switch(capacity=2.0), given)
    np.testing.assert_array_equal(np.asarray(y[0, :, -1]) > 0, [True] * 4 + [False] * 4)
    assert float(told.dropped.total) == 4 and float(told.dropped.weight) == 8
    assert told.load.total.tolist() == [32, 0, 0, 0]


def test_the_second_expert_is_taken_as_often_as_it_weighs():
    """Of weight w it is taken for numbers below 2 w; without a key always."""
    given = np.broadcast_to(np.log(np.array([0.75, 0.25, 1e-9, 1e-9], np.float32)), (64, 32, 4))
    taken = [run(Top2(capacity=None), given, key=key)[0][..., -1] > 0.76 for key in (jax.random.key(0), None)]
    assert 0.45 < taken[0].mean() < 0.55 and taken[1].all()


def test_jitter_moves_what_the_gate_sees_and_nothing_else():
    given = logits(4, 16, 4)
    still, told = run(Switch(jitter=0.5, capacity=None), given)
    moved, other = run(Switch(jitter=0.5, capacity=None), given, key=jax.random.key(0))
    assert 0.3 < float(other.entropy.total / told.entropy.total) < 3 and not np.allclose(still, moved)
    calm, _ = run(Switch(jitter=0.0, capacity=None), given, key=jax.random.key(0))
    np.testing.assert_array_equal(still, calm)


@pytest.mark.parametrize("form", ["scatter", "einsum"])
def test_padding_goes_nowhere_and_counts_for_nothing(form):
    given, real = logits(2, 12, 4), np.arange(12) < np.array([[5], [12]])
    y, told = run(Top2(), given, real=jnp.asarray(real), form=form, group=6)
    assert not y[0, 5:].any()
    shorter = [run(Top2(capacity=1.2), given[:1, :5]), run(Top2(), given[1:], group=6)]  # as many places
    np.testing.assert_allclose(y[0, :5], shorter[0][0][0], rtol=1e-5)
    np.testing.assert_allclose(told.entropy.total, sum(t.entropy.total for _, t in shorter), rtol=1e-5)
    np.testing.assert_allclose(told.balance.total, sum(t.balance.total for _, t in shorter), rtol=1e-5)
    assert float(told.entropy.weight) == 17


# The forms


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_both_forms_are_equal(router):
    """Values, and gradients to tokens, gate and experts."""
    key = jax.random.key(3)
    x, gate = jax.random.normal(key, (4, 16, 6)), jax.random.normal(key, (6, 5))
    weights = jax.random.normal(key, (5, 6, 6))

    def total(form, x, gate, weights):
        with sl.unsharded():
            y, told = moe(
                x, router, lambda w, x: jnp.tanh(x @ w), gate=gate, weights=weights, key=key, group=8, form=form
            )
        return (y * jnp.arange(6)).sum() + told.balance.total, (y, told)

    found = [
        jax.value_and_grad(partial(total, form), (0, 1, 2), has_aux=True)(x, gate, weights)
        for form in ("scatter", "einsum")
    ]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), *found)


def test_one_expert_may_have_every_token():
    """`capacity=None` holds them all, wherever they go."""
    given = np.zeros((2, 8, 3), np.float32)
    given[..., 1] = 9
    for form in ("scatter", "einsum"):
        y, told = run(TopK(1), given, form=form)
        np.testing.assert_allclose(y[..., -1], 2)
        assert float(told.dropped.total) == 0


# Meshes: `tests` of the decoder below go through the step, manual and automatic


CONFIG = decoder.tiny(width=16, heads=2, context=8, vocab=32, hidden=24, layers=2, every=1)
TOKENS = {"tokens": np.random.default_rng(0).integers(0, 32, (16, 9)).astype(np.int32)}
BOTH = sl.rules.experts | sl.AxisRules(batch=("data", "expert"))
MESHES = {
    "one axis": ("data=8", sl.rules.experts, None),
    "one axis, automatic": ("data=8", sl.rules.experts, ()),
    "two experts each": ("data=4,model=2", sl.rules.experts | sl.rules.tensor, None),
    "with tensor, automatic": ("data=4,model=2", sl.rules.experts | sl.rules.tensor, ()),
    "an axis of their own": ("data=2,expert=4", sl.rules.data | sl.AxisRules(experts="expert"), None),
    "apart, of the batch too": ("data=2,expert=4", BOTH | sl.AxisRules(experts="expert"), None),
    "both axes": ("data=2,expert=4", BOTH | sl.AxisRules(experts=("data", "expert")), None),
    "sequence, too": ("data=4,model=2", sl.rules.experts | sl.rules.tensor_sequence, None),
}  # fmt: skip
OPTIMIZER = optax.sgd(1.0)  # the change of a parameter is its gradient


def after_a_step(config, mesh, rules, manual, **options):
    strategy = sl.Strategy(mesh=mesh, rules=rules, manual=manual, **options)
    state = sl.init(lambda: decoder.MoE(config, rngs=nnx.Rngs(0)), OPTIMIZER, strategy)
    state, metrics = sl.train_step(decoder.loss, strategy)(state, TOKENS)
    return jax.device_get((state.params, metrics)), state


@pytest.fixture(scope="module")
def on_one_device():
    found = {}

    def get(config):
        if config not in found:
            found[config] = after_a_step(
                config, sl.make_mesh("data=1", devices=jax.devices()[:1]), sl.rules.experts, None
            )[0]
        return found[config]

    return get


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("router", "form"), [(Top2(), "scatter"), (Switch(), "einsum"), (TopK(2), "scatter")], ids=lambda v: str(v)[:6]
)
def test_every_mesh_is_as_one_device(on_one_device, mesh, router, form):
    config = replace(CONFIG, router=router, form=form)
    found, state = after_a_step(config, *MESHES[mesh])
    found[1].pop("first_nonfinite"), (expected := on_one_device(config))[1].pop("first_nonfinite", None)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
    up = state.params["blocks"]["expert"]["mlp"]["up"]
    rules = MESHES[mesh][1]
    expected_spec = P(None, rules["experts"][0], None, rules["mlp"][0] if "mlp" in rules else None)
    assert up.sharding.is_equivalent_to(jax.sharding.NamedSharding(up.sharding.mesh, expected_spec), up.ndim)
