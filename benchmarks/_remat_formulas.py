"""What each word of `Strategy(remat=...)` keeps of a layer and computes again, compiled for TPUs
and GPUs.

The layer is GPT-2's without dropout, in bfloat16, of as many sequences as there are devices. Kept
is what one more layer adds to the most that activations take: the slope between two depths.
Beside it is a formula, term by term (`TERMS`), and Megatron's (Korthikanti et al., 2022, without
the masks of dropout). In `s b h`, numbers of the residual stream, with `a` heads:

    word         attention   ours                  Megatron's
    none         fused       32 + 4a/h             -
    none         plain       32 + 8a/h + 6as/h     32 + 4as/h
    selective    plain       32                    32
    selective    fused       32 + 4a/h             -
    minimal      fused       20 + 4a/h             -
    full         either      2                     2

Over `t` devices of a tensor axis, terms of heads and of the MLP's hidden width are divided by `t`;
with sequence parallelism, so is the stream, and with it what `full` keeps: ZeRO's split
activations.
"""

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib.compiled._compile import Compiled, compile_apart
from shardlib.compiled._flops import compiled_flops
from shardlib.compiled._memory import attribute
from shardlib.machine._targets import COMPILERS, installed
from shardlib.planning._compiled_step import kinds_of
from shardlib.planning._flops import flops_of_planned
from shardlib.planning._lower import lower

# Deep enough that what all layers keep of one kind is not in a TPU's fast memory instead, of 128
# MiB. Little is kept of deep ones, so that the device has room for them; and for deeper ones where
# devices share a layer. There, an array that is in fast memory at one depth alone is as large as
# what eight layers keep.
DEPTHS, DEEP, DEEPER, LITTLE = (8, 16), (32, 64), (32, 160), 2**25
LENGTH, WIDTH, HEADS, VOCAB = 2048, 1024, 8, 1024
STREAM = LENGTH * WIDTH
SCORES = HEADS * LENGTH * LENGTH
TARGETS = {"v5e": "tpu:v5e:2x4", "v5p": "tpu:v5p:2x2x2", "h200": "gpu:h200:1x1x8"}
MACHINES = {
    "tensor1": ("data=8,model=1", sl.rules.data),
    "tensor8": ("data=1,model=8", sl.rules.data | sl.rules.tensor),
    "sequence8": ("data=1,model=8", sl.rules.data | sl.rules.tensor_sequence),
}
ATTENTIONS = ("plain", "fused")
FUSED: dict[str, Literal["tpu", "cudnn"]] = {"tpu": "tpu", "gpu": "cudnn"}
WORDS = ("none", "selective", "minimal", "full")
# Over which axis an array is split: never, always, or with sequence parallelism.
Split = Literal["tensor", "sequence"]


@dataclass(frozen=True)
class Term:
    """An array that is kept of a layer: how many numbers of how many bytes, and how it is split.

    `words` are those that keep it, `attention` the kind that has it, or either.
    """

    array: str
    numbers: int
    itemsize: int
    split: Split
    words: tuple[str, ...]
    attention: str = ""

    def bytes_on(self, machine: str) -> int:
        """Of one device of a machine, where devices that share a layer have as many sequences."""
        sequences, parts = 1, 1
        if machine != "tensor1":
            sequences = 8
        if machine == "sequence8" or (machine == "tensor8" and self.split == "tensor"):
            parts = 8
        return sequences * self.numbers * self.itemsize // parts


