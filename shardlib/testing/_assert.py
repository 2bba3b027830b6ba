"""Assertions about the bytes that a step sends and the memory that it takes, on any machine.

Both compile the step with `sl.plan` for a target that need not be there, read what they assert off
the compiled program, and return the plan. Nothing runs, so the numbers are exact and a test of them
is never flaky.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardlib._text import human_bytes, listed, table
from shardlib.checks import _arguments as check
from shardlib.compiled._collectives import KINDS, Collective
from shardlib.compiled._memory import KINDS as MEMORY_KINDS
from shardlib.compiled._memory import Memory, Piece
from shardlib.machine._mesh import parse_axes
from shardlib.machine._targets import Target
from shardlib.planning._plan import Plan, plan
from shardlib.planning._report import short, where_it_runs

Axes = str | tuple[str, ...]
_LISTED_PIECES = 6  # of the memory that is over its limit, the largest


@dataclass(frozen=True)
class _Link:
    """What the bytes of a step are counted by: a kind of collective, and the axes it runs over.

    `axes` are None where the groups of a collective are no axes of the mesh.
    """

    kind: str
    axes: tuple[str, ...] | None

    @property
    def over(self) -> str:
        """The axes in words."""
        if self.axes is None:
            return "other groups"
        return " x ".join(self.axes)


def assert_collectives(
    step: Any,
    state: Any = None,
    batch: Any = None,
    *,
    sends: Mapping[tuple[str, Axes], int],
    target: str | Target | None = None,
    ignore_below: int = 0,
) -> Plan:
    """Assert how many bytes a device sends in a step, by kind of collective and mesh axes.

    Bytes are counted as `Collective.sent_bytes` says. What is not in `sends` must not be there, but
    for collectives that send less than `ignore_below` each time, such as the sum of the loss. As in
    a plan, a collective in a loop of unknown length counts once, and one in a branch as if the
    branch were taken. The plan is returned. An `AssertionError` lists what differs, with the
    collectives and the lines of Python that they come from.

    Args:
        step: a step, as for `sl.plan`, or a plan that has been made already.
        state: the state of the step, as for `sl.plan`.
        batch: the batch of the step, as for `sl.plan`.
        sends: bytes per device and step, by kind of collective and mesh axis or axes.
        target: the machine to compile for, as for `sl.plan`.
        ignore_below: bytes; a collective that sends less each time is not counted.

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
    step_plan = _plan(step, state, batch, target)
    expected = _in_mesh_order(expected, step_plan.mesh)
    # Differences go both ways: what is sent and was not expected, and what was expected and is not
    # sent.
    differences = _differences(expected, _collectives_by_link(step_plan, ignore_below))
    if differences:
        raise AssertionError(
            f"On {step_plan.target}, {step_plan.mesh}, a device sends other bytes per step than "
            f"expected.\n{_describe_differences(differences)}"
        )
    return step_plan


@dataclass(frozen=True)
class _Difference:
    """A link over which other bytes are sent than expected, and what sends them.

    `expected` is 0 for a link that nobody expected; `collectives` are empty if nothing is sent.
    """

    link: _Link
    expected: int
    sent: int
    collectives: list[Collective]


def _collectives_by_link(step_plan: Plan, ignore_below: int) -> dict[_Link, list[Collective]]:
    """The collectives of a step that send at least so many bytes each time, by link."""
    collectives: dict[_Link, list[Collective]] = defaultdict(list)
    for collective in step_plan.collectives:
        if collective.sent_bytes >= ignore_below:
            collectives[_Link(collective.kind, collective.axes)].append(collective)
    return collectives


def _differences(
    expected: Mapping[_Link, int], collectives: Mapping[_Link, list[Collective]]
) -> list[_Difference]:
    """The links over which other bytes are sent than expected.

    Expected ones come first, in the order of `sends`, then those that nobody expected.
    """
    differences = []
    for link in dict.fromkeys([*expected, *collectives]):
        expected_bytes = expected.get(link, 0)
        senders = collectives.get(link, [])
        sent = sum(collective.total_bytes for collective in senders)
        if sent != expected_bytes:
            differences.append(_Difference(link, expected_bytes, sent, senders))
    return differences


