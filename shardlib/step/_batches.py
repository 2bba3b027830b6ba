"""Batches on the mesh, from anybody's iterator: each process gives the examples that its own
devices hold.
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
from shardlib.step._strategy import Strategy

State = dict[str, Any]

MOST_EXAMPLES = 2**26
"""Of a batch: rows are named one by one."""

_MOST_AHEAD = 2**20


def batch_sharding(strategy: Strategy) -> NamedSharding:
    """How a batch lies on the mesh: its examples, along dim 0, over the axes of the batch."""
    return NamedSharding(strategy.device_mesh, PartitionSpec(strategy.batch_axes or None))


def check_batch(batch: Any, strategy: Strategy) -> None:
    """Refuse what is no batch, or does not split over the mesh."""
    leaves = named_leaves(batch)
    if not leaves:
        raise ValueError("The batch holds no arrays.")
    _check_arrays(leaves)
    axes = {axis: strategy.device_mesh.shape[axis] for axis in strategy.batch_axes}
    parts = strategy.microbatches
    for size in axes.values():
        parts *= size
    rows = leaves[0][1].shape[0] if leaves[0][1].ndim else 0
    for path, leaf in leaves:
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            here = path or "the batch"
            raise ValueError(
                f"Every array of a batch has the examples along dim 0. `{leaves[0][0]}` has "
                f"{rows}, `{here}` has shape {leaf.shape}. Give constants to the loss by closing "
                "over them."
            )
    if rows == 0 or rows % parts:
        along = " x ".join(f"`{axis}={size}`" for axis, size in axes.items()) or "no axis"
        raise ValueError(
            f"A batch of {rows} examples does not split over {along} and "
            f"{_microbatches(strategy)}: use a multiple of {parts}."
        )


def _check_arrays(leaves: list[tuple[str, Any]]) -> None:
    """Refuse leaves of a batch that are no arrays, or arrays of what JAX has no arrays of, such as
    text.
    """
    for path, leaf in leaves:
        what = f"`{path or 'the batch'}` of the batch"
        if not hasattr(leaf, "ndim") or isinstance(leaf, type):
            raise ValueError(
                f"{what} is a {type(leaf).__name__}; a batch is a tree of arrays of numbers. Give "
                "constants to the loss by closing over them."
            )
        if not check_arrays.holds(leaf.dtype):
            raise ValueError(
                f"{what} is an array of {leaf.dtype}, which no device holds: a batch is a tree of "
                "arrays of numbers. Leave it out, or turn it into numbers: texts into tokens, "
                "dates into days."
            )


def _microbatches(strategy: Strategy) -> str:
    if strategy.pipeline is None:
        return f"`accumulate={strategy.accumulate}`"
    return f"the pipeline's `microbatches={strategy.microbatches}`"


def local_rows(size: int, strategy: Strategy) -> np.ndarray:
    """Which rows of a batch of so many examples the devices of this process hold, in order.

    >>> import shardlib as sl
    >>> sl.local_rows(4, sl.Strategy(mesh="data=2,model=4", rules=sl.rules.data))
    array([0, 1, 2, 3])
    """
    _check_strategy("local_rows", strategy)
    size = check.whole(
        "local_rows", "size", size, "a number of examples", least=1, most=MOST_EXAMPLES
    )
    parts = int(
        np.prod([strategy.device_mesh.shape[axis] for axis in strategy.batch_axes], dtype=int)
    )
    if size % (parts * strategy.microbatches):
        raise ValueError(
            f"`local_rows(size={size})`: a batch of {size} examples does not split over the "
            f"{parts} parts that the axes {strategy.batch_axes} make of it and "
            f"{_microbatches(strategy)}: use a multiple of {parts * strategy.microbatches}."
        )
    held = batch_sharding(strategy).addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[rows] for rows in held if rows is not None]))


def _check_strategy(function: str, strategy: Any) -> None:
    check.kind(function, "strategy", strategy, Strategy, "a `sl.Strategy`")


def _is_no_source(source: Any) -> bool:
    return isinstance(source, type | dict | str | bytes) or getattr(source, "ndim", 1) == 0


def batches(source: Any, strategy: Strategy, *, ahead: int = 2) -> "Batches":
    """Put batches of numpy arrays on the mesh, `ahead` of them before they are asked for.

    `source` is any iterable of trees of arrays with the examples along dim 0. Where several
    processes train together, each gives the rows of its own devices, see `local_rows`; a source
    with a method `local(rows)`, such as `shardlib.data.Sequences`, is told which. What comes out
    remembers its place in the data: a source whose iterator has `get_state` and `set_state`, as
    those of `grain` and of `shardlib.data` have, is asked for it; any other is read again from its
    start and as many batches are dropped, so it should be the same each time.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> batch = next(sl.batches([{"x": np.ones((16, 3))}], strategy))
    >>> batch["x"].sharding.spec
    P('data',)
    """
    _check_strategy("batches", strategy)
    if isinstance(source, Batches):
        if batch_sharding(source.strategy) != batch_sharding(strategy):
            raise ValueError(
                f"These batches are put on the mesh as {batch_sharding(source.strategy)}, and "
                f"wanted as {batch_sharding(strategy)}. Make them with the strategy of the step."
            )
        return source
    if not (hasattr(source, "local") or isinstance(source, Iterable)) or _is_no_source(source):
        raise ValueError(
            "`source` is an iterable of batches, each a tree of arrays; got "
            f"{type(source).__name__}: {check.shown(source)}."
            + (" For one batch, a list of it: `[batch]`." if isinstance(source, dict) else "")
        )
    ahead = check.whole("batches", "ahead", ahead, "a number of batches", least=1, most=_MOST_AHEAD)
    return Batches(source, strategy, ahead)


class Batches(Iterator[Any]):
    """Batches on the mesh; make them with `batches`."""

    def __init__(self, source: Any, strategy: Strategy, ahead: int) -> None:
        self._source, self.strategy, self._ahead = source, strategy, ahead
        self._taken = 0
        self._place: State | None = None  # of the source, after the last batch given out
        self._reader: _Reader | None = None

    def __next__(self) -> Any:
        if self._reader is None:
            self._reader = _Reader(self._open(), self._on_mesh, self._ahead)
        batch, self._place = self._reader.take()
        self._taken += 1
        return batch

    def state(self) -> State:
        """The place in the data, for `restore`: how many batches were given out, and what the
        source says of it.
        """
        return {"batches": self._taken, "source": self._place}

    @property
    def identity(self) -> str:
        """Which data these are, of a source that gives each process its part of the same; to
        compare between processes.
        """
        return json.dumps(self._place) if hasattr(self._source, "local") else ""

    def restore(self, state: State) -> None:
        """Go on from a place that `state` gave, here or in an earlier run."""
        _check_place(state)
        if state == self.state():
            return  # here already, and what was read ahead stays
        self.close()
        self._taken, self._place = int(state["batches"]), state["source"]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self) -> Iterator[Any]:
        source = self._source
        iterator = (
            source.local(local_rows(source.batch, self.strategy))
            if hasattr(source, "local")
            else iter(source)
        )
        kind, knows = type(source).__name__, hasattr(iterator, "set_state")
        if self._place is not None and not knows:
            raise ValueError(
                f"The place in the data was kept by a source that could say where it is; {kind} "
                "has no `set_state`. Give the source that the run was started with."
            )
        if self._place is not None:
            iterator.set_state(self._place)
        elif self._taken and knows:
            raise ValueError(
                f"The place in the data, {self._taken} batches from its start, was kept for a "
                f"source that could not say where it is; {kind} can, and is another. Give the "
                "source that the run was started with."
            )
        elif self._taken:
            if iterator is source and not _is_fresh(source):
                raise ValueError(
                    f"To go on after {self._taken} batches a source is read again from its start, "
                    f"and this {kind} may have been read from before. Give one that starts anew "
                    "each time it is iterated, a list or a class with `__iter__`, or a new "
                    "generator."
                )
            for number in range(self._taken):
                if next(iterator, _ENDED) is _ENDED:
                    raise ValueError(
                        f"To go on after {self._taken} batches, the source was read again from its "
                        f"start, and it ended after {number}. Give one that starts anew each time "
                        "it is iterated, and does not end before."
                    )
        return iterator

    def _on_mesh(self, batch: Any) -> Any:
        sharding = batch_sharding(self.strategy)
        _check_arrays(named_leaves(batch))

        def put(path: str, leaf: Any) -> jax.Array:
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return leaf  # is on the mesh already
            try:
                # A copy, since a device may keep the memory it is given, and a source may use it
                # again for its next batch.
                return jax.make_array_from_process_local_data(sharding, np.array(leaf, copy=True))
            except ValueError as error:
                raise ValueError(
                    f"`{path or 'the batch'}` of shape {leaf.shape} does not split over the axes "
                    f"{self.strategy.batch_axes}: {error}"
                ) from error

        return map_named(put, batch)


def _check_place(state: Any) -> None:
    if not isinstance(state, dict) or state.keys() != {"batches", "source"}:
        raise check.refusal(
            "restore", "state", state, "a place in the data, as `Batches.state()` gives it"
        )
    check.whole(
        "restore",
        "state",
        state["batches"],
        "a place in the data, after a number of batches",
        least=0,
    )


_ENDED = object()


def _is_fresh(source: Any) -> bool:
    """Whether an iterator has given nothing yet, which of generators alone can be told."""
    return inspect.isgenerator(source) and inspect.getgeneratorstate(source) == inspect.GEN_CREATED


def _place_of(iterator: Any) -> Any:
    """Where an iterator is, as a checkpoint will give it back: a copy, which does not move on with
    the source.
    """
    if not hasattr(iterator, "get_state"):
        return None
    place = iterator.get_state()
    try:
        copied = json.loads(json.dumps(place))
    except TypeError as error:
        copied, why = None, f": {error}"
    else:
        why = ""
    if copied != place:
        raise ValueError(
            "The place in the data goes into checkpoints as JSON, and what `get_state` of "
            f"{type(iterator).__name__} gives does not come back from it as it was{why}. Let it "
            "give dicts with text for keys, lists, numbers and text."
        )
    return copied


class _Reader:
    """A thread that draws batches ahead, each with the place of the source after it."""

    def __init__(self, iterator: Iterator[Any], prepare: Any, ahead: int) -> None:
        self._ready: queue.Queue[tuple[Any, Any]] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(iterator, prepare), daemon=True)
        self._thread.start()

    def take(self) -> tuple[Any, Any]:
        if self._failed is not None:
            raise self._failed
        batch, of = self._ready.get()
        if batch is _ENDED:
            self._failed = of
            raise of
        return batch, of

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        # It may be waiting for its source, and ends when that gives something.
        self._thread.join(timeout=1)

    def _read(self, iterator: Iterator[Any], prepare: Any) -> None:
        try:
            for batch in iterator:
                if not self._give((prepare(batch), _place_of(iterator))):
                    return
            self._give((_ENDED, StopIteration()))
        except BaseException as error:  # of the user's source: raised where the batch is asked for
            self._give((_ENDED, error))

    def _give(self, item: tuple[Any, Any]) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False
