"""How far each form of attention over a split sequence is from plain attention, in float32.

Shapes, heads, windows, documents and meshes are drawn; 8 devices are simulated, and the reference
implementation runs on each of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shardlib as sl
from shardlib.rules import context

QUERIES = ("batch", "seq", "act_heads", "head_dim")
KEYS = ("batch", "seq", "act_kv_heads", "head_dim")
FORMS = ("gather", "ring", "zigzag", "ulysses", "usp")


class Case(NamedTuple):
    """An attention that was drawn: its mesh and rules, its arrays, and what masks it."""

    form: str
    mesh: str
    rules: sl.AxisRules
    arrays: dict[str, jax.Array]
    cotangent: jax.Array
    options: dict[str, Any]


def draw(form: str, seed: int) -> Case:
    """A case of a form."""
    random = np.random.default_rng([FORMS.index(form), seed])
    data = int(random.choice([1, 2]))
    parts = int(random.choice([2, 4])) if data == 2 or form == "usp" else int(random.choice([4, 8]))
    ring, ulysses = (parts // 2, 2) if form == "usp" else (parts, parts)
    if form == "usp":
        rules, mesh = context("usp", axis=("ring", "ulysses")), f"ring={ring},ulysses=2"
    elif form in ("gather", "ulysses"):
        rules, mesh = context(form), f"context={parts}"
    else:
        order = "zigzag" if form == "zigzag" else "sequence"
        rules, mesh = context("ring", order=order), f"context={parts}"
    key_heads = int(random.choice([1, 2, 4]))
    heads = key_heads * int(random.choice([1, 2, 3]))
    if form in ("ulysses", "usp"):
        heads = int(np.lcm(key_heads, ulysses)) * int(random.choice([1, 2]))
    length, size = 2 * parts * int(random.integers(2, 9)), int(random.choice([4, 8, 16]))
    drawn: dict[str, jax.Array] = {}
    for name, count in (("q", heads), ("k", key_heads), ("v", key_heads)):
        drawn[name] = jnp.asarray(random.normal(size=(2, length, count, size)), jnp.float32)
    options: dict[str, Any] = {"causal": bool(random.random() < 0.7)}
    if random.random() < 0.4:
        reach = int(random.integers(0, length))
        options["window"] = (reach, int(random.integers(0, length)))
    if random.random() < 0.5:
        ends = np.sort(random.integers(0, length, (2, 3)), axis=1)
        positions = np.arange(length)
        documents = (positions[None, :, None] >= ends[:, None, :]).sum(-1)
        options["segment_ids"] = jnp.asarray(documents)
    cotangent = jnp.asarray(random.normal(size=drawn["q"].shape), jnp.float32)
    return Case(form, f"data={data},{mesh}", sl.rules.data | rules, drawn, cotangent, options)


def plain(arrays: dict[str, jax.Array], options: dict[str, Any]) -> jax.Array:
    """Attention with all its scores, on one device."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    length, heads, size = q.shape[1:]
    k, v = (jnp.repeat(x, heads // x.shape[2], 2) for x in (k, v))
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    seen = jnp.ones((1, length, length), bool)
    if options["causal"]:
        seen &= distance <= 0
    if "window" in options:
        left, right = options["window"]
        seen &= (distance >= -left) & (distance <= right)
    if "segment_ids" in options:
        ids = options["segment_ids"]
        seen &= ids[:, :, None] == ids[:, None, :]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / np.sqrt(size)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, precision="highest")


def split(arrays: dict[str, jax.Array], options: dict[str, Any]) -> jax.Array:
    """The same by the rules in force, of arrays in the order of the sequence."""
    arranged = {name: sl.context.arrange(x) for name, x in arrays.items()}
    if "segment_ids" in options:
        options = options | {"segment_ids": sl.context.arrange(options["segment_ids"])}
    y = sl.kernels.attention(**arranged, names=QUERIES, kv_names=KEYS, arranged=True, **options)
    return sl.context.restore(y)


def error_of(case: Case) -> float:
    """The largest error of values and gradients, over the scale of an array or one."""

    def both(function: Any) -> Any:
        def run(arrays: Any, cotangent: Any) -> Any:
            y, back = jax.vjp(lambda arrays: function(arrays, case.options), arrays)
            return y, back(cotangent)[0]

        return jax.jit(run)

    expected = both(plain)(case.arrays, case.cotangent)
    count = int(np.prod([int(axis.split("=")[1]) for axis in case.mesh.split(",")]))
    with sl.use(case.rules, sl.make_mesh(case.mesh, devices=jax.devices()[:count])):
        found = both(split)(case.arrays, case.cotangent)
    errors = []
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.abs(theirs).max()))
        errors.append(float(jnp.abs(ours - theirs).max()) / scale)
    return max(errors)


def worst_errors(cases: int) -> dict[str, float]:
    """The worst error of each form over so many cases."""
    worst = {}
    for form in FORMS:
        worst[form] = max(error_of(draw(form, seed)) for seed in range(cases))
    return worst
