"""Collectives that send codes in place of numbers, for use inside any `shard_map`: real bytes on
the wire.

Of n devices, each sends what the functions beside them say by formula, in bytes: as many
collectives as their exact kin, however many arrays go in them together.
"""

import itertools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.collectives._codecs import Codec, Encoded
from shardlib.layouts._rules import Axes, as_tuple


class Errors(NamedTuple):
    """What compression left out of what a device sent.

    It has errors as a worker, of its own array, and as a server, of its part of the mean.
    """

    worker: Any  # (workers, elements of a part)
    server: Any  # (elements of a part,)


class Pieces(NamedTuple):
    """How a device's array is cut for a mean: into a part for each of those that have the same, and
    of it one for each server.
    """

    size: int
    shared: int
    workers: int

    @property
    def elements(self) -> int:
        """The elements of a part; the last part may be padded."""
        return -(-self.size // (self.shared * self.workers))

    def errors(self, dtype: Any = jnp.float32) -> Errors:
        """The errors of one device before the first exchange: zero."""
        return Errors(
            jnp.zeros((self.workers, self.elements), dtype), jnp.zeros(self.elements, dtype)
        )

    def all_rows(self, x: jax.Array) -> jax.Array:
        """All of an array, as `(shared, workers, elements)`."""
        flat = x.reshape(-1)
        flat = jnp.pad(flat, (0, self.shared * self.workers * self.elements - self.size))
        return flat.reshape(self.shared, self.workers, self.elements)

    def whole(self, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """An array of a shape from all of its rows."""
        return rows.reshape(-1)[: self.size].reshape(shape)


def pmean(
    x: Any,
    axis: Axes,
    codec: Codec,
    errors: Any = None,
    *,
    alive: Any = None,
    shared: tuple[str, ...] = (),
) -> tuple[Any, Any]:
    """The mean over devices of an array or a tree of arrays, compressed twice.

    With it come the errors that are left.

    Each array goes in parts to its servers by an all-to-all; each server takes the mean of what
    came, compresses it again, and all gather it. With `errors` of an earlier call, or of
    `no_errors`, what was owed is sent along: nothing is lost, it comes later, but for what an array
    narrower than float32 rounds away. Without, what compression takes away is gone.

    - `alive`: arrays of bools like `x`, the same on every device: what is not stays zero, and is
      left out of scales.
    - `shared`: axes along which `x` is the same. Each device there sends a part of it, and all
      gather these.

    >>> import shardlib as sl
    >>> P, mesh = jax.sharding.PartitionSpec, sl.make_mesh("data=8")
    >>> def mean(x):
    ...     return pmean(x[0], "data", sl.collectives.Signs())[0]
    >>> mean = jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    >>> jax.jit(mean)(jnp.tile(jnp.array([1.0, -1.0]), (8, 512))).tolist()[:4]
    [1.0, -1.0, 1.0, -1.0]
    """
    over, shared = _axes_of_both("pmean", axis, shared)
    check_codec("pmean", codec)
    leaves, treedef = jax.tree.flatten(x)
    for leaf in leaves:
        check_arrays.array("pmean", "x", leaf, "an array, or a tree of arrays")
    if not leaves:
        return x, errors
    if errors is not None and not all(
        isinstance(e, Errors) for e in jax.tree.leaves(errors, is_leaf=_is_errors)
    ):
        raise ValueError(
            "`pmean(errors=...)` takes those of an earlier call, or of `no_errors(x, axis)` in the "
            "same `shard_map`."
        )
    owed = [None] * len(leaves) if errors is None else _alike("errors", errors, treedef)
    living = [None] * len(leaves) if alive is None else _alike("alive", alive, treedef)
    cuts = [pieces_of(leaf, over, shared) for leaf in leaves]
    for leaf, cut, error, living_one in zip(leaves, cuts, owed, living, strict=True):
        _check_beside(leaf, cut, error, living_one)
    place, mine = lax.axis_index(over), lax.axis_index(shared) if shared else 0

    rows, masks = [], []
    for leaf, cut, error, living_one in zip(leaves, cuts, owed, living, strict=True):
        _check_real(leaf, "pmean")
        row = cut.all_rows(_not_differentiated(leaf.astype(jnp.float32)))[mine]
        rows.append(row if error is None else row + error.worker)
        masks.append(_mask(living_one, cut, mine))
    if cuts[0].workers == 1:  # nothing is sent between workers, so nothing is lost
        rows = [
            row if error is None else row + error.server
            for row, error in zip(rows, owed, strict=True)
        ]
        every = [lax.all_gather(row, shared, axis=0, tiled=True) if shared else row for row in rows]
        found = [
            cut.whole(row, leaf.shape) for row, cut, leaf in zip(every, cuts, leaves, strict=True)
        ]
        found = [
            (one if mask is None else jnp.where(mask, one, 0)).astype(leaf.dtype)
            for one, mask, leaf in zip(found, living, leaves, strict=True)
        ]
        return treedef.unflatten(found), jax.tree.map(jnp.zeros_like, errors)
    sent = [codec.encode(row, mask) for row, mask in zip(rows, masks, strict=True)]
    widths = [one.code.shape[1] for one in sent]
    received = _apart(
        lax.all_to_all(jnp.concatenate([one.code for one in sent], 1), over, 0, 0, tiled=True),
        widths,
    )

    means = []
    for code, cut, error, mask in zip(received, cuts, owed, masks, strict=True):
        mean = jnp.mean(codec.decode(code, cut.elements), 0) + (
            0 if error is None else error.server
        )
        means.append(mean[None] if mask is None else jnp.where(mask[place], mean, 0)[None])
    mine_of_all = [None if mask is None else mask[place][None] for mask in masks]
    again = [codec.encode(mean, mask) for mean, mask in zip(means, mine_of_all, strict=True)]
    gathered = lax.all_gather(
        jnp.concatenate([one.code for one in again], 1), over, axis=0, tiled=True
    )
    if shared:
        gathered = lax.all_gather(gathered, shared, axis=0, tiled=True)

    found = []
    for leaf, cut, code, living_one in zip(
        leaves, cuts, _apart(gathered, widths), living, strict=True
    ):
        one = cut.whole(codec.decode(code, cut.elements), leaf.shape)
        found.append(
            (one if living_one is None else jnp.where(living_one, one, 0)).astype(leaf.dtype)
        )

    def left(row: jax.Array, encoded: Encoded, mask: jax.Array | None) -> jax.Array:
        rest = row - encoded.decoded
        return rest if mask is None else jnp.where(mask, rest, 0)

    if errors is None:
        return treedef.unflatten(found), None
    each = zip(rows, sent, masks, means, again, mine_of_all, strict=True)
    after = [Errors(left(r, c, m), left(r2, c2, m2)[0]) for r, c, m, r2, c2, m2 in each]
    return treedef.unflatten(found), treedef.unflatten(after)


def pieces_of(x: Any, over: tuple[str, ...], shared: tuple[str, ...]) -> Pieces:
    """How a device's array is cut, where axes have sizes."""
    workers, parts = (math.prod(lax.axis_size(axis) for axis in axes) for axes in (over, shared))
    return Pieces(math.prod(x.shape), parts, workers)


def no_errors(x: Any, axis: Axes, *, shared: tuple[str, ...] = ()) -> Any:
    """The errors to begin with, zero, for what `pmean` is given.

    Call it inside the same `shard_map`.
    """
    over, shared = _axes_of_both("no_errors", axis, shared)
    for leaf in jax.tree.leaves(x):
        check_arrays.array("no_errors", "x", leaf, "an array, or a tree of arrays")
    return jax.tree.map(lambda leaf: pieces_of(leaf, over, shared).errors(), x)


def pmean_bytes(elements: int, workers: int, codec: Codec, shared: int = 1) -> int:
    """What a device sends for `pmean` of an array of so many elements.

    That is 2 (n-1) codes of a part; if shared, n (k-1) more.

    Of one worker it is nothing but, if shared, the part itself.

    >>> from shardlib.collectives._codecs import Signs
    >>> all_reduce = 2 * 7 / 8 * 4 * 2**20
    >>> f"{pmean_bytes(2**20, 8, Signs()) / all_reduce:.5f} of an all-reduce in float32"
    '0.03174 of an all-reduce in float32'
    """
    check_codec("pmean_bytes", codec)
    elements = check.whole("pmean_bytes", "elements", elements, "a number of elements", least=0)
    workers = check.whole("pmean_bytes", "workers", workers, "a number of workers", least=1)
    shared = check.whole("pmean_bytes", "shared", shared, "a number of devices", least=1)
    part = Pieces(elements, shared, workers).elements
    if workers == 1:
        return (shared - 1) * part * 4
    code = codec.size(part)
    return 2 * (workers - 1) * code + (shared - 1) * workers * code


def check_codec(name: str, codec: Any) -> None:
    """Refuse what is no codec."""
    functions = [getattr(codec, method, None) for method in ("encode", "decode", "size")]
    if isinstance(codec, type) or not all(map(callable, functions)):
        raise ValueError(
            f"`{name}` takes a codec, `sl.collectives.Signs()` or `sl.collectives.Integers(8)`; "
            f"got {check.shown(codec)}."
        )


def axes_here(name: str, argument: str, axis: Any) -> tuple[str, ...]:
    """The axes of an argument, over which this is manual."""
    takes = "an axis of the surrounding `shard_map`, or a tuple of several"
    if not isinstance(axis, str):
        check.texts(name, argument, axis, takes)
    manual, axes = jax.sharding.get_abstract_mesh().manual_axes, as_tuple(axis)
    if any(one not in manual for one in axes) or len(set(axes)) < len(axes):
        raise check.refusal(name, argument, axis, f"{takes}, each once; it is manual over {manual}")
    return axes


def _axes_of_both(name: str, axis: Any, shared: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which arrays differ, and those along which they are the same."""
    over, same = axes_here(name, "axis", axis), axes_here(name, "shared", shared)
    if both := [one for one in same if one in over]:
        raise ValueError(
            f"`{name}(axis={check.shown(axis)}, shared={check.shown(shared)})`: along `{both[0]}` "
            "arrays either differ or are the same."
        )
    return over, same


def _alike(argument: str, tree: Any, treedef: Any) -> list[Any]:
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"`pmean({argument}=...)` is a tree like `x`, {treedef}: {error}"
        ) from error


def _check_beside(x: Any, cut: Pieces, error: Any, alive: Any) -> None:
    if error is not None:
        expected = ((cut.workers, cut.elements), (cut.elements,))
        found = tuple(getattr(one, "shape", None) for one in error)
        if found != expected:
            raise ValueError(
                f"`pmean(errors=...)`: of an array of shape {list(x.shape)} errors have the shapes "
                f"{expected}; got {found}. Take those of an earlier call for the same array, or "
                "`no_errors(x, axis)`."
            )
    if alive is not None and (getattr(alive, "shape", None), getattr(alive, "dtype", None)) != (
        x.shape,
        bool,
    ):
        raise ValueError(
            f"`pmean(alive=...)` takes bools of the shape of `x`, {list(x.shape)}; got "
            f"{check.shown(alive)}."
        )


def _is_errors(x: Any) -> bool:
    return isinstance(x, Errors)


def _check_real(x: jax.Array, name: str) -> None:
    check_arrays.array(name, "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"`{name}` compresses real numbers, and was given {x.dtype}{list(x.shape)}: send that "
            "exactly."
        )


def _dim(x: jax.Array, dim: int, name: str) -> int:
    _check_real(x, name)
    check.whole(
        name, "dim", dim, f"a dim of an array of shape {x.shape}", least=-x.ndim, most=x.ndim - 1
    )
    return dim % x.ndim


def _mask(alive: jax.Array | None, cut: Pieces, mine: Any) -> jax.Array | None:
    full = cut.size == cut.shared * cut.workers * cut.elements
    if alive is None and full:
        return None
    return cut.all_rows(jnp.ones(cut.size, bool) if alive is None else alive)[mine]


def _apart(together: jax.Array, widths: list[int]) -> list[jax.Array]:
    ends = [0, *itertools.accumulate(widths)]
    return [together[:, first:last] for first, last in itertools.pairwise(ends)]


@jax.custom_jvp
def _not_differentiated(x: jax.Array) -> jax.Array:
    return x


@_not_differentiated.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "`pmean` of codes has no derivative: it is for what was differentiated already, a gradient "
        "or a momentum. `all_gather` and `psum_scatter` have that of their exact kin."
    )


def all_gather(x: jax.Array, axis: Axes, codec: Codec, dim: int = 0) -> jax.Array:
    """Every device's array, concatenated along `dim`, sent as codes.

    Its derivative is that of an exact gather.

    >>> import shardlib as sl
    >>> P, mesh = jax.sharding.PartitionSpec, sl.make_mesh("data=8")
    >>> gather = jax.shard_map(
    ...     lambda x: all_gather(x, "data", sl.collectives.Integers(8)),
    ...     mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False,
    ... )
    >>> jax.jit(gather)(jnp.arange(8.0)).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    over = axes_here("all_gather", "axis", axis)
    check_codec("all_gather", codec)
    return _all_gather(x, over, codec, _dim(x, dim, "all_gather"))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(x: jax.Array, over: tuple[str, ...], codec: Codec, dim: int) -> jax.Array:
    codes = lax.all_gather(codec.encode(x.reshape(1, -1)).code, over, axis=0, tiled=True)
    parts = codec.decode(codes, math.prod(x.shape)).astype(x.dtype).reshape(-1, *x.shape)
    shape = (*x.shape[:dim], parts.shape[0] * x.shape[dim], *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def _gather_forward(
    x: jax.Array, over: tuple[str, ...], codec: Codec, dim: int
) -> tuple[jax.Array, None]:
    return _all_gather(x, over, codec, dim), None


def _gather_backward(
    over: tuple[str, ...], codec: Codec, dim: int, _: None, g: jax.Array
) -> tuple[jax.Array]:
    return (lax.psum_scatter(g, over, scatter_dimension=dim, tiled=True),)


_all_gather.defvjp(_gather_forward, _gather_backward)


def all_gather_bytes(elements: int, devices: int, codec: Codec) -> int:
    """What a device sends for `all_gather` of its array of so many elements: n-1 codes."""
    return (_devices("all_gather_bytes", elements, devices, codec) - 1) * codec.size(elements)


def psum_scatter(x: jax.Array, axis: Axes, codec: Codec, dim: int = 0) -> jax.Array:
    """The sum over devices, of which each keeps its part of `dim`.

    Codes of the parts go to their owners, and are added there.

    Each number is compressed once, whatever the number of devices. The derivative is that of the
    exact sum.

    >>> import shardlib as sl
    >>> P, mesh = jax.sharding.PartitionSpec, sl.make_mesh("data=8")
    >>> scatter = jax.shard_map(
    ...     lambda x: psum_scatter(x, "data", sl.collectives.Integers(8)),
    ...     mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False,
    ... )
    >>> jax.jit(scatter)(jnp.arange(8.0)).tolist()
    [0.0, 8.0, 16.0, 24.0, 32.0, 40.0, 48.0, 56.0]
    """
    over, dim = axes_here("psum_scatter", "axis", axis), _dim(x, dim, "psum_scatter")
    check_codec("psum_scatter", codec)
    parts = math.prod(lax.axis_size(one) for one in over)
    if x.shape[dim] % parts:
        raise ValueError(
            f"`psum_scatter`: dim {dim} of an array of shape {x.shape} does not divide into "
            f"{parts} parts."
        )
    return _psum_scatter(x, over, codec, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _psum_scatter(x: jax.Array, over: tuple[str, ...], codec: Codec, dim: int) -> jax.Array:
    parts = math.prod(lax.axis_size(one) for one in over)
    shape = (*x.shape[:dim], x.shape[dim] // parts, *x.shape[dim + 1 :])
    rows = jnp.moveaxis(x.reshape(*shape[:dim], parts, *shape[dim:]), dim, 0).reshape(parts, -1)
    codes = lax.all_to_all(codec.encode(rows).code, over, 0, 0, tiled=True)
    return jnp.sum(codec.decode(codes, rows.shape[1]), 0).astype(x.dtype).reshape(shape)


def _scatter_forward(
    x: jax.Array, over: tuple[str, ...], codec: Codec, dim: int
) -> tuple[jax.Array, None]:
    return _psum_scatter(x, over, codec, dim), None


def _scatter_backward(
    over: tuple[str, ...], codec: Codec, dim: int, _: None, g: jax.Array
) -> tuple[jax.Array]:
    for name in reversed(over):
        g = lax.all_gather(g, name, axis=dim, tiled=True)
    return (g,)


_psum_scatter.defvjp(_scatter_forward, _scatter_backward)


def psum_scatter_bytes(elements: int, devices: int, codec: Codec) -> int:
    """What a device sends for `psum_scatter` of its array of so many elements.

    That is n-1 codes of a part.
    """
    return (_devices("psum_scatter_bytes", elements, devices, codec) - 1) * codec.size(
        elements // devices
    )


def _devices(name: str, elements: Any, devices: Any, codec: Any) -> int:
    check_codec(name, codec)
    check.whole(name, "elements", elements, "a number of elements", least=0)
    return check.whole(name, "devices", devices, "a number of devices", least=1)
