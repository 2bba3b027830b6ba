"""The mean over devices of arrays that are sent as codes, for use inside any `shard_map`.

Of n workers each is also the server of one part of every array:

    worker      rows, one for each server      + what it owes   -> encode -> all-to-all
    server      the mean of the rows it got    + what it owes   -> encode -> all-gather
    everybody   decodes all parts

So each number is compressed twice, by its worker and by its server, and what each compression
leaves out can be kept and sent along the next time. `pmean_bytes` says by a formula how many bytes
each device sends. All arrays of a tree go together, in as many collectives as an exact mean has.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.collectives._codecs import Codec, Encoded
from shardlib.layouts._specs import Axes, as_tuple


class Errors(NamedTuple):
    """What compression left out of what a device sent, to be sent along the next time.

    - `worker`: of its own array, (workers, elements of a row).
    - `server`: of its part of the mean, (elements of a row,).
    """

    worker: Any  # (workers, elements of a part)
    server: Any  # (elements of a part,)


class Pieces(NamedTuple):
    """How a device's array is cut for a mean.

    It is cut into a part for each of the devices that have the same array, and each of these into a
    row for each server. Rows are of one length, so the last ones may be padded with zeros:

        array    | part 0             | part 1             |     shared = 2
        rows     | 0  | 1  | 2  | 3   | 0  | 1  | 2  | 3   |     workers = 4
    """

    size: int  # elements of the array
    shared: int
    workers: int

    @property
    def elements(self) -> int:
        """The elements of a row, which a server has of a part; the last one may be padded."""
        return -(-self.size // (self.shared * self.workers))

    def errors(self, dtype: Any = jnp.float32) -> Errors:
        """The errors of one device before the first exchange, which are zero."""
        worker = jnp.zeros((self.workers, self.elements), dtype)
        return Errors(worker, jnp.zeros(self.elements, dtype))

    def all_rows(self, x: jax.Array) -> jax.Array:
        """All of an array, as `(shared, workers, elements)`, padded with zeros."""
        flat = x.reshape(-1)
        # Zeros are owed nothing, and their errors stay zero.
        flat = jnp.pad(flat, (0, self.shared * self.workers * self.elements - self.size))
        return flat.reshape(self.shared, self.workers, self.elements)

    def whole(self, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """An array of a shape from all of its rows, without their padding."""
        return rows.reshape(-1)[: self.size].reshape(shape)


@dataclass(frozen=True, eq=False)
class _Message:
    """One array of those that are averaged together, with what `pmean` is given along with it."""

    array: jax.Array
    pieces: Pieces
    errors: Errors | None
    alive: jax.Array | None

    def rows_to_send(self, part: Any) -> jax.Array:
        """The numbers that this device sends, a row for each server, with what it owes.

        They are those of one part of the array, in float32.
        """
        _check_real(self.array, "pmean")
        rows = self.pieces.all_rows(_not_differentiated(self.array.astype(jnp.float32)))[part]
        # Without errors, what compression takes away is gone.
        if self.errors is None:
            return rows
        return rows + self.errors.worker

    def mask(self, part: Any) -> jax.Array | None:
        """Which numbers of this device's part are alive; None where all of them are.

        The padding is not: it stays zero, and out of the scales.
        """
        pieces = self.pieces
        if self.alive is not None:
            return pieces.all_rows(self.alive)[part]
        if pieces.size == pieces.shared * pieces.workers * pieces.elements:
            return None
        return pieces.all_rows(jnp.ones(pieces.size, bool))[part]

    def mean_on_server(
        self, rows: jax.Array, mask: jax.Array | None, worker: jax.Array
    ) -> jax.Array:
        """The mean of the decoded rows of all workers, with what this device owes as a server.

        One row of those numbers that it is the server of; `mask` is that of all rows.
        """
        # A server owes of the mean what its own code left out of it, the last time.
        owed: Any = 0
        if self.errors is not None:
            owed = self.errors.server
        mean = jnp.mean(rows, 0) + owed
        if mask is None:
            return mean[None]
        return jnp.where(mask[worker], mean, 0)[None]

    def whole(self, rows: jax.Array) -> jax.Array:
        """The array that is made of all rows, in float32."""
        return self.pieces.whole(rows, self.array.shape)

    def as_given(self, mean: jax.Array) -> jax.Array:
        """A mean with zeros where the array is not alive, in the dtype of the array."""
        if self.alive is not None:
            mean = jnp.where(self.alive, mean, 0)
        return mean.astype(self.array.dtype)


def pmean(
    x: Any,
    axis: Axes,
    codec: Codec,
    errors: Any = None,
    *,
    alive: Any = None,
    shared: tuple[str, ...] = (),
) -> tuple[Any, Any]:
    """A compressed all-reduce: the mean over devices of an array or a tree of arrays, as codes.

    Each device is the server of a part: it gets the codes of that part by an all-to-all, averages
    them, and encodes the mean again, which all gather. It returns the means, in the dtypes of `x`,
    and the errors for the next call, None if it was given none. It has no derivative.

    - `x`: arrays of floats, of the same shape on every device.
    - `axis`: an axis of the surrounding `shard_map`, or several in a tuple, where `x` differs.
    - `codec`: such as `Signs()` or `Integers(8)`.
    - `errors`: those of the last call, or of `no_errors`. What was owed is sent along: it comes
      later, but for what an array narrower than float32 rounds away. With None it is lost.
    - `alive`: bools like `x`, alike on all devices: what is not stays zero, and out of scales.
    - `shared`: axes along which `x` is the same. Each device there sends a part; all gather these.

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
    messages = _messages(leaves, treedef, errors, alive, over, shared)
    worker = lax.axis_index(over)
    # Devices that have the same array send a part of it each.
    part: Any = 0
    if shared:
        part = lax.axis_index(shared)
    rows, masks = [], []
    for message in messages:
        rows.append(message.rows_to_send(part))
        masks.append(message.mask(part))
    if messages[0].pieces.workers == 1:
        # Nothing is sent between workers, so nothing is compressed and nothing is left over.
        means = _mean_of_one_worker(messages, rows, shared)
        return treedef.unflatten(means), jax.tree.map(jnp.zeros_like, errors)

    # Both ways are encoded, and each has errors of its own.
    by_worker = _all_sent(codec, rows, masks)
    by_server = _sent_by_server(codec, messages, by_worker, over, worker)
    means = []
    for message, code in zip(messages, _from_servers(by_server, over, shared), strict=True):
        mean = message.whole(codec.decode(code, message.pieces.elements))
        means.append(message.as_given(mean))
    # Who gives no errors gets none: nothing is owed where nothing is kept.
    if errors is None:
        return treedef.unflatten(means), None
    left = []
    for worker_sent, server_sent in zip(by_worker, by_server, strict=True):
        left.append(Errors(worker_sent.left_over(), server_sent.left_over()[0]))
    return treedef.unflatten(means), treedef.unflatten(left)


