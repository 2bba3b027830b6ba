"""The names of machines to plan for, such as `tpu:v5e:16x16`, read and checked.

    tpu : v5e  : 16x16      : slices=4      gpu : h200 : 64x1x8               cpu : 8
          chip   chips along  TPU slices          chip   slices x hosts x GPUs      devices
                 each dim of
                 the torus

A name that cannot be read is refused with what is nearest to it. Names that clouds use for TPU
slices, such as `v5p-64`, are recognized: they do not say what shape the slice has, and some count
TensorCores where others count chips, so the message gives the names that may be meant.
"""

import difflib
import itertools
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from shardlib._text import listed
from shardlib.machine._chips import CPU, GPUS, TPUS, Chip

Platform = Literal["tpu", "gpu", "cpu"]

_NUMBER = "[0-9]{1,6}"  # of devices along one dim: no machine has a million
_LARGEST_MACHINE = 2**17  # devices in all, more than any machine has: compilers list every one
_GPUS_OF_HOST = 8  # at most, in any machine
_LONGEST_SHOWN = 80  # characters of a user's text, in a message
_SUGGESTIONS = 3


@dataclass(frozen=True)
class Machine:
    """What the name of a machine says.

    `shape` is that of one slice: of a TPU chips along each dim of the torus, of GPUs hosts and GPUs
    of each, of a CPU its devices.
    """

    platform: Platform
    chip: Chip
    shape: tuple[int, ...]
    slices: int


def parse_machine(text: Any) -> Machine:
    """Read the name of a machine; a `ValueError` says what is wrong with it.

    The machine need not exist, but it must be one that could: its chip is known, and its slices are
    no larger than those that are built.
    """
    parts = text.split(":") if isinstance(text, str) else []
    if len(parts) == 2 and parts[0] == "cpu" and re.fullmatch("[0-9]+", parts[1]):
        return _cpu(text, parts[1])
    if isinstance(text, str):
        cloud_name = _explain_cloud_name(text)
        if cloud_name:
            raise ValueError(cloud_name)
    machine = _accelerators(text, parts)
    # A machine of any size could be planned, but compilers make an object of every device.
    devices = machine.slices * math.prod(machine.shape) * machine.chip.devices
    if devices > _LARGEST_MACHINE:
        raise ValueError(
            f"`{_cut(text)}` has {devices:,} devices; a target has at most {_LARGEST_MACHINE:,}. "
            "Take fewer slices."
        )
    return machine


def _accelerators(text: Any, parts: list[str]) -> Machine:
    """A machine of TPUs or GPUs, from the parts of its name between the colons.

    The parts are the platform, the chip, sizes with an `x` between them, and for TPUs perhaps the
    number of slices.
    """
    if len(parts) not in (3, 4):
        raise ValueError(_unknown(text, parts))
    platform, chip_name, sizes_text, *options = parts
    chips = {"tpu": TPUS, "gpu": GPUS}.get(platform, {})
    if chip_name not in chips or not re.fullmatch(f"{_NUMBER}(x{_NUMBER})*", sizes_text):
        raise ValueError(_unknown(text, parts))
    sizes = tuple(map(int, sizes_text.split("x")))
    read = _tpu if platform == "tpu" else _gpus
    return read(text, chips[chip_name], sizes, options)


def _cpu(text: str, count: str) -> Machine:
    """A machine of simulated devices; their number, in digits, may be too large or zero."""
    if not re.fullmatch(_NUMBER, count) or not 0 < int(count) <= CPU.largest:
        raise ValueError(
            f"`{_cut(text)}`: from 1 to {CPU.largest:,} devices can be simulated, as in "
            "`cpu:8`. Larger machines are planned by their own compilers, `tpu:...` or "
            "`gpu:...`."
        )
    return Machine("cpu", CPU, (int(count),), 1)