def _describe_differences(differences: list[_Difference]) -> str:
    """A table of what is sent and what was expected, and below it the collectives of each row."""
    rows = [("collective", "over", "expected", "found", "difference")]
    details = []
    for difference in differences:
        link, expected, sent = difference.link, difference.expected, difference.sent
        rows.append((link.kind, link.over, f"{expected:,}", f"{sent:,}", f"{sent - expected:+,}"))
        # Where nothing is sent there is no line to blame.
        if difference.collectives:
            details.append(f"  {link.kind} over {link.over}:")
            details.extend(map(_describe_collective, difference.collectives))
    return "\n".join([table(rows, right=(2, 3, 4)), *details])


def _describe_collective(collective: Collective) -> str:
    """One line about a collective: how often, how many bytes of which dtypes, and why it is there.

    The reason is the user's lines of Python; without any, JAX's name of the operation; and without
    that, the compiler put it there.
    """
    dtypes = "/".join(dict.fromkeys(collective.dtypes))
    reason = ", ".join(map(short, collective.sources)) or collective.op_name or "the compiler"
    sent = f"{collective.times:,} x {collective.sent_bytes:,} B of {dtypes}"
    return f"    {sent}, because of {reason}{where_it_runs(collective)}"


def assert_memory(
    step: Any,
    state: Any = None,
    batch: Any = None,
    *,
    at_most: Mapping[str, int],
    target: str | Target | None = None,
) -> Plan:
    """Assert that a step takes no more of each device's memory than it may.

    Limits are in bytes, by kind of memory; `"total"` is all of them together, and `"host"` what is
    in the host's memory. The plan is returned. An `AssertionError` lists the kinds that are
    over their limits, and the largest values among them.

    Args:
        step: a step, as for `sl.plan`, or a plan that has been made already.
        state: the state of the step, as for `sl.plan`.
        batch: the batch of the step, as for `sl.plan`.
        at_most: bytes per device, by kind of memory; kinds that are not in it are not limited.
        target: the machine to compile for, as for `sl.plan`.

    >>> import jax, jax.numpy as jnp, optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> state = sl.init(lambda: {"w": jnp.zeros((64, 64))}, optax.adam(1e-3), strategy,
    ...     abstract=True)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
    >>> batch = jax.ShapeDtypeStruct((16, 64), "float32")
    >>> found = sl.testing.assert_memory(step, state, batch, at_most={"gradients": 2 * 64 * 64 * 4,
    ...     "total": 150_000})
    """
    _check_limits(at_most)
    step_plan = _plan(step, state, batch, target)
    memory = {
        "total": step_plan.memory.total_bytes,
        "host": step_plan.memory.host_bytes,
        **step_plan.memory.kinds,
    }
    rows = [("memory per device", "at most", "found", "over by")]
    over = []
    for kind, limit in at_most.items():
        size = memory[kind]
        if size > limit:
            over.append(kind)
            rows.append((kind, f"{limit:,}", f"{size:,}", human_bytes(size - limit)))
    if not over:
        return step_plan
    # Which values take the memory is what a user can do something about.
    lines = [table(rows, right=(1, 2, 3))]
    pieces = _largest_pieces(step_plan.memory, over)
    if pieces:
        lines += ["the largest:", *map(_describe_piece, pieces)]
    raise AssertionError(
        f"On {step_plan.target}, {step_plan.mesh}, a device holds more than it may.\n"
        + "\n".join(lines)
    )


def _check_limits(at_most: Any) -> None:
    """Refuse limits of memory that are no mapping from kinds that exist to numbers of bytes."""
    check.kind(
        "assert_memory", "at_most", at_most, Mapping, 'bytes by kind: `at_most={"total": 2**30}`'
    )
    kinds = ("total", "host", *MEMORY_KINDS)
    # All names are looked at before the first size.
    for kind in at_most:
        if kind not in kinds:
            raise ValueError(f"`{kind}` is no kind of memory; there are {listed(kinds)}.")
    for kind, size in at_most.items():
        check.whole("assert_memory", f"at_most[{kind!r}]", size, "a number of bytes", least=0)


