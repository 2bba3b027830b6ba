"""1-bit Adam, and other optimizers under compressed exchanges: errors are kept and sent later, on
any mesh.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from machines import mesh_on

import shardlib as sl
from shardlib.collectives import OneBit, Quantised
from shardlib.optimizers import onebit_adam, onebit_lamb
from shardlib.step._gradient_sizes import sketch
from shardlib.step._saved_errors import saved

RULES = sl.AxisRules(batch=("pod", "data"), embed=None, mlp="model", rows=None)
NAMES = {
    "table": ("rows", "embed"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "bias": (None,),
}
B1, B2 = 0.9, 0.99


def make():
    shapes = {"table": (12, 8), "up": (8, 16), "down": (16, 8), "bias": (5,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return sl.annotate(
        {
            name: jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        },
        NAMES,
    )


def batch(seed=0):
    """Rows 9 to 11 of the table are never used."""
    random = np.random.default_rng(seed)
    return {"id": random.integers(0, 9, 16), "y": random.normal(size=(16, 8)).astype(np.float32)}


def loss(model, batch, rng):
    x = model["table"][batch["id"]]
    y = x + jnp.tanh(x @ model["up"]) @ model["down"]
    return jnp.mean((y - batch["y"]) ** 2) + jnp.mean((y[:, :5] - model["bias"]) ** 2)


def adam(freeze, **options):
    return onebit_adam(1e-2, freeze=freeze, b1=B1, b2=B2, **options)


def owed(state):
    """What the mean of all workers is owed, in the shape of each parameter."""
    errors = jax.device_get(saved(state).errors)
    return {path: worker.mean(0) + server for path, (worker, server) in errors.items()}


def run(optimizer, steps, strategy, state=None, first=0):
    state = state or sl.init(make, optimizer, strategy)
    step, metrics = sl.train_step(loss, strategy), []
    for seed in range(first, first + steps):
        state, told = step(state, batch(seed))
        metrics.append(jax.device_get(told))
    return state, metrics


@functools.cache
def two_steps_of_adam(clip):
    alone = sl.make_mesh("pod=1,data=1,model=1", devices=jax.devices()[:1])
    state, _ = run(
        optax.adam(1e-2, b1=B1, b2=B2), 2, sl.Strategy(mesh=alone, rules=RULES, clip=clip)
    )
    return jax.device_get(state.params)


gradient_of = jax.jit(jax.grad(lambda params, batch: loss(params, batch, None)))


PODS = "pod=2,data=2,model=2"
STRATEGIES = {
    "every device a worker": dict(mesh="pod=1,data=8,model=1", exchange=OneBit("data")),
    "pods, stage 1": dict(mesh=PODS, exchange=OneBit("pod"), zero=sl.Zero(1, small=0)),
    "pods, stage 2, accumulated": dict(
        mesh=PODS, exchange=OneBit("pod"), zero=sl.Zero(2, small=0), accumulate=2
    ),
    "both axes, clipped": dict(mesh=PODS, exchange=OneBit(("pod", "data"), scale="rms"), clip=0.5),
    "integers": dict(
        mesh=PODS,
        exchange=Quantised("pod", bits=4, block=8, feedback=True),
        zero=sl.Zero(3, small=0),
    ),
    "one pod": dict(mesh="pod=1,data=4,model=2", exchange=OneBit("pod")),
}


@pytest.mark.representative("pods, stage 2, accumulated")
@pytest.mark.long
@pytest.mark.sentinel("integers")
@pytest.mark.parametrize("name", STRATEGIES)
def test_onebit_adam_equals_adam_until_the_freeze_then_keeps_errors(name):
    strategy = sl.Strategy(rules=RULES, **STRATEGIES[name])
    optimizer, expected = adam(2), two_steps_of_adam(strategy.clip)
    state, metrics = run(optimizer, 2, strategy)
    chex.assert_trees_all_close(jax.device_get(state.params), expected, rtol=1e-5, atol=1e-6)
    assert all(not np.any(x) for x in owed(state).values()) and not metrics[-1]["compressed"]
    frozen = jax.device_get(state.opt_state.nu)

    step = sl.train_step(loss, strategy)
    for seed in (2, 3):
        before, owed_before = jax.device_get((state.params, state.opt_state)), owed(state)
        gradient = jax.device_get(gradient_of(before[0], batch(seed)))
        norm = float(optax.tree.norm(gradient))
        state, told = step(state, batch(seed))
        assert bool(told["compressed"]) and told["grad_norm"] == pytest.approx(norm, rel=1e-4)
        clip = (
            1.0
            if strategy.clip is None
            else strategy.clip / max(strategy.clip, float(told["grad_norm"]))
        )
        after = jax.device_get((state.params, state.opt_state))
        chex.assert_trees_all_equal(after[1].nu, frozen)
        for path, sent in after[1].mu.items():
            wanted = owed_before[path] + B1 * before[1].mu[path] + (1 - B1) * clip * gradient[path]
            wanted[frozen[path] == 0] = 0
            found = sent + owed(state)[path]
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
            # And it moves by the momentum that was sent, over the root of the variance that was
            # frozen.
            scale = np.sqrt(frozen[path] / (1 - B2**2)) + 1e-8
            moved = -1e-2 * sent / (1 - B1 ** (seed + 1)) / scale
            np.testing.assert_allclose(
                after[0][path] - before[0][path], moved, rtol=1e-4, atol=1e-6
            )
    # Rows that are never used.
    np.testing.assert_array_equal(state.params["table"][9:], expected["table"][9:])
    if name == "one pod":  # there is nobody to send to, and nothing is left over
        assert all(not np.any(x) for x in owed(state).values())
    elif isinstance(strategy.exchange, OneBit):
        # One bit: on each of eight devices a part with one scale, on both sides of zero.
        assert (
            np.unique(np.abs(np.asarray(state.opt_state.mu["up"]))).size
            <= 8
            < state.opt_state.mu["up"].size
        )


@pytest.mark.long
def test_onebit_adam_leaves_exact_parameters_to_plain_adam():
    strategy = sl.Strategy(
        rules=RULES, mesh="pod=1,data=8,model=1", exchange=OneBit("data", exact=("table", "u.*"))
    )
    state, _ = run(adam(1), 1, strategy)
    assert set(state.errors) == {"down", "bias"}
    before = jax.device_get((state.params, state.opt_state))
    gradient = jax.device_get(gradient_of(before[0], batch(1)))
    state, told = run(None, 1, strategy, state, first=1)
    assert told[0]["compressed"]
    for path in ("table", "up"):
        np.testing.assert_allclose(
            state.opt_state.mu[path],
            B1 * before[1].mu[path] + (1 - B1) * gradient[path],
            rtol=1e-4,
            atol=1e-6,
        )
        np.testing.assert_allclose(
            state.opt_state.nu[path],
            B2 * before[1].nu[path] + (1 - B2) * gradient[path] ** 2,
            rtol=1e-4,
            atol=1e-7,
        )


@pytest.mark.parametrize(("rises", "frozen"), [(0, 50), (60, 70)])
def test_onebit_adam_freezes_when_variance_and_learning_rate_settle(rises, frozen):
    rate = optax.linear_schedule(1e-3, 2e-3, rises) if rises else 1e-3
    optimizer, gradient = onebit_adam(rate, freeze="auto", b2=0.9), {"w": jnp.arange(1.0, 9)}
    update = jax.jit(
        lambda state, scale: optimizer.update(
            {"w": gradient["w"] * scale}, state, gradient, sent={"w": True}
        )[1]
    )
    state = optimizer.init(gradient)
    for count in range(1, 90):
        state = update(state, 1.2 if count < 15 else 1.0)
        if optimizer.sends(state):
            break
    # Compared every ten steps, with what it was ten steps before: 1.26, 1.09, 1.03, 1.01 of what it
    # comes to.
    assert count == frozen


@pytest.mark.parametrize("size", [2000, 300_000])
def test_onebit_sketch_estimates_the_gradient_norm(size):
    random = np.random.default_rng(0)
    a_column = np.where(np.arange(size) % 512 == 7, 1, 1e-3)
    for scale in (1.0, random.normal(size=size) ** 4, a_column):
        x = (random.normal(size=size) * scale).astype(np.float32)
        assert jnp.sum(sketch(jnp.asarray(x), 0) ** 2) == pytest.approx(
            np.sum(x**2), rel=1e-5 if size == 2000 else 0.1
        )


@pytest.mark.long
def test_onebit_errors_survive_a_nonfinite_gradient():
    strategy = sl.Strategy(rules=RULES, mesh=PODS, exchange=OneBit("pod"))
    step = sl.train_step(loss, strategy)
    state, _ = run(adam(1), 2, strategy)
    before = jax.device_get((state.params, state.opt_state, state.errors))
    assert any(np.any(x) for x in jax.tree.leaves(before[2]))
    poisoned = batch(2)
    poisoned["y"][3] = np.inf
    state, told = step(state, poisoned)
    assert told["first_nonfinite"] >= 0 and int(state.nonfinite) == 1
    chex.assert_trees_all_equal(
        jax.device_get((state.params, state.opt_state, state.errors)), before
    )
    state, _ = step(state, batch(3))
    assert all(
        np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get((state.params, state.errors)))
    )


THREE_NAMES = ("a", "b", "c")


def three_products(model, x, rng):
    """Each parameter's gradient is the mean of its own columns."""
    columns = jnp.split(x, len(THREE_NAMES), axis=1)
    products = [part @ model[name] for part, name in zip(columns, THREE_NAMES, strict=True)]
    return jnp.mean(sum(products))


