"""What a run of `train_lm.py` is: one frozen value, which a function in `configs/` returns and the
command line may change.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx

import shardlib as sl
import shardlib.data
from examples.fields import fields, short
from models import gpt, hub, moe


@dataclass(frozen=True)
class AdamW:
    """AdamW whose learning rate warms up, then falls along a cosine.

    - `learning_rate`: at its highest.
    - `warmup`: steps until then.
    - `final`: the share of it that is left at the end.
    - `b1`, `b2`, `weight_decay`: AdamW's; what has one dim, norms and biases, does not decay.
    - `freeze`: 1-bit Adam, under a `strategy.exchange` of one bit: after how many steps, what part
      of the run, or `auto`, the variance is frozen and momenta are sent; none: never.
    """

    learning_rate: float = 3e-4
    warmup: int = 100
    final: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    freeze: int | float | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        _check_rates(self)
        if self.freeze is not None:  # which the optimizer that has it checks
            sl.optimizers.onebit_adam(self.learning_rate, freeze=self.freeze)

    def schedule(self, steps: int) -> optax.Schedule:
        """The learning rate by step of a run of so many."""
        return _warmup_and_cosine(self.learning_rate, self.warmup, self.final, steps)

    def make(self, steps: int) -> optax.GradientTransformation:
        """The optimizer for a run of so many steps."""
        options: dict[str, Any] = {
            "b1": self.b1,
            "b2": self.b2,
            "weight_decay": self.weight_decay,
            "mask": gpt.decays,
        }
        if self.freeze is not None:
            return sl.optimizers.onebit_adam(
                self.schedule(steps), freeze=self.freeze, steps=steps, **options
            )
        return optax.adamw(self.schedule(steps), **options)


@dataclass(frozen=True)
class Muon:
    """Muon, under AdamW's learning rate: it makes the steps of matrices orthogonal, and small
    models learn faster so.

    Kernels take its steps; embeddings, head and norms keep AdamW's.

    - `learning_rate`: at its highest.
    - `warmup`: steps until then.
    - `final`: the share of it that is left at the end.
    - `reach`: how far the elements of kernels move in a step, in learning rates; 0.2 is as far as
      under AdamW.
    - `momentum`: of the kernels' gradients.
    - `b1`, `b2`: AdamW's.
    - `weight_decay`: of kernels.
    """

    learning_rate: float = 3e-3
    warmup: int = 100
    final: float = 0.1
    reach: float = 0.2
    momentum: float = 0.95
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        _check_rates(self)
        _check_number(self, "reach", above=0)
        _check_number(self, "momentum", least=0, below=1)

    def schedule(self, steps: int) -> optax.Schedule:
        """The learning rate by step of a run of so many."""
        return _warmup_and_cosine(self.learning_rate, self.warmup, self.final, steps)

    def make(self, steps: int) -> optax.GradientTransformation:
        """The optimizer for a run of so many steps."""
        return optax.contrib.muon(
            self.schedule(steps),
            beta=self.momentum,
            weight_decay=self.weight_decay,
            consistent_rms=self.reach,
            adam_b1=self.b1,
            adam_b2=self.b2,
            muon_weight_dimension_numbers=_kernels,
        )


def _check_rates(optimizer: AdamW | Muon) -> None:
    """Refuse numbers with which nothing is learned, or that are no numbers."""
    _check_number(optimizer, "learning_rate", above=0)
    _check_whole(optimizer, "warmup", least=0, most=2**31 - 1)
    _check_number(optimizer, "final", least=0, most=1)
    _check_number(optimizer, "b1", least=0, below=1)
    _check_number(optimizer, "b2", least=0, below=1)
    _check_number(optimizer, "weight_decay", least=0)


def _check_number(
    owner: Any,
    name: str,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Refuse what is no finite number, or not between these."""
    value = getattr(owner, name)
    within = type(value) in (int, float) and least <= value <= most and above < value < below
    if not within:
        bounds = {"at least": least, "above": above, "below": below, "at most": most}
        said = " and ".join(
            f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound)
        )
        raise ValueError(
            f"`{type(owner).__name__}({name}={short(value)})`: a finite number, {said}."
        )


def _check_whole(owner: Any, name: str, least: int, most: int) -> None:
    """Refuse what is no whole number, or not between these."""
    value = getattr(owner, name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"`{type(owner).__name__}({name}={short(value)})`: a whole number, {least} to {most:,}."
        )


def _warmup_and_cosine(rate: float, warmup: int, final: float, steps: int) -> optax.Schedule:
    warmup = min(warmup, steps - 1)
    return optax.warmup_cosine_decay_schedule(
        0.0, rate, warmup, max(steps, warmup + 1), final * rate
    )


