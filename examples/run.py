"""What a run of `train_lm.py` is: one frozen value, which a function in `configs/` returns and the
command line may change.
"""

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
import shardlib.data
from models import gpt, hub, moe

CONFIGS = Path(__file__).parent / "configs"


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
            f"`{type(owner).__name__}({name}={_short(value)})`: a finite number, {said}."
        )


def _check_whole(owner: Any, name: str, least: int, most: int) -> None:
    """Refuse what is no whole number, or not between these."""
    value = getattr(owner, name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"`{type(owner).__name__}({name}={_short(value)})`: a whole number, "
            f"{least} to {most:,}."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text):,} letters)"


def _warmup_and_cosine(rate: float, warmup: int, final: float, steps: int) -> optax.Schedule:
    warmup = min(warmup, steps - 1)
    return optax.warmup_cosine_decay_schedule(
        0.0, rate, warmup, max(steps, warmup + 1), final * rate
    )


def _kernels(params: Any) -> Any:
    """The kernels, as Muon takes them: a matrix for each layer, whose outputs come first."""

    def matrix(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        names = {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}
        if "kernel" not in names:
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
                f"`LoRA(paths={_short(self.paths)})`: a pattern of layers, or several in a tuple."
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
    - `seed`: of the model, of the order of the data, and of dropout.
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
                f"`Run(strategy.frozen={_short(self.strategy.frozen)}, "
                f"lora.rank={self.lora.rank})`: with factors all else is frozen already; choose "
                "layers by `--lora.paths`, and leave `frozen` out."
            )
        _check_whole(self, "seed", least=0, most=2**63 - 1)
        for name in ("name", "folder", "cache", "prompt", "start"):
            value = getattr(self, name)
            if not isinstance(value, str) or (name == "name" and not value):
                raise ValueError(f"`Run({name}={_short(value)})`: text.")
        for name in ("name", "folder", "cache"):
            longest = max(
                len(part.encode(errors="replace")) for part in getattr(self, name).split("/")
            )
            if longest > 255 or "\0" in getattr(self, name):
                raise ValueError(
                    f"`Run({name}={_short(getattr(self, name))})`: a path, of at most 255 bytes "
                    "between slashes, without zeros."
                )

    @property
    def home(self) -> Path:
        """The folder of the run."""
        return Path(self.folder or f"runs/{self.name}").expanduser().absolute()

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
        return {name: repr(value) for name, value in _fields(self)}


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


