"""Slices of values and their concatenation: what is right passes and is right; what shares memory is known to."""

from __future__ import annotations

import pytest

from shardlab.check import check
from shardlab.common.errors import Rule
from shardlab.language import Op, OpKind, Program, Rank, Sizes, Strategy, trace
from tests.check import slicing_programs as right
from tests.support.interpreter import Outcome, judge
from tests.support.refusing import refusal, refuses, require_refusal


@pytest.mark.parametrize("program_of", right.PROGRAMS)
def test_slices_are_read_and_written_as_parts_of_their_whole(program_of: Strategy) -> None:
    program = trace(program_of, 2, 3, 4)
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_activations_are_gathered_and_scattered_by_hand() -> None:
    for strategy, mesh, sizes in (
        (right.sequence_parallel, right.sequence_parallel_mesh(2), Sizes.half_blocks(1)),
        (right.context_parallel, right.context_parallel_mesh(2), Sizes.context_blocks(1)),
    ):
        program = trace(strategy, mesh, sizes, 1)
        kinds = {op.kind for op in program.tapes[0]}
        assert {OpKind.SLICE, OpKind.CONCATENATE} <= kinds
        assert check(program).backends() == ["gloo", "nccl"]
        assert judge(program).right


def traced(when: str) -> Program:
    """A rank updates the halves of its weight apart, and reads one of them, or all, at some time."""

    async def strategy(rank: Rank) -> None:
        w, o = rank.weights, rank.opt_states
        w[0], o[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([0])
        grad = rank.loss(rank.forward(0, rank.activations[0], w[0]))
        rank.grad_weights[0], _ = rank.backward(0, rank.activations.pop(0), grad, w[0])
        for i in range(2):
            w["old", i], o["old", i] = rank.slice(w[0], i, 2), rank.slice(o[0], i, 2)
        if when == "sent whole":
            rank.send(w[0], to=1 - rank.index)
        if when == "the other half sent":
            rank.send(w["old", 1], to=1 - rank.index)
        if when == "a part sent":
            rank.send(rank.slice(w["old", 0], 1, 3), to=1 - rank.index)
        w["new", 0], o["new", 0] = rank.update(0, rank.grad_weights[0], w["old", 0], o["old", 0])
        if when.endswith("sent") or when == "sent whole":
            await rank.recv(source=1 - rank.index)
        if when == "the whole read":
            await rank.all_gather(rank.slice(w[0], 0, 1), axis="pp")
        if when == "the same half read":
            await rank.all_gather(rank.slice(w[0], 0, 2), axis="pp")
        if when == "the other half read":
            await rank.all_gather(rank.slice(w[0], 1, 2), axis="pp")
        w["new", 1], o["new", 1] = rank.update(0, rank.grad_weights[0], w["old", 1], o["old", 1])
        w[0], o[0] = (rank.concatenate(store.pop(("new", i)) for i in range(2)) for store in (w, o))

    ranks = 2 if "sent" in when else 1
    return trace(strategy, ranks, 1, 1)


@pytest.mark.parametrize("when", ["never", "the other half read", "the other half sent"])
def test_unchanged_slices_may_be_read_after_an_update(when: str) -> None:
    program = traced(when)
    assert refusal(program) is None
    assert judge(program).right


@pytest.mark.parametrize("when", ["sent whole", "a part sent"])
def test_a_slice_of_a_value_in_flight_is_not_overwritten(when: str) -> None:
    program = traced(when)
    with refuses("in flight", layer=0):
        check(program)
    assert judge(program).outcome is Outcome.BROKEN


@pytest.mark.parametrize("when", ["the whole read", "the same half read"])
def test_overwritten_values_are_not_read_through_a_slice(when: str) -> None:
    with refuses("written over", layer=0):
        check(traced(when))


def test_a_tape_says_which_slice_is_meant() -> None:
    program = trace(right.updates_in_chunks, 1, 1, 1)
    at, op = next((at, op) for at, op in enumerate(program.tapes[0]) if op.kind is OpKind.SLICE)
    other = op.outputs[0]
    cases: list[tuple[Op, Rule]] = [
        (op._replace(holds=None), "unknown slice"),
        (op._replace(layer=1), "wrong layer"),
        (Op(OpKind.CONCATENATE, 0, (), (other,)), "malformed tape"),
    ]
    for wrong, rule in cases:
        program.tapes[0][at] = wrong
        require_refusal(refusal(program), rule, rank=0, op=at)
