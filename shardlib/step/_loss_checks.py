"""What a step looks for in a loss before it compiles: errors, and what was probably not meant.

The loss is traced once, with whole parameters and the examples of one microbatch. Each check walks
through the trace in a file of its own: `_varying` follows what differs between devices,
`_promoted_products` follows narrow weights into wide products, and `_coupled` follows examples into
reductions. This file decides which of them apply, and says what they found.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardlib._text import listed
from shardlib._tree import named_leaves
from shardlib.layouts._annotate import current_scope, warn
from shardlib.layouts._checkpoint_policies import (
    BESIDE,
    COMPRESSIBLE,
    CONTEXT,
    CUDNN_ATTENTION,
    PolicyOfPart,
)
from shardlib.layouts._remat_parts import SCORES
from shardlib.layouts._remat_policy import Remat
from shardlib.layouts._rules import EXPERTS
from shardlib.layouts._specs import axes_within, parts_over, spec_axes
from shardlib.modeling._batch import WeightedMean
from shardlib.modeling._random import describe_raw_keys, raw_keys
from shardlib.step._coupled import Split, describe_coupled, facts, is_divided_by_whole_batch
from shardlib.step._examples import CONSTANT, Fact, with_examples
from shardlib.step._loss import Returned
from shardlib.step._promoted_products import describe_widened, widened
from shardlib.step._reassigned import is_computed
from shardlib.step._state import combine
from shardlib.step._strategy import Strategy
from shardlib.step._varying import describe_varying, sends_between, varying_outputs
from shardlib.tracing._block_places import TracedLoss
from shardlib.tracing._chain_loops import holder_of_loops, loops_over_blocks
from shardlib.tracing._jaxpr import every_equation, held_functions, is_block, line_of, open_jaxpr
from shardlib.tracing._sign_checks import readers_of_values


def check_loss(
    call: Callable[..., Returned],
    arguments: Callable[..., Any],
    trained: Any,
    frozen: Any,
    rest: Any,
    first: Any,
    strategy: Strategy,
) -> None:
    """Trace a loss and look for what a step cannot do right, or what was probably not meant.

    Refused is state that would differ between devices, since it was made from the examples or the
    parameters of one, or drawn for it. Refused too is recomputation where no block is marked, and
    keeping names that no block has. A warning is given for losses that are not means over examples,
    and for products that are not computed in the dtype that was asked for.

    Args:
        call: the loss, adapted to the step.
        arguments: `(rest, number, examples)` to the arguments of `call` after the parameters.
        trained: a `StepParameter` for each trained parameter.
        frozen: the same for each frozen one.
        rest: the model's state that is neither parameter nor random stream.
        first: the number and the examples of the first microbatch.
        strategy: the strategy of the step.
    """
    number, examples = first
    streams = arguments(rest, number, examples)[0]
    state = [*named_leaves(streams), *named_leaves(rest)]
    if not _is_worth_tracing(strategy, state):
        return
    traced = _trace(call, arguments, (trained, frozen), rest, first)
    _check_traced(traced, strategy)
    scope = current_scope()
    if scope is not None and scope.used is not None:
        mesh = jax.sharding.get_abstract_mesh()
        scope.used.losses[:] = [TracedLoss(traced.jaxpr.jaxpr, mesh)]


def check_evaluated(
    call: Callable[..., Returned],
    arguments: Callable[..., Any],
    parameters: Any,
    rest: Any,
    first: Any,
    strategy: Strategy,
) -> None:
    """Warn of values of an evaluation that are not means over examples.

    Arguments are those of `check_loss`. What the loss makes of the state is not looked at: an
    evaluation forgets it.
    """
    if not _batch_is_split(strategy):
        return
    nothing = jax.tree.map(lambda _: None, parameters)
    traced = _trace(call, arguments, (parameters, nothing), rest, first)
    _warn_of_coupled_examples(traced, strategy)


def _trace(
    call: Callable[..., Returned],
    arguments: Callable[..., Any],
    parameters: tuple[Any, Any],
    rest: Any,
    first: Any,
) -> "_TracedLoss":
    """Trace a loss with whole parameters, trained and frozen, and some examples."""
    number, examples = first
    streams = arguments(rest, number, examples)[0]

    def after(params: Any, frozen_params: Any, rest: Any, examples: Any) -> Any:
        returned = call(combine(params, frozen_params), *arguments(rest, number, examples))
        return (
            (returned.streams, returned.rest),
            _values_returned(returned.out),
            returned.means["loss"].total,
            returned.reassigned,
        )

    # Under the mesh of the step, so that the step need not trace the loss again.
    mesh = jax.sharding.get_abstract_mesh()
    whole = jax.tree.map(lambda parameter: _on(mesh, parameter.whole), parameters)
    jaxpr, (_, values, _, reassigned) = jax.make_jaxpr(after, return_shape=True)(
        *whole, rest, examples
    )
    return _TracedLoss(
        jaxpr=jaxpr,
        parameters=jax.tree.leaves(parameters),
        rest=named_leaves(rest),
        examples=jax.tree.leaves(examples),
        state=[*named_leaves(streams), *named_leaves(rest)],
        values=values,
        reassigned=list(reassigned),
        with_twice_the_examples=lambda: _trace(
            call, arguments, parameters, rest, (number, jax.tree.map(_twice, examples))
        ),
    )


def _twice(examples: jax.Array) -> jax.Array:
    """Examples along dim 0, and the same again."""
    return jnp.concatenate([examples, examples]) if examples.ndim else examples


def _check_traced(traced: "_TracedLoss", strategy: Strategy) -> None:
    """Look for everything in a traced loss: what is refused first, and then what is warned of."""
    kept = strategy.kept_by_blocks
    if kept is not None and _must_be_marked(strategy):
        _check_marked(traced.jaxpr, kept, strategy.remat)
    _check_signs(traced.jaxpr)
    _check_parts(traced, strategy)
    # Without data axes all devices compute the same, and so does their state.
    if strategy.data_axes and traced.state:
        _check_state(traced, strategy)
    _warn_of_wide_products(traced, strategy)
    _warn_of_assignments(traced)
    _warn_of_coupled_examples(traced, strategy)


@dataclass(frozen=True)
class _TracedLoss:
    """A traced loss, and what its inputs and outputs are.

    Its inputs are the parameters, `rest` and the examples, in this order; its outputs `state`,
    `values`, the total, and each parameter of `reassigned` as it is after the loss.
    """

    jaxpr: Any
    parameters: list[Any]
    rest: list[tuple[str, Any]]
    examples: list[Any]
    state: list[tuple[str, Any]]
    values: list["_Value"]
    reassigned: list[str]
    with_twice_the_examples: Callable[[], "_TracedLoss"]


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


def _check_parts(traced: _TracedLoss, strategy: Strategy) -> None:
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


def _check_state(traced: _TracedLoss, strategy: Strategy) -> None:
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


def _check_raw_keys(traced: _TracedLoss) -> None:
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


def _warn_of_wide_products(traced: _TracedLoss, strategy: Strategy) -> None:
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


def _warn_of_assignments(traced: _TracedLoss) -> None:
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


def _warn_of_coupled_examples(traced: _TracedLoss, strategy: Strategy) -> None:
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


def _facts_of_values(traced: _TracedLoss, axes: Sequence[str]) -> list[Fact]:
    """What is known of the loss, its metrics and all outputs after them."""
    # Parameters and state are the same for all examples, whatever they are laid out like.
    given = [CONSTANT] * (len(traced.parameters) + len(traced.rest))
    given += [with_examples(leaf.shape) for leaf in traced.examples]
    return facts(traced.jaxpr, given, axes)[len(traced.state) :]


def _with_constant_divisors(
    known: list[Fact], traced: _TracedLoss, axes: Sequence[str]
) -> list[Fact]:
    """The same facts, without divisors that grow with the number of examples at hand.

    Those are found out by tracing the loss once more, with twice as many examples.
    """
    try:
        larger = _facts_of_values(traced.with_twice_the_examples(), axes)
    except Exception:  # a loss may take one number of examples alone: nothing is claimed of it
        return [replace(fact, divisor=0.0) for fact in known]
    result = []
    for fact, of_larger in zip(known, larger, strict=True):
        is_constant = fact.divisor == of_larger.divisor
        result.append(fact if is_constant else replace(fact, divisor=0.0))
    return result


def _on(mesh: AbstractMesh, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of an array on a mesh, of whose axes none splits it explicitly."""
    # Without a mesh, in a plain evaluation, there is nothing to put the array on.
    if mesh.empty:
        return shape
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Value:
    """A number that a loss function returned: the loss or a metric, its total or its weight."""

    value: Any
    name: str = field(metadata={"static": True})
    weighted: bool = field(metadata={"static": True})


