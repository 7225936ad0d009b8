"""Collectives with a root, run by the executor on real processes, give one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardlab.models import GPT
from shardlab.train.job import Job
from shardlab.train.verify import verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
PROGRAMS = Path(__file__).with_name("rooted_programs.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"


@pytest.mark.parametrize(
    ("strategy", "count", "microbatches"),
    [
        (f"{EXAMPLE}:parameter_server", 3, 3),
        (f"{EXAMPLE}:parameter_server", 1, 2),
        (f"{PROGRAMS}:by_root", 2, 4),
        (f"{PROGRAMS}:by_root", 4, 4),
        (f"{PROGRAMS}:replicas", 2, 4),
        (f"{PROGRAMS}:replicas", 3, 3),
    ],
    ids=lambda value: value.rpartition(":")[2] if isinstance(value, str) else str(value),
)
def test_by_way_of_a_root_the_numbers_are_those_of_one_device(
    ranks: World, strategy: str, count: int, microbatches: int
) -> None:
    model = GPT(layers=3, width=16, heads=2, block=8, dropout=0.1)
    verdict = ranks(count).call(verify_rank, CPU, Job(strategy, count, microbatches, model, 2, torch.float64), 3)[0]
    assert verdict.ok, verdict
