"""The ops of `shardlib.kernels` for their tests: each as a function of a tree of arrays, and the
same in plain JAX.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

import shardlib as sl
from shardlib import kernels

ROUNDING = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
RULES = sl.AxisRules(batch="data", heads="model", seq="model", width="model")


@dataclass(frozen=True)
class Op:
    """An op as a function of a tree of arrays, and the same in plain JAX, whose derivative JAX
    takes.
    """

    name: str
    call: Any  # (arrays, options) -> tree
    plain: Any
    arrays: Any  # (shape of x) -> shapes of arrays, by name; a mask is one
    options: Any  # what may be drawn
    implementations: tuple[str, ...] = ("reference", "tpu_simulated", "gpu_simulated")


def softmax(arrays, options):
    return kernels.softmax(arrays["x"], where=arrays.get("where"), **options)


def plain_softmax(arrays, options):
    x, where = arrays["x"] * options.get("scale", 1.0), arrays.get("where", True)
    if options.get("causal"):
        where = where & jnp.tril(jnp.ones(x.shape[-2:], bool))
    where = jnp.broadcast_to(where, x.shape)
    some = where.any(-1, keepdims=True)
    return jnp.where(
        some, jax.nn.softmax(jnp.where(where, x, -jnp.inf), -1, where=where | ~some), 0
    )


def norm(arrays, options):
    arrays = dict(arrays)
    centred = "bias" in arrays or options.get("centred")
    options = {name: value for name, value in options.items() if name != "centred"}
    return (kernels.layer_norm if centred else kernels.rms_norm)(**arrays, **options)


def plain_norm(arrays, options):
    x, centred = arrays["x"], "bias" in arrays or options.get("centred")
    h = x + arrays.get("residual", 0)
    z = h - h.mean(-1, keepdims=True) if centred else h
    y = z / jnp.sqrt(
        (z * z).mean(-1, keepdims=True) + options.get("epsilon", 1e-5 if centred else 1e-6)
    )
    y = y * arrays.get("scale", 1) + arrays.get("bias", 0)
    return (y, h) if "residual" in arrays else y


def head(arrays, options):
    return kernels.linear_cross_entropy(arrays["x"], arrays["kernel"], arrays["targets"], **options)


def plain_head(arrays, options):
    x, kernel, targets = (arrays[name] for name in ("x", "kernel", "targets"))
    count, smoothing, cap = (
        options.get("vocab") or len(kernel),
        options.get("smoothing", 0),
        options.get("cap"),
    )
    z = x @ kernel[:count].T
    z = z if cap is None else cap * jnp.tanh(z / cap)
    log_z = jax.nn.logsumexp(z, -1)
    of_target = jnp.take_along_axis(z, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    losses = (
        log_z
        - (1 - smoothing) * of_target
        - smoothing * z.mean(-1)
        + options.get("z_loss", 0) * log_z**2
    )
    return jnp.where(targets == -1, 0, losses)


def head_arrays(shape, draw):
    rows = draw(st.integers(2, 300))
    return {"x": shape, "kernel": (rows, shape[-1]), "targets": shape[:-1]}


MASKS = [None, (0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 1), (1, 1, 0)]


def softmax_arrays(shape, draw):
    mask = draw(st.sampled_from(MASKS))
    return {"x": shape} | (
        {}
        if mask is None
        else {"where": tuple(1 if one else n for one, n in zip(mask, shape, strict=False))}
    )


def norm_arrays(shape, draw):
    row, given = shape[-1:], {"x": shape}
    given |= {"residual": shape} if draw(st.booleans()) else {}
    given |= {"scale": row} if draw(st.booleans()) else {}
    return given | ({"bias": row} if draw(st.booleans()) else {})


# The simulator of GPUs has matrix units from JAX 0.12, where it is public.
SIMULATED = (
    "reference",
    "tpu_simulated",
    *["gpu_simulated"] * hasattr(plgpu, "InterpretGPUParams"),
)
OPS = {
    "softmax": Op("softmax", softmax, plain_softmax, softmax_arrays, {"scale": [1.0, 0.125]}),
    "norm": Op("norm", norm, plain_norm, norm_arrays, {"centred": [True, False], "epsilon": [1e-5,
    0.1]}),
    "head": Op(
        "head", head, plain_head, head_arrays,
        {"z_loss": [0.0, 1e-2], "smoothing": [0.0, 0.1], "cap": [None, 2.0], "vocab": [None, 2]},
        SIMULATED,
    ),
}  # fmt: skip
needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="needs Tokamax: the extra `tokamax`"
)
every_op = pytest.mark.parametrize("op", [OPS["softmax"], OPS["norm"]], ids=lambda op: op.name)
every = pytest.mark.parametrize(
    ("op", "implementation"),
    [(op, one) for op in OPS.values() for one in op.implementations]
    + [pytest.param(op, "gpu", marks=pytest.mark.gpu) for op in OPS.values()]
    + [pytest.param(OPS["norm"], "tokamax", marks=[pytest.mark.gpu, needs_tokamax])],
    ids=lambda x: getattr(x, "name", x),
)


def make(shapes, dtype, seed=0):
    random = np.random.default_rng(seed)

    def one(name, shape):
        if name == "where":
            return random.random(shape) < 0.7
        if name == "targets":
            return random.integers(-1, 2, shape)
        return jnp.asarray(
            random.normal(size=shape) + (name == "scale"),
            "float32" if name in ("scale", "bias") and seed % 2 == 0 else dtype,
        )

    return {name: one(name, shape) for name, shape in shapes.items()}


def split(arrays):
    """Floats, and what has no derivative."""
    floats = {name: x for name, x in arrays.items() if name not in ("where", "targets")}
    return floats, {name: x for name, x in arrays.items() if name in ("where", "targets")}


def derived(function, arrays, options, cotangent=None):
    """What a function gives, and its gradients to all floats, from what is given for it, or from
    some numbers.
    """
    floats, masks = split(arrays)
    out, back = jax.vjp(lambda floats: function({**floats, **masks}, options), floats)
    return out, back(some(out) if cotangent is None else cotangent)[0]


def some(tree):
    """Numbers for arrays like these."""
    return jax.tree.map(
        lambda y: jnp.asarray(np.cos(np.arange(y.size)).reshape(y.shape), y.dtype), tree
    )


def true(op, arrays, options, cotangent):
    with jax.enable_x64():
        floats, rest = split(arrays)
        wide = {**{name: np.asarray(x, np.float64) for name, x in floats.items()}, **rest}
        return jax.tree.map(
            np.asarray, derived(op.plain, wide, options, jax.tree.map(np.float64, cotangent))
        )


def rounding(op, dtype):
    """How far from float64 results may be: on a GPU products of float32 are TF32's, whose logits
    are of several ones.
    """
    if dtype == "float32" and op.name == "head" and jax.default_backend() == "gpu":
        return 2 * ROUNDING["float16"]
    return ROUNDING[dtype]


def near(found, wanted, tolerance, least=1e-30):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        other = np.asarray(other, np.float64)
        np.testing.assert_allclose(
            np.float64(one), other, rtol=0, atol=tolerance * max(np.abs(other).max(), least)
        )
