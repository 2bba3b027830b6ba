"""Routers: each held to its paper's rule by hand in NumPy, and the bias that evens the load."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.experts import (
    ExpertChoice,
    Hash,
    NoisyTopK,
    Seen,
    SigmoidTopK,
    Switch,
    Top2,
    TopK,
    balanced,
    moe,
)
from shardlib.experts._bias import with_load_error
from shardlib.experts._choose import choose
from shardlib.experts._routing import Choices, places

SEES = ExpertChoice(2.0, sees_later_tokens=True)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(x, count):
    return np.argsort(-x, -1, kind="stable")[..., :count]


def spread(expert, weight, experts):
    """Choices (..., K) as a number for each expert, zero where it is not chosen."""
    dense = np.zeros((*expert.shape[:-1], experts))
    np.put_along_axis(dense, expert, weight, -1)
    return dense


def slope(function, x, step=1e-4):
    """The gradient of a NumPy function by central differences."""
    x = x.astype(np.float64)
    found = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        found[index] = (function(up) - function(down)) / (2 * step)
    return found


def of_choices(router, seen, experts):
    """The weight of each expert for each token, by the router."""
    choices = router.choose(seen)
    one_hot = jax.nn.one_hot(choices.expert, experts) * choices.wanted[..., None]
    return (one_hot * choices.weight[..., None]).sum(-2)


# Noisy top-k, Shazeer et al. 2017


NOISE = normal(2, 6, 5, seed=1)
SPREAD = normal(2, 6, 5, seed=2)


def noisy_by_hand(logits, spread_logits, k):
    """Equations 3 to 5: H(x), and G(x), the softmax of the k largest."""
    noisy = logits + NOISE * np.log1p(np.exp(spread_logits))
    threshold = np.sort(noisy)[..., -k, None]
    return noisy, softmax(np.where(noisy >= threshold, noisy, -np.inf))


def variation(x):
    return x.var(-1) / x.mean(-1) ** 2


def noisy_losses(logits, spread_logits, k):
    """Equations 6 to 11: CV² of the importance, and that of the smooth load, by group."""
    noisy, gates = noisy_by_hand(logits, spread_logits, k)
    chance = np.zeros(noisy.shape)
    for g, s, e in np.ndindex(noisy.shape):
        others = np.sort(np.delete(noisy[g, s], e))
        distance = (logits[g, s, e] - others[-k]) / np.log1p(np.exp(spread_logits[g, s, e]))
        chance[g, s, e] = (1 + math.erf(distance / math.sqrt(2))) / 2
    return variation(gates.sum(1)), variation(chance.sum(1))


@pytest.mark.parametrize("k", [1, 2])
def test_noisy_top_k_router_follows_its_paper(k):
    router, logits = NoisyTopK(k, importance=0.3, load=0.7), normal(2, 6, 5)
    seen = Seen(logits, normal=NOISE, noise_logits=SPREAD)
    _, gates = noisy_by_hand(logits, SPREAD, k)
    np.testing.assert_allclose(of_choices(router, seen, 5), gates, atol=1e-6)
    importance, load = noisy_losses(logits, SPREAD, k)
    found = router.balance(seen, router.choose(seen))
    np.testing.assert_allclose(found, 0.3 * importance + 0.7 * load, rtol=1e-5)


def test_noisy_top_k_gradients_match_differences():
    """To logits, and to those of the noise, through weights and both losses."""
    router, logits, factors = NoisyTopK(2), normal(2, 6, 5), normal(2, 6, 5, seed=3)

    def found(logits, spread_logits):
        seen = Seen(logits, normal=NOISE, noise_logits=spread_logits)
        loss = router.balance(seen, router.choose(seen)).sum()
        return loss + (of_choices(router, seen, 5) * factors).sum()

    def by_hand(logits, spread_logits):
        losses = sum(loss.sum() for loss in noisy_losses(logits, spread_logits, 2))
        return losses + (noisy_by_hand(logits, spread_logits, 2)[1] * factors).sum()

    gradients = jax.jit(jax.grad(found, (0, 1)))(logits, SPREAD)
    expected = (
        slope(lambda x: by_hand(x, SPREAD), logits),
        slope(lambda x: by_hand(logits, x), SPREAD),
    )
    for gradient, difference in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, difference, rtol=2e-3, atol=2e-4)


def test_noisy_top_k_without_a_key_has_no_noise_and_counts_tokens():
    router, logits = NoisyTopK(2), normal(2, 6, 5)
    seen = Seen(logits, noise_logits=SPREAD)
    dense = spread(best(logits, 2), softmax(np.sort(logits)[..., :-3:-1]), 5)
    np.testing.assert_allclose(of_choices(router, seen, 5), dense, atol=1e-6)
    expected = variation(dense.sum(1)) + variation((dense > 0).sum(1))
    np.testing.assert_allclose(router.balance(seen, router.choose(seen)), expected, rtol=1e-5)
    everyone = NoisyTopK(5)
    training = Seen(logits, normal=NOISE, noise_logits=SPREAD)
    assert (everyone.chance(training, everyone.choose(training)) == 1).all()


# Sigmoid gates and groups, DeepSeek-V2 and V3


BIAS = np.array([0.4, -0.3, 0.0, 0.2, -0.1, 0.3, 0.0, -0.2], np.float32)


def groups_by_hand(scores, groups, taken, largest):
    """Scores of the groups whose largest add up to most, and -inf for all others."""
    by_group = scores.reshape(*scores.shape[:-1], groups, -1)
    worth = np.sort(by_group)[..., -largest:].sum(-1)
    kept = np.full(by_group.shape, -np.inf)
    for index in np.ndindex(worth.shape[:-1]):
        for group in best(worth[index], taken):
            kept[(*index, group)] = by_group[(*index, group)]
    return kept.reshape(scores.shape)


def v3_by_hand(logits, chosen, normalize, scale):
    """Equations 12 to 16 of DeepSeek-V3, for experts that are chosen already."""
    weight = np.take_along_axis(sigmoid(logits), chosen, -1)
    if normalize:
        weight = weight / weight.sum(-1, keepdims=True)
    return spread(chosen, weight * scale, logits.shape[-1])


@pytest.mark.parametrize(("groups", "taken"), [(1, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("normalize", [True, False])
def test_sigmoid_router_follows_deepseek_v3(groups, taken, normalize):
    logits, factors = normal(2, 6, 8), normal(2, 6, 8, seed=3)
    router = SigmoidTopK(3, scale=2.5, normalize=normalize, groups=groups, groups_taken=taken)
    largest = min(2, 8 // groups)
    chosen = best(groups_by_hand(sigmoid(logits) + BIAS, groups, taken, largest), 3)
    by_hand = lambda x: v3_by_hand(x, chosen, normalize, 2.5)
    found = lambda x: of_choices(router, Seen(x, bias=BIAS), 8)
    np.testing.assert_allclose(found(logits), by_hand(logits), rtol=1e-5)
    gradient = jax.grad(lambda x: (found(x) * factors).sum())(logits)
    expected = slope(lambda x: (by_hand(x) * factors).sum(), logits)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5)


def test_sigmoid_router_loss_is_that_of_deepseek_v3_sequences():
    """Equations 17 to 20: f counts the best by score, without bias; P is of normalized scores."""
    logits, router = normal(2, 6, 8), SigmoidTopK(3)
    top = spread(best(sigmoid(logits), 3), 1.0, 8)

    def by_hand(x):
        share = sigmoid(x) / sigmoid(x).sum(-1, keepdims=True)
        return ((8 / (3 * 6) * top.sum(1)) * share.mean(1)).sum(-1)

    found = lambda x: router.balance(Seen(x, bias=BIAS), router.choose(Seen(x, bias=BIAS)))
    np.testing.assert_allclose(found(logits), by_hand(logits), rtol=1e-5)
    gradient = jax.grad(lambda x: found(x).sum())(logits)
    np.testing.assert_allclose(
        gradient, slope(lambda x: by_hand(x).sum(), logits), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("renormalize", [True, False])
def test_top_k_router_with_groups_follows_deepseek_v2(renormalize):
    """A group is as good as its likeliest expert; weights are of the softmax over all."""
    logits = normal(2, 6, 8)
    chosen = best(groups_by_hand(softmax(logits), 4, 2, 1), 3)
    weight = np.take_along_axis(softmax(logits), chosen, -1)
    if renormalize:
        weight = weight / weight.sum(-1, keepdims=True)
    router = TopK(3, renormalize=renormalize, groups=4, groups_taken=2)
    found = of_choices(router, Seen(logits), 8)
    np.testing.assert_allclose(found, spread(chosen, weight, 8), rtol=1e-5)
    assert ((np.asarray(found).reshape(2, 6, 4, 2) > 0).any(-1).sum(-1) <= 2).all()


# Hash layers, Roller et al. 2021


def finalizer(word):
    """MurmurHash3's, in Python's whole numbers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * factor % 2**32
    return word ^ (word >> 16)


