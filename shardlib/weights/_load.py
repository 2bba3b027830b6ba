"""From files to parameters: a tensor at a time, and each device what it is to have of it."""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardlib._progress import Progress
from shardlib._tree import map_named, named_leaves
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.step._precision import check_patterns
from shardlib.step._saved_model import parameters_of
from shardlib.step._state import State, combine
from shardlib.weights._table import Rule, Table, rules_by_path
from shardlib.weights._tensor_files import TensorFiles, is_floating, open_tensors

OP = "load"
Loaded = TypeVar("Loaded")
Index = tuple[slice, ...]


def load(
    source: str | Path | TensorFiles,
    like: Loaded,
    table: Table,
    *,
    keep: tuple[str, ...] = (),
    release: bool = False,
) -> Loaded:
    """Parameters from files, with the shapes, the dtypes and the shardings of others.

    Tensors are read one after the other, and each device is sent its part, so that the host has
    little more than one tensor in memory.

    Args:
        source: a safetensors file, a folder of them, or what `open_tensors` gives.
        like: a state, of which the parameters are replaced; or a tree of arrays, or of their shapes
            and shardings.
        table: which tensors make up which parameters.
        keep: patterns that match the whole path of parameters which stay as they are: a new head,
            or the factors of LoRA, `(lora.PARAMETERS,)`. The table has no rules for them.
        release: whether the parameters of `like` are deleted from their devices, once it is seen
            that the files fit, so that devices need not hold them twice. `like` cannot be used
            after it. Where a pipeline stores layers in another order than the model, devices hold
            both orders for a moment all the same.

    >>> import tempfile, shardlib as sl
    >>> folder, tree = tempfile.mkdtemp(), {"kernel": jnp.arange(6.0).reshape(2, 3)}
    >>> table = Table((Rule("w.{layers}", "kernel", "in -> layers in"),))
    >>> _ = sl.weights.save(folder, tree, table)
    >>> load(folder, jax.tree.map(jnp.zeros_like, tree), table)["kernel"].tolist()
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    files = source if isinstance(source, TensorFiles) else open_tensors(source)
    release = check.boolean(OP, "release", release)
    parameters = like
    if isinstance(like, State):
        # What is kept is taken in the order in which the model has its layers.
        parameters = like.weights if keep else combine(like.params, like.frozen)
    leaves = _without_kept(dict(named_leaves(parameters)), keep)
    rules = rules_by_path(OP, table, leaves)
    for path, leaf in leaves.items():
        _check_leaf(path, leaf)
    _check_tensors(files, table, rules, leaves)
    if release:
        _release(parameters, leaves)
        if isinstance(like, State):
            # These are others, where layers were put into another order or workers have their own.
            for tree in parameters_of(like):
                _release(tree, leaves)
    total = sum(_bytes(leaf) for leaf in leaves.values())
    is_first = jax.process_index() == 0
    with Progress("weights", f"reading {files.name}", total, is_shown=is_first) as progress:

        def loaded_leaf(path: str, leaf: Any) -> jax.Array:
            if path not in leaves:
                return leaf
            sizes = table.sizes_of(rules[path], leaf.shape)
            return _Parameter(files, rules[path], sizes, leaf, progress).loaded()

        loaded: Any = map_named(loaded_leaf, parameters)
    result: Any = like.with_weights(loaded) if isinstance(like, State) else loaded
    return result


def _release(tree: Any, leaves: Mapping[str, Any]) -> None:
    """Delete the arrays of a tree from their devices, those whose paths are among the leaves."""
    for path, leaf in named_leaves(tree):
        if path in leaves and isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


def _bytes(leaf: Any) -> int:
    """How much a parameter takes."""
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def _without_kept(leaves: Mapping[str, Any], keep: tuple[str, ...]) -> dict[str, Any]:
    """The leaves that no pattern matches; each pattern must match one."""
    check.patterns(OP, "keep", keep)
    check_patterns("load(keep=...)", keep, leaves)

    def is_kept(path: str) -> bool:
        return any(re.fullmatch(pattern, path) for pattern in keep)

    return {path: leaf for path, leaf in leaves.items() if not is_kept(path)}


def _check_leaf(path: str, leaf: Any) -> None:
    """Refuse what has no shape and dtype."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        check_arrays.array(OP, path, leaf)


