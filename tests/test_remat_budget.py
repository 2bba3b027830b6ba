"""Layers that keep different things, and budgets of memory: the same numbers, and the best choice."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from remat_cases import BATCH, DATA, FULL_ZERO, decoder, stepped

import shardlib as sl
from models import gpt
from shardlib.compiled._memory import peak_bytes
from shardlib.step._remat_budget import fit_remat, loops_of
from shardlib.tracing._block_costs import Costs, HostRoom, choices_of
from shardlib.tracing._block_places import TracedLoss
from shardlib.tracing._flops import flops_of
from shardlib.tracing._layer_runs import Run, loop_in_runs

LAYERS = 5
CONFIG = decoder(LAYERS)
MIXED = sl.Remat.layers((2, sl.Remat.save("context")), (1, "none"), rest="full")


@functools.cache
def plain():
    return stepped(CONFIG, **DATA)


@pytest.mark.representative("tensor")
@pytest.mark.long
@pytest.mark.sentinel("stage 3")
@pytest.mark.parametrize(
    "options",
    [
        DATA,
        DATA | {"accumulate": 2},
        DATA | FULL_ZERO,
        DATA | FULL_ZERO | {"accumulate": 2},
        DATA | {"exchange": sl.Exact(overlap=True)},
        {"mesh": "data=2,model=4", "rules": sl.rules.data | sl.rules.tensor_sequence} | FULL_ZERO,
    ],
    ids=["data", "microbatches", "stage 3", "stage 3 microbatches", "overlap", "tensor"],
)
def test_layers_that_keep_different_things_change_no_number(options):
    loss, params = stepped(CONFIG, remat=MIXED, **options)
    expected_loss, expected = plain()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)


def body(constants, carry, layer):
    """A layer with every kind of value: a number of it, a random key, a constant of all layers."""
    (shift, step), (x, count), (w, key) = constants, carry, layer
    h = sl.checkpoint_name(jnp.sin(x @ w + shift) * (1 + count), "h")
    y = jnp.cos(h) + 0.1 * jax.random.normal(key, h.shape)
    return (y, count + step), (jnp.sum(y), count)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_a_loop_in_runs_is_a_scan(reverse):
    keys = jax.random.split(jax.random.key(1), LAYERS)
    w = 0.5 * jax.random.normal(jax.random.key(0), (LAYERS, 8, 8))
    x, shift = jnp.ones((3, 8)), jnp.linspace(0, 1, 8)
    policies = jax.checkpoint_policies
    every = [policies.everything_saveable, policies.save_only_these_names("h"), None]
    runs = []
    for stop, policy in zip((1, 3, LAYERS), every, strict=True):
        runs.append(Run(stop, jax.checkpoint(body, policy=policy)))

    def total(results):
        (x, count), (sums, counts) = results
        return jnp.sum(x**2) + jnp.sum(sums * jnp.arange(LAYERS)), (count, counts)

    def in_runs(w, x, shift):
        given = (shift, jnp.int32(2)), (x, jnp.int32(0)), (w, keys)
        return total(loop_in_runs(runs, *given, reverse=reverse))

    def scanned(w, x, shift):
        step = functools.partial(body, (shift, 2))
        return total(jax.lax.scan(step, (x, jnp.int32(0)), (w, keys), reverse=reverse))

    for arguments in ((0, 1, 2), (0,)):
        differentiated = [
            jax.jit(jax.value_and_grad(f, arguments, has_aux=True)) for f in (in_runs, scanned)
        ]
        got, expected = [f(w, x, shift) for f in differentiated]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)


@pytest.mark.parametrize("where", ["in a loop", "one by one"])
def test_blocks_are_counted_in_the_order_of_their_calls(where):
    """So many products run again as the layers that keep none have."""

    def loss(model, batch, rng):
        def product(x, w):
            return jnp.sin(sl.checkpoint_name(x @ w, "product"))

        block, x = sl.remat(product), batch
        if where == "in a loop":
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, model["w"])
        else:
            for number in range(LAYERS):
                x = block(x, model["w"][number])
        return jnp.mean(x)

    def products(remat):
        strategy = sl.Strategy(remat=remat, **DATA)
        make = lambda: {"w": jnp.ones((LAYERS, 8, 8))}
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        step = sl.train_step(loss, strategy)
        return flops_of(step.trace(state, np.ones((16, 8), "f")).jaxpr).total

    one = 2 * 16 * 8 * 8
    kept = sl.Remat.save("product")
    assert products("full") - products("none") == LAYERS * one
    assert products(sl.Remat.layers((2, "full"), rest=kept)) - products(kept) == 2 * one
    assert products(sl.Remat.layers((1, kept), (1, "full"), (3, "none"))) - products(kept) == one


def loss_of_two(model, batch, rng):
    """Layers of an encoder, in a loop, and of a decoder, one by one, whose products have names."""

    def product(x, w):
        return jnp.sin(sl.checkpoint_name(x @ w.astype("float32"), "product"))

    block = sl.remat(product)
    x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch, model["encoder"]["w"])
    cast = jax.jit(lambda tree: jax.tree.map(lambda w: w.astype("bfloat16"), tree))
    for layer in cast(model["decoder"]).values():
        x = block(x, layer)
    return jnp.mean(x)


def products_of_two(remat, zero=0):
    strategy = sl.Strategy(remat=remat, zero=sl.Zero(zero, small=0), **DATA)
    w = jnp.ones((8, 8))
    make = lambda: {"encoder": {"w": jnp.ones((4, 8, 8))}, "decoder": {"a": w, "b": w}}
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    step = sl.train_step(loss_of_two, strategy)
    return flops_of(step.trace(state, np.ones((16, 8), "f")).jaxpr).total // (2 * 16 * 8 * 8)


@pytest.mark.parametrize("zero", [0, 3])
def test_blocks_are_chosen_by_the_paths_of_what_they_read(zero):
    none = products_of_two("none", zero)
    for patterns, rest, again in [
        ([("encoder/.*", "full")], "none", 4),
        ([("decoder/.*", "full")], "none", 2),
        ([("decoder/a", "full")], sl.Remat.save("product"), 1),
        ([("decoder/b", "none"), ("decoder/.*", "full")], "none", 1),
        ([("encoder/w", "none"), (r"decoder/\w", "full")], None, 2),
    ]:
        remat = sl.Remat.paths(*patterns, rest=rest)
        assert products_of_two(remat, zero) - none == again, remat


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (sl.Remat.paths(("encoder", "full"), rest="none"), "matches `encoder`. The blocks read"),
        (sl.Remat.paths(("encoder/w", "full")), "reads `decoder/a`, which no pattern matches"),
        (
            sl.Remat.paths((".*", "full"), ("decoder/.*", "none")),
            "no pattern before it takes.*`decoder/.*`. The blocks read `decoder/a`, `decoder/b`",
        ),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(remat, message):
    with pytest.raises(ValueError, match=message):
        products_of_two(remat)


def test_patterns_are_made_of_expressions_and_values():
    with pytest.raises(ValueError, match="is no regular expression"):
        sl.Remat.paths(("(", "full"))
    with pytest.raises(ValueError, match="drops no parts"):
        sl.Remat.paths(("a", "selective"))
    with pytest.raises(ValueError, match="patterns of paths"):
        sl.Remat.paths()
    with pytest.raises(ValueError, match="of all blocks"):
        sl.remat(jnp.sin, sl.Remat.paths(("a", "full")))


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (sl.Remat.layers((4, "full")), "is for 4 blocks, and the loss calls 5"),
        (sl.Remat.layers((6, "full"), rest="none"), "is for 6 blocks or more, and the loss"),
        (sl.Remat.layers((1, sl.Remat.save("contxt")), rest="full"), "`contxt`, which no"),
    ],
    ids=["fewer", "more", "names"],
)
def test_layers_that_do_not_fit_the_model_are_refused(remat, message):
    strategy = sl.Strategy(remat=remat, **DATA)
    state = sl.init(
        lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy, abstract=True
    )
    with pytest.raises(ValueError, match=message):
        sl.train_step(gpt.loss, strategy).trace(state, BATCH)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sl.Remat.layers((0, "full")), "a number of blocks"),
        (lambda: sl.Remat.layers((1, "stage")), "what blocks keep"),
        (lambda: sl.Remat.layers((1, "selective")), "drops no parts"),
        (lambda: sl.Remat.layers((1, "sublinear")), "has no chain"),
        (lambda: sl.Remat.layers(), "runs of blocks"),
        (lambda: sl.Remat.budget("14 gigs"), '"14GiB"'),
        (lambda: sl.Remat.budget(0), "bytes"),
        (lambda: sl.Remat.budget("1GiB", offload="block_in"), "in a tuple"),
        (lambda: sl.remat(jnp.sin, sl.Remat.budget("1GiB")), "that is of all blocks"),
    ],
)
def test_values_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pipeline_refuses_layers_that_differ():
    with pytest.raises(ValueError, match="all stages run the same program"):
        sl.Strategy(
            mesh="stage=2,data=4",
            rules=sl.rules.data | sl.rules.pipeline,
            pipeline=sl.pipeline.OneFOneB(2, 2),
            remat=MIXED,
        )


def test_a_derivative_outside_of_a_step_refuses_layers_that_differ():
    def loss(w):
        return jnp.sum(sl.remat(jnp.sin)(w))

    with (
        sl.use(sl.rules.data, sl.make_mesh("data=8"), remat=MIXED),
        pytest.raises(ValueError, match="for blocks that a `sl.train_step` calls"),
    ):
        jax.grad(loss)(1.0)


@functools.cache
def traced_loss(remat="full"):
    with sl.use(sl.rules.data, sl.make_mesh("data=8"), remat=remat):
        model = nnx.eval_shape(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model)
        traced = jax.make_jaxpr(lambda p: gpt.loss(nnx.merge(graph, p), BATCH).total)(params)
        return TracedLoss(traced.jaxpr)


def marked_block():
    (loop,) = loops_of(traced_loss())
    (block,) = loop.blocks
    return block


@functools.cache
def choices():
    return choices_of(marked_block())


NAMES = ("attention_out", "context", "key", "mlp_gate", "mlp_hidden", "mlp_up", "query", "value")


@functools.cache
def recomputed_flops(names):
    """What JAX computes again in one layer that keeps these names."""
    config = dataclasses.replace(CONFIG, layers=1)

    def total(remat):
        with sl.use(sl.rules.data, sl.make_mesh("data=8"), remat=remat):
            graph, params = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
            loss = lambda p: gpt.loss(nnx.merge(graph, p), BATCH).total
            return flops_of(jax.make_jaxpr(jax.grad(loss))(params)).total

    return total(sl.Remat.save(*names)) - total("none")


@pytest.mark.long
def test_choices_cost_what_jax_computes_again():
    for choice in choices():
        assert choice.flops == recomputed_flops(choice.names)


def test_positions_are_no_reason_to_compute_products_again():
    """They have no derivative, so that what it would read is neither kept nor computed again."""
    assert choices()[-1].flops == 0 and {"query", "key"} <= set(choices()[-1].names)


def test_choices_are_the_best_there_are():
    """Of all subsets of names, none is smaller and computes less again than a choice."""
    costs = Costs.of(marked_block())
    assert set(costs.sizes) == set(NAMES)
    best, frontier = float("inf"), []
    subsets = [set(names) for size in range(9) for names in itertools.combinations(NAMES, size)]
    every = [costs.choice(names) for names in subsets]
    for choice in sorted(every, key=lambda one: (one.size, one.flops)):
        if choice.flops < best:
            frontier.append((choice.size, choice.flops))
            best = choice.flops
    assert frontier == [(choice.size, choice.flops) for choice in choices()]


def test_choices_of_large_blocks_are_smaller_and_smaller():
    """Of gigabytes, a solver's tolerance is more than the byte by which the next is to be smaller."""
    config = gpt.GPTConfig(
        layers=2, width=4096, heads=8, context=4096, vocab=4096, norm="rms", positions="rotary",
        bias=False, tied=False,
    )  # fmt: skip
    tokens = {"tokens": jax.ShapeDtypeStruct((64, config.context + 1), "int32")}
    with sl.use(sl.rules.data, sl.make_mesh("data=8"), remat="full"):
        graph, params = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
        loss = lambda p, batch: gpt.loss(nnx.merge(graph, p), batch).total
        (loop,) = loops_of(TracedLoss(jax.make_jaxpr(loss)(params, tokens).jaxpr))
    (block,) = loop.blocks
    costs = Costs.of(block)
    for limit in range(2**27, costs.total_size, 2**27 + 1):
        choice = costs.best(limit)
        assert choice is None or choice.size <= limit
    sizes = [choice.size for choice in costs.choices()]
    assert len(sizes) == len(set(sizes)) > 10