@pytest.mark.parametrize("k", [1, 3])
def test_hash_router_sends_an_id_to_the_experts_of_largest_hash(k):
    ids, router = np.array([[0, 5, 7, 2**31 - 1], [5, -1, 5, 3]]), Hash(k, seed=11)
    choices = router.choose(Seen(jnp.zeros((2, 4, 6)), ids=jnp.asarray(ids)))
    for g, s in np.ndindex(ids.shape):
        word = finalizer((int(ids[g, s]) + finalizer(11)) % 2**32)
        hashes = [finalizer((word + expert) % 2**32) >> 8 for expert in range(6)]
        assert choices.expert[g, s].tolist() == best(np.array(hashes), k).tolist()
    np.testing.assert_allclose(choices.weight, 1 / k)
    np.testing.assert_allclose(choices.probability.sum(-1), 1, rtol=1e-6)


def test_hash_router_is_even_over_many_ids_and_differs_by_seed():
    seen = Seen(jnp.zeros((4096, 8)), ids=jnp.arange(4096))
    first, other = (Hash(seed=seed).choose(seen).expert[:, 0] for seed in (0, 1))
    assert np.bincount(first, minlength=8).min() > 4096 / 8 * 0.85
    assert 0.08 < (first == other).mean() < 0.17


# Expert choice, Zhou et al. 2022


