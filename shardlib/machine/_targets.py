"""Machines to plan for, and their devices to compile for, which need not be there.

Compilers for accelerators run on any machine. JAX makes device objects of a description: of a TPU
slice by its name, of GPUs by their datasheet. They look like devices to a mesh and to `jax.jit`,
and nothing can be run on them. While compilers work they are kept from looking for accelerators and
from writing to standard error, which is what `quietly` is for.
"""

import contextlib
import functools
import importlib.util
import math
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from shardlib.checks import _arguments as check
from shardlib.machine._absent import OPTIONS_FOR_GPUS
from shardlib.machine._chips import Chip
from shardlib.machine._mesh import make_mesh, parse_axes, spell_axes
from shardlib.machine._target_names import Machine, Platform, parse_machine


@dataclass(frozen=True)
class Target:
    """A machine to plan for, which need not be there: `tpu:v5e:16x16`, `gpu:h200:64x1x8`, `cpu:8`.

    - `tpu:GENERATION:SHAPE`, chips along each dim of the torus; several slices as
      `tpu:v5e:16x16:slices=4`.
    - `gpu:MODEL:SLICESxHOSTSxGPUS`. A slice is what NVLink joins: one host of up to eight GPUs, or,
      of B200s, up to 18 hosts of four.
    - `cpu:COUNT`, simulated devices.

    >>> Target("tpu:v5e:4x4").size, Target("gpu:h200:64x1x8").slices
    (16, 64)
    """

    text: str

    def __post_init__(self) -> None:
        check.text("Target", "text", self.text, "the name of a machine, such as `tpu:v5e:16x16`")
        self._machine  # noqa: B018  refuse a wrong text at once

    def __str__(self) -> str:
        return self.text

    @property
    def platform(self) -> Platform:
        """The kind of device, which says which compiler is asked: `tpu`, `gpu` or `cpu`."""
        return self._machine.platform

    @property
    def chip(self) -> Chip:
        """The datasheet of its devices."""
        return self._machine.chip

    @property
    def shape(self) -> tuple[int, ...]:
        """Chips of one slice, along each dim; of GPUs, hosts and GPUs of each."""
        return self._machine.shape

    @property
    def slices(self) -> int:
        """How many slices there are, joined by the slow network."""
        return self._machine.slices

    @property
    def size(self) -> int:
        """JAX devices in all, which on some TPUs are two to a chip."""
        return self.slices * math.prod(self.shape) * self.chip.devices

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """The devices, which programs can be compiled for but not run on.

        Needs the compiler: `shardlib[tpu-plan]` or `shardlib[gpu-plan]`.
        """
        return _devices(self)

    def mesh(self, shape: str = "", *, dcn: str = "") -> Mesh:
        """A mesh of these devices, as `make_mesh` lays it out.

        >>> Target("cpu:8").mesh("data=2,model=4").devices.shape
        (2, 4)
        """
        check.text("Target.mesh", "shape", shape)
        check.text("Target.mesh", "dcn", dcn)
        axes = parse_axes(shape)
        # Refused before the devices are made, which takes seconds for a large machine.
        count = math.prod(axes.values())
        if axes and -1 not in axes.values() and count != self.size:
            raise ValueError(
                f"The mesh `{spell_axes(axes)}` is {count} devices, and `{self}` has {self.size}. "
                f"Choose sizes whose product is {self.size}, or make one of them -1."
            )
        return make_mesh(shape, dcn=dcn, devices=self.devices)

    @property
    def compiler_options(self) -> dict[str, str | bool | int]:
        """Options for a compiler that has no device to try anything on."""
        return dict(OPTIONS_FOR_GPUS) if self.platform == "gpu" else {}

    @functools.cached_property
    def _machine(self) -> Machine:
        return parse_machine(self.text)


@functools.cache
def _devices(target: Target) -> tuple[Any, ...]:
    """The devices of a target, the same objects at every call, so that meshes of them are equal."""
    if target.platform == "cpu":
        return _simulated_devices(target)
    _require(target)
    if target.platform == "gpu":
        return _gpu_devices(target)
    return _tpu_devices(target)


