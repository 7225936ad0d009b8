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

import mmap
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from threading import Condition
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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


# How a rank finds its neighbours, the ranks of its host, and shares its memory with them.


HELLO = struct.Struct("=16sI")
"""The first message of a connection: the token of whom it is for, and the sender's rank; its memory comes along."""

MAPPED = 2**46
"""Bytes that all memories of a world may have together: half of what a process of 64 bits can map."""


class Address(NamedTuple):
    """Where a rank is found by others.

    Attributes:
        host: the name of its host, equal for ranks that can share memory; empty for a rank that shares none.
        name: the name of the Unix socket at which it listens.
        token: a secret by which who connects to that socket shows that this rank has told it the address.
        size: bytes of the memory that it shares.
    """

    host: str = ""
    name: bytes = b""
    token: bytes = b""
    size: int = 0


def connect_neighbours(limit: timedelta, later: timedelta | None = None, *, shares: bool = True) -> None:
    """Find this rank's neighbours; every rank of the default process group calls this.

    Args:
        limit: how long is waited for them now.
        later: how long is waited for each letter later (None: as long).
        shares: whether this rank may have any: what it shares counts where a process's memory is limited.
    """
    Neighbours.part()
    rank, world = dist.get_rank(), dist.get_world_size()
    with ExitStack() as opened:
        host = _host() if shares else ""
        outbox = _outbox(world) if host else None
        listener = None if outbox is None else opened.enter_context(_socket(limit))
        address, addresses = Address(), [Address()] * world
        if outbox is not None and listener is not None:
            name, token = b"\0shardlab-" + secrets.token_hex(16).encode(), secrets.token_bytes(16)
            listener.bind(name)
            listener.listen(world)
            address = Address(host, name, token, outbox.size)
        dist.all_gather_object(addresses, address)
        others = {other: each for other, each in enumerate(addresses) if other != rank and each.host == host}
        if outbox is None or listener is None or not others:
            return
        sockets, files = _connected(rank, address.token, outbox.file, listener, others, limit)
        memories = {other: SharedMemory(others[other].size, world, file) for other, file in files.items()}
        for file in (outbox.file, *files.values()):
            os.close(file)  # what is mapped stays
        Neighbours.here = Neighbours(rank, outbox, sockets, memories, later or limit)


def _host() -> str:
    """Name this host, the same for all its processes that can reach each other's sockets; empty if they share none.

    Processes share memory by Linux's files without a name. They reach each other's sockets if they are in one network
    namespace of one host, as one user. The host's processor must be one whose order of writes `shared_memory` rests on.
    """
    if not hasattr(os, "memfd_create") or platform.machine() != IN_ORDER:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino} {os.getuid()}"
    except OSError:
        return ""


