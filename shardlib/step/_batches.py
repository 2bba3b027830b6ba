"""Batches on the mesh, from anybody's iterator.

Each process gives the examples that its own devices hold. A thread reads ahead, and copies batches
to the devices while these compute:

    source -> iterator -> [a thread: put on the mesh] -> queue of `ahead` batches -> step

The queue holds each batch together with the source's place after it. So a checkpoint records where
reading should continue, not how far the thread has read ahead.
"""

import contextlib
import inspect
import json
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib._tree import map_named, named_leaves
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._specs import parts_over, product_text
from shardlib.modeling._random import is_key
from shardlib.step._strategy import Strategy

State = dict[str, Any]

# The most examples of a batch: their rows are listed one by one.
MOST_EXAMPLES = 2**26
_MOST_AHEAD = 2**20
# What the queue has after the last batch, and what an iterator gives that has ended.
_ENDED = object()


def batch_sharding(strategy: Strategy) -> NamedSharding:
    """How a batch is laid out on the mesh: its examples, along dim 0, over the batch axes."""
    return NamedSharding(strategy.device_mesh, PartitionSpec(strategy.batch_axes or None))


def check_batch(batch: Any, strategy: Strategy) -> None:
    """Refuse anything but a batch that splits evenly over the mesh and into microbatches.

    Nothing is padded or dropped silently: either would change which examples the loss averages.
    """
    leaves = named_leaves(batch)
    if not leaves:
        raise ValueError("The batch holds no arrays.")
    _check_arrays(leaves)
    first_path, first = leaves[0]
    # A scalar has no examples, and the loop below names it.
    examples = first.shape[0] if first.ndim else 0
    for path, leaf in leaves:
        if leaf.ndim == 0 or leaf.shape[0] != examples:
            raise ValueError(
                f"Every array of a batch has the examples along dim 0. `{first_path}` has "
                f"{examples}, `{path or 'the batch'}` has shape {leaf.shape}. Give constants to "
                "the loss by closing over them."
            )
    sizes = strategy.device_mesh.shape
    parts = parts_over(sizes, strategy.batch_axes) * strategy.microbatches
    if examples == 0 or examples % parts:
        over = product_text(sizes, strategy.batch_axes)
        raise ValueError(
            f"A batch of {examples} examples does not split over {over} and "
            f"{_describe_microbatches(strategy)}: use a multiple of {parts}."
        )


def _check_arrays(leaves: list[tuple[str, Any]]) -> None:
    """Refuse leaves of a batch that are no arrays, or that no device can hold, such as text."""
    for path, leaf in leaves:
        what = f"`{path or 'the batch'}` of the batch"
        if not hasattr(leaf, "ndim") or isinstance(leaf, type):
            raise ValueError(
                f"{what} is a {type(leaf).__name__}; a batch is a tree of arrays of numbers. Give "
                "constants to the loss by closing over them."
            )
        # Arrays of numpy may be of text or of objects.
        if not check_arrays.holds(leaf.dtype):
            raise ValueError(
                f"{what} is an array of {leaf.dtype}, which no device holds: a batch is a tree of "
                "arrays of numbers. Leave it out, or turn it into numbers: texts into tokens, "
                "dates into days."
            )


def _describe_microbatches(strategy: Strategy) -> str:
    """The argument that says how many microbatches there are, for errors."""
    if strategy.pipeline is None:
        return f"`accumulate={strategy.accumulate}`"
    return f"the pipeline's `microbatches={strategy.microbatches}`"


def local_rows(size: int, strategy: Strategy) -> np.ndarray:
    """Which rows of a batch of `size` examples the devices of this process hold, in order.

    A source of data gives these rows, and no process reads what others hold.

    >>> import shardlib as sl
    >>> sl.local_rows(4, sl.Strategy(mesh="data=2,model=4", rules=sl.rules.data))
    array([0, 1, 2, 3])
    """
    _check_strategy("local_rows", strategy)
    size = check.whole(
        "local_rows", "size", size, "a number of examples", least=1, most=MOST_EXAMPLES
    )
    parts = parts_over(strategy.device_mesh.shape, strategy.batch_axes)
    if size % (parts * strategy.microbatches):
        raise ValueError(
            f"`local_rows(size={size})`: a batch of {size} examples does not split over the "
            f"{parts} parts that the axes {strategy.batch_axes} make of it and "
            f"{_describe_microbatches(strategy)}: use a multiple of "
            f"{parts * strategy.microbatches}."
        )
    # Any dims behind the first are not split, so that a shape of one dim says it all.
    slices = batch_sharding(strategy).addressable_devices_indices_map((size,)).values()
    # Devices along other axes hold the same rows, which are counted once.
    rows = [np.arange(size)[part] for part in slices if part is not None]
    return np.unique(np.concatenate(rows))


def _check_strategy(function: str, strategy: Any) -> None:
    check.kind(function, "strategy", strategy, Strategy, "a `sl.Strategy`")