def expert_choice_by_hand(logits, count, real=None):
    """S = softmax(x W), and each expert's tokens of largest S, weighed by it."""
    share = softmax(logits)
    ranked = share if real is None else np.where(real[..., None], share, -1)
    taken = np.zeros(share.shape)
    for g in range(len(share)):
        for e in range(share.shape[-1]):
            taken[g, best(ranked[g, :, e], count), e] = 1
    return share * taken * (ranked >= 0)


@pytest.mark.parametrize("form", ["scatter", "einsum"])
@pytest.mark.parametrize("capacity", [0.5, 2.0, 4.0])
def test_expert_choice_router_follows_its_paper(form, capacity):
    logits = normal(2, 12, 4)
    router = ExpertChoice(capacity, sees_later_tokens=True)
    y, told = run(router, logits, form=form)
    weight = expert_choice_by_hand(logits, math.ceil(capacity * 12 / 4))
    np.testing.assert_allclose(y[..., -1], (weight * np.arange(1, 5)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(told.load.total / told.load.weight, 1)
    alone = (weight.sum(-1) == 0).sum()
    assert float(told.dropped.total) == alone and float(told.dropped.weight) == 24
    by_token = router.choose(Seen(logits))
    np.testing.assert_allclose(np.where(by_token.wanted, by_token.weight, 0), weight, rtol=1e-6)


@pytest.mark.long
def test_expert_choice_forms_give_equal_gradients():
    x, gate, weights = normal(2, 8, 6), normal(6, 4, seed=1), normal(4, 6, 6, seed=2)

    def total(form, x, gate, weights):
        with sl.unsharded():
            y, _ = moe(x, SEES, lambda w, x: jnp.tanh(x @ w), gate=gate, weights=weights, form=form)
        return (y * jnp.arange(6)).sum()

    found = [
        jax.jit(jax.grad(partial(total, form), (0, 1, 2)))(x, gate, weights)
        for form in ("scatter", "einsum")
    ]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), *found)