@pytest.mark.parametrize("room", [float("inf"), 100_000, 20_000, 10_000])
def test_choices_with_room_on_the_host_are_the_best_there_are(room):
    """Of all ways to share names out, none is smaller and cheaper than a choice."""
    may_leave = ("block_in", "context", "mlp_gate", "mlp_up")
    host = HostRoom(may_leave, bytes_per_block=room)
    costs = Costs.of(marked_block(), host)
    places = ("device", "host", "nowhere")
    every = []
    for places_of in itertools.product(places, repeat=len(may_leave)):
        on_host = {
            name for name, place in zip(may_leave, places_of, strict=True) if place == "host"
        }
        on_device = {
            name for name, place in zip(may_leave, places_of, strict=True) if place == "device"
        }
        for others in ((), ("query", "key"), ("query", "key", "value", "attention_out")):
            choice = costs.choice({*on_device, *others}, on_host)
            if choice.host_size <= room:
                every.append(choice)
    best = choices_of(marked_block(), host)
    assert all(choice.host_size <= room for choice in best)
    for one in every:
        beaten = [choice for choice in best if choice.size <= one.size]
        assert min(choice.costs for choice in beaten) <= one.costs, one
    # What is told of a choice is what it comes to.
    for choice in best:
        assert costs.choice(choice.names, choice.offloaded) == choice


