"""The decoder against a second one, written in numpy from the definitions, and against itself on a
mesh.
"""

import functools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt
from shardlib._tree import named_leaves
from shardlib.compiled._collectives import collectives, summary

SMALL = gpt.tiny(width=32, heads=8, context=16, vocab=40)
LLAMA = replace(
    SMALL,
    norm="rms",
    positions="rotary",
    mlp="swiglu",
    bias=False,
    tied=False,
    hidden=96,
    kv_heads=4,
)
VARIANTS = {
    "gpt1": replace(SMALL, norm_first=False, tied=False),
    "gpt2": SMALL,
    "llama2": replace(LLAMA, kv_heads=None),
    "llama3": replace(LLAMA, rope_theta=500_000.0),
    "padded": replace(SMALL, vocab=37, vocab_multiple=8),
    "wide_heads": replace(LLAMA, head_dim=6, bias=True),
    "no_bias": replace(SMALL, bias=False),
    "post_norm_rotary": replace(LLAMA, norm_first=False),
    "geglu": replace(SMALL, mlp="geglu"),
}
RULES = {
    "tensor": sl.rules.data | sl.rules.tensor,
    "tensor_sequence": sl.rules.data | sl.rules.tensor_sequence,
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def make(config):
    """A model in which no parameter is at a value, such as zero, that would hide a mistake."""
    structure, shapes = abstract(config)
    generator = np.random.default_rng(0)

    def value(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(centre + 0.2 * generator.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(structure, jax.tree.map_with_path(value, shapes))


@functools.cache
def abstract(config):
    structure, shapes = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
    return structure, nnx.to_pure_dict(shapes)


def tokens_of(config, rows=4, length=16):
    return np.random.default_rng(1).integers(0, config.vocab, (rows, length), dtype=np.int32)


MESH = mesh_on("cpu", "data=2,model=4")


@nnx.jit
def call(model, tokens, key=None):
    return model(tokens, key=key)


loss = nnx.jit(gpt.loss)


# The reference: one example, one head at a time, in float64.


def reference(model, tokens):
    config, params = (
        model.config,
        jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(model, nnx.Param))),
    )
    return np.stack([reference_row(config, params, row) for row in tokens])


def reference_row(config, params, row):
    x = params["embedding"][row]
    if config.positions == "learned":
        x = x + params["positions"][: len(row)]
    for layer in range(config.layers):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        halves = (
            (
                block["attention_norm"],
                lambda h, block=block: reference_attention(config, block["attention"], h),
            ),
            (block["mlp_norm"], lambda h, block=block: reference_mlp(config, block["mlp"], h)),
        )
        for norm, half in halves:
            x = x + half(reference_norm(config, norm, x) if config.norm_first else x)
            x = x if config.norm_first else reference_norm(config, norm, x)
    if config.norm_first:
        x = reference_norm(config, params["norm"], x)
    logits = x @ (params["embedding"] if config.tied else params["head"]).T
    return logits[:, : config.vocab]


def reference_norm(config, params, x):
    if config.norm == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * params["scale"]
    y = (
        (x - x.mean(-1, keepdims=True))
        / np.sqrt(x.var(-1, keepdims=True) + config.norm_epsilon)
        * params["scale"]
    )
    return y + params["bias"] if config.bias else y


def reference_attention(config, params, x):
    length, out = len(x), np.zeros_like(x)
    heads_per_kv_head = config.heads // (config.kv_heads or config.heads)
    for head in range(config.heads):
        of = {"query": head, "key": head // heads_per_kv_head, "value": head // heads_per_kv_head}
        q, k, v = (x @ params[name]["kernel"][at].T for name, at in of.items())
        if config.bias:
            q, k, v = (
                y + params[name]["bias"][at]
                for y, (name, at) in zip((q, k, v), of.items(), strict=True)
            )
        if config.positions == "rotary":
            q, k = reference_rotary(config, q), reference_rotary(config, k)
        for i in range(length):
            weights = np.exp(k[: i + 1] @ q[i] / math.sqrt(len(q[i])))
            out[i] += (weights / weights.sum()) @ v[: i + 1] @ params["output"]["kernel"][:, head].T
    return out + params["output"]["bias"] if config.bias else out


def reference_rotary(config, x):
    """Multiply pairs of dims, as complex numbers, by a power of e^i."""
    size = x.shape[1]
    turned = np.zeros_like(x)
    for position in range(len(x)):
        for pair in range(size // 2):
            angle = position * config.rope_theta ** (-2 * pair / size)
            z = complex(x[position, pair], x[position, pair + size // 2]) * complex(
                math.cos(angle), math.sin(angle)
            )
            turned[position, pair], turned[position, pair + size // 2] = z.real, z.imag
    return turned


def reference_mlp(config, params, x):
    bias = lambda name: params[name]["bias"] if config.bias else 0
    up = x @ params["up"]["kernel"].T + bias("up")
    gelu = lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    if config.gated:
        gate = x @ params["gate"]["kernel"].T + bias("gate")
        hidden = up * (gelu(gate) if config.mlp == "geglu" else gate / (1 + np.exp(-gate)))
    else:
        hidden = gelu(up)
    return hidden @ params["down"]["kernel"].T + bias("down")


# What it computes.


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (gpt.gpt1(), 147_674_112),
        (gpt.gpt1(vocab=40_478, tied=True), 116_534_784),
        (gpt.gpt2(), 124_439_808),
        (gpt.gpt2_xl(), 1_557_611_200),
        (gpt.llama2_7b(), 6_738_415_616),
        (gpt.llama3_8b(), 8_030_261_248),
    ],
    ids=["gpt1", "gpt1_published", "gpt2", "gpt2_xl", "llama2_7b", "llama3_8b"],
)
def test_gpt_presets_have_the_published_parameter_counts(config, count):
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == count


@every_variant
def test_gpt_logits_match_a_numpy_reference(config):
    model, tokens = make(config), tokens_of(config)
    with sl.unsharded():
        logits = call(model, tokens)
    np.testing.assert_allclose(
        logits[..., : config.vocab], reference(model, tokens), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_gpt_token_changes_no_logits_before_it(config):
    model, tokens = make(config), tokens_of(config)
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab
    with sl.unsharded():
        before, after = call(model, tokens), call(model, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any((0, 2)).all()


@pytest.mark.long
def test_gpt_packed_segments_do_not_affect_each_other():
    # Whose positions are relative, so that it matters not where a segment begins.
    config = replace(LLAMA, context=12)
    model, tokens = make(config), np.arange(24).reshape(2, 12) % config.vocab
    segments = np.array([[0] * 5 + [1] * 7, [0] * 12], np.int32)
    with sl.unsharded():
        packed = model(tokens, segments)
        alone = [model(tokens[:1, :5]), model(tokens[:1, 5:]), model(tokens[1:])]
    np.testing.assert_allclose(
        packed[0], np.concatenate([alone[0][0], alone[1][0]]), rtol=2e-4, atol=2e-4
    )
    np.testing.assert_allclose(packed[1], alone[2][0], rtol=2e-4, atol=2e-4)
    assert not np.allclose(model_without_segments(model, tokens)[0], packed[0], atol=1e-2)


def model_without_segments(model, tokens):
    with sl.unsharded():
        return model(tokens)


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_gpt_attention_by_xla_matches_the_default(config):
    tokens = tokens_of(config)
    with sl.unsharded():
        plain, default = (
            call(make(replace(config, attention=name)), tokens) for name in ("xla", None)
        )
    np.testing.assert_allclose(plain, default, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["cudnn", "tokamax"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gpt_attention_by_a_gpu_kernel_is_refused_on_cpu(dtype, name):
    config = replace(SMALL, attention=name, dtype=dtype)
    refusal = f"`{name}` is a kernel for GPUs, and this is traced for cpu"
    with sl.unsharded(), pytest.raises(ValueError, match=refusal):
        call(make(config), tokens_of(config))


@pytest.mark.representative("gpt2")
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_gpt_attention_by_cudnn_compiles_to_two_calls_without_a_mask(config):
    config = replace(config, attention="cudnn", head_dim=16, dtype=jnp.bfloat16)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 17), "int32")}

    def lowered(config, shape, rules):
        strategy = sl.Strategy(mesh=mesh_on("h200:1x1x8", shape), rules=rules)
        state = sl.init(
            lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy, abstract=True
        )
        return sl.train_step(gpt.loss, strategy).lower(state, batch)

    # Over axes of data, and beside an automatic axis that splits heads.
    for shape, rules in (("data=8", sl.rules.data), ("data=4,model=2", sl.rules.tensor)):
        text = compile_for(mesh_on("h200:1x1x8", shape), lowered(config, shape, rules)).as_text()
        calls = re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax(\w*)"', text)
        assert sorted(calls) == ["", "Backward"], "forward and backward, once each"
        assert text.count("__cudnn$fmha") == 2, "nothing with a mask or a bias"
    with pytest.raises(ValueError, match="attends in bfloat16 or float16; not float32"):
        lowered(replace(config, dtype=jnp.float32), "data=8", sl.rules.data)


def lowered_with_cudnn(remat):
    config = replace(SMALL, attention="cudnn", head_dim=16, dtype=jnp.bfloat16)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 17), "int32")}
    mesh = mesh_on("h200:1x1x8", "data=8")
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, remat=remat)
    make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    return sl.train_step(gpt.loss, strategy).lower(state, batch)