def _outbox(world: int) -> Outbox | None:
    """Make this rank's memory; None where a limit of the process forbids it, such as that of files' sizes."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        return Outbox(min(physical, MAPPED // world), world)
    return None


def _socket(limit: timedelta) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(limit.total_seconds())
    return made


def _connected(
    rank: int, token: bytes, file: int, listener: socket.socket, others: dict[int, Address], limit: timedelta
) -> tuple[dict[int, socket.socket], dict[int, int]]:
    """Connect to each: the sockets, and the descriptors of their memories. Of two ranks the lower one listens."""
    sockets: dict[int, socket.socket] = {}
    files: dict[int, int] = {}
    for other, address in others.items():
        if other < rank:
            sockets[other] = made = _socket(limit)
            made.connect(address.name)
            socket.send_fds(made, [HELLO.pack(address.token, rank)], [file])
    while any(other > rank and other not in sockets for other in others):
        accepted, _ = listener.accept()
        accepted.settimeout(limit.total_seconds())
        hello, theirs, *_ = socket.recv_fds(accepted, HELLO.size, 1)
        known, other = HELLO.unpack(hello) if len(hello) == HELLO.size else (b"", -1)
        if not secrets.compare_digest(known, token):  # any process of the host may connect
            accepted.close()
            for each in theirs:
                os.close(each)
            continue
        (files[other],) = theirs
        sockets[other] = accepted
        socket.send_fds(accepted, [HELLO.pack(others[other].token, rank)], [file])
    for other in others:
        if other < rank:
            _, (files[other],), *_ = socket.recv_fds(sockets[other], HELLO.size, 1)
    return sockets, files


# Memory of one rank that the other ranks of its host read: what it sends them lies there until they have taken it.
#
# No lock guards it, but the order of each process: a tensor is written before its letter, a letter before it is
# counted, and what somebody reads is read before its byte or its count says so. Python has no barrier that would have
# other processes see that order, and a bell is no substitute: a rank looks for letters before the bell has come. x86
# has them see it: there, writes become visible in the order of the program, and none before what the program has read
# earlier (Intel's manual of software developers, volume 3A, "Memory Ordering"). ARM promises neither, so that a rank
# might read a room before the tensor is there. So ranks share memory on the processors of `IN_ORDER` alone (see
# `connecting`).


SMALLEST = 4096
"""Bytes of a room; larger ones have twice as many, four times, and so on."""

LETTERS = 2**16
"""Letters to a rank that it need not have read."""

RING = 3 + 2 * LETTERS
"""Words of the letters to a rank: three counts, and two words for each letter."""

IN_ORDER = "x86_64"
"""The processors, by Linux's name for them, on which all processes see each other's writes in order."""


class SharedMemory:
    """A memory that several processes have mapped: what nobody wrote of it takes none.

    It is a file without a name, so nothing of it stays whoever is killed. Each tensor in it lies in a room, which
    begins with a byte for every rank: a rank sets its own when it has read what is there. Before the rooms lie the
    letters to each rank, which say what there is for it: how many were written, how many it has read, how many messages
    it has begun to receive, and of the last letters, around a ring, the channel and the room.

    Attributes:
        file: its descriptor.
    """

    def __init__(self, size: int, ranks: int, file: int | None = None) -> None:
        """Make one of so many bytes, or map one that another process has made (by its descriptor).

        Args:
            size: bytes.
            ranks: of the world.
            file: which another process has made.

        Raises:
            OSError: when this system has no such memory, or none is left of what the process may map.
        """
        if file is None:
            if not hasattr(os, "memfd_create"):
                raise OSError("this system has no files in memory that have no name")
            file = os.memfd_create("shardlab")
            os.ftruncate(file, size)
        self.file = file
        mapped = mmap.mmap(file, size)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self.flags = memoryview(mapped)
        self.header_bytes = -(-ranks // 64) * 64  # tensors begin at whole lines of a cache
        self._words = self.flags[: ranks * 8 * RING].cast("Q")

    def tensor(self, room: int, like: Tensor) -> Tensor:
        """What lies in the room that begins at a byte, as a tensor of this shape and dtype."""
        begin = room + self.header_bytes
        return self.bytes[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    def write_letter(self, reader: int, channel: int, room: int) -> None:
        """Tell a rank of a room.

        Raises:
            MemoryError: when it has not read thousands of letters.
        """
        words, ring = self._words, reader * RING
        written = words[ring]
        if written - words[ring + 1] == LETTERS:
            raise MemoryError(f"{LETTERS:,} messages to rank {reader} are sent and not received")
        place = ring + 3 + 2 * (written % LETTERS)
        words[place], words[place + 1] = channel, room
        words[ring] = written + 1  # only now does the reader look at it

    def read_letters(self, reader: int) -> Iterator[tuple[int, int]]:
        """The channel and the room of each letter that this rank has not read yet."""
        words, ring = self._words, reader * RING
        while (read := words[ring + 1]) < words[ring]:
            place = ring + 3 + 2 * (read % LETTERS)
            letter = words[place], words[place + 1]
            words[ring + 1] = read + 1
            yield letter

    def note_receives(self, reader: int, count: int) -> None:
        """Let the sender know how many of its messages this reader has begun to receive."""
        self._words[reader * RING + 2] = count

    def receives(self, reader: int) -> int:
        """How many messages this reader has begun to receive."""
        return self._words[reader * RING + 2]


class Outbox(SharedMemory):
    """A rank's own: rooms that it writes into, each of which is used again when all who read it have.

    Attributes:
        size: bytes that it may hold.
    """

    def __init__(self, size: int, ranks: int) -> None:
        super().__init__(size, ranks)
        self.size, self._end = size, -(-ranks * 8 * RING // SMALLEST) * SMALLEST
        self._rooms: dict[int, list[tuple[int, Sequence[int]]]] = defaultdict(list)

    def put(self, tensor: Tensor, readers: Sequence[int]) -> int:
        """Copy a tensor into a room that nobody reads any more: the byte at which it begins.

        Raises:
            MemoryError: when more is under way than this memory can hold.
        """
        wanted = max(SMALLEST, 1 << (self.header_bytes + tensor.nbytes - 1).bit_length())
        size, room = self._free(wanted) or (wanted, self._end)
        if room == self._end:
            if room + size > self.size:
                raise MemoryError(f"a message of {tensor.nbytes:,} bytes finds no room in {self.size:,} bytes")
            self._end += size
        self._rooms[size].append((room, readers))
        for rank in readers:
            self.flags[room + rank] = 0
        self.tensor(room, tensor).copy_(tensor)
        return room

    def _free(self, least: int) -> tuple[int, int] | None:
        """Take a room of at least this size that all have read: its size, and where it begins."""
        for size in sorted(each for each in self._rooms if each >= least):
            rooms = self._rooms[size]
            for place, (room, readers) in enumerate(rooms):
                if all(self.flags[room + rank] for rank in readers):
                    del rooms[place]
                    return size, room
        return None


# How far a rank may run ahead of another one that it sends messages.


BYTES = 4 * 2**20
"""Bytes of messages that a rank may have sent before its reader begins to receive them."""

MESSAGES_AHEAD = 4
"""Messages that it may have sent so, however large they are."""


class MessageLead:
    """The messages of one rank to another, of which the last may be sent before the reader begins to receive them.

    What may go ahead is `MESSAGES`, or as many as have at most `BYTES` together. The wait of any other send lasts until
    its receive has begun, as that of each does on gloo: so what cannot hang there cannot hang here.
    """

    def __init__(self) -> None:
        self._sent = self._bytes = 0
        self._ahead: deque[int] = deque()

    def count(self, size: int) -> int:
        """Count a message of so many bytes.

        Returns:
            How many messages the reader must have begun to receive when the wait of this one's send ends.
        """
        size = max(size, SMALLEST)
        self._sent, self._bytes = self._sent + 1, self._bytes + size
        self._ahead.append(size)
        while len(self._ahead) > MESSAGES_AHEAD and self._bytes > BYTES:
            self._bytes -= self._ahead.popleft()
        return self._sent - len(self._ahead)
