"""What cannot be read is drawn coarser: passes, then shares of time with a close-up, so that pictures stay small."""

from __future__ import annotations

import re
import time
from functools import cache

import pytest

from shardlab.draw import timeline_svg
from shardlab.draw.looks import Looks
from shardlab.draw.rows import rows_of
from shardlab.draw.spans import Detail, detail_of, passes, tracks
from shardlab.predict.estimate import estimate
from shardlab.predict.folding import fold
from shardlab.program import Mesh, OpKind, Sizes
from shardlab.strategies.plan import Plan
from shardlab.timeline import Timeline
from tests.draw.test_timeline import texts, timeline_of
from tests.timeline.fakes import FakePrices

PLAN = Plan(Mesh(pp=4, tp=8))


@cache
def wide(name: str, microbatches: int) -> Timeline:
    return timeline_of(name, 64, microbatches=microbatches)


@cache
def large_plan() -> Timeline:
    return estimate(fold(PLAN, Sizes.of_puzzle(80, PLAN.mesh), 32), FakePrices()).timeline()


@pytest.mark.parametrize(("name", "microbatches"), [("1f1b", 64), ("zb-v", 32), ("pipeline-fsdp", 64), ("fsdp", 64)])
def test_64_ranks_are_drawn_in_seconds_and_some_hundred_kilobytes(name: str, microbatches: int) -> None:
    timeline = wide(name, microbatches)
    before = time.process_time()
    svg = timeline_svg(timeline)
    assert time.process_time() - before < 20
    assert len(svg) < 600_000
    width, height = (float(size) for size in re.findall(r'(?:width|height)="([\d.]+)pt"', svg)[:2])
    assert width < 20 * 72
    assert height < 20 * 72


def test_a_plan_of_many_layers_is_drawn_by_passes_with_their_microbatches() -> None:
    timeline = large_plan()
    assert sum(map(len, timeline.events)) > 40_000
    svg = timeline_svg(timeline)
    assert len(svg) < 600_000
    words = texts(svg)
    assert "height: share of the time" in words
    for microbatch in range(32):
        assert words.count(str(microbatch)) >= 8  # forwards and backwards of four stages


def test_a_pass_goes_through_all_layers_of_a_stage_and_is_as_high_as_it_computes() -> None:
    timeline = large_plan()
    looks = Looks(timeline, "pass")
    (row, *_) = rows_of(timeline)
    found = passes(row, looks)
    forwards = [span for kind, span in found if kind is OpKind.FORWARD]
    assert [span.text for span in forwards] == [str(microbatch) for microbatch in range(32)]
    assert sum(kind is OpKind.BACKWARD for kind, _ in found) == 32
    for span in forwards:
        inside = [e for e in row.events if e.kind is OpKind.FORWARD and span.start <= e.start < span.end]
        computes = sum(event.end - event.start for event in inside)
        assert sum(share for _, share in span.shares) * (span.end - span.start) == pytest.approx(computes)


def test_recomputation_is_part_of_its_backward_pass() -> None:
    plan = Plan(Mesh(pp=2), recompute="full")
    timeline = estimate(fold(plan, Sizes.of_puzzle(8, plan.mesh), 4), FakePrices()).timeline()
    looks = Looks(timeline, "pass")
    found = passes(rows_of(timeline)[0], looks)
    backwards = [span for kind, span in found if kind is OpKind.BACKWARD]
    assert len(backwards) == 4
    assert all("////" in {paint.hatch for paint, _ in span.shares} for span in backwards)


def test_detail_goes_from_ops_to_passes_to_shares() -> None:
    timeline = timeline_of("1f1b", 4, layers=16)
    rows, looks = rows_of(timeline), Looks(timeline, "pass")
    assert [detail_of(rows, looks, points) for points in (20.0, 4.0, 0.5)] == [
        Detail.OPS,
        Detail.PASSES,
        Detail.SHARES,
    ]


def test_shares_of_the_time_add_up_to_what_is_computed() -> None:
    timeline = timeline_of("1f1b", 8, microbatches=64)
    rows, looks = rows_of(timeline), Looks(timeline, "pass")
    drawn = tracks(rows, looks, Detail.SHARES, 0.1, lambda row, event: "")
    for row, track in zip(rows, drawn, strict=True):
        computes = sum(e.end - e.start for e in row.events if e.kind in (OpKind.FORWARD, OpKind.BACKWARD))
        shown = sum(share * (span.end - span.start) for span in track.compute for _, share in span.shares)
        assert shown == pytest.approx(computes, rel=0.15)
        assert all(sum(share for _, share in span.shares) <= 1.1 for span in track.compute)


def test_a_close_up_shows_single_microbatches_of_the_steady_state() -> None:
    words = texts(timeline_svg(wide("1f1b", 128)))
    (heading,) = [word for word in words if word.startswith("Close-up")]
    assert heading.endswith("8 of the rows")
    assert {"rank 0", "rank 27", "rank 63"} <= {word for word in words if words.count(word) == 2}
    assert sum(word.isdecimal() for word in words) > 150
    assert not [word for word in texts(timeline_svg(timeline_of("1f1b", 4))) if word.startswith("Close-up")]


def test_one_rank_of_many_microbatches_has_a_close_up() -> None:
    words = texts(timeline_svg(timeline_of("grad-accum", 1, microbatches=512)))
    assert any(word.startswith("Close-up") for word in words)
