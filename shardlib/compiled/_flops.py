"""Floating-point operations of the products in a compiled program, read from its text.

A product is a `dot` or a `convolution`, in a fusion or not, and on GPUs a call of cuBLAS, which has
the dims that are contracted in its settings. The compiler for TPUs writes most
products of matrices as convolutions: dims of a batch become dims that a window slides over, with
padding, dilation and strides such that each place of the window meets one element. So the places
count that meet an element, and not those that meet padding.

    %conv = f32[8,128]{1,0} convolution(%x, %w), window={size=2 pad=1_1 rhs_reversal=1},
        dim_labels=0bf_0io->0bf
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from shardlib.compiled._hlo import Instruction, Program, Scope, arrays, numbers, text_of

# An element of a convolution's window is written where it differs from this.
_PLAIN = {"stride": 1, "lhs_dilate": 1, "rhs_dilate": 1}


def compiled_flops(compiled: Any) -> int:
    """What a device multiplies and adds in one run of a program, outside of kernels.

    A multiplication and an addition count each. Loops count as often as they run where loads are
    even; an error names another loop with products whose length the program does not tell. All
    branches count, and those of a pipeline's passes as often as a stage has such a pass.

    Args:
        compiled: a compiled program, or its text.
    """
    program = Program(text_of("compiled_flops", "compiled", compiled))
    total = 0
    for scope, made, run in program.walk():
        if not _is_product(made) or not run.times:
            continue
        if not run.known:
            raise ValueError(
                f"`{made.name}` in `{scope.name}` is a product in a loop whose length the program "
                "does not tell."
            )
        total += run.times * _OF[made.opcode](scope, made)
    return total


def _of_dot(scope: Scope, made: Instruction) -> int:
    """A product of two arrays over the dims that are contracted."""
    (_, shape), *_ = arrays(scope.instructions[made.operands[0]].result)
    contracted = numbers(made.get(r"lhs_contracting_dims=\{([\d,]*)\}"))
    return 2 * _size(made) * math.prod(shape[dim] for dim in contracted)


def _of_convolution(scope: Scope, made: Instruction) -> int:
    """A convolution: for each pair of examples and features, the places that meet an element."""
    of_input, of_kernel, of_output = _labels(made)
    input_, kernel = (_shape(scope.instructions[name]) for name in made.operands[:2])
    output = _shape(made)
    features = input_[of_input.index("f")] // _groups(made, "feature")
    examples = input_[of_input.index("b")] // _groups(made, "batch")
    places = 1
    for dim, window in _windows(made).items():
        sizes = (input_[of_input.index(dim)], output[of_output.index(dim)])
        assert window.size == kernel[of_kernel.index(dim)]
        places *= window.meetings(*sizes)
    return 2 * features * examples * output[of_output.index("f")] * places


def _of_cublas(scope: Scope, made: Instruction) -> int:
    """A call of cuBLAS: its result, and the room that it works in, come as a tuple."""
    (_, shape), *_ = arrays(scope.instructions[made.operands[0]].result)
    listed = made.get(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    return 2 * _size(made) * math.prod(shape[int(dim)] for dim in re.findall(r"\d+", listed))


_OF = {"dot": _of_dot, "convolution": _of_convolution, "custom-call": _of_cublas}


def _is_product(made: Instruction) -> bool:
    """Whether an instruction multiplies matrices; of other calls nothing is known."""
    if made.opcode == "custom-call":
        return "__cublas" in made.get(r'custom_call_target="([^"]*)"')
    return made.opcode in _OF


@dataclass(frozen=True)
class _Window:
    """What a convolution's window does along one dim."""

    size: int
    stride: int
    before: int  # elements of padding; less than none cuts off elements
    input_dilation: int
    window_dilation: int

    def meetings(self, input_: int, output: int) -> int:
        """How often an element of the window meets one of the input, at all its places."""
        count = 0
        dilated = (input_ - 1) * self.input_dilation + 1
        for element in range(self.size):
            # Of an element, its places in the dilated input are a stride apart.
            first = element * self.window_dilation - self.before
            count += _on_elements(first, self.stride, output, dilated, self.input_dilation)
        return count


def _on_elements(first: int, stride: int, count: int, length: int, dilation: int) -> int:
    """How many of `count` places, a stride apart, are elements of an array with gaps.

    Args:
        first: the first of the places.
        stride: between two places.
        count: of the places.
        length: of the array with its gaps.
        dilation: each so many-th place of the array is an element.
    """
    # The places within the array are those from `begin` to `end`.
    begin = max(0, -(first // stride))
    end = min(count, (length - 1 - first) // stride + 1)
    if begin >= end:
        return 0
    # Whether a place is an element repeats after so many places.
    period = dilation // math.gcd(dilation, stride)
    found = 0
    for place in range(begin, min(begin + period, end)):
        if (first + place * stride) % dilation == 0:
            found += (end - 1 - place) // period + 1
    return found


def _windows(made: Instruction) -> dict[str, _Window]:
    """The window of a convolution, by the digits that its labels give the dims."""
    written = made.get(r"\bwindow=\{([^}]*)\}")
    fields = dict(re.findall(r"(\w+)=(\S+)", written))
    if "size" not in fields:
        return {}
    windows = {}
    for number, size in enumerate(_each(fields["size"])):
        windows[str(number)] = _window_along(fields, number, size)
    return windows


def _window_along(fields: dict[str, str], number: int, size: int) -> _Window:
    """The window along one dim, from what is written of all; XLA leaves out what is plain."""
    values = dict(_PLAIN)
    for name in _PLAIN.keys() & fields.keys():
        values[name] = _each(fields[name])[number]
    before = 0
    if "pad" in fields:
        # `1_2x0_0`: one before the first dim and two after it, none along the next.
        before = int(fields["pad"].split("x")[number].split("_")[0])
    return _Window(size, values["stride"], before, values["lhs_dilate"], values["rhs_dilate"])


def _each(text: str) -> list[int]:
    """The numbers of a field of a window, one for each dim: `3x1` is 3 and 1."""
    return [int(number) for number in text.split("x")]


def _labels(made: Instruction) -> tuple[str, str, str]:
    """The labels of the dims of a convolution's input, kernel and output."""
    labels = made.get(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    before, output = labels.split("->")
    input_, kernel = before.split("_")
    return input_, kernel, output


def _groups(made: Instruction, kind: str) -> int:
    """Into how many groups features or examples fall, each with a kernel of its own."""
    return int(made.get(rf"{kind}_group_count=(\d+)") or 1)


def _shape(made: Instruction) -> tuple[int, ...]:
    (_, shape), *_ = arrays(made.result)
    return shape


def _size(made: Instruction) -> int:
    return math.prod(_shape(made))
