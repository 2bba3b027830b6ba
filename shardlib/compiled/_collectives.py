"""The collectives of a compiled program: which, over which mesh axes, how many bytes, how often.

What a compiler was asked to move and what it moves are two things. The text of a compiled program
says the second, but says it differently for every machine, and this file knows the spellings:

- a collective that overlaps with computation is a `-start` and a `-done`, or sits in a computation
  of its own that an `async-start`, `call-start` or `custom-call-start` runs (the last two on the
  sparse cores of some TPUs);
- a TPU also weaves an all-gather into the fusions it overlaps with, where the same collective is
  written once to start, once in every fusion it passes through and once to finish;
- a TPU writes some reduce-scatters as a fusion of an all-reduce and the slice that each device
  keeps;
- between slices of TPUs there are no collectives but a `send` and a `recv` that the network's
  runtime interprets;
- the devices of a group are listed, computed from an iota, or named as axes of a mesh that is
  rarely the user's;
- only CPU and GPU programs say how often a loop runs; on TPU it follows from its condition, start
  and step.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh

from shardlib._text import human_bytes
from shardlib.checks import _arguments as check
from shardlib.compiled._device_groups import Devices, longest_chain
from shardlib.compiled._hlo import Instruction, Program, Scope, arrays, size_bytes, text_of
from shardlib.compiled._runs import Run

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, in bytes per device and execution.

    Shapes and dtypes are those of the operands as compiled, which is what is on the wire: a CPU
    widens a bfloat16 all-reduce to float32, a TPU narrows a float32 weight to bfloat16 before
    gathering it and pads a scattered dimension to whole tiles (the rows that end up on the wrong
    device then move by a small `collective-permute` of their own). A collective that was combined
    from several has as many operands. Of a `ragged-all-to-all` the operand is the whole buffer to
    send from: how much of it moves is decided when the program runs.

    - `kind`: HLO's name: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`,
      `collective-permute`, `ragged-all-to-all` or `collective-broadcast`.
    - `dtypes`: HLO's names, one per operand: `f32`, `bf16`, `s8`.
    - `shapes`: on one device, one per operand.
    - `operand_bytes`: all operands together, on one device.
    - `result_bytes`: the results, on one device.
    - `axes`: mesh axes the groups run over, in the mesh's order; None without a mesh or a match.
    - `group_size`: devices in a group; of a permute, in its longest chain.
    - `times`: runs per execution of the program, as far as the loops around it are known.
    - `times_known`: False inside a loop that runs an unknown number of times, counted as once; or
      as zero times if it takes an uneven load of experts to run it at all.
    - `further_times`: how often each further round of such a load runs it.
    - `conditional`: whether it is inside a branch of a conditional, counted as if taken; in a
      pipeline as often as a stage has such a pass.
    - `op_name`: JAX's name stack.
    - `sources`: `file:line` of the user's code; several where collectives were combined.
    - `slow`: whether it runs between slices, over the slow network.
    - `overlapped`: whether the device multiplies matrices while it sends, between its start, or
      what gives it its operands later on, and its end, as they are scheduled.
    - `asynchronous`: whether it has a start and an end, between which other instructions may run.
    """

    kind: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    operand_bytes: int
    result_bytes: int
    axes: tuple[str, ...] | None
    group_size: int
    times: int = 1
    times_known: bool = True
    further_times: int = 0
    conditional: bool = False
    op_name: str = ""
    sources: tuple[str, ...] = ()
    slow: bool = False
    overlapped: bool = False
    asynchronous: bool = field(default=False, compare=False)

    @property
    def sent_bytes(self) -> int:
        """What a device sends each time it runs, as a ring would; of N devices, and S bytes of the
        full array.

        An all-reduce sends 2 S (N-1)/N, an all-gather and a reduce-scatter S (N-1)/N, an all-to-all
        the same of what one device holds, a permute and a broadcast S.

        >>> Collective("all-gather", ("f32",), ((1024,),), 4096, 16384, ("data",), 4,
        ...     times=24).sent_bytes
        12288
        """
        others, size = self.group_size - 1, self.group_size
        match self.kind:
            case "all-reduce":
                return 2 * self.operand_bytes * others // size
            case "all-gather":
                return self.result_bytes * others // size
            case "reduce-scatter" | "all-to-all" | "ragged-all-to-all":
                return self.operand_bytes * others // size
        return self.operand_bytes

    @property
    def total_bytes(self) -> int:
        """What a device sends in one run of the program, in bytes.

        A loop that runs an unknown number of times is counted as once.
        """
        return self.sent_bytes * self.times

    @property
    def further_bytes(self) -> int:
        """What a device sends besides in each further round that an uneven load takes, in bytes."""
        return self.sent_bytes * self.further_times


