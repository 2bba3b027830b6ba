"""Machines to plan for: what they are made of, and their devices to compile for, which need not be there.

Figures are those of one JAX device, which on v3 is a core and on 7x a half of a chip, elsewhere a chip or a GPU; FLOP/s
are dense. Where vendors say less than one needs (a link's share of a chip's bandwidth, the network between slices), the
figures are those of "How to Scale Your Model" (jax-ml.github.io/scaling-book), marked `book`.
"""

import contextlib
import difflib
import functools
import importlib.util
import math
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from shardlib._mesh import make_mesh, parse_axes

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """The datasheet of a device."""

    name: str
    kind: str  # as JAX names the device
    flops: dict[str, float]  # per second, by dtype; of "f32" what a product in JAX's default precision reaches
    hbm_bytes: float
    usable_bytes: float  # what a program may take of it
    hbm_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second, one way: of one link of a TPU's torus, or all of a GPU's NVLink
    slow_bandwidth: float  # bytes per second, one way: this device's share of the network between slices
    devices: int = 1  # JAX devices of one chip
    torus: int = 0  # dims of the torus its links form; none where a switch joins all
    largest: int = 8  # chips of the largest slice
    description: str = field(default="", repr=False)  # of a GPU, as its compiler reads it


def _gpu(
    name: str, major: int, cores: int, fpus: int, clock: float, memory: int, bandwidth: int, cache: int, shared: int
) -> str:
    # The fields of openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb, which XLA reads off such a GPU.
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024} shared_memory_per_core: {shared}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {bandwidth} l2_cache_size: {cache} device_memory_size: {memory}
          cuda_compute_capability {{ major: {major} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 13 minor: 0 }}
        device_description_str: "{name}"
        """


# TPUs: docs.cloud.google.com/tpu/docs/{v3,v4,v5e,v5p,v6e,tpu7x}, "System architecture", halved where two devices are a
# chip. A float32 product runs in bfloat16 by default. `usable_bytes` is what the compiler of libtpu 0.0.42 allows: "exceeds
# available HBM (15.75G)". Links and the slow network: book, "TPU specs"; where it has no figure, a comment.
_TPUS = {
    "v3": Chip(
        "v3", "TPU v3", {"bf16": 61.5e12, "f32": 61.5e12}, 16 * GIB, 15.48 * GIB, 0.45e12,
        link_bandwidth=100e9 / 2,  # book: 100e9 for a chip's link, which its two cores share
        slow_bandwidth=25e9 / 8,  # book, first edition: 25e9 for a host of four chips
        devices=2, torus=2, largest=1024,
    ),
    "v4": Chip(
        "v4", "TPU v4", {"bf16": 275e12, "f32": 275e12, "s8": 275e12}, 32 * GIB, 30.75 * GIB, 1.2e12,
        link_bandwidth=45e9, slow_bandwidth=6.25e9, torus=3, largest=4096,
    ),
    "v5e": Chip(
        "v5e", "TPU v5 lite", {"bf16": 197e12, "f32": 197e12, "s8": 393e12}, 16 * GIB, 15.75 * GIB, 0.819e12,
        link_bandwidth=45e9, slow_bandwidth=3.125e9, torus=2, largest=256,
    ),
    "v5p": Chip(
        "v5p", "TPU v5", {"bf16": 459e12, "f32": 459e12, "s8": 918e12}, 96 * GIB, 95.74 * GIB, 2.765e12,
        link_bandwidth=90e9, slow_bandwidth=6.25e9, torus=3, largest=8960,
    ),
    "v6e": Chip(
        "v6e", "TPU v6 lite", {"bf16": 918e12, "f32": 918e12, "s8": 1836e12}, 32 * GIB, 31.25 * GIB, 1.638e12,
        link_bandwidth=90e9, slow_bandwidth=12.5e9, torus=2, largest=256,
    ),
    "7x": Chip(
        "7x", "TPU7x", {"bf16": 1153.5e12, "f32": 1153.5e12, "f8": 2307e12}, 96 * GIB, 94.75 * GIB, 3.69e12,
        link_bandwidth=100e9 / 2,  # 1,200 GB/s both ways over six links of a chip, which two devices share
        slow_bandwidth=12.5e9 / 2,  # 100 Gb/s of a chip
        devices=2, torus=3, largest=9216,
    ),
}  # fmt: skip

# GPUs: NVIDIA's datasheets of A100 (80 GB SXM), H100 and H200 (SXM), and B200 (HGX), dense. A float32 product runs in TF32.
# `hbm_bytes` is what the driver shows, as openxla/xla's specs have it; NVLink and the NIC of each GPU: book, "GPU specs"
# (18 links of 25 GB/s on Hopper, of 50 GB/s on Blackwell; 400 Gb/s), and NVIDIA's DGX A100 (12 links of 25; 200 Gb/s).
# JAX takes three quarters of the memory unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise.
_GPUS = {
    "a100": Chip(
        "a100", "NVIDIA A100-SXM4-80GB", {"bf16": 312e12, "f32": 156e12, "s8": 624e12}, 85100068864, 0.75 * 85100068864,
        2.039e12, link_bandwidth=300e9, slow_bandwidth=25e9,
        description=_gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 85100068864, 2039040000000, 41943040, 167936),
    ),
    "h100": Chip(
        "h100", "NVIDIA H100 80GB HBM3", {"bf16": 989e12, "f32": 494.5e12, "s8": 1979e12, "f8": 1979e12}, 84942979072,
        0.75 * 84942979072, 3.35e12, link_bandwidth=450e9, slow_bandwidth=50e9,
        description=_gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 84942979072, 3352320000000, 52428800, 233472),
    ),
    "h200": Chip(
        "h200", "NVIDIA H200", {"bf16": 989e12, "f32": 494.5e12, "s8": 1979e12, "f8": 1979e12}, 151397597184,
        0.75 * 151397597184, 4.8e12, link_bandwidth=450e9, slow_bandwidth=50e9,
        description=_gpu("NVIDIA H200", 9, 132, 128, 1.98, 151397597184, 4800000000000, 52428800, 233472),
    ),
    "b200": Chip(
        "b200", "NVIDIA B200", {"bf16": 2250e12, "f32": 1125e12, "s8": 4500e12, "f8": 4500e12, "f4": 9000e12},
        191514411008, 0.75 * 191514411008, 8.0e12, link_bandwidth=900e9, slow_bandwidth=50e9, largest=72,
        description=_gpu("NVIDIA B200", 10, 148, 128, 1.965, 191514411008, 7672320000000, 132644864, 233472),
    ),
}  # fmt: skip

# A simulated device has no memory of its own and no network: what it is asked about is shapes and collectives.
_CPU = Chip("cpu", "cpu", {}, math.inf, math.inf, math.nan, math.nan, math.nan, largest=4096)

CHIPS = _TPUS | _GPUS | {"cpu": _CPU}

Platform = Literal["tpu", "gpu", "cpu"]


@dataclass(frozen=True)
class Target:
    """A machine to plan for, which need not be there: `tpu:v5e:16x16`, `gpu:h200:64x1x8`, `cpu:8`.

    - `tpu:GENERATION:SHAPE`, chips along each dim of the torus; several slices as `tpu:v5e:16x16:slices=4`.
    - `gpu:MODEL:SLICESxHOSTSxGPUS`. A slice is what NVLink joins: one host of up to eight GPUs, or, of B200s, up to 18
      hosts of four.
    - `cpu:COUNT`, simulated devices.

    >>> Target("tpu:v5e:4x4").size, Target("gpu:h200:64x1x8").slices
    (16, 64)
    """

    text: str

    def __post_init__(self) -> None:
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
        """The devices, for compiling alone. Needs the compiler: `shardlib[tpu-plan]` or `shardlib[gpu-plan]`."""
        return _devices(self)

    def mesh(self, shape: str = "", *, dcn: str = "") -> Mesh:
        """A mesh of these devices, as `make_mesh` lays it out.

        >>> Target("cpu:8").mesh("data=2,model=4").devices.shape
        (2, 4)
        """
        named = parse_axes(shape)
        if named and -1 not in named.values() and (asked := math.prod(named.values())) != self.size:
            spelt = ",".join(f"{name}={size}" for name, size in named.items())
            raise ValueError(
                f"The mesh `{spelt}` is {asked} devices, and `{self}` has {self.size}. Choose sizes whose product is "
                f"{self.size}, or make one of them -1."
            )
        return make_mesh(shape, dcn=dcn, devices=self.devices)

    @property
    def compiler_options(self) -> dict[str, str | bool | int]:
        """Options for a compiler that has no device to try anything on."""
        if self.platform == "gpu":  # nothing can be timed, so kernels are chosen by default
            return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
        return {}

    @functools.cached_property
    def _parsed(self) -> tuple[Platform, Chip, tuple[int, ...], int]:
        return _parse(self.text)


def _parse(text: str) -> tuple[Platform, Chip, tuple[int, ...], int]:
    parts = text.split(":") if isinstance(text, str) else []
    if (
        parts[:1] == ["cpu"]
        and len(parts) == 2
        and re.fullmatch("[0-9]+", parts[1])
        and 0 < int(parts[1]) <= _CPU.largest
    ):
        return "cpu", _CPU, (int(parts[1]),), 1
    models = {"tpu": _TPUS, "gpu": _GPUS}.get(parts[0] if parts else "", {})
    if len(parts) not in (3, 4) or parts[1] not in models or not re.fullmatch("[0-9]+(x[0-9]+)*", parts[2]):
        raise ValueError(_unknown(text, parts))
    chip, sizes = models[parts[1]], tuple(map(int, parts[2].split("x")))
    return (_tpu if parts[0] == "tpu" else _gpus)(text, chip, sizes, parts[3:])


def _tpu(text: str, chip: Chip, shape: tuple[int, ...], more: list[str]) -> tuple[Platform, Chip, tuple[int, ...], int]:
    match = re.fullmatch("slices=([1-9][0-9]*)", more[0]) if more else None
    if more and not match:
        raise ValueError(f"`{text}`: several slices are written `{':'.join(text.split(':')[:3])}:slices=4`.")
    fitting = all(size in (1, 2) or (size and size % 4 == 0) for size in shape)
    if len(shape) != chip.torus or not fitting or math.prod(shape) > chip.largest:
        example = "x".join(["4"] * chip.torus)
        raise ValueError(
            f"`{text}`: a slice of {chip.name} has {chip.torus} dims, each 1, 2 or a multiple of 4, and at most "
            f"{chip.largest:,} chips, as in "
            f"`tpu:{chip.name}:{example}`; larger machines are several slices, `tpu:{chip.name}:{example}:slices=2`."
        )
    return "tpu", chip, shape, int(match[1]) if match else 1


def _gpus(
    text: str, chip: Chip, sizes: tuple[int, ...], more: list[str]
) -> tuple[Platform, Chip, tuple[int, ...], int]:
    slices, hosts, gpus = sizes if len(sizes) == 3 else (0, 0, 0)
    if more or 0 in (slices, hosts, gpus):
        raise ValueError(
            f"`{text}`: GPUs are counted as slices x hosts x GPUs, `gpu:{chip.name}:4x1x8` for four hosts of 8."
        )
    if hosts * gpus > chip.largest or gpus > 8 or (hosts > 1 and chip.largest == 8):
        raise ValueError(
            f"`{text}`: a slice is what NVLink joins, at most {chip.largest} {chip.name.upper()}s"
            + (" of one host. " if chip.largest == 8 else ", 18 hosts of 4. ")
            + f"Several hosts on the network are several slices: `gpu:{chip.name}:{slices * hosts}x1x{min(gpus, 8)}`."
        )
    return "gpu", chip, (hosts, gpus), slices


def _unknown(text: Any, parts: list[str]) -> str:
    examples = [f"tpu:{name}:{'x'.join(['4'] * chip.torus)}" for name, chip in _TPUS.items()]
    examples += [f"gpu:{name}:1x1x8" for name in _GPUS] + ["cpu:8"]
    named = parts[1].lower().removeprefix("tpu").removeprefix("v") if len(parts) > 1 else ""
    near = [e for e in examples if named and named in e.split(":")[1]] or difflib.get_close_matches(
        str(text), examples, 3
    )
    return (
        f"`{text}` is no target. " + (f"Near it: {', '.join(f'`{e}`' for e in near[:3])}. " if near else "")
        + f"There are {', '.join(f'`tpu:{name}`' for name in _TPUS)} by the shape of a slice "
        f"(`tpu:v5e:16x16`, `tpu:v5p:4x4x8:slices=2`), {', '.join(f'`gpu:{name}`' for name in _GPUS)} by "
        "slices x hosts x GPUs (`gpu:h200:4x1x8`), and `cpu:8`."
    )  # fmt: skip


@functools.cache
def _devices(target: Target) -> tuple[Any, ...]:
    shape = "x".join(map(str, target.shape))
    if target.platform == "cpu":
        return _simulated(target)
    _require(target)
    if target.platform == "gpu":
        hosts, gpus = target.shape
        # Of GPUs that are not there JAX knows the host and not the slice, so a slice is described as one host.
        topology = f"{target.slices}x1x{hosts * gpus}"
        options = {"target_config": target.chip.description, "topology": topology}
        with quietly():
            try:
                found = topologies.get_topology_desc(platform="cuda", topology_name=target.chip.name, **options)
            except NotImplementedError as error:
                raise ValueError(
                    f"`{target}`: JAX has not loaded its CUDA plugin, which without a GPU it does only where it is told to use "
                    'the CPU: `jax.config.update("jax_platforms", "cpu")` before its first use, `sl.simulate_devices(...)`, '
                    "or plan from the command line."
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
            return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"`{target}`: the TPU compiler knows no such slice ({str(error).splitlines()[0]})"
            ) from error


def _simulated(target: Target) -> tuple[Any, ...]:
    devices = jax.devices("cpu")
    if len(devices) < target.size:
        raise ValueError(
            f"`{target}` needs {target.size} simulated devices, and JAX sees {len(devices)}: call "
            f"`sl.simulate_devices({target.size})` before JAX's first use, or plan from the command line."
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
# What makes the TPU compiler log its own account of memory; for processes of our own, since it stays so.
LOUD = {"TPU_STDERR_LOG_LEVEL": "0", "TPU_MIN_LOG_LEVEL": "0"}


@contextlib.contextmanager
def quietly() -> Iterator[Path]:
    """Run a compiler without its noise: what the process writes to standard error goes into a file, whose path this gives."""
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
