"""What is refused of a strategy whose fields do not go together, with a pipeline or with arrays in
the memory of the host.

A field that means something else there, or nothing, is not passed over: the error says what to take
in its place.
"""

from collections.abc import Mapping
from typing import Any

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.collectives._exact import Exact
from shardlib.layouts._remat_policy import RematBudget, RematByBlock
from shardlib.layouts._rules import RINGS
from shardlib.layouts._specs import axes_within
from shardlib.pipeline._program import program_of
from shardlib.pipeline._schedule_checks import check_is_schedule, check_stage_axis, check_table


def check_offload(strategy: Any, axes: Mapping[str, int]) -> None:
    """Refuse parameters in the host's memory with what holds them whole."""
    if strategy.offloaded is None or not strategy.offloaded.parameters:
        return
    shown = f"`Strategy(offload={strategy.offload!r}"
    over = axes_within(strategy.zero_axes, strategy.sequence_axes)
    if any(axes[axis] > 1 for axis in over):
        raise ValueError(
            f"{shown}, zero={strategy.zero!r})`: parameters are copied from the host some rows at "
            f"a time, but over {listed(over)}, which splits sequences, ZeRO would split their "
            "other dims. Name the axes of data, "
            f"`zero=sl.Zero({strategy.sharding.stage}, axes={strategy.data_axes})`, or leave "
            'parameters on the device: `offload="optimizer"`.'
        )
    # Only parameters are used in the passes: the optimizer's state is read once a step.
    if strategy.pipeline is not None:
        raise ValueError(
            f"{shown}, pipeline=...)`: each stage uses its layers in every tick, so that they "
            "would be copied from the host as often. Leave them on the device: "
            '`offload="optimizer"`.'
        )
    if isinstance(strategy.exchange, Exact) and strategy.exchange.overlap:
        raise ValueError(
            f"{shown}, exchange={strategy.exchange})`: gradients of parameters that are copied "
            "from the host cannot be exchanged in the backward pass. Use `zero=3`, which scatters "
            'gradients there, without `overlap`, or `offload="optimizer"`.'
        )


def check_pipeline(strategy: Any, axes: Mapping[str, int]) -> None:
    """Refuse a schedule that cannot be run, or not with the other fields.

    A field that means something else in a pipeline, or nothing, is not passed over: the error
    says what to take in its place.
    """
    schedule: Any = strategy.pipeline
    check_is_schedule(schedule)
    check_table(schedule)
    check_stage_axis(schedule, strategy.rules, axes)
    for axis, size in axes.items():
        if size > 1 and strategy.rules.attention_form(axis) in RINGS:
            raise ValueError(
                f"`Strategy(pipeline=...)` with attention around a ring over `{axis}`: in a "
                "tick, stages take different branches of the program, and the permutes of a "
                'ring wait for all of them. Use `sl.rules.context("ulysses")` or `"gather"`.'
            )
    if strategy.accumulate != 1:
        raise ValueError(
            f"`Strategy(accumulate={strategy.accumulate}, pipeline=...)`: the schedule says how "
            f"many microbatches there are, {schedule.microbatches}: leave `accumulate` out."
        )
    if strategy.sharding.stage > 1:
        raise ValueError(
            f"`Strategy(zero={strategy.zero!r}, pipeline=...)`: each stage uses its layers in "
            "every tick, so that stages 2 and 3 of ZeRO would scatter gradients, and gather "
            "weights, once for every microbatch. Use `zero=1`, which splits parameters and "
            "optimizer state at rest alike."
        )
    if isinstance(strategy.remat, RematByBlock | RematBudget):
        raise ValueError(
            f"`Strategy(remat={strategy.remat}, pipeline=...)`: all stages run the same program, "
            'so all layers must keep the same. Use one value for all, or `remat="stage"`.'
        )
    kept = strategy.kept_by_blocks
    if kept is not None and kept.chain is not None:
        raise ValueError(
            f"`Strategy(remat={check.shown(strategy.remat)}, pipeline=...)`: a pipeline "
            "differentiates its layers one by one, and keeps their inputs for each microbatch. "
            'To keep less, take `remat="stage"`: only what was sent to each stage.'
        )
    if strategy.offloaded_activations:
        raise ValueError(
            f"`Strategy(remat={check.shown(strategy.remat)}, offload={strategy.offload!r}, "
            f"pipeline=...)` offloads {listed(strategy.offloaded_activations)}: what a stage keeps "
            "of a microbatch waits in buffers of the device. Keep less there, "
            '`remat="full"`, or `remat="stage"`, which keeps only what was sent to each stage.'
        )
    if isinstance(strategy.exchange, Exact) and strategy.exchange.overlap:
        raise ValueError(
            "`Exact(overlap=True)` is for steps without a pipeline: a pipeline exchanges gradients "
            "after the last tick."
        )


def check_combined_passes(strategy: Any) -> None:
    """Refuse to combine passes where no tick has two that do not wait for each other."""
    if not strategy.combine_passes:
        return
    schedule = strategy.pipeline
    if schedule is None:
        raise ValueError(
            "`Strategy(combine_passes=True)` runs a forward and a backward pass of a pipeline's "
            "tick together: give a schedule, `pipeline=sl.pipeline.DualPipeV(...)` say."
        )
    check_is_schedule(schedule)
    if not schedule.paired:
        raise ValueError(
            f"`Strategy(combine_passes=True, pipeline={schedule!r})`: a tick of this schedule "
            "takes one pass. Give it `paired=True`, or use `DualPipeV(stages, microbatches)`; on "
            "the trainer's command line, `dualpipe-v:STAGES:MICROBATCHES`."
        )
    check_table(schedule)
    program = program_of(schedule, loops=1, recompute=strategy.remat == "stage", trains=True)
    if not program.combined_passes:
        stage = int(program.combinable.sum(axis=0).argmin())
        raise ValueError(
            f"`Strategy(combine_passes=True, pipeline={schedule!r})`: in no tick has stage {stage} "
            "a forward and a backward pass that do not wait for each other, and a tick takes as "
            "long as its slowest stage. Use `DualPipeV`, or `ZBV` or `Interleaved` with "
            "`paired=True`."
        )