def test_expert_choice_takes_no_padding():
    logits, real = normal(2, 12, 4), np.arange(12) < np.array([[5], [12]])
    y, told = run(SEES, logits, real=jnp.asarray(real))
    weight = expert_choice_by_hand(logits, 6, real)
    np.testing.assert_allclose(y[..., -1], (weight * np.arange(1, 5)).sum(-1), rtol=1e-5)
    assert told.load.weight == 4 * (5 + 6) and told.dropped.weight == 17


def test_expert_choice_sees_later_tokens_only_if_asked_for_by_name():
    with pytest.raises(
        ValueError,
        match=r"a causal model does not have when it writes.*`moe\(causal=False\)`.*sees_later_tokens=True",
    ):
        run(ExpertChoice(), normal(1, 4, 2))
    run(ExpertChoice(), normal(1, 4, 2), causal=False)
    logits = normal(1, 8, 2)
    later = logits.copy()
    later[0, -1] = 9, -9
    first, other = (run(ExpertChoice(1.0, True), given)[0][0, :-1] for given in (logits, later))
    assert not np.allclose(first, other)


# The layer, with any of them


@partial(jax.jit, static_argnames=("router", "form", "causal"))
def run(router, given, *, key=None, real=None, form="scatter", causal=True, **inputs):
    """The layer whose gate gives these logits, and experts that multiply by number and one."""
    count = given.shape[-1]
    x = jnp.concatenate([given, jnp.ones((*given.shape[:2], 1))], -1)
    return apply(router, x, jnp.eye(count + 1, count), key, real, form, causal, **inputs)


def apply(router, x, gate, key=None, real=None, form="scatter", causal=True, **inputs):
    with sl.unsharded():
        return moe(
            x,
            router,
            lambda w, x: w[:, None, None] * x,
            gate=gate,
            weights=jnp.arange(1.0, gate.shape[1] + 1),
            key=key,
            real=real,
            form=form,
            causal=causal,
            **inputs,
        )


IDS = np.random.default_rng(5).integers(0, 99, (2, 12)).astype(np.int32)
ROUTERS = {
    "noisy": (NoisyTopK(2), {"noise_gate": jnp.full((5, 4), 0.3)}),
    "sigmoid": (SigmoidTopK(2, groups=2, groups_taken=1), {"bias": BIAS[:4]}),
    "groups": (TopK(2, groups=2, groups_taken=1), {}),
    "hash": (Hash(2, capacity=None), {"ids": IDS}),
}


@pytest.mark.representative()
@pytest.mark.long("groups")
@pytest.mark.parametrize("name", ROUTERS)
def test_padding_counts_for_nothing_in_any_router(name):
    """What a group of real tokens tells is what it tells without padding beside it."""
    router, inputs = ROUTERS[name]
    given, real = normal(2, 12, 4), np.arange(12) < np.array([[6], [6]])
    y, told = run(router, given, real=jnp.asarray(real), **inputs)
    cut = {**inputs, "ids": IDS[:, :6]} if "ids" in inputs else inputs
    alone, of_real = run(router, given[:, :6], **cut)
    assert not y[:, 6:].any()
    np.testing.assert_allclose(y[:, :6], alone, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), told, of_real)


def test_noise_is_drawn_from_the_key_alone():
    router, inputs = ROUTERS["noisy"]
    given = normal(2, 12, 4)
    keys = (jax.random.key(0), jax.random.key(0), jax.random.key(1))
    first, again, other = (run(router, given, key=key, **inputs)[0] for key in keys)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    still = [run(router, given, **inputs)[0] for _ in range(2)]
    np.testing.assert_array_equal(*still)