# How clouds name TPU slices: a generation and a number, which of some generations counts
# TensorCores and of others chips.
_CLOUD_NAME = re.compile(
    rf"(?:tpu:)?(?:tpu-?)?(v3|v4|v5p|v5litepod|v5e|v6e|v?7x)-({_NUMBER})", re.IGNORECASE
)
_CLOUD_GENERATIONS = {"v5litepod": "v5e", "v7x": "7x"}
# TensorCores of a chip, where those are what is counted.
_CLOUD_CORES = {"v3": 2, "v4": 2, "v5p": 2, "7x": 2}


def _explain_cloud_name(text: str) -> str:
    """Which targets a cloud's name of a slice, such as `v5p-64`, may mean; empty for other texts.

    The number counts chips for some generations. For others it counts TensorCores, and people read
    it as chips, so both readings are given.
    """
    match = _CLOUD_NAME.fullmatch(text)
    if not match:
        return ""
    generation, count = match[1].lower(), int(match[2])
    chip = TPUS[_CLOUD_GENERATIONS.get(generation, generation)]
    cores = _CLOUD_CORES.get(chip.name)
    # Newer chips have one core, and their names count chips.
    if cores is None:
        return (
            f"`{text}` does not say the shape of the slice. In this name clouds count chips: "
            f"{_describe_slice(chip, count)}. Write the target with its shape."
        )
    if count % cores:
        as_cores = f"no slice, since a chip has {cores}"
    else:
        as_cores = _describe_slice(chip, count // cores)
    return (
        f"`{text}` can be read in two ways. Clouds count TensorCores in this name, {cores} to a "
        f"chip: {as_cores}. Read as a number of chips it is {_describe_slice(chip, count)}. Write "
        "the target with its shape."
    )


def _describe_slice(chip: Chip, count: int) -> str:
    """So many chips of a generation in words, with the target of that size if there is one."""
    shape = _most_compact_shape(chip, count)
    plural = "" if count == 1 else "s"
    chips = f"{count:,} chip{plural}"
    if shape is None:
        return f"{chips}, of which there is no slice of {chip.name}"
    return f"{chips}, `tpu:{chip.name}:{'x'.join(map(str, shape))}`"


def _most_compact_shape(chip: Chip, count: int) -> tuple[int, ...] | None:
    """The shape of the slice of so many chips whose sides are the most alike.

    It is written as clouds write shapes, from the shortest side to the longest, but with sides of
    one chip at the end. None if no slice has so many chips.
    """
    if not 0 < count <= chip.largest:
        return None
    sides = [side for side in range(1, count + 1) if _is_side(side) and count % side == 0]
    shapes = []
    for shape in itertools.combinations_with_replacement(sides, chip.torus):
        if math.prod(shape) == count:
            shapes.append(shape)
    if not shapes:
        return None
    # Sides are in ascending order in each shape.
    most_compact = min(shapes, key=lambda shape: shape[-1] / shape[0])
    return tuple(sorted(most_compact, key=lambda side: (side == 1, side)))


def _is_side(size: int) -> bool:
    """Whether a slice can have so many chips along a dim of its torus."""
    return size in (1, 2) or (size > 0 and size % 4 == 0)


def _cut(text: Any) -> str:
    """A text of a user's as it can be shown in a message."""
    shown = str(text)
    if len(shown) <= _LONGEST_SHOWN:
        return shown
    return f"{shown[: _LONGEST_SHOWN - 3]}..."


def _tpu(text: str, chip: Chip, shape: tuple[int, ...], options: list[str]) -> Machine:
    """A machine of TPU slices; `options` is what follows the shape, `slices=4` or nothing.

    The shape is that of a slice, in chips, as in `tpu:v5p:4x4x8`.
    """
    slices = _slice_count(text, options[0]) if options else 1
    are_sides = len(shape) == chip.torus and all(map(_is_side, shape))
    if not are_sides or math.prod(shape) > chip.largest:
        example = _example_shape(chip)
        raise ValueError(
            f"`{_cut(text)}`: a slice of {chip.name} has {chip.torus} dims, each 1, 2 or a "
            f"multiple of 4, and at most {chip.largest:,} chips, as in "
            f"`tpu:{chip.name}:{example}`; larger machines are several slices, "
            f"`tpu:{chip.name}:{example}:slices=2`."
        )
    return Machine("tpu", chip, shape, slices)


def _slice_count(text: str, option: str) -> int:
    """The number in `slices=4`; `text` is the whole name of the target."""
    match = re.fullmatch(f"slices=({_NUMBER})", option)
    if not match or not int(match[1]):
        raise ValueError(
            f"`{_cut(text)}`: several slices are written "
            f"`{':'.join(text.split(':')[:3])}:slices=4`, of at most {_LARGEST_MACHINE:,} "
            "devices in all."
        )
    return int(match[1])


def _gpus(text: str, chip: Chip, sizes: tuple[int, ...], options: list[str]) -> Machine:
    """A machine of GPUs; `options` is what follows the sizes, where nothing may be.

    The sizes are slices, hosts of a slice, and GPUs of a host, as in `gpu:h200:4x1x8`.
    """
    if options or len(sizes) != 3 or 0 in sizes:
        raise ValueError(
            f"`{_cut(text)}`: GPUs are counted as slices x hosts x GPUs, `gpu:{chip.name}:4x1x8` "
            "for four hosts of 8."
        )
    slices, hosts, gpus = sizes
    # NVLink joins the GPUs of one host, and of B200s those of a rack.
    joins_one_host = chip.largest == _GPUS_OF_HOST
    too_large = hosts * gpus > chip.largest or gpus > _GPUS_OF_HOST
    if too_large or (hosts > 1 and joins_one_host):
        raise ValueError(_describe_too_wide(text, chip, sizes))
    return Machine("gpu", chip, (hosts, gpus), slices)


def _describe_too_wide(text: str, chip: Chip, sizes: tuple[int, ...]) -> str:
    """The error for slices of more GPUs than NVLink joins."""
    slices, hosts, gpus = sizes
    limit = ", 18 hosts of 4"
    if chip.largest == _GPUS_OF_HOST:
        limit = " of one host"
    return (
        f"`{_cut(text)}`: a slice is what NVLink joins, at most {chip.largest} "
        f"{chip.name.upper()}s{limit}. Several hosts on the network are several "
        f"slices: `gpu:{chip.name}:{slices * hosts}x1x{min(gpus, _GPUS_OF_HOST)}`."
    )


def _unknown(text: Any, parts: list[str]) -> str:
    """The message for a text that names no machine: targets like it, and how targets are written.

    `parts` are those between the colons.
    """
    near = _nearest(text, parts)
    suggestion = ""
    if near:
        suggestion = f"Near it: {listed(near)}. "
    tpus = listed(f"tpu:{name}" for name in TPUS)
    gpus = listed(f"gpu:{name}" for name in GPUS)
    return (
        f"`{_cut(text)}` is no target. {suggestion}There are {tpus} by the shape of a slice "
        f"(`tpu:v5e:16x16`, `tpu:v5p:4x4x8:slices=2`), {gpus} by slices x hosts x GPUs "
        "(`gpu:h200:4x1x8`), and `cpu:8`."
    )


def _nearest(text: Any, parts: list[str]) -> list[str]:
    """Up to three examples of targets like a text that names none.

    They are those of the chip that it seems to name, else those whose spelling is close.
    """
    examples = [f"tpu:{name}:{_example_shape(chip)}" for name, chip in TPUS.items()]
    examples += [f"gpu:{name}:1x1x8" for name in GPUS]
    examples.append("cpu:8")
    near = []
    if len(parts) > 1:
        chip_name = parts[1].lower().removeprefix("tpu").removeprefix("v")
        for example in examples:
            if chip_name and chip_name in example.split(":")[1]:
                near.append(example)
    if not near:
        shown = str(text)[:_LONGEST_SHOWN]  # the search takes long for long texts
        near = difflib.get_close_matches(shown, examples, _SUGGESTIONS)
    return near[:_SUGGESTIONS]


def _example_shape(chip: Chip) -> str:
    """A small slice of a TPU, `4x4` or `4x4x4`."""
    return "x".join(["4"] * chip.torus)
