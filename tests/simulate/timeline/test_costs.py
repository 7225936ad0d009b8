"""Teaching costs: compute by FLOPs, communication by bytes, collectives as long as the same messages by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from shardlab.check import check
from shardlab.language import Kind, Mesh, OpKind, Rank, Sizes, Strategy, Value, trace
from shardlab.language.mesh import group_of
from shardlab.models import GPT
from shardlab.models.cutting import cut
from shardlab.simulate.timeline import TEACHING_COSTS, Timeline, simulate
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan, ReduceAt
from shardlab.strategies.plan.program import program_from_plan
from tests.simulate.timeline.runs import ROWS, SQUARE, events

FREE_MESSAGES = replace(TEACHING_COSTS, flops_per_byte=0.0, latency=0.0)
FORWARD, BACKWARD, UPDATE = OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE


def run(strategy: Strategy, ranks: Mesh | int, layers: Sizes | int = 4, microbatches: int = 4) -> Timeline:
    return simulate(check(trace(strategy, ranks, layers, microbatches)))


def planned(plan: Plan, layers: Sizes | int = 4, microbatches: int = 4) -> Timeline:
    sizes = Sizes.of_puzzle(layers, plan.mesh) if isinstance(layers, int) else layers
    return simulate(check(trace(program_from_plan(plan), plan.mesh, sizes, microbatches)), FREE_MESSAGES)


def time_of(timeline: Timeline, *kinds: OpKind, rank: int = 0) -> float:
    return sum(event.end - event.start for kind in kinds for event in events(timeline, kind, rank))


# Compute.


def test_a_backward_pass_takes_two_forward_passes_and_each_half_one() -> None:
    whole, split = (planned(Plan(Mesh(pp=2), name)) for name in ("1f1b", "zb-h1"))
    assert time_of(whole, FORWARD) == pytest.approx(2 * 4)
    assert time_of(whole, BACKWARD) == pytest.approx(2 * time_of(whole, FORWARD))
    halves = [time_of(split, half) for half in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)]
    assert halves == pytest.approx([8.0, 8.0])


def test_a_recomputation_takes_a_forward_pass() -> None:
    timeline = planned(Plan(Mesh(dp_shard=2), recompute="full"))
    assert time_of(timeline, OpKind.RECOMPUTE) == pytest.approx(time_of(timeline, FORWARD))


PASSES = (FORWARD, BACKWARD, OpKind.ATTEND, OpKind.ATTEND_BACKWARD)


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("mesh", [Mesh(tp=1), Mesh(tp=2), Mesh(tp=4), Mesh(ep=2), Mesh(cp=2), Mesh(cp=2, tp=2)])
def test_a_model_that_is_cut_takes_as_long_as_whole_layers(mesh: Mesh, blocks: int) -> None:
    timeline = planned(Plan(mesh), blocks)
    assert sum(time_of(timeline, *PASSES, rank=rank) for rank in range(mesh.world)) == pytest.approx(3 * 4 * blocks)


def test_a_real_model_takes_as_long_whole_as_cut() -> None:
    model = GPT(layers=3, hidden_size=32, heads=4)
    whole = run(STRATEGIES["single"].program, 1, model.sizes(2, 4), 2)
    for tp in (2, 4):
        sizes = cut(model, tp=tp).sizes(2, 4)
        timeline = planned(Plan(Mesh(tp=tp)), sizes, 2)
        assert tp * time_of(timeline, *PASSES) == pytest.approx(time_of(whole, *PASSES))
    assert time_of(whole, FORWARD) == pytest.approx(2 * 3)


def test_an_update_takes_time_by_its_elements() -> None:
    ddp, zero = (run(STRATEGIES[name].program, 4) for name in ("ddp", "zero-1"))
    assert time_of(ddp, UPDATE) == pytest.approx(4 * TEACHING_COSTS.update)
    assert time_of(zero, UPDATE) == pytest.approx(time_of(ddp, UPDATE) / 4)
    cut_up = planned(Plan(Mesh(tp=2)))
    vectors = 9 * 512 / (10 * SQUARE + 9 * 512)  # norms, of which every rank updates a copy
    assert time_of(cut_up, UPDATE) == pytest.approx(0.8 * (0.5 * (1 - vectors) + vectors))


def test_the_loss_and_sums_of_gradients_take_no_time() -> None:
    timeline = run(STRATEGIES["grad-accum"].program, 1)
    assert events(timeline, OpKind.ADD)
    assert time_of(timeline, OpKind.LOSS, OpKind.ADD) == 0


# Communication.


def test_a_message_of_an_activation_takes_a_fifth_of_a_forward_pass() -> None:
    assert TEACHING_COSTS.message_times(Kind.ACTIVATION, 4 * ROWS, 0, 1)[0] == pytest.approx(0.2)
    ring_times = [
        TEACHING_COSTS.collective_time(kind, 4 * SQUARE, group_of("dp_shard", range(4))) for kind in ON_A_RING
    ]
    assert ring_times == pytest.approx([0.33, 0.66])
    assert TEACHING_COSTS.collective_time(OpKind.ALL_REDUCE, 4 * SQUARE, group_of("dp_shard", (0,))) == 0


ON_A_RING = (OpKind.ALL_GATHER, OpKind.ALL_REDUCE)


async def ring_all_reduce(rank: Rank, value: Value) -> Value:
    n, me = rank.world, rank.index
    parts = rank.grad_weights
    for part in range(n):
        parts["part", part] = rank.slice(value, part, n)
    for step in range(2 * (n - 1)):
        give, take = (me - step) % n, (me - step - 1) % n
        arrived = await rank.exchange(parts["part", give], to=(me + 1) % n, source=(me - 1) % n)
        parts["part", take] = rank.add(parts["part", take], arrived) if step < n - 1 else arrived
    return rank.concatenate(parts.pop(("part", part)) for part in range(n))


async def ring_reduce_scatter(rank: Rank, value: Value) -> Value:
    n, me = rank.world, rank.index
    parts = rank.grad_weights
    for part in range(n):
        parts["part", part] = rank.slice(value, part, n)
    for step in range(n - 1):
        give, take = (me - step - 1) % n, (me - step - 2) % n
        arrived = await rank.exchange(parts["part", give], to=(me + 1) % n, source=(me - 1) % n)
        parts["part", take] = rank.add(parts["part", take], arrived)
    return parts["part", me]


async def chained_reduce(rank: Rank, value: Value) -> Value:
    total = rank.grad_weights["total"] = value
    if rank.index < rank.world - 1:
        total = rank.grad_weights["total"] = rank.add(value, await rank.recv(source=rank.index + 1))
    if rank.index:
        await rank.send(total, to=rank.index - 1)
    return total


async def chained_broadcast(rank: Rank, value: Value) -> Value:
    if rank.index:
        value = rank.grad_weights["total"] = await rank.recv(source=rank.index - 1)
    if rank.index < rank.world - 1:
        await rank.send(value, to=rank.index + 1)
    return value


async def scattered_by_hand(rank: Rank, value: Value) -> Value:
    n = rank.world
    if rank.index:
        return await rank.recv(source=0)
    for other in range(1, n):
        await rank.send(rank.slice(value, other, n), to=other)
    return rank.slice(value, 0, n)


Reduction = Callable[[Rank, Value], Awaitable[Value]]


def reducing(reduction: Reduction, shard: bool) -> Strategy:
    """Data parallelism that reduces each gradient in this way, and updates whole weights or shards."""

    async def program(rank: Rank) -> None:
        slices = (rank.index, rank.world) if shard else (0, 1)
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *slices)
            rank.weights[l, "full"] = await rank.all_gather(rank.weights[l]) if shard else rank.weights[l]
        rank.activations[0] = rank.load_batch(rank.share())
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l, "full"])
        rank.grad_activations[len(rank.layers)] = rank.loss(rank.activations.pop(len(rank.layers)))
        for l in reversed(rank.layers):
            x, gradient = rank.activations.pop(l), rank.grad_activations.pop(l + 1)
            grad_weight, rank.grad_activations[l] = rank.backward(l, x, gradient, rank.weights.pop((l, "full")))
            rank.grad_weights["made"] = grad_weight
            total = rank.grad_weights[l] = await reduction(rank, grad_weight)
            rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])
            rank.grad_weights.clear()

    return program


async def reduce_then(rank: Rank, value: Value, second: str, by_hand: bool) -> Value:
    """Reduce to rank 0, then give all ranks the sum or a slice of it."""
    if by_hand:
        total = await chained_reduce(rank, value)
        return await (chained_broadcast if second == "broadcast" else scattered_by_hand)(rank, total)
    total = await rank.reduce(value, root=0)
    return await (rank.broadcast if second == "broadcast" else rank.scatter)(total, root=0)


async def all_reduce(rank: Rank, value: Value) -> Value:
    return await rank.all_reduce(value)


async def reduce_scatter(rank: Rank, value: Value) -> Value:
    return await rank.reduce_scatter(value)


def rooted(second: str, *, by_hand: bool) -> Reduction:
    return partial(reduce_then, second=second, by_hand=by_hand)


BY_HAND: dict[str, tuple[Reduction, Reduction, bool]] = {
    "all_reduce": (all_reduce, ring_all_reduce, False),
    "reduce_scatter": (reduce_scatter, ring_reduce_scatter, True),
    "broadcast": (rooted("broadcast", by_hand=False), rooted("broadcast", by_hand=True), False),
    "scatter": (rooted("scatter", by_hand=False), rooted("scatter", by_hand=True), True),
}
"""Ways to reduce a gradient: by a collective, by messages, and whether they leave shards."""


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", BY_HAND)
def test_messages_by_hand_take_as_long_as_the_collective(name: str, ranks: int) -> None:
    collective, by_hand, shard = BY_HAND[name]
    ends = [run(reducing(reduction, shard), ranks, 2, ranks).end for reduction in (collective, by_hand)]
    assert ends[0] == pytest.approx(ends[1])
    assert ends[0] > simulate(check(trace(reducing(collective, shard), ranks, 2, ranks)), FREE_MESSAGES).end


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("reduce_at", ["layer", "step"])
@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp_shard=2), Mesh(pp=2, dp_shard=3), Mesh(pp=4, dp_replicate=2)])
def test_identical_replicas_have_identical_timelines(mesh: Mesh, reduce_at: ReduceAt, schedule: str) -> None:
    plan = Plan(mesh, schedule, reduce_at=reduce_at)
    timeline = run(program_from_plan(plan), mesh, 4, 12)
    times = [[(event.start, event.end) for event in events] for events in timeline.events]
    replicas = mesh.dp_shard * mesh.dp_replicate
    for first in range(0, mesh.world, replicas):
        assert times[first : first + replicas] == [times[first]] * replicas
