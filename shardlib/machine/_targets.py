"""Machines to plan for, and their devices to compile for, which need not be there."""

import contextlib
import difflib
import functools
import importlib.util
import itertools
import math
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from shardlib.checks import _arguments as check
from shardlib.machine._chips import CPU, GPUS, TPUS, Chip
from shardlib.machine._mesh import make_mesh, parse_axes

Platform = Literal["tpu", "gpu", "cpu"]


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
        self._parsed  # noqa: B018  refuse a wrong text at once

    def __str__(self) -> str:
        return self.text

    @property
    def platform(self) -> Platform:
        return self._parsed[0]

    @property
    def chip(self) -> Chip:
        return self._parsed[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Chips of one slice, along each dim; of GPUs, hosts and GPUs of each."""
        return self._parsed[2]

    @property
    def slices(self) -> int:
        return self._parsed[3]

    @property
    def size(self) -> int:
        """JAX devices in all."""
        return self.slices * math.prod(self.shape) * self.chip.devices

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """The devices, for compiling alone. Needs the compiler: `shardlib[tpu-plan]` or
        `shardlib[gpu-plan]`.
        """
        return _devices(self)

    def mesh(self, shape: str = "", *, dcn: str = "") -> Mesh:
        """A mesh of these devices, as `make_mesh` lays it out.

        >>> Target("cpu:8").mesh("data=2,model=4").devices.shape
        (2, 4)
        """
        check.text("Target.mesh", "shape", shape)
        check.text("Target.mesh", "dcn", dcn)
        named = parse_axes(shape)
        if named and -1 not in named.values() and (asked := math.prod(named.values())) != self.size:
            spelt = ",".join(f"{name}={size}" for name, size in named.items())
            raise ValueError(
                f"The mesh `{spelt}` is {asked} devices, and `{self}` has {self.size}. Choose "
                f"sizes whose product is {self.size}, or make one of them -1."
            )
        return make_mesh(shape, dcn=dcn, devices=self.devices)

    @property
    def compiler_options(self) -> dict[str, str | bool | int]:
        """Options for a compiler that has no device to try anything on."""
        if self.platform == "gpu":  # nothing can be timed, so kernels are chosen by default
            return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
        return {}

    @functools.cached_property
    def _parsed(self) -> "_Parsed":
        return _parse(self.text)


_Parsed = tuple[Platform, Chip, tuple[int, ...], int]
_NUMBER = "[0-9]{1,6}"  # of devices along one dim: no machine has a million
_LARGEST_MACHINE = 2**17  # devices in all, more than any machine has: compilers list every one


def _parse(text: str) -> _Parsed:
    parts = text.split(":") if isinstance(text, str) else []
    if parts[:1] == ["cpu"] and len(parts) == 2 and re.fullmatch("[0-9]+", parts[1]):
        if not re.fullmatch(_NUMBER, parts[1]) or not 0 < int(parts[1]) <= CPU.largest:
            raise ValueError(
                f"`{_cut(text)}`: from 1 to {CPU.largest:,} devices can be simulated, as in "
                "`cpu:8`. Larger machines are planned by their own compilers, `tpu:...` or "
                "`gpu:...`."
            )
        return "cpu", CPU, (int(parts[1]),), 1
    if isinstance(text, str) and (name := _cloud_name(text)):
        raise ValueError(name)
    models = {"tpu": TPUS, "gpu": GPUS}.get(parts[0] if parts else "", {})
    if (
        len(parts) not in (3, 4)
        or parts[1] not in models
        or not re.fullmatch(f"{_NUMBER}(x{_NUMBER})*", parts[2])
    ):
        raise ValueError(_unknown(text, parts))
    chip, sizes = models[parts[1]], tuple(map(int, parts[2].split("x")))
    platform, chip, shape, slices = (_tpu if parts[0] == "tpu" else _gpus)(
        text, chip, sizes, parts[3:]
    )
    if (devices := slices * math.prod(shape) * chip.devices) > _LARGEST_MACHINE:
        raise ValueError(
            f"`{_cut(text)}` has {devices:,} devices; a target has at most {_LARGEST_MACHINE:,}. "
            "Take fewer slices."
        )
    return platform, chip, shape, slices


# How clouds name TPU slices: a generation and a number, which of some generations counts
# TensorCores and of others chips.
_CLOUD_NAME = re.compile(
    rf"(?:tpu:)?(?:tpu-?)?(v3|v4|v5p|v5litepod|v5e|v6e|v?7x)-({_NUMBER})", re.IGNORECASE
)
_CLOUD_GENERATIONS = {"v5litepod": "v5e", "v7x": "7x"}
# TensorCores of a chip, where those are what is counted.
_CLOUD_CORES = {"v3": 2, "v4": 2, "v5p": 2, "7x": 2}


def _cloud_name(text: str) -> str:
    """What to say of a cloud's name of a slice, `v5p-64`, which does not say the slice's shape;
    empty for other texts.
    """
    match = _CLOUD_NAME.fullmatch(text)
    if not match:
        return ""
    given, count = match[1].lower(), int(match[2])
    chip = TPUS[_CLOUD_GENERATIONS.get(given, given)]
    cores = _CLOUD_CORES.get(chip.name)
    if cores is None:
        return (
            f"`{text}` does not say the shape of the slice. In this name clouds count chips: "
            f"{_chips(chip, count)}. Write the target with its shape."
        )
    as_cores = (
        f"no slice, since a chip has {cores}" if count % cores else _chips(chip, count // cores)
    )
    return (
        f"`{text}` can be read in two ways. Clouds count TensorCores in this name, {cores} to a "
        f"chip: {as_cores}. Read as a number of chips it is {_chips(chip, count)}. Write the "
        "target with its shape."
    )


def _chips(chip: Chip, count: int) -> str:
    """So many chips of a generation, as the target of that size."""
    shape = _slice_of(chip, count)
    counted = f"{count:,} chip" + "s" * (count != 1)
    if shape is None:
        return f"{counted}, of which there is no slice of {chip.name}"
    return f"{counted}, `tpu:{chip.name}:{'x'.join(map(str, shape))}`"


def _slice_of(chip: Chip, count: int) -> tuple[int, ...] | None:
    """The most compact slice of so many chips, written as clouds do; none where there is none."""
    if not 0 < count <= chip.largest:
        return None
    sides = [side for side in range(1, count + 1) if _is_side(side) and count % side == 0]
    shapes = [
        shape
        for shape in itertools.combinations_with_replacement(sides, chip.torus)
        if math.prod(shape) == count
    ]
    if not shapes:
        return None
    best = min(shapes, key=lambda shape: shape[-1] / shape[0])
    return tuple(sorted(best, key=lambda side: (side == 1, side)))


def _is_side(size: int) -> bool:
    return size in (1, 2) or (size > 0 and size % 4 == 0)


def _cut(text: Any) -> str:
    """A text of a user's as it can be shown in a message."""
    shown = str(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _tpu(text: str, chip: Chip, shape: tuple[int, ...], more: list[str]) -> _Parsed:
    match = re.fullmatch(f"slices=({_NUMBER})", more[0]) if more else None
    if more and (not match or not int(match[1])):
        raise ValueError(
            f"`{_cut(text)}`: several slices are written "
            f"`{':'.join(text.split(':')[:3])}:slices=4`, of at most {_LARGEST_MACHINE:,} devices "
            "in all."
        )
    if len(shape) != chip.torus or not all(map(_is_side, shape)) or math.prod(shape) > chip.largest:
        example = "x".join(["4"] * chip.torus)
        raise ValueError(
            f"`{_cut(text)}`: a slice of {chip.name} has {chip.torus} dims, each 1, 2 or a "
            f"multiple of 4, and at most {chip.largest:,} chips, as in "
            f"`tpu:{chip.name}:{example}`; larger machines are several slices, "
            f"`tpu:{chip.name}:{example}:slices=2`."
        )
    return "tpu", chip, shape, int(match[1]) if match else 1


def _gpus(text: str, chip: Chip, sizes: tuple[int, ...], more: list[str]) -> _Parsed:
    slices, hosts, gpus = sizes if len(sizes) == 3 else (0, 0, 0)
    if more or 0 in (slices, hosts, gpus):
        raise ValueError(
            f"`{_cut(text)}`: GPUs are counted as slices x hosts x GPUs, `gpu:{chip.name}:4x1x8` "
            "for four hosts of 8."
        )
    if hosts * gpus > chip.largest or gpus > 8 or (hosts > 1 and chip.largest == 8):
        raise ValueError(
            f"`{_cut(text)}`: a slice is what NVLink joins, at most {chip.largest} "
            f"{chip.name.upper()}s"
            + (" of one host. " if chip.largest == 8 else ", 18 hosts of 4. ")
            + "Several hosts on the network are several slices: "
            f"`gpu:{chip.name}:{slices * hosts}x1x{min(gpus, 8)}`."
        )
    return "gpu", chip, (hosts, gpus), slices


def _unknown(text: Any, parts: list[str]) -> str:
    examples = [f"tpu:{name}:{'x'.join(['4'] * chip.torus)}" for name, chip in TPUS.items()]
    examples += [f"gpu:{name}:1x1x8" for name in GPUS] + ["cpu:8"]
    named = parts[1].lower().removeprefix("tpu").removeprefix("v") if len(parts) > 1 else ""
    near = [e for e in examples if named and named in e.split(":")[1]] or difflib.get_close_matches(
        str(text)[:80], examples, 3
    )
    suggestion = f"Near it: {', '.join(f'`{e}`' for e in near[:3])}. " if near else ""
    return (
        f"`{_cut(text)}` is no target. {suggestion}"
        f"There are {', '.join(f'`tpu:{name}`' for name in TPUS)} by the shape of a slice "
        "(`tpu:v5e:16x16`, `tpu:v5p:4x4x8:slices=2`), "
        f"{', '.join(f'`gpu:{name}`' for name in GPUS)} by slices x hosts x GPUs "
        "(`gpu:h200:4x1x8`), and `cpu:8`."
    )


@functools.cache
def _devices(target: Target) -> tuple[Any, ...]:
    shape = "x".join(map(str, target.shape))
    if target.platform == "cpu":
        return _simulated(target)
    _require(target)
    if target.platform == "gpu":
        hosts, gpus = target.shape
        # Of GPUs that are not there JAX knows the host and not the slice, so a slice is described
        # as one host.
        topology = f"{target.slices}x1x{hosts * gpus}"
        options = {"target_config": target.chip.description, "topology": topology}
        with quietly():
            try:
                found = topologies.get_topology_desc(
                    platform="cuda", topology_name=target.chip.name, **options
                )
            except NotImplementedError as error:
                raise ValueError(
                    f"`{target}`: JAX has not loaded its CUDA plugin, which without a GPU it does "
                    'only where it is told to use the CPU: `jax.config.update("jax_platforms", '
                    '"cpu")` before its first use, `sl.simulate_devices(...)`, or plan from the '
                    "command line."
                ) from error
            return tuple(found.devices)
    name = f"{'tpu7x' if target.chip.name == '7x' else target.chip.name}:{shape}"
    options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
    if target.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as v4 is run
    if any(size % 2 for size in target.shape[:2]):
        options["chips_per_host_bounds"] = (1, 1, 1)
    with quietly():
        try:
            return tuple(
                topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
            )
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"`{target}`: the TPU compiler knows no such slice ({str(error).splitlines()[0]})"
            ) from error


def _simulated(target: Target) -> tuple[Any, ...]:
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
    module = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}[target.platform]
    if not installed(module):
        raise ModuleNotFoundError(
            f"The compiler for `{target}` is not installed (`{module}`): "
            f'pip install "shardlib[{target.platform}-plan]"', name=module,
        )  # fmt: skip


def installed(module: str) -> bool:
    """Whether a module could be imported; nothing is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


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
    """Run a compiler without its noise: what the process writes to standard error goes into a file,
    whose path this gives.
    """
    with _ONE_AT_A_TIME, _into_a_file() as path:
        yield path


_ONE_AT_A_TIME = threading.RLock()  # standard error and the environment are of the whole process


@contextlib.contextmanager
def _into_a_file() -> Iterator[Path]:
    before = {name: os.environ.get(name) for name in COMPILE_ONLY}
    os.environ.update({name: value for name, value in COMPILE_ONLY.items() if before[name] is None})
    with tempfile.TemporaryDirectory(prefix="shardlib-") as folder:
        path = Path(folder) / "stderr.txt"
        try:
            kept = os.dup(2)
        except OSError:  # a process may have closed it
            kept = os.open(os.devnull, os.O_WRONLY)
        try:
            with path.open("wb") as noise:
                os.dup2(noise.fileno(), 2)
            yield path
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
