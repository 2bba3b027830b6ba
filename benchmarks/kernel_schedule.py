"""How many instructions attention takes on a TPU, as its compiler schedules them.

The TPU compiler estimates no cycles of kernels, but it writes down their schedules: bundles of
instructions, of which a core begins one in each cycle. Counted are those of the three kernels of
attention, forward and backward, for one pair of a block of queries and a block of keys, with heads
of 128 in bfloat16, of which no mask hides anything:

- `ratio_v5e` and others: bundles of ours over those of JAX's splash kernel with the same blocks,
  all three kernels together. `ratio_max` is the worst of the targets.

Each program is compiled in a process of its own, since the compiler is told once where to write. It
needs the TPU compiler and no TPU, and takes a minute: `pip install -e ".[tpu-plan]"`.

    python -m benchmarks.kernel_schedule --json
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

# With how many queries and keys a block has: a core of v4 has too little fast memory for 1,024.
TARGETS = {
    "v4": ("tpu:v4:1x1x1", 512),
    "v5e": ("tpu:v5e:1x1", 1024),
    "v5p": ("tpu:v5p:1x1x1", 1024),
    "v6e": ("tpu:v6e:1x1", 1024),
    "7x": ("tpu:7x:1x1x1", 1024),
}
BOUNDS = {"ratio_max": 1.05}
KERNELS = ("ours", "splash")
LENGTH, HEADS, SIZE = 4096, 4, 128
NAMES = ("batch", None, None, None)
# What the compiler writes of a kernel, and the name of that file.
TOTAL = re.compile(r"total scheduled bundles:\s+(\d+)")
FILE = re.compile(r"(attention_|splash_mha_)(\w+?)[.\d]*-\d+-schedule-analysis")


def ours() -> Any:
    """Attention by the kernels of ours."""
    import shardlib as sl

    return lambda q, k, v: sl.kernels.attention(q, k, v, names=NAMES, implementation="tpu")


def splash(block: int) -> Any:
    """Attention by JAX's kernel, with its separate kernels of backward.

    `block` is how many queries and keys a block has.
    """
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    import shardlib as sl

    mask = splash.MultiHeadMask([splash.FullMask((LENGTH, LENGTH))] * HEADS)
    sizes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    blocks = splash.BlockSizes(**dict.fromkeys(sizes, block))

    def attend(q: Any, k: Any, v: Any) -> Any:
        kernel: Any = splash.make_splash_mha(
            mask=mask, block_sizes=blocks, head_shards=1, q_seq_shards=1
        )
        y: Any = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q, k, v)))
        return y.swapaxes(1, 2)

    return sl.kernels.on_shards(attend, [NAMES] * 3, NAMES)


def compile_kernels(name: str, short: str) -> None:
    """Compile attention, forward and backward, for one sequence on each device of a target."""
    import jax
    import jax.numpy as jnp

    import shardlib as sl
    from shardlib.kernels._attention import _tpu_blocks

    target, block = TARGETS[short]
    mesh = sl.Target(target).mesh("data=-1")
    attend = ours() if name == "ours" else splash(block)
    # A chip of a TPU 7x is two devices.
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((mesh.size, LENGTH, HEADS, SIZE), "bfloat16", sharding=sharding)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v).astype(jnp.float32).sum()

    blocks = (_tpu_blocks.Blocks(block, block),)
    with sl.use(sl.AxisRules(batch="data"), mesh), mock.patch.object(_tpu_blocks, "BLOCKS", blocks):
        jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()


def bundles(name: str, short: str) -> dict[str, int]:
    """The scheduled bundles of each kernel of an attention, by the kernel's name."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*",
        ]
        environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        environment["LIBTPU_INIT_ARGS"] = " ".join(flags)
        command = [sys.executable, "-m", "benchmarks.kernel_schedule", "--compile", name, short]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{name} on {short}:\n{done.stderr[-2000:]}")
        counted = {}
        for path in sorted(Path(folder).iterdir()):
            file, total = FILE.search(path.name), TOTAL.search(path.read_text(errors="replace"))
            if file and total:
                counted[file[2]] = int(total[1])
    assert len(counted) == 3, f"three kernels, and found {counted}"
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        compile_kernels(*arguments.compile)
        return
    from benchmarks._report import report

    figures: dict[str, Any] = {}
    for short in TARGETS:
        totals = {}
        for name in KERNELS:
            counted = bundles(name, short)
            totals[name] = sum(counted.values())
            print(f"{short:4} {name:7} {totals[name]:6}  {counted}", flush=True)
        figures[f"ratio_{short}"] = totals["ours"] / totals["splash"]
    figures["ratio_max"] = max(figures.values())
    report("kernel_schedule", figures, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