def _values_returned(out: Any) -> list[_Value]:
    """The numbers of the loss and of each metric, as a loss function returned them."""
    # As the step itself reads the result, see `as_means`.
    loss, metrics = out if isinstance(out, tuple) else (out, {})
    values: list[_Value] = []
    for name, value in {"loss": loss, **metrics}.items():
        weighted = isinstance(value, WeightedMean)
        parts = (value.total, value.weight) if weighted else (value,)
        values += [_Value(jnp.asarray(part), name, weighted) for part in parts]
    return values


def _check_marked(jaxpr: Any, kept: Remat, asked: Any) -> None:
    """Refuse recomputation of a loss that marks nothing for it, and names that nothing has.

    The program would be the same without them. `asked` is the strategy's `remat`, as it was given.
    """
    text = f'"{asked}"' if isinstance(asked, str) else repr(asked)
    blocks = [equation for equation in every_equation(jaxpr.jaxpr) if is_block(equation)]
    if kept.dropped:
        missing = _missing_parts(jaxpr, kept, blocks)
        if missing:
            raise ValueError(
                f"`Strategy(remat={text})` recomputes {listed(missing)}, which no part of the "
                "loss is called: the program would be the same. Mark the part, `f = sl.remat(f, "
                f"part={missing[0]!r})`; or leave `remat` out."
            )
    elif not blocks:
        raise ValueError(
            f"`Strategy(remat={text})` recomputes blocks marked with `sl.remat`, and the loss "
            "calls none: the program would be the same. Mark the model's blocks, `block = "
            "sl.remat(block)`; or leave `remat` out."
        )
    if kept.chain is not None:
        _check_loops_over_blocks(jaxpr.jaxpr, text)
    _check_names(blocks, kept, asked)


