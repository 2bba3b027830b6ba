"""Named meshes: which devices stand along which axis, and which axes cross the slow network.

A machine has up to two networks. Inside a *slice* (a TPU torus, the GPUs of one NVLink domain)
links are fast; between slices runs the data-centre network, an order of magnitude slower. A mesh is
laid out well when only axes with little traffic cross the slow one, so that is the one thing about
the hardware a user is asked to say: `dcn=`.
"""

import collections
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.checks import _arguments as check
from shardlib.machine._device_grid import arrange, is_simulated, slice_index, way_out

_MOST_DIGITS = 18  # of a size, as text
_MOST_ON_AXIS = 10**9
_ENTRY = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:=\s*([+-]?\d+)\s*)?")
_MOST_SIMULATED = 65_536  # of 4,096 there is a use, and with many more a laptop is at its end


def make_mesh(
    shape: str | Mapping[str, int] = "",
    *,
    dcn: str | Mapping[str, int] = "",
    devices: Sequence[Any] | None = None,
    axis_type: AxisType = AxisType.Auto,
    allow_split_physical_axes: bool = True,
    **axes: int,
) -> Mesh:
    """A mesh of devices with named axes, outermost first.

    Neighbours along the inner axes are close to each other on the hardware.

    - `shape`: the axes and their sizes, as text such as `"data=2,model=4"` or as a mapping. Sizes
      are total sizes, however many networks an axis crosses. One of them may be -1: the devices
      that the others leave.
    - `dcn`: which axes, or factors of axes, cross the network between slices, see below.
    - `devices`: the devices of the mesh, all of which are used; by default `jax.devices()`.
    - `axis_type`: JAX's type of all axes: `Auto`, where the partitioner lays arrays out, or
      `Explicit`. A strategy takes automatic axes.
    - `allow_split_physical_axes`: see below.
    - `axes`: further axes, as keywords, behind those of `shape`.

    >>> format_mesh(make_mesh("data=2,model=4"))
    'data=2,model=4'
    >>> format_mesh(make_mesh(data=-1, model=2))
    'data=4,model=2'

    On several slices, `dcn` says what crosses the network between them: `dcn="pod"` the whole axis
    `pod`, `dcn="data=2"` a factor 2 of `data`, the outer one; the rest of `data` stays inside each
    slice. There is no default: an axis on the wrong network costs most of a machine's speed, so on
    several slices a mesh without `dcn` is refused.

    The devices of one CPU process take part as if consecutive blocks of them were slices, to try a
    layout on a laptop:

    >>> mesh = make_mesh("data=4,model=2", dcn="data=2")
    >>> [[device.id for device in row] for row in mesh.devices]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> mesh = make_mesh("model=4,data=2", dcn="data")
    >>> [[device.id for device in row] for row in mesh.devices]
    [[0, 4], [1, 5], [2, 6], [3, 7]]

    `allow_split_physical_axes` lets two axes share one dimension of a TPU torus, each with a part
    of its links. Without it, shapes that need that are refused.
    """
    sizes = parse_axes(shape)
    _check_once(sizes, axes)
    check.kind("make_mesh", "axis_type", axis_type, AxisType, "a `jax.sharding.AxisType`")
    split = check.boolean("make_mesh", "allow_split_physical_axes", allow_split_physical_axes)
    devices = jax.devices() if devices is None else _devices(devices)
    sizes = _fill_in(_checked((*sizes.items(), *axes.items())), devices)
    slow_factors = _slow_factors(dcn, sizes, devices)
    try:
        device_grid = arrange(sizes, slow_factors, devices, split)
    # JAX asserts where the devices do not fill a box of the torus or come two to a chip, and has
    # not implemented the shapes that it refuses. Before 0.12 it also misreads the factors of sizes
    # such as 14 when it splits a dimension, and fails on what follows. To a user each of these is a
    # shape that does not go with these devices.
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"`make_mesh` cannot lay `{spell_axes(sizes)}` out on {count_devices(devices)}: "
            f"{way_out(error)}"
        ) from error
    return Mesh(device_grid, tuple(sizes), axis_types=(axis_type,) * len(sizes))


