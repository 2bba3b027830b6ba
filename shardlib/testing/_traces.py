"""How often a function is traced: a retrace that nobody asked for shows up as a count of two."""

import functools
from collections.abc import Callable
from typing import Any

from shardlib.checks import _arguments as check


class CountedTraces:
    """A function that counts its calls; under `jax.jit` or in a step, these are traces.

    JAX calls the Python function only to trace it and then runs the compiled program, so `count`
    grows by one for each new combination of shapes, dtypes and static arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.count = 0
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and count the call."""
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
