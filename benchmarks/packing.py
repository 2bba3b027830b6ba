"""What it takes a device to pack what a compressed exchange sends, over what formulas say.

Workers are simulated on one device by `jax.vmap`, so that every number is packed, sent to its
server, averaged and unpacked as between devices, and what is on the wire is a copy in memory. A
worker's seconds are those of all workers by their number.

`copy_bandwidth` is what a copy of an array reads and writes in the same process, and `bytes` of a
method are a worker's seconds times that, for each number of the gradient: what the constants of
`sl.break_even` say. `over_formula` is the first by the second.

    python -m benchmarks.packing --json
    python -m benchmarks.packing --tiny       # to try the path on a CPU; the figures mean nothing
"""

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp

import shardlib as sl
from benchmarks._report import report
from benchmarks._timing import seconds
from shardlib.collectives._exact import ExchangeInputs

AXIS, WORKERS = "pod", 4
CALLS = 5


class TopK(sl.collectives.TopK):
    """The same, whose workers look for their largest elements one after the other, as devices do.

    Under `jax.vmap` it would be one sort of several rows, which is ten times slower.
    """

    def _chosen(self, gradient: jax.Array, parameter: sl.collectives.Parameter) -> Any:
        def chosen(gradient: jax.Array) -> Any:
            return super(TopK, self)._chosen(gradient, parameter)

        return jax.custom_batching.sequential_vmap(chosen)(gradient)


METHODS: dict[str, sl.Exchange] = {
    "one_bit": sl.collectives.OneBit(AXIS),
    "four_bits": sl.collectives.Quantised(AXIS, bits=4, feedback=True),
    "eight_bits": sl.collectives.Quantised(AXIS, bits=8),
    "power_sgd": sl.collectives.PowerSGD(AXIS),
    "top_k": TopK(AXIS),
}


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--tiny", action="store_true", help="small arrays; figures mean nothing")
    parser.add_argument("--matrices", type=int, default=4, help="of a gradient")
    arguments = parser.parse_args()
    width = 256 if arguments.tiny else 4096
    elements = arguments.matrices * width * width
    bandwidth = copy_bandwidth(elements)
    figures: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "elements": elements,
        "copy_bandwidth": bandwidth,
    }
    for name, exchange in METHODS.items():
        taken = seconds_of_a_worker(exchange, arguments.matrices, width)
        # On an infinite network packing is all that is left.
        counted = sl.break_even(
            parameters=elements,
            workers=WORKERS,
            bandwidth=math.inf,
            memory_bandwidth=1.0,
            exchange=exchange,
            width=width,
        )
        formula = counted.compressed_seconds / elements
        found = taken * bandwidth / elements
        figures[name] = {
            "seconds": taken,
            "bytes": found,
            "formula": formula,
            "over_formula": found / formula,
        }
        print(name, figures[name], flush=True)
    report("packing", figures, {}, arguments.json)


def copy_bandwidth(elements: int) -> float:
    """Bytes per second that a device reads and writes when it copies numbers."""
    x = jnp.ones(elements * WORKERS)
    return 2 * x.nbytes / seconds(lambda x: x + 1, x, calls=CALLS)


def seconds_of_a_worker(exchange: sl.Exchange, matrices: int, width: int) -> float:
    """Seconds in which one of several workers takes part in an exchange."""
    shape = (width, width)
    parameter = sl.collectives.Parameter("kernel", shape, jax.P(), (AXIS,), jax.P())
    parameters = [parameter] * matrices

    def of_one(gradients: list[jax.Array], errors: list[Any]) -> Any:
        inputs = ExchangeInputs([()] * matrices, errors, [None] * matrices)
        return exchange.average(gradients, parameters, inputs)

    gradients = [
        jax.random.normal(jax.random.key(number), (WORKERS, *shape)) for number in range(matrices)
    ]
    errors: list[Any] = [None] * matrices
    if exchange.keeps_errors:
        first = [exchange.first_errors(parameter, {AXIS: WORKERS})] * matrices
        errors = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), first)
    return seconds(jax.vmap(of_one, axis_name=AXIS), gradients, errors, calls=CALLS) / WORKERS


if __name__ == "__main__":
    main()