def _largest_pieces(memory: Memory, over: list[str]) -> list[Piece]:
    """The largest values of the kinds of memory that are over their limits.

    If the total is over its limit, a value of any kind counts.
    """
    pieces = list(memory.pieces)  # the largest first
    if "total" not in over:
        pieces = [piece for piece in pieces if piece.kind in over]
    return pieces[:_LISTED_PIECES]


def _describe_piece(piece: Piece) -> str:
    """One line about a value in memory: its type, size and kind, and where it comes from."""
    origin = short(piece.source) or piece.op_name
    return f"  {piece.type}  {human_bytes(piece.size)}  {piece.kind}  {origin}"


def _expected_bytes(sends: Any) -> list[tuple[_Link, int]]:
    """Check what a user says a step sends, and bring each entry into one form.

    A single axis, `"data"`, is the same as a tuple of one, `("data",)`.
    """
    takes = 'bytes by kind and axes: `sends={("all-reduce", "data"): 4096}`'
    check.kind("assert_collectives", "sends", sends, Mapping, takes)
    expected: list[tuple[_Link, int]] = []
    for key, size in sends.items():
        # A key is a kind and axes; a kind by itself would not say over which network.
        if not isinstance(key, tuple) or len(key) != 2:
            raise check.refusal("assert_collectives", "sends", sends, takes)
        link = _checked_link(key, takes)
        takes_bytes = "a number of bytes"
        size = check.whole("assert_collectives", f"sends[{key!r}]", size, takes_bytes, least=0)
        expected.append((link, size))
    return expected


def _in_mesh_order(expected: list[tuple[_Link, int]], mesh: str) -> dict[_Link, int]:
    """What is expected, with axes in the order in which the mesh has them, as collectives have.

    Axes that are none of the mesh are refused, and a link that is there twice, in any order.
    """
    known = list(parse_axes(mesh)) if "=" in mesh else []
    ordered: dict[_Link, int] = {}
    for link, size in expected:
        axes = link.axes or ()
        for axis in axes:
            if axis not in known:
                raise ValueError(
                    f"`assert_collectives(sends=...)`: `{axis}` of `{link.kind}` is no axis of "
                    f"the mesh `{mesh}`."
                )
        link = _Link(link.kind, tuple(sorted(axes, key=known.index)))
        if link in ordered:
            raise ValueError(
                f"`assert_collectives(sends=...)` has the {link.kind} over {link.over} twice: give "
                "the sum of its bytes once."
            )
        ordered[link] = size
    return ordered


def _checked_link(key: tuple[Any, Any], takes: str) -> _Link:
    """A kind of collective and the axes it runs over, one of them by itself or in a tuple."""
    kind, axes = key
    if kind not in KINDS:
        raise ValueError(f"`{kind}` is no kind of collective; there are {listed(KINDS)}.")
    if isinstance(axes, str):
        axes = (axes,)
    check.texts("assert_collectives", f"sends[{key!r}]", axes, f"axes, as text or texts; {takes}")
    if not axes or len(set(axes)) < len(axes):
        takes = "one axis or several, each once"
        raise check.refusal("assert_collectives", f"sends[{key!r}]", axes, takes)
    return _Link(kind, axes)


def _plan(step: Any, state: Any, batch: Any, target: str | Target | None) -> Plan:
    """The plan of a step; what is a plan already stays as it is.

    Args:
        step: a step of `sl.train_step`, or a plan of one.
        state: the state it takes.
        batch: the batch it takes.
        target: the machine to compile for; by default the one at hand.
    """
    if not isinstance(step, Plan):
        return plan(step, state, batch, target)
    if any(given is not None for given in (state, batch, target)):
        raise ValueError(
            f"What is given first is a plan already, for {step.target}: leave `state`, `batch` and "
            "`target` out, or give the step in its place."
        )
    return step