def test_entropy_of_a_sigmoid_router_is_of_normalized_scores():
    given = normal(2, 12, 4)
    _, told = run(SigmoidTopK(2), given)
    share = sigmoid(given) / sigmoid(given).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        told.entropy.total / 24, -(share * np.log(share)).sum(-1).mean(), rtol=1e-5
    )
    _, told = run(Hash(2, capacity=None), given, ids=IDS)
    np.testing.assert_allclose(told.entropy.total / 24, math.log(2), rtol=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TopK(2, groups=2, groups_taken=3), "groups_taken=3.*at least 1 and at most 2"),
        (lambda: SigmoidTopK(2, groups=2, groups_taken=0), r"groups_taken=0.*of none it could take no expert"),
        (lambda: SigmoidTopK(2, groups=0), "groups=0.*at least 1"),
        (lambda: SigmoidTopK(2, scale=0), "scale=0.*above 0"),
        (lambda: SigmoidTopK(2, normalize=1), "normalize=1.*True or False"),
        (lambda: NoisyTopK(0), "choices=0.*at least 1"),
        (lambda: NoisyTopK(2, load=-1), "load=-1.*at least 0"),
        (lambda: Hash(seed=-1), "seed=-1.*at least 0"),
        (lambda: ExpertChoice(0), "capacity=0.*above 0"),
        (lambda: ExpertChoice(None), "capacity=None.*how many experts a token has on average"),
        (lambda: ExpertChoice(sees_later_tokens="yes"), "sees_later_tokens='yes'.*True or False"),
        (lambda: balanced(3), "balanced.optimizer=3"),
        (lambda: balanced(optax.sgd(1), speed=-1), "balanced.speed=-1.*at least 0"),
        (lambda: balanced(optax.sgd(1), pattern="("), "no regular expression"),
        (lambda: balanced(optax.sgd(1)).init({"bias": jnp.ones(2)}), r"matches the path of no parameter.*'bias'"),
        (lambda: balanced(sl.optimizers.onebit_adam(0.1, freeze=1)), "says itself what workers send"),
        (lambda: balanced(sl.optimizers.zero_one_adam(0.1, steps=9)), "balanced.*what workers send"),
        (lambda: sl.optimizers.delayed(sl.optimizers.zero_one_adam(0.1, steps=9), 1), "delayed.*what workers send"),
    ],
)  # fmt: skip
def test_router_settings_out_of_range_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


GATE = jnp.eye(5, 4)


@pytest.mark.parametrize(
    ("router", "inputs", "said"),
    [
        (SigmoidTopK(5), {}, "sends each token to 5 experts, and there are 4"),
        (SigmoidTopK(1, groups=3, groups_taken=1), {}, "3 groups of experts, and there are 4.*equal size"),
        (SigmoidTopK(3, groups=2, groups_taken=1), {}, "3 experts of 1 groups, which have 2 of 4"),
        (SigmoidTopK(2), {"bias": jnp.array([0, jnp.nan, 0, jnp.inf])}, "bias=.*not finite for 2 of 4 experts, the first being expert 1: nan"),
        (SigmoidTopK(2), {"bias": jnp.zeros(2)}, r"real numbers, of shape \(4,\); got float32\[2\].*whole on every device"),
        (TopK(2), {"bias": jnp.zeros(4)}, r"`moe\(bias=...\)` was given, and TopK.* does not read it"),
        (TopK(2), {"ids": IDS}, r"`moe\(ids=...\)` was given"),
        (Hash(), {}, r"needs `moe\(ids=...\)`"),
        (Hash(), {"ids": IDS[:, :3]}, r"whole numbers, of shape \(2, 12\); got int32\[2, 3\]"),
        (Hash(), {"ids": IDS * 1.0}, "whole numbers"),
        (NoisyTopK(2), {}, r"needs `moe\(noise_gate=...\)`"),
        (NoisyTopK(2), {"noise_gate": jnp.ones((4, 5))}, r"of shape \(5, 4\); got float32\[4, 5\]"),
        (TopK(2), {"causal": None}, "causal=None.*True or False"),
    ],
)  # fmt: skip
def test_moe_refuses_inputs_that_do_not_fit_the_router(router, inputs, said):
    with pytest.raises(ValueError, match=said):
        apply(router, jnp.ones((2, 12, 5)), GATE, **inputs)


def test_traced_bias_that_is_not_finite_makes_the_output_nan():
    given = normal(2, 12, 4)
    y, _ = run(SigmoidTopK(2), given, bias=jnp.array([0, 0, jnp.inf, 0]))
    assert jnp.isnan(y).all()


