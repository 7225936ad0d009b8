"""Replicas that rounding drives apart are reported, and no others."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from examples.parameter_server import parameter_server
from shardlab.check import Checked, check, drifts_of
from shardlab.check.replicas import FOLLOWING_CAUSE, replicas_of
from shardlab.language import Kind, Mesh, Op, OpKind, Program, Rank, Refused, Sizes, Strategy, Value, trace
from shardlab.models import GPT, MLP, MoE, cut
from shardlab.simulate.passes.run import apply_passes
from shardlab.strategies import STRATEGIES
from shardlab.strategies.column_parallel import column_parallel
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from tests.check import drifting
from tests.check.drifting import added, computed, data_parallel, turned
from tests.check.programs import built_in, fits, layers_for
from tests.check.test_mutations import PLANS
from tests.support.interpreter import judge
from tests.support.mutating import changed, living_on, places, renamed, with_tape
from tests.support.random_layers import random_attention, random_experts
from tests.support.random_plans import Planned, plans
from tests.support.random_programs import Shape, random_program, shapes
from tests.support.refusing import refusal_of, refuses, require_refusal
from tests.support.rounding import replicas_apart
from tests.support.thorough import examples
from tests.train import rooted_programs, user_programs


def checked(program: Strategy, ranks: int = 4, layers: int = 2) -> Checked:
    return check(trace(program, ranks, layers, ranks))


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_built_in_strategy_drifts(name: str) -> None:
    assert drifts_of(check(built_in(name))) == []
    if fits(name, 8):
        assert drifts_of(check(built_in(name, 8, layers_for(name, 8), 8))) == []


@pytest.mark.parametrize("name", PLANS)
def test_no_plan_drifts(name: str) -> None:
    assert drifts_of(check(PLANS[name].program)) == []


def test_no_plan_drifts_whose_reductions_run_in_buckets() -> None:
    """Ranks of `tp` have other slices of layers in their buckets, and replicas of norms beside them."""
    plan = Plan(Mesh(dp_replicate=4, tp=2))
    proof = apply_passes(check(trace(program_from_plan(plan), plan.mesh, Sizes.half_blocks(1), 4)), "bucket")
    assert any(op.batch >= 0 for op in proof.program.tapes[0])
    assert drifts_of(proof) == []


@settings(max_examples=examples(15))
@given(plans())
def test_no_plan_at_random_drifts(shape: Planned) -> None:
    assert drifts_of(check(shape.program)) == []


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6), st.sampled_from([random_attention, random_experts]))
def test_attention_and_experts_dealt_at_random_do_not_drift(seed: int, random: Callable[[int], Program]) -> None:
    """Where no ranks hold replicas: each rank adds its microbatches in an order of its own."""
    program = random(seed)
    assume(random is random_attention or program.mesh.tp == program.mesh.cp == 1)
    assert drifts_of(check(program)) == []


def apart_at_once(proof: Checked) -> set[int]:
    """The layers that are said to drift in the first step, and not because others do."""
    return {layer for drift in drifts_of(proof) if drift.cause != FOLLOWING_CAUSE for layer in drift.layers}


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
    assert sorted(layer for drift in drifts_of(proof) for layer in drift.layers) == at
    assert sorted(replicas_apart(proof)) == at


def test_sums_of_each_rank_in_an_order_of_its_own_drift() -> None:
    (drift,) = drifts_of(checked(drifting.drifting, 3))
    assert str(drift) == (
        "replicas of weights[0-1] on ranks 0-2 may drift: their gradients were summed in different orders; all_reduce "
        "the gradients, or sum them on one rank and broadcast the sum."
    )
    assert drift.layers == (0, 1)
    assert drift.groups == ((0,), (1,), (2,))


def test_ranks_whose_copies_stay_equal_are_one_group() -> None:
    (drift,) = drifts_of(checked(drifting.one_turned))
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
    assert drifts_of(proof) == []
    assert replicas_apart(proof) == set()


def in_columns(program: Strategy, ranks: int = 2, microbatches: int = 2) -> Checked:
    """A program of layers whose gradient is one product, which adds in a fixed order."""
    mesh, sizes = STRATEGIES["column-parallel"].mesh(ranks), built_in("column-parallel").sizes
    return check(trace(program, mesh, sizes, microbatches))


def test_a_sum_that_is_part_of_a_backward_pass_rounds_otherwise_than_one_after_it() -> None:
    proof = in_columns(drifting.fused_on_one_rank)
    (drift,) = drifts_of(proof)
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
            grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.accumulate(grad_weight)
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = update


def test_a_product_over_microbatches_rounds_otherwise_than_one_for_each() -> None:
    (drift,) = drifts_of(in_columns(at_once_or_one_by_one))
    assert drift.layers == (0, 1)


async def last_layer_drifts(rank: Rank) -> None:
    """Every rank computes the whole batch; only the last layer's gradients are summed otherwise on the last rank."""
    drifting.sum_apart_on_last_rank(rank, rank.layers[1:])
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = update


