"""Precision: in which dtypes a step computes, adds up and sends. What is stored keeps the dtype that it was made in."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f32": "float32"}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, each by its name.

    - `compute`: what the model gets its parameters in; None is as they are stored. What is stored, and what the
      optimizer moves, are the master weights.
    - `keep`: patterns that match the whole of a parameter's path; these the model gets as they are stored.
    - `accumulate`: in which gradients are added up over microbatches, or in a wider one that they have.
    - `reduce`: in which they are added up over devices: what is on the wire.

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
            try:
                name = jnp.dtype(NAMES.get(str(value), value)).name
            except TypeError as error:
                raise ValueError(
                    f"`Precision({field}={value!r})` takes the name of a dtype, such as `bf16`."
                ) from error
            if not jnp.issubdtype(jnp.dtype(name), jnp.floating):
                raise ValueError(f"`Precision({field}={value!r})`: a dtype of floating-point numbers, such as `bf16`.")
            if jnp.finfo(name).bits < 16:
                raise ValueError(
                    f"`Precision({field}={value!r})`: numbers of {jnp.finfo(name).bits} bits need a scale for each array, which "
                    "a step does not have. Take `bf16`, and quantise inside the model."
                )
            object.__setattr__(self, field, name)
        if not isinstance(self.keep, tuple):
            raise ValueError(f"`Precision(keep={self.keep!r})` takes a tuple of patterns.")

    def of(self, path: str, dtype: Any) -> Any:
        """The dtype in which the model gets a parameter."""
        if self.compute is None or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return dtype if any(re.fullmatch(pattern, path) for pattern in self.keep) else jnp.dtype(self.compute)

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


def resolve_precision(value: Any) -> Precision:
    """What `Strategy(precision=...)` says: a `Precision`, or the name of the dtype to compute in."""
    if isinstance(value, Precision):
        return value
    if value is None or isinstance(value, str):
        return Precision(value) if value not in ("float32", "fp32", "f32") else Precision()
    raise ValueError(f'`Strategy(precision={value!r})` takes a name such as `"bf16"`, or a `sl.Precision`.')


def check_patterns(what: str, patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Refuse a pattern that matches no path."""
    paths = list(paths)
    for pattern in patterns:
        if not any(re.fullmatch(pattern, path) for path in paths):
            raise ValueError(
                f"`{what}`: the pattern `{pattern}` matches no parameter. The paths are: {', '.join(paths)}."
            )


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """In another dtype, or the array itself."""
    return x if x.dtype == dtype else x.astype(dtype)
