"""What a checkpoint is made of: arrays by path, what each of them is, and digests of their bits.

A digest is a sum over the elements of an array, modulo 2**32, of

    scramble(bits of the element + position)

so it is the same however the array is sharded, and any change of a single element changes it. A
state's keys of random numbers are saved as the words they are made of, since a file has no dtype
for them.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib._tree import named_leaves
from shardlib.layouts._host import to_device
from shardlib.machine._agreement import gather_texts
from shardlib.modeling._random import is_key, scrambled
from shardlib.step._state import State

# The layout of a checkpoint's description; a version reads only the format that it writes.
FORMAT = 1
# Odd factors of an element's index along even and odd dims, which tell positions apart.
_POSITION_FACTORS = (0x9E3779B1, 0x85EBCA77)


@jax.jit
def _digests(arrays: list[jax.Array]) -> jax.Array:
    """A digest of 32 bits for each array, in a vector."""
    return jnp.stack([_digest(to_device(x)) for x in arrays])


def _digest(x: jax.Array) -> jax.Array:
    """The digest of one array: the sum of its elements' bits, scrambled with their positions.

    Scrambling maps words one to one, so that no change of an element goes unseen, and changes of
    several do not cancel. A sum of integers is the same on every mesh.
    """
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    word = _bits(x)
    for dim in range(word.ndim):
        word += lax.broadcasted_iota(jnp.uint32, word.shape, dim) * jnp.uint32(
            _POSITION_FACTORS[dim % 2] + 2 * dim
        )
    return jnp.sum(scrambled(word), dtype=jnp.uint32)


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """A number for each array, by path, that depends on its bits and not on its sharding.

    It has eight hexadecimal digits. Arrays without elements have none.

    >>> digests({"w": jnp.arange(4)}) == digests({"w": jnp.array([0, 1, 3, 2])})
    False
    """
    # One program for all: a process may not have several with collectives under way on the devices
    # of a CPU.
    nonempty = {path: leaf for path, leaf in arrays.items() if leaf.size}
    if not nonempty:
        return {}
    numbers = np.asarray(_digests(list(nonempty.values())))
    return {path: f"{int(number):08x}" for path, number in zip(nonempty, numbers, strict=True)}


def _bits(x: jax.Array) -> jax.Array:
    """The bits of each element as one or two unsigned words, two along a new last dim."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.integer):
        width, wider_dtype = jnp.iinfo(x.dtype).bits, jnp.int32
    else:
        width, wider_dtype = jnp.finfo(x.dtype).bits, jnp.float32
    # Of dtypes of less than a byte, bits cannot be taken; the wider dtype holds all their values.
    if width < 8:
        return lax.bitcast_convert_type(x.astype(wider_dtype), jnp.uint32)
    # Elements of 64 bits become two words of 32.
    word_dtype = {8: jnp.uint8, 16: jnp.uint16}.get(width, jnp.uint32)
    return lax.bitcast_convert_type(x, word_dtype).astype(jnp.uint32)


def arrays_of(state: State) -> dict[str, Any]:
    """A state's arrays by path, those of keys as the words that they are made of.

    Of an abstract state, the shapes, dtypes and shardings of these arrays.
    """
    arrays = {}
    for path, leaf in named_leaves(state):
        if is_key(leaf):
            leaf = _words(leaf)
        arrays[path] = leaf
    return arrays


def _words(keys: Any) -> Any:
    """The words that keys of random numbers are made of, abstract ones of abstract keys."""
    if isinstance(keys, jax.Array):
        return jax.random.key_data(keys)
    return jax.ShapeDtypeStruct(
        jax.eval_shape(jax.random.key_data, keys).shape,
        jnp.uint32,
        sharding=getattr(keys, "sharding", None),
    )


def as_leaf(like: Any, words: Any, array: Any) -> Any:
    """The leaf of a state that was read from a checkpoint as an array: keys from their words.

    `like` is the leaf that is wanted, and `words` the same as `arrays_of` has it, both abstract.
    `array` is None for an array without elements, which a checkpoint does not hold.
    """
    if array is None:
        return jax.device_put(jnp.zeros(words.shape, words.dtype), words.sharding)
    if not is_key(like):
        return array
    # An abstract key does not tell its implementation, but the one that tracing makes of it does.
    implementations: list[Any] = []
    jax.eval_shape(lambda keys: implementations.append(jax.random.key_impl(keys)), like)
    return jax.random.wrap_key_data(array, impl=implementations[0])


def check_json(data: Any, about: Mapping[str, Any] | None) -> None:
    """Refuse at once what could not be written as JSON later, in another thread."""
    try:
        json.dumps([data, dict(about or {})])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            "`save(data=..., about=...)` go into checkpoints as JSON, which cannot hold them: "
            f"{error}."
        ) from error


