"""The dtypes in which a step computes, adds gradients up, and sends them.

    stored (master weights) -> compute -> gradients -> accumulate -> wire -> reduce -> optimizer

What is stored keeps the dtype that it was made in.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays

# Short names, and what they stand for.
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f32": "float32"}
SUPPORTED = ("bfloat16", "float32", "float64")
# The names of the dtype that a step computes in if nothing is said.
_FULL = ("float32", "fp32", "f32")


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, each by its name.

    - `compute`: the dtype in which the model gets its parameters; None leaves them as they are
      stored. The stored parameters, which the optimizer updates, are the master weights.
    - `keep`: patterns that match the whole path of a parameter. The model gets these parameters in
      the dtype in which they are stored.
    - `accumulate`: the dtype in which gradients are added up over microbatches. Gradients of a
      wider dtype are added up in their own.
    - `reduce`: the dtype in which gradients are added up over devices.
    - `wire`: the dtype in which gradients are sent to be added up; None: the one in which they are
      added up. If it is narrower, each device rounds what it sends once, and the receiver adds up.

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
    wire: str | None = None

    def __post_init__(self) -> None:
        for field in ("compute", "accumulate", "reduce", "wire"):
            value = getattr(self, field)
            # Gradients are always added up in some dtype; the other two have one to follow.
            if value is None and field in ("compute", "wire"):
                continue
            check.assign(self, **{field: _checked(field, value)})
        if self.wire is not None and wider(self.wire, self.reduce) != self.reduce:
            raise ValueError(
                f'`Precision(wire="{self.wire}", reduce="{self.reduce}")` sends more than is added '
                f'up. Add up in as wide a dtype, `reduce="{self.wire}"`, or leave `wire` out: then '
                "gradients are sent as they are added up."
            )
        check.patterns("Precision", "keep", self.keep)

    def of(self, path: str, dtype: Any) -> Any:
        """The dtype in which the model gets a parameter that is stored in `dtype`.

        Integers, complex numbers and what `keep` matches stay as they are stored.
        """
        if self.compute is None or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        # The whole path has to match, so that `norm` alone does not keep `norms_of/kernel` too.
        for pattern in self.keep:
            if re.fullmatch(pattern, path):
                return dtype
        return jnp.dtype(self.compute)

    def accumulated(self, dtype: Any) -> Any:
        """The dtype in which gradients of `dtype` are added up over microbatches."""
        return wider(dtype, self.accumulate)

    def reduced(self, dtype: Any) -> Any:
        """The dtype in which gradients of a parameter of `dtype` are added up over devices.

        It may be narrower than the parameter's, to send less, but for parameters of more than
        float32: who stores float64 wants all of it.
        """
        # Complex gradients are added up as they are: there is no narrower complex dtype.
        if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 32:
            return jnp.dtype(self.reduce)
        return wider(dtype, self.reduce)

    def sent(self, dtype: Any) -> Any:
        """The dtype in which gradients of a parameter of `dtype` are sent, to be added up.

        That is the one they are added up in, for parameters of more than float32.
        """
        reduced = self.reduced(dtype)
        if self.wire is None or reduced != self.reduce:
            return reduced
        return jnp.dtype(self.wire)


def wider(dtype: Any, other: Any) -> Any:
    """The dtype that holds both, by JAX's standard rules of promotion.

    The user may have set stricter rules for the loss, `jax_numpy_dtype_promotion`.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, other)


def _checked(field: str, value: Any) -> str:
    """The full name of a dtype that a step can compute, add up or send in.

    Others are refused: those whose gradients are lost without a scaled loss, and float64 where JAX
    would silently make float32 of it.
    """
    takes = "the name of a dtype of floating-point numbers, such as `bf16`"
    dtype = value
    if isinstance(value, str):
        dtype = NAMES.get(value, value)
    name = check_arrays.dtype("Precision", field, dtype, takes).name
    if name == "float16":
        raise ValueError(
            f"`Precision({field}={check.shown(value)})`: in float16 gradients below 6e-8 are zero "
            "and sums beyond 65,504 infinite. That takes a scaled loss, which a step does not have "
            "yet. Use `bf16`, which has the range of float32."
        )
    if name not in SUPPORTED:
        takes = f"{takes}, of {', '.join(SUPPORTED)}"
        if name.startswith("float"):
            takes += "; dtypes of 8 bits and fewer take scales, which a step does not have"
        raise check.refusal("Precision", field, value, takes)
    # Without `jax_enable_x64` arrays of float64 cannot exist, whatever a strategy says.
    if jax.dtypes.canonicalize_dtype(name) != name:
        raise ValueError(
            f"`Precision({field}={check.shown(value)})`: JAX makes float32 of float64 unless it is "
            'told otherwise: `jax.config.update("jax_enable_x64", True)` before its first use.'
        )
    return name


def resolve_precision(value: Any) -> Precision:
    """The `Precision` that `Strategy(precision=...)` stands for.

    It is given as one, or as the name of the dtype to compute in; all else is then float32.
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        # Full precision is no cast at all, so that what is stored in bfloat16 stays so.
        if value in _FULL:
            return Precision()
        try:
            return Precision(value)
        except ValueError as error:
            raise ValueError(f"`Strategy(precision={check.shown(value)})`: {error}") from error
    raise check.refusal(
        "Strategy", "precision", value, 'a name, such as `"bf16"`, or a `sl.Precision`'
    )


def check_patterns(what: str, patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Refuse a pattern that matches no path, which is most often misspelt.

    Args:
        what: the argument that has the patterns, for the error.
        patterns: regular expressions that match a whole path.
        paths: the paths of all parameters.
    """
    paths = list(paths)
    for pattern in patterns:
        if not any(re.fullmatch(pattern, path) for path in paths):
            raise ValueError(
                f"`{what}`: the pattern `{pattern}` matches no parameter. The paths are: "
                f"{', '.join(paths)}."
            )


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """An array in a dtype: the array itself if it has that, so that nothing is traced."""
    if x.dtype == dtype:
        return x
    return x.astype(dtype)
