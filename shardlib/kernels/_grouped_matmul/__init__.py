"""Products of rows in groups, each group with a matrix of its own: what experts are made of.

    rows of group 0   |  w[0]
    rows of group 1   |  w[1]         as many rows as each group happens to have
    ...               |
    rows of no group  |  zeros        at the end

How rows are laid out over devices is said by `Groups`: blocks of rows, each with the sizes of its
own groups, over some axes, and the rows' features over others. Over the latter each device gathers
the features that a product reads, and what it has of a sum over features is added up and
scattered:

    up      x (rows, features / t)  -- gather -->  (rows, features)  @  (features, columns / t)
    down    (rows, columns / t)  @  (columns / t, features)  -- sum -->  (rows, features / t)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._choice import Chosen, Implementation, Task, choose, device_here
from shardlib.kernels._shards import (
    ArrayLayout,
    Names,
    automatic_axes,
    layout_of,
    per_shard,
    shard_offset,
    varying,
    varying_alike,
)
from shardlib.layouts._annotate import mesh_of_shards
from shardlib.layouts._specs import axes_within, parts_over, product_text, spec_entry

OP = "grouped_matmul"
IMPLEMENTATIONS = (
    Implementation("reference", None, f"{__name__}._reference"),
    Implementation("tpu", "tpu", f"{__name__}._tpu"),
    Implementation("gpu", "gpu", f"{__name__}._gpu"),
    Implementation("ragged_dot", None, f"{__name__}._ragged_dot"),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Which rows are of which group, and how rows are laid out over devices.

    - `sizes`: (blocks, groups), whole numbers. Rows are as many blocks of equal length; in each the
      rows of one group come after those of the other, and the rows at its end are of no group.
    - `row_axes`: automatic axes of the mesh that split the blocks.
    - `feature_axes`: those that split the features of rows where a product's own names do not.
    """

    sizes: jax.Array
    row_axes: tuple[str, ...] = field(default=(), metadata={"static": True})
    feature_axes: tuple[str, ...] = field(default=(), metadata={"static": True})


def grouped_matmul(
    x: jax.Array,
    w: "jax.Array | Sequence[jax.Array]",
    groups: "Groups | jax.Array",
    *,
    names: Names | None = None,
    implementation: str | None = None,
) -> Any:
    """The product of each row with the matrix of its group; zeros for rows of no group.

    Args:
        x: (rows, features).
        w: (groups, features, columns), of the dtype of `x`; or a list of such arrays, each of which
            gives a result. Their gradients to `x` are added up before they are sent.
        groups: how many rows each group has, (groups,), one group after the other; or `Groups`.
        names: the names of the features and of the columns, by which the matrices are split over
            devices. Without names every device has whole matrices.
        implementation: None chooses the fastest one here. A name chooses that one, or raises an
            error if it cannot run. See `explain`.

    >>> import jax.numpy as jnp
    >>> w = jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
    >>> grouped_matmul(jnp.ones((4, 2)), w, jnp.array([1, 2]))
    Array([[1., 1.],
           [3., 3.],
           [3., 3.],
           [0., 0.]], dtype=float32)
    """
    x = check_arrays.as_array(OP, "x", x)
    several = isinstance(w, list | tuple)
    matrices = _checked_matrices(list(w) if several else [w], x)
    groups = _checked_groups(groups, x, matrices[0].shape[0])
    layouts = [_layouts(x, matrix, groups, names) for matrix in matrices]
    chosen = tuple(
        _chosen(x, matrix, one, groups, implementation)
        for matrix, one in zip(matrices, layouts, strict=True)
    )
    call = Call(chosen, tuple(layouts))
    x, sizes, *matrices = varying_alike(x, groups.sizes, *matrices)
    if 0 in (x.size, *(matrix.size for matrix in matrices)):
        made = [jnp.zeros((x.shape[0], matrix.shape[2]), x.dtype) for matrix in matrices]
    else:
        made = cast("list[jax.Array]", _products(call, x, matrices, sizes))
    return tuple(made) if several else made[0]


