"""The decoder against a second one, written in numpy from the definitions, and against itself on a mesh."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

import shardlib as sl
from models import gpt
from shardlib._hlo import collectives, summary

SMALL = gpt.tiny(width=32, heads=8, context=16, vocab=40)
LLAMA = replace(SMALL, norm="rms", positions="rotary", mlp="swiglu", bias=False, tied=False, hidden=96, kv_heads=4)
VARIANTS = {
    "gpt1": replace(SMALL, norm_first=False, tied=False),
    "gpt2": SMALL,
    "llama2": replace(LLAMA, kv_heads=None),
    "llama3": replace(LLAMA, rope_theta=500_000.0),
    "padded": replace(SMALL, vocab=37, vocab_multiple=8),
    "wide_heads": replace(LLAMA, head_dim=6, bias=True),
    "no_bias": replace(SMALL, bias=False),
    "post_norm_rotary": replace(LLAMA, norm_first=False),
}
PRESETS = {
    "data": sl.rules.data,
    "tensor": sl.rules.data | sl.rules.tensor,
    "tensor_sequence": sl.rules.data | sl.rules.tensor_sequence,
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
every_preset = pytest.mark.parametrize("rules", PRESETS.values(), ids=PRESETS)


def make(config, seed=0):
    """A model in which no parameter is at a value, such as zero, that would hide a mistake."""
    model = jax.jit(lambda: nnx.split(gpt.GPT(config, rngs=nnx.Rngs(seed))))
    structure, params = model()
    leaves, treedef = jax.tree.flatten(params)
    generator = np.random.default_rng(seed)
    leaves = [leaf + 0.2 * generator.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    return nnx.merge(structure, jax.tree.unflatten(treedef, leaves))


def tokens_of(config, rows=4, length=16, seed=1):
    return np.random.default_rng(seed).integers(0, config.vocab, (rows, length), dtype=np.int32)


@functools.cache
def mesh_of(kind):
    devices = jax.devices()
    if kind == "tpu":
        from jax.experimental import topologies

        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices)


# The reference: one example, one head at a time, in float64.


def reference(model, tokens):
    config, params = model.config, jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return np.stack([reference_row(config, params, row) for row in tokens])


def reference_row(config, params, row):
    x = params["embedding"][row]
    if config.positions == "learned":
        x = x + params["positions"][: len(row)]
    for layer in range(config.layers):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        halves = (
            (block["attention_norm"], lambda h, block=block: reference_attention(config, block["attention"], h)),
            (block["mlp_norm"], lambda h, block=block: reference_mlp(config, block["mlp"], h)),
        )
        for norm, half in halves:
            if config.norm_first:
                x = x + half(reference_norm(config, norm, x))
            else:
                x = reference_norm(config, norm, x + half(x))
    if config.norm_first:
        x = reference_norm(config, params["norm"], x)
    logits = x @ (params["embedding"].T if config.tied else params["head"])
    return logits[:, : config.vocab]


def reference_norm(config, params, x):
    if config.norm == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * params["scale"]
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_epsilon) * params["scale"]
    return y + params["bias"] if config.bias else y


def reference_attention(config, params, x):
    length, out = len(x), np.zeros_like(x)
    heads_per_kv_head = config.heads // (config.kv_heads or config.heads)
    for head in range(config.heads):
        of = {"query": head, "key": head // heads_per_kv_head, "value": head // heads_per_kv_head}
        q, k, v = (x @ params[name]["kernel"][:, at] for name, at in of.items())
        if config.bias:
            q, k, v = (y + params[name]["bias"][at] for y, (name, at) in zip((q, k, v), of.items(), strict=True))
        if config.positions == "rotary":
            q, k = reference_rotary(config, q), reference_rotary(config, k)
        for i in range(length):
            weights = np.exp(k[: i + 1] @ q[i] / math.sqrt(len(q[i])))
            out[i] += (weights / weights.sum()) @ v[: i + 1] @ params["output"]["kernel"][head]
    return out + params["output"]["bias"] if config.bias else out


def reference_rotary(config, x):
    """Multiply pairs of dims, as complex numbers, by a power of e^i."""
    size = x.shape[1]
    turned = np.zeros_like(x)
    for position in range(len(x)):
        for pair in range(size // 2):
            angle = position * config.rope_theta ** (-2 * pair / size)
            z = complex(x[position, pair], x[position, pair + size // 2]) * complex(math.cos(angle), math.sin(angle))
            turned[position, pair], turned[position, pair + size // 2] = z.real, z.imag
    return turned


def reference_mlp(config, params, x):
    bias = lambda name: params[name]["bias"] if config.bias else 0  # noqa: E731
    up = x @ params["up"]["kernel"] + bias("up")
    if config.mlp == "swiglu":
        gate = x @ params["gate"]["kernel"] + bias("gate")
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return hidden @ params["down"]["kernel"] + bias("down")


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
def test_presets_have_as_many_parameters_as_the_papers_say(config, count):
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == count


@every_variant
def test_logits_equal_the_definitions(config):
    model, tokens = make(config), tokens_of(config)
    with sl.unsharded():
        logits = nnx.jit(gpt.GPT.__call__)(model, tokens)
    np.testing.assert_allclose(logits[..., : config.vocab], reference(model, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_a_token_changes_nothing_before_it(config):
    model, tokens = make(config), tokens_of(config)
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab
    with sl.unsharded():
        call = nnx.jit(gpt.GPT.__call__)
        before, after = call(model, tokens), call(model, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any((0, 2)).all()


def test_rows_beyond_the_vocabulary_get_no_probability_and_no_gradient():
    config = VARIANTS["padded"]
    model, batch = make(config), {"tokens": tokens_of(config, length=17)}
    assert model.embedding.shape[0] == 40
    with sl.unsharded():
        assert (jax.nn.softmax(model(batch["tokens"][:, :-1]))[..., 37:] == 0).all()
        gradient = nnx.grad(lambda model: gpt.loss(model, batch).total)(model)
    assert (gradient["embedding"][...][37:] == 0).all()
    assert (gradient["embedding"][...][:37] != 0).any(1).all()


def test_a_token_that_is_no_row_is_nan():
    model, tokens = make(SMALL), tokens_of(SMALL)
    tokens[0, 3] = 40
    with sl.unsharded():
        assert jnp.isnan(model(tokens)[0, 3]).all()


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_scanned_blocks_equal_a_loop_over_layers(config):
    model, tokens = make(replace(config, layers=3)), tokens_of(config)
    structure, params = nnx.split(model.blocks)
    with sl.unsharded():
        x = model._embed(tokens)
        rotation = (
            gpt.rotations(16, config.dims["head_dim"], config.rope_theta) if config.positions == "rotary" else None
        )
        for layer in range(3):
            x = nnx.merge(structure, jax.tree.map(lambda leaf, layer=layer: leaf[layer], params))(x, rotation, None)
        np.testing.assert_allclose(model.features(tokens), model.norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [SMALL, VARIANTS["padded"]], ids=["gpt2", "padded"])
def test_loss_equals_optax(config):
    model, tokens = make(config), tokens_of(config, length=17)
    mask = np.random.default_rng(2).integers(0, 2, (4, 16))
    with sl.unsharded():
        logits = model(tokens[:, :-1])[..., : config.vocab]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        whole, masked = gpt.loss(model, {"tokens": tokens}), gpt.loss(model, {"tokens": tokens, "mask": mask})
    np.testing.assert_allclose(whole.total, losses.sum(), rtol=1e-5)
    np.testing.assert_allclose(masked.total, (losses * mask).sum(), rtol=1e-5)
    assert (whole.weight, masked.weight) == (64, mask.sum())


def test_loss_is_float32_where_the_model_is_bfloat16():
    model, batch = make(replace(SMALL, dtype=jnp.bfloat16)), {"tokens": tokens_of(SMALL, length=17)}
    with sl.unsharded():
        assert model(batch["tokens"][:, :-1]).dtype == jnp.bfloat16
        found = gpt.loss(model, batch)
        expected = gpt.loss(make(SMALL), batch)
    assert found.total.dtype == jnp.float32
    np.testing.assert_allclose(found.total, expected.total, rtol=0.02)


def test_dropout_needs_a_key_until_eval_and_costs_nothing_at_rate_zero():
    config = replace(SMALL, dropout=0.5)
    model, tokens, key = make(config), tokens_of(config), jax.random.key(0)
    with sl.unsharded():
        with pytest.raises(ValueError, match="rngs"):
            model(tokens)
        once, again, other = (model(tokens, key=k) for k in (key, key, jax.random.key(1)))
        np.testing.assert_array_equal(once, again)
        assert (once != other).any()
        np.testing.assert_array_equal(nnx.view(model, deterministic=True)(tokens), make(SMALL)(tokens))
        traced = jax.make_jaxpr(lambda: make_plain(SMALL)(tokens, key=key))()
    assert "random_bits" not in str(traced)


def make_plain(config):
    return nnx.merge(*nnx.split(make(config)), copy=True)


def test_dropout_differs_by_layer_and_place():
    config = replace(SMALL, dropout=0.5, layers=3)
    structure, params = nnx.split(gpt.GPT(config, rngs=nnx.Rngs(0)))
    keys = []

    def watch(key, p, shape, **_):
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        return jnp.ones(shape, bool)

    with sl.unsharded(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bernoulli", watch)
        nnx.merge(structure, params)(tokens_of(config), key=jax.random.key(0)).block_until_ready()
    jax.effects_barrier()
    assert len(set(keys)) == len(keys) == 1 + 2 * 3


def test_generate_continues_the_prompt():
    config = replace(SMALL, dropout=0.1)
    model, prompt = make(config), tokens_of(config, rows=2, length=5)
    with sl.unsharded():
        tokens = gpt.generate(model, prompt, 6, jax.random.key(0), 0.0)
        logits = nnx.view(model, deterministic=True)(tokens)
        drawn = gpt.generate(model, prompt, 6, jax.random.key(0))
        assert (drawn != gpt.generate(model, prompt, 6, jax.random.key(1))).any()
    np.testing.assert_array_equal(tokens[:, :5], prompt)
    np.testing.assert_array_equal(tokens[:, 5:], logits.argmax(-1)[:, 4:-1])
    assert not model.dropout.deterministic


# What is wrong with a configuration is said.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "`GPTConfig(width=32)` must be a multiple of `heads=5`"),
        ({"kv_heads": 3}, "`GPTConfig(heads=8)` must be a multiple of `kv_heads=3`"),
        ({"norm": "batch"}, "choose 'layer' or 'rms'"),
        ({"mlp": "relu"}, "choose 'gelu' or 'swiglu'"),
        ({"positions": "none"}, "choose 'learned' or 'rotary'"),
        ({"positions": "rotary", "head_dim": 3}, "`head_dim=3` must be even"),
        ({"layers": 0}, "`GPTConfig(layers=0)` must be a positive integer"),
        ({"kv_heads": 0}, "`GPTConfig(kv_heads=0)` must be a positive integer"),
        ({"vocab": 50_257.0}, "`GPTConfig(vocab=50257.0)` must be a positive integer"),
        ({"dropout": 1.0}, "`GPTConfig(dropout=1.0)`"),
    ],
)
def test_wrong_configurations_are_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        replace(SMALL, **changes)
    assert message in str(caught.value)


def test_a_sequence_longer_than_the_context_is_refused():
    with sl.unsharded(), pytest.raises(ValueError, match=r"17 tokens does not fit `GPTConfig\(context=16\)`"):
        make(SMALL)(tokens_of(SMALL, length=17))


# How it is laid out.


@functools.cache
def split_up(config):
    structure, params = nnx.split(make(config))
    return structure, nnx.to_pure_dict(params)


def value_and_grad(config, params, batch):
    def mean_loss(params):
        found = gpt.loss(nnx.merge(split_up(config)[0], params), batch)
        return found.total / found.weight

    return jax.value_and_grad(mean_loss)(params)


@every_preset
@pytest.mark.parametrize("config", [SMALL, VARIANTS["gpt1"], LLAMA], ids=["gpt2", "gpt1", "llama"])
def test_loss_and_gradients_on_a_mesh_equal_those_without(config, rules):
    mask = np.random.default_rng(2).integers(0, 2, (4, 16))
    batch, params = {"tokens": tokens_of(config, length=17), "mask": mask}, split_up(config)[1]
    compute = jax.jit(functools.partial(value_and_grad, config))
    with sl.unsharded():
        expected = compute(params, batch)
    mesh = mesh_of("cpu")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), sl.specs(make(config), rules, mesh))
    with sl.use(rules, mesh):
        found = compute(jax.device_put(params, shardings), batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)


@every_variant
def test_every_dim_of_every_parameter_has_a_name_and_tensor_rules_split_all_large_ones(config):
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        names = variable.get_metadata()["out_sharding"]
        assert len(names) == variable.ndim and set(names) <= set(sl.rules.vocabulary), path
    specs = sl.specs(model, PRESETS["tensor"], mesh_of("cpu"))
    whole = [path for path, spec in nnx.traversals.flatten_mapping(specs).items() if "model" not in spec]
    replicated = ("norm", "positions", "output", "down")
    assert all(any(part in name for part in replicated for name in path) for path in whole), whole
    assert all(path[-1] != "kernel" for path in whole)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_program_does_not_grow_with_depth(remat):
    def lines(layers):
        config = replace(LLAMA, layers=layers, dropout=0.1)
        params, batch = split_up(config)[1], {"tokens": tokens_of(config, length=17)}

        def loss(params, key):
            return gpt.loss(nnx.merge(split_up(config)[0], params), batch, key).total

        with sl.use(PRESETS["tensor"], mesh_of("cpu"), remat=remat):
            return jax.jit(jax.grad(loss)).lower(params, jax.random.key(0)).as_text().count("\n")

    assert lines(2) == lines(7)


def compiled(config, rules, mesh):
    """Loss and gradients of one device's examples, as in the train step: manual over `data`, automatic over `model`."""
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    structure, shapes = nnx.split(model)
    shapes, specs = nnx.to_pure_dict(shapes), sl.specs(model, rules, mesh)
    P = jax.sharding.PartitionSpec

    def local(params, tokens):
        return jax.grad(lambda params: gpt.loss(nnx.merge(structure, params), {"tokens": tokens}).total)(params)

    def program(params, tokens):
        local_gradients = jax.shard_map(
            lambda params, tokens: jax.tree.map(lambda leaf: leaf[None], local(params, tokens)),
            in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"}, check_vma=False,
        )  # fmt: skip
        return local_gradients(params, tokens)

    place = functools.partial(NamedSharding, mesh)
    params = jax.tree.map(lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(spec)), shapes, specs)
    tokens = jax.ShapeDtypeStruct((8, 129), jnp.int32, sharding=place(P("data")))
    out = jax.tree.map(lambda spec: place(P("data", *spec)), specs)
    with sl.use(rules, mesh):
        return jax.jit(program, out_shardings=out).lower(params, tokens).compile()