def test_a_drift_that_follows_from_another_is_named_so_and_not_audited() -> None:
    proof = in_columns(last_layer_drifts)
    first, later = drifts_of(proof)
    assert (first.layers, later.layers) == ((1,), (0,))
    assert "their gradients depend on other weights that drift" in str(later)
    assert later.groups == ((0,), (1,))
    assert replicas_of(proof) == []


def test_two_values_add_up_to_the_same_in_either_order() -> None:
    assert drifts_of(checked(drifting.drifting, 2)) == []


@settings(max_examples=examples(40))
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_sums_drift_if_any_rank_adds_in_another_order(ranks: int, seed: int) -> None:
    def order(rank: int, world: int) -> list[int]:
        random = Random(f"{seed} {rank}")
        return random.sample(range(world), world) if random.random() < 0.5 else list(range(world))

    orders = {(frozenset(order(rank, ranks)[:2]), *order(rank, ranks)[2:]) for rank in range(ranks)}
    proof = checked(data_parallel(added(order)), ranks, layers=1)
    assert len(drifts_of(proof)) == (len(orders) > 1)
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
    (drift,) = drifts_of(checked(whole_and_halves(added(turned)), 3, layers=1))
    assert drift.groups == ((0,), (1,), (2,))
    first = added(lambda rank, world: turned(rank % 2, world))  # rank 1 alone adds in another order
    (drift,) = drifts_of(checked(whole_and_halves(first), 3, layers=1))
    assert drift.groups == ((0,), (1,))
    assert drifts_of(checked(whole_and_halves(drifting.reduced), 3, layers=1)) == []


def test_a_norm_that_each_rank_adds_up_in_its_own_order_drifts() -> None:
    async def clipped(rank: Rank) -> None:
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        gradient = computed(rank, rank.share())
        for l in reversed(rank.layers):
            grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.grad_weights[l] = await rank.all_reduce(grad_weight)
        for l in rank.layers if rank.index else reversed(rank.layers):
            part = rank.norm(l, rank.grad_weights[l])
            rank.scalars[0] = rank.scalars[0] + part if 0 in rank.scalars else part
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.update(
                l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars[0]
            )
        del rank.scalars[0]

    (drift,) = drifts_of(checked(clipped, 3, layers=3))
    assert drift.layers == (0, 1, 2)
    assert drift.groups == ((0,), (1, 2))
    assert "the norms that clip their gradients were computed apart" in str(drift)


async def all_by_itself(rank: Rank) -> None:
    """Every rank computes the whole batch."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    gradient = computed(rank, rank.microbatches)
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


def test_gradients_that_each_rank_computes_for_itself_drift_where_kernels_add_in_no_fixed_order() -> None:
    (drift,) = drifts_of(checked(all_by_itself, 2))
    assert "their gradients were computed apart" in str(drift)
    proof = check(trace(all_by_itself, STRATEGIES["column-parallel"].mesh(2), built_in("column-parallel").sizes, 2))
    assert drifts_of(proof) == []  # a matrix's gradient is one product


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

    (drift,) = drifts_of(checked(averaged, 3))
    assert (drift.kind, drift.layers) == ("opt_states", (0, 1))


async def updated_in_slices(rank: Rank) -> None:
    """Every rank updates a slice, from a sum in an order of its own, and the slices are gathered."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weight(l), rank.load_opt_state(l, rank.index, rank.world)
    gradient = computed(rank, rank.share())
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        rank.grad_weights["mine"] = grad_weight
        total = await added(turned)(rank, grad_weight)
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
            grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.grad_weights[l, m - rank.share()[0]] = await rank.reduce_scatter(grad_weight)
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
        assert drifts_of(proof) == []
        assert replicas_apart(proof) == set()


def test_a_gradient_reduced_by_mean_heals_what_was_summed_apart() -> None:
    async def healed(rank: Rank, mine: Value) -> Value:
        rank.grad_weights["apart"] = await added(turned)(rank, mine)
        return await rank.all_reduce(rank.grad_weights["apart"], reduction="mean")

    assert drifts_of(checked(data_parallel(healed), 3)) == []


# Mistakes on the tapes of layers cut by columns, and by heads and sequences: each is refused by the check alone.


TWO = Mesh(tp=2)
HEADS = Plan(Mesh(cp=2, tp=2), sequence_parallel=True)
PROGRAMS: dict[str, Callable[[], Program]] = {
    "columns": lambda: traced(column_parallel, TWO, Sizes.columns(3)),
    "heads": lambda: traced(program_from_plan(HEADS), HEADS.mesh, Sizes.context_blocks(1)),
    "recomputed": lambda: traced(program_from_plan(Plan(TWO, recompute="full")), TWO, Sizes.half_blocks(2)),
}
Change = Callable[[Op], Op]


