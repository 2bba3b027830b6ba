"""How long a call takes on a device, for benchmarks of single functions."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

TURNS = 5


def seconds(function: Callable[..., Any], *arrays: Any, calls: int) -> float:
    """Seconds of a call, of several in a row: the median of some turns."""
    run = jax.jit(function)
    jax.block_until_ready(run(*arrays))
    turns = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(calls - 1):
            run(*arrays)
        jax.block_until_ready(run(*arrays))
        turns.append((time.perf_counter() - begin) / calls)
    return statistics.median(turns)
