"""Replicas that rounding drives apart are told of, and no others."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from examples.parameter_server import parameter_server
from shardlab.check import Checked, check
from shardlab.check.replicas import FOLLOWS, replicas_of
from shardlab.language import Mesh, Program, Rank, Sizes, Strategy, Value, trace
from shardlab.models import GPT, MLP, MoE, cut
from shardlab.simulate.passes.run import passed
from shardlab.simulate.timeline import simulate
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import planned
from tests.check import drifting
from tests.check.drifting import added, computed, data_parallel, turned
from tests.check.programs import built_in, fits, layers_for
from tests.check.test_mutations import PLANS
from tests.support.random_attention import random_attention
from tests.support.random_experts import random_experts
from tests.support.random_plans import Planned, plans
from tests.support.random_programs import Shape, random_program, shapes
from tests.support.rounding import replicas_apart
from tests.support.thorough import examples
from tests.train import rooted_programs, user_programs


def checked(program: Strategy, ranks: int = 4, layers: int = 2) -> Checked:
    return check(trace(program, ranks, layers, ranks))


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_built_in_strategy_drifts(name: str) -> None:
    assert check(built_in(name)).drifts == []
    for ranks in (4, 8):
        if fits(name, ranks):
            assert check(built_in(name, ranks, layers_for(name, ranks), 2 * ranks)).drifts == []


@pytest.mark.parametrize("name", PLANS)
def test_no_plan_drifts(name: str) -> None:
    assert check(PLANS[name].program).drifts == []


def test_no_plan_drifts_whose_reductions_run_in_buckets() -> None:
    """Ranks of `tp` have other slices of layers in their buckets, and replicas of norms beside them."""
    plan = Plan(Mesh(dp_replicate=4, tp=2))
    proof = passed(check(trace(planned(plan), plan.mesh, Sizes.half_blocks(1), 4)), "bucket")
    assert any(op.batch >= 0 for op in proof.program.tapes[0])
    assert proof.drifts == []


@settings(max_examples=examples(30))
@given(plans())
def test_no_plan_at_random_drifts(shape: Planned) -> None:
    assert check(shape.program).drifts == []


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6), st.sampled_from([random_attention, random_experts]))
def test_attention_and_experts_dealt_at_random_do_not_drift(seed: int, random: Callable[[int], Program]) -> None:
    """Where no ranks hold replicas: each rank adds its microbatches in an order of its own."""
    program = random(seed)
    assume(random is random_attention or program.mesh.tp == program.mesh.cp == 1)
    assert check(program).drifts == []


def apart_at_once(proof: Checked) -> set[int]:
    """The layers that are said to drift in the first step, and not because others do."""
    return {layer for drift in proof.drifts if drift.cause != FOLLOWS for layer in drift.layers}


@settings(max_examples=examples(150))
@given(shapes())
def test_random_programs_drift_just_where_sums_that_mind_their_order_do(shape: Shape) -> None:
    """Some of them add what was reduced microbatch by microbatch in an order that each rank draws for itself."""
    proof = check(random_program(shape))
    assert apart_at_once(proof) == replicas_apart(proof)


@pytest.mark.parametrize("seed", [126, 134])
def test_a_random_program_that_drifts_is_found(seed: int) -> None:
    layers, at = {126: (2, [1]), 134: (4, [0, 2])}[seed]
    proof = check(random_program(Shape(pp=2, dp_replicate=1, dp_shard=2, layers=layers, microbatches=6, seed=seed)))
    assert sorted(layer for drift in proof.drifts for layer in drift.layers) == at
    assert sorted(replicas_apart(proof)) == at


def test_sums_of_each_rank_in_an_order_of_its_own_drift() -> None:
    (drift,) = checked(drifting.drifting, 3).drifts
    assert str(drift) == (
        "replicas of weights[0-1] on ranks 0-2 may drift: their gradients were summed in different orders; all_reduce "
        "the gradients, or sum them on one rank and broadcast the sum."
    )
    assert drift.layers == (0, 1)
    assert drift.groups == ((0,), (1,), (2,))


def test_ranks_whose_copies_stay_equal_are_told_together() -> None:
    (drift,) = checked(drifting.one_turned).drifts
    assert drift.groups == ((0, 1, 2), (3,))
    assert "on ranks 0-2 against 3 may drift" in str(drift)


@pytest.mark.parametrize(
    "program",
    [
        drifting.all_in_one_order,
        drifting.chained,
        drifting.doubled,
        drifting.all_reduced,
        drifting.in_slices,
        drifting.broadcast,
        parameter_server,
        rooted_programs.replicas,
        rooted_programs.by_root,
        user_programs.zero_1,
        user_programs.zero_2,
        user_programs.split_fsdp,
    ],
)
def test_sums_made_once_or_in_one_order_do_not_drift(program: Strategy) -> None:
    proof = checked(program)
    assert proof.drifts == []
    assert replicas_apart(proof) == set()


def in_columns(program: Strategy, ranks: int = 2, microbatches: int = 2) -> Checked:
    """A program of layers whose gradient is one product, which adds in a fixed order."""
    mesh, sizes = STRATEGIES["column-parallel"].mesh(ranks), built_in("column-parallel").sizes
    return check(trace(program, mesh, sizes, microbatches))


def test_a_sum_that_is_part_of_a_backward_pass_rounds_otherwise_than_one_after_it() -> None:
    proof = in_columns(drifting.fused_on_one_rank)
    (drift,) = proof.drifts
    assert drift.layers == (1,)
    assert "some ranks add a gradient within its backward pass" in str(drift)
    assert replicas_apart(proof) == {1}


async def at_once_or_one_by_one(rank: Rank) -> None:
    """Rank 0 computes all microbatches at once, and the others one after the other."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for microbatches in [rank.microbatches] if rank.index == 0 else [[m] for m in rank.microbatches]:
        gradient = computed(rank, microbatches)
        for l in reversed(rank.layers):
            made, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.accumulate(made)
    for l in rank.layers:
        made = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = made


