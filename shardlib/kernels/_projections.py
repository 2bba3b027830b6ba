"""Products of one array with several kernels: queries, keys and values, or an MLP's gate and up.

Taken one by one, each product reads the array, and backward each adds its part to the gradient in
memory. Taken as one, with the kernels concatenated, the array is read once:

    x (rows, features) [query | key | value] (features, columns)  =  [q | k | v] (rows, columns)

But then the kernels, the products and their gradients are copied once more. With `k` products that
have `columns` together, the numbers that are read or written, forward and backward, are:

    saved     4 (k - 1) x rows x features        x once for the values, once for the gradients to
                                                 the kernels; its gradient written and read
    copied    6 x features x columns             kernels twice, and their gradients
              4 x rows x columns                 products, and their gradients

A device that has few columns of each kernel, as under tensor parallelism, saves more than it
copies. Where devices have parts of the columns, kernels are concatenated part by part, which only
a function of a device's own shards can do: to the partitioner it would be a new layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._choice import device_here
from shardlib.kernels._shards import (
    ArrayLayout,
    Names,
    automatic_axes,
    layout_of,
    partitioned,
    per_shard,
    varying_alike,
)
from shardlib.layouts._annotate import shard
from shardlib.layouts._specs import as_tuple
from shardlib.tracing._jaxpr import keeps_arguments

OP = "projections"
# One product is taken if it saves more than this times what it copies. What a large product reads
# is partly hidden beside its arithmetic, and nothing of a copy is. By TPU compilers' own
# estimates (JAX 0.12) of Llama 2's step, the one product for queries, keys and values changes its
# cycles on v5e, v5p and v6e by -15, -8 and -21% at 9 times, by -4, +1 and -9% at 3.9 times and by
# +5, +9 and +9% at 1.5 times; that for gate and up by -2, -1 and -4% at 2.5 times, and by +4, +5
# and +1% at 1.1 times.
MARGIN = 2.0
# How many numbers a TPU stores a row in, and how much longer than its numbers a row may be. Parts
# of one product are stored row by row; of a product by itself the compiler may store other dims in
# rows. GPT-2's heads of 64, kept for the backward pass, would take twice the memory.
LANES, PADDED = 128, 1.125


def projections(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    *,
    names: Names | None = None,
    outputs: Sequence[Names] | None = None,
    joined: bool | None = None,
) -> tuple[jax.Array, ...]:
    """Products of one array with several kernels, in one where that reads and writes less.

    Args:
        x: `(..., features)`.
        kernels: each `(..., features)`, of the dtype of `x`, with its own output dims first, as
            PyTorch has them.
        names: of the dims of `x`, as it is laid out.
        outputs: for each kernel the names of its product's dims: those of `x` without its
            features, then those of the kernel's outputs. Where the first are split over fewer axes
            than in `names`, as a sequence is that tensor parallelism gathers, `x` is gathered for
            all products at once, and its gradient is summed and scattered.
        joined: whether to concatenate the kernels and compute one product. By default this is done
            if it saves more reads and writes than the concatenation costs: if a device has few
            columns of each kernel, and many rows.

    The products are `(..., outputs...)`, in the order of the kernels. Both ways give the same,
    except for the order of sums in the gradient to `x`.

    >>> import jax.numpy as jnp
    >>> up, gate = projections(jnp.ones((2, 8)), [jnp.ones((4, 8)), jnp.ones((3, 8))])
    >>> up.shape, gate.shape
    ((2, 4), (2, 3))
    """
    x = check_arrays.as_array(OP, "x", x)
    kernels = _checked_kernels(kernels, x)
    if joined is not None:
        check.boolean(OP, "joined", joined)
    if (names is None) != (outputs is None):
        raise ValueError(f"`{OP}` takes `names` and `outputs` together, or neither.")
    if names is not None and outputs is not None:
        _check_outputs(names, outputs, x, kernels)
    try:
        layouts = _layouts(x, kernels, names, outputs)
    except ValueError:
        # Separate products are left to the partitioner, which says itself what it cannot do.
        if joined:
            raise
        return _separate(x, kernels, names, outputs)
    if joined is None:
        joined = _saves_more(layouts)
    if joined:
        return _joined(x, kernels, layouts)
    return _separate(x, kernels, names, outputs, gathered=layouts.gathered)


def _checked_kernels(kernels: Any, x: jax.Array) -> list[jax.Array]:
    """The kernels as arrays; refuses those that cannot be multiplied with `x`."""
    check.kind(OP, "kernels", kernels, list | tuple, "kernels of the same features, in a list")
    if not kernels:
        raise ValueError(f"`{OP}`: `kernels` is empty: give it one kernel at least.")
    checked = []
    for number, kernel in enumerate(kernels):
        kernel = check_arrays.as_array(OP, f"kernels[{number}]", kernel)
        text = f"`kernels[{number}]` is {kernel.dtype}{list(kernel.shape)}"
        if not x.ndim or kernel.ndim < 2 or kernel.shape[-1] != x.shape[-1]:
            raise ValueError(
                f"`{OP}`: {text} and `x` is {x.dtype}{list(x.shape)}: the last dim of both is the "
                "features, of one size, and a kernel has a dim of outputs before it."
            )
        # Neither is rounded without being asked to be.
        if kernel.dtype != x.dtype:
            raise ValueError(
                f"`{OP}`: {text} and `x` is {x.dtype}: they are multiplied in one dtype; `astype` "
                "the one that is to be rounded."
            )
        checked.append(kernel)
    return checked


def _check_outputs(names: Any, outputs: Any, x: jax.Array, kernels: list[jax.Array]) -> None:
    """Refuse outputs that are not names for each dim of each product, the first ones alike."""
    takes = "the names of each product's dims, in a list"
    check.kind(OP, "outputs", outputs, list | tuple, takes)
    if len(outputs) != len(kernels):
        raise ValueError(
            f"`{OP}`: `outputs` has names for {len(outputs)} products, of {len(kernels)} kernels."
        )
    lead = x.ndim - 1
    for number, (product, kernel) in enumerate(zip(outputs, kernels, strict=True)):
        check.kind(OP, f"outputs[{number}]", product, list | tuple, takes)
        dims = lead + kernel.ndim - 1
        if len(product) != dims:
            raise ValueError(
                f"`{OP}`: `outputs[{number}]` has {len(product)} names "
                f"{check.shown(tuple(product))}, and the product of `x` {list(x.shape)} and "
                f"`kernels[{number}]` {list(kernel.shape)} has {dims} dims."
            )
        if tuple(product[:lead]) != tuple(outputs[0][:lead]):
            raise ValueError(
                f"`{OP}`: `outputs[{number}]` begins with {check.shown(tuple(product[:lead]))} and "
                f"`outputs[0]` with {check.shown(tuple(outputs[0][:lead]))}: `x` is laid out one "
                "way for all products."
            )


@dataclass(frozen=True)
class _Layouts:
    """How the arrays of joined products are laid out."""

    x: ArrayLayout
    products: tuple[ArrayLayout, ...]
    kernels: tuple[ArrayLayout, ...]

    @property
    def lead(self) -> int:
        """How many dims of `x` are not its features."""
        return len(self.x.shape) - 1

    def gathered_axes(self, dim: int) -> tuple[str, ...]:
        """The axes that split a dim of `x` and not that of the products."""
        kept = self.products[0].automatic_axes(dim)
        return self.x.automatic_axes(dim)[len(kept) :]

    @property
    def gathered(self) -> bool:
        """Whether parts of `x` are gathered for the products."""
        return any(self.gathered_axes(dim) for dim in range(self.lead))


def _layouts(
    x: jax.Array, kernels: list[jax.Array], names: Names | None, outputs: Sequence[Names] | None
) -> _Layouts:
    """The layouts of the arrays; refuses those with which no product can be taken on shards."""
    lead = x.ndim - 1
    products, kernel_layouts = [], []
    for number, kernel in enumerate(kernels):
        shape = (*x.shape[:-1], *kernel.shape[:-1])
        product_names = None if outputs is None else outputs[number]
        product = jax.ShapeDtypeStruct(shape, x.dtype)
        layout = layout_of(OP, product, product_names, f"product {number}")
        products.append(layout)
        # A kernel's outputs are split as those of its product, and its features are whole.
        spec = None if layout.spec is None else PartitionSpec(*layout.spec[lead:], None)
        kernel_layouts.append(ArrayLayout(kernel.shape, spec, (*layout.axes[lead:], ())))
    layouts = _Layouts(layout_of(OP, x, names), tuple(products), tuple(kernel_layouts))
    _check_layouts(layouts)
    return layouts


def _check_layouts(layouts: _Layouts) -> None:
    """Refuse layouts with which a device's own shards do not make its part of the products."""
    if partitioned(layouts.x):
        raise ValueError(
            f"`{OP}`: the mesh has the automatic axes {listed(automatic_axes())}, and nothing says "
            "how `x` is split over them: give it `names` and `outputs`."
        )
    if layouts.x.spec is None:
        return
    *lead, features = layouts.x.spec
    if features is not None:
        raise ValueError(
            f"`{OP}`: the features of `x` are split over {listed(as_tuple(features))}, so that a "
            "device has parts of sums: `joined=False` leaves them to the partitioner."
        )
    for dim, entry in enumerate(lead):
        for product in layouts.products:
            axes, kept = as_tuple(entry), product.automatic_axes(dim)
            if axes[: len(kept)] != kept:
                raise ValueError(
                    f"`{OP}`: dim {dim} is split over {axes} in `x` and over {kept} in a product, "
                    "which may leave out axes at the end, and no others: `joined=False` leaves the "
                    "rest to the partitioner."
                )


