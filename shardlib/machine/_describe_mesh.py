"""A mesh in words and as a picture: which network each axis takes, and where each device stands.

data=2,model=4 on 8 cpu devices

axis   size
data      2
model     4

         model →
        ┌─────────┐
data ↓  │ 0 1 2 3 │
        │ 4 5 6 7 │
        └─────────┘
"""

from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from shardlib._notebook import Text
from shardlib._text import table
from shardlib.checks import _arguments as check
from shardlib.machine._mesh import count_devices, format_mesh, name_slices, slices_of
from shardlib.machine._torus import has_torus

_MAX_DRAWN_DEVICES = 16
_FIRST_FEW = 4  # devices of an axis, listed where the mesh is not drawn


def describe_mesh(mesh: Mesh) -> str:
    """A picture of a mesh for the terminal.

    It shows the axes, the networks they use, and where each device stands.

    Up to 16 devices along one or two axes are drawn, with their ids; double lines are the slow
    network. Of others, the table shows the first few along each axis. For TPUs it also says on
    which dimensions of the torus each axis lies.

    >>> import shardlib as sl
    >>> print(sl.describe_mesh(sl.make_mesh("data=2,model=4")))
    data=2,model=4 on 8 cpu devices
    <BLANKLINE>
    axis   size
    data      2
    model     4
    <BLANKLINE>
             model →
            ┌─────────┐
    data ↓  │ 0 1 2 3 │
            │ 4 5 6 7 │
            └─────────┘
    """
    check.kind("describe_mesh", "mesh", mesh, Mesh, "a mesh of devices, `sl.make_mesh(...)`")
    devices, slices = mesh.devices, slices_of(mesh)
    slice_count = len(np.unique(slices))
    title = f"{format_mesh(mesh)} on {count_devices(devices.flat)}"
    if slice_count > 1:
        title += f" in {slice_count} {name_slices(devices.flat)}"
    # Axes of one device take no room in a picture, and paper has two directions.
    long = [axis for axis, size in enumerate(devices.shape) if size > 1]
    if devices.size > _MAX_DRAWN_DEVICES or len(long) not in (1, 2):
        return Text(f"{title}\n\n{_table_of_axes(mesh, slices, list_devices=True)}")
    down = mesh.axis_names[long[0]] if len(long) == 2 else ""
    across = mesh.axis_names[long[-1]]
    # All other axes have one device, so the two that are drawn, or one, are all there is.
    grid = (-1, devices.shape[long[-1]])
    picture = _picture(devices.reshape(grid), slices.reshape(grid), down, across)
    axes = _table_of_axes(mesh, slices, list_devices=False)
    return Text(f"{title}\n\n{axes}\n\n{picture}")


def _table_of_axes(mesh: Mesh, slices: np.ndarray, *, list_devices: bool) -> str:
    """A table with a row for each axis of a mesh: its size, its networks, its place on a torus.

    Columns that would say the same of every mesh of these devices are left out: the networks where
    there is a single slice, the torus where there is none. `slices` has the slice of each device.
    """
    devices = mesh.devices
    columns = [["axis", *mesh.axis_names], ["size", *map(str, devices.shape)]]
    # What is said of an axis is read off the line along it through the first device. The lines that
    # are parallel to it look alike.
    if len(np.unique(slices)) > 1:
        columns.append(["network", *map(_networks, _lines_along_axes(slices))])
    if has_torus(devices.flat[0]):
        columns.append(["torus", *map(_torus, _lines_along_axes(devices))])
    if list_devices:
        columns.append(["devices", *map(_first_few, _lines_along_axes(devices))])
    # Sizes, the second column, are numbers and stand to the right.
    return table([*zip(*columns, strict=True)], right=(1,))


def _lines_along_axes(array: np.ndarray) -> Iterator[np.ndarray]:
    """For each axis of an array, the entries along it, from the first entry of the array on."""
    for axis in range(array.ndim):
        index: list[int | slice] = [0] * array.ndim
        index[axis] = slice(None)
        yield array[tuple(index)]


