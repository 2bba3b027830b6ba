"""Arrays in the memory of the host: by their types, and copied from and to the device.

JAX keeps the memory that an array is in in its type, so that nothing computes with an array of the
host by accident.
"""

from typing import Any

import jax

HOST = "pinned_host"
"""What JAX calls the memory of the host that devices copy from and to by themselves."""


def is_on_host(array: Any) -> bool:
    """Whether a traced array is in the host's memory, by its type."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def to_device(array: Any) -> Any:
    """The same array in the device's memory.

    What is there already is given back, so that no copy of it is left in the program.
    """
    if not is_on_host(array):
        return array
    return jax.device_put(array, jax.memory.Space.Device)


def to_host(array: Any) -> jax.Array:
    """The same array in the host's memory."""
    return jax.device_put(array, jax.memory.Space.Host)