@pytest.mark.gpu_compiler
def test_gpt_attention_by_cudnn_has_no_scores_to_recompute():
    assert lowered_with_cudnn("selective").as_text() == lowered_with_cudnn("none").as_text()


@pytest.mark.representative("minimal-calls1", "remat2-calls2")
@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("remat", "calls"),
    [("full", ["", "", "Backward"]), ("minimal", ["", "Backward"]),
    (sl.Remat.save("context"), ["", "Backward"])],
)  # fmt: skip
def test_gpt_attention_by_cudnn_runs_once_where_its_context_is_kept(remat, calls):
    text = compile_for(mesh_on("h200:1x1x8", "data=8"), lowered_with_cudnn(remat)).as_text()
    found = re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax(\w*)"', text)
    assert sorted(found) == calls


@pytest.mark.gpu_compiler
def test_gpt_context_of_cudnn_is_kept_on_the_device_or_computed_again():
    with pytest.raises(ValueError, match="offloads `context`, which no activation"):
        lowered_with_cudnn(sl.Remat.offload("context"))
    with pytest.raises(ValueError, match="compresses `context`, which cannot be"):
        lowered_with_cudnn(sl.Remat.compress("int8", "context"))


def test_gpt_training_flops_are_six_per_weight_plus_attention():
    config = gpt.gpt2(vocab_multiple=128)
    weights = 12 * 12 * 768**2 + config.dims["vocab"] * 768
    assert config.training_flops_per_token == pytest.approx(
        6 * weights + 12 * 12 * 768 * 1024, rel=0.01
    )


