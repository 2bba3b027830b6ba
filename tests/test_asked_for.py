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
def test_full_recomputation_needs_a_block_that_is_marked(of, more):
    cast = lambda block: lambda x, w: block(x.astype(w.dtype), w).astype(x.dtype)
    traced(of(cast(sl.remat(layer))), make(shape=(2, 8, 8)), remat="full", **more)
    with pytest.raises(
        ValueError, match='remat="full".*blocks marked with `sl.remat`, and the loss calls none'
    ):
        traced(of(cast(layer)), remat="full", **more)
    traced(of(cast(layer)), remat="none", **more)


def test_a_block_that_settles_it_for_itself_is_not_marked_for_the_strategy():
    with pytest.raises(ValueError, match="the loss calls none"):
        traced(scanned(sl.remat(layer, "none")), remat="full")


def test_a_second_step_of_the_same_loss_sees_marks_that_were_traced_before():
    """JAX keeps what a loop's body was traced to: a mark may be seen in what it made alone."""
    marked = sl.remat(layer)
    body = lambda x, w: (marked(x, w), None)
    loss = lambda model, x, rng: jnp.mean(lax.scan(body, x, model["w"])[0])
    for _ in range(2):
        traced(loss, remat="full")


def test_modules_of_flax_are_marked_too():
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
def test_names_of_stacked_dims_are_names_of_the_model(stage, stacked):
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
def test_zero_that_splits_nothing_says_so_with_the_sizes(zero, precision):
    said = r"splits nothing over `data=8`.*largest is `w` \(small: 64 elements\).*small=.*`zero=sl.Zero\(\d, small=0\)`"
    with pytest.warns(sl.ShardingWarning, match=said):
        init(zero=zero, precision=precision)


def test_zero_whose_dims_do_not_divide_says_that():
    with pytest.warns(
        sl.ShardingWarning,
        match=r"`w` \(no dim that is whole divides by `data=8`\). Have a dim that divides",
    ):
        init(make(shape=(2, 6, 6)), zero=sl.Zero(3, small=8))


def test_zero_that_splits_something_or_has_one_device_says_nothing():
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
def test_a_metric_has_no_name_that_the_step_or_a_record_has(name, of):
    loss = lambda model, x, rng: (
        jnp.mean(x @ model["w"][0]),
        {"mine": of(jnp.mean(x)), name: of(jnp.mean(x))},
    )
    with pytest.raises(ValueError, match=f"The metric `{name}` is the step's own"):
        traced(loss)
    strategy = sl.Strategy(mesh="data=8", rules=RULES)
    with pytest.raises(ValueError, match=f"The metric `{name}` is the step's own"):
        sl.evaluation(loss, strategy).trace(init(), X)


def test_every_name_that_a_step_returns_is_refused():
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


def test_metrics_have_names():
    with pytest.raises(ValueError, match="takes a dict of metrics by name"):
        traced(lambda model, x, rng: (jnp.mean(x @ model["w"][0]), {1: jnp.mean(x)}))


@pytest.mark.parametrize("name", ["loss", "examples_per_second", "seconds_left", "step"])
def test_two_numbers_of_a_record_have_two_names(name):
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
def test_float16_is_refused_until_losses_are_scaled(field, value):
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
def test_dtypes_that_a_step_cannot_have_are_refused_with_the_reason(field, value, said):
    with pytest.raises(ValueError, match=rf"Precision\({field}=.*{said}"):
        sl.Precision(**{field: value})


@pytest.mark.parametrize("value", ["fp16", "float16"])
def test_a_strategy_does_not_take_float16_by_name(value):
    with pytest.raises(ValueError, match="in float16 gradients below"):
        sl.Strategy(mesh="data=8", rules=RULES, precision=value)


def test_float64_is_taken_where_jax_has_it():
    with jax.enable_x64(True):
        assert sl.Precision("float64").compute == "float64"
    assert sl.Precision(jnp.bfloat16) == sl.Precision("bf16") == sl.Precision("bfloat16")
