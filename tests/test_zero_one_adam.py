"""0/1 Adam: few exact gradients, momenta of one bit, and steps that send nothing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.collectives import LocalSGD, OneBit, Quantised
from shardlib.optimizers import zero_one_adam

RULES = sl.AxisRules(batch=("pod", "data"), embed=None, mlp="model", rows=None)
NAMES = {"table": ("rows", "embed"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
PODS = "pod=2,data=2,model=2"
B1, B2, EPS, DECAY = 0.9, 0.99, 1e-8, 0.1
RATE = optax.linear_schedule(0.0, 2e-2, 5)
SCHEDULE = dict(freeze=9, kappa=2, apart=6, double=4, longest=4)
STEPS = 22
EXACT = (".*",)


def adam(**options):
    return zero_one_adam(RATE, b1=B1, b2=B2, weight_decay=DECAY, **(SCHEDULE | options))


def values():
    random = np.random.default_rng(0)
    shapes = {"table": (12, 8), "up": (8, 16), "down": (16, 8)}
    return {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def make():
    return sl.annotate({name: jnp.asarray(value) for name, value in values().items()}, NAMES)


def batch(step):
    """Rows 9 to 11 of the table are used only late, when the variance is frozen."""
    random = np.random.default_rng(step)
    last = 9 if step < 12 else 12
    return {
        "id": random.integers(0, last, 16),
        "y": random.normal(size=(16, 8)).astype(np.float32),
    }


def loss(model, batch, rng):
    x = model["table"][batch["id"]]
    y = x + jnp.tanh(x @ model["up"]) @ model["down"]
    return jnp.mean((y - batch["y"]) ** 2)


def run(strategy, steps=STEPS, state=None, optimizer=None):
    state = state or sl.init(make, optimizer or adam(), strategy)
    step, metrics = sl.train_step(loss, strategy), []
    for number in range(int(state.step), int(state.step) + steps):
        state, told = step(state, batch(number))
        metrics.append(jax.device_get(told))
    return state, metrics


gradient_of = jax.jit(jax.grad(lambda params, batch: loss(params, batch, None)))


def halves(examples, workers):
    split = {name: np.split(x, workers) for name, x in examples.items()}
    return [{name: parts[worker] for name, parts in split.items()} for worker in range(workers)]


class Simulated:
    """Workers and their meetings, in float64, as the paper writes them."""

    def __init__(self, workers):
        start = {name: value.astype("f8") for name, value in values().items()}
        self.zeros = {name: 0 * value for name, value in start.items()}
        self.count, self.center = workers, start
        self.own = [dict(start) for _ in range(workers)]
        self.mu = [dict(self.zeros) for _ in range(workers)]
        self.u = [dict(self.zeros) for _ in range(workers)]
        self.nu, self.seen, self.next_seen = dict(self.zeros), 0, 0
        self.rates, self.decay, self.apart, self.next_meeting = 0.0, 1.0, False, 1
        self.met, self.averaged = [], []

    def mean(self, trees):
        return {name: sum(tree[name] for tree in trees) / self.count for name in self.zeros}

    def root(self, name):
        unbiased = self.nu[name] / (1 - B2**self.seen)
        return np.where(self.nu[name] > 0, np.sqrt(unbiased) + EPS, 1)

    def step(self, number):
        gradients = []
        for own, examples in zip(self.own, halves(batch(number), self.count), strict=True):
            params = {name: value.astype("f4") for name, value in own.items()}
            found = gradient_of(params, examples)
            gradients.append({name: np.asarray(g, "f8") for name, g in found.items()})
        averaged = number == self.next_seen
        if averaged:
            mean = self.mean(gradients)
            gradients = [mean] * self.count
            self.seen += 1
            for name, g in mean.items():
                self.nu[name] = B2 * self.nu[name] + (1 - B2) * g * g
            following = number + 2 ** ((self.seen - 1) // SCHEDULE["kappa"])
            self.next_seen = following if following < SCHEDULE["freeze"] else -1
        learning_rate = float(RATE(number))
        rate = learning_rate / (1 - B1 ** (number + 1))
        for worker, gradient in enumerate(gradients):
            for name, g in gradient.items():
                mu = (1 - B1) * g + B1 * self.mu[worker][name]
                self.mu[worker][name] = mu
                move = np.where(self.nu[name] > 0, rate * mu, 0)
                x = self.own[worker][name]
                decayed = learning_rate * DECAY * x
                self.own[worker][name] = x - move / self.root(name) - decayed
                self.u[worker][name] = self.u[worker][name] + move
        self.rates += rate
        self.decay *= 1 - learning_rate * DECAY
        self.apart = self.apart or not averaged
        self.averaged.append(averaged)
        self.meet(number + 1)

    def meet(self, steps):
        met = self.apart and steps >= self.next_meeting
        self.met.append(met)
        if met:
            mean = self.mean(self.u)
            for name, u in mean.items():
                self.center[name] = self.center[name] * self.decay - u / self.root(name)
                for worker in range(self.count):
                    self.mu[worker][name] = u / self.rates
            self.own = [dict(self.center) for _ in self.own]
        elif self.apart:
            return
        else:
            # All have the same.
            self.center = dict(self.own[0])
        self.u = [dict(self.zeros) for _ in self.u]
        self.rates, self.decay, self.apart = 0.0, 1.0, False
        interval = 2 ** (max(steps - SCHEDULE["apart"], 0) // SCHEDULE["double"])
        self.next_meeting = steps + min(interval, SCHEDULE["longest"])


@functools.cache
def simulated(workers):
    found = Simulated(workers)
    for number in range(STEPS):
        found.step(number)
    return found


MESHES = {
    "every device": dict(mesh="pod=1,data=8,model=1", exchange=OneBit("data", exact=EXACT)),
    "pods": dict(mesh=PODS, exchange=OneBit("pod", exact=EXACT), zero=sl.Zero(3, small=0)),
    "both axes": dict(mesh=PODS, exchange=OneBit(("pod", "data"), exact=EXACT)),
}


@pytest.mark.representative("pods")
@pytest.mark.long
@pytest.mark.sentinel("pods")
@pytest.mark.parametrize("name", MESHES)
def test_with_exact_meetings_it_is_the_papers_algorithm(name):
    strategy = sl.Strategy(rules=RULES, **MESHES[name])
    state, metrics = run(strategy)
    expected = simulated(state.layout.workers)
    assert [bool(told["met"]) for told in metrics] == expected.met
    # Averaged in fewer and fewer steps, and apart for longer and longer.
    assert [n for n, averaged in enumerate(expected.averaged) if averaged] == [0, 1, 2, 4, 6]
    assert [n for n, met in enumerate(expected.met) if met][-3:] == [13, 17, 21]
    for path, center in expected.center.items():
        np.testing.assert_allclose(state.params[path], center, atol=2e-5)
        own = np.stack([mine[path] for mine in expected.own])
        np.testing.assert_allclose(state.workers.params[path], own, atol=2e-5)
    # Rows that the variance has not seen stay where they were, but for weight decay.
    moved = np.asarray(state.params["table"])[9:] / values()["table"][9:]
    np.testing.assert_allclose(moved, moved[0, 0], rtol=1e-4)


@pytest.mark.long("exchange1")
@pytest.mark.parametrize("exchange", [OneBit("pod"), Quantised("pod", bits=8, feedback=True)])
def test_with_codes_workers_meet_in_equal_parameters(exchange):
    strategy = sl.Strategy(mesh=PODS, rules=RULES, zero=sl.Zero(2, small=0), exchange=exchange)
    state, metrics = run(strategy, 6)
    assert metrics[-1]["met"]
    for path in NAMES:
        own = np.asarray(state.workers.params[path])
        np.testing.assert_array_equal(own[0], own[1])
        np.testing.assert_array_equal(own[0], state.params[path])
    for u in jax.tree.leaves(jax.device_get(state.workers.opt_state.u)):
        assert not np.any(u)
    assert all(np.any(jax.device_get(errors.worker)) for errors in state.errors.values())


def test_steps_that_are_averaged_clip_the_mean():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"), clip=0.05)
    state, _ = run(strategy, 2)
    alone = sl.make_mesh("pod=1,data=1,model=1", devices=jax.devices()[:1])
    plain = sl.Strategy(mesh=alone, rules=RULES, clip=0.05)
    expected, _ = run(plain, 2, optimizer=optax.adamw(RATE, b1=B1, b2=B2, weight_decay=DECAY))
    for path in NAMES:
        np.testing.assert_allclose(state.params[path], expected.params[path], atol=1e-5)


def test_steps_of_ones_own_clip_at_what_noise_of_that_many_workers_has():
    clip = 0.05
    exchange = OneBit("pod", exact=EXACT)
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=exchange, clip=clip)
    optimizer = adam()
    # The gradient of the next step is not averaged, and workers meet after it.
    state, _ = run(strategy, 3, optimizer=optimizer)
    params, before = jax.device_get((state.params, state.workers.opt_state.mu))
    momenta = []
    for worker, examples in enumerate(halves(batch(3), 2)):
        gradient = jax.device_get(gradient_of(params, examples))
        norm = float(optax.tree.norm(gradient))
        assert norm > clip * np.sqrt(2)
        scale = clip * np.sqrt(2) / norm
        own = {n: (1 - B1) * scale * g + B1 * before[n][worker] for n, g in gradient.items()}
        momenta.append(own)
    state, metrics = run(strategy, 1, state)
    assert metrics[0]["met"]
    for path in ("up", "down"):
        expected = (momenta[0][path] + momenta[1][path]) / 2
        found = np.asarray(state.workers.opt_state.mu[path])[0]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.long
def test_a_limit_that_is_a_whole_number_is_that_of_the_mean_too():
    def after_four_steps(clip):
        strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"), clip=clip)
        state = sl.init(make, adam(), strategy)
        step = sl.train_step(lambda *arguments: 100 * loss(*arguments), strategy)
        for number in range(4):
            state, metrics = step(state, batch(number))
            assert metrics["grad_norm"] > 2
        return jax.device_get(state.workers)

    chex.assert_trees_all_equal(after_four_steps(1), after_four_steps(1.0))


def test_if_one_worker_is_not_finite_all_skip():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"))
    state, _ = run(strategy, 3)
    before = jax.device_get(state.workers)
    bad = batch(3)
    bad["y"][3] = np.inf
    state, metrics = sl.train_step(loss, strategy)(state, bad)
    chex.assert_trees_all_equal(jax.device_get(state.workers), before)
    assert int(state.nonfinite) == 1
    assert int(metrics["first_nonfinite"]) >= 0


def test_a_rate_of_zero_moves_nothing_and_spoils_nothing():
    optimizer = zero_one_adam(0.0, b1=B1, b2=B2, **SCHEDULE)
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"))
    state, metrics = run(strategy, 5, optimizer=optimizer)
    assert metrics[3]["met"]
    for path, expected in values().items():
        np.testing.assert_array_equal(state.params[path], expected)
        assert np.all(np.isfinite(state.workers.opt_state.mu[path]))


def test_the_mean_of_gradients_of_sixteen_bits_is_taken_in_more():
    """Each worker's gradient is nearly the largest number of its dtype, and so is their mean."""
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"))
    optimizer = zero_one_adam(1e-3, **SCHEDULE)
    weights = lambda: {"w": jnp.ones((8, 16), jnp.float16)}
    state = sl.init(weights, optimizer, strategy)
    step = sl.train_step(lambda model, x, rng: 4e4 * jnp.mean(model["w"][0] * x), strategy)
    state, metrics = step(state, np.full((4, 16), 16, "f4"))
    assert int(state.nonfinite) == 0
    assert int(metrics["first_nonfinite"]) == -1


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(tmp_path):
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"))
    optimizer = adam()
    state, _ = run(strategy, 15, optimizer=optimizer)
    checkpoints = sl.Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.wait()
    without, _ = run(strategy, 5, state)
    restored = checkpoints.restore(sl.init(make, optimizer, strategy)).state
    after, _ = run(strategy, 5, restored)
    chex.assert_trees_all_equal(
        jax.device_get(without.replaced(key=0)), jax.device_get(after.replaced(key=0))
    )