def collectives(
    compiled_or_text: "jax.stages.Compiled | Program | str", mesh: Mesh | None = None
) -> tuple[Collective, ...]:
    """Every collective that a compiled program runs, each once, in the order of the program.

    `compiled_or_text` is a `jax.stages.Compiled` or its `as_text()`. With the `mesh` it was
    compiled for, every group of devices is matched to the mesh axes it runs over. Collectives of a
    device with itself are left out.

    >>> P = jax.sharding.PartitionSpec
    >>> mesh = jax.make_mesh((4, 2), ("data", "model"),
    ...     axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"),
    ...     out_specs=P())
    >>> compiled = jax.jit(total).lower(jax.ShapeDtypeStruct((8, 256), "float32")).compile()
    >>> [found] = collectives(compiled, mesh)
    >>> found.kind, found.axes, found.group_size, found.shapes, found.operand_bytes
    ('all-reduce', ('data',), 4, ((2, 256),), 2048)
    """
    check.kind("collectives", "mesh", mesh, Mesh, "the mesh of the program", optional=True)
    program = compiled_or_text
    if not isinstance(program, Program):
        program = Program(text_of("collectives", "compiled_or_text", program))
    devices = Devices(mesh, program.partitions)
    collected: list[Collective] = []
    for scope, made, run in program.walk():
        collective = _collective(program, devices, scope, made, run)
        if collective is not None and collective.group_size > 1:
            collected.append(collective)
    return tuple(collected)


def summary(found: Iterable[Collective]) -> str:
    """A line for each kind of collective, its axes and its size, most bytes first.

    It is for people, and for the messages of failed tests.

    The size is that of the whole array: of an all-gather's result, of a reduce-scatter's operand.

    >>> gather = Collective("all-gather", ("f32",), ((1024,),), 4096, 16384, ("data",), 4, times=24)
    >>> print(summary([gather, gather]))
    all-gather over data: 48 x 16.0 KiB
    >>> print(summary([]))
    no collectives
    """
    takes = "collectives, as `collectives(compiled)` gives them"
    check.kind("summary", "found", found, list | tuple | Iterator, takes)
    # How often each runs, by its size and its line but for that number.
    times: dict[tuple[int, str], int] = defaultdict(int)
    for collective in found:
        check.kind("summary", "found", collective, Collective, takes)
        size = max(collective.operand_bytes, collective.result_bytes)
        times[size, _summary_line(collective, size)] += collective.times
    if not times:
        return "no collectives"
    # What sends most comes first.
    counted = [(size, count, line) for (size, line), count in times.items()]
    counted.sort(key=lambda row: (-row[0] * row[1], row[2]))
    return "\n".join(line.format(count) for _, count, line in counted)


def _summary_line(collective: Collective, size: int) -> str:
    """The line of a summary for a collective, with `{}` where the number of its runs goes.

    Collectives whose lines are equal are counted together.
    """
    over = f"groups of {collective.group_size}"
    if collective.axes is not None:
        over = ", ".join(collective.axes)
    line = f"{collective.kind} over {over}: {{}} x {human_bytes(size)}"
    if collective.conditional:
        line += " in a branch"
    if not collective.times:
        line += " in a round that an even load does not take"
    elif not collective.times_known:
        line += " in a loop of unknown length"
    return line