class _Sent(NamedTuple):
    """What a device sends of one array, as a worker or as a server."""

    rows: jax.Array  # the numbers that were meant
    mask: jax.Array | None  # which of them are alive; None for all
    encoded: Encoded  # what they became

    def left_over(self) -> jax.Array:
        """What the code says too little of the rows; zero where they are not alive."""
        difference = self.rows - self.encoded.decoded
        if self.mask is None:
            return difference
        return jnp.where(self.mask, difference, 0)


def _all_sent(
    codec: Codec, rows: Sequence[jax.Array], masks: Sequence[jax.Array | None]
) -> list[_Sent]:
    """Rows of each array as they are sent, encoded."""
    sent = []
    for numbers, mask in zip(rows, masks, strict=True):
        sent.append(_Sent(numbers, mask, codec.encode(numbers, mask)))
    return sent


def _sent_by_server(
    codec: Codec,
    messages: Sequence[_Message],
    by_worker: Sequence[_Sent],
    over: tuple[str, ...],
    worker: jax.Array,
) -> list[_Sent]:
    """What this device sends as a server: the means of the rows that workers have sent it.

    Args:
        codec: the codec of both ways.
        messages: the arrays.
        by_worker: what this device has sent of each as a worker.
        over: the axes of the workers.
        worker: the number of this device among them.
    """
    means, masks = [], []
    codes = _to_servers(by_worker, over)
    for message, code, sent in zip(messages, codes, by_worker, strict=True):
        received = codec.decode(code, message.pieces.elements)
        means.append(message.mean_on_server(received, sent.mask, worker))
    # Of the rows of all servers, this device has one: that of its own number.
    for sent in by_worker:
        mask = sent.mask
        if mask is not None:
            mask = mask[worker][None]
        masks.append(mask)
    return _all_sent(codec, means, masks)