def _networks(line: np.ndarray) -> str:
    """The networks that an axis crosses, from the slices of the devices along it.

    `slow ×2, fast ×4` is two slices with four devices in each; an axis of one device has `-`.
    """
    slow = len(np.unique(line))
    fast = len(line) // slow
    return _factors(("slow", "fast"), (slow, fast), " ×", ", ")


def _torus(line: np.ndarray) -> str:
    """The dimensions of the torus along which the devices of a line differ: `x×4 core×2`."""
    coordinates = np.array([(*device.coords, device.core_on_chip) for device in line])
    extents = [len(np.unique(column)) for column in coordinates.T]
    return _factors(("x", "y", "z", "core"), extents, "×", " ")


def _factors(names: Sequence[str], sizes: Sequence[int], times: str, gap: str) -> str:
    """Names with their sizes, those of size 1 left out; `-` if no others remain.

    >>> _factors(("slow", "fast"), (2, 4), " ×", ", ")
    'slow ×2, fast ×4'
    >>> _factors(("slow", "fast"), (1, 1), " ×", ", ")
    '-'
    """
    factors = []
    for name, size in zip(names, sizes, strict=True):
        if size > 1:
            factors.append(f"{name}{times}{size}")
    return gap.join(factors) or "-"


def _first_few(line: np.ndarray) -> str:
    """The ids of the first devices along an axis, and an ellipsis if there are more."""
    ids = [str(device.id) for device in line[:_FIRST_FEW]]
    if len(line) > _FIRST_FEW:
        ids.append("…")
    return " ".join(ids)


def _picture(devices: np.ndarray, slices: np.ndarray, down: str, across: str) -> str:
    """The ids of a grid of devices in a frame, with the names of its axes.

    Double lines run where neighbours are of different slices. `down` is empty for a single row.
    """
    # Of each row and column, whether it begins a new slice; the first of each begins nothing.
    new_row = [False, *(slices[1:] != slices[:-1]).any(axis=1)]
    new_column = [False, *(slices[:, 1:] != slices[:, :-1]).any(axis=0)]
    width = max(len(str(device.id)) for device in devices.flat)
    # All ids are as wide as the widest, so that columns stand below each other.
    rows = [_row_of_ids(row, new_column, width) for row in devices]

    lines = [f" {across} →", *_framed(rows, new_row)]
    if down:
        lines = _with_label(lines, f"{down} ↓  ")
    return "\n".join(lines)


def _with_label(lines: list[str], label: str) -> list[str]:
    """Lines with the name of the axis that runs down before the first row of ids, the third."""
    labelled: list[str] = []
    for number, line in enumerate(lines):
        margin = label if number == 2 else " " * len(label)
        labelled.append(margin + line)
    return labelled


def _framed(rows: list[str], new_row: list[bool]) -> list[str]:
    """Rows of ids in a frame, with a double line above those that begin a new slice."""
    lines = [_rule("┌─╥┐", rows[0])]
    for row, is_new in zip(rows, new_row, strict=True):
        if is_new:
            lines.append(_rule("╞═╬╡", rows[0]))
        lines.append(f"│{row}│")
    lines.append(_rule("└─╨┘", rows[0]))
    return lines


def _row_of_ids(row: np.ndarray, new_column: list[bool], width: int) -> str:
    """The ids of a row of devices, each `width` wide, with `║` before a new slice."""
    text = ""
    for device, is_new in zip(row, new_column, strict=True):
        if is_new:
            text += " ║"
        text += f" {device.id:>{width}}"
    return text + " "


def _rule(characters: str, row: str) -> str:
    """A horizontal line of the frame, which crosses the double lines of a row of ids.

    The characters are those at its left end, along it, at crossings, and at its right end.
    """
    left, fill, crossing, right = characters
    return left + "".join(crossing if character == "║" else fill for character in row) + right