def _saves_more(layouts: _Layouts) -> bool:
    """Whether one product saves a device clearly more reads and writes than its copies cost."""
    # Over automatic axes of the batch, gradients to kernels are summed: the partitioner sees them
    # whole, and may leave each device a part.
    if layouts.products[0].automatic_axes(*range(layouts.lead)):
        return False
    if device_here().platform == "tpu" and not all(map(_fills_rows, layouts.products)):
        return False
    features = layouts.x.shape[-1]
    rows = math.prod(layouts.products[0].local_shape[: layouts.lead])
    columns = sum(math.prod(layout.local_shape[:-1]) for layout in layouts.kernels)
    saved = 4 * (len(layouts.kernels) - 1) * rows * features
    copied = 6 * features * columns + 4 * rows * columns
    return saved > MARGIN * copied


def _fills_rows(product: ArrayLayout) -> bool:
    """Whether a TPU stores a product in rows that are hardly longer than its numbers."""
    size = product.local_shape[-1]
    return math.ceil(size / LANES) * LANES <= PADDED * size


def _joined(x: jax.Array, kernels: list[jax.Array], layouts: _Layouts) -> tuple[jax.Array, ...]:
    """The products on each device's own shards, of concatenated kernels."""

    def body(x: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, ...]:
        for dim in range(layouts.lead):
            axes = layouts.gathered_axes(dim)
            if axes:
                x = lax.all_gather(x, axes, axis=dim, tiled=True)
        features = x.shape[-1]
        matrices = [kernel.reshape(-1, features) for kernel in kernels]
        product = jnp.tensordot(x, jnp.concatenate(matrices), (-1, -1))
        columns = [matrix.shape[0] for matrix in matrices]
        products = []
        for part, kernel in zip(lax.split(product, columns, -1), kernels, strict=True):
            products.append(part.reshape(*x.shape[:-1], *kernel.shape[:-1]))
        return tuple(products)

    # Only the arguments are kept for the backward pass: parts of `x`, which is gathered again, and
    # kernels, which ZeRO may gather again. By this policy it is no block of the model: a `Remat`
    # around it finds the names in it.
    recomputed = jax.checkpoint(body, prevent_cse=False, policy=keeps_arguments)
    arrays = varying_alike(x, *kernels)
    return per_shard(recomputed, arrays, [layouts.x, *layouts.kernels], layouts.products)


def _separate(
    x: jax.Array,
    kernels: list[jax.Array],
    names: Names | None,
    outputs: Sequence[Names] | None,
    *,
    gathered: bool = False,
) -> tuple[jax.Array, ...]:
    """The products one by one, laid out by the partitioner, for which `x` may be gathered."""

    def body(x: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, ...]:
        if names is not None and outputs is not None:
            # With the second layout alone, the partitioner might carry it over to what made `x`.
            x = shard(x, *names)
            x = shard(x, *outputs[0][: x.ndim - 1], names[-1])
        products = []
        for number, kernel in enumerate(kernels):
            product = jnp.tensordot(x, kernel, (-1, -1))
            if outputs is not None:
                product = shard(product, *outputs[number])
            products.append(product)
        return tuple(products)

    if gathered and device_here().platform == "gpu":
        # As in joined products, the backward pass gathers again. XLA's compilers for TPUs keep what
        # was gathered or gather again, as they see fit; those for GPUs would always keep it.
        body = jax.checkpoint(body, prevent_cse=False, policy=keeps_arguments)
    return body(x, *kernels)
