"""How often gradients are reduced, and over which axis: counted on the tape."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from shardlab.check import check
from shardlab.program import Kind, Mesh, OpKind, Sizes, trace
from shardlab.strategies.plan import Plan
from shardlab.strategies.planned import planned
from shardlab.strategies.schedules import SCHEDULES
from tests.support.interpreter import judge

SHARD, REPLICATE, BOTH = ("dp_shard",), ("dp_replicate",), ("dp_shard", "dp_replicate")
MESH = Mesh(dp_replicate=2, dp_shard=2)
EACH = 3
"""Microbatches on each data-parallel rank."""

BACKWARD = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
REDUCES = (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER)


def reductions(plan: Plan, model: Sizes | int = 1) -> dict[tuple[str, str], int]:
    """(op, axis) to how often rank 0 reduces the gradient of its last layer, in a step of a right program."""
    program = trace(planned(plan), plan.mesh, model, EACH * plan.data_ranks)
    assert judge(program).right
    specs = check(program).specs[0]
    counts: dict[tuple[str, str], int] = {}
    last = max(op.layer for op in program.tapes[0] if op.kind is OpKind.UPDATE)
    for op in program.tapes[0]:
        if op.kind in REDUCES and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT and op.layer == last:
            key = (op.kind.value, str(op.group))
            counts[key] = counts.get(key, 0) + 1
    return counts


def hsdp(reduce_each: tuple[str, ...] | None, gradients: tuple[str, ...] = SHARD) -> Plan:
    return Plan(MESH, "1f1b", None, (), SHARD, gradients, SHARD, reduce_each)


def test_scattered_and_reduced_at_each_microbatch() -> None:
    assert reductions(hsdp(BOTH)) == {("reduce_scatter", "dp_shard"): EACH, ("all_reduce", "dp_replicate"): EACH}


def test_scattered_at_each_microbatch_and_reduced_over_replicas_once() -> None:
    assert reductions(hsdp(None)) == {("reduce_scatter", "dp_shard"): EACH, ("all_reduce", "dp_replicate"): 1}


def test_neither_until_the_end() -> None:
    assert reductions(hsdp((), ())) == {("reduce_scatter", "dp_shard"): 1, ("all_reduce", "dp_replicate"): 1}


def test_a_state_that_is_cut_over_both_axes_is_scattered_over_both() -> None:
    plan = Plan(MESH, "1f1b", None, (), SHARD, SHARD, BOTH)
    assert reductions(plan) == {("reduce_scatter", "dp_shard"): EACH, ("reduce_scatter", "dp_replicate"): 1}


def test_a_gradient_kept_whole_along_one_axis_is_not_cut_along_the_next() -> None:
    """Its slices would not be those of the optimizer's state, which is cut along that axis first."""
    plan = Plan(MESH, "1f1b", None, (), (), (), BOTH, reduce_each=SHARD)
    assert reductions(plan) == {("all_reduce", "dp_shard"): EACH, ("all_reduce", "dp_replicate"): 1}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduce_at", ["layer", "step"])
def test_what_is_reduced_once_a_step_is_so_beside_the_backward_passes_or_after_them(
    schedule: str, reduce_at: Literal["layer", "step"]
) -> None:
    """Each layer that a rank keeps, once over each axis; beside them if other passes come after its own."""
    plan = Plan(Mesh(pp=2, dp_replicate=2), schedule, shard_optimizer=REPLICATE, reduce_at=reduce_at)
    program = trace(planned(plan), plan.mesh, 8, 4 * 2)
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


def test_what_is_reduced_at_each_microbatch_is_so_at_once_whenever_the_rest_is() -> None:
    late = replace(hsdp(None), reduce_at="step")
    assert reductions(late) == reductions(hsdp(None))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_reduces_over_replicas_once(schedule: str) -> None:
    """However it splits the backward pass, and on however many ranks it runs; no microbatch is left out."""
    mesh = Mesh(pp=2, dp_replicate=2)
    count = 4 * 2
    program = trace(planned(Plan(mesh, schedule)), mesh, 4, count)
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
        program = trace(planned(plan), mesh, Sizes.half_blocks(2), 2)
        specs = check(program).specs[0]
        reduced = [op for op in program.tapes[0] if op.kind in REDUCES]
        layers = [op.layer for op in reduced if specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT]
        assert set(layers) == expected
        assert len(layers) == len(expected), "once a step"
