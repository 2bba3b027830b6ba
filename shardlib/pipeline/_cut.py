"""A traced loss, cut at its loops over layers, so that stages can run the pieces.

Whoever writes a model need not say where it is to be cut: it is cut at its loops over stacked
weights, which are `scan`s. What is outside the loops is cut too, by what it is computed from:

    inputs --> [ start of loop 0 ] -> layers ... -> [ start of loop 1 ] -> layers ... -> [ head ]
    weights --> [ trained and frozen constants of each loop ]

- The *start* of a loop is what has to be computed before its first layer: the carry, and whatever
  else is made of weights together with inputs, or of what an earlier loop gave. It travels with the
  microbatch, so that its gradient comes back.
- What is made of weights only is computed once on every stage.
- What is made of inputs only is computed by every stage whenever a pass needs it.
- The *head* is what comes after the last loop, up to the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.pipeline._cut_checks import check_effects, check_inputs, check_loops, check_reader
from shardlib.pipeline._cut_loss import Cut, Sources
from shardlib.pipeline._loop import (
    LayerScan,
    Loop,
    Weight,
    body_of,
    outputs_behind,
)
from shardlib.tracing._jaxpr import (
    JITS,
    behind,
    inlined,
    inputs_of,
    scan_parts,
    variables,
)
from shardlib.tracing._layer_uses import has_layers


@dataclass(frozen=True, eq=False)
class _Traced:
    """A loss as it is being cut: its jaxpr, its weights, and what its variables are computed from.

    The three dictionaries follow dependencies outside the loops. `of_inputs` is only ever asked
    whether a variable is in it, and `of_trained` stops at `stop_gradient`.
    """

    jaxpr: Jaxpr
    weights: Sequence[Weight]
    number_of: dict[Any, int]
    of_trained: Sources
    of_weights: Sources
    of_inputs: Sources

    def has_gradient(self, atom: Any) -> bool:
        """Whether a gradient of an atom is asked for, so that trained weights get theirs."""
        if isinstance(atom, Literal) or not self.of_trained.get(atom):
            return False
        return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def cut(
    function: Callable[..., Any],
    weights: Sequence[Weight],
    inputs: Sequence[Any],
    names: Sequence[str],
) -> Cut:
    """Trace `function(weights, inputs)`, two lists, and cut it at its loops over stacked weights.

    `names` are those of stacked dims, in the order in which the loops have to come. A loss that
    cannot be cut is refused with a `ValueError`.
    """
    # The loss is traced once; all pieces are equations of this trace.
    traced = jax.make_jaxpr(function)([weight.value for weight in weights], list(inputs))
    check_effects(traced)
    is_stacked = [weight.stacked_dim is not None for weight in weights]
    # A loop inside a `jit` could not be cut.
    flat = _with_loops_outside(traced, [*is_stacked, *([False] * len(inputs))])
    jaxpr = flat.jaxpr
    scans = _scans_over(jaxpr, is_stacked)
    check_loops(jaxpr, scans, weights, names)
    _check_readers(jaxpr, weights, scans)
    parts = _followed(jaxpr, weights, [scan.equation for scan in scans])
    return Cut(
        jaxpr=jaxpr,
        consts=flat.consts,
        loops=_sorted_loops(parts, scans),
        outer=tuple(k for k in range(len(weights)) if not is_stacked[k]),
        trained=frozenset(k for k, weight in enumerate(weights) if weight.trained),
        weight_count=len(weights),
        trained_sources=parts.of_trained,
    )


def _sorted_loops(traced: _Traced, scans: Sequence[LayerScan]) -> tuple[Loop, ...]:
    """The loops with their inputs and outputs sorted by how stages get them.

    Inputs that no stage could get are refused.
    """
    loops: list[Loop] = []
    for scan in scans:
        # What a loop takes is sorted by what the loops before it gave.
        loop = _with_inputs_sorted(traced, scan.equation, loops)
        check_inputs(traced.jaxpr, loop, loops, _unnamed_paths(traced, loop))
        loops.append(_with_outputs_sorted(traced.jaxpr, loop))
    return _with_passing(traced.jaxpr, loops)


def _check_readers(jaxpr: Jaxpr, weights: Sequence[Weight], scans: Sequence[LayerScan]) -> None:
    """Refuse stacked weights that anything but their loop reads."""
    scan_over: dict[int, Any] = {}
    for scan in scans:
        scan_over.update(dict.fromkeys(scan.weights, scan.equation))
    for k, weight in enumerate(weights):
        if weight.stacked_dim is not None:
            check_reader(jaxpr, jaxpr.invars[k], weight.path, scan_over.get(k))


def _with_loops_outside(traced: ClosedJaxpr, flags: Sequence[bool]) -> ClosedJaxpr:
    """The function with those calls inlined that have a loop over flagged inputs within.

    Other calls stay as they are, so that the program is as near to the one without a pipeline as
    can be.
    """
    calls: set[int] = set()
    _find_calls_with_loops(traced.jaxpr, flags, calls)
    return inlined(traced, lambda equation: id(equation) in calls)


def _find_calls_with_loops(jaxpr: Jaxpr, flags: Sequence[bool], calls: set[int]) -> None:
    """Add to `calls` the ids of the calls, nested ones too, that loop over flagged inputs."""
    flagged = set()
    for variable, flag in zip(jaxpr.invars, flags, strict=True):
        if flag:
            flagged.add(variable)
    for equation in jaxpr.eqns:
        if equation.primitive.name not in JITS:
            continue
        read = [not isinstance(atom, Literal) and atom in flagged for atom in equation.invars]
        inner = equation.params["jaxpr"].jaxpr
        # Only a call with a loop over layers within is opened.
        if any(read) and has_layers(inner, read, read):
            calls.add(id(equation))
            _find_calls_with_loops(inner, read, calls)


def _scans_over(jaxpr: Jaxpr, is_stacked: Sequence[bool]) -> list[LayerScan]:
    """The loops that take stacked weights layer by layer, in the order of the loss."""
    stacked = {jaxpr.invars[k]: k for k, flag in enumerate(is_stacked) if flag}
    scans = []
    for equation in jaxpr.eqns:
        if equation.primitive.name != "scan":
            continue
        # Constants and carries come first, and scanned inputs after them.
        scanned = variables(equation.invars[sum(scan_parts(equation)) :])
        weights = [stacked[atom] for atom in scanned if atom in stacked]
        if weights:
            scans.append(LayerScan(equation, weights))
    return scans


def _followed(jaxpr: Jaxpr, weights: Sequence[Weight], loops: list[Any]) -> _Traced:
    """The loss with what each of its variables is computed from, other than through `loops`.

    What comes out of a loop is there after the last stage only, whatever it was computed from.
    """
    number_of = {jaxpr.invars[k]: k for k in range(len(weights))}
    outer = {var: k for var, k in number_of.items() if weights[k].stacked_dim is None}
    of_weights: Sources = {}
    of_trained: Sources = {}
    for variable, k in outer.items():
        of_weights[variable] = frozenset({k})
        if weights[k].trained:
            of_trained[variable] = frozenset({k})
    # It does not matter which input something is computed from: all have the same number.
    of_inputs = dict.fromkeys(jaxpr.invars[len(weights) :], frozenset({0}))
    return _Traced(
        jaxpr,
        weights,
        number_of,
        of_trained=_propagated(jaxpr, of_trained, loops, stop="stop_gradient"),
        of_weights=_propagated(jaxpr, of_weights, loops),
        of_inputs=_propagated(jaxpr, of_inputs, loops),
    )


def _propagated(jaxpr: Jaxpr, known: Sources, loops: list[Any], stop: str | None = None) -> Sources:
    """The sources of all variables that come of `known` ones, neither through a loop nor `stop`."""
    # One walk in the order of the trace is enough: equations read what was written before.
    sources = dict(known)
    for equation in jaxpr.eqns:
        numbers: frozenset[int] = frozenset()
        for variable in variables(equation.invars):
            numbers |= sources.get(variable, frozenset())
        # A loop's outputs depend on stages: what is made of them is no constant of any kind.
        if numbers and equation not in loops and equation.primitive.name != stop:
            sources.update(dict.fromkeys(equation.outvars, numbers))
    return sources


def _with_inputs_sorted(traced: _Traced, equation: Any, earlier: Sequence[Loop]) -> Loop:
    """A loop whose inputs are sorted by how a stage gets them, given the loops before it."""
    weight_inputs = _stacked_inputs(traced, equation)
    carried, trained, frozen = [], [], []
    # Only constants are sorted here: the carry travels in any case.
    constants, _ = scan_parts(equation)
    for k, atom in enumerate(equation.invars[:constants]):
        if isinstance(atom, Literal):
            continue
        from_weights = atom in traced.of_weights
        from_both = from_weights and atom in traced.of_inputs
        # It differs between microbatches and has a gradient that goes on beyond the loop: only what
        # travels has both.
        if from_both or outputs_behind(traced.jaxpr, [atom], earlier):
            carried.append(k)
        elif from_weights and traced.has_gradient(atom):
            trained.append(k)
        elif from_weights:
            frozen.append(k)
    return Loop(
        equation,
        weight_inputs=tuple(weight_inputs),
        weight_numbers=tuple(weight_inputs.values()),
        carried_inputs=tuple(carried),
        trained_constants=tuple(trained),
        frozen_constants=tuple(frozen),
    )


def _stacked_inputs(traced: _Traced, equation: Any) -> dict[int, int]:
    """The positions of a loop's inputs that are stacked weights, each with the weight's number.

    Trained weights come before frozen ones, as the derivative of a layer wants them.
    """
    trained: dict[int, int] = {}
    frozen: dict[int, int] = {}
    for position, atom in enumerate(equation.invars):
        # A literal is no weight, and cannot be looked up: it is not hashable.
        if isinstance(atom, Literal) or atom not in traced.number_of:
            continue
        number = traced.number_of[atom]
        weight = traced.weights[number]
        if weight.stacked_dim is None:
            continue
        if weight.trained:
            trained[position] = number
        else:
            frozen[position] = number
    return trained | frozen


def _unnamed_paths(traced: _Traced, loop: Loop) -> list[str]:
    """The weights that a loop takes layer by layer though no dim of them is named as stacked.

    Something made of frozen weights and inputs together is no such weight: every stage computes it
    from the microbatch, as it does other inputs.
    """
    paths = []
    for k in loop.per_layer_inputs:
        atom = loop.equation.invars[k]
        # What is not made of weights, such as the numbers of the layers, needs no name.
        if isinstance(atom, Literal) or atom not in traced.of_weights:
            continue
        if atom not in traced.of_inputs or traced.has_gradient(atom):
            paths.append(traced.weights[min(traced.of_weights[atom])].path)
    return list(dict.fromkeys(paths))


def _with_outputs_sorted(jaxpr: Jaxpr, loop: Loop) -> Loop:
    """The loop with its stacked outputs sorted by whether layers have a part in them.

    Outputs that nobody reads are in neither list, and are not computed.
    """
    # Whatever anything outside the loop reads.
    read = set(variables(jaxpr.outvars))
    for equation in jaxpr.eqns:
        read.update(variables(equation.invars))
    body = body_of(loop.equation).jaxpr
    # What every stage has: from these an output is computed without any layer.
    local = {body.invars[k] for k in (*loop.shared_inputs, *loop.per_layer_inputs)}
    local.update(body.constvars)
    batch_only, stacked = [], []
    outputs = loop.equation.outvars
    _, carries = loop.parts
    for k in range(carries, len(outputs)):
        if outputs[k] not in read:
            continue
        if local.issuperset(_inputs_behind(body, body.outvars[k])):
            batch_only.append(k)
        else:
            stacked.append(k)
    return replace(loop, batch_only_outputs=tuple(batch_only), stacked_outputs=tuple(stacked))


def _inputs_behind(body: Jaxpr, output: Any) -> list[Any]:
    """The inputs and constants of a loop's body that one of its outputs is computed from."""
    equations = behind(body, [output])
    # An output may be an input as it is, with no equation in between.
    if not equations:
        return variables([output])
    return inputs_of(equations)


def _with_passing(jaxpr: Jaxpr, loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """The loops, each with the outputs of earlier ones that only pass by it, to be read later."""
    # What is computed after each loop: the start of the next one, and after the last the outputs.
    # An output of a loop passes by all later loops up to the last one before it is read.
    read_after = [*[loop.entering for loop in loops[1:]], jaxpr.outvars]
    complete = []
    for k, loop in enumerate(loops):
        passing: dict[Any, None] = {}
        for atoms in read_after[k:]:
            for number, variable in outputs_behind(jaxpr, atoms, loops):
                if number < k:
                    passing[variable] = None
        complete.append(replace(loop, passing=tuple(passing)))
    return tuple(complete)
