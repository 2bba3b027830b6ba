"""Meshes of machines that are not there, for tests that compile and never run."""

import functools

import jax
from jax.experimental import topologies

import shardlib as sl

# What XLA's GPU compiler asks about a GPU; an H200, as NVIDIA describes it.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""
# Without a GPU nothing can be timed, so kernels are chosen by default.
GPU_OPTIONS = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False"}


def mesh_on(platform, shape):
    """A mesh on `"cpu"`, on TPUs (`"v5e:2x4"`), or on GPUs (`"h200:1x1x8"`: slices x hosts x GPUs)."""
    return sl.make_mesh(shape, devices=devices_of(platform))


@functools.cache
def devices_of(platform, **options):
    if platform == "cpu":
        return jax.devices("cpu")
    kind, topology = platform.split(":")
    if kind == "h200":
        options |= {"target_config": H200, "topology": topology}
        return topologies.get_topology_desc(platform="cuda", topology_name=kind, **options).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=platform, **options).devices


def compile_for(mesh, lowered):
    """The program for the machine that a mesh is on."""
    on_gpu = mesh.devices.flat[0].platform in ("cuda", "gpu")
    return lowered.compile(compiler_options=GPU_OPTIONS if on_gpu else None)
