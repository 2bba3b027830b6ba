"""Randomness that is the same on every mesh and under every accumulation count.

Inside the step each device draws for its own examples, with the same key; a plain key would give
every device the same mask. A *row key* also carries which global example its first row is (`start`)
and how far apart its rows are (`stride`). A draw whose leading dim is the number of rows here draws
each row by the example's global number; any other draw is the same on every device, as it would be
on one. Stock layers need not know: it is an ordinary PRNG implementation, so `jax.random`,
`nnx.Dropout` and the rest simply work.

A row key is words in a row, those of two plain keys and two numbers:

    [stream | example | start, stride]

`jax.random.split(key, n)` with as many keys as rows may mean one key per example or just n streams
(two rows, two streams). That is why a row key holds two keys, which differ only after such a split:
`stream`, counted by position, used by draws that have a row per example, and `example`, counted by
the example's global number, used by all other draws. What remains ambiguous is a draw without rows
from one of n streams where there are n rows here: it differs by device.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random as extend_random
from jax.extend.core import Jaxpr, Literal

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.tracing._jaxpr import held_functions, open_jaxpr

_PREFIX = "rows_of_"
THREEFRY = "threefry2x32"
"""The implementation of keys that draws the same for a batch of keys as for each by itself."""


def _check_implementation(base: str) -> None:
    """Refuse keys whose numbers would depend on how many are drawn together."""
    if base != THREEFRY:
        raise ValueError(
            f"A key of the implementation `{base}` draws otherwise for a batch of keys than for "
            "each alone, so its numbers would depend on the mesh. Make it with "
            f'`jax.random.key(seed, impl="{THREEFRY}")`, JAX\'s default; or say that they may, '
            '`Strategy(draws="by_mesh")`.'
        )


def row_keys(
    keys: jax.Array, rows: int, start: Any, stride: int, *, by_mesh: bool = False
) -> jax.Array:
    """Keys for `rows` examples of which row `r` is the global example `start + r * stride`.

    Where draws may depend on the mesh, `by_mesh`, keys of any implementation will do. Those of
    another than threefry draw for all rows at once, with a key of their own for each device and
    microbatch.

    Args:
        keys: a key or an array of them; of row keys, the keys that they were made of.
        rows: how many examples this device has.
        start: the global number of its first example, which may be traced.
        stride: how far apart the global numbers of its examples are.
        by_mesh: whether draws may depend on the mesh.

    >>> whole = jax.random.normal(row_keys(jax.random.key(0), 8, 0, 1), (8, 2))
    >>> part = jax.random.normal(row_keys(jax.random.key(0), 4, 1, 2), (4,
    ...     2))  # every second example, from number 1
    >>> bool((whole[1::2] == part).all())
    True
    """
    keys = plain_keys(keys)
    base = str(jax.random.key_impl(keys))
    if not by_mesh:
        _check_implementation(base)
    words = jax.random.key_data(keys)
    position = jnp.stack([jnp.asarray(start, jnp.uint32), jnp.asarray(stride, jnp.uint32)])
    position = jnp.broadcast_to(position, (*words.shape[:-1], 2))
    # The two keys, `stream` and `example`, are the same until the first split.
    packed = jnp.concatenate([words, words, position], axis=-1)
    return jax.random.wrap_key_data(packed, impl=_implementation(rows, base))


def plain_keys(keys: jax.Array) -> jax.Array:
    """The keys that row keys were made of; any other key as it is.

    If row keys have been split since, it is their `stream`, the key that is counted by position.
    """
    if not is_row_key(keys):
        return keys
    # The dtype is written `key<rows_of_threefry2x32/8>`.
    base = str(keys.dtype).split(_PREFIX, 1)[1].split("/", 1)[0]
    words = jax.random.key_data(keys)
    key_words = words.shape[-1] // 2 - 1  # two keys, and two words for start and stride
    return jax.random.wrap_key_data(words[..., :key_words], impl=base)


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
    if not is_key(key) and key.dtype != jnp.uint32:  # the dtype of `jax.random.PRNGKey`
        raise check.refusal("replicated_draws", "key", key, takes)
    return plain_keys(key)


def is_key(x: Any) -> bool:
    """Whether an array holds typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_row_key(x: Any) -> bool:
    """Whether an array holds row keys."""
    return is_key(x) and _PREFIX in str(x.dtype)


def raw_keys(jaxpr: Jaxpr, paths: Sequence[str | None]) -> dict[str, None]:
    """The inputs of a traced function whose words it takes for a key: old-style raw keys.

    `paths` are those of its inputs, None for one that is of no interest. Words are followed from
    the inputs through operations and inner functions to where JAX wraps them as a key. The result
    is an ordered set, a dict whose keys are the paths.
    """
    path_of = {var: path for var, path in zip(jaxpr.invars, paths, strict=True) if path is not None}
    raw: dict[str, None] = {}
    for equation in jaxpr.eqns:
        read = _paths_read(equation, path_of)
        paths_read = list(filter(None, read))
        if not paths_read:
            continue
        if equation.primitive.name == "random_wrap":
            raw.update(dict.fromkeys(paths_read))
            continue
        for inner in map(open_jaxpr, held_functions(equation)):
            # The first operand of a `cond` says which branch, and is no input of the branches.
            extra = len(read) - len(inner.invars)
            if extra >= 0:
                raw.update(raw_keys(inner, read[extra:]))
        # What is computed from the words of a key, as a slice of them, may be words of a key too.
        for var in equation.outvars:
            if getattr(var.aval, "dtype", None) == jnp.uint32:
                path_of[var] = paths_read[0]
    return raw