def test_gpt_padded_vocabulary_rows_get_no_probability_or_gradient():
    config = VARIANTS["padded"]
    model, batch = make(config), {"tokens": tokens_of(config, length=17)}
    assert model.embedding.shape[0] == 40
    with sl.unsharded():
        assert (jax.nn.softmax(call(model, batch["tokens"][:, :-1]))[..., 37:] == 0).all()
        gradient = nnx.jit(nnx.grad(lambda model: gpt.loss(model, batch).total))(model)[
            "embedding"
        ][...]
    assert (gradient[37:] == 0).all()
    assert (gradient[:37] != 0).any(1).all()


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gpt_model_may_be_captured_by_a_traced_function(remat):
    model, tokens = make(SMALL), tokens_of(SMALL)
    with sl.use(RULES["tensor"], MESH, remat=remat):
        assert jax.eval_shape(lambda tokens: model(tokens), tokens).shape == (4, 16, 40)


def test_gpt_token_outside_the_vocabulary_gives_nan():
    model, tokens = make(SMALL), tokens_of(SMALL)
    tokens[0, 3] = 40
    with sl.unsharded():
        assert jnp.isnan(call(model, tokens)[0, 3]).all()


@pytest.mark.representative()
@pytest.mark.long("gpt2")
@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_gpt_scanned_blocks_equal_a_loop_over_layers(config):
    model, tokens = make(replace(config, layers=3)), tokens_of(config)
    structure, params = nnx.split(model.blocks)
    with sl.unsharded():
        x, rotation = model._embed(tokens), None
        if config.positions == "rotary":
            rotation = gpt.rotations(jnp.arange(16), config.dims["head_dim"], config.rope_theta)
        for layer in range(3):
            block = nnx.merge(
                structure, jax.tree.map(lambda leaf, layer=layer: leaf[layer], params)
            )
            x, _ = nnx.jit(gpt.Block.__call__)(block, x, None, gpt.Seen(rotation))
        np.testing.assert_allclose(
            call(model, tokens), model.logits(model.norm(x)), rtol=1e-4, atol=1e-4
        )