NONFINITE = [
    (Switch(capacity=None, jitter=0.0), "scatter", {}),
    (TopK(2), "scatter", {}),
    (Top2(capacity=4.0), "einsum", {}),
    (SigmoidTopK(2), "scatter", {}),
    (Hash(capacity=None), "scatter", {"ids": np.zeros((2, 12), np.int32)}),
    (ExpertChoice(4.0), "scatter", {"causal": False}),
    (ExpertChoice(4.0), "einsum", {"causal": False}),
]


@pytest.mark.parametrize(
    ("router", "form", "more"),
    NONFINITE,
    ids=[f"{type(one[0]).__name__}-{one[1]}" for one in NONFINITE],
)
def test_a_traced_logit_that_is_not_finite_makes_its_token_nan(router, form, more):
    """Also one of an expert that is not chosen; no other token is nan."""
    x = jnp.asarray(normal(2, 12, 5)).at[..., 0].set(0).at[1, 3, 0].set(1e30)
    gate = jnp.asarray(normal(5, 4, seed=1)).at[0].set(jnp.array([0, 0, 0, -1e30]))
    y, told = jax.jit(lambda x: apply(router, x, gate, form=form, **more))(x)
    assert float(told.nonfinite.total) == 1
    expected = np.zeros((2, 12, 5), bool)
    expected[1, 3] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


def test_padding_and_dropped_tokens_are_zeros_whatever_their_logits():
    given = jnp.asarray(normal(2, 12, 4)).at[..., 0].set(9).at[:, -1].set(-jnp.inf)
    router = Switch(capacity=0.5, jitter=0.0)
    y, told = jax.jit(lambda given: run(router, given))(given)
    assert float(told.nonfinite.total) == 2 and not np.isnan(y[:, :-1]).any()
    dropped = ~np.asarray(y[:, :-1]).any(-1)
    assert dropped.any()
    real = jnp.arange(12)[None].repeat(2, 0) < 11
    y, told = jax.jit(lambda given: run(router, given, real=real))(given)
    assert float(told.nonfinite.total) == 0 and not y[:, -1].any()


# The bias that evens the load, DeepSeek-V3


def test_gradient_of_the_bias_is_the_load_error_whatever_the_loss():
    """Of unwanted choices nothing; and an even load is exactly zero."""
    expert = jnp.array([[[0, 1], [0, 2], [0, 1]]])
    wanted = jnp.array([[[True, True], [True, True], [True, False]]])
    weight = jnp.full(expert.shape, 0.5)

    def loss(bias, factor, wanted):
        choices = with_load_error(Choices(expert, weight, wanted), bias)
        return (choices.weight * factor).sum()

    counts = np.array([3, 1, 1])
    for factor in (1.0, -7.0):
        gradient = jax.grad(loss)(jnp.zeros(3), factor, wanted)
        np.testing.assert_array_equal(gradient * 2.0**40, 3 * counts - counts.sum())
    even = jax.grad(loss)(
        jnp.zeros(3),
        1.0,
        jnp.ones(expert.shape, bool)
        .at[0, 0, 0]
        .set(False)
        .at[0, 1, 0]
        .set(False)
        .at[0, 0, 1]
        .set(False),
    )
    np.testing.assert_array_equal(even, 0)


def test_bias_of_a_layer_gets_the_error_before_tokens_are_dropped():
    given = normal(2, 12, 4)

    def loss(bias, scale):
        y, told = run(SigmoidTopK(2, capacity=0.5), given, bias=bias)
        return scale * y.sum() + told.balance.total + told.z.total

    counts = (spread(best(sigmoid(given) + BIAS[:4], 2), 1.0, 4)).sum((0, 1))
    gradient = jax.jit(jax.grad(loss))(BIAS[:4], 3.0)
    np.testing.assert_array_equal(gradient * 2.0**40, 4 * counts - 48)
    assert 0 < abs(gradient).max() < 1e-9  # no norm sees it


def test_balanced_moves_biases_by_sign_and_leaves_the_rest_to_the_optimizer():
    params = {"a": {"router_bias": jnp.array([1.0, 2.0, 3.0])}, "w": jnp.array([3.0, 4.0])}
    gradients = {"a": {"router_bias": jnp.array([2e-12, 0.0, -5.0])}, "w": jnp.array([3.0, 4.0])}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.5))
    whole = balanced(inner, speed=lambda step: 0.25 / (1 + step))
    state, plain = whole.init(params), inner.init({"w": params["w"]})
    for move in (0.25, 0.125):
        updates, state = whole.update(gradients, state, params)
        expected, plain = inner.update({"w": gradients["w"]}, plain, {"w": params["w"]})
        np.testing.assert_array_equal(updates["a"]["router_bias"], [-move, 0.0, move])
        np.testing.assert_array_equal(updates["w"], expected["w"])


