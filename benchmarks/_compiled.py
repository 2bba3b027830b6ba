"""A program compiled for a machine, and what benchmarks read off it."""

import time
from typing import Any, NamedTuple

import jax

import shardlib as sl


class Compiled(NamedTuple):
    """A compiled program and its collectives."""

    program: Any
    collectives: tuple[sl.testing.Collective, ...]
    seconds: float  # that compiling took

    @property
    def held(self) -> int:
        """Bytes of a device for arguments and temporaries."""
        memory = self.program.memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    @property
    def sent(self) -> int:
        """Bytes that a device sends."""
        return sum(one.total_bytes for one in self.collectives)

    @property
    def hidden(self) -> float:
        """The share of these that is under way while matrices are multiplied."""
        hidden = sum(one.total_bytes for one in self.collectives if one.overlapped)
        return hidden / self.sent


def compile_for(target: sl.Target, mesh: jax.sharding.Mesh, lowered: Any) -> Compiled:
    """Compile a lowered program for a machine."""
    started = time.perf_counter()
    program = lowered.compile(compiler_options=target.compiler_options)
    seconds = time.perf_counter() - started
    return Compiled(program, sl.testing.collectives(program, mesh), seconds)
