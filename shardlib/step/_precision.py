"""Precision: in which dtypes a step computes, adds up and sends. What is stored keeps the dtype
that it was made in.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays

NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f32": "float32"}
SUPPORTED = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, each by its name.

    - `compute`: what the model gets its parameters in; None is as they are stored. What is stored,
      and what the optimizer moves, are the master weights.
    - `keep`: patterns that match the whole of a parameter's path; these the model gets as they are
      stored.
    - `accumulate`: in which gradients are added up over microbatches, or in a wider one that they
      have.
    - `reduce`: in which they are added up over devices: what is on the wire.

    The dtypes are bfloat16, float32 and, where `jax_enable_x64` is set, float64. Small gradients
    are zero in float16, so that it needs a scaled loss, which a step does not have yet; float8
    needs scales too.

    >>> Precision("bf16", keep=(".*norm.*", ".*router.*")).compute
    'bfloat16'
    """

    compute: str | None = None
    keep: tuple[str, ...] = ()
    accumulate: str = "float32"
    reduce: str = "float32"

    def __post_init__(self) -> None:
        for field in ("compute", "accumulate", "reduce"):
            value = getattr(self, field)
            if value is None and field == "compute":
                continue
            check.assign(self, **{field: _checked(field, value)})
        check.patterns("Precision", "keep", self.keep)

    def of(self, path: str, dtype: Any) -> Any:
        """The dtype in which the model gets a parameter."""
        if self.compute is None or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return (
            dtype
            if any(re.fullmatch(pattern, path) for pattern in self.keep)
            else jnp.dtype(self.compute)
        )

    def accumulated(self, dtype: Any) -> Any:
        """The dtype in which gradients of `dtype` are added up over microbatches."""
        return _wider(dtype, self.accumulate)

    def reduced(self, dtype: Any) -> Any:
        """The dtype in which gradients of a parameter of `dtype` are added up over devices."""
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 32:
            return jnp.dtype(self.reduce)
        return _wider(dtype, self.reduce)


def _wider(dtype: Any, other: Any) -> Any:
    """The dtype that holds both, whatever the user said of promotion in the loss."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def _checked(field: str, value: Any) -> str:
    """The name of a dtype that a step can compute, add up or send in."""
    takes = "the name of a dtype of floating-point numbers, such as `bf16`"
    full = NAMES.get(value, value) if isinstance(value, str) else value
    name = check_arrays.dtype("Precision", field, full, takes).name
    if name == "float16":
        raise ValueError(
            f"`Precision({field}={check.shown(value)})`: in float16 gradients below 6e-8 are zero "
            "and sums beyond 65,504 infinite. That takes a scaled loss, which a step does not have "
            "yet. Use `bf16`, which has the range of float32."
        )
    if name not in SUPPORTED:
        few = (
            "; dtypes of 8 bits and fewer take scales, which a step does not have"
            if name.startswith("float")
            else ""
        )
        raise check.refusal("Precision", field, value, f"{takes}, of {', '.join(SUPPORTED)}{few}")
    if jax.dtypes.canonicalize_dtype(name) != name:
        raise ValueError(
            f"`Precision({field}={check.shown(value)})`: JAX makes float32 of float64 unless it is "
            'told otherwise: `jax.config.update("jax_enable_x64", True)` before its first use.'
        )
    return name


def resolve_precision(value: Any) -> Precision:
    """What `Strategy(precision=...)` says: a `Precision`, or the name of the dtype to compute
    in.
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        if value in ("float32", "fp32", "f32"):
            return Precision()
        try:
            return Precision(value)
        except ValueError as error:
            raise ValueError(f"`Strategy(precision={check.shown(value)})`: {error}") from error
    raise check.refusal(
        "Strategy", "precision", value, 'a name, such as `"bf16"`, or a `sl.Precision`'
    )


def check_patterns(what: str, patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Refuse a pattern that matches no path."""
    paths = list(paths)
    for pattern in patterns:
        if not any(re.fullmatch(pattern, path) for path in paths):
            raise ValueError(
                f"`{what}`: the pattern `{pattern}` matches no parameter. The paths are: "
                f"{', '.join(paths)}."
            )


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """In another dtype, or the array itself."""
    return x if x.dtype == dtype else x.astype(dtype)
