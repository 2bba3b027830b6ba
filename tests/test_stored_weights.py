"""Weights that ZeRO stores split are gathered where they are used, whatever a loss does."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Literal
from test_zero import DATA, FULL, X, fit, mlp, normal, strategy, trained

import shardlib as sl
from models import gpt
from shardlib import testing
from shardlib._tree import named_leaves


def weights():
    return {
        "a": normal(0, 16, 16),
        "b": normal(1, 16, 16),
        "unused": normal(2, 16),
        "stack": normal(3, 3, 16, 16),
        "nested": normal(4, 2, 2, 16, 16),
        "layers": [{"up": normal(5 + i, 16, 16), "bias": normal(8 + i, 16)} for i in range(2)],
    }


STACKS = {
    ".*/stack": ("layers", "embed", "mlp"),
    ".*/nested": ("layers", "layers", "embed", "mlp"),
}


def dense(x, w):
    return jnp.tanh(x @ w)


def by_rows(x, m, rng):
    """Of which each row chooses its weight: devices differ."""
    return lax.map(
        lambda row: lax.cond(row[0] > 0, lambda: dense(row, m["a"]), lambda: dense(row, m["b"])), x
    )


@jax.custom_vjp
def straight_through(x, w):
    return jnp.round(4 * x @ w) / 4


straight_through.defvjp(
    lambda x, w: (straight_through(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g)
)


def spectral(x, m, rng):
    """By a loop that has no derivative, of what has none."""
    step = lambda carry: (carry[0] + 1, jnp.tanh(m["a"].T @ (m["a"] @ carry[1])))
    scale = lax.while_loop(lambda carry: carry[0] < 3, step, (0, jnp.ones(16)))[1]
    return dense(x, m["a"]) * jnp.round(scale).astype(int)


def of_layers(x, m, rng):
    for w in m["layers"]:
        x = dense(x, w["up"]) + w["bias"]
    return x


def in_two_loops(x, m, rng):
    inner = lambda x, ws: lax.scan(lambda x, w: (dense(x, w), None), x, ws)
    return lax.scan(inner, x, m["nested"])[0]


def drawn(x, m, rng):
    return jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), dense(x, m["a"]), 0)


def kept(x, m, rng):
    block = jax.checkpoint(lambda x, ws: lax.scan(lambda x, w: (dense(x, w), None), x, ws)[0])
    return block(x, m["stack"])


def in_two_loops_converted(x, m, rng):
    """Of which the first takes its weights in two places, beside a loop."""

    def body(x, ws):
        x = dense(x, ws[0].real) + x @ ws[1].real.T
        return lax.scan(lambda x, w: (dense(x, w.real), None), x, ws)[0], None

    return lax.scan(body, x, m["nested"].astype(jnp.complex64))[0]


def marked_of_a_converted_stack(x, m, rng):
    block = sl.zero3_layer(lambda x, w: dense(x, w.real))
    return lax.scan(
        lambda x, w: (block(x, w) + x @ w.real.T, None), x, m["stack"].astype(jnp.complex64)
    )[0]


def converted_by_a_jit(x, m, rng):
    """Between the uses of a layer: another layer, and a stack together with an array."""
    convert = jax.jit(lambda tree: jax.tree.map(lambda w: w.astype(jnp.complex64), tree))
    first, second = m["layers"]
    x = dense(x, first["up"])
    second = convert(second)
    stack, x = convert((m["stack"], x))
    x = dense(x.real + first["bias"], second["up"].real) + second["bias"].real
    return lax.scan(lambda x, w: (dense(x, w.real), None), x, stack)[0]


def picked_and_kept(x, m, rng):
    layer, one = jax.jit(
        lambda w: (lambda first: (lax.squeeze(first, (0,)), first))(lax.slice_in_dim(w, 0, 1))
    )(m["stack"])
    return dense(dense(x, layer), one[0])


USES = {
    "in a marked layer": lambda x, m, rng: sl.zero3_layer(lambda x, w, n: dense(x, w) / n)(
        x, m["a"], 2
    ),
    "in a jit": lambda x, m, rng: jax.jit(dense)(x, m["a"]),
    "in a checkpoint": lambda x, m, rng: jax.checkpoint(dense)(x, m["a"]),
    "in a scan in a checkpoint": kept,
    "in either branch": lambda x, m, rng: lax.cond(
        m["a"][0, 0] > 0, lambda: dense(x, m["a"]), lambda: dense(x, m["b"])
    ),
    "in either branch by row": by_rows,
    "in a loop of unknown length": spectral,
    "in every iteration": lambda x, m, rng: lax.scan(
        lambda x, _: (dense(x, m["a"]), None), x, None, length=3
    )[0],
    "as what a loop carries": lambda x, m, rng: dense(
        x, lax.fori_loop(0, 2, lambda _, w: w @ m["b"], m["a"])
    ),
    "by number": lambda x, m, rng: dense(
        dense(dense(x, m["stack"][0]), m["stack"][2]), m["stack"][-1]
    ),
    "by a number that is computed": lambda x, m, rng: lax.fori_loop(
        0, 3, lambda i, x: dense(x, m["stack"][i]), x
    ),
    "in a slice": lambda x, m, rng: lax.scan(lambda x, w: (dense(x, w), None), x, m["stack"][1:])[
        0
    ],
    "backwards": lambda x, m, rng: lax.scan(
        lambda x, w: (dense(x, w), None), x, m["stack"], reverse=True
    )[0],
    "stacked side by side": lambda x, m, rng: jnp.sum(jax.vmap(dense, (None, 0))(x, m["stack"]), 0),
    "in two loops": in_two_loops,
    "in two loops, converted": in_two_loops_converted,
    "in a marked layer of a converted stack": marked_of_a_converted_stack,
    "by number, and as it was picked": picked_and_kept,
    "converted by a jit": converted_by_a_jit,
    "with a derivative of its own": lambda x, m, rng: straight_through(x, m["a"]),
    "transposed, twice": lambda x, m, rng: (
        dense(dense(x, m["a"]), m["a"].T) + m["a"].reshape(4, 64)[0, :16]
    ),
    "layer by layer": of_layers,
    "beside randomness": drawn,
    "as a derivative": lambda x, m, rng: jax.grad(
        lambda x: jnp.sum(dense(dense(x, m["a"]), m["b"]))
    )(x),
}
if jax.__version_info__ >= (0, 12):
    # Since then, `prevent_cse` may say of each argument whether it is protected.
    USES["in a scan in a checkpoint of some arguments"] = lambda x, m, rng: jax.checkpoint(
        lambda x, ws, y: lax.scan(lambda x, w: (dense(x, w) + y, None), x, ws)[0],
        prevent_cse=(True, False, False),
    )(x, m["stack"], x)


class Recorded(dict):
    """A dict that remembers what is read of it."""

    def __init__(self, items, read):
        super().__init__(items)
        self.read = read

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


def weights_of(use):
    """The weights that a use reads, one that it may not read, and one that it does not."""
    read = {"a", "unused"}
    jax.eval_shape(
        lambda m, key: USES[use](X, Recorded(m, read), key), weights(), jax.random.key(0)
    )
    return {name: leaf for name, leaf in weights().items() if name in read}


def make():
    return sl.annotate({use: weights_of(use) for use in USES}, STACKS)


def fit_uses(model, x, rng):
    assert all(m["a"].shape == (16, 16) for m in model.values())
    errors = {use: jnp.mean((USES[use](x, m, rng) - x) ** 2) for use, m in model.items()}
    return sum(errors.values()), {
        **errors,
        "itself": jnp.mean(jnp.stack([m["a"][0, 0] for m in model.values()])),
    }


ALONE = sl.Zero(0), 1, False, sl.make_mesh("data=1", devices=jax.devices()[:1])


@cache
def gradients(zero, accumulate, overlap, mesh="data=8"):
    """The gradients of all uses at once, each of weights of its own, and the metrics."""
    exchange = sl.Exact(overlap=overlap)
    strategy = sl.Strategy(
        mesh=mesh, rules=DATA, zero=zero, accumulate=accumulate, exchange=exchange
    )
    state = sl.init(make, optax.trace(0.0), strategy)
    state, metrics = sl.train_step(fit_uses, strategy)(state, X)
    return state.opt_state.trace, metrics


# All uses of a setting are one program, which the first of them waits for.
LONG_SETTINGS = ("sums", "overlapped sums", "stage 2", "stage 3", "stage 3 sums")


@pytest.mark.representative(
    *(f"{use}-{setting}" for use in USES for setting in ("sums", "overlapped sums", "stage 3")),
)
@pytest.mark.long(
    *(f"{use}-{setting}" for use in USES for setting in LONG_SETTINGS),
)
@pytest.mark.parametrize(
    ("zero", "accumulate", "overlap"),
    [
        (sl.Zero(0, small=0), 2, False),
        (sl.Zero(1, small=0), 2, True),
        (sl.Zero(2, small=0), 1, False),
        (FULL, 1, False),
        (FULL, 2, False),
        (sl.Zero(3, small=0, layers=r".*layers/\d+"), 1, False),
    ],
    ids=[
        "sums", "overlapped sums", "stage 2", "stage 3", "stage 3 sums", "layers by path",
    ],
)  # fmt: skip
@pytest.mark.parametrize("use", USES)
def test_zero_weights_are_whole_wherever_a_loss_uses_them(use, zero, accumulate, overlap):
    (ours, found), (theirs, expected) = gradients(zero, accumulate, overlap), gradients(*ALONE)
    for name in (use, "itself"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(theirs[use]))
    for (path, mine), (_, alone) in zip(
        named_leaves(ours[use]), named_leaves(theirs[use]), strict=True
    ):
        assert mine.sharding.is_fully_replicated == (zero.stage == 0)
        scale = max(np.abs(alone).max(), 1e-2 * largest)  # as `check_step` has it
        np.testing.assert_allclose(mine, alone, rtol=0, atol=1e-5 * scale, err_msg=path)
    assert largest > 1e-3


@pytest.mark.long("2", "3")
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_with_complex_weights_and_derived_state_equals_one_device(stage):
    def loss(model, x, rng):
        w = model["params"]["w"]
        model["average"] = 0.9 * model["average"] + 0.1 * w
        return jnp.mean(jnp.abs(x @ w - 1) ** 2)

    make = lambda: {
        "params": {"w": normal(0, 16, 16) * (1 + 1j)},
        "average": jnp.zeros((16, 16), jnp.complex64),
    }
    testing.check_step(
        make, optax.sgd(0.1), loss, X, DATA, meshes=["data=8"], zero=sl.Zero(stage, small=0)
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_keeps_a_counter_that_layers_increment_in_a_scan(stage):
    """NNX's dropout counts like this in its random streams."""

    def loss(model, x, rng):
        body = lambda carry, w: ((dense(carry[0], w), carry[1] + 1), None)
        (x, model["count"]), _ = lax.scan(body, (x, model["count"]), model["params"]["w"])
        return jnp.mean(x**2)

    named = lambda: sl.annotate({"w": normal(0, 3, 16, 16)}, {"w": ("layers", "embed", "mlp")})
    make = lambda: {"params": named(), "count": jnp.int32(0)}
    state, _ = trained(loss, make=make, rules=DATA, mesh="data=8", zero=sl.Zero(stage, small=0))[1:]
    assert int(state.rest["count"]) == 3


