"""The published puzzle solutions, and the native strategies beside them."""

from __future__ import annotations

import pytest

from shardlab.strategies import STRATEGIES
from tests.simulate.timeline.runs import run

TABLE = [
    # strategy, ranks, layers, microbatches; steps, end and peak memory of the published solution
    ("single", 1, 2, 4, 16.5, 17.0, 2621440),
    ("grad-accum", 1, 2, 4, 16.5, 17.0, 1966080),
    ("ddp", 4, 2, 4, 5.1, 5.6, 1835008),
    ("wsdp", 4, 6, 4, 19.9, 20.4, 2752512),
    ("fsdp", 4, 6, 4, 19.9, 20.4, 2359296),
    ("pipeline", 4, 8, 4, 66.9, 67.4, 3145728),
    ("gpipe", 4, 8, 4, 33.3, 33.8, 4194304),
    ("pipeline-fsdp", 16, 4, 4, 15.5, 16.0, 966656),
]


@pytest.mark.parametrize(("name", "ranks", "layers", "microbatches", "steps", "end", "peak"), TABLE)
def test_no_strategy_is_slower_or_larger_than_the_published_solution(
    name: str, ranks: int, layers: int, microbatches: int, steps: float, end: float, peak: int
) -> None:
    entry = STRATEGIES[name]
    timeline = run(entry.program, entry.mesh(ranks), layers, microbatches)
    assert timeline.steps <= steps
    assert timeline.end <= end
    assert timeline.peak_memory <= peak


def test_the_table_has_a_row_for_every_strategy_of_the_puzzles() -> None:
    ours = {"column-parallel", "tensor-parallel", "expert-parallel"}
    puzzles = {name for name, entry in STRATEGIES.items() if not entry.plan} - ours
    assert [row[0] for row in TABLE] == [n for n in STRATEGIES if n in puzzles | {"gpipe", "pipeline-fsdp"}]


def test_one_device_takes_exactly_what_the_puzzle_says() -> None:
    timeline = run(STRATEGIES["single"].program, 1, 2, 4)
    assert (timeline.steps, timeline.end, timeline.peak_memory) == (16.5, 17.0, 2621440)


def test_steps_is_when_the_last_op_starts_and_end_when_it_ends() -> None:
    timeline = run(STRATEGIES["fsdp"].program, 4, 6, 4)
    every = [event for events in timeline.events for event in events]
    assert timeline.steps == pytest.approx(max(event.start for event in every))
    assert timeline.end == pytest.approx(max(event.end for event in every))


def test_peak_memory_is_the_largest_over_the_ranks() -> None:
    timeline = run(STRATEGIES["gpipe"].program, STRATEGIES["gpipe"].mesh(4), 8, 4)
    assert timeline.peak_memory == max(timeline.peak_memory_by_rank)
    assert len(set(timeline.peak_memory_by_rank)) > 1
