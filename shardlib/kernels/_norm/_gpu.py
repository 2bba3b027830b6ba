"""RMSNorm and LayerNorm on a GPU: a row in registers, each array read once and written once.

Forward is independent for each row. Backward also sums the gradients to scale and bias over all
rows. For this, `B` warpgroups take the rows in turns and keep running sums:

    warpgroup 0:      rows 0, B, 2B, ...      -> its sums --.
    warpgroup 1:      rows 1, B + 1, ...      -> its sums --+--> added up by XLA
    warpgroup B - 1:  ...                     -> its sums --'

The running sums are in shared memory while a warpgroup works, or in the result itself where they
do not fit. Rows are in `groups`, each of which has its own scale and bias (a `vmap` makes them).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._gpu import call
from shardlib.kernels._gpu_rows import (
    SHARED_BYTES,
    Numbers,
    RowBlocks,
    RowLayout,
    as_float32,
    over_rows,
    piecewise,
    refuses,
    shared_bytes,
    split_refs,
)
from shardlib.kernels._norm._reference import Norm
from shardlib.kernels._rows import batched, grouped

__all__ = ["backward", "forward", "refuses"]

FEWEST_TURNS = 8  # in which a warpgroup takes rows in backward
# Multiprocessors of a GPU, about. Each runs a few warpgroups, which have sums of their own.
PROCESSORS = 132


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The norm of the rows of `h = x + residual`, and `h`; rows must be whole on the device.

    Arguments are those of the reference. `simulated` runs the kernel in Pallas's interpreter.
    """
    run = partial(_forward_of_groups, Norm(epsilon, centred), simulated)
    return batched(run, "rows", "rows", "broadcast", "broadcast")(x, residual, scale, bias)


