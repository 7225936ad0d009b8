"""Rows stand for ranks, which are named truly, and figures have one unit."""

from __future__ import annotations

import re
import time
from functools import cache
from itertools import combinations

import pytest

from shardlab.check import check
from shardlab.common.text import bytes_text
from shardlab.draw import timeline_svg
from shardlab.draw.canvas import Looks
from shardlab.draw.rows import Detail, Row, detail_of, passes, ranks_text, row_name, rows_of, sample_rows, tracks
from shardlab.language import Mesh, OpKind, Sizes, trace
from shardlab.simulate.predict.estimate import estimate
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.timeline import Timeline, simulate
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from tests.draw.test_timeline import texts, timeline_of
from tests.simulate.timeline.fakes import FakePrices
from tests.support.thorough import sampled

TP = Plan(Mesh(pp=4, tp=8))
FOLDED = estimate(fold(TP, Sizes.of_puzzle(8, TP.mesh), 4), FakePrices())


def test_folded_ranks_have_their_true_numbers_everywhere() -> None:
    words = texts(timeline_svg(FOLDED.timeline()))
    rows = [f"ranks {first}-{first + 7}" for first in range(0, 32, 8)]
    assert [word for word in words if word.endswith(")") and word.startswith("ranks")] == [
        f"{ranks} (pp {stage})" for stage, ranks in enumerate(rows)
    ]
    keys = [f"{ranks}: {bytes_text(peak.bytes)}" for ranks, peak in zip(rows, FOLDED.peaks, strict=True)]
    assert set(keys) <= set(words)
    assert not [word for word in words if re.match(r"rank [1-3]\b", word)]


def test_a_folded_picture_counts_the_ranks_and_the_layers_of_the_model() -> None:
    (title,) = [word for word in texts(timeline_svg(FOLDED.timeline())) if "microbatches  ·" in word]
    assert title.startswith("32 ranks (pp 4 x tp 8) in 4 rows, alike ones together  ·  8 layers  ·  4 microbatches")
    assert title.endswith(f"peak {bytes_text(FOLDED.peak.bytes)} on ranks {_first_peak()}")


def _first_peak() -> str:
    return f"{FOLDED.peak.rank}-{FOLDED.peak.rank + 7}"


def test_a_priced_picture_says_bytes_in_one_unit_and_its_peak_is_the_reports() -> None:
    timeline = FOLDED.timeline()
    assert timeline.peak_memory_by_rank == [peak.bytes for peak in FOLDED.peaks]
    words = texts(timeline_svg(timeline))
    unit = bytes_text(FOLDED.peak.bytes).split()[1]
    assert f"live memory ({unit})" in words
    assert not [word for word in words if re.search(r"\d [kMG]\b|bytes|elements", word)]


def test_many_ranks_that_do_the_same_share_a_row_with_the_microbatches_of_all() -> None:
    (row,) = rows_of(wide("fsdp", 64))
    assert row.ranks == list(range(64))
    words = texts(timeline_svg(wide("fsdp", 64)))
    assert "ranks 0-63" in words
    assert words.count("0-63") == 2 * 4
    assert any(word.startswith("64 ranks in one row, all alike") for word in words)


def test_few_ranks_keep_rows_of_their_own() -> None:
    assert [row.ranks for row in rows_of(timeline_of("fsdp", 16, microbatches=16))] == [[rank] for rank in range(16)]


def test_a_row_names_the_coordinates_that_its_ranks_share() -> None:
    sizes = Sizes.of_puzzle(4, TP.mesh)
    timeline = simulate(check(trace(program_from_plan(TP), TP.mesh, sizes, 2)))
    names = [row_name(timeline.program, row) for row in rows_of(timeline)]
    assert names == ["ranks 0-7 (pp 0)", "ranks 8-15 (pp 1)", "ranks 16-23 (pp 2)", "ranks 24-31 (pp 3)"]
    assert row_name(timeline.program, Row(9, [9], ())) == "rank 9 (pp 1, tp 1)"


def test_ranks_that_lie_apart_are_counted() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(8)) == "ranks 0-7"
    assert ranks_text(range(0, 64, 8)) == "ranks 0, 8, ... (8 alike)"


def test_spaced_rows_have_both_ends() -> None:
    rows = rows_of(timeline_of("1f1b", 64))
    numbers = [row.row for row in sample_rows(rows, 8)]
    assert numbers == [0, 9, 18, 27, 36, 45, 54, 63]
    assert sample_rows(rows, 64) == rows


# Illegible pictures are drawn coarser: passes, then shares of time with a close-up, so that pictures stay small.


