"""Meshes of machines that are not there, for tests that compile and never run."""

import concurrent.futures
import functools
import multiprocessing

import jax
from jax.experimental import topologies

import shardlib as sl


def mesh_on(platform, shape):
    """A mesh on `"cpu"`, on TPUs (`"v5e:2x4"`), or on GPUs (`"h200:1x1x8"`: slices x hosts x
    GPUs).
    """
    return sl.make_mesh(shape, devices=devices_of(platform))


@functools.cache
def devices_of(platform, **options):
    if platform == "cpu":
        return jax.devices("cpu")
    if platform.startswith("h200"):
        return sl.Target(f"gpu:{platform}").devices
    return topologies.get_topology_desc(platform="tpu", topology_name=platform, **options).devices


def compile_for(mesh, lowered):
    """The program for the machine that a mesh is on."""
    on_gpu = mesh.devices.flat[0].platform in ("cuda", "gpu")
    return lowered.compile(
        compiler_options=sl.Target("gpu:h200:1x1x8").compiler_options if on_gpu else None
    )


def on_its_own(target, function, *args):
    """What a function gives for a machine; GPUs of each kind have a process of their own.

    Mosaic assembles all kernels of a process for the generation of GPUs that it has met first
    there.
    """
    if target.startswith("tpu"):
        return function(target, *args)
    return _process(target).submit(function, target, *args).result()


@functools.cache
def _process(target):
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
