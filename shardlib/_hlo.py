"""Reading the collectives off a compiled program: which, over which mesh axes, how many bytes, how often.

What a compiler was asked to move and what it moves are two things. The text of a compiled program says the second, but
says it differently for every machine, and this file knows the spellings:

- a collective that overlaps with computation is a `-start` and a `-done`, or sits in a computation of its own that an
  `async-start`, `call-start` or `custom-call-start` runs (the last two on the sparse cores of some TPUs);
- a TPU also weaves an all-gather into the fusions it overlaps with, where the same collective is written once to start,
  once in every fusion it passes through and once to finish;
- a TPU writes some reduce-scatters as a fusion of an all-reduce and the slice that each device keeps;
- between slices of TPUs there are no collectives but a `send` and a `recv` that the network's runtime interprets;
- the devices of a group are listed, computed from an iota, or named as axes of a mesh that is rarely the user's;
- only CPU and GPU programs say how often a loop runs; on TPU it follows from its condition, start and step.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

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

    Shapes and dtypes are those of the operands as compiled, which is what is on the wire: a CPU widens a bfloat16
    all-reduce to float32, a TPU narrows a float32 weight to bfloat16 before gathering it and pads a scattered dimension
    to whole tiles (the rows that end up on the wrong device then move by a small `collective-permute` of their own). A
    collective that was combined from several has as many operands. Of a `ragged-all-to-all` the operand is the whole
    buffer to send from: how much of it moves is decided when the program runs.
    """

    kind: str  # one of KINDS
    dtypes: tuple[str, ...]  # HLO's names, one per operand: "f32", "bf16", "s8"
    shapes: tuple[tuple[int, ...], ...]  # on one device, one per operand
    operand_bytes: int  # all operands together
    result_bytes: int
    axes: tuple[str, ...] | None  # mesh axes the groups run over, in the mesh's order; None without a mesh or a match
    group_size: int  # devices in a group; of a permute, in its longest chain
    times: int = 1  # runs per execution of the program, as far as the loops around it are known
    times_known: bool = True  # False inside a loop that runs an unknown number of times, counted as once
    conditional: bool = False  # inside a branch of a conditional, counted as if taken
    op_name: str = ""  # JAX's name stack
    source: str = ""  # "file:line" of the user's code


def collectives(compiled_or_text: "jax.stages.Compiled | str", mesh: Mesh | None = None) -> tuple[Collective, ...]:
    """Every collective that a compiled program runs, each once, in the order of the program.

    `compiled_or_text` is a `jax.stages.Compiled` or its `as_text()`. With the `mesh` it was compiled for, every group
    of devices is matched to the mesh axes it runs over. Collectives of a device with itself are left out.

    >>> P = jax.sharding.PartitionSpec
    >>> mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    >>> compiled = jax.jit(total).lower(jax.ShapeDtypeStruct((8, 256), "float32")).compile()
    >>> [found] = collectives(compiled, mesh)
    >>> found.kind, found.axes, found.group_size, found.shapes, found.operand_bytes
    ('all-reduce', ('data',), 4, ((2, 256),), 2048)
    """
    text = compiled_or_text if isinstance(compiled_or_text, str) else compiled_or_text.as_text()
    if not text or "ENTRY " not in text:
        raise ValueError("`compiled_or_text` must be a compiled program or its `as_text()`; found no ENTRY in it.")
    program = _Program(text)
    devices = _Devices(mesh, program.partitions)
    found = (_collective(program, devices, *place) for place in program.walk())
    return tuple(one for one in found if one is not None and one.group_size > 1)


