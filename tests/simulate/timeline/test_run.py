"""When ops start: compute stops only at a WAIT, and each rank's communication takes turns on one stream."""

from __future__ import annotations

import itertools

import pytest

from shardlab.check import check
from shardlab.draw import timeline_svg
from shardlab.language import OpKind, Rank, trace
from shardlab.language.ops import ROOTED
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.simulate.timeline import PUZZLE_COSTS, Costs, traffic
from shardlab.strategies import STRATEGIES
from tests.simulate.predict.test_estimate import of_program
from tests.simulate.timeline.fakes import FakePrices
from tests.simulate.timeline.programs import (
    early_receive,
    prefetching,
    recomputing,
    reduction_before_a_send,
    reductions_at_once,
    uneven,
)
from tests.simulate.timeline.runs import event, events, run
from tests.train.rooted_programs import by_root, by_root_mesh, parameter_server

COSTS = Costs(forward=1, backward_input=1.25, backward_weight=0.75, update=0.5, collective=0.75, send=0.25, recv=0.125)


def test_forward_and_backward_cost_their_microbatches() -> None:
    timeline = run(STRATEGIES["single"].program, 1, 2, 3, COSTS)
    assert [e.end - e.start for e in events(timeline, OpKind.FORWARD)] == [3, 3]
    assert [e.end - e.start for e in events(timeline, OpKind.BACKWARD)] == [6, 6]
    assert [e.end - e.start for e in events(timeline, OpKind.UPDATE)] == [0.5, 0.5]
    assert [e.end - e.start for e in events(timeline, OpKind.LOSS)] == [0]


def test_a_reduction_runs_while_the_layer_below_computes() -> None:
    timeline = run(STRATEGIES["ddp"].program, 2, 2, 2, COSTS)
    reduction, backward = event(timeline, OpKind.ALL_REDUCE, 1), event(timeline, OpKind.BACKWARD, 0)
    assert reduction.start == backward.start == event(timeline, OpKind.BACKWARD, 1).end
    assert reduction.end == reduction.start + 0.75
    assert backward.end == backward.start + 2


def test_compute_waits_where_the_program_awaits() -> None:
    timeline = run(uneven, 2, 2, 2, COSTS)
    assert event(timeline, OpKind.UPDATE, 1).start == event(timeline, OpKind.ALL_REDUCE, 1).end


def test_a_collective_starts_when_its_last_member_arrives() -> None:
    timeline = run(uneven, 2, 1, 4, COSTS)
    assert event(timeline, OpKind.BACKWARD, 0, rank=0).end == 3
    assert event(timeline, OpKind.BACKWARD, 0, rank=1).end == 9
    for rank in (0, 1):
        reduction = event(timeline, OpKind.ALL_REDUCE, 0, rank)
        assert (reduction.start, reduction.end) == (9, 9.75)


def test_two_collectives_share_one_stream() -> None:
    timeline = run(reductions_at_once, 2, 3, 2, COSTS)
    starts = [e.start for e in events(timeline, OpKind.ALL_REDUCE)]
    assert starts == [9, 9.75, 10.5]  # after three forwards of 1 and three backwards of 2
    assert [e.start for e in events(timeline, OpKind.UPDATE)] == [9.75, 10.5, 11.25]


def test_gathers_issued_early_hide_behind_compute() -> None:
    timeline = run(prefetching, 2, 3, 2, COSTS)
    assert [e.start for e in events(timeline, OpKind.ALL_GATHER)] == [0, 0.75, 1.5]
    assert [e.start for e in events(timeline, OpKind.FORWARD)] == [0.75, 1.75, 2.75]


def test_a_receive_starts_no_earlier_than_its_send_ends() -> None:
    entry = STRATEGIES["pipeline"]
    timeline = run(entry.program, entry.mesh(2), 2, 2, COSTS)
    (send,), (receive,) = events(timeline, OpKind.SEND, 0), events(timeline, OpKind.RECV, 1)
    assert (send.start, send.end) == (2, 2.25)
    assert (receive.start, receive.end) == (2.25, 2.375)
    assert event(timeline, OpKind.FORWARD, 1, rank=1).start == 2.375


