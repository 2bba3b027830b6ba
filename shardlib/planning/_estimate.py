"""What a decoder takes, by formula, before anything is compiled: for choosing where to start.

Parameters, gradients and optimizer state are ZeRO's (arXiv 1910.02054); activations are Megatron's
(2205.05198) and, beside them, what JAX keeps of a decoder that is written plainly, which is more:
every intermediate that a derivative reads.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardlib._text import human_bytes, table, terminal_width
from shardlib.checks import _arguments as check

Recompute = Literal["none", "selective", "full"]

# Bytes of state per parameter, in float32.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "lion": 4, "muon": 4, "adam": 8, "adamw": 8, "lamb": 8}


@dataclass(frozen=True)
class Module:
    """A part of a decoder, of which there are `count`; figures are of one.

    `flops` are those of a forward pass, `output` is the shape of what the module hands on, and
    `kept_bytes` is what JAX keeps of it for the backward pass.
    """

    name: str
    count: int
    parameters: int
    flops: int
    output: tuple[int, ...]
    kept_bytes: int


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
                optional = hint is not int
                checked = check.whole("Decoder", name, value, least=1, optional=optional)
                check.assign(self, **{name: checked})

    def modules(self, examples: int = 1, itemsize: int = 2, tensor: int = 1) -> tuple[Module, ...]:
        """The modules of the decoder, in order; a layer's are there once, with their count.

        Figures are for so many `examples` in a dtype of `itemsize` bytes. FLOPs and what is kept
        are those of one of `tensor` devices, split as Megatron splits.
        """
        examples, itemsize, tensor = _counts(
            "modules", examples=examples, itemsize=itemsize, tensor=tensor
        )
        tokens, width = examples * self.sequence, self.width
        stream = (examples, self.sequence, width)
        has_bias = self.norm == "layer" and self.bias
        # A norm keeps three float32 intermediates of the whole stream, and what it hands on.
        norm = Module(
            name="norm",
            count=1,
            parameters=width * (1 + has_bias),
            flops=5 * tokens * width,
            output=stream,
            kept_bytes=tokens * width * (12 + itemsize),
        )
        learned = self.positions == "learned"
        embedding = Module(
            name="embedding",
            count=1,
            parameters=width * (self.vocab + learned * self.sequence),
            flops=0,
            output=stream,
            kept_bytes=0,
        )
        head = Module(
            name="head",
            count=1,
            parameters=0 if self.tied else self.vocab * width,
            flops=2 * tokens * width * self.vocab // tensor,
            output=(examples, self.sequence, self.vocab),
            kept_bytes=tokens * self.vocab * itemsize // tensor,
        )
        modules = [
            embedding,
            replace(norm, name="attention_norm", count=self.layers),
            self._attention(examples, itemsize, tensor),
            replace(norm, name="mlp_norm", count=self.layers),
            self._mlp(examples, itemsize, tensor),
        ]
        if self.final_norm:
            modules.append(norm)
        return (*modules, head)

    def _attention(self, examples: int, itemsize: int, tensor: int) -> Module:
        """The attention of a layer: projections to queries, keys, values and back, and scores."""
        tokens, width, bias = examples * self.sequence, self.width, int(self.bias)
        head_dim = self.head_dim or width // self.heads
        queries, keys = self.heads * head_dim, (self.kv_heads or self.heads) * head_dim
        scores = self.heads * self.sequence * tokens // tensor
        return Module(
            name="attention",
            count=self.layers,
            parameters=2 * width * (queries + keys) + bias * (queries + 2 * keys + width),
            flops=4 * tokens * (width * (queries + keys) + self.sequence * queries) // tensor,
            output=(examples, self.sequence, width),
            # Queries, keys, values, output; of each score its exponential in float32 and its
            # probability.
            kept_bytes=2 * tokens * (queries + keys) * itemsize // tensor + scores * (4 + itemsize),
        )

    def _mlp(self, examples: int, itemsize: int, tensor: int) -> Module:
        """The MLP of a layer: two matrices, and a third for the gate of SwiGLU."""
        tokens, width, bias = examples * self.sequence, self.width, int(self.bias)
        hidden = self.hidden or 4 * width
        matrices = 3 if self.mlp == "swiglu" else 2
        return Module(
            name="mlp",
            count=self.layers,
            parameters=matrices * width * hidden + bias * (hidden * (matrices - 1) + width),
            flops=2 * matrices * tokens * width * hidden // tensor,
            output=(examples, self.sequence, width),
            # The argument of the activation and each step of its formula.
            kept_bytes=6 * tokens * hidden * itemsize // tensor,
        )

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole decoder."""
        return sum(module.count * module.parameters for module in self.modules())

    def megatron_activation_bytes(
        self,
        examples: int = 1,
        *,
        tensor: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
    ) -> int:
        """Megatron's formula for activations, in 16 bits with dropout, and its variants.

        It is s b h L (10 + 24/t + 5 a s / (h t)), for a sequence of s, b examples, width h, L
        layers, a heads and t devices. Splitting along the sequence divides the 10 by t too;
        selective recomputing drops the last term, and full recomputing leaves 2 s b h L.
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
        """The module with the most parameters; of a layer's modules, one layer's count."""
        return max(self.modules, key=lambda module: module.parameters)

    def __str__(self) -> str:
        rows = [("module", "", "parameters", "forward FLOPs", "output", "kept")]
        for module in self.modules:
            rows.append(
                (
                    module.name,
                    f"{module.count} x",
                    f"{module.parameters:,}",
                    f"{module.flops:.3g}",
                    "x".join(map(str, module.output)),
                    human_bytes(module.kept_bytes),
                )
            )
        memory = [("bytes per device", "")]
        for kind, size in [*self.kinds.items(), ("at the fullest moment", self.total_bytes)]:
            if size:
                memory.append((kind, human_bytes(size)))
        largest = self.largest_module
        sections = [
            table(rows, right=(1, 2, 3, 5), width=terminal_width(), shorten=(0,), drop=(4, 1)),
            table(memory, right=(1,)),
            f"{self.flops:.3g} FLOPs a step; the largest module is {largest.name}, "
            f"{largest.parameters:,} parameters",
        ]
        return "\n\n".join(sections)


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
    """What a step of a decoder takes, from formulas only.

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
    scores = decoder.heads * decoder.sequence**2 * examples // tensor * (4 + itemsize)
    activations = _activations(
        decoder, modules, stream, scores, tensor if sequence_parallel else 1, recompute
    )
    parameters = decoder.parameters // tensor
    at_rest = parameters * parameter_itemsize // (devices if zero else 1)
    # A module's FLOPs are those of one of `tensor` devices.
    forward = sum(module.count * module.flops for module in modules) * tensor * devices
    if not training:
        total = at_rest + max(activations.logits, activations.layer)
        return Estimate({"parameters": at_rest}, total, forward, modules)
    weight = weight_itemsize or parameter_itemsize
    copied = zero in (1, 2) or (not zero and weight < parameter_itemsize)
    # Sums, over microbatches or devices, are in float32.
    gradient = 4 if accumulate > 1 or zero >= 2 else weight
    kinds = {
        "parameters": at_rest,
        "optimizer state": parameters * OPTIMIZERS[optimizer] // (devices if zero else 1),
        "copies of parameters": parameters * weight if copied else 0,
        "gradients": parameters * gradient // (devices if zero >= 2 else 1),
        "activations": activations.kept,
    }
    # Stage 3 of ZeRO gathers one layer's parameters at a time.
    gathered = 0
    if zero >= 3:
        of_layer = sum(module.parameters for module in _layer_modules(decoder, modules))
        gathered = of_layer // tensor * (weight_itemsize or itemsize)
    # The fullest moment is one of two. At the head everything is kept, the logits get a gradient of
    # their size, and there are no other gradients but sums of earlier microbatches. At the first
    # layer all gradients are there, and what was dropped of the layer is there again.
    summed = kinds["gradients"] if accumulate > 1 else 0
    at_head = activations.kept + activations.logits + summed
    at_layer = activations.kept - activations.outside + activations.recomputed
    at_layer += gathered + kinds["gradients"]
    total = kinds["parameters"] + kinds["optimizer state"] + kinds["copies of parameters"]
    # A backward pass costs two forward passes; recomputing everything costs one more.
    passes = 4 if recompute == "full" else 3
    return Estimate(kinds, total + max(at_head, at_layer), forward * passes * accumulate, modules)