def _paths_read(equation: Any, path_of: Mapping[Any, str]) -> list[str | None]:
    """For each operand of an operation, the path of the input that it comes from, if any."""
    paths: list[str | None] = []
    for atom in equation.invars:
        # Literals have no hash.
        paths.append(None if isinstance(atom, Literal) else path_of.get(atom))
    return paths


def describe_raw_keys(paths: Iterable[str]) -> str:
    """The error for raw keys in the state of a model."""
    return (
        f"The loss draws with old-style raw keys of the model, {listed(paths)}. They know of "
        "no examples, so every device would draw the same for its own. Hold typed keys, "
        "`jax.random.key(0)`, or of a raw one `jax.random.wrap_key_data(raw)`; for draws that are "
        "the same everywhere, on weights say, `sl.replicated_draws(key)`."
    )


def rows_of(x: Any) -> int:
    """How many examples row keys draw for; it is part of their dtype.

    >>> rows_of(row_keys(jax.random.key(0), 8, 0, 1))
    8
    """
    return int(str(x.dtype).rsplit("/", 1)[1].rstrip(">"))


@dataclass(frozen=True)
class _RowKeys:
    """The functions of a PRNG implementation whose keys draw for `rows` examples.

    Keys are made of those of the implementation `base`, each of `size` words:

        words of a row key = [stream: size | example: size | start, stride]

    The methods have the signatures that JAX asks of an implementation, and take a single key.
    """

    rows: int
    base: str
    size: int

    def unpack(self, words: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The two keys of a row key, and its start and stride."""
        size = self.size
        wrap = functools.partial(jax.random.wrap_key_data, impl=self.base)
        return wrap(words[:size]), wrap(words[size : 2 * size]), words[2 * size :]

    def pack(self, stream: jax.Array, example: jax.Array, position: jax.Array) -> jax.Array:
        """The words of a row key, from its two keys and its start and stride.

        It undoes `unpack`.
        """
        return jnp.concatenate(
            [jax.random.key_data(stream), jax.random.key_data(example), position], axis=-1
        )

    def seed(self, value: jax.Array) -> jax.Array:
        """A key from a seed, as if the rows were the first examples of the batch."""
        key = jax.random.key(value, impl=self.base)
        return self.pack(key, key, jnp.array([0, 1], jnp.uint32))

    def fold_in(self, words: jax.Array, data: Any) -> jax.Array:
        """Fold a number into both keys; the rows stay the same examples."""
        stream, example, position = self.unpack(words)
        return self.pack(
            jax.random.fold_in(stream, data), jax.random.fold_in(example, data), position
        )

    def split(self, words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """New keys, of which there may be as many as rows: then one of each two is by example.

        `stream` gets the key's position in the split folded in. `example` gets the global number of
        its example, if there is a key for each row; otherwise the position too.
        """
        stream, example, position = self.unpack(words)
        index = jnp.arange(math.prod(shape), dtype=jnp.uint32)
        number = position[0] + position[1] * index if shape == (self.rows,) else index
        # One more fold keeps the keys of a split apart from those of rows, which are folded in by
        # number alone.
        stream, example = jax.random.fold_in(stream, 0x5EED), jax.random.fold_in(example, 0x5EED)
        children = jax.vmap(
            lambda i, n: self.pack(
                jax.random.fold_in(stream, i), jax.random.fold_in(example, n), position
            )
        )(index, number)
        return children.reshape(*shape, words.shape[-1])

    def random_bits(self, words: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
        """Random bits: by example if the first dim is as long as there are rows, else by key.

        A draw by example folds the global number of each example into `stream`, so that the example
        gets the same bits wherever it is. Any other draw uses `example` as it is.
        """
        stream, example, position = self.unpack(words)
        bits = functools.partial(jax.random.bits, dtype=f"uint{bit_width}")
        if shape[:1] != (self.rows,):
            return bits(example, shape)
        # Only threefry's numbers for a batch of keys are those for each key by itself.
        if self.base != THREEFRY:
            return bits(jax.random.fold_in(stream, position[0]), shape)
        numbers = position[0] + position[1] * jnp.arange(self.rows, dtype=jnp.uint32)
        return jax.vmap(lambda number: bits(jax.random.fold_in(stream, number), shape[1:]))(numbers)


@functools.cache
def _implementation(rows: int, base: str) -> Any:
    """The PRNG implementation of row keys for so many rows, made of keys of another.

    It is cached, so that all keys for as many rows have the same functions. Its name, which shows
    in the dtype of keys, is read back by `plain_keys` and `rows_of`.
    """
    size = jax.random.key_data(jax.random.key(0, impl=base)).shape[-1]
    functions = _RowKeys(rows, base, size)
    name = f"{_PREFIX}{base}/{rows}"
    return extend_random.define_prng_impl(
        key_shape=(2 * size + 2,),
        seed=functions.seed,
        split=functions.split,
        random_bits=functions.random_bits,
        fold_in=functions.fold_in,
        name=name,
        tag=name,
    )


def scrambled(words: jax.Array) -> jax.Array:
    """Words of 32 bits as others that look random: each bit depends on all bits of the word.

    It is the finalizer of MurmurHash3. Every step of it can be undone, so that words that differ
    stay different.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> jnp.uint32(shift))) * jnp.uint32(factor)
    return words ^ (words >> jnp.uint32(16))
