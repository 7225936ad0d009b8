"""Traces: a page of one has the ops and figures of the timeline that was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.draw.trace_events import save_trace_events
from shardlab.draw.viewer.columns import decode, encode
from shardlab.draw.viewer.trace_file import read_trace_file, trace_tables
from shardlab.language import UserError
from shardlab.simulate.timeline.figures import figures_of
from tests.draw.viewer.steps import step_of, two_timelines


def write_trace(name: str, folder: Path) -> Path:
    (view,) = step_of(name).timelines
    save_trace_events({"": (view.timeline, view.counters)}, folder / "trace.json")
    return folder / "trace.json"


@pytest.mark.parametrize("name", ["gpipe", "fsdp", "zero-2", "pipeline"])
def test_a_trace_has_the_events_that_were_written(name: str, tmp_path: Path) -> None:
    timeline = step_of(name).timelines[0].timeline
    (read,) = read_trace_file(write_trace(name, tmp_path))
    assert len(read.ranks) == len(timeline.events)
    for rank, events in zip(read.ranks, timeline.events, strict=True):
        assert set(rank.ops) == {event.op for event in events}
        for event in events:
            kind, start, end, layer, *_ = rank.ops[event.op]
            assert (kind, layer) == (event.kind, event.layer)
            assert (start, end) == pytest.approx((event.start, event.end), abs=2e-9)


@pytest.mark.parametrize("name", ["gpipe", "fsdp", "zero-2", "pipeline"])
def test_the_figures_of_a_trace_are_those_of_its_timeline(name: str, tmp_path: Path) -> None:
    expected = figures_of(step_of(name).timelines[0].timeline)
    figures = read_trace_file(write_trace(name, tmp_path))[0].figures
    assert figures.end == pytest.approx(expected.end)
    assert (figures.compute, figures.exposed, figures.overlap) == pytest.approx(
        (expected.compute, expected.exposed, expected.overlap), abs=1e-6
    )
    assert sum(figures.idle.values()) == pytest.approx(sum(expected.idle.values()), abs=1e-6)


def test_a_trace_of_two_timelines_has_both(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace_events(
        {timeline.name: (timeline.timeline, timeline.counters) for timeline in two_timelines().timelines}, path
    )
    timelines = read_trace_file(path)
    assert [timeline.name for timeline in timelines] == ["predicted", "measured"]
    header, columns = decode(encode(trace_tables("", "", timelines)))
    assert [entry["name"] for entry in header["timelines"]] == ["predicted", "measured"]
    assert "end1" in columns


def test_timelines_with_different_ops_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    one, other = step_of("fsdp").timelines[0], step_of("gpipe").timelines[0]
    save_trace_events({"one": (one.timeline, None), "other": (other.timeline, None)}, path)
    with pytest.raises(UserError, match="'one' and 'other' of this trace have different ops"):
        trace_tables("", "", read_trace_file(path))


def refused(path: Path, content: str, match: str) -> None:
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=match) as refusal:
        read_trace_file(path)
    assert str(refusal.value).startswith(str(path))


def test_a_trace_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    text = write_trace("gpipe", tmp_path).read_text()
    for share in (0.0, 0.1, 0.5, 0.99):
        refused(tmp_path / "cut.json", text[: int(share * len(text))], "is cut off or damaged")


def test_what_is_no_trace_of_shardlab_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    refused(path, "[1, 2]", "is no trace")
    refused(path, '{"a": 1}', "is no trace")
    refused(path, '{"traceEvents": []}', "is a trace of another program")
    other: dict[str, Any] = {"otherData": {"generator": "shardlab"}, "traceEvents": []}
    refused(path, json.dumps(other), "has no ops")
    other["traceEvents"] = [{"ph": "X", "pid": 0, "name": "cudaLaunch"}]
    refused(path, json.dumps(other), "has an event that Shardlab does not write")
    refused(path, "[" * 100_000, "cannot be read as a trace|is cut off")


def test_a_missing_file_and_one_that_is_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read as a trace"):
        read_trace_file(tmp_path / "missing.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as a trace: it is not text"):
        read_trace_file(tmp_path / "bytes.json")
