"""Decoding with a cache, against a whole pass of the model for each token, and against itself on
meshes; and the programs of a token.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import decoding, gpt, moe, sampling
from models.sampling import Sampling
from shardlib import testing

GPT2 = gpt.tiny(width=32, heads=8, context=16, vocab=40)
LLAMA = replace(
    GPT2, norm="rms", positions="rotary", mlp="swiglu", bias=False, tied=False, hidden=96,
    kv_heads=4,
)  # fmt: skip
GEMMA = replace(
    LLAMA, layers=3, window=4, full_every=2, local_rope_theta=100.0, norm_from_zero=True,
    post_norms=True, scaled_embedding=True, attention_scale=0.5, attention_cap=3.0, logit_cap=5.0,
)  # fmt: skip
CONFIGS = {
    "gpt1": replace(GPT2, norm_first=False, tied=False),
    "gpt2": replace(GPT2, dropout=0.1),
    "llama": LLAMA,
    "padded vocabulary, scores in memory": replace(
        LLAMA, vocab=37, vocab_multiple=8, attention="xla"
    ),
    "gemma": GEMMA,
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
KEY = jax.random.key(0)
DRAWN = Sampling(temperature=0.8, top_k=20, top_p=0.9)


@functools.cache
def make(config, kind=gpt.GPT):
    """A model whose likeliest tokens differ from place to place."""
    structure, shapes = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    generator = np.random.default_rng(0)

    def value(path, leaf):
        centre = 1.0 if path[-1].key == "scale" and not config.norm_from_zero else 0.0
        return jnp.asarray(centre + 0.2 * generator.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(structure, jax.tree.map_with_path(value, nnx.to_pure_dict(shapes)))


def tokens_of(config, rows=4, length=16):
    return np.random.default_rng(1).integers(0, config.vocab, (rows, length), dtype=np.int32)


@jax.jit
def whole_pass(model, tokens):
    return nnx.view(model, deterministic=True)(tokens)


def without_cache(model, prompts, tokens):
    """The likeliest tokens after prompts of one length, each by a pass over all before it."""
    rows, size = prompts.shape
    written = np.concatenate([prompts, np.zeros((rows, tokens), np.int32)], axis=1)
    for at in range(size, size + tokens):
        # What stands behind a token changes nothing before it.
        written[:, at] = whole_pass(model, written)[:, at - 1].argmax(-1)
    return written[:, size:]


# With a cache, and without one.


@pytest.mark.representative()
@pytest.mark.long("gpt2", "padded vocabulary, scores in memory", "gemma")
@every_config
def test_decoding_with_a_cache_equals_a_whole_pass_for_each_token(config):
    model, prompts = make(config), tokens_of(config, length=5)
    with sl.unsharded():
        expected = without_cache(model, prompts, 8)
        found = sampling.generate(model, prompts, 8, KEY)
        fewer = sampling.generate(model, prompts, 3, KEY)
    assert len(np.unique(expected)) > 4
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(fewer, expected[:, :3])


@pytest.mark.representative()
@pytest.mark.long("gpt1", "padded vocabulary, scores in memory", "gemma")
@every_config
def test_decoding_logits_equal_those_of_a_whole_pass(config):
    model, tokens = make(config), tokens_of(config)
    with sl.unsharded():
        logits, cache = decoding.prefill(model, tokens[:, :6], slots=16)
        found = [logits]
        for at in range(6, 16):
            logits, cache = decoding.extend(model, tokens[:, at : at + 1], cache)
            found.append(logits)
        expected = whole_pass(model, tokens)[:, 5:]
    np.testing.assert_allclose(np.stack(found, 1), expected, rtol=1e-4, atol=1e-5)
    assert int(cache.length) == 16


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.sentinel("llama-3", "llama-16")
@pytest.mark.parametrize("chunk", [3, 5, 16])
@pytest.mark.parametrize("config", [GPT2, LLAMA, GEMMA], ids=["gpt2", "llama", "gemma"])
def test_decoding_of_a_prompt_in_chunks_equals_that_of_a_whole_prompt(config, chunk):
    model, prompts = make(config), tokens_of(config, length=10)
    padding = np.array([0, 3, 9, 1])
    with sl.unsharded():
        expected = sampling.generate(model, prompts, 6, KEY, padding_B=padding)
        found = sampling.generate(model, prompts, 6, KEY, padding_B=padding, chunk=chunk)
        logits, whole = decoding.prefill(model, prompts, slots=12)
        cache = decoding.empty(model, rows=4, slots=12)
        for first, last in ((0, 4), (4, 5), (5, 10)):
            parts, cache = decoding.extend(model, prompts[:, first:last], cache)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(parts, logits, rtol=1e-4, atol=1e-5)
    for one, other in zip(cache, whole, strict=True):
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.representative()
@pytest.mark.long("gpt1", "gpt2", "gemma")
@every_config
def test_decoding_of_prompts_of_different_lengths_equals_each_alone(config):
    model, tokens = make(config), tokens_of(config)
    prompts = [tokens[0, :2], tokens[1, :7], tokens[2, :5], tokens[3, :1]]
    padded, padding = decoding.pad(prompts)
    with sl.unsharded():
        found = sampling.generate(model, padded, 8, KEY, padding_B=padding)
        for row, prompt in zip(found, prompts, strict=True):
            np.testing.assert_array_equal(row, without_cache(model, prompt[None], 8)[0])


@pytest.mark.long
def test_decoding_of_experts_equals_a_whole_pass_for_each_token():
    router = sl.experts.TopK(2)
    config = moe.tiny(
        layers=5, width=32, context=16, vocab=40, router=router, every=2, dense_layers=1
    )
    model, prompts = make(config, moe.MoE), tokens_of(config, length=5)
    with sl.unsharded():
        expected = without_cache(model, prompts, 6)
        np.testing.assert_array_equal(sampling.generate(model, prompts, 6, KEY), expected)
        # Tokens that are trained in groups of several sequences are not decoded so.
        grouped = make(replace(config, group=64), moe.MoE)
        np.testing.assert_array_equal(sampling.generate(grouped, prompts, 6, KEY), expected)


# On a mesh.

CONTEXT = sl.AxisRules(seq="context", residual_seq="context")
WHOLE_KEY_HEADS = sl.AxisRules(kv_heads=["model", None], act_kv_heads=["model", None])
MESHES = {
    "data": ("data=4,model=1", sl.rules.data),
    "model": ("data=1,model=4", sl.rules.tensor),
    "both": ("data=2,model=4", sl.rules.data | sl.rules.tensor),
    "sequence": ("data=2,model=4", sl.rules.data | sl.rules.tensor_sequence),
    "ring": ("data=2,context=4", sl.rules.data | CONTEXT.attention(context="ring")),
    "ulysses": ("data=2,context=4", sl.rules.data | CONTEXT.attention(context="ulysses")),
    "zigzag": ("data=2,context=4", sl.rules.data | sl.rules.context("ring")),
    "whole key heads": ("data=1,model=8", sl.rules.tensor | WHOLE_KEY_HEADS),
    "stages": ("data=4,stage=2", sl.rules.data | sl.rules.pipeline),
}


def cpu_mesh(shape):
    sizes = [int(one.partition("=")[2]) for one in shape.split(",")]
    return sl.make_mesh(shape, devices=jax.devices()[: np.prod(sizes)])


@functools.cache
def on_one_device(config, chunk):
    """What is written, greedily and drawn, without any sharding."""
    prompts, padding = tokens_of(config, length=8), np.array([0, 3, 6, 1])
    with sl.unsharded():
        return [
            sampling.generate(make(config), prompts, 8, KEY, how, padding_B=padding, chunk=chunk)
            for how in (sampling.GREEDY, DRAWN)
        ]


@pytest.mark.representative(
    "gpt2-both-whole",
    "gpt2-ulysses-chunks",
    "gpt2-whole key heads-whole",
    "llama-model-whole",
    "llama-sequence-chunks",
    "llama-zigzag-chunks",
    "llama-stages-chunks",
    "gemma-zigzag-chunks",
)
@pytest.mark.long
@pytest.mark.sentinel("llama-ring-chunks")
@pytest.mark.parametrize("chunk", [None, 4], ids=["whole", "chunks"])
@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize("config", [GPT2, LLAMA, GEMMA], ids=["gpt2", "llama", "gemma"])
def test_decoding_on_a_mesh_writes_what_one_device_writes(config, where, chunk):
    shape, rules = MESHES[where]
    prompts, padding = tokens_of(config, length=8), np.array([0, 3, 6, 1])
    model, greedy, drawn = make(config), *on_one_device(config, chunk)
    write = functools.partial(sampling.generate, padding_B=padding, chunk=chunk)
    with sl.use(decoding.rules(rules), cpu_mesh(shape)):
        np.testing.assert_array_equal(write(model, prompts, 8, KEY), greedy)
        np.testing.assert_array_equal(write(model, prompts, 8, KEY, DRAWN), drawn)


def test_decoding_lays_the_cache_out_by_its_names():
    rules = decoding.rules(sl.rules.data | sl.rules.tensor | sl.AxisRules(seq="context"))
    model, prompts = make(LLAMA), tokens_of(LLAMA, length=4)
    with sl.use(rules, mesh_on("cpu", "data=2,model=2,context=2")):
        _, cache = decoding.prefill(model, prompts, slots=16)
        _, extended = decoding.extend(model, prompts[:, :1], cache)
        empty = decoding.empty(model, rows=4, slots=16)
    for each in (extended, empty):
        spec = jax.P(None, "data", "model", "context", None)
        assert each.k_LBGCK.sharding.is_equivalent_to(
            jax.NamedSharding(each.k_LBGCK.sharding.mesh, spec), 5
        )
    assert cache.k_LBGCK.is_deleted() and cache.v_LBGCK.is_deleted()


# How tokens are chosen.


def reference(logits, how):
    """The probabilities of one row, by sorting."""
    wide = logits.astype(np.float64) / how.temperature
    order = np.argsort(-wide)
    if how.top_k is not None:
        order = order[: how.top_k]
    shares = np.exp(wide[order] - wide[order].max())
    shares /= shares.sum()
    if how.top_p is not None:
        count = np.searchsorted(np.cumsum(shares), how.top_p) + 1
        order, shares = order[:count], shares[:count] / shares[:count].sum()
    found = np.zeros(len(logits))
    found[order] = shares
    return found


@pytest.mark.parametrize(
    "how",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=1),
        Sampling(top_k=7),
        Sampling(top_k=100),
        Sampling(top_p=0.3),
        Sampling(top_p=1),
        Sampling(temperature=2, top_k=9, top_p=0.6),
    ],
    ids=str,
)
def test_sampling_has_the_probabilities_of_the_reference(how):
    logits = 2 * np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    found = jax.nn.softmax(how.kept(jnp.asarray(logits)))
    expected = [reference(row, how) for row in logits]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    keys = jax.random.split(KEY, 2000)
    drawn = how.drawn(jnp.broadcast_to(logits[0], (2000, 40)), keys)
    shares = np.bincount(drawn, minlength=40) / 2000
    assert not shares[expected[0] == 0].any()
    np.testing.assert_allclose(shares, expected[0], atol=0.05)


def test_sampling_at_temperature_zero_is_greedy_and_rows_draw_their_own():
    model, prompts = make(GPT2), np.repeat(tokens_of(GPT2, rows=1, length=5), 4, axis=0)
    with sl.unsharded():
        coldest = sampling.generate(model, prompts, 4, KEY, Sampling(temperature=0, top_p=0.5))
        drawn = sampling.generate(model, prompts, 8, KEY, Sampling())
        again = sampling.generate(model, prompts, 8, KEY, Sampling())
        others = sampling.generate(model, prompts, 8, jax.random.key(1), Sampling())
        np.testing.assert_array_equal(coldest, without_cache(model, prompts, 4))
    np.testing.assert_array_equal(drawn, again)
    assert len({tuple(row) for row in np.asarray(drawn).tolist()}) == 4
    assert (drawn != others).any()


def test_decoding_ends_a_row_at_the_end_token():
    model, prompts = make(GPT2), tokens_of(GPT2, length=5)
    with sl.unsharded():
        free = np.asarray(sampling.generate(model, prompts, 8, KEY))
        end = int(free[0, 2])
        found = np.asarray(sampling.generate(model, prompts, 8, KEY, end=end))
    for row, ended in zip(free, found, strict=True):
        count = row.tolist().index(end) if end in row else 8
        np.testing.assert_array_equal(ended[:count], row[:count])
        assert (ended[count:] == end).all()


# What is refused.


def test_decoding_refuses_a_full_cache_and_gives_nan_where_it_cannot_see_that():
    model, prompts = make(GPT2), tokens_of(GPT2, length=6)
    with sl.unsharded():
        _, cache = decoding.prefill(model, prompts, slots=7)
        logits, cache = decoding.extend(model, prompts[:, :1], cache)
        assert np.isfinite(logits).all()
        with pytest.raises(ValueError) as caught:
            decoding.extend(model, prompts[:, :1], cache)
        hidden, _ = jax.jit(decoding.extend)(model, prompts[:, :1], cache)
    assert str(caught.value) == (
        "A cache of 7 slots, of which 7 are written, has no room for 1 more tokens. Make one with "
        "`slots=8` or more."
    )
    assert np.isnan(hidden).all()


def test_decoding_refuses_positions_behind_the_context():
    model, prompts = make(LLAMA), tokens_of(LLAMA)
    with sl.unsharded():
        _, cache = decoding.prefill(model, prompts, slots=20)
        with pytest.raises(ValueError, match=r"17 tokens do not fit `GPTConfig\(context=16\)`"):
            decoding.extend(model, prompts[:, :1], cache)
        hidden, _ = jax.jit(decoding.extend)(model, prompts[:, :1], cache)
        # Padding takes no position.
        _, cache = decoding.prefill(model, prompts, slots=20, padding_B=np.array([1, 2, 3, 4]))
        logits, _ = decoding.extend(model, prompts[:, :1], cache)
    assert np.isnan(hidden).all() and np.isfinite(logits).all()


PROMPTS = np.ones((2, 4), np.int32)
BEYOND_32_BITS = np.array([[2**32 + 5]])  # of which JAX would make 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: sampling.generate(model, PROMPTS, 13, KEY), "17 tokens do not fit"),
        (lambda model: sampling.generate(model, PROMPTS, 0, KEY), "`generate(tokens=0)`"),
        (lambda model: sampling.generate(model, PROMPTS, 1, KEY, chunk=0), "`generate(chunk=0)`"),
        (lambda model: sampling.generate(model, PROMPTS, 1, KEY, end=40), "0 to 39"),
        (lambda model: sampling.generate(model, PROMPTS, 1, KEY, end=True), "0 to 39"),
        (lambda model: sampling.generate(model, PROMPTS, 1, 0), "key=0)` takes one key of JAX"),
        (lambda model: sampling.generate(model, PROMPTS, 1, None), "`jax.random.key(0)`, of any"),
        (lambda model: sampling.generate(model, PROMPTS[0], 1, KEY), "got int32[4]"),
        (lambda model: sampling.generate(model, [[1, 2], [3]], 1, KEY), "one by `decoding.pad`"),
        (lambda model: sampling.generate(model, [[5, 40]], 1, KEY), "and the model has 0 to 39"),
        (
            lambda model: sampling.generate(model, [[5, -1]], 1, KEY),
            "`generate`: tokens are from -1",
        ),
        (
            lambda model: sampling.generate(model, BEYOND_32_BITS, 1, KEY),
            "to 4294967301, and the model",
        ),
        (lambda model: decoding.prefill(model, [[40]], 8), "`prefill`: tokens are from 40 to 40"),
        (
            lambda model: decoding.extend(model, [[40]], decoding.empty(model, 1, 8)),
            "`extend`: tokens are from 40 to 40",
        ),
        (lambda model: decoding.prefill(model, PROMPTS, 8.0), "`prefill(slots=8.0)`"),
        (lambda model: decoding.empty(model, 2, 0), "`empty(slots=0)`"),
        (lambda model: decoding.empty(model, 2, 4.0), "`empty(slots=4.0)`"),
        (lambda model: decoding.prefill(model, 1.0 * PROMPTS, 8), "whole numbers of shape"),
        (lambda model: decoding.prefill(model, PROMPTS, 3), "no room for 4 more tokens"),
        (
            lambda model: decoding.prefill(model, PROMPTS, 8, np.zeros(3, int)),
            "one for each of 2 rows",
        ),
        (
            lambda model: decoding.extend(model, PROMPTS, decoding.empty(model, 3, 8)),
            "2 rows of tokens and a cache of 3 rows",
        ),
        (lambda model: decoding.pad([]), "prompts of [] tokens"),
        (lambda model: decoding.pad([[1], []]), "prompts of [1, 0] tokens"),
        (lambda model: decoding.pad([5, 6, 7]), "prompt 0 is int64[]: each is a row of tokens"),
        (lambda model: decoding.pad([[1], "abc"]), "prompt 1 is <U3[]"),
        (lambda model: decoding.pad([[1, 2**32 + 5]]), "prompt 0 has the token 4294967301"),
        (lambda model: decoding.pad([[1], [-2]]), "prompt 1 has the token -2"),
        (lambda model: decoding.pad([[1.7, 2.9]]), "prompt 0 is float64[2]"),
        (lambda model: Sampling(temperature=-1), "`Sampling(temperature=-1)`"),
        (lambda model: Sampling(temperature=float("nan")), "`Sampling(temperature=nan)`"),
        (lambda model: Sampling(temperature=1e-38), "or a number, at least 1e-06"),
        (lambda model: Sampling(top_k=0), "`Sampling(top_k=0)`"),
        (lambda model: Sampling(top_k=2.0), "`Sampling(top_k=2.0)`"),
        (lambda model: Sampling(top_p=0), "`Sampling(top_p=0)`"),
        (lambda model: Sampling(top_p="0.5"), "`Sampling(top_p='0.5')`"),
    ],
)
def test_decoding_refuses_what_it_cannot_do(call, message):
    with sl.unsharded(), pytest.raises(ValueError) as caught:
        call(make(GPT2))
    assert message in str(caught.value)


def test_counts_and_tokens_may_be_numbers_of_numpy():
    model = make(GPT2)
    with sl.unsharded():
        plain = sampling.generate(model, PROMPTS, 2, KEY, end=3, chunk=2)
        numbers = {"end": np.int64(3), "chunk": np.int32(2)}
        found = sampling.generate(model, PROMPTS, np.int64(2), jax.random.PRNGKey(0), **numbers)
        assert decoding.empty(model, np.int64(2), np.int64(4)).slots == 4
    np.testing.assert_array_equal(found, plain)


# The program of a token.

LAYERS, ROWS, SLOTS, WIDTH = 3, 8, 2048, 512
LARGE = gpt.tiny(
    layers=LAYERS, width=WIDTH, heads=8, kv_heads=4, context=SLOTS, vocab=1024,
    positions="rotary", norm="rms", mlp="swiglu", bias=False,
    dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
)  # fmt: skip
PLATFORMS = [
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]
# A workspace of cuBLAS, which is not of the program.
CUBLAS = 32 * 2**20


def abstract(mesh, rules, config=LARGE):
    """A large model and its cache, on a machine that is not there."""
    make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
    strategy = sl.Strategy(mesh=mesh, rules=rules)
    model = sl.init(make, optax.sgd(0.1), strategy, abstract=True).model
    names = decoding.names_of(model)
    split = jax.NamedSharding(mesh, jax.P(*(name and rules[name][0] for name in names)))
    whole = jax.NamedSharding(mesh, jax.P())
    with sl.use(rules, mesh):
        cache = jax.eval_shape(functools.partial(decoding.empty, rows=ROWS, slots=SLOTS), model)

    def laid_out(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if x.ndim else whole)

    return model, jax.tree.map(laid_out, cache)


def compile_extend(platform, shape, rules, tokens=1, config=LARGE):
    mesh, rules = mesh_on(platform, shape), decoding.rules(rules)
    model, cache = abstract(mesh, rules, config)
    tokens = jax.ShapeDtypeStruct(
        (ROWS, tokens), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P("data"))
    )
    with sl.use(rules, mesh):
        # Not `extend` itself, which a `jax.jit` around it would rob of its donated cache.
        compiled = compile_for(mesh, decoding._extend.lower(model, tokens, cache))
    return compiled, testing.collectives(compiled, mesh)


def cache_bytes(devices=8):
    return 2 * LAYERS * ROWS * LARGE.kv_heads * SLOTS * (WIDTH // LARGE.heads) * 2 // devices


def check_memory(compiled, platform, least=0):
    """See that the cache is updated where it is, and that there is no second one beside it."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes()
    workspace = CUBLAS if platform.startswith("h200") else 0
    # GPUs copy what cuBLAS multiplies, a layer's kernels, keys and values at a time.
    assert memory.temp_size_in_bytes - workspace < cache_bytes() + least


