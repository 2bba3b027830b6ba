"""The update of a parameter by the processors of the host, where its optimizer's state is.

ZeRO-Offload: the gradient goes to the host and the new parameter comes back, and the optimizer's
state goes nowhere. Each host updates the shards of its own devices:

    device    gradient, 2 or 4 bytes per parameter  ->  host
    host      moments and parameter, updated where they are
    host      the parameter, if it is stored on the device  ->  device

There is no communication between hosts in such a computation. So an update is taken if the rows of
each shard depend on no rows of another one, which the equations of its trace tell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import compute_on
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from shardlib.layouts._host import to_device, to_host

# Its name since JAX 0.11.
_compute_on: Callable[..., Any] = getattr(compute_on, "compute_on2", compute_on.compute_on)


@dataclass(frozen=True, eq=False)
class HostUpdate:
    """A function of all rows of one parameter's arrays, evaluated by the host.

    Attributes:
        body: its equations, which read the arrays at `inputs` and then other values.
        inputs: the positions of the arrays that it reads.
        positions: those of the arrays that it updates.
    """

    body: Jaxpr
    inputs: tuple[int, ...]
    positions: tuple[int, ...]

    def run(self, arrays: Sequence[Any], wholes: Sequence[Any]) -> list[Any]:
        """The updated arrays, each in the memory where it was."""
        function = jaxpr_as_fun(ClosedJaxpr(self.body, []))

        def by_host(*operands: Any) -> list[Any]:
            # The types of the trace are of the device's memory. Here these copies do nothing.
            return function(*map(to_device, operands))

        # Results that were on the device go back there by the same computation.
        spaces = [jax.typeof(arrays[position]).memory_space for position in self.positions]
        compute = _compute_on(by_host, compute_type="device_host", out_memory_spaces=spaces)
        read = [arrays[position] for position in self.inputs]
        return compute(*map(to_host, [*read, *wholes]))
