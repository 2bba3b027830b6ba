"""What is refused of an exchange, beside the other fields of a strategy."""

from collections.abc import Mapping
from typing import Any

from shardlib.collectives._exact import Exchange
from shardlib.collectives._zero import Zero
from shardlib.layouts._rules import BATCH, AxisRules
from shardlib.layouts._specs import as_tuple


def check_exchange(
    exchange: Exchange,
    zero: Any,
    split: Zero,
    data_axes: tuple[str, ...],
    rules: AxisRules,
    axes: Mapping[str, int],
) -> None:
    """Refuse an exchange over axes that carry no gradients, or over which ZeRO splits.

    Either would be a strategy that prints what no step does.

    Args:
        exchange: of the gradients.
        zero: as it was asked for, for errors.
        split: what that stands for.
        data_axes: along which devices have gradients of their own.
        rules: of the names of dims.
        axes: the sizes of the mesh's axes.
    """
    exchanged_over = exchange.axes
    if not exchanged_over:
        return
    if not data_axes:
        raise ValueError(
            f"`Strategy(exchange={exchange})` would never run: no axis splits the batch "
            "and nothing else, so the partitioner sums the gradients. Give `batch` an axis of "
            "its own in the rules, or name it: `manual=(...)`."
        )
    for axis in exchanged_over:
        if axis not in data_axes:
            raise ValueError(
                f"`Strategy(exchange={exchange})`: `{axis}` "
                f"{_why_no_gradients_along(axis, rules, axes)}. The mesh has "
                f"{', '.join(map(repr, axes))}; gradients are exchanged over "
                f"{', '.join(map(repr, data_axes))}."
            )
        if split.stage and axis in (split.axes or ()):
            raise ValueError(
                f"`Strategy(zero={zero!r}, exchange={exchange})`: ZeRO would split "
                f"parameters over `{axis}` too, and every step gather them whole again over "
                "it, in more bytes than the exchange saves. Split over other axes."
            )
    # ZeRO needs an axis of its own that the exchange does not take.
    if split.stage and set(exchanged_over) >= set(data_axes):
        raise ValueError(
            f"`Strategy(zero={zero!r}, exchange={exchange})`: the exchange takes all "
            "axes of data, and none is left for ZeRO. Over an axis of the exchange, ZeRO would "
            "gather whole parameters in every step, in more bytes than the exchange saves. "
            "Leave `zero` out; or exchange over some of the axes, say those of the slow "
            'network: `mesh="pod=4,data=8"`, with `exchange=...(axis="pod")`.'
        )


def check_apart(strategy: Any, apart: tuple[str, ...]) -> None:
    """Refuse what does not go with workers that have parameters of their own.

    `apart` are the axes along which they have, as the exchange or the optimizer wants it.
    """
    if not apart:
        return
    shown = f"`Strategy(exchange={strategy.exchange}"
    if strategy.pipeline is not None:
        raise ValueError(
            f"{shown}, pipeline=...)`: the stages of a pipeline hold layers of one model, and each "
            "tick of the schedule runs on all of them together. Workers that train apart have a "
            "model each, and none is cut into stages yet. Leave one of the two out."
        )
    if strategy.offloaded is not None:
        raise ValueError(
            f"{shown}, offload={strategy.offload!r})`: what each worker has of its own stays on "
            "its devices. Leave `offload` out, or split the state within a worker: `zero=3`, over "
            "an axis of data that the exchange does not take."
        )
    # The rule for the batch is the one that says who the workers are.
    for name, candidates in strategy.rules.items():
        if name == BATCH:
            continue
        for axis in apart:
            if any(axis in as_tuple(axes) for axes in candidates):
                raise ValueError(
                    f"{shown})` has workers with parameters of their own along `{axis}`, and the "
                    f"rule for `{name}` splits arrays over it: each worker would hold only a part "
                    "of the model, and the other parts would belong to workers with other "
                    f"parameters. Split `{name}` over an axis within a worker: `rules | "
                    f"sl.AxisRules({name}=...)`."
                )


def _why_no_gradients_along(axis: str, rules: AxisRules, axes: Mapping[str, int]) -> str:
    """Why devices along an axis have no gradients of their own, as the end of a sentence."""
    # Three reasons, of which the first that holds says what to change.
    if axis in rules.batch_axes:
        return (
            "splits weights too, or is not manual, so that the partitioner sums gradients along it"
        )
    if axis in axes:
        return (
            "splits no batch, so that no gradients differ along it; for it to, `rules "
            "| sl.AxisRules(batch=(...))`"
        )
    return "is no axis of the mesh"