def _check_tensors(
    files: TensorFiles, table: Table, rules: Mapping[str, Rule], leaves: Mapping[str, Any]
) -> None:
    """Refuse files that lack tensors, have others, or have them in other shapes."""
    wanted: dict[str, str] = {}
    for path, rule in rules.items():
        sizes = table.sizes_of(rule, leaves[path].shape)
        expected = rule.tensor_shape(sizes)
        for place in rule.places(sizes):
            name = rule.name_at(place)
            wanted[name] = path
            found = files.tensors.get(name)
            if found is not None and found.shape != expected:
                raise ValueError(
                    f"`{name}` is of shape {found.shape}, and `{path}` of shape "
                    f"{leaves[path].shape} takes {expected}, which is "
                    f"{rule.form.partition('->')[0].strip()} of {_sizes_text(rule, sizes)}. Make "
                    "the model with the sizes that the files have."
                )
            is_float = is_floating(leaves[path].dtype)
            if found is not None and is_floating(found.dtype) != is_float:
                raise ValueError(
                    f"`{name}` is of dtype {found.dtype}, and `{path}` of "
                    f"{leaves[path].dtype}: quantized weights are not known here."
                )
    missing = [name for name in wanted if name not in files.tensors]
    if missing:
        near = difflib.get_close_matches(missing[0], files.tensors, 3, 0.5)
        hint = f" The nearest are {', '.join(near)}." if near else ""
        raise ValueError(
            f"The files have no `{missing[0]}`, of which `{wanted[missing[0]]}` is made; "
            f"{len(missing)} of {len(wanted)} tensors are missing.{hint}"
        )
    others = [name for name in files.tensors if name not in wanted and not table.is_ignored(name)]
    if others:
        raise ValueError(
            f"The files have {len(others)} tensors that no parameter is made of, such as "
            f"`{others[0]}`: they are of another model. What is meant to be left out, the table "
            "names: `Table(ignored=(...))`."
        )


def _sizes_text(rule: Rule, sizes: Mapping[str, int]) -> str:
    """The sizes of the dims of a tensor."""
    dims, in_tensor = [dim for group in rule.groups for dim in group], rule.tensor_sizes(sizes)
    return ", ".join(f"{dim}={in_tensor[dim]}" for dim in dims)


