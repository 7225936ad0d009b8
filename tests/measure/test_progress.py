"""Jobs take turns: every rank knows the same times, and what is far behind stops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardlab.language import Mesh
from shardlab.measure.progress import Race
from shardlab.measure.side_by_side.sides import race_rank
from shardlab.models import GPT
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job
from tests.support.ranks import Ranks


def raced(rank: int, jobs: list[Job], turns: Race) -> list[float]:
    return race_rank(rank, torch.device("cpu"), jobs, turns)


@pytest.mark.starts_ranks
def test_the_shorter_step_is_found_and_all_ranks_know(ranks: Callable[[int], Ranks]) -> None:
    """One job has sixteen times as many microbatches, so that no noise hides which is shorter."""
    model = GPT(layers=2, hidden_size=32, heads=2, seq_len=16)
    jobs = [Job(Plan(Mesh(dp_shard=2)), 2, count, model, 1) for count in (32, 2)]
    first, second = ranks(2).call(raced, jobs, Race(rounds=3))
    assert first == second
    assert first[0] > 2 * first[1] > 0


def test_a_job_far_behind_is_dropped_after_some_rounds() -> None:
    race = Race(always=(3,))
    times = [[1.0] * 3, [1.2] * 3, [1.3] * 3, [9.0] * 3]
    assert race.select_jobs(range(4), [seconds[:2] for seconds in times]) == [0, 1, 2, 3]
    assert race.select_jobs(range(4), times) == [0, 1, 3]
    longer = [[1.0] * 8, [1.2] * 8, [1.3] * 3, [9.0] * 8]
    assert race.select_jobs([0, 1, 3], longer) == [0, 3]
    assert race.select_jobs([0, 3], [[1.0] * 9, [1.2] * 8, [1.3] * 3, [9.0] * 9]) == [0, 3]