BIG = {"layers": 3, "width": 256, "heads": 8, "context": 128, "vocab": 1000, "vocab_multiple": 128}
STREAM = (4, 128, 256)


@pytest.mark.parametrize("preset", [gpt.gpt1, gpt.gpt2, gpt.llama3_8b])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("tpu", marks=pytest.mark.tpu_compiler)])
def test_tensor_parallelism_is_megatrons(preset, kind):
    """Two all-reduces per layer and direction; one each for the embedding and the head; three numbers per token."""
    config = preset(**{**BIG, **({"kv_heads": 4, "hidden": 512} if preset is gpt.llama3_8b else {})})
    found = collectives(compiled(config, PRESETS["tensor"], mesh_of(kind)), mesh_of(kind))
    assert {(one.kind, one.axes) for one in found} == {("all-reduce", ("model",))}, summary(found)
    of_stream = [one.times for one in found if STREAM in one.shapes]
    assert sorted(of_stream) == [1, 1, 3, 3, 3, 3], summary(found)
    per_token = [shape for one in found for shape in one.shapes if shape != STREAM]
    assert per_token == [(4, 128)] * 3, summary(found)
    if kind == "tpu":  # a CPU sums the gradients of query, key and value, and of gate and up, after reducing each
        assert all(one.shapes.count(STREAM) <= 1 for one in found), summary(found)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("preset", [gpt.gpt1, gpt.gpt2, gpt.llama3_8b])
