"""Tapes that no program writes: halves that do not belong together, and updates of which some clip and some do not."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.language import Kind, Op, OpKind, Program, Rank, Refused, trace
from tests.support.interpreter import judge
from tests.support.mutating import changed, living_on, places, renamed, with_tape
from tests.support.refusing import refusal_of, tells


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
            given = rank.activations[l, m], rank.grad_activations[l + 1, m]
            rank.grad_activations[l, m] = rank.backward_input(l, *given, rank.weights[l])
    for l in rank.layers:
        for m in rank.share():
            new = rank.backward_weight(l, rank.activations.pop((l, m)), rank.grad_activations.pop((l + 1, m)))
            rank.grad_weights[l] = rank.grad_weights[l] + new if l in rank.grad_weights else new
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights[l])
        part = rank.norm(l, rank.grad_weights[l])
        rank.scalars[0] = rank.scalars[0] + part if l else part
    for l in rank.layers:
        made = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars[0])
        rank.weights[l], rank.opt_states[l] = made


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


def test_what_another_microbatchs_first_half_left_is_refused() -> None:
    (at, one), (_, other) = halves()[:2]
    mutant = changed(PROGRAM, 0, at, one._replace(inputs=(*one.inputs[:2], other.inputs[2])))
    tells(refused(mutant), "no forward", op=at, layer=0)


def test_what_the_forward_pass_saved_is_not_what_the_first_half_left() -> None:
    at, op = halves()[0]
    saved = next(first.inputs[3] for _, first in halves(OpKind.BACKWARD_INPUT) if first.outputs[1] == op.inputs[2])
    mutant = changed(PROGRAM, 0, at, op._replace(inputs=(*op.inputs[:2], saved)))
    tells(refused(mutant), "no forward", op=at, layer=0)


def test_a_second_weight_half_has_nothing_left_to_read() -> None:
    at, op = halves()[0]
    tape = living_on(living_on(PROGRAM.tapes[0], op.inputs[0]), op.inputs[1])
    again = [op._replace(outputs=(10**6,)), Op(OpKind.FREE, -1, (10**6,))]
    mutant = with_tape(PROGRAM, 0, [*tape[: at + 1], *again, *tape[at + 1 :]])
    tells(refused(mutant), "no forward", op=at + 1, layer=0)


def test_what_is_kept_for_the_second_half_is_no_value_of_the_program() -> None:
    at, op = halves()[0]
    mutant = changed(PROGRAM, 0, at, Op(OpKind.FREE, -1, op.inputs[2:]), op)
    tells(refused(mutant), "the layer's own", op=at)


def test_a_microbatch_whose_weight_half_is_left_out_is_missing() -> None:
    op = halves()[1][1]
    tape = PROGRAM.tapes[0]
    add = next(o for o in tape if o.kind is OpKind.ADD and op.outputs[0] in o.inputs)
    frees = [Op(OpKind.FREE, -1, (number,)) for number in add.inputs]
    rest = [o for o in tape if o not in (op, add, *frees)]
    mutant = with_tape(PROGRAM, 0, renamed(rest, add.outputs[0], add.inputs[0]))
    tells(refused(mutant), "missing microbatches", layer=0, missing=(1,))


def plain(tape: list[Op], which: int | None = None) -> list[Op]:
    """The tape with updates (or one of them) that are not given the norm."""
    updates = [op for op in tape if op.kind is OpKind.UPDATE]
    without = updates if which is None else [updates[which]]
    return [op._replace(inputs=op.inputs[:3]) if op in without else op for op in tape]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_clips_all_its_updates_or_none(which: int) -> None:
    tells(refused(with_tape(PROGRAM, 1, plain(PROGRAM.tapes[1], which))), "norm for some", rank=1, layer=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_clip_or_none_does(rank: int) -> None:
    tells(refused(with_tape(PROGRAM, rank, plain(PROGRAM.tapes[rank]))), "norm on some ranks", rank=rank)


def test_a_norm_may_be_computed_and_not_used() -> None:
    program = with_tape(with_tape(PROGRAM, 0, plain(PROGRAM.tapes[0])), 1, plain(PROGRAM.tapes[1]))
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_an_update_has_one_norm() -> None:
    at, op = halves(OpKind.UPDATE)[0]
    mutant = changed(PROGRAM, 0, at, op._replace(inputs=(*op.inputs, op.inputs[3])))
    tells(refused(mutant), "wrong kind", rank=0, op=at)  # the place after the norm is a direction's


def test_a_norm_names_its_own_layer() -> None:
    at, op = halves(OpKind.NORM)[0]
    mutant = changed(PROGRAM, 0, at, op._replace(layer=1))
    tells(refused(mutant), "wrong layer", op=at, layer=1)
