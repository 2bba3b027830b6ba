"""What a decoder takes, by formula, before anything is compiled: for choosing where to start.

Parameters, gradients and optimizer state are ZeRO's (arXiv 1910.02054); activations are Megatron's
(2205.05198) and, next to them, what JAX keeps of a decoder that is written plainly, which is more:
every intermediate that a derivative reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardlib._notebook import Shown
from shardlib._text import human_bytes, table, terminal_width
from shardlib.checks import _arguments as check
from shardlib.layouts._remat_policy import Remat
from shardlib.planning._decoder import Decoder, Module, Recompute, counts
from shardlib.planning._decoder_names import Named, kept_names, named_of

# Bytes of state per parameter, in float32.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "lion": 4, "muon": 4, "adam": 8, "adamw": 8, "lamb": 8}


def zero_bytes(
    parameters: int,
    *,
    devices: int = 1,
    stage: int = 0,
    weights: int = 2,
    gradients: int = 2,
    state: int = 12,
) -> int:
    """ZeRO's bytes per device, of parameters, gradients and optimizer state, by the paper.

    By default they are those of mixed-precision Adam.

    Args:
        parameters: how many parameters the model has.
        devices: how many devices share what is split.
        stage: ZeRO's stage: 0 splits nothing, 1 the optimizer's state, 2 gradients too, 3
            parameters too.
        weights: bytes of each parameter, as the model computes with it.
        gradients: bytes of its gradient.
        state: bytes of its optimizer state: by default a 32-bit master and two moments.

    >>> [round(zero_bytes(7_500_000_000, devices=64, stage=stage) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    parameters = check.whole(
        "zero_bytes", "parameters", parameters, "a number of parameters", least=0
    )
    stage = check.whole("zero_bytes", "stage", stage, "a stage of ZeRO", least=0, most=3)
    devices = check.whole("zero_bytes", "devices", devices, "a number of devices", least=1)
    total = 0
    # What each kind takes of a parameter, and from which stage on it is split.
    kinds = (("weights", weights, 3), ("gradients", gradients, 2), ("state", state, 1))
    for name, value, first_stage in kinds:
        takes = "a number of bytes for each parameter"
        size = check.whole("zero_bytes", name, value, takes, least=0)
        parts = 1
        if stage >= first_stage:
            parts = devices
        total += math.ceil(parameters * size / parts)
    return total


@dataclass(frozen=True)
class Estimate(Shown):
    """The estimated memory of a device, by kind, and the FLOPs of a step; it prints as tables.

    - `kinds`: bytes of a device by kind, such as `parameters` and `activations`: the most of each
      at any moment.
    - `total_bytes`: bytes of a device at its fullest moment, which need not be their sum.
    - `flops`: floating-point operations of a step, on all devices.
    - `modules`: the parts of the decoder, each with its parameters, FLOPs and bytes.
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
        rows += map(_row, self.modules)
        memory = [("bytes per device", "")]
        # Kinds that take nothing, such as sums without microbatches, are left out.
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


def _row(module: Module) -> tuple[str, str, str, str, str, str]:
    """The line of a module in the table of an estimate."""
    return (
        module.name,
        f"{module.count} x",
        f"{module.parameters:,}",
        f"{module.flops:.3g}",
        "x".join(map(str, module.output)),
        human_bytes(module.kept_bytes),
    )


@dataclass(frozen=True)
class ItemSizes:
    """Bytes of one number, by what it is for.

    - `compute`: activations, 2 for bfloat16.
    - `parameters`: parameters as they are stored.
    - `weights`: parameters as the model gets them, 2 for `Strategy(precision="bf16")`; None is as
      they are stored.
    """

    compute: int = 2
    parameters: int = 4
    weights: int | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "parameters", "weights"):
            value = getattr(self, name)
            optional = name == "weights"
            takes = "a number of bytes"
            size = check.whole("ItemSizes", name, value, takes, least=1, optional=optional)
            check.assign(self, **{name: size})


@dataclass(frozen=True)
class Parallelism:
    """How many devices share a decoder, and what each of them holds.

    - `data`: devices with examples of their own, which share what ZeRO splits.
    - `zero`: ZeRO's stage; 0 splits nothing. At rest all others split parameters and optimizer
      state; during a step, stage 1 holds whole parameters and gradients, stage 2 whole parameters,
      stage 3 those of one layer.
    - `tensor`: devices that split each layer, as Megatron does.
    - `sequence`: whether these split the stream between layers too, Megatron's sequence
      parallelism.
    """

    data: int = 1
    zero: int = 0
    tensor: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        data, tensor = counts("Parallelism", data=self.data, tensor=self.tensor)
        zero = check.whole("Parallelism", "zero", self.zero, "a stage of ZeRO", least=0, most=3)
        check.boolean("Parallelism", "sequence", self.sequence)
        check.assign(self, data=data, tensor=tensor, zero=zero)


def _check_tensor(decoder: Decoder, tensor: int) -> None:
    """Refuse devices that could not share the heads of a layer evenly."""
    if decoder.heads % tensor:
        raise ValueError(
            f"`Parallelism(tensor={tensor})` does not divide the {decoder.heads} heads of the "
            "decoder."
        )


def estimate(
    decoder: Decoder,
    *,
    examples: int,
    itemsizes: ItemSizes | None = None,
    parallelism: Parallelism | None = None,
    optimizer: str = "adamw",
    recompute: Recompute | str | Remat = "none",
    accumulate: int = 1,
    training: bool = True,
) -> Estimate:
    """What a step of a decoder takes, from formulas only.

    Args:
        decoder: the shape of the decoder.
        examples: how many examples one device sees at a time.
        itemsizes: bytes of each number; by default parameters are float32, activations 16 bits.
        parallelism: how devices share the work; by default there is one.
        optimizer: its name, which says how much state there is for each parameter.
        recompute: what the backward pass computes again: "none", "selective" or "full"; "minimal",
            or a `Remat.save(...)`, keeps activations by the names that `models/gpt.py` has.
        accumulate: microbatches of a step, whose gradients are summed in float32, in place.
        training: whether there is a backward pass, and a state of an optimizer.

    >>> gpt2 = Decoder(layers=12, width=768, heads=12, sequence=1024, vocab=50_304)
    >>> step = estimate(gpt2, examples=4)
    >>> {kind: size // 2**20 for kind, size in step.kinds.items()}, step.total_bytes // 2**20
    ({'parameters': 474, 'optimizer state': 949, 'copies of parameters': 0, 'gradients': 474,
    'activations': 5763}, 7580)
    """
    check.kind("estimate", "decoder", decoder, Decoder, "a `sl.planning.Decoder`")
    takes = "a `sl.planning.ItemSizes`"
    check.kind("estimate", "itemsizes", itemsizes, ItemSizes, takes, optional=True)
    takes = "a `sl.planning.Parallelism`"
    check.kind("estimate", "parallelism", parallelism, Parallelism, takes, optional=True)
    examples, accumulate = counts("estimate", examples=examples, accumulate=accumulate)
    check.choice("estimate", "optimizer", optimizer, OPTIMIZERS)
    names = kept_names(recompute, decoder)
    check.boolean("estimate", "training", training)
    if not training and accumulate > 1:
        raise ValueError(
            f"`estimate(training=False, accumulate={accumulate})`: only a step of training has "
            "microbatches. Leave `accumulate` out."
        )
    sizes = itemsizes or ItemSizes()
    shared = parallelism or Parallelism()
    _check_tensor(decoder, shared.tensor)

    modules = decoder.modules(examples, sizes.compute, shared.tensor)
    if recompute == Remat():
        recompute, names = "full", None
    work = _Work(decoder, modules, examples, sizes, shared)
    activations = work.by_names(names) if names is not None else work.by_word(str(recompute))
    # A module's FLOPs are those of one of the devices that split it.
    # So a step's FLOPs are those of one device times all of them.
    devices = shared.tensor * shared.data
    forward = sum(module.count * module.flops for module in modules) * devices
    if not training:
        kinds = {"parameters": _state_bytes(decoder, sizes.parameters, shared)}
        if copied := _copied_bytes(decoder, sizes, shared):
            kinds["copies of parameters"] = copied
        in_layer = activations.layer + _gathered_bytes(modules, sizes, shared)
        total = sum(kinds.values()) + max(activations.logits, in_layer)
        return Estimate(kinds, total, forward, modules)

    kinds = {
        "parameters": _state_bytes(decoder, sizes.parameters, shared),
        "optimizer state": _state_bytes(decoder, OPTIMIZERS[optimizer], shared),
        "copies of parameters": _copied_bytes(decoder, sizes, shared),
        "gradients": _gradient_bytes(decoder, sizes, shared, accumulate),
        "activations": activations.kept,
    }
    in_state = kinds["parameters"] + kinds["optimizer state"] + kinds["copies of parameters"]
    # The fullest moment is one of two. At the head everything is kept, the logits get a gradient of
    # their size, and there are no other gradients but sums of earlier microbatches.
    at_head = activations.kept + activations.logits
    if accumulate > 1:
        at_head += kinds["gradients"]
    # At the first layer all gradients are there, what was dropped of the layer is there again, and
    # with stage 3 of ZeRO its parameters are whole.
    at_layer = activations.kept - activations.outside + activations.recomputed
    at_layer += _gathered_bytes(modules, sizes, shared) + kinds["gradients"]
    # A backward pass costs two forward passes; recomputing everything costs one more.
    passes = 3
    if recompute == "full":
        passes = 4
    total = in_state + max(at_head, at_layer)
    flops = forward * passes + activations.again * devices
    return Estimate(kinds, total, flops * accumulate, modules)


def _state_bytes(decoder: Decoder, itemsize: int, shared: Parallelism) -> int:
    """Bytes at rest of an array for each parameter, which every stage of ZeRO splits."""
    size = decoder.parameters // shared.tensor * itemsize
    if shared.zero:
        size //= shared.data
    return size


def _copied_bytes(decoder: Decoder, sizes: ItemSizes, shared: Parallelism) -> int:
    """Bytes of whole parameters during a step, where these are not the stored ones.

    Stages 1 and 2 of ZeRO gather them, and a narrower dtype needs a copy.
    """
    itemsize = sizes.weights or sizes.parameters
    # Stage 3 gathers weights only layer by layer, and stage 0 has them whole already.
    narrowed = shared.zero == 0 and itemsize < sizes.parameters
    if shared.zero in (1, 2) or narrowed:
        return decoder.parameters // shared.tensor * itemsize
    return 0


def _gradient_bytes(
    decoder: Decoder, sizes: ItemSizes, shared: Parallelism, accumulate: int
) -> int:
    """Bytes of all gradients; sums over microbatches or devices are in float32."""
    itemsize = sizes.weights or sizes.parameters
    if accumulate > 1 or shared.zero >= 2:
        itemsize = 4
    size = decoder.parameters // shared.tensor * itemsize
    if shared.zero >= 2:
        size //= shared.data
    return size


def _gathered_bytes(modules: tuple[Module, ...], sizes: ItemSizes, shared: Parallelism) -> int:
    """Bytes of the parameters that stage 3 of ZeRO gathers at a time: those of one layer."""
    if shared.zero < 3:
        return 0
    parameters = sum(module.parameters for module in modules if module.in_layer)
    return parameters // shared.tensor * (sizes.weights or sizes.compute)


@dataclass(frozen=True)
class _Activations:
    """Bytes of activations on a device, for the microbatch that it works on.

    - `kept`: all that is kept for the backward pass; `outside`: what of that is not in layers.
    - `layer`: what one layer would keep if nothing were recomputed.
    - `recomputed`: what is made again of a layer in its backward pass, and the gradients of what is
      kept of its MLP.
    - `logits`: those of the head.
    - `again`: operations that run again in all layers, on one device, where names are kept.
    """

    kept: int
    outside: int
    layer: int
    recomputed: int
    logits: int
    again: int = 0


@dataclass(frozen=True)
class _Work:
    """A decoder's modules, for the examples of one microbatch of one device."""

    decoder: Decoder
    modules: tuple[Module, ...]
    examples: int
    sizes: ItemSizes
    shared: Parallelism

    @property
    def stream(self) -> int:
        """The bytes of the stream between modules, whole; along the sequence it may be split."""
        decoder = self.decoder
        return self.examples * decoder.sequence * decoder.width * self.sizes.compute

    @property
    def parts(self) -> int:
        """In how many parts the stream is split."""
        return self.shared.tensor if self.shared.sequence else 1

    def by_word(self, recompute: str) -> _Activations:
        """The activations if a layer keeps everything, all but its scores, or its input."""
        scores = self.decoder.score_bytes(self.examples, self.sizes.compute, self.shared.tensor)
        layer, outside, gradients = self._sums()
        kept = {"none": layer, "selective": layer - scores, "full": self.stream // self.parts}
        recomputed = {"none": 0, "selective": scores, "full": layer + gradients}
        found = self._activations(kept[recompute], recomputed[recompute], layer, outside)
        if recompute == "selective" and self.decoder.scores:
            found = replace(found, again=self.decoder.layers * self._named["context"].flops)
        return found

    def by_names(self, names: Sequence[str]) -> _Activations:
        """The activations if a layer keeps its input and those of some names."""
        named = self._named
        layer, outside, gradients = self._sums()
        size = sum(named[name].size for name in names)
        again = sum(one.flops for name, one in named.items() if name not in names)
        # Attention that writes its scores makes them again, whatever is kept of it.
        if self.decoder.scores:
            again += named["context"].flops
        kept = self.stream // self.parts + size
        found = self._activations(kept, layer + gradients - size, layer, outside)
        return replace(found, again=self.decoder.layers * again)

    @property
    def _named(self) -> dict[str, Named]:
        """The named activations of a layer."""
        sizes, shared = self.sizes, self.shared
        return named_of(self.decoder, self.examples, sizes.compute, shared.tensor, self.parts)

    def _sums(self) -> tuple[int, int, int]:
        """What a layer keeps, what is kept outside of layers, and the gradients of an MLP."""
        # Embedding, last norm and head are there once, whatever the number of layers.
        layer, outside, gradients = 0, 0, 0
        for module in self.modules:
            if module.in_layer:
                layer += _kept_of(module, self.stream, self.parts)
                # What an MLP keeps gets gradients, each of its size, while all of it is there.
                gradients += module.kept_bytes if module.name == "mlp" else 0
            else:
                outside += _kept_of(module, self.stream, self.parts)
        return layer, outside, gradients

    def _activations(self, kept: int, recomputed: int, layer: int, outside: int) -> _Activations:
        return _Activations(
            kept=self.decoder.layers * kept + outside,
            outside=outside,
            layer=layer,
            recomputed=recomputed,
            logits=self.modules[-1].kept_bytes,
        )


def _kept_of(module: Module, stream: int, shard: int) -> int:
    """What is kept of a module, where the stream may be split along the sequence.

    Of a norm, its own intermediates are split, but what it hands on is gathered.
    """
    if "norm" not in module.name:
        return module.kept_bytes
    return (module.kept_bytes - stream) // shard + stream