@pytest.mark.long
def test_zero_weight_without_gradient_works_in_a_while_loop():
    def loss(model, x, rng):
        in_, start = lax.stop_gradient(model["in"]), (0, jnp.ones(16))
        step = lambda carry: (carry[0] + 1, jnp.tanh(in_ @ (in_.T @ carry[1])))
        return fit(model, x * lax.while_loop(lambda carry: carry[0] < 3, step, start)[1], rng)

    testing.check_step(mlp, optax.sgd(0.1), loss, X, DATA, meshes=["data=8"], zero=FULL, steps=1)


def lowered(make, loss, zero, width):
    plan = strategy(zero=zero)
    state = sl.init(make, optax.sgd(0.1), plan, abstract=True)
    return sl.train_step(loss, plan).lower(state, jax.ShapeDtypeStruct((8, width), "float32"))


def test_zero_stage_3_holds_one_layer_of_weights_and_stage_2_all():
    depth, width = 8, 256
    make = lambda: sl.annotate(
        {"w": jnp.zeros((depth, width, width))}, {"w": ("layers", "embed", "mlp")}
    )
    loss = lambda model, x, rng: jnp.mean(
        lax.scan(lambda x, w: (dense(x, w), None), x, model["w"])[0]
    )
    layer = width * width * 4
    stage_2, stage_3 = (
        lowered(make, loss, sl.Zero(stage, small=0), width)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for stage in (2, 3)
    )
    assert stage_2 > depth * layer
    # The shards of the gradient, and a layer: its weights, its gradient.
    assert stage_3 < depth * layer // 8 + 3 * layer


