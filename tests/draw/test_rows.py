"""Rows stand for ranks, which are named truly, and figures have one unit."""

from __future__ import annotations

import re

from shardlab.check import check
from shardlab.draw import timeline_svg
from shardlab.draw.rows import Row, ranks_text, row_name, rows_of, spaced
from shardlab.predict.estimate import estimate
from shardlab.predict.folding import fold
from shardlab.program import Mesh, Sizes, trace
from shardlab.strategies.plan import Plan
from shardlab.strategies.planned import planned
from shardlab.timeline import simulate
from shardlab.timeline.units import bytes_text
from tests.draw.test_timeline import texts, timeline_of
from tests.timeline.fakes import FakePrices

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
    (said,) = [word for word in texts(timeline_svg(FOLDED.timeline())) if "microbatches  ·" in word]
    assert said.startswith("32 ranks (pp 4 x tp 8) in 4 rows, alike ones together  ·  8 layers  ·  4 microbatches")
    assert said.endswith(f"peak {bytes_text(FOLDED.peak.bytes)} on ranks {_first_peak()}")


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
    (row,) = rows_of(timeline_of("fsdp", 64, microbatches=64))
    assert row.ranks == list(range(64))
    words = texts(timeline_svg(timeline_of("fsdp", 64, microbatches=64)))
    assert "ranks 0-63" in words
    assert words.count("0-63") == 2 * 4
    assert any(word.startswith("64 ranks in one row, all alike") for word in words)


def test_few_ranks_keep_rows_of_their_own() -> None:
    assert [row.ranks for row in rows_of(timeline_of("fsdp", 16, microbatches=16))] == [[rank] for rank in range(16)]


def test_a_row_names_the_coordinates_that_its_ranks_share() -> None:
    sizes = Sizes.of_puzzle(4, TP.mesh)
    timeline = simulate(check(trace(planned(TP), TP.mesh, sizes, 2)))
    names = [row_name(timeline.program, row) for row in rows_of(timeline)]
    assert names == ["ranks 0-7 (pp 0)", "ranks 8-15 (pp 1)", "ranks 16-23 (pp 2)", "ranks 24-31 (pp 3)"]
    assert row_name(timeline.program, Row(9, [9], ())) == "rank 9 (pp 1, tp 1)"


def test_ranks_that_lie_apart_are_counted() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(8)) == "ranks 0-7"
    assert ranks_text(range(0, 64, 8)) == "ranks 0, 8, ... (8 alike)"


def test_spaced_rows_have_both_ends() -> None:
    rows = rows_of(timeline_of("1f1b", 64))
    found = [row.row for row in spaced(rows, 8)]
    assert found == [0, 9, 18, 27, 36, 45, 54, 63]
    assert spaced(rows, 64) == rows
