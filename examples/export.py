"""Give a model that `train_lm.py` or `finetune.py` has trained to other frameworks.

    python examples/export.py runs/tiny exported
    python examples/export.py runs/Llama-3.2-1B-tuned exported --dtype bfloat16

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

import shardlib as sl
from examples.finetune import tokenizer_of
from examples.run import Run, recorded
from examples.start import restored, to_read
from models import hub

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
        described = hub.description(run.model)
        table = hub.table(run.model)
        model, step = restored(source, to_read(run, asked.mesh), asked.step)
        files = sl.weights.save(folder, model, table, dtype=asked.dtype)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    files += _write_beside(run, described, folder)
    print(f"Step {step} of {source}, in {folder}:")
    for file in files:
        print(f"  {file.name}")


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="the folder of a run, such as `runs/tiny`")
    parser.add_argument("folder", help="for the files")
    parser.add_argument("--dtype", help="of the tensors; by default that of the parameters")
    parser.add_argument("--step", type=int, help="of the checkpoint; by default the newest")
    parser.add_argument("--mesh", default="data=-1", help="to read the checkpoint on")
    return parser.parse_args(arguments)


def _write_beside(run: Run, described: dict[str, object], folder: Path) -> list[Path]:
    """Write a configuration and the tokenizer: those of the published model, or the run's own."""
    written = []
    start = Path(run.start).expanduser()
    if run.start and (start / "config.json").exists():
        present = [start / name for name in BESIDE if (start / name).exists()]
    else:
        (folder / "config.json").write_text(json.dumps(described, indent=2))
        written.append(folder / "config.json")
        tokenizer = Path(tokenizer_of(run))
        present = [tokenizer] if tokenizer.is_file() else []
    for file in present:
        shutil.copyfile(file, folder / file.name)
        written.append(folder / file.name)
    return written


if __name__ == "__main__":
    main(sys.argv[1:])