@dataclass(frozen=True)
class _Parameter:
    """One parameter, as it is read.

    - `files`: that have its tensors.
    - `rule`: which these are.
    - `sizes`: of the dims of the tensors.
    - `leaf`: has the shape, the dtype and the sharding.
    - `progress`: is told what has been read.
    """

    files: TensorFiles
    rule: Rule
    sizes: Mapping[str, int]
    leaf: Any
    progress: Progress

    def loaded(self) -> jax.Array:
        """The parameter on its devices."""
        at_rest = getattr(self.leaf, "sharding", None)
        if at_rest is None:
            at_rest = SingleDeviceSharding(jax.local_devices()[0])
        # What is kept in the memory of the host is put together in that of the devices.
        (device, *_) = at_rest.addressable_devices
        sharding = at_rest.with_memory_kind(device.default_memory().kind)
        if self.rule.counters:
            made = self._stacked(sharding)
        else:
            made = self._spread((), sharding)
            self.progress.advance(_bytes(self.leaf))
        return jax.device_put(made, at_rest)

    def _stacked(self, sharding: Any) -> jax.Array:
        """The parameter, each tensor put to its place among the others."""
        of_tensor, new_dims = self._without_counters(sharding)
        stack = _zeros(self.leaf.shape, self.leaf.dtype, sharding)()
        put = _putting(sharding, new_dims)
        places = list(self.rule.places(self.sizes))
        for place in places:
            at = dict(zip(self.rule.counters, place, strict=True))
            starts = tuple(at.get(dim, 0) for dim in self.rule.dims)
            stack = put(stack, self._spread(place, of_tensor), starts)
            # The next tensor is read when this one is no longer needed.
            jax.block_until_ready(stack)
            self.progress.advance(_bytes(self.leaf) // len(places))
        return stack

    def _without_counters(self, sharding: Any) -> tuple[Any, tuple[int, ...]]:
        """The sharding of one tensor's dims, and which dims of the parameter it has not."""
        new_dims = tuple(k for k, dim in enumerate(self.rule.dims) if dim in self.rule.counters)
        if not isinstance(sharding, NamedSharding):
            return sharding, new_dims
        entries = [*sharding.spec, *[None] * (len(self.rule.dims) - len(sharding.spec))]
        kept = [entry for k, entry in enumerate(entries) if k not in new_dims]
        return NamedSharding(sharding.mesh, PartitionSpec(*kept)), new_dims

    def _spread(self, place: tuple[int, ...], sharding: Any) -> jax.Array:
        """A tensor on its devices, each with its part of it."""
        sizes = dict(zip(self.rule.dims, self.leaf.shape, strict=True))
        shape = tuple(sizes[dim] for dim in self.rule.inner)
        pieces: dict[Any, np.ndarray] = {}

        def piece(index: Any) -> np.ndarray:
            bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            if bounds not in pieces:
                pieces[bounds] = self._piece(place, tuple(slice(*ends) for ends in bounds))
            return pieces[bounds]

        return jax.block_until_ready(jax.make_array_from_callback(shape, sharding, piece))

    def _piece(self, place: tuple[int, ...], inner: Index) -> np.ndarray:
        """What a tensor has of a part of the parameter, zeros where it has nothing."""
        tensor = self.files.read(self.rule.name_at(place))
        taken = self.rule.taken(tensor, self.sizes, inner)
        # A parameter of one tensor might else be the file itself, which may change later.
        is_copied = not self.rule.counters
        piece = self._in_dtype(np.asarray(taken), is_copied)
        missing = [
            (0, part.stop - part.start - size)
            for part, size in zip(inner, piece.shape, strict=True)
        ]
        return np.pad(piece, missing) if any(more for _, more in missing) else piece

    def _in_dtype(self, numbers: np.ndarray, copy: bool) -> np.ndarray:
        """Numbers of a file in the dtype of the parameter, which has to hold them."""
        dtype = np.dtype(self.leaf.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = numbers.astype(dtype, copy=copy)
        if not numbers.size or _holds_all(dtype, numbers.dtype):
            return cast
        if jnp.issubdtype(dtype, jnp.inexact):
            lost = np.isfinite(numbers) & ~np.isfinite(cast)
        else:
            lost = cast != numbers
        if lost.any():
            raise ValueError(
                f"`load`: `{self.rule.tensor}` has numbers up to "
                f"{float(np.abs(numbers).max()):.4g} in {numbers.dtype.name}, which "
                f"{dtype.name}, the parameter's dtype, cannot hold."
            )
        return cast


def _holds_all(dtype: Any, other: Any) -> bool:
    """Whether a dtype has a number near every finite one of another."""
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.issubdtype(other, jnp.inexact):
        return float(jnp.finfo(dtype).max) >= float(jnp.finfo(other).max)
    return dtype == other


@lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    """A function that makes an array of zeros on its devices."""
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@lru_cache(maxsize=64)
def _putting(sharding: Any, new_dims: tuple[int, ...]) -> Callable[..., jax.Array]:
    """A function that puts an array to a place in another one, which has more dims."""

    def put(stack: jax.Array, one: jax.Array, starts: tuple[Any, ...]) -> jax.Array:
        return lax.dynamic_update_slice(stack, jnp.expand_dims(one, new_dims), starts)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)
