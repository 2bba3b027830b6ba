"""What a TPU's compiler spends its time on: for a program of `benchmarks.pods`, or for DeepSeek-V3.

The compiler writes into its log how long each of its passes took, and from how many instructions of
its own it made each operation of the program. These instructions are what it works on for the rest
of its time. They are counted here by the JAX operation that they are for, and how many there are
does not depend on the machine that compiles.

It needs `pip install -e ".[tpu-plan]"` and no TPU.

    python -m benchmarks.compile_time llama2_7b --top 30
    python -m benchmarks.compile_time deepseek_v3 --json
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import shardlib as sl
from benchmarks import dropless, pods
from benchmarks._compiled import compile_for
from benchmarks._report import report
from shardlib.machine._targets import COMPILE_ONLY

DEEPSEEK = "deepseek_v3"
# What the compiler is to write to standard error: times of passes, and sizes of operations.
LOGS = {
    "TPU_STDERR_LOG_LEVEL": "0",
    "TPU_MIN_LOG_LEVEL": "0",
    "TPU_VMODULE": "hlo_pass_pipeline=1,deepsea_compiler_backend=3",
}
_SIZE = re.compile(r"\[(\S+)\] LLO optimizing ([\d,]+) instructions")
_PASS = re.compile(r"HLO pass: (\S+) time: [^(]*\((\d+) us\)")
_MADE = re.compile(r'\s+(?:ROOT )?%?(\S+) = .*?op_name="([^"]*)"')


def compile_here(name: str, program: Path) -> None:
    """Compile a program, and write it."""
    if name == DEEPSEEK:
        target = sl.Target("tpu:7x:4x4x8")
        mesh = target.mesh("data=256")
        step, state, batch = dropless.deepseek_step(mesh, "experts")
    else:
        target = sl.Target(pods.PODS[name].target)
        mesh = target.mesh(pods.PODS[name].mesh)
        step, state, batch = pods.step_on(mesh, pods.PODS[name])
    compiled = compile_for(target, mesh, step.lower(state, batch))
    program.write_text(compiled.program.as_text())
    print(f"{compiled.seconds:.1f}")


def instructions(log: str, program: str) -> Counter[tuple[str, str]]:
    """The compiler's instructions by the part of the step and the JAX operation."""
    operations = dict(_MADE.findall(program))
    counts: Counter[tuple[str, str]] = Counter()
    for name, size in _SIZE.findall(log):
        # The compiler makes several of one operation at times, and marks them.
        plain = re.sub(r"\.(refs_\d+_|lhs|rhs)$", "", name)
        operation = operations.get(plain, re.sub(r"[.\d]+$", "", plain))
        counts[part_of_step(operation), operation.rsplit("/", 1)[-1]] += int(size.replace(",", ""))
    return counts


def part_of_step(operation: str) -> str:
    """Which part of a step an operation is of, by its name."""
    if "/optimizer/" in operation:
        return "optimizer"
    if "rematted" in operation:
        return "recomputed"
    if "transpose" in operation:
        return "backward"
    return "forward"


def slowest_passes(log: str, count: int) -> list[tuple[str, float]]:
    """The passes that took the most seconds, with these."""
    seconds: dict[str, float] = {}
    for name, microseconds in _PASS.findall(log):
        seconds[name] = seconds.get(name, 0.0) + int(microseconds) / 1e6
    return sorted(seconds.items(), key=lambda one: -one[1])[:count]


def main() -> None:
    """Compile in a process whose log is read, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_tpus = [name for name, pod in pods.PODS.items() if pod.target.startswith("tpu:")]
    parser.add_argument("name", choices=[*on_tpus, DEEPSEEK])
    parser.add_argument("--top", type=int, default=20, help="how many operations to print")
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into:
        compile_here(arguments.name, arguments.into)
        return
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.txt"
        command = [sys.executable, "-m", "benchmarks.compile_time", arguments.name]
        environment = {**os.environ, **COMPILE_ONLY, **LOGS}
        done = subprocess.run(
            [*command, "--into", str(program)], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        counts = instructions(done.stderr, program.read_text())
    print("instructions", file=sys.stderr)
    for (part, operation), count in counts.most_common(arguments.top):
        print(f"{count:12,}  {part:10}  {operation}", file=sys.stderr)
    print("seconds", file=sys.stderr)
    for name, seconds in slowest_passes(done.stderr, 5):
        print(f"{seconds:12.1f}  {name}", file=sys.stderr)
    figures: dict[str, Any] = {
        f"{arguments.name}_instructions": counts.total(),
        f"{arguments.name}_compile_s": float(done.stdout.split()[-1]),
    }
    report("compile_time", figures, {}, arguments.json)


if __name__ == "__main__":
    main()
