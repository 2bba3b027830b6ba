"""Experts: each router's rule by hand, two forms of dispatch alike, the layer on many meshes as on
one device.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from machines import compile_for, mesh_on

import shardlib as sl
from models import moe as decoder
from models import translation
from shardlib._tree import named_leaves
from shardlib.experts import Seen, Switch, Top2, TopK, moe
from shardlib.experts._dispatch import dispatch
from shardlib.experts._gate import logits as gate_logits
from shardlib.experts._routing import places, z_loss
from shardlib.experts._selection import largest

ROUTERS = [
    Top2(),
    Top2(capacity=0.5),
    Switch(),
    Switch(capacity=0.5),
    TopK(2),
    TopK(3, capacity=1.0),
]


def logits(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# The rules


def algorithm_1(gates, capacity, drawn):
    """GShard's paper, line by line, for one group: the weight of each token at each expert, and the
    auxiliary loss.
    """
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


@pytest.mark.representative("0.25-scatter", "0.25-einsum", "1.0-scatter")
@pytest.mark.long
@pytest.mark.sentinel("4.0-einsum")
@pytest.mark.parametrize("form", ["scatter", "einsum"])
@pytest.mark.parametrize("capacity", [0.25, 0.6, 1.0, 4.0])
def test_top2_router_follows_gshard_algorithm_1(form, capacity):
    router, tokens, experts = Top2(capacity), 24, 5
    given, drawn = (
        logits(3, tokens, experts),
        np.random.default_rng(1).random((3, tokens)).astype(np.float32),
    )
    choices = router.choose(Seen(given, drawn))
    room = places(router, tokens, experts)
    sent = dispatch(choices, experts, room, form)
    # One expert's output at a time tells which tokens it has met, and with what weight.
    identity = sent.to_experts(jnp.broadcast_to(jnp.eye(tokens), (3, tokens, tokens)))
    for g in range(3):
        weight, _ = algorithm_1(softmax(given[g].astype(np.float64)), room, drawn[g])
        of_expert = [
            sent.from_experts(identity.at[:, :e].set(0).at[:, e + 1 :].set(0))[g].diagonal()
            for e in range(experts)
        ]
        np.testing.assert_allclose(np.stack(of_expert, 1), weight, atol=1e-6)
        np.testing.assert_array_equal(np.asarray(identity[g].sum((1, 2))) > 0, [True] * experts)
        assert identity[g].sum(-1).max() == 1  # a place has one token


@partial(jax.jit, static_argnames=("router", "group", "form"))
def run(router, given, *, key=None, real=None, group=None, form="scatter"):
    """The layer whose gate gives these logits, and experts that multiply by their number and
    one.
    """
    count = given.shape[-1]
    x = jnp.concatenate([given, jnp.ones((*given.shape[:2], 1))], -1)
    options = {"gate": jnp.eye(count + 1, count), "weights": jnp.arange(1.0, count + 1)}
    with sl.unsharded():
        return moe(
            x,
            router,
            lambda w, x: w[:, None, None] * x,
            **options,
            key=key,
            real=real,
            group=group,
            form=form,
        )


def test_router_losses_match_a_plain_numpy_calculation():
    given = logits(2, 16, 4)
    _, told = run(Top2(), given)
    by_hand = [algorithm_1(softmax(g), 8, np.zeros(16))[1] for g in given]
    np.testing.assert_allclose(
        told.balance.total / told.balance.weight, np.mean(by_hand), rtol=1e-6
    )

    _, told = run(Switch(), given)
    probability = softmax(given)
    share = np.stack([(given.argmax(-1) == e).mean(1) for e in range(4)], 1)
    np.testing.assert_allclose(
        told.balance.total / 2, (4 * (share * probability.mean(1)).sum(1)).mean(), rtol=1e-6
    )
    np.testing.assert_allclose(
        told.z.total / told.z.weight, (np.log(np.exp(given).sum(-1)) ** 2).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(
        told.entropy.total / 32, -(probability * np.log(probability)).sum(-1).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(told.load.total / told.load.weight, 4 * share.mean(0), rtol=1e-6)
    assert float(told.nonfinite.total) == 0 and float(z_loss(jnp.zeros(4))) == pytest.approx(
        math.log(4) ** 2
    )

    _, told = run(TopK(2), given)
    top = np.argsort(-given, -1)[..., :2]
    share = np.stack([(top == e).sum((1, 2)) for e in range(4)], 1) / 32
    np.testing.assert_allclose(
        told.balance.total / 2, (4 * (share * probability.mean(1)).sum(1)).mean(), rtol=1e-6
    )


def test_switch_router_weighs_by_the_probability_among_all_experts():
    given = logits(2, 6, 4)
    y, told = run(Switch(capacity=None), given)
    best = given.argmax(-1)
    np.testing.assert_allclose(y[..., -1], (best + 1) * softmax(given).max(-1), rtol=1e-5)
    assert float(told.dropped.total) == 0


@pytest.mark.parametrize("renormalize", [True, False])
def test_top_k_router_without_a_limit_is_the_weighted_sum(renormalize):
    given = logits(2, 6, 4)
    y, _ = run(TopK(3, renormalize=renormalize), given)
    weight = np.where(given <= np.sort(given)[..., :1], 0, softmax(given))
    weight = weight / weight.sum(-1, keepdims=True) if renormalize else weight
    np.testing.assert_allclose(y[..., -1], (weight * np.arange(1, 5)).sum(-1), rtol=1e-5)


def test_experts_at_capacity_drop_later_tokens():
    """Every token wants expert 0: the first four have it, the others nothing but what they
    bring.
    """
    given = np.zeros((1, 8, 4), np.float32)
    given[..., 0] = 5
    y, told = run(Switch(capacity=2.0), given)
    np.testing.assert_array_equal(np.asarray(y[0, :, -1]) > 0, [True] * 4 + [False] * 4)
    assert float(told.dropped.total) == 4 and float(told.dropped.weight) == 8
    assert told.load.total.tolist() == [32, 0, 0, 0]


def test_top2_router_takes_the_second_expert_in_proportion_to_its_weight():
    """Of weight w it is taken for numbers below 2 w; without a key always."""
    given = np.broadcast_to(np.log(np.array([0.75, 0.25, 1e-9, 1e-9], np.float32)), (64, 32, 4))
    taken = [
        run(Top2(capacity=None), given, key=key)[0][..., -1] > 0.76
        for key in (jax.random.key(0), None)
    ]
    assert 0.45 < taken[0].mean() < 0.55 and taken[1].all()


def test_router_jitter_changes_the_output_only_if_positive_and_with_a_key():
    given = logits(4, 16, 4)
    still, told = run(Switch(jitter=0.5, capacity=None), given)
    moved, other = run(Switch(jitter=0.5, capacity=None), given, key=jax.random.key(0))
    assert 0.3 < float(other.entropy.total / told.entropy.total) < 3 and not np.allclose(
        still, moved
    )
    calm, _ = run(Switch(jitter=0.0, capacity=None), given, key=jax.random.key(0))
    np.testing.assert_array_equal(still, calm)


@pytest.mark.parametrize("form", ["scatter", "einsum"])
def test_experts_ignore_padding(form):
    given, real = logits(2, 12, 4), np.arange(12) < np.array([[6], [12]])
    given[0, 7] = np.nan
    y, told = run(Top2(), given, real=jnp.asarray(real), form=form, group=6)
    assert not y[0, 6:].any()
    real_groups = np.stack([given[0, :6], given[1, :6], given[1, 6:]])
    alone, of_real = run(Top2(), real_groups, form=form)
    np.testing.assert_allclose(np.concatenate([y[0, :6], y[1]]), alone.reshape(18, -1), rtol=1e-5)
    for name in ("entropy", "balance", "load", "dropped", "z"):
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-5),
            getattr(told, name),
            getattr(of_real, name),
        )
    assert float(told.entropy.weight) == 18


# The forms


@pytest.mark.representative(
    "Top2(capacity=0.5, jitter=0.0)",
    "Switch(capacity=1.25, jitter=0.01)",
    "TopK(choices=2, capacity=None, jitter=0.0, renormalize=True, groups=1, groups_taken=1)",
)
@pytest.mark.long
@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_dispatch_forms_give_equal_values_and_gradients(router):
    """Values, and gradients to tokens, gate and experts."""
    key = jax.random.key(3)
    x, gate = jax.random.normal(key, (4, 16, 6)), jax.random.normal(key, (6, 5))
    weights = jax.random.normal(key, (5, 6, 6))

    def total(form, x, gate, weights):
        with sl.unsharded():
            y, told = moe(
                x,
                router,
                lambda w, x: jnp.tanh(x @ w),
                gate=gate,
                weights=weights,
                key=key,
                group=8,
                form=form,
            )
        return (y * jnp.arange(6)).sum() + told.balance.total, (y, told)

    both = [
        jax.value_and_grad(partial(total, form), (0, 1, 2), has_aux=True)
        for form in ("scatter", "einsum")
    ]
    found = [jax.jit(function)(x, gate, weights) for function in both]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), *found)


@pytest.mark.representative("3", "768")
@pytest.mark.long
@pytest.mark.parametrize("count", [3, 300, 768])
def test_router_logits_and_top_k_are_right_for_any_number_of_experts(count):
    """Of many a few columns at a time; and the choice among equals is the first, as a sort has
    it.
    """
    x, gate = logits(2, 5, 16), logits(16, count, seed=1)
    found = gate_logits(jnp.asarray(x), jnp.asarray(gate))
    np.testing.assert_allclose(found, x @ gate, rtol=1e-5, atol=1e-5)
    by = lambda of: jax.grad(lambda x, gate: jnp.sin(of(x, gate)).sum(), (0, 1))(
        jnp.asarray(x), jnp.asarray(gate)
    )
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), by(gate_logits), by(jnp.matmul)
    )
    # With many equals, and fewer than are wanted.
    coarse = jnp.round(found).at[0, 0, 1:].set(-jnp.inf)
    jax.tree.map(np.testing.assert_array_equal, largest(coarse, 3), tuple(jax.lax.top_k(coarse, 3)))
    slope = lambda of: jax.grad(lambda x: (of(x, 3)[0] * jnp.arange(3)).sum())(coarse)
    np.testing.assert_array_equal(slope(largest), slope(jax.lax.top_k))


def test_expert_capacity_is_rounded_up_but_not_for_float_error():
    assert [places(Switch(capacity=c), 100, 10) for c in (1.1, 1.11, 0.07, 1)] == [11, 12, 1, 10]


def test_experts_without_a_capacity_limit_take_every_token():
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
    "an axis of their own": (
        "data=2,expert=4",
        sl.rules.data | sl.AxisRules(experts="expert"),
        None,
    ),
    "apart, of the batch too": ("data=2,expert=4", BOTH | sl.AxisRules(experts="expert"), None),
    "both axes": ("data=2,expert=4", BOTH | sl.AxisRules(experts=("data", "expert")), None),
    "sequence, too": ("data=4,model=2", sl.rules.experts | sl.rules.tensor_sequence, None),
}
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


def check_mesh(on_one_device, mesh, config, **options):
    found, state = after_a_step(config, *MESHES[mesh], **options)
    (
        found[1].pop("first_nonfinite"),
        (expected := on_one_device(config))[1].pop("first_nonfinite", None),
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
    return state


# Each mesh once, and each router and form on some: a program takes ten seconds to compile.
PAIRS = [(Top2(), "scatter"), (Switch(), "einsum"), (TopK(2), "scatter")]


@pytest.mark.representative("5-apart, of the batch too", "7-sequence, too")
@pytest.mark.long
@pytest.mark.sentinel("4-an axis of their own")
@pytest.mark.parametrize(("number", "mesh"), list(enumerate(MESHES)))
def test_experts_on_every_mesh_match_one_device(on_one_device, number, mesh):
    router, form = PAIRS[number % 3]
    state = check_mesh(on_one_device, mesh, replace(CONFIG, router=router, form=form))
    up, rules = state.params["blocks"]["expert"]["mlp"]["up"], MESHES[mesh][1]
    expected = P(None, rules["experts"][0], None, rules["mlp"][0])
    assert up.sharding.is_equivalent_to(
        jax.sharding.NamedSharding(up.sharding.mesh, expected), up.ndim
    )


@pytest.mark.representative("3")
@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_experts_with_zero_match_one_device(on_one_device, stage):
    """Weights that are no experts' are split over the same axis; experts are already."""
    zero = sl.Zero(stage, small=1)
    state = check_mesh(
        on_one_device, "two experts each", replace(CONFIG, router=PAIRS[0][0]), zero=zero
    )
    blocks = state.params["blocks"]["expert"]
    assert "data" in str(blocks["attention"]["query"]["kernel"].sharding.spec)
    assert blocks["mlp"]["up"].sharding.spec[1] == "data"