def _kernels(params: Any) -> Any:
    """The kernels, as Muon takes them: a matrix for each layer, whose outputs come first.

    Those of experts are a matrix for each layer and expert, and have their inputs first.
    """

    def matrix(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        names = {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}
        if "kernel" not in names:
            if leaf.ndim == 4 and names & {"up", "gate", "down"}:
                return optax.contrib.MuonDimensionNumbers((2,), (3,))
            return None
        # Attention's output reads heads and what is in them.
        inputs = leaf.ndim - (2 if "output" in names else 1)
        return optax.contrib.MuonDimensionNumbers(
            tuple(range(inputs, leaf.ndim)), tuple(range(1, inputs))
        )

    return jax.tree_util.tree_map_with_path(matrix, params)


@dataclass(frozen=True)
class LoRA:
    """Thin factors beside the kernels of layers, which learn in place of all else.

    - `rank`: of the factors; 0 is none, and all parameters learn.
    - `alpha`: what the factors add is times `alpha / rank`; none: once.
    - `paths`: patterns of the layers that have some, `.*/attention/(query|value)`.
    """

    rank: int = 0
    alpha: float | None = None
    paths: str | tuple[str, ...] = (".*",)

    def __post_init__(self) -> None:
        _check_whole(self, "rank", least=0, most=2**16)
        if self.alpha is not None:
            _check_number(self, "alpha", above=0)
        paths = (self.paths,) if isinstance(self.paths, str) else self.paths
        object.__setattr__(self, "paths", paths)
        is_texts = isinstance(paths, tuple) and all(isinstance(path, str) for path in paths)
        if not is_texts or not paths:
            raise ValueError(
                f"`LoRA(paths={short(self.paths)})`: a pattern of layers, or several in a tuple."
            )
        for path in paths:
            try:
                re.compile(path)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    f"`LoRA(paths=...)`: `{path}` is no regular expression: {error}."
                ) from error


