"""What to change where a step does not fit: advice, sorted by the bytes that it could save.

Each piece of advice goes with the bytes of memory that it is about. That is an upper bound of what
it saves, and enough to say what to try first:

    what blocks keep          activations; see `_remat_advice`
    fewer examples            activations and temporaries
    split further at rest     parameters and optimizer state
    a later stage of ZeRO     gradients (2), whole copies of parameters (3)
    JAX's share of a GPU      what JAX leaves to others by default

Advice that the strategy cannot take, such as a stage that its pipeline refuses, is left out.
"""

import dataclasses
from collections.abc import Sequence

from shardlib._text import human_bytes
from shardlib.compiled._memory import Memory
from shardlib.layouts._specs import parts_over, product_text
from shardlib.machine._chips import Chip
from shardlib.step._strategy import Strategy


def host_has_room(memory: Memory, chip: Chip) -> bool:
    """Whether a device's share of its host's memory suffices; it does where that is unknown."""
    return chip.host_bytes is None or memory.host_bytes <= chip.host_bytes


def advice_for(
    memory: Memory,
    chip: Chip,
    strategy: Strategy | None,
    about_remat: Sequence[tuple[float, str]] = (),
) -> tuple[str, ...]:
    """What to change, the most promising first, where a step does not fit.

    Each piece of advice goes with the bytes that it is about. Those below a hundredth of the total
    are left out, and the others are sorted by them.
    """
    kinds = memory.kinds
    kept = kinds["parameters"] + kinds["optimizer state"]
    advice = [
        *about_remat,
        _fewer_examples(memory, strategy),
        (kept, _split_at_rest(human_bytes(kept), strategy)),
    ]
    if strategy is not None:
        advice += _later_stages(kinds, strategy)
    # A lone device is the one at hand, of whose memory JAX reserves only a part by default.
    if chip.devices == 1 and chip.usable_bytes < 0.8 * chip.hbm_bytes:
        advice.append(
            (
                chip.hbm_bytes - chip.usable_bytes,
                f"JAX takes {human_bytes(chip.usable_bytes)} of {human_bytes(chip.hbm_bytes)} here "
                "by default: set `XLA_PYTHON_CLIENT_MEM_FRACTION=0.95`.",
            )
        )
    worthwhile = [item for item in advice if item[0] > 0.01 * memory.total_bytes]
    # The sort is stable: of equal sizes, what is written first above stays first.
    worthwhile.sort(key=lambda item: -item[0])
    texts = [text for _, text in worthwhile if text]
    if memory.total_bytes > chip.usable_bytes:
        excess = human_bytes(memory.total_bytes - chip.usable_bytes)
        texts.insert(0, f"It is {excess} too much.")
    if not host_has_room(memory, chip):
        texts.insert(0, _less_on_host(memory, chip))
    return tuple(texts)


def _less_on_host(memory: Memory, chip: Chip) -> str:
    """Advice for a step that takes more of the host's memory than there is for its device."""
    assert chip.host_bytes is not None
    excess = human_bytes(memory.host_bytes - chip.host_bytes)
    return (
        f"It takes {human_bytes(memory.host_bytes)} of the host's memory for each device, {excess} "
        "too much: offload less, `Strategy(offload=...)` and `Remat.offload`; split state further, "
        "`Strategy(zero=3)`; or take fewer examples at once."
    )


def _fewer_examples(memory: Memory, strategy: Strategy | None) -> tuple[float, str]:
    """Advice to take fewer examples at once, with the largest array that depends on them."""
    working = memory.kinds["activations"] + memory.kinds["temporaries"]
    text = (
        f"Take fewer examples at once, {human_bytes(working)} of activations and temporaries: "
        f"{_smaller(strategy)}a smaller batch, or more devices along its axis."
    )
    for piece in memory.pieces:  # the largest comes first
        if piece.kind in ("activations", "temporaries"):
            source = piece.source or "the compiler"
            text += f" The largest is {piece.type}, {human_bytes(piece.size)}, of {source}."
            break
    return working, text


def _smaller(strategy: Strategy | None) -> str:
    """How a step of ours takes fewer examples at a time."""
    if strategy is None:
        return ""
    if strategy.pipeline is None:
        return "`Strategy(accumulate=...)`, which `sl.planning.largest_microbatch` finds, "
    return "more microbatches in the schedule, "


def _split_at_rest(size: str, strategy: Strategy | None) -> str:
    """Advice on how to split parameters and optimizer state further.

    From its first stage on, ZeRO splits both at rest over the axes of data, so that only a longer
    axis or another one helps.
    """
    split = f"Split parameters and optimizer state, {size}, over more devices"
    rules = "rules such as `sl.rules.fsdp`"
    # ZeRO splits over axes of data and of sequences, and does nothing where these have one device.
    if strategy is None or not _data_devices(strategy):
        return f"{split}: {rules}, or a longer axis."
    if strategy.sharding.stage:
        over = product_text(strategy.device_mesh.shape, strategy.zero_axes)
        return (
            f"{split} than {over}, over which ZeRO splits them already: a longer axis, or "
            f"{rules} over another one."
        )
    first = "`Strategy(zero=1)`, " if _takes_stage(strategy, 1) else ""
    return f"{split}: {first}{rules}, or a longer axis."


def _later_stages(kinds: dict[str, int], strategy: Strategy) -> list[tuple[float, str]]:
    """Advice to take a later stage of ZeRO, with the bytes that would no longer be held whole.

    Stage 2 scatters gradients as they are made, and stage 3 gathers parameters a layer at a time.
    Stages that the strategy cannot have are left out.
    """
    if not _data_devices(strategy):
        return []
    advice: list[tuple[float, str]] = []
    # Later stages keep what earlier ones do.
    now = strategy.sharding.stage
    gradients, copies = kinds["gradients"], kinds["copies of parameters"]
    if now < 2 and _takes_stage(strategy, 2):
        what = (
            f"Scatter each layer's gradients as soon as they are there, {human_bytes(gradients)} "
            "now"
        )
        advice.append((gradients, f"{what}: `Strategy(zero=2)`."))
    if 1 <= now < 3 and _takes_stage(strategy, 3):
        what = f"Gather parameters a layer at a time, {human_bytes(copies)} of copies now"
        advice.append((copies, f"{what}: `Strategy(zero=3)`."))
    return advice


def _data_devices(strategy: Strategy) -> bool:
    """Whether there are several devices along the axes that ZeRO can split over."""
    axes = (*strategy.data_axes, *strategy.sequence_axes)
    return parts_over(strategy.device_mesh.shape, axes) > 1


def _takes_stage(strategy: Strategy, stage: int) -> bool:
    """Whether the strategy could have that stage of ZeRO, beside its pipeline and its exchange."""
    try:
        dataclasses.replace(strategy, zero=dataclasses.replace(strategy.sharding, stage=stage))
    except ValueError:
        return False
    return True