def test_a_constant_may_have_a_name():
    block = sl.remat(lambda x: jnp.sin(x) * sl.checkpoint_name(2.0, "two"), "full")
    traced = jax.make_jaxpr(block)(jnp.ones(8))
    assert [choice.flops for choice in choices_of(traced.jaxpr.eqns[0])] == [0]


def test_the_host_gets_what_is_copied_while_a_block_is_computed():
    forward = flops_of(jax.extend.core.ClosedJaxpr(marked_block().function, [])).total
    size = Costs.of(marked_block()).sizes["mlp_up"]
    for share, offloaded in [(1.01, ("mlp_up",)), (0.99, ())]:
        host = HostRoom(("mlp_up",), bytes_per_flop=share * size / forward)
        assert choices_of(marked_block(), host)[0].offloaded == offloaded


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.5, 0.8, 1.0])
def test_a_budget_spends_its_memory_as_an_exhaustive_search_would(share):
    """Where peaks are sums of sizes, within one layer's smallest choice."""
    loops = loops_of(traced_loss())
    assert [loop.times for loop in loops] == [LAYERS]
    whole, base = LAYERS * choices()[-1].size, 10**6
    sizes = {sl.Remat(choice.names): choice.size for choice in choices()}
    costs = {sl.Remat(choice.names): choice.flops for choice in choices()}

    def layers_of(remat):
        return (
            [remat] * LAYERS
            if isinstance(remat, sl.Remat)
            else remat.of_blocks([frozenset()] * LAYERS)
        )

    budget = base + round(share * whole)
    fitted = fit_remat(
        budget, loops, lambda remat: base + sum(sizes[one] for one in layers_of(remat))
    )
    assert fitted.best.peak <= budget
    assert fitted.best.flops == sum(costs[one] for one in layers_of(fitted.best.remat))
    # No layer is alone in its loop, so neither is one in what it is compared with.
    least = min(
        sum(choice.flops for choice in some)
        for some in itertools.combinations_with_replacement(choices(), LAYERS)
        if sum(choice.size for choice in some) <= budget - base
        and all(some.count(one) > 1 for one in some)
    )
    assert fitted.best.flops <= 1.01 * least


