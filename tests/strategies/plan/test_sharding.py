"""Gathers and frees of a plan's weights: by the order of uses, and counted on the tape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from shardlab.check import check, drifts_of
from shardlab.language import Kind, Mesh, OpKind, Program, Sizes, trace
from shardlab.strategies.plan.plan import Plan, Reshard
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.plan.resolve import resolve
from shardlab.strategies.plan.sharding import WeightUse, weight_uses
from shardlab.strategies.schedules import SCHEDULES, Action, Backward, BackwardInput, BackwardWeight, Forward
from tests.support.interpreter import judge

SHARD = ("dp_shard",)


def used(
    steps: Sequence[Action],
    reshard_after: Reshard,
    model: Sizes | None = None,
) -> list[WeightUse]:
    """The uses of one rank, whose stage 0 has layers 0 and 1, and stage 1 layer 2; or, of another model, all layers."""
    plan = Plan(schedule="interleaved-1f1b", stages_per_rank=2, layers_per_stage=(2, 1), reshard_after=reshard_after)
    if model is not None:
        plan = Plan(reshard_after=reshard_after)
    return weight_uses(resolve(plan, model or Sizes.puzzle(3), 1, 0), steps)


def show_uses(
    steps: Sequence[Action],
    reshard_after: Reshard,
    model: Sizes | None = None,
) -> str:
    """The layers in the order of their uses, each with + where it stays for the next one."""
    return " ".join(f"{layer}{'+' * keep}" for layer, keep, _ in used(steps, reshard_after, model))


TURNS = [Forward(0, 0), Forward(0, 1), Forward(1, 0), Backward(1, 0), Backward(0, 0), Backward(0, 1)]


@pytest.mark.parametrize(
    ("reshard_after", "expected"),
    [
        ("layer", "0 1 0 1 2+ 2 1 0 1 0"),
        ("forward", "0 1 0 1 2+ 2 1+ 0+ 1 0"),
        ("stage", "0+ 1+ 0 1 2+ 2 1+ 0+ 1 0"),
        ("step", "0+ 1+ 0+ 1+ 2+ 2 1+ 0+ 1 0"),
    ],
)
def test_a_weight_stays_until_the_layers_the_stages_or_the_steps_end(reshard_after: Reshard, expected: str) -> None:
    assert show_uses(list(TURNS), reshard_after) == expected


def test_the_last_layer_of_a_forward_pass_stays_for_the_backward_pass_that_follows_at_once() -> None:
    assert show_uses([Forward(0, 0), Backward(0, 0)], "layer") == "0 1+ 1 0"


def test_the_weights_half_of_a_backward_pass_uses_no_weight() -> None:
    steps = [Forward(1, 0), BackwardInput(1, 0), BackwardWeight(1, 0)]
    assert used(steps, "step") == [WeightUse(2, True, 0), WeightUse(2, False, 0)]


def test_a_tied_head_uses_the_embeddings_weight() -> None:
    embedding_norm_head = Sizes.half_blocks(0, tied=True)
    assert show_uses([Forward(0, 0), Backward(0, 0)], "step", embedding_norm_head) == "0+ 1+ 0+ 0+ 1 0"


def fsdp(reshard_after: Reshard, schedule: str = "gpipe") -> Program:
    mesh = Mesh(pp=2, dp_shard=2)
    plan = Plan(mesh, schedule, None, (), SHARD, SHARD, SHARD, reshard_after=reshard_after)
    return trace(program_from_plan(plan), mesh, 4, 6)


def gathers(program: Program) -> set[int]:
    """How often a rank gathers a layer's weight, over all ranks and layers."""
    counts = [Counter(op.layer for op in tape if op.kind is OpKind.ALL_GATHER) for tape in program.tapes]
    return {count for of_layers in counts for count in of_layers.values()}


def test_the_tape_has_the_number_of_gathers_that_the_plan_implies() -> None:
    """Three microbatches, forward and backward; the last layer's forward and backward follow each other only once."""
    assert gathers(fsdp("step")) == {1}
    assert max(gathers(fsdp("layer"))) == 6
    assert gathers(fsdp("stage")) == {1}, "GPipe never leaves the only stage of a rank"
    assert 1 < max(gathers(fsdp("stage", "breadth-first"))) < 6


