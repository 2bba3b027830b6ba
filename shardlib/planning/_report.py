"""The report of a plan, for people who read it in a terminal.

A report is a list of sections with an empty line between them. Each section has a function of its
own that returns its text, or an empty string where the plan has nothing to say on that subject:

    title  memory  refusal  activations  largest arrays  communication  ZeRO  estimate  products
    remarks  advice  seconds

Tables are fitted to the width of the terminal: the columns named in `shorten` are cut first, then
those in `drop` are left out, in that order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib._text import human_bytes, table, terminal_width, wrapped
from shardlib.planning._activations_report import activations_table
from shardlib.planning._advice import host_has_room

_BAR_WIDTH = 32  # characters of a bar that stands for all of a device's memory in use
_EIGHTHS = "▏▎▍▌▋▊▉"  # the last character of a bar, from one eighth to seven eighths full
_SHOWN = 8  # rows of the table of largest arrays; communication has twice as many
_SMALL_SHARE = 1e-4  # kinds of memory below this share of the total are shown as one row


def report(plan: Any) -> str:
    """The whole report of a `Plan`, its sections separated by empty lines."""
    sections = [
        _title(plan),
        _memory(plan),
        _refusal(plan),
        activations_table(plan),
        _largest(plan),
        _communication(plan),
        _prices(plan),
        _estimated(plan),
        _products(plan),
        _listed("what the compiler remarked", plan.remarks),
        _listed("what to change", plan.advice, "- "),
        _seconds(plan),
    ]
    # A section without anything to say is empty.
    return "\n\n".join(section for section in sections if section)


def _seconds(plan: Any) -> str:
    """How long it took to trace and to compile, and whether an earlier plan did the latter.

    Then the seconds are those that it took at the time.
    """
    compiled = f"compiled in {plan.compile_seconds:.1f} s"
    if plan.compiled_before:
        compiled = f"{compiled} by an earlier plan"
    return f"traced in {plan.lower_seconds:.1f} s, {compiled}; nothing was run"


def _title(plan: Any) -> str:
    """Two lines that name the step, the machine and the mesh.

    The memory of a device is left out where its datasheet has no bound, as for CPUs.
    """
    devices = f"{plan.devices} device"
    if plan.devices > 1:
        devices += "s"
    # The memory that a CPU may take is unknown.
    if not math.isinf(plan.chip.hbm_bytes):
        devices += f", {human_bytes(plan.chip.hbm_bytes)} each"
    mesh = f"mesh {plan.mesh}"
    if plan.slow_axes:
        mesh += f"; on the slow network: {', '.join(plan.slow_axes)}"
    width = terminal_width()
    return (
        wrapped(f"{plan.name} on {plan.target}: {devices}", width, later="  ")
        + "\n"
        + wrapped(mesh, width, later="  ")
    )


def _memory(plan: Any) -> str:
    """The table of a device's memory by kind, with bars and the total.

    Kinds that are too small to matter are added up in one row. Memory that could not be attributed
    always has its own row, however small, because the reader has to know of it.
    """
    memory = plan.memory
    total = max(memory.total_bytes, 1)
    # Bars are shares of what the step takes, not of what the device has: they add up to a full one.
    rows = [("memory per device", "", "")]
    small_bytes = 0
    for kind, size in memory.kinds.items():
        if size > _SMALL_SHARE * total or (kind == "unattributed" and size):
            rows.append((f"  {kind}", human_bytes(size), _bar(size / total)))
        elif kind != "unattributed":
            small_bytes += size
    if small_bytes:
        rows.append(("  all else", human_bytes(small_bytes), ""))
    rows.append(("  total", human_bytes(memory.total_bytes), _verdict(plan)))
    lines = [table(rows, right=(1,), width=terminal_width(), shorten=(0,))]
    if memory.host_bytes:
        lines.append(f"  and {human_bytes(memory.host_bytes)} of the host's memory{_of_host(plan)}")
    return "\n".join(lines)


def _of_host(plan: Any) -> str:
    """How much of the host's memory there is for a device, and whether that suffices."""
    if plan.chip.host_bytes is None:
        return ""
    text = f", of {human_bytes(plan.chip.host_bytes)} for each device"
    if not host_has_room(plan.memory, plan.chip):
        text += ": DOES NOT FIT"
    return text