def _check_names(blocks: Sequence[Any], kept: Remat, asked: Any) -> None:
    """Refuse names that no activation of what is recomputed has.

    A word means activations of several kinds of models, and some of them must be there.
    """
    known: set[str] = set()
    by_operation: set[str] = set()
    for block in blocks:
        for equation in every_equation(open_jaxpr(block.params["jaxpr"])):
            if equation.primitive.name == "name":
                known.add(equation.params["name"].removesuffix(BESIDE))
            elif equation.primitive.name == CUDNN_ATTENTION:
                by_operation.add(CONTEXT)
    text = f'"{asked}"' if isinstance(asked, str) else repr(asked)
    does = f"`Strategy(remat={text})` keeps"
    on_device = set(kept.every_name) - set(kept.offloaded)
    unknown = sorted(on_device - known - by_operation)
    if isinstance(asked, str) and len(unknown) < len(on_device):
        unknown = []
    if not unknown:
        does = "The strategy offloads"
        unknown = sorted(set(kept.offloaded) - known)
    if not unknown:
        return _check_compressed(blocks, kept, text)
    names = listed(sorted(known)) if known else "no names"
    raise ValueError(
        f"{does} {listed(unknown)}, which no activation of a marked "
        f"block is called. They are called {names}: choose of these, or name an activation, "
        f"`x = sl.checkpoint_name(x, {unknown[0]!r})`."
    )


