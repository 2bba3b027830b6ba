"""What a step looks for in a loss before it compiles: errors, and what was probably not meant.

The loss is traced once, with whole parameters and the examples of one microbatch. Each check walks
through the trace in a file of its own: `_varying` follows what differs between devices,
`_promoted_products` follows narrow weights into wide products, and `_coupled` follows examples into
reductions, `_reassigned` what the loss assigns, and `_remat_checks` looks for marked blocks. This
file decides which of them apply, and says what they found.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shardlib._text import listed
from shardlib.layouts._annotate import current_scope, warn
from shardlib.layouts._rules import EXPERTS
from shardlib.layouts._specs import axes_within, parts_over, spec_axes
from shardlib.modeling._random import describe_raw_keys, raw_keys
from shardlib.step._coupled import Split, describe_coupled, facts, is_divided_by_whole_batch
from shardlib.step._examples import CONSTANT, Fact, with_examples
from shardlib.step._loss_trace import LossCall, LossTrace
from shardlib.step._promoted_products import describe_widened, widened
from shardlib.step._reassigned import is_computed
from shardlib.step._remat_checks import check_marked, check_signs
from shardlib.step._strategy import Strategy
from shardlib.step._varying import describe_varying, sends_between, varying_outputs
from shardlib.tracing._block_places import TracedLoss


def check_loss(loss: LossCall, strategy: Strategy) -> None:
    """Trace a loss and look for what a step cannot do right, or what was probably not meant.

    Refused is state that would differ between devices, since it was made from the examples or the
    parameters of one, or drawn for it. Refused too is recomputation where no block is marked, and
    keeping names that no block has. A warning is given for losses that are not means over examples,
    for parameters that the loss assigns to, and for products that are not computed in the dtype
    that was asked for.
    """
    if not _is_worth_tracing(strategy, loss.state):
        return
    traced = loss.trace()
    _check_traced(traced, strategy)
    scope = current_scope()
    if scope is not None and scope.used is not None:
        mesh = jax.sharding.get_abstract_mesh()
        scope.used.losses[:] = [TracedLoss(traced.jaxpr.jaxpr, mesh)]


def check_evaluated(loss: LossCall, strategy: Strategy) -> None:
    """Warn of values of an evaluation that are not means over examples.

    What the loss makes of the state is not looked at: an evaluation forgets it.
    """
    if _batch_is_split(strategy):
        _warn_of_coupled_examples(loss.trace(), strategy)


def _check_traced(traced: LossTrace, strategy: Strategy) -> None:
    """Look for everything in a traced loss: what is refused first, and then what is warned of."""
    kept = strategy.kept_by_blocks
    if kept is not None and _must_be_marked(strategy):
        check_marked(traced.jaxpr, kept, strategy.remat)
    check_signs(traced.jaxpr)
    _check_parts(traced, strategy)
    # Without data axes all devices compute the same, and so does their state.
    if strategy.data_axes and traced.state:
        _check_state(traced, strategy)
    _warn_of_wide_products(traced, strategy)
    _warn_of_assignments(traced)
    _warn_of_coupled_examples(traced, strategy)


def _is_worth_tracing(strategy: Strategy, state: list[Any]) -> bool:
    """Whether there is anything to find, which takes as long as tracing the loss."""
    # Each of these is what one of the checks looks for.
    has_own_state = bool(strategy.data_axes and state)
    computes_narrowly = strategy.dtypes.compute is not None
    if has_own_state or computes_narrowly or _must_be_marked(strategy):
        return True
    return _batch_is_split(strategy)


def _must_be_marked(strategy: Strategy) -> bool:
    """Whether a strategy recomputes nothing in a loss that marks no block."""
    # A pipeline recomputes its stages whether they have marked blocks or not.
    return strategy.kept_by_blocks is not None and strategy.remat != "stage"


def _split_axes(strategy: Strategy) -> list[str]:
    """The data axes that have several devices."""
    sizes = strategy.device_mesh.shape
    return [axis for axis in strategy.data_axes if sizes[axis] > 1]


def _batch_is_split(strategy: Strategy) -> bool:
    return bool(_split_axes(strategy)) or strategy.microbatches > 1


def _check_parts(traced: LossTrace, strategy: Strategy) -> None:
    """Refuse a loss that would take a device's part of a parameter for the whole.

    `experts` is the one name that may be split over the data axes, unless `manual` says that parts
    are meant. A loss that sends nothing along these axes cannot know of the other parts.
    """
    axes = _split_axes(strategy)
    if strategy.manual is not None:
        return
    # One collective over these axes, of whatever it be, is taken as a sign that the author of the
    # loss knows that there are other parts: `sl.experts.moe` sends tokens to them.
    in_parts = [parameter for parameter in traced.parameters if _is_split(parameter, axes)]
    if in_parts and not sends_between(traced.jaxpr, axes):
        raise ValueError(_describe_part(in_parts[0], axes, strategy))


def _check_state(traced: LossTrace, strategy: Strategy) -> None:
    """Refuse a model whose state would differ between devices after the step."""
    axes = strategy.data_axes
    # The inputs of the trace in order: parameters, the rest of the state, examples.
    differs_before = [_is_split(parameter, axes) for parameter in traced.parameters]
    differs_before += [False] * len(traced.rest)
    differs_before += [True] * len(traced.examples)
    differs_after = varying_outputs(traced.jaxpr, differs_before, axes)
    differing: list[str] = []
    # The state comes first among the outputs; those after it may differ.
    for (path, _), differs in zip(traced.state, differs_after, strict=False):
        if differs:
            differing.append(path)
    if differing:
        raise ValueError(describe_varying(differing))
    _check_raw_keys(traced)


def _check_raw_keys(traced: LossTrace) -> None:
    """Refuse keys in raw form, arrays of uint32, in the model's state.

    They are not known to be keys, and so would draw the same rows on all devices.
    """
    paths: list[str | None] = [None] * len(traced.parameters)
    for path, leaf in traced.rest:
        paths.append(path if leaf.dtype == jnp.uint32 else None)
    paths += [None] * len(traced.examples)
    raw = raw_keys(traced.jaxpr.jaxpr, paths)
    if raw:
        raise ValueError(describe_raw_keys(raw))


def _warn_of_wide_products(traced: LossTrace, strategy: Strategy) -> None:
    """Warn of products of narrow weights that are computed in a wider dtype than was asked for."""
    compute = strategy.dtypes.compute
    if compute is None:
        return
    narrowed: list[str | None] = []
    for parameter in traced.parameters:
        # `whole` has the dtype that the model gets, `dtype` is the one that is stored. What is
        # stored in the narrow dtype was narrow before anything was asked for.
        is_narrowed = parameter.whole.dtype == compute != parameter.dtype
        narrowed.append(parameter.path if is_narrowed else None)
    others = len(traced.rest) + len(traced.examples)
    wide = widened(traced.jaxpr, narrowed + [None] * others, jnp.dtype(compute).itemsize)
    if wide:
        warn((describe_widened(wide, compute),))


def _warn_of_assignments(traced: LossTrace) -> None:
    """Warn of parameters that the loss assigns to, which a step does not keep."""
    paths = sorted(traced.reassigned)
    jaxpr = traced.jaxpr.jaxpr
    # A dict is flattened in the order of its keys.
    outputs = jaxpr.outvars[len(jaxpr.outvars) - len(paths) :]
    lost = []
    for path, output in zip(paths, outputs, strict=True):
        if is_computed(jaxpr, output):
            lost.append(path)
    if lost:
        remark = (
            f"The loss assigns to {listed(lost[:3])}, and the step does not keep that: after it, a "
            "parameter is what the optimizer makes of it. If the loss is to change it, make it "
            "state that is no parameter: an `nnx.Variable` of a class of its own, a collection of "
            "Linen other than `params`, or say which leaves are parameters, "
            "`sl.init(..., trainable=...)`. Nothing is lost if every step sets it anew from the "
            "parameter, as a weight norm does."
        )
        warn((remark,))


def _warn_of_coupled_examples(traced: LossTrace, strategy: Strategy) -> None:
    """Warn of values that are not means over examples."""
    if not _batch_is_split(strategy):
        return
    axes = _split_axes(strategy)
    known = _facts_of_values(traced, axes)
    examples = traced.examples[0].shape[0] if traced.examples[0].shape else 1
    devices = parts_over(strategy.device_mesh.shape, axes)
    split = Split(examples, devices, strategy.microbatches)
    if any(is_divided_by_whole_batch(fact, split) for fact in known):
        known = _with_constant_divisors(known, traced, axes)
    remarks = {}
    for value, fact in zip(traced.values, known, strict=False):
        remark = describe_coupled(value.name, fact, value.weighted, split)
        if remark:
            remarks[value.name] = remark
    if not remarks:
        return
    # One remark is enough: more often than not, the others have the same cause.
    remark, others = next(iter(remarks.values())), list(remarks)[1:]
    if others:
        remark += f" Look at {listed(others)} too."
    warn((remark,))


def _facts_of_values(traced: LossTrace, axes: Sequence[str]) -> list[Fact]:
    """What is known of the loss, its metrics and all outputs after them."""
    # Parameters and state are the same for all examples, whatever they are laid out like.
    given = [CONSTANT] * (len(traced.parameters) + len(traced.rest))
    given += [with_examples(leaf.shape) for leaf in traced.examples]
    return facts(traced.jaxpr, given, axes)[len(traced.state) :]


def _with_constant_divisors(
    known: list[Fact], traced: LossTrace, axes: Sequence[str]
) -> list[Fact]:
    """The same facts, without divisors that grow with the number of examples at hand.

    Those are found out by tracing the loss once more, with twice as many examples.
    """
    try:
        larger = _facts_of_values(traced.loss.with_twice_the_examples().trace(), axes)
    except Exception:  # a loss may take one number of examples alone: nothing is claimed of it
        return [replace(fact, divisor=0.0) for fact in known]
    result = []
    for fact, of_larger in zip(known, larger, strict=True):
        is_constant = fact.divisor == of_larger.divisor
        result.append(fact if is_constant else replace(fact, divisor=0.0))
    return result


def _is_split(parameter: Any, axes: Sequence[str]) -> bool:
    """Whether its names split a parameter over any of some axes."""
    return not set(spec_axes(parameter.named)).isdisjoint(axes)


def _describe_part(parameter: Any, split_axes: Sequence[str], strategy: Strategy) -> str:
    """The error for a parameter of which the loss sees a part, and takes it for the whole."""
    axes = listed(axes_within(spec_axes(parameter.named), split_axes))
    return (
        f"`{parameter.path}` of shape {parameter.shape} is laid out as {parameter.named}, split "
        f"over {axes}, over which each device has its own part: the loss would see an array of "
        f"shape {parameter.whole.shape}, and sends nothing along that axis to the other parts. Use "
        "it in a layer of experts, `sl.experts.moe`; or lay it out whole, `rules | "
        f"sl.AxisRules({EXPERTS}=None)`, and split it by ZeRO, `zero=3`; or if each device is "
        f"meant to use only its own part, say so: `Strategy(manual={strategy.data_axes})`."
    )
