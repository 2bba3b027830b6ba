"""Lowering a step that is planned, and errors that say what a plan cannot do.

A plan has shapes and no values, and devices that are not there. Steps that run well may fail here
for one of three reasons, each of which is told with the user's line:

    the step reads values while it is traced     there are only shapes
    the step calls back into Python              no backend of an absent GPU can lower that
    the step closes over large arrays            they would be constants of the program
"""

import contextlib
import re
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from shardlib._text import human_bytes
from shardlib.compiled._source_lines import is_of_user
from shardlib.tracing._jaxpr import every_equation, line_of

_LARGEST_CONSTANT = 2**20
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class Lowered(NamedTuple):
    """A step that was lowered: ready to be compiled, and as it was traced."""

    lowered: Any
    jaxpr: Any
    paths: tuple[str, ...]  # of each leaf of its arguments
    seconds: float


def lower(step: Any, state: Any, batch: Any) -> Lowered:
    """Trace and lower a step.

    Errors that come from planning, and not from the step as such, are raised as a `ValueError`
    which says what to change and where.
    """
    started = time.perf_counter()
    with _told_of():
        traced = step.trace(state, batch)
        _check_constants(traced.jaxpr)
    with _told_of(traced.jaxpr):
        lowered = traced.lower()
    paths = tuple(traced.jaxpr.jaxpr.debug_info.arg_names)
    return Lowered(lowered, traced.jaxpr, paths, time.perf_counter() - started)


def trace(step: Any, state: Any, batch: Any) -> Any:
    """The jaxpr of a step, with errors as those of `lower`."""
    with _told_of():
        return step.trace(state, batch).jaxpr


@contextlib.contextmanager
def _told_of(jaxpr: Any = None) -> Iterator[None]:
    """Errors in tracing and lowering that are due to planning, in plain words.

    `jaxpr` is what is lowered, if it has been traced.
    """
    try:
        with _whole_tracebacks():
            yield
    except Exception as error:
        # Some errors are the user's, who is told in plain words; others are handed on as they are.
        message = _lowering_message(error, jaxpr)
        if not message:
            raise
        raise ValueError(message) from error


def check_traceable(function: str, step: Any) -> None:
    """Refuse what is no compiled function: a plan is made of a trace."""
    if not callable(step) or not hasattr(step, "trace"):
        raise ValueError(
            f"`{function}` takes a step that can be traced, of `sl.train_step` or `jax.jit`; got "
            f"{type(step).__name__}."
        )


def _lowering_message(error: Exception, jaxpr: Any) -> str:
    """What to tell of an error in tracing or lowering that is due to planning, else nothing."""
    line = line_of_user(error)
    where = f" at {line}" if line else ""
    # JAX raises a plain `TypeError` for a shape that depends on values, known only by its text.
    dynamic_shape = "Shapes must be 1D sequences of concrete values" in str(error)
    if isinstance(error, _NEEDS_VALUES) or dynamic_shape:
        reason = re.split(r"\n|\. ", str(error))[0].rstrip(".")
        return (
            f"The step needs values while it is traced{where}, and a plan has only shapes: "
            f"{reason}. Choose by `jnp.where` or `jax.lax.cond`, or make what decides a "
            "constant of the step."
        )
    # A callback is lowered for a backend in this process, and there is none of an absent GPU.
    if "Unknown backend" in str(error):
        line = line or _line_of_callback(jaxpr)
        where = f" at {line}" if line else ""
        return (
            f"The step calls back into Python{where}, by `jax.debug.print` or a callback, "
            "which cannot be compiled for GPUs that are not there. Leave that out of the step "
            "that is planned."
        )
    return ""


def _line_of_callback(jaxpr: Any) -> str:
    """The line of the first callback into Python that was traced; empty text if none is found."""
    if jaxpr is None:
        return ""
    for equation in every_equation(jaxpr.jaxpr):
        if "callback" in equation.primitive.name or equation.primitive.name == "debug_print":
            return line_of(equation)
    return ""


def line_of_user(error: BaseException) -> str:
    """The last line in a traceback that is neither ours nor of something installed.

    It is `file:line`, or an empty string where no frame is the user's. A syntax error is in the
    file that it names, which has no frame since it never ran.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    # The innermost frame comes last.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_of_user(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _check_constants(jaxpr: Any) -> None:
    """Refuse a step that closes over large concrete arrays.

    They would be compiled into the program as constants, whole on every device. Small ones, below
    `_LARGEST_CONSTANT` bytes each, are let through.
    """
    large = []
    for constant in _constants(jaxpr):
        # Keys and tokens have no size in bytes, and are small.
        if getattr(constant, "nbytes", 0) >= _LARGEST_CONSTANT:
            size = human_bytes(constant.nbytes)
            large.append(f"{constant.dtype}{list(constant.shape)} ({size})")
    if large:
        raise ValueError(
            f"The step closes over concrete arrays, {', '.join(large)}, which every device would "
            "hold whole as constants of its program. Hand them in with the state or the batch, or "
            "make them inside the step."
        )


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a traced function and of those that it calls.

    Functions that are called, such as branches and the bodies of loops, are parameters of their
    equation, which may also be in a tuple or a dictionary.
    """
    yield from getattr(jaxpr, "consts", ())
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _constants(inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


@contextlib.contextmanager
def _whole_tracebacks() -> Iterator[None]:
    """Keep enough of each traceback to find the user's line under any number of library frames."""
    before = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 50)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
