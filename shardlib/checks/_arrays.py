"""Checks of arguments that are arrays or dtypes.

They have the parameters of the checks in `_arguments`, where these are explained. They are here
because they import JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardlib.checks import _arguments as check


def array(
    function: str,
    argument: str,
    value: Any,
    takes: str = "an array of numbers",
    *,
    abstract: bool = False,
) -> Any:
    """An array that JAX could hold, or a tracer.

    It is given back as it is, of whatever class. With `abstract` a description of an array, a
    `jax.ShapeDtypeStruct`, is taken as well.

    >>> array("shard", "x", np.zeros(3)).shape
    (3,)
    """
    # Arrays of several libraries are known by their shape and dtype. A class may have these too.
    has_shape = isinstance(getattr(value, "shape", None), tuple) and not isinstance(value, type)
    if not has_shape or not holds(getattr(value, "dtype", None)):
        raise check.refusal(function, argument, value, takes)
    if isinstance(value, jax.ShapeDtypeStruct) and not abstract:
        raise check.refusal(function, argument, value, takes)
    return value


def values(function: str, argument: str, array: Any) -> None:
    """Refuse a state without values: one of shapes alone, or one that a step has replaced.

    `array` is one of its arrays, which all have values or none.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ValueError(
            f"`{function}({argument}=...)` takes a state with values, and this one is abstract, of "
            "shapes alone: make it by `sl.init` without `abstract`."
        )
    # A traced array has no memory of its own that could be deleted.
    is_held = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    if is_held and array.is_deleted():
        raise ValueError(
            f"`{function}({argument}=...)`: this state has been through a step already, which put "
            "the new one in its place: use that."
        )


def as_array(
    function: str, argument: str, value: Any, takes: str = "an array of numbers"
) -> jax.Array:
    """An array of JAX, made of whatever `jnp.asarray` takes.

    Lists and numbers are taken, other than by `array`.

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
        numpy_dtype = np.dtype(dtype)
    except (TypeError, ValueError):
        return False
    if numpy_dtype.kind == "b":
        return True
    if numpy_dtype.kind in "mM":  # times, which NumPy counts among the integers
        return False
    # NumPy's long doubles are larger.
    largest = 16 if jnp.issubdtype(numpy_dtype, np.complexfloating) else 8
    return jnp.issubdtype(numpy_dtype, np.number) and numpy_dtype.itemsize <= largest


def is_float(dtype: Any) -> bool:
    """Whether a dtype is one of floats of 16 bits or more.

    JAX promotes these to one another, but never promotes smaller ones.

    >>> is_float(jnp.bfloat16), is_float(jnp.float8_e4m3fn), is_float(jnp.int32)
    (True, False, False)
    """
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits >= 16


def real(
    function: str, argument: str, value: Any, takes: str = "a number, or an array of numbers"
) -> Any:
    """A real number, or an array or tracer of real numbers.

    It may be nan or infinite, as what a program computes may be.

    >>> real("mean", "total", 3.0)
    3.0
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    checked = array(function, argument, value, takes)
    # Keys are no numbers, and complex numbers are not real.
    for unreal in (jax.dtypes.extended, np.complexfloating):
        if jnp.issubdtype(checked.dtype, unreal):
            raise check.refusal(function, argument, value, takes)
    return checked


def dtype(
    function: str,
    argument: str,
    value: Any,
    takes: str = "a dtype, or its name, such as `bfloat16`",
) -> np.dtype:
    """A dtype, made of one or of what JAX calls one: its name, `jnp.bfloat16`, `float`.

    None is refused, of which NumPy would make float64; so are dtypes of objects and of records.

    >>> dtype("GPTConfig", "dtype", "bfloat16")
    dtype(bfloat16)
    """
    # `jnp.bfloat16` has a dtype and no shape; an array has both, and is no dtype.
    scalar = isinstance(getattr(value, "dtype", None), np.dtype) and not hasattr(value, "shape")
    if not scalar and not isinstance(value, str | np.dtype | type):
        raise check.refusal(function, argument, value, takes)
    try:
        made_dtype = jnp.dtype(value)
    except Exception as error:
        # Of any kind: NumPy takes some texts for lists of dtypes, and reads these as Python.
        raise check.refusal(function, argument, value, takes) from error
    if made_dtype.fields is not None or made_dtype.hasobject:
        raise check.refusal(function, argument, value, takes)
    return made_dtype