def test_parts_of_a_run_are_those_of_the_run_that_fit_makes():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"))
    optimizer = zero_one_adam(RATE, b1=B1, b2=B2, freeze=0.3, apart=0.2, double=0.2, longest=2)
    state = sl.init(make, optimizer, strategy)
    records = []
    state = sl.fit(
        sl.train_step(loss, strategy),
        state,
        [batch(number) for number in range(10)],
        sl.Loop(steps=10, log_every=1),
        records=sl.Records(sinks=[records.append]),
    )
    # Frozen after three steps: steps 0, 1 and 2 are averaged. From step 4 on the interval is two.
    met = [record["met"] for record in records if "met" in record]
    assert met == [False, False, False, True, False, True, False, True, False, True]
    assert state.layout.optimizer is optimizer


REFUSED = {
    "a part of a run of unknown length": (
        lambda: run(
            sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod")),
            1,
            optimizer=zero_one_adam(0.1),
        ),
        "parts of the run, and a step by itself",
    ),
    "a freeze beyond the run": (
        lambda: zero_one_adam(0.1, freeze=20, steps=10),
        "freeze=20.* lies beyond the run, which has 10 steps",
    ),
    "apart beyond the run": (
        lambda: zero_one_adam(0.1, freeze=2, apart=20, steps=10),
        "apart=20.* lies beyond the run",
    ),
    "a freeze of zero": (lambda: zero_one_adam(0.1, freeze=0), "freeze=0.*takes a step"),
    "an interval of zero": (lambda: zero_one_adam(0.1, longest=0), "longest=0.*at least 1"),
    "no gradient before the gap doubles": (lambda: zero_one_adam(0.1, kappa=0), "kappa=0"),
    "in a chain": (
        lambda: run(
            sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod")),
            1,
            optimizer=optax.chain(adam(), optax.scale(1.0)),
        ),
        "needs each worker's own gradient",
    ),
    "with an exact exchange": (
        lambda: sl.init(make, adam(), sl.Strategy(mesh=PODS, rules=RULES)),
        "gives it only averaged ones",
    ),
    "with another kind of meeting": (
        lambda: sl.init(
            make, adam(), sl.Strategy(mesh=PODS, rules=RULES, exchange=LocalSGD("pod", every=2))
        ),
        "send nothing between meetings",
    ),
    "with experts over workers": (
        lambda: sl.init(
            make,
            adam(),
            sl.Strategy(
                mesh=PODS,
                rules=RULES | sl.AxisRules(experts="pod"),
                exchange=OneBit("pod"),
            ),
        ),
        "the rule for `experts` splits arrays over it",
    ),
    "clipped by value": (
        lambda: sl.init(
            make,
            adam(),
            sl.Strategy(mesh=PODS, rules=RULES, exchange=OneBit("pod"), clip=optax.clip(1.0)),
        ),
        "clip by the global norm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name):
    make_it, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make_it()
