"""A plan for people."""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlib._text import human_bytes, table, terminal_width, wrapped

_BAR = 32
_SHOWN = 8


def report(plan: Any) -> str:
    """The whole report of a `Plan`."""
    sections = [
        _title(plan),
        _memory(plan),
        _refusal(plan),
        _largest(plan),
        _communication(plan),
        _prices(plan),
        _estimated(plan),
        _listed("what the compiler remarked", plan.remarks),
        _listed("what to change", plan.advice, "- "),
        f"traced in {plan.lower_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s; nothing "
        "was run",
    ]
    return "\n\n".join(section for section in sections if section)


def _title(plan: Any) -> str:
    chip = plan.chip
    each = "" if math.isinf(chip.hbm_bytes) else f", {human_bytes(chip.hbm_bytes)} each"
    slow = f"; on the slow network: {', '.join(plan.slow_axes)}" if plan.slow_axes else ""
    devices = f"{plan.devices} device" + ("s" if plan.devices > 1 else "")
    width = terminal_width()
    return (
        wrapped(f"{plan.name} on {plan.target}: {devices}{each}", width, later="  ")
        + "\n"
        + wrapped(f"mesh {plan.mesh}{slow}", width, later="  ")
    )


def _memory(plan: Any) -> str:
    memory, usable = plan.memory, plan.chip.usable_bytes
    scale = max(memory.total_bytes, 1)
    rows = [("memory per device", "", "")]
    rows += [
        (f"  {kind}", human_bytes(size), _bar(size / scale))
        for kind, size in memory.kinds.items()
        if size > 1e-4 * scale or (kind == "unattributed" and size)
    ]
    small = sum(
        size
        for kind, size in memory.kinds.items()
        if size <= 1e-4 * scale and kind != "unattributed"
    )
    if small:
        rows.append(("  all else", human_bytes(small), ""))
    rows.append(("  total", human_bytes(memory.total_bytes), _verdict(plan, usable)))
    lines = [table(rows, right=(1,), width=terminal_width(), shorten=(0,))]
    if memory.host_bytes:
        lines.append(f"  and {human_bytes(memory.host_bytes)} of the host's memory")
    return "\n".join(lines)


def _verdict(plan: Any, usable: float) -> str:
    if math.isinf(usable):
        return ""
    if plan.fits:
        return f"of {human_bytes(usable)}: fits, {1 - plan.memory.total_bytes / usable:.0%} free"
    return f"of {human_bytes(usable)}: DOES NOT FIT"


def _refusal(plan: Any) -> str:
    """The compiler's own words where it refuses the program."""
    if not plan.refusal:
        return ""
    return _listed("the compiler refuses it", plan.refusal.splitlines())


def _listed(title: str, lines: Sequence[str], mark: str = "") -> str:
    """Sentences below a title; nothing where there are none."""
    width = terminal_width()
    below = [wrapped(line, width, f"  {mark}", "    ") for line in lines]
    return "\n".join([title, *below]) if below else ""


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _largest(plan: Any) -> str:
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
    return table(rows, right=(1,), width=terminal_width(), shorten=(4, 3, 0), drop=(3, 2))


def _operation(op_name: str) -> str:
    parts = [part.rstrip(")") for part in op_name.split("/") if part]
    again = (
        "again: "
        if "rematted_computation" in parts
        else "backward: "
        if "transpose(" in op_name
        else ""
    )
    return again + (parts[-1] if parts else "-")


def short(source: str) -> str:
    """A line of Python, from here where it is below here."""
    file, colon, line = source.rpartition(":")
    if not colon:
        return source
    try:
        return f"{Path(file).relative_to(Path.cwd())}:{line}"
    except ValueError:
        parts = Path(file).parts
        kept = parts[parts.index("site-packages") + 1 :] if "site-packages" in parts else parts[-3:]
        return f"{Path(*kept)}:{line}"


def _estimated(plan: Any) -> str:
    """The estimate that was made before, beside what the compiler has."""
    if plan.estimate is None:
        return ""
    rows = [("the most at any moment", "by formula", "compiled", "error")]
    pairs = [(kind, size, plan.memory.most[kind]) for kind, size in plan.estimate.kinds.items()]
    for kind, guess, size in [
        *pairs,
        ("total", plan.estimate.total_bytes, plan.memory.total_bytes),
    ]:
        if guess or size:
            error = f"{guess / size - 1:+.0%}" if size else "-"
            rows.append((f"  {kind}", human_bytes(guess), human_bytes(size), error))
    return (
        table(rows, right=(1, 2, 3), width=terminal_width(), shorten=(0,))
        + f"\n  {plan.estimate.flops:.3g} FLOPs a step, on all devices"
    )


def _prices(plan: Any) -> str:
    if not plan.prices:
        return ""
    rows = [("ZeRO, by formula", "sends per step", "holds beside what is at rest", "")]
    rows += [
        (f"  stage {one.stage}", human_bytes(one.sent_bytes), human_bytes(one.held_bytes)
         + (" and a layer" if one.stage == 3 else ""), "this step" if one.chosen else "")
        for one in plan.prices
    ]  # fmt: skip
    return table(rows, right=(1,), width=terminal_width(), shorten=(2,), drop=(3,))


def _communication(plan: Any) -> str:
    if not plan.collectives:
        return "no communication"
    lines: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for one in plan.collectives:
        over = "groups of " + str(one.group_size) if one.axes is None else " x ".join(one.axes)
        note = "".join(
            (
                " in a branch" * one.conditional,
                " in a loop of unknown length" * (not one.times_known),
            )
        )
        sources = ", ".join(dict.fromkeys(map(short, one.sources[:3]))) + (
            ", …" if len(one.sources) > 3 else ""
        )
        dtypes = "/".join(dict.fromkeys(one.dtypes))
        size = max(one.operand_bytes, one.result_bytes)
        key = (over, "slow" if one.slow else "fast", one.kind, dtypes, size, sources + note)
        lines[key][0] += one.times
        lines[key][1] += one.total_bytes
    ordered = sorted(lines.items(), key=lambda item: -item[1][1])
    rows = [
        (
            "communication per step",
            "network",
            "collective",
            "dtype",
            "times",
            "of",
            "sends",
            "because of",
        )
    ]
    rows += [
        (
            f"  {over}",
            network,
            kind,
            dtype,
            f"{times:,} x",
            human_bytes(size),
            human_bytes(sent),
            because,
        )
        for (over, network, kind, dtype, size, because), (times, sent) in ordered[: 2 * _SHOWN]
    ]
    if rest := ordered[2 * _SHOWN :]:
        rows.append(
            (
                "  and",
                "",
                f"{len(rest)} more",
                "",
                f"{sum(times for _, (times, _) in rest):,} x",
                "",
                human_bytes(sum(sent for _, (_, sent) in rest)),
                "",
            )
        )
    totals = sorted(plan.sent_bytes.items(), key=lambda item: -item[1])
    for (axes, slow), sent in totals:
        over = "other groups" if axes is None else " x ".join(axes)
        rows.append(
            (
                f"  all over {over}",
                "slow" if slow else "fast",
                "",
                "",
                "",
                "",
                human_bytes(sent),
                "",
            )
        )
    return (
        table(rows, right=(4, 5, 6), width=terminal_width(), shorten=(7,), drop=(5, 3, 4, 1))
        + f"\n  {plan.overlapped_fraction:.0%} of it under way while matrices are multiplied, as "
        "it is scheduled"
    )
