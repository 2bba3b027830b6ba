"""What a checkpoint is made of: arrays by path, what each of them is, and digests of their bits."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib._tree import named_leaves
from shardlib.modeling._random import is_key
from shardlib.step._state import State


@jax.jit
def _digests(arrays: list[jax.Array]) -> jax.Array:
    # Each element's bits are scrambled together with its place, one to one, so that no change of an
    # element goes unseen and changes of several do not cancel (MurmurHash3's finalizer); then
    # summed, since a sum of integers is alike on every mesh.
    def digest(x: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(x):
            x = jnp.stack([x.real, x.imag])
        word = _bits(x)
        for dim in range(word.ndim):
            word += lax.broadcasted_iota(jnp.uint32, word.shape, dim) * jnp.uint32(
                (0x9E3779B1, 0x85EBCA77)[dim % 2] + 2 * dim
            )
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            word = (word ^ (word >> jnp.uint32(shift))) * jnp.uint32(factor)
        return jnp.sum(word ^ (word >> jnp.uint32(16)), dtype=jnp.uint32)

    return jnp.stack([digest(x) for x in arrays])


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """A number for each array that changes if any of its bits does, and not with how the array
    lies.

    >>> digests({"w": jnp.arange(4)}) == digests({"w": jnp.array([0, 1, 3, 2])})
    False
    """
    # One program for all: a process may not have several with collectives under way on the devices
    # of a CPU.
    some = {path: leaf for path, leaf in arrays.items() if leaf.size}
    found = np.asarray(_digests(list(some.values()))) if some else ()
    return {path: f"{int(number):08x}" for path, number in zip(some, found, strict=True)}


def _bits(x: jax.Array) -> jax.Array:
    """The bits of each element as one or two unsigned words, two along a new last dim."""
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = (jnp.iinfo if integer else jnp.finfo)(x.dtype).bits
    if width < 8:  # less than a byte each: none of the wider values is left out
        return lax.bitcast_convert_type(x.astype(jnp.int32 if integer else jnp.float32), jnp.uint32)
    return lax.bitcast_convert_type(
        x, {8: jnp.uint8, 16: jnp.uint16}.get(width, jnp.uint32)
    ).astype(jnp.uint32)


def arrays_of(state: State) -> dict[str, Any]:
    """A state's arrays by path, those of keys as the words that they are made of."""
    return {path: _words(leaf) if is_key(leaf) else leaf for path, leaf in named_leaves(state)}


def _words(keys: Any) -> Any:
    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys)
    return jax.ShapeDtypeStruct(
        jax.eval_shape(jax.random.key_data, keys).shape,
        jnp.uint32,
        sharding=getattr(keys, "sharding", None),
    )


def as_leaf(like: Any, words: Any, read: Any) -> Any:
    if read is None:  # without elements
        return jax.device_put(jnp.zeros(words.shape, words.dtype), words.sharding)
    if not is_key(like):
        return read
    of: list[Any] = []
    # Which `like`, when abstract, does not tell.
    jax.eval_shape(lambda keys: of.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(read, impl=of[0])


def describe_leaves(
    state: State, arrays: Mapping[str, Any], digest: Mapping[str, str]
) -> dict[str, Any]:
    dtypes = {path: str(leaf.dtype) for path, leaf in named_leaves(state)}
    names = dict(state.layout.names)
    return {
        path: {
            "shape": list(leaf.shape),
            "dtype": dtypes[path],
            "names": str(names.get(path.partition("/")[2])),
            "digest": digest.get(path),
        }
        for path, leaf in arrays.items()
    }


def check_leaves(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], step: int, folder: str
) -> None:
    """Refuse a checkpoint of another model or optimizer, naming each leaf that differs."""

    def kind(leaf: Mapping[str, Any]) -> str:
        return f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]"

    differing = [
        f"`{path}` is {kind(saved[path])} in the checkpoint and {kind(leaf)} in the state"
        for path, leaf in wanted.items()
        if path in saved and kind(saved[path]) != kind(leaf)
    ]
    differing += [
        f"`{path}` is only in the checkpoint, {kind(leaf)}"
        for path, leaf in saved.items()
        if path not in wanted
    ]
    differing += [
        f"`{path}` is only in the state, {kind(leaf)}"
        for path, leaf in wanted.items()
        if path not in saved
    ]
    if differing:
        owed = any(path.startswith("errors/") for path in saved.keys() ^ wanted.keys())
        exchange = (
            " What an exchange has left over, `errors`, belongs to it: restore under the same "
            "exchange."
            if owed
            else ""
        )
        raise ValueError(
            f"The checkpoint of step {step} in {folder} is of another model or optimizer than the "
            f"state to read it into: {'; '.join(differing)}. Make the state as it was made then, "
            f"or start in another folder.{exchange}"
        )


def sealed(content: Any) -> dict[str, str]:
    text = json.dumps(content)
    return {"content": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def unsealed(sealed: Mapping[str, str]) -> Any:
    if hashlib.sha256(sealed["content"].encode()).hexdigest() != sealed["sha256"]:
        raise ValueError("another digest")
    return json.loads(sealed["content"])


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        here = tree
        for folder in folders:
            here = here.setdefault(folder, {})
        here[name] = leaf
    return tree


def at(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree
