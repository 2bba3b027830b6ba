"""Which values differ from device to device: by the walk over the jaxpr, and by running it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.step._varying import varying_outputs

AXES = ("data", "pod")


def later(x, same):
    """After three turns the last of the carries has met what the first one did not."""
    return lax.scan(lambda c, _: ((x.sum(), c[0], c[1]), None), (same, same, same), None, length=3)[
        0
    ][2]


CASES = {
    "the examples": (lambda x, same: x.sum(), True),
    "what all have": (lambda x, same: same * 2, False),
    "summed over all": (lambda x, same: lax.psum(x.sum(), AXES), False),
    "summed over some": (lambda x, same: lax.psum(x.sum(), "data"), True),
    "summed in turn": (lambda x, same: lax.pmean(lax.pmax(x.sum(), "pod"), "data"), False),
    "gathered": (lambda x, same: lax.all_gather(x, AXES).sum(), False),
    "the device's number": (lambda x, same: same + lax.axis_index("pod"), True),
    "a carry, later": (later, True),
    "a carry that stays": (lambda x, same: lax.scan(lambda c, r: (c + 1, r), same, x)[0], False),
    "stacked": (lambda x, same: lax.scan(lambda c, r: (c, r.sum()), same, x)[1].sum(), True),
    "as often as": (
        lambda x, same: lax.while_loop(lambda c: c < x.sum(), lambda c: c + 1, same),
        True,
    ),
    "a loop of all": (
        lambda x, same: lax.while_loop(lambda c: c < 9, lambda c: c + 1, same),
        False,
    ),
    "one of two": (lambda x, same: lax.cond(x.sum() > 0, lambda s: s, lambda s: s + 1, same), True),
    "either of two": (
        lambda x, same: lax.cond(same > 0, lambda s: s, lambda s: s + 1, same),
        False,
    ),
    "inside a jit": (jax.jit(lambda x, same: lax.psum(x, AXES).sum()), False),
    "inside a checkpoint": (jax.checkpoint(lambda x, same: jnp.sin(x).sum()), True),
    "a gradient": (lambda x, same: jax.grad(lambda s: jnp.sum(s * x))(same), True),
}


@pytest.mark.parametrize("case", CASES)
def test_varying_outputs_match_what_devices_compute(case):
    function, varies = CASES[case]
    mesh = sl.make_mesh("data=4,pod=2")
    found = []

    def on_each(x, same):
        found[:] = varying_outputs(jax.make_jaxpr(function)(x, same), [True, False], AXES)
        return function(x, same)[None]

    x = np.random.default_rng(0).normal(size=(16, 3)).astype("f")
    run = jax.shard_map(
        on_each, mesh=mesh, in_specs=(P(AXES), P()), out_specs=P(AXES), check_vma=False
    )
    values = np.asarray(jax.jit(run)(x, jnp.float32(-7)))
    assert found == [varies]
    assert (len(set(values.tolist())) > 1) is varies


def test_parameter_shard_used_as_the_whole_parameter_is_refused():
    rules = sl.rules.data | sl.rules.experts
    numbers = np.arange(16, dtype=np.int32) % 8

    def make():
        return sl.annotate({"e": jnp.arange(16.0).reshape(8, 2)}, {"e": ("experts", "embed")})

    def loss(model, chosen, key):
        return jnp.mean(model["e"][chosen % 8] ** 2)

    strategy = sl.Strategy(mesh="data=4,model=2", rules=rules)
    state = sl.init(make, optax.sgd(0.1), strategy)
    with pytest.raises(
        ValueError, match=r"`e` of shape \(8, 2\).*split over `data`.*shape \(2, 2\).*experts=None"
    ):
        sl.train_step(loss, strategy)(state, numbers)
    whole = sl.Strategy(
        mesh="data=4,model=2", rules=rules | sl.AxisRules(experts=None), zero=sl.Zero(3, small=0)
    )
    _, metrics = sl.train_step(loss, whole)(sl.init(make, optax.sgd(0.1), whole), numbers)
    np.testing.assert_allclose(metrics["loss"], np.mean(np.arange(16.0) ** 2))
    # Where each device has exactly one element along that dim.
    one_each = sl.Strategy(mesh="data=8", rules=rules)
    with pytest.raises(
        ValueError, match=r"shape \(1, 2\).*only its own part.*`Strategy\(manual=\('data',\)\)`"
    ):
        sl.train_step(loss, one_each)(sl.init(make, optax.sgd(0.1), one_each), numbers)
    meant = sl.Strategy(mesh="data=8", rules=rules, manual=("data",))
    _, metrics = sl.train_step(lambda model, chosen, key: jnp.mean(model["e"] ** 2), meant)(
        sl.init(make, optax.sgd(0.1), meant), numbers
    )
    np.testing.assert_allclose(metrics["loss"], np.mean(np.arange(16.0) ** 2))
    alone = sl.Strategy(mesh="data=1,model=8", rules=rules)
    sl.train_step(loss, alone)(sl.init(make, optax.sgd(0.1), alone), numbers)
