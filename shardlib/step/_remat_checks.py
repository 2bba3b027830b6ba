"""What a step looks for in a loss that it recomputes: marked blocks, and the names that they keep.

A strategy that says to recompute, or to keep by name, what the loss does not have would compile the
same program as without it, so that is refused.
"""

from collections.abc import Sequence
from typing import Any

from shardlib._text import listed
from shardlib.layouts._checkpoint_policies import (
    BESIDE,
    COMPRESSIBLE,
    CONTEXT,
    CUDNN_ATTENTION,
    PolicyOfPart,
)
from shardlib.layouts._remat_parts import SCORES
from shardlib.layouts._remat_policy import Remat
from shardlib.tracing._chain_loops import holder_of_loops, loops_over_blocks
from shardlib.tracing._jaxpr import every_equation, held_functions, is_block, line_of, open_jaxpr
from shardlib.tracing._sign_checks import readers_of_values


class NoMarkedBlocksError(ValueError):
    """A loss that is to compute blocks again has no block that is marked for it."""


def check_marked(jaxpr: Any, kept: Remat, asked: Any) -> None:
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
        raise NoMarkedBlocksError(
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


def check_signs(jaxpr: Any) -> None:
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
