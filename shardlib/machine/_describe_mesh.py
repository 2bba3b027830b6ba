"""A mesh in words and as a picture: which network each axis takes, and where each device stands."""

import numpy as np
from jax.sharding import Mesh

from shardlib.checks import _arguments as check
from shardlib.machine._mesh import count_devices, format_mesh, name_slices, slices_of

_MAX_DRAWN_DEVICES = 16


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
    count = len(np.unique(slices))
    title = f"{format_mesh(mesh)} on {count_devices(devices.flat)}"
    if count > 1:
        title += f" in {count} {name_slices(devices.flat)}"

    columns = [["axis", *mesh.axis_names], ["size", *map(str, devices.shape)]]
    # One line through the mesh along each axis, from its first device, stands for all the lines
    # parallel to it.
    lines = [
        tuple(slice(None) if k == axis else 0 for k in range(devices.ndim))
        for axis in range(devices.ndim)
    ]
    if count > 1:
        columns.append(["network", *(_networks(slices[line]) for line in lines)])
    if hasattr(devices.flat[0], "coords"):
        columns.append(["torus", *(_torus(devices[line]) for line in lines)])
    long = [axis for axis, size in enumerate(devices.shape) if size > 1]
    if devices.size > _MAX_DRAWN_DEVICES or len(long) not in (1, 2):
        columns.append(["devices", *(_first_few(devices[line]) for line in lines)])
        return f"{title}\n\n{_table(columns)}"
    names = ["", *(mesh.axis_names[axis] for axis in long)][-2:]
    grid = (-1, devices.shape[long[-1]])
    picture = _picture(devices.reshape(grid), slices.reshape(grid), *names)
    return f"{title}\n\n{_table(columns)}\n\n{picture}"


def _networks(line: np.ndarray) -> str:
    slow = len(np.unique(line))
    fast = len(line) // slow
    return (
        ", ".join(f"{name} ×{size}" for name, size in (("slow", slow), ("fast", fast)) if size > 1)
        or "-"
    )


def _torus(line: np.ndarray) -> str:
    coordinates = np.array([(*device.coords, device.core_on_chip) for device in line])
    extents = [len(np.unique(column)) for column in coordinates.T]
    return (
        " ".join(
            f"{name}×{n}" for name, n in zip(("x", "y", "z", "core"), extents, strict=True) if n > 1
        )
        or "-"
    )


def _first_few(line: np.ndarray) -> str:
    return " ".join([*(str(device.id) for device in line[:4]), *(["…"] if len(line) > 4 else [])])


def _table(columns: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in columns]
    # Sizes, the second column, are numbers and stand to the right.
    formats = [f"{{:{'>' if k == 1 else '<'}{width}}}" for k, width in enumerate(widths)]
    return "\n".join("  ".join(formats).format(*row).rstrip() for row in zip(*columns, strict=True))


def _picture(devices: np.ndarray, slices: np.ndarray, down: str, across: str) -> str:
    """The ids of a grid of devices, with double lines where neighbours are of different slices."""
    width = max(len(str(device.id)) for device in devices.flat)
    new_row = [False, *(slices[1:] != slices[:-1]).any(axis=1)]
    new_column = [False, *(slices[:, 1:] != slices[:, :-1]).any(axis=0)]
    rows = [
        "".join(
            f"{' ║' if new else ''} {device.id:>{width}}"
            for device, new in zip(row, new_column, strict=True)
        )
        + " "
        for row in devices
    ]

    def rule(left: str, fill: str, crossing: str, right: str) -> str:
        return (
            left + "".join(crossing if character == "║" else fill for character in rows[0]) + right
        )

    lines = [f" {across} →", rule("┌", "─", "╥", "┐")]
    for row, new in zip(rows, new_row, strict=True):
        lines += [rule("╞", "═", "╬", "╡"), f"│{row}│"] if new else [f"│{row}│"]
    lines.append(rule("└", "─", "╨", "┘"))
    label = f"{down} ↓  " if down else ""
    return "\n".join((label if k == 2 else " " * len(label)) + line for k, line in enumerate(lines))
