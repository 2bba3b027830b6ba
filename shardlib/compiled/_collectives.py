"""Reading the collectives off a compiled program: which, over which mesh axes, how many bytes, how
often.

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
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from shardlib._text import human_bytes
from shardlib.checks import _arguments as check
from shardlib.compiled._hlo import (
    Instruction,
    Program,
    Run,
    Scope,
    arrays,
    first,
    numbers,
    size_bytes,
    text_of,
)
from shardlib.machine._mesh import slice_index

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
    """

    kind: str  # one of KINDS
    dtypes: tuple[str, ...]  # HLO's names, one per operand: "f32", "bf16", "s8"
    shapes: tuple[tuple[int, ...], ...]  # on one device, one per operand
    operand_bytes: int  # all operands together
    result_bytes: int
    # Mesh axes the groups run over, in the mesh's order; None without a mesh or a match.
    axes: tuple[str, ...] | None
    group_size: int  # devices in a group; of a permute, in its longest chain
    times: int = 1  # runs per execution of the program, as far as the loops around it are known
    # False inside a loop that runs an unknown number of times, counted as once.
    times_known: bool = True
    conditional: bool = False  # inside a branch of a conditional, counted as if taken
    op_name: str = ""  # JAX's name stack
    # "file:line" of the user's code; several where collectives were combined.
    sources: tuple[str, ...] = ()
    slow: bool = False  # between slices, over the slow network
    # Between its start and its end, as they are scheduled, the device multiplies matrices.
    overlapped: bool = False

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
        """What a device sends in one run of the program."""
        return self.sent_bytes * self.times


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
    devices = _Devices(mesh, program.partitions)
    found = (_collective(program, devices, *place) for place in program.walk())
    return tuple(one for one in found if one is not None and one.group_size > 1)


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
    times: dict[tuple[int, str], int] = defaultdict(int)
    for one in found:
        check.kind("summary", "found", one, Collective, takes)
        over = f"groups of {one.group_size}" if one.axes is None else ", ".join(one.axes)
        note = (" in a branch" if one.conditional else "") + (
            "" if one.times_known else " in a loop of unknown length"
        )
        size = max(one.operand_bytes, one.result_bytes)
        times[size, f"{one.kind} over {over}: {{}} x {human_bytes(size)}{note}"] += one.times
    lines = sorted(times.items(), key=lambda item: (-item[0][0] * item[1], item[0][1]))
    return "\n".join(line.format(count) for (_, line), count in lines) or "no collectives"


def _collective(
    program: Program, devices: "_Devices", scope: Scope, made: Instruction, run: Run
) -> Collective | None:
    kind = made.opcode.removesuffix("-start")
    if kind in KINDS and not _is_continued(scope, made):
        groups = devices.groups(made)
    elif made.opcode == "send" and (transfer := made.get(r'_xla_megascale_transfer_type="(\w+)"')):
        kind = (
            "collective-permute" if transfer == "ONE_TO_ONE" else transfer.lower().replace("_", "-")
        )
        groups = devices.megascale_groups(made)
    else:
        return None
    operands = [
        array for name in made.operands for array in arrays(scope.instructions[name].result)
    ]
    results = arrays(made.result)
    if made.opcode.endswith("-start"):
        # Its type is that of the operands, the results and some flags; only an all-reduce's is that
        # of the results.
        results = results[len(operands) : 2 * len(operands)] or results
    if kind == "ragged-all-to-all":
        # The others are the buffer to receive in, offsets and sizes.
        operands, results = operands[:1], results[:1]
    if made.opcode == "send":
        meeting = made.get(r'(_xla_host_transfer_rendezvous="[^"]*")')
        receives = (other for other in scope.instructions.values() if other.opcode == "recv")
        results = next(
            arrays(other.result)[:1] for other in receives if meeting in other.attributes
        )
    if kind == "all-reduce" and (kept := _slice_kept(scope, made)):
        kind, results = "reduce-scatter", arrays(kept.result)
    op_name, source = program.origin(scope, made)
    return Collective(
        kind=kind,
        dtypes=tuple(dtype for dtype, _ in operands),
        shapes=tuple(shape for _, shape in operands),
        operand_bytes=size_bytes(operands),
        result_bytes=size_bytes(results),
        axes=devices.axes(groups, permute=kind == "collective-permute"),
        group_size=_longest_chain(groups)
        if kind == "collective-permute"
        else max(map(len, groups)),
        times=run.times,
        times_known=run.known,
        conditional=run.conditional,
        op_name=op_name,
        sources=_sources(program, scope, made, source),
        slow=devices.cross_slices(groups),
        overlapped=_is_overlapped(program, scope, made),
    )


