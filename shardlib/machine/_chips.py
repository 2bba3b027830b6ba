"""Datasheets: what one device of a machine does in a second, holds, and sends.

Figures are those of one JAX device, which on v3 is a core and on 7x a half of a chip, elsewhere a
chip or a GPU; FLOP/s are dense. Where vendors say less than one needs (a link's share of a chip's
bandwidth, the network between slices), the figures are those of "How to Scale Your Model"
(jax-ml.github.io/scaling-book), marked `book`.
"""

import math
from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """The datasheet of a device.

    Bytes and bytes per second are of one JAX device, and so are FLOP/s, which are dense. Where a
    device has no such thing, a simulated one for example, figures are infinite or nan.

    - `name`: as targets name it, such as `v5e` or `h200`.
    - `kind`: as JAX names the device, such as `TPU v5 lite`.
    - `flops`: per second, by dtype; of `f32` what a product in JAX's default precision reaches.
    - `hbm_bytes`: the memory of the device.
    - `usable_bytes`: what a program may take of it.
    - `hbm_bandwidth`: bytes per second of that memory.
    - `link_bandwidth`: bytes per second, one way, of one link of a TPU's torus, or of all of a
      GPU's NVLink.
    - `slow_bandwidth`: bytes per second, one way, of the device's share of the network between
      slices.
    - `devices`: JAX devices of one chip.
    - `torus`: dims of the torus that its links form; 0 where a switch joins all.
    - `largest`: chips of the largest slice.
    - `description`: of a GPU, as its compiler reads it.
    - `host_bytes`: the device's share of the memory of its host; None where no public figure was
      found.
    - `host_bandwidth`: bytes per second, one way, between the device and its host; None where
      nobody says.
    """

    name: str
    kind: str
    flops: dict[str, float]
    hbm_bytes: float
    usable_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    slow_bandwidth: float
    devices: int = 1
    torus: int = 0
    largest: int = 8
    description: str = field(default="", repr=False)
    host_bytes: float | None = None
    host_bandwidth: float | None = None