@pytest.mark.parametrize("turned", [False, True])
def test_zero3_layer_is_one_region_unless_a_loop_scans_its_stack(turned):
    """A loop over a transposed stack leaves one region: it needs the whole stack."""
    make = lambda: sl.annotate(
        {"a": jnp.zeros((16, 16)), "w": jnp.zeros((3, 16, 16))},
        {"a": ("embed", "mlp"), "w": ("layers", "embed", "mlp")},
    )

    @sl.zero3_layer
    def block(x, m):
        stack = jnp.swapaxes(m["w"], 1, 2) if turned else m["w"]
        x = dense(dense(x, m["a"]), m["a"])
        return lax.scan(lambda x, w: (dense(x, w), None), x, stack)[0]

    loss = lambda model, x, rng: jnp.mean(block(x, model))
    # Forward and backward, but for the first use: `x` has no gradient. Outside of a common region
    # each use of `a` gathers it.
    gathers = lowered(make, loss, FULL, 16).as_text().count("stablehlo.all_gather")
    assert gathers == (4 if turned else 5)


BY_PATH = sl.Zero(3, small=0, layers=r"layers/\d")

LAYERS = {
    "marked": (sl.zero3_layer, FULL),
    "recomputed": (partial(sl.remat, policy="full"), FULL),
    "by path": (lambda block: block, BY_PATH),
}


