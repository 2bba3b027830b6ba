"""Options that a step sets for the compiler of its devices.

They change when data is sent and in how many pieces, but no result. If the user has set an option,
in `XLA_FLAGS` or `LIBTPU_INIT_ARGS`, the step does not set it: the options of a program silently
override flags. An option that the installed compiler does not know is left out, and a plan says so.
"""

import functools
import os
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.collectives._meetings import Meeting
from shardlib.layouts._specs import axes_without, parts_over
from shardlib.step._strategy import Strategy

Options = dict[str, bool | int]

# TPUs whose sparse cores can gather and scatter, by JAX's names of them. The sparse cores of v4
# cannot, and v5e has none.
_SENDING_BY_SPARSE_CORES = ("TPU v5", "TPU v6 lite", "TPU7x")
# Gathers over one, two and three dims of the torus have an option each.
_BY_SPARSE_CORES = ("reduce_scatter", "all_gather", "2d_all_gather", "3d_all_gather")


@dataclass(frozen=True)
class CompilerOptions:
    """The options for a program, and the names of those that the compiler does not know."""

    known: Options
    unknown: tuple[str, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a plan says of the options that are left out, a line each.

        At run time nothing is said: the step is the same without them, and slower at most.
        """
        return tuple(
            f"This compiler does not know the option `{name}`, which is left out."
            for name in self.unknown
        )


def compiler_options(strategy: Strategy) -> CompilerOptions:
    """The options for a step of a strategy, on the devices of its mesh.

    Each is tried on a program of nothing first, since a compiler refuses a step with an option that
    it does not know.
    """
    mesh = strategy.device_mesh
    device = mesh.devices.flat[0]
    if device.platform in ("gpu", "cuda"):
        wanted = _bucket_options(strategy)
    elif strategy.hide_collectives and device.device_kind in _SENDING_BY_SPARSE_CORES:
        wanted = _sparse_core_options()
    else:
        return CompilerOptions({})
    known: Options = {}
    unknown: list[str] = []
    for name, value in wanted.items():
        if _is_set_by_user(name):
            continue
        if _is_known(name, value, mesh):
            known[name] = value
        else:
            unknown.append(name)
    return CompilerOptions(known, tuple(unknown))


def _bucket_options(strategy: Strategy) -> Options:
    """Options that keep the compiler of a GPU from joining the buckets of an exchange.

    Joined, it would hold the buffers of all of them at once.
    """
    exchange = strategy.exchange.within
    axes = axes_without(strategy.zero_axes, strategy.sequence_axes)
    parts = parts_over(strategy.device_mesh.shape, axes)
    limits = {
        "all_reduce": exchange.bucket_bytes,
        # The compiler counts the output of a scatter, which is one part of the bucket.
        "reduce_scatter": max(1, exchange.bucket_bytes // parts),
    }
    meeting = strategy.exchange
    if isinstance(meeting, Meeting) and meeting.overlap:
        # Joined with the sums of metrics, a meeting would begin where the step ends.
        limits["all_reduce"] = 1
    return {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind, size in limits.items()}


def _sparse_core_options() -> Options:
    """Options that let a TPU's sparse cores gather and scatter.

    Otherwise its tensor cores do this, and cannot multiply matrices meanwhile.
    """
    prefix = "xla_tpu_enable_sparse_core_collective_offload"
    return {f"{prefix}_{kind}": True for kind in _BY_SPARSE_CORES}


def _is_set_by_user(name: str) -> bool:
    """Whether the flags that compilers read when they are loaded have an option.

    XLA reads the one variable, and TPUs' compiler the other as well.
    """
    flags = os.environ.get("XLA_FLAGS", "") + " " + os.environ.get("LIBTPU_INIT_ARGS", "")
    names = [flag.split("=")[0].lstrip("-") for flag in flags.split()]
    return name in names


@functools.cache
def _is_known(name: str, value: bool | int, mesh: Mesh) -> bool:
    """Whether the compiler for a mesh takes an option, found out with the least of programs.

    That takes some hundredths of a second, once in a process for each option and mesh.
    """
    # The mesh of a step may be in force, so the program is one for all of its devices.
    nothing = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, PartitionSpec()))
    identity = jax.jit(lambda x: x, compiler_options={name: value})
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        lowered = identity.lower(nothing)
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True