def three_vectors():
    return {name: jnp.ones(8, jnp.float32) for name in THREE_NAMES}


def strategy_of_three(clip=None):
    rules = sl.AxisRules(batch=("pod", "data"))
    return sl.Strategy(rules=rules, mesh="pod=2,data=4", exchange=OneBit("pod"), clip=clip)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_onebit_step_reports_the_first_nonfinite_parameter(clip):
    strategy = strategy_of_three(clip)
    state = sl.init(three_vectors, adam(1), strategy)
    step = sl.train_step(three_products, strategy)
    good = np.ones((8, 24), np.float32)
    infinite, large = good.copy(), good.copy()
    infinite[0, 20] = np.inf
    # Finite, but its square is not: neither is its norm.
    large[:, 12] = 3e19
    told = []
    for x in (good, infinite, large, good):
        state, metrics = step(state, x)
        told.append((float(metrics["compressed"]), int(metrics["first_nonfinite"])))
    assert told == [(0, -1), (1, 2), (1, 1), (1, -1)]


@pytest.mark.long
def test_onebit_step_gradient_norm_is_the_same_with_x64_enabled():
    def norms():
        strategy = strategy_of_three(clip=1.0)
        state = sl.init(three_vectors, adam(1), strategy)
        step = sl.train_step(three_products, strategy)
        told = []
        for seed in range(3):
            x = np.random.default_rng(seed).normal(size=(8, 24)).astype(np.float32)
            state, metrics = step(state, x)
            told.append(float(metrics["grad_norm"]))
        return told

    with jax.enable_x64(True):
        wide = norms()
    assert wide == pytest.approx(norms(), rel=1e-6)


