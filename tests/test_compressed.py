"""Codecs, the collectives around them, and the bytes they say they send."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import compile_for, mesh_on

import shardlib as sl
from shardlib import testing
from shardlib.collectives import Integers, Signs
from shardlib.optimizers._rounds import rounds_of

P = jax.P
WHOLE = P()
CODECS = [Signs(), Signs("rms", block=16), Integers(8), Integers(4), Integers(8, block=16)]
PLATFORMS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on(mesh, function, *specs, out=WHOLE):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    )


@pytest.mark.representative(
    "Signs(scale='mean', block=2048)", "Integers(bits=4, block=256)", "Integers(bits=8, block=16)"
)
@pytest.mark.long
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 70)),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-20, 1, 1e20]),
)
@settings(deadline=None, max_examples=4)
def test_codecs_encode_to_the_stated_size_with_bounded_error(codec, shape, seed, scale):
    rows = normal(*shape, seed=seed) * np.float32(scale)
    code, decoded = codec.encode(jnp.asarray(rows))
    assert code.dtype == jnp.uint8 and code.shape == (shape[0], codec.size(shape[1]))
    found = np.asarray(codec.decode(code, shape[1]))
    np.testing.assert_array_equal(decoded, found)
    assert found.shape == rows.shape
    if isinstance(codec, Signs):
        wide = rows.astype(np.float64)
        blocks = [wide[:, k : k + codec.block] for k in range(0, shape[1], codec.block)]
        scales = [
            np.abs(x).mean(1) if codec.scale == "mean" else np.sqrt((x**2).mean(1)) for x in blocks
        ]
        scales = np.concatenate(
            [np.broadcast_to(s[:, None], x.shape) for s, x in zip(scales, blocks, strict=True)], 1
        )
        if codec.scale == "mean" or scale == 1:  # squares of the others are no float32
            np.testing.assert_allclose(found, np.where(rows >= 0, 1, -1) * scales, rtol=1e-5)
    else:
        block = codec.block
        padded = np.pad(rows, ((0, 0), (0, -shape[1] % block))).reshape(shape[0], -1, block)
        step = np.abs(padded).max(2, keepdims=True) / (2 ** (codec.bits - 1) - 1)
        wrong = np.abs(padded.reshape(shape[0], -1)[:, : shape[1]] - found)
        assert (
            wrong
            <= np.broadcast_to(step * 0.501, padded.shape).reshape(shape[0], -1)[:, : shape[1]]
        ).all()


@pytest.mark.long
def test_sign_codec_packs_eight_signs_into_a_byte():
    rows = normal(3, 800)
    code = np.asarray(Signs().encode(jnp.asarray(rows)).code)
    assert code.shape == (3, 104)
    bits = (
        np.unpackbits(code[:, :100], axis=1, bitorder="little")
        .reshape(3, 100, 8)
        .swapaxes(1, 2)
        .reshape(3, 800)
    )
    np.testing.assert_array_equal(bits, rows >= 0)


def test_codecs_leave_masked_elements_out_of_scales():
    rows, alive = jnp.array([[4.0, 7.0, -2.0, 9.0]]), jnp.array([[True, False, True, False]])
    assert Signs().decode(Signs().encode(rows, alive).code, 4)[0, ::2].tolist() == [3.0, -3.0]
    assert Signs().decode(Signs().encode(rows, jnp.zeros((1, 4), bool)).code, 4).tolist() == [
        [0.0] * 4
    ]
    assert Integers(4).decode(Integers(4).encode(rows, alive).code, 4)[0].tolist()[1::2] == [
        0.0,
        0.0,
    ]


@pytest.mark.representative(
    "nan-Signs(scale='mean', block=2048)",
    "nan-Signs(scale='rms', block=16)",
    "nan-Integers(bits=8, block=256)",
    "inf-Signs(scale='rms', block=16)",
)
@pytest.mark.long
@pytest.mark.sentinel(
    "nan-Integers(bits=4, block=256)",
    "inf-Signs(scale='mean', block=2048)",
    "inf-Integers(bits=4, block=256)",
    "-inf-Signs(scale='mean', block=2048)",
    "-inf-Integers(bits=4, block=256)",
)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_codecs_keep_nonfinite_values_within_their_row(codec, bad):
    rows = normal(2, 40)
    rows[1, 3] = bad
    found = np.asarray(codec.decode(codec.encode(jnp.asarray(rows)).code, 40))
    assert np.isfinite(found[0]).all() and not np.isfinite(found[1, :16]).all()


def reference(arrays, errors, codec, shared=1):
    """`pmean`, an array of each worker at a time."""
    workers, size = arrays.shape[0], arrays[0].size
    elements = -(-size // (workers * shared))
    pad = lambda x: np.pad(x.reshape(-1), (0, workers * shared * elements - size)).reshape(
        shared * workers, elements
    )
    alive = pad(np.ones(size, bool))

    def coded(rows, alive):
        return np.asarray(codec.encode(jnp.asarray(rows), jnp.asarray(alive)).decoded) * alive

    sends = np.stack([pad(x) for x in arrays]) + errors[0]
    sent = np.stack([coded(rows, alive) for rows in sends])
    means = sent.mean(0) + errors[1]
    again = coded(means, alive)
    return again.reshape(-1)[:size].reshape(arrays.shape[1:]), (
        (sends - sent) * alive,
        means - again,
    )


@pytest.mark.representative(
    "a-shared0-Integers(bits=4, block=8)",
    "axis1-shared1-Signs(scale='mean', block=2048)",
    "axis2-shared2-Signs(scale='rms', block=2048)",
    "axis2-shared2-Integers(bits=4, block=8)",
    "a-shared4-Signs(scale='mean', block=2048)",
)
@pytest.mark.long
@pytest.mark.sentinel("b-shared3-Integers(bits=4, block=8)")
@pytest.mark.parametrize("codec", [Signs(), Signs("rms"), Integers(4, block=8)], ids=repr)
@pytest.mark.parametrize(
    ("axis", "shared"),
    [("a", ()), (("a", "b"), ()), (("b", "a"), ()), ("b", ("a",)), ("a", ("b", "c"))],
)
def test_compressed_mean_follows_the_algorithm_and_carries_its_errors(codec, axis, shared):
    mesh = sl.make_mesh("a=2,b=4" if "c" not in shared else "a=2,b=2,c=2")
    axes = (axis,) if isinstance(axis, str) else axis
    workers, k = (int(np.prod([mesh.shape[a] for a in of])) for of in (axes, shared))
    others = tuple(a for a in mesh.shape if a not in (*axes, *shared))

    def mean(x, errors):
        errors = jax.tree.map(lambda e: e[0], errors)
        found, left = sl.collectives.pmean({"x": x[0]}, axis, codec, {"x": errors}, shared=shared)
        return found["x"], jax.tree.map(lambda e: e[None], left["x"])

    every = (*shared, *axes, *others)
    step = on(mesh, mean, P(axes), P(every), out=(P(), P(every)))
    shape = (5, 7)
    elements = -(-35 // (workers * k))
    errors = sl.collectives.Errors(
        np.zeros((8, workers, elements), "f"), np.zeros((8, elements), "f")
    )
    expected = np.zeros((workers, workers * k, elements)), np.zeros((workers * k, elements))
    owed = np.zeros(shape)
    for seed in range(3):
        arrays = normal(workers, *shape, seed=seed)
        found, errors = step(arrays, errors)
        wanted, expected = reference(arrays, expected, codec, k)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        of_workers, of_servers = expected
        now = (of_workers.mean(0) + of_servers).reshape(-1)[:35].reshape(shape)
        np.testing.assert_allclose(found + now, arrays.mean(0) + owed, rtol=1e-5, atol=1e-5)
        owed = now
    repeats = 8 // (workers * k)
    server = (
        np.asarray(errors.server)
        .reshape(k, workers, repeats, elements)[:, :, 0]
        .reshape(-1, elements)
    )
    np.testing.assert_allclose(server, of_servers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [(), ("data",)])
def test_compressed_mean_of_one_worker_is_exact_and_adds_past_errors(shared):
    mesh, x = sl.make_mesh("pod=1,data=8"), normal(45)

    def twice(x):
        none = sl.collectives.no_errors(x, "pod", shared=shared)
        owed = jax.tree.map(lambda e: e + 1, none)  # as a worker, and as a server
        return sl.collectives.pmean(x, "pod", Signs(), owed, shared=shared)

    found, left = on(mesh, twice, P(), out=(P(), P()))(x)
    np.testing.assert_allclose(found, x + 2, rtol=1e-6)
    assert all(not leaf.any() for leaf in jax.tree.leaves(left))
    assert sl.collectives.pmean_bytes(64, 1, Signs()) == 0


def test_compressed_mean_without_error_feedback_keeps_dtypes():
    mesh = sl.make_mesh("data=8")
    arrays = {"a": normal(8, 33), "b": normal(8, 4, 3).astype(jnp.bfloat16)}

    def mean(x):
        found, left = sl.collectives.pmean(jax.tree.map(lambda x: x[0], x), "data", Integers(8))
        assert left is None
        return found

    found = on(mesh, mean, P("data"))(arrays)
    assert found["b"].dtype == jnp.bfloat16
    np.testing.assert_allclose(found["a"], arrays["a"].mean(0), atol=0.03)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("axis", ["a", ("a", "b")])
def test_compressed_gathers_and_scatters_are_close_with_exact_gradients(axis, dim):
    mesh, spec = sl.make_mesh("a=4,b=2"), (P(axis), P(None, axis))[dim]
    x, codec = normal(16, 24), Integers(8, block=4)
    whole = on(mesh, lambda x: sl.collectives.all_gather(x, axis, codec, dim), spec)
    np.testing.assert_allclose(whole(x), x, atol=np.abs(x).max() / 254 * 1.01)
    summed = on(mesh, lambda x: sl.collectives.psum_scatter(x, axis, codec, dim), P(), out=spec)
    n = 4 if axis == "a" else 8
    np.testing.assert_allclose(summed(x), n * x, atol=n * np.abs(x).max() / 254 * 1.01)

    weights = normal(16, 24, seed=1)
    of_gather = on(
        mesh,
        jax.grad(lambda x, w: jnp.sum(sl.collectives.all_gather(x, axis, codec, dim) * w)),
        spec,
        P(),
        out=spec,
    )
    np.testing.assert_allclose(of_gather(x, weights), n * weights, rtol=1e-6)
    of_sum = on(
        mesh,
        jax.grad(lambda x, w: jnp.sum(sl.collectives.psum_scatter(x, axis, codec, dim) * w)),
        P(),
        spec,
    )
    np.testing.assert_allclose(of_sum(x, weights), weights, rtol=1e-6)


@pytest.mark.representative(
    "Signs(scale='mean', block=2048)-v5e:2x4",
    "Signs(scale='mean', block=2048)-h200:1x1x8",
    "Integers(bits=8, block=256)-v5e:2x4",
    "Integers(bits=4, block=256)-v5e:2x4",
    "Integers(bits=4, block=256)-h200:1x1x8",
)
@pytest.mark.long("Integers(bits=8, block=256)-cpu")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("codec", [Signs(), Integers(8), Integers(4)], ids=repr)
def test_compressed_collectives_send_the_bytes_of_the_formulas(platform, codec):
    mesh, elements = mesh_on(platform, "pod=4,data=2"), 4096
    c = sl.collectives
    both = ("pod", "data")
    programs = {
        c.pmean_bytes(elements, 8, codec): lambda x: c.pmean(x, both, codec)[0],
        c.pmean_bytes(elements, 4, codec, shared=2): lambda x: c.pmean(
            x, "pod", codec, shared=("data",)
        )[0],
        c.all_gather_bytes(elements, 4, codec): lambda x: c.all_gather(x, "pod", codec),
        c.psum_scatter_bytes(elements, 4, codec): lambda x: c.psum_scatter(x, "pod", codec),
    }
    for formula, program in programs.items():
        lowered = on(mesh, lambda x, program=program: program(x)[None], P(), out=P(both)).lower(
            jax.ShapeDtypeStruct((elements,), "float32", sharding=jax.NamedSharding(mesh, P()))
        )
        found = testing.collectives(compile_for(mesh, lowered), mesh)
        assert sum(one.total_bytes for one in found) == formula
        assert {dtype for one in found for dtype in one.dtypes} == {"u8"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Signs("max"), "scale='max'.*'mean', 'rms'"),
        (lambda: Signs(block=12), "block=12.*multiple of 8 up to 1024"),
        (lambda: Signs(block=1504), "block=1504.*of 1024 beyond"),
        (lambda: Integers(3), "bits=3.*one of 8, 4"),
        (lambda: Integers(4, block=7), "block=7.*even"),
        (
            lambda: on(
                sl.make_mesh("data=8"),
                lambda x: sl.collectives.psum_scatter(x, "data", Signs()),
                P(),
                out=P("data"),
            )(jnp.ones(12)),
            "dim 0 of an array of shape .12,. does not divide into 8 parts",
        ),
        (
            lambda: on(
                sl.make_mesh("data=8"), lambda x: sl.collectives.pmean(x, "data", Signs())[0], P()
            )(jnp.arange(8)),
            "`pmean` compresses real numbers.*int32.8.",
        ),
        (
            lambda: on(
                sl.make_mesh("data=8"),
                jax.grad(lambda x: jnp.sum(sl.collectives.pmean(x, "data", Signs())[0])),
                P(),
            )(jnp.ones(8)),
            "no derivative",
        ),
        (
            lambda: sl.collectives.pmean(jnp.ones(8), "data", "int8"),
            "`pmean.axis='data'.` takes an axis of the surrounding",
        ),
        (lambda: sl.collectives.pmean_bytes(8, 8, Signs), "`pmean_bytes` takes a codec"),
        (
            lambda: sl.collectives.pmean(jnp.ones(8), "data", Signs(), jnp.zeros(8)),
            "takes an axis of the surrounding",
        ),
        (
            lambda: sl.break_even(parameters=1e6, workers=2, bandwidth=1e9, exchange="int8"),
            "an exchange, such as",
        ),
    ],
)
def test_compressed_collectives_refuse_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_break_even_prints_without_a_memory_bandwidth():
    pays = sl.break_even(parameters=350e6, workers=2, bandwidth=1.25e9)
    assert str(pays).endswith("times as fast, and faster whatever the network")


def test_compressed_mean_under_vmap_is_that_of_devices():
    mesh = sl.make_mesh("data=4", devices=jax.devices()[:4])
    x = normal(4, 3000)

    def mean(x):
        errors = sl.collectives.no_errors(x, "data")
        return sl.collectives.pmean(x, "data", Signs(), errors)

    def of_row(x):
        return jax.tree.map(lambda y: y[None], mean(x[0]))

    found = jax.jit(jax.vmap(mean, axis_name="data"))(x)
    expected = on(mesh, of_row, P("data"), out=P("data"))(x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="takes an axis of the surrounding"):
        jax.vmap(mean, axis_name="pod")(x)


def test_break_even_counts_what_packing_takes():
    of = dict(parameters=1e6, workers=4, bandwidth=float("inf"), memory_bandwidth=1e9, width=1000)
    c = sl.collectives
    seconds = {}
    for exchange in (c.OneBit("pod"), c.OneBit("pod", feedback=False), c.TopK("pod"), sl.Exact()):
        seconds[exchange] = sl.break_even(**of, exchange=exchange).compressed_seconds
    kept, dropped, largest, exact = seconds.values()
    assert exact == 0
    assert 0 < dropped < kept < largest
    apart = sl.break_even(**of, exchange=c.LocalSGD("pod", every=10)).compressed_seconds
    assert apart == pytest.approx(1e6 * 24 / 1e9 / 10)


def test_break_even_counts_what_each_exchange_sends():
    of = dict(parameters=8e6, workers=4, shards=2, bandwidth=1e9, memory_bandwidth=1e12)
    exact = 2 * 4 * 4e6 * 3 / 4
    c = sl.collectives
    sent = {
        c.OneBit("pod"): c.pmean_bytes(4_000_000, 4, Signs()),
        c.Quantised("pod", bits=4): c.pmean_bytes(4_000_000, 4, c.Integers(4)),
        c.LocalSGD("pod", every=8): exact / 8,
        c.ParameterServer("pod"): exact,
        c.TopK("pod", part=0.001): 3 * 8 * 4000,
        c.PowerSGD("pod", rank=4): exact * 8 / 1000,
        sl.Exact(): exact,
    }
    for exchange, expected in sent.items():
        found = sl.break_even(**of, exchange=exchange, width=1000)
        assert found.sent_bytes == pytest.approx(expected)
        assert found.exact_seconds == pytest.approx(exact / 1e9)
    fragments = sl.break_even(**of, exchange=c.DiLoCo("pod", every=500, fragments=4))
    assert fragments.most_bytes == pytest.approx(exact / 4)
    assert fragments.sent_bytes == pytest.approx(exact / 500)
    with pytest.raises(ValueError, match="say how many rows and columns they have"):
        sl.break_even(**of, exchange=c.PowerSGD("pod"))

    class Own(sl.Exchange):
        pass

    with pytest.raises(ValueError, match="it is not known what it sends"):
        sl.break_even(**of, exchange=Own())


def test_break_even_counts_what_an_optimizer_sends_over_a_run():
    """Freezes after a fifth; and by the schedule of 0/1 Adam's paper, for BERT-Large."""
    of = dict(parameters=8e6, workers=4, shards=2, bandwidth=1e9)
    exact, coded = 2 * 4 * 4e6 * 3 / 4, sl.collectives.pmean_bytes(4_000_000, 4, Signs())
    adam = sl.optimizers.onebit_adam(1e-3, freeze=0.2)
    found = sl.break_even(**of, optimizer=adam, steps=100)
    assert found.sent_bytes == pytest.approx(0.2 * exact + 0.8 * coded)
    assert found.most_bytes == exact
    paper = sl.optimizers.zero_one_adam(
        1e-3, freeze=23_000, kappa=16, apart=12_500, double=32_678, longest=16
    )
    rounds = rounds_of(paper, 162_000)
    assert sum(rounds) == 162_000
    # "Up to" 54% fewer rounds than 1-bit Adam, in which every step is one.
    assert rounds.silent / 162_000 == pytest.approx(0.537, abs=1e-3)
    found = sl.break_even(**of, optimizer=paper, steps=162_000)
    shares = np.array([rounds.exact, rounds.coded]) / 162_000
    assert found.sent_bytes == pytest.approx(shares @ [exact, coded])