@pytest.mark.long
def test_experts_with_microbatches_match_the_whole_batch(on_one_device):
    """Groups and capacities are those of a sequence, so microbatches change nothing but the mean of
    the balance.
    """
    config = replace(CONFIG, router=Top2(), balance=0.0)
    whole = on_one_device(config)
    parts = after_a_step(config, *MESHES["one axis"], accumulate=2)[0]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), whole[0], parts[0])
    np.testing.assert_allclose(whole[1]["load"], parts[1]["load"], rtol=1e-5)


# What is refused


def layer(**changes):
    options = {
        "x": jnp.ones((4, 6, 8)),
        "router": TopK(2),
        "experts": lambda w, x: x @ w,
        "gate": jnp.ones((8, 4)),
        "weights": {"up": jnp.ones((4, 8, 8))},
        **changes,
    }
    x, router, experts = (options.pop(name) for name in ("x", "router", "experts"))
    weights = options.pop("weights")
    with sl.unsharded():
        return moe(x, router, lambda w, x: experts(w["up"], x), weights=weights, **options)


class Beyond(TopK):
    def choose(self, seen):
        expert = jnp.full((*seen.logits.shape[:-1], self.choices), 7)
        return super().choose(seen)._replace(expert=expert)


@pytest.mark.long("gate-1")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router": TopK(5)}, r"TopK\(choices=5.* sends each token to 5 experts, and there are 4"),
        ({"group": 5}, r"`moe\(group=5\)` does not divide the 24 tokens"),
        ({"gate": jnp.ones((7, 4))}, r"of shape \(width, experts\), \(8, ...\) for tokens of shape \(4, 6, 8\); got \(7, 4\)"),
        ({"weights": {"up": jnp.ones((3, 8, 8))}}, r"`up` of shape \(3, 8, 8\) should have 4 experts along dim 0"),
        ({"weights": {}}, "holds no arrays"),
        ({"form": "sort"}, "form='sort'.. takes one of 'scatter', 'einsum'"),
        ({"gate": jnp.full((8, 4), jnp.nan)}, "logits are not finite for 24 of 24 tokens, the "
                                              "first being token 0 of group 0"),
        ({"router": Beyond(2)}, "A router chose expert 7, and there are 4, counted from 0: 48 of "
                                "48 choices"),
        ({"real": jnp.ones((4, 5), bool)}, r"shape \(4, 6\), true or false; got \(4, 5\)"),
        ({"experts": lambda w, x: x[:, :1]}, r"was given tokens of shape \(4, 24, 8\).*made \(4, 1, 8\)"),
        ({"experts": lambda w, x: (x @ w).sum(-1)}, r"made \(4, 24\) of them: it gives \(experts, tokens, width"),
        ({"x": jnp.ones((0, 6, 8))}, r"`moe` of `x` of shape \[0, 6, 8\]: there are no tokens"),
        ({"x": jnp.ones((4, 0, 8))}, r"`moe` of `x` of shape \[4, 0, 8\]: there are no tokens"),
        ({"x": jnp.ones((4, 6, 0)), "gate": jnp.ones((0, 4))}, "or they have no width"),
        ({"names": ("batch", "act_embed")}, "a name for each dim"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)  # fmt: skip
def test_moe_layer_refuses_wrong_arguments(changes, said):
    with pytest.raises(ValueError, match=said):
        layer(**changes)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Top2(capacity=0), r"Top2\(capacity=0\)`.*none would drop every token"),
        (lambda: Top2(capacity=math.inf), r"Top2\(capacity=inf\)`.*finite and above 0, or None"),
        (lambda: TopK(0), "choices=0.*at least 1"),
        (lambda: Switch(jitter=1.5), "jitter=1.5.*at least 0 and below 1"),
        (lambda: decoder.tiny(every=3, layers=4), r"every=3\)` does not divide `layers=4`"),
        (lambda: decoder.tiny(experts=1), "2 experts, and there are"),
    ],
)
def test_moe_settings_out_of_range_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_moe_layer_under_jit_turns_errors_into_nan():
    """Where an error is no longer possible: the loop counts the step as not finite, and the metric
    says why.
    """
    with sl.unsharded():
        run = jax.jit(lambda gate, router: layer(gate=gate, router=router), static_argnums=1)
    y, told = run(jnp.full((8, 4), jnp.nan), TopK(2))
    assert jnp.isnan(y).all() and float(told.nonfinite.total) == 24
    assert jnp.isnan(run(jnp.ones((8, 4)), Beyond(2))[0]).all()


