"""Values of a run as text: as a command line writes them, and as a `run.json` has them.

    --strategy.rules "data|tensor"     --strategy.pipeline 1f1b:4:16
    --strategy.remat "context|mlp_up"  --strategy.exchange onebit:pod

A `run.json` has what `repr` prints. That is evaluated here and not by Python: a text makes values
of known types, and runs nothing.
"""

import ast
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import shardlib as sl
import shardlib.data
from models import gpt

# What fields hold as one value, although it is made of fields itself.
WHOLE = (
    sl.AxisRules,
    sl.Precision,
    sl.Remat,
    sl.Offload,
    sl.Zero,
    sl.Exchange,
    shardlib.data.Chat,
    gpt.RopeScaling,
    gpt.LinearScaling,
    gpt.YarnScaling,
    gpt.LatentAttention,
)
REMATS = (
    *("none", "full", "stage", "dots", "dots_without_batch"),
    *("selective", "minimal", "sublinear"),
)
_EXCHANGES: dict[str, Callable[..., sl.Exchange]] = {
    "onebit": sl.collectives.OneBit,
    "int8": partial(sl.collectives.Quantised, bits=8),
    "int4": partial(sl.collectives.Quantised, bits=4),
    "server": sl.collectives.ParameterServer,
}
# Those with a number behind the axes, and what it is.
_NUMBERED: dict[str, tuple[Callable[..., sl.Exchange], str]] = {
    "powersgd": (sl.collectives.PowerSGD, "rank"),
    "local": (sl.collectives.LocalSGD, "every"),
    "diloco": (sl.collectives.DiLoCo, "every"),
    "elastic": (sl.collectives.ElasticAveraging, "every"),
}


def _types_in(module: Any) -> dict[str, type]:
    """The public types of a module, by name."""
    return {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}


# What blocks may keep, as `Remat` makes it.
_KEPT = (
    sl.Remat.every(1).chain,
    sl.Remat.slots(1).chain,
    sl.Remat.layers((1, "none")),
    sl.Remat.budget(1),
)
# What values in a `run.json` are made of, beside numbers, texts and their like.
_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (*WHOLE, sl.Exact)},
    **{type(made).__name__: type(made) for made in _KEPT},
    **_types_in(sl.collectives),
    **_types_in(sl.pipeline),
    "dtype": np.dtype,
}
# Routers have names of their own: `TopK` is one, and an exchange too.
_ROUTERS = _types_in(sl.experts)


def rules(text: str) -> sl.AxisRules:
    """Rules: presets and rules of a name, `data|tensor|batch=pod,data`."""
    presets: dict[str, sl.AxisRules] = {}
    for name, value in vars(sl.rules).items():
        if isinstance(value, sl.AxisRules):
            presets[name] = value
    joined = sl.AxisRules({})
    for part in text.split("|"):
        name, given, axes = (word.strip() for word in part.partition("="))
        split_over = None if axes.lower() == "none" else _axes(axes)
        if given and split_over != ():
            joined |= sl.AxisRules({name: split_over})
        elif name in presets:
            joined |= presets[name]
        else:
            raise ValueError(
                f"Rules are presets, of {', '.join(presets)}, and rules of a name, "
                f"`batch=pod,data`, joined by `|`; got `{text}`."
            )
    return joined


def _axes(text: str) -> tuple[str, ...]:
    """The axes of a list such as `pod,data`; none if one of them has no name."""
    names = tuple(name.strip() for name in text.split(","))
    return names if all(names) else ()


def schedule(text: str) -> sl.pipeline.Schedule:
    """A schedule of a pipeline with its stages and microbatches: `1f1b:4:16`."""
    name, *numbers = text.split(":")
    counts = (2, 3) if name == "interleaved" else (2,)
    is_known = name in sl.pipeline.SCHEDULES and len(numbers) in counts
    if not is_known or not all(map(_is_count, numbers)):
        raise ValueError(
            "A pipeline is a schedule, its stages and its microbatches, `1f1b:4:16`, of "
            f"{', '.join(sl.pipeline.SCHEDULES)}; `interleaved:4:16:3` has 3 parts on a stage. Got "
            f"`{text}`."
        )
    try:
        return sl.pipeline.SCHEDULES[name](*map(int, numbers))
    except ValueError as error:
        raise ValueError(f"The pipeline `{text}`: {error}") from error


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def remat(text: str) -> Any:
    """A word, names of activations, a chain or a budget: `full`, `context|mlp_up`, `every:4`,
    `slots:4`, `budget:14GiB`, which may have names for the host, `budget:14GiB,block_in`; names of
    which some are kept by the host, `context|offload:block_in`, or in fewer bits,
    `query|compress:int8:mlp_up,context`.

    A name that no activation has is refused by the step, which knows them.
    """
    if text in REMATS:
        return text
    name, colon, number = text.partition(":")
    if name == "budget":
        memory, *on_host = number.split(",")
        return sl.Remat.budget(memory, offload=tuple(name.strip() for name in on_host))
    if "offload:" in text or "compress:" in text:
        return _remat_of_names(text)
    if colon and name.isidentifier():
        chains = {"every": sl.Remat.every, "slots": sl.Remat.slots}
        if name not in chains or not _is_count(number):
            raise ValueError(
                "A chain of blocks is `every:4`, which keeps the input of every fourth, or "
                f"`slots:4`, which keeps four of them at a time; got `{text}`."
            )
        return chains[name](int(number))
    return sl.Remat.save(*(name.strip() for name in text.split("|")))