def summary(found: Iterable[Collective]) -> str:
    """A line for each kind, axes and size, most bytes first, for people and for the messages of failed tests.

    The size is that of the whole array: of an all-gather's result, of a reduce-scatter's operand.

    >>> gather = Collective("all-gather", ("f32",), ((1024,),), 4096, 16384, ("data",), 4, times=24)
    >>> print(summary([gather, gather]))
    all-gather over data: 48 x 16.0 KiB
    >>> print(summary([]))
    no collectives
    """
    times: dict[tuple[int, str], int] = defaultdict(int)
    for one in found:
        over = f"groups of {one.group_size}" if one.axes is None else ", ".join(one.axes)
        note = (" in a branch" if one.conditional else "") + ("" if one.times_known else " in a loop of unknown length")
        size = max(one.operand_bytes, one.result_bytes)
        times[size, f"{one.kind} over {over}: {{}} x {_readable(size)}{note}"] += one.times
    lines = sorted(times.items(), key=lambda item: (-item[0][0] * item[1], item[0][1]))
    return "\n".join(line.format(count) for (_, line), count in lines) or "no collectives"


def _readable(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@dataclass(frozen=True)
class _Instruction:
    name: str
    result: str  # type
    opcode: str
    argument: str  # what stands between the parentheses: operands, or the value of a constant
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.argument)

    def get(self, pattern: str) -> str:
        return _first(pattern, self.attributes)


@dataclass(frozen=True)
class _Scope:
    """A computation where it is called: `caller` is the instruction in `outer` that does."""

    name: str
    instructions: dict[str, _Instruction]
    caller: _Instruction | None = None
    outer: "_Scope | None" = None

    def follow(self, name: str) -> _Instruction:
        """The instruction that makes the value called `name`, past everything that only moves it."""
        while (made := self.instructions[name]).opcode in ("copy", "copy-start", "copy-done", "bitcast", "convert"):
            name = made.operands[0]
        return made

    def root(self) -> _Instruction:
        return self.follow(next(made.name for made in self.instructions.values() if made.is_root))

    def carried(self, name: str) -> int | None:
        """Which element of a loop's state the value called `name` is, if it is one."""
        made = self.follow(name)
        if made.opcode == "get-tuple-element" and self.follow(made.operands[0]).opcode == "parameter":
            return int(made.get(r"index=(\d+)"))
        return None


@dataclass(frozen=True)
class _Run:
    times: int = 1
    known: bool = True
    conditional: bool = False


# No type has a space before a word and a parenthesis, so the first such word is the opcode.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")