def _gpu_devices(target: Target) -> tuple[Any, ...]:
    """The devices of XLA's CUDA compiler for a target's GPUs.

    The compiler knows them by the description of the hardware in the datasheet.
    """
    hosts, gpus = target.shape
    # JAX knows the host of GPUs that are not there and not their slice, so a slice is described as
    # one host.
    topology = f"{target.slices}x1x{hosts * gpus}"
    options = {"target_config": target.chip.description, "topology": topology}
    with quietly():
        try:
            description = topologies.get_topology_desc(
                platform="cuda", topology_name=target.chip.name, **options
            )
        except NotImplementedError as error:
            raise ValueError(
                f"`{target}`: JAX has not loaded its CUDA plugin, which without a GPU it does "
                'only where it is told to use the CPU: `jax.config.update("jax_platforms", '
                '"cpu")` before its first use, `sl.simulate_devices(...)`, or plan from the '
                "command line."
            ) from error
        return tuple(description.devices)


def _topology_options(target: Target) -> dict[str, Any]:
    """What libtpu is told of a slice besides its generation and its shape."""
    options: dict[str, Any] = {}
    if target.slices > 1:
        options["num_slices"] = target.slices
    if target.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as v4 is run
    # A host has 2x2 chips by default, which do not fit where a side is odd.
    if any(size % 2 for size in target.shape[:2]):
        options["chips_per_host_bounds"] = (1, 1, 1)
    return options


def _tpu_devices(target: Target) -> tuple[Any, ...]:
    """The devices of libtpu's compiler for a target's slices."""
    shape = "x".join(map(str, target.shape))
    generation = target.chip.name
    if generation == "7x":
        generation = "tpu7x"  # as libtpu spells it
    options = _topology_options(target)
    with quietly():
        try:
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{generation}:{shape}", **options
            )
            return tuple(description.devices)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"`{target}`: the TPU compiler knows no such slice ({str(error).splitlines()[0]})"
            ) from error


def _simulated_devices(target: Target) -> tuple[Any, ...]:
    """The first CPU devices of this process, of which there must be enough."""
    # Where this is JAX's first use it looks for accelerators too, and libtpu complains that it
    # finds none.
    with quietly():
        devices = jax.devices("cpu")
    if len(devices) < target.size:
        raise ValueError(
            f"`{target}` needs {target.size} simulated devices, and JAX sees {len(devices)}: call "
            f"`sl.simulate_devices({target.size})` before JAX's first use, or plan from the "
            "command line."
        )
    return tuple(devices[: target.size])


def _require(target: Target) -> None:
    """Refuse a target whose compiler is not installed, and say how to install it."""
    module = COMPILERS[target.platform]
    if not installed(module):
        raise ModuleNotFoundError(
            f"The compiler for `{target}` is not installed (`{module}`): "
            f'pip install "shardlib[{target.platform}-plan]"', name=module,
        )  # fmt: skip


def installed(module: str) -> bool:
    """Whether a module could be imported; it is looked for, and not run."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False


# The modules of the compilers, by platform.
COMPILERS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}
# What keeps the compilers from looking for accelerators, and from writing logs where nobody looks.
COMPILE_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
}
# What makes the TPU compiler log its own account of memory; for processes of our own, since it
# stays so.
LOUD = {"TPU_STDERR_LOG_LEVEL": "0", "TPU_MIN_LOG_LEVEL": "0"}


@contextlib.contextmanager
def quietly() -> Iterator[Path]:
    """Run a compiler without its noise, and with the environment of `COMPILE_ONLY`.

    What the process writes to standard error meanwhile goes into a temporary file, whose path is
    yielded. It is the C++ code that writes there, so the file descriptor itself is redirected, not
    `sys.stderr`. One thread at a time.
    """
    with _ONE_AT_A_TIME, _compile_only(), _standard_error_in_a_file() as path:
        yield path


_ONE_AT_A_TIME = threading.RLock()  # standard error and the environment are of the whole process


@contextlib.contextmanager
def _compile_only() -> Iterator[None]:
    """Set those variables of `COMPILE_ONLY` that the user has not set, and remove them again."""
    added = [name for name in COMPILE_ONLY if name not in os.environ]
    for name in added:
        os.environ[name] = COMPILE_ONLY[name]
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _standard_error_in_a_file() -> Iterator[Path]:
    """Redirect the file descriptor of standard error to a temporary file, and back."""
    with tempfile.TemporaryDirectory(prefix="shardlib-") as folder:
        path = Path(folder) / "stderr.txt"
        # Descriptor 2 is standard error, also to what is not Python.
        try:
            original = os.dup(2)
        except OSError:  # a process may have closed it
            original = os.open(os.devnull, os.O_WRONLY)
        try:
            with path.open("wb") as noise:
                os.dup2(noise.fileno(), 2)
            yield path
        finally:
            os.dup2(original, 2)
            os.close(original)