def _messages(
    leaves: list[Any],
    treedef: Any,
    errors: Any,
    alive: Any,
    over: tuple[str, ...],
    shared: tuple[str, ...],
) -> list[_Message]:
    """The arrays of a tree, each with its errors and with where it is alive, checked.

    Args:
        leaves: the arrays.
        treedef: the structure of the tree.
        errors: a tree of the same structure, or None.
        alive: another one, or None.
        over: the axes of the workers.
        shared: the axes along which the arrays are the same.
    """
    if errors is not None:
        for each in jax.tree.leaves(errors, is_leaf=lambda node: isinstance(node, Errors)):
            if not isinstance(each, Errors):
                raise ValueError(
                    "`pmean(errors=...)` takes those of an earlier call, or of "
                    "`no_errors(x, axis)` in the same `shard_map`."
                )
    # Errors and bools come in trees like the arrays', or are None for all.
    errors_by_leaf = _by_leaf("errors", errors, treedef)
    alive_by_leaf = _by_leaf("alive", alive, treedef)
    messages = []
    for leaf, owed, living in zip(leaves, errors_by_leaf, alive_by_leaf, strict=True):
        messages.append(_Message(leaf, pieces_of(leaf, over, shared), owed, living))
    for message in messages:
        _check_message(message)
    return messages


def _mean_of_one_worker(
    messages: Sequence[_Message], rows: Sequence[jax.Array], shared: tuple[str, ...]
) -> list[jax.Array]:
    """The arrays themselves, with what was owed, where they have one worker.

    Devices that share an array still have a part of it each, which all of them gather.
    """
    parts = []
    for message, row in zip(messages, rows, strict=True):
        if message.errors is not None:
            row = row + message.errors.server
        parts.append(row)
    if shared:
        parts = [lax.all_gather(part, shared, axis=0, tiled=True) for part in parts]
    means = [message.whole(part) for message, part in zip(messages, parts, strict=True)]
    return [message.as_given(mean) for message, mean in zip(messages, means, strict=True)]


def _to_servers(sent: Sequence[_Sent], over: tuple[str, ...]) -> list[jax.Array]:
    """The codes that a server gets from all workers, for each array.

    Codes of all arrays are sent next to each other in one all-to-all.
    """
    # One collective for all arrays: each of them alone would take a latency of its own.
    codes = [each.encoded.code for each in sent]
    received = lax.all_to_all(jnp.concatenate(codes, 1), over, 0, 0, tiled=True)
    return _split_columns(received, codes)


def _from_servers(
    sent: Sequence[_Sent], over: tuple[str, ...], shared: tuple[str, ...]
) -> list[jax.Array]:
    """The codes of all servers, those of other parts included, for each array."""
    codes = [each.encoded.code for each in sent]
    gathered = lax.all_gather(jnp.concatenate(codes, 1), over, axis=0, tiled=True)
    if shared:
        gathered = lax.all_gather(gathered, shared, axis=0, tiled=True)
    return _split_columns(gathered, codes)


