"""Seconds from a model's kernels, a device and a cluster, with all three simple enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from shardlab.check import Checked, check
from shardlab.language import Kind, Mesh, Op, OpKind, Rank, Sizes, Strategy, UserError, trace
from shardlab.language.mesh import group_of
from shardlab.language.precision import find_precision
from shardlab.models import GPT, Model
from shardlab.models.layout import Matmul
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.hardware.cluster import find_cluster
from shardlab.simulate.predict.prices import ClusterPrices
from shardlab.simulate.predict.recipe import Kernels, Overlap, Recipe
from shardlab.simulate.timeline import Costs
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.registry import entry_from_plan
from tests.simulate.timeline.fakes import FakeCluster, FakeModel
from tests.simulate.timeline.runs import event, events, run

BF16 = find_precision("bf16")

PRICES = ClusterPrices(cast(Model, FakeModel()), 3, cast(Cluster, FakeCluster()), BF16)

PRODUCT = 2 * (3 * 16) * 4 * 8
"""FLOPs of a layer for one microbatch of three sequences of 16 tokens."""


def traced(plan: Plan, blocks: int, microbatches: int) -> Checked:
    sizes = entry_from_plan(plan, "plan").puzzle(plan.mesh.world, blocks)
    return check(trace(program_from_plan(plan), plan.mesh, BF16.sizes(sizes), microbatches))


def price(checked: Checked, op: Op, rank: int = 0) -> float:
    return PRICES.compute_time(op, checked.specs[rank], checked.program.sizes)


def ops(checked: Checked, kind: OpKind) -> list[Op]:
    return [op for op in checked.program.tapes[0] if op.kind is kind]


def test_a_pass_takes_the_kernels_of_its_microbatches() -> None:
    checked = check(trace(STRATEGIES["single"].program, 1, BF16.sizes(Sizes.puzzle(2)), 4))
    assert [price(checked, op) for op in ops(checked, OpKind.FORWARD)] == [4 * PRODUCT] * 2
    assert [price(checked, op) for op in ops(checked, OpKind.BACKWARD)] == [8 * PRODUCT] * 2
    (loss,) = ops(checked, OpKind.LOSS)
    assert price(checked, loss) == 2 * 2 * (4 * 3 * 16)  # forward and backward


def test_the_halves_of_a_backward_pass_are_its_two_products() -> None:
    checked = traced(Plan(Mesh(pp=2), "zb-h1"), 2, 4)
    for kind in (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT):
        assert {price(checked, op) for op in ops(checked, kind)} == {PRODUCT}


def test_recomputation_takes_a_forward_pass() -> None:
    checked = traced(Plan(Mesh(), recompute="full"), 2, 1)
    assert {price(checked, op) for op in ops(checked, OpKind.RECOMPUTE)} == {PRODUCT}


def work(plan: Plan, kinds: set[OpKind]) -> float:
    checked = traced(plan, 2, 1)
    return sum(price(checked, op) for op in checked.program.tapes[0] if op.kind in kinds)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(cp=2), Mesh(cp=2, tp=2)], ids=str)
def test_blocks_of_half_blocks_take_their_forward_pass_again(mesh: Mesh) -> None:
    """All layers but the embedding's body and the head's norm and body; attention's core takes what it did as well."""
    forward = {OpKind.FORWARD, OpKind.RECOMPUTE}
    once = traced(Plan(mesh), 2, 1)
    ends = {0, once.program.layers - 2, once.program.layers - 1}
    recomputed = sum(price(once, op) for op in ops(once, OpKind.FORWARD) if op.layer not in ends)
    assert work(Plan(mesh, recompute="full"), forward) == work(Plan(mesh), forward) + recomputed
    attends = {OpKind.ATTEND}
    assert work(Plan(mesh, recompute="full"), attends) == 2 * work(Plan(mesh), attends)