def traced(strategy: Strategy, mesh: Mesh, sizes: Sizes) -> Program:
    return trace(strategy, mesh, sizes, 2)


def everywhere(program: Program, change: Change) -> None:
    """Make one mistake on every rank."""
    for tape in program.tapes:
        tape[:] = [change(op) for op in tape]


def another_collective(kind: OpKind, wrong: OpKind, layer: int) -> Change:
    return lambda op: op._replace(kind=wrong) if op.kind is kind and op.layer == layer else op


def replace_by_input(program: Program, kind: OpKind, layer: int) -> None:
    """Replace the result of a collective by its input."""
    for tape in program.tapes:
        at, op = next((at, op) for at, op in enumerate(tape) if op.kind is kind and op.layer == layer)
        (source,), (result,) = op.inputs, op.outputs
        rest = [
            other
            for i, other in enumerate(tape)
            if i != at and not (other.kind is OpKind.WAIT and other.handle == op.handle)
        ]
        rest = [other for other in rest if other.kind is not OpKind.FREE or other.inputs != (source,)]
        swap = {result: source}
        tape[:] = [other._replace(inputs=tuple(swap.get(n, n) for n in other.inputs)) for other in rest]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_right_program_passes(name: str) -> None:
    check(PROGRAMS[name]())


@pytest.mark.parametrize(
    ("kind", "wrong", "layer"),
    [
        (OpKind.ALL_GATHER, OpKind.ALL_REDUCE, 1),
        (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, 2),
        (OpKind.ALL_GATHER, OpKind.ALL_REDUCE, 3),
        (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, 1),
        (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER, 2),
    ],
)
def test_columns_are_gathered_and_terms_are_summed(kind: OpKind, wrong: OpKind, layer: int) -> None:
    program = PROGRAMS["columns"]()
    everywhere(program, another_collective(kind, wrong, layer))
    with pytest.raises(Refused):
        check(program)


@pytest.mark.parametrize(("kind", "layer"), [(OpKind.ALL_GATHER, 1), (OpKind.ALL_REDUCE, 2), (OpKind.ALL_REDUCE, 1)])
def test_slices_that_are_not_combined_are_refused(kind: OpKind, layer: int) -> None:
    program = PROGRAMS["columns"]()
    replace_by_input(program, kind, layer)
    with pytest.raises(Refused):
        check(program)


def test_terms_of_a_projections_gradient_are_reduced() -> None:
    program = PROGRAMS["heads"]()
    project = next(l for l, layer in enumerate(program.sizes.signatures) if layer.projects)
    everywhere(program, another_collective(OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER, project))
    with pytest.raises(Refused):
        check(program)


def test_heads_of_another_rank_are_refused() -> None:
    """Rank 0's projection is of the other rank's heads."""
    program = PROGRAMS["heads"]()
    project = next(l for l, layer in enumerate(program.sizes.signatures) if layer.projects)
    tape = program.tapes[0]
    at = next(i for i, op in enumerate(tape) if op.kind is OpKind.LOAD_WEIGHT and op.layer == project)
    other = next(op.holds for op in program.tapes[1] if op.kind is OpKind.LOAD_WEIGHT and op.layer == project)
    tape[at] = tape[at]._replace(holds=other)
    with refuses("other pieces", layer=2):
        check(program)


def test_a_block_that_was_not_computed_again_has_no_backward_pass() -> None:
    program = PROGRAMS["recomputed"]()
    tape = program.tapes[0]
    loss = next(at for at, op in enumerate(tape) if op.kind is OpKind.LOSS)
    at = next(i for i, op in enumerate(tape) if i > loss and op.kind is OpKind.FORWARD)
    del tape[at]
    with pytest.raises(Refused):
        check(program)


# Tapes that no program writes: halves that do not belong together, and updates of which some clip and some do not.