def _verdict(plan: Any) -> str:
    """Whether the total fits in a device's usable memory, and how much of it stays free.

    It is empty where the usable memory has no bound.
    """
    usable = plan.chip.usable_bytes
    if math.isinf(usable):
        return ""
    if not plan.refusal and plan.memory.total_bytes <= usable:
        return f"of {human_bytes(usable)}: fits, {1 - plan.memory.total_bytes / usable:.0%} free"
    return f"of {human_bytes(usable)}: DOES NOT FIT"


def _refusal(plan: Any) -> str:
    """The compiler's own words where it refuses the program, else an empty string."""
    if not plan.refusal:
        return ""
    return _listed("the compiler refuses it", plan.refusal.splitlines())


def _listed(title: str, lines: Sequence[str], mark: str = "") -> str:
    """A title with sentences below it, each wrapped and preceded by `mark`.

    Without any sentence the title is left out too, and the section is empty.
    """
    if not lines:
        return ""
    width = terminal_width()
    return "\n".join([title, *(wrapped(line, width, f"  {mark}", "    ") for line in lines)])


def _bar(share: float) -> str:
    """A bar whose length is a share of `_BAR_WIDTH`, rounded to an eighth of a character."""
    full, eighths = divmod(round(share * _BAR_WIDTH * 8), 8)
    bar = "█" * full
    if eighths:
        bar += _EIGHTHS[eighths - 1]
    return bar


def _largest(plan: Any) -> str:
    """The table of the largest arrays at the moment when the memory is fullest.

    Each row has the array's type, size and kind, the operation that makes it, and its line of
    Python.
    """
    pieces = plan.memory.pieces[:_SHOWN]
    if not pieces:
        return ""
    rows = [("largest at the fullest moment", "", "", "", "")]
    for piece in pieces:
        rows.append(
            (
                f"  {piece.type}",
                human_bytes(piece.size),
                piece.kind,
                _operation(piece.op_name),
                short(piece.source),
            )
        )
    # On a narrow terminal the operation goes first and then the kind: the size and the line say
    # what to change.
    return table(rows, right=(1,), width=terminal_width(), shorten=(4, 3, 0), drop=(3, 2))


def _operation(op_name: str) -> str:
    """The last part of an operation's name, marked where it is recomputed or of the backward pass.

    The compiler's names are paths such as `jit(step)/transpose(jvp(loss))/dot_general`, in which
    JAX leaves the names of its transformations.
    """
    parts = [part.rstrip(")") for part in op_name.split("/") if part]
    operation = parts[-1] if parts else "-"  # the parts before it are the scopes it is in
    # Recomputed activations are part of the backward pass, so their mark is looked for first.
    if "rematted_computation" in parts:
        return f"again: {operation}"
    if "transpose(" in op_name:
        return f"backward: {operation}"
    return operation


def short(source: str) -> str:
    """A source line `file:line` with a shorter path.

    The path is relative to the working directory if the file is below it, else to the
    `site-packages` that holds it, else its last three parts. Text without a colon is returned as it
    is.
    """
    file, colon, line = source.rpartition(":")
    if not colon:
        return source
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except ValueError:
        parts = Path(file).parts
    # An installed package is recognized by its own folders, wherever the environment is.
    if "site-packages" in parts:
        return f"{Path(*parts[parts.index('site-packages') + 1 :])}:{line}"
    return f"{Path(*parts[-3:])}:{line}"


def _estimated(plan: Any) -> str:
    """The table that sets an estimate by formula against what the compiler has.

    It compares the most that each kind of memory takes at any moment, which need not be the moment
    when the total is largest. It is empty where the plan was made without an estimate.
    """
    estimate = plan.estimate
    if estimate is None:
        return ""
    rows = [("the most at any moment", "by formula", "compiled", "error")]
    for kind, size in estimate.kinds.items():
        # An estimate is of the most of each kind at any moment, not of one moment for all.
        rows += _estimated_rows(kind, size, plan.memory.most[kind])
    rows += _estimated_rows("total", estimate.total_bytes, plan.memory.total_bytes)
    return (
        table(rows, right=(1, 2, 3), width=terminal_width(), shorten=(0,))
        + f"\n  {estimate.flops:.3g} FLOPs a step, on all devices"
    )


