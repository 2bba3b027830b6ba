"""Rotary positions: the angles by which each position turns the pairs of a head's dims, and how
models change these for contexts longer than those that they began with.
"""

import math
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp

Rotation = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rotary positions, for contexts longer than those that a model began with.

    Angles that turn less than `low` times in the first context are divided by `factor`, those that
    turn more than `high` times stay, and between the two lie those between.

    - `factor`: how much longer the context became.
    - `low`, `high`: how often angles turn in the first context.
    - `context`: the length of the first context.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192

    def __post_init__(self) -> None:
        _check_numbers(self, "factor", "low", "high")
        _check_context(self)
        if self.low >= self.high:
            raise ValueError(
                f"`RopeScaling(low={self.low}, high={self.high})`: `low` must be below `high`."
            )

    def scaled(self, frequency: jax.Array, theta: float) -> jax.Array:
        """Angles by position, of those without scaling."""
        turns = self.context * frequency / (2 * math.pi)
        kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class LinearScaling:
    """Rotary positions whose angles are all divided by `factor`, as in Gemma 3."""

    factor: float = 8.0

    def __post_init__(self) -> None:
        _check_numbers(self, "factor")

    def scaled(self, frequency: jax.Array, theta: float) -> jax.Array:
        """Angles by position, of those without scaling."""
        return frequency / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's rotary positions (arXiv 2309.00071), as DeepSeek-V3 and Qwen 3 have them.

    Pairs that turn more than `fast` times in the first context keep their angles, those of pairs
    that turn less than `slow` times are divided by `factor`, and between the two lie those between.
    YaRN also multiplies queries and keys by `size`, or the scores by its square, which is
    `GPTConfig(attention_scale=...)`.

    - `factor`: how much longer the context became.
    - `context`: the length of the first context.
    - `fast`, `slow`: how often pairs turn in the first context.
    - `size`: what cosines and sines are multiplied by.
    """

    factor: float = 40.0
    context: int = 4096
    fast: float = 32.0
    slow: float = 1.0
    size: float = 1.0

    def __post_init__(self) -> None:
        _check_numbers(self, "factor", "fast", "slow", "size")
        _check_context(self)
        if self.slow >= self.fast:
            raise ValueError(
                f"`YarnScaling(slow={self.slow}, fast={self.fast})`: `slow` must be below `fast`."
            )

    def scaled(self, frequency: jax.Array, theta: float) -> jax.Array:
        """Angles by position, of those without scaling."""
        pairs = frequency.size
        first = max(math.floor(self._pair(self.fast, pairs, theta)), 0)
        last = min(math.ceil(self._pair(self.slow, pairs, theta)), 2 * pairs - 1)
        # Where one pair is both the first and the last, it is the end of what is kept.
        length = max(last - first, 0.001)
        divided = jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - first) / length, 0, 1)
        return frequency * ((1 - divided) + divided / self.factor)

    def _pair(self, turns: float, pairs: int, theta: float) -> float:
        """The number of the pair that turns so often in the first context, as a fraction."""
        return pairs * math.log(self.context / (2 * math.pi * turns)) / math.log(theta)


Scaling = RopeScaling | LinearScaling | YarnScaling
SCALINGS = get_args(Scaling)


def yarn_size(factor: float, weight: float = 1.0) -> float:
    """How much larger YaRN makes queries and keys where contexts became so much longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rotations(
    positions: jax.Array, K: int, theta: float, scaling: Scaling | None = None
) -> Rotation:
    """Cosine and sine of each position's angle for each pair of a head's dims: `[S, 1, K / 2]` of
    positions `[S]`, and `[B, S, 1, K / 2]` of `[B, S]`.
    """
    frequency = theta ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    frequency = frequency if scaling is None else scaling.scaled(frequency, theta)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    size = scaling.size if isinstance(scaling, YarnScaling) else 1.0
    return (cosine, sine) if size == 1 else (cosine * size, sine * size)


def _check_numbers(scaling: Any, *fields: str) -> None:
    """Refuse what is no number above zero."""
    for field in fields:
        value = getattr(scaling, field)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(
                f"`{type(scaling).__name__}({field}={value!r})` must be a number above 0."
            )


def _check_context(scaling: Any) -> None:
    """Refuse what is no length of a context."""
    value = scaling.context
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(
            f"`{type(scaling).__name__}(context={value!r})` must be a positive integer, below "
            "2**31."
        )
