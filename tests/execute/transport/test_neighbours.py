"""Ranks of one host send each other what they would by gloo, in any order of waits, and notice who has gone."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardlab.check import check
from shardlab.execute.transport import neighbours
from shardlab.execute.transport.collectives import Transport, messages_with, transport_of
from shardlab.execute.transport.neighbours import (
    MAX_CHANNELS,
    MIN_BUFFER_BYTES,
    QUEUE_LENGTH,
    QUEUE_WORDS,
    WINDOW_BYTES,
    WINDOW_MESSAGES,
    Neighbours,
    Outbox,
    SendWindow,
    SharedMemory,
    connect_neighbours,
)
from shardlab.execute.transport.shared_transport import SharedTransport
from shardlab.language import Op, OpKind, Program, Reduction
from shardlab.train.faults import is_lost
from tests.support.random_programs import chatter
from tests.support.ranks import Ranks
from tests.support.thorough import examples

World = Callable[[int], Ranks]

LIMIT = timedelta(minutes=5)
LENGTH = 6
KINDS = [
    "all_reduce",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "scatter",
    "gather",
    "barrier",
    "send",
]
MANY = WINDOW_BYTES // MIN_BUFFER_BYTES + 200
"""Messages of one number, more than may go ahead of their receives, and more than a Unix socket holds (278)."""


def _world() -> Transport:
    return transport_of(cast(Any, dist.group.WORLD))


def all_reduce(tensor: Tensor, group: Any) -> Any:
    return transport_of(group).all_reduce([tensor])


def send(tensor: Tensor, to: int) -> Any:
    return messages_with(to).send([tensor], to)


def recv(tensor: Tensor, source: int) -> Any:
    return messages_with(source).recv([tensor], source)


def _values(rank: int, number: int, size: int) -> Tensor:
    """Whole numbers, so that a sum is the same in every order."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-99, 99, (size * LENGTH,), generator=generator).float()


def mixed(rank: int, size: int, seed: int, shared: bool) -> list[Tensor]:
    """What comes of collectives on two groups and messages around the ranks, waited for in an order of this rank's."""
    connected = Neighbours.current
    assert connected is not None
    assert all(other in connected for other in range(size) if other != rank)
    with patch.object(Neighbours, "current", connected if shared else None):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        groups = [(_world(), size)]
        groups.append((transport_of(cast(Any, dist.new_group(pair, use_local_synchronization=True))), 2))
        kinds = random.Random(seed)
        results: list[Tensor] = []
        works: list[Any] = []
        for number in range(12):
            group, members = kinds.choice(groups)
            inputs = [_values(rank, number, members), _values(rank, number + 50, members)]
            root = kinds.randrange(members)
            is_root = rank == (root if members == size else pair[root])
            wholes, pieces, gathered = (
                [torch.zeros(elements) for _ in inputs]
                for elements in (members * LENGTH, LENGTH, members * members * LENGTH)
            )
            match kinds.choice(KINDS):
                case "all_reduce":
                    results += inputs
                    works.append(group.all_reduce(inputs))
                case "reduce":
                    results += inputs if is_root else []
                    works.append(group.reduce(inputs, root, Reduction.MAX))
                case "all_gather":
                    results += gathered
                    works.append(group.all_gather(gathered, inputs))
                case "reduce_scatter":
                    results += pieces
                    works.append(group.reduce_scatter(pieces, inputs))
                case "all_to_all":
                    results += wholes
                    works.append(group.all_to_all(wholes, inputs))
                case "broadcast":
                    results += inputs
                    works.append(group.broadcast(inputs, root))
                case "scatter":
                    results += pieces
                    works.append(group.scatter(pieces, inputs if is_root else [], root))
                case "gather":
                    results += gathered
                    works.append(group.gather(gathered if is_root else [], inputs, root))
                case "barrier":
                    works.append(group.barrier())
                case _:
                    results.append(wholes[0])
                    works += [send(inputs[0], (rank + 1) % size), recv(wholes[0], (rank - 1) % size)]
        random.Random(seed + rank + 1).shuffle(works)
        for work in works:
            work.wait()
        return results


@pytest.mark.hypothesis  # so that `make verify-all` runs it, with more seeds
@pytest.mark.parametrize("size", [2, 4])
def test_all_that_is_exchanged_is_what_gloo_brings(ranks: World, size: int) -> None:
    for seed in range(examples(12)):
        ours, gloos = (ranks(size).call(mixed, size, seed, shared) for shared in (True, False))
        for mine, theirs in zip(ours, gloos, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), seed


def flooded_before_gloo(rank: int) -> None:
    """Rank 1 receives only after both have met in gloo."""
    shared, received = torch.ones(1), torch.empty(1)
    if rank == 0:
        for _ in range(MANY):
            send(torch.ones(1), 1)
    dist.broadcast(shared, 0)
    if rank == 1:
        for _ in range(MANY):
            recv(received, 0).wait()


def test_who_sends_waits_for_nobody(ranks: World) -> None:
    ranks(2).call(flooded_before_gloo)


LARGE = 2**18
"""Elements of a message of 1 MiB."""


def ahead_of_a_slow_reader(rank: int) -> float:
    """Rank 0 sends faster than rank 1 receives: how much of the memory that it shares it has written, in messages."""
    connect_neighbours(LIMIT)  # to memory of which nothing is written
    start = _shared_bytes()
    tensor = torch.ones(LARGE)
    for _ in range(60):
        if rank == 0:
            send(tensor, 1).wait()
        else:
            time.sleep(0.002)
            recv(tensor, 0).wait()
    return (_shared_bytes() - start) / tensor.nbytes


def one_gives(rank: int) -> float:
    """Rank 0 gives, and does so faster than rank 1 takes: how much it has written, in messages."""
    connect_neighbours(LIMIT)
    start_bytes = _shared_bytes()
    tensor, pair, world = torch.ones(LARGE), torch.ones(2 * LARGE), _world()
    starts: list[Callable[[], Any]] = [
        lambda: world.broadcast([tensor], 0),
        lambda: world.scatter([tensor], [] if rank else [pair], 0),
        lambda: world.gather([pair] if rank else [], [tensor], 1),
        lambda: world.reduce([tensor], 1),
    ]
    for start in starts:
        for _ in range(20):
            time.sleep(0.002 * rank)
            start().wait()
    return (_shared_bytes() - start_bytes) / tensor.nbytes


def _shared_bytes() -> int:
    match = re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def test_who_is_faster_holds_no_more_than_a_few_messages(ranks: World) -> None:
    assert (
        ranks(2).call(ahead_of_a_slow_reader)[0] < neighbours.WINDOW_MESSAGES + 3
    )  # one is sent, and one or two are read


def test_who_gives_alone_waits_for_who_takes(ranks: World) -> None:
    assert ranks(2).call(one_gives)[0] < 5


def started_and_left(rank: int) -> tuple[float, list[float]]:
    """Start sums and messages of 1 MiB that nobody waits for.

    Returns:
        Shared memory that this rank has written, in tensors, and the last result of each kind.
    """
    connect_neighbours(LIMIT)
    start, other, world = _shared_bytes(), 1 - rank, _world()
    messages = messages_with(other)
    total, received, works = torch.empty(0), torch.full((1,), 299.0), list[Any]()
    for number in range(300):
        total = torch.full((LARGE,), float(number))
        works = [world.all_reduce([total])]
        if rank == 0:
            messages.send([torch.full((LARGE,), float(number))], other)
        else:
            received = torch.empty(LARGE)
            works.append(messages.recv([received], other))
        if number % 4 == 0:
            dist.barrier()
    for work in works:
        work.wait()
    return (_shared_bytes() - start) / total.nbytes, [float(total[-1]), float(received[-1])]


def test_works_that_nobody_waits_for_free_their_messages(ranks: World) -> None:
    for tensors, results in ranks(2).call(started_and_left):
        assert tensors < 64
        assert results == [598.0, 299.0]


def with_tags(rank: int) -> list[float]:
    """Rank 0 waits for its sends of one tag; rank 1 has begun to receive those, but none of another tag."""
    connect_neighbours(timedelta(seconds=20))
    try:
        messages, other = messages_with(1 - rank), 1 - rank
        tensors = [torch.full((LARGE,), float(number)) for number in range(2 * WINDOW_MESSAGES)]
        if rank == 0:
            works = [[messages.send([tensor + 100 * tag], other, tag) for tensor in tensors] for tag in (1, 2)]
            for work in works[1]:
                work.wait()
            dist.barrier()
            for work in works[0]:
                work.wait()
            return []
        works = [messages.recv([tensor], other, 2) for tensor in tensors]
        dist.barrier()
        received = [torch.empty(LARGE) for _ in tensors]
        works += [messages.recv([tensor], other, 1) for tensor in received]
        for work in works:
            work.wait()
        return [float(tensor[0]) for tensor in (*tensors, *received)]
    finally:
        connect_neighbours(LIMIT)


