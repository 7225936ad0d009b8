"""What ranks send in a step, counted on tapes."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.language import Mesh, trace
from shardlab.simulate.timeline import Traffic, traffic
from shardlab.strategies import STRATEGIES, Plan
from shardlab.strategies.plan.program import program_from_plan

# What a rank sends in a step, counted on its tape, is what the formulas of rings say.


def traffic_by_rank(name: str, ranks: int, layers: int = 6, microbatches: int = 8) -> list[Traffic]:
    entry = STRATEGIES[name]
    return traffic(check(trace(entry.program, entry.grid(ranks), entry.puzzle(ranks, layers), microbatches)))


WEIGHT = 512 * 512 * 4
ACTIVATION = 512 * 256 * 4


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ddp_reduces_every_gradient_once(ranks: int) -> None:
    for rank_traffic in traffic_by_rank("ddp", ranks):
        assert (rank_traffic.collectives, rank_traffic.messages) == (6, 0)
        assert rank_traffic.bytes == rank_traffic.weights == pytest.approx(6 * WEIGHT * 2 * (ranks - 1) / ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_sends_half_as_much_again_as_ddp(ranks: int) -> None:
    assert traffic_by_rank("fsdp", ranks)[0].bytes == pytest.approx(1.5 * traffic_by_rank("ddp", ranks)[0].bytes)


@pytest.mark.parametrize("microbatches", [4, 8])
def test_zero_1_sends_as_much_as_ddp_however_many_microbatches(microbatches: int) -> None:
    assert traffic_by_rank("zero-1", 4, microbatches=microbatches)[0].weights == pytest.approx(
        traffic_by_rank("ddp", 4)[0].weights
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_are_sent_all_tokens_but_a_ranks_own_both_ways_and_gradients_of_the_rest_are_reduced(
    ranks: int,
) -> None:
    """Three layers of experts, each with four exchanges a step, between four dense ones."""
    for rank_traffic in traffic_by_rank("expert-parallel", ranks, layers=3, microbatches=ranks):
        assert (rank_traffic.collectives, rank_traffic.messages) == (3 * 4 + 4, 0)
        assert rank_traffic.activations == pytest.approx(3 * 4 * ACTIVATION * (ranks - 1) / ranks)
        assert rank_traffic.weights == pytest.approx(4 * WEIGHT * 2 * (ranks - 1) / ranks)


def test_a_pipeline_sends_each_microbatch_up_and_its_gradient_down() -> None:
    first, middle, _, last = traffic_by_rank("gpipe", 4, microbatches=5)
    assert (first.messages, middle.messages, last.messages) == (5, 10, 5)
    assert middle.activations == 10 * ACTIVATION
    assert middle.weights == 0
    assert middle.others == 6  # the gradient's norm, 4 bytes around a ring of 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_exchange_all_but_their_own_share_of_each_buffer(ranks: int) -> None:
    """Out and back, forward and backward: a rank keeps 1/n of what it gives."""
    blocks, rank_traffic = 3, traffic_by_rank("expert-parallel", ranks, layers=3, microbatches=ranks)[0]
    assert rank_traffic.activations == pytest.approx(4 * blocks * ACTIVATION * (ranks - 1) / ranks)


def test_one_rank_sends_nothing() -> None:
    for name in ("single", "ddp", "fsdp", "gpipe"):
        assert traffic_by_rank(name, 1) == [Traffic()]


def test_replicas_reduce_gradients_once_a_step_and_shards_once_a_microbatch() -> None:
    shard = ("dp_shard",)
    plan = Plan(Mesh(dp_replicate=2, dp_shard=2), shard_gradients=shard, shard_optimizer=shard, reshard_after="step")
    for microbatches in (4, 8, 12):
        (rank_traffic, *_) = traffic(check(trace(program_from_plan(plan), plan.mesh, 1, microbatches)))
        scattered = microbatches / 4 * WEIGHT / 2
        assert rank_traffic.weights == scattered + WEIGHT / 2 + WEIGHT / 2  # then halves all-reduced, and gathered back


@pytest.mark.parametrize("name", ["ddp", "fsdp", "gpipe", "context-parallel"])
def test_an_element_sent_has_four_bytes(name: str) -> None:
    for rank_traffic in traffic_by_rank(name, STRATEGIES[name].ranks):
        assert rank_traffic.elements == pytest.approx(rank_traffic.bytes / 4)
        assert rank_traffic.elements > 0