def test_heads_take_their_slice_of_a_projection_and_of_what_follows_attention() -> None:
    sliced, whole = (traced(Plan(Mesh(cp=2, tp=tp)), 1, 1) for tp in (2, 1))
    for one, other in zip(ops(sliced, OpKind.FORWARD), ops(whole, OpKind.FORWARD), strict=True):
        norm = not sliced.program.sizes.signatures[one.layer].sliced
        assert price(sliced, one) == price(whole, other) / (1 if norm else 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_body_takes_its_slice_of_the_parameters_and_a_norm_its_slice_of_the_sequence(sequence_parallel: bool) -> None:
    checked = traced(Plan(Mesh(tp=2), sequence_parallel=sequence_parallel), 1, 1)
    for op in ops(checked, OpKind.FORWARD):
        body = op.layer % 2 == 0
        assert price(checked, op) == (PRODUCT / 2 if body or sequence_parallel else PRODUCT)
    for op in ops(checked, OpKind.BACKWARD):
        body = op.layer % 2 == 0
        assert price(checked, op) == 2 * (PRODUCT / 2 if body or sequence_parallel else PRODUCT)


def test_the_loss_of_slices_is_found_out_first_and_then_taken_back() -> None:
    checked = traced(Plan(Mesh(tp=2)), 1, 1)
    (stats,), (loss,) = ops(checked, OpKind.LOSS_STATS), ops(checked, OpKind.LOSS)
    assert price(checked, stats) == price(checked, loss) == 2 * 3 * 16


def test_attention_of_blocks_knows_how_much_of_it_is_seen() -> None:
    checked = traced(Plan(Mesh(cp=2)), 1, 1)
    own_block, other_block = ops(checked, OpKind.ATTEND)
    # The first rank has slices 0 and 3 of 4. Among themselves 0 and 3 are half seen, 0 by 3 whole, 3 by 0 not at all;
    # of slices 1 and 2 slice 3 sees all and slice 0 nothing.
    assert price(checked, own_block) == price(checked, other_block) == 2 * 0.5


def test_an_update_moves_the_state_of_its_slice() -> None:
    checked = check(trace(STRATEGIES["fsdp"].program, 4, BF16.sizes(Sizes.puzzle(1)), 4))
    (update,) = ops(checked, OpKind.UPDATE)
    elements = 512 * 512 / 4
    assert price(checked, update) == 2 * elements * (2 + 2 * 12 + 2) / 4
    assert find_precision("fp32").moved_by_update == 4 + 2 * 8 + 2 * 4


@pytest.mark.parametrize("plan", [Plan(Mesh(dp_shard=4)), Plan(Mesh(dp_shard=4), shard_optimizer=("dp_shard",))])
def test_muon_s_update_makes_those_matrices_orthogonal_that_its_slice_has_parts_of(plan: Plan) -> None:
    model = GPT(layers=2, hidden_size=256, heads=4, vocab_size=256, seq_len=64)
    prices = ClusterPrices(model, 1, find_cluster("h100x8"), BF16.with_optimizer("muon"))
    checked = check(trace(program_from_plan(plan), plan.mesh, BF16.sizes(model.sizes(1, 2), "muon"), 4))
    (first, second), sizes = ops(checked, OpKind.UPDATE), checked.program.sizes
    spent = prices.compute_time(second, checked.specs[0], sizes)
    elementwise = prices.compute_time(second, checked.specs[0], replace(sizes, whole_matrices=False))
    square, wide = (Matmul(256, 256, 256),) * 3, (Matmul(256, 256, 1024), Matmul(256, 256, 256), Matmul(256, 1024, 256))
    # in the buffer: queries, keys, values, their output, then two matrices of four times the size, then the head
    mine = [square] * 4 if plan.shard_optimizer else [square] * 4 + [wide] * 2
    seconds = [prices.cluster.device.seconds(kernel, "bfloat16") for matrix in mine for kernel in 5 * matrix]
    assert spent - elementwise == pytest.approx(sum(seconds))
    assert prices.compute_time(first, checked.specs[0], sizes) > 0
    directions = ops(checked, OpKind.DIRECTION)
    assert [op.layer for op in directions] == ([0, 1] if plan.shard_optimizer else [])
    assert all(prices.compute_time(op, checked.specs[0], sizes) > 0 for op in directions)
    direction_specs = [spec for spec in checked.specs[0].values() if spec.kind is Kind.DIRECTION]
    whole = [sizes.bytes(spec) for spec in direction_specs if spec.holds.complete]
    assert whole == [2 * sizes.weights[op.layer] for op in directions]


def test_loading_is_free_and_a_group_of_one_waits_for_nobody() -> None:
    checked = traced(Plan(Mesh()), 1, 1)
    assert {price(checked, op) for op in checked.program.tapes[0] if op.kind.value.startswith("load")} == {0}
    assert PRICES.collective_time(OpKind.ALL_REDUCE, 100, group_of("tp", (0,))) == 0
    assert PRICES.collective_time(OpKind.ALL_REDUCE, 100, group_of("tp", (0, 1, 2))) == 300
    assert PRICES.message_times(Kind.ACTIVATION, 100, 0, 1) == (200, 200)


def test_an_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no precision 'b16'; did you mean bf16\?"):
        find_precision("b16")
    with pytest.raises(UserError, match="there are fp32"):
        find_precision("xyz")


def test_a_rank_is_as_slow_as_its_host_where_kernels_are_shorter() -> None:
    checked = traced(Plan(Mesh()), 1, 1)
    forward, backward, loss = (ops(checked, kind)[0] for kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.LOSS))

    def by_host(op: Op, seconds: float) -> float:
        prices = replace(PRICES, recipe=Recipe(kernels=Kernels(host_seconds=seconds)))
        return prices.compute_time(op, checked.specs[0], checked.program.sizes)

    assert by_host(forward, PRODUCT / 2) == price(checked, forward)
    assert by_host(forward, 3 * PRODUCT) == 3 * PRODUCT  # one product
    assert by_host(backward, 3 * PRODUCT) == 6 * PRODUCT  # two
    assert by_host(loss, 3 * PRODUCT) == price(checked, loss)  # none


