"""What the check says of kept weights and of dealt microbatches holds on real processes."""

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
PROGRAMS = Path(__file__).parents[1] / "check"


@pytest.mark.parametrize(
    ("strategy", "count", "layers"),
    [
        ("unsound_programs.py:stepped_while_it_arrived_apart", 2, 1),
        ("sliced_programs.py:microbatches_together", 2, 2),
        ("sliced_programs.py:microbatches_together", 4, 1),
    ],
)
def test_what_is_accepted_runs_and_gives_the_numbers_of_one_device(
    ranks: World, strategy: str, count: int, layers: int
) -> None:
    model = GPT(layers=layers, width=16, heads=4, block=8, dropout=0.1)
    job = Job(f"{PROGRAMS}/{strategy}", count, 4, model, 2, torch.float64)
    verdict = ranks(count).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict
