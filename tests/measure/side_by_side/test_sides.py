"""Both sides train alike and take turns; what is slower is seen as slower, and where."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from shardlab.measure.side_by_side.results import PAIRS, Comparison, find_pairs
from tests.measure.side_by_side import jobs
from tests.support.ranks import Ranks
from tests.support.thorough import sampled

pytestmark = pytest.mark.starts_ranks
Worlds = Callable[[int], Ranks]


@cache
def compared(ranks: Worlds, name: str, transport: str) -> Comparison:
    """Both sides of a pair on two ranks."""
    pair = PAIRS[name]
    return ranks(2).call(jobs.compared, pair, pair.sized(jobs.TINY, 2), 2, transport)[0]


SAMPLE = {"tensor-parallel", "zb-v"}
"""Data parallelism is compared below, after its passes."""


@pytest.mark.parametrize(
    "name", sampled((name for name, pair in PAIRS.items() if pair.min_ranks == 2), SAMPLE.__contains__)
)
def test_both_sides_of_a_pair_have_one_loss(ranks: Worlds, name: str) -> None:
    comparison = compared(ranks, name, "shared")
    assert comparison.loss_error <= 1e-6
    assert len(comparison.our_losses) > len(comparison.ours.seconds) == 2, "losses of the first steps count as well"
    assert (
        comparison.our_losses[0] > comparison.our_losses[-1] or comparison.our_losses[0] != comparison.our_losses[1]
    ), "both train"
    assert 0.5 < comparison.memory < 2


@pytest.mark.parametrize(
    "name",
    sampled(("ddp", "zero-1", "fsdp", "tensor-parallel", "1f1b", "zb-v"), {"fsdp"}.__contains__),
)
def test_pytorchs_side_has_the_same_losses_on_both_transports(ranks: Worlds, name: str) -> None:
    """To the last bit, as sums of two terms are the same in either order."""
    by_memory, by_gloo = (compared(ranks, name, transport) for transport in ("shared", "gloo"))
    assert (by_memory.transport, by_gloo.transport) == ("shared", "gloo")
    assert by_memory.their_losses == by_gloo.their_losses
    assert by_memory.our_losses == by_gloo.our_losses


@pytest.mark.parametrize(
    ("requested", "shares", "transport"),
    [
        ("", True, "shared"),
        ("", False, "gloo"),
        ("gloo", True, "gloo"),
        ("shared", False, "--transport shared: the ranks share no memory here; give --transport gloo"),
        ("nccl", True, "--transport nccl: this is no transport of these ranks; give --transport gloo"),
    ],
)
def test_both_sides_use_shared_memory_unless_there_is_none(
    ranks: Worlds, requested: str, shares: bool, transport: str
) -> None:
    assert ranks(2).call(jobs.transports, requested, shares) == [transport] * 2


def test_a_rewritten_program_has_pytorchs_loss_as_well(ranks: Worlds) -> None:
    (pair,) = find_pairs(("ddp",), "all")
    comparison = ranks(2).call(jobs.compared, pair, jobs.TINY, 1)[0]
    assert comparison.loss_error <= 1e-6


@pytest.mark.thorough  # the suite compares shards and replicas apart
def test_replicas_of_shards_have_one_loss_with_pytorchs(ranks: Worlds) -> None:
    comparison = ranks(4).call(jobs.compared, PAIRS["hsdp"], jobs.TINY, 1)[0]
    assert comparison.agrees


def test_a_slower_side_is_seen_as_slower_and_where(ranks: Worlds) -> None:
    comparison, others = ranks(2).call(jobs.slow_stand_in, 3)
    assert comparison == others, "every rank gives the slowest rank's steps"
    assert comparison.ratio.median > 1
    ours, theirs = (side.parts(comparison.plain) for side in (comparison.ours, comparison.theirs))
    assert ours.waiting > 0.1 > ours.overhead
    assert theirs.overhead > 0.01
