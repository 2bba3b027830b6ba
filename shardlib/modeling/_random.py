"""Randomness that is the same on every mesh and under every accumulation count.

Inside the step each device draws for its own examples, with the same key; a plain key would give
every device the same mask. A *row key* also carries which global example its first row is (`start`)
and how far apart its rows are (`stride`). A draw whose leading dim is the number of rows here draws
each row by the example's global number; any other draw is the same on every device, as it would be
on one. Stock layers need not know: it is an ordinary PRNG implementation, so `jax.random`,
`nnx.Dropout` and the rest simply work.

`jax.random.split(key, n)` with as many keys as rows may mean one key per example or just n streams
(two rows, two streams). So a row key holds two keys, which differ only after such a split:
`stream`, counted by position, used by draws that have a row per example, and `example`, counted by
the example's global number, used by all other draws. What remains ambiguous is a draw without rows
from one of n streams where there are n rows here: it differs by device.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as extend_random
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays

_PREFIX = "rows_of_"
THREEFRY = "threefry2x32"
"""The implementation of keys that draws the same for a batch of keys as for each of them alone."""


def row_keys(
    keys: jax.Array, rows: int, start: Any, stride: int, *, by_mesh: bool = False
) -> jax.Array:
    """Keys for `rows` examples of which row `r` is the global example `start + r * stride`.

    Where draws may depend on the mesh, `by_mesh`, keys of any implementation will do. Those of
    another than threefry draw for all rows at once, with a key of their own for each device and
    microbatch.

    >>> whole = jax.random.normal(row_keys(jax.random.key(0), 8, 0, 1), (8, 2))
    >>> part = jax.random.normal(row_keys(jax.random.key(0), 4, 1, 2), (4,
    ...     2))  # every second example, from number 1
    >>> bool((whole[1::2] == part).all())
    True
    """
    keys = plain_keys(keys)
    if (base := str(jax.random.key_impl(keys))) != THREEFRY and not by_mesh:
        raise ValueError(
            f"A key of the implementation `{base}` draws otherwise for a batch of keys than for "
            "each alone, so its numbers would depend on the mesh. Make it with "
            f'`jax.random.key(seed, impl="{THREEFRY}")`, JAX\'s default; or say that they may, '
            '`Strategy(draws="by_mesh")`.'
        )
    words = jax.random.key_data(keys)
    where = jnp.stack([jnp.asarray(start, jnp.uint32), jnp.asarray(stride, jnp.uint32)])
    where = jnp.broadcast_to(where, (*words.shape[:-1], 2))
    packed = jnp.concatenate([words, words, where], axis=-1)
    return jax.random.wrap_key_data(packed, impl=_implementation(rows, base))


def plain_keys(keys: jax.Array) -> jax.Array:
    """The keys that row keys were made of; any other key as it is."""
    if not is_row_key(keys):
        return keys
    base = str(keys.dtype).split(_PREFIX, 1)[1].split("/", 1)[0]
    words = jax.random.key_data(keys)
    return jax.random.wrap_key_data(words[..., : words.shape[-1] // 2 - 1], impl=base)


def replicated_draws(key: jax.Array) -> jax.Array:
    """A key whose draws are the same on every device, whatever their shape.

    It is for noise on weights, for example.

    Inside the step a draw whose first dim is as long as there are examples here draws per example,
    and means to. To draw per example where the examples are not the first dim, draw with a key for
    each: `jax.vmap(draw)(jax.random.split(key, examples))`.

    >>> key = jax.random.key(0)
    >>> replicated_draws(row_keys(key, 4, 8, 1)) == key
    Array(True, dtype=bool)
    """
    takes = "a key, such as `jax.random.key(0)`"
    check_arrays.array("replicated_draws", "key", key, takes)
    if not is_key(key) and key.dtype != jnp.uint32:  # of `jax.random.PRNGKey`
        raise check.refusal("replicated_draws", "key", key, takes)
    return plain_keys(key)


def is_key(x: Any) -> bool:
    """Whether an array holds typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_row_key(x: Any) -> bool:
    """Whether an array holds row keys."""
    return is_key(x) and _PREFIX in str(x.dtype)


