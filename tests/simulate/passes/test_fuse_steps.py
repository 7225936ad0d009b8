"""The next step's first gathers are made in this step's tail, and what they bring is the next step's weights."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardlab.check import Checked, check, check_forward, forward_only
from shardlab.common.errors import Refused
from shardlab.language import Kind, Op, OpKind, Program, Rank, trace
from shardlab.simulate.passes import Goal, run_named
from shardlab.simulate.passes.fuse_steps import fuse_steps
from shardlab.simulate.passes.reorder import CannotApply
from shardlab.simulate.timeline import PUZZLE_COSTS
from shardlab.strategies.fsdp import fsdp
from tests.simulate.passes.late_programs import checked
from tests.simulate.passes.test_run import checked_plan
from tests.support import interpreter_rank, judged_compute, one_device
from tests.support.interpreter import judge
from tests.support.one_device import one_device as stepped
from tests.support.passing import is_right
from tests.support.random_plans import random_plan
from tests.support.random_programs import random_program, random_shape
from tests.support.thorough import examples
from tests.support.toy_network import network_of


def fused(program: Checked, count: int) -> Program:
    return replace(program.program, tapes=fuse_steps(program, count))


def test_the_first_gather_goes_on_beside_the_updates_of_other_layers() -> None:
    for program, gain in ((checked(fsdp, 4), (0.6, 2)), (checked_plan("zero-3"), (0.3, 1))):
        original, result = run_named(program, "fuse-steps", Goal(PUZZLE_COSTS))
        assert (round(original.end - result.end, 6), result.setting) == gain


async def sharded_beside_an_idle_rank(rank: Rank) -> None:
    """Fully sharded data parallel on all ranks but the last, which does nothing."""
    count = rank.world - 1
    if rank.index == count:
        return
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, count)
    rank.activations[0] = rank.load_batch([rank.index])
    for l in rank.layers:
        rank.weights[l, "full"] = await rank.all_gather(rank.weights[l], among=range(count))
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l, "full"])
    gradient = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights.pop((l, "full")))
        total = await rank.reduce_scatter(grad_weight, among=range(count))
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


def test_a_rank_that_does_nothing_is_left_as_it_is() -> None:
    two_steps = fused(check(trace(sharded_beside_an_idle_rank, 3, 2, 2)), 2)
    assert not two_steps.tapes[2]
    is_right(two_steps)


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.filter_too_much])  # most begin with no gather
@given(st.integers(0, 10**6))
def test_every_program_that_can_be_fused_is_right(seed: int) -> None:
    program = check(random_program(random_shape(seed)) if seed % 2 else random_plan(seed, ranks=4).program)
    try:
        steps = fused(program, Random(seed).randrange(1, 9))
    except CannotApply:
        assume(False)
        return
    is_right(steps)


@pytest.mark.parametrize("count", [1, 3])
def test_a_second_step_goes_on_from_what_the_first_has_left(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gathered weights are those that the first step's updates have made: the judge knows no others."""
    for program in (checked(fsdp, 4), checked_plan("zero-3")):
        steps = fused(program, count)
        assert judge(steps).right
        updated_weights = stepped(network_of(steps), steps.microbatches, program.clips)
        with monkeypatch.context() as patch:
            for module in (one_device, judged_compute, interpreter_rank):
                patch.setattr(module, "initial", updated_weights.__getitem__)
            stepped.cache_clear()
            second_verdict = judge(steps)
        stepped.cache_clear()
        assert second_verdict.right, second_verdict.reason


def test_the_step_begins_with_what_was_gathered_and_ends_with_nothing_in_flight() -> None:
    program = check(fused(checked(fsdp, 4), 2))
    for rank, tape in enumerate(program.program.tapes):
        specs = program.specs[rank]
        gathers = [op for op in tape if op.kind is OpKind.ALL_GATHER]
        new = [op for op in gathers if specs[op.outputs[0]].step]
        assert [op.layer for op in new] == [0, 1]
        assert len(gathers) == 8
        assert {tape[-1].handle, tape[-2].handle} == {op.handle for op in new}
        wholes = [op for op in tape if op.kind is OpKind.LOAD_WEIGHT and specs[op.outputs[0]].holds.complete]
        assert [op.layer for op in wholes] == [0, 1]


def test_the_weights_are_evaluated_and_sampled_from_as_they_are_carried() -> None:
    half = check_forward(forward_only(check(fused(checked(fsdp, 4), 2))))
    gathers = [op.layer for op in half.program.tapes[0] if op.kind is OpKind.ALL_GATHER]
    assert gathers == [2, 3]


def mistaken(program: Checked, change: str) -> Program:
    """A fused program of which one rank's tail does something else."""
    tapes = [list(tape) for tape in program.program.tapes]
    for tape, specs in zip(tapes, program.specs, strict=True):
        at = max(at for at, op in enumerate(tape) if op.kind is OpKind.ALL_GATHER)
        gather = tape[at]
        old = next(op.outputs[0] for op in tape if op.kind is OpKind.LOAD_WEIGHT and op.layer == gather.layer)
        update = next(at for at, op in enumerate(tape) if op.kind is OpKind.UPDATE and op.layer == gather.layer)
        assert specs[gather.outputs[0]].kind is Kind.WEIGHT
        if change == "before its update":
            tape.insert(update, tape.pop(at)._replace(inputs=(old,)))
        elif change == "another layer's":
            other = next(op for op in tape if op.kind is OpKind.UPDATE and op.layer != gather.layer)
            tape.insert(at + 1, tape.pop(at)._replace(inputs=(other.outputs[0],), layer=other.layer))
        else:
            wait = next(at for at, op in enumerate(tape) if op.kind is OpKind.WAIT and op.handle == gather.handle)
            tape.pop(wait)
            if change == "not made":
                tape.pop(at)
            elif change == "the old one":
                tape.pop(at)
                tape.remove(freed(tape, gather.layer, specs))
    return replace(program.program, tapes=tapes)


def freed(tape: list[Op], layer: int, specs: object) -> Op:
    """Where the loaded whole weight of a layer is freed."""
    loads = [op.outputs[0] for op in tape if op.kind is OpKind.LOAD_WEIGHT and op.layer == layer]
    return next(op for op in tape if op.kind is OpKind.FREE and op.inputs[0] in loads)


@pytest.mark.parametrize("change", ["before its update", "another layer's", "not made", "the old one", "not awaited"])
def test_what_would_carry_another_weight_is_refused(change: str) -> None:
    program = check(fused(checked(fsdp, 4), 1))
    wrong = mistaken(program, change)
    with pytest.raises(Refused):
        check(wrong)
    assert not judge(wrong).right