def test_each_tag_has_a_receive_count_of_its_own(ranks: World) -> None:
    numbers = range(2 * WINDOW_MESSAGES)
    assert ranks(2).call(with_tags)[1] == [*(200.0 + n for n in numbers), *(100.0 + n for n in numbers)]


def from_threads(rank: int) -> int:
    """Eight threads send at once, each with a tag of its own."""
    messages, other = messages_with(1 - rank), 1 - rank

    def exchange(tag: int) -> int:
        wrong = 0
        for number in range(100):
            received = torch.empty(500)
            work = messages.recv([received], other, tag)
            messages.send([torch.full((500,), 1000.0 * tag + number)], other, tag).wait()
            work.wait()
            wrong += int((received != 1000.0 * tag + number).sum())
        return wrong

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(exchange, range(1, 9)))


def test_several_threads_may_send(ranks: World) -> None:
    assert ranks(2).call(from_threads) == [0, 0]


def test_threads_that_put_tensors_at_once_get_different_buffers() -> None:
    outbox, tensors = Outbox(SIZE, RANKS), [torch.full((50,), float(number)) for number in range(400)]
    with ThreadPoolExecutor(8) as pool:
        offsets = list(pool.map(outbox.put, [[tensor] for tensor in tensors], [[1]] * len(tensors)))
    assert len(set(offsets)) == len(tensors)
    assert all(
        torch.equal(outbox.tensors(at, [tensor])[0], tensor) for at, tensor in zip(offsets, tensors, strict=True)
    )


def test_more_channels_than_the_table_holds_are_refused() -> None:
    outbox = Outbox(SIZE, RANKS)
    for channel in range(1, MAX_CHANNELS + 1):
        outbox.note_receives(1, channel, 10 * channel)
    outbox.note_receives(1, 7, 71)
    assert [outbox.receives(1, channel) for channel in (1, 7, MAX_CHANNELS, 1000)] == [10, 71, 10 * MAX_CHANNELS, 0]
    assert outbox.receives(2, 1) == 0
    with pytest.raises(RuntimeError, match="more than 256 pairs of a group and a tag; use fewer tags"):
        outbox.note_receives(1, 1000, 1)


def crossing(rank: int) -> float:
    """Both ranks wait for what they send, and meet, before they wait for what they receive."""
    other, message = 1 - rank, torch.ones(LARGE)
    received = [torch.zeros(LARGE) for _ in range(10)]
    receives = [recv(tensor, other) for tensor in received]
    for work in [send(message, other) for _ in received]:
        work.wait()
    dist.barrier()
    for work in receives:
        work.wait()
    return float(sum(tensor[-1] for tensor in received))


def test_a_send_is_over_once_its_receive_has_begun(ranks: World) -> None:
    assert ranks(2).call(crossing) == [10.0] * 2


def talked(rank: int, programs: list[Program]) -> list[dict[int, float]]:
    """What comes of the messages and sums of some programs, by op, where no message may go ahead of its receive."""
    groups: dict[tuple[int, ...], Any] = {}
    for members in sorted(
        {op.group.ranks for program in programs for tape in program.tapes for op in tape if op.group}
    ):
        groups[members] = dist.new_group(list(members))
    connect_neighbours(timedelta(seconds=20))
    try:
        with patch.object(neighbours, "WINDOW_MESSAGES", 0), patch.object(neighbours, "WINDOW_BYTES", 0):
            return [_talk(rank, program.tapes[rank], groups) for program in programs if rank < len(program.tapes)]
    finally:
        connect_neighbours(LIMIT)


def _talk(rank: int, tape: Sequence[Op], groups: dict[tuple[int, ...], Any]) -> dict[int, float]:
    works: dict[int, Any] = {}
    received: dict[int, Tensor] = {}
    for at, op in enumerate(tape):
        if op.kind is OpKind.WAIT:
            works.pop(op.handle).wait()
        elif op.kind is OpKind.SEND:
            works[op.handle] = send(torch.tensor([_value_of(rank, at)]), op.peer)
        elif op.kind is OpKind.RECV:
            received[at] = torch.empty(1)
            works[op.handle] = recv(received[at], op.peer)
        elif op.group is not None:
            received[at] = torch.tensor([_value_of(rank, at)])
            works[op.handle] = all_reduce(received[at], groups[op.group.ranks])
    return {at: float(tensor) for at, tensor in received.items()}


