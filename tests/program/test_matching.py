"""The k-th communication of each participant on a channel is one, whoever comes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.program import Mesh, Program, Rank, trace
from shardlab.program.matching import EXCHANGES, Communication, Matcher, communications_of, communicator, stream_of
from shardlab.program.ops import Stream
from shardlab.strategies import STRATEGIES


def of(name: str) -> Program:
    entry = STRATEGIES[name]
    return trace(entry.program, entry.mesh(entry.ranks), entry.puzzle(entry.ranks, 8), 8)


@given(st.permutations([(rank, turn) for rank in range(3) for turn in range(4)]))
def test_parts_meet_by_turn_in_whatever_order_they_come(order: list[tuple[int, int]]) -> None:
    turns = dict.fromkeys(range(3), 0)
    matcher = Matcher[tuple[int, int]]()
    found: list[list[tuple[int, int]]] = []
    for rank, _ in order:
        arrived = matcher[0, 1, 2].next(rank)
        arrived[rank] = (rank, turns[rank])
        turns[rank] += 1
        if len(arrived) == 3:
            found.append(matcher[0, 1, 2].whole())
    assert found == [[(rank, turn) for rank in range(3)] for turn in range(4)]
    assert not list(matcher.left())


def test_what_has_no_peer_is_left() -> None:
    matcher = Matcher[str]()
    matcher[0, 1].next(0)[0] = "sent"
    matcher[1, 0].next(0)[0] = "wanted"
    assert [list(came.values()) for came in matcher.left()] == [["sent"], ["wanted"]]


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
    assert communicator(program, barrier) is stream_of(program, barrier) is barrier.group
    there, back, single = sorted(by(Stream.MESSAGE), key=lambda communication: communication.participants[0].op)
    assert communicator(program, there) == communicator(program, back) == EXCHANGES
    assert {stream_of(program, there), stream_of(program, back)} == {(0, 1), (1, 0)}
    assert communicator(program, single) == stream_of(program, single) == frozenset({0, 1})
