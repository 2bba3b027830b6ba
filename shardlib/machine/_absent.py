"""Devices that are not there: clients that compile for them and run nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

# Nothing can be timed on a GPU that is not there, so kernels are chosen by default.
OPTIONS_FOR_GPUS: dict[str, str | bool | int] = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}


def options_for(device: Any) -> dict[str, str | bool | int]:
    """The options of a compiler that has no device to try anything on; none where it has one."""
    is_gpu = device.platform in ("gpu", "cuda")  # JAX calls NVIDIA's platform by either name
    return dict(OPTIONS_FOR_GPUS) if is_gpu and is_absent(device) else {}


def is_absent(device: Any) -> bool:
    """Whether programs for this device can be compiled only."""
    # Nothing but its type tells such a client.
    return type(getattr(device, "client", None)).__name__.startswith("CompileOnly")


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Turn JAX's compilation cache on disk off, and afterwards on again if it was on.

    JAX writes programs for absent devices into that cache, cannot read them back, and warns about
    each. For any device, a program that comes from the cache makes the compiler write no files.
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether to use it was decided at its first use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
