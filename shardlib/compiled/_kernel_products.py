"""Which custom calls of a compiled program multiply matrices.

Of a kernel the program says what it takes and gives. What it does stands in the settings of its
call, as a module of MLIR in bytecode, in which the names of operations are plain text:

    %kernel = f32[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call",
        backend_config={"custom_call_config":{"body":"TUzvUgFNTElSMjM..."}}
"""

import base64
import re

# What a product of matrices is called in a body. The kernels of Mosaic have instructions of the
# matrix unit on GPUs, those of Triton an operation of its dialect.
_ON_TPU = (b"tpu.matmul", b"vector.contract")
_ON_GPU = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
# Names end with a zero, which the program's text has as an escape.
_IN_TRITON = (r"\00dot\00", r"\00dot_scaled\00")


def call_multiplies(attributes: str) -> bool:
    """Whether a custom call with these attributes multiplies matrices.

    Bodies are searched and not parsed: each version of JAX writes another version of dialects that
    only its own bindings read, and these are private. Of calls that are neither kernels nor of
    NVIDIA's libraries nothing is known, and the answer is no.
    """
    found = re.search(r'custom_call_target="([^"]*)"', attributes)
    target = found[1] if found else ""
    if target == "tpu_custom_call":
        body = _tpu_body(attributes)
        return any(name in body for name in _ON_TPU)
    if target.startswith("mosaic_gpu"):
        return any(name in attributes for name in _ON_GPU)
    if target == "__gpu$xla.gpu.triton":
        return any(name in attributes for name in _IN_TRITON)
    # Products, convolutions and attention, and no norms.
    return target.startswith(("__cublas", "__cudnn$")) and target != "__cudnn$norm"


def _tpu_body(attributes: str) -> bytes:
    """The body of a kernel for TPUs, which is in base64."""
    found = re.search(r'"body":"([^"]*)"', attributes)
    return base64.b64decode(found[1]) if found else b""
