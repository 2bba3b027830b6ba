"""Attention by plain JAX in float64, and the masks that implementations are compared under."""

import jax
import jax.numpy as jnp
import numpy as np
from kernel_ops import ROUNDING, near

from shardlib import kernels


def plain(arrays, options):
    """Attention by plain JAX, with all its scores; what it gives, and the log-sum-exp."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    queries, heads, size = q.shape[1:]
    k, v = (jnp.repeat(x, heads // x.shape[2], 2) for x in (k, v))
    z = jnp.einsum("bqhd,bkhd->bhqk", q, k) * options.get("scale", size**-0.5)
    cap = options.get("soft_cap")
    z = z if cap is None else cap * jnp.tanh(z / cap)
    first_query, first_key = options.get("starts") or (0, 0)
    query, key = np.arange(queries) + first_query, np.arange(k.shape[1]) + first_key
    kept = jnp.asarray(seen(query, key, options))
    if "segment_ids" in options:
        ids = options["segment_ids"]
        own, other = ids if isinstance(ids, tuple) else (ids, ids)
        kept = kept & (own[:, None, :, None] == other[:, None, None, :])
    z = jnp.where(kept, z, -jnp.inf)
    if "sinks" in arrays:
        sinks = jnp.broadcast_to(arrays["sinks"][:, None, None], (*z.shape[:3], 1))
        z = jnp.concatenate([z, sinks], -1)
    some = jnp.isfinite(z).any(-1, keepdims=True)
    p = jax.nn.softmax(jnp.where(some, z, 0), -1) * some
    lse = jax.nn.logsumexp(jnp.where(some, z, 0), -1, where=some, keepdims=True)
    lse = jnp.where(some, lse, -jnp.inf)[..., 0]
    return jnp.einsum("bhqk,bkhv->bqhv", p[..., : k.shape[1]], v), lse.swapaxes(1, 2)


def seen(query, key, options):
    """Which keys of these positions queries of those see, by a band and a pattern."""
    distance = key[None] - query[:, None]
    kept = np.ones((1, len(query), len(key)), bool)
    if options.get("causal"):
        kept = kept & (distance <= 0)
    if "window" in options:
        left, right = options["window"]
        kept = kept & (distance >= (-np.inf if left is None else -left))
        kept = kept & (distance <= (np.inf if right is None else right))
    if "block_mask" in options:
        blocks = options["block_mask"]
        pattern = blocks.pattern.reshape(-1, *blocks.pattern.shape[-2:])
        kept = kept & pattern[:, query // blocks.size][:, :, key // blocks.size]
    return kept


def both_ways(function, arrays, options, cotangents):
    """What an attention gives, and its gradients to all arrays."""
    results, back = jax.vjp(lambda arrays: function(arrays, options), arrays)
    finite = jnp.where(jnp.isfinite(results[1]), cotangents[1], 0)
    return results, back((cotangents[0].astype(results[0].dtype), finite))[0]


def compiled(function, arrays, options, cotangents):
    """The same by one program, where each operation by itself would be compiled otherwise."""
    return jax.jit(lambda *given: both_ways(function, given[0], options, given[1]))(
        arrays, cotangents
    )


def attend(arrays, options):
    return kernels.attention(**arrays, **options, with_lse=True)


def finite(results):
    """Results with zeros for infinities."""
    return jax.tree.map(lambda x: np.where(np.isfinite(x), x, 0), results)


def check(arrays, options, implementation, dtype="float32", tolerance=None):
    """Values and gradients of an implementation beside those of plain JAX in float64."""
    random = np.random.default_rng(7)
    shape = (*arrays["q"].shape[:3], arrays["v"].shape[3])
    cotangents = random.normal(size=shape), random.normal(size=shape[:3])
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    chosen = {**options, "implementation": implementation}
    found = compiled(attend, arrays, chosen, jax.tree.map(jnp.float32, cotangents))
    with jax.enable_x64():
        wide = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
        wanted = jax.tree.map(np.asarray, compiled(plain, wide, options, cotangents))
    (y, lse), gradients = found
    (wanted_y, wanted_lse), wanted_gradients = wanted
    tolerance = tolerance or 6 * ROUNDING[dtype]
    near(y, wanted_y, tolerance, 1)
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(wanted_lse))
    some = np.isfinite(wanted_lse)
    near(np.where(some, lse, 0), np.where(some, wanted_lse, 0), tolerance, 1)
    near(gradients, wanted_gradients, tolerance, 1)
    unseen = ~some[..., None] & np.ones_like(y, bool)
    assert not np.asarray(y)[unseen].any(), "zeros where nothing is seen"


def make(queries, keys, heads=4, groups=2, size=8, value_size=None, batch=2, sinks=False):
    random = np.random.default_rng(queries + keys)
    shapes = {
        "q": (batch, queries, heads, size),
        "k": (batch, keys, groups, size),
        "v": (batch, keys, groups, value_size or size),
    }
    if sinks:
        shapes["sinks"] = (heads,)
    return {name: random.normal(size=shape).astype("f") for name, shape in shapes.items()}


def segments(length, seed=0):
    return np.sort(np.random.default_rng(seed).integers(0, 3, (2, length)))


def pattern(*shape, size=64, seed=0):
    return kernels.BlockMask(np.random.default_rng(seed).random(shape) < 0.5, size)


COTANGENTS = (
    np.random.default_rng(4).normal(size=(2, 256, 4, 8)).astype("f"),
    np.random.default_rng(5).normal(size=(2, 256, 4)).astype("f"),
)
MASKS = {
    "everything": {},
    "causal": {"causal": True},
    "window": {"window": (40, 70)},
    "causal window": {"causal": True, "window": (40, None)},
    "segments": {"causal": True, "segment_ids": segments(256)},
    "two segments": {"segment_ids": (segments(256), segments(256, 1) + 1)},
    "capped": {"soft_cap": 2.0, "scale": 0.5},
    "blocks": {"block_mask": pattern(4, 4), "causal": True},
    "blocks of heads": {"block_mask": pattern(4, 4, 4)},
    "starts": {"causal": True, "starts": (0, 100)},
}
