"""What processes tell each other, and whether they agree.

The processes of a run are separate Python programs that must start the same compiled programs in
the same order. If one starts another, collectives wait for each other for ever, or add up numbers
that do not belong together. So before anything expensive each process describes in text what it is
about to do. First only digests of fixed size are gathered, which costs next to nothing; where they
differ, one process of each group that agrees sends its texts to all, and every process raises the
same error.
"""

import difflib
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.machine._processes import initialized_with

_MAX_STATEMENTS = 4  # groups of processes whose texts are sent and compared
_MAX_DIFFERENCES = 20  # lines of a comparison of two texts
_MAX_RUNS = 16  # of consecutive processes, named in a sentence
_WIDTH = 120  # columns of a line in a comparison

Statement = tuple[Sequence[int], Mapping[str, str]]
"""The processes of a set that say the same, and what they say: texts by name."""


@dataclass(frozen=True)
class _Group:
    """Processes whose texts are the same, and how many bytes these are as JSON."""

    processes: list[int]
    text_bytes: int


def require_agreement(what: Mapping[str, str]) -> None:
    """See that all processes are about to do the same, or say on each of them which one is not.

    Every process calls it, with the same names and texts of its own: a configuration, the shapes of
    a batch, the fingerprint of a program. Where they differ, a collective would hang or mix numbers
    that do not belong together.

    >>> require_agreement({"configuration": "batch = 256"})
    """
    check.kind("require_agreement", "what", what, Mapping, "a mapping from names to texts")
    for name, text in what.items():
        check.text("require_agreement", "what", name, "names and texts")
        check.text("require_agreement", name, text)
    if jax.process_count() == 1:
        return
    _check_devices(Counter(device.process_index for device in jax.devices()))
    texts = dict(what)
    # A process that sends its heartbeats later than the others expect them would be given up by
    # them, so the timeout must be the same too.
    if initialized_with:
        texts["heartbeat_timeout"] = f"{initialized_with[0]} seconds"

    groups = _agreeing_groups(texts)
    if len(groups) > 1:
        raise ValueError(_disagreement(groups, texts))


def _disagreement(groups: list[_Group], texts: Mapping[str, str]) -> str:
    """What differs between groups of processes, in words; collective, and `texts` the caller's.

    The texts of the largest groups are compared; what still others say, nobody asks for.
    """
    # The largest group comes first: what most processes say is likely what was meant.
    by_size = sorted(groups, key=lambda group: -len(group.processes))
    # Every process takes part in every broadcast, in the same order.
    statements: list[Statement] = []
    for group in by_size[:_MAX_STATEMENTS]:
        statements.append((group.processes, _texts_of(group, texts)))
    unheard: list[int] = []
    for group in by_size[_MAX_STATEMENTS:]:
        unheard.extend(group.processes)
    return describe_disagreement(statements, unheard=unheard)


def _agreeing_groups(texts: Mapping[str, str]) -> list[_Group]:
    """All processes, grouped by what they say; collective: every process calls it.

    What is gathered is a digest of the texts, which does not depend on the order of their names,
    and the length of the message that holds them. A group is listed where its first process is.
    """
    # 32 bytes of digest and 8 of length from each process.
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).digest()
    record = digest + len(_message(texts)).to_bytes(8, "little")
    gathered = multihost_utils.process_allgather(np.frombuffer(record, np.uint8))
    processes_by_record: dict[bytes, list[int]] = defaultdict(list)
    for process, process_record in enumerate(gathered):
        processes_by_record[process_record.tobytes()].append(process)
    groups = []
    for group_record, processes in processes_by_record.items():
        groups.append(_Group(processes, int.from_bytes(group_record[-8:], "little")))
    return groups


def _texts_of(group: _Group, texts: Mapping[str, str]) -> Mapping[str, str]:
    """What a group says, on every process; collective, and `texts` are those of the caller.

    The group's first process sends. The others take part with as many zeros, since a broadcast
    needs the same shape everywhere.
    """
    is_source = group.processes[0] == jax.process_index()
    message = np.zeros(group.text_bytes, np.uint8)
    if is_source:
        message[:] = np.frombuffer(_message(texts), np.uint8)
    received = multihost_utils.broadcast_one_to_all(message, is_source=is_source)
    return json.loads(received.tobytes())


def _message(texts: Mapping[str, str]) -> bytes:
    return json.dumps(texts).encode()


def gather_texts(text: str) -> list[str]:
    """The texts of all processes, in the order of the processes; each of them calls it.

    It is meant for short texts: every process receives all of them, padded to the longest, since
    arrays that are gathered have the same shape everywhere.

    >>> gather_texts("here")
    ['here']
    """
    if jax.process_count() == 1:
        return [text]
    message = text.encode()
    sizes = multihost_utils.process_allgather(np.int32(len(message)))
    # At least one byte: an empty array cannot be gathered.
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    gathered = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


