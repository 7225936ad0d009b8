"""Rooms of shared memory: what lies there stays until all who read it have, and then the room is used again."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardlab.execute.shared_memory import LETTERS, RING, SMALLEST, Outbox, SharedMemory
from tests.support.thorough import examples

RANKS = 3
LETTERS_BYTES = RANKS * 8 * RING
SIZE = 2**24 + LETTERS_BYTES

lengths = st.sampled_from([0, 1, 7, 1000, 1008, 1009, 5000, 40_000])
puts = st.tuples(st.just("put"), lengths, st.sets(st.integers(0, RANKS - 1), min_size=1))
reads = st.tuples(st.just("read"), st.integers(0, 50), st.integers(0, RANKS - 1))


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(puts | reads, max_size=60))
def test_what_somebody_has_not_read_is_never_written_over(steps: list[tuple[str, int, set[int] | int]]) -> None:
    outbox = Outbox(SIZE, RANKS)
    lying: dict[int, tuple[Tensor, set[int]]] = {}
    for number, (what, size, who) in enumerate(steps):
        if isinstance(who, set):
            tensor = torch.full((size,), float(number))
            room = outbox.put(tensor, sorted(who))
            assert room not in lying
            lying[room] = tensor, set(who)
        elif lying:
            room = sorted(lying)[size % len(lying)]
            outbox.flags[room + who] = 1
            lying[room][1].discard(who)
            if not lying[room][1]:
                del lying[room]
        for room, (tensor, _) in lying.items():
            assert torch.equal(outbox.tensor(room, tensor), tensor), what


def test_rooms_are_used_again_so_that_a_step_takes_no_more_than_the_first() -> None:
    outbox, tensor = Outbox(SIZE, RANKS), torch.arange(3000.0)

    def step() -> set[int]:
        rooms = {outbox.put(tensor, [0, 2]) for _ in range(4)}
        for room in rooms:
            outbox.flags[room] = outbox.flags[room + 2] = 1
        return rooms

    first = step()
    assert len(first) == 4
    assert all(step() == first for _ in range(5))


def test_two_that_map_one_memory_see_the_same() -> None:
    outbox = Outbox(SIZE, RANKS)
    other = SharedMemory(SIZE, RANKS, outbox.file)
    for tensor in (torch.randn(3, 5), torch.randn(4, dtype=torch.bfloat16), torch.arange(6).view(2, 3).T):
        assert torch.equal(other.tensor(outbox.put(tensor, [1]), tensor), tensor)


def test_more_under_way_than_there_is_room_for_is_told() -> None:
    outbox = Outbox(2 * SMALLEST + -(-8 * RING // SMALLEST) * SMALLEST, 1)
    first = outbox.put(torch.zeros(5), [0])
    outbox.put(torch.zeros(5), [0])
    for _ in range(2):
        with pytest.raises(MemoryError, match=r"a message of 20 bytes finds no room in [0-9,]+ bytes"):
            outbox.put(torch.zeros(5), [0])
    outbox.flags[first] = 1
    assert outbox.put(torch.zeros(5), [0]) == first


def test_what_is_read_makes_room_for_smaller_messages() -> None:
    outbox = Outbox(SIZE, RANKS)
    room = outbox.put(torch.zeros(100_000), [1])
    assert outbox.put(torch.zeros(10), [1]) != room
    outbox.flags[room + 1] = 1
    assert outbox.put(torch.zeros(50_000), [1]) == room


def test_letters_are_read_once_and_in_order_around_the_ring() -> None:
    outbox = Outbox(SIZE, RANKS)
    reader = SharedMemory(SIZE, RANKS, outbox.file)
    for begin in range(0, 3 * LETTERS, LETTERS):
        letters = [(begin + number, number) for number in range(LETTERS)]
        for channel, room in letters:
            outbox.write_letter(2, channel, room)
        assert list(reader.read_letters(1)) == []
        assert list(reader.read_letters(2)) == letters
        assert list(reader.read_letters(2)) == []


def test_more_letters_than_are_kept_are_told() -> None:
    outbox = Outbox(SIZE, RANKS)
    for number in range(LETTERS):
        outbox.write_letter(0, number, 0)
    with pytest.raises(MemoryError, match=r"65,536 messages to rank 0 are sent and not received"):
        outbox.write_letter(0, 1, 1)
    assert next(outbox.read_letters(0)) == (0, 0)
    outbox.write_letter(0, 1, 1)