def _split_columns(together: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays that are next to each other in another one, each as wide as one of `like`."""
    # Codes of different arrays are of different widths.
    ends = [0, *itertools.accumulate(x.shape[1] for x in like)]
    return [together[:, first:last] for first, last in itertools.pairwise(ends)]


def pieces_of(x: Any, over: tuple[str, ...], shared: tuple[str, ...]) -> Pieces:
    """How a device's array is cut, inside a `shard_map`, where axes have sizes."""
    workers = lax.axis_size(over)
    parts = lax.axis_size(shared)
    return Pieces(math.prod(x.shape), parts, workers)


def no_errors(x: Any, axis: Axes, *, shared: tuple[str, ...] = ()) -> Any:
    """Zero errors for the first call of `pmean`, which has the same `x`, `axis` and `shared`.

    Call it inside the same `shard_map`. It returns an `Errors` for each array of `x`.
    """
    over, shared = _axes_of_both("no_errors", axis, shared)
    for leaf in jax.tree.leaves(x):
        check_arrays.array("no_errors", "x", leaf, "an array, or a tree of arrays")
    return jax.tree.map(lambda leaf: pieces_of(leaf, over, shared).errors(), x)


def pmean_bytes(elements: int, workers: int, codec: Codec, shared: int = 1) -> int:
    """How many bytes a device sends for `pmean` of an array of so many `elements`, by a formula.

    With n `workers`, and k = `shared` devices with the same array, that is 2 (n-1) codes of a part,
    and n (k-1) more. With one worker it is k-1 parts in float32.

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
    # Each way, a worker sends a code to every other one.
    code = codec.size(part)
    return 2 * (workers - 1) * code + (shared - 1) * workers * code


def check_codec(name: str, codec: Any) -> None:
    """Refuse what is no codec, on behalf of the function `name`.

    A codec is known by its methods. Their absence is a mistake, and so is a class in place of a
    value of it, `Signs` for `Signs()`.
    """
    methods = [getattr(codec, method, None) for method in ("encode", "decode", "size")]
    if isinstance(codec, type) or not all(map(callable, methods)):
        raise ValueError(
            f"`{name}` takes a codec, `sl.collectives.Signs()` or `sl.collectives.Integers(8)`; "
            f"got {check.shown(codec)}."
        )


def manual_axes(name: str, argument: str, axis: Any) -> tuple[str, ...]:
    """The axes that an argument names, checked to be of the surrounding `shard_map` or `vmap`.

    `name` and `argument` are the function and the argument that an error speaks of. Under
    `jax.vmap(..., axis_name="data")` one device computes what several would.
    """
    takes = "an axis of the surrounding `shard_map`, or a tuple of several"
    if not isinstance(axis, str):
        check.texts(name, argument, axis, takes)
    manual, axes = jax.sharding.get_abstract_mesh().manual_axes, as_tuple(axis)
    if not all(map(_is_bound, axes)) or len(set(axes)) < len(axes):
        raise check.refusal(name, argument, axis, f"{takes}, each once; it is manual over {manual}")
    return axes


def _is_bound(axis: str) -> bool:
    """Whether collectives may go over an axis here."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def _axes_of_both(name: str, axis: Any, shared: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes over which arrays differ, and those along which they are the same."""
    over, same = manual_axes(name, "axis", axis), manual_axes(name, "shared", shared)
    both = [axis for axis in same if axis in over]
    if both:
        raise ValueError(
            f"`{name}(axis={check.shown(axis)}, shared={check.shown(shared)})`: along `{both[0]}` "
            "arrays either differ or are the same."
        )
    return over, same


def _by_leaf(argument: str, tree: Any, treedef: Any) -> list[Any]:
    """An optional tree like `x`, as a list: what it has for each array, or None for each."""
    if tree is None:
        return [None] * treedef.num_leaves
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"`pmean({argument}=...)` is a tree like `x`, {treedef}: {error}"
        ) from error


def _check_message(message: _Message) -> None:
    """Refuse errors, and bools of where an array is alive, that do not fit the array."""
    shape, pieces, alive = list(message.array.shape), message.pieces, message.alive
    if message.errors is not None:
        expected = ((pieces.workers, pieces.elements), (pieces.elements,))
        shapes = tuple(getattr(error, "shape", None) for error in message.errors)
        if shapes != expected:
            raise ValueError(
                f"`pmean(errors=...)`: of an array of shape {shape} errors have the shapes "
                f"{expected}; got {shapes}. Take those of an earlier call for the same array, or "
                "`no_errors(x, axis)`."
            )
    if alive is None:
        return
    # Anything may be in the tree of `alive`, so its shape is asked for with care.
    described = (getattr(alive, "shape", None), getattr(alive, "dtype", None))
    if described != (message.array.shape, bool):
        raise ValueError(
            f"`pmean(alive=...)` takes bools of the shape of `x`, {shape}; got "
            f"{check.shown(alive)}."
        )


def _check_real(x: jax.Array, name: str) -> None:
    """Refuse what no codec can encode: anything but real numbers with a point."""
    check_arrays.array(name, "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"`{name}` compresses real numbers, and was given {x.dtype}{list(x.shape)}: send that "
            "exactly."
        )


def check_dim(x: jax.Array, dim: int, name: str) -> int:
    """A dim of an array of real numbers, counted from the first, on behalf of `name`."""
    _check_real(x, name)
    check.whole(
        name, "dim", dim, f"a dim of an array of shape {x.shape}", least=-x.ndim, most=x.ndim - 1
    )
    return dim % x.ndim


@jax.custom_jvp
def _not_differentiated(x: jax.Array) -> jax.Array:
    """The array itself; to differentiate it is an error, where rounding would give zeros."""
    return x


@_not_differentiated.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "`pmean` of codes has no derivative: it is for what was differentiated already, a gradient "
        "or a momentum. `all_gather` and `psum_scatter` have that of their exact kin."
    )
