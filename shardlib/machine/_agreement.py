"""What processes tell each other, and whether they agree: texts that are gathered from all."""

import difflib
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlib.checks import _arguments as check
from shardlib.machine._processes import initialized_with

_MAX_SAYINGS, _MAX_DIFFERENCES, _WIDTH = 4, 20, 120

# Of a set of processes that say the same: which ones, and what they say.
Saying = tuple[Sequence[int], Mapping[str, str]]


def require_agreement(what: Mapping[str, str]) -> None:
    """See that all processes are about to do the same, or say on each of them which one is not.

    Every process calls it, with the same names and texts of its own: a configuration, the shapes of
    a batch, the fingerprint of a program. Where they differ, a collective would hang or mix numbers
    that do not belong together.

    >>> require_agreement({"configuration": "batch = 256"})
    """
    check.kind("require_agreement", "what", what, Mapping, "a mapping from names to texts")
    for name, said in what.items():
        check.text("require_agreement", "what", name, "names and texts")
        check.text("require_agreement", name, said)
    count = jax.process_count()
    if count == 1:
        return
    _check_devices(Counter(device.process_index for device in jax.devices()))
    # One that sends its heartbeats later than the others expect them would be given up by them.
    compared = dict(what)
    if initialized_with:
        compared["heartbeat_timeout"] = f"{initialized_with[0]} seconds"
    said = json.dumps(compared).encode()
    mine = hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).digest() + len(
        said
    ).to_bytes(8, "little")
    groups: dict[bytes, list[int]] = defaultdict(list)
    for process, record in enumerate(
        multihost_utils.process_allgather(np.frombuffer(mine, np.uint8))
    ):
        groups[record.tobytes()].append(process)
    if len(groups) == 1:
        return
    by_size = sorted(groups.items(), key=lambda group: -len(group[1]))
    sayings: list[Saying] = []
    for record, processes in by_size[:_MAX_SAYINGS]:
        padded = np.zeros(int.from_bytes(record[-8:], "little"), np.uint8)
        if processes[0] == jax.process_index():
            padded[:] = np.frombuffer(said, np.uint8)
        heard = multihost_utils.broadcast_one_to_all(
            padded, is_source=processes[0] == jax.process_index()
        )
        sayings.append((processes, json.loads(heard.tobytes())))
    raise ValueError(
        describe_disagreement(
            sayings, unheard=[one for _, processes in by_size[_MAX_SAYINGS:] for one in processes]
        )
    )


def gather_texts(text: str) -> list[str]:
    """What every process says, short texts, in the order of the processes; each of them calls it.

    >>> gather_texts("here")
    ['here']
    """
    if jax.process_count() == 1:
        return [text]
    said = text.encode()
    sizes = multihost_utils.process_allgather(np.int32(len(said)))
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: len(said)] = np.frombuffer(said, np.uint8)
    heard = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(heard, sizes, strict=True)]


def describe_disagreement(sayings: Sequence[Saying], unheard: Sequence[int] = ()) -> str:
    """Who differs from most, or from whom; in what, and where that first happens. The largest group
    comes first.

    >>> print(describe_disagreement([([0, 2], {"batch": "8 x 128"}), ([1], {"batch": "8 x 64"})]))
    Process 1 differs from processes 0, 2 in `batch`. Start every process with the same command,
    code and environment.
    --- `batch` on processes 0, 2
    +++ `batch` on process 1
    @@ -1 +1 @@
    -8 x 128
    +8 x 64
    """
    (usual, texts), *others = sayings
    tie = len(usual) == len(others[0][0])
    heads, differences = [], []
    for processes, other in others:
        names = [name for name in {**texts, **other} if texts.get(name) != other.get(name)]
        differ = "differs" if len(processes) == 1 else "differ"
        listed = ", ".join(f"`{name}`" for name in names)
        heads.append(f"{_name(processes)} {differ} from {_name(usual)} in {listed}")
        differences += [
            line for name in names for line in _difference(name, usual, texts, processes, other)
        ]
    if unheard:
        heads.append(
            f"{_name(unheard)} {'differs' if len(unheard) == 1 else 'differ'} from all of these"
        )
    told = "P" + "; ".join(heads)[1:] + (". Neither is in the majority" if tie else "")
    return "\n".join(
        [f"{told}. Start every process with the same command, code and environment.", *differences]
    )


def _check_devices(counts: Mapping[int, int]) -> None:
    """Refuse processes of unequal size, by which JAX cannot arrange the devices, and which often
    means a broken one.
    """
    by_count: dict[int, list[int]] = defaultdict(list)
    for process, count in counts.items():
        by_count[count].append(process)
    if len(by_count) > 1:
        listed = "; ".join(
            f"{_name(processes)} {'has' if len(processes) == 1 else 'have'} {count}"
            for count, processes in sorted(by_count.items(), key=lambda item: len(item[1]))
        )
        raise ValueError(
            f"Processes have different numbers of devices: {listed}. Look for a device that is "
            "broken or taken there, or give every process as many."
        )


def _name(processes: Sequence[int]) -> str:
    """Processes in a sentence, runs of them as a range: however many there are, it stays
    readable.
    """
    runs: list[list[int]] = []
    for process in sorted(processes):
        if runs and process == runs[-1][-1] + 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    spelt = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = f" and {len(spelt) - 16} more such" if len(spelt) > 16 else ""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(spelt[:16])}{more}"


def _difference(
    name: str,
    usual: Sequence[int],
    texts: Mapping[str, str],
    processes: Sequence[int],
    other: Mapping[str, str],
) -> list[str]:
    lines = difflib.unified_diff(
        _lines(texts.get(name, "(it has no such text)")),
        _lines(other.get(name, "(it has no such text)")),
        f"`{name}` on {_name(usual)}",
        f"`{name}` on {_name(processes)}",
        n=1,
        lineterm="",
    )
    shown = list(islice(lines, _MAX_DIFFERENCES))
    return [*shown, f"... and {more} more lines"] if (more := sum(1 for _ in lines)) else shown


def _lines(text: str) -> list[str]:
    """The lines of a text, long ones in pieces, so that of a line that differs one piece is
    shown.
    """
    return [
        line[k : k + _WIDTH]
        for line in text.splitlines()
        for k in range(0, max(len(line), 1), _WIDTH)
    ]
