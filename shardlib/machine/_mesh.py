"""Named meshes: which devices stand along which axis, and which axes cross the slow network.

A machine has up to two networks. Inside a *slice* (a TPU torus, the GPUs of one NVLink domain)
links are fast; between slices runs the data-centre network, an order of magnitude slower. A mesh is
laid out well when only axes with little traffic cross the slow one, so that is the one thing about
the hardware a user is asked to say: `dcn=`.
"""

import collections
import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.checks import _arguments as check

_MOST_DIGITS = 18
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
    """A mesh of named axes, outermost first.

    Neighbours along the inner axes are close to each other on the hardware.

    Sizes are the total sizes of the axes, however many networks they cross. One of them may be -1:
    the devices that the others leave. `devices` are `jax.devices()` unless given.

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
    named = parse_axes(shape)
    if twice := [name for name in axes if name in named]:
        raise ValueError(
            f"`make_mesh` takes each axis once; `{twice[0]}` is both in the shape, "
            f"`{_spell(named)}`, and a keyword. Remove one of the two."
        )
    check.kind("make_mesh", "axis_type", axis_type, AxisType, "a `jax.sharding.AxisType`")
    split = check.boolean("make_mesh", "allow_split_physical_axes", allow_split_physical_axes)
    devices = jax.devices() if devices is None else _devices(devices)
    named = _fill_in(_checked((*named.items(), *axes.items())), devices)
    crossing = _crossing(dcn, named, devices)
    try:
        laid_out = _lay_out(named, crossing, devices, split)
    # JAX asserts where the devices do not fill a box of the torus or come two to a chip, and has
    # not implemented the shapes that it refuses. Before 0.12 it also misreads the factors of sizes
    # such as 14 when it splits a dimension, and fails on what follows. To a user each of these is a
    # shape that does not go with these devices.
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"`make_mesh` cannot lay `{_spell(named)}` out on {count_devices(devices)}: "
            f"{_way_out(error)}"
        ) from error
    return Mesh(laid_out, tuple(named), axis_types=(axis_type,) * len(named))


@dataclass(frozen=True)
class PortableMesh:
    """A mesh by the numbers of its devices, as it is written into a pickle: a device itself belongs
    to one process.
    """

    axes: tuple[str, ...]
    axis_types: tuple[AxisType, ...]
    platform: str
    ids: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "PortableMesh":
        """How a mesh is written, if its devices are those of this machine."""
        devices = list(mesh.devices.flat)
        platform = devices[0].platform
        known = _devices_by_id(platform)
        if any(known.get(device.id) != device for device in devices):
            raise ValueError(
                f"A strategy whose mesh is of {count_devices(devices)} that this process does not "
                "have cannot be pickled: no other process could find them. Pickle one whose mesh "
                "is text, and give it the mesh there: `dataclasses.replace(strategy, mesh=...)`."
            )
        ids = tuple(device.id for device in devices)
        return cls(mesh.axis_names, mesh.axis_types, platform, ids, mesh.devices.shape)

    def here(self) -> Mesh:
        """The same mesh, of the devices of this process."""
        known = _devices_by_id(self.platform)
        if lost := [number for number in self.ids if number not in known]:
            raise ValueError(
                f"The mesh that was pickled, {dict(zip(self.axes, self.shape, strict=True))}, has "
                f"the {self.platform} device {lost[0]}, and this process has {len(known)} "
                f"{self.platform} devices. Pickle a strategy whose mesh is text for another "
                'machine: `mesh="data=-1"`.'
            )
        flat = np.empty(len(self.ids), dtype=object)
        flat[:] = [known[number] for number in self.ids]
        devices = flat.reshape(self.shape)
        return Mesh(devices, self.axes, axis_types=self.axis_types)


def _devices_by_id(platform: str) -> dict[int, Any]:
    try:
        return {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # there is no such platform here
        return {}


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
        pass  # JAX has started: what it sees is checked below
    found = jax.devices()
    if len(found) != count or found[0].platform != "cpu":
        raise ValueError(
            f"`simulate_devices({count})` came too late, or `XLA_FLAGS` says otherwise: JAX sees "
            f"{count_devices(found)}. Call it before anything asks JAX for devices or arrays."
        )


def parse_axes(text: str | Mapping[str, int]) -> dict[str, int]:
    """The axes that a text or a mapping names, in their order. One size may be -1, to be filled in
    by `make_mesh`.

    >>> parse_axes("data=-1, model=4")
    {'data': -1, 'model': 4}
    """
    if not isinstance(text, str):
        return _checked(_pairs("shape", text))
    entries = _entries(text)
    if bare := [name for name, size in entries if size is None]:
        raise ValueError(
            f"Mesh axes need a size each, as in `data=2,model=4`; got `{text}`. "
            f"Write `{bare[0]}=4`, or `{bare[0]}=-1` for the devices that the other axes leave."
        )
    return _checked(entries)


def format_mesh(mesh: Mesh | AbstractMesh) -> str:
    """The axes of a mesh as `make_mesh` and `parse_axes` read them.

    >>> format_mesh(make_mesh(data=2, model=4))
    'data=2,model=4'
    """
    return _spell(mesh.shape)


def slow_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the slice changes, read off the devices: collectives over them use the
    slow network.

    Where devices know no slices, their process stands in. The simulated devices of one process are
    a single slice.

    >>> slow_axes(make_mesh("pod=2,model=4", dcn="pod"))
    ()
    """
    slices = slices_of(mesh)
    return tuple(
        name for axis, name in enumerate(mesh.axis_names) if np.diff(slices, axis=axis).any()
    )