def _is_source(source: Any) -> bool:
    """Whether something may be iterated for batches; dicts and text may, but not for these."""
    if isinstance(source, type | dict | str | bytes) or getattr(source, "ndim", 1) == 0:
        return False
    return hasattr(source, "local") or isinstance(source, Iterable)


def batches(source: Any, strategy: Strategy, *, ahead: int = 2) -> "Batches":
    """Put batches of numpy arrays on the mesh, `ahead` of them before they are asked for.

    Returns an iterator that knows its place in the data, for checkpoints. If the iterator of the
    source has `get_state` and `set_state`, as in `grain` and `shardlib.data`, these get and set the
    place. Any other source is read again from its start, and the batches that were already used are
    dropped, so it must give the same batches each time.

    Args:
        source: any iterable of trees of arrays with the examples along dim 0. Where several
            processes train together, each gives the rows of its own devices, see `local_rows`; a
            source with a method `local(rows)`, such as `shardlib.data.Sequences`, is told which.
        strategy: the strategy of the step.
        ahead: how many batches are read and put on the mesh before they are asked for.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> batch = next(sl.batches([{"x": np.ones((16, 3))}], strategy))
    >>> batch["x"].sharding.spec
    P('data',)
    """
    _check_strategy("batches", strategy)
    if isinstance(source, Batches):
        # Batches that are on the mesh already are taken as they are, if they are where the step
        # wants them.
        if batch_sharding(source.strategy) != batch_sharding(strategy):
            raise ValueError(
                f"These batches are sharded as {batch_sharding(source.strategy)}, but the step "
                f"needs {batch_sharding(strategy)}. Make them with the strategy of the step."
            )
        return source
    if not _is_source(source):
        advice = ""
        if isinstance(source, dict):
            advice = " For one batch, a list of it: `[batch]`."
        raise ValueError(
            "`source` is an iterable of batches, each a tree of arrays; got "
            f"{type(source).__name__}: {check.shown(source)}.{advice}"
        )
    ahead = check.whole("batches", "ahead", ahead, "a number of batches", least=1, most=_MOST_AHEAD)
    return Batches(source, strategy, ahead)


