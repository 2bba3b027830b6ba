"""What a loss must be like to be cut at its loops over layers, and what is said where it is not.

Each function refuses one kind of loss with a `ValueError` that names the line and what to write
instead.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardlib._text import listed
from shardlib.pipeline._loop import LayerScan, Loop, Weight, outputs_behind
from shardlib.tracing._jaxpr import line_of, readers_of, scan_parts, variables

_UNKNOWN_LINE = "a line unknown"


def check_effects(traced: ClosedJaxpr) -> None:
    """Refuse a loss with side effects, such as printing or callbacks.

    A pipeline computes parts of a loss again and leaves out what nobody reads, so that a side
    effect would happen never or several times.
    """
    equation = _first_with_effects(traced.jaxpr)
    if equation is None:
        return
    raise ValueError(
        f"The loss has a side effect, such as a print or a callback: `{equation.primitive.name}` "
        f"at {line_of(equation) or _UNKNOWN_LINE}. Stages compute parts of the loss again, and "
        "leave out what nothing reads, so it would happen several times or never. Take it out, or "
        "debug without the pipeline."
    )


def _first_with_effects(jaxpr: Jaxpr) -> Any:
    """The first equation with side effects, the innermost one where equations hold others."""
    for equation in jaxpr.eqns:
        if not _has_side_effects(equation):
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            # The innermost equation is the one that the user wrote, at the line that is named.
            if isinstance(inner, Jaxpr) and _has_side_effects(inner):
                return _first_with_effects(inner) or equation
        return equation
    return None


def _has_side_effects(traced: Any) -> bool:
    """Whether an equation or a jaxpr prints, calls back or the like.

    JAX has effects of other kinds too, for an axis that is named or an array that is changed in
    place. These do no harm, and the kinds that do have no common class: hence the names.
    """
    names = [type(effect).__name__ for effect in traced.effects]
    return any("Debug" in name or "IO" in name for name in names)


def check_loops(
    jaxpr: Jaxpr, scans: Sequence[LayerScan], weights: Sequence[Weight], names: Sequence[str]
) -> None:
    """Refuse a loss whose loops over layers are not one for each name of a stacked dim, in order.

    `names` are the names of stacked dims in the order in which the rules lay them over the stages.
    The checks go from what is missing to what is in the wrong order, so that each may rely on those
    before it.
    """
    stacked_dims = {weight.stacked_dim for weight in weights}
    expected = [name for name in names if name in stacked_dims]
    dims_of_scans = [_stacked_dims_of(scan, weights) for scan in scans]
    looped_over = list(chain(*dims_of_scans))
    for name in expected:
        if name not in looped_over:
            raise ValueError(_no_loop_over(name, jaxpr, weights))
    lines = " and ".join(line_of(scan.equation) or _UNKNOWN_LINE for scan in scans)
    _check_used_once(scans, weights, lines)
    # Every name has its loop by now: more loops than names are several loops of one name.
    if len(scans) > len(expected):
        raise ValueError(
            f"The loss has {len(scans)} loops over layers, at {lines}, and of stacked dims there "
            f"are {listed(expected)}. A pipeline tells loops apart by the "
            "names of what they take: call the stacked dim of an encoder `encoder_layers`, say, "
            '`sl.Layers([...], name="encoder_layers")`; of what is to be whole on every stage, '
            "anything that no rule lays over the stages."
        )
    for scan, dims in zip(scans, dims_of_scans, strict=True):
        if len(dims) > 1:
            raise ValueError(_two_dims_in_a_loop(scan, dims, weights))
    if looped_over != expected:
        raise ValueError(
            f"The loops over layers, at {lines}, take {listed(looped_over)} "
            f"in this order, and the rules have {listed(expected)}: their "
            "order says which parts of the pipeline come first. Write the rules in the order of "
            "the loss."
        )


def _stacked_dims_of(scan: LayerScan, weights: Sequence[Weight]) -> tuple[str | None, ...]:
    """The names of the stacked dims that a loop goes over, each once."""
    return tuple(dict.fromkeys(weights[k].stacked_dim for k in scan.weights))


def _no_loop_over(name: str, jaxpr: Jaxpr, weights: Sequence[Weight]) -> str:
    """The message that no loop takes the weights with a stacked dim layer by layer.

    It names what reads them instead, which most often is a cast or a reshape before the loop.
    """
    stacked = [k for k, weight in enumerate(weights) if weight.stacked_dim == name]
    # The first operation that takes one whole is the best guess at what is wrong.
    stacked_variables = {jaxpr.invars[k] for k in stacked}
    reader = ""
    for equation in jaxpr.eqns:
        if stacked_variables & set(variables(equation.invars)):
            at = line_of(equation) or _UNKNOWN_LINE
            reader = f"; `{equation.primitive.name}` at {at} takes it whole"
            break
    return (
        "A pipeline cuts a model at its loop over layers, and the loss has no "
        f"`jax.lax.scan` that takes {listed([weights[k].path for k in stacked[:3]])} one "
        f"layer at a time{reader}. `sl.Layers([...])` makes one of a list of modules; "
        "otherwise scan over them, as `nnx.scan` does. What casts weights or reshapes them "
        "belongs into the layer (`Strategy(precision=...)` casts them), and so does a "
        "`jax.checkpoint`: `sl.remat` marks a layer."
    )


def _check_used_once(scans: Sequence[LayerScan], weights: Sequence[Weight], lines: str) -> None:
    """Refuse weights that several loops go over: a stage would have to be in two places."""
    times_used = Counter(chain(*[scan.weights for scan in scans]))
    for k, times in times_used.items():
        if times > 1:
            raise ValueError(
                f"`{weights[k].path}` goes through {times} loops over layers, at {lines}: "
                "layers that are used again cannot be cut, since each stage runs its own once."
            )


def _two_dims_in_a_loop(
    scan: LayerScan, dims: Sequence[str | None], weights: Sequence[Weight]
) -> str:
    """The message that one loop goes over weights whose stacked dims have different names."""
    # Backwards, so that the first path of each dim remains.
    first_paths = {}
    for k in reversed(scan.weights):
        first_paths[weights[k].stacked_dim] = weights[k].path
    return (
        f"The loop over layers at {line_of(scan.equation)} takes `{first_paths[dims[0]]}`, whose "
        f"stacked dim is named `{dims[0]}`, and `{first_paths[dims[1]]}`, where it is "
        f"`{dims[1]}`: what one loop takes has one name."
    )


def check_reader(jaxpr: Jaxpr, variable: Any, path: str, loop: Any) -> None:
    """Refuse a stacked weight that anything but its own loop reads.

    The loop has to take it layer by layer, and once. A weight that nobody reads at all is let be.
    """
    readers = readers_of(jaxpr, variable)
    is_output = variable in variables(jaxpr.outvars)
    if not readers and not is_output:
        return
    # A weight that is an output too would have to be whole on every device.
    if readers == [loop] and not is_output and _is_scanned_once(loop, variable):
        return
    # Any other reader says more than the loop itself does.
    other = next((equation for equation in readers if equation is not loop), loop)
    if other is None:
        reader = "it is an output"
    else:
        reader = f"`{other.primitive.name}` at {line_of(other) or _UNKNOWN_LINE}"
    raise ValueError(
        f"`{path}` is stacked, each stage of the pipeline has its own layers of it, and the loss "
        f"uses it outside the loop over layers: {reader}. Use it in the layer."
    )


def _is_scanned_once(loop: Any, variable: Any) -> bool:
    """Whether a loop takes a variable layer by layer, and in no other way."""
    positions = [k for k, atom in enumerate(loop.invars) if atom is variable]
    # Constants and carries come first among a loop's inputs; a layer would see these whole.
    return len(positions) == 1 and positions[0] >= sum(scan_parts(loop))


def check_inputs(
    jaxpr: Jaxpr, loop: Loop, earlier: Sequence[Loop], unnamed_paths: Sequence[str]
) -> None:
    """Refuse a loop that takes something that the stages of a pipeline cannot be given.

    `earlier` are the loops before it, and `unnamed_paths` those weights that it takes one layer at
    a time although no dim of them is named as stacked.
    """
    equation, at = loop.equation, line_of(loop.equation)
    if equation.params["reverse"]:
        raise ValueError(
            f"The loop over layers at {at} goes backwards; a pipeline goes from the first layer on."
        )
    if unnamed_paths:
        raise ValueError(
            f"The loop over layers at {at} takes {listed(unnamed_paths)}, or what is made of it, "
            "one layer at a time, and no dim of it is named `layers`, so that every stage would "
            "hold all of it. Name its first dim: `sl.logical(initializer, ...)` where it is made, "
            "for a bias too, or `sl.annotate(model, ...)`."
        )
    for k in loop.per_layer_inputs:
        # A stage has the layers of one loop only, and with them what the loop makes layer by layer.
        outputs = outputs_behind(jaxpr, [equation.invars[k]], earlier)
        if outputs:
            number, _ = outputs[0]
            raise ValueError(
                f"The loop over layers at {at} takes what the loop at "
                f"{line_of(earlier[number].equation)} made one layer at a "
                "time. Stages of the one do not have what stages of the other made: hand it on "
                "from layer to layer, or give all of it to each."
            )
    _check_carry(loop)


def _check_carry(loop: Loop) -> None:
    """Refuse a loop whose carry has random keys: to a collective a key is no array."""
    constants, carries = loop.parts
    for atom in loop.equation.invars[constants : constants + carries]:
        if jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"The loop over layers at {line_of(loop.equation)} hands a key from layer to "
                "layer; a pipeline cannot send one. Fold the layer's number into one key, "
                "`jax.random.fold_in(key, number)`, and let the loop take it."
            )