def test_a_receive_posted_early_holds_nothing_up() -> None:
    timeline = run(early_receive, 2, 2, 2, COSTS)
    assert event(timeline, OpKind.FORWARD, 0, rank=0).start == 0
    (received,) = events(timeline, OpKind.RECV, 1)
    assert received.start == 2.25
    (back,) = events(timeline, OpKind.RECV, 0)
    assert back.start == events(timeline, OpKind.SEND, 1)[0].end


def test_a_send_that_is_not_awaited_runs_beside_the_update() -> None:
    timeline = run(early_receive, 2, 2, 2, COSTS)
    (send,) = events(timeline, OpKind.SEND, 1)
    assert event(timeline, OpKind.UPDATE, 1, rank=1).start == send.start


def test_recomputation_costs_a_forward_and_stands_on_the_timeline() -> None:
    timeline = run(recomputing, 1, 2, 3, COSTS)
    single = run(STRATEGIES["single"].program, 1, 2, 3, COSTS)
    assert [e.layer for e in events(timeline, OpKind.RECOMPUTE)] == [1, 0]
    assert timeline.end == single.end + 2 * 3


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_rank_does_two_things_at_once_on_one_stream(name: str) -> None:
    entry = STRATEGIES[name]
    timeline = run(entry.program, entry.mesh(entry.ranks), entry.puzzle(entry.ranks), 4)
    communication = {OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.SEND, OpKind.RECV}
    for rank in timeline.events:
        for stream in (
            [e for e in rank if e.kind in communication],
            [e for e in rank if e.kind not in communication],
        ):
            stream.sort(key=lambda e: (e.start, e.end))
            for previous, following in itertools.pairwise(stream):
                assert following.start >= previous.end - 1e-9


def test_wait_and_free_are_no_events() -> None:
    timeline = run(STRATEGIES["fsdp"].program, 2, 2, 2)
    kinds = {e.kind for rank in timeline.events for e in rank}
    assert not kinds & {OpKind.WAIT, OpKind.FREE}


def test_what_is_ready_first_takes_the_stream_first() -> None:
    timeline = run(reduction_before_a_send, 2, 1, 3)
    reduction = event(timeline, OpKind.ALL_REDUCE, 0, rank=1)
    assert (reduction.start, reduction.end) == (4, pytest.approx(4.3))
    send, receive = event(timeline, OpKind.SEND, 1, rank=1), event(timeline, OpKind.RECV, 1)
    assert (send.start, send.end) == (pytest.approx(4.3), pytest.approx(4.5))
    assert receive.start == pytest.approx(4.5)
    assert event(timeline, OpKind.UPDATE, 0, rank=1).start == pytest.approx(4.3)


# Ranks that wait for each other come apart where communication needs their cores.


@pytest.mark.parametrize("strategy", ["fsdp", "gpipe"])
def test_a_step_lags_where_it_waits_for_collectives_or_for_messages(strategy: str) -> None:
    steps = [of_program(strategy, 2, 4, 2, FakePrices(lag=lag)).step for lag in (NO_LAG, Lag(0.5, 0.1))]
    assert steps[0] < steps[1]


# Collectives with a root and barriers take time, memory and traffic, and are drawn.


WEIGHT = 512 * 512
KINDS = ROOTED | {OpKind.BARRIER}


def test_each_takes_a_collectives_time_on_all_members() -> None:
    timeline = run(by_root, by_root_mesh(4), 2, 4)
    durations = {(e.kind, round(e.end - e.start, 9)) for events in timeline.events for e in events if e.kind in KINDS}
    assert durations == {(kind, PUZZLE_COSTS.collective) for kind in KINDS}


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
    layers, traffic_by_rank = 3, traffic(check(trace(parameter_server, ranks, 3, ranks)))
    passes_on = [1, *(1 for _ in range(ranks - 2)), 0]
    reduces = [0, *(1 for _ in range(ranks - 1))]
    for rank_traffic, down, up in zip(traffic_by_rank, passes_on, reduces, strict=True):
        assert (rank_traffic.collectives, rank_traffic.messages) == (2 * layers, 0)
        assert rank_traffic.weights == rank_traffic.bytes == layers * (down + up) * WEIGHT * 4


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