def _devices(devices: Any) -> list[Any]:
    """The devices of a sequence or an array of them, in order."""
    takes = "devices, such as `jax.devices()[:4]`, each once"
    if not isinstance(devices, Sequence | np.ndarray) or isinstance(devices, str | bytes):
        raise check.refusal("make_mesh", "devices", devices, takes)
    try:
        flat = list(np.asarray(devices, dtype=object).flat)
    except ValueError as error:  # rows of unequal length
        raise check.refusal("make_mesh", "devices", devices, takes) from error
    if not all(hasattr(one, "device_kind") for one in flat) or len(set(flat)) < len(flat):
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
    entries = []
    for part in text.split(",") if text.strip() else []:
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise ValueError(
                f"Mesh axes are written `name=size` with commas between, as in `data=2,model=4`; "
                f"got `{check.shown(part.strip())[1:-1]}` in `{check.shown(text)[1:-1]}`."
            )
        if len(match[2] or "") > _MOST_DIGITS:
            raise ValueError(
                f"The size of the mesh axis `{match[1]}` has {len(match[2]):,} digits."
            )
        entries.append((match[1], None if match[2] is None else int(match[2])))
    return entries


def _checked(entries: Iterable[tuple[str, int | None]]) -> dict[str, int]:
    axes: dict[str, int] = {}
    for name, size in entries:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                f"The name of a mesh axis must be a word, such as `data`; got {check.shown(name)}."
            )
        if (
            isinstance(size, bool)
            or not isinstance(size, int | np.integer)
            or size == 0
            or not -1 <= size <= _MOST_ON_AXIS
        ):
            raise ValueError(
                f"The size of the mesh axis `{name}` must be a whole number from 1 up to "
                f"{_MOST_ON_AXIS:,}, or -1 for the devices that the other axes leave; got "
                f"{check.shown(size)}."
            )
        if name in axes:
            raise ValueError(
                f"A mesh names each axis once; `{name}` is there twice. Rename or remove one."
            )
        axes[name] = int(size)
    if list(axes.values()).count(-1) > 1:
        raise ValueError(
            f"One axis of a mesh may be -1; got `{_spell(axes)}`. Give all but one their sizes."
        )
    return axes