@pytest.mark.long
def test_break_even_counts_an_optimizer_whose_mask_is_that_of_a_model():
    of = dict(parameters=8e6, workers=4, bandwidth=1e9, steps=99)
    optimizers = sl.optimizers
    for make in (optimizers.onebit_adam, optimizers.onebit_lamb, optimizers.zero_one_adam):
        plain = sl.break_even(**of, optimizer=make(1e-3, freeze=9))
        for mask in ({"w": True, "b": False}, lambda params: dict.fromkeys(params, True)):
            optimizer = make(1e-3, freeze=9, weight_decay=0.1, mask=mask)
            assert sl.break_even(**of, optimizer=optimizer) == plain


@pytest.mark.parametrize("width", [6, 8, 9])
def test_break_even_has_matrices_summed_exactly_where_powersgd_does(width):
    exchange = sl.collectives.PowerSGD("pod", rank=4)
    parameter = sl.collectives.Parameter("w", (width, width), P(), ("pod",), P())
    of = dict(parameters=1e6, workers=4, bandwidth=1e9, memory_bandwidth=1e12, itemsize=2)
    found = sl.break_even(**of, exchange=exchange, width=width)
    exact = sl.break_even(**of, exchange=sl.Exact())
    if exchange.over(parameter):
        assert found.sent_bytes == pytest.approx(4 / 2 * exact.sent_bytes * 8 / width)
    else:
        assert found == exact


