"""Rematerialization on one GPU: the seconds and the memory of a step under each policy.

The model is Llama 3.2 of 1.2 billion parameters, trained as `benchmarks.train_gpu` trains it, whose
`REMATS` are the policies. Each runs in a process of its own, one after the other.

- `seconds_...`: of a step.
- `slower_...`: over those of a step that recomputes nothing.
- `gb_...`: the most that JAX's allocator has handed out.
- `measured_over_compiled_...`: that over what the compiled step says it takes.

It needs a GPU, and takes some minutes:

    python -m benchmarks.remat_gpu --json [--policies none,full]
"""

import argparse
import os
import sys
import tempfile
from typing import Any

from benchmarks import train_gpu
from benchmarks._report import report


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--model", choices=tuple(train_gpu.MODELS), default="llama_1b")
    parser.add_argument(
        "--policies", default=",".join(train_gpu.REMATS), help="some of them, with commas between"
    )
    parser.add_argument("--tiny", action="store_true", help="to try the path on a CPU")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"model": arguments.model}
    exact = None
    for policy in arguments.policies.split(","):
        found = train_gpu.in_process_of_its_own(
            "ours", arguments.model, _options(policy, arguments.tiny)
        )
        print(f"{policy}: {train_gpu.said(found)}", file=sys.stderr, flush=True)
        if "failed" in found:
            figures[f"failed_{policy}"] = found["failed"]
            continue
        figures.setdefault("device", found["device"])
        seconds = found["step_seconds"]
        figures[f"seconds_{policy}"] = round(seconds, 4)
        if policy == "none":
            exact = seconds
        if exact is not None:
            figures[f"slower_{policy}"] = round(seconds / exact, 3)
        if found["peak_bytes"]:
            figures[f"gb_{policy}"] = round(found["peak_bytes"] / 1e9, 2)
            over = found["peak_bytes"] / found["compiled_bytes"]
            figures[f"measured_over_compiled_{policy}"] = round(over, 3)
    report("remat_gpu", figures, {}, arguments.json)


def _options(policy: str, tiny: bool) -> list[str]:
    """Arguments of `benchmarks.train_gpu` for one policy."""
    options = ["--remat", policy, "--steps", "10", "--compiled-bytes"]
    if tiny:
        options.append("--tiny")
    return options


if __name__ == "__main__":
    # Each step is compiled twice, the second time from JAX's cache.
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        main()
