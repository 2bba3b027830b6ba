"""A decoder by its shape: its modules, and what each has, computes and keeps.

A decoder is described by a few numbers, and its modules follow from them:

    embedding -> layers x [ norm -> attention -> norm -> MLP ] -> norm -> head

Each module has its parameters, the FLOPs of a forward pass, and the bytes that JAX keeps of it for
the backward pass, where the module is written plainly: every intermediate that a derivative reads.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardlib.checks import _arguments as check

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Module:
    """A part of a decoder, such as the attention of a layer; figures are of one of them.

    - `name`: what it is, such as `attention`.
    - `count`: how many of them the decoder has.
    - `parameters`: how many parameters it has.
    - `flops`: floating-point operations of a forward pass.
    - `output`: the shape of what it hands on.
    - `kept_bytes`: what JAX keeps of it for the backward pass.
    - `in_layer`: whether each layer has one, as it has an attention, or the decoder has one, as it
      has a head.
    """

    name: str
    count: int
    parameters: int
    flops: int
    output: tuple[int, ...]
    kept_bytes: int
    in_layer: bool = False


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder (GPT, Llama): what the formulas of `sl.estimate` ask about.

    - `layers`: how many layers it has.
    - `width`: the size of the stream between layers.
    - `heads`: how many heads of queries an attention has.
    - `sequence`: tokens of an example.
    - `vocab`: how many tokens the vocabulary has.
    - `kv_heads`: heads of keys and values; by default as many as `heads`.
    - `head_dim`: the size of a head; by default the width over the heads.
    - `hidden`: the inner width of the MLP; by default four times the width.
    - `norm`: the kind of its norms, `"layer"` or `"rms"`.
    - `mlp`: the activation of its MLP; `"swiglu"` and `"geglu"` have a third matrix, for the gate.
    - `positions`: `"learned"`, a table of them, or `"rotary"`, which has no parameters.
    - `bias`: whether linear and `"layer"` norm layers add a bias.
    - `tied`: whether the head shares the embedding.
    - `final_norm`: whether there is a norm before the head.
    - `scores`: whether attention writes its scores to memory, as plain JAX does;
      `sl.kernels.attention` does not.

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
    mlp: Literal["gelu", "relu", "swiglu", "geglu"] = "gelu"
    positions: Literal["learned", "rotary"] = "learned"
    bias: bool = True
    tied: bool = True
    final_norm: bool = True
    scores: bool = True  # attention writes its scores to memory, as plain JAX does

    def __post_init__(self) -> None:
        # The type of a field says what it takes.
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
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"`Decoder(width={self.width})` must be a multiple of `heads={self.heads}`, or say "
                "the size of a head: `head_dim`."
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"`Decoder(heads={self.heads})` must be a multiple of `kv_heads={self.kv_heads}`."
            )

    def modules(self, examples: int = 1, itemsize: int = 2, tensor: int = 1) -> tuple[Module, ...]:
        """The modules of the decoder, in order; a layer's are there once, with their count.

        Figures are for so many `examples` in a dtype of `itemsize` bytes. FLOPs and what is kept
        are those of one of `tensor` devices, split as Megatron splits.
        """
        examples, itemsize, tensor = counts(
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
            replace(norm, name="attention_norm", count=self.layers, in_layer=True),
            self._attention(examples, itemsize, tensor),
            replace(norm, name="mlp_norm", count=self.layers, in_layer=True),
            self._mlp(examples, itemsize, tensor),
        ]
        if self.final_norm:
            modules.append(norm)
        return (*modules, head)

    def _attention(self, examples: int, itemsize: int, tensor: int) -> Module:
        """The attention of a layer: projections to queries, keys, values and back, and scores.

        Args:
            examples: how many a device has at once.
            itemsize: the bytes of a number that is kept.
            tensor: over how many devices heads are split: each has its share of what they take.
        """
        tokens, width, bias = examples * self.sequence, self.width, int(self.bias)
        head_dim = self.head_dim or width // self.heads
        # With grouped queries there are fewer heads of keys and values than of queries.
        queries, keys = self.heads * head_dim, (self.kv_heads or self.heads) * head_dim
        return Module(
            name="attention",
            count=self.layers,
            parameters=2 * width * (queries + keys) + bias * (queries + 2 * keys + width),
            flops=4 * tokens * (width * (queries + keys) + self.sequence * queries) // tensor,
            output=(examples, self.sequence, width),
            # Queries, keys, values and output, and what is kept of the scores.
            kept_bytes=2 * tokens * (queries + keys) * itemsize // tensor
            + self.score_bytes(examples, itemsize, tensor),
            in_layer=True,
        )

    def score_bytes(self, examples: int, itemsize: int, tensor: int = 1) -> int:
        """The bytes that are kept of the scores of a layer's attention, on one device.

        Of each score that is written these are its exponential in float32 and its probability. An
        attention that writes none keeps one number in float32 for each query and head, from which
        it makes them again.
        """
        queries = self.heads * self.sequence * examples // tensor
        if not self.scores:
            return 4 * queries
        return queries * self.sequence * (4 + itemsize)

    def _mlp(self, examples: int, itemsize: int, tensor: int) -> Module:
        """The MLP of a layer: two matrices, and a third for the gate of SwiGLU or GeGLU.

        Args:
            examples: how many a device has at once.
            itemsize: the bytes of a number that is kept.
            tensor: over how many devices the hidden dim is split.
        """
        tokens, width, bias = examples * self.sequence, self.width, int(self.bias)
        hidden = self.hidden or 4 * width
        # A gate is one matrix more.
        matrices = 3 if self.mlp in ("swiglu", "geglu") else 2
        return Module(
            name="mlp",
            count=self.layers,
            parameters=matrices * width * hidden + bias * (hidden * (matrices - 1) + width),
            flops=2 * matrices * tokens * width * hidden // tensor,
            output=(examples, self.sequence, width),
            # What each matrix into the MLP gives, and what the one out of it takes.
            kept_bytes=matrices * tokens * hidden * itemsize // tensor,
            in_layer=True,
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
        examples, tensor = counts("megatron_activation_bytes", examples=examples, tensor=tensor)
        check.boolean("megatron_activation_bytes", "sequence_parallel", sequence_parallel)
        check.choice("megatron_activation_bytes", "recompute", recompute, get_args(Recompute))
        s, h, a, t = self.sequence, self.width, self.heads, tensor
        stream = s * examples * h * self.layers
        # What is outside the matrices is split only along the sequence.
        parts = 1
        if sequence_parallel:
            parts = t
        if recompute == "full":
            return 2 * stream // parts
        scores = 0
        if recompute == "none":
            scores = 5 * a * s * s * examples * self.layers // t
        return 10 * stream // parts + 24 * stream // t + scores


def counts(function: str, **counts: Any) -> list[int]:
    """Numbers of at least one each, in order."""
    return [check.whole(function, name, value, least=1) for name, value in counts.items()]