@pytest.mark.parametrize("platform", PLATFORMS)
def test_decoding_under_tensor_parallelism_is_two_all_reduces_of_a_token_per_layer(platform):
    compiled, found = compile_extend(platform, "data=2,model=4", sl.rules.data | sl.rules.tensor)
    token = ROWS // 2 * WIDTH
    sums = {}
    for one in found:
        assert (one.kind, one.axes) == ("all-reduce", ("model",)), testing.summary(found)
        assert one.operand_bytes in (2 * token, 4 * token)
        sums[one.times] = sums.get(one.times, 0) + 1
    # Two in each layer, and one of the embedding.
    assert sums == {LAYERS: 2, 1: 1}, testing.summary(found)
    check_memory(compiled, platform)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_decoding_of_split_rows_exchanges_nothing(platform):
    _, found = compile_extend(platform, "data=8", sl.rules.data)
    assert not found, testing.summary(found)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_decoding_with_slots_split_over_devices_combines_what_queries_found(platform):
    rules = sl.rules.data | CONTEXT.attention(context="ring")
    _, found = compile_extend(platform, "data=2,context=4", rules)
    heads = ROWS // 2 * LARGE.heads
    size = WIDTH // LARGE.heads
    # Of each query: its largest score, its sum of exponentials, and its result.
    assert {(one.kind, one.axes, one.times) for one in found} == {
        ("all-reduce", ("context",), LAYERS)
    }, testing.summary(found)
    elements = sorted(int(np.prod(shape)) for one in found for shape in one.shapes)
    assert elements == [heads, heads, heads * size], testing.summary(found)