@pytest.mark.parametrize("layers_on_host", [1, 3, 5])
def test_a_budget_below_the_inputs_of_blocks_has_them_on_the_host(layers_on_host):
    """Where peaks are sums of sizes, as many layers as must have their input there."""
    loops = loops_of(traced_loss())
    costs = Costs.of(marked_block())
    (size,) = costs.bytes_by_name.inputs.values()

    def peak_of(remat):
        total = 10**6
        for one in (
            [remat] * LAYERS if isinstance(remat, sl.Remat) else remat.of_blocks([()] * LAYERS)
        ):
            total += costs.choice(one.names, one.offloaded).size
        return total

    budget = 10**6 - layers_on_host * size
    fitted = fit_remat(budget, loops, peak_of, host=HostRoom(("block_in",)))
    assert fitted.best.peak <= budget
    assert fitted.most_flops == LAYERS * choices()[0].flops
    assert fitted.best.estimate <= -layers_on_host * size
    with pytest.raises(ValueError, match=r'Remat.budget\(".*offload=\("block_in",\)\)'):
        fit_remat(budget, loops, peak_of)


def test_a_budget_that_nothing_meets_is_refused():
    with pytest.raises(ValueError, match="takes 1.0 MiB where blocks keep their inputs alone"):
        fit_remat(1000, loops_of(traced_loss()), lambda remat: 2**20)
    host = HostRoom(("block_in",))
    keeps = r'keep the least, `sl.Remat.offload\("block_in"\)`'
    with pytest.raises(ValueError, match=keeps):
        fit_remat(1000, loops_of(traced_loss()), lambda remat: 2**20, host=host)