def _checked_matrices(matrices: list[Any], x: jax.Array) -> list[jax.Array]:
    """The matrices as arrays; refuses those that cannot be multiplied with `x`."""
    if x.ndim != 2 or not check_arrays.is_float(x.dtype):
        raise ValueError(
            f"`{OP}` of x {x.dtype}{list(x.shape)}: give it floats of 16 bits or more, "
            "(rows, features)."
        )
    if not matrices:
        raise ValueError(f"`{OP}`: `w` is empty: give it one array of matrices at least.")
    checked = []
    for matrix in matrices:
        matrix = check_arrays.as_array(OP, "w", matrix)
        if matrix.ndim != 3 or matrix.shape[1] != x.shape[1] or matrix.dtype != x.dtype:
            raise ValueError(
                f"`{OP}`: `w` is {matrix.dtype}{list(matrix.shape)}; for x "
                f"{x.dtype}{list(x.shape)} it should be {x.dtype}, (groups, {x.shape[1]}, "
                "columns)."
            )
        if matrix.shape[0] != matrices[0].shape[0]:
            raise ValueError(
                f"`{OP}`: arrays of matrices for {matrices[0].shape[0]} and "
                f"{matrix.shape[0]} groups in one call: all have a matrix for each group."
            )
        checked.append(matrix)
    return checked


