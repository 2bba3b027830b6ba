"""What kernels for GPUs share: which GPUs they are for, how they are called, the simulator.

They are written in Pallas's Mosaic GPU, in which a thread is a warpgroup: 128 lanes in step.
"""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._choice import Task
from shardlib.kernels._shards import alone, as_varying, varying

# `plgpu.load` takes an index of its own up to JAX 0.10.
_OF_LOAD = inspect.signature(plgpu.load).parameters
INDEX: list[Any] = (
    [()] if "idx" in _OF_LOAD and _OF_LOAD["idx"].default is inspect.Parameter.empty else []
)

# A store to places that lanes do not share a sector of is to be asked for from JAX 0.12 on; before,
# any is taken.
STORE: Any = getattr(plgpu, "store", None)

GENERATIONS = {
    "hopper": ("NVIDIA H1", "NVIDIA H2", "NVIDIA H8", "NVIDIA GH"),
    "blackwell": ("NVIDIA B", "NVIDIA GB2", "NVIDIA GB3"),
}  # by names of devices


def generation(kind: str) -> str:
    """Of which generation a GPU is; what is no GPU simulates Hopper's."""
    return next((name for name, kinds in GENERATIONS.items() if kind.startswith(kinds)), "hopper")


def refuses_device(task: Task) -> str | None:
    """Why a kernel is not for a GPU, if it is not."""
    assert task.device is not None
    known = any(task.device.kind.startswith(kinds) for kinds in GENERATIONS.values())
    if known or task.device.platform != "gpu":
        return None
    return f"is for GPUs of the generations Hopper and Blackwell, and this is {task.device.kind}"


def call(
    body: Any, name: str, outs: Any, simulated: bool, rough: bool = False, **options: Any
) -> Any:
    """A kernel by its name, compiled, or simulated: that tells races, and memory that was never
    written is nan.

    Its results are known to differ between devices as what it is given does. `rough` takes
    exponentials from the GPU's own unit, exact to some 22 bits, and hyperbolic tangents, to 11.
    """
    compiler = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=rough
    )
    if simulated:
        options["interpret"] = _simulator()
    kernel = plgpu.kernel(
        body, out_type=outs, kernel_name=name, compiler_params=compiler, **options
    )

    def called(*operands: jax.Array) -> Any:
        axes = frozenset().union(*map(varying, operands))
        return jax.tree.map(lambda y: as_varying(y, axes), kernel(*operands))

    return called


def _simulator() -> Any:
    if not (simulator := getattr(plgpu, "InterpretGPUParams", None)) or not alone():
        raise ValueError(
            "A kernel for GPUs is simulated on one device, and this is traced for several. Those "
            "for TPUs can be on several."
            if simulator
            else f"JAX {jax.__version__} has no public simulator of GPUs; 0.12 has."
        )
    return simulator(detect_races=True)