def simulate_devices(count: int = 8) -> None:
    """Let JAX see `count` CPU devices and nothing else, to try any sharding on a laptop.

    Call it before JAX's first use.

    >>> simulate_devices(8)
    >>> len(jax.devices())
    8
    """
    count = check.whole(
        "simulate_devices", "count", count, "a number of devices", least=1, most=_MOST_SIMULATED
    )
    try:
        jax.config.update("jax_platforms", "cpu")
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # JAX has started: what it sees is checked below.
        pass
    found = jax.devices()
    if len(found) != count or found[0].platform != "cpu":
        raise ValueError(
            f"`simulate_devices({count})` came too late, or `XLA_FLAGS` says otherwise: JAX sees "
            f"{count_devices(found)}. Call it before anything asks JAX for devices or arrays."
        )


def parse_axes(text: str | Mapping[str, int]) -> dict[str, int]:
    """The axes that a text or a mapping names, in their order.

    One size may be -1, to be filled in by `make_mesh`.

    >>> parse_axes("data=-1, model=4")
    {'data': -1, 'model': 4}
    """
    if not isinstance(text, str):
        return _checked(_pairs("shape", text))
    entries = _entries(text)
    for name, size in entries:
        if size is None:
            raise ValueError(
                f"Mesh axes need a size each, as in `data=2,model=4`; got `{text}`. "
                f"Write `{name}=4`, or `{name}=-1` for the devices that the other axes leave."
            )
    return _checked(entries)


def format_mesh(mesh: Mesh | AbstractMesh) -> str:
    """The axes of a mesh as `make_mesh` and `parse_axes` read them.

    >>> format_mesh(make_mesh(data=2, model=4))
    'data=2,model=4'
    """
    return spell_axes(mesh.shape)


def slow_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the slice changes: collectives over them use the slow network.

    They are read off the devices. Where devices know no slices, their process stands in. The
    simulated devices of one process are a single slice.

    >>> slow_axes(make_mesh("pod=2,model=4", dcn="pod"))
    ()
    """
    slices = slices_of(mesh)
    slow: list[str] = []
    for axis, name in enumerate(mesh.axis_names):
        # Two neighbours along the axis are of different slices.
        if np.diff(slices, axis=axis).any():
            slow.append(name)
    return tuple(slow)


def with_first(mesh: Mesh, axes: Sequence[str], first: Sequence[str]) -> Mesh:
    """The same mesh with some of its `axes` before the others of these, if they are not yet.

    Each device has the same place along every axis. Axes of one device do not count.

    >>> mesh = make_mesh("data=4,pod=2")
    >>> with_first(mesh, ["data", "pod"], ["pod"]).axis_names
    ('pod', 'data')
    """
    several = [axis for axis in mesh.axis_names if axis in axes and mesh.shape[axis] > 1]
    count = sum(axis in first for axis in several)
    if all(axis in first for axis in several[:count]):
        return mesh
    leading = [axis for axis in mesh.axis_names if axis in first]
    order = [*leading, *[axis for axis in mesh.axis_names if axis not in first]]
    dims = [mesh.axis_names.index(axis) for axis in order]
    return Mesh(mesh.devices.transpose(dims), tuple(order), axis_types=_types_of(mesh, order))


def _types_of(mesh: Mesh, axes: Sequence[str]) -> Any:
    """Whether each axis is automatic or explicit, in another order of the axes."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(types[axis] for axis in axes)


def _check_once(sizes: Mapping[str, int], keywords: Mapping[str, int]) -> None:
    """Refuse an axis that is in the shape of a mesh and is a keyword too."""
    for name in keywords:
        if name in sizes:
            raise ValueError(
                f"`make_mesh` takes each axis once; `{name}` is both in the shape, "
                f"`{spell_axes(sizes)}`, and a keyword. Remove one of the two."
            )


def _devices(devices: Any) -> list[Any]:
    """The devices of a sequence or an array of them, in order; each may be there once."""
    takes = "devices, such as `jax.devices()[:4]`, each once"
    if not isinstance(devices, Sequence | np.ndarray) or isinstance(devices, str | bytes):
        raise check.refusal("make_mesh", "devices", devices, takes)
    try:
        flat = list(np.asarray(devices, dtype=object).flat)
    except ValueError as error:  # rows of unequal length
        raise check.refusal("make_mesh", "devices", devices, takes) from error
    are_devices = all(hasattr(device, "device_kind") for device in flat)
    if not are_devices or len(set(flat)) < len(flat):
        raise check.refusal("make_mesh", "devices", devices, takes)
    return flat