def _collective(
    program: Program, devices: Devices, scope: Scope, made: Instruction, run: Run
) -> Collective | None:
    """The collective that an instruction starts or does, or None where it is none.

    Args:
        program: the compiled program.
        devices: the numbers of its devices, and the mesh they are on.
        scope: the computation that the instruction is in.
        made: the instruction.
        run: how often it runs.
    """
    kind = _kind(scope, made)
    if kind is None:
        return None
    groups = devices.megascale_groups(made) if made.opcode == "send" else devices.groups(made)
    operands, results = _operands_and_results(scope, made, kind)
    # Some TPU fusions are reduce-scatters that are written as an all-reduce.
    if kind == "all-reduce" and (kept := _slice_kept(scope, made)):
        kind, results = "reduce-scatter", arrays(kept.result)
    group_size = max(map(len, groups))
    if kind == "collective-permute":
        group_size = longest_chain(groups)
    op_name, source = program.origin(scope, made)
    return Collective(
        kind=kind,
        dtypes=tuple(dtype for dtype, _ in operands),
        shapes=tuple(shape for _, shape in operands),
        operand_bytes=size_bytes(operands),
        result_bytes=size_bytes(results),
        axes=devices.axes(groups, permute=kind == "collective-permute"),
        group_size=group_size,
        times=run.times,
        times_known=run.known,
        further_times=run.further,
        conditional=run.conditional,
        op_name=op_name,
        sources=_sources(program, scope, made, source),
        slow=devices.cross_slices(groups),
        overlapped=_is_overlapped(program, scope, made),
        asynchronous=_is_asynchronous(_start_as_scheduled(scope, made)[1]),
    )


def _kind(scope: Scope, made: Instruction) -> str | None:
    """Which of `KINDS` an instruction is, or None.

    Of a collective in several pieces it is the first one only: the `-start`, the fusion it is
    started in, the `send`.
    """
    kind = made.opcode.removesuffix("-start")
    if kind in KINDS and not _is_continued(scope, made):
        return kind
    if made.opcode != "send":
        return None
    transfer = made.get(r'_xla_megascale_transfer_type="(\w+)"')
    if not transfer:
        return None
    if transfer == "ONE_TO_ONE":
        return "collective-permute"
    return transfer.lower().replace("_", "-")


_Arrays = list[tuple[str, tuple[int, ...]]]


def _operands_and_results(scope: Scope, made: Instruction, kind: str) -> tuple[_Arrays, _Arrays]:
    """The arrays that a collective takes and those that it gives, each by dtype and shape.

    Compilers put them in different places, by the kind of the collective and how it is started.
    """
    operands: _Arrays = []
    for name in made.operands:
        operands += arrays(scope.instructions[name].result)
    results = arrays(made.result)
    if made.opcode.endswith("-start"):
        # Its type is that of the operands, the results and some flags; only an all-reduce's is that
        # of the results.
        results = results[len(operands) : 2 * len(operands)] or results
    if kind == "ragged-all-to-all":
        # The others are the buffer to receive in, offsets and sizes.
        operands, results = operands[:1], results[:1]
    if made.opcode == "send":
        # What it gives comes from the `recv` that meets it.
        results = arrays(_matching_receive(scope, made).result)[:1]
    return operands, results


def _matching_receive(scope: Scope, send: Instruction) -> Instruction:
    """The `recv` that meets a `send`: both name the same meeting."""
    meeting = send.get(r'(_xla_host_transfer_rendezvous="[^"]*")')
    for other in scope.instructions.values():
        if other.opcode == "recv" and meeting in other.attributes:
            return other
    raise ValueError(f"The program sends by `{send.name}`, and has no `recv` of {meeting}.")


def _sources(program: Program, scope: Scope, made: Instruction, source: str) -> tuple[str, ...]:
    """The lines of Python that a collective came from, each once.

    `source` is its own. Where the compiler combined several collectives, or left out the line, the
    lines of what goes into it are added.
    """
    lines = [source]
    if len(made.operands) > 1 or not source:
        for name in made.operands:
            _, line = program.origin(scope, scope.follow(name))
            lines.append(line)
    return tuple(dict.fromkeys(line for line in lines if line))