@pytest.mark.parametrize("experts", [4, 12])
def test_experts_not_divisible_by_the_mesh_axis_are_refused(experts):
    with pytest.raises(
        ValueError,
        match=rf"`experts`={experts}, of .*`data=8` does not divide {experts}.*multiple of 8",
    ):
        after_a_step(replace(CONFIG, experts=experts), *MESHES["one axis"])


@pytest.mark.representative()
@pytest.mark.long("data=2,expert=4-rules1-None", "data=4,model=2-rules2-None")
@pytest.mark.parametrize(
    ("mesh", "rules", "manual"),
    [
        ("data=2,expert=4", sl.rules.data | sl.AxisRules(experts=("data", "expert")), None),
        ("data=2,expert=4", sl.rules.data | sl.AxisRules(experts=("expert", "data")), None),
        ("data=4,model=2", sl.rules.experts | sl.rules.tensor | sl.AxisRules(experts=("data", "model"), mlp=None), None),
        ("data=2,expert=4", BOTH | sl.AxisRules(experts=("data", "expert")), ("expert",)),
    ],
)  # fmt: skip
def test_experts_over_partly_manual_axes_are_refused(mesh, rules, manual):
    strategy = sl.Strategy(mesh=mesh, rules=rules, manual=manual)
    config = replace(CONFIG, form="scatter")
    state = sl.init(
        lambda: decoder.MoE(config, rngs=nnx.Rngs(0)), OPTIMIZER, strategy, abstract=True
    )
    with pytest.raises(ValueError, match=r"of which the step is manual over \('\w+',\) alone"):
        sl.train_step(decoder.loss, strategy).trace(state, TOKENS)
    automatic = replace(strategy, manual=())
    sl.train_step(decoder.loss, automatic).trace(
        replace(state, layout=replace(state.layout, strategy=automatic)), TOKENS
    )