def test_a_budget_refuses_names_for_the_host_that_no_activation_has():
    strategy = sl.Strategy(remat=sl.Remat.budget("1GiB", offload=("block_inn",)), **DATA)
    state = sl.init(
        lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy, abstract=True
    )
    with pytest.raises(ValueError, match="`block_inn`, which no activation.*`block_in`"):
        sl.train_step(gpt.loss, strategy).fitted_remat(state, BATCH)


@pytest.mark.tpu_compiler
def test_a_step_on_a_tpu_has_on_the_host_what_does_not_fit():
    layers, rows, width, hidden = 8, 1024, 2048, 8192
    size = rows * width * 2

    def loss(model, batch, rng):
        def layer(x, w):
            x = sl.checkpoint_name(x, "block_in")
            return x + jnp.tanh(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)

        block = sl.remat(layer)
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch, model)
        return jnp.mean(x.astype("float32") ** 2)

    def on_tpu(remat):
        mesh = sl.Target("tpu:v5e:1x1").mesh("data=1")
        strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, remat=remat)
        make = lambda: {
            "up": jnp.zeros((layers, width, hidden), "bfloat16"),
            "down": jnp.zeros((layers, hidden, width), "bfloat16"),
        }
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        batch = jax.ShapeDtypeStruct((rows, width), "bfloat16")
        return sl.train_step(loss, strategy), state, batch

    def compiled(remat):
        step, state, batch = on_tpu(remat)
        return step.lower(state, batch).compile()

    budget = peak_bytes(compiled("full"), "tpu") - 3 * size
    step, state, batch = on_tpu(sl.Remat.budget(budget, offload=("block_in",)))
    fitted = step.fitted_remat(state, batch)
    assert fitted.best.peak <= budget
    memory = compiled(fitted.best.remat).memory_analysis()
    # Two inputs more are on the device for as long as they are copied.
    assert memory.host_temp_size_in_bytes // size in range(3, layers + 1)


