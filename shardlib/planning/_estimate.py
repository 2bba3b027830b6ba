"""What a decoder takes, by formula, before anything is compiled: for choosing where to start.

Parameters, gradients and optimizer state are ZeRO's (arXiv 1910.02054); activations are Megatron's
(2205.05198) and, beside them, what JAX keeps of a decoder that is written plainly, which is more:
every intermediate that a derivative reads.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardlib._text import human_bytes, table, terminal_width
from shardlib.checks import _arguments as check

Recompute = Literal["none", "selective", "full"]

# Bytes of state per parameter, in float32.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "lion": 4, "muon": 4, "adam": 8, "adamw": 8, "lamb": 8}


@dataclass(frozen=True)
class Module:
    """A part of a decoder, of which there are `count`; figures are of one."""

    name: str
    count: int
    parameters: int
    flops: int  # forward
    output: tuple[int, ...]
    kept_bytes: int  # of what JAX keeps for the backward pass


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder: what the formulas ask about.

    >>> gpt1 = Decoder(layers=12, width=768, heads=12, sequence=512, vocab=40_512, tied=False,
    ...     final_norm=False)
    >>> f"{gpt1.parameters:,}"
    '147,674,112'
    >>> f"{gpt1.megatron_activation_bytes():,}"
    '349,175,808'
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["gelu", "relu", "swiglu"] = "gelu"
    positions: Literal["learned", "rotary"] = "learned"
    bias: bool = True
    tied: bool = True
    final_norm: bool = True

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if hint is bool:
                check.boolean("Decoder", name, value)
            elif get_origin(hint) is Literal:
                check.choice("Decoder", name, value, get_args(hint))
            else:
                check.assign(
                    self,
                    **{
                        name: check.whole("Decoder", name, value, least=1, optional=hint is not int)
                    },
                )

    def modules(self, examples: int = 1, itemsize: int = 2, tensor: int = 1) -> tuple[Module, ...]:
        """The parts, for so many examples in a dtype of so many bytes, split over `tensor` devices
        as Megatron splits.
        """
        examples, itemsize, tensor = _counts(
            "modules", examples=examples, itemsize=itemsize, tensor=tensor
        )
        head_dim = self.head_dim or self.width // self.heads
        queries, keys = self.heads * head_dim, (self.kv_heads or self.heads) * head_dim
        hidden, tokens, width = self.hidden or 4 * self.width, examples * self.sequence, self.width
        scores = self.heads * self.sequence * tokens // tensor
        stream = (examples, self.sequence, width)
        bias = int(self.bias)

        # Three float32 intermediates of the whole stream, and what it hands on.
        norm_parameters = width * (1 + (self.norm == "layer" and bias))
        norm = Module(
            "", 1, norm_parameters, 5 * tokens * width, stream, tokens * width * (12 + itemsize)
        )
        matrices = 3 if self.mlp == "swiglu" else 2
        learned = self.positions == "learned"
        parts = [
            Module("embedding", 1, width * (self.vocab + learned * self.sequence), 0, stream, 0),
            _renamed(norm, "attention_norm", self.layers),
            Module(
                "attention",
                self.layers,
                2 * width * (queries + keys) + bias * (queries + 2 * keys + width),
                4 * tokens * (width * (queries + keys) + self.sequence * queries) // tensor,
                stream,
                # Queries, keys, values, output; of each score its exponential in float32 and its
                # probability.
                2 * tokens * (queries + keys) * itemsize // tensor + scores * (4 + itemsize),
            ),
            _renamed(norm, "mlp_norm", self.layers),
            Module(
                "mlp",
                self.layers,
                matrices * width * hidden + bias * (hidden * (matrices - 1) + width),
                2 * matrices * tokens * width * hidden // tensor,
                stream,
                6 * tokens * hidden * itemsize // tensor,
                # the argument of the activation and each step of its formula
            ),
            *([_renamed(norm, "norm", 1)] if self.final_norm else []),
            Module(
                "head",
                1,
                0 if self.tied else self.vocab * width,
                2 * tokens * width * self.vocab // tensor,
                (examples, self.sequence, self.vocab),
                tokens * self.vocab * itemsize // tensor,
            ),
        ]
        return tuple(parts)

    @property
    def parameters(self) -> int:
        return sum(module.count * module.parameters for module in self.modules())

    def megatron_activation_bytes(
        self,
        examples: int = 1,
        *,
        tensor: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> int:
        """Megatron's formula, in 16 bits with dropout: s b h L (10 + 24/t + 5 a s / (h t)), and its
        variants.
        """
        examples, tensor = _counts("megatron_activation_bytes", examples=examples, tensor=tensor)
        check.boolean("megatron_activation_bytes", "sequence_parallel", sequence_parallel)
        check.choice("megatron_activation_bytes", "recompute", recompute, get_args(Recompute))
        s, h, a, t = self.sequence, self.width, self.heads, tensor
        stream = s * examples * h * self.layers
        if recompute == "full":
            return 2 * stream // (t if sequence_parallel else 1)
        outside = 10 * stream // t if sequence_parallel else 10 * stream
        scores = 5 * a * s * s * examples * self.layers // t if recompute == "none" else 0
        return outside + 24 * stream // t + scores


def _counts(function: str, **counts: Any) -> list[int]:
    """Numbers of at least one each, in order."""
    return [check.whole(function, name, value, least=1) for name, value in counts.items()]


def _renamed(module: Module, name: str, count: int) -> Module:
    return Module(name, count, module.parameters, module.flops, module.output, module.kept_bytes)


def zero_bytes(
    parameters: int,
    *,
    devices: int = 1,
    stage: int = 0,
    weights: int = 2,
    gradients: int = 2,
    state: int = 12,
) -> int:
    """ZeRO's bytes per device, by the paper's formulas.

    By default they are those of mixed-precision Adam, whose `state` holds the 32-bit master and two
    moments.

    >>> [round(zero_bytes(7_500_000_000, devices=64, stage=stage) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    parameters = check.whole(
        "zero_bytes", "parameters", parameters, "a number of parameters", least=0
    )
    stage = check.whole("zero_bytes", "stage", stage, "a stage of ZeRO", least=0, most=3)
    devices = check.whole("zero_bytes", "devices", devices, "a number of devices", least=1)
    sizes = [
        check.whole("zero_bytes", name, value, "a number of bytes for each parameter", least=0)
        for name, value in (("weights", weights), ("gradients", gradients), ("state", state))
    ]
    parts = [devices if stage >= first else 1 for first in (3, 2, 1)]
    return sum(math.ceil(parameters * size / part) for size, part in zip(sizes, parts, strict=True))


@dataclass(frozen=True)
class Estimate:
    """The estimated memory of a device, by kind, and the FLOPs of a step.

    It has the most of each kind at any moment, and the total at the peak; FLOPs are of a step on
    all devices.
    """

    kinds: dict[str, int]
    total_bytes: int
    flops: int
    modules: tuple[Module, ...]

    @property
    def largest_module(self) -> Module:
        return max(self.modules, key=lambda module: module.parameters)

    def __str__(self) -> str:
        rows = [("module", "", "parameters", "forward FLOPs", "output", "kept")]
        rows += [
            (
                one.name,
                f"{one.count} x",
                f"{one.parameters:,}",
                f"{one.flops:.3g}",
                "x".join(map(str, one.output)),
                human_bytes(one.kept_bytes),
            )
            for one in self.modules
        ]
        kinds = [*self.kinds.items(), ("at the fullest moment", self.total_bytes)]
        memory = [
            ("bytes per device", ""),
            *((kind, human_bytes(size)) for kind, size in kinds if size),
        ]
        largest = self.largest_module
        modules = table(rows, right=(1, 2, 3, 5), width=terminal_width(), shorten=(0,), drop=(4, 1))
        return (
            modules
            + "\n\n"
            + table(memory, right=(1,))
            + f"\n\n{self.flops:.3g} FLOPs a step; the largest module is {largest.name}, "
            f"{largest.parameters:,} parameters"
        )


def estimate(
    decoder: Decoder,
    *,
    examples: int,
    itemsize: int = 2,
    parameter_itemsize: int = 4,
    weight_itemsize: int | None = None,
    optimizer: str = "adamw",
    recompute: Recompute = "none",
    tensor: int = 1,
    sequence_parallel: bool = False,
    devices: int = 1,
    zero: int = 0,
    accumulate: int = 1,
    training: bool = True,
) -> Estimate:
    """What a step of a decoder takes, from formulas alone.

    - `examples` that one device sees at a time, computed in a dtype of `itemsize` bytes.
    - `parameter_itemsize` bytes of each parameter at rest; the model gets it in `weight_itemsize`,
      2 of `Strategy(precision="bf16")`, by default as it rests.
    - `tensor` devices split each layer, and the stream too if `sequence_parallel`.
    - `devices` share what ZeRO's stage `zero` splits: at rest everything; in a step stage 1 holds
      whole parameters and gradients, 2 whole parameters, 3 a layer's.
    - `accumulate` microbatches, whose gradients are summed in float32, in place.

    >>> gpt2 = Decoder(layers=12, width=768, heads=12, sequence=1024, vocab=50_304)
    >>> found = estimate(gpt2, examples=4)
    >>> {kind: size // 2**20 for kind, size in found.kinds.items()}, found.total_bytes // 2**20
    ({'parameters': 474, 'optimizer state': 949, 'copies of parameters': 0, 'gradients': 474,
    'activations': 6915}, 8732)
    """
    check.kind("estimate", "decoder", decoder, Decoder, "a `sl.planning.Decoder`")
    examples, itemsize, parameter_itemsize = _counts(
        "estimate", examples=examples, itemsize=itemsize, parameter_itemsize=parameter_itemsize
    )
    tensor, devices, accumulate = _counts(
        "estimate", tensor=tensor, devices=devices, accumulate=accumulate
    )
    takes = "a number of bytes"
    weight_itemsize = check.whole(
        "estimate", "weight_itemsize", weight_itemsize, takes, least=1, optional=True
    )
    check.choice("estimate", "optimizer", optimizer, OPTIMIZERS)
    check.choice("estimate", "recompute", recompute, get_args(Recompute))
    zero = check.whole("estimate", "zero", zero, "a stage of ZeRO", least=0, most=3)
    check.boolean("estimate", "sequence_parallel", sequence_parallel)
    check.boolean("estimate", "training", training)
    modules = decoder.modules(examples, itemsize, tensor)
    stream = examples * decoder.sequence * decoder.width * itemsize
    shard = tensor if sequence_parallel else 1
    layers = [module for module in modules if module.count == decoder.layers]

    def kept_of(module: Module) -> int:
        """What is kept of a module. Of a stream split along the sequence a norm's own is, but what
        it hands on is gathered.
        """
        return (
            (module.kept_bytes - stream) // shard + stream
            if "norm" in module.name
            else module.kept_bytes
        )

    of_layer = sum(map(kept_of, layers))
    outside = sum(kept_of(module) for module in modules if module not in layers)
    logits = modules[-1].kept_bytes
    scores = (
        decoder.heads * decoder.sequence * decoder.sequence * examples // tensor * (4 + itemsize)
    )
    kept = {"none": of_layer, "selective": of_layer - scores, "full": stream // shard}[recompute]
    parameters = decoder.parameters // tensor
    at_rest = devices if zero else 1
    weight = weight_itemsize or parameter_itemsize
    # Sums, over microbatches or devices, are in float32.
    gradient = 4 if accumulate > 1 or zero >= 2 else weight
    forward = sum(module.count * module.flops for module in modules) * tensor
    if not training:
        kinds = {"parameters": parameters * parameter_itemsize // at_rest}
        total = kinds["parameters"] + max(logits, of_layer)
        return Estimate(kinds, total, forward * devices, modules)
    kinds = {
        "parameters": parameters * parameter_itemsize // at_rest,
        "optimizer state": parameters * OPTIMIZERS[optimizer] // at_rest,
        "copies of parameters": parameters * weight
        if zero in (1, 2) or (not zero and weight < parameter_itemsize)
        else 0,
        "gradients": parameters * gradient // (devices if zero >= 2 else 1),
        "activations": decoder.layers * kept + outside,
    }
    # The fullest moment is one of two. At the head everything is kept, the logits get a gradient of
    # their size, and no other gradient is there. At the first layer all are, and what was dropped
    # of the layer is there again.
    again = {"none": 0, "selective": scores, "full": of_layer}[recompute]
    gathered = (
        sum(module.parameters for module in layers) // tensor * (weight_itemsize or itemsize)
        if zero >= 3
        else 0
    )
    summed = kinds["gradients"] if accumulate > 1 else 0
    head = kinds["activations"] + logits + summed
    layer = kinds["activations"] - outside + again + gathered + kinds["gradients"]
    total = (
        kinds["parameters"]
        + kinds["optimizer state"]
        + kinds["copies of parameters"]
        + max(head, layer)
    )
    passes = {"none": 3, "selective": 3, "full": 4}[recompute]
    return Estimate(kinds, total, forward * passes * accumulate * devices, modules)
