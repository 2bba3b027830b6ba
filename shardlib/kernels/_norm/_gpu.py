"""RMSNorm and LayerNorm on a GPU: a row in the registers of a warpgroup, each array read once and
written once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._gpu import call
from shardlib.kernels._gpu_rows import (
    SHARED,
    Numbers,
    Rows,
    each,
    over_rows,
    parts,
    refuses,
    shared_bytes,
    wide,
)
from shardlib.kernels._rows import batched, grouped

__all__ = ["backward", "forward", "refuses"]

FEW = 8  # rows, at least, that a warpgroup sums, or times 128 where lanes do
# Of a GPU, about: so many times some warpgroups sum gradients over rows, each its own.
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
    """As the reference's, of whole rows."""

    def here(depth: int, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
        groups, beside = grouped(depth, x, scale, bias)
        shared = [one for one in beside if one is not None]
        groups = groups if any(len(one) > 1 for one in shared) else 1
        of = Rows.of(x.shape[-1], [x.dtype, *(one.dtype for one in shared)], simulated=simulated)
        of_rows = [of.flat(one, groups, mode="edge") for one in (x, residual) if one is not None]

        def norm_forward(group: Any, indices: list[jax.Array], *refs: Any) -> None:
            sizes = len(of_rows), len(shared), 1, len(of_rows) - 1
            inputs, of_shared, (y_ref,), h_refs, space = parts(refs, *sizes)
            loaded = [[of.load(ref, index) for ref in inputs] for index in indices]
            same = [
                of.load_shared(ref, group if len(one) > 1 else 0)
                for ref, one in zip(of_shared, shared, strict=True)
            ]
            for index, given in zip(indices, loaded, strict=True):
                h, *added = (each(wide, one) for one in given)
                for one in added:
                    h = each(lambda h, residual: wide((h + residual).astype(x.dtype)), h, one)
                h = each(wide, of.keep(h, space))
                y, _ = _unit(of, h, epsilon, centred)
                for put, one in zip(
                    [jnp.multiply] * (scale is not None) + [jnp.add], same, strict=False
                ):
                    y = each(put, y, each(wide, one))
                of.store((y_ref, index, y), *((ref, index, h) for ref in h_refs))

        count = len(of_rows[0])
        outs = [jax.ShapeDtypeStruct((count, of.row), x.dtype)] * len(of_rows)
        results = over_rows(norm_forward, of, groups, count // groups, outs, of.room(x.dtype))(
            *of_rows, *shared
        )
        y, *sums = (of.unflat(one, x.shape, groups) for one in results)
        return y, sums[0] if sums else x

    return batched(here, "rows", "rows", "beside", "beside")(x, residual, scale, bias)


def backward(
    h: jax.Array,
    scale: jax.Array | None,
    gradient: jax.Array,
    of_h: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    biased: bool,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """As the reference's, of whole rows; each warpgroup adds up the gradients of what rows share,
    in its shared memory.
    """

    def here(depth: int, h: Any, scale: Any, gradient: Any, of_h: Any) -> tuple[Any, ...]:
        groups, (scale,) = grouped(depth, h, scale)
        dtypes = [one.dtype for one in (h, gradient, of_h, scale) if one is not None]
        of = Rows.of(h.shape[-1], dtypes, simulated=simulated)
        count = h.size // of.row // groups
        # Rows of a group, with those that `flat` adds, which have no gradient.
        there = max(count, of.held)
        given = [
            of.flat(h, groups, mode="edge"),
            *(of.flat(one, groups) for one in (gradient, of_h) if one is not None),
        ]
        kinds = (scale is not None) + biased
        scratch = [plgpu.SMEM((kinds * of.held, of.pitch), jnp.float32)] * (kinds > 0)
        scratch = scratch if shared_bytes(*scratch) <= SHARED else []
        room = of.room(h.dtype, gradient.dtype, beside=scratch)
        at_once = min(2 if of.apart else 4, SHARED // max(shared_bytes(*scratch, *room), 1))
        blocks = _share(-(-count // of.held), at_once)

        def norm_backward(*refs: Any) -> None:
            inputs, shared, (x_ref,), sum_refs, own_sums, space = parts(
                refs, len(given), scale is not None, 1, kinds, len(scratch)
            )
            group, block = lax.axis_index("group"), lax.axis_index("block")
            # The first of its sums, which it adds up there if nowhere nearer.
            own = (group * blocks + block) * of.held
            sums = [(ref, own) for ref in sum_refs]
            if scratch:
                sums = [(own_sums[0], which * of.held) for which in range(kinds)]
            of.store(*((ref, at, lambda piece: of.full(0.0)) for ref, at in sums))

            def of_turn(turn: jax.Array, _: None) -> None:
                # In the last turn there may be no rows left: what another warpgroup writes is not
                # written a second time.
                first = (block + turn * blocks) * of.held
                pl.when(first < there)(lambda: of_rows_from(first))

            def of_rows_from(first: jax.Array) -> None:
                at = jnp.minimum(first, there - of.held)
                index = group * there + at
                h, g, *added = (of.load(ref, index) for ref in inputs)
                h, g = (each(wide, of.keep(one, space[k : k + 1])) for k, one in enumerate((h, g)))
                unit, inverse = _unit(of, h, epsilon, centred)
                of_unit = g
                if scale is not None:
                    scales = of.load_shared(shared[0], group if len(scale) > 1 else 0)
                    of_unit = each(lambda g, scale: g * wide(scale), g, scales)
                mean = of.total(each(jnp.multiply, of_unit, unit)) * (1 / of.row)
                of_x = each(lambda a, b, mean: a - b * mean, of_unit, unit, mean)
                if centred:
                    of_x = each(jnp.subtract, of_x, of.total(of_unit) * (1 / of.row))
                of_x = each(jnp.multiply, of_x, inverse)
                for one in added:
                    of_x = each(lambda of_x, one: of_x + wide(one), of_x, one)
                counts = of.indices(at) >= first  # the last rows may be done twice, and count once
                of_sums = [each(jnp.multiply, g, unit)] * (scale is not None) + [g] * biased
                adds = [
                    (ref, at, each(_added, of.load(ref, at, now=False), of.once(x), counts))
                    for (ref, at), x in zip(sums, of_sums, strict=True)
                ]
                of.store((x_ref, index, of_x), *adds)

            lax.fori_loop(0, -(-count // (blocks * of.held)), of_turn, None)
            if scratch:
                of.store(
                    *(
                        (out, own, of.load(ref, at, now=False))
                        for out, (ref, at) in zip(sum_refs, sums, strict=True)
                    )
                )

        sums = jax.ShapeDtypeStruct((groups * blocks * of.held, of.row), jnp.float32)
        of_x, *of_rows = call(
            norm_backward,
            "norm_backward",
            [jax.ShapeDtypeStruct(given[0].shape, h.dtype), *[sums] * kinds],
            simulated,
            scratch_types=[*scratch, *room],
            grid=(groups, blocks),
            grid_names=("group", "block"),
        )(*given, *([] if scale is None else [scale]))
        summed = (
            one.reshape(groups, -1, of.row).sum(1).reshape(*h.shape[:depth], of.row)
            for one in of_rows
        )
        return of.unflat(of_x, h.shape, groups), *summed

    of_x, *of_rows = batched(here, "rows", "beside", "rows", "rows")(h, scale, gradient, of_h)
    return of_x, of_rows.pop(0) if scale is not None else None, of_rows.pop() if biased else None


def _share(count: int, at_once: int) -> int:
    """How many warpgroups share so many rows, each about as many as the others, if a processor has
    so many of them at once.

    Each writes sums, which are read again: that is a third of what `FEW` rows move, and less of
    more.
    """
    turns = max(-(-count // (PROCESSORS * at_once)), FEW)
    return -(-count // turns)


def _unit(of: Rows, h: Numbers, epsilon: float, centred: bool) -> tuple[Numbers, jax.Array]:
    if centred:
        h = each(jnp.subtract, h, of.total(h) * (1 / of.row))
    inverse = lax.rsqrt(of.total(each(jnp.square, h)) * (1 / of.row) + epsilon)
    return each(jnp.multiply, h, inverse), inverse


def _added(so_far: jax.Array, x: jax.Array, counts: jax.Array) -> jax.Array:
    return so_far + jnp.where(counts, x, jnp.zeros_like(x))
