"""Weights in safetensors files: whether all come back, and what reading them takes.

- `round_trip_differs`: tensors of small models of all families that are not the same, bit for bit,
  after they were read into another layout and written again.
- `worst_logit_error`: of these models from transformers' own, by absolute value, for random weights
  in float32. It needs PyTorch and transformers, and is left out without.

Of a file of about 1 GB, read into parameters that are split over eight simulated devices:

- `memory_ratio`: the most memory that a new process takes besides what it took before, the
  parameters and the pages of the file, over the two largest tensors. What compiling takes is in it.
- `speed_ratio`: the time to read the file and copy it once, over that of an import, the best of
  five each.

    python -m benchmarks.weights --json
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from models import gpt, hub
from shardlib.weights import open_tensors
from shardlib.weights._command import differences

BOUNDS = {"round_trip_differs": 0, "worst_logit_error": 1e-4, "memory_ratio": 1.5}
AT_LEAST = {"speed_ratio": 0.5}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
WINDOWS = {"num_hidden_layers": 5, "head_dim": 32, "sliding_window": 8}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
}
SPARSE = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
# By family: the name of its classes, and what its configuration has besides.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 128},
    ),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 8}),
    "mixtral": ("Mixtral", {**SIZES, **SPARSE}),
    "llama3.1": ("Llama", {**SIZES, "rope_parameters": SCALED}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, **SPARSE, "head_dim": 32, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "gemma": ("Gemma", {**SIZES, "head_dim": 32}),
    "gemma2": ("Gemma2", {**SIZES, **WINDOWS, "attn_logit_softcapping": 2.0}),
    "gemma3_text": ("Gemma3Text", {**SIZES, **WINDOWS}),
    "deepseek_v3": ("DeepseekV3", {**SIZES, **LATENT, "rope_parameters": YARN}),
}
STRATEGY: dict[str, Any] = {"mesh": "data=4,model=2", "rules": sl.rules.data | sl.rules.tensor}


def round_trip() -> dict[str, float]:
    """Tensors that are not the same after they were read and written, of all families."""
    split = sl.Strategy(**STRATEGY, zero=sl.Zero(3, small=0))
    other = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    count = 0
    for family, (_, fields) in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            of = config_of(Path(folder), family, fields)
            table = hub.table(of)
            names = [Path(folder) / name for name in ("one", "two")]
            sl.weights.save(names[0], state_of(of, other, 0), table, file_size=50_000)
            read = sl.weights.load(names[0], state_of(of, split, 1), table)
            sl.weights.save(names[1], read, table)
            count += len(list(differences(*map(open_tensors, names))))
    return {"round_trip_differs": count}


def config_of(folder: Path, family: str, fields: dict[str, Any]) -> Any:
    """The configuration of a small model."""
    kind = family.removesuffix("3.1")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    return hub.config(folder)


def state_of(config: Any, strategy: sl.Strategy, seed: int) -> sl.State:
    """A new state of a model."""
    return sl.init(lambda: hub.model(config, nnx.Rngs(seed)), optax.sgd(1.0), strategy)


def logits() -> dict[str, float]:
    """The worst error of logits from those of transformers."""
    # They are in an environment of their own.
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    strategy = sl.Strategy(**STRATEGY, zero=sl.Zero(3, small=0))
    tokens = np.random.default_rng(0).integers(0, 128, (4, 48))
    worst = 0.0
    for family, (name, fields) in FAMILIES.items():
        kind = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
        of = getattr(transformers, name + "Config")(**fields)
        theirs = getattr(transformers, name.removesuffix("Text") + kind)(of).eval()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            for parameter in theirs.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
            expected = theirs(torch.tensor(tokens)).logits.numpy()
            theirs.save_pretrained(folder)
            config = hub.config(folder)
            state = sl.weights.load(folder, state_of(config, strategy, 1), hub.table(config))
        with strategy.scope(), jax.default_matmul_precision("highest"):
            found = jax.jit(lambda model, tokens: model(tokens))(state.model, jnp.asarray(tokens))
        error = float(np.abs(found - expected).max())
        print(f"{family}: {error:.2g}", file=sys.stderr, flush=True)
        worst = max(worst, error)
    return {"worst_logit_error": worst}


OF_COSTS = {"layers": 4, "width": 2048, "heads": 16, "hidden": 5504, "vocab": 16_000}


def costs() -> dict[str, float]:
    """Memory and time of an import of some 1 GB, in a process that has done nothing before."""
    of, strategy = gpt.llama2_7b(**OF_COSTS), split_over_all()
    with tempfile.TemporaryDirectory() as folder:
        sl.weights.save(folder, state_of(of, strategy, 0), hub.table(of))
        command = [sys.executable, "-m", "benchmarks.weights", "--import", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def split_over_all() -> sl.Strategy:
    """Parameters split over eight devices."""
    return sl.Strategy(mesh="data=8", rules=sl.rules.data, zero=3)


def costs_of_import(folder: str) -> dict[str, float]:
    """The costs of an import of the files in a folder."""
    of = gpt.llama2_7b(**OF_COSTS)
    make = lambda: hub.model(of, nnx.Rngs(0))  # noqa: E731
    like = sl.init(make, optax.sgd(1.0), split_over_all(), abstract=True).params
    table, files = hub.table(of), list(Path(folder).glob("*.safetensors"))
    with Peak() as peak:
        read = sl.weights.load(folder, like, table)
    parameters = sum(x.nbytes for x in jax.tree.leaves(read))
    tensors = open_tensors(folder).tensors.values()
    largest = sum(sorted(tensor.size for tensor in tensors)[-2:])
    del read
    # The best of five each, in turn: programs are compiled, and files are in memory.
    reading, importing = [], []
    for _ in range(5):
        reading.append(seconds(lambda: copy_all(files)))
        importing.append(seconds(lambda: sl.weights.load(folder, like, table)))
    more = peak.most - peak.before - parameters
    print(f"{more / 1e6:.0f} MB more, {reading}, {importing} s", file=sys.stderr)
    return {
        "memory_ratio": round(more / largest, 3),
        "speed_ratio": round(min(reading) / min(importing), 3),
        "import_gb": round(parameters / 1e9, 3),
    }


def seconds(run: Callable[[], object]) -> float:
    """How long something takes."""
    started = time.monotonic()
    run()
    return time.monotonic() - started


def copy_all(files: list[Path]) -> None:
    """Read files, and copy what is in them once."""
    for file in files:
        if file.suffix == ".safetensors":
            np.array(np.memmap(file, np.uint8, "r"))


class Peak:
    """The most memory that is not of files, while this is entered: sampled, as Linux tells it."""

    def __enter__(self) -> "Peak":
        self.before = self.most = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, _resident())


def _resident() -> int:
    """Bytes in memory that no file has."""
    text = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert found is not None
    return 1024 * int(found[1])


PARTS = {"round_trip": round_trip, "logits": logits, "costs": costs}


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="only this part")
    parser.add_argument("--import", dest="folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sl.simulate_devices(8)
    if arguments.folder:
        print(json.dumps(costs_of_import(arguments.folder)))
        return
    figures: dict[str, float] = {}
    for part in arguments.only or PARTS:
        try:
            figures |= PARTS[part]()
        except ImportError as error:
            print(f"{part}: left out. {error}", file=sys.stderr)
    bounds = {name: bound for name, bound in BOUNDS.items() if name in figures}
    floors = {name: bound for name, bound in AT_LEAST.items() if name in figures}
    report("weights", figures, bounds, arguments.json, at_least=floors)


if __name__ == "__main__":
    main()