def test_gpt_positions_may_be_in_any_order_and_differ_by_row():
    model, tokens = make(SMALL), tokens_of(SMALL)
    order = np.random.default_rng(2).permuted(np.tile(np.arange(16), (4, 1)), axis=1)
    with sl.unsharded():
        embedded = model._embed(tokens)
        by_row = model._embed(np.take_along_axis(tokens, order, 1), order)
        alike = model._embed(tokens[:, order[0]], order[0])
        assert jnp.isnan(model._embed(tokens, jnp.arange(16) + 1)[:, -1]).all()
    np.testing.assert_array_equal(np.take_along_axis(embedded, order[..., None], 1), by_row)
    np.testing.assert_array_equal(embedded[:, order[0]], alike)
    cos, sin = gpt.rotations(jnp.arange(16), 4, 10_000.0)
    cosines, sines = gpt.rotations(jnp.asarray(order), 4, 10_000.0)
    np.testing.assert_array_equal(cosines, cos[order])
    np.testing.assert_array_equal(sines, sin[order])


@functools.cache
def trained(unroll):
    config = gpt.tiny(layers=3, norm="rms", mlp="swiglu", bias=False, unroll=unroll)
    strategy = sl.Strategy(
        mesh="data=4,model=2",
        rules=sl.rules.data | sl.rules.tensor,
        zero=sl.Zero(3, small=0),
        remat=sl.Remat.save("context"),
        accumulate=2,
    )
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
    tokens = np.random.default_rng(0).integers(0, config.vocab, (8, 17), dtype=np.int32)
    state, metrics = sl.train_step(gpt.loss, strategy)(state, {"tokens": tokens})
    return metrics["loss"], jax.tree.map(np.asarray, state.params)


@pytest.mark.long
@pytest.mark.parametrize("unroll", [2, 3])  # with a layer left over, and without a loop
def test_gpt_layers_that_are_written_out_train_as_those_of_a_loop(unroll):
    (loss, params), (expected_loss, expected) = trained(unroll), trained(1)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)


@pytest.mark.parametrize("config", [SMALL, VARIANTS["padded"]], ids=["gpt2", "padded"])
def test_gpt_loss_equals_optax(config):
    model, tokens = make(config), tokens_of(config, length=17)
    mask = np.random.default_rng(2).integers(0, 2, (4, 16))
    with sl.unsharded():
        logits = call(model, tokens[:, :-1])[..., : config.vocab]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        whole, masked = (
            loss(model, {"tokens": tokens}),
            loss(model, {"tokens": tokens, "mask": mask}),
        )
    np.testing.assert_allclose(whole.total, losses.sum(), rtol=1e-5)
    np.testing.assert_allclose(masked.total, (losses * mask).sum(), rtol=1e-5)
    assert (whole.weight, masked.weight) == (64, mask.sum())


