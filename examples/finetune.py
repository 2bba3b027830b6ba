"""Fine-tune a model: one that is published, or one that `train_lm.py` has trained.

    # Conversations, in JSON lines, teach the assistant's part; by default through LoRA:
    python examples/finetune.py Llama-3.2-1B-Instruct chats.jsonl --data.chat llama3
    python examples/finetune.py runs/tiny chats.jsonl --data.chat plain

    # Plain text, and all parameters; the fields of a run are those of `train_lm.py`:
    python examples/finetune.py Qwen3-0.6B "*.txt" --lora.rank 0 --optimizer.learning_rate 1e-5

The first is a folder: with a `config.json`, safetensors and a `tokenizer.json`, or of a run; or a
model of the Hugging Face hub, `hf:Qwen/Qwen3-0.6B`, which is downloaded. The same command continues
a run that was stopped. `generate.py` reads what was learned, and `export.py`
gives it to others.
"""

import dataclasses
import sys
from pathlib import Path

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import shardlib as sl
from examples.fields import override, show_help
from examples.find_run import recorded
from examples.run import AdamW, LoRA, Run
from examples.start import folder_of, name_of, published_model, published_texts, tokenizer_of
from examples.train_lm import interrupted, train
from shardlib.data import Corpus

CONTEXT = 2048  # at most, unless `--model.context` says otherwise: long ones take much memory


def main(arguments: list[str]) -> None:
    """A run that begins with the weights of others."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(__doc__)
        raise SystemExit(0 if {"-h", "--help"} & set(arguments) else 2)
    start, files, *changes = arguments
    run = tuned(start, files)
    if {"-h", "--help"} & set(changes):
        show_help(run)
        return
    try:
        run = override(run, changes)
    except ValueError as error:
        raise SystemExit(f"{error}\n`{start} {files} --help` lists the fields.") from error
    train(run)


def tuned(start: str, files: str) -> Run:
    """The run that fine-tunes the model in a folder on some files."""
    folder = folder_of(start)
    if (folder / "run.json").exists():
        before = recorded(folder / "run.json")
        model, strategy, cache = before.model, before.strategy, before.cache
        tokenizer = tokenizer_of(start)
        markers = {name: getattr(before.data, name) for name in ("end", "begin", "unknown")}
        data = Corpus(files, tokenizer=tokenizer, **markers)
    elif (folder / "config.json").exists():
        model, data = published_model(folder, CONTEXT), published_texts(folder, files)
        strategy, cache = sl.Strategy(mesh="data=-1", rules=sl.rules.data, zero=3), ""
    else:
        raise SystemExit(
            f"`{start}` is no folder to start from: it has neither a `config.json`, as published "
            "models have, nor a `run.json`, as runs of `train_lm.py` have."
        )
    return Run(
        name=f"{name_of(start)}-tuned",
        model=model,
        data=data,
        batch=8,
        optimizer=AdamW(learning_rate=2e-4, warmup=20, weight_decay=0.0),
        strategy=dataclasses.replace(strategy, clip=1.0, nonfinite="skip", remat="full", frozen=()),
        loop=sl.Loop(steps=500, evaluate_every=100, save_every=100),
        cache=cache,
        start=start,
        lora=LoRA(rank=16),
    )


if __name__ == "__main__":
    interrupted(main)