def from_command_line(arguments: Sequence[str]) -> Run:
    """The run that a command line names, with its changes:
    `tiny --loop.steps 100 --strategy.mesh data=2,model=4`.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        names = ", ".join(sorted(path.stem for path in CONFIGS.glob("[!_]*.py")))
        print(
            f"usage: {Path(sys.argv[0]).name} RUN [--FIELD VALUE ...]\n\nRUN is one of {names}; or "
            "`path/to/file.py:function`, a function that returns a `Run`;\nor `path/to/run.json`, "
            "the same run as the one that wrote it.\nRUN --help lists its fields."
        )
        raise SystemExit(0 if arguments else 2)
    run = _named(arguments[0])
    if {"-h", "--help"} & set(arguments[1:]):
        show_help(run)
        raise SystemExit(0)
    try:
        return override(run, arguments[1:])
    except ValueError as error:
        raise SystemExit(f"{error}\n`{arguments[0]} --help` lists the fields.") from error


def override(value: Any, arguments: Sequence[str]) -> Any:
    """A value of frozen dataclasses with fields changed by their dotted names: `--loop.steps 100`,
    or `--loop.steps=100`.

    >>> override(AdamW(), ["--warmup", "20", "--learning_rate=1e-3"])
    AdamW(learning_rate=0.001, warmup=20, final=0.1, b1=0.9, b2=0.95, weight_decay=0.1, freeze=None)
    >>> override(AdamW(), ["--warmpu", "20"])
    Traceback (most recent call last):
    ValueError: There is no field `warmpu`; did you mean `warmup`?
    """
    rest, changes = list(arguments), []
    while rest:
        name, equals, text = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"Fields are given as `--FIELD VALUE`; got `{name}`.")
        if not equals:
            if not rest:
                raise ValueError(f"`{name}` has no value.")
            text = rest.pop(0)
        changes.append((name[2:].replace("-", "_"), text))
    for name, text in changes:
        if kinds := _kinds(type(value), name):
            value = dataclasses.replace(value, **{name: _kind(name, text, kinds)()})
    changes = [(name, text) for name, text in changes if not _kinds(type(value), name)]
    for name, _ in changes:
        known = [name for name, _ in _fields(value)]
        if name not in known:
            raise ValueError(f"There is no field `{name}`{_meant(name, known)}")
    return _changed(value, dict(changes))


def _kinds(owner: type, name: str) -> dict[str, type]:
    """The classes of which a group of fields is one, by their names in small letters, where there
    is a choice.
    """
    choices = get_args(get_type_hints(owner).get(name))
    if not choices or not all(map(dataclasses.is_dataclass, choices)):
        return {}
    return {kind.__name__.lower(): kind for kind in choices}


def _kind(name: str, text: str, kinds: dict[str, type]) -> type:
    if text.lower() not in kinds:
        raise ValueError(
            f"`{name}` is {' or '.join(f'`{kind}`' for kind in kinds)}, with its own fields; got "
            f"`{text}`."
        )
    return kinds[text.lower()]


def _meant(name: str, known: Sequence[str]) -> str:
    """The end of a message on a field that does not exist: those that were probably meant."""
    group, _, last = name.rpartition(".")
    of_group = [one for one in known if one.startswith(f"{name}.")]
    if of_group:
        return f": it is a group of fields, {_listed(of_group)}."
    beside = [one for one in known if group and one.startswith(f"{group}.")]
    ends: dict[str, list[str]] = {}
    for one in beside or known:
        ends.setdefault(one.rpartition(".")[2], []).append(one)
    near = ends.get(last) or [
        one
        for end in difflib.get_close_matches(last, list(ends), 1, 0.6 if beside else 0.75)
        for one in ends[end]
    ]
    if near:
        return f"; did you mean {' or '.join(f'`{one}`' for one in near)}?"
    return f": `{group}` has {_listed(beside)}." if beside else "."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _changed(value: Any, changes: dict[str, str]) -> Any:
    """All fields of one dataclass at once, since each may be wrong without the other."""
    new: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        of = {k: v for k, v in changes.items() if k.split(".")[0] == field.name}
        now = getattr(value, field.name)
        if field.name in of:
            new[field.name] = _parsed(
                field.name, of[field.name], now, get_type_hints(type(value))[field.name]
            )
        elif of:
            new[field.name] = _changed(now, {k.split(".", 1)[1]: v for k, v in of.items()})
    return dataclasses.replace(value, **new)


def _parsed(name: str, text: str, now: Any, hint: Any) -> Any:
    if isinstance(now, sl.AxisRules):
        return _rules(text)
    if name == "pipeline" and text.lower() != "none":
        return _schedule(text)
    if name == "exchange":
        return _exchange(text)
    if name == "remat":
        return _remat(text)
    choices = [
        one
        for kind in (hint, *get_args(hint))
        if get_origin(kind) is Literal
        for one in get_args(kind)
    ]
    if name in ("separator", "prompt"):  # a newline is typed as \n
        return _unescaped(name, text) if text.lower() != "none" else None
    if hint is str or text in choices:
        return text
    if re.match(r"\w+\(", text) and text.partition("(")[0] in _types(name):
        return _value(name, text)
    words = {"true": True, "false": False, "none": None}
    try:
        value = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = text
    may_be = {
        type(None) if kind is None else get_origin(kind) or kind
        for kind in get_args(hint) or (hint,)
    }
    if value is None and type(None) not in may_be and hint is not Any:
        raise ValueError(f"`{name}` cannot be none; it is {now!r} now.")
    if bool in may_be and not isinstance(value, bool):
        raise ValueError(f"`{name}` is true or false; got {_short(text)}.")
    if bool not in may_be and isinstance(value, bool):
        raise ValueError(f"`{name}` is neither true nor false; it is {now!r} now.")
    if (
        may_be & {int, float}
        and not isinstance(value, int | float | None)
        and not may_be - {int, float, type(None)}
    ):
        raise ValueError(f"`{name}` is a number, {now} now; got {_short(text)}.")
    if may_be == {int} and isinstance(value, float):
        raise ValueError(f"`{name}` is a whole number, {now} now; got {_short(text)}.")
    if isinstance(now, float) and type(value) is int and int not in may_be:
        return float(value) if abs(value) < 2**1000 else math.inf
    return value


def _unescaped(name: str, text: str) -> str:
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`{name}` has a backslash that begins nothing, {_short(text)}: two of them are one of "
            f"the text ({error.reason})."
        ) from error


def _rules(text: str) -> sl.AxisRules:
    presets = {
        name: value for name, value in vars(sl.rules).items() if isinstance(value, sl.AxisRules)
    }
    rules = sl.AxisRules({})
    for part in text.split("|"):
        name, given, axes = (word.strip() for word in part.partition("="))
        if not given and name not in presets:
            raise ValueError(
                f"Rules are presets, of {', '.join(presets)}, and rules of a name, "
                f"`batch=pod,data`, joined by `|`; got `{text}`."
            )
        one = axes.split(",") if axes.lower() != "none" else None
        rules = rules | (
            presets[name]
            if not given
            else sl.AxisRules({name: None if one is None else tuple(one)})
        )
    return rules


def _schedule(text: str) -> sl.pipeline.Schedule:
    name, *numbers = text.split(":")
    counts = (2, 3) if name == "interleaved" else (2,)
    if (
        name not in sl.pipeline.SCHEDULES
        or len(numbers) not in counts
        or not all(map(_is_count, numbers))
    ):
        raise ValueError(
            "A pipeline is a schedule, its stages and its microbatches, `1f1b:4:16`, of "
            f"{', '.join(sl.pipeline.SCHEDULES)}; `interleaved:4:16:3` has 3 parts on a stage. Got "
            f"`{text}`."
        )
    try:
        return sl.pipeline.SCHEDULES[name](*map(int, numbers))
    except ValueError as error:
        raise ValueError(f"The pipeline `{text}`: {error}") from error


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def _remat(text: str) -> Any:
    """A word, names of activations, a chain or a budget: `full`, `context|mlp_up`, `every:4`,
    `slots:4`, `budget:14GiB`, which may have names for the host, `budget:14GiB,block_in`; names of
    which some are kept by the host, `context|offload:block_in`, or in fewer bits,
    `query|compress:int8:mlp_up,context`.

    A name that no activation has is refused by the step, which knows them.
    """
    if text in REMATS:
        return text
    name, colon, number = text.partition(":")
    if name == "budget":
        memory, *on_host = number.split(",")
        return sl.Remat.budget(memory, offload=tuple(name.strip() for name in on_host))
    if "offload:" in text or "compress:" in text:
        return _remat_of_names(text)
    if colon and name.isidentifier():
        chains = {"every": sl.Remat.every, "slots": sl.Remat.slots}
        if name not in chains or not _is_count(number):
            raise ValueError(
                "A chain of blocks is `every:4`, which keeps the input of every fourth, or "
                f"`slots:4`, which keeps four of them at a time; got `{text}`."
            )
        return chains[name](int(number))
    return sl.Remat.save(*(name.strip() for name in text.split("|")))


def _remat_of_names(text: str) -> sl.Remat:
    """Names of activations, some by the host or in fewer bits: `query|offload:block_in`."""
    remat = sl.Remat()
    for part in text.split("|"):
        word, _, rest = part.strip().partition(":")
        encoding, _, names = rest.rpartition(":")
        listed = [name.strip() for name in names.split(",")]
        if word == "compress" and encoding:
            remat |= sl.Remat.compress(encoding, *listed)  # type: ignore[arg-type]
        elif word == "offload" and names and not encoding:
            remat |= sl.Remat.offload(*listed)
        elif rest or word in (*REMATS, "compress", "offload"):
            raise ValueError(
                "Names of activations are `context|mlp_up`; of those that the host keeps, "
                "`offload:block_in`; and of those in fewer bits, `compress:int8:mlp_up,context`; "
                f"got `{text}`."
            )
        else:
            remat |= sl.Remat.save(word)
    return remat


def _exchange(text: str) -> sl.Exchange:
    """An exchange as text: `exact`, `onebit:pod`, `powersgd:pod:4` or `diloco:pod:500`."""
    made: dict[str, Any] = {
        "onebit": sl.collectives.OneBit,
        "int8": partial(sl.collectives.Quantised, bits=8),
        "int4": partial(sl.collectives.Quantised, bits=4),
        "server": sl.collectives.ParameterServer,
    }
    numbered: dict[str, Any] = {
        "powersgd": sl.collectives.PowerSGD,
        "local": sl.collectives.LocalSGD,
        "diloco": sl.collectives.DiLoCo,
        "elastic": sl.collectives.ElasticAveraging,
    }
    if text == "exact":
        return sl.Exact()
    name, _, rest = text.partition(":")
    axes, _, number = rest.partition(":")
    fits = (name in made and not number) or (name in numbered and number.isdigit())
    if not fits or not axes:
        raise ValueError(
            f"An exchange is `exact`; one of {', '.join(made)} and the axes that it takes, "
            f"`onebit:pod`; or one of {', '.join(numbered)} with a number more, the rank of "
            f"factors or the steps between meetings, `diloco:pod:500`; got `{text}`."
        )
    axis = tuple(axes.split(",")) if "," in axes else axes
    if name in made:
        return made[name](axis)
    if name == "powersgd":
        return sl.collectives.PowerSGD(axis, rank=int(number))
    return numbered[name](axis, every=int(number))


def _fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        whole = isinstance(
            inner,
            sl.AxisRules
            | sl.Precision
            | sl.Remat
            | sl.Offload
            | sl.Zero
            | sl.Exchange
            | shardlib.data.Chat
            | gpt.RopeScaling
            | gpt.LinearScaling
            | gpt.YarnScaling
            | gpt.LatentAttention,
        ) or field.name in ("pipeline", "remat", "router")
        if dataclasses.is_dataclass(inner) and not whole:
            yield from _fields(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, inner


def show_help(run: Run) -> None:
    """Print the fields of a run."""
    print(_help(run))


def _help(run: Run) -> str:
    """Every field with its value, and what the docstrings say of it."""
    lines = [inspect.getdoc(type(run)).partition("\n")[0]]  # type: ignore[union-attr]
    for name, value in _fields(run):
        owner = run
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        said = _said(type(owner)).get(name.rpartition(".")[2], "")
        lines.append(f"  --{name} {value!r}" + (f"\n        {said}" if said else ""))
    return "\n".join(lines)


def _said(kind: type) -> dict[str, str]:
    """What the list in a docstring says of each field."""
    items = re.findall(
        r"^- ((?:`\w+`(?:, )?)+): (.*(?:\n  .*)*)", inspect.getdoc(kind) or "", re.MULTILINE
    )
    return {
        name: " ".join(text.split())
        for names, text in items
        for name in re.findall(r"`(\w+)`", names)
    }


# What values in a `run.json` are made of, beside numbers, texts and their like.
_TYPES: dict[str, Any] = {
    **{
        kind.__name__: kind
        for kind in (
            sl.AxisRules,
            sl.Zero,
            sl.Precision,
            sl.Remat,
            sl.Offload,
            sl.Exact,
            shardlib.data.Chat,
            gpt.RopeScaling,
            gpt.LinearScaling,
            gpt.YarnScaling,
            gpt.LatentAttention,
        )
    },
    # What else blocks may keep: `Remat` makes these.
    **{
        type(made).__name__: type(made)
        for made in (
            sl.Remat.every(1).chain,
            sl.Remat.slots(1).chain,
            sl.Remat.layers((1, "none")),
            sl.Remat.budget(1),
        )
    },
    **{name: kind for name, kind in vars(sl.collectives).items() if isinstance(kind, type)},
    **{name: kind for name, kind in vars(sl.pipeline).items() if isinstance(kind, type)},
    "dtype": np.dtype,
}
# Routers have names of their own: `TopK` is one, and an exchange too.
_ROUTERS = {name: kind for name, kind in vars(sl.experts).items() if isinstance(kind, type)}
REMATS = (
    *("none", "full", "stage", "dots", "dots_without_batch"),
    *("selective", "minimal", "sublinear"),
)
MODELS = (gpt.GPTConfig, moe.MoEConfig)  # that the field `model` may be
OF_TEXTS = ("train", "held out")  # in a `run.json` beside the fields: fingerprints of the tokens


def recorded(path: str | Path) -> Run:
    """The run that wrote a `run.json`, with every field as it was."""
    try:
        lines = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise SystemExit(f"There is no file `{path}`.") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"`{path}` cannot be read: {error}") from error
    if not isinstance(lines, dict) or not all(isinstance(text, str) for text in lines.values()):
        raise SystemExit(f"`{path}` is not the `run.json` of a run: it holds no fields as text.")
    lines = {name: text for name, text in lines.items() if name not in OF_TEXTS}
    try:
        run = _rebuilt(Run, lines)
    except ValueError as error:
        raise SystemExit(f"`{path}` cannot be taken up: {error}") from error
    now = run.lines()
    if differing := [name for name in {**lines, **now} if lines.get(name) != now.get(name)]:
        raise SystemExit(
            f"`{path}` cannot be taken up: this version of the program has other fields, or reads "
            f"them otherwise: {_listed(differing)}."
        )
    return run


def _rebuilt(kind: type, lines: dict[str, str], prefix: str = "") -> Any:
    """A frozen dataclass from what `lines` wrote of it."""
    new: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name, below = prefix + field.name, f"{prefix}{field.name}."
        inner = {
            line.removeprefix(below).partition(".")[0] for line in lines if line.startswith(below)
        }
        if name in lines:
            new[field.name] = _value(name, lines[name])
        elif inner:
            hint = get_type_hints(kind)[field.name]
            kinds = MODELS if hint is gpt.GPTConfig else get_args(hint) or (hint,)
            fitting: list[type] = []
            for one in kinds:
                names = {f.name for f in dataclasses.fields(one)} if _is_record(one) else set()
                if names == inner:
                    fitting.append(one)
            if not fitting:
                raise ValueError(
                    f"`{name}` has the fields {_listed(sorted(inner))}, which this "
                    "version does not know."
                )
            new[field.name] = _rebuilt(fitting[0], lines, below)
        else:
            raise ValueError(f"it has no `{name}`.")
    return kind(**new)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _value(name: str, text: str) -> Any:
    if scalar := re.fullmatch(r"<class '[\w.]*?(\w+)'>", text):  # jnp.bfloat16 and its like
        return getattr(jnp, scalar[1])
    try:
        return _evaluated(ast.parse(text, mode="eval").body, _types(name))
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"`{name} = {text}` is not written so that it can be made again. Begin from the "
            "function that gives the run."
        ) from error


def _types(name: str) -> dict[str, Any]:
    """The types that the value of a field may be made of."""
    return _ROUTERS if name.rpartition(".")[2] == "router" else _TYPES


def _evaluated(node: ast.expr, types: dict[str, Any]) -> Any:
    """The value of an expression of constants and of some types; nothing else is called."""
    of = partial(_evaluated, types=types)
    if isinstance(node, ast.Call):
        call: Any
        if isinstance(node.func, ast.Attribute):  # AxisRules(...).indivisible(...)
            rules = of(node.func.value)
            if not isinstance(rules, sl.AxisRules) or node.func.attr != "indivisible":
                raise ValueError(f"nothing is called `{node.func.attr}`")
            call = rules.indivisible
        else:
            call = types[node.func.id] if isinstance(node.func, ast.Name) else None
            call = _rules_of if call is sl.AxisRules else call
        named = {str(one.arg): of(one.value) for one in node.keywords}
        return call(*map(of, node.args), **named)
    if isinstance(node, ast.Tuple):
        return tuple(map(of, node.elts))
    if isinstance(node, ast.List):
        return list(map(of, node.elts))
    return ast.literal_eval(node)


def _rules_of(known: Collection[str] = (), **rules: Any) -> sl.AxisRules:
    """Rules as they are printed: `known` are names without a rule."""
    return sl.AxisRules.knowing(*known) | sl.AxisRules(rules)


def _named(name: str) -> Run:
    if name.endswith(".json"):
        return recorded(name)
    path, _, function = name.partition(":")
    if path.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        if spec is None or spec.loader is None or not Path(path).exists():
            raise SystemExit(f"There is no file `{path}`.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        known = sorted(one.stem for one in CONFIGS.glob("[!_]*.py"))
        if path not in known:
            near = difflib.get_close_matches(path, known, 1, 0.5)
            raise SystemExit(
                f"There is no run `{path}`{f'; did you mean `{near[0]}`?' if near else '.'} There "
                f"are {', '.join(known)}; or name a function of a file of your own: "
                "`my_run.py:run`."
            )
        module = importlib.import_module(f"examples.configs.{path}")
    made = getattr(module, function or "run", None)
    if made is None:
        raise SystemExit(
            f"`{path}` has no function `{function or 'run'}`, which would return the run."
        )
    return made()
