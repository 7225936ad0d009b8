"""What is cut, sent and put together by hand gives one device's numbers on real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardlab.models import GPT
from shardlab.train.job import Job
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SLICING = "tests/check/slicing_programs.py"


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        ("examples/ring_all_reduce.py:ring_all_reduce", 2),
        ("examples/ring_all_reduce.py:ring_all_reduce", 4),
        ("examples/halving_and_doubling.py:halving_and_doubling", 2),
        ("examples/halving_and_doubling.py:halving_and_doubling", 4),
        (f"{SLICING}:updates_in_chunks", 2),
        (f"{SLICING}:updates_as_chunks_come", 2),
        (f"{SLICING}:slices_of_a_gathered_weight", 4),
        (f"{SLICING}:a_rank_without_a_microbatch", 2),
        (f"{SLICING}:a_rank_without_a_microbatch", 4),
        (f"{SLICING}:all_pairs_at_once", 2),
        (f"{SLICING}:all_pairs_at_once", 4),
        ("tests/check/scaling_programs.py:mean_over_ranks", 2),
        ("tests/check/scaling_programs.py:sum_of_tokens", 2),
        ("tests/check/scaling_programs.py:means_weighted_by_tokens", 4),
        ("tests/check/casting_programs.py:gradients_in_half", 2),
        ("tests/check/casting_programs.py:weights_in_half", 2),
        ("tests/check/casting_programs.py:messages_in_half", 2),
        ("tests/check/offloading_programs.py:offloaded", 2),
        ("tests/check/offloading_programs.py:state_away", 2),
        ("tests/check/offloading_programs.py:weights_away", 2),
        ("tests/check/offloading_programs.py:sums_away", 2),
        ("tests/check/offloading_programs.py:state_goes_to_weight", 2),
        ("examples/offload.py:offload", 2),
        ("examples/gradients_in_half.py:gradients_in_half", 2),
        (f"{SLICING}:microbatches_apart_and_together", 2),
        (f"{SLICING}:sequence_parallel", 2),
        (f"{SLICING}:context_parallel", 2),
    ],
)
def test_programs_by_hand_give_the_numbers_of_one_device(ranks: World, strategy: str, count: int) -> None:
    model = GPT(layers=2, hidden_size=16, heads=4, seq_len=8, dropout=0.1)
    job = Job(f"{ROOT}/{strategy}", count, 4, model, 2, "fp64", ema=0.7)
    verdict = ranks(count).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("program", ["gradients_in_half", "weights_in_half", "messages_in_half"])
def test_what_is_cast_is_rounded_where_it_is(ranks: World, program: str) -> None:
    """Half precision has 8 or 11 bits: errors are as large as its rounding, and no larger than some of them."""
    model = GPT(layers=2, hidden_size=16, heads=4, seq_len=8)
    job = Job(f"{ROOT}/tests/check/casting_programs.py:{program}", 2, 4, model, 2, "fp32")
    verdict = ranks(2).call(verify_rank, CPU, job, 1)[0]
    assert 2**-13 < verdict.gradient_error < 2**-5, verdict
