"""Schedules as tables: closed formulas and published figures to the last decimal, and tables that
are refused.
"""

import itertools
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline import PUBLISHED, published
from shardlib.__main__ import main
from shardlib.pipeline import (
    SCHEDULES,
    UNIT,
    ZBH1,
    ZBH2,
    ZBV,
    Costs,
    DualPipeV,
    Eager1F1B,
    GPipe,
    Interleaved,
    OneFOneB,
    Op,
    Table,
    VHalf,
    VMin,
    ZeroBubble,
    pack,
    simulate,
)  # fmt: skip
from shardlib.pipeline.schedules._published import COSTED

SHAPES = [(1, 3), (2, 2), (2, 8), (3, 9), (4, 8), (4, 32), (8, 16), (16, 32), (32, 64)]
UNEVEN = Costs(forward=3, backward=4, weights=1.5)


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("schedule", [GPipe, OneFOneB, Eager1F1B, Interleaved, ZBH1, ZBH2])
def test_pipeline_schedules_match_the_papers_closed_formulas(schedule, stages, microbatches):
    rule = schedule(stages, microbatches)
    if schedule is ZBH2 and microbatches < 2 * stages - 1:
        pytest.skip("its formula is that of at least 2 S - 1 microbatches")
    for costs in (Costs(), UNEVEN):
        timeline = simulate(rule.table(), costs)
        assert timeline.gap == pytest.approx(rule.gap(costs))
        assert timeline.live == tuple(rule.live(stage) for stage in range(stages))


def test_pipeline_with_one_microbatch_is_naive_model_parallelism():
    timeline = simulate(GPipe(4, 1).table())
    starts = sorted((timeline.start[op], timeline.end[op]) for op in timeline.start)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(starts))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32])