def test_gpt_loss_is_float32_for_a_bfloat16_model():
    model, batch = make(replace(SMALL, dtype=jnp.bfloat16)), {"tokens": tokens_of(SMALL, length=17)}
    with sl.unsharded():
        assert jax.eval_shape(model, batch["tokens"][:, :-1]).dtype == jnp.bfloat16
        found, expected = loss(model, batch), loss(make(SMALL), batch)
    assert found.total.dtype == jnp.float32
    np.testing.assert_allclose(found.total, expected.total, rtol=0.02)


@pytest.mark.long
def test_gpt_dropout_acts_until_eval_and_costs_nothing_at_rate_zero():
    config = replace(SMALL, dropout=0.5)
    model, tokens, key = make(config), tokens_of(config), jax.random.key(0)
    with sl.unsharded():
        with pytest.raises(ValueError, match="rngs"):
            call(model, tokens)
        once, again, other = (call(model, tokens, k) for k in (key, key, jax.random.key(1)))
        np.testing.assert_array_equal(once, again)
        assert (once != other).any()
        plain = call(make(SMALL), tokens)
        assert "random_bits" not in str(
            jax.make_jaxpr(lambda key: make(SMALL)(tokens, key=key))(key)
        )
        assert "random_bits" in str(jax.make_jaxpr(lambda key: make(config)(tokens, key=key))(key))
        model.eval()
        np.testing.assert_array_equal(call(model, tokens), plain)


def test_gpt_dropout_draws_a_new_mask_in_every_layer_and_place(monkeypatch):
    keys = []

    def watch(key, p, shape, **_):
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        return jnp.ones(shape, bool)

    monkeypatch.setattr(jax.random, "bernoulli", watch)
    config = replace(SMALL, dropout=0.5, layers=3)
    with sl.unsharded():
        jax.block_until_ready(call(make(config), tokens_of(config), jax.random.key(0)))
    jax.effects_barrier()
    assert len(set(keys)) == len(keys) == 1 + 2 * 3


# Wrong configurations and inputs.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "`GPTConfig(width=32)` must be a multiple of `heads=5`"),
        ({"kv_heads": 3}, "`GPTConfig(heads=8)` must be a multiple of `kv_heads=3`"),
        ({"norm": "batch"}, "choose 'layer' or 'rms'"),
        ({"mlp": "tanh"}, "choose 'gelu' or 'relu' or 'swiglu'"),
        ({"attention": "flash"}, "choose 'reference' or 'tpu' or "),
        ({"positions": "none"}, "choose 'learned' or 'rotary'"),
        ({"positions": "rotary", "head_dim": 3}, "`head_dim=3` must be even"),
        ({"layers": 0}, "`GPTConfig(layers=0)` must be a positive integer"),
        ({"kv_heads": 0}, "`GPTConfig(kv_heads=0)` must be a positive integer"),
        ({"vocab": 50_257.0}, "`GPTConfig(vocab=50257.0)` must be a positive integer"),
        ({"dropout": 1.0}, "`GPTConfig(dropout=1.0)`"),
    ],
)
def test_gpt_config_refuses_wrong_values(changes, message):
    with pytest.raises(ValueError) as caught:
        replace(SMALL, **changes)
    assert message in str(caught.value)


def test_gpt_sequence_longer_than_the_context_is_refused():
    with (
        sl.unsharded(),
        pytest.raises(ValueError, match=r"17 tokens does not fit `GPTConfig\(context=16\)`"),
    ):
        make(SMALL)(tokens_of(SMALL, length=17))


# How it is laid out.


def value_and_grad(structure, params, batch):
    def mean_loss(params):
        found = gpt.loss(nnx.merge(structure, params), batch)
        return found.total / found.weight

    return jax.value_and_grad(mean_loss)(params)