def _products(plan: Any) -> str:
    """What the step's products take on all devices, and what of the forward pass runs again.

    It is empty for a pipeline, and where a step has no products.
    """
    flops = plan.flops
    if flops is None or not flops.total:
        return ""
    text = f"products of matrices: {flops.total:.3g} FLOPs a step, on all devices"
    if flops.recomputed:
        text += (
            f"; {flops.recomputed:.3g} of them recompute {flops.recomputed_fraction:.1%} of the "
            "forward pass"
        )
    if flops.unknown:
        kinds = [f"{number} x {name}" for name, number in flops.unknown]
        text += f"; not counted: {', '.join(kinds)}"
    return wrapped(text, terminal_width(), later="  ")


def _estimated_rows(
    kind: str, estimated: float, compiled: float
) -> list[tuple[str, str, str, str]]:
    """The row of one kind of memory with its relative error, or no row where both sizes are 0."""
    if not estimated and not compiled:
        return []
    # What the compiler needs none of has no relative error.
    error = "-"
    if compiled:
        error = f"{estimated / compiled - 1:+.0%}"
    return [(f"  {kind}", human_bytes(estimated), human_bytes(compiled), error)]


def _prices(plan: Any) -> str:
    """The table of what each stage of ZeRO sends and holds, with the step's own stage marked.

    It is empty for a plan without prices, such as that of a function that `jax.jit` compiled.
    """
    if not plan.prices:
        return ""
    rows = [("ZeRO, by formula", "sends per step", "holds besides what is at rest", "")]
    for price in plan.prices:
        held = human_bytes(price.held_bytes)
        # Stage 3 gathers parameters a layer at a time, and so holds one layer's besides its shard.
        if price.stage == 3:
            held += " and a layer"
        mark = ""
        if price.chosen:
            mark = "this step"
        rows.append((f"  stage {price.stage}", human_bytes(price.sent_bytes), held, mark))
    return table(rows, right=(1,), width=terminal_width(), shorten=(2,), drop=(3,))


@dataclass(frozen=True)
class _Route:
    """What collectives have in common that share a row of the table of communication."""

    over: str  # the mesh axes, or the size of the groups where they follow no axes
    network: str
    kind: str
    dtypes: str
    size: int  # bytes of the larger of operands and results
    because: str  # the lines of Python, and a note on how often they run


@dataclass
class _Traffic:
    """How often the collectives of a row run in a step, and the bytes that a device sends."""

    times: int = 0
    sent_bytes: int = 0


def _communication(plan: Any) -> str:
    """The table of a step's collectives, those that send most first, and their totals by axes.

    Collectives that differ only in their name share a row. Rows past a limit are added up in one,
    then there is a row for each combination of mesh axes and network.
    """
    if not plan.collectives:
        return "no communication"
    # Collectives and totals share the columns, so that both are in one table.
    heading = "communication per step,network,collective,dtype,times,of,sends,because of"
    rows = [
        tuple(heading.split(",")),
        *_collective_rows(_traffic_by_route(plan.collectives)),
        *_total_rows(plan.sent_bytes),
    ]
    return (
        table(rows, right=(4, 5, 6), width=terminal_width(), shorten=(7,), drop=(5, 3, 4, 1))
        + "\n"
        + _hidden(plan)
    )


def _hidden(plan: Any) -> str:
    """What share of the bytes is sent beside products, why the others are not, and what uneven
    loads would add.

    Shares that would read as none are left out.
    """
    alone = idle = total = 0
    for one in plan.collectives:
        total += one.total_bytes
        if not one.asynchronous:
            alone += one.total_bytes
        elif not one.overlapped:
            idle += one.total_bytes
    lines = [
        f"  {plan.overlapped_fraction:.0%} of it under way while matrices are multiplied, as it is "
        "scheduled"
    ]
    reasons = {
        "waited for: the compiler sends it in one go": alone,
        "started early, with nothing to multiply until it is needed": idle,
    }
    for words, size in reasons.items():
        if size >= 0.005 * total > 0:
            lines.append(f"  {size / total:.0%} {words}")
    if plan.further_round_bytes:
        lines.append(
            f"  {human_bytes(plan.further_round_bytes)} more for each further round of experts, "
            "which uneven loads take"
        )
    return "\n".join(lines)