class Layer(nnx.Module):
    """A layer of experts with whatever its router needs, on the residual stream."""

    def __init__(self, router, rngs):
        init = nnx.initializers.normal(0.5)
        make = lambda init, *dims: nnx.Param(
            sl.logical(init, *dims)(rngs.params(), [SIZES[d] for d in dims])
        )
        self.router = router
        self.gate = make(init, "embed", "routes")
        self.up = make(init, "experts", "embed", "mlp")
        reads = getattr(router, "reads", ())
        self.noise_gate = make(init, "embed", "routes") if "noise_logits" in reads else None
        self.router_bias = make(nnx.initializers.zeros, "routes") if "bias" in reads else None

    def __call__(self, x, ids=None, real=None, key=None):
        inputs = {}
        if self.noise_gate is not None:
            inputs["noise_gate"] = self.noise_gate[...]
        if self.router_bias is not None:
            inputs["bias"] = self.router_bias[...]
        if isinstance(self.router, Hash):
            inputs["ids"] = ids
        y, told = moe(
            x,
            self.router,
            lambda w, x: jnp.tanh(x @ w) @ w.mT,
            gate=self.gate[...],
            weights=self.up[...],
            real=real,
            key=key,
            **inputs,
        )
        return x + y, told


SIZES = {"embed": 6, "mlp": 5, "experts": 8, "routes": 8}
BATCH = {
    "x": normal(16, 6, 6),
    "ids": np.random.default_rng(0).integers(0, 99, (16, 6)).astype(np.int32),
    "real": np.arange(6) < np.random.default_rng(1).integers(2, 7, (16, 1)),
}


def strategy_on(devices, **options):
    mesh = sl.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    return sl.Strategy(mesh=mesh, rules=sl.rules.experts, **options)


def loss_of_layer(model, batch, rng):
    y, told = model(batch["x"], batch["ids"], batch["real"], rng)
    error = jnp.square(y - 1).sum((1, 2))
    return sl.weighted_mean(
        error.sum(), error.size
    ) + 0.1 * told.balance + 0.01 * told.z, told.metrics


def after_a_step(router, devices):
    strategy = strategy_on(devices)
    state = sl.init(lambda: Layer(router, nnx.Rngs(0)), optax.sgd(0.1), strategy)
    state, metrics = sl.train_step(loss_of_layer, strategy)(state, BATCH)
    return jax.device_get((state.params, metrics))


@pytest.mark.representative("groups", "hash", "expert choice")
@pytest.mark.long
@pytest.mark.sentinel("noisy")
@pytest.mark.parametrize(
    "router",
    [NoisyTopK(2), SigmoidTopK(3, groups=4, groups_taken=2), TopK(2, groups=2, groups_taken=1), Hash(2), SEES],
    ids=["noisy", "sigmoid", "groups", "hash", "expert choice"],
)  # fmt: skip
def test_routers_on_many_devices_match_one_device(router):
    """Values, gradients, statistics and draws, with padding and experts over the data."""
    found, expected = (after_a_step(router, devices) for devices in (8, 1))
    for told in (found, expected):
        told[1].pop("first_nonfinite")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


class Deep(nnx.Module):
    """Stacked layers, each with a bias of its own."""

    def __init__(self, rngs):
        router = SigmoidTopK(2, groups=4, groups_taken=2)
        self.blocks = sl.Layers([Plain(router, rngs) for _ in range(2)])


class Plain(Layer):
    def __call__(self, x):
        return super().__call__(x)[0]


def deep_loss(model, batch, rng):
    return jnp.square(model.blocks(batch["x"]) - 1).mean()


OPTIMIZER = balanced(optax.adamw(1e-2, weight_decay=0.1), speed=0.125)