@pytest.mark.parametrize(
    ("exchange", "optimizer"),
    [(OneBit("data"), optax.sgd(0.1)), (OneBit("data", feedback=False), optax.sign_sgd(0.1))],
)
def test_onebit_exchange_matches_numpy_error_feedback_and_majority_vote(exchange, optimizer):
    """Worker by worker, in numpy; the bias has five elements on eight workers, of which three serve
    none.
    """
    strategy = sl.Strategy(rules=RULES, mesh="pod=1,data=8,model=1", exchange=exchange)
    state = sl.init(make, optimizer, strategy)
    params = jax.device_get(state.params)
    worker, server = (dict.fromkeys(params, 0.0) for _ in range(2))
    coded = lambda x: np.where(x >= 0, 1, -1) * np.abs(x).mean() if x.size else x
    train = sl.train_step(loss, strategy)
    for seed in range(3):
        state, _ = train(state, batch(seed))
        rows = [{name: x[2 * i : 2 * i + 2] for name, x in batch(seed).items()} for i in range(8)]
        own = [jax.device_get(gradient_of(params, of)) for of in rows]
        for path, p in params.items():
            sends = np.stack([g[path].reshape(-1) for g in own]) + worker[path]
            parts = [slice(k, k + -(-p.size // 8)) for k in range(0, p.size, -(-p.size // 8))]
            sent = np.concatenate(
                [np.stack([coded(one) for one in sends[:, part]]) for part in parts], 1
            )
            mean = sent.mean(0) + server[path]
            again = np.concatenate([coded(mean[part]) for part in parts])
            if exchange.feedback:
                worker[path], server[path] = sends - sent, mean - again
            step = again if exchange.feedback else np.sign(again)
            params[path] = p - 0.1 * step.reshape(p.shape)
        chex.assert_trees_all_close(jax.device_get(state.params), params, rtol=2e-4, atol=1e-5)


@pytest.mark.long
def test_onebit_checkpoint_resumes_exactly_and_keeps_errors_on_any_mesh(tmp_path):
    common = dict(rules=RULES, exchange=OneBit("pod"), zero=sl.Zero(1, small=0))
    eight = sl.Strategy(mesh="pod=4,data=2,model=1", **common)
    state, _ = run(adam(2), 4, eight)
    owes = owed(state)
    assert any(np.any(x) for x in owes.values())
    read = {}
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        for mesh in (
            "pod=4,data=2,model=1",
            "pod=4,data=1,model=2",
            "pod=2,data=2,model=1",
            "pod=1,data=2,model=2",
        ):
            sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
            on = sl.make_mesh(mesh, devices=jax.devices()[: int(np.prod(sizes))])
            strategy = eight if mesh == eight.mesh else sl.Strategy(mesh=on, **common)
            read[mesh] = checkpoints.restore(sl.init(make, adam(2), strategy, abstract=True)).state
            now = owed(read[mesh])
            if sizes[0] == 4:  # as many workers
                chex.assert_trees_all_equal(now, owes)
            chex.assert_trees_all_close(now, owes, rtol=1e-5, atol=1e-9)
    never_stopped, again = (
        run(None, 2, eight, one, first=4)[0] for one in (state, read[eight.mesh])
    )
    chex.assert_trees_all_equal(
        *(jax.device_get((s.params, s.opt_state, s.errors)) for s in (never_stopped, again))
    )
    half = read["pod=2,data=2,model=1"]
    half, told = run(None, 1, half.layout.strategy, half, first=4)
    assert told[0]["compressed"] and all(np.isfinite(x).all() for x in owed(half).values())


PLATFORMS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_onebit_exchange_sends_only_codes_between_pods(platform):
    """Compiled: what crosses, of a step that compresses, is bytes of codes, and a few numbers."""
    width, hidden = 256, 1024
    make = lambda: sl.annotate(
        {"up": jnp.ones((width, hidden)), "down": jnp.ones((hidden, width))},
        {"up": ("embed", "mlp"), "down": ("mlp", "embed")},
    )
    total = lambda model, x, rng: jnp.mean((x + jnp.tanh(x @ model["up"]) @ model["down"]) ** 2)
    strategy = sl.Strategy(
        mesh=mesh_on(platform, PODS), rules=RULES, zero=sl.Zero(1), exchange=OneBit("pod"), clip=1.0
    )
    state = sl.init(make, adam(10), strategy, abstract=True)
    plan = sl.plan(
        sl.train_step(total, strategy), state, jax.ShapeDtypeStruct((16, width), "float32")
    )
    crossing = [
        one for one in plan.collectives if "pod" in (one.axes or ()) and one.sent_bytes > 1000
    ]
    shard = 2 * width * hidden // 4
    codes = [one for one in crossing if set(one.dtypes) == {"u8"}]
    assert {one.kind for one in codes} == {"all-to-all", "all-gather"}
    formula = 2 * sl.collectives.pmean_bytes(shard // 2, 2, sl.collectives.Signs())
    assert sum(one.total_bytes for one in codes) == formula
    others = sorted(one.total_bytes for one in crossing if one not in codes)
    assert others == [4 * 2039, 4 * shard], (
        "sums from which the norm is told, and before the freeze one of shards"
    )


def with_exchange(exchange, optimizer=None, **options):
    strategy = sl.Strategy(**{"mesh": PODS, "rules": RULES, **options}, exchange=exchange)
    return run(optimizer or adam(1), 1, strategy)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: with_exchange(OneBit("slice")),
            "`slice` is no axis of the mesh.*'pod', 'data', 'model'.*over 'pod', 'data'",
        ),
        (lambda: with_exchange(OneBit("model")), "`model` splits no batch"),
        (lambda: OneBit(()), "takes an axis of the mesh"),
        (lambda: OneBit("pod", exact="table"), "takes a tuple of patterns"),
        (lambda: OneBit("pod", exact=("(",)), "no regular expression"),
        (lambda: OneBit("pod", scale="max"), "scale='max'"),
        (lambda: Quantised("pod", bits=2), "bits=2"),
        (
            lambda: with_exchange(OneBit(("pod", "data")), zero=1),
            "takes all axes of data, and none is left for ZeRO",
        ),
        (
            lambda: with_exchange(OneBit("pod"), zero=sl.Zero(1, axes=("pod",))),
            "split parameters over `pod` too",
        ),
        (
            lambda: with_exchange(sl.Exact()),
            "of each worker's own gradient.*only averaged ones.*OneBit",
        ),
        (
            lambda: with_exchange(OneBit("pod"), clip=optax.clip(1.0)),
            "looks at the averaged gradient",
        ),
        (
            lambda: with_exchange(OneBit("pod"), optax.chain(optax.clip(1.0), adam(1))),
            "not in `optax.chain`",
        ),
        (lambda: adam(2).update({}, None), "averaged already"),
        (
            lambda: with_exchange(OneBit("pod"), adam(0.2)),
            "freeze=0.2.* is a part of the run.*steps=10_000",
        ),
        (lambda: onebit_adam(0.1, freeze=0), "freeze=0.*takes a step"),
        (lambda: onebit_adam(0.1, freeze=1.5), "freeze=1.5.*takes a step"),
        (
            lambda: onebit_adam(0.1, freeze=100, steps=100),
            "freeze=100.* lies beyond the run, which has 100 steps",
        ),
        (lambda: onebit_adam(0.1, freeze=1, b1=1.0), "b1=1.0"),
        (
            lambda: onebit_adam(0.1, freeze=0.99, steps=10),
            "lies beyond the run, which has 10 steps",
        ),
        (
            lambda: with_exchange(
                OneBit("pod"), optax.inject_hyperparams(onebit_adam)(0.1, freeze=1)
            ),
            "not go into",
        ),
        (
            lambda: with_exchange(OneBit("pod", exact=("tabel",))),
            "the pattern `tabel` matches no parameter",
        ),
        (lambda: with_exchange(OneBit("pod", exact=(".*",))), "takes the gradient of no parameter"),
        (
            lambda: with_exchange(
                OneBit("data"),
                rules=sl.AxisRules(batch=("pod", "data"), embed="data", mlp="model", rows=None),
            ),
            "`data` splits weights too",
        ),
        (lambda: onebit_adam(0.1, freeze=1, steps=0), "steps=0"),
        (lambda: adam(0.5, steps=10).for_run(20), "steps=10.* says another length.*20 steps"),
    ],
)
def test_onebit_refuses_invalid_settings(call, message):
    with pytest.raises(ValueError, match=message):
        call()


OPTIMIZERS = (onebit_adam, sl.optimizers.onebit_lamb, sl.optimizers.zero_one_adam)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_masks_are_those_of_optax_and_refused_where_they_fit_no_parameters(make_optimizer):
    """Numpy's bools, one for a whole branch, and one for a parameter that is not trained."""
    params = {"up": {"w": jnp.ones(3), "b": jnp.ones(3)}, "down": [jnp.ones(3)], "frozen": None}

    def start(mask):
        return make_optimizer(0.1, freeze=2, weight_decay=0.1, mask=mask).init(params)

    yes, no = np.True_, np.False_
    start({"up": {"w": yes, "b": no}, "down": yes, "frozen": no})
    start({"up": True, "down": no, "frozen": None})
    start(lambda params: jax.tree.map(lambda x: x.ndim > 1, params))
    refused = {
        "has no bool for `up/b`.* has one for `up/c`, which": {
            "up": {"w": True, "c": True},
            "down": True,
            "frozen": True,
        },
        "has no bool for `down/0`, `up/b`, `up/w`. Give": {"frozen": True},
        "has no bool for `frozen`. Give": {"up": True, "down": True},
        "has containers of other types": {"up": True, "down": (True,), "frozen": True},
    }
    for message, mask in refused.items():
        for given in (mask, lambda params, mask=mask: mask):
            with pytest.raises(ValueError, match=message):
                start(given)
    with pytest.raises(ValueError, match="a tree of bools like the parameters"):
        start({"up": 1, "down": True, "frozen": True})


@pytest.mark.long
def test_onebit_step_reports_overflowing_codes_as_nonfinite():
    strategy = sl.Strategy(rules=RULES, mesh=PODS, exchange=OneBit("pod", scale="rms"))
    state, _ = run(adam(1), 2, strategy)
    before = jax.device_get((state.params, state.errors))
    large = batch(2) | {"y": batch(2)["y"] * np.float32(1e22)}
    state, told = sl.train_step(lambda *a: loss(*a) * 1e-2, strategy)(state, large)
    assert told["first_nonfinite"] >= 0
    chex.assert_trees_all_equal(jax.device_get((state.params, state.errors)), before)


@pytest.mark.long
def test_onebit_adam_learns_the_run_length_from_fit(tmp_path):
    strategy = sl.Strategy(rules=RULES, mesh=PODS, exchange=OneBit("pod"))
    step, records = sl.train_step(loss, strategy), []
    source = (batch(seed) for seed in range(10))
    loop = sl.Loop(steps=8, log_every=1)
    state = sl.fit(
        step,
        sl.init(make, adam(0.5), strategy),
        source,
        loop,
        records=sl.Records(sinks=[records.append]),
    )
    assert [record["compressed"] for record in records if "loss" in record] == [False] * 4 + [
        True
    ] * 4
    with pytest.raises(ValueError, match="beyond the run, which has 8 steps"):
        sl.fit(step, sl.init(make, adam(8), strategy), source, loop, records=sl.Records(sinks=[]))
    again = sl.fit(
        step,
        jax.tree.map(jnp.copy, state),
        (batch(seed) for seed in range(4)),
        sl.Loop(steps=10),
        records=sl.Records(sinks=[]),
    )
    assert int(again.step) == 10  # longer than it was said to be
    other = sl.Strategy(rules=RULES, mesh=PODS, exchange=OneBit("data"))
    with pytest.raises(
        ValueError,
        match="made for another exchange than the step's: `exchange` is OneBit.axis='pod'.*'data'",
    ):
        sl.train_step(loss, other)(state, batch())
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        plain = sl.Strategy(rules=RULES, mesh=PODS, exchange=OneBit("pod", feedback=False))
        with pytest.raises(
            ValueError,
            match="`errors/bias/worker` is only in the checkpoint.*under the same exchange",
        ):
            checkpoints.restore(sl.init(make, adam(4), plain, abstract=True))
    with sl.Checkpoints(tmp_path / "without") as checkpoints:
        checkpoints.save(run(adam(4), 1, plain)[0])
        checkpoints.wait()
        begun = checkpoints.restore(sl.init(make, adam(4), strategy, abstract=True)).state
        assert all(not np.any(x) for x in owed(begun).values())
        run(None, 1, strategy, begun)


LAMB = dict(b1=B1, b2=B2, weight_decay=0.1)


def lamb(freeze, **options):
    return onebit_lamb(1e-2, freeze=freeze, **LAMB, **options)


def test_onebit_lamb_is_lamb_until_the_freeze():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"), zero=sl.Zero(2, small=0))
    state, metrics = run(lamb(5), 4, strategy)
    alone = sl.make_mesh("pod=1,data=1,model=1", devices=jax.devices()[:1])
    expected, _ = run(optax.lamb(1e-2, **LAMB), 4, sl.Strategy(mesh=alone, rules=RULES))
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(expected.params), atol=1e-5
    )
    assert not any(told["compressed"] for told in metrics)