def _value_of(rank: int, at: int) -> float:
    return 1000.0 * rank + at


def test_programs_that_a_rendezvous_lets_pass_end(ranks: World) -> None:
    """Their ranks begin and await messages in orders that cross; a send that lasts until it is read would hang some."""
    checked = [check(program) for program in map(chatter, range(150)) if program is not None]
    right = [case for case in checked if case.why_not("gloo") is None]
    assert len(right) > 50
    ends = ranks(4).call(talked, [case.program for case in right])
    for case in right:
        received = [ends[rank].pop(0) for rank in range(len(case.program.tapes))]
        for _, _, members in case.communications:
            inputs = [_value_of(rank, at) for rank, _, at in members]
            receives = [received[rank][at] for rank, _, at in members if at in received[rank]]
            assert receives == ([inputs[0]] if len(receives) < len(inputs) else [sum(inputs)] * len(inputs))


def reused(rank: int) -> float:
    """On rank 2 a sum in which its own term is kept takes the room of an earlier one, which is waited for meanwhile."""
    world, pair_of = cast(Any, dist.group.WORLD), [rank // 2 * 2, rank // 2 * 2 + 1]
    group = cast(
        Any, dist.new_group(pair_of, use_local_synchronization=True)
    )  # all make as many, or names would differ
    upper = group if rank > 1 else None
    total, pair = torch.tensor([10.0**rank]), torch.tensor([5.0])
    if upper is not None:
        first = all_reduce(pair, upper)
        if rank == 3:
            first.wait()
        dist.barrier(upper)
        works = [all_reduce(total, world)]
        if rank == 2:
            first.wait()
    else:
        works = [all_reduce(total, world)]
    if rank != 2:
        works.pop().wait()
    dist.barrier()
    if rank == 2:
        send(torch.tensor([9e6]), 3)
        works.pop().wait()
    elif rank == 3:
        recv(torch.empty(1), 2).wait()
    return float(total)


def test_a_term_that_is_kept_stays_until_it_is_added(ranks: World) -> None:
    assert ranks(4).call(reused) == [1111.0] * 4


def flooded(rank: int) -> float:
    """Both ranks send `MANY` messages before either receives one."""
    other, received = 1 - rank, torch.empty(1)
    for number in range(MANY):
        send(torch.tensor([float(number)]), other)
    total = 0.0
    for number in range(MANY):
        recv(received, other).wait()
        assert float(received) == number
        total += float(received)
    return total


def test_more_messages_than_sockets_hold_block_no_rank(ranks: World) -> None:
    assert ranks(2).call(flooded) == [MANY * (MANY - 1) / 2] * 2


def bits(rank: int, size: int) -> Tensor:
    """A sum that depends on its order, of a tensor that is changed at once by who sends it."""
    values = torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    works: list[Any] = []
    for _ in range(3):
        total = values.clone()
        works.append((total, all_reduce(total, cast(Any, dist.group.WORLD))))
    for _, work in reversed(works):
        work.wait()
    assert all(torch.equal(total, works[0][0]) for total, _ in works)
    return works[0][0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_group_order_on_all_ranks(ranks: World, size: int) -> None:
    terms = [torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(size)]
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term
    assert all(torch.equal(total, expected) for total in ranks(size).call(bits, size))


def on_two_hosts(rank: int) -> tuple[list[bool], float]:
    """Ranks 0 and 2 are on one host, 1 and 3 on another: who are neighbours, and a sum over all."""
    with patch.object(neighbours, "_host", return_value=f"host {rank % 2}"):
        connect_neighbours(LIMIT)
    try:
        connected, world = Neighbours.current, cast(Any, dist.group.WORLD)
        assert connected is not None
        assert not isinstance(transport_of(world), SharedTransport)
        total = torch.tensor([float(rank)])
        all_reduce(total, world).wait()
        received = torch.empty(1)
        works = [send(total + rank, rank ^ 2), recv(received, rank ^ 2), send(total, rank ^ 1), recv(total, rank ^ 1)]
        for work in works:
            work.wait()
        assert float(received) == 6 + (rank ^ 2)
        return [other in connected for other in range(4)], float(total)
    finally:
        connect_neighbours(LIMIT)


def test_ranks_of_other_hosts_are_reached_by_gloo(ranks: World) -> None:
    assert ranks(4).call(on_two_hosts) == [([other == rank ^ 2 for other in range(4)], 6.0) for rank in range(4)]


def test_memory_is_shared_only_where_processors_keep_the_order_of_writes() -> None:
    assert neighbours._host()  # pyright: ignore[reportPrivateUsage]
    with patch("platform.machine", return_value="aarch64"):
        assert not neighbours._host()  # pyright: ignore[reportPrivateUsage]


def alone(rank: int) -> bool:
    """Rank 0's memory is limited, so it shares none."""
    connect_neighbours(LIMIT, shares=rank > 0)
    try:
        total = torch.ones(1)
        all_reduce(total, cast(Any, dist.group.WORLD)).wait()
        assert float(total) == 3
        return Neighbours.current is None
    finally:
        connect_neighbours(LIMIT)


def test_a_rank_that_may_not_share_has_no_neighbours(ranks: World) -> None:
    assert ranks(3).call(alone) == [True, False, False]


def left_behind(rank: int) -> None:
    """Rank 1 is killed, with a message unread, and rank 0 waits for what it would send, after what it has sent."""
    received = torch.empty(1)
    send(torch.ones(1), 1 - rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    recv(received, 1).wait()
    assert float(received) == 1
    with pytest.raises(RuntimeError, match="rank 1 has gone") as caught:
        recv(received, 1).wait()
    assert is_lost(caught.value)


def test_a_rank_that_has_gone_is_noticed_at_once() -> None:
    world = Ranks(2)
    try:
        with pytest.raises(AssertionError, match="rank 1:\nthe process ended") as caught:
            world.call(left_behind)
        assert "rank 0" not in str(caught.value)
    finally:
        world.close()


def late(rank: int) -> None:
    """Rank 0 waits for what nobody sends."""
    connect_neighbours(LIMIT, timedelta(seconds=0.2))
    try:
        if rank == 0:
            message = "Timed out waiting for rank 1: nothing arrived within 0.2 s"
            with pytest.raises(RuntimeError, match=message) as caught:
                recv(torch.empty(1), 1).wait()
            assert is_lost(caught.value)
            for _ in range(neighbours.WINDOW_MESSAGES):
                send(torch.ones(2 * LARGE), 1).wait()
            message = "Timed out waiting for rank 1: it read nothing for 0.2 s"
            with pytest.raises(RuntimeError, match=message) as caught:
                send(torch.ones(2 * LARGE), 1).wait()
            assert is_lost(caught.value)
    finally:
        dist.barrier()
        connect_neighbours(LIMIT)


def test_what_does_not_come_in_time_is_reported(ranks: World) -> None:
    ranks(2).call(late)


# Rooms of shared memory: what lies there stays until all who read it have, and then the room is used again.


RANKS = 3
QUEUE_BYTES = RANKS * 8 * QUEUE_WORDS
SIZE = 2**24 + QUEUE_BYTES

lengths = st.sampled_from([0, 1, 7, 1000, 1008, 1009, 5000, 40_000])
puts = st.tuples(st.just("put"), lengths, st.sets(st.integers(0, RANKS - 1), min_size=1))
reads = st.tuples(st.just("read"), st.integers(0, 50), st.integers(0, RANKS - 1))


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(puts | reads, max_size=60))
def test_what_somebody_has_not_read_is_never_written_over(steps: list[tuple[str, int, set[int] | int]]) -> None:
    outbox = Outbox(SIZE, RANKS)
    unread: dict[int, tuple[Tensor, set[int]]] = {}
    for number, (action, size, readers) in enumerate(steps):
        if isinstance(readers, set):
            tensor = torch.full((size,), float(number))
            offset = outbox.put([tensor], sorted(readers))
            assert offset not in unread
            unread[offset] = tensor, set(readers)
        elif unread:
            offset = sorted(unread)[size % len(unread)]
            outbox.flags[offset + readers] = 1
            unread[offset][1].discard(readers)
            if not unread[offset][1]:
                del unread[offset]
        for offset, (tensor, _) in unread.items():
            assert torch.equal(outbox.tensors(offset, [tensor])[0], tensor), action


def test_buffers_are_reused_so_later_steps_need_no_more_memory() -> None:
    outbox, tensor = Outbox(SIZE, RANKS), torch.arange(3000.0)

    def step() -> set[int]:
        offsets = {outbox.put([tensor], [0, 2]) for _ in range(4)}
        for offset in offsets:
            outbox.flags[offset] = outbox.flags[offset + 2] = 1
        return offsets

    first = step()
    assert len(first) == 4
    assert all(step() == first for _ in range(5))


def test_two_that_map_one_memory_see_the_same() -> None:
    outbox = Outbox(SIZE, RANKS)
    other = SharedMemory(SIZE, RANKS, outbox.file)
    for tensor in (torch.randn(3, 5), torch.randn(4, dtype=torch.bfloat16), torch.arange(6).view(2, 3).T):
        assert torch.equal(other.tensors(outbox.put([tensor], [1]), [tensor])[0], tensor)


def test_tensors_in_flight_beyond_the_memory_raise_an_error() -> None:
    outbox = Outbox(2 * MIN_BUFFER_BYTES + -(-8 * QUEUE_WORDS // MIN_BUFFER_BYTES) * MIN_BUFFER_BYTES, 1)
    first = outbox.put([torch.zeros(5)], [0])
    outbox.put([torch.zeros(5)], [0])
    for _ in range(2):
        with pytest.raises(
            MemoryError, match=r"a message of 64 bytes does not fit into the [0-9,]+ bytes of shared memory"
        ):
            outbox.put([torch.zeros(5)], [0])
    outbox.flags[first] = 1
    assert outbox.put([torch.zeros(5)], [0]) == first


def test_a_released_buffer_is_reused_for_a_smaller_tensor() -> None:
    outbox = Outbox(SIZE, RANKS)
    offset = outbox.put([torch.zeros(100_000)], [1])
    assert outbox.put([torch.zeros(10)], [1]) != offset
    outbox.flags[offset + 1] = 1
    assert outbox.put([torch.zeros(50_000)], [1]) == offset


def test_messages_are_read_once_and_in_order_around_the_queue() -> None:
    outbox = Outbox(SIZE, RANKS)
    reader = SharedMemory(SIZE, RANKS, outbox.file)
    for begin in range(0, 3 * QUEUE_LENGTH, QUEUE_LENGTH):
        messages = [(begin + number, number) for number in range(QUEUE_LENGTH)]
        for channel, offset in messages:
            outbox.write_message(2, channel, offset)
        assert list(reader.read_messages(1)) == []
        assert outbox.unread(2) == QUEUE_LENGTH
        assert list(reader.read_messages(2)) == messages
        assert outbox.unread(2) == 0
        assert list(reader.read_messages(2)) == []


def test_a_full_queue_raises_an_error() -> None:
    outbox = Outbox(SIZE, RANKS)
    for number in range(QUEUE_LENGTH):
        outbox.write_message(0, number, 0)
    with pytest.raises(MemoryError, match=r"65,536 messages to rank 0 are sent and not received"):
        outbox.write_message(0, 1, 1)
    assert next(outbox.read_messages(0)) == (0, 0)
    outbox.write_message(0, 1, 1)


# What may be sent before it is received: a few messages, or a few MiB of smaller ones, and never more.


@given(
    st.lists(st.integers(0, 2 * WINDOW_BYTES), max_size=40) | st.lists(st.integers(0, WINDOW_BYTES // 10), max_size=40)
)
def test_all_but_the_last_few_must_be_wanted(sizes: list[int]) -> None:
    window, previous = SendWindow(), 0
    for count, _ in enumerate(sizes, 1):
        required = window.count(sizes[count - 1])
        ahead = [max(size, MIN_BUFFER_BYTES) for size in sizes[required:count]]
        assert len(ahead) <= WINDOW_MESSAGES or sum(ahead) <= WINDOW_BYTES
        with_one_more = [max(size, MIN_BUFFER_BYTES) for size in sizes[max(0, required - 1) : count]]
        assert required == previous or (len(with_one_more) > WINDOW_MESSAGES and sum(with_one_more) > WINDOW_BYTES), (
            "it is held back no more than it must be"
        )
        assert required >= previous
        previous = required


def test_the_send_window_never_fills_the_queue() -> None:
    window = SendWindow()
    required = [window.count(0) for _ in range(QUEUE_LENGTH)]
    assert (
        max(number - count for number, count in enumerate(required, 1))
        == WINDOW_BYTES // MIN_BUFFER_BYTES
        < QUEUE_LENGTH
    )