def test_a_budget_on_an_absent_tpu_leaves_jaxs_cache_alone(tmp_path):
    cache = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in cache}

    def loss(model, batch, rng):
        block = sl.remat(lambda x, w: jnp.tanh(x @ w))
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), batch, model["w"])
        return jnp.mean(x**2)

    def fitted():
        mesh = sl.Target("tpu:v5e:1x1").mesh("data=1")
        remat = sl.Remat.budget(2**30)
        strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, remat=remat)
        make = lambda: {"w": jnp.zeros((2, 128, 128))}
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        batch = jax.ShapeDtypeStruct((8, 128), "float32")
        return sl.train_step(loss, strategy).fitted_remat(state, batch).best

    try:
        for name, value in cache.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        # A program read back from the cache would warn, which is an error here.
        assert fitted() == fitted()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.long
def test_a_step_keeps_what_fits_and_changes_no_number(monkeypatch):
    agreed = []
    monkeypatch.setattr("shardlib.step._step.require_agreement", agreed.append)

    def of(remat):
        strategy = sl.Strategy(remat=remat, **DATA, **FULL_ZERO)
        state = sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
        return sl.train_step(gpt.loss, strategy), state

    step, state = of(sl.Remat.budget("1GiB"))
    fitted = step.fitted_remat(state, BATCH)
    assert fitted.best.remat == sl.Remat(choices()[-1].names)
    assert "100.0% of full" in str(fitted) and len(fitted.tried) == 2
    state, metrics = step(state, BATCH)
    # All processes of a run have found the same, once.
    assert agreed == [{"what blocks keep within the budget": repr(fitted.best.remat)}]
    np.testing.assert_allclose(metrics["loss"], plain()[0], rtol=1e-6)
    least = fitted.tried[0].peak
    step, state = of(sl.Remat.budget(least))
    assert step.fitted_remat(state, BATCH).best.peak <= least


@pytest.mark.gpu
def test_a_gpu_takes_no_more_than_the_budget():
    config = dataclasses.replace(CONFIG, width=512, heads=8, context=512, vocab=1024, layers=8)
    mesh = sl.make_mesh("data=1", devices=jax.devices()[:1])
    batch = {"tokens": np.zeros((32, 513), np.int32)}

    def of(remat):
        strategy = sl.Strategy(remat=remat, mesh=mesh, rules=sl.rules.data)
        state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
        return sl.train_step(gpt.loss, strategy), state

    def peak(remat):
        step, state = of(remat)
        return peak_bytes(step.lower(state, batch).compile(), "gpu")

    budget = (peak("full") + peak("none")) // 2
    step, state = of(sl.Remat.budget(budget))
    fitted = step.fitted_remat(state, batch)
    assert peak("full") < fitted.best.peak <= budget
    _, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"])


@pytest.mark.gpu_compiler
def test_a_budget_counts_on_absent_gpus_what_a_plan_counts():
    """Both compile without a device to try kernels on, and so with the same options."""

    def gated(x, w):
        gate = sl.checkpoint_name(x @ w["gate"], "gate")
        return x + jnp.sin(gate) @ w["down"]

    def loss(model, x, rng):
        block = sl.remat(gated)
        return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, model)[0] ** 2)

    target = sl.Target("gpu:h100:1x1x8")
    budget = sl.Remat.budget("100MiB")
    strategy = sl.Strategy(mesh=target.mesh("data=8"), rules=sl.rules.data, remat=budget)
    model = lambda: dict.fromkeys(("gate", "down"), jnp.zeros((4, 512, 512)))
    state = sl.init(model, optax.sgd(0.1), strategy, abstract=True)
    step, batch = sl.train_step(loss, strategy), jax.ShapeDtypeStruct((8192, 512), "float32")
    plan = sl.plan(step, state, batch, target)
    assert step.fitted_remat(state, batch).best.peak == plan.memory.stated_bytes