def test_a_product_over_microbatches_rounds_otherwise_than_one_for_each() -> None:
    (drift,) = in_columns(at_once_or_one_by_one).drifts
    assert drift.layers == (0, 1)


async def last_layer_drifts(rank: Rank) -> None:
    """Every rank computes the whole batch; only the last layer's gradients are summed otherwise on the last rank."""
    drifting.sum_apart_on_last_rank(rank, rank.layers[1:])
    for l in rank.layers:
        made = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = made


def test_what_is_computed_of_a_weight_that_drifts_is_said_to_follow_and_not_audited() -> None:
    proof = in_columns(last_layer_drifts)
    first, later = proof.drifts
    assert (first.layers, later.layers) == ((1,), (0,))
    assert "other weights, which drift, enter their gradients" in str(later)
    assert later.groups == ((0,), (1,))
    assert replicas_of(proof) == []


def test_two_values_add_up_to_the_same_in_either_order() -> None:
    assert checked(drifting.drifting, 2).drifts == []


@settings(max_examples=examples(40))
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_sums_drift_if_any_rank_adds_in_another_order(ranks: int, seed: int) -> None:
    def order(rank: int, world: int) -> list[int]:
        random = Random(f"{seed} {rank}")
        return random.sample(range(world), world) if random.random() < 0.5 else list(range(world))

    orders = {(frozenset(order(rank, ranks)[:2]), *order(rank, ranks)[2:]) for rank in range(ranks)}
    proof = checked(data_parallel(added(order)), ranks, layers=1)
    assert len(proof.drifts) == (len(orders) > 1)
    assert replicas_apart(proof) == ({0} if len(orders) > 1 else set())


def whole_and_halves(total: drifting.Sum) -> Strategy:
    """Rank 0 keeps the layer, and each of the others half of it."""

    async def program(rank: Rank) -> None:
        if rank.index == 0:
            rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        else:
            rank.weights[0], rank.opt_states[0] = rank.load_weights(0, rank.index - 1, 2)
        rank.weights["all"] = await rank.broadcast(rank.weights[0] if rank.index == 0 else None, root=0, expect=None)
        await finish(rank, total)

    return program


async def finish(rank: Rank, total: drifting.Sum) -> None:
    rank.activations[0] = rank.load_batch([rank.index])
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights["all"])
    gradient = rank.loss(rank.activations.pop(1))
    rank.grad_weights["mine"], _ = rank.backward(0, rank.activations.pop(0), gradient, rank.weights.pop("all"))
    whole = await total(rank, rank.grad_weights["mine"])
    rank.weights[0], rank.opt_states[0] = rank.update(0, whole, rank.weights[0], rank.opt_states[0])
    rank.grad_weights.clear()


def test_a_whole_copy_is_compared_with_the_halves_that_others_keep() -> None:
    (drift,) = checked(whole_and_halves(added(turned)), 3, layers=1).drifts
    assert drift.groups == ((0,), (1,), (2,))
    first = added(lambda rank, world: turned(rank % 2, world))  # rank 1 alone adds in another order
    (drift,) = checked(whole_and_halves(first), 3, layers=1).drifts
    assert drift.groups == ((0,), (1,))
    assert checked(whole_and_halves(drifting.reduced), 3, layers=1).drifts == []


