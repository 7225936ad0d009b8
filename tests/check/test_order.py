"""The members of a group issue its collectives in one order; on NCCL, all groups that share ranks do."""

from __future__ import annotations

import re

import pytest

from shardlab.check import check
from shardlab.language import Mesh, Op, OpKind, Program, Rank, Refused, Strategy, trace
from tests.check.programs import built_in
from tests.support.interpreter import judge
from tests.support.mutations import places, with_tape
from tests.support.refusing import refusal_of, refuses, tells


def two_groups(shard_first: set[int], again: str = "dp_shard") -> Strategy:
    """One layer on all ranks; those in `shard_first` issue a gather along an axis first, others the reduction."""

    async def program(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0, rank.coordinate(again), 2)
        full = await rank.all_gather(rank.weights[0], axis=again)
        rank.activations[0] = rank.load_batch([rank.index])
        rank.activations[1] = rank.forward(0, rank.activations[0], full)
        gradient = rank.loss(rank.activations[1])
        full = await rank.all_gather(rank.weights[0], axis=again)
        rank.grad_weights[0], _ = rank.backward(0, rank.activations[0], gradient, full)
        if rank.index in shard_first:
            extra = rank.all_gather(rank.weights[0], axis=again)
            total = rank.all_reduce(rank.grad_weights[0])
        else:
            total = rank.all_reduce(rank.grad_weights[0])
            extra = rank.all_gather(rank.weights[0], axis=again)
        await extra
        update = rank.update(0, await total, rank.weights[0], rank.opt_states[0])
        rank.weights[0], rank.opt_states[0] = update

    return program


MESH = Mesh(dp_replicate=2, dp_shard=2)


@pytest.mark.parametrize("shard_first", [set[int](), {0, 1, 2, 3}])
def test_groups_that_share_ranks_pass_in_one_order(shard_first: set[int]) -> None:
    program = trace(two_groups(shard_first), MESH, 1, 4)
    assert not any(check(program).models.values())
    assert judge(program).right


@pytest.mark.parametrize("shard_first", [{0}, {1}, {3}, {0, 2}, {0, 1, 2}])
def test_groups_that_share_two_ranks_are_refused_on_nccl_alone_in_different_orders(shard_first: set[int]) -> None:
    """The numbers are right and gloo runs it: but two communicators may block each other on devices."""
    program = trace(two_groups(shard_first), MESH, 1, 4)
    assert judge(program).right
    checked = check(program)
    assert checked.backends() == ["gloo"]
    deadlock = str(checked.why_not("nccl"))
    call = r"rank (\d)'s all_(?:reduce|gather)\(layer 0\) on (world|dp_shard) \(its op \d+\)"
    named = re.search(rf"which is queued behind {call}, which is queued behind {call}", deadlock)
    assert named, deadlock
    assert len({int(named[1]), int(named[3])} & shard_first) == 1
    assert {named[2], named[4]} == {"world", "dp_shard"}


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_ranks_that_share_no_second_group_may_differ(axis: str) -> None:
    """Ranks 0 and 3 meet only in the world, so their gathers along the axis need not stand in one order with it."""
    first = {0, 1} if axis == "dp_shard" else {0, 2}
    program = trace(two_groups(first, axis), MESH, 1, 4)
    assert not any(check(program).models.values())


def test_an_axis_that_is_the_whole_world_is_another_group() -> None:
    """Two ranks, two communicators over both of them."""
    assert check(trace(two_groups({0}), Mesh(dp_shard=2), 1, 2)).backends() == ["gloo"]
    assert check(trace(two_groups({0, 1}), Mesh(dp_shard=2), 1, 2)).backends() == ["gloo", "nccl"]


def collectives(program: Program, rank: int, kind: OpKind) -> list[int]:
    return [at for r, at, _ in places(program, kind) if r == rank]


def refused(program: Program, rank: int, tape: list[Op]) -> Refused:
    return refusal_of(lambda: check(with_tape(program, rank, tape)))


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_of_one_group_in_another_order_are_refused_naming_both_ranks(rank: int) -> None:
    """Two gathers of other layers change places, with what belongs to them."""
    program = built_in("fsdp")
    tape = list(program.tapes[rank])
    one, other = collectives(program, rank, OpKind.ALL_GATHER)[:2]
    a, b = tape[one], tape[other]
    tape[one] = a._replace(inputs=b.inputs, layer=b.layer)
    tape[other] = b._replace(inputs=a.inputs, layer=a.layer)
    tells(refused(program, rank, tape), "other order", rank=1, op=5)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [OpKind.ALL_REDUCE, OpKind.ALL_GATHER])
def test_collectives_of_another_kind_are_refused_naming_both_ranks(rank: int, kind: OpKind) -> None:
    program = built_in("fsdp")
    tape = list(program.tapes[rank])
    at = collectives(program, rank, OpKind.REDUCE_SCATTER)[0]
    tape[at] = tape[at]._replace(kind=kind)
    sentence = str(refused(program, rank, tape))
    call = r"(all_reduce|all_gather|reduce_scatter)\(grad_weights\[1\] \(microbatch [01]\)\)"
    named = re.match(rf"rank (\d), op {at} {call} on world: rank (\d) meets it with {call} \(its op {at}\)", sentence)
    assert named, sentence
    assert {named[1], named[3]} == {"0", "1"}
    assert {named[2], named[4]} == {kind.value, "reduce_scatter"}


def test_collectives_of_another_layer_are_refused_while_tracing_too() -> None:
    async def program(rank: Rank) -> None:
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, rank.world)
        for l in rank.layers if rank.index else reversed(rank.layers):
            rank.all_gather(rank.weights[l])

    with refuses("other order", layer=0):
        trace(program, 2, 2, 2)