@cache
def wide(name: str, microbatches: int) -> Timeline:
    return timeline_of(name, 64, microbatches=microbatches)


@cache
def large_plan() -> Timeline:
    return estimate(fold(TP, Sizes.of_puzzle(40, TP.mesh), 32), FakePrices()).timeline()


@pytest.mark.parametrize(
    ("name", "microbatches"),
    sampled([("1f1b", 64), ("zb-v", 32), ("pipeline-fsdp", 64), ("fsdp", 64)], lambda case: "fsdp" in case[0]),
)
def test_64_ranks_are_drawn_in_seconds_and_some_hundred_kilobytes(name: str, microbatches: int) -> None:
    timeline = wide(name, microbatches)
    start = time.process_time()
    svg = timeline_svg(timeline)
    assert time.process_time() - start < 20
    assert len(svg) < 600_000
    width, height = (float(size) for size in re.findall(r'(?:width|height)="([\d.]+)pt"', svg)[:2])
    assert width < 20 * 72
    assert height < 20 * 72


def test_a_plan_of_many_layers_is_drawn_by_passes_with_their_microbatches() -> None:
    timeline = large_plan()
    assert sum(map(len, timeline.events)) > 20_000
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
    spans = passes(row, looks)
    forwards = [span for kind, span in spans if kind is OpKind.FORWARD]
    assert [span.text for span in forwards] == [str(microbatch) for microbatch in range(32)]
    assert sum(kind is OpKind.BACKWARD for kind, _ in spans) == 32
    for span in forwards:
        events = [e for e in row.events if e.kind is OpKind.FORWARD and span.start <= e.start < span.end]
        computes = sum(event.end - event.start for event in events)
        assert sum(share for _, share in span.shares) * (span.end - span.start) == pytest.approx(computes)


def test_recomputation_is_part_of_its_backward_pass() -> None:
    plan = Plan(Mesh(pp=2), recompute="full")
    timeline = estimate(fold(plan, Sizes.of_puzzle(8, plan.mesh), 4), FakePrices()).timeline()
    looks = Looks(timeline, "pass")
    spans = passes(rows_of(timeline)[0], looks)
    backwards = [span for kind, span in spans if kind is OpKind.BACKWARD]
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
    drawn_tracks = tracks(rows, looks, Detail.SHARES, 0.1, lambda row, event: "")
    for row, track in zip(rows, drawn_tracks, strict=True):
        computes = sum(e.end - e.start for e in row.events if e.kind in (OpKind.FORWARD, OpKind.BACKWARD))
        drawn_seconds = sum(share * (span.end - span.start) for span in track.compute for _, share in span.shares)
        assert drawn_seconds == pytest.approx(computes, rel=0.15)
        assert all(sum(share for _, share in span.shares) <= 1.1 for span in track.compute)


def test_a_close_up_shows_single_microbatches_of_the_steady_state() -> None:
    words = texts(timeline_svg(wide("1f1b", 64)))
    (heading,) = [word for word in words if word.startswith("Close-up")]
    assert heading.endswith("8 of the rows")
    assert {"rank 0", "rank 27", "rank 63"} <= {word for word in words if words.count(word) == 2}
    assert sum(word.isdecimal() for word in words) > 150
    assert not [word for word in texts(timeline_svg(timeline_of("1f1b", 4))) if word.startswith("Close-up")]


def test_one_rank_of_many_microbatches_has_a_close_up() -> None:
    words = texts(timeline_svg(timeline_of("grad-accum", 1, microbatches=512)))
    assert any(word.startswith("Close-up") for word in words)


@pytest.mark.parametrize("name", ["context-parallel", "fsdp"])
def test_communications_at_the_same_time_are_drawn_one_above_the_other(name: str) -> None:
    entry = STRATEGIES[name]
    timeline = simulate(check(trace(entry.program, entry.mesh(4), entry.puzzle(4), 4)))
    drawn_tracks = tracks(
        rows_of(timeline), Looks(timeline, "pass"), Detail.OPS, 10.0, lambda _, event: event.kind.value
    )
    shared = 0
    for track in drawn_tracks:
        for one, other in combinations(track.communication, 2):
            if max(one.start, other.start) < min(one.end, other.end) - 1e-6:
                assert max(one.part[0], other.part[0]) >= min(one.part[1], other.part[1])
                shared += 1
    assert (shared > 0) == (name != "fsdp")
    assert name != "fsdp" or {span.part for track in drawn_tracks for span in track.communication} == {(0.0, 1.0)}
