"""What Pallas kernels read and write of a device's memory, and of its fast memory take, counted
from their traced programs.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

CACHED = 2**20  # bytes of an array that a GPU's cache keeps while all of a kernel's blocks read it


@dataclass
class Touched:
    """Bytes read and written, and the most of fast memory that a kernel's blocks take."""

    read: int = 0
    written: int = 0
    fast: int = 0


def touched(traced: ClosedJaxpr, prefetched: Sequence[Any] = ()) -> Touched:
    """What the kernels in a traced function touch; nothing else in it counts.

    Args:
        traced: the function.
        prefetched: the arrays by which a TPU's kernel says, in each step of its grid, which blocks
            it takes; none for a kernel that knows that without any.
    """
    total = Touched()
    for equation in _equations(traced.jaxpr):
        if equation.primitive.name == "pallas_call":
            one = _of_grid(equation, prefetched)
        elif equation.primitive.name == "mpmd_map":
            one = _of_loads(equation)
        else:
            continue
        total = Touched(
            total.read + one.read, total.written + one.written, max(total.fast, one.fast)
        )
    return total


def _inner(equation: Any) -> Iterator[Any]:
    for value in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
    ):
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in ("pallas_call", "mpmd_map"):
            for inner in _inner(equation):
                yield from _equations(inner)


def _of_grid(equation: Any, prefetched: Sequence[Any]) -> Touched:
    """Of a TPU's kernel: a block is fetched, or written back, where its place differs from that of
    the step before.
    """
    mapping, total = equation.params["grid_mapping"], Touched()
    steps = list(itertools.product(*map(range, mapping.grid)))
    outputs = len(equation.outvars)
    for k, block in enumerate(mapping.block_mappings):
        sizes = [getattr(size, "block_size", 1) for size in block.block_shape]
        array = block.array_aval if hasattr(block, "array_aval") else block.array_shape_dtype
        itemsize = jnp.dtype(array.dtype).itemsize
        if len(sizes) != len(array.shape) or str(getattr(block, "block_aval", "")).startswith(
            "Ref<any>"
        ):
            continue
        place = jax.jit(jax.vmap(partial(_place, _closed(block.index_map_jaxpr), prefetched)))
        at = jnp.stack(place(*jnp.asarray(steps, jnp.int32).reshape(len(steps), -1).T), 1)
        moved = [tuple(row) for row, _ in itertools.groupby(map(tuple, at.tolist()))]
        # The last block of a ragged array is cut off where the array ends.
        count = sum(
            math.prod(
                min(size, whole - size * index)
                for size, whole, index in zip(sizes, array.shape, one, strict=True)
            )
            for one in moved
        )
        total.fast += 2 * math.prod(sizes) * itemsize
        if k < len(mapping.block_mappings) - outputs:
            total.read += count * itemsize
        else:
            total.written += count * itemsize
    for copy in _equations(equation.params["jaxpr"]):
        # One of the kernel's own, in each step but some at the ends.
        if copy.primitive.name == "dma_start":
            _count_copy(copy, len(steps), total)
    return total


def _place(index_map: ClosedJaxpr, prefetched: Sequence[Any], *step: Any) -> list[Any]:
    """Where the block of a step is, by an index map that may read what was prefetched.

    Reading a reference is not a function of arrays: here each reference is the array itself.
    """
    known = dict(zip(index_map.jaxpr.constvars, index_map.consts, strict=True))
    known |= dict(zip(index_map.jaxpr.invars, (*step, *prefetched), strict=True))

    def value(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known[atom]

    for equation in index_map.jaxpr.eqns:
        operands = [value(atom) for atom in equation.invars]
        if equation.primitive.name == "get":
            (indexer,) = jax.tree.unflatten(equation.params["tree"], operands[1:])
            results = [jnp.asarray(operands[0])[tuple(indexer.indices)]]
        elif "jaxpr" in equation.params:
            results = jaxpr_as_fun(equation.params["jaxpr"])(*operands)
        else:
            results = equation.primitive.bind(*operands, **equation.params)
            if not equation.primitive.multiple_results:
                results = [results]
        known |= dict(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in index_map.jaxpr.outvars]


def _count_copy(copy: Any, times: int, total: Touched) -> None:
    source, destination = copy.params["tree"].unflatten(copy.invars)[:2]
    fast = next(one for one in (source, destination) if "vmem" in str(one.ref.aval))
    shape = fast.transforms[-1].get_indexer_shape()
    count = times * math.prod(shape) * jnp.dtype(fast.ref.aval.dtype).itemsize
    if fast is source:
        total.written += count
    else:
        total.read += count


def _closed(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, [])


def _of_loads(equation: Any) -> Touched:
    """Of a GPU's kernel: its loads and stores, as often as its blocks and loops do them."""
    total, (mesh,), (jaxpr,) = Touched(), equation.params["meshes"], equation.params["jaxprs"]
    reads: dict[Any, int] = defaultdict(int)
    writes: dict[Any, int] = defaultdict(int)
    arrays: dict[Any, Any] = {}

    def walk(jaxpr: Any, refs: dict[Any, Any], times: int) -> None:
        for one in jaxpr.eqns:
            name = one.primitive.name
            if name in ("get", "load") and (ref := refs.get(one.invars[0])) is not None:
                reads[ref] += times * one.outvars[0].aval.size
            elif name in ("swap", "store") and (ref := refs.get(one.invars[0])) is not None:
                writes[ref] += times * one.outvars[0].aval.size
            elif name == "run_scoped":
                shared = (
                    v.aval
                    for v in one.params["jaxpr"].invars
                    if str(getattr(v.aval, "memory_space", "")) == "smem"
                )
                total.fast += sum(x.size * getattr(x.dtype, "itemsize", 0) for x in shared)
                walk(
                    one.params["jaxpr"],
                    _inherited(refs, one.params["jaxpr"].constvars, one.invars),
                    times,
                )
            else:
                for inner in _inner(one):
                    args = one.invars[len(one.invars) - len(inner.invars) :]
                    walk(
                        inner,
                        _inherited(refs, inner.invars, args),
                        times * one.params.get("length", 1),
                    )

    body = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    operands = [*body.constvars, *body.invars]
    for k, var in enumerate(operands):
        arrays[k] = var.aval
    walk(body, {var: k for k, var in enumerate(operands)}, math.prod(mesh.grid))
    for counts, field in ((reads, "read"), (writes, "written")):
        for k, count in counts.items():
            size, itemsize = arrays[k].size, jnp.dtype(arrays[k].dtype).itemsize
            count = size if size * itemsize <= CACHED else count
            setattr(total, field, getattr(total, field) + count * itemsize)
    return total


def _inherited(refs: dict[Any, Any], inside: Any, outside: Any) -> dict[Any, Any]:
    found = {
        var: refs[arg]
        for var, arg in zip(inside, outside, strict=False)
        if not hasattr(arg, "val") and arg in refs
    }
    return {**refs, **found}