def test_pipeline_v_schedules_hold_a_half_and_a_third_of_the_memory(stages):
    half, least = VHalf(stages, 3 * stages), VMin(stages, 3 * stages)
    for rule, held in ((half, stages // 2 + 1), (least, stages / 3 + (1.5 if stages > 1 else 2))):
        timeline = simulate(rule.table())
        assert timeline.gap == pytest.approx(rule.gap(Costs()))
        assert max(timeline.live) <= held
        assert timeline.sends == 2 * 2 * (stages - 1) * 3 * stages
    assert half.gap(Costs()) <= OneFOneB(stages, 3 * stages).gap(Costs()) / 2


@pytest.mark.representative("32x96")
@pytest.mark.long("16x128", "32x96", "32x128")
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]}x{row[1]}")
def test_pipeline_bubbles_match_the_published_shares(row):
    columns = {name: (found, share) for name, found, share in published(row)}
    # 1F1B-I was measured with stages of unequal layers, of which the paper gives no figures.
    found, share = columns.pop("interleaved")
    assert found == pytest.approx(share, abs=0.005)
    assert {name: round(found, 4) for name, (found, _) in columns.items()} == {
        name: share for name, (_, share) in columns.items()
    }


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 16])
def test_pipeline_zbv_and_dualpipe_v_match_their_gap_and_memory_formulas(stages):
    for times in (1, 2, 3):
        rule = ZBV(stages, times * stages)
        timeline = simulate(rule.table())
        assert timeline.gap == pytest.approx(rule.gap(UNIT)) and max(timeline.live) <= stages
    for times in (2, 3):
        rule = DualPipeV(stages, times * stages)
        timeline = simulate(rule.table())
        assert timeline.gap == pytest.approx(rule.gap(UNIT)) and set(timeline.live) == {
            stages + 0.5
        }
    uneven = Costs(1.0, 1.2, 0.7, send=0.1)
    made = ZBV(stages, 3 * stages, uneven)
    assert (
        simulate(made.table(), uneven).bubble
        <= simulate(OneFOneB(stages, 3 * stages).table(), uneven).bubble
    )
    assert max(simulate(made.table(), uneven).live) <= stages


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline_command_draws_each_schedule_and_prints_its_numbers(name, tmp_path, capsys):
    picture = tmp_path / "out.svg"
    assert (
        main(
            [
                "pipeline",
                "--schedule",
                name,
                "--stages",
                "4",
                "--microbatches",
                "8",
                "--svg",
                str(picture),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.count(" | ") == 4 and f"\n{name} " in shown and "at its fullest" in shown
    drawn = xml.etree.ElementTree.parse(picture).getroot()
    table = SCHEDULES[name](4, 8, **({"costs": UNIT} if name in COSTED else {})).table()
    titles = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(set(titles)) == sum(map(len, table.orders))


def test_pipeline_command_compares_schedules_and_reads_tables(tmp_path, capsys):
    assert main(["pipeline", "--stages", "8", "--microbatches", "8"]) == 0
    shown = capsys.readouterr().out
    assert (
        all(name in shown for name in SCHEDULES)
        and "dualpipe-v: `DualPipeV(stages=8, microbatches=8)`: at least 16" in shown
    )
    mine = tmp_path / "mine.txt"
    mine.write_text("F0 F1 B0 B1\nF0 B0 F1 B1\n")
    assert main(["pipeline", "--table", str(mine), "--weights", "0"]) == 0
    assert "stage 0 | F0 F1 .. B0 .. B1\nstage 1 | .. F0 B0 F1 B1" in capsys.readouterr().out
    assert main(["pipeline", "--table", str(mine), "--paired"]) == 0
    assert "4 paired" in capsys.readouterr().out
    mine.write_text("# there and back\nF0@0 F0@3 B0@3 B0@0\nF0@1 F0@2 B0@2 B0@1\n")
    assert main(["pipeline", "--table", str(mine)]) == 0
    assert "stage 1 | .. F0" in capsys.readouterr().out
    mine.write_text("F0 F1 B0 B1\nF0 B0 F1\n")
    letters = tmp_path / "letters.txt"
    letters.write_bytes(b"\xff\xfe")
    for arguments, words in (
        (["--table", str(mine)], "`B1@1` is missing: stage 1 never does it"),
        (["--schedule", "1f1b", "--stages", "0"], "stages=0"),
        (["--svg", "x.svg"], "say which"),
        (["--table", str(tmp_path / "none.txt")], "none.txt` cannot be read: "),
        (["--table", str(letters)], "letters.txt` cannot be read: "),
        (["--schedule", "gpipe", "--svg", f"{tmp_path}/no/x.svg"], "there is no folder"),
        (["--table", str(mine), "--stages", "2"], "--stages: the table says"),
        (["--schedule", "1f1b", "--chunks", "4"], "--chunks is for `interleaved`"),
        (["--paired"], "--paired is for a --table"),
        (["--forward", "0", "--backward", "0", "--weights", "0"], "nothing takes any time"),
    ):
        assert main(["pipeline", *arguments]) == 2
        assert words in capsys.readouterr().err


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_pipeline_schedules_are_complete_and_pack_into_ticks(data):
    schedule = data.draw(
        st.sampled_from([GPipe, OneFOneB, Eager1F1B, ZBH1, ZBH2, VMin, VHalf, ZBV, ZeroBubble])
    )
    limit = {"limit": data.draw(st.floats(1, 9))} if schedule is ZeroBubble else {}
    stages, microbatches = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 17))
    rule = schedule(stages, max(microbatches, stages) if schedule is ZBV else microbatches, **limit)
    costs = Costs(
        *(data.draw(st.floats(0.1, 3)) for _ in range(3)), send=data.draw(st.floats(0, 1))
    )
    table = rule.table()
    timeline = simulate(table, costs)
    for op, start in timeline.start.items():
        for one in table.before(op):
            sent = costs.send if table.placement[one.part] != table.placement[op.part] else 0
            assert start >= timeline.end[one] + sent
    assert all(abs(held[-1]) < 1e-9 and min(held) > -1e-9 for held in timeline.held)
    assert all(held <= rule.live(stage) + 1e-9 for stage, held in enumerate(timeline.live))
    for paired in (False, True):
        ticks = pack(table, paired)
        done = {op: number for number, row in enumerate(ticks.rows) for ops in row for op in ops}
        assert done.keys() == timeline.start.keys()
        for op, tick in done.items():
            for one in table.before(op):
                apart = table.placement[one.part] != table.placement[op.part]
                assert done[one] < tick + (not apart)
        assert ticks.makespan(costs) >= timeline.elapsed - 1e-9


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 16), (4, 8), (8, 32)])
def test_pipeline_tick_counts_match_their_closed_formulas(stages, microbatches):
    """A forward and a backward pass in each: M + 2 (S - 1) of them, in which the lockstep is as
    long as free stages take.
    """
    eager = Eager1F1B(stages, microbatches)
    ticks = pack(eager.table(), eager.paired)
    assert len(ticks.rows) == microbatches + 2 * (stages - 1)
    assert ticks.bubble(UNEVEN) == pytest.approx(simulate(eager.table(), UNEVEN).bubble)
    one = pack(OneFOneB(stages, microbatches).table(), paired=False)
    assert len(one.rows) == 2 * (microbatches + stages - 1)