def test_a_norm_that_each_rank_adds_up_in_its_own_order_drifts() -> None:
    async def clipped(rank: Rank) -> None:
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        gradient = computed(rank, rank.share())
        for l in reversed(rank.layers):
            made, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.grad_weights[l] = await rank.all_reduce(made)
        for l in rank.layers if rank.index else reversed(rank.layers):
            part = rank.norm(l, rank.grad_weights[l])
            rank.scalars[0] = rank.scalars[0] + part if 0 in rank.scalars else part
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.update(
                l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars[0]
            )
        del rank.scalars[0]

    (drift,) = checked(clipped, 3, layers=3).drifts
    assert drift.layers == (0, 1, 2)
    assert drift.groups == ((0,), (1, 2))
    assert "the norms that clip their gradients were computed apart" in str(drift)


async def all_by_itself(rank: Rank) -> None:
    """Every rank computes the whole batch."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    gradient = computed(rank, rank.microbatches)
    for l in reversed(rank.layers):
        made, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        rank.weights[l], rank.opt_states[l] = rank.update(l, made, rank.weights[l], rank.opt_states[l])


def test_gradients_that_each_rank_computes_for_itself_drift_where_kernels_add_in_no_fixed_order() -> None:
    (drift,) = checked(all_by_itself, 2).drifts
    assert "their gradients were computed apart" in str(drift)
    proof = check(trace(all_by_itself, STRATEGIES["column-parallel"].mesh(2), built_in("column-parallel").sizes, 2))
    assert proof.drifts == []  # a matrix's gradient is one product


def test_look_ups_and_attention_may_add_in_no_fixed_order() -> None:
    blocks = (cut(MoE(layers=1)), cut(GPT(layers=1)), cut(MLP(layers=1), columns=True))
    real = {node.name: node.atomic for model in blocks for layer in model.signatures for node in layer.nodes}
    assert {name for name, atomic in real.items() if atomic} == {"lookup", "attend"}
    toys = (Sizes.puzzle(1), Sizes.half_blocks(1), Sizes.context_blocks(1), Sizes.mixture(2), Sizes.columns(2))
    atomic = {node.name for sizes in toys for layer in sizes.signatures for node in layer.nodes if node.atomic}
    assert atomic == {"matrix", "lookup", "attend"}, "a puzzle's layer may be anything"


def test_copies_made_one_again_after_the_update_leave_their_states_apart() -> None:
    async def averaged(rank: Rank) -> None:
        await drifting.drifting(rank)
        for l in rank.layers:
            rank.weights[l] = await rank.all_reduce(rank.weights[l], reduction="mean")

    (drift,) = checked(averaged, 3).drifts
    assert (drift.kind, drift.layers) == ("opt_states", (0, 1))


async def updated_in_slices(rank: Rank) -> None:
    """Every rank updates a slice, from a sum in an order of its own, and the slices are gathered."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weight(l), rank.load_opt_state(l, rank.index, rank.world)
    gradient = computed(rank, rank.share())
    for l in reversed(rank.layers):
        made, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        rank.grad_weights["mine"] = made
        total = await added(turned)(rank, made)
        new, rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])
        rank.weights[l] = await rank.all_gather(new)
        rank.grad_weights.clear()


async def slices_summed_apart(rank: Rank) -> None:
    """Every rank adds up its slice of each microbatch's gradient in an order of its own; then they are gathered."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.share():
        gradient = computed(rank, [m])
        for l in reversed(rank.layers):
            made, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.grad_weights[l, m - rank.share()[0]] = await rank.reduce_scatter(made)
    for l in rank.layers:
        one, two, three = (rank.grad_weights[l, (i + rank.index) % 3] for i in range(3))
        rank.grad_weights["first"] = one + two
        rank.grad_weights["slice"] = rank.grad_weights["first"] + three
        rank.grad_weights["total", l] = await rank.all_gather(rank.grad_weights["slice"])
        part = rank.norm(l, rank.grad_weights["total", l])
        rank.scalars[0] = rank.scalars[0] + part if l else part
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(("total", l)), rank.weights[l], rank.opt_states[l], rank.scalars[0]
        )
    rank.scalars.clear()
    rank.grad_weights.clear()


def test_slices_made_in_different_ways_and_gathered_are_the_same_on_all_ranks() -> None:
    for proof in (checked(updated_in_slices, 3), check(trace(slices_summed_apart, 3, 2, 9))):
        assert proof.drifts == []
        assert replicas_apart(proof) == set()


def test_who_does_not_ask_does_not_pay() -> None:
    proof = checked(drifting.drifting, 3)
    simulate(proof)
    assert "drifts" not in vars(proof)
    assert proof.drifts is proof.drifts


def test_a_gradient_reduced_by_mean_heals_what_was_summed_apart() -> None:
    async def healed(rank: Rank, mine: Value) -> Value:
        rank.grad_weights["apart"] = await added(turned)(rank, mine)
        return await rank.all_reduce(rank.grad_weights["apart"], reduction="mean")

    assert checked(data_parallel(healed), 3).drifts == []
