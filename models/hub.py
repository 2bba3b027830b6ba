"""Models whose weights others have published: their configurations, and where their tensors go.

    config = hub.config("Llama-3-8B")                      # the folder that holds the files
    state = sl.init(lambda: hub.model(config, nnx.Rngs(0)), optimizer, strategy)
    state = sl.weights.load("Llama-3-8B", state, hub.table_in("Llama-3-8B", config))

GPT-2, Llama 1 to 3.2, Mistral, Mixtral, Qwen 2 and 3, Gemma 1 to 3 and DeepSeek-V3 have the names
that Hugging Face's transformers gives them. Of models that read images too, what reads texts is
taken. `sl.weights.save` writes files that it reads.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from models import gpt, hub_configs, hub_descriptions, hub_tables, moe
from shardlib.weights import Table, open_tensors


def config(folder: str | Path, **changes: Any) -> gpt.GPTConfig:
    """The configuration of the model in a folder, by its `config.json`."""
    file = Path(folder) / "config.json"
    said = _said(folder)
    kind = said.get("model_type")
    if kind in hub_configs.WITH_TEXTS:
        _check_known(file, said)
        # Of a model that reads images too, the part that reads texts.
        said = said.get(hub_configs.WITH_TEXTS[kind]) or {}
        kind = said.get("model_type")
    if kind not in hub_configs.READERS:
        known = ", ".join(map(repr, hub_configs.READERS))
        raise ValueError(f"{file} is of a model of type {kind!r}; known are {known}.")
    said = {**hub_configs.DEFAULTS.get(kind, {}), **said}
    _check_known(file, said)
    try:
        return hub_configs.READERS[kind](said, changes)
    except KeyError as error:
        raise ValueError(f"{file} has no `{error.args[0]}`.") from error


def _check_known(file: Path, said: dict[str, Any]) -> None:
    """Refuse a configuration that has what the models here do not."""
    for field, absent in hub_configs.UNKNOWN.items():
        if said.get(field) not in (None, absent):
            raise ValueError(
                f"{file} has `{field}` {said[field]!r}, which the models here do not know."
            )


def _said(folder: str | Path) -> dict[str, Any]:
    """What the `config.json` in a folder says."""
    file = Path(folder) / "config.json"
    try:
        said = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    if not isinstance(said, dict):
        raise ValueError(f"{file} is no configuration: it is no JSON object.")
    return said


def reads_more_than_texts(folder: str | Path) -> bool:
    """Whether the model in a folder has parts that read images, which the models here leave out."""
    return _said(folder).get("model_type") in hub_configs.WITH_TEXTS


def description(config: gpt.GPTConfig) -> dict[str, Any]:
    """What a `config.json` says of a model, as transformers reads it, and `config` above."""
    return hub_descriptions.description(config)


def end_token(folder: str | Path) -> str | None:
    """The token that ends a document, by the `tokenizer_config.json` in a folder, if it says so."""
    return _token(_tokenizer_settings(folder), "eos_token")


def _tokenizer_settings(folder: str | Path) -> dict[str, Any]:
    """What the `tokenizer_config.json` in a folder says, nothing where there is none."""
    file = Path(folder) / "tokenizer_config.json"
    if not file.exists():
        return {}
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is no JSON object.")
    return settings


def _token(settings: dict[str, Any], name: str) -> str | None:
    """A token by its name, which may be a text or a record."""
    token = settings.get(name)
    return token.get("content") if isinstance(token, dict) else token


def begin_token(folder: str | Path) -> str | None:
    """The token that a text begins with, if the tokenizer in a folder puts one there: by the
    `add_bos_token` of its `tokenizer_config.json`, or else by its `tokenizer.json`.
    """
    settings = _tokenizer_settings(folder)
    if settings.get("add_bos_token") is not None:
        return _token(settings, "bos_token") if settings["add_bos_token"] else None
    file = Path(folder) / "tokenizer.json"
    if not file.exists():
        return None
    try:
        processor = json.loads(file.read_text()).get("post_processor") or {}
        for step in processor.get("processors", [processor]):
            if step.get("type") == "TemplateProcessing":
                return step["single"][0].get("SpecialToken", {}).get("id")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no tokenizer: {error!r}.") from error
    return None


def model(config: gpt.GPTConfig, rngs: nnx.Rngs) -> gpt.GPT:
    """A new model of a configuration."""
    if isinstance(config, moe.MoEConfig):
        return moe.MoE(config, rngs=rngs)
    return gpt.GPT(config, rngs=rngs)


def weights(folder: str | Path) -> tuple[Callable[[], gpt.GPT], Table, dict[str, Any]]:
    """How to make the model in a folder, the table of its tensors, and its configuration.

    It is what `python -m shardlib weights import` asks.
    """
    found = config(folder)
    said = description(found) if reads_more_than_texts(folder) else _said(folder)
    return lambda: model(found, nnx.Rngs(0)), table_in(folder, found), said


def table(config: gpt.GPTConfig, prefix: str | None = None) -> Table:
    """Which tensors make up the parameters of a model.

    Args:
        config: of the model.
        prefix: before the names of all tensors but the head's; by default `"model."`, and
            `"transformer."` for GPT-2, whose first files have none.
    """
    if config.positions == "learned":
        return hub_tables.gpt2(config, "transformer." if prefix is None else prefix)
    return hub_tables.llama(config, "model." if prefix is None else prefix)


def table_in(folder: str | Path, config: gpt.GPTConfig) -> Table:
    """The table of a model for the files in a folder, whose tensors may have another prefix.

    So do the first files of GPT-2, and models that read images too, of which only what reads texts
    is taken. Without safetensors in the folder it is that of the files that would be written.
    """
    if not any(Path(folder).glob("*.safetensors")):
        return table(config)
    embedding = "wte.weight" if config.positions == "learned" else "embed_tokens.weight"
    names = [name for name in open_tensors(folder).tensors if name.endswith(embedding)]
    # With none or several, the files are of another model: loading them says what is missing.
    prefix = names[0].removesuffix(embedding) if len(names) == 1 else None
    found = table(config, prefix)
    if not reads_more_than_texts(folder):
        return found
    ignored = (*found.ignored, *hub_configs.NOT_OF_TEXTS)
    return dataclasses.replace(found, ignored=ignored)
