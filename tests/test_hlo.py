"""Compiled programs parsed from HLO text: operands, source lines, bytes sent and trip counts."""

import pytest

import shardlib
from shardlib.compiled._collectives import Collective, collectives
from shardlib.compiled._hlo import Program
from shardlib.compiled._source_lines import _line_of_user

PACKAGE = shardlib.__path__[0]

HEAD = """HloModule jit_f, is_scheduled=true, num_partitions=8

FileNames
1 "/home/me/train.py"
2 "{package}/layouts/_annotate.py"
3 "/usr/lib/python3.13/site-packages/flax/nnx/linear.py"
4 "{package}/step/_step.py"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=4}}
2 {{file_name_id=2 function_name_id=1 line=20 end_line=20 column=4 end_column=4}}
3 {{file_name_id=3 function_name_id=1 line=30 end_line=30 column=4 end_column=4}}
4 {{file_name_id=4 function_name_id=1 line=40 end_line=40 column=4 end_column=4}}

StackFrames
{frames}

"""
BODY = """%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: (f32[4], (f32[8,2], s32[]))) -> f32[8,2] {
  %p = (f32[4]{0}, /*index=1*/(f32[8,2]{1,0}, s32[])) parameter(0)
  ROOT %psum = f32[8,2]{1,0} all-reduce(%p#1#0), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add, \
metadata={op_name="jit(f)/psum" stack_frame_id=4}
}
"""
# The same stack, as versions write it: parents by the number of their frame, and by that number and
# one.
FRAMES = {
    "plain": "1 {file_location_id=4}\n2 {file_location_id=1 parent_frame_id=1}\n3 "
    "{file_location_id=3 parent_frame_id=2}\n4 {file_location_id=2 parent_frame_id=3}",
    "shifted": "1 {file_location_id=4 parent_frame_id=1}\n2 {file_location_id=1 "
    "parent_frame_id=2}\n3 {file_location_id=3 parent_frame_id=3}\n4 "
    "{file_location_id=2 parent_frame_id=4}",
}


@pytest.mark.parametrize("frames", FRAMES)
def test_hlo_parser_reads_tuple_operands_and_the_users_source_line(frames):
    text = HEAD.format(package=PACKAGE, frames=FRAMES[frames]) + BODY
    program = Program(text)
    assert program.computations["main"]["p#1#0"].result == "f32[8,2]{1,0}"
    [found] = collectives(text)
    assert (found.shapes, found.operand_bytes, found.sources) == (
        ((8, 2),),
        64,
        ("/home/me/train.py:7",),
    )


@pytest.mark.parametrize(
    "stack, line",
    [
        (["/me/model.py:1", "/me/main.py:2"], "/me/model.py:1"),
        ([f"{PACKAGE}/_annotate.py:1", "/me/model.py:2"], "/me/model.py:2"),
        (
            ["/x/site-packages/flax/a.py:1", "/me/model.py:2", f"{PACKAGE}/step/_step.py:3"],
            "/me/model.py:2",
        ),
        # What the step does of itself is not the fault of whoever called it.
        (
            [f"{PACKAGE}/step/_exchange.py:1", f"{PACKAGE}/step/_step.py:2", "/me/main.py:3"],
            f"{PACKAGE}/step/_exchange.py:1",
        ),
        ([f"{PACKAGE}/step/_step.py:2", "/me/main.py:3"], f"{PACKAGE}/step/_step.py:2"),
        (
            ["/x/site-packages/optax/a.py:1", f"{PACKAGE}/step/_step.py:2", "/me/main.py:3"],
            "/x/site-packages/optax/a.py:1",
        ),
        ([], ""),
    ],
)
def test_hlo_source_line_is_the_responsible_frame_of_the_stack(stack, line):
    assert _line_of_user([(place.rpartition(":")[0], place) for place in stack]) == line


@pytest.mark.parametrize(
    "kind, operand, result, sent",
    [
        ("all-reduce", 800, 800, 1400),
        ("all-gather", 100, 800, 700),
        ("reduce-scatter", 800, 100, 700),
        ("all-to-all", 800, 800, 700),
        ("ragged-all-to-all", 800, 800, 700),
        ("collective-permute", 800, 800, 800),
        ("collective-broadcast", 800, 800, 800),
    ],
)
def test_collective_bytes_sent_per_device(kind, operand, result, sent):
    one = Collective(kind, ("f32",), ((operand // 4,),), operand, result, ("data",), 8, times=3)
    assert one.sent_bytes == sent and one.total_bytes == 3 * sent


def test_hlo_loop_trip_count_ignores_control_dependencies():
    """Control dependencies stand behind the operands, and are none of them."""
    program = Program(
        """
%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]) parameter(0)
  %at = s32[] get-tuple-element(%state), index=0
  %x = f32[4] get-tuple-element(%state), index=1
  %twice = f32[4] add(%x, %x)
  %one = s32[] constant(1)
  %next = s32[] add(%at, %one), control-predecessors={%twice}, metadata={op_name="while/body/add"}
  ROOT %after = (s32[], f32[4]) tuple(%next, %twice)
}

%test (tested: (s32[], f32[4])) -> pred[] {
  %tested = (s32[], f32[4]) parameter(0)
  %counter = s32[] get-tuple-element(%tested), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

ENTRY %main (given: f32[4]) -> (s32[], f32[4]) {
  %given = f32[4] parameter(0)
  %zero = s32[] constant(0)
  %before = (s32[], f32[4]) tuple(%zero, %given)
  ROOT %loop = (s32[], f32[4]) while(%before), condition=%test, body=%body
}
"""
    )
    assert [run.times for scope, made, run in program.walk() if made.name == "twice"] == [7]