ALL, BUT_FULL, WHOLE = WORDS, ("none", "selective", "minimal"), ("none", "selective")
TERMS = (
    Term("the stream that the first norm reads", STREAM, 2, "sequence", ALL),
    Term("what query, key and value are made of", STREAM, 2, "sequence", WHOLE),
    Term("query", STREAM, 2, "tensor", BUT_FULL),
    Term("key", STREAM, 2, "tensor", BUT_FULL),
    Term("value", STREAM, 2, "tensor", BUT_FULL),
    Term("exponentials of scores, in float32", SCORES, 4, "tensor", ("none",), "plain"),
    Term("shares, in bfloat16", SCORES, 2, "tensor", ("none",), "plain"),
    Term("sums and highest of scores", 2 * HEADS * LENGTH, 4, "tensor", ("none",), "plain"),
    Term("context", STREAM, 2, "tensor", BUT_FULL),
    Term("log-sum-exps", HEADS * LENGTH, 4, "tensor", BUT_FULL, "fused"),
    Term("what is added to the stream by attention", STREAM, 2, "sequence", ("minimal",)),
    Term("the stream that the second norm reads", STREAM, 2, "sequence", WHOLE),
    Term("what the MLP is made of", STREAM, 2, "sequence", WHOLE),
    Term("what the activation reads", 4 * STREAM, 2, "tensor", BUT_FULL),
    Term("what the activation makes", 4 * STREAM, 2, "tensor", WHOLE),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A program: a target, how a layer is split, which attention, and a word."""

    target: str
    machine: str
    attention: str
    word: str

    @property
    def name(self) -> str:
        """By which `--only` chooses it."""
        return f"{self.target}_{self.machine}_{self.attention}_{self.word}"

    @property
    def formula(self) -> int:
        """Bytes that a layer keeps, by our terms."""
        total = 0
        for term in TERMS:
            if self.word in term.words and term.attention in ("", self.attention):
                total += term.bytes_on(self.machine)
        return total

    @property
    def megatron(self) -> float | None:
        """Bytes that a layer keeps in Megatron's, without dropout; None where it has no formula."""
        tensor = 1 if self.machine == "tensor1" else 8
        stream = tensor if self.machine == "sequence8" else 1
        if self.word == "full":
            return tensor * STREAM * 2 / stream
        if self.word not in WHOLE or self.attention == "fused":
            return None
        scores = SCORES * 4 / tensor if self.word == "none" else 0
        return tensor * (STREAM * (8 / stream + 24 / tensor) + scores)


def cases() -> Iterator[Case]:
    """All programs; the words whose programs are the same, once."""
    for target in TARGETS:
        for machine in MACHINES:
            for attention in ATTENTIONS:
                for word in WORDS:
                    yield Case(target, machine, attention, word)


# What was compiled, by its target and its text: words may keep the same.
_programs: dict[tuple[str, str], Compiled] = {}


def compiled(case: Case, layers: int) -> tuple[Compiled, Any, dict[str, str]]:
    """A program of so many layers, its count of products, and the kinds of its arguments."""
    target = sl.Target(TARGETS[case.target])
    axes, rules = MACHINES[case.machine]
    mesh = target.mesh(axes)
    attention = "xla" if case.attention == "plain" else FUSED[target.platform]
    config = gpt.GPTConfig(
        layers=layers, width=WIDTH, heads=HEADS, context=LENGTH, vocab=VOCAB,
        attention=attention, kernels=None,
    )  # fmt: skip
    strategy = sl.Strategy(mesh=mesh, rules=rules, remat=case.word, precision="bf16")
    make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))  # noqa: E731
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, LENGTH + 1), "int32")}
    step = sl.train_step(gpt.loss, strategy)
    traced = lower(step, state, batch)
    key = (case.target, traced.lowered.as_text())
    if key not in _programs:
        options = target.compiler_options
        _programs[key] = compile_apart(traced.lowered, target.platform, options)
    program = _programs[key]
    kinds = kinds_of(traced.paths, len(jax.tree.leaves(state)))
    return program, flops_of_planned(step, traced.jaxpr), kinds


def figures_of(case: Case) -> dict[str, float]:
    """What a program keeps of a layer and recomputes, beside the formulas."""
    kept, error, again = [], 0.0, 0.0
    depths = DEPTHS
    if case.formula <= LITTLE:
        depths = DEEP if case.machine == "tensor1" else DEEPER
    for layers in depths:
        program, flops, kinds = compiled(case, layers)
        memory = attribute(program, sl.Target(TARGETS[case.target]).platform, kinds)
        kept.append(memory.most["activations"])
        # Of kernels the compiler says nothing.
        counted = (flops.total - flops.in_kernels) / 8
        error = max(error, abs(compiled_flops(program.text) / counted - 1))
        again = flops.recomputed_fraction
    slope = (kept[1] - kept[0]) / (depths[1] - depths[0])
    figures = {
        "bytes": slope,
        "formula": case.formula,
        "ratio": round(slope / case.formula, 4),
        "flops_error": error,
        "recomputes": round(again, 4),
    }
    if case.megatron is not None:
        figures["megatron"] = case.megatron
    return figures


def figures(only: Collection[str]) -> dict[str, Any]:
    """The figures of all programs, or of some by name, and the worst of them."""
    found: dict[str, Any] = {}
    ratios, errors = [], []
    for case in cases():
        if only and case.name not in only:
            continue
        platform = TARGETS[case.target].split(":")[0]
        if not installed(COMPILERS[platform]):
            print(f"{case.name}: its compiler is not installed; left out", file=sys.stderr)
            continue
        of_case = figures_of(case)
        print(case.name, of_case, file=sys.stderr, flush=True)
        ratios.append(of_case["ratio"])
        errors.append(of_case["flops_error"])
        for figure, value in of_case.items():
            found[f"{case.name}_{figure}"] = value
    return found | {
        "programs": len(ratios),
        "formula_ratio_max": max(ratios),
        "formula_ratio_min": min(ratios),
        "flops_error_max": max(errors),
    }