def test_pipeline_costs_may_differ_by_part():
    table = Interleaved(2, 4, 2).table()
    even = simulate(table, Costs(2, 4, 2))
    assert simulate(table, Costs((1,) * 4, (2,) * 4, (1,) * 4)).end == even.end
    slow = simulate(table, Costs((1, 1, 1, 5), (2,) * 4, (1,) * 4))
    assert slow.work == even.work + 4 * 4 and slow.makespan > even.makespan
    assert (
        simulate(table, Costs(0, 0, 0)).bubble
        == pack(table, paired=False).bubble(Costs(0, 0, 0))
        == 0
    )
    assert hash(Costs([1, 1], 1, 1)) == hash(Costs((1.0, 1.0), 1, 1))
    with pytest.raises(
        ValueError, match=r"Costs\(forward=...\)` has 3 numbers, and the table has 4 parts"
    ):
        simulate(table, Costs(forward=(1, 1, 1)))


@pytest.mark.parametrize(
    ("text", "placement", "said"),
    [
        ("F0 . B0 | F1\n\nF0 B0 F1 B1", None, r"`B1@0` is missing: stage 0 never does it"),
        ("F0 B0 F0\nF0 B0", None, r"`F0@0` is done twice: op 0 of stage 0, and op 2 of stage 0"),
        (
            "F0 B0 W0\nF0 B0",
            None,
            r"`W0@1` is missing: stage 1 never does it, and every part does F, B, W",
        ),
        ("F0 X0\nF0 B0", None, r"`X0`, op 1 of stage 0: an op is `F3`, `B3` or `W3`"),
        ("F0@1 B0@1\nF0@0 B0@0", None, r"`F0@1`, op 0 of stage 0: part 1 is on stage 1"),
        (
            "F0 B0\nF0@1 B0@1",
            (0, 1, 0),
            r"`F0`, op 0 of stage 0: stage 0 has the parts \[0, 2\]: say which, as in `F3@0`",
        ),
        ("F0@0 B0@0", (0, 3), r"Stage|names stage 3"),
        ("", None, "at least one stage"),
    ],
)
def test_pipeline_tables_that_are_malformed_are_refused(text, placement, said):
    with pytest.raises(ValueError, match=said):
        Table.parse(text, placement)


