"""How often a function is traced: what a retrace that nobody asked for shows up in."""

import functools
from collections.abc import Callable
from typing import Any

from shardlib.checks import _arguments as check


class CountedTraces:
    """A function that counts its calls; under `jax.jit` or in a step, these are traces."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.count = function, 0
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


def count_traces(function: Callable[..., Any]) -> CountedTraces:
    """Wrap a function, a loss for example, to count how often it is traced.

    >>> import jax
    >>> double = count_traces(lambda x: 2 * x)
    >>> compiled = jax.jit(double)
    >>> compiled(1.0), compiled(2.0), double.count
    (Array(2., dtype=float32, weak_type=True), Array(4., dtype=float32, weak_type=True), 1)
    """
    return CountedTraces(check.function("count_traces", "function", function))