def raw_keys(jaxpr: Jaxpr, paths: Sequence[str | None]) -> dict[str, None]:
    """Of the inputs that have a path, those whose words a traced function takes for a key:
    old-style raw keys.
    """
    known = {var: path for var, path in zip(jaxpr.invars, paths, strict=True) if path is not None}
    found: dict[str, None] = {}
    for equation in jaxpr.eqns:
        read = [None if isinstance(atom, Literal) else known.get(atom) for atom in equation.invars]
        if not any(read):
            continue
        if equation.primitive.name == "random_wrap":
            found.update(dict.fromkeys(filter(None, read)))
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if isinstance(inner, Jaxpr) and (more := len(read) - len(inner.invars)) >= 0:
                # Of a `cond` the first says which branch.
                found.update(raw_keys(inner, read[more:]))
        words = [var for var in equation.outvars if getattr(var.aval, "dtype", None) == jnp.uint32]
        known.update(dict.fromkeys(words, next(filter(None, read))))
    return found


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def describe_raw_keys(paths: Iterable[str]) -> str:
    """The error for raw keys in the state of a model."""
    listed = ", ".join(f"`{path}`" for path in paths)
    return (
        f"The loss draws with old-style raw keys of the model, {listed}. They know of no examples, "
        "so every device would draw the same for its own. Hold typed keys, `jax.random.key(0)`, or "
        "of a raw one `jax.random.wrap_key_data(raw)`; for draws that are the same everywhere, on "
        "weights say, `sl.replicated_draws(key)`."
    )


def rows_of(x: Any) -> int:
    """How many examples row keys draw for.

    >>> rows_of(row_keys(jax.random.key(0), 8, 0, 1))
    8
    """
    return int(str(x.dtype).rsplit("/", 1)[1].rstrip(">"))


@functools.cache
def _implementation(rows: int, base: str) -> Any:
    size = jax.random.key_data(jax.random.key(0, impl=base)).shape[-1]

    def unpack(words: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        wrap = functools.partial(jax.random.wrap_key_data, impl=base)
        return wrap(words[:size]), wrap(words[size : 2 * size]), words[2 * size :]

    def pack(stream: jax.Array, example: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.concatenate(
            [jax.random.key_data(stream), jax.random.key_data(example), where], axis=-1
        )

    def seed(value: jax.Array) -> jax.Array:
        key = jax.random.key(value, impl=base)
        return pack(key, key, jnp.array([0, 1], jnp.uint32))

    def fold_in(words: jax.Array, data: Any) -> jax.Array:
        stream, example, where = unpack(words)
        return pack(jax.random.fold_in(stream, data), jax.random.fold_in(example, data), where)

    def split(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        stream, example, where = unpack(words)
        position = jnp.arange(math.prod(shape), dtype=jnp.uint32)
        number = where[0] + where[1] * position if shape == (rows,) else position
        # One more fold keeps the keys of a split apart from those of rows, which are folded in by
        # number alone.
        stream, example = jax.random.fold_in(stream, 0x5EED), jax.random.fold_in(example, 0x5EED)
        children = jax.vmap(
            lambda p, n: pack(jax.random.fold_in(stream, p), jax.random.fold_in(example, n), where)
        )(position, number)
        return children.reshape(*shape, words.shape[-1])

    def random_bits(words: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        stream, example, where = unpack(words)
        bits = functools.partial(jax.random.bits, dtype=f"uint{bit_width}")
        if shape[:1] != (rows,):
            return bits(example, shape)
        if base != THREEFRY:  # whose numbers for a batch of keys are not those for each alone
            return bits(jax.random.fold_in(stream, where[0]), shape)
        numbers = where[0] + where[1] * jnp.arange(rows, dtype=jnp.uint32)
        return jax.vmap(lambda number: bits(jax.random.fold_in(stream, number), shape[1:]))(numbers)

    name = f"{_PREFIX}{base}/{rows}"
    return extend_random.define_prng_impl(
        key_shape=(2 * size + 2,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=name,
        tag=name,
    )