def _sources(program: Program, scope: Scope, made: Instruction, source: str) -> tuple[str, ...]:
    """The line of a collective; where the compiler combined several, also those of what went into
    it.
    """
    found = [source]
    if len(made.operands) > 1 or not source:
        found += [program.origin(scope, scope.follow(name))[1] for name in made.operands]
    return tuple(dict.fromkeys(line for line in found if line))


def _is_continued(scope: Scope, made: Instruction) -> bool:
    """Whether a collective only passes through a TPU's fusion, having been started in a fusion
    before.
    """
    if scope.caller is None or scope.caller.opcode != "fusion":
        return False
    users = [user for user in scope.instructions.values() if made.name in user.operands]
    targets = {user.get(r'custom_call_target="AsyncCollective(\w+)"') for user in users}
    part_of_chain = (
        scope.name.startswith("async_collective_fusion") or "chain_id=" in made.attributes
    )
    return "Start" not in targets and ("Done" in targets or part_of_chain)


def _is_overlapped(program: Program, scope: Scope, made: Instruction) -> bool:
    """Whether matrices are multiplied between the start and the end of a collective, as they are
    scheduled.
    """
    if scope.caller is not None and scope.outer is not None:
        targets = {
            one.get(r'custom_call_target="AsyncCollective(\w+)"')
            for one in scope.instructions.values()
        }
        if scope.caller.opcode.endswith("-start") or "Start" in targets:
            scope, made = scope.outer, scope.caller
    if not (made.opcode.endswith("-start") or made.opcode in ("send", "fusion")):
        return False
    continued = {made.name}
    for one in itertools.islice(
        itertools.dropwhile(lambda one: one is not made, scope.instructions.values()), 1, None
    ):
        if program.multiplies(scope, one):
            return True
        if continued.intersection(one.operands):
            if one.opcode.endswith("-done") or _is_end(program, scope, one):
                return False
            continued.add(one.name)
    return False


def _is_end(program: Program, scope: Scope, made: Instruction) -> bool:
    """Whether it is the fusion of a TPU that ends a collective which was woven into others."""
    inside = (
        program.called(scope, made, name)
        for name in program.calls(scope, made)
        if made.opcode == "fusion"
    )
    ends = 'custom_call_target="AsyncCollectiveDone"'
    return any(ends in one.attributes for inner in inside for one in inner.instructions.values())


def _slice_kept(scope: Scope, made: Instruction) -> Instruction | None:
    """The slice of an all-reduce that each device keeps, in a fusion that a TPU runs as a
    reduce-scatter.
    """
    if (
        scope.caller is None
        or scope.caller.opcode != "fusion"
        or "kind=kCustom" not in scope.caller.attributes
    ):
        return None
    slices = (user for user in scope.instructions.values() if user.opcode == "dynamic-slice")
    return next((user for user in slices if scope.follow(user.operands[0]) is made), None)


_Groups = list[tuple[int, ...]]