class Batches(Iterator[Any]):
    """Batches on the mesh; make them with `batches`."""

    def __init__(self, source: Any, strategy: Strategy, ahead: int) -> None:
        self._source, self.strategy, self._ahead = source, strategy, ahead
        # Batches that were given out, not those that were read ahead: a checkpoint counts these.
        self._taken = 0
        # The place of the source after the last batch that was given out.
        self._place: State | None = None
        self._reader: _Reader | None = None

    def __next__(self) -> Any:
        if self._reader is None:
            self._reader = _Reader(self._open(), self._on_mesh, self._ahead)
        batch, self._place = self._reader.take()
        self._taken += 1
        return batch

    def state(self) -> State:
        """The place in the data, for `restore`.

        It has the number of batches that were given out, and what the source says of its place.
        """
        return {"batches": self._taken, "source": self._place}

    @property
    def identity(self) -> str:
        """Text that is equal in all processes that read the same data.

        It is empty if the source does not hand each process its part of one data set: then there is
        nothing to compare.
        """
        if not hasattr(self._source, "local"):
            return ""
        return json.dumps(self._place)

    def restore(self, state: State) -> None:
        """Go on from a place that `state` gave, here or in an earlier run."""
        _check_place(state)
        # At this place already: what was read ahead stays.
        if state == self.state():
            return
        self.close()
        self._taken, self._place = int(state["batches"]), state["source"]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self) -> Iterator[Any]:
        """An iterator of the source that goes on after the last batch that was given out."""
        source = self._source
        # A source of ours reads only the rows of this process.
        if hasattr(source, "local"):
            iterator = source.local(local_rows(source.batch, self.strategy))
        else:
            iterator = iter(source)
        kind = type(source).__name__
        # Grain's iterators know their place too, by the same two methods.
        knows_its_place = hasattr(iterator, "set_state")
        if self._place is not None and not knows_its_place:
            raise ValueError(
                f"The place in the data was kept by a source that could say where it is; {kind} "
                "has no `set_state`. Give the source that the run was started with."
            )
        if self._place is not None:
            iterator.set_state(self._place)
        elif self._taken and knows_its_place:
            raise ValueError(
                f"The place in the data, {self._taken} batches from its start, was kept for a "
                f"source that could not say where it is. {kind} can, so it is another source. Give "
                "the one that the run was started with."
            )
        elif self._taken:
            self._drop_taken(iterator)
        return iterator

    def _drop_taken(self, iterator: Iterator[Any]) -> None:
        """Read as many batches from the start as were given out, and forget them."""
        # An iterator that is its own source cannot be read again.
        if iterator is self._source and not _is_fresh(self._source):
            raise ValueError(
                f"To go on after {self._taken} batches a source is read again from its start, and "
                f"this {type(self._source).__name__} may have been read from before. Give one that "
                "starts anew each time it is iterated, a list or a class with `__iter__`, or a new "
                "generator."
            )
        for number in range(self._taken):
            if next(iterator, _ENDED) is _ENDED:
                raise ValueError(
                    f"To go on after {self._taken} batches, the source was read again from its "
                    f"start, and it ended after {number}. Give one that starts anew each time "
                    "it is iterated, and does not end before."
                )

    def _describe_uneven(self, path: str, leaf: Any, error: ValueError) -> str:
        """The error for an array of a batch that cannot be put on the mesh."""
        sizes, axes = self.strategy.device_mesh.shape, self.strategy.batch_axes
        told = f"`{path or 'the batch'}` of shape {leaf.shape} does not split over "
        told += product_text(sizes, axes)
        # Each process gives the examples of its own devices.
        parts = max(1, parts_over(sizes, axes) // jax.process_count())
        if leaf.ndim and leaf.shape[0] % parts == 0:
            return f"{told}: {error}"
        if not leaf.ndim:
            return f"{told}: every array of a batch has the examples along dim 0."
        return (
            f"{told}: give a multiple of {parts} examples. A last batch that is smaller may be "
            "filled up with examples that a mask leaves out of `sl.weighted_mean(total, weight)`."
        )

    def _on_mesh(self, batch: Any) -> Any:
        """The batch as arrays on the mesh, of which this process gives its rows."""
        sharding = batch_sharding(self.strategy)
        _check_arrays(named_leaves(batch))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
            raise ValueError("The batch has no values, but shapes alone: give it arrays.")

        def put(path: str, leaf: Any) -> jax.Array:
            # Such an array is on the mesh already.
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return leaf
            # Keys are numbers to a host.
            numbers = jax.random.key_data(leaf) if is_key(leaf) else leaf
            try:
                # A copy, since a device may keep the memory it is given, and a source may use it
                # again for its next batch.
                copied = np.array(numbers, copy=True)
                on_mesh = jax.make_array_from_process_local_data(sharding, copied)
            except ValueError as error:
                raise ValueError(self._describe_uneven(path, leaf, error)) from error
            if is_key(leaf):
                return jax.random.wrap_key_data(on_mesh, impl=jax.random.key_impl(leaf))
            return on_mesh

        return map_named(put, batch)


def _check_place(state: Any) -> None:
    if not isinstance(state, dict) or state.keys() != {"batches", "source"}:
        raise check.refusal(
            "restore", "state", state, "a place in the data, as `Batches.state()` gives it"
        )
    takes = "a place in the data, after a number of batches"
    check.whole("restore", "state", state["batches"], takes, least=0)


def _is_fresh(source: Any) -> bool:
    """Whether an iterator is known to have given nothing yet; only generators can tell."""
    return inspect.isgenerator(source) and inspect.getgeneratorstate(source) == inspect.GEN_CREATED


def _place_of(iterator: Any) -> Any:
    """The place of an iterator, as a checkpoint will give it back; None if it has none.

    It is a copy, which does not move on with the source.
    """
    if not hasattr(iterator, "get_state"):
        return None
    place = iterator.get_state()
    copied, reason = None, ""
    try:
        copied = json.loads(json.dumps(place))
    except TypeError as error:
        reason = f": {error}"
    # JSON turns tuples into lists and keys into text: what does not come back would be lost.
    if copied != place:
        raise ValueError(
            "The place in the data goes into checkpoints as JSON, and what `get_state` of "
            f"{type(iterator).__name__} gives does not come back from it as it was{reason}. Let it "
            "give dicts with text for keys, lists, numbers and text."
        )
    return copied


class _Reader:
    """A thread that reads batches ahead, each with the place of the source after it.

    Args:
        iterator: the iterator of the source.
        prepare: what is done to a batch before it is queued: it is put on the mesh.
        ahead: how many batches may wait.
    """

    def __init__(self, iterator: Iterator[Any], prepare: Any, ahead: int) -> None:
        # A full queue stops the thread: no more than `ahead` batches take memory on the devices.
        self._ready: queue.Queue[tuple[Any, Any]] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._failed: BaseException | None = None
        # A daemon, since a source may block for ever and must not keep the process from ending.
        self._thread = threading.Thread(target=self._read, args=(iterator, prepare), daemon=True)
        self._thread.start()

    def take(self) -> tuple[Any, Any]:
        """The next batch and the place after it, once it is there.

        The end of the source and its errors are raised here, again at each later call.
        """
        if self._failed is not None:
            raise self._failed
        batch, place = self._ready.get()
        if batch is _ENDED:
            self._failed = place
            raise place
        return batch, place

    def close(self) -> None:
        """Stop the thread, and drop what it has read."""
        self._closed.set()
        # A thread that waits for room in the queue gets some, and sees that it is closed.
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        # It may still be waiting for its source, and ends when that gives something.
        self._thread.join(timeout=1)

    def _read(self, iterator: Iterator[Any], prepare: Any) -> None:
        try:
            for batch in iterator:
                if not self._give((prepare(batch), _place_of(iterator))):
                    return
            self._give((_ENDED, StopIteration()))
        except BaseException as error:
            # An error of the user's source is raised where the batch is asked for.
            self._give((_ENDED, error))

    def _give(self, item: tuple[Any, Any]) -> bool:
        """Queue an item once there is room; False if the reader was closed meanwhile."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False