def _traffic_by_route(collectives: Sequence[Any]) -> list[tuple[_Route, _Traffic]]:
    """The traffic of a step by row of the table, the most bytes first.

    Rows that send equally much keep the order in which the program has their first collective.
    """
    traffic: dict[_Route, _Traffic] = {}
    for collective in collectives:
        # Equal routes are one row, whichever instructions of the program they come from.
        total = traffic.setdefault(_route(collective), _Traffic())
        total.times += collective.times
        total.sent_bytes += collective.total_bytes
    return sorted(traffic.items(), key=lambda item: -item[1].sent_bytes)


def _route(collective: Any) -> _Route:
    """The row of the table to which a collective belongs."""
    # Groups that follow no axes of the mesh are known by their size only.
    if collective.axes is None:
        over = f"groups of {collective.group_size}"
    else:
        over = " x ".join(collective.axes)
    return _Route(
        over=over,
        network=_network(collective.slow),
        kind=collective.kind,
        dtypes="/".join(dict.fromkeys(collective.dtypes)),
        size=max(collective.operand_bytes, collective.result_bytes),
        because=_because(collective),
    )


def _because(collective: Any) -> str:
    """The lines of Python that cause a collective, at most three, and how often it may run."""
    # A `dict` keeps the order of the lines, and the first of those that are equal.
    because = ", ".join(dict.fromkeys(map(short, collective.sources[:3])))
    if len(collective.sources) > 3:
        because += ", …"
    return because + where_it_runs(collective)


def where_it_runs(collective: Any) -> str:
    """What is to be known of how often a collective runs, behind a line about it; or empty text.

    One in a branch is counted as if the branch were taken, if it is not in a pass of a pipeline,
    and the rounds of a loop of unknown length are not counted.
    """
    where = ""
    if collective.conditional:
        where += " in a branch"
    if not collective.times:
        where += " in a round that an even load does not take"
    elif not collective.times_known:
        where += " in a loop of unknown length"
    return where


def _network(slow: bool) -> str:
    """The word for the network between slices, or for the one within a slice."""
    return "slow" if slow else "fast"


def _collective_rows(traffic: Sequence[tuple[_Route, _Traffic]]) -> list[tuple[str, ...]]:
    """The rows of the collectives that send most, and one row for all others."""
    # Twice as many rows as of arrays: forward and backward passes have collectives of their own.
    shown, others = traffic[: 2 * _SHOWN], traffic[2 * _SHOWN :]
    rows = []
    for route, total in shown:
        rows.append(
            (
                f"  {route.over}",
                route.network,
                route.kind,
                route.dtypes,
                f"{total.times:,} x",
                human_bytes(route.size),
                human_bytes(total.sent_bytes),
                route.because,
            )
        )
    if others:
        rows.append(_row_of_others(others))
    return rows


def _row_of_others(others: Sequence[tuple[_Route, _Traffic]]) -> tuple[str, ...]:
    """One row for the collectives that have none of their own."""
    times = sent_bytes = 0
    for _, total in others:
        times += total.times
        sent_bytes += total.sent_bytes
    more, sent = f"{len(others)} more", human_bytes(sent_bytes)
    return ("  and", "", more, "", f"{times:,} x", "", sent, "")


def _total_rows(
    sent_bytes: dict[tuple[tuple[str, ...] | None, bool], int],
) -> list[tuple[str, ...]]:
    """The rows of `Plan.sent_bytes`, one for each axes and network, the most bytes first."""
    rows = []
    # The totals are of all collectives, those that the table does not show included.
    for (axes, slow), sent in sorted(sent_bytes.items(), key=lambda item: -item[1]):
        over = "other groups" if axes is None else " x ".join(axes)
        rows.append((f"  all over {over}", _network(slow), "", "", "", "", human_bytes(sent), ""))
    return rows