def _forward_of_groups(
    norm: Norm, simulated: bool, depth: int, x: Any, residual: Any, scale: Any, bias: Any
) -> tuple[Any, Any]:
    """The forward of rows with `depth` batch dims first, each with a scale and a bias of its own.

    Args:
        norm: which norm.
        simulated: whether an interpreter runs the kernel.
        depth: how many dims `vmap` added in front.
        x: rows.
        residual: what is added to them, or None.
        scale: a row for each element of the batch dims, or one for all, or None.
        bias: as `scale`.
    """
    groups, aligned = grouped(depth, x, scale, bias)
    shared = _present(*aligned)
    if all(len(array) == 1 for array in shared):
        groups = 1  # all rows have the same scale and bias

    dtypes = [x.dtype, *(array.dtype for array in shared)]
    rows = RowLayout.choose(x.shape[-1], dtypes, simulated=simulated)
    # With an epsilon of zero a row of zeros has no norm: padding repeats the last row.
    inputs = [rows.flatten(array, groups, mode="edge") for array in _present(x, residual)]
    kernel = _ForwardKernel(
        rows,
        norm,
        x.dtype,
        len(inputs),
        scale is not None,
        tuple(len(array) > 1 for array in shared),
    )
    count = len(inputs[0])
    # There is a result `h` only where a residual makes it differ from `x`.
    shapes = [jax.ShapeDtypeStruct((count, rows.length), x.dtype)] * len(inputs)
    blocks = RowBlocks(rows, groups, count // groups)
    run = over_rows(kernel, "norm_forward", blocks, shapes, rows.scratch(x.dtype))
    results = [rows.unflatten(array, x.shape, groups) for array in run(*inputs, *shared)]
    if residual is None:
        return results[0], x
    y, h = results
    return y, h


@dataclass(frozen=True)
class _ForwardKernel:
    """The program that computes the norm of a block of rows.

    Its references are to `inputs` arrays of rows, to the scale and bias as far as there are such,
    to `y`, to `h` if a residual is added, and to shared memory for `h` if rows are streamed.
    """

    rows: RowLayout
    norm: Norm
    dtype: Any  # in which `h` is rounded
    inputs: int  # 1, or 2 with a residual
    scaled: bool
    by_group: tuple[bool, ...]  # for scale and bias, whether each group has its own

    def __call__(self, group: Any, indices: list[jax.Array], *refs: Any) -> None:
        """Trace the program for the rows with these indices."""
        rows, shared_count = self.rows, len(self.by_group)
        sizes = (self.inputs, shared_count, 1, self.inputs - 1)
        inputs, shared_refs, (y_ref,), h_refs, staging = split_refs(refs, *sizes)
        # Loads come first: those of the second row are on their way while the first is computed.
        loaded = [[rows.load(ref, index) for ref in inputs] for index in indices]
        shared = []
        for ref, by_group in zip(shared_refs, self.by_group, strict=True):
            shared.append(rows.load_shared(ref, group if by_group else 0))
        for index, (x, *residuals) in zip(indices, loaded, strict=True):
            h = piecewise(as_float32, x)
            for residual in residuals:
                h = piecewise(self._add_rounded, h, piecewise(as_float32, residual))
            h = piecewise(as_float32, rows.stage(h, staging))
            unit, _ = _unit_rows(rows, h, self.norm)
            y = self._scale_and_shift(unit, shared)
            rows.store((y_ref, index, y), *((ref, index, h) for ref in h_refs))

    def _add_rounded(self, h: jax.Array, residual: jax.Array) -> jax.Array:
        """The sum, rounded as it will be in memory, since backward reads it rounded."""
        return as_float32((h + residual).astype(self.dtype))

    def _scale_and_shift(self, unit: Numbers, shared: Sequence[Numbers]) -> Numbers:
        """Multiply by the scale and add the bias, as far as there are such."""
        operations = [jnp.add]
        if self.scaled:
            operations = [jnp.multiply, jnp.add]
        y = unit
        for operation, row in zip(operations, shared, strict=False):
            y = piecewise(operation, y, piecewise(as_float32, row))
        return y


def backward(
    h: jax.Array,
    scale: jax.Array | None,
    gradient: jax.Array,
    h_gradient: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    biased: bool,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The gradients to `x`, scale and bias; rows must be whole on the device.

    Arguments are those of the reference; `simulated` runs the kernel in Pallas's interpreter.
    """
    run = partial(_backward_of_groups, Norm(epsilon, centred), biased, simulated)
    operands = (h, scale, gradient, h_gradient)
    x_gradient, *sums = batched(run, "rows", "broadcast", "rows", "rows")(*operands)
    scale_gradient = bias_gradient = None
    # The sum for the scale comes first, if there is one.
    if scale is not None:
        scale_gradient = sums.pop(0)
    if biased:
        bias_gradient = sums.pop()
    return x_gradient, scale_gradient, bias_gradient


def _backward_of_groups(
    norm: Norm,
    biased: bool,
    simulated: bool,
    depth: int,
    h: Any,
    scale: Any,
    gradient: Any,
    h_gradient: Any,
) -> tuple[Any, ...]:
    """The backward of rows with `depth` batch dims first: the gradient to `x`, and sums over rows.

    The sums are the gradient to the scale and that to the bias, as far as there are such, and are
    `(*batch dims, row)`.

    Args:
        norm: which norm.
        biased: whether there is a bias, which needs a sum.
        simulated: whether an interpreter runs the kernel.
        depth: how many dims `vmap` added in front.
        h: the rows that were normed.
        scale: a row for each element of the batch dims, or one for all, or None.
        gradient: that to the norm's output.
        h_gradient: the gradient to `h` from elsewhere, or None.
    """
    groups, (scale,) = grouped(depth, h, scale)
    dtypes = [array.dtype for array in _present(h, gradient, h_gradient, scale)]
    rows = RowLayout.choose(h.shape[-1], dtypes, simulated=simulated)
    count = h.size // rows.length // groups
    inputs = [rows.flatten(h, groups, mode="edge")]
    # Rows that `flatten` adds have a gradient of zero here, and so add nothing to the sums.
    inputs += [rows.flatten(array, groups) for array in _present(gradient, h_gradient)]
    sum_count = (scale is not None) + biased
    sums_memory, staging = _backward_scratch(rows, sum_count, h.dtype, gradient.dtype)
    blocks = _count_blocks(rows, count, shared_bytes(*sums_memory, *staging))
    kernel = _BackwardKernel(
        rows=rows,
        norm=norm,
        count=count,
        padded_count=max(count, rows.rows_held),
        blocks=blocks,
        inputs=len(inputs),
        scaled=scale is not None,
        scale_by_group=scale is not None and len(scale) > 1,
        biased=biased,
        sums_in_shared_memory=bool(sums_memory),
    )

    def norm_backward(*refs: Any) -> None:
        kernel.run(refs)

    sums = jax.ShapeDtypeStruct((groups * blocks * rows.rows_held, rows.length), jnp.float32)
    x_gradient, *block_sums = call(
        norm_backward,
        "norm_backward",
        [jax.ShapeDtypeStruct(inputs[0].shape, h.dtype), *[sums] * sum_count],
        simulated,
        scratch_types=[*sums_memory, *staging],
        grid=(groups, blocks),
        grid_names=("group", "block"),
    )(*inputs, *_present(scale))
    x_gradient = rows.unflatten(x_gradient, h.shape, groups)
    batch = h.shape[:depth]
    group_sums = []
    for array in block_sums:
        by_group = array.reshape(groups, -1, rows.length).sum(1)
        group_sums.append(by_group.reshape(*batch, rows.length))
    return x_gradient, *group_sums


def _backward_scratch(
    rows: RowLayout, sum_count: int, h_dtype: Any, gradient_dtype: Any
) -> tuple[list[Any], list[Any]]:
    """Shared memory of a warpgroup in backward: for its running sums, and for streamed rows.

    Both are empty where they are not needed or do not fit. Sums take what there is before rows do.
    """
    sums_memory: list[Any] = []
    if sum_count:
        sums = plgpu.SMEM((sum_count * rows.rows_held, rows.pitch), jnp.float32)
        if shared_bytes(sums) <= SHARED_BYTES:
            sums_memory = [sums]
    return sums_memory, rows.scratch(h_dtype, gradient_dtype, reserved=sums_memory)


def _count_blocks(rows: RowLayout, count: int, shared: int) -> int:
    """How many warpgroups share the rows of a group, if each needs so many bytes of shared memory.

    As many as the GPU runs at once, but each has `FEWEST_TURNS` or more. Each writes sums that XLA
    reads again: with `FEWEST_TURNS` this is a third of all traffic, and less with more turns.
    """
    total_turns = -(-count // rows.rows_held)
    # Registers allow so many warpgroups on a processor, and shared memory may allow fewer.
    by_registers = 2 if rows.one_row_per_lane else 4
    at_once = min(by_registers, SHARED_BYTES // max(shared, 1))
    turns = max(-(-total_turns // (PROCESSORS * at_once)), FEWEST_TURNS)
    return -(-total_turns // turns)


@dataclass(frozen=True)
class _Accumulators:
    """Where a warpgroup adds up gradients over rows.

    There is a reference and an index for each sum: that of the scale first, then that of the bias,
    as far as there are such.
    """

    refs: Sequence[Any]
    indices: Sequence[Any]  # the first row of the warpgroup's sum

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Each reference with its index."""
        return list(zip(self.refs, self.indices, strict=True))


@dataclass(frozen=True)
class _BackwardRefs:
    """The references of a backward program, by name."""

    inputs: Sequence[Any]  # `h`, the gradient, and perhaps the gradient to `h` from elsewhere
    scale: Sequence[Any]  # one or none
    x: Any  # the gradient to `x`
    sums: Sequence[Any]  # results: the sums of all warpgroups
    sums_memory: Sequence[Any]  # this warpgroup's in shared memory, in one array, or none
    staging: Sequence[Any]  # shared memory for streamed rows


@dataclass(frozen=True)
class _BackwardKernel:
    """The program of one warpgroup in backward, which takes every `blocks`-th part of a group.

    A part is one long row or 128 short ones. The warpgroup adds up its parts' gradients to
    scale and bias.
    """

    rows: RowLayout
    norm: Norm
    count: int  # rows of a group
    padded_count: int  # with those that `flatten` added
    blocks: int  # warpgroups that share a group
    inputs: int
    scaled: bool
    scale_by_group: bool  # or one for all groups
    biased: bool
    sums_in_shared_memory: bool

    def run(self, refs: Sequence[Any]) -> None:
        """Trace the program: clear the sums, take rows in turns, and write the sums."""
        rows, named = self.rows, self._named(refs)
        group, block = lax.axis_index("group"), lax.axis_index("block")
        # Where this warpgroup's sums go in the results.
        result_index = (group * self.blocks + block) * rows.rows_held
        results = _Accumulators(named.sums, [result_index] * len(named.sums))
        sums = self._accumulators(named, results)
        rows.store(*((ref, index, lambda piece: rows.full(0.0)) for ref, index in sums.pairs))

        def take_turn(turn: jax.Array, _: None) -> None:
            # In the last turn there may be no rows left: nothing is written then, since those rows
            # are another warpgroup's.
            first = (block + turn * self.blocks) * rows.rows_held
            pl.when(first < self.padded_count)(
                lambda: self._add_rows_from(first, group, named, sums)
            )

        turns = -(-self.count // (self.blocks * rows.rows_held))
        lax.fori_loop(0, turns, take_turn, None)
        if self.sums_in_shared_memory:
            # Running sums go from shared memory to the results.
            writes = []
            for out, (ref, index) in zip(named.sums, sums.pairs, strict=True):
                writes.append((out, result_index, rows.load(ref, index, now=False)))
            rows.store(*writes)

    def _named(self, refs: Sequence[Any]) -> _BackwardRefs:
        """The references by name; they come in the order of the fields of `_BackwardRefs`."""
        sizes = (
            self.inputs,
            int(self.scaled),
            1,
            self.scaled + self.biased,
            int(self.sums_in_shared_memory),
        )
        inputs, scale, (x,), sums, sums_memory, staging = split_refs(refs, *sizes)
        return _BackwardRefs(inputs, scale, x, sums, sums_memory, staging)

    def _accumulators(self, refs: _BackwardRefs, results: _Accumulators) -> _Accumulators:
        """Shared memory for the running sums, one after the other, or else the results."""
        if not self.sums_in_shared_memory:
            return results
        kinds = len(refs.sums)
        offsets = [kind * self.rows.rows_held for kind in range(kinds)]
        return _Accumulators([refs.sums_memory[0]] * kinds, offsets)

    def _add_rows_from(
        self, first: Any, group: Any, refs: _BackwardRefs, sums: _Accumulators
    ) -> None:
        """Write the gradient to the rows from `first` on, and add theirs to the sums.

        All writes share one pass over the columns, so that a streamed row is read no more
        often than its reductions require.
        """
        rows = self.rows
        # Near the end of a group of short rows, some are computed a second time.
        begin = jnp.minimum(first, self.padded_count - rows.rows_held)
        # Rows of all groups are in one array.
        index = group * self.padded_count + begin
        loaded = [rows.load(ref, index) for ref in refs.inputs]
        h = piecewise(as_float32, rows.stage(loaded[0], refs.staging[0:1]))
        g = piecewise(as_float32, rows.stage(loaded[1], refs.staging[1:2]))
        unit, inverse = _unit_rows(rows, h, self.norm)
        unit_gradient = g
        if self.scaled:
            scale = rows.load_shared(refs.scale[0], group if self.scale_by_group else 0)
            unit_gradient = piecewise(lambda g, scale: g * as_float32(scale), g, scale)
        x_gradient = self._through_norm(unit_gradient, unit, inverse)
        for h_gradient in loaded[2:]:
            x_gradient = piecewise(
                lambda x_gradient, h_gradient: x_gradient + as_float32(h_gradient),
                x_gradient,
                h_gradient,
            )
        # Rows that are computed a second time are added to the sums once.
        is_new = rows.row_indices(begin) >= first
        summands = []
        if self.scaled:
            summands.append(piecewise(jnp.multiply, g, unit))
        if self.biased:
            summands.append(g)
        writes = []
        for (ref, own_index), summand in zip(sums.pairs, summands, strict=True):
            so_far = rows.load(ref, own_index, now=False)
            total = piecewise(_add_where, so_far, rows.without_repeats(summand), is_new)
            writes.append((ref, own_index, total))
        rows.store((refs.x, index, x_gradient), *writes)

    def _through_norm(self, unit_gradient: Numbers, unit: Numbers, inverse: jax.Array) -> Numbers:
        """The gradient to `h` through the norm, from that to the unit rows.

        With `g` for `unit_gradient` it is `inverse * (g - unit * mean(g * unit) - mean(g))`,
        without the last term if the norm is not centred.
        """
        rows = self.rows
        mean = rows.total(piecewise(jnp.multiply, unit_gradient, unit)) * (1 / rows.length)
        x_gradient = piecewise(
            lambda unit_gradient, unit, mean: unit_gradient - unit * mean, unit_gradient, unit, mean
        )
        if self.norm.centred:
            x_gradient = piecewise(
                jnp.subtract, x_gradient, rows.total(unit_gradient) * (1 / rows.length)
            )
        return piecewise(jnp.multiply, x_gradient, inverse)


def _unit_rows(rows: RowLayout, h: Numbers, norm: Norm) -> tuple[Numbers, jax.Array]:
    """Rows of mean square one, and the factor that made them so."""
    if norm.centred:
        h = piecewise(jnp.subtract, h, rows.total(h) * (1 / rows.length))
    mean_square = rows.total(piecewise(jnp.square, h)) * (1 / rows.length)
    inverse = lax.rsqrt(mean_square + norm.epsilon)
    return piecewise(jnp.multiply, h, inverse), inverse


def _add_where(so_far: jax.Array, x: jax.Array, is_added: jax.Array) -> jax.Array:
    """Add those rows to a sum for which `is_added` is true."""
    return so_far + jnp.where(is_added, x, jnp.zeros_like(x))


def _present(*arrays: Any) -> list[Any]:
    """The arrays that are not None."""
    return [array for array in arrays if array is not None]