@pytest.mark.filterwarnings("ignore:The out_shape and scratch_shapes:DeprecationWarning")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_decoding_of_a_chunk_under_sequence_parallelism_moves_no_keys(platform):
    compiled, found = compile_extend(
        platform, "data=2,model=4", sl.rules.data | sl.rules.tensor_sequence, tokens=512
    )
    stream = ROWS // 2 * 512 * WIDTH * 2
    in_layers = {}
    for one in found:
        if one.times == LAYERS:
            moved = max(one.operand_bytes, one.result_bytes)
            in_layers[one.kind] = in_layers.get(one.kind, 0) + moved
    assert in_layers == {"all-gather": 2 * stream, "reduce-scatter": 2 * stream}, testing.summary(
        found
    )
    # The stream of the chunk, and an MLP's.
    check_memory(compiled, platform, least=4 * stream)


@pytest.mark.tpu_compiler
def test_decoding_of_a_chunk_over_split_slots_gathers_the_chunk_and_not_the_cache():
    rules = sl.rules.data | CONTEXT.attention(context="ring")
    compiled, found = compile_extend("v5e:2x4", "data=2,context=4", rules, tokens=512)
    chunk = ROWS // 2 * 512 * LARGE.kv_heads * (WIDTH // LARGE.heads) * 2
    gathered = [one.result_bytes for one in found if one.kind == "all-gather"]
    assert gathered == [chunk, chunk], testing.summary(found)
    # Devices of the ring pass on the slots that they have.
    passed = {one.operand_bytes for one in found if one.times == 3 * LAYERS}
    assert passed == {cache_bytes() // LAYERS // 2}, testing.summary(found)
    # The stream of a device's part of the chunk, and an MLP's.
    stream = ROWS // 2 * 512 // 4 * WIDTH * 2
    check_memory(compiled, "v5e:2x4", least=4 * stream)


@pytest.mark.tpu_compiler
def test_decoding_in_one_program_has_the_cache_once():
    mesh, rules = mesh_on("v5e:2x4", "data=2,model=4"), decoding.rules(TENSOR)
    model, _ = abstract(mesh, rules)
    split = jax.NamedSharding(mesh, jax.P("data"))
    prompts = jax.ShapeDtypeStruct((ROWS, 256), jnp.int32, sharding=split)
    write = jax.jit(functools.partial(sampling.generate, tokens=SLOTS - 256))
    key = jax.ShapeDtypeStruct((), KEY.dtype, sharding=jax.NamedSharding(mesh, jax.P()))
    with sl.use(rules, mesh):
        compiled = compile_for(mesh, write.lower(model, prompts, key=key))
    assert compiled.memory_analysis().temp_size_in_bytes < 1.6 * cache_bytes()


TENSOR = sl.rules.data | sl.rules.tensor
