"""Checks of arguments that are arrays or dtypes, beside those of `_arguments`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.checks import _arguments as check


def array(
    function: str,
    argument: str,
    value: Any,
    takes: str = "an array of numbers",
    *,
    abstract: bool = False,
) -> Any:
    """An array that JAX could hold, or a tracer; with `abstract` a description of one,
    `jax.ShapeDtypeStruct`, as well.

    >>> array("shard", "x", np.zeros(3)).shape
    (3,)
    """
    described = isinstance(getattr(value, "shape", None), tuple) and not isinstance(value, type)
    if (
        described
        and holds(getattr(value, "dtype", None))
        and (abstract or not isinstance(value, jax.ShapeDtypeStruct))
    ):
        return value
    raise check.refusal(function, argument, value, takes)


def as_array(
    function: str, argument: str, value: Any, takes: str = "an array of numbers"
) -> jax.Array:
    """An array of JAX, made of whatever `jnp.asarray` takes.

    >>> as_array("softmax", "x", [1.0, 2.0]).shape
    (2,)
    """
    try:
        return jnp.asarray(value)
    except Exception as error:  # of whatever kind: it is the value's
        raise check.refusal(function, argument, value, takes) from error


def holds(dtype: Any) -> bool:
    """Whether JAX has arrays of a dtype: of numbers, bools and keys, not of text or objects.

    >>> holds(np.dtype("int8")), holds(np.dtype("O"))
    (True, False)
    """
    try:
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            return True
        found = np.dtype(dtype)
    except (TypeError, ValueError):
        return False
    if found.kind == "b":
        return True
    if found.kind in "mM":  # times, which NumPy counts among the integers
        return False
    # NumPy's long doubles are larger.
    largest = 16 if jnp.issubdtype(found, np.complexfloating) else 8
    return jnp.issubdtype(found, np.number) and found.itemsize <= largest


def is_float(dtype: Any) -> bool:
    """Whether it is a dtype of floats that JAX promotes to others: of 16 bits or more.

    >>> is_float(jnp.bfloat16), is_float(jnp.float8_e4m3fn), is_float(jnp.int32)
    (True, False, False)
    """
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits >= 16


def real(
    function: str, argument: str, value: Any, takes: str = "a number, or an array of numbers"
) -> Any:
    """A real number, or an array or tracer of real numbers; which may be nan, as what a program
    computes may be.

    >>> real("mean", "total", 3.0)
    3.0
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    found = array(function, argument, value, takes)
    if jnp.issubdtype(found.dtype, jax.dtypes.extended) or jnp.issubdtype(
        found.dtype, np.complexfloating
    ):
        raise check.refusal(function, argument, value, takes)
    return found


def dtype(
    function: str,
    argument: str,
    value: Any,
    takes: str = "a dtype, or its name, such as `bfloat16`",
) -> np.dtype:
    """A dtype, or what JAX calls one: its name, `jnp.bfloat16`, `float`. None is not one.

    >>> dtype("GPTConfig", "dtype", "bfloat16")
    dtype(bfloat16)
    """
    scalar = isinstance(getattr(value, "dtype", None), np.dtype) and not hasattr(value, "shape")
    if isinstance(value, str | np.dtype | type) or scalar:
        try:
            found = jnp.dtype(value)
        except (
            Exception
        ) as error:  # NumPy takes some texts for lists of dtypes, and reads these as Python
            raise check.refusal(function, argument, value, takes) from error
        if found.fields is None and not found.hasobject:
            return found
    raise check.refusal(function, argument, value, takes)
