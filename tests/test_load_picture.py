"""The picture of the load of experts over a run."""

import math
import re
from xml.etree import ElementTree

import pytest

from shardlib.experts import load_picture

SVG = "{http://www.w3.org/2000/svg}"


def records(count=3, **metrics):
    return [{"step": 10 * k, "load": [2.0, 1.0, 0.0], **metrics} for k in range(1, count + 1)]


def test_the_load_of_each_expert_is_a_box_of_its_colour():
    drawn = ElementTree.fromstring(load_picture(records(), "Loads & <more>"))
    assert drawn.find(f"{SVG}text").text == "Loads & <more>"
    paper, *boxes = drawn.findall(f"{SVG}rect")
    assert float(paper.get("width")) == 900
    colours = {box.find(f"{SVG}title").text: box.get("fill") for box in boxes}
    assert len(boxes) == len(colours) == 9
    assert colours["expert 0, step 10: 2"] == "rgb(255,51,51)"
    assert colours["expert 1, step 20: 1"] == "rgb(255,255,255)"
    assert colours["expert 2, step 30: 0"] == "rgb(51,51,255)"


def test_metrics_that_all_records_have_are_curves():
    run = records(entropy=0.5, dropped=0.0, rounds=1.0)
    assert load_picture(run).count("<polyline") == 4
    del run[1]["rounds"]
    picture = load_picture(run)
    assert picture.count("<polyline") == 3 and "rounds" not in picture
    run = records(rounds=1.0, sent_within=512.0, sent_across=64.0)
    assert load_picture(run).count("<polyline") == 4
    # A curve reaches from its least at the bottom to its most at the top.
    run = [{"step": k, "load": [1.0], "dropped": k / 10} for k in range(5)]
    points = re.findall(r'points="([^"]*)"', load_picture(run))[1]
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights == sorted(heights, reverse=True) and heights[0] - heights[-1] == 110


def test_numbers_that_are_none_are_left_out_of_curves():
    run = records(2, dropped=0.25)
    run[0]["dropped"], run[0]["load"] = math.nan, [math.nan] * 3
    picture = load_picture(run)
    # In `metrics.jsonl` they are null.
    assert load_picture([{**run[0], "dropped": None, "load": [None] * 3}, *run[1:]]) == picture
    assert "nan," not in picture and ",nan" not in picture and "#888" in picture


def test_long_runs_are_thinned():
    assert load_picture(records(5000)).count("<rect") < 3 * 1000


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ([], "none of the 0 records has a `load`"),
        ([{"step": 1, "loss": 2.0}], "none of the 1 records has a `load`"),
        ([{"load": [1.0]}], "a whole number as each record's `step`"),
        ([{"step": 1, "load": 1.0}], "one for each expert"),
        ([{"step": 1, "load": []}], "one for each expert"),
        ([{"step": 1, "load": ["1"]}], "one for each expert"),
        ([{"step": 1, "load": [1.0]}, {"step": 2, "load": [1.0, 1.0]}], "of 1 and of 2 experts"),
        ([{"step": 1, "load": [1.0], "dropped": "no"}], "a number as each record's `dropped`"),
        ("load", "the records of a run"),
    ],
)
def test_records_that_cannot_be_drawn_are_refused(run, message):
    with pytest.raises(ValueError, match=message):
        load_picture(run)