def describe_disagreement(statements: Sequence[Statement], unheard: Sequence[int] = ()) -> str:
    """Who differs from the largest group, in what, and where that first happens.

    `statements` are groups of processes and what they say, the largest first. `unheard` are
    processes of still more groups, whose texts nobody asked for.

    >>> print(describe_disagreement([([0, 2], {"batch": "8 x 128"}), ([1], {"batch": "8 x 64"})]))
    Process 1 differs from processes 0, 2 in `batch`. Start every process with the same command,
    code and environment.
    --- `batch` on processes 0, 2
    +++ `batch` on process 1
    @@ -1 +1 @@
    -8 x 128
    +8 x 64
    """
    usual, *others = statements
    usual_processes, usual_texts = usual
    clauses, differences = [], []
    for other in others:
        names = _differing_names(usual_texts, other[1])
        clauses.append(f"{_differ(other[0])} from {_name(usual_processes)} in {listed(names)}")
        for name in names:
            differences.extend(_difference(name, usual, other))
    if unheard:
        clauses.append(f"{_differ(unheard)} from all of these")

    sentence = _capitalised("; ".join(clauses))
    # The largest group comes first: where the next is as large, nobody can tell which is right.
    if len(usual_processes) == len(others[0][0]):
        sentence += ". Neither is in the majority"
    sentence += ". Start every process with the same command, code and environment."
    return "\n".join([sentence, *differences])


def _capitalised(sentence: str) -> str:
    """A sentence with a capital at its beginning, and the rest as it is.

    >>> _capitalised("process 1 differs in `XLA_FLAGS`")
    'Process 1 differs in `XLA_FLAGS`'
    """
    return sentence[:1].upper() + sentence[1:]


def _differing_names(usual: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The names whose texts differ, or that only one of the two has; the usual ones first."""
    differing = []
    for name in dict.fromkeys([*usual, *other]):
        if usual.get(name) != other.get(name):
            differing.append(name)
    return differing


def _differ(processes: Sequence[int]) -> str:
    if len(processes) == 1:
        return f"{_name(processes)} differs"
    return f"{_name(processes)} differ"


def _check_devices(counts: Mapping[int, int]) -> None:
    """Refuse processes that have different numbers of devices; `counts` is by process.

    JAX cannot arrange such devices in a mesh, and often one of them is broken. The rarest count is
    named first.
    """
    processes_by_count: dict[int, list[int]] = defaultdict(list)
    for process, count in counts.items():
        processes_by_count[count].append(process)
    if len(processes_by_count) <= 1:
        return
    clauses = []
    for count, processes in sorted(processes_by_count.items(), key=lambda item: len(item[1])):
        verb = "has" if len(processes) == 1 else "have"
        clauses.append(f"{_name(processes)} {verb} {count}")
    raise ValueError(
        f"Processes have different numbers of devices: {'; '.join(clauses)}. Look for a device "
        "that is broken or taken there, or give every process as many."
    )


def _name(processes: Sequence[int]) -> str:
    """Processes in a sentence: `process 3`, or `processes 0-6, 8`.

    Consecutive ones are a range, and no more than 16 ranges are listed, so that it stays readable
    however many there are.
    """
    runs: list[list[int]] = []
    for process in sorted(processes):
        if runs and process == runs[-1][-1] + 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    spelt = list(map(_spell_run, runs))
    named = ", ".join(spelt[:_MAX_RUNS])
    if len(spelt) > _MAX_RUNS:
        named += f" and {len(spelt) - _MAX_RUNS} more such"
    noun = "processes" if len(processes) > 1 else "process"
    return f"{noun} {named}"


def _spell_run(run: list[int]) -> str:
    if len(run) == 1:
        return f"{run[0]}"
    return f"{run[0]}-{run[-1]}"


def _difference(name: str, usual: Statement, other: Statement) -> list[str]:
    """The lines in which two groups' texts of one name differ, as a unified diff.

    It is cut after its first lines, and says how many more there are.
    """
    missing = "(it has no such text)"
    diff = difflib.unified_diff(
        _wrapped_lines(usual[1].get(name, missing)),
        _wrapped_lines(other[1].get(name, missing)),
        f"`{name}` on {_name(usual[0])}",
        f"`{name}` on {_name(other[0])}",
        n=1,
        lineterm="",
    )
    shown = list(islice(diff, _MAX_DIFFERENCES))
    # What is left in the iterator is not shown.
    more = len(list(diff))
    if more:
        shown.append(f"... and {more} more lines")
    return shown


def _wrapped_lines(text: str) -> list[str]:
    """The lines of a text, with long ones in pieces of equal length.

    A line that differs, such as a whole program's on one line, then shows as the piece that does.
    """
    pieces = []
    for line in text.splitlines():
        # An empty line is one piece.
        for start in range(0, max(len(line), 1), _WIDTH):
            pieces.append(line[start : start + _WIDTH])
    return pieces