class _Program:
    """The computations of a program by name, and how they call each other."""

    def __init__(self, text: str):
        self.partitions = int(_first(r"num_partitions=(\d+)", text) or 1)
        self.sources = _sources(text)
        self.entry = ""
        self.computations: dict[str, dict[str, _Instruction]] = {}
        current: dict[str, _Instruction] = {}
        for line in text.splitlines():
            if match := _INSTRUCTION.match(line):
                root, name, result, opcode, rest = match.groups()
                argument, attributes, *_ = [*re.split(r"\)(?=, [a-z_]+=|$)", rest, maxsplit=1), ""]
                current[name] = _Instruction(name, result, opcode, argument, attributes, bool(root))
            elif match := _COMPUTATION.match(line):
                current = self.computations[match[2]] = {}
                self.entry = match[2] if match[1] else self.entry

    def walk(self, scope: _Scope | None = None, run: _Run = _Run()) -> Iterator[tuple[_Scope, _Instruction, _Run]]:
        """Every instruction in the order of the program, once for each place that its computation is called from."""
        scope = scope or _Scope(self.entry, self.computations[self.entry])
        for made in scope.instructions.values():
            yield scope, made, run
            names, inner = [], run
            match made.opcode.removesuffix("-start"):
                case "while":
                    count = self.trip_count(scope, made)
                    names = ["body"]
                    inner = replace(run, known=False) if count is None else replace(run, times=run.times * count)
                case "conditional":
                    inner = replace(run, conditional=True)
                    names = re.findall(r"[\w.-]+", made.get(r"branch_computations=\{([^}]*)\}"))
                    names = names or ["true_computation", "false_computation"]
                case "call" | "fusion" | "async" | "custom-call":
                    called = made.get(r"(?:calls=|to_apply=|called_computations=\{)%?([\w.-]+)")
                    names = [called] if called else []
            for name in names:
                yield from self.walk(self.called(scope, made, name), inner)

    def called(self, scope: _Scope, caller: _Instruction, name: str) -> _Scope:
        """A computation by its name or by the attribute of the caller that has the name."""
        name = name if name in self.computations else caller.get(rf"\b{name}=%?([\w.-]+)")
        return _Scope(name, self.computations[name], caller, scope)

    def trip_count(self, scope: _Scope, loop: _Instruction) -> int | None:
        """How often a loop runs: as the compiler says, or from `for (i = start; i < limit; i += step)`."""
        if said := loop.get(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(said)
        body, condition = self.called(scope, loop, "body"), self.called(scope, loop, "condition")
        test, state = condition.root(), body.root()
        if test.opcode != "compare" or state.opcode != "tuple":
            return None
        index, limit = condition.carried(test.operands[0]), self.constant(condition, test.operands[1])
        if index is None or limit is None:
            return None
        update = body.follow(state.operands[index])
        steps = [self.constant(body, name) for name in update.operands if body.carried(name) != index]
        start = self.initial(scope, loop, index)
        if update.opcode != "add" or len(steps) != 1 or not (step := steps[0]) or start is None:
            return None
        match test.get(r"direction=(\w+)"):
            case "LT" | "GT":
                return len(range(start, limit, step))
            case "LE" | "GE":
                return len(range(start, limit + (1 if step > 0 else -1), step))
        return None

    def initial(self, scope: _Scope, loop: _Instruction, index: int) -> int | None:
        before = scope.follow(loop.operands[0])
        return self.constant(scope, before.operands[index]) if before.opcode == "tuple" else None

    def constant(self, scope: _Scope, name: str) -> int | None:
        """The value called `name` where it is a constant, also one that loops carry unchanged."""
        made = scope.follow(name)
        if made.opcode == "constant":
            return int(made.argument) if re.fullmatch(r"-?\d+", made.argument) else None
        index, loop, outer = scope.carried(name), scope.caller, scope.outer
        if index is None or loop is None or outer is None or loop.opcode != "while":
            return None
        body = self.called(outer, loop, "body")
        state = body.root()
        unchanged = state.opcode == "tuple" and body.carried(state.operands[index]) == index
        return self.initial(outer, loop, index) if unchanged else None


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _sources(text: str) -> dict[str, str]:
    """`file:line` of each stack frame, from the tables at the head of the text."""

    def table(title: str, entry: str) -> list:
        return re.findall(rf"(?m)^(\d+) {entry}", _first(rf"(?m)^{title}\n((?:\d+ .*\n)*)", text))

    files = dict(table("FileNames", '"(.*)"'))
    locations = table("FileLocations", r"\{file_name_id=(\d+).*?\bline=(\d+)")
    places = {key: f"{files[file]}:{line}" for key, file, line in locations if file in files}
    return {key: places.get(place, "") for key, place in table("StackFrames", r"\{file_location_id=(\d+)")}


def _collective(
    program: _Program, devices: "_Devices", scope: _Scope, made: _Instruction, run: _Run
) -> Collective | None:
    kind = made.opcode.removesuffix("-start")
    if kind in KINDS and not _is_continued(scope, made):
        groups = devices.groups(made)
    elif made.opcode == "send" and (transfer := made.get(r'_xla_megascale_transfer_type="(\w+)"')):
        kind = "collective-permute" if transfer == "ONE_TO_ONE" else transfer.lower().replace("_", "-")
        groups = devices.megascale_groups(made)
    else:
        return None
    operands = [array for name in made.operands for array in _arrays(scope.instructions[name].result)]
    results = _arrays(made.result)
    if made.opcode.endswith("-start"):
        # Its type is that of the operands, the results and some flags; only an all-reduce's is that of the results.
        results = results[len(operands) : 2 * len(operands)] or results
    if kind == "ragged-all-to-all":
        operands, results = operands[:1], results[:1]  # the others are the buffer to receive in, offsets and sizes
    if made.opcode == "send":
        meeting = made.get(r'(_xla_host_transfer_rendezvous="[^"]*")')
        receives = (other for other in scope.instructions.values() if other.opcode == "recv")
        results = next(_arrays(other.result)[:1] for other in receives if meeting in other.attributes)
    if kind == "all-reduce" and (kept := _slice_kept(scope, made)):
        kind, results = "reduce-scatter", _arrays(kept.result)
    op_name, source = _origin(program, scope, made)
    return Collective(
        kind=kind,
        dtypes=tuple(dtype for dtype, _ in operands),
        shapes=tuple(shape for _, shape in operands),
        operand_bytes=_bytes(operands),
        result_bytes=_bytes(results),
        axes=devices.axes(groups, permute=kind == "collective-permute"),
        group_size=_longest_chain(groups) if kind == "collective-permute" else max(map(len, groups)),
        times=run.times,
        times_known=run.known,
        conditional=run.conditional,
        op_name=op_name,
        source=source,
    )


def _is_continued(scope: _Scope, made: _Instruction) -> bool:
    """Whether a collective only passes through a TPU's fusion, having been started in a fusion before."""
    if scope.caller is None or scope.caller.opcode != "fusion":
        return False
    users = [user for user in scope.instructions.values() if made.name in user.operands]
    targets = {user.get(r'custom_call_target="AsyncCollective(\w+)"') for user in users}
    part_of_chain = scope.name.startswith("async_collective_fusion") or "chain_id=" in made.attributes
    return "Start" not in targets and ("Done" in targets or part_of_chain)


def _slice_kept(scope: _Scope, made: _Instruction) -> _Instruction | None:
    """The slice of an all-reduce that each device keeps, in a fusion that a TPU runs as a reduce-scatter."""
    if scope.caller is None or scope.caller.opcode != "fusion" or "kind=kCustom" not in scope.caller.attributes:
        return None
    slices = (user for user in scope.instructions.values() if user.opcode == "dynamic-slice")
    return next((user for user in slices if scope.follow(user.operands[0]) is made), None)


def _origin(program: _Program, scope: _Scope, made: _Instruction) -> tuple[str, str]:
    """Name stack and source line, which a collective may have left to its `-done` or to the fusion it is in."""
    users = scope.instructions.values() if made.opcode.endswith("-start") else ()
    done = (user for user in users if user.opcode.endswith("-done") and made.name in user.operands)
    around = [scope.caller] if scope.caller and scope.caller.opcode not in ("while", "conditional") else []
    for origin in itertools.chain([made], done, around):
        if name := origin.get(r'\bop_name="([^"]*)"'):
            return name, program.sources.get(origin.get(r"\bstack_frame_id=(\d+)"), "")
    return "", ""


def _arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", type_)
    return [(dtype, tuple(_numbers(shape))) for dtype, shape in found if _bits(dtype)]


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(_first(r"(\d+)", dtype) or 0)  # a token has none


def _bytes(arrays: list[tuple[str, tuple[int, ...]]]) -> int:
    return sum(math.ceil(math.prod(shape) * _bits(dtype) / 8) for dtype, shape in arrays)


_Groups = list[tuple[int, ...]]


class _Devices:
    """The devices of a program by number, which is their place in the mesh.

    For several TPU slices one program is compiled that all of them run: its groups number the devices within a slice
    and stand for as many groups as there are slices. Transfers between slices name devices by their ids instead.
    """

    def __init__(self, mesh: Mesh | None, partitions: int):
        self.mesh = mesh
        self.slices = {0: list(range(partitions))}
        self.place_of_id: dict[int, int] = {}
        if mesh is not None:
            members = defaultdict(list)
            for place, device in enumerate(mesh.devices.flat):
                members[getattr(device, "slice_index", 0)].append(place)
                self.place_of_id[device.id] = place
            self.slices = dict(sorted(members.items())) if partitions < mesh.size else {0: list(range(mesh.size))}

    def groups(self, made: _Instruction) -> _Groups:
        pairs = made.get(r"source_target_pairs=\{((?:\{[^}]*\},?)*)\}")
        local = _listed(pairs) if pairs else _replica_groups(made.attributes)
        slices = list(self.slices.values())
        local = local or [tuple(range(len(slices[0])))]
        if len(slices) == 1:
            return local
        return [tuple(members[number] for number in group) for members in slices for group in local]

    def megascale_groups(self, made: _Instruction) -> _Groups:
        """`{1,2}x{0:3}`: each device of slice 1 with that of slice 2. `{{a,b},…}`, `{{a->b},…}`: device ids."""
        if slices := made.get(r'_xla_megascale_target="\{([\d,]+)\}x'):
            members = [self.slices.get(number - 1) or [number] for number in _numbers(slices)]
            return list(zip(*members, strict=self.mesh is not None))
        named = _listed(made.get(r"_xla_megascale_target=\{((?:\{[^}]*\},?)*)\}"))
        return [tuple(self.place_of_id.get(number, number) for number in group) for group in named]

    def axes(self, groups: _Groups, permute: bool) -> tuple[str, ...] | None:
        """The mesh axes that groups run over; for the pairs of a permute, those along which anything moves."""
        if self.mesh is None or max(map(max, groups)) >= self.mesh.size:
            return None
        places = np.arange(self.mesh.size).reshape(self.mesh.devices.shape)
        coordinates = [np.unravel_index(group, places.shape) for group in (groups if permute else groups[:1])]
        moving = [any(np.ptp(place[axis]) > 0 for place in coordinates) for axis in range(places.ndim)]
        order = sorted(range(places.ndim), key=moving.__getitem__)  # what groups run over goes last
        size = math.prod(itertools.compress(places.shape, moving))
        expected = places.transpose(order).reshape(-1, size).tolist()
        if not permute and sorted(map(sorted, groups)) != sorted(map(sorted, expected)):
            return None
        return tuple(name for name, moves in zip(self.mesh.axis_names, moving, strict=True) if moves)


def _replica_groups(attributes: str) -> _Groups:
    """The groups in any of their spellings; none where all devices are one group."""
    if match := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return list(map(tuple, _iota(match[2]).reshape(_numbers(match[1])).tolist()))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", attributes):
        return _mesh_groups(*match.groups())
    return _listed(_first(r"replica_groups=\{((?:\{[^}]*\},?)*)\}", attributes))


def _mesh_groups(sizes: str, device_ids: str | None, grouped: str) -> _Groups:
    """`mesh['a'=4,'b'=2] {'b'}`; `'a':(2)2` is a part of an axis, two devices wide, with 2 such parts before it."""
    mesh = {name: int(size) for name, size in re.findall(r"([^',=]+)'?=(\d+)", sizes)}
    ids = np.arange(math.prod(mesh.values()))
    if device_ids:
        ids = _iota(device_ids) if device_ids.startswith("[") else np.array(_numbers(device_ids))
    parts = [(name, int(before or 1), int(size or mesh[name])) for name, before, size in _PART.findall(grouped)]
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
    counted = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return counted.transpose(_numbers(order)) if order else counted


def _listed(text: str) -> _Groups:
    return [tuple(_numbers(group)) for group in re.findall(r"\{([^}]*)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _longest_chain(pairs: _Groups) -> int:
    """How many devices the longest chain or ring of a permute's pairs passes."""
    chain = {place: {place} for pair in pairs for place in pair}
    for source, target in pairs:
        chain[source] |= chain[target]
        for place in chain[target]:
            chain[place] = chain[source]
    return max(map(len, chain.values()))
