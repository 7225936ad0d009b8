"""Tables of a step: they have each op, value and communication of the program, and the times of the timeline."""

from __future__ import annotations

import math

import pytest

from shardlab.draw.viewer.columns import decode, encode
from shardlab.draw.viewer.step_tables import KINDS, Step, step_tables
from shardlab.language.ops import COMMUNICATION
from tests.draw.viewer.steps import step_of, two_timelines

NAMES = ["gpipe", "fsdp", "zb-v", "pipeline"]


@pytest.mark.parametrize("name", NAMES)
def test_the_ops_are_those_of_the_tapes(name: str) -> None:
    step = step_of(name)
    program, specs = step.traced.program, step.traced.specs
    header, columns = decode(encode(step_tables(step)))
    at = 0
    for row, tape in enumerate(program.tapes):
        assert columns["rowStart"][row] == at
        for op in tape:
            assert KINDS[int(columns["kind"][at])] is op.kind
            assert columns["layer"][at] == op.layer
            start = int(columns["inputStart"][at])
            inputs = [int(value) for value in columns["input"][start : int(columns["inputStart"][at + 1])]]
            assert tuple(inputs) == op.inputs
            for value in inputs:
                number = int(columns["valueSpec"][int(columns["valueStart"][row]) + value])
                assert header["specs"][number] == str(specs[row][value])
            at += 1
    assert len(columns["kind"]) == at


@pytest.mark.parametrize("name", NAMES)
def test_the_times_are_those_of_the_timeline(name: str) -> None:
    step = step_of(name)
    (view,) = step.timelines
    _, columns = decode(encode(step_tables(step)))
    event_count = 0
    for row, events in enumerate(view.timeline.events):
        for event in events:
            at = int(columns["rowStart"][row]) + event.op
            assert (columns["start0"][at], columns["end0"][at]) == (event.start, event.end)
            assert columns["reached0"][at] <= event.start
            event_count += 1
    assert sum(not math.isnan(start) for start in columns["start0"]) == event_count


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_memory_is_the_peak_of_the_timeline(name: str) -> None:
    step = step_of(name)
    header, columns = decode(encode(step_tables(step)))
    (timeline,), total = header["timelines"], len(columns["memoryTime0"])
    assert len(columns["memory0"]) == total * len(timeline["categories"])
    for row, peak in enumerate(step.timelines[0].timeline.peak_memory_by_rank):
        start, stop = int(columns["memoryRows0"][row]), int(columns["memoryRows0"][row + 1])
        live = [sum(columns["memory0"][at::total]) for at in range(start, stop)]
        assert max(live) == peak


@pytest.mark.parametrize("name", NAMES)
def test_the_members_of_a_communication_are_its_participants(name: str) -> None:
    step = step_of(name)
    _, columns = decode(encode(step_tables(step)))
    for number, communication in enumerate(step.traced.communications):
        places = range(int(columns["memberStart"][number]), int(columns["memberStart"][number + 1]))
        members = [(columns["memberRow"][at], columns["memberOp"][at]) for at in places]
        assert members == [(row, op) for row, _, op in communication.participants]
        for row, op in members:
            at = int(columns["rowStart"][int(row)] + op)
            assert columns["communication"][at] == number
            assert KINDS[int(columns["kind"][at])] in COMMUNICATION


def test_the_critical_path_is_the_one_of_the_simulation() -> None:
    step = step_of("gpipe")
    header, columns = decode(encode(step_tables(step)))
    assert header["timelines"][0]["path"]
    assert step.timelines[0].path is not None
    assert list(zip(columns["pathRow0"], columns["pathOp0"], strict=True)) == [
        (link.row, link.op) for link in step.timelines[0].path
    ]


def test_a_second_timeline_has_columns_of_its_own() -> None:
    step = two_timelines()
    header, columns = decode(encode(step_tables(step)))
    assert [entry["name"] for entry in header["timelines"]] == ["predicted", "measured"]
    assert columns["end0"] != columns["end1"]
    assert header["timelines"][1]["figures"]["end"] == step.timelines[1].timeline.end


def test_the_figures_are_those_of_the_step() -> None:
    step = step_of("gpipe")
    header, _ = decode(encode(step_tables(step)))
    assert header["timelines"][0]["figures"] == step.figures[0].as_dict()


def test_a_step_without_lines_has_no_files() -> None:
    step = step_of("gpipe")
    header, columns = decode(encode(step_tables(Step("", "", step.traced, step.timelines))))
    assert header["files"] == []
    assert set(columns["file"]) == {-1}