@pytest.mark.long
def test_expert_weights_that_are_not_sharded_are_refused():
    """The rule asks for an axis, and the parameter was named otherwise: that is an error, never a
    layer without it.
    """
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.experts)
    make = lambda: {"gate": jnp.ones((4, 8)), "up": jnp.ones((8, 4, 4))}
    x = jnp.ones((8, 2, 4))

    def loss(model, x, rng):
        y, _ = moe(x, TopK(1), lambda w, x: x @ w, gate=model["gate"], weights=model["up"])
        return jnp.mean(y)

    def trace(names, strategy):
        state = sl.init(
            lambda: sl.annotate(make(), {"up": names}), optax.sgd(0.1), strategy, abstract=True
        )
        sl.train_step(loss, strategy).trace(state, x)

    whole, automatic = (None, None, None), replace(strategy, manual=())
    with pytest.raises(
        ValueError,
        match="should have 1 experts along dim 0.*All of them are here: name .* `experts`",
    ):
        trace(whole, strategy)
    with pytest.raises(
        ValueError,
        match="which the rule `experts` splits over `data`, and no parameter has a dim of that",
    ):
        trace(whole, automatic)  # where the layer sees all of them in any case
    trace(("experts", None, None), strategy)
    trace(("experts", None, None), automatic)
    trace(P("data", None, None), automatic)
    trace(whole, replace(automatic, rules=sl.rules.experts | sl.AxisRules(experts=None)))