def test_pipelines_of_pytorch_gather_again_after_each_forward_pass_but_not_after_a_backward_pass() -> None:
    """As `torch.distributed.pipelining` with FSDP2's `reshard_after_forward`: F F B F B F B B gathers a layer for the
    first three passes and for the next two backward passes that follow a forward pass, and F B F B F B F B for the
    first pass and each backward pass. A rank's last layer stays from a forward pass to the backward pass after it."""
    plan = Plan(Mesh(pp=2, dp_shard=2), "1f1b", None, (), SHARD, (), SHARD, reshard_after="forward", recompute="full")
    program = trace(program_from_plan(plan), plan.mesh, 4, 8)
    assert judge(program).right
    assert [Counter(op.layer for op in tape if op.kind is OpKind.ALL_GATHER) for tape in program.tapes[::2]] == [
        {0: 5, 1: 2},
        {2: 5, 3: 1},
    ]


# How often gradients are reduced, and over which axis: counted on the tape.


SHARD_of_reducing, REPLICATE, BOTH = ("dp_shard",), ("dp_replicate",), ("dp_shard", "dp_replicate")
MESH = Mesh(dp_replicate=2, dp_shard=2)
EACH = 3
"""Microbatches on each data-parallel rank."""

BACKWARD = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
REDUCES = (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER)


def reductions(plan: Plan, model: Sizes | int = 1) -> dict[tuple[str, str], int]:
    """(op, axis) to how often rank 0 reduces the gradient of its last layer, in a step of a right program."""
    program = trace(program_from_plan(plan), plan.mesh, model, EACH * plan.data_ranks)
    assert judge(program).right
    specs = check(program).specs[0]
    counts: dict[tuple[str, str], int] = {}
    last = max(op.layer for op in program.tapes[0] if op.kind is OpKind.UPDATE)
    for op in program.tapes[0]:
        if op.kind in REDUCES and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT and op.layer == last:
            key = (op.kind.value, str(op.group))
            counts[key] = counts.get(key, 0) + 1
    return counts


def hsdp(reduce_every_microbatch: tuple[str, ...] | None, gradients: tuple[str, ...] = SHARD_of_reducing) -> Plan:
    return Plan(MESH, "1f1b", None, (), SHARD_of_reducing, gradients, SHARD_of_reducing, reduce_every_microbatch)


def test_scattered_and_reduced_at_each_microbatch() -> None:
    assert reductions(hsdp(BOTH)) == {("reduce_scatter", "dp_shard"): EACH, ("all_reduce", "dp_replicate"): EACH}


def test_scattered_at_each_microbatch_and_reduced_over_replicas_once() -> None:
    assert reductions(hsdp(None)) == {("reduce_scatter", "dp_shard"): EACH, ("all_reduce", "dp_replicate"): 1}


def test_neither_until_the_end() -> None:
    assert reductions(hsdp((), ())) == {("reduce_scatter", "dp_shard"): 1, ("all_reduce", "dp_replicate"): 1}


def test_a_state_that_is_cut_over_both_axes_is_scattered_over_both() -> None:
    plan = Plan(MESH, "1f1b", None, (), SHARD_of_reducing, SHARD_of_reducing, BOTH)
    assert reductions(plan) == {("reduce_scatter", "dp_shard"): EACH, ("reduce_scatter", "dp_replicate"): 1}


def test_a_gradient_kept_whole_along_one_axis_is_not_cut_along_the_next() -> None:
    """Its slices would not be those of the optimizer's state, which is cut along that axis first."""
    plan = Plan(MESH, "1f1b", None, (), (), (), BOTH, reduce_every_microbatch=SHARD_of_reducing)
    assert reductions(plan) == {("all_reduce", "dp_shard"): EACH, ("all_reduce", "dp_replicate"): 1}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduce_at", ["layer", "step"])
def test_gradients_reduced_once_a_step_are_reduced_during_or_after_the_backward_passes(
    schedule: str, reduce_at: Literal["layer", "step"]
) -> None:
    """Each layer that a rank keeps, once over each axis; beside them if other passes come after its own."""
    plan = Plan(Mesh(pp=2, dp_replicate=2), schedule, shard_optimizer=REPLICATE, reduce_at=reduce_at)
    program = trace(program_from_plan(plan), plan.mesh, 8, 4 * 2)
    checked = check(program)
    assert judge(program).right
    early = 0
    for tape, specs in zip(program.tapes, checked.specs, strict=True):
        reduced = [
            (at, op.layer)
            for at, op in enumerate(tape)
            if op.kind in REDUCES and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT
        ]
        assert sorted(layer for _, layer in reduced) == sorted(op.layer for op in tape if op.kind is OpKind.UPDATE)
        last = max(at for at, op in enumerate(tape) if op.kind in BACKWARD)
        early += sum(at < last for at, _ in reduced)
    assert (early > 0) == (reduce_at == "layer")


