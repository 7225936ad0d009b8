"""TODO."""

from __future__ import annotations

from pathlib import Path

from shardlab.planner.published.predict import outcome_of, outcomes_of
from shardlab.planner.published.records import read_rows

RUNS = Path(__file__).parent / "published_runs.json"


def test_processes_say_what_one_would_say_in_the_order_of_the_rows() -> None:
    rows = [row for row in read_rows(RUNS) if row["parallelism"]["pp"] == 1]
    assert len(rows) > 2
    assert list(outcomes_of(rows)) == [outcome_of(row) for row in rows]
    assert list(outcomes_of(rows[:1])) == [outcome_of(rows[0])]