@pytest.mark.representative("gpt2", "simulated kernels")
@pytest.mark.long
@pytest.mark.sentinel("norms by the reference")
@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        (SMALL, None),
        (VARIANTS["post_norm_rotary"], None),
        (SMALL, "reference"),
        (replace(SMALL, norm="rms"), "tpu_simulated"),
    ],
    ids=["gpt2", "post_norm_rotary", "norms by the reference", "simulated kernels"],
)
def test_gpt_loss_and_gradients_on_a_mesh_match_the_unsharded_model(config, kernels):
    mask = np.random.default_rng(2).integers(0, 2, (4, 16))
    batch, model, mesh = {"tokens": tokens_of(config, length=17), "mask": mask}, make(config), MESH
    structure, params = abstract(config)[0], nnx.to_pure_dict(nnx.state(model))
    with sl.unsharded():
        expected = jax.jit(functools.partial(value_and_grad, structure))(params, batch)
    compute = jax.jit(
        functools.partial(value_and_grad, abstract(replace(config, kernels=kernels))[0])
    )
    for rules in RULES.values():
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), sl.specs(model, rules, mesh)
        )
        with sl.use(rules, mesh):
            found = compute(jax.device_put(params, shardings), batch)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected
        )


@every_variant
def test_gpt_dims_are_all_named_and_tensor_rules_split_every_matrix(config):
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        names = variable.get_metadata()["out_sharding"]
        assert len(names) == variable.ndim and set(names) <= set(sl.rules.vocabulary), path
        assert (names[0] == "layers") is (path[0] == "blocks"), path
    specs = sl.specs(model, RULES["tensor"], MESH)
    for path, spec in jax.tree.leaves_with_path(specs):
        if path[-1].key in ("kernel", "embedding", "head"):
            assert "model" in spec, path


@pytest.mark.long("none")
@pytest.mark.parametrize("remat", ["none", "full"])
def test_gpt_program_does_not_grow_with_depth(remat):
    def lines(layers):
        config = replace(LLAMA, layers=layers, dropout=0.1)
        (structure, params), batch = abstract(config), {"tokens": tokens_of(config, length=17)}
        total = lambda params, key: gpt.loss(nnx.merge(structure, params), batch, key).total
        with sl.use(RULES["tensor"], MESH, remat=remat):
            return jax.jit(jax.grad(total)).lower(params, jax.random.key(0)).as_text().count("\n")

    assert lines(2) == lines(7)


STREAM = (4, 128, 256)


def big(preset, **changes):
    if preset is gpt.llama3_8b:
        changes |= {"kv_heads": 4, "hidden": 512}
    return preset(
        layers=3, width=256, heads=8, context=128, vocab=1000, vocab_multiple=128, **changes
    )


def compiled_collectives(config, rules, kind):
    """Of loss and gradients on each device's examples: as in the train step, manual over `data`
    alone.
    """
    (structure, shapes), mesh = abstract(config), mesh_on(kind, "data=2,model=4")
    specs = sl.specs(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))), rules, mesh)

    def local(params, tokens):
        total = lambda params: gpt.loss(nnx.merge(structure, params), {"tokens": tokens}).total
        return jax.tree.map(lambda leaf: leaf[None], jax.value_and_grad(total)(params))

    def program(params, tokens):
        manual = {
            "in_specs": (P(), P("data")),
            "out_specs": P("data"),
            "axis_names": {"data"},
            "check_vma": False,
        }
        return jax.shard_map(local, **manual)(params, tokens)

    place = functools.partial(NamedSharding, mesh)
    params = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(spec)), shapes, specs
    )
    tokens = jax.ShapeDtypeStruct((8, 129), jnp.int32, sharding=place(P("data")))
    out = place(P("data")), jax.tree.map(lambda spec: place(P("data", *spec)), specs)
    with sl.use(rules, mesh):
        return collectives(
            jax.jit(program, out_shardings=out).lower(params, tokens).compile(), mesh
        )