def _fill_in(axes: dict[str, int], devices: list[Any]) -> dict[str, int]:
    count = len(devices)
    if not axes or not devices:
        missing = "axis" if devices else "device"
        raise ValueError(
            f'`make_mesh` needs at least one {missing}, as in `make_mesh("data=-1")`; got none.'
        )
    product = math.prod(size for size in axes.values() if size != -1)
    if -1 in axes.values():
        if count % product:
            raise ValueError(
                f"`make_mesh` cannot fill in the -1 of `{_spell(axes)}`: the other axes take "
                f"{product} devices at a time, which does not divide the {count} there are. Choose "
                f"sizes whose product divides {count}."
            )
        return {name: count // product if size == -1 else size for name, size in axes.items()}
    if product < count:
        raise ValueError(
            f"A mesh uses all of its devices; `{_spell(axes)}` is {product} of {count}. Make one "
            "axis -1 to use them all, or choose some: `sl.make_mesh(..., "
            f"devices=jax.devices()[:{product}])`."
        )
    if product > count:
        more = ""
        if devices[0].platform == "cpu":
            more = (
                f", simulate more: `XLA_FLAGS=--xla_force_host_platform_device_count={product}` "
                "before JAX starts, or take those of a machine that is not there, to plan for it: "
                "`sl.Target(...).mesh(...)`"
            )
        raise ValueError(
            f"`make_mesh` has too few devices for `{_spell(axes)}`: it takes {product} and there "
            f"are {count}. Choose smaller sizes, make one axis -1{more}."
        )
    return axes


def _crossing(
    dcn: str | Mapping[str, int], axes: dict[str, int], devices: list[Any]
) -> dict[str, int]:
    """The factor of each axis that crosses the slow network, checked against the slices there
    are.
    """
    entries = _entries(dcn) if isinstance(dcn, str) else _pairs("dcn", dcn)
    if unknown := [name for name, _ in entries if name not in axes]:
        raise ValueError(
            f"`dcn` names axes of the mesh `{_spell(axes)}`; it has no axis "
            f"`{check.shown(unknown[0])[1:-1]}`."
        )
    factors = _checked((name, axes[name] if size is None else size) for name, size in entries)
    for name, factor in factors.items():
        if factor == -1 or axes[name] % factor:
            raise ValueError(
                f"The `dcn` factor of an axis must divide its size; got `{name}={factor}` for "
                f"`{name}={axes[name]}`."
            )
    slices = collections.Counter(map(slice_index, devices))
    count, product, called = len(slices), math.prod(factors.values()), name_slices(devices)
    if len(set(slices.values())) > 1:
        raise ValueError(
            f"A mesh over several {called} takes equally many devices of each; "
            f"`make_mesh(devices=...)` got {', '.join(map(str, slices.values()))}. Leave out whole "
            f"{called}, or take the same number of each."
        )
    if product == count or (count == 1 and _is_simulated(devices)):
        return factors
    advice = "Leave `dcn` out."
    if count > 1:
        advice = f'Write `dcn="{_proposal(axes, count)}"`, or name the axes with the least traffic.'
    if not dcn:
        raise ValueError(
            "`make_mesh` must be told by `dcn` which axes cross the slow network: the devices are "
            f"in {count} {called}, and `{_spell(axes)}` does not say which run between them. "
            f"{advice}"
        )
    raise ValueError(
        f"The `dcn` factors must multiply to the number of {called}, {count}; got "
        f"`{_spell(factors)}`, which is {product}. {advice}"
    )


def _proposal(axes: dict[str, int], slice_count: int) -> str:
    """The outermost factors that make up the number of slices, which divides the product of the
    sizes.
    """
    parts = []
    for name, size in axes.items():
        factor = math.gcd(size, slice_count)
        slice_count //= factor
        if factor > 1:
            parts.append(name if factor == size else f"{name}={factor}")
    return ",".join(parts)


def _lay_out(
    axes: dict[str, int], crossing: dict[str, int], devices: list[Any], split: bool
) -> np.ndarray:
    outer = [crossing.get(name, 1) for name in axes]
    inner = [size // factor for size, factor in zip(axes.values(), outer, strict=True)]
    if math.prod(outer) == 1:
        return mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=split)
    if not _is_simulated(devices):
        return mesh_utils.create_hybrid_device_mesh(
            inner,
            outer,
            devices,
            process_is_granule=[slice_index(device) for device in devices]
            == [device.process_index for device in devices],
            allow_split_physical_axes=split,
        )
    # Blocks of devices in order are the slices: (outer..., inner...) interleaved to (outer, inner),
    # (outer, inner), ...
    order = itertools.chain.from_iterable((k, k + len(axes)) for k in range(len(axes)))
    return (
        np.asarray(devices, dtype=object)
        .reshape(outer + inner)
        .transpose(*order)
        .reshape(*axes.values())
    )


def slice_index(device: Any) -> int:
    """Which slice a device is in: what the fast network joins."""
    # The devices of a TPU topology that is a single slice carry no `slice_index`, and their
    # processes share the torus. GPUs that are only compiled for are all of slice 0; those of one
    # process are joined by NVLink.
    if device.platform == "gpu" and type(getattr(device, "client", None)).__name__.startswith(
        "CompileOnly"
    ):
        return device.process_index
    return getattr(device, "slice_index", 0 if device.platform == "tpu" else device.process_index)


def slices_of(mesh: Mesh) -> np.ndarray:
    return np.vectorize(slice_index, otypes=[int])(mesh.devices)


def name_slices(devices: Iterable[Any]) -> str:
    device = next(iter(devices))
    return "slices" if hasattr(device, "slice_index") or device.platform == "tpu" else "processes"


def _is_simulated(devices: list[Any]) -> bool:
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) == 1


def _way_out(error: Exception) -> str:
    if isinstance(error, NotImplementedError):
        return (
            "an axis would share a dimension of the torus with another. Pass "
            "`allow_split_physical_axes=True`."
        )
    if "megacore" in str(error):
        return (
            "JAX wants one device per chip here, and these are two. Use megacore; in "
            '`get_topology_desc` that is `chip_config_name="megacore"`.'
        )
    if isinstance(error, AssertionError):
        return (
            "they do not fill a box of the torus. Take whole slices, or all devices between two "
            "corners of a box."
        )
    return (
        f"JAX finds no way to divide the torus ({error}). Choose sizes that divide its dimensions."
    )


def _spell(axes: Mapping[Any, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes.items())


def count_devices(devices: Iterable[Any]) -> str:
    devices = list(devices)
    return f"{len(devices)} {devices[0].device_kind} device" + ("s" if len(devices) > 1 else "")