class _Devices:
    """The devices of a program by number, which is their place in the mesh.

    For several TPU slices one program is compiled that all of them run: its groups number the
    devices within a slice and stand for as many groups as there are slices. Transfers between
    slices name devices by their ids instead.
    """

    def __init__(self, mesh: Mesh | None, partitions: int):
        self.mesh = mesh
        self.slices = {0: list(range(partitions))}
        self.place_of_id: dict[int, int] = {}
        self.slice_of: dict[int, int] = {}
        if mesh is not None:
            members = defaultdict(list)
            for place, device in enumerate(mesh.devices.flat):
                members[slice_index(device)].append(place)
                self.place_of_id[device.id] = place
            self.slice_of = {
                place: number for number, places in members.items() for place in places
            }
            self.slices = (
                dict(sorted(members.items()))
                if partitions < mesh.size
                else {0: list(range(mesh.size))}
            )

    def groups(self, made: Instruction) -> _Groups:
        pairs = made.get(r"source_target_pairs=\{((?:\{[^}]*\},?)*)\}")
        local = _listed(pairs) if pairs else _replica_groups(made.attributes)
        slices = list(self.slices.values())
        local = local or [tuple(range(len(slices[0])))]
        if len(slices) == 1:
            return local
        return [tuple(members[number] for number in group) for members in slices for group in local]

    def megascale_groups(self, made: Instruction) -> _Groups:
        """`{1,2}x{0:3}`: each device of slice 1 with that of slice 2. `{{a,b},…}`, `{{a->b},…}`:
        device ids.
        """
        if slices := made.get(r'_xla_megascale_target="\{([\d,]+)\}x'):
            members = [self.slices.get(number - 1) or [number] for number in numbers(slices)]
            return list(zip(*members, strict=self.mesh is not None))
        named = _listed(made.get(r"_xla_megascale_target=\{((?:\{[^}]*\},?)*)\}"))
        return [tuple(self.place_of_id.get(number, number) for number in group) for group in named]

    def cross_slices(self, groups: _Groups) -> bool:
        return any(len({self.slice_of.get(place, 0) for place in group}) > 1 for group in groups)

    def axes(self, groups: _Groups, permute: bool) -> tuple[str, ...] | None:
        """The mesh axes that groups run over; for the pairs of a permute, those along which
        anything moves.
        """
        if self.mesh is None or max(map(max, groups)) >= self.mesh.size:
            return None
        places = np.arange(self.mesh.size).reshape(self.mesh.devices.shape)
        coordinates = [
            np.unravel_index(group, places.shape) for group in (groups if permute else groups[:1])
        ]
        moving = [
            any(np.ptp(place[axis]) > 0 for place in coordinates) for axis in range(places.ndim)
        ]
        order = sorted(range(places.ndim), key=moving.__getitem__)  # what groups run over goes last
        size = math.prod(itertools.compress(places.shape, moving))
        expected = places.transpose(order).reshape(-1, size).tolist()
        if not permute and sorted(map(sorted, groups)) != sorted(map(sorted, expected)):
            return None
        return tuple(
            name for name, moves in zip(self.mesh.axis_names, moving, strict=True) if moves
        )


def _replica_groups(attributes: str) -> _Groups:
    """The groups in any of their spellings; none where all devices are one group."""
    if match := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return list(map(tuple, _iota(match[2]).reshape(numbers(match[1])).tolist()))
    if match := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", attributes
    ):
        return _mesh_groups(*match.groups())
    return _listed(first(r"replica_groups=\{((?:\{[^}]*\},?)*)\}", attributes))


def _mesh_groups(sizes: str, device_ids: str | None, grouped: str) -> _Groups:
    """`mesh['a'=4,'b'=2] {'b'}`; `'a':(2)2` is a part of an axis, two devices wide, with 2 such
    parts before it.
    """
    mesh = {name: int(size) for name, size in re.findall(r"([^',=]+)'?=(\d+)", sizes)}
    ids = np.arange(math.prod(mesh.values()))
    if device_ids:
        ids = _iota(device_ids) if device_ids.startswith("[") else np.array(numbers(device_ids))
    parts = [
        (name, int(before or 1), int(size or mesh[name]))
        for name, before, size in _PART.findall(grouped)
    ]
    # Every axis is seen as three: what comes before its part, the part, and what comes after.
    split = {name: (size, 1, 1) for name, size in mesh.items()}
    split |= {name: (before, size, mesh[name] // (before * size)) for name, before, size in parts}
    if len({name for name, *_ in parts}) != len(parts):
        raise NotImplementedError(f"A replica group over two parts of one axis: {{{grouped}}}.")
    together = [3 * list(mesh).index(name) + 1 for name, *_ in parts]
    ids = np.moveaxis(ids.reshape(sum(split.values(), ())), together, range(-len(together), 0))
    return list(map(tuple, ids.reshape(-1, math.prod(size for *_, size in parts)).tolist()))


_PART = re.compile(r"([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")


def _iota(text: str) -> np.ndarray:
    """`[2,2,2]T(2,1,0)`: the numbers in that shape, transposed."""
    shape, _, order = text.partition("T")
    counted = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return counted.transpose(numbers(order)) if order else counted


def _listed(text: str) -> _Groups:
    return [tuple(numbers(group)) for group in re.findall(r"\{([^}]*)\}", text)]


def _longest_chain(pairs: _Groups) -> int:
    """How many devices the longest chain or ring of a permute's pairs passes."""
    chain = {place: {place} for pair in pairs for place in pair}
    for source, target in pairs:
        chain[source] |= chain[target]
        for place in chain[target]:
            chain[place] = chain[source]
    return max(map(len, chain.values()))