@pytest.mark.long
def test_onebit_lamb_scales_frozen_ratios_by_how_far_the_variance_has_gone():
    """The last step of a run, from the states before and after it, in NumPy."""
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"))
    optimizer = lamb(3)
    before, _ = run(optimizer, 5, strategy)
    old = jax.device_get((before.params, before.opt_state))
    after, metrics = run(optimizer, 1, strategy, before, first=5)
    new = jax.device_get((after.params, after.opt_state))
    assert metrics[0]["compressed"]
    (params, adam_before), (moved, adam_after) = old, new
    steps, seen, eps = 6, 3, 1e-6
    for path in NAMES:
        mu, nu = adam_after.mu[path].astype("f8"), adam_after.nu[path].astype("f8")
        g = (mu - B1 * adam_before.mu[path]) / (1 - B1)
        fresh = (1 - B2) * g * g + B2 * adam_before.rest.fresh[path]
        np.testing.assert_allclose(adam_after.rest.fresh[path], fresh, rtol=1e-3, atol=1e-8)
        frozen = np.sqrt(nu / (1 - B2**seen)) + eps
        going_on = np.sqrt(fresh / (1 - B2**steps)) + eps
        step = mu / (1 - B1**steps) / frozen
        whole = step + LAMB["weight_decay"] * params[path]
        share = min(1, np.linalg.norm(step) / np.linalg.norm(whole))
        factor = np.clip(np.max(frozen / going_on) * share + 1 - share, 0.5, 4.0)
        last = adam_before.rest.factor[path]
        factor = np.clip(factor, 0.9 * last, 1.1 * last)
        ratio = adam_after.rest.ratio[path] / adam_after.rest.weight
        expected = params[path] - 1e-2 * ratio * factor * whole
        np.testing.assert_allclose(moved[path], expected, rtol=1e-4, atol=1e-6)
        # Ratios do not change after the freeze.
        assert adam_after.rest.ratio[path] == adam_before.rest.ratio[path]


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (0.0, 1.0), (1.0,), 3.0])
def test_onebit_lamb_refuses_bounds_that_hold_nothing(bounds):
    with pytest.raises(ValueError, match="a pair of numbers"):
        onebit_lamb(0.1, freeze=3, ratios=bounds)


def test_onebit_lamb_refuses_a_freeze_beyond_the_run_by_its_own_name():
    with pytest.raises(ValueError, match=r"onebit_lamb\(freeze=9\)` lies beyond the run"):
        onebit_lamb(0.1, freeze=9, steps=9)
