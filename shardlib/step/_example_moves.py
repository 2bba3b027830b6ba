"""How operations that move, pick or multiply elements change which dims hold examples.

Each rule takes an equation of a traced loss and the facts of its operands, none of which is a
total or coupled (the walk in `_coupled` has dealt with those), and returns the fact of its result:

    x: [batch, seq, dim]      reshape       ->  [batch * seq, dim]    dim 0 still counts examples
    x: [batch, dim]           transpose     ->  [dim, batch]          dim 1 holds them
    x, y: [batch, dim]        x @ y.T       ->  [batch, batch]        coupled: each against each
    x, y: [batch, dim]        x.T @ y       ->  [dim, dim]            a total, a sum over examples

`MOVE_RULES` at the end maps the names of primitives to these rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlib.modeling._random import rows_of
from shardlib.step._example_rules import along_axis, couple, elementwise, unknown
from shardlib.step._examples import (
    Fact,
    Factor,
    Rows,
    factors_of,
    has_row,
    plain,
    reshaped,
    resized,
    with_examples,
    with_rows,
)
from shardlib.tracing._jaxpr import line_of

# Changes of shape


def _reshape(equation: Any, operands: list[Fact]) -> Fact:
    return with_rows(operands[0], reshaped(operands[0].rows, equation.outvars[0].aval.shape))


def _broadcast_in_dim(equation: Any, operands: list[Fact]) -> Fact:
    """The operand's dims of examples at the positions to which the broadcast maps them.

    The dims that the broadcast adds hold copies, and so no examples.
    """
    fact = operands[0]
    if fact.rows is None:
        return fact
    rows = list(plain(equation.outvars[0].aval.shape))
    output_dims = equation.params["broadcast_dimensions"]
    for factors, output_dim in zip(fact.rows, output_dims, strict=True):
        if has_row(factors):
            rows[output_dim] = factors
    return replace(fact, rows=tuple(rows))


def _transpose(equation: Any, operands: list[Fact]) -> Fact:
    rows = operands[0].rows
    if rows is None:
        return operands[0]
    permuted = tuple(rows[dim] for dim in equation.params["permutation"])
    return replace(operands[0], rows=permuted)


def _squeeze(equation: Any, operands: list[Fact]) -> Fact:
    """The dims that are left; a squeezed dim of one example makes a value of a single example."""
    fact = operands[0]
    if fact.rows is None:
        return fact
    squeezed = equation.params["dimensions"]
    kept = [factors for dim, factors in enumerate(fact.rows) if dim not in squeezed]
    return with_rows(fact, tuple(kept))


def _slice_or_pad(equation: Any, operands: list[Fact]) -> Fact:
    """The same dims with fewer or more elements, as slices, padding and updates make them.

    Where only the other operands hold examples (an update written into a constant array), the
    dims are guessed from their sizes.
    """
    fact = operands[0]
    if fact.rows is None:
        return unknown(equation, operands)
    return resized(fact, equation.outvars[0].aval)


def _rev(equation: Any, operands: list[Fact]) -> Fact:
    """The same elements in the reverse order along some dims."""
    (fact,) = operands
    turned = fact.several & set(equation.params["dimensions"])
    return replace(fact, moved=True) if turned else fact


# Several arrays in one


def _first_with_rows(facts: list[Fact]) -> Fact:
    """The first fact that has dims of examples, or else the first of all."""
    for fact in facts:
        if fact.rows is not None:
            return fact
    return facts[0]


def _concatenate(equation: Any, operands: list[Fact]) -> Fact:
    """The dims of examples of all operands together.

    Along the concatenated dim, operands of equal shapes are taken for several views of the same
    examples, as in contrastive losses; operands of different shapes for different examples.
    """
    shape, axis = equation.outvars[0].aval.shape, equation.params["dimension"]
    dims: set[int] = set()
    for fact in operands:
        dims |= fact.dims
    example = _first_with_rows(operands)
    if example.rows is None:
        return elementwise(equation, equation.outvars[0], operands)
    rows = list(plain(shape))
    for dim in dims - {axis}:
        rows[dim] = example.rows[dim]
    if axis in dims:
        operand_shapes = {atom.aval.shape for atom in equation.invars}
        if len(operand_shapes) == 1:
            # The views come first: they vary slowest.
            rows[axis] = ((len(operands), False), *example.rows[axis])
        else:
            rows[axis] = ((shape[axis], True),)
    return replace(example, rows=tuple(rows))


def _stack(equation: Any, operands: list[Fact]) -> Fact:
    """The dims of the operands with a new one, which counts operands and not examples."""
    fact = _first_with_rows(operands)
    if fact.rows is None:
        return Fact(single=any(operand.single for operand in operands))
    # The operands have equal shapes, so that the rows of one stand for all.
    rows = list(fact.rows)
    rows.insert(equation.params["axis"], ((len(operands), False),))
    return replace(fact, rows=tuple(rows))


# Indexing


def _gather(equation: Any, operands: list[Fact]) -> Fact:
    """The elements that indices pick: a row for each example of the indices, or of the operand.

    If the indices belong to examples (an embedding lookup), so do the results, one for each. If
    they do not, they pick among the examples of the operand (a permutation, a subset).
    """
    operand, indices = operands
    numbers = equation.params["dimension_numbers"]
    shape = equation.outvars[0].aval.shape
    operand_rank = len(equation.invars[0].aval.shape)
    rows = list(plain(shape))
    # The dims of the result are those of the indices and, at `offset_dims`, the dims of the
    # operand that are neither collapsed nor batched.
    index_dims = _other_dims(len(shape), numbers.offset_dims)
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window_dims = _other_dims(operand_rank, dropped)
    if indices.rows is not None:
        # The last dim of the indices is the index vector itself.
        for dim, factors in zip(index_dims, indices.rows[:-1], strict=True):
            rows[dim] = factors
    else:
        counting_dims: list[int] = []
        # Examples are picked by numbers that do not depend on them: the result has some of them.
        if operand.dims - set(window_dims):
            counting_dims += index_dims
        for output_dim, window_dim in zip(numbers.offset_dims, window_dims, strict=True):
            if window_dim in operand.dims:
                counting_dims.append(output_dim)
        for dim in counting_dims:
            rows[dim] = ((shape[dim], True),)
    single = operand.single or indices.single
    picked = set(numbers.collapsed_slice_dims) & operand.several
    moved = operand.moved or (indices.rows is None and bool(picked))
    return with_rows(Fact(rows=(), single=single, moved=moved), tuple(rows))


def _other_dims(rank: int, dims: Sequence[int]) -> list[int]:
    """The dims of an array of some rank that are not among `dims`, in order."""
    return [dim for dim in range(rank) if dim not in dims]


def _scatter(equation: Any, operands: list[Fact]) -> Fact:
    """An array into which examples are written: it holds them, or adds them up.

    What is written into an array whose first dim is as long as the examples is most likely a row
    for each. Otherwise examples meet in the same elements, and the result is a sum over them.
    """
    operand, indices, updates = operands
    if operand.rows is not None:
        return operand
    shape = equation.outvars[0].aval.shape
    numbers = equation.params["dimension_numbers"]
    rows = list(plain(shape))
    index_shape = equation.invars[1].aval.shape
    operand_dims, index_dims = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    for operand_dim, index_dim in zip(operand_dims, index_dims, strict=True):
        if index_dim in indices.dims:
            rows[operand_dim] = factors_of(indices, index_dim, index_shape)
    if any(map(has_row, rows)):
        return Fact(rows=tuple(rows))
    if shape and shape[0] in _example_lengths(equation, operands):
        return with_examples(shape)
    # Nothing that is written depends on the examples.
    if not (indices.varies or updates.varies):
        return operand
    return _sum_over_examples(equation)


def _example_lengths(equation: Any, operands: list[Fact]) -> set[int]:
    """The sizes of all dims of the operands that hold examples."""
    lengths: set[int] = set()
    for atom, fact in zip(equation.invars, operands, strict=True):
        lengths.update(atom.aval.shape[dim] for dim in fact.dims)
    return lengths


# Products


@dataclass(frozen=True)
class _ProductSide:
    """One operand of a `dot_general`: its fact, its shape, and the roles of its dims.

    A dim is contracted (summed over), batched (paired with a dim of the other side), or free. The
    result has the batched dims first, then the free ones of the left, then those of the right.
    """

    fact: Fact
    shape: tuple[int, ...]
    contracted: tuple[int, ...]
    batched: tuple[int, ...]

    @property
    def sums_examples(self) -> bool:
        """Whether a contracted dim holds examples."""
        return bool(self.fact.dims & set(self.contracted))

    @property
    def batches_examples(self) -> bool:
        """Whether a batched dim holds examples."""
        return bool(self.fact.dims & set(self.batched))

    @property
    def has_free_examples(self) -> bool:
        """Whether a free dim holds several examples."""
        return bool(self.fact.several - set(self.contracted) - set(self.batched))

    def free_factors(self) -> list[tuple[Factor, ...]]:
        """The factors of the free dims, in order."""
        free = _other_dims(len(self.shape), (*self.contracted, *self.batched))
        return [factors_of(self.fact, dim, self.shape) for dim in free]


def _dot_general(equation: Any, operands: list[Fact]) -> Fact:
    """A product: coupled, a sum over examples, or a row for each example.

    It couples if examples of one side meet those of the other, each against each, or if examples
    are summed over while others stay (attention from example to example). Where examples are
    paired by a batched dim, each meets only itself.
    """
    contracted, batched = equation.params["dimension_numbers"]
    left_atom, right_atom = equation.invars
    left = _ProductSide(operands[0], left_atom.aval.shape, contracted[0], batched[0])
    right = _ProductSide(operands[1], right_atom.aval.shape, contracted[1], batched[1])
    summed = left.sums_examples or right.sums_examples
    paired = left.batches_examples or right.batches_examples
    each_against_each = left.has_free_examples and right.has_free_examples
    some_stay = left.has_free_examples or right.has_free_examples
    if (each_against_each and not paired) or (summed and some_stay):
        return couple(equation, line_of(equation))
    if summed and not paired:
        # A product with what is no example scales, as a mean by a vector of 1/n does.
        scaled = not all(fact.varies for fact in operands)
        return Fact(total="sum", scaled=scaled, reduced=line_of(equation))
    single = any(fact.single for fact in operands)
    return with_rows(Fact(rows=(), single=single), _product_rows(left, right))


def _product_rows(left: _ProductSide, right: _ProductSide) -> Rows:
    """The rows of a product whose sides do not couple: batched dims, then the free ones."""
    rows: list[tuple[Factor, ...]] = []
    for left_dim, right_dim in zip(left.batched, right.batched, strict=True):
        # Where only one side holds examples along a batched dim, the result has them from there.
        if left_dim in left.fact.dims:
            rows.append(factors_of(left.fact, left_dim, left.shape))
        else:
            rows.append(factors_of(right.fact, right_dim, right.shape))
    rows += left.free_factors()
    rows += right.free_factors()
    return tuple(rows)


def _conv_general_dilated(equation: Any, operands: list[Fact]) -> Fact:
    """A convolution, which keeps examples apart along the batch dim of the images.

    The derivative with respect to a kernel is a convolution too. There a kernel, or another dim of
    the images, holds the examples, and the result is a sum over them.
    """
    numbers = equation.params["dimension_numbers"]
    images, kernel = operands
    # Forward, a kernel is a parameter and belongs to no example.
    if kernel.varies:
        return _sum_over_examples(equation)
    if images.rows is None:
        return images
    batch_dim = numbers.lhs_spec[0]
    if images.dims - {batch_dim}:
        return _sum_over_examples(equation)
    rows = list(plain(equation.outvars[0].aval.shape))
    rows[numbers.out_spec[0]] = images.rows[batch_dim]
    return replace(images, rows=tuple(rows))


def _sum_over_examples(equation: Any) -> Fact:
    """The fact of a sum over examples that nothing has divided yet."""
    return Fact(total="sum", scaled=False, reduced=line_of(equation))


# Sorting and drawing


def _sort(equation: Any, operands: list[Fact]) -> list[Fact]:
    """The operands in another order, which couples examples if it is one among examples.

    All operands are sorted together, so that each result depends on all of them.
    """
    fact = operands[0]
    for operand in operands:
        if operand.varies:
            fact = operand
            break
    return [along_axis(equation, fact, equation.params["dimension"])] * len(equation.outvars)


def _top_k(equation: Any, operands: list[Fact]) -> Fact:
    """The largest elements along the last dim, which couples examples if that dim holds them."""
    fact = operands[0]
    if fact.rows is None:
        return fact
    if len(fact.rows) - 1 in fact.dims:
        return couple(equation, line_of(equation))
    chosen = ((equation.outvars[0].aval.shape[-1], False),)
    return replace(fact, rows=(*fact.rows[:-1], chosen))


def _random_bits(equation: Any, operands: list[Fact]) -> Fact:
    """Random numbers, or keys: for each example its own where keys are, or the key draws by rows.

    A key that draws by rows is one key for the whole batch, which gives each row its own numbers.
    """
    shape, keys = equation.outvars[0].aval.shape, operands[0]
    if keys.rows is not None:
        drawn_dims = plain(shape[len(keys.rows) :])
        return replace(keys, rows=(*keys.rows, *drawn_dims))
    if shape[:1] == (rows_of(equation.invars[0].aval),):
        return with_examples(shape)
    return keys


def between_devices(equation: Any, fact: Fact) -> Fact:
    """What a collective over some of the axes makes of an array: dims that it adds or removes.

    A dim for devices counts examples if the array has any, as each device has others.
    """
    aval, params, name = equation.outvars[0].aval, equation.params, equation.primitive.name
    if fact.rows is None or params.get("tiled", True):
        return resized(fact, aval)
    rows = list(fact.rows)
    if name == "all_to_all":
        del rows[params["split_axis"]]
        added = params["concat_axis"]
    elif name.startswith("all_gather"):
        added = params["all_gather_dimension"]
    else:
        # What is scattered loses the dim that is split among devices.
        del rows[params["scatter_dimension"]]
        return resized(with_rows(fact, tuple(rows)), aval)
    rows.insert(added, ((aval.shape[added], bool(fact.dims)),))
    return resized(replace(fact, rows=tuple(rows)), aval)


# By the names of primitives, with underscores for hyphens.
MOVE_RULES: dict[str, Callable[[Any, list[Fact]], Fact | list[Fact]]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice_or_pad,
    "dynamic_slice": _slice_or_pad,
    "pad": _slice_or_pad,
    "rev": _rev,
    "dynamic_update_slice": _slice_or_pad,
    "concatenate": _concatenate,
    "stack": _stack,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general_dilated,
    "sort": _sort,
    "top_k": _top_k,
    "random_bits": _random_bits,
    "random_split": _random_bits,
}