def biases(devices, steps=3, **options):
    """The biases after some steps, as eighths, and the other parameters."""
    strategy = strategy_on(devices, **options)
    state = sl.init(lambda: Deep(nnx.Rngs(0)), OPTIMIZER, strategy)
    step = sl.train_step(deep_loss, strategy)
    for _ in range(steps):
        state, _ = step(state, {"x": BATCH["x"]})
    return jax.device_get(state.params)["blocks"]["stacked"], state, strategy


@pytest.fixture(scope="module")
def biases_on_one_device():
    return biases(1)[0]


@pytest.mark.representative("zero 2", "remat", "automatic")
@pytest.mark.long
@pytest.mark.sentinel("zero 3, microbatches")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"zero": sl.Zero(1, small=1)},
        {"zero": sl.Zero(2, small=1)},
        {"zero": sl.Zero(3, small=1), "accumulate": 2},
        {"remat": "full"},
        {"manual": ()},
    ],
    ids=["plain", "microbatches", "zero 1", "zero 2", "zero 3, microbatches", "remat", "automatic"],
)
def test_bias_in_a_step_is_bit_for_bit_that_of_one_device(biases_on_one_device, options):
    found, _, _ = biases(4, **options)
    expected = biases_on_one_device
    assert found["router_bias"].shape == (2, 8) and found["router_bias"].any()
    np.testing.assert_array_equal(found["router_bias"], expected["router_bias"])
    # Adam divides gradients of experts that little goes to by their own size.
    np.testing.assert_allclose(found["gate"], expected["gate"], rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_bias_is_summed_exactly_where_gradients_are_compressed():
    exchange = sl.collectives.OneBit("data")
    found, _, _ = biases(4, steps=1, exchange=exchange)
    expected, _, _ = biases(4, steps=1)
    assert found["router_bias"].any()
    np.testing.assert_array_equal(found["router_bias"], expected["router_bias"])


@pytest.mark.long
def test_bias_of_a_step_moves_once_by_the_load_of_the_whole_batch():
    """By hand, for the first of the layers, and evaluation leaves it where it is."""
    found, state, strategy = biases(4, steps=1, accumulate=2)
    with sl.unsharded():
        model = Deep(nnx.Rngs(0))
    gate = np.asarray(model.blocks.stacked.gate[0])
    score = sigmoid(BATCH["x"] @ gate)
    counts = spread(best(groups_by_hand(score, 4, 2, 2), 2), 1.0, 8).sum((0, 1))
    np.testing.assert_array_equal(found["router_bias"][0], -0.125 * np.sign(counts - counts.mean()))
    sl.evaluation(deep_loss, strategy)(state, [{"x": BATCH["x"]}])
    after = jax.device_get(state.params)["blocks"]["stacked"]
    np.testing.assert_array_equal(after["router_bias"], found["router_bias"])


def test_bias_evens_the_load_of_a_skewed_router():
    """Forty steps of the rule: from an expert that has all tokens to a load that is nearly even."""
    given = normal(8, 32, 4) * 0.5 + np.array([1.5, 0.5, 0, -0.5], np.float32)
    router, optimizer = SigmoidTopK(1, normalize=False), balanced(optax.sgd(0.1), speed=0.02)
    params = {"router_bias": jnp.zeros(4)}
    state, loads = optimizer.init(params), []

    @jax.jit
    def move(params, state):
        def loss(params):
            choices = choose(router, Seen(given, bias=params["router_bias"]))
            return choices.weight.sum(), (choices.expert[..., None] == jnp.arange(4)).sum((0, 1, 2))

        gradients, load = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, load

    for _ in range(40):
        params, state, load = move(params, state)
        loads.append(np.asarray(load) * 4 / load.sum())
    assert loads[0].max() > 2.5 and loads[-1].max() < 1.3 and loads[-1].min() > 0.7


def test_places_of_routers_by_capacity():
    assert places(ExpertChoice(2.0), 12, 4) == 6 and places(ExpertChoice(0.1), 12, 4) == 1
    assert places(SigmoidTopK(2), 12, 4) == 12 and places(Hash(), 12, 4) == 4
    assert [places(router, 16, 4) for router in (Top2(), Switch())] == [8, 5]