def test_pipeline_table_that_deadlocks_is_refused_with_stage_and_op():
    with pytest.raises(
        ValueError, match=r"Stage 1 does `B0@1`, its op 0, before `F0@1`, which that needs"
    ):
        simulate(Table.parse("F0 B0\nB0 F0"))
    crossed = Table.parse("F0 B0 F1 B1\nF1 B1 F0 B0")
    said = (
        "stage 1 cannot do `F1@1`, its op 0, before `F1@0`, which is op 2 of stage 0; .* waits at "
        "its op 1, `B0@0`"
    )
    with pytest.raises(ValueError, match=said):
        simulate(crossed)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GPipe(0, 4), r"GPipe\(stages=0\)` takes a number of stages, at least 1"),
        (lambda: OneFOneB(4, 0), r"microbatches=0\)` takes a number of microbatches, at least 1"),
        (
            lambda: Interleaved(4, 6),
            r"at least 4, a multiple of 4: its microbatches go in groups as many as there are stages",
        ),
        (lambda: Interleaved(4, 8, chunks=0), r"Interleaved\(chunks=0\)`"),
        (
            lambda: ZeroBubble(4, 8, limit=0.5),
            r"ZeroBubble\(limit=0.5\)` takes .* that a stage holds, at least 1",
        ),
        (lambda: Costs(forward=-1), r"Costs\(forward=-1\)` takes a cost, .* at least 0"),
        (lambda: Costs(kept=2), r"Costs\(kept=2\)` takes a share, at least 0 and at most 1"),
        (lambda: Costs(send=float("inf")), "takes a cost, finite and at least 0"),
        (lambda: Costs(weights="much"), r"Costs\(weights='much'\)` takes a cost"),
        (lambda: ZBH1(4, 3).gap(UNIT), "M at least S"),
        (lambda: ZBH2(4, 6).gap(UNIT), "M at least 2 S - 1"),
        (
            lambda: ZBV(4, 3),
            r"ZBV\(stages=4, microbatches=3\)`: at least 4, as many as there are stages",
        ),
        (lambda: ZBV(4, 6).gap(UNIT), "M = S and for M at least 2 S"),
        (lambda: DualPipeV(4, 7), "at least 8, twice as many as there are stages"),
        (
            lambda: ZBH1(4, 8).gap(Costs(1, 2, 1.5)),
            "closed formula is for W at most F, and M at least S; got",
        ),
        (lambda: VHalf(4, 8).gap(Costs(1, 2, 1)), "closed formula is for F = B = W; got"),
        (
            lambda: simulate(GPipe(2, 2)),
            r"simulate\(table=GPipe\(.*takes a table; of a schedule it is `schedule.table\(\)`",
        ),
        (lambda: OneFOneB(4, 8).gap(Costs((1, 2), 1, 1)), "stages that are all alike"),
    ],
)
def test_pipeline_refuses_invalid_arguments(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline_refuses_absurd_stage_and_microbatch_counts(name, capsys):
    huge = 10**30
    for stages, microbatches, said in [
        (
            4,
            huge,
            r"microbatches=10+\)` takes a number of microbatches, at least 1 and at most 65,536",
        ),
        (4, 10**5000, r"microbatches=.*at most 65,536"),
        (huge, huge, r"stages=10+\)` takes a number of stages, at least 1 and at most 256"),
        (257, 514, r"stages=257\)` takes a number of stages"),
        (1, -huge, r"microbatches=-10+\)` takes a number of microbatches"),
        (1, 2**17, r"microbatches=131072\)`.*at most"),
        (256, 2**12, r"passes of each kind, and a table at most [0-9,]+: use fewer"),
        (True, 8, r"stages=True\)` takes a number of stages"),
    ]:
        with pytest.raises(ValueError, match=said) as refused:
            SCHEDULES[name](stages, microbatches)
        assert len(str(refused.value)) < 400
    for numbers in (["--stages", str(huge)], ["--microbatches", str(huge)]):
        assert main(["pipeline", "--schedule", name, *numbers]) == 2
        assert "shardlib pipeline: `" in capsys.readouterr().err


def test_pipeline_command_and_tables_refuse_huge_numbers(capsys):
    assert main(["pipeline", "--microbatches", str(10**30)]) == 2
    assert "microbatches=1000" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"chunks=10+\)` takes a number of parts on each stage"):
        Interleaved(4, 8, chunks=10**30)
    for word in ("F" + "9" * 5000, "F0@" + "9" * 5000):
        with pytest.raises(ValueError, match="an op is `F3`") as refused:
            Table.parse(f"{word} B0")
        assert len(str(refused.value)) < 400


def test_pipeline_tables_import_without_jax():
    """The files import nothing but each other and the standard library."""
    code = (
        "import sys, types; package = types.ModuleType('shardlib'); package.__path__ = "
        "['shardlib']; sys.modules['shardlib'] = package; import shardlib.pipeline; print('jax' in "
        "sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False" and Op("F", 1, 2) == ("F", 1, 2)
