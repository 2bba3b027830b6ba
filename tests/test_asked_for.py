"""What a strategy or a loss asks for and would not get is refused, or said aloud: nothing is
silently ignored.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import shardlib as sl

RULES = sl.AxisRules(batch="data", layers=None, blocks=None, embed=None, mlp=None)
X = np.ones((16, 8), np.float32)


def make(names=("layers", "embed", "mlp"), shape=(2, 8, 8)):
    return lambda: sl.annotate({"w": jnp.ones(shape), "b": jnp.ones(8)}, {"w": names})


def init(make_model=None, **options):
    return sl.init(
        make_model or make(),
        optax.sgd(0.1),
        sl.Strategy(**{"mesh": "data=8", "rules": RULES, **options}),
        abstract=True,
    )


def traced(loss, make_model=None, **options):
    strategy = sl.Strategy(mesh="data=8", rules=RULES, **options)
    state = sl.init(make_model or make(), optax.sgd(0.1), strategy, abstract=True)
    return sl.train_step(loss, strategy).trace(state, X)


# Blocks that are marked.


def layer(x, w):
    return jnp.tanh(x @ w)


def scanned(block):
    def loss(model, x, rng):
        return jnp.mean(lax.scan(lambda x, w: (block(x, w), None), x, model["w"])[0])

    return loss


def branching(block):
    def loss(model, x, rng):
        return jnp.mean(
            lax.cond(x.shape[0] > 100, lambda x: x, lambda x: block(x, model["w"][0]), x)
        )

    return loss


def in_a_function(block):
    def loss(model, x, rng):
        return jnp.mean(jax.jit(block)(x, model["w"][0]))

    return loss


@pytest.mark.parametrize("of", [scanned, branching, in_a_function])
@pytest.mark.parametrize(
    "more", [{}, {"accumulate": 2}, {"zero": sl.Zero(3, small=0)}, {"precision": "bf16"}], ids=str
)
def test_full_remat_without_a_marked_block_is_refused(of, more):
    cast = lambda block: lambda x, w: block(x.astype(w.dtype), w).astype(x.dtype)
    traced(of(cast(sl.remat(layer))), make(shape=(2, 8, 8)), remat="full", **more)
    with pytest.raises(
        ValueError, match='remat="full".*blocks marked with `sl.remat`, and the loss calls none'
    ):
        traced(of(cast(layer)), remat="full", **more)
    traced(of(cast(layer)), remat="none", **more)


def test_full_remat_does_not_count_blocks_with_their_own_policy():
    with pytest.raises(ValueError, match="the loss calls none"):
        traced(scanned(sl.remat(layer, "none")), remat="full")


def test_full_remat_sees_marked_blocks_in_cached_traces():
    """JAX caches the trace of a loop's body: the mark may be seen only in the cached result."""
    marked = sl.remat(layer)
    body = lambda x, w: (marked(x, w), None)
    loss = lambda model, x, rng: jnp.mean(lax.scan(body, x, model["w"])[0])
    for _ in range(2):
        traced(loss, remat="full")


def test_full_remat_recognizes_marked_flax_modules_and_layers():
    class Model(nnx.Module):
        def __init__(self, marked):
            self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.marked = marked

        def __call__(self, x):
            block = lambda layer, x: layer(x)
            if self.marked:
                block = sl.remat(
                    block, checkpoint=functools.partial(nnx.remat, graph_updates=False)
                )
            return block(self.layer, x)

    loss = lambda model, x, rng: jnp.mean(model(x))
    traced(loss, lambda: Model(True), remat="full")
    traced(
        loss,
        lambda: sl.Layers([nnx.Linear(8, 8, rngs=nnx.Rngs(n)) for n in range(2)]),
        remat="full",
    )
    with pytest.raises(ValueError, match="the loss calls none"):
        traced(loss, lambda: Model(False), remat="full")


# ZeRO.


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("stacked", [("nosuch",), ("layers", "nosuch"), ("embed", "nosuch")])
def test_zero_stacked_names_must_be_dim_names_of_the_model(stage, stacked):
    with pytest.raises(
        ValueError,
        match=r"Zero.stacked=.*no parameter has a dim of the name `nosuch`.*`embed`, `layers`",
    ):
        init(zero=sl.Zero(stage, small=0, stacked=stacked))
    init(zero=sl.Zero(stage, small=0, stacked=("layers",)))
    init(
        make(("blocks", "embed", "mlp"), (2, 8, 8)),
        zero=sl.Zero(stage, small=0, stacked=("blocks",)),
    )


@pytest.mark.parametrize("zero", [1, 2, 3, "FULL_SHARD", sl.Zero(3, small=64)])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_zero_that_splits_nothing_warns_with_the_sizes(zero, precision):
    said = r"splits nothing over `data=8`.*largest is `w` \(small: 64 elements\).*small=.*`zero=sl.Zero\(\d, small=0\)`"
    with pytest.warns(sl.ShardingWarning, match=said):
        init(zero=zero, precision=precision)


def test_zero_warns_when_no_dim_divides():
    with pytest.warns(
        sl.ShardingWarning,
        match=r"`w` \(no dim that is whole divides by `data=8`\). Have a dim that divides",
    ):
        init(make(shape=(2, 6, 6)), zero=sl.Zero(3, small=8))


