"""Ops, and the hash by which processes compare their programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.language import (
    ExpectedValue,
    Holds,
    Kind,
    Mesh,
    Op,
    OpKind,
    Program,
    Rank,
    Reduction,
    Refused,
    Sizes,
    Spec,
    trace,
)
from shardlab.language.collective_calls import require_expected_message
from shardlab.language.mesh import group_of
from shardlab.language.ops import Stream
from shardlab.language.rules.kinds import factor_of
from shardlab.language.rules.spec import Space, form_of
from shardlab.language.tape import (
    EXCHANGES,
    Communication,
    Matcher,
    communication_op,
    communications_of,
    communicator_of,
    compute_op,
    queue_key,
)
from shardlab.strategies import STRATEGIES
from tests.support.refusing import require_refusal

PROGRAM = trace(STRATEGIES["pipeline-fsdp"].program, Mesh(pp=2, dp_shard=2), 2, 4)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_equal_traces_have_one_fingerprint(name: str) -> None:
    entry = STRATEGIES[name]
    layers = entry.puzzle(entry.ranks)
    first, second = (trace(entry.program, entry.mesh(entry.ranks), layers, 4) for _ in range(2))
    assert first == second
    assert first.fingerprint() == second.fingerprint()


def test_every_builtin_strategy_has_its_own_fingerprint() -> None:
    programs = [  # two microbatches on each rank: with one, zero-1 and zero-2 do the same
        trace(entry.program, entry.mesh(entry.ranks), entry.puzzle(entry.ranks, 8), 8) for entry in STRATEGIES.values()
    ]
    assert len({program.fingerprint() for program in programs}) == len(programs)


CHANGES: dict[str, list[Any]] = {
    "kind": [OpKind.ADD],
    "layer": [77],
    "inputs": [(77,)],
    "outputs": [(77, 78)],
    "handle": [77],
    "group": [group_of("tp", (0, 1, 2)), group_of("tp", (0, 1, 3)), group_of("dp_shard", (0, 1, 2))],
    "peer": [77],
    "holds": [Holds(1, 77)],
    "expect": [ExpectedValue(Kind.SAVED, 77, 1)],
    "batch": [77],
    "root": [77],
    "reduction": [Reduction.MAX],
    "dtype": ["bfloat16"],
    "place": ["host"],
    "offset": [77],
    "factor": [None, factor_of(1), factor_of(2), factor_of(1, ((1, 1),))],
}
"""For each field of an op, other values."""


def test_every_field_of_an_op_is_among_the_changes() -> None:
    assert set(CHANGES) == set(Op._fields)


@pytest.mark.parametrize("field", Op._fields)
def test_a_changed_op_changes_the_fingerprint(field: str) -> None:
    def fingerprint(op: Op) -> str:
        return replace(PROGRAM, tapes=[[op]]).fingerprint()

    for op in {op for tape in PROGRAM.tapes for op in tape}:
        assert fingerprint(op) == fingerprint(op._replace())
        for value in CHANGES[field]:
            changed = op._replace(**{field: value})
            assert (fingerprint(changed) != fingerprint(op)) == (changed != op), (op, changed)


@pytest.mark.parametrize(
    "changed",
    [
        replace(PROGRAM, mesh=Mesh(pp=4)),
        replace(PROGRAM, microbatches=8),
        replace(PROGRAM, sizes=Sizes((1, 1), (1, 1), (1, 1, 1), (0, 0))),
        replace(PROGRAM, tapes=PROGRAM.tapes[:-1]),
        replace(PROGRAM, tapes=[PROGRAM.tapes[1], PROGRAM.tapes[0], *PROGRAM.tapes[2:]]),
        replace(PROGRAM, tapes=[PROGRAM.tapes[0][:-1], *PROGRAM.tapes[1:]]),
    ],
    ids=["mesh", "microbatches", "sizes", "a rank dropped", "ranks swapped", "an op dropped"],
)
def test_another_world_has_another_fingerprint(changed: Program) -> None:
    assert changed.fingerprint() != PROGRAM.fingerprint()


def test_a_program_knows_its_ranks_and_layers() -> None:
    program = trace(STRATEGIES["gpipe"].program, Mesh(pp=2), 6, 3)
    assert (program.ranks, program.layers, program.microbatches) == (2, 6, 3)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op(OpKind.LOAD_WEIGHT, 2), "load_weight(layer 2)"),
        (Op(OpKind.LOAD_BATCH, 0), "load_batch(batch)"),
        (Op(OpKind.FORWARD, 3), "forward(layer 3)"),
        (Op(OpKind.WAIT, -1, handle=7), "wait(handle 7)"),
        (Op(OpKind.FREE, -1, (9,)), "free(value 9)"),
        (Op(OpKind.SEND, 1, (4,), handle=0, peer=2), "send to rank 2"),
        (Op(OpKind.RECV, -1, (), (4,), 0, peer=2), "recv from rank 2"),
        (
            Op(OpKind.RECV, 1, (), (4,), 0, peer=2, expect=ExpectedValue(Kind.ACTIVATION, 1, 0b110)),
            "recv from rank 2 of activations[1] of microbatches 1-2",
        ),
        (
            Op(OpKind.RECV, 1, (), (4,), 0, peer=2, expect=ExpectedValue(Kind.WEIGHT, 1, 0)),
            "recv from rank 2 of weights[1]",
        ),
        (Op(OpKind.ALL_REDUCE, 1, group=Mesh(tp=2).group(0, "tp")), "all_reduce(layer 1) on tp"),
        (Op(OpKind.BARRIER, -1, group=Mesh(tp=2).group(0, "tp")), "barrier on tp"),
    ],
)
def test_an_op_says_what_it_does(op: Op, text: str) -> None:
    assert str(op) == text


def test_a_message_is_named_by_kind_layer_and_microbatches() -> None:
    def spec(kind: Kind, cells: int = 0) -> Spec:
        return Spec(form_of(kind, 1, 0, Space(4)), cells)

    assert ExpectedValue.of(spec(Kind.ACTIVATION, 0b11)) == ExpectedValue(Kind.ACTIVATION, 1, 0b11)
    assert ExpectedValue.of(spec(Kind.GRAD_WEIGHT, 0b101)) == ExpectedValue(Kind.GRAD_WEIGHT, 1, 0b101)
    assert ExpectedValue.of(spec(Kind.WEIGHT)) == ExpectedValue(Kind.WEIGHT, 1, 0)
    require_expected_message(3, ExpectedValue(Kind.ACTIVATION, 1, 0b11), spec(Kind.ACTIVATION, 0b11))


def test_another_message_than_the_one_expected_is_refused_with_both() -> None:
    with pytest.raises(Refused) as caught:
        require_expected_message(
            3, ExpectedValue(Kind.ACTIVATION, 1, 0b1), Spec(form_of(Kind.ACTIVATION, 1, 0, Space(4)), 0b10)
        )
    require_refusal(caught.value, "other message", layer=1)


def test_ops_that_are_made_without_a_constructor_have_all_fields() -> None:
    holds, group = Holds(0b1, 2), group_of("tp", (0, 1))
    assert compute_op(OpKind.FORWARD, 1, (2, 3), (4,)) == Op(OpKind.FORWARD, 1, (2, 3), (4,))
    assert compute_op(OpKind.FORWARD, 1, (2, 3), (4,), holds) == Op(OpKind.FORWARD, 1, (2, 3), (4,), holds=holds)
    op = communication_op(OpKind.REDUCE, 1, (2,), (3,), 4, group, -1, None, -1, 1, Reduction.MAX)
    assert op == Op(OpKind.REDUCE, 1, (2,), (3,), 4, group, root=1, reduction=Reduction.MAX)
    expect = ExpectedValue(Kind.ACTIVATION, 1, 0b1)
    op = communication_op(OpKind.RECV, 1, (), (3,), 4, None, 5, expect, 6)
    assert op == Op(OpKind.RECV, 1, (), (3,), 4, peer=5, expect=expect, batch=6)


# The k-th communication of each participant on a channel is one, whoever comes first.


def of(name: str) -> Program:
    entry = STRATEGIES[name]
    return trace(entry.program, entry.mesh(entry.ranks), entry.puzzle(entry.ranks, 8), 8)


@given(st.permutations([(rank, turn) for rank in range(3) for turn in range(4)]))
def test_parts_meet_by_turn_in_whatever_order_they_come(order: list[tuple[int, int]]) -> None:
    turns = dict.fromkeys(range(3), 0)
    matcher = Matcher[tuple[int, int]]()
    complete: list[list[tuple[int, int]]] = []
    for rank, _ in order:
        arrived = matcher[0, 1, 2].join(rank)
        arrived[rank] = (rank, turns[rank])
        turns[rank] += 1
        if len(arrived) == 3:
            complete.append(matcher[0, 1, 2].pop_complete())
    assert complete == [[(rank, turn) for rank in range(3)] for turn in range(4)]
    assert not list(matcher.incomplete())


def test_communications_without_a_peer_are_incomplete() -> None:
    matcher = Matcher[str]()
    matcher[0, 1].join(0)[0] = "sent"
    matcher[1, 0].join(0)[0] = "wanted"
    assert [list(arrived.values()) for arrived in matcher.incomplete()] == [["sent"], ["wanted"]]


def test_tapes_alone_give_the_meetings_that_the_check_finds() -> None:
    for name in ("zb-v", "3d", "hsdp"):
        program = of(name)
        communications, places = communications_of(program)
        checked = check(program)
        assert sorted(communications, key=lambda communication: communication.participants) == sorted(
            checked.communications, key=lambda communication: communication.participants
        )
        for mine, theirs in zip(places, checked.communication_of, strict=True):
            assert {h: communications[at] for h, at in mine.items()} == {
                h: checked.communications[at] for h, at in theirs.items()
            }


async def swapping(rank: Rank) -> None:
    rank.activations[0] = rank.load_batch(rank.share())
    other = 1 - rank.index
    rank.activations["theirs"] = await rank.exchange(rank.activations[0], to=other, source=other)
    await rank.barrier()
    if rank.index:
        await rank.send(rank.activations[0], to=0)
    else:
        await rank.recv(source=1)


def test_each_communication_has_one_communicator_and_an_exchange_two_streams() -> None:
    program = trace(swapping, Mesh(dp_shard=2), 1, 2)

    def by(stream: Stream) -> list[Communication]:
        return [communication for communication in communications_of(program)[0] if communication.stream is stream]

    (barrier,) = by(Stream.COLLECTIVE)
    assert communicator_of(program, barrier) is queue_key(program, barrier) is barrier.group
    forth, back, single = sorted(by(Stream.MESSAGE), key=lambda communication: communication.participants[0].op)
    assert communicator_of(program, forth) == communicator_of(program, back) == EXCHANGES
    assert {queue_key(program, forth), queue_key(program, back)} == {(0, 1), (1, 0)}
    assert communicator_of(program, single) == queue_key(program, single) == frozenset({0, 1})
