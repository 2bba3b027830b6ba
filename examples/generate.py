"""Text from a model that was trained here, or that is published, on any mesh.

    # The last checkpoint of a run goes on with a prompt, or with several at once:
    python examples/generate.py runs/tiny --prompt "def "
    python examples/generate.py runs/tiny --prompt "def " --prompt "class " --temperature 0

    # A published model, by its folder or from the Hugging Face hub, answers:
    python examples/generate.py hf:Qwen/Qwen3-0.6B --chat chatml --prompt "What is a mesh?"

    # On another mesh than that of the run, by its rules or by others:
    python examples/generate.py runs/tiny --mesh data=2,model=4 --rules "data|tensor"

The texts go to the standard output, and how long they took to the standard error.
"""

import argparse
import dataclasses
import difflib
import functools
import math
import sys
import time
from pathlib import Path
from typing import Any

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np
from jax.experimental import multihost_utils

import shardlib as sl
import shardlib.data
from examples.run import Run
from examples.start import described, folder_of, has_checkpoints, restored, to_read, tokenizer_of
from models import decoding, gpt, sampling

SEPARATOR = "\n" + "-" * 20 + "\n"  # between the texts of several prompts


def main(arguments: list[str]) -> None:
    """Texts from the command line's prompts."""
    asked = _parsed(arguments)
    sl.initialize_distributed()
    folder = folder_of(asked.folder)
    run = _run_of(asked, folder)
    programs = shardlib.data.cache_folder(run.cache or None) / "programs"
    jax.config.update("jax_compilation_cache_dir", str(programs))
    try:
        chosen = sampling.Sampling(asked.temperature, asked.top_k, asked.top_p)
        strategy = to_read(run, asked.mesh, asked.rules)
        if has_checkpoints(folder):
            _check_step(folder / "checkpoints", asked.step)
        tokenizer = _tokenizer(run, asked.folder)
        prompts = _encoded(tokenizer, asked.prompt or [run.prompt], run)
        tokens = _room(prompts, asked.tokens, run.model)
        model, step = restored(asked.folder, strategy, asked.step)
        end = run.end(tokenizer)
        written, seconds = _written(model, strategy, prompts, tokens, end, chosen, asked)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if jax.process_index():
        return
    texts, made = [], 0
    for prompt, row in zip(prompts, written, strict=False):
        row = row.tolist()
        kept = row[: row.index(end)] if end in row else row
        made += min(len(kept) + 1, len(row))  # with the end, if there is one
        # Of a conversation only the answer is shown.
        shown = kept if run.data.chat else [*prompt, *kept]
        texts.append(tokenizer.decode(shown))
    print(SEPARATOR.join(texts))
    sys.stderr.write(
        f"\n{made} tokens {_step_text(step)}in {seconds:.2f} s, "
        f"{made / seconds:.0f} tokens/s, on {_mesh_text(strategy)}\n"
    )


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", help="of a run, such as `runs/tiny`, or of a published model, or `hf:NAME/MODEL`")
    add("--prompt", action="append", help="what a text begins with; may be given several times")
    add("--chat", help="the format of conversations that a published model has learned: `llama3`")
    add("--tokens", type=int, help="how many more of each text; by default 200, if they fit")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest token each time")
    add("--top-k", type=int, help="draw from so many of the likeliest tokens")
    add("--top-p", type=float, help="draw from the likeliest with this share of the probability")
    add("--seed", type=int, default=0, help="of what is drawn, a whole number of 32 bits")
    add("--mesh", help="by default that of the run")
    add("--rules", help="by default those of the run; written as for `train_lm.py`")
    add("--step", type=int, help="of the checkpoint; by default the newest")
    add("--chunk", type=int, help="read prompts so many tokens at a time")
    asked = parser.parse_args(arguments)
    # JAX makes a key of the last 32 bits: seeds that have these in common would be one.
    if not 0 <= asked.seed < 2**32:
        parser.error(f"`--seed {asked.seed}`: a whole number of 32 bits, 0 to {2**32 - 1:,}.")
    return asked


