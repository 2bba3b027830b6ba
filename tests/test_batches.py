"""Batches on the mesh: whose rows, which place in the data, what goes wrong where."""

import time

import jax
import numpy as np
import pytest

import shardlib as sl

STRATEGY = sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data)


def numbered(count, rows=8):
    return [{"x": np.full((rows, 2), number, np.float32)} for number in range(count)]


def first(batch):
    return int(batch["x"][0, 0])


class Stateful:
    """A source whose iterator says where it is, as grain's do."""

    def __init__(self):
        self.opened = 0

    def __iter__(self):
        self.opened += 1
        return Place()


class Place:
    def __init__(self):
        self.place = {"at": 0}  # which goes on with it

    @property
    def at(self):
        return self.place["at"]

    @at.setter
    def at(self, at):
        self.place["at"] = at

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return numbered(1)[0] | {"x": np.full((8, 2), self.at - 1, np.float32)}

    def get_state(self):
        return self.place

    def set_state(self, state):
        self.at = state["at"]


def test_batches_are_split_over_the_data_axes():
    batch = next(sl.batches(numbered(1), STRATEGY))
    assert batch["x"].sharding.spec == jax.P("data") and batch["x"].shape == (8, 2)
    assert {shard.data.shape for shard in batch["x"].addressable_shards} == {(2, 2)}


def test_batches_state_ignores_batches_that_were_only_read_ahead():
    source = Stateful()
    batches = sl.batches(source, STRATEGY, ahead=4)
    assert [first(next(batches)) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.1)  # for the thread to read ahead; nothing below depends on how far
    place = batches.state()
    assert place == {"batches": 3, "source": {"at": 3}}
    assert first(next(batches)) == 3
    again = sl.batches(Stateful(), STRATEGY)
    again.restore(place)
    assert again.state() == place
    assert [first(next(again)) for _ in range(3)] == [3, 4, 5]
    batches.close(), again.close()


def test_batches_restore_replays_a_source_without_state():
    batches = sl.batches(numbered(6), STRATEGY)
    next(batches), next(batches)
    again = sl.batches(numbered(6), STRATEGY)
    again.restore(batches.state())
    assert [first(batch) for batch in again] == [2, 3, 4, 5]
    with pytest.raises(StopIteration):
        next(again)
    with pytest.raises(StopIteration):  # and again
        next(again)


def test_batches_restore_refuses_a_source_that_ends_too_early():
    batches = sl.batches(numbered(2), STRATEGY)
    batches.restore({"batches": 5, "source": None})
    with pytest.raises(ValueError, match=r"To go on after 5 batches.*ended after 2"):
        next(batches)


def test_batches_restore_refuses_state_for_a_source_without_set_state():
    batches = sl.batches(numbered(2), STRATEGY)
    batches.restore({"batches": 1, "source": {"at": 1}})
    with pytest.raises(ValueError, match="list has no `set_state`"):
        next(batches)


def test_batches_restore_refuses_a_bare_count_for_a_stateful_source():
    batches = sl.batches(Stateful(), STRATEGY)
    batches.restore({"batches": 3, "source": None})
    with pytest.raises(
        ValueError, match="3 batches from its start, was kept for a source that could not say"
    ):
        next(batches)


def test_batches_restore_refuses_an_iterator_that_may_be_partly_read():
    used = (batch for batch in numbered(6))
    next(used)
    for source in (used, iter(numbered(6))):
        batches = sl.batches(source, STRATEGY)
        batches.restore({"batches": 2, "source": None})
        with pytest.raises(ValueError, match="may have been read from before"):
            next(batches)
    fresh = sl.batches((batch for batch in numbered(6)), STRATEGY)
    fresh.restore({"batches": 2, "source": None})
    assert first(next(fresh)) == 2
    fresh.close()


def test_batches_refuse_source_state_that_json_would_change():
    class Odd(Stateful):
        def __iter__(self):
            place = Place()
            place.get_state = lambda: {0: place.at}
            return place

    with pytest.raises(ValueError, match="does not come back from it as it was"):
        next(sl.batches(Odd(), STRATEGY))


def test_batches_keep_their_values_if_the_source_reuses_memory():
    memory = np.zeros(8 * 2 * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # as a device may take it over without a copy
    buffer = memory[start : start + 64].view(np.float32).reshape(8, 2)

    def reusing():
        for number in range(20):
            buffer[:] = number
            yield {"x": buffer}

    given = list(sl.batches(reusing(), STRATEGY, ahead=8))
    assert [first(batch) for batch in given] == list(range(20))


def test_batches_raise_a_source_error_at_the_batch_that_failed():
    def broken():
        yield from numbered(2)
        raise OSError("the disk is gone")

    batches = sl.batches(broken(), STRATEGY)
    assert [first(next(batches)) for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"x": np.ones((8, 2))}, r"For one batch, a list of it: `\[batch\]`"),
        (7, "`source` is an iterable of batches, each a tree of arrays; got int"),
        ("data.jsonl", "`source` is an iterable of batches"),
    ],
)
def test_batches_refuse_a_source_that_is_no_iterable_of_batches(source, message):
    with pytest.raises(ValueError, match=message):
        sl.batches(source, STRATEGY)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": np.ones((6, 2))},
            r"`x` of shape \(6, 2\) does not split over `?data`?.*give a multiple of",
        ),
        ({"x": np.ones((8, 2)), "y": 3}, "`y` of the batch is a int"),
    ],
)
def test_batches_refuse_unusable_arrays_by_name(batch, message):
    with pytest.raises(ValueError, match=message):
        next(sl.batches([batch], STRATEGY))


def test_local_rows_of_one_process_are_all_and_wrong_sizes_are_refused():
    assert sl.local_rows(8, STRATEGY).tolist() == list(range(8))
    accumulating = sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data, accumulate=3)
    with pytest.raises(
        ValueError, match=r"batch of 8 examples.*4 parts.*`accumulate=3`: use a multiple of 12"
    ):
        sl.local_rows(8, accumulating)