def test_zero_does_not_warn_if_it_splits_or_runs_on_one_device():
    one = sl.make_mesh("data=1", devices=jax.devices()[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(zero=0)
        init(zero=sl.Zero(3, small=8))  # `b` stays whole, `w` does not
        init(zero=3, mesh=one)
        init(make(shape=(2, 512, 512)), zero=3)


# Metrics.


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "weight",
        "grad_norm",
        "first_nonfinite",
        "nonfinite_losses",
        "compressed",
        "step",
        "note",
        "crc32",
    ],
)
@pytest.mark.parametrize("of", [lambda loss: loss, lambda loss: sl.weighted_mean(loss, 1)])
def test_metrics_with_names_reserved_by_steps_or_records_are_refused(name, of):
    loss = lambda model, x, rng: (
        jnp.mean(x @ model["w"][0]),
        {"mine": of(jnp.mean(x)), name: of(jnp.mean(x))},
    )
    with pytest.raises(ValueError, match=f"The metric `{name}` is the step's own"):
        traced(loss)
    strategy = sl.Strategy(mesh="data=8", rules=RULES)
    with pytest.raises(ValueError, match=f"The metric `{name}` is the step's own"):
        sl.evaluation(loss, strategy).trace(init(), X)


def test_metric_names_reserved_include_everything_a_step_returns():
    """So that one that is added to a step is added to the names."""
    strategy = sl.Strategy(mesh="data=8", rules=RULES, exchange=sl.collectives.OneBit("data"))
    state = sl.init(make(), sl.optimizers.onebit_adam(0.1, freeze=1), strategy, abstract=True)
    out = (
        sl.train_step(lambda model, x, rng: jnp.mean(x @ model["w"][0] + model["b"]), strategy)
        .trace(state, X)
        .out_info
    )
    for name in out[1]:
        with pytest.raises(ValueError, match=f"The metric `{name}`"):
            traced(
                lambda model, x, rng, name=name: (jnp.mean(x @ model["w"][0]), {name: jnp.mean(x)})
            )
    assert set(out[1]) == {
        "loss",
        "weight",
        "grad_norm",
        "first_nonfinite",
        "nonfinite_losses",
        "nonfinite_microbatch",
        "compressed",
    }


def test_metrics_with_names_that_are_not_text_are_refused():
    with pytest.raises(ValueError, match="takes a dict of metrics by name"):
        traced(lambda model, x, rng: (jnp.mean(x @ model["w"][0]), {1: jnp.mean(x)}))


@pytest.mark.parametrize("name", ["loss", "examples_per_second", "seconds_left", "step"])
def test_watched_numbers_named_like_others_of_a_record_are_refused(name):
    strategy = sl.Strategy(mesh="data=8", rules=RULES)
    state = sl.init(lambda: {"w": jnp.ones((8, 8))}, optax.sgd(0.1), strategy)
    step = sl.train_step(lambda model, x, rng: jnp.mean(x @ model["w"]), strategy)
    with pytest.raises(ValueError, match=f"two numbers of a record are called `{name}`"):
        sl.fit(
            step,
            state,
            [X] * 20,
            sl.Loop(steps=20, log_every=5),
            records=sl.Records(sinks=[], watch={name: lambda step: 0.0}),
        )


# Precision.


@pytest.mark.parametrize("field", ["compute", "accumulate", "reduce"])
@pytest.mark.parametrize(
    "value",
    ["fp16", "float16", "half", "f2", jnp.float16, np.float16, np.dtype("float16")],
    ids=str,
)
def test_precision_refuses_float16_without_loss_scaling(field, value):
    with pytest.raises(
        ValueError,
        match=rf"Precision\({field}=.*in float16 gradients below 6e-8 are zero.*scaled loss.*`bf16`",
    ):
        sl.Precision(**{field: value})


@pytest.mark.parametrize("field", ["compute", "accumulate", "reduce"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("float8_e4m3fn", "of 8 bits and fewer take scales"),
        (jnp.float8_e5m2, "of 8 bits and fewer take scales"),
        ("float4_e2m1fn", "of 8 bits and fewer take scales"),
        ("float64", "makes float32 of float64.*jax_enable_x64"),
        ("int8", "dtype of floating-point numbers"),
        ("complex64", "dtype of floating-point numbers"),
        ("f4,f4", "dtype of floating-point numbers"),
        (("f4", "f4"), "dtype of floating-point numbers"),
        (32, "dtype of floating-point numbers"),
    ],
)
def test_precision_refuses_unusable_dtypes_with_the_reason(field, value, said):
    with pytest.raises(ValueError, match=rf"Precision\({field}=.*{said}"):
        sl.Precision(**{field: value})


@pytest.mark.parametrize("value", ["fp16", "float16"])
def test_strategy_refuses_float16_precision_by_name(value):
    with pytest.raises(ValueError, match="in float16 gradients below"):
        sl.Strategy(mesh="data=8", rules=RULES, precision=value)


def test_precision_accepts_float64_when_x64_is_enabled():
    with jax.enable_x64(True):
        assert sl.Precision("float64").compute == "float64"
    assert sl.Precision(jnp.bfloat16) == sl.Precision("bf16") == sl.Precision("bfloat16")