@dataclass(frozen=True)
class Run:
    """A run: a model, what it reads, how it learns, and the machine it runs on.

    - `name`: of the run; it lives in the folder `runs/NAME` unless `folder` says otherwise.
    - `model`: what is trained, on sequences as long as its context.
    - `data`: the texts. The vocabulary of the model is at least the tokenizer's.
    - `batch`: sequences a step, over all devices and microbatches.
    - `optimizer`: how it learns.
    - `strategy`: how the machine runs it.
    - `loop`: how long it is, and what happens on the way.
    - `evaluation_batches`: at most so many batches of held-out text are measured at a time.
    - `across_documents`: whether a token sees the documents before its own that share its sequence.
    - `seed`: of the model, of the order of the data, and of dropout; a whole number of 32 bits.
    - `folder`, `cache`: where the run, and the tokens of its data, are kept.
    - `tensorboard`: whether to write curves for TensorBoard too.
    - `prompt`: what the sample at the end begins with; none is written where it is empty.
    - `start`: a folder whose weights the run begins with: of a published model, or of a run.
    - `lora`: factors that learn in place of all parameters.
    """

    name: str
    model: gpt.GPTConfig
    data: shardlib.data.Corpus
    batch: int
    strategy: sl.Strategy
    loop: sl.Loop
    optimizer: AdamW | Muon = AdamW()
    evaluation_batches: int = 50
    across_documents: bool = False
    seed: int = 0
    folder: str = ""
    cache: str = ""
    tensorboard: bool = False
    prompt: str = ""
    start: str = ""
    lora: LoRA = LoRA()

    def __post_init__(self) -> None:
        for name in ("batch", "evaluation_batches"):
            _check_whole(self, name, least=1, most=2**26)
        if self.lora.rank and isinstance(self.optimizer, Muon):
            raise ValueError(
                f"`Run(optimizer=Muon, lora.rank={self.lora.rank})`: Muon moves kernels, and "
                "factors are none: `--optimizer adamw`."
            )
        if self.lora.rank and self.strategy.frozen:
            raise ValueError(
                f"`Run(strategy.frozen={short(self.strategy.frozen)}, "
                f"lora.rank={self.lora.rank})`: with factors all else is frozen already; choose "
                "layers by `--lora.paths`, and leave `frozen` out."
            )
        # JAX makes a key of the last 32 bits: seeds that have these in common would be one.
        _check_whole(self, "seed", least=0, most=2**32 - 1)
        for name in ("name", "folder", "cache", "prompt", "start"):
            value = getattr(self, name)
            if not isinstance(value, str) or (name == "name" and not value):
                raise ValueError(f"`Run({name}={short(value)})`: text.")
        for name in ("name", "folder", "cache"):
            longest = max(
                len(part.encode(errors="replace")) for part in getattr(self, name).split("/")
            )
            if longest > 255 or "\0" in getattr(self, name):
                raise ValueError(
                    f"`Run({name}={short(getattr(self, name))})`: a path, of at most 255 bytes "
                    "between slashes, without zeros."
                )

    @property
    def home(self) -> Path:
        """The folder of the run."""
        folder = Path(self.folder or f"runs/{self.name}")
        try:
            return folder.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(f"`folder={str(folder)!r}`: {error}") from error

    def make_model(self) -> gpt.GPT:
        """The model as it is before the first step."""
        model = hub.model(self.model, nnx.Rngs(self.seed))
        if not self.lora.rank:
            return model
        rngs = nnx.Rngs(self.seed + 1)
        options = {"alpha": self.lora.alpha, "paths": self.lora.paths}
        return sl.lora.add(model, self.lora.rank, rngs=rngs, **options)

    def make_optimizer(self) -> optax.GradientTransformation:
        """The optimizer. Biases of routers follow the load of their experts."""
        optimizer = self.optimizer.make(self.loop.steps)
        has_biases = isinstance(self.model, moe.MoEConfig) and self.model.balance_bias
        return sl.experts.balanced(optimizer) if has_biases and not self.lora.rank else optimizer

    @property
    def step_strategy(self) -> sl.Strategy:
        """The strategy of the step: beside factors that learn, all else is frozen."""
        if not self.lora.rank:
            return self.strategy
        return dataclasses.replace(self.strategy, frozen=sl.lora.FROZEN)

    def prompt_ids(self, tokenizer: shardlib.data.Tokenizer, text: str) -> np.ndarray:
        """The tokens of a prompt: of conversations, a message of the user, and then the assistant's
        turn.
        """
        if isinstance(self.data.chat, shardlib.data.Chat):
            prompt = self.data.chat.prompt_ids(tokenizer, [("user", text)])
        else:
            prompt = tokenizer.encode_batch([text])[0]
        return np.concatenate([tokenizer.encode_marker(self.data.prefix), prompt])

    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array | None) -> Any:
        """What training makes less of a batch of sequences; of experts with the losses of routers,
        and with metrics of them.
        """
        of_model = moe.loss if isinstance(self.model, moe.MoEConfig) else gpt.loss
        return of_model(model, self._read(batch), rng)

    def entropy(self, model: gpt.GPT, batch: dict[str, jax.Array]) -> sl.WeightedMean:
        """The cross-entropy of a batch of sequences alone."""
        return gpt.loss(nnx.view(model, deterministic=True), self._read(batch), None)

    def _read(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """What is read of a batch."""
        seen = {"tokens", "mask"} if self.across_documents else {"tokens", "mask", "segments"}
        return {name: array for name, array in batch.items() if name in seen}

    def end(self, tokenizer: shardlib.data.Tokenizer) -> int:
        """The token that ends a text: of conversations, what ends a turn."""
        end = None
        if isinstance(self.data.chat, shardlib.data.Chat):
            end = self.data.chat.end_of_turn(tokenizer)
        return tokenizer.end if end is None else end

    def planned(
        self, target: sl.Target, mesh: str = "", dcn: str = ""
    ) -> tuple[sl.Step, sl.State, Any]:
        """The step of this run on a machine that need not be there, for `python -m shardlib plan`.

        State and batch are abstract. Without a `mesh`, the axes are those of the run's strategy.
        """
        if not mesh:
            own = self.strategy.mesh
            mesh = (
                own
                if isinstance(own, str)
                else ",".join(f"{axis}={size}" for axis, size in own.shape.items())
            )
            dcn = dcn or self.strategy.dcn
        strategy = dataclasses.replace(self.step_strategy, mesh=target.mesh(mesh, dcn=dcn), dcn="")
        optimizer = self.make_optimizer()
        state = sl.init(self.make_model, optimizer, strategy, seed=self.seed, abstract=True)
        ids, targets = (self.batch, self.model.context + 1), (self.batch, self.model.context)
        batch = {
            "tokens": jax.ShapeDtypeStruct(ids, "int32"),
            "segments": jax.ShapeDtypeStruct(ids, "int32"),
            "mask": jax.ShapeDtypeStruct(targets, "float32"),
        }
        return sl.train_step(self.loss, strategy), state, batch

    def lines(self) -> dict[str, str]:
        """Every field by its dotted name, as text."""
        return {name: repr(value) for name, value in fields(self)}


# What may differ where a run is taken up again: where and how it runs, how long, and what it says.
# The rest is the run.
MAY_CHANGE = (
    "strategy.",
    "loop.",
    "folder",
    "cache",
    "tensorboard",
    "prompt",
    "evaluation_batches",
    "name",
)
