"""Arrays in files, checked by block: each block has a digest, which is compared when the block is
first read.

The digests are CRC-32: at 2 GB/s on one core faster than a disk, where BLAKE2b and SHA-256 make 1,
and all that damage by chance asks for: errors within 32 bits of each other are always seen, any
others all but once in 2**32 times. A block is what the kernel reads ahead anyway, so that checking
costs a reader of single examples no more of the disk.
"""

import contextlib
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 32 << 10
SUSPECT = "suspect"  # a file of this name in a store's folder asks for a check of every block
_DIGEST = np.dtype("<u4")


class Digests:
    """The digests of a file's blocks, made while it is written."""

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._crc, self._size = 0, 0  # of the block that is not full yet

    def update(self, data: Any) -> None:
        """Take what is written next."""
        rest = memoryview(data).cast("B")
        # What is written need not end where a block does.
        while len(rest):
            part = rest[: BLOCK_BYTES - self._size]
            self._crc, self._size = zlib.crc32(part, self._crc), self._size + len(part)
            rest = rest[len(part) :]
            if self._size == BLOCK_BYTES:
                self._finish_block()

    def finish(self) -> np.ndarray:
        """A digest for each block; the last block may be shorter than the others."""
        if self._size:
            self._finish_block()
        return np.array(self._finished, _DIGEST)

    def _finish_block(self) -> None:
        self._finished.append(self._crc)
        self._crc, self._size = 0, 0


class CheckedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A file as an array of one dim, memory-mapped, in which no block is read before it is checked
    against its digest.

    Indexing checks the blocks that it reads. What takes the whole array, such as `np.asarray` and
    arithmetic, checks all of it. A block is checked once in a process; threads may read at the same
    time. Pickled, it is the file's name and its digests: another process opens the file and checks
    for itself.
    """

    def __init__(self, path: Path, dtype: Any, digests: np.ndarray) -> None:
        self.path = Path(path)
        self.dtype = np.dtype(dtype)
        self._digests = np.asarray(digests, _DIGEST)
        with self.path.open("rb") as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            blocks = -(-self.nbytes // BLOCK_BYTES)
            if self.nbytes % self.dtype.itemsize or blocks != len(self._digests):
                raise ValueError(
                    f"`{self.path}` is damaged: it has {self.nbytes} bytes, and digests of "
                    f"{len(self._digests)} blocks of {BLOCK_BYTES}. {self._way_out()}"
                )
            # A file without bytes cannot be mapped.
            self._all: np.ndarray = np.empty(0, self.dtype)
            if self.nbytes:
                self._all = np.memmap(file, self.dtype, mode="r")
            self._file = os.dup(file.fileno())
        # The file stays open as long as the array, even if its folder is renamed.
        weakref.finalize(self, os.close, self._file)
        # By this process; the digests of blocks that are never read are never compared.
        self._checked = np.zeros(len(self._digests), bool)

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckedArray, (self.path, self.dtype, self._digests)

    def __repr__(self) -> str:
        return f"CheckedArray({self.size} of {self.dtype} in {self.path})"

    @property
    def size(self) -> int:
        """How many elements there are."""
        return len(self._all)

    @property
    def shape(self) -> tuple[int]:
        """The size, as arrays have it."""
        return (self.size,)

    @property
    def ndim(self) -> int:
        """One."""
        return 1

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            self._check_slice(index)
            return np.asarray(self._all[index])
        if isinstance(index, list | np.ndarray | int | np.integer):
            chosen = np.asarray(index)
            if chosen.dtype.kind in "iu":
                self._check_numbers(chosen, index)
                return self._all[chosen]
        # Masks, ellipses, new axes: rare, and may read anything.
        self.check_all()
        return np.asarray(self._all)[index]

    def _check_slice(self, index: slice) -> None:
        """Check the blocks of a slice, which are all from its first element to its last."""
        places = range(self.size)[index]
        if len(places):
            first, last = sorted((places[0], places[-1]))
            self.check(np.array([first]), np.array([last + 1]))

    def _check_numbers(self, chosen: np.ndarray, index: Any) -> None:
        """Check the blocks of elements by their numbers, of which negative ones count from the end.

        `index` is what the caller wrote, for the error.
        """
        # Numbers of 8 bits, as `chosen` may have, cannot count blocks.
        starts = chosen.astype(np.int64).ravel()
        starts = np.where(starts < 0, starts + self.size, starts)
        if ((starts < 0) | (starts >= self.size)).any():
            raise IndexError(f"{self!r} has no element of each of these numbers: {index}")
        self.check(starts, starts + 1)

    def __iter__(self) -> Any:
        return iter(np.asarray(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check_all()
        whole = np.asarray(self._all)
        if copy is False and dtype is not None and np.dtype(dtype) != self.dtype:
            raise ValueError(
                f"A `CheckedArray` of {self.dtype} cannot be one of {dtype} without a copy."
            )
        if copy:
            return np.array(whole, dtype)
        return np.asarray(whole, dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = []
        for operand in inputs:
            if isinstance(operand, CheckedArray):
                operand = np.asarray(operand)
            arrays.append(operand)
        return getattr(ufunc, method)(*arrays, **options)

    def windows(self, starts: np.ndarray, size: int) -> np.ndarray:
        """The elements from each start on, as a row of `size`; beyond the end, the last element."""
        self.check(starts, np.minimum(starts + size, self.size))
        return windows(self._all, starts, size)

    def check_all(self) -> None:
        """Check every block that was not."""
        for block in np.flatnonzero(~self._checked):
            self._check_block(int(block))

    def check(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Check the blocks of the elements from each start up to its stop."""
        # The blocks of each element range, `counts` of them from `first` on, in one array. Two
        # threads may check a block at the same time; both find the same.
        first = starts * self.dtype.itemsize // BLOCK_BYTES
        counts = (stops * self.dtype.itemsize - 1) // BLOCK_BYTES - first + 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = np.repeat(first, counts) + within
        for block in np.unique(blocks[~self._checked[blocks]]):
            self._check_block(int(block))

    def find_damage(self) -> str:
        """The first block that is not what was written, for a message; empty if all are right."""
        for block in np.flatnonzero(~self._checked):
            if not self._is_right(int(block)):
                return self._called(int(block))
        return ""

    def _check_block(self, block: int) -> None:
        if not self._is_right(block):
            with contextlib.suppress(OSError):
                (self.path.parent / SUSPECT).open("x").close()
            raise ValueError(
                f"`{self.path}` is damaged: {self._called(block)} is not what was written. "
                f"{self._way_out()}"
            )

    def _is_right(self, block: int) -> bool:
        start = block * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.nbytes - start)
        # Read, not mapped: a disk that fails is an error here, and would kill the process there.
        try:
            data = os.pread(self._file, size, start)
        except OSError as error:
            raise ValueError(
                f"`{self.path}`: {self._called(block)} cannot be read: {error.strerror}."
            ) from error
        self._checked[block] = len(data) == size and zlib.crc32(data) == self._digests[block]
        return bool(self._checked[block])

    def _called(self, block: int) -> str:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self.nbytes)
        return (
            f"block {block} of {len(self._digests)} of `{self.path.name}` (bytes {start} to {stop})"
        )

    def _way_out(self) -> str:
        folder = self.path.parent
        again = f"Delete `{folder}` and run again"
        # Where the suspicion could be noted, the store is checked and made again by itself.
        if os.path.lexists(folder / SUSPECT):
            again = "Run again"
        return (
            f"{again}: `prepare` makes the tokens again from the texts. If the texts are gone, "
            f"take the folder `{folder}` from a copy."
        )


def windows(ids: np.ndarray | CheckedArray, starts: np.ndarray, size: int) -> np.ndarray:
    """The elements from each start on, as a row of `size`; beyond the end, the last element.

    >>> windows(np.array([5, 6, 7]), np.array([0, 2]), 2)
    array([[5, 6],
           [7, 7]])
    """
    if isinstance(ids, CheckedArray):
        return ids.windows(starts, size)
    if len(ids) >= size and (starts + size <= len(ids)).all():
        return np.lib.stride_tricks.sliding_window_view(ids, size)[starts]
    return ids[np.minimum(starts[:, None] + np.arange(size), len(ids) - 1)]