@dataclass(frozen=True)
class _Gpu:
    """The hardware of a GPU, as the CUDA compiler needs to know it to compile without one.

    Numbers are what XLA reads off such a GPU: memory and caches in bytes, bandwidth in bytes per
    second, the clock in GHz.
    """

    name: str
    major: int  # of its compute capability
    cores: int  # streaming multiprocessors
    fpus: int  # of each core
    clock: float
    memory: int
    bandwidth: int
    cache: int  # level 2
    shared: int  # memory that the threads of a core share

    def description(self) -> str:
        """The description in XLA's own format, a text protocol buffer.

        The fields are those of openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb. What is
        not of this GPU is the same for all that there are datasheets of.
        """
        cache, memory = self.cache, self.memory
        # CUDA keeps 1 KiB of shared memory of each block for itself.
        return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared - 1024}
          shared_memory_per_core: {self.shared}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {self.bandwidth} l2_cache_size: {cache} device_memory_size: {memory}
          cuda_compute_capability {{ major: {self.major} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 13 minor: 0 }}
        device_description_str: "{self.name}"
        """


# TPUs: docs.cloud.google.com/tpu/docs/{v3,v4,v5e,v5p,v6e,tpu7x}, "System architecture", halved
# where two devices are a chip. A float32 product runs in bfloat16 by default. `usable_bytes` is
# what the compiler of libtpu 0.0.42 allows: "exceeds available HBM (15.75G)". Links and the slow
# network: book, "TPU specs"; where it has no figure, a comment. `host_bytes`: of v5e what a virtual
# machine gets ("VM types": 384 GB for eight chips), of v6e "DRAM per host" (1536 GiB for eight).
# `host_bandwidth`: book, "TPU specs": 15 GB/s of PCIe for a chip, 16 of v4 and 32 of v6e.
TPUS = {
    "v3": Chip(
        "v3", "TPU v3", {"bf16": 61.5e12, "f32": 61.5e12}, 16 * GIB, 15.48 * GIB, 0.45e12,
        link_bandwidth=100e9 / 2,  # book: 100e9 for a chip's link, which its two cores share
        slow_bandwidth=25e9 / 8,  # book, first edition: 25e9 for a host of four chips
        devices=2, torus=2, largest=1024,
    ),
    "v4": Chip(
        "v4", "TPU v4", {"bf16": 275e12, "f32": 275e12, "s8": 275e12}, 32 * GIB, 30.75 * GIB,
        1.2e12,
        link_bandwidth=45e9, slow_bandwidth=6.25e9, torus=3, largest=4096, host_bandwidth=16e9,
    ),
    "v5e": Chip(
        "v5e", "TPU v5 lite", {"bf16": 197e12, "f32": 197e12, "s8": 393e12}, 16 * GIB, 15.75 * GIB,
        0.819e12,
        link_bandwidth=45e9, slow_bandwidth=3.125e9, torus=2, largest=256, host_bytes=384e9 / 8,
        host_bandwidth=15e9,
    ),
    "v5p": Chip(
        "v5p", "TPU v5", {"bf16": 459e12, "f32": 459e12, "s8": 918e12}, 96 * GIB, 95.74 * GIB,
        2.765e12,
        link_bandwidth=90e9, slow_bandwidth=6.25e9, torus=3, largest=8960, host_bandwidth=15e9,
    ),
    "v6e": Chip(
        "v6e", "TPU v6 lite", {"bf16": 918e12, "f32": 918e12, "s8": 1836e12}, 32 * GIB,
        31.25 * GIB, 1.638e12,
        link_bandwidth=90e9, slow_bandwidth=12.5e9, torus=2, largest=256,
        host_bytes=1536 * GIB / 8, host_bandwidth=32e9,
    ),
    "7x": Chip(
        "7x", "TPU7x", {"bf16": 1153.5e12, "f32": 1153.5e12, "f8": 2307e12}, 96 * GIB, 94.75 * GIB,
        3.69e12,
        link_bandwidth=100e9 / 2,
        # 1,200 GB/s both ways over six links of a chip, which two devices share
        slow_bandwidth=12.5e9 / 2,  # 100 Gb/s of a chip
        devices=2, torus=3, largest=9216,
    ),
}  # fmt: skip

# GPUs: NVIDIA's datasheets of A100 (80 GB SXM), H100 and H200 (SXM), and B200 (HGX), dense. A
# float32 product runs in TF32. `hbm_bytes` is what the driver shows, as openxla/xla's specs have
# it; NVLink and the NIC of each GPU: book, "GPU specs" (18 links of 25 GB/s on Hopper, of 50 GB/s
# on Blackwell; 400 Gb/s), and NVIDIA's DGX A100 (12 links of 25; 200 Gb/s). JAX takes three
# quarters of the memory unless `XLA_PYTHON_CLIENT_MEM_FRACTION` says otherwise. `host_bytes`: of
# H100 and H200 the 2 TB of a host of eight, as results of MLPerf list them. `host_bandwidth`: half
# of what the datasheets say of PCIe, which is the sum of both directions. Memory, cache and the
# speed of the memory of an H200 are as its driver told XLA (driver 580.159, CUDA 13.0).
GPUS = {
    "a100": Chip(
        "a100", "NVIDIA A100-SXM4-80GB", {"bf16": 312e12, "f32": 156e12, "s8": 624e12},
        85100068864, 0.75 * 85100068864,
        2.039e12, link_bandwidth=300e9, slow_bandwidth=25e9, host_bandwidth=32e9,
        description=_Gpu(name="NVIDIA A100-SXM4-80GB", major=8, cores=108, fpus=64, clock=1.41,
            memory=85100068864, bandwidth=2039040000000, cache=41943040, shared=167936,
        ).description(),
    ),
    "h100": Chip(
        "h100", "NVIDIA H100 80GB HBM3", {"bf16": 989e12, "f32": 494.5e12, "s8": 1979e12,
        "f8": 1979e12}, 84942979072,
        0.75 * 84942979072, 3.35e12, link_bandwidth=450e9, slow_bandwidth=50e9, host_bytes=2e12 / 8,
        host_bandwidth=64e9,
        description=_Gpu(name="NVIDIA H100 80GB HBM3", major=9, cores=132, fpus=128, clock=1.98,
            memory=84942979072, bandwidth=3352320000000, cache=52428800, shared=233472,
        ).description(),
    ),
    "h200": Chip(
        "h200", "NVIDIA H200", {"bf16": 989e12, "f32": 494.5e12, "s8": 1979e12, "f8": 1979e12},
        150109880320,
        0.75 * 150109880320, 4.8e12, link_bandwidth=450e9, slow_bandwidth=50e9, host_bytes=2e12 / 8,
        host_bandwidth=64e9,
        description=_Gpu(name="NVIDIA H200", major=9, cores=132, fpus=128, clock=1.98,
            memory=150109880320, bandwidth=4814304000000, cache=62914560, shared=233472,
        ).description(),
    ),
    "b200": Chip(
        "b200", "NVIDIA B200", {"bf16": 2250e12, "f32": 1125e12, "s8": 4500e12, "f8": 4500e12,
        "f4": 9000e12},
        191514411008, 0.75 * 191514411008, 8.0e12, link_bandwidth=900e9, slow_bandwidth=50e9,
        largest=72, host_bandwidth=64e9,
        description=_Gpu(name="NVIDIA B200", major=10, cores=148, fpus=128, clock=1.965,
            memory=191514411008, bandwidth=7672320000000, cache=132644864, shared=233472,
        ).description(),
    ),
}  # fmt: skip

# A simulated device has no memory of its own and no network: what it is asked about is shapes and
# collectives.
CPU = Chip("cpu", "cpu", {}, math.inf, math.inf, math.nan, math.nan, math.nan, largest=4096)

CHIPS = TPUS | GPUS | {"cpu": CPU}


def chip_of(kind: str) -> Chip | None:
    """The datasheet of a device, by what JAX calls its kind.

    None where there is no datasheet, or the device is no accelerator.

    >>> chip_of("TPU v5 lite").name
    'v5e'
    """
    for chip in CHIPS.values():
        if chip.kind == kind and chip.flops:
            return chip
    return None