def _pairs(argument: str, axes: Any) -> list[tuple[Any, Any]]:
    """Names and sizes of a mapping."""
    if not isinstance(axes, Mapping):
        raise check.refusal(
            "make_mesh", argument, axes, 'text such as `"data=2,model=4"`, or a mapping'
        )
    return list(axes.items())


def _entries(text: str) -> list[tuple[str, int | None]]:
    """Names and sizes in a text such as `data=2,model=4`; a name without a size has None.

    Whether names and sizes make sense is left to `_checked`.
    """
    if not text.strip():
        return []
    entries = []
    for part in text.split(","):
        match = _ENTRY.fullmatch(part)
        if match is None:
            # Without the quotation marks that `shown` puts around a text.
            raise ValueError(
                f"Mesh axes are written `name=size` with commas between, as in `data=2,model=4`; "
                f"got `{check.shown(part.strip())[1:-1]}` in `{check.shown(text)[1:-1]}`."
            )
        entries.append((match[1], _size_of(match[1], match[2])))
    return entries


def _size_of(name: str, digits: str | None) -> int | None:
    """The size that an axis is given, or None."""
    if digits is None:
        return None
    # Python refuses to read numbers of thousands of digits, with an error of its own.
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"The size of the mesh axis `{name}` has {len(digits):,} digits.")
    return int(digits)


