"""Chains: few inputs of the blocks of a loop are kept, and the numbers stay what they are."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from machines import compile_for, mesh_on
from remat_cases import DATA, STAGE_3, TENSOR, decoder, stepped

import shardlib as sl
from models import gpt
from shardlib.layouts._chain_schedules import (
    AT_HAND,
    Advance,
    Binomial,
    ChainTable,
    Differentiate,
    Every,
    least_evaluations,
)
from shardlib.tracing._chain_scan import chain_scan

LENGTHS, SLOTS = range(1, 65), range(1, 9)


@functools.cache
def least_by_search(layers, slots):
    """The fewest evaluations before layers are differentiated, those of the forward pass too.

    All divisions are tried: the state after `first` layers is kept, and what follows has one slot
    less.
    """
    if layers == 1:
        return 0
    if slots == 1:
        return layers * (layers - 1) // 2
    found = []
    for first in range(1, layers):
        rest = least_by_search(layers - first, slots - 1)
        found.append(first + rest + least_by_search(first, slots))
    return min(found)


@pytest.mark.parametrize("slots", SLOTS)
def test_chain_of_slots_evaluates_as_little_as_the_formula_and_a_search_say(slots):
    for layers in LENGTHS:
        table = Binomial(slots).table(layers)
        least = least_by_search(layers, slots) - (layers - 1)
        assert table.evaluations == least_evaluations(layers, slots) == least, layers
        assert table.slots <= slots and table.places <= slots + 1, layers


def test_chain_of_segments_evaluates_each_layer_at_most_once_before():
    for layers in LENGTHS:
        for segment in {1, 2, 3, 5, 8, layers // 2 + 1, layers, layers + 1}:
            table = Every(segment).table(layers)
            count = math.ceil(layers / segment)
            last = layers - segment * (count - 1)
            # The inputs of segments' first layers are kept, and that of the last layer is at hand.
            assert table.kept == tuple(range(0, layers, segment))
            assert table.evaluations == layers - count - (last > 1)
            assert table.slots <= count + max(segment - 2, 0)
            advanced = [one.layer for one in table.actions if isinstance(one, Advance)]
            assert len(set(advanced)) == len(advanced)


def test_chain_of_the_square_root_keeps_about_twice_that():
    for layers in LENGTHS:
        assert Every(None).table(layers).slots <= 2 * math.sqrt(layers)


@pytest.mark.parametrize(
    ("kept", "actions", "message"),
    [
        ((0,), [Differentiate(1, AT_HAND), Differentiate(0, 2)], "place 2, which holds nothing"),
        ((0,), [Differentiate(0, 1)], "where layer 1 is next"),
        ((0,), [Advance(0, 1, 1), Differentiate(1, 1), Differentiate(0, 1)], "which holds 1"),
        ((0,), [Differentiate(1, AT_HAND)], "ends before 0"),
        ((1,), [], "the first is 0"),
        ((0, 2), [], "layers in order"),
    ],
)
def test_chain_tables_that_cannot_be_run_are_refused(kept, actions, message):
    with pytest.raises(ValueError, match=message):
        ChainTable(2, kept, tuple(actions))


COUNT = 7
CHAINS = [Every(None), Every(1), Every(20), Binomial(1), Binomial(2), Binomial(20)]
NAMES = ["segments", "each", "one segment", "one slot", "slots", "all slots"]
WEIGHTS = jax.random.normal(jax.random.key(0), (COUNT, 4, 4)) / 2
SHIFT, ROWS = jnp.full(4, 0.3), jnp.ones((8, 4))


def of_everything(scan, reverse):
    """A loss whose loop carries, scans, stacks and closes over floats, whole numbers and keys."""

    def loss(weights, shift, rows, key):
        def body(carry, x):
            (h, number, drawn), (weight, index, own) = carry, x
            noise = jax.random.uniform(drawn, h.shape)
            h = jnp.tanh(h @ weight + shift + noise) * (1 + number / 10)
            # The next layer draws from the key of this one.
            return (h, number + 1, own), {"sum": h.sum(), "index": 2 * index, "unread": h * shift}

        xs = weights, jnp.arange(COUNT), jax.random.split(key, COUNT)
        # Python's numbers are promoted, as `jax.lax.scan` does it.
        (h, number, _), ys = scan(body, (rows, 0, key), xs, COUNT, reverse=reverse)
        return jnp.sum(h**2) + ys["sum"] @ jnp.arange(7.0) + number + ys["index"].sum()

    return loss


def with_gradients(scan, reverse):
    loss = of_everything(scan, reverse)
    differentiated = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    return differentiated(WEIGHTS, SHIFT, ROWS, jax.random.key(1))


@functools.cache
def plain_gradients(reverse):
    return with_gradients(lax.scan, reverse)


def assert_near(found, expected):
    near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(near, found, expected)


@pytest.mark.long
@pytest.mark.sentinel("False-segments", "True-slots")
@pytest.mark.parametrize("chain", CHAINS, ids=NAMES)
@pytest.mark.parametrize("reverse", [False, True])
def test_chain_scan_equals_scan(chain, reverse):
    found = with_gradients(functools.partial(chain_scan, chain=chain), reverse)
    assert_near(found, plain_gradients(reverse))


@pytest.mark.long
@pytest.mark.sentinel("True")
@pytest.mark.parametrize("varying", [False, True])
def test_chain_scan_equals_scan_on_manual_axes(varying):
    mesh = sl.make_mesh("data=8")

    def gradients(scan):
        def on_device(weights, shift, rows):
            def body(h, weight):
                return jnp.tanh(h @ weight + shift) + lax.pmean(h, "data") / 10, h.sum()

            h, sums = scan(body, rows, weights, COUNT)
            return lax.pmean(jnp.sum(h**2) + jnp.sum(sums**2), "data")

        specs = P(), P(), P("data")
        loss = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=varying)
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(WEIGHTS, SHIFT, ROWS)

    expected = gradients(lax.scan)
    for chain in (Every(None), Binomial(2)):
        assert_near(gradients(functools.partial(chain_scan, chain=chain)), expected)


@pytest.mark.parametrize("chain", [Every(3), Binomial(2)], ids=str)
def test_chain_scan_evaluates_as_many_layers_as_its_table_says(chain):
    seen = []

    @jax.jit
    def gradient(weights, rows):
        def body(h, x):
            weight, number = x
            jax.debug.callback(lambda number: seen.append(int(number)), number)
            return jnp.tanh(h @ weight), None

        def loss(weights):
            h, _ = chain_scan(body, rows, (weights, jnp.arange(COUNT)), COUNT, chain)
            return h.sum()

        return jax.grad(loss)(weights)

    jax.block_until_ready(gradient(WEIGHTS, ROWS))
    jax.effects_barrier()
    table = chain.table(COUNT)
    again = [action.layer for action in table.actions]
    assert sorted(seen) == sorted([*range(COUNT), *again])
    assert len(seen) == 2 * COUNT + table.evaluations


def test_chain_scan_holds_one_layer_whatever_their_number():
    def equations(count):
        def loss(weights):
            return chain_scan(
                lambda h, w: (jnp.tanh(h @ w), None), ROWS, weights, count, Every(None)
            )[0].sum()

        return str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((count, 4, 4))))

    # Forward, advanced, and differentiated: its product, and those with its two transposes.
    assert equations(9).count("dot_general") == equations(36).count("dot_general") == 1 + 1 + 3


@pytest.mark.long
@pytest.mark.sentinel("segments", "slots")
@pytest.mark.parametrize(
    "chain",
    [Every(None), Every(4), Binomial(2), Binomial(5)],
    ids=["segments", "of four", "slots", "five slots"],
)
def test_chain_scan_keeps_the_rows_of_its_table(chain):
    """Temporaries of the program grow by a state for each place."""

    def temporaries(scan, size):
        def loss(scale, rows):
            def body(h, _):
                return jnp.sin(h * scale), None

            return scan(body, rows, None, 36)[0].sum()

        lowered = jax.jit(jax.grad(loss)).lower(jnp.float32(1), jnp.ones(size))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    def states(scan):
        # What does not grow with the states is left out.
        return (temporaries(scan, 2 * 2**16) - temporaries(scan, 2**16)) / (4 * 2**16)

    table = chain.table(36)
    kept = states(functools.partial(chain_scan, chain=chain))
    # Three more are in work: what is read, and what is made of it.
    most = table.places + 3
    if table.places > len(table.kept) + 1:
        # The buffer of the backward pass is made of that of the forward pass.
        most = max(most, table.places + len(table.kept) + 2)
    assert table.places <= kept <= most
    assert states(lax.scan) >= 36


LAYERS = 5
CONFIG = decoder(LAYERS, width=32)
OVERLAP = {**DATA, "exchange": sl.Exact(overlap=True)}


@functools.cache
def plain_step():
    return stepped(CONFIG, **DATA)


@pytest.mark.representative("tensor", "overlap")
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {**DATA, "remat": "sublinear"},
        {**DATA, "remat": sl.Remat.slots(2), "accumulate": 2},
        {**STAGE_3, "remat": sl.Remat.every(3)},
        {**STAGE_3, "remat": "sublinear", "accumulate": 2},
        {**TENSOR, "remat": sl.Remat.slots(2)},
        {**OVERLAP, "remat": "sublinear", "accumulate": 2},
    ],
    ids=[
        "stage 0", "two microbatches", "stage 3", "stage 3, two microbatches", "tensor", "overlap",
    ],
)  # fmt: skip
def test_chain_changes_no_number_of_a_step(options):
    loss, params = stepped(CONFIG, **options)
    expected_loss, expected = plain_step()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), params, expected)


def looped(block):
    """A loss of blocks in a loop, whose weights are a stack."""

    def loss(model, batch, rng):
        h, _ = lax.scan(lambda h, w: (block(h, w), None), batch, model["w"])
        return jnp.mean(h**2)

    return loss


def layer(h, w):
    return jnp.tanh(h @ w)


def traced(loss, shape=(4, 16, 16), **options):
    """The step of a loss, traced."""
    strategy = sl.Strategy(**{**DATA, "remat": "sublinear", **options})
    state = sl.init(lambda: {"w": jnp.ones(shape)}, optax.sgd(0.1), strategy)
    step = sl.train_step(loss, strategy)
    return str(jax.make_jaxpr(step)(state, jnp.ones((8, 16))))


@pytest.mark.parametrize("zero", [0, sl.Zero(2, small=0), sl.Zero(3, small=0)], ids=["0", "2", "3"])
def test_chain_runs_a_loop_within_loops_and_calls(zero):
    block = sl.remat(layer)

    @jax.jit
    def of_four(h, w):
        return lax.scan(lambda h, w: (block(h, w), None), h, w)

    def loss(model, batch, rng):
        h, _ = lax.scan(of_four, batch, model["w"])
        return jnp.mean(h**2)

    # Only the backward pass of a chain has loops whose turns a table says.
    groups = (4, 4, 16, 16)
    assert traced(loss, groups, zero=zero).count(" while[") == 1
    assert traced(loss, groups, zero=zero, remat="full").count(" while[") == 0
    assert traced(looped(block), zero=zero).count(" while[") == 1


def test_chain_is_refused_where_no_loop_has_blocks_or_one_cannot_be_exchanged():
    block = sl.remat(layer)
    with pytest.raises(ValueError, match="the loss calls none"):
        traced(looped(layer))
    with pytest.raises(ValueError, match="its blocks are called one by one.*sl.Layers"):
        traced(lambda model, batch, rng: jnp.mean(block(batch, model["w"][0])))

    def in_branches(model, batch, rng):
        loss = lambda: looped(block)(model, batch, rng)
        return lax.cond(batch.sum() > 0, loss, loss)

    with pytest.raises(ValueError, match=r'inside of a `cond` \(.*test_remat_chain.py.*"full"'):
        traced(in_branches)


def test_chain_values_are_made_compared_and_refused():
    assert sl.Remat.slots(3) == sl.Remat.slots(3) != sl.Remat.every(3)
    assert sl.Remat.slots(3) | sl.Remat.slots(3) == sl.Remat.slots(3)
    for other in (sl.Remat(), sl.Remat.save("context"), sl.Remat.slots(4), sl.Remat.sublinear()):
        with pytest.raises(ValueError, match="only inputs of blocks are kept"):
            sl.Remat.slots(3) | other
    with pytest.raises(ValueError, match="only inputs of blocks are kept"):
        sl.Remat(("context",), chain=Every(2))
    for make in (sl.Remat.slots, sl.Remat.every):
        with pytest.raises(ValueError, match="at least 1"):
            make(0)
    with pytest.raises(ValueError, match="sl.Remat.slots"):
        sl.Remat(chain=4)
    with pytest.raises(ValueError, match="of all blocks of a loop"):
        sl.remat(layer, "sublinear")
    in_force = sl.use(sl.rules.data, remat=sl.Remat.every(2))
    with pytest.raises(ValueError, match="in a step"), in_force:
        pass


def test_chain_is_refused_under_a_pipeline():
    with pytest.raises(ValueError, match='take `remat="stage"`'):
        sl.Strategy(
            mesh="stage=2,data=4",
            rules=sl.rules.data | sl.rules.pipeline,
            pipeline=sl.pipeline.OneFOneB(2, 2),
            remat=sl.Remat.slots(2),
        )


def test_chain_is_refused_between_uses_of_a_named_layer():
    block = sl.remat(layer)

    def loss(model, batch, rng):
        batch = batch @ model["top"]["a"]
        return jnp.mean(looped(block)(model, batch, rng) * model["top"]["b"])

    strategy = sl.Strategy(**DATA, zero=sl.Zero(3, small=0, layers="to[p]"), remat="sublinear")
    make = lambda: {
        "w": jnp.ones((16, 8, 8)), "top": {"a": jnp.ones((8, 8)), "b": jnp.ones(8)},
    }  # fmt: skip
    state = sl.init(make, optax.sgd(0.1), strategy)
    with pytest.raises(ValueError, match="between whose uses there is a loop"):
        sl.train_step(loss, strategy).lower(state, jnp.ones((8, 8)))


@pytest.mark.exhaustive
@pytest.mark.tpu_compiler
def test_chain_keeps_fewer_inputs_in_the_memory_of_a_tpu():
    """Of 16 layers, thin ones with many tokens."""
    layers, rows, context, width = 16, 64, 256, 128
    mesh = mesh_on("v5e:2x4", "data=8")
    config = dataclasses.replace(CONFIG, layers=layers, width=width, context=context)
    batch = {"tokens": jax.ShapeDtypeStruct((8 * rows, context + 1), "int32")}

    def inputs(remat):
        """Temporaries, in inputs of a layer."""
        strategy = sl.Strategy(**{**STAGE_3, "mesh": mesh}, remat=remat)
        make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        lowered = sl.train_step(gpt.loss, strategy).lower(state, batch)
        temporaries = compile_for(mesh, lowered).memory_analysis().temp_size_in_bytes
        return temporaries / (4 * rows * context * width)

    every, fewest = map(inputs, ("full", sl.Remat.slots(3)))
    # Those that are there at a time, by the table. A compiler's copies are not counted on.
    assert every - fewest >= (layers - Binomial(3).table(layers).places) / 2


@pytest.mark.parametrize("zero", [0, 3])
def test_chain_computes_a_layer_once_more_in_the_program_of_a_step(zero):
    """Once forward, once to get there, once to differentiate it: and gathers as many times."""
    block = sl.remat(lambda h, w, shift: jnp.tanh(h @ w) + shift)

    def loss(model, batch, rng):
        # Nothing is differentiated with respect to what the blocks close over.
        shift = jnp.cos(batch)
        h, _ = lax.scan(lambda h, w: (block(h, w, shift), None), batch, model["w"])
        return jnp.mean(h**2)

    def program(remat):
        strategy = sl.Strategy(**DATA, zero=sl.Zero(zero, small=0), remat=remat, accumulate=2)
        state = sl.init(lambda: {"w": jnp.ones((8, 64, 64))}, optax.sgd(0.1), strategy)
        step = sl.train_step(loss, strategy)
        compiled = step.lower(state, jnp.ones((64, 64))).compile()
        text = compiled.as_text()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        return text.count(" dot("), text.count(" all-gather("), temporaries

    products, gathers, temporaries = program("full")
    found = program(sl.Remat.slots(2))
    assert found[:2] == (products + 1, gathers + (zero == 3))
    # No stack of gradients is there that nothing reads, or sums beside those of the microbatches.
    assert found[2] <= temporaries + 2 * 4 * 64**2