def _remat_of_names(text: str) -> sl.Remat:
    """Names of activations, some by the host or in fewer bits: `query|offload:block_in`."""
    kept = sl.Remat()
    for part in text.split("|"):
        word, _, rest = part.strip().partition(":")
        encoding, _, names = rest.rpartition(":")
        listed = [name.strip() for name in names.split(",")]
        if word == "compress" and encoding:
            kept |= sl.Remat.compress(encoding, *listed)  # type: ignore[arg-type]
        elif word == "offload" and names and not encoding:
            kept |= sl.Remat.offload(*listed)
        elif rest or word in (*REMATS, "compress", "offload"):
            raise ValueError(
                "Names of activations are `context|mlp_up`; of those that the host keeps, "
                "`offload:block_in`; and of those in fewer bits, `compress:int8:mlp_up,context`; "
                f"got `{text}`."
            )
        else:
            kept |= sl.Remat.save(word)
    return kept


def exchange(text: str) -> sl.Exchange:
    """An exchange: `exact`, `onebit:pod`, `powersgd:pod:4` or `diloco:pod:500`."""
    if text == "exact":
        return sl.Exact()
    name, _, rest = text.partition(":")
    axes, _, number = rest.partition(":")
    names = _axes(axes)
    axis = names[0] if len(names) == 1 else names
    if names and name in _EXCHANGES and not number:
        return _EXCHANGES[name](axis)
    if names and name in _NUMBERED and number.isdigit():
        make, what = _NUMBERED[name]
        return make(axis, **{what: int(number)})
    raise ValueError(
        f"An exchange is `exact`; one of {', '.join(_EXCHANGES)} and the axes that it takes, "
        f"`onebit:pod`; or one of {', '.join(_NUMBERED)} with a number more, the rank of "
        f"factors or the steps between meetings, `diloco:pod:500`; got `{text}`."
    )


def is_made(name: str, text: str) -> bool:
    """Whether a text makes a value of one of the types that a field may be made of."""
    return bool(re.match(r"\w+\(", text)) and text.partition("(")[0] in _types_of(name)


def evaluated(name: str, text: str) -> Any:
    """The value of a field that `repr` has written, or that is written like that."""
    if scalar := re.fullmatch(r"<class '[\w.]*?(\w+)'>", text):  # jnp.bfloat16 and its like
        return getattr(jnp, scalar[1])
    try:
        return _evaluated(ast.parse(text, mode="eval").body, _types_of(name))
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"`{name} = {text}` is not written so that it can be made again. Begin from the "
            "function that gives the run."
        ) from error


def _types_of(name: str) -> dict[str, Any]:
    """The types that the value of a field may be made of."""
    return _ROUTERS if name.rpartition(".")[2] == "router" else _TYPES


def _evaluated(node: ast.expr, types: dict[str, Any]) -> Any:
    """The value of an expression of constants and of some types; nothing else is called."""
    of = partial(_evaluated, types=types)
    if isinstance(node, ast.Call):
        call = _called(node.func, types)
        named = {str(one.arg): of(one.value) for one in node.keywords}
        return call(*map(of, node.args), **named)
    if isinstance(node, ast.Tuple):
        return tuple(map(of, node.elts))
    if isinstance(node, ast.List):
        return list(map(of, node.elts))
    return ast.literal_eval(node)


def _called(function: ast.expr, types: dict[str, Any]) -> Callable[..., Any]:
    """What an expression calls: a type, or the methods of rules with which they are printed."""
    if isinstance(function, ast.Attribute):  # AxisRules(...).indivisible(...).attention(...)
        value = _evaluated(function.value, types)
        if not isinstance(value, sl.AxisRules) or function.attr not in ("indivisible", "attention"):
            raise ValueError(f"nothing is called `{function.attr}`")
        return getattr(value, function.attr)
    if not isinstance(function, ast.Name):
        raise ValueError("only types are called")
    kind = types[function.id]
    return _rules_as_printed if kind is sl.AxisRules else kind


def _rules_as_printed(known: Collection[str] = (), **axes: Any) -> sl.AxisRules:
    """Rules as they are printed: `known` are names without a rule."""
    return sl.AxisRules.knowing(*known) | sl.AxisRules(axes)