def test_gradients_reduced_at_each_microbatch_are_reduced_immediately() -> None:
    late = replace(hsdp(None), reduce_at="step")
    assert reductions(late) == reductions(hsdp(None))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_reduces_over_replicas_once(schedule: str) -> None:
    """However it splits the backward pass, and on however many ranks it runs; no microbatch is left out."""
    mesh = Mesh(pp=2, dp_replicate=2)
    count = 4 * 2
    program = trace(program_from_plan(Plan(mesh, schedule)), mesh, 4, count)
    checked = check(program)
    assert judge(program).right
    for tape, specs in zip(program.tapes, checked.specs, strict=True):
        reduced = [op for op in tape if op.kind in REDUCES and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT]
        updates = [op for op in tape if op.kind is OpKind.UPDATE]
        assert sorted(op.layer for op in reduced) == sorted(op.layer for op in updates)
        assert {specs[op.inputs[0]].cells for op in updates} == {(1 << count) - 1}


def test_only_norms_are_reduced_over_tp_and_only_when_each_rank_has_seen_other_tokens() -> None:
    mesh = Mesh(tp=2)
    for sequence, expected in ((False, set[int]()), (True, {1, 3, 5, 7, 9})):
        plan = Plan(mesh, sequence_parallel=sequence)
        program = trace(program_from_plan(plan), mesh, Sizes.half_blocks(2), 2)
        specs = check(program).specs[0]
        reduced = [op for op in program.tapes[0] if op.kind in REDUCES]
        layers = [op.layer for op in reduced if specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT]
        assert set(layers) == expected
        assert len(layers) == len(expected), "once a step"


def most_in_flight(plan: Plan, model: Sizes | int) -> dict[str, int]:
    """By axis, the most elements of whole gradients that rank 0 has in reductions that were issued and not awaited."""
    program = trace(program_from_plan(plan), plan.mesh, model, EACH * plan.data_ranks)
    assert judge(program).right
    checked = check(program)
    assert all(refusal is None for refusal in checked.models.values()), "every channel model"
    flying: dict[int, tuple[str, int]] = {}
    largest: dict[str, int] = {}
    for op in program.tapes[0]:
        if op.kind in REDUCES and checked.specs[0][op.inputs[0]].kind is Kind.GRAD_WEIGHT:
            assert op.group is not None
            axis = str(op.group.axis)
            flying[op.handle] = axis, program.sizes.weights[op.layer]
            largest[axis] = max(
                largest.get(axis, 0), sum(elements for other, elements in flying.values() if other == axis)
            )
        elif op.kind is OpKind.WAIT:
            flying.pop(op.handle, None)
    return largest


SEQUENCE_PARALLEL = Plan(Mesh(dp_shard=2, tp=2), sequence_parallel=True)
HALVES = Sizes.half_blocks(3)
MATRIX, NORM = HALVES.weights[0], HALVES.weights[1]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Mesh(dp_shard=2, tp=2)),
        SEQUENCE_PARALLEL,
        replace(SEQUENCE_PARALLEL, shard_optimizer=SHARD_of_reducing, shard_gradients=SHARD_of_reducing),
        replace(SEQUENCE_PARALLEL, shard_optimizer=SHARD_of_reducing, reduce_at="step"),
    ],
)
def test_reductions_in_flight_are_bounded_by_the_largest_block_however_finely_it_is_cut(plan: Plan) -> None:
    """With the embedding in the first one and the head in the last: three matrices, and the norms before them."""
    assert 3 * MATRIX <= most_in_flight(plan, HALVES)["dp_shard"] <= 3 * MATRIX + 3 * NORM


def test_of_whole_blocks_one_is_reduced_at_a_time() -> None:
    assert most_in_flight(Plan(Mesh(dp_shard=2)), 6) == {"dp_shard": Sizes.puzzle(6).weights[0]}


