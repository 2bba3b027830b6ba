"""Give a model that `train_lm.py` or `finetune.py` has trained to other frameworks.

    python examples/export.py runs/tiny exported
    python examples/export.py runs/Llama-3.2-1B-Instruct-tuned exported --dtype bfloat16

The folder holds safetensors, a `config.json` and the tokenizer's files, as Hugging Face's
transformers reads them. Factors of LoRA are added to their kernels.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
from flax import nnx

import shardlib as sl
from examples.find_run import recorded
from examples.run import Run
from examples.start import folder_of, restored, to_read, tokenizer_of
from models import hub
from shardlib.data import load_tokenizer

# What a folder of a published model has besides its weights.
BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def main(arguments: list[str]) -> None:
    """The files of one model."""
    asked = _parsed(arguments)
    source, folder = Path(asked.run).expanduser(), Path(asked.folder).expanduser()
    if not (source / "run.json").exists():
        raise SystemExit(f"`{source}` is no folder of a run: it has no `run.json`.")
    run = recorded(source / "run.json")
    try:
        hub.description(run.model)  # what transformers cannot read is refused before all else
        _check_published(_published(run), folder)
        table = hub.table(run.model)
        mesh = asked.mesh or _mesh_of_data(run.strategy.rules)
        model, step = restored(asked.run, to_read(run, mesh, is_split=True), asked.step)
        files = sl.weights.save(folder, model, table, dtype=asked.dtype)
        dtype = asked.dtype or str(jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype)
        beside = _write_beside(asked.run, run, folder, dtype)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    names = [*(file.name for file in files), *beside]
    print(f"Step {step} of {source}, in {folder}:")
    for name in dict.fromkeys(names):
        print(f"  {name}")
    if not (folder / "tokenizer.json").exists():
        print("The tokenizer is of bytes, for which there is no file.")
    if run.data.chat is not None and _published(run) is not None:
        print("A template for conversations is that of the published model.")


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="the folder of a run, such as `runs/tiny`")
    parser.add_argument("folder", help="for the files")
    parser.add_argument("--dtype", help="of the tensors; by default that of the parameters")
    parser.add_argument("--step", type=int, help="of the checkpoint; by default the newest")
    parser.add_argument(
        "--mesh", help="to read the checkpoint on; by default all devices along `data`"
    )
    return parser.parse_args(arguments)


def _mesh_of_data(rules: sl.AxisRules) -> str:
    """A mesh of all devices along `data`, with the other axes of rules, which split nothing."""
    others = [axis for axis in rules.axes if axis != "data"]
    return ",".join(["data=-1", *(f"{axis}=1" for axis in others)])


def _check_published(published: Path | None, folder: Path) -> None:
    """Refuse to write over the model that a run began with, or without what it has to give."""
    if published is None:
        return
    if not (published / "config.json").exists():
        raise ValueError(
            f"The run began with the published model in `{published}`, which is gone: put it back. "
            "Its configuration and tokenizer go beside the weights."
        )
    if folder.resolve() == published.resolve():
        raise ValueError(
            f"`{folder}` has the published model that the run began with, which would be replaced: "
            "name another folder."
        )


def _write_beside(source: str, run: Run, folder: Path, dtype: str) -> list[str]:
    """Write a configuration and the tokenizer: those of the published model, or the run's own.

    What ends a text is what the run has learned to end its own with. What an older model has left
    in the folder is removed.
    """
    published = _published(run)
    if published is not None:
        _remove_beside(folder)
        names = [name for name in BESIDE if (published / name).exists()]
        for name in names:
            shutil.copyfile(published / name, folder / name)
        _write_changed_config(run, published, folder, dtype)
        return names + _write_end(run, published / "tokenizer.json", folder)
    file = Path(tokenizer_of(source)).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    # Read before anything is removed: it may be in this folder.
    tokenizer = file.read_bytes() if file.is_file() else None
    _remove_beside(folder)
    (folder / "config.json").write_text(json.dumps(hub.description(run.model), indent=2))
    if tokenizer is None:
        return ["config.json"]
    written = folder / "tokenizer.json"
    written.write_bytes(tokenizer)
    return ["config.json", written.name, *_write_end(run, written, folder)]


def _remove_beside(folder: Path) -> None:
    """Remove what an older model has left beside its weights."""
    for name in BESIDE:
        (folder / name).unlink(missing_ok=True)


def _write_changed_config(run: Run, published: Path, folder: Path, dtype: str) -> None:
    """Write the configuration anew if the run has another model than the published one.

    The dtype is that of the files. A model with rotary positions reads as far as either does.
    """
    before = json.loads((published / "config.json").read_text())
    said = hub.description(run.model)
    is_same = said == hub.description(hub.config(published, context=run.model.context))
    if is_same and not hub.reads_more_than_texts(published):
        now = dict(before)
    else:
        kept = {name: number for name, number in before.items() if name.endswith("_token_id")}
        now = said | kept
    for name in ("torch_dtype", "dtype"):
        if name in now:
            now[name] = dtype
    longest = "max_position_embeddings"
    if longest in now and run.model.positions == "rotary":
        published_longest = before.get("text_config", before).get(longest, 0)
        now[longest] = max(published_longest, run.model.context)
    if now != before:
        (folder / "config.json").write_text(json.dumps(now, indent=2))


def _published(run: Run) -> Path | None:
    """The folder of the published model that a run began with, perhaps by way of other runs."""
    if not run.start:
        return None
    start = folder_of(run.start)
    if (start / "run.json").exists():
        return _published(recorded(start / "run.json"))
    return start


def _write_end(run: Run, file: Path, folder: Path) -> list[str]:
    """Say which token ends a text, by its number and by its name."""
    tokenizer = load_tokenizer(file, end=run.data.end)
    settings = folder / "generation_config.json"
    said = json.loads(settings.read_text()) if settings.exists() else {}
    ends = {run.end(tokenizer), tokenizer.end}
    settings.write_text(json.dumps(said | {"eos_token_id": sorted(ends)}, indent=2))
    written = ["generation_config.json"]
    names = folder / "tokenizer_config.json"
    if not names.exists():
        # An end may be a word of the vocabulary, without being one of the added tokens.
        names_of = {number: name for name, number in _added(file).items()}
        end = names_of.get(tokenizer.end, run.data.end)
        kind = "PreTrainedTokenizerFast"
        names.write_text(json.dumps({"tokenizer_class": kind, "eos_token": end}, indent=2))
        written.append(names.name)
    return written


def _added(file: Path) -> dict[str, int]:
    """The tokens that were added to the vocabulary of a tokenizer, with their numbers."""
    added = json.loads(file.read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in added}


if __name__ == "__main__":
    main(sys.argv[1:])