def _checked_size(name: Any, size: Any) -> int:
    """The size of an axis; refused if its name is no word, or its size no number of devices."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"The name of a mesh axis must be a word, such as `data`; got {check.shown(name)}."
        )
    if not _is_size(size):
        raise ValueError(
            f"The size of the mesh axis `{name}` must be a whole number from 1 up to "
            f"{_MOST_ON_AXIS:,}, or -1 for the devices that the other axes leave; got "
            f"{check.shown(size)}."
        )
    return int(size)


def _checked(entries: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    """Sizes by name, in order: each name is a word and is there once, at most one size is -1."""
    axes: dict[str, int] = {}
    for name, size in entries:
        axis_size = _checked_size(name, size)
        if name in axes:
            raise ValueError(
                f"A mesh names each axis once; `{name}` is there twice. Rename or remove one."
            )
        axes[name] = axis_size
    if list(axes.values()).count(-1) > 1:
        raise ValueError(
            f"One axis of a mesh may be -1; got `{spell_axes(axes)}`. Give all but one their sizes."
        )
    return axes


def _is_size(size: Any) -> TypeGuard[int]:
    """Whether a value is a whole number that an axis may have as its size, or -1."""
    # To Python True is a whole number too.
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        return False
    return bool(size == -1 or 1 <= size <= _MOST_ON_AXIS)


def _fill_in(axes: dict[str, int], devices: list[Any]) -> dict[str, int]:
    """The sizes of axes with -1 filled in, so that their product is the number of devices."""
    count = len(devices)
    if not axes or not devices:
        missing = "axis" if devices else "device"
        raise ValueError(
            f'`make_mesh` needs at least one {missing}, as in `make_mesh("data=-1")`; got none.'
        )
    if -1 in axes.values():
        return _deduced(axes, count)
    product = math.prod(axes.values())
    if product < count:
        raise ValueError(
            f"A mesh uses all of its devices; `{spell_axes(axes)}` is {product} of {count}. Make "
            "one axis -1 to use them all, or choose some: `sl.make_mesh(..., "
            f"devices=jax.devices()[:{product}])`."
        )
    if product > count:
        raise ValueError(_too_few(axes, product, devices))
    return axes


def _deduced(axes: dict[str, int], count: int) -> dict[str, int]:
    """The sizes of axes of which one is -1, with the number of devices that the others leave."""
    sizes = dict(axes)
    unknown = next(name for name, size in axes.items() if size == -1)
    del sizes[unknown]
    product = math.prod(sizes.values())
    if count % product:
        raise ValueError(
            f"`make_mesh` cannot fill in the -1 of `{spell_axes(axes)}`: the other axes take "
            f"{product} devices at a time, which does not divide the {count} there are. Choose "
            f"sizes whose product divides {count}."
        )
    return axes | {unknown: count // product}


def _too_few(axes: dict[str, int], product: int, devices: list[Any]) -> str:
    """The message for a mesh of more devices than there are; on a CPU, more can be simulated."""
    more = ""
    if devices[0].platform == "cpu":
        more = (
            f", simulate more: `XLA_FLAGS=--xla_force_host_platform_device_count={product}` "
            "before JAX starts, or take those of a machine that is not there, to plan for it: "
            "`sl.Target(...).mesh(...)`"
        )
    return (
        f"`make_mesh` has too few devices for `{spell_axes(axes)}`: it takes {product} and there "
        f"are {len(devices)}. Choose smaller sizes, make one axis -1{more}."
    )


def _slow_factors(
    dcn: str | Mapping[str, int], axes: dict[str, int], devices: list[Any]
) -> dict[str, int]:
    """The factor of each axis that crosses the slow network, as `dcn` says.

    An axis that `dcn` does not name stays inside a slice and is not in the result. The factors
    divide their axes and multiply to the number of slices there are; simulated devices, which have
    no slices, are divided into as many as `dcn` says.
    """
    entries = _entries(dcn) if isinstance(dcn, str) else _pairs("dcn", dcn)
    for name, _ in entries:
        if name not in axes:
            raise ValueError(
                f"`dcn` names axes of the mesh `{spell_axes(axes)}`; it has no axis "
                f"`{check.shown(name)[1:-1]}`."
            )
    # A name without a factor is the whole axis.
    factors = _checked((name, axes[name] if size is None else size) for name, size in entries)
    for name, factor in factors.items():
        if factor == -1 or axes[name] % factor:
            raise ValueError(
                f"The `dcn` factor of an axis must divide its size; got `{name}={factor}` for "
                f"`{name}={axes[name]}`."
            )
    _check_slices(bool(dcn), factors, axes, devices)
    return factors


def _check_slices(
    named: bool, factors: dict[str, int], axes: dict[str, int], devices: list[Any]
) -> None:
    """Refuse factors that do not fit the slices of the devices, and slices of unequal size.

    `named` says whether the user has given `dcn` at all.
    """
    count, product = _count_slices(devices), math.prod(factors.values())
    noun = name_slices(devices)
    # The devices of one CPU process may stand in for any number of slices.
    if product == count or (count == 1 and is_simulated(devices)):
        return
    # With a single slice there is no slow network to cross.
    advice = "Leave `dcn` out."
    if count > 1:
        advice = f'Write `dcn="{_proposal(axes, count)}"`, or name the axes with the least traffic.'
    if not named:
        raise ValueError(
            "`make_mesh` must be told by `dcn` which axes cross the slow network: the devices are "
            f"in {count} {noun}, and `{spell_axes(axes)}` does not say which run between them. "
            f"{advice}"
        )
    raise ValueError(
        f"The `dcn` factors must multiply to the number of {noun}, {count}; got "
        f"`{spell_axes(factors)}`, which is {product}. {advice}"
    )


def _count_slices(devices: list[Any]) -> int:
    """How many slices devices are of; all must have equally many of the devices."""
    slice_sizes = collections.Counter(map(slice_index, devices))
    if len(set(slice_sizes.values())) > 1:
        noun = name_slices(devices)
        raise ValueError(
            f"A mesh over several {noun} takes equally many devices of each; "
            f"`make_mesh(devices=...)` got {', '.join(map(str, slice_sizes.values()))}. Leave out "
            f"whole {noun}, or take the same number of each."
        )
    return len(slice_sizes)


def _proposal(axes: dict[str, int], slice_count: int) -> str:
    """A `dcn` to propose: the outermost factors of the axes that make up the number of slices.

    There always are such factors, since the number of slices divides that of the devices, which is
    the product of the sizes.
    """
    parts = []
    for name, size in axes.items():
        factor = math.gcd(size, slice_count)
        slice_count //= factor
        if factor > 1:
            parts.append(name if factor == size else f"{name}={factor}")
    return ",".join(parts)


def slices_of(mesh: Mesh) -> np.ndarray:
    """The slice of each device, in an array of the shape of the mesh."""
    return np.vectorize(slice_index, otypes=[int])(mesh.devices)


def name_slices(devices: Iterable[Any]) -> str:
    """What to call the slices of devices in messages: processes, where devices know no slices."""
    device = next(iter(devices))
    if hasattr(device, "slice_index") or device.platform == "tpu":
        return "slices"
    return "processes"


def spell_axes(axes: Mapping[Any, int]) -> str:
    """Axes and their sizes as `parse_axes` reads them."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def count_devices(devices: Iterable[Any]) -> str:
    """How many devices there are and of which kind, for messages: `8 cpu devices`."""
    devices = list(devices)
    noun = "device" if len(devices) == 1 else "devices"
    return f"{len(devices)} {devices[0].device_kind} {noun}"