def test_break_even_takes_what_goes_between_workers_apart_as_float32():
    """Moves, and the gradients of 0/1 Adam; those of 1-bit Adam are as gradients are."""
    of = dict(parameters=8e6, workers=4, bandwidth=1e9)
    exact, c = 2 * 4 * 8e6 * 3 / 4, sl.collectives
    for exchange in (c.LocalSGD("pod", every=8), c.DiLoCo("pod", every=8)):
        for itemsize, bytes in ((2, exact), (4, exact), (8, 2 * exact)):
            found = sl.break_even(**of, itemsize=itemsize, exchange=exchange)
            assert found.most_bytes == pytest.approx(bytes)
            assert found.exact_seconds == pytest.approx(itemsize / 4 * exact / 1e9)
    for make, bytes in (
        (sl.optimizers.zero_one_adam, exact),
        (sl.optimizers.onebit_adam, exact / 2),
    ):
        found = sl.break_even(**of, itemsize=2, optimizer=make(1e-3, freeze=9), steps=99)
        assert found.most_bytes == pytest.approx(bytes)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            dict(optimizer=sl.optimizers.onebit_adam(1e-3, freeze="auto"), steps=9000),
            "goes by its gradients",
        ),
        (dict(optimizer=optax.adam(1e-3)), "optimizer.*takes one that says what is sent"),
        (dict(optimizer=None), "is for an optimizer whose steps differ"),
        (
            dict(
                optimizer=sl.optimizers.onebit_adam(1e-3, freeze=9),
                exchange=sl.collectives.DiLoCo("pod"),
            ),
            "goes with an exchange of codes",
        ),
    ],
)
def test_break_even_refuses_optimizers_that_send_nothing_themselves(options, match):
    with pytest.raises(ValueError, match=match):
        sl.break_even(**{"parameters": 8e6, "workers": 4, "bandwidth": 1e9, "steps": 99} | options)
