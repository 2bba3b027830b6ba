"""A mesh as it is written into a pickle, which another process on the same machine can read."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardlib.machine._mesh import count_devices


@dataclass(frozen=True)
class PortableMesh:
    """A mesh by the numbers of its devices, as it is written into a pickle.

    A device object belongs to one process; its number means the same device in any process on the
    same machine. `shape` is that of the grid of devices, in which `ids` are listed row by row.
    """

    axes: tuple[str, ...]
    axis_types: tuple[AxisType, ...]
    platform: str
    ids: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "PortableMesh":
        """The numbers of a mesh's devices.

        Devices that are not those of this process, such as a compiler's, are refused: nobody could
        find them by their numbers.
        """
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
        """The same mesh, of the devices of this process that have these numbers.

        A number that no device here has is refused.
        """
        known = _devices_by_id(self.platform)
        for number in self.ids:
            if number not in known:
                raise ValueError(
                    "The mesh that was pickled, "
                    f"{dict(zip(self.axes, self.shape, strict=True))}, has the {self.platform} "
                    f"device {number}, and this process has {len(known)} {self.platform} devices. "
                    "Pickle a strategy whose mesh is text for another machine: "
                    '`mesh="data=-1"`.'
                )
        # NumPy would look for sequences inside a list of devices, so the array is made first.
        flat = np.empty(len(self.ids), dtype=object)
        flat[:] = [known[number] for number in self.ids]
        devices = flat.reshape(self.shape)
        return Mesh(devices, self.axes, axis_types=self.axis_types)


def _devices_by_id(platform: str) -> dict[int, Any]:
    try:
        return {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # there is no such platform here
        return {}