def _checked_groups(groups: Any, x: jax.Array, count: int) -> Groups:
    """The groups with sizes of two dims; refuses sizes that are not those of rows and matrices."""
    if not isinstance(groups, Groups):
        sizes = check_arrays.as_array(OP, "groups", groups, "how many rows each group has")
        groups = Groups(sizes.reshape(1, -1))
    sizes = check_arrays.as_array(OP, "groups", groups.sizes, "how many rows each group has")
    whole = jnp.issubdtype(sizes.dtype, jnp.integer)
    if not whole or sizes.ndim != 2 or sizes.shape[1] != count:
        raise ValueError(
            f"`{OP}`: the sizes of groups are {sizes.dtype}{list(sizes.shape)}; with {count} "
            f"matrices they should be whole numbers, ({count},), or (blocks, {count}) in `Groups`."
        )
    if x.shape[0] % sizes.shape[0]:
        raise ValueError(
            f"`{OP}`: {x.shape[0]} rows in {sizes.shape[0]} blocks of equal length: the number of "
            "blocks should divide that of rows."
        )
    _check_sizes(sizes, x.shape[0] // sizes.shape[0])
    # Sums of sizes may not fit in the integers that these are.
    return replace(groups, sizes=sizes.astype(jnp.int32))


def _check_sizes(sizes: jax.Array, rows: int) -> None:
    """Refuse sizes that are known to be negative, or more than a block's rows together."""
    if isinstance(sizes, Tracer) or not (sizes.is_fully_addressable or sizes.is_fully_replicated):
        return
    # Sums of sizes may not fit in the integers that these are.
    known = np.asarray(sizes).astype(object)
    if (known < 0).any() or (known.sum(1) > rows).any():
        raise ValueError(
            f"`{OP}`: groups of {sizes.tolist()} rows in blocks of {rows}: sizes are not negative, "
            "and no more together than there are rows."
        )


@dataclass(frozen=True)
class Layouts:
    """How the arrays of one product are laid out over automatic axes.

    - `gathered`: axes over which the features of `x` are gathered before the product.
    - `summed`: axes over which devices have parts of the sum over features.
    - `scattered`: axes over which the columns are split after it, which the matrix does not.
    """

    x: ArrayLayout
    w: ArrayLayout
    sizes: ArrayLayout
    y: ArrayLayout
    gathered: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    scattered: tuple[str, ...] = ()


def _layouts(x: jax.Array, w: jax.Array, groups: Groups, names: Names | None) -> Layouts:
    """The layouts of one product, by the names of its matrices and where the rows are."""
    count, features, columns = w.shape
    of_matrix = None
    if names is not None:
        takes = "two names, of the features and of the columns"
        check.kind(OP, "names", names, tuple | list, takes)
        if len(names) != 2:
            raise check.refusal(OP, "names", names, takes)
        of_matrix = (None, *names)
    w_layout = layout_of(OP, w, of_matrix, "w")
    if w_layout.spec is None:
        if not _is_automatic(groups):
            return Layouts(
                _whole(x.shape),
                _whole(w.shape),
                _whole(groups.sizes.shape),
                _whole((x.shape[0], columns)),
            )
        w_layout = ArrayLayout(w.shape, PartitionSpec(None, None, None), ((), (), ()))
    # Over manual axes `x` and `w` are parts already, and what is summed is summed over them too.
    by_features, by_columns = w_layout.axes[1:]
    of_x = by_features or groups.feature_axes
    of_y = by_columns or groups.feature_axes
    blocks = groups.sizes.shape[0]
    return Layouts(
        _matrix_layout((x.shape[0], features), groups.row_axes, of_x),
        w_layout,
        _matrix_layout((blocks, count), groups.row_axes, ()),
        _matrix_layout((x.shape[0], columns), groups.row_axes, of_y),
        gathered=() if by_features else of_x,
        summed=by_features,
        scattered=() if by_columns else of_y,
    )


def _whole(shape: tuple[int, ...]) -> ArrayLayout:
    """The layout of an array of which nothing is known, so that every device has all of it."""
    return ArrayLayout(shape, None, ((),) * len(shape))


def _is_automatic(groups: Groups) -> bool:
    """Whether rows are split over automatic axes, of which a kernel knows nothing."""
    return bool(groups.row_axes or groups.feature_axes)


def _matrix_layout(
    shape: tuple[int, int], rows: tuple[str, ...], columns: tuple[str, ...]
) -> ArrayLayout:
    """The layout of an array of two dims, of which each is split over some axes."""
    sizes, entries = mesh_of_shards().shape, []
    for size, axes in zip(shape, (rows, columns), strict=True):
        automatic = axes_within(axes, automatic_axes())
        if size % parts_over(sizes, automatic):
            raise ValueError(
                f"`{OP}`: {size} of shape {shape} are not divided by the axes "
                f"{product_text(sizes, automatic)}, which split them."
            )
        entries.append(spec_entry(automatic))
    return ArrayLayout(shape, PartitionSpec(*entries), (rows, columns))


def _chosen(
    x: jax.Array, w: jax.Array, layouts: Layouts, groups: Groups, implementation: str | None
) -> Chosen:
    """The implementation for one product."""
    rows, features = layouts.x.local_shape
    features *= parts_over(mesh_of_shards().shape, layouts.gathered)
    blocks = layouts.sizes.local_shape[0]
    local = {
        "x": jax.ShapeDtypeStruct((rows // blocks, features), x.dtype),
        "w": layouts.w.local(w.dtype),
    }
    sizes = mesh_of_shards().shape
    task = Task(
        OP,
        local,
        partitioned=layouts.w.spec is None and any(sizes[axis] > 1 for axis in automatic_axes()),
        differing=varying(x) | varying(w),
        device=device_here(),
        length=features,
    )
    return choose(IMPLEMENTATIONS, task, implementation)


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are: the static argument of the `custom_vjp`."""

    chosen: tuple[Chosen, ...]
    layouts: tuple[Layouts, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(
    call: Call, x: jax.Array, matrices: list[jax.Array], sizes: jax.Array
) -> list[jax.Array]:
    """The product of `x` with each array of matrices."""
    first = call.layouts[0]

    def run_shard(x: jax.Array, sizes: jax.Array, *matrices: jax.Array) -> list[jax.Array]:
        whole = _gathered(x, first.gathered)
        made = []
        for chosen, layouts, w in zip(call.chosen, call.layouts, matrices, strict=True):
            forward = partial(chosen.implementation.forward, **chosen.options)
            y = _by_block(lambda x, sizes, w=w, run=forward: run(x, w, sizes), sizes, whole)
            made.append(_placed(y, layouts.summed, layouts.scattered))
        return made

    given = [layouts.w for layouts in call.layouts]
    return per_shard(
        run_shard,
        (x, sizes, *matrices),
        (first.x, first.sizes, *given),
        [layouts.y for layouts in call.layouts],
    )


def _forward(call: Call, x: jax.Array, matrices: list[jax.Array], sizes: jax.Array) -> Any:
    return _products(call, x, matrices, sizes), (x, matrices, sizes)


def _backward(call: Call, saved: Any, gradients: list[jax.Array]) -> tuple[Any, Any, None]:
    """The gradients to `x` and to the matrices, all in one function of a device's shards."""
    x, matrices, sizes = saved
    first, count = call.layouts[0], len(matrices)

    def run_shard(x: jax.Array, sizes: jax.Array, *others: jax.Array) -> list[jax.Array]:
        whole = _gathered(x, first.gathered)
        # The gradients to `x` of matrices, by the axes over which devices have parts of them.
        of_x: dict[tuple[str, ...], jax.Array] = {}
        of_matrices = []
        for k in range(count):
            chosen, layouts, w = call.chosen[k], call.layouts[k], others[k]
            backward = partial(chosen.implementation.backward, **chosen.options)
            gradient = _gathered(others[count + k], layouts.scattered)
            added, of_w = _gradients_by_block(backward, whole, w, sizes, gradient)
            # Where columns are split, each device has a part of the sum over them. A name's axes
            # may divide the columns of one matrix, and not those of another.
            parts = () if layouts.scattered else layouts.y.axes[1]
            of_x[parts] = of_x[parts] + added if parts in of_x else added
            if layouts.sizes.automatic_axes(0):
                of_w = lax.psum(of_w, layouts.sizes.automatic_axes(0))
            of_matrices.append(of_w)
        placed = [_placed(sums, parts, first.gathered) for parts, sums in of_x.items()]
        return [sum(placed[1:], placed[0]), *of_matrices]

    w_layouts = [layouts.w for layouts in call.layouts]
    y_layouts = [layouts.y for layouts in call.layouts]
    of_x, *of_matrices = per_shard(
        run_shard,
        (x, sizes, *matrices, *gradients),
        (first.x, first.sizes, *w_layouts, *y_layouts),
        [first.x, *w_layouts],
    )
    return of_x, of_matrices, None


_products.defvjp(_forward, _backward)


def _gradients_by_block(
    backward: Callable[..., Any], x: jax.Array, w: jax.Array, sizes: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients to the rows, block by block, and to the matrices, summed over blocks."""
    of_rows, of_w = [], None
    blocks = zip(_blocks(x, sizes), sizes, _blocks(gradient, sizes), strict=True)
    for block, block_sizes, block_gradient in blocks:
        of_block, added = backward(block, w, block_sizes, block_gradient)
        of_rows.append(of_block)
        of_w = added if of_w is None else of_w + added
    return _joined(of_rows), cast(jax.Array, of_w)


def _by_block(run: Callable[..., Any], sizes: jax.Array, x: jax.Array) -> jax.Array:
    """A function of rows and sizes, of each block."""
    pairs = zip(_blocks(x, sizes), sizes, strict=True)
    return _joined([run(block, block_sizes) for block, block_sizes in pairs])


def _blocks(x: jax.Array, sizes: jax.Array) -> list[jax.Array]:
    """The blocks of rows, as many as there are sizes."""
    count = sizes.shape[0]
    return [x] if count == 1 else list(x.reshape(count, -1, x.shape[1]))


def _joined(blocks: list[jax.Array]) -> jax.Array:
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks)


def _gathered(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All features of rows whose features are split over axes."""
    return lax.all_gather(x, axes, axis=1, tiled=True) if axes else x


def _placed(x: jax.Array, summed: tuple[str, ...], split: tuple[str, ...]) -> jax.Array:
    """A device's part, of the features, of a sum over devices.

    Args:
        x: the features whole, of which a device may have but a part of the sum.
        summed: the axes over which devices have such parts.
        split: the axes over which the features are split in the result.
    """
    if summed and summed == split:
        return lax.psum_scatter(x, summed, scatter_dimension=1, tiled=True)
    if summed:
        x = lax.psum(x, summed)
    if split:
        size = x.shape[1] // parts_over(mesh_of_shards().shape, split)
        x = lax.dynamic_slice_in_dim(x, shard_offset(split, size), size, 1)
    return x
