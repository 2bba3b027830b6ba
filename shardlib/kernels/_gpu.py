"""What kernels for GPUs share: which GPUs they are for, how they are called, the simulator.

They are written in Pallas's Mosaic GPU, whose threads are warpgroups: 128 lanes in step. Arrays are
in the GPU's memory until a kernel loads them to registers or copies them to shared memory.
"""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._choice import Task
from shardlib.kernels._shards import as_varying, on_one_device, varying

# Up to JAX 0.10 `plgpu.load` requires an index besides the reference; an empty one loads all of it.
_LOAD_PARAMETERS = inspect.signature(plgpu.load).parameters
INDEX: list[Any] = []
if "idx" in _LOAD_PARAMETERS and _LOAD_PARAMETERS["idx"].default is inspect.Parameter.empty:
    INDEX = [()]

# From JAX 0.12 on, an assignment takes only stores in which the lanes of a warpgroup write
# neighbouring numbers; this function takes any. It is None before, where an assignment takes any.
STORE: Any = getattr(plgpu, "store", None)

# How the names of a generation's devices begin.
GENERATIONS = {
    "hopper": ("NVIDIA H1", "NVIDIA H2", "NVIDIA H8", "NVIDIA GH"),
    "blackwell": ("NVIDIA B", "NVIDIA GB2", "NVIDIA GB3"),
}


def generation(kind: str) -> str:
    """The generation of a GPU, by its kind of device; all other devices simulate a Hopper GPU."""
    for name, prefixes in GENERATIONS.items():
        if kind.startswith(prefixes):
            return name
    return "hopper"


def refuses_device(task: Task) -> str | None:
    """Why kernels do not run on a task's GPU; None if they do.

    It is None too where the device is no GPU, for which a simulator may run them.
    """
    assert task.device is not None
    kind = task.device.kind
    known = any(kind.startswith(prefixes) for prefixes in GENERATIONS.values())
    if known or task.device.platform != "gpu":
        return None
    return f"is for GPUs of the generations Hopper and Blackwell, and this is {kind}"


def call(
    body: Any, name: str, outs: Any, simulated: bool, approx_math: bool = False, **options: Any
) -> Any:
    """A function of arrays that runs a kernel, compiled or simulated.

    The results vary over the manual axes that any operand varies over. The simulator finds races,
    and memory that was never written.

    Args:
        body: called with references to operands, results and scratch.
        name: of the kernel, which profiles show.
        outs: the shapes and dtypes of the results.
        simulated: whether an interpreter runs the kernel.
        approx_math: whether exponentials may be those of the GPU's own unit, exact to some 22 bits,
            and hyperbolic tangents, exact to 11.
        options: further ones of `plgpu.kernel`, such as the grid.
    """
    compiler = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=approx_math
    )
    if simulated:
        options["interpret"] = _simulator()
    kernel = plgpu.kernel(
        body, out_type=outs, kernel_name=name, compiler_params=compiler, **options
    )

    def called(*operands: jax.Array) -> Any:
        # A kernel loses over which axes its operands vary, and `shard_map` checks that of results.
        axes = frozenset().union(*map(varying, operands))
        return jax.tree.map(lambda y: as_varying(y, axes), kernel(*operands))

    return called


def _simulator() -> Any:
    """The parameters of JAX's simulator of GPUs, which needs JAX 0.12 and a single device."""
    simulator = getattr(plgpu, "InterpretGPUParams", None)
    if simulator is None:
        raise ValueError(f"JAX {jax.__version__} has no public simulator of GPUs; 0.12 has.")
    if not on_one_device():
        raise ValueError(
            "A kernel for GPUs is simulated on one device, and this is traced for several. Those "
            "for TPUs can be on several."
        )
    return simulator(detect_races=True)