def _check_compressed(blocks: Sequence[Any], kept: Remat, text: str) -> None:
    """Refuse to compress what has only a name of JAX's own: it would be computed again."""
    known: set[str] = set()
    for block in blocks:
        for equation in every_equation(open_jaxpr(block.params["jaxpr"])):
            if equation.primitive.name == COMPRESSIBLE:
                known.add(equation.params["name"])
    for name, _ in kept.compressed:
        if name not in known:
            raise ValueError(
                f"`Strategy(remat={text})` compresses `{name}`, which cannot be: decisions depend "
                "on its exact numbers, or it was named by JAX's own `checkpoint_name`. Keep it as "
                f"it is, `sl.Remat.save({name!r})`, or name it by `sl.checkpoint_name`."
            )


def _check_signs(jaxpr: Any) -> None:
    """Refuse to keep the sign alone of what a backward pass reads the value of."""
    for name, equation in readers_of_values(jaxpr.jaxpr):
        operation = equation.primitive.name
        raise ValueError(
            f'`Remat.compress("sign", {name!r})`: the backward pass reads more of `{name}` than '
            f"whether it is above zero: `{operation}`{_at(line_of(equation))} reads its value. "
            "Keep what is made of it too, such as the result of the ReLU, "
            f'`sl.Remat.compress("sign", {name!r}) | sl.Remat.save("mlp_hidden")`; or its value, '
            f'`sl.Remat.compress("int8", {name!r})`.'
        )


def _missing_parts(jaxpr: Any, kept: Remat, blocks: Sequence[Any]) -> list[str]:
    """The parts that are dropped and that the loss has not.

    Kernels of attention keep no scores anyway: a loss that has one is as if it dropped them.
    """
    found = set()
    for block in blocks:
        policy = block.params["policy"]
        if isinstance(policy, PolicyOfPart):
            found.add(policy.part)
    if _attends_without_scores(jaxpr.jaxpr):
        found.add(SCORES)
    return [part for part in kept.dropped if part not in found]


def _attends_without_scores(jaxpr: Any) -> bool:
    """Whether a loss attends by `sl.kernels.attention` or by cuDNN.

    That is told by the name of its results, or by cuDNN's call, within a function that has its own
    derivative.
    """
    for equation in every_equation(jaxpr):
        if not equation.primitive.name.startswith("custom_vjp_call"):
            continue
        for function in held_functions(equation):
            for inner in every_equation(open_jaxpr(function)):
                if inner.primitive.name == CUDNN_ATTENTION:
                    return True
                if inner.primitive.name == "name" and inner.params["name"] == CONTEXT:
                    return True
    return False


def _check_loops_over_blocks(jaxpr: Any, text: str) -> None:
    """Refuse a chain where no loop has blocks, or one is where the step cannot exchange it.

    `text` is the strategy's `remat`, as it was given.
    """
    holder = holder_of_loops(jaxpr)
    if holder is not None:
        raise ValueError(
            f"`Strategy(remat={text})` keeps few inputs of a loop over marked blocks, and the loss "
            f"has one inside of a `{holder.primitive.name}`{_at(line_of(holder))}, in which it "
            'cannot be exchanged. Take the loop out of it; or keep the inputs of all, `"full"`.'
        )
    if not any(True for _ in loops_over_blocks(jaxpr)):
        raise ValueError(
            f"`Strategy(remat={text})` keeps few inputs of a loop over marked blocks, and the loss "
            "has none: its blocks are called one by one. Make a loop of them, `sl.Layers` or "
            '`jax.lax.scan`; or keep the inputs of all, `remat="full"`.'
        )


def _at(line: str) -> str:
    return f" ({line})" if line else ""
