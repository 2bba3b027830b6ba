"""Some rows of a traced function's results, computed from the same rows of its arguments.

An optimizer's update of a stack of layers mostly treats each layer by itself. Then one layer's
results can be computed without the other layers being there:

    the trace, for 40 layers             for the 2 layers from `start` on
    m: f32[40,64,16]                     f32[2,64,16]
    n: f32[40,1,16] = mean(m, dim 1)     f32[2,1,16]
    u: f32[40,64,16] = m / (n + c)       f32[2,64,16]
    s: f32[] = sum(u)                    refused: it needs all of them

Each value is known by the dim along which its rows lie, or is whole. An equation that reads rows is
evaluated by a rule, which says along which dim the rows of its results lie, and refuses if they
depend on other rows. So what is computed is what the trace says; nothing is traced anew, and no
constant of the trace can be another one. An operation that has no rule is refused, too.

The rules of single operations have a file of their own. Here are those of calls, branches and
loops, which evaluate the functions that they hold in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, Literal

from shardlib.tracing._jaxpr import JITS, Stretch, open_jaxpr, scan_parts, variables
from shardlib.tracing._row_rules import RULES, MixesRowsError, Part, Rows, Rule, cut, resized


def evaluate_rows(
    jaxpr: Jaxpr, consts: Sequence[Any], parts: Sequence[Part], rows: Rows
) -> list[Part]:
    """Evaluate a jaxpr for some rows.

    Raises `MixesRowsError` where its results for these rows take more than these rows.

    Args:
        jaxpr: the function.
        consts: the values of its constants, which are whole.
        parts: its arguments: some rows of them, or the whole of those that have no rows.
        rows: which rows these are.
    """
    # Each variable of the trace is known as what there is of it: some rows, or the whole.
    known: dict[Any, Part] = dict(zip(jaxpr.invars, parts, strict=True))
    known.update(zip(jaxpr.constvars, map(Part, consts), strict=True))
    for equation in jaxpr.eqns:
        operands = _parts_of(equation.invars, known)
        if any(operand.has_rows for operand in operands):
            results = _by_rule(equation, operands, rows)
        else:
            results = _whole(jaxpr, equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return _parts_of(jaxpr.outvars, known)


def _parts_of(atoms: Sequence[Any], known: dict[Any, Part]) -> list[Part]:
    """What is known of each atom; a literal is whole."""
    parts = []
    for atom in atoms:
        if isinstance(atom, Literal):
            parts.append(Part(atom.val))
        else:
            parts.append(known[atom])
    return parts


def _whole(jaxpr: Jaxpr, equation: Any, operands: list[Part]) -> list[Part]:
    """The results of an equation that reads no rows."""
    # An equation may read a variable twice, and JAX's evaluator takes each once.
    values: dict[Any, Any] = {}
    for atom, operand in zip(equation.invars, operands, strict=True):
        if not isinstance(atom, Literal):
            values[atom] = operand.value
    outputs = variables(equation.outvars)
    results = Stretch(jaxpr, [equation], list(values), outputs)(list(values.values()))
    # An optimizer's constants are spread over whole stacks: the rows of these are made one by one
    # instead.
    if equation.primitive.name == "broadcast_in_dim":
        return [Part(results[0], spread=(operands[0].value, equation.params))]
    return list(map(Part, results))


def _by_rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """The results of an equation that reads rows.

    An error names this equation, also where the one to blame is in a function that it holds: who
    evaluates the trace knows the equations of the trace alone.
    """
    name = equation.primitive.name
    try:
        if name not in _ALL_RULES:
            raise MixesRowsError(f"`{name}` may mix rows")
        return _ALL_RULES[name](equation, operands, rows)
    except MixesRowsError as error:
        raise MixesRowsError(str(error), equation) from error


@dataclass(frozen=True, eq=False)
class _RowFunction:
    """A traced function that an equation holds, such as the body of a loop, for some rows."""

    function: Any
    rows: Rows

    def __call__(self, parts: Sequence[Part]) -> list[Part]:
        jaxpr, consts = open_jaxpr(self.function), getattr(self.function, "consts", [])
        return evaluate_rows(jaxpr, consts, parts, self.rows)

    def dims(self, parts: Sequence[Part]) -> list[int | None]:
        """The dims along which the rows of its results lie; nothing is computed.

        The values of the parts may be shapes.
        """
        dims: list[int | None] = []

        def values_of_results(values: list[Any]) -> list[Any]:
            results = self(_with_values(parts, values))
            dims.extend(result.dim for result in results)
            return _values(results)

        # Rules run on shapes too, and refuse on shapes what they would refuse on arrays.
        jax.eval_shape(values_of_results, _values(parts))
        return dims

    def settled(
        self, init: Sequence[Part], before: Sequence[Part], after: Sequence[Part] = ()
    ) -> list[Part]:
        """The first carries of a loop with this body, with rows where the body makes rows of them.

        Args:
            init: the first carries as they are given. They are the first results of the body.
            before: what the body reads before the carries.
            after: what it reads after them, as one iteration gets it.
        """
        settled = list(init)
        # Each round but the last finds another carry that has rows.
        for _ in range(len(settled) + 1):
            # A carry that got rows may give rows to another one in the next round.
            dims = self.dims([*before, *settled, *after])[: len(settled)]
            found = False
            for position, (carry, dim) in enumerate(zip(settled, dims, strict=True)):
                if dim is not None and not carry.has_rows:
                    settled[position], found = cut(carry, dim, self.rows), True
            if not found:
                break
        return settled

    def aligned(self, parts: Sequence[Part], dims: Sequence[int | None]) -> list[Any]:
        """The values of results as another evaluation has them, with rows along these dims.

        Iterations of a loop, and branches, return arrays of the same shapes: what is whole in one
        place and has rows in another is cut there. What is to be whole must be.
        """
        values = []
        for part, dim in zip(parts, dims, strict=True):
            if dim is not None:
                part = cut(part, dim, self.rows)
            elif part.has_rows:
                raise MixesRowsError("a loop or a branch makes rows of a whole value")
            values.append(part.value)
        return values


def _values(parts: Sequence[Part]) -> list[Any]:
    return [part.value for part in parts]


def _dims(parts: Sequence[Part]) -> list[int | None]:
    return [part.dim for part in parts]


def _with_values(parts: Sequence[Part], values: Sequence[Any]) -> list[Part]:
    """The same parts of other values, of which nobody knows what they were made of."""
    return list(map(Part, values, _dims(parts)))


def _call(param: str) -> Rule:
    """The rule of an operation that calls the function in a parameter."""

    def rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
        return _RowFunction(equation.params[param], rows)(operands)

    return rule


@dataclass(frozen=True, eq=False)
class _Scan:
    """A loop over parts of arrays, which does not go over the rows.

    Attributes:
        body: takes constants, carries and parts of what is scanned, and returns the next carries
            and what is stacked.
        consts: what each iteration reads.
        carries: the first ones, with rows where the body makes rows of them.
        xs: what is scanned.
        one_of_xs: the same as one iteration gets it, by shape.
    """

    body: _RowFunction
    consts: list[Part]
    carries: list[Part]
    xs: list[Part]
    one_of_xs: list[Part]

    @classmethod
    def of(cls, equation: Any, operands: list[Part], rows: Rows) -> "_Scan":
        """The loop of an equation, for some rows.

        Raises `MixesRowsError` where it goes over the rows, one in each iteration.
        """
        body = _RowFunction(equation.params["jaxpr"], rows)
        num_consts, num_carry = scan_parts(equation)
        # The operands of a `scan` are constants, carries and what is scanned, in this order.
        consts, others = operands[:num_consts], operands[num_consts:]
        init, xs = others[:num_carry], others[num_carry:]
        shapes = open_jaxpr(body.function).invars[num_consts + num_carry :]
        one_of_xs = []
        for x, var in zip(xs, shapes, strict=True):
            one_of_xs.append(_of_iteration(x, var.aval, rows))
        carries = body.settled(init, consts, one_of_xs)
        return cls(body, consts, carries, xs, one_of_xs)

    def run(self, **options: Any) -> list[Part]:
        """The last carries, and what is stacked."""
        dims = self.body.dims([*self.consts, *self.carries, *self.one_of_xs])
        last, stacked = lax.scan(self._step, _values(self.carries), _values(self.xs), **options)
        results = _with_values(self.carries, last)
        for value, dim in zip(stacked, dims[len(last) :], strict=True):
            if dim is not None:
                # What is stacked has one more dim in front.
                dim += 1
            results.append(Part(value, dim))
        return results

    def _step(self, carries: list[Any], scanned: list[Any]) -> tuple[list[Any], list[Any]]:
        carried = _with_values(self.carries, carries)
        results = self.body([*self.consts, *carried, *_with_values(self.one_of_xs, scanned)])
        count = len(self.carries)
        next_carries = self.body.aligned(results[:count], _dims(self.carries))
        return next_carries, _values(results[count:])


def _of_iteration(x: Part, aval: Any, rows: Rows) -> Part:
    """What one iteration gets of a scanned value, by the shape that it was traced with."""
    if x.dim == 0:
        raise MixesRowsError("`scan` goes over the rows")
    if x.dim is None:
        return Part(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    dim = x.dim - 1
    return Part(jax.ShapeDtypeStruct(resized(aval.shape, dim, rows.count), aval.dtype), dim)


def _scan(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A loop in which each iteration treats rows by themselves; it does not go over the rows."""
    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    return _Scan.of(equation, operands, rows).run(**options)