@pytest.mark.representative("cpu-gpt1", "v5e:2x4-llama3_8b")
@pytest.mark.long
@pytest.mark.sentinel("cpu-gpt2")
@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        *(("cpu", preset) for preset in (gpt.gpt1, gpt.gpt2, gpt.llama3_8b)),
        pytest.param("v5e:2x4", gpt.gpt1, marks=pytest.mark.tpu_compiler),
        pytest.param("v5e:2x4", gpt.llama3_8b, marks=pytest.mark.tpu_compiler),
    ],
)
def test_gpt_tensor_parallelism_uses_the_collectives_of_megatron(preset, kind):
    """Two all-reduces per layer and direction; one each for the embedding and the head; three
    numbers per token.
    """
    found = compiled_collectives(big(preset), RULES["tensor"], kind)
    assert {(one.kind, one.axes) for one in found} == {("all-reduce", ("model",))}, summary(found)
    assert sorted(one.times for one in found if STREAM in one.shapes) == [1, 1, 3, 3, 3, 3], (
        summary(found)
    )
    per_token = [shape for one in found for shape in one.shapes if shape != STREAM]
    assert per_token == [(4, 128)] * 3, summary(found)
    # A CPU adds up the gradients through query, key and value only after it has reduced each.
    if kind != "cpu":
        assert all(one.shapes.count(STREAM) <= 1 for one in found), summary(found)


@pytest.mark.representative("gpt2")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("preset", [gpt.gpt2, gpt.llama3_8b])
def test_gpt_sequence_parallelism_uses_the_collectives_of_megatron(preset):
    """Each of those all-reduces is a reduce-scatter where it was, and an all-gather on the way
    back.
    """
    found = compiled_collectives(
        big(preset, dtype=jnp.bfloat16), RULES["tensor_sequence"], "v5e:2x4"
    )
    assert {one.axes for one in found} == {("model",)}, summary(found)
    scatters = [one for one in found if one.kind == "reduce-scatter" and one.shapes == (STREAM,)]
    gathers = [one for one in found if one.kind == "all-gather" and one.shapes == ((4, 32, 256),)]
    for expected in (scatters, gathers):
        assert sorted(one.times for one in expected) == [1, 1, 3, 3, 3, 3], summary(found)
    # Beside them: three numbers per token; the gradients of norms and biases, which are applied to
    # parts of the sequence, summed once for all layers; those of positions, of which each device
    # has made a part, gathered.
    for other in set(found) - {*scatters, *gathers}:
        assert other.times == 1 and other.kind in ("all-reduce", "all-gather"), summary(found)
        assert all(math.prod(shape) < 128 * 256 for shape in other.shapes), summary(found)


def test_scaled_positions_are_those_of_llama_3_1():
    scaling, theta, size = gpt.RopeScaling(8.0, 1.0, 4.0, context=64), 10_000.0, 32
    cos, sin = gpt.rotations(jnp.arange(5), size, theta, scaling)
    for pair in range(size // 2):
        frequency = theta ** (-2 * pair / size)
        length = 2 * math.pi / frequency
        if length > 64 / 1.0:
            expected = frequency / 8
        elif length < 64 / 4.0:
            expected = frequency
        else:
            smooth = (64 / length - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        for position in range(5):
            assert cos[position, 0, pair] == pytest.approx(math.cos(position * expected), abs=1e-5)
            assert sin[position, 0, pair] == pytest.approx(math.sin(position * expected), abs=1e-5)


def test_biases_of_queries_keys_and_values_are_theirs_alone():
    biases = [path for path, _ in named_leaves(abstract(replace(LLAMA, qkv_bias=True))[1])]
    biases = [path for path in biases if path.endswith("bias")]
    assert biases == [f"blocks/attention/{name}/bias" for name in ("key", "query", "value")]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_scaling": 8.0}, r"is `RopeScaling\(...\)`"),
        ({"rope_scaling": gpt.RopeScaling(), "positions": "learned"}, "only rotary positions"),
        ({"rope_scaling": gpt.YarnScaling(), "rope_theta": 1.0}, "must be above 1"),
        ({"qkv_bias": True, "latent": gpt.LatentAttention(8, 8, 4, 4, 4), "kv_heads": None}, "qkv"),
    ],
)
def test_scaled_positions_and_biases_must_have_a_meaning(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **changes)
    for wrong in ({"factor": 0}, {"low": 4.0, "high": 1.0}, {"context": 1.5}):
        with pytest.raises(ValueError, match="RopeScaling"):
            gpt.RopeScaling(**wrong)
