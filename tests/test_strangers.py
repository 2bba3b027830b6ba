"""`benchmarks.strangers`, random uses of the library, detects each kind of outcome of a case, and a
wrong result.
"""

import dataclasses
import doctest
import json
import random
import sys
import warnings

import pytest

from benchmarks import _strangers, _strangers_flips, _strangers_kills, _strangers_meshes, strangers
from benchmarks._strangers import Outcome, in_children
from benchmarks._strangers_meshes import Case
from shardlib import make_mesh

ENDS = ["ran", "silent", "raw_errors", "aborts", "refused", "hangs", "ran"]
PART = f"""
import os, time
import shardlib  # before any case, whose time is limited
from benchmarks._strangers import serve

def attempt(kind):
    if kind == "silent": return "0.5 against 0.4"
    if kind == "raw_errors": return [][1]
    if kind == "aborts": os.abort()
    if kind == "refused": shardlib.make_mesh("data=0")
    if kind == "hangs": time.sleep(1000)
    return ""

serve(lambda seed, number: {ENDS}[number], attempt)
"""


@pytest.mark.exhaustive
@pytest.mark.long
def test_strangers_benchmark_counts_every_outcome_and_continues(tmp_path):
    (tmp_path / "part.py").write_text(PART)
    environment = _strangers.fast_compiles(1)
    environment["PYTHONPATH"] += f":{tmp_path}"
    outcomes = list(in_children("part", 3, 0, len(ENDS), environment, patience=3))
    assert outcomes == [
        Outcome.of(kind, f"case {k} of seed 3: {kind}", seen)
        for (k, kind), seen in zip(enumerate(ENDS), [said(one) for one in outcomes], strict=True)
    ]
    assert "0.5 against 0.4" in said(outcomes[1]) and "IndexError" in said(outcomes[2])
    assert "exit code -6" in said(outcomes[3]) and "no end after 3 s" in said(outcomes[5])


def said(outcome):
    """What a failure says behind its case."""
    return "".join(outcome.failures).partition(": ")[2].partition(": ")[2].partition(": ")[2]


def test_strangers_benchmark_exits_when_a_part_cannot_start(tmp_path):
    (tmp_path / "part.py").write_text("raise KeyError('before any case')")
    environment = _strangers.fast_compiles(1)
    environment["PYTHONPATH"] += f":{tmp_path}"
    with pytest.raises(SystemExit, match="before any case"):
        list(in_children("part", 0, 0, 3, environment, patience=60))


@pytest.mark.parametrize("part", [_strangers_meshes, _strangers_flips, _strangers_kills])
def test_strangers_cases_are_reproducible_from_seed_and_number(part):
    first = [part.draw(5, number) for number in range(40)]
    random.random()
    assert [part.draw(5, number) for number in reversed(range(40))] == first[::-1]
    assert len(set(first)) > 35 and part.draw(6, 39) != first[39]


def test_strangers_cases_cover_all_mesh_ranks_presets_and_models():
    cases = [_strangers_meshes.draw(0, number) for number in range(500)]
    assert {case.mesh.count("=") for case in cases} == {1, 2, 3, 4}
    assert {case.model for case in cases} == set(_strangers_meshes.BY_NAME)
    assert {" | ".join(presets) for presets in _strangers_meshes.PRESETS} <= {
        case.rules for case in cases
    }
    assert {(case.zero, case.accumulate) for case in cases} == {
        (zero, count) for zero in range(4) for count in (1, 2)
    }


CASE = Case("tied", 32, "data=2,model=2", "data | tensor", zero=2, accumulate=2, manual=True)


@pytest.mark.long
def test_strangers_mesh_case_detects_a_deviation_from_one_device(monkeypatch):
    assert _strangers_meshes.attempt(CASE) == ""
    expected = _strangers_meshes.reference("tied", 32)
    told, after = expected
    off = [dict(told[0]), {**told[1], "grad_norm": told[1]["grad_norm"] * 1.001}]
    monkeypatch.setattr(_strangers_meshes, "reference", lambda *_: expected._replace(metrics=off))
    assert _strangers_meshes.attempt(CASE).startswith("grad_norm of step 2 is")
    moved = {**after, "up": after["up"] + 1e-3}
    monkeypatch.setattr(_strangers_meshes, "reference", lambda *_: expected._replace(params=moved))
    assert _strangers_meshes.attempt(CASE).startswith("`up` is off by 0.001")