async def split(rank: Rank) -> None:
    """Data parallel, a microbatch at a time; all weights' halves come at the end, and all updates clip."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.share():
        rank.activations[0, m] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], rank.weights[l])
        last = len(rank.layers)
        rank.grad_activations[last, m] = rank.loss(rank.activations.pop((last, m)))
        for l in reversed(rank.layers):
            inputs = rank.activations[l, m], rank.grad_activations[l + 1, m]
            rank.grad_activations[l, m] = rank.backward_input(l, *inputs, rank.weights[l])
    for l in rank.layers:
        for m in rank.share():
            new = rank.backward_weight(l, rank.activations.pop((l, m)), rank.grad_activations.pop((l + 1, m)))
            rank.grad_weights[l] = rank.grad_weights[l] + new if l in rank.grad_weights else new
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights[l])
        part = rank.norm(l, rank.grad_weights[l])
        rank.scalars[0] = rank.scalars[0] + part if l else part
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars[0])
        rank.weights[l], rank.opt_states[l] = update


PROGRAM = trace(split, 2, 2, 4)


def refused(program: Program) -> Refused:
    assert not judge(program).right
    return refusal_of(lambda: check(program))


def halves(kind: OpKind = OpKind.BACKWARD_WEIGHT, rank: int = 0) -> list[tuple[int, Op]]:
    return [(at, op) for r, at, op in places(PROGRAM, kind) if r == rank]


def test_the_program_itself_passes() -> None:
    assert check(PROGRAM).backends() == ["gloo", "nccl"]
    assert judge(PROGRAM).right


def test_the_check_derives_what_is_kept_between_the_halves() -> None:
    specs = check(PROGRAM).specs[0]
    for _, op in halves():
        half = specs[op.inputs[2]]
        assert (half.kind, half.layer, half.holds) == (Kind.SAVED_FOR_WEIGHT, op.layer, specs[op.inputs[0]].holds)


def test_the_first_half_of_another_microbatch_is_refused() -> None:
    (at, one), (_, other) = halves()[:2]
    mutant = changed(PROGRAM, 0, at, one._replace(inputs=(*one.inputs[:2], other.inputs[2])))
    require_refusal(refused(mutant), "no forward", op=at, layer=0)


def test_saved_values_are_no_substitute_for_those_of_the_first_half() -> None:
    at, op = halves()[0]
    saved_value = next(
        first.inputs[3] for _, first in halves(OpKind.BACKWARD_INPUT) if first.outputs[1] == op.inputs[2]
    )
    mutant = changed(PROGRAM, 0, at, op._replace(inputs=(*op.inputs[:2], saved_value)))
    require_refusal(refused(mutant), "no forward", op=at, layer=0)


def test_a_second_weight_half_has_nothing_left_to_read() -> None:
    at, op = halves()[0]
    tape = living_on(living_on(PROGRAM.tapes[0], op.inputs[0]), op.inputs[1])
    second = [op._replace(outputs=(10**6,)), Op(OpKind.FREE, -1, (10**6,))]
    mutant = with_tape(PROGRAM, 0, [*tape[: at + 1], *second, *tape[at + 1 :]])
    require_refusal(refused(mutant), "no forward", op=at + 1, layer=0)


def test_values_kept_for_the_second_half_are_hidden_from_the_program() -> None:
    at, op = halves()[0]
    mutant = changed(PROGRAM, 0, at, Op(OpKind.FREE, -1, op.inputs[2:]), op)
    require_refusal(refused(mutant), "the layer's own", op=at)


def test_a_microbatch_whose_weight_half_is_left_out_is_missing() -> None:
    op = halves()[1][1]
    tape = PROGRAM.tapes[0]
    add = next(o for o in tape if o.kind is OpKind.ADD and op.outputs[0] in o.inputs)
    frees = [Op(OpKind.FREE, -1, (number,)) for number in add.inputs]
    rest = [o for o in tape if o not in (op, add, *frees)]
    mutant = with_tape(PROGRAM, 0, renamed(rest, add.outputs[0], add.inputs[0]))
    require_refusal(refused(mutant), "missing microbatches", layer=0, missing=(1,))


def plain(tape: list[Op], index: int | None = None) -> list[Op]:
    """The tape with updates (or one of them) that are not given the norm."""
    updates = [op for op in tape if op.kind is OpKind.UPDATE]
    stripped = updates if index is None else [updates[index]]
    return [op._replace(inputs=op.inputs[:3]) if op in stripped else op for op in tape]


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_clips_all_its_updates_or_none(index: int) -> None:
    require_refusal(refused(with_tape(PROGRAM, 1, plain(PROGRAM.tapes[1], index))), "norm for some", rank=1, layer=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_clip_or_none_does(rank: int) -> None:
    require_refusal(refused(with_tape(PROGRAM, rank, plain(PROGRAM.tapes[rank]))), "norm on some ranks", rank=rank)


def test_a_norm_may_be_computed_and_not_used() -> None:
    program = with_tape(with_tape(PROGRAM, 0, plain(PROGRAM.tapes[0])), 1, plain(PROGRAM.tapes[1]))
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_an_update_has_one_norm() -> None:
    at, op = halves(OpKind.UPDATE)[0]
    mutant = changed(PROGRAM, 0, at, op._replace(inputs=(*op.inputs, op.inputs[3])))
    require_refusal(refused(mutant), "wrong kind", rank=0, op=at)  # the place after the norm is a direction's


def test_a_norm_names_its_own_layer() -> None:
    at, op = halves(OpKind.NORM)[0]
    mutant = changed(PROGRAM, 0, at, op._replace(layer=1))
    require_refusal(refused(mutant), "wrong layer", op=at, layer=1)