@pytest.mark.parametrize("how", LAYERS)
def test_zero3_layer_is_gathered_once_forward_and_once_backward(how):
    mark, zero = LAYERS[how]
    block = lambda x, w: dense(dense(dense(x, w), w), w)

    def loss(model, x, rng, mark=mark):
        for w in model["layers"]:
            x = mark(block)(x, w)
        return jnp.mean(x)

    make = lambda: {"layers": [normal(0, 16, 16), normal(1, 16, 16)]}

    def gathers(loss, zero):  # as written; a CPU's compiler makes one of those forward and backward
        return lowered(make, loss, zero, 16).as_text().count("stablehlo.all_gather")

    assert gathers(loss, zero) == 4
    assert gathers(partial(loss, mark=lambda block: block), FULL) > 8


def test_zero_weight_shared_by_all_layers_is_gathered_once():
    make = lambda: sl.annotate(
        {"w": jnp.zeros((5, 16, 16)), "shared": jnp.zeros((16, 16))},
        {"w": ("layers", "embed", "mlp"), "shared": ("embed", "mlp")},
    )

    def loss(model, x, rng):
        body = lambda x, w: (dense(dense(x, w), model["shared"]), None)
        return jnp.mean(lax.scan(body, x, model["w"])[0])

    # A layer in each pass, and what is shared in the first: it is kept for the other.
    assert lowered(make, loss, FULL, 16).as_text().count("stablehlo.all_gather") == 3


def test_zero3_layer_keeps_no_derived_weight_for_backward():
    make = lambda: {"layers": [jnp.zeros((16, 16)), jnp.zeros((16, 16))]}
    block = sl.zero3_layer(lambda x, w: jax.jit(lambda x, w: dense(x, w.T))(x, w))

    def loss(model, x, rng):
        for w in model["layers"]:
            x = block(x, w)
        return jnp.mean(x)

    # Two forward and, since `x` has no gradient, one backward, which is dead if `w.T` was kept.
    assert lowered(make, loss, FULL, 16).as_text().count("stablehlo.all_gather") == 3


def converted(tree):
    return jax.tree.map(lambda w: w.astype("bfloat16"), tree)


def test_zero3_program_is_the_same_wherever_weights_are_cast():
    """Even where the next layer's weights are cast within this layer, or in a jit."""
    make = lambda: {"layers": [{"a": jnp.zeros((16, 16)), "b": jnp.zeros((16, 16))}] * 2}

    def loss(model, x, rng, cast, early):
        first, second = model["layers"]
        if early:
            second = cast(second)
        x = dense(x, first["a"])
        if not early:
            second = cast(second)
        x = dense(x, first["b"])
        return jnp.mean(dense(x.astype("bfloat16"), second["a"]) @ second["b"])

    programs = {
        lowered(make, partial(loss, cast=cast, early=early), BY_PATH, 16).as_text()
        for cast in (converted, jax.jit(converted), jax.jit(jax.jit(converted)))
        for early in (True, False)
    }
    assert len(programs) == 1


def test_zero3_program_is_the_same_when_a_jit_casts_several_layers():
    """Also when the layers are a stack that a loop takes within a marked block."""
    make = lambda: {
        "layers": [jnp.zeros((16, 16)), jnp.zeros((16, 16))],
        "stack": sl.annotate(jnp.zeros((3, 16, 16)), {"": ("layers", "embed", "mlp")}),
    }

    def loss(model, x, rng, cast):
        x, model = x.astype("bfloat16"), {**model, "layers": cast(model["layers"])}
        for w in model["layers"]:
            x = dense(dense(x, w), w)
        block = lambda x, ws: lax.scan(lambda x, w: (dense(x, w), None), x, cast(ws))[0]
        return jnp.mean(sl.zero3_layer(block)(x, model["stack"]))

    plain, in_jit = (
        lowered(make, partial(loss, cast=cast), BY_PATH, 16).as_text()
        for cast in (converted, jax.jit(converted))
    )
    assert in_jit == plain


