"""Neighbours: ranks of one host, which send each other tensors through memory that they share.

gloo sends within a host as it does between hosts, by TCP: the kernel copies twice, and threads wake up on both sides.
Here a rank copies what it sends into memory of its own (`shared_memory`), writes a letter there, which says where it
lies and which channel it is for, and rings at a Unix socket. Who waits for it reads it there, or adds it from there.
Nothing runs beside the ranks' own threads, and no one waits to send: who waits for what it has sent is held back, if it
is far ahead of the reader (`lead`). A rank that has gone has closed its sockets, which the others see at once.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import select
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from threading import Condition
from typing import ClassVar, NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardlab.execute.lead import MessageLead
from shardlab.execute.shared_memory import Outbox, SharedMemory

LONGEST = 2**31 // 1000 - 1
"""Seconds that a poll can wait."""

RING_BELL = b"!"
"""The byte that a rank sends on a socket after it has written a letter, so that the reader looks for it."""

MESSAGES = 0
"""The channel of messages between two ranks; each process group has one of its own."""

PAUSE = 0.001
"""Seconds after which a rank that is held back looks again: its reader rings no bell, since it need not know of it."""


class Channel(NamedTuple):
    """A process group whose members are neighbours.

    Attributes:
        number: alike on all members, and different for each group.
        members: their ranks, in group order.
        mine: this rank's place among them.
    """

    number: int
    members: Sequence[int]
    mine: int

    @property
    def others(self) -> list[int]:
        """The other members, in group order."""
        return [*self.members[: self.mine], *self.members[self.mine + 1 :]]


class Expected(NamedTuple):
    """The tensor of this number, from 1, among those that a rank sends this one on a channel."""

    source: int
    channel: int
    number: int


class SharedTensor(NamedTuple):
    """A tensor in its sender's memory, where it lies until all who read it have `taken` it.

    Attributes:
        tensor: what was sent.
        flags: the sender's memory.
        flag: the byte there that says that this rank has read it.
    """

    tensor: Tensor
    flags: memoryview
    flag: int

    def taken(self) -> None:
        """Let the sender use the room again."""
        self.flags[self.flag] = 1


class Neighbours:
    """This rank's connections to its neighbours.

    Attributes:
        here: the connections of this process; None if it has no neighbours, or has not met them.

    Args:
        rank: this rank, in the default process group.
        outbox: the memory that this rank writes, where it puts what it sends.
        sockets: by rank, a connected Unix socket to each neighbour.
        memories: by rank, the memory that each neighbour writes, mapped into this process.
        limit: how long this rank waits for a letter before it fails.
    """

    here: ClassVar[Neighbours | None] = None

    def __init__(
        self,
        rank: int,
        outbox: Outbox,
        sockets: dict[int, socket.socket],
        memories: dict[int, SharedMemory],
        limit: timedelta,
    ) -> None:
        self._rank, self._outbox, self._sockets, self._memories = rank, outbox, sockets, memories
        self._limit = min(limit.total_seconds(), LONGEST)
        self._expected: dict[tuple[int, int], int] = defaultdict(int)
        self._arrived: dict[tuple[int, int], int] = defaultdict(int)
        self._rooms: dict[Expected, int] = {}
        self._leads = {other: MessageLead() for other in sockets}
        self._channels: dict[str, Channel | None] = {}
        self._ranks = {each.fileno(): other for other, each in sockets.items()}
        self._gone: set[int] = set()
        self._turn, self._reads = Condition(), False
        self._bells = select.poll()
        for each in sockets.values():
            each.setblocking(False)
            self._bells.register(each, select.POLLIN)

    def __contains__(self, rank: int) -> bool:
        return rank in self._sockets

    @classmethod
    def with_rank(cls, rank: int) -> Neighbours | None:
        """This process's neighbours if a rank is one of them, else None."""
        return None if cls.here is None or rank not in cls.here else cls.here

    @classmethod
    def memories(cls) -> list[Tensor]:
        """List all memory that neighbours share, of which only what was written takes any; none without neighbours."""
        return [] if cls.here is None else [each.bytes for each in (cls.here._outbox, *cls.here._memories.values())]

    def channel(self, group: dist.ProcessGroup) -> Channel | None:
        """The channel of a process group; None if some of its members are no neighbours."""
        name = group.group_name
        if name not in self._channels:
            members: list[int] = dist.get_process_group_ranks(group)
            here = len(members) > 1 and all(rank in self or rank == self._rank for rank in members)
            number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1
            self._channels[name] = Channel(number, members, members.index(self._rank)) if here else None
        return self._channels[name]

    def send_message(self, tensor: Tensor, to: int) -> int:
        """Send a rank a message, as `send` does.

        Returns:
            How many messages that rank must have begun to receive before this one goes on (see `wait_for_receives`).
        """
        self.send(tensor, [to], MESSAGES)
        return self._leads[to].count(tensor.nbytes)

    def wait_for_receives(self, reader: int, count: int) -> None:
        """Wait until a rank has begun to receive so many of this one's messages.

        Raises:
            RuntimeError: when it has gone, or has not begun within the limit.
        """
        if self._outbox.receives(reader) >= count:
            return
        end = time.monotonic() + self._limit
        with self._turn:
            while self._outbox.receives(reader) < count:
                self._want(reader)
                if not self._read(PAUSE) and time.monotonic() > end:
                    raise RuntimeError(f"Timed out waiting for rank {reader}: it took nothing for {self._limit:g} s")

    def send(self, tensor: Tensor, to: Sequence[int], channel: int, *, keeps: bool = False) -> SharedTensor:
        """Send a tensor to some ranks; it may change as soon as this has ended, which waits for nobody.

        Returns:
            What they read. It is there for this rank only if it `keeps` it: until it has taken it as well.

        Raises:
            RuntimeError: when one of them has gone.
            MemoryError: when more is under way than the memory has room for.
        """
        outbox = self._outbox
        room = outbox.put(tensor, [*to, self._rank] if keeps else to)
        for rank in to:
            outbox.write_letter(rank, channel, room)
            try:
                self._sockets[rank].send(RING_BELL)
            except BlockingIOError:  # it has rung often enough
                pass
            except OSError as error:
                raise RuntimeError(f"Connection closed by peer: rank {rank} has gone ({error})") from None
        return self._shared(self._outbox, room, tensor)

    def expect_message(self, source: int) -> Expected:
        """Begin to receive a rank's next message."""
        expected = self.expect(source, MESSAGES)
        self._memories[source].note_receives(self._rank, expected.number)
        return expected

    def expect(self, source: int, channel: int) -> Expected:
        """Note that the next tensor which nobody expects yet of a rank on a channel is wanted."""
        self._expected[source, channel] += 1
        return Expected(source, channel, self._expected[source, channel])

    def receive(self, expected: Expected, like: Tensor) -> SharedTensor:
        """Wait for a tensor that is expected, of the shape and dtype of `like`.

        Raises:
            RuntimeError: when its sender has gone, or nothing comes within the limit.
        """
        with self._turn:
            self._take_in(expected.source)
            while expected not in self._rooms:
                self._want(expected.source)
                if not self._read(self._limit):
                    why = f"nothing came within {self._limit:g} s"
                    raise RuntimeError(f"Timed out waiting for rank {expected.source}: {why}")
            return self._shared(self._memories[expected.source], self._rooms.pop(expected), like)

    def _shared(self, memory: SharedMemory, room: int, like: Tensor) -> SharedTensor:
        return SharedTensor(memory.tensor(room, like), memory.flags, room + self._rank)

    @classmethod
    def part(cls) -> None:
        """Leave them: what is sent from now on goes by torch.distributed. What was sent can still be read."""
        if cls.here is not None:
            for each in cls.here._sockets.values():
                each.close()
        cls.here = None

    def _want(self, rank: int) -> None:
        if rank in self._gone:
            raise RuntimeError(f"Connection closed by peer: rank {rank} has gone")

    def _read(self, seconds: float) -> bool:
        """Wait for some seconds until some rank rings, and read its letters; false if none has.

        While ops are timed, each is waited for on a thread of its own: one of them reads for all, in its turn.
        """
        if self._reads:
            return self._turn.wait(seconds)
        self._reads = True
        self._turn.release()
        try:
            rung = self._bells.poll(1000 * seconds)
        finally:
            self._turn.acquire()
            self._reads = False
            self._turn.notify_all()
        for file, _ in rung:
            rank = self._ranks[file]
            has_gone = not self._silenced(rank)
            self._take_in(rank)
            if has_gone:
                self._gone.add(rank)
                self._bells.unregister(file)
        return bool(rung)

    def _silenced(self, rank: int) -> bool:
        """Take all that a rank has rung; false if it has gone."""
        while True:
            try:
                if not self._sockets[rank].recv(len(RING_BELL)):
                    return False
            except BlockingIOError:
                return True
            except ConnectionResetError:  # it has left something unread
                continue

    def _take_in(self, rank: int) -> None:
        """Read a rank's letters."""
        for channel, room in self._memories[rank].read_letters(self._rank):
            self._arrived[rank, channel] += 1
            self._rooms[Expected(rank, channel, self._arrived[rank, channel])] = room