def _run_of(asked: argparse.Namespace, folder: Path) -> Run:
    """The run whose folder this is, or that a published model could begin with."""
    is_run = (folder / "run.json").exists()
    if is_run and asked.chat is not None:
        raise SystemExit("`--chat` is for published models: a run has its own `data.chat`.")
    if not is_run and not (folder / "config.json").exists():
        others = [one.parent.name for one in folder.parent.glob("*/run.json")]
        near = difflib.get_close_matches(folder.name, others, 1)
        meant = f"; did you mean `{folder.parent / near[0]}`?" if near else "."
        raise SystemExit(
            f"`{folder}` is no folder of a run of `train_lm.py`: it has no `run.json`{meant} "
            "Neither has it a `config.json`, as published models have."
        )
    run = described(asked.folder)
    if asked.chat is None:
        return run
    try:
        return dataclasses.replace(run, data=dataclasses.replace(run.data, chat=asked.chat))
    except ValueError as error:
        raise SystemExit(str(error)) from error


def _check_step(folder: Path, step: int | None) -> None:
    """Refuse a step of which there is no checkpoint, and a run that has none."""
    with sl.Checkpoints(folder) as checkpoints:
        steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        wanted = "" if step is None else f" of step {step}"
        raise SystemExit(
            f"There is no checkpoint{wanted} in {folder}; there are: "
            f"{', '.join(map(str, steps)) or 'none yet'}."
        )


def _tokenizer(run: Run, source: str) -> shardlib.data.Tokenizer:
    """The tokenizer that the model has learned with."""
    return shardlib.data.load_tokenizer(tokenizer_of(source), run.data.end, run.data.unknown)


def _encoded(tokenizer: shardlib.data.Tokenizer, prompts: list[str], run: Run) -> list[list[int]]:
    """The tokens of prompts. A text from nothing begins with what ends the document before it."""
    encoded = []
    for prompt in prompts:
        encoded.append(run.prompt_ids(tokenizer, prompt).tolist() or [tokenizer.end])
    largest = max(max(ids) for ids in encoded)
    if largest >= run.model.vocab:
        raise SystemExit(
            f"The prompts have the token {largest}, and `model.vocab` is {run.model.vocab}: the "
            "model has never seen it. Leave out what it stands for."
        )
    return encoded


def _room(prompts: list[list[int]], tokens: int | None, config: gpt.GPTConfig) -> int:
    """How many tokens to write after the prompts."""
    longest = max(map(len, prompts))
    room = config.context - longest
    if room < 1 or (tokens is not None and tokens > room):
        raise SystemExit(
            f"The longest prompt has {longest} tokens, and the context is {config.context}: it has "
            f"room for {max(room, 0)} more. A shorter `--prompt`, or fewer `--tokens`."
        )
    return min(room, 200) if tokens is None else tokens


def _written(
    model: Any,
    strategy: sl.Strategy,
    prompts: list[list[int]],
    tokens: int,
    end: int,
    chosen: sampling.Sampling,
    asked: argparse.Namespace,
) -> tuple[np.ndarray, float]:
    """The tokens after each prompt, and the seconds that they took once the program was made."""
    # Rows are split over the axes of the batch; those that are lacking are prompts once more.
    parts = math.prod(strategy.device_mesh.shape[axis] for axis in strategy.batch_axes)
    rows = [prompts[number % len(prompts)] for number in range(-(-len(prompts) // parts) * parts)]
    tokens_BS, padding_B = decoding.pad(rows)
    padding = padding_B if padding_B.any() else None
    known_end = end if end < model.config.vocab else None
    options = {"tokens": tokens, "sampling": chosen, "end": known_end, "chunk": asked.chunk}
    generate: Any = jax.jit(functools.partial(sampling.generate, **options))
    key = jax.random.key(asked.seed)
    with strategy.scope():
        program = generate.lower(model, tokens_BS, key=key, padding_B=padding).compile()
        started = time.time()
        written = program(model, tokens_BS, key=key, padding_B=padding)
        whole = multihost_utils.process_allgather(written, tiled=True)
    return np.asarray(whole), time.time() - started


def _step_text(step: int | None) -> str:
    """The step of a checkpoint, which a published model has not."""
    return "" if step is None else f"of step {step} "


def _mesh_text(strategy: sl.Strategy) -> str:
    """The mesh in a few words."""
    sizes = [f"{axis}={size}" for axis, size in strategy.device_mesh.shape.items()]
    return ",".join(sizes)


if __name__ == "__main__":
    main(sys.argv[1:])