@pytest.mark.long
def test_strangers_blame_the_compiler_when_plain_jax_deviates_too(monkeypatch):
    case = dataclasses.replace(CASE, zero=0, manual=False)
    expected = _strangers_meshes.reference("tied", 32)
    moved = expected._replace(params={**expected.params, "up": expected.params["up"] + 1e-3})
    monkeypatch.setattr(_strangers_meshes, "reference", lambda *_: moved)
    assert _strangers.judged(lambda: _strangers_meshes.attempt(case))[0] == "compiler"
    # Right, and the library is not.
    monkeypatch.setattr(_strangers_meshes, "by_plain_jit", lambda *_: moved)
    assert _strangers.judged(lambda: _strangers_meshes.attempt(case))[0] == "silent"


def test_strangers_flip_changes_exactly_one_bit(tmp_path):
    folder = tmp_path / "tokens" / "key"
    folder.mkdir(parents=True)
    (folder / "held_out.ids").write_bytes(bytes(5))
    (folder / "train.ids").write_bytes(bytes(15))
    for place in (0.0, 0.24, 0.26, 0.9999):
        before = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        said_of = _strangers_flips.flip(tmp_path, _strangers_flips.Case("token ids", place))
        after = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        changed = [k for k in range(160) if (before[k // 8] ^ after[k // 8]) >> k % 8 & 1]
        assert changed == [int(place * 160)]
        assert ("held_out.ids" if place < 0.25 else "train.ids") in said_of


def test_strangers_detect_two_runs_writing_in_turns(tmp_path):
    def write(*writers):
        lines = (
            json.dumps({"step": k, "writer": writer, "loss": 1.0, "grad_norm": 1.0})
            for k, writer in enumerate(writers)
        )
        (tmp_path / "metrics.jsonl").write_text(
            "\n".join(lines) + '\n{"step": 7, "note": "resumed"}\n{"ste'
        )
        return _strangers_kills.two_writers(tmp_path)

    assert write(0, 0, 1, 1, 2) == ""
    assert "[0, 1, 0]" in write(0, 1, 1, 0)
    assert len(_strangers_kills.numbers(tmp_path)) == 5  # with the half line, without the note


def test_strangers_distinguish_refusals_from_raw_errors():
    assert _strangers.judged(lambda: make_mesh("data=0"))[0] == "refused"
    # A ValueError too, and not the library's.
    assert _strangers.judged(lambda: json.loads("{"))[0] == "raw_errors"

    def warned():
        warnings.warn("the newest checkpoint cannot be used", stacklevel=2)
        return "0.5 against 0.4"

    assert _strangers.judged(warned)[0] == "refused"
    assert _strangers.judged(lambda: "0.5 against 0.4") == ("silent", "0.5 against 0.4")


@pytest.mark.parametrize("failing", [*_strangers.FAILURES, "nothing", "too few"])
def test_strangers_exit_code_is_1_on_any_failure(failing, monkeypatch, capsys):
    class Part:
        @staticmethod
        def run(count, seed):
            kinds = {failing: 1} if failing in _strangers.FAILURES else {}
            return Outcome(
                drawn=count,
                ran=count - (failing == "too few"),
                failures=("what was seen",) * len(kinds),
                **kinds,
            )

    monkeypatch.setattr(strangers.importlib, "import_module", lambda name: Part)
    monkeypatch.setattr(
        sys, "argv", ["strangers", "--json", "--seed", "7", "--only", "meshes", "--meshes", "9"]
    )
    if failing == "nothing":
        strangers.main()
    else:
        with pytest.raises(SystemExit) as error:
            strangers.main()
        assert error.value.code == 1
    shown = capsys.readouterr().out
    told = next(json.loads(line) for line in shown.splitlines() if line.startswith("{"))
    assert told["seed"] == 7 and told["drawn"] == 9 and told["meshes_drawn"] == 9
    if failing in _strangers.FAILURES:
        assert told[failing] == told[f"meshes_{failing}"] == 1 and "what was seen" in shown


def test_strangers_docstring_examples():
    for module in (_strangers, _strangers_meshes):
        assert doctest.testmod(module).failed == 0