def describe(
    state: State,
    step: int,
    arrays: Mapping[str, Any],
    data: Any,
    about: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What a checkpoint says of itself, as JSON holds it.

    Args:
        state: what is saved, in the form in which checkpoints have it.
        step: the number of steps it has taken.
        arrays: the arrays of the state by path.
        data: this process's place in the data; those of the others are gathered here.
        about: what the run says of itself.
    """
    leaves = describe_leaves(state, arrays, digests(arrays))
    # The strategy is written for people to read: a state is restored under whichever is in force.
    strategy = state.layout.strategy
    options = {}
    for field in dataclasses.fields(strategy):
        options[field.name] = repr(getattr(strategy, field.name))
    return {
        "format": FORMAT,
        "step": step,
        "leaves": leaves,
        "strategy": options,
        "processes": [json.loads(text) for text in gather_texts(json.dumps(data))],
        "about": dict(about or {}),
    }


def describe_leaves(
    state: State, arrays: Mapping[str, Any], digest: Mapping[str, str]
) -> dict[str, Any]:
    """What each array of a state is, by path, as JSON holds it.

    `arrays` is what `arrays_of` makes of the state, and `digest` what `digests` makes of these; a
    state that is only to be compared in shapes and dtypes needs none.
    """
    # Keys keep their own dtype here, though they are saved as words.
    dtypes = {path: str(leaf.dtype) for path, leaf in named_leaves(state)}
    names = dict(state.layout.names)
    described = {}
    for path, leaf in arrays.items():
        # Names are by parameter, without the `params/` that its path in a state begins with.
        parameter_path = path.partition("/")[2]
        described[path] = {
            "shape": list(leaf.shape),
            "dtype": dtypes[path],
            "names": str(names.get(parameter_path)),
            "digest": digest.get(path),
        }
    return described


def check_leaves(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], step: int, folder: str
) -> None:
    """Refuse a checkpoint of another model or optimizer, naming each leaf that differs.

    `saved` and `wanted` are descriptions by path, as `describe_leaves` makes them. Shapes and
    dtypes are compared, and neither names nor digests. `step` and `folder` are for the message.
    """
    differing = _differences(saved, wanted)
    if not differing:
        return
    exchange = ""
    # Errors that only one of the two has come from another exchange.
    if any(path.startswith("errors/") for path in saved.keys() ^ wanted.keys()):
        exchange = (
            " What an exchange has left over, `errors`, belongs to it: restore under the same "
            "exchange."
        )
    raise ValueError(
        f"The checkpoint of step {step} in {folder} is of another model or optimizer than the "
        f"state to read it into: {'; '.join(differing)}. Make the state as it was made then, "
        f"or start in another folder.{exchange}"
    )


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Each leaf that differs, in words: first those of both, then those of one of them only."""
    differing = []
    for path, leaf in wanted.items():
        if path in saved and _kind(saved[path]) != _kind(leaf):
            differing.append(
                f"`{path}` is {_kind(saved[path])} in the checkpoint and {_kind(leaf)} in the state"
            )
    for path, leaf in saved.items():
        if path not in wanted:
            differing.append(f"`{path}` is only in the checkpoint, {_kind(leaf)}")
    for path, leaf in wanted.items():
        if path not in saved:
            differing.append(f"`{path}` is only in the state, {_kind(leaf)}")
    return differing


def _kind(leaf: Mapping[str, Any]) -> str:
    """The dtype and shape of a leaf that is described, as `float32[2,3]`."""
    return f"{leaf['dtype']}[{','.join(map(str, leaf['shape']))}]"


def sealed(content: Any) -> dict[str, str]:
    """Content as a text of JSON, beside the checksum of that text.

    The text is kept whole, so that a checksum does not depend on how a library writes JSON.
    """
    text = json.dumps(content)
    return {"content": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def unsealed(sealed: Mapping[str, str]) -> Any:
    """The content that `sealed` made this of; a `ValueError` if its text has changed since."""
    if hashlib.sha256(sealed["content"].encode()).hexdigest() != sealed["sha256"]:
        raise ValueError("another digest")
    return json.loads(sealed["content"])


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dicts from leaves by path, where `/` stands between the keys: `at` undoes it."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        subtree = tree
        for folder in folders:
            subtree = subtree.setdefault(folder, {})
        subtree[name] = leaf
    return tree


def at(tree: Any, path: str) -> Any:
    """The leaf at a path of a tree that `nested` has made."""
    for name in path.split("/"):
        tree = tree[name]
    return tree
