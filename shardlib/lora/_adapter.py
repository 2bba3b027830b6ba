"""Two thin factors, whose product is added to a kernel."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.modeling._flax import Names

PARAMETERS = r"(.*/)?adapter/(down|up)"
"""A pattern of the paths of factors, for `sl.weights.load(..., keep=(lora.PARAMETERS,))`."""

FROZEN = (rf"(?!{PARAMETERS}$).*",)
"""A pattern of everything else, for `sl.Strategy(frozen=lora.FROZEN)`."""


@dataclass(frozen=True)
class Kernel:
    """The dims of a kernel: those of stacked layers, and those of its inputs and outputs.

    - `shape`, `dtype`, `names`: of the kernel; the names may be None.
    - `inputs`, `outputs`: how many dims each has. Dims before them are those of stacked layers.
    - `inputs_first`: whether inputs come before outputs, as in Flax's layers.
    """

    shape: tuple[int, ...]
    dtype: Any
    names: Names
    inputs: int
    outputs: int
    inputs_first: bool

    def _divided(self, dims: Any) -> tuple[Any, Any, Any]:
        """Something for each dim: of stacked layers, of inputs, and of outputs."""
        stacked = len(self.shape) - self.inputs - self.outputs
        if self.inputs_first:
            middle = stacked + self.inputs
            return dims[:stacked], dims[stacked:middle], dims[middle:]
        middle = stacked + self.outputs
        return dims[:stacked], dims[middle:], dims[stacked:middle]

    @property
    def in_features(self) -> int:
        """How many numbers each output is a sum over."""
        return math.prod(self._divided(self.shape)[1])

    @property
    def out_features(self) -> int:
        """How many outputs there are."""
        return math.prod(self._divided(self.shape)[2])

    def down_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the factor that reads inputs."""
        stacked, inputs, _ = self._divided(self.shape)
        return (*stacked, rank, *inputs)

    def up_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the factor that makes outputs."""
        stacked, _, outputs = self._divided(self.shape)
        return (*stacked, *outputs, rank)

    def down_names(self) -> Names:
        """The names of the dims of the factor that reads inputs."""
        return self._names(lambda stacked, inputs, _: (*stacked, None, *inputs))

    def up_names(self) -> Names:
        """The names of the dims of the factor that makes outputs."""
        return self._names(lambda stacked, _, outputs: (*stacked, *outputs, None))

    def _names(self, joined: Callable[..., tuple[Any, ...]]) -> Names:
        """Names of a factor, of those of the kernel; a spec, which may be short, gives a spec."""
        if self.names is None:
            return None
        missing = len(self.shape) - len(self.names)
        names = joined(*self._divided((*self.names, *[None] * missing)))
        return PartitionSpec(*names) if isinstance(self.names, PartitionSpec) else names


class Adapter(nnx.Module):
    """Two thin factors beside a kernel.

    `down`, `(rank, inputs)`, is drawn as PyTorch draws kernels. `up`, `(outputs, rank)`, begins
    with zeros, so that the layer begins as it was. In stacked layers both have the dims of the
    stack in front. They are named and sharded like the dims of the kernel, and are float32 where
    that has fewer bits.
    """

    def __init__(self, kernel: Kernel, rank: int, scale: float, rngs: nnx.Rngs) -> None:
        self.rank, self.scale = rank, scale
        self.inputs, self.outputs = kernel.inputs, kernel.outputs
        self.inputs_first = kernel.inputs_first
        bound = 1 / math.sqrt(kernel.in_features)

        def uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        # Small steps vanish in half precision.
        dtype = jnp.promote_types(kernel.dtype, jnp.float32)
        down_shape, up_shape = kernel.down_shape(rank), kernel.up_shape(rank)
        self.down = nnx.Param(uniform(rngs.params(), down_shape, dtype))
        self.up = nnx.Param(jnp.zeros(up_shape, dtype))
        if kernel.names is not None:
            self.down.set_metadata(out_sharding=kernel.down_names())
            self.up.set_metadata(out_sharding=kernel.up_names())

    def __call__(self, x: jax.Array) -> jax.Array:
        """What is added to the layer's product of `x`."""
        return self.project_up(self.project_down(x))

    def project_down(self, x: jax.Array) -> jax.Array:
        """The first product: `(..., rank)`, of `x` whose last dims are the inputs."""
        last = tuple(range(-self.inputs, 0))
        return jnp.tensordot(x, self.down[...].astype(x.dtype), (last, last))

    def project_up(self, low: jax.Array) -> jax.Array:
        """The second product, times the scale: the outputs, of what `project_down` gives."""
        return self.scale * jnp.tensordot(low, self.up[...].astype(low.dtype), (-1, -1))

    def added_to(self, kernel: jax.Array) -> jax.Array:
        """A kernel, or stacked ones, that computes the same without factors."""
        down, up = self.down[...], self.up[...]

        def summed(kernel: jax.Array, down: jax.Array, up: jax.Array) -> jax.Array:
            down, up = down.astype(jnp.float32), up.astype(jnp.float32)
            more = self.scale * jnp.tensordot(up, down, (-1, 0), precision=lax.Precision.HIGHEST)
            if self.inputs_first:
                outputs, last = range(self.outputs), range(-self.outputs, 0)
                more = jnp.moveaxis(more, tuple(outputs), tuple(last))
            return (kernel.astype(jnp.float32) + more).astype(kernel.dtype)

        for _ in range(down.ndim - 1 - self.inputs):
            summed = jax.vmap(summed)
        # The factors are arguments: a program closes over no array that other processes have.
        return jax.jit(summed)(kernel, down, up)