def test_zero_stage_2_program_is_the_same_when_a_jit_casts_the_stack():
    make = lambda: sl.annotate({"w": jnp.zeros((4, 16, 16))}, {"w": ("layers", "embed", "mlp")})

    def loss(model, x, rng, cast):
        layer = lambda x, w: (dense(x, w), None)
        return jnp.mean(lax.scan(layer, x.astype("bfloat16"), cast(model["w"]))[0])

    plain, in_jit = (
        lowered(make, partial(loss, cast=cast), sl.Zero(2, small=0), 16).as_text()
        for cast in (converted, jax.jit(converted))
    )
    assert in_jit == plain


def test_layer_stack_gathers_only_the_layer_that_is_read():
    make = lambda: sl.annotate({"w": jnp.zeros((4, 16, 16))}, {"w": ("layers", "embed", "mlp")})

    def loss(model, x, rng):
        for i in range(4):
            x = dense(x, model["w"][i])
        return jnp.mean(x)

    found = testing.collectives(lowered(make, loss, FULL, 16).compile(), sl.make_mesh("data=8"))
    sizes = {one.result_bytes for one in found if one.kind == "all-gather"}
    assert sizes == {16 * 16 * 4}, testing.summary(found)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_zero_saves_values_shared_by_all_layers_once_for_backward(remat):
    config = gpt.tiny(layers=5, context=48, positions="rotary")
    strategy = sl.Strategy(
        mesh="data=8", rules=sl.rules.data, zero=sl.Zero(3, small=0), remat=remat
    )
    state = sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy, abstract=True
    )
    batch = {"tokens": jax.ShapeDtypeStruct((8, 49), "int32")}
    traced = str(sl.train_step(gpt.loss, strategy).trace(state, batch).jaxpr)
    half = config.dims["head_dim"] // 2
    assert f"f32[48,1,{half}]" in traced, "the angles of the positions"
    assert f"f32[5,48,1,{half}]" not in traced


@jax.custom_vjp
def mean_of_tanh(x, w):
    return jnp.tanh(x @ w).mean()


def mean_of_tanh_backward(saved, g):
    x, w, h = saved
    dz = g / h.size * (1 - h**2)
    return dz @ w.T, x.T @ dz


mean_of_tanh.defvjp(
    lambda x, w: (mean_of_tanh(x, w), (x, w, jnp.tanh(x @ w))), mean_of_tanh_backward
)


def all_equations(jaxpr):
    """The equations of a jaxpr and of those in them, each with the jaxpr that it is in."""
    for equation in jaxpr.eqns:
        yield jaxpr, equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from all_equations(getattr(inner, "jaxpr", inner))


def ancestors(jaxpr, equation):
    """The names of the primitives, in one jaxpr, that an equation depends on."""
    makers = {var: one for one in jaxpr.eqns for var in one.outvars}
    found, waiting = set(), [equation]
    while waiting:
        variables = [var for var in waiting.pop().invars if not isinstance(var, Literal)]
        for maker in [makers.pop(var) for var in variables if var in makers]:
            found.add(maker.primitive.name)
            waiting.append(maker)
    return found


def test_zero_regathers_weights_for_backward_only_after_forward():
    """The cotangent of a loss is known from the start: alone, it would let the gather begin."""
    run = sl.Strategy(mesh=sl.make_mesh("data=8"), rules=sl.rules.data, zero=sl.Zero(3, small=0))
    make = lambda: {"first": jnp.ones((64, 64)), "last": jnp.ones((64, 64))}
    state = sl.init(make, optax.sgd(0.1), run, abstract=True)
    x = jax.ShapeDtypeStruct((16, 64), "float32")
    loss = lambda model, x, rng: mean_of_tanh(x @ model["first"], model["last"])
    traced = sl.train_step(loss, run).trace(state, x)
    steps = [
        ancestors(jaxpr, equation)
        for jaxpr, equation in all_equations(traced.jaxpr.jaxpr)
        if equation.primitive.name == "all_gather"
    ]
    waits = ["tanh" in before for before in steps]
    assert waits == [False, False, True, True], "backward, the last weight and then the first"
