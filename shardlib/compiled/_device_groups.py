"""The groups of devices that collectives run over, in all the spellings that compilers have.

They are listed, computed from an iota, or named as axes of a mesh that is rarely the user's; and a
program for several TPU slices numbers the devices of one slice. `Devices` turns them all into
positions in the user's mesh, and finds the mesh axes that groups run over.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from shardlib.compiled._hlo import Instruction, first, numbers
from shardlib.machine._device_grid import slice_index
from shardlib.machine._torus import torus_dims

Groups = list[tuple[int, ...]]
"""Groups of devices by number, or the pairs of a permute."""


class Devices:
    """The devices of a program by number, which is their position in the mesh.

    For several TPU slices one program is compiled that all of them run: its groups number the
    devices within a slice and stand for as many groups as there are slices. Transfers between
    slices name devices by their ids instead.

    `slices` has the positions of the devices that run each copy of the program.
    """

    def __init__(self, mesh: Mesh | None, partitions: int):
        self.mesh = mesh
        self.slices = {0: list(range(partitions))}
        self.position_of_id: dict[int, int] = {}
        self.slice_of: dict[int, int] = {}
        if mesh is None:
            return
        for position, device in enumerate(mesh.devices.flat):
            self.slice_of[position] = slice_index(device)
            self.position_of_id[device.id] = position
        # One program for the whole mesh numbers all of its devices, whatever slices they are in.
        self.slices = {0: list(range(mesh.size))}
        if partitions < mesh.size:
            self.slices = self._positions_by_slice()

    def _positions_by_slice(self) -> dict[int, list[int]]:
        """The positions in the mesh of the devices of each slice."""
        members: dict[int, list[int]] = defaultdict(list)
        for position, number in self.slice_of.items():
            members[number].append(position)
        return dict(sorted(members.items()))

    def groups(self, made: Instruction) -> Groups:
        """The groups of a collective, or the pairs of a permute, of all slices together.

        Where the instruction lists none, all devices of a slice are one group.
        """
        # A permute has pairs (source, target), any other collective has groups.
        pairs = made.get(r"source_target_pairs=\{((?:\{[^}]*\},?)*)\}")
        local = _listed(pairs) if pairs else _replica_groups(made.attributes)
        slices = list(self.slices.values())
        local = local or [tuple(range(len(slices[0])))]
        if len(slices) == 1:
            return local
        # Each slice runs the same program on its own devices.
        groups: Groups = []
        for members in slices:
            groups += [tuple(members[number] for number in group) for group in local]
        return groups

    def megascale_groups(self, made: Instruction) -> Groups:
        """The groups of a transfer between slices, in either of its spellings.

        `{1,2}x{0:3}` is each device of slice 1 with that of slice 2; `{{a,b},...}` and
        `{{a->b},...}` have the ids of devices.
        """
        if slices := made.get(r'_xla_megascale_target="\{([\d,]+)\}x'):
            # Slices are counted from one. Without a mesh each stands for one of its devices.
            members = [self.slices.get(number - 1) or [number] for number in numbers(slices)]
            return list(zip(*members, strict=self.mesh is not None))
        groups: Groups = []
        for ids in _listed(made.get(r"_xla_megascale_target=\{((?:\{[^}]*\},?)*)\}")):
            groups.append(tuple(self.position_of_id.get(number, number) for number in ids))
        return groups

    def cross_slices(self, groups: Groups) -> bool:
        """Whether any group has devices of several slices, between which the network is slow."""
        for group in groups:
            if len({self.slice_of.get(position, 0) for position in group}) > 1:
                return True
        return False

    def axes(self, groups: Groups, permute: bool) -> tuple[str, ...] | None:
        """The mesh axes that groups run over; for the pairs of a permute, those that are moved on.

        None where there is no mesh, or where the groups are not what these axes would make, or
        those of their dims of a torus over which they run.
        """
        if self.mesh is None or max(map(max, groups)) >= self.mesh.size:
            return None
        shape, names = _torus_shape(self.mesh)
        positions = np.arange(self.mesh.size).reshape(shape)
        # All groups run over the same axes, so the first one is enough; pairs may differ.
        varying = _varying_dims(groups if permute else groups[:1], positions.shape)
        if not permute:
            expected = _groups_along(positions, varying)
            if sorted(map(sorted, groups)) != sorted(map(sorted, expected)):
                return None
        return tuple(dict.fromkeys(names[dim] for dim in varying))


def _torus_shape(mesh: Mesh) -> tuple[tuple[int, ...], list[str]]:
    """The shape of a mesh with a dim for each dim of the torus, and the axis that each belongs to.

    Collectives over an axis that lies along several dims of a torus go over one after the other.
    """
    # Axes that lie along one dim of a torus, or along none, are not in it.
    sizes_of_axes = dict(torus_dims(mesh))
    shape: list[int] = []
    names: list[str] = []
    for name, size in mesh.shape.items():
        sizes = sizes_of_axes.get(name, (size,))
        shape += sizes
        names += [name] * len(sizes)
    return tuple(shape), names


def _groups_along(positions: np.ndarray, dims: list[int]) -> list[list[int]]:
    """The groups of a collective that runs over some dims of the mesh, all of them.

    >>> _groups_along(np.arange(4).reshape(2, 2), [0])
    [[0, 2], [1, 3]]
    """
    size = 1
    fixed: list[int] = []
    for dim, length in enumerate(positions.shape):
        if dim in dims:
            size *= length
        else:
            fixed.append(dim)
    # Devices of one group differ in these dims only, which come last and are counted first.
    return positions.transpose(fixed + dims).reshape(-1, size).tolist()


def _varying_dims(groups: Groups, shape: tuple[int, ...]) -> list[int]:
    """The dims of a mesh along which the members of some group have different coordinates.

    `shape` is that of the mesh, in which devices are numbered row by row.
    """
    varying: set[int] = set()
    for group in groups:
        for dim, coordinates in enumerate(np.unravel_index(group, shape)):
            if np.ptp(coordinates) > 0:
                varying.add(dim)
    return sorted(varying)


def _replica_groups(attributes: str) -> Groups:
    """The groups in any of their spellings; none where all devices are one group.

    `[4,2]<=[8]` is the numbers to 8 in 4 groups of 2, `[4,2]<=[2,4]T(1,0)` the same of a transposed
    iota. Groups may also be named by axes of the compiler's own mesh, or be listed one by one.
    """
    if match := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        shape, iota = match.groups()
        return list(map(tuple, _iota(iota).reshape(numbers(shape)).tolist()))
    if match := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", attributes
    ):
        return _mesh_groups(*match.groups())
    return _listed(first(r"replica_groups=\{((?:\{[^}]*\},?)*)\}", attributes))


@dataclass(frozen=True)
class _AxisPart:
    """A part of an axis of the compiler's mesh, with as many parts `before` it.

    `'a':(2)2` is two devices wide, with 2 such parts before it: of an axis of 8 devices, whose
    index is then three digits of 2, it is the middle one. A whole axis has one part before it.
    """

    axis: str
    before: int
    size: int


def _axis_parts(grouped: str, mesh: dict[str, int]) -> list[_AxisPart]:
    """The axes, or parts of axes, that groups run over, in order.

    The first is the most major one: it decides about the order of the members of a group.
    """
    parts: list[_AxisPart] = []
    for axis, before, size in _PART.findall(grouped):
        parts.append(_AxisPart(axis, int(before or 1), int(size or mesh[axis])))
    return parts


def _mesh_groups(sizes: str, device_ids: str | None, grouped: str) -> Groups:
    """The groups of `mesh['a'=4,'b'=2] {'b'}`, where `'b'` may be a part of an axis.

    Args:
        sizes: the axes of the compiler's mesh, which is rarely the user's, with their sizes.
        device_ids: the numbers of its devices, where they are not in order: a list or an iota.
        grouped: the axes, or parts of them, that groups run over.
    """
    mesh = {name: int(size) for name, size in re.findall(r"([^',=]+)'?=(\d+)", sizes)}
    if not device_ids:
        ids = np.arange(math.prod(mesh.values()))
    elif device_ids.startswith("["):
        ids = _iota(device_ids)
    else:
        ids = np.array(numbers(device_ids))
    parts = _axis_parts(grouped, mesh)
    # Every axis is seen as three dims: what comes before its part, the part, and what comes after.
    split = {name: (size, 1, 1) for name, size in mesh.items()}
    for part in parts:
        split[part.axis] = (part.before, part.size, mesh[part.axis] // (part.before * part.size))
    if len({part.axis for part in parts}) != len(parts):
        raise NotImplementedError(f"A replica group over two parts of one axis: {{{grouped}}}.")
    # The parts become the last dims, so that each row of what is left is a group.
    part_dims = [3 * list(mesh).index(part.axis) + 1 for part in parts]
    ids = np.moveaxis(ids.reshape(sum(split.values(), ())), part_dims, range(-len(parts), 0))
    size = math.prod(part.size for part in parts)
    return list(map(tuple, ids.reshape(-1, size).tolist()))


# `'a'`, or `'a':(before)size`.
_PART = re.compile(r"([^',:{}]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")


def _iota(text: str) -> np.ndarray:
    """The numbers from 0 in a shape, transposed where the text says so.

    `[2,2,2]T(2,1,0)` is `numpy.arange(8).reshape(2, 2, 2).transpose(2, 1, 0)`.
    """
    shape, _, order = text.partition("T")
    counted = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    if not order:
        return counted
    return counted.transpose(numbers(order))


def _listed(text: str) -> Groups:
    """Groups that are listed one by one: `{0,1},{2,3}`.

    Pairs of a permute are spelt in the same way.
    """
    return [tuple(numbers(group)) for group in re.findall(r"\{([^}]*)\}", text)]


def longest_chain(pairs: Groups) -> int:
    """How many devices the longest chain or ring of a permute's pairs passes.

    Each device has the set of those it is connected with, which it shares with all of them.
    """
    chain: dict[int, set[int]] = {}
    for pair in pairs:
        for device in pair:
            chain[device] = {device}
    # Each pair joins two chains.
    for source, target in pairs:
        chain[source] |= chain[target]
        for device in chain[target]:
            chain[device] = chain[source]
    return max(map(len, chain.values()))