def _is_continued(scope: Scope, made: Instruction) -> bool:
    """Whether a collective only passes through a TPU's fusion, started in a fusion before.

    The same collective is written in each fusion of such a chain, and is counted in the first.
    """
    if scope.caller is None or scope.caller.opcode != "fusion":
        return False
    targets: set[str] = set()
    for user in scope.instructions.values():
        if made.name in user.operands:
            targets.add(user.get(_ASYNC_TARGET))
    part_of_chain = (
        scope.name.startswith("async_collective_fusion") or "chain_id=" in made.attributes
    )
    return "Start" not in targets and ("Done" in targets or part_of_chain)


# The custom calls of a TPU's fusions that start and end a collective woven into them.
_ASYNC_TARGET = r'custom_call_target="AsyncCollective(\w+)"'


def _is_overlapped(program: Program, scope: Scope, made: Instruction) -> bool:
    """Whether matrices are multiplied between the start and the end of a collective.

    The instructions of a computation are listed in the order in which they are scheduled, so what
    is listed between the two runs while the collective does.
    """
    scope, made = _start_as_scheduled(scope, made)
    if not _is_asynchronous(made):
        return False
    made = _sends_from(scope, made)
    after_start = itertools.dropwhile(lambda other: other is not made, scope.instructions.values())
    next(after_start, None)  # the start itself
    # The start, and the fusions that the collective passes through on its way to the end.
    continued = {made.name}
    for instruction in after_start:
        if program.multiplies(scope, instruction):
            return True
        if continued.isdisjoint(instruction.operands):
            continue
        if instruction.opcode.endswith("-done") or _is_end(program, scope, instruction):
            return False
        continued.add(instruction.name)
    return False


def _is_asynchronous(start: Instruction) -> bool:
    """Whether an instruction starts a collective that another one ends.

    It is one that `_start_as_scheduled` gives, which is a fusion only if a collective starts in it.
    """
    return start.opcode.endswith("-start") or start.opcode in ("send", "fusion")


def _start_as_scheduled(scope: Scope, made: Instruction) -> tuple[Scope, Instruction]:
    """The instruction that starts a collective among those it may overlap with.

    That is the collective itself, or, where it is in a computation of its own or in the fusion that
    starts it, what calls that computation.
    """
    if scope.caller is None or scope.outer is None:
        return scope, made
    targets = {other.get(_ASYNC_TARGET) for other in scope.instructions.values()}
    if scope.caller.opcode.endswith("-start") or "Start" in targets:
        return scope.outer, scope.caller
    return scope, made


def _sends_from(scope: Scope, start: Instruction) -> Instruction:
    """The instruction from which on a collective sends: its start, or what gives it its operands.

    The program of a sparse core may be started before there is anything to send. Then the start has
    no operands, and a `call-update` later on has them.
    """
    if start.operands:
        return start
    # An update has the instruction that it continues, and what it gives to the collective.
    last = start
    for user in scope.instructions.values():
        if user.opcode.endswith("-update") and last.name in user.operands:
            if len(user.operands) > 1:
                return user
            last = user
    return start


def _is_end(program: Program, scope: Scope, made: Instruction) -> bool:
    """Whether an instruction is the fusion of a TPU that ends a collective.

    The collective was woven into other fusions before; a custom call inside marks its end.
    """
    if made.opcode != "fusion":
        return False
    for name in program.calls(scope, made):
        for instruction in program.called(scope, made, name).instructions.values():
            if 'custom_call_target="AsyncCollectiveDone"' in instruction.attributes:
                return True
    return False


def _slice_kept(scope: Scope, made: Instruction) -> Instruction | None:
    """The slice of an all-reduce that each device keeps, or None.

    It is in a fusion, which a TPU runs as a reduce-scatter.
    """
    caller = scope.caller
    if caller is None or caller.opcode != "fusion" or "kind=kCustom" not in caller.attributes:
        return None
    for user in scope.instructions.values():
        if user.opcode == "dynamic-slice" and scope.follow(user.operands[0]) is made:
            return user
    return None
