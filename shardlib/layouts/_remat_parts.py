"""What a `Remat` is made of: words, names, encodings and budgets, and checks of them."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from shardlib.checks import _arguments as check

Products: TypeAlias = Literal["none", "without_batch", "all"]
Encoding: TypeAlias = Literal["int8", "int4", "fp8", "bf16", "sign"]
ENCODINGS = get_args(Encoding)
# Words for values. "none" keeps everything, and "stage" is a pipeline's own affair.
WORDS = (
    *("none", "full", "stage", "dots", "dots_without_batch"),
    *("selective", "minimal", "sublinear"),
)
# What the words mean that speak of a model's parts and activations. Megatron's "selective" computes
# attention's scores and their softmax again.
SCORES = "scores"
# MaxText's "minimal": results of projections, and attention's context. A gated MLP, another and
# experts have some each.
PROJECTED = (
    *("query_latent", "kv_latent", "rotary_key"),
    *("query", "key", "value", "context", "attention_out"),
    *("mlp_gate", "mlp_up", "mlp_out"),
    *("router", "expert_in", "expert_gate", "expert_up", "expert_out"),
)


@dataclass(frozen=True)
class RematBudget:
    """What a step may take of a device's memory, in bytes; made by `Remat.budget`.

    A step keeps those named activations of marked blocks that save the most recomputation, in as
    many layers as fit. Until a step has found them, blocks keep only their inputs.

    - `offload`: names of activations that may be kept on the host. The host gets what the device
      has no room for, as much as can be copied while the block is computed.
    """

    memory: int
    offload: tuple[str, ...] = ()

    def __repr__(self) -> str:
        offload = f", offload={self.offload!r}" if self.offload else ""
        return f"RematBudget(memory={self.memory}{offload})"


def checked_budget(memory: Any, offload: Any) -> RematBudget:
    """A budget of a device's memory, in bytes or as text, and of names for the host's."""
    takes = 'the bytes that a step may take of a device: a number, or text such as `"14GiB"`'
    memory = check.size("Remat.budget", "memory", memory, takes)
    takes = 'names of activations, in a tuple: `("block_in",)`'
    names = check.texts("Remat.budget", "offload", offload, takes)
    return RematBudget(memory, tuple(sorted(set(names))))


def check_one_place(names: tuple[str, ...], offloaded: tuple[str, ...]) -> None:
    """Refuse activations that are to be kept on the device and in the memory of the host."""
    both = sorted(set(names) & set(offloaded))
    if both:
        raise ValueError(
            f"`Remat`: `{both[0]}` is to be kept on the device, by `Remat.save` or "
            "`Remat.compress`, and in the memory of the host, by `Remat.offload`. Name it in one "
            "of the two."
        )


def encodings_by_name(pairs: Any, kept: tuple[str, ...]) -> tuple[tuple[str, Encoding], ...]:
    """Names with their encodings, in order, but for those that are `kept` as they are."""
    takes = 'pairs of a name and an encoding, `(("mlp_up", "int8"),)`'
    encodings: dict[str, Encoding] = {}
    for pair in check.kind("Remat", "compressed", pairs, tuple, takes):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise check.refusal("Remat", "compressed", pairs, takes)
        name = check.text("Remat", "compressed", pair[0], "the name of an activation, as text")
        check.choice("Remat.compress", "encoding", pair[1], ENCODINGS)
        if encodings.setdefault(name, pair[1]) != pair[1]:
            raise ValueError(
                f"`Remat`: `{name}` is compressed as {encodings[name]!r} and as {pair[1]!r}. "
                "Choose one of them."
            )
    return tuple(sorted((name, how) for name, how in encodings.items() if name not in kept))


def chain_stands_alone() -> ValueError:
    """The error for what is kept beside a chain."""
    return ValueError(
        "`Remat`: in the loop of a chain, such as `sl.Remat.slots(4)`, only inputs of blocks are "
        "kept, so it cannot be combined with `names`, `products`, other fields or another chain. "
        "Take one of the two."
    )