@dataclass(frozen=True)
class _Activations:
    """Bytes of activations on a device, for the microbatch that it works on.

    - `kept`: all that is kept for the backward pass; `outside`: what of that is not in layers.
    - `layer`: what one layer would keep if nothing were recomputed.
    - `recomputed`: what is made again of a layer in its backward pass.
    - `logits`: those of the head.
    """

    kept: int
    outside: int
    layer: int
    recomputed: int
    logits: int


def _activations(
    decoder: Decoder,
    modules: tuple[Module, ...],
    stream: int,
    scores: int,
    shard: int,
    recompute: Recompute,
) -> _Activations:
    """The activations of a decoder, from what its modules keep.

    Args:
        decoder: The decoder.
        modules: Its modules, for the examples of one microbatch.
        stream: Bytes of the stream between modules, not split.
        scores: Bytes of the attention scores of a layer, which selective recomputing drops.
        shard: Over how many devices the stream is split along the sequence.
        recompute: What the backward pass computes again.
    """
    in_layers = _layer_modules(decoder, modules)
    layer = sum(_kept_of(module, stream, shard) for module in in_layers)
    outside = 0
    for module in modules:
        if module not in in_layers:
            outside += _kept_of(module, stream, shard)
    kept = {"none": layer, "selective": layer - scores, "full": stream // shard}[recompute]
    return _Activations(
        kept=decoder.layers * kept + outside,
        outside=outside,
        layer=layer,
        recomputed={"none": 0, "selective": scores, "full": layer}[recompute],
        logits=modules[-1].kept_bytes,
    )


def _layer_modules(decoder: Decoder, modules: tuple[Module, ...]) -> list[Module]:
    """The modules that are in each layer, known by there being as many of them as layers."""
    return [module for module in modules if module.count == decoder.layers]


def _kept_of(module: Module, stream: int, shard: int) -> int:
    """What is kept of a module, where the stream may be split along the sequence.

    Of a norm, its own intermediates are split, but what it hands on is gathered.
    """
    if "norm" not in module.name:
        return module.kept_bytes
    return (module.kept_bytes - stream) // shard + stream