def test_a_layer_larger_than_a_block_is_not_waited_for_by_small_ones() -> None:
    """Small blocks beside one large one: as many as it has room for."""
    sizes = Sizes.puzzle(6)
    large = replace(sizes, weights=(4 * sizes.weights[0], *sizes.weights[1:]))
    assert most_in_flight(Plan(Mesh(dp_shard=2)), large) == {"dp_shard": 4 * sizes.weights[0]}


@pytest.mark.parametrize("plan", [hsdp(None), hsdp(BOTH), hsdp((), ()), Plan(MESH)])
def test_over_a_second_axis_reductions_are_in_flight_beside_those_over_the_first(plan: Plan) -> None:
    """Nothing waits at once for what it has started: a backward pass lies between, unless it was the last."""
    program = trace(program_from_plan(plan), plan.mesh, 6, plan.data_ranks)
    specs = check(program).specs[0]
    issued: dict[int, int] = {}
    passes, waited_at_once = 0, 0
    for op in program.tapes[0]:
        passes += op.kind in BACKWARD
        if op.kind in REDUCES and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT:
            issued[op.handle] = passes
        elif op.kind is OpKind.WAIT and op.handle in issued:
            waited_at_once += issued[op.handle] == passes < 6
    assert len(issued) == 2 * 6
    assert waited_at_once == 0


def test_a_pipelines_rank_is_bounded_by_its_own_largest_block() -> None:
    sizes = Sizes.puzzle(8)
    sizes = replace(sizes, weights=(9 * sizes.weights[0], *sizes.weights[1:]))
    plan = Plan(Mesh(pp=2, dp_shard=2), "gpipe", shard_optimizer=SHARD_of_reducing, shard_gradients=SHARD_of_reducing)
    program = trace(program_from_plan(plan), plan.mesh, sizes, 4)
    specs = check(program).specs
    last = program.tapes[-1]
    at_once = 0
    for op in last:
        if op.kind in REDUCES and specs[-1][op.inputs[0]].kind is Kind.GRAD_WEIGHT:
            at_once += 1
        elif op.kind is OpKind.WAIT:
            at_once = 0
        assert at_once <= 1


@pytest.mark.parametrize(
    ("plan", "model", "axes"),
    [
        (Plan(MESH, shard_optimizer=SHARD_of_reducing), Sizes.puzzle(3), ["dp_shard"]),
        (Plan(MESH, shard_optimizer=BOTH), Sizes.puzzle(3), ["dp_replicate", "dp_shard"]),
        (Plan(Mesh(dp_shard=2, tp=2), shard_optimizer=SHARD_of_reducing), Sizes.half_blocks(1), ["dp_shard", "tp"]),
        (Plan(Mesh(dp_shard=2, ep=2), shard_optimizer=SHARD_of_reducing), Sizes.mixture(1), ["dp_shard"]),
        (Plan(MESH), Sizes.puzzle(3), []),
    ],
    ids=str,
)
def test_directions_of_whole_matrices_are_gathered_over_the_axes_that_cut_these(
    plan: Plan, model: Sizes, axes: list[str]
) -> None:
    program = trace(program_from_plan(plan), plan.mesh, replace(model, whole_matrices=True), 2 * plan.data_ranks)
    assert judge(program).right
    proof = check(program)
    assert drifts_of(proof) == []
    gathers = [
        (op.layer, str(op.group))
        for op in program.tapes[0]
        if op.kind is OpKind.ALL_GATHER and proof.specs[0][op.inputs[0]].kind is Kind.DIRECTION
    ]
    assert sorted(gathers) == sorted((layer, axis) for layer in program.sizes.directed for axis in axes)


def test_the_next_layer_s_direction_is_gathered_while_one_is_updated() -> None:
    plan = Plan(Mesh(dp_shard=2), shard_optimizer=SHARD_of_reducing)
    tape = trace(program_from_plan(plan), plan.mesh, replace(Sizes.puzzle(4), whole_matrices=True), 2).tapes[0]
    order = [(op.kind, op.layer) for op in tape if op.kind in (OpKind.DIRECTION, OpKind.UPDATE)]
    direction, step = OpKind.DIRECTION, OpKind.UPDATE
    steps = [(direction, 0), (direction, 1), (step, 0), (direction, 2), (step, 1), (direction, 3), (step, 2), (step, 3)]
    assert order == steps
