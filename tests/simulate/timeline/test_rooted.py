"""Collectives with a root and barriers take time, memory and traffic, and are drawn."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.draw import timeline_svg
from shardlab.language import OpKind, Rank, trace
from shardlab.language.ops import ROOTED
from shardlab.simulate.timeline import UNIT_COSTS, traffic
from tests.simulate.timeline.runs import event, run
from tests.train.rooted_programs import by_root, by_root_mesh, parameter_server

WEIGHT = 512 * 512
KINDS = ROOTED | {OpKind.BARRIER}


def test_each_takes_a_collectives_time_on_all_members() -> None:
    timeline = run(by_root, by_root_mesh(4), 2, 4)
    taken = {(e.kind, round(e.end - e.start, 9)) for events in timeline.events for e in events if e.kind in KINDS}
    assert taken == {(kind, UNIT_COSTS.collective) for kind in KINDS}


async def late(rank: Rank) -> None:
    """Rank 1 computes twice as long, and all meet at a barrier before they update."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch([1, 2] if rank.index else [0])
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    gradient = rank.loss(rank.activations.pop(1))
    rank.grad_weights[0], _ = rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])
    await rank.barrier()
    total = await rank.all_reduce(rank.grad_weights.pop(0))
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])


def test_a_barrier_starts_when_the_last_rank_has_come() -> None:
    timeline = run(late, 2, 1, 3)
    assert event(timeline, OpKind.BACKWARD, 0, rank=0).end == 2
    for rank in (0, 1):
        barrier = event(timeline, OpKind.BARRIER, -1, rank)
        assert (barrier.start, barrier.microbatches) == (4, 0)


def test_the_server_keeps_its_weights_where_they_are_and_others_get_a_copy() -> None:
    server, *others = run(parameter_server, 3, 2, 3).peak_memory_by_rank
    state = 2 * WEIGHT  # of two layers, each as large as its weight
    assert others == [server - state] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_broadcast_goes_along_a_chain_and_a_reduce_back(ranks: int) -> None:
    layers, each = 3, traffic(check(trace(parameter_server, ranks, 3, ranks)))
    passes_on = [1, *(1 for _ in range(ranks - 2)), 0]
    reduces = [0, *(1 for _ in range(ranks - 1))]
    for sent, down, up in zip(each, passes_on, reduces, strict=True):
        assert (sent.collectives, sent.messages) == (2 * layers, 0)
        assert sent.weights == sent.bytes == layers * (down + up) * WEIGHT * 4


def test_a_scatters_root_sends_all_but_its_own_and_in_a_gather_all_others_send() -> None:
    """Along dp_shard rank 1 scatters two microbatches and one gradient to two ranks, and gathers the weight."""
    keeper, other = traffic(check(trace(by_root, by_root_mesh(2), 1, 2)))[::-1]
    broadcast, scatter, gather, reduce = WEIGHT * 4, WEIGHT * 4 / 2, WEIGHT * 4 / 2, WEIGHT * 4
    assert keeper.weights == broadcast + scatter
    assert other.weights == gather + reduce
    assert (keeper.activations, other.activations) == (512 * 256 * 4, 0)


def test_every_one_of_them_is_drawn_with_its_root() -> None:
    timeline = run(by_root, by_root_mesh(4), 1, 4)
    svg = timeline_svg(timeline, "by root")
    for kind in KINDS:
        assert f">{kind.row.legend}<" in svg
    assert f">{OpKind.BROADCAST.row.letters}1<" in svg
