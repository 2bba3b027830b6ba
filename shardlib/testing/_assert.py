"""Tests of what a step moves and what it takes, as its compiler has it, on any machine."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from shardlib._text import human_bytes, table
from shardlib.checks import _arguments as check
from shardlib.compiled._collectives import KINDS
from shardlib.compiled._memory import KINDS as MEMORY_KINDS
from shardlib.machine._targets import Target
from shardlib.planning._plan import Plan, plan
from shardlib.planning._report import short

Axes = str | tuple[str, ...]


def assert_collectives(
    step: Any,
    state: Any = None,
    batch: Any = None,
    *,
    sends: Mapping[tuple[str, Axes], int],
    target: str | Target | None = None,
    ignore_below: int = 0,
) -> Plan:
    """Assert what a step sends.

    That is, for each kind of collective and mesh axis, the bytes that a device sends in a step.

    `step`, `state`, `batch` and `target` are those of `sl.plan`, or `step` is a plan that was made.
    Bytes are counted as `Collective.sent_bytes` says. What is not in `sends` must not be there, but
    for collectives that send less than `ignore_below` each time, such as the sum of the loss.

    >>> import jax, jax.numpy as jnp, optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> state = sl.init(lambda: {"w": jnp.zeros((64, 64))}, optax.adam(1e-3), strategy,
    ...     abstract=True)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
    >>> batch = jax.ShapeDtypeStruct((16, 64), "float32")
    >>> gradient = 64 * 64 * 4 + 16  # with the loss, its weight, and two counts of NaN losses
    >>> found = sl.testing.assert_collectives(step, state, batch, sends={("all-reduce",
    ...     "data"): gradient * 2 * 7 // 8})
    """
    expected = _expected_bytes(sends)
    check.whole("assert_collectives", "ignore_below", ignore_below, "a number of bytes", least=0)
    found = _plan(step, state, batch, target)
    sent: dict[tuple[str, tuple[str, ...] | None], int] = defaultdict(int)
    lines: dict[tuple[str, tuple[str, ...] | None], list[str]] = defaultdict(list)
    for one in found.collectives:
        if one.sent_bytes >= ignore_below:
            key = (one.kind, one.axes)
            sent[key] += one.total_bytes
            lines[key].append(
                f"    {one.times:,} x {one.sent_bytes:,} B of "
                f"{'/'.join(dict.fromkeys(one.dtypes))}, because of "
                + (", ".join(map(short, one.sources)) or one.op_name or "the compiler")
            )
    wrong = [key for key in {**expected, **sent} if expected.get(key, 0) != sent.get(key, 0)]
    if wrong:
        rows = [("collective", "over", "expected", "found", "difference")]
        details = []
        for kind, axes in wrong:
            over = "other groups" if axes is None else " x ".join(axes)
            want, got = expected.get((kind, axes), 0), sent.get((kind, axes), 0)
            rows.append((kind, over, f"{want:,}", f"{got:,}", f"{got - want:+,}"))
            if lines[kind, axes]:
                details += [f"  {kind} over {over}:", *lines[kind, axes]]
        raise AssertionError(
            f"On {found.target}, {found.mesh}, a device sends other bytes per step than expected.\n"
            + "\n".join([table(rows, right=(2, 3, 4)), *details])
        )
    return found


def assert_memory(
    step: Any,
    state: Any = None,
    batch: Any = None,
    *,
    at_most: Mapping[str, int],
    target: str | Target | None = None,
) -> Plan:
    """Hold a step to the bytes that it takes of each device, by kind, or in all as `"total"`.

    `step`, `state`, `batch` and `target` are those of `sl.plan`, or `step` is a plan that was made.

    >>> import jax, jax.numpy as jnp, optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> state = sl.init(lambda: {"w": jnp.zeros((64, 64))}, optax.adam(1e-3), strategy,
    ...     abstract=True)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
    >>> batch = jax.ShapeDtypeStruct((16, 64), "float32")
    >>> found = sl.testing.assert_memory(step, state, batch, at_most={"gradients": 2 * 64 * 64 * 4,
    ...     "total": 150_000})
    """
    check.kind(
        "assert_memory", "at_most", at_most, Mapping, 'bytes by kind: `at_most={"total": 2**30}`'
    )
    known = ("total", "host", *MEMORY_KINDS)
    if unknown := [kind for kind in at_most if kind not in known]:
        raise ValueError(
            f"`{unknown[0]}` is no kind of memory; there are "
            f"{', '.join(f'`{one}`' for one in known)}."
        )
    for kind, size in at_most.items():
        check.whole("assert_memory", f"at_most[{kind!r}]", size, "a number of bytes", least=0)
    found = _plan(step, state, batch, target)
    memory = {
        "total": found.memory.total_bytes,
        "host": found.memory.host_bytes,
        **found.memory.kinds,
    }
    over = [kind for kind, limit in at_most.items() if memory[kind] > limit]
    if over:
        rows = [("memory per device", "at most", "found", "over by")]
        rows += [
            (k, f"{at_most[k]:,}", f"{memory[k]:,}", human_bytes(memory[k] - at_most[k]))
            for k in over
        ]
        pieces = [piece for piece in found.memory.pieces if piece.kind in over or "total" in over][
            :6
        ]
        details = [
            f"  {piece.type}  {human_bytes(piece.size)}  {piece.kind}  "
            f"{short(piece.source) or piece.op_name}"
            for piece in pieces
        ]
        raise AssertionError(
            f"On {found.target}, {found.mesh}, a device holds more than it may.\n"
            + "\n".join(
                [table(rows, right=(1, 2, 3)), *(["the largest:", *details] if details else [])]
            )
        )
    return found


def _expected_bytes(sends: Any) -> dict[tuple[str, tuple[str, ...] | None], int]:
    takes = 'bytes by kind and axes: `sends={("all-reduce", "data"): 4096}`'
    check.kind("assert_collectives", "sends", sends, Mapping, takes)
    expected: dict[tuple[str, tuple[str, ...] | None], int] = {}
    for key, size in sends.items():
        if not isinstance(key, tuple) or len(key) != 2:
            raise check.refusal("assert_collectives", "sends", sends, takes)
        kind, axes = key
        if kind not in KINDS:
            raise ValueError(
                f"`{kind}` is no kind of collective; there are "
                f"{', '.join(f'`{one}`' for one in KINDS)}."
            )
        over = (axes,) if isinstance(axes, str) else axes
        check.texts(
            "assert_collectives", "sends", over, f"axes as text or a tuple of text; {takes}"
        )
        expected[kind, over] = check.whole(
            "assert_collectives", f"sends[{key!r}]", size, "a number of bytes", least=0
        )
    return expected


def _plan(step: Any, state: Any, batch: Any, target: str | Target | None) -> Plan:
    return step if isinstance(step, Plan) else plan(step, state, batch, target)