def test_expert_weights_that_are_not_sharded_are_refused_by_every_step():
    """Also where the layer is inside a `jax.jit`, which is not traced again where nothing has
    changed.
    """
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.experts, manual=())

    @jax.jit
    def layer(model, x):
        return moe(x, TopK(1), lambda w, x: x @ w, gate=model["gate"], weights=model["up"])[0]

    make = lambda: {"gate": jnp.ones((4, 8)), "up": jnp.ones((8, 4, 4))}
    for _ in range(2):
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        step = sl.train_step(lambda model, x, rng: jnp.mean(layer(model, x)), strategy)
        with pytest.raises(ValueError, match="and no parameter has a dim of that"):
            step.trace(state, jnp.ones((8, 2, 4)))


@pytest.mark.long
def test_experts_work_in_a_linen_module():
    """Its boxes name the experts, and the step's form is as one device's."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.normal(0.5)
            gate = self.param("gate", init, (4, 8))
            # All where the model is made, and in the step this device's.
            shape = sl.experts.local_experts(8), 4, 4
            up = self.param(
                "up", nn.with_logical_partitioning(init, ("experts", None, None)), shape
            )
            return moe(x, Top2(), lambda w, x: jnp.tanh(x @ w), gate=gate, weights=up)

    x = np.random.default_rng(0).normal(size=(16, 6, 4)).astype(np.float32)

    def loss(variables, x, rng):
        y, told = Layer().apply(variables, x)
        error = jnp.square(y - x).mean((1, 2))
        return sl.weighted_mean(error.sum(), error.size) + told.balance, told.metrics

    def after(mesh):
        strategy = sl.Strategy(mesh=mesh, rules=sl.rules.experts)
        state = sl.init(
            lambda: Layer().init(jax.random.key(0), jnp.ones((8, 6, 4))), OPTIMIZER, strategy
        )
        state, metrics = sl.train_step(loss, strategy)(state, x)
        return jax.device_get((state.params, metrics["loss"]))

    one = sl.make_mesh("data=1", devices=jax.devices()[:1])
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), after("data=8"), after(one)
    )


# The compiled program


MACHINES = [
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]


@pytest.mark.representative("scatter-step-v5e:2x4", "scatter-step-h200:1x1x8")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("form", "manual"),
    [("scatter", None), ("einsum", ())],
    ids=["scatter-step", "einsum-annotations"],
)
def test_experts_compile_to_the_collectives_of_the_paper(machine, manual, form):
    """Two all-to-alls a layer forward and two backward, of the places of a device's tokens; and
    each weight's sum.
    """
    mesh = mesh_on(machine, "data=8")
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.experts, manual=manual)
    config = replace(
        CONFIG, width=128, hidden=256, heads=2, context=64, vocab=128, router=Top2(), form=form
    )
    state = sl.init(
        lambda: decoder.MoE(config, rngs=nnx.Rngs(0)), OPTIMIZER, strategy, abstract=True
    )
    batch = {"tokens": jax.ShapeDtypeStruct((16, 65), "int32")}
    with jax.default_matmul_precision("highest"):
        lowered = sl.train_step(decoder.loss, strategy).lower(state, batch)
    found = sl.testing.collectives(compile_for(mesh, lowered), mesh)
    sent = [one for one in found if one.kind == "all-to-all"]
    places = 2 * 2 * 64 * 128 * 4  # choices x tokens of a device x width, in float32
    assert sum(one.times for one in sent) == 4 * config.layers
    assert {one.operand_bytes for one in sent} == {places}
    others = {one.kind for one in found} - {"all-to-all"}
    assert others == {"all-reduce"}
    dense = sum(x.size for path, x in named_leaves(state.params) if decoder.stacked(path, x) < 2)
    summed = sum(one.total_bytes for one in found if one.kind == "all-reduce") / (2 * 7 / 8)
    # The partitioner sums what comes to a tied embedding from each end by itself.
    twice = 0 if manual is None else config.vocab * config.width
    assert 4 * (dense + twice) <= summed < 4.01 * (dense + twice)


def test_moe_presets_have_the_published_parameter_counts():
    def count(make):
        with sl.unsharded():
            return sum(
                math.prod(x.shape)
                for x in jax.tree.leaves(jax.eval_shape(lambda: nnx.state(make(), nnx.Param)))
            )

    assert count(lambda: decoder.MoE(decoder.mixtral_8x7b(), rngs=nnx.Rngs(0))) == 46_702_792_704
    sizes = {128: 37e9, 512: 150e9, 2048: 600e9}
    for experts, paper in sizes.items():
        config = translation.gshard(36, experts)
        assert (
            1 < count(lambda c=config: translation.Translation(c, rngs=nnx.Rngs(0))) / paper < 1.07
        )


# Translation


@pytest.mark.long
def test_translation_is_unchanged_by_padding():
    config = translation.tiny(width=16, heads=2, context=12, vocab=32, hidden=24, router=TopK(2))
    with sl.unsharded():
        model = translation.Translation(config, rngs=nnx.Rngs(0))
        plain = jax.jit(lambda source, target: model.translated(source, target)[0])
        aware = jax.jit(lambda source, target, real: model.translated(source, target, real)[0])
        source, target = np.random.default_rng(0).integers(1, 32, (2, 3, 6))
        padded = np.pad(source, ((0, 0), (0, 4)))
        alone, beside = (
            aware(source, target, np.ones(source.shape, bool)),
            aware(padded, target, padded != 0),
        )
        np.testing.assert_allclose(alone, beside, atol=1e-5)
        later, other = target.copy(), source.copy()
        later[:, 3:] = 5  # the decoder is causal
        np.testing.assert_allclose(
            plain(source, later)[:, :3], plain(source, target)[:, :3], atol=1e-5
        )
        other[:, -1] = (source[:, -1] + 1) % 32  # and the encoder is not
        assert not np.allclose(plain(other, target)[:, 0], plain(source, target)[:, 0])


@pytest.mark.exhaustive
@pytest.mark.long
def test_translation_on_eight_devices_matches_one_device():
    config = translation.tiny(width=16, heads=2, context=8, vocab=32, hidden=24)
    random = np.random.default_rng(0)
    batch = {
        "source": random.integers(0, 32, (16, 8)),
        "target": random.integers(0, 32, (16, 9)),
        "pad": np.zeros(16, int),
    }

    def after(mesh):
        strategy = sl.Strategy(mesh=mesh, rules=sl.rules.experts)
        state = sl.init(
            lambda: translation.Translation(config, rngs=nnx.Rngs(0)), OPTIMIZER, strategy
        )
        state, metrics = sl.train_step(translation.loss, strategy)(
            state, jax.tree.map(np.int32, batch)
        )
        return jax.device_get((state.params, metrics["loss"], metrics["load"]))

    one = sl.make_mesh("data=1", devices=jax.devices()[:1])
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), after("data=8"), after(one)
    )


# Optimizers that update each layer and expert by itself


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer", [optax.adafactor(0.1), optax.lamb(0.1)], ids=["adafactor", "lamb"]
)
def test_per_layer_and_expert_optimizer_updates_each_member_separately(optimizer):
    random = np.random.default_rng(0)
    # Whose longest dim, that of the experts, Adafactor would factor over.
    shape = (2, 256, 130, 128)
    params, gradients = ({"stack": random.normal(size=shape).astype("f")} for _ in range(2))
    whole = sl.optimizers.per_layer_and_expert(optimizer, lambda path, leaf: 2)
    updates, state = jax.jit(whole.update)(gradients, whole.init(params), params)
    for layer, expert in ((0, 0), (1, 200)):
        p, g = params["stack"][layer, expert], gradients["stack"][layer, expert]
        alone, _ = optimizer.update(g, optimizer.init(p), p)
        np.testing.assert_allclose(updates["stack"][layer, expert], alone, rtol=2e-5, atol=1e-6)
    assert all(leaf.shape[:2] == (2, 256) for leaf in jax.tree.leaves(state))
    with pytest.raises(
        ValueError, match=r"`stack` of shape \(2, 256, 130, 128\) cannot have 5 leading dims"
    ):
        sl.optimizers.per_layer_and_expert(optimizer, lambda path, leaf: 5).init(params)


def test_per_layer_and_expert_optimizer_draws_for_each_member_by_itself():
    noisy = optax.add_noise(1.0, 0.0, key=0)
    optimizer = sl.optimizers.per_layer_and_expert(noisy, lambda path, leaf: leaf.ndim - 1)
    zeros = {"a": jnp.zeros((2, 3, 4)), "b": jnp.zeros(4), "c": jnp.zeros(4)}
    noise, state = optimizer.update(zeros, optimizer.init(zeros), zeros)
    later, _ = optimizer.update(zeros, state, zeros)
    drawn = []
    for update in (noise, later):
        drawn += [np.reshape(leaf, (-1, 4)) for leaf in jax.tree.leaves(update)]
    drawn = np.concatenate(drawn)
    assert drawn.shape == (16, 4)
    assert len(np.unique(drawn)) == drawn.size


def test_per_layer_and_expert_optimizer_state_is_sharded_like_experts():
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.experts)
    optimizer = sl.optimizers.per_layer_and_expert(
        optax.adafactor(0.1, min_dim_size_to_factor=8), decoder.stacked
    )
    state = sl.init(
        lambda: decoder.MoE(CONFIG, rngs=nnx.Rngs(0)), optimizer, strategy, abstract=True
    )
    found = {
        path: leaf.sharding.spec
        for path, leaf in named_leaves(state.opt_state)
        if "expert/mlp/up" in path
    }
    assert found and all(spec[1] == "data" for spec in found.values()), found


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.parametrize(("model", "kind"), [(decoder, "MoE"), (translation, "Translation")])
def test_moe_models_fused_loss_equals_the_plain_loss(model, kind):
    tokens = np.random.default_rng(0).integers(0, 30, (2, 9))
    batch = {"tokens": tokens} if kind == "MoE" else {"source": tokens, "target": tokens}

    def of(**changes):
        config = model.tiny(
            width=16, heads=2, context=12, vocab=30, vocab_multiple=8, hidden=24, **changes
        )
        loss = lambda: (
            model.loss(getattr(model, kind)(config, rngs=nnx.Rngs(0)), batch)[1][
                "cross_entropy"
            ].total
        )
        with sl.unsharded():
            called = [call.op for call in sl.kernels.explain(loss).calls]
            return jax.jit(loss)(), called

    (fused, called), (plain, none) = of(fused_loss=True, kernels=None), of()
    always = {"attention"} if kind != "MoE" else {"attention", "grouped_matmul"}
    assert set(called) == {*always, "layer_norm", "linear_cross_entropy"}
    assert set(none) == always
    np.testing.assert_allclose(fused, plain, rtol=1e-5)


@pytest.mark.long("dropless")
@pytest.mark.parametrize("form", ["scatter", "dropless"])
def test_groups_of_several_examples_are_no_mistake_of_the_loss(form):
    """Whoever asks for such groups is not warned that examples depend on each other."""
    capacity = None if form == "dropless" else 1.25
    config = replace(decoder.tiny(), router=TopK(2, capacity=capacity), form=form, group=32)
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.experts)
    state = sl.init(lambda: decoder.MoE(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
    batch = {"tokens": np.ones((16, 17), np.int32)}
    _, metrics = sl.train_step(decoder.loss, strategy)(state, batch)
    assert np.isfinite(float(metrics["loss"]))