def _while(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A loop that is not ended by rows.

    Its condition may read whole values only, such as a counter.
    """
    params = equation.params
    condition = _RowFunction(params["cond_jaxpr"], rows)
    body = _RowFunction(params["body_jaxpr"], rows)
    # Constants of the condition come first, then those of the body, then the carries.
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    condition_consts, others = operands[:of_condition], operands[of_condition:]
    body_consts, init = others[:of_body], others[of_body:]
    carries = body.settled(init, body_consts)
    # Rows are evaluated at different times, so that no one time could end the loop for all.
    if condition.dims([*condition_consts, *carries]) != [None]:
        raise MixesRowsError("`while` is ended by rows")

    def goes_on(values: list[Any]) -> Any:
        return condition([*condition_consts, *_with_values(carries, values)])[0].value

    def step(values: list[Any]) -> list[Any]:
        results = body([*body_consts, *_with_values(carries, values)])
        return body.aligned(results, _dims(carries))

    return _with_values(carries, lax.while_loop(goes_on, step, _values(carries)))


def _cond(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A branch that is not chosen by rows.

    Both branches are evaluated for these rows, and return them along the same dims.
    """
    index, arguments = operands[0], operands[1:]
    if index.has_rows:
        raise MixesRowsError("`cond` is chosen by rows")
    functions = [_RowFunction(branch, rows) for branch in equation.params["branches"]]
    dims = _joined_dims([function.dims(arguments) for function in functions])

    def branch(function: _RowFunction) -> Callable[..., list[Any]]:
        def evaluated(*values: Any) -> list[Any]:
            return function.aligned(function(_with_values(arguments, values)), dims)

        return evaluated

    results = lax.switch(index.value, list(map(branch, functions)), *_values(arguments))
    return list(map(Part, results, dims))


def _joined_dims(of_branches: Sequence[Sequence[int | None]]) -> list[int | None]:
    """The dims of results that have rows in any branch; a branch for which they do not fit refuses.

    >>> _joined_dims([[None, 0], [1, 0]])
    [1, 0]
    """
    joined: list[int | None] = []
    for dims in zip(*of_branches, strict=True):
        present = [dim for dim in dims if dim is not None]
        joined.append(present[-1] if present else None)
    return joined


_ALL_RULES: dict[str, Rule] = {
    **RULES,
    **dict.fromkeys(JITS, _call("jaxpr")),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