def test_a_recipe_s_collectives_along_tp_wait_for_their_hosts() -> None:
    prices = replace(PRICES, recipe=Recipe(overlap=Overlap(tp_seconds=5.0)))
    assert prices.collective_time(OpKind.ALL_GATHER, 100, group_of("tp", (0, 1))) == 205
    assert prices.collective_time(OpKind.ALL_GATHER, 100, group_of("dp_shard", (0, 1))) == 200
    assert prices.collective_time(OpKind.ALL_GATHER, 100, group_of("tp", (0,))) == 0


def test_a_ring_over_nodes_goes_at_the_pace_of_its_slowest_link() -> None:
    """Whichever of its ranks is looked at; of a pipeline each message has its own link."""
    ring, pipeline = (
        ClusterPrices(cast(Model, FakeModel()), 1, find_cluster("h100x16"), BF16, mesh=mesh)
        for mesh in (Mesh(cp=4, tp=4), Mesh(pp=4, tp=4))
    )
    in_node, between_nodes = ((0, 4), (4, 8))
    assert ring.message_times(Kind.KEYS_VALUES, 2**24, *in_node) == ring.message_times(
        Kind.KEYS_VALUES, 2**24, *between_nodes
    )
    assert pipeline.message_times(Kind.ACTIVATION, 2**24, *in_node) < pipeline.message_times(
        Kind.ACTIVATION, 2**24, *between_nodes
    )


# Links that have latency only: messages take no stream, and any number of them travel at once.


COSTS = Costs(forward=1, backward_input=1, backward_weight=1, update=0, send=5, recv=0, link_latency=True)


async def sends_all_forward(rank: Rank) -> None:
    """Two ranks; the first starts to send each microbatch as soon as it is through, and awaits each at once."""
    await _two_stages(rank, awaits=True)


async def sends_and_goes_on(rank: Rank) -> None:
    """Two ranks; the first starts to send each microbatch as soon as it is through, and awaits none."""
    await _two_stages(rank, awaits=False)


async def _two_stages(rank: Rank, awaits: bool) -> None:
    l = rank.index
    rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        if l == 0:
            rank.activations[0, m] = rank.load_batch([m])
        else:
            rank.activations[1, m] = await rank.recv(source=0, expect=("activations", 1, m))
        out = rank.forward(l, rank.activations[l, m], rank.weights[l])
        if l == 0:
            handle = rank.send(out, to=1)
            if awaits:
                await handle
        else:
            rank.grad_activations[2, m] = rank.loss(out)
    for m in rank.microbatches:
        if l == 0:
            rank.grad_activations[1, m] = await rank.recv(source=1, expect=("grad_activations", 1, m))
        grad_weight, grad_input = rank.backward(
            l, rank.activations.pop((l, m)), rank.grad_activations.pop((l + 1, m)), rank.weights[l]
        )
        rank.grad_weights[l] = rank.grad_weights[l] + grad_weight if m else grad_weight
        if l == 1:
            await rank.send(grad_input, to=0)
    rank.weights[l], rank.opt_states[l] = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])


@pytest.mark.parametrize("program", [sends_all_forward, sends_and_goes_on])
def test_a_message_arrives_its_latency_after_it_was_issued_however_many_travel(program: Strategy) -> None:
    timeline = run(program, 2, 2, 3, COSTS)
    assert [(e.start, e.end) for e in events(timeline, OpKind.SEND, 0)] == [(1, 6), (2, 7), (3, 8)]
    assert [e.start for e in events(timeline, OpKind.FORWARD, 0)] == [0, 1, 2]
    assert [(e.start, e.end) for e in events(timeline, OpKind.RECV, 1)] == [(6, 6), (7, 7), (8, 8)]
    assert [e.start for e in events(timeline, OpKind.FORWARD, 1)] == [6, 7, 8]


def test_a_receive_of_its_own_length_starts_when_the_message_arrives() -> None:
    costs = Costs(forward=1, update=0, send=5, recv=2, link_latency=True)
    entry = STRATEGIES["pipeline"]
    timeline = run(entry.program, entry.mesh(2), 2, 1, costs)
    (received,) = events(timeline, OpKind.RECV, 1)
    assert (received.start, received.end) == (6, 8)
    assert event(timeline, OpKind.FORWARD, 1, rank=1).start == 8


def test_collectives_still_take_the_streams() -> None:
    costs = Costs(collective=3, link_latency=True)
    assert run(STRATEGIES["fsdp"].program, 2, 2, 2, costs).events == (
        run(STRATEGIES["fsdp"].program, 2, 2, 2, Costs(collective=3)).events
    )
