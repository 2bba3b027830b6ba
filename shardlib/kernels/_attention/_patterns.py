"""Well-known patterns of blocks for block-sparse attention.

Each function makes a `BlockMask` for queries and keys of one length. Patterns say nothing of
order: together with `attention(causal=True)`, a query sees of them what is not behind it.
"""

import math
from typing import Any

import numpy as np

from shardlib.checks import _arguments as check
from shardlib.kernels._attention._mask import BlockMask

# A pattern has a byte for each pair of blocks: 256 MiB of them.
_MOST_BLOCKS = 2**14


def fixed_blocks(length: int, size: int, *, local: int = 4, summaries: int = 1) -> BlockMask:
    """Windows of blocks, and the last blocks of each window, which all queries see.

    It is the fixed pattern of the Sparse Transformer (Child et al., 2019), as DeepSpeed has it.

    Args:
        length: how many queries and keys there are.
        size: how many positions a block has.
        local: how many blocks a window has, of which each sees all others.
        summaries: how many blocks at the end of each window are seen by all.

    >>> fixed_blocks(4, 1, local=2).pattern.astype(int)
    array([[1, 1, 0, 1],
           [1, 1, 0, 1],
           [0, 1, 1, 1],
           [0, 1, 1, 1]])
    """
    number = _numbers("fixed_blocks", length, size)
    check.whole("fixed_blocks", "local", local, least=1)
    check.whole("fixed_blocks", "summaries", summaries, least=0, most=local)
    window = number // local
    same_window = window[:, None] == window[None, :]
    summary = number % local >= local - summaries
    return BlockMask(same_window | summary[None, :], size)


def longformer_blocks(
    length: int, size: int, *, window: int = 3, everywhere: tuple[int, ...] = (0,)
) -> BlockMask:
    """A window around each block, and blocks that see all and are seen by all.

    It is the pattern of Longformer (Beltagy et al., 2020), in blocks.

    Args:
        length: how many queries and keys there are.
        size: how many positions a block has.
        window: how many blocks a block sees, with itself in the middle: an odd number.
        everywhere: the numbers of the blocks that see all and are seen by all.

    >>> longformer_blocks(5, 1, everywhere=()).pattern.astype(int)
    array([[1, 1, 0, 0, 0],
           [1, 1, 1, 0, 0],
           [0, 1, 1, 1, 0],
           [0, 0, 1, 1, 1],
           [0, 0, 0, 1, 1]])
    """
    number = _numbers("longformer_blocks", length, size)
    return BlockMask(_around("longformer_blocks", number, window, everywhere), size)


def bigbird_blocks(
    length: int,
    size: int,
    *,
    window: int = 3,
    everywhere: tuple[int, ...] = (0,),
    random: int = 1,
    seed: int = 0,
) -> BlockMask:
    """A window around each block, blocks that see all and are seen by all, and some at random.

    It is the pattern of BigBird (Zaheer et al., 2020), in blocks.

    Args:
        length: how many queries and keys there are.
        size: how many positions a block has.
        window: how many blocks a block sees, with itself in the middle: an odd number.
        everywhere: the numbers of the blocks that see all and are seen by all.
        random: how many further blocks each block of queries sees; all, where fewer are left.
        seed: of NumPy's generator that draws them.

    >>> bigbird_blocks(80, 10, random=2).pattern.sum(1)
    array([8, 5, 6, 6, 6, 6, 6, 5])
    """
    number = _numbers("bigbird_blocks", length, size)
    pattern = _around("bigbird_blocks", number, window, everywhere)
    check.whole("bigbird_blocks", "random", random, least=0)
    generator = np.random.default_rng(check.whole("bigbird_blocks", "seed", seed, least=0))
    for row in pattern:
        unseen = np.flatnonzero(~row)
        row[generator.permutation(unseen)[:random]] = True
    return BlockMask(pattern, size)


def _numbers(function: str, length: int, size: int) -> np.ndarray:
    """The numbers of the blocks of a length."""
    check.whole(function, "length", length, least=1)
    check.whole(function, "size", size, least=1)
    number = math.ceil(length / size)
    if number > _MOST_BLOCKS:
        raise ValueError(
            f"`{function}(length={length}, size={size})`: that is {number:,} blocks, and a pattern "
            f"says of each pair whether they see each other: at most {_MOST_BLOCKS:,}. Take larger "
            "blocks; or, for a window alone, `attention(window=...)`, which needs no pattern."
        )
    return np.arange(number)


def _around(function: str, number: np.ndarray, window: int, everywhere: Any) -> np.ndarray:
    """Which blocks each sees of a window around itself, and with blocks that all see."""
    check.whole(function, "window", window, "an odd number of blocks", least=1)
    if window % 2 == 0:
        raise check.refusal(function, "window", window, "an odd number of blocks")
    pattern = abs(number[:, None] - number[None, :]) <= window // 2
    takes = "the numbers of blocks, in a tuple"
    check.kind(function, "everywhere", everywhere, tuple, takes)
    for block in everywhere:
        check.whole(function, "everywhere", block, takes, least=0, most=len(number) - 1)
        pattern[block, :] = pattern[:, block] = True
    return pattern