def test_sequence_parallelism_is_megatrons(preset):
    """Each of those all-reduces is a reduce-scatter where it was, and an all-gather on the way back."""
    config = preset(
        **{**BIG, **({"kv_heads": 4, "hidden": 512} if preset is gpt.llama3_8b else {})}, dtype=jnp.bfloat16
    )
    found = collectives(compiled(config, PRESETS["tensor_sequence"], mesh_of("tpu")), mesh_of("tpu"))
    assert {one.axes for one in found} == {("model",)}, summary(found)
    scatters = [one.times for one in found if one.kind == "reduce-scatter" and one.shapes == (STREAM,)]
    gathers = [one.times for one in found if one.kind == "all-gather" and one.shapes == ((4, 32, 256),)]
    assert sorted(scatters) == sorted(gathers) == [1, 1, 3, 3, 3, 3], summary(found)
    # Beside them: norms and biases, applied to parts of the sequence, get gradients that are summed, once for all layers;
    # so do positions, of which each device has a part.
    others = [one for one in found if one.times == 1 and one.shapes not in ((STREAM,), ((4, 32, 256),))]
    assert {one.kind for one in others} <= {"all-reduce", "all-gather"}, summary(found)
    assert all(math.prod(shape) <= 128 * 256 for one in others for shape in one.shapes), summary(found)
