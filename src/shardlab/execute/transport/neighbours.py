"""Transport between neighbours: ranks of one host send each other tensors through shared memory.

gloo sends within a host as it does between hosts, by TCP: the kernel copies twice, and threads wake up on both sides.
Here the sender copies a tensor into a buffer of its shared memory, writes the buffer's offset into the queue for the
receiver in the same memory, and sends a byte on a Unix socket. The receiver reads the tensor in place. There is no
helper thread. A send returns at once. Its wait blocks only if the sender is too far ahead of the receiver (the send
window). If a rank ends, its sockets close, which the others notice at once.

A message carries a list of tensors on a channel. Each group has a channel for its collectives, and one for each tag of
its messages.

Read `Neighbours` first (send, expect, receive), then `connect_neighbours` (the connections of a host's ranks),
`SharedMemory` and `Outbox` (buffers and queues), and `SendWindow` (how far a sender may run ahead).
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
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from pathlib import Path
from threading import Condition, Lock
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

MAX_POLL_SECONDS = 2**31 // 1000 - 1
"""Longest timeout of a poll, in seconds."""

SIGNAL = b"!"
"""Byte that a rank sends on a socket after it has written a message, to wake up the reader."""

MAX_SIGNALS = 4096
"""Number of signals that are read at once."""

POLL_SECONDS = 0.001
"""Seconds between two checks by a waiting sender whether its reader has caught up, since the reader sends no signal."""


class ExpectedMessage(NamedTuple):
    """Message that this rank expects: the `number`-th, counted from 1, that `source` sends to it on a channel."""

    source: int
    channel: int
    number: int


class SharedTensors(NamedTuple):
    """Tensors of a message in its sender's memory. They stay valid until all readers have called `release`.

    Attributes:
        tensors: the tensors.
        flags: the sender's memory as bytes.
        flag: index of the byte that this rank sets when it has read the message.
    """

    tensors: list[Tensor]
    flags: memoryview
    flag: int

    def release(self) -> None:
        """Let the sender reuse the buffer."""
        self.flags[self.flag] = 1


@cache
def channel_number(*names: object) -> int:
    """Return the number of the channel with these names. It is equal in all processes, and never 0.

    There is a channel for the collectives of each process group, and one for the messages of each tag in a group.
    """
    return int.from_bytes(blake2b(repr(names).encode(), digest_size=8).digest(), "little") or 1


class Neighbours:
    """Connections of this rank to its neighbours.

    Attributes:
        current: connections of this process; None if it has no neighbours, or is not connected to them yet.

    Args:
        rank: number of this rank in the default process group.
        outbox: shared memory into which this rank writes messages.
        sockets: connected Unix socket of each neighbour.
        memories: shared memory that each neighbour writes, mapped into this process.
        limit: time after which waiting for a message fails.
    """

    current: ClassVar[Neighbours | None] = None

    def __init__(
        self,
        rank: int,
        outbox: Outbox,
        sockets: dict[int, socket.socket],
        memories: dict[int, SharedMemory],
        limit: timedelta,
    ) -> None:
        self.rank, self._outbox, self._sockets, self._memories = rank, outbox, sockets, memories
        self._limit = min(limit.total_seconds(), MAX_POLL_SECONDS)
        self._expected: dict[tuple[int, int], int] = defaultdict(int)
        self._arrived: dict[tuple[int, int], int] = defaultdict(int)
        self._offsets: dict[ExpectedMessage, int] = {}
        self._windows: dict[tuple[int, int], SendWindow] = defaultdict(SendWindow)
        self._ranks = {connection.fileno(): other for other, connection in sockets.items()}
        self._ended_ranks: set[int] = set()
        self._condition, self._is_reading, self._send_lock = Condition(), False, Lock()
        self._poll = select.poll()
        for connection in sockets.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)

    def __contains__(self, rank: int) -> bool:
        return rank in self._sockets

    @classmethod
    def among(cls, members: Sequence[int]) -> Neighbours | None:
        """Return this process's connections if it and all other members of a group are neighbours, else None."""
        current = cls.current
        if current is None or len(members) < 2 or any(rank not in current for rank in members if rank != current.rank):
            return None
        return current

    @classmethod
    def memories(cls) -> list[Tensor]:
        """List all memory that neighbours share. Pages that were never written take no memory."""
        return (
            []
            if cls.current is None
            else [memory.bytes for memory in (cls.current._outbox, *cls.current._memories.values())]
        )

    def send_point_to_point(self, tensors: Sequence[Tensor], to: int, channel: int) -> int:
        """Send tensors to one rank, and count the message in the channel's send window.

        Returns:
            Number of messages that the receiver must have begun to receive before this rank may continue (see
            `wait_for_receives`).
        """
        self.send(tensors, [to], channel)
        with self._send_lock:
            return self._windows[to, channel].count(message_bytes(tensors))

    def wait_for_receives(self, reader: int, channel: int, count: int) -> None:
        """Wait until a rank has begun to receive `count` of this rank's messages on a channel.

        Raises:
            RuntimeError: if the rank has ended, or has not begun within the limit.
        """
        if self._outbox.receives(reader, channel) >= count:
            return
        end = time.monotonic() + self._limit
        with self._condition:
            while self._outbox.receives(reader, channel) < count:
                self._check_connected(reader)
                if not self._wait_for_signal(POLL_SECONDS) and time.monotonic() > end:
                    raise RuntimeError(f"Timed out waiting for rank {reader}: it read nothing for {self._limit:g} s")

    def send(self, tensors: Sequence[Tensor], to: Sequence[int], channel: int, *, keeps: bool = False) -> int:
        """Copy tensors into shared memory for some ranks, and return at once. The tensors may change afterwards.

        Args:
            tensors: the tensors.
            to: ranks that receive them.
            channel: number of the channel.
            keeps: whether this rank reads the copy too (see `kept_copy`). The copy is then valid until this rank
                releases it.

        Returns:
            Offset of the copy in this rank's memory.

        Raises:
            RuntimeError: if one of the ranks has ended.
            MemoryError: if the memory has no space left for tensors in flight.
        """
        outbox = self._outbox
        offset = outbox.put(tensors, [*to, self.rank] if keeps else to)
        for rank in to:
            with self._send_lock:
                outbox.write_message(rank, channel, offset)
            try:
                self._sockets[rank].send(SIGNAL)
            except BlockingIOError:  # the reader has enough unread signals
                pass
            except OSError as error:
                if outbox.unread(rank):  # otherwise the rank has read this message before it ended
                    raise RuntimeError(f"Connection closed by peer: rank {rank} has gone ({error})") from None
        return offset

    def kept_copy(self, offset: int, like: Sequence[Tensor]) -> SharedTensors:
        """Return the copy of tensors that this rank has sent with `keeps`, by the offset that `send` returned."""
        return self._shared(self._outbox, offset, like)

    def expect_point_to_point(self, source: int, channel: int) -> ExpectedMessage:
        """Begin to receive the next message of a rank on a channel for messages to a single rank.

        Raises:
            RuntimeError: if the rank uses too many channels for messages to this rank.
        """
        expected = self.expect(source, channel)
        self._memories[source].note_receives(self.rank, channel, expected.number)
        return expected

    def expect(self, source: int, channel: int) -> ExpectedMessage:
        """Expect the next message of a rank on a channel, after those that are already expected."""
        self._expected[source, channel] += 1
        return ExpectedMessage(source, channel, self._expected[source, channel])

    def have_arrived(self, expected: Iterable[ExpectedMessage]) -> bool:
        """Return whether all these messages have arrived, without waiting."""
        with self._condition:
            for message in expected:
                self._read_messages(message.source)
                if message not in self._offsets:
                    return False
        return True

    def receive(self, expected: ExpectedMessage, like: Sequence[Tensor]) -> SharedTensors:
        """Wait for an expected message, whose tensors have the shapes and dtypes of `like`.

        Raises:
            RuntimeError: if its sender has ended, or nothing arrives within the limit.
        """
        with self._condition:
            self._read_messages(expected.source)
            while expected not in self._offsets:
                self._check_connected(expected.source)
                if not self._wait_for_signal(self._limit):
                    reason = f"nothing arrived within {self._limit:g} s"
                    raise RuntimeError(f"Timed out waiting for rank {expected.source}: {reason}")
            return self._shared(self._memories[expected.source], self._offsets.pop(expected), like)

    def _shared(self, memory: SharedMemory, offset: int, like: Sequence[Tensor]) -> SharedTensors:
        return SharedTensors(memory.tensors(offset, like), memory.flags, offset + self.rank)

    @classmethod
    @contextmanager
    def not_used(cls) -> Generator[None]:
        """Let transports that are created inside of the context use torch.distributed although there are neighbours."""
        neighbours, cls.current = cls.current, None
        try:
            yield
        finally:
            cls.current = neighbours

    @classmethod
    def part(cls) -> None:
        """Disconnect. Later sends use torch.distributed. Neighbours can still read messages that were sent before."""
        if cls.current is not None:
            for connection in cls.current._sockets.values():
                connection.close()
        cls.current = None

    def _check_connected(self, rank: int) -> None:
        if rank in self._ended_ranks:
            raise RuntimeError(f"Connection closed by peer: rank {rank} has gone")

    def _wait_for_signal(self, seconds: float) -> bool:
        """Wait for a signal for some seconds, and read the messages of the ranks that sent one.

        While ops are timed, each communication has a thread that waits for it. One of these threads reads for all.

        Returns:
            Whether a signal arrived.
        """
        if self._is_reading:
            return self._condition.wait(seconds)
        self._is_reading = True
        self._condition.release()
        try:
            signalled = self._poll.poll(1000 * seconds)
        finally:
            self._condition.acquire()
            self._is_reading = False
            self._condition.notify_all()
        for file, _ in signalled:
            rank = self._ranks[file]
            has_gone = not self._drain_signals(rank)
            self._read_messages(rank)
            if has_gone:
                self._ended_ranks.add(rank)
                self._poll.unregister(file)
        return bool(signalled)

    def _drain_signals(self, rank: int) -> bool:
        """Read all signals of a rank. Return False if the rank has ended."""
        while True:
            try:
                signals = self._sockets[rank].recv(MAX_SIGNALS)
                if len(signals) < MAX_SIGNALS:
                    return bool(signals)
            except BlockingIOError:
                return True
            except ConnectionResetError:  # the rank has ended without reading all signals
                continue

    def _read_messages(self, rank: int) -> None:
        """Read a rank's messages."""
        for channel, offset in self._memories[rank].read_messages(self.rank):
            self._arrived[rank, channel] += 1
            self._offsets[ExpectedMessage(rank, channel, self._arrived[rank, channel])] = offset


HELLO = struct.Struct("=16sI")
"""First packet of a connection: the receiver's token and the sender's rank, with the sender's file descriptor."""

MAX_MAPPED_BYTES = 2**46
"""Largest total size in bytes of all ranks' shared memories: half of the address space of a 64-bit process."""


class Address(NamedTuple):
    """Address at which other ranks connect to a rank.

    Attributes:
        host: name of its host, equal for ranks that can share memory; empty for a rank that does not share memory.
        name: name of the Unix socket on which it listens.
        token: secret that a connecting process sends to prove that it has received this address.
        size: size in bytes of the memory that the rank shares.
    """

    host: str = ""
    name: bytes = b""
    token: bytes = b""
    size: int = 0


def connect_neighbours(limit: timedelta, later: timedelta | None = None, *, shares: bool = True) -> None:
    """Connect this rank to its neighbours. Every rank of the default process group calls this.

    Args:
        limit: time to wait for the connections.
        later: time to wait for each message afterwards (None: `limit`).
        shares: whether this rank may share memory. Shared memory counts towards a limit on a process's memory.
    """
    Neighbours.part()
    rank, world = dist.get_rank(), dist.get_world_size()
    with _open_socket(limit) as listener:
        host = _host() if shares else ""
        outbox = _outbox(world) if host else None
        address, addresses = Address(), [Address()] * world
        if outbox is not None:
            name, token = b"\0shardlab-" + secrets.token_hex(16).encode(), secrets.token_bytes(16)
            listener.bind(name)
            listener.listen(world)
            address = Address(host, name, token, outbox.size)
        dist.all_gather_object(addresses, address)
        others = {other: peer for other, peer in enumerate(addresses) if other != rank and peer.host == host}
        if outbox is None or not others:
            return
        sockets, files = _connect(rank, address.token, outbox.file, listener, others, limit)
        memories = {other: SharedMemory(others[other].size, world, file) for other, file in files.items()}
        for file in (outbox.file, *files.values()):
            os.close(file)  # mappings remain valid
        Neighbours.current = Neighbours(rank, outbox, sockets, memories, later or limit)


def _host() -> str:
    """Return a name of this host that is equal for all processes that can connect; empty without shared memory.

    Processes share memory by Linux's anonymous files (memfd). They can connect if they are in one network namespace of
    one host, as one user. The processor must keep the order of writes (`ORDERED_PROCESSOR`).
    """
    if not hasattr(os, "memfd_create") or platform.machine() != ORDERED_PROCESSOR:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino} {os.getuid()}"
    except OSError:
        return ""


def _outbox(world: int) -> Outbox | None:
    """Create this rank's shared memory; None if a limit of the process forbids it, such as the limit on file sizes."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        return Outbox(min(physical, MAX_MAPPED_BYTES // world // 4096 * 4096), world)
    return None


def _open_socket(limit: timedelta) -> socket.socket:
    new_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new_socket.settimeout(limit.total_seconds())
    return new_socket


def _connect(
    rank: int, token: bytes, file: int, listener: socket.socket, others: dict[int, Address], limit: timedelta
) -> tuple[dict[int, socket.socket], dict[int, int]]:
    """Connect to each rank of `others`. Of two ranks, the lower one listens.

    Returns:
        The socket of each other rank, and the file descriptor of its memory.
    """
    sockets: dict[int, socket.socket] = {}
    files: dict[int, int] = {}
    for other, address in others.items():
        if other < rank:
            sockets[other] = connection = _open_socket(limit)
            connection.connect(address.name)
            socket.send_fds(connection, [HELLO.pack(address.token, rank)], [file])
    while any(other > rank and other not in sockets for other in others):
        accepted, _ = listener.accept()
        accepted.settimeout(limit.total_seconds())
        hello, peer_files, *_ = socket.recv_fds(accepted, HELLO.size, 1)
        received_token, other = HELLO.unpack(hello) if len(hello) == HELLO.size else (b"", -1)
        if not secrets.compare_digest(received_token, token):  # any process of the host may connect
            accepted.close()
            for peer_file in peer_files:
                os.close(peer_file)
            continue
        (files[other],) = peer_files
        sockets[other] = accepted
        socket.send_fds(accepted, [HELLO.pack(others[other].token, rank)], [file])
    for other in others:
        if other < rank:
            _, (files[other],), *_ = socket.recv_fds(sockets[other], HELLO.size, 1)
    return sockets, files


MIN_BUFFER_BYTES = 4096
"""Size in bytes of the smallest buffer. Larger buffers have 2, 4, 8, ... times this size."""

QUEUE_LENGTH = 2**16
"""Largest number of unread messages to a rank."""

MAX_CHANNELS = 256
"""Largest number of channels (pairs of a process group and a tag) for messages from one rank to another."""

RING = 2 + 2 * MAX_CHANNELS
"""Index of the word of a queue at which the ring of messages begins."""

QUEUE_WORDS = RING + 2 * QUEUE_LENGTH
"""Length of the queue to a rank in 64-bit words: two counts, two words for each channel, two for each message."""

ORDERED_PROCESSOR = "x86_64"
"""Linux's name of the processor on which processes see each other's writes in order (see `SharedMemory`)."""


class SharedMemory:
    """Memory of one rank that the other ranks of its host read.

    It is an anonymous file, so nothing is left behind if processes are killed. It begins with a queue of messages to
    each rank: two counts (messages written, messages read), then a table of (channel, messages on it that the reader
    has begun to receive), then a ring of (channel, offset of a buffer). Buffers with tensors follow. Each begins with a
    byte for every rank, which that rank sets when it has read the tensors. Pages that were never written take no
    memory.

    There is no lock. Correctness depends on the order of memory accesses: a tensor is written before its message, a
    message before it is counted, and a tensor is read before its byte or count says so. Python has no memory barrier,
    and a signal is no substitute, because a rank may look for messages before a signal has arrived. x86 keeps this
    order: writes become visible in program order, and none before earlier reads (Intel's manual for software
    developers, volume 3A, "Memory Ordering"). ARM does not, so a rank could read a buffer before the tensor is there.
    Therefore ranks share memory only on `ORDERED_PROCESSOR`.

    Attributes:
        file: file descriptor of the memory.
    """

    def __init__(self, size: int, ranks: int, file: int | None = None) -> None:
        """Create a shared memory, or map one that another process has created.

        Args:
            size: size in bytes.
            ranks: number of ranks of the world.
            file: descriptor of the memory that another process has created (None: create one).

        Raises:
            OSError: if this system has no anonymous files, or the process may not map so much memory.
        """
        if file is None:
            if not hasattr(os, "memfd_create"):
                raise OSError("this system has no anonymous files in memory")
            file = os.memfd_create("shardlab")
            os.ftruncate(file, size)
        self.file = file
        mapped = mmap.mmap(file, size)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._elements: dict[torch.dtype, Tensor] = {}
        self.flags = memoryview(mapped)
        self.header_bytes = _aligned(ranks)
        self._words = self.flags[: ranks * 8 * QUEUE_WORDS].cast("Q")

    def tensors(self, offset: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in the buffer at an offset, with the shapes and dtypes of `like`."""
        begin, tensors = offset + self.header_bytes, list[Tensor]()
        for example in like:
            elements = self._elements.get(example.dtype)
            if elements is None:
                elements = self._elements[example.dtype] = self.bytes.view(example.dtype)
            first = begin // example.itemsize
            flat = elements[first : first + example.numel()]
            tensors.append(flat if example.dim() == 1 else flat.view(example.shape))
            begin += _aligned(example.nbytes)
        return tensors

    def write_message(self, reader: int, channel: int, offset: int) -> None:
        """Append a message to a rank's queue. The tensors of the message are in the buffer at `offset`.

        Raises:
            MemoryError: if the queue is full.
        """
        words, queue = self._words, reader * QUEUE_WORDS
        count = words[queue]
        if count - words[queue + 1] == QUEUE_LENGTH:
            raise MemoryError(f"{QUEUE_LENGTH:,} messages to rank {reader} are sent and not received")
        place = queue + RING + 2 * (count % QUEUE_LENGTH)
        words[place], words[place + 1] = channel, offset
        words[queue] = count + 1  # the reader looks at the message only after this write

    def read_messages(self, reader: int) -> Iterator[tuple[int, int]]:
        """Yield channel and buffer offset of each message that the rank `reader` has not read yet."""
        words, queue = self._words, reader * QUEUE_WORDS
        while (read := words[queue + 1]) < words[queue]:
            place = queue + RING + 2 * (read % QUEUE_LENGTH)
            message = words[place], words[place + 1]
            words[queue + 1] = read + 1
            yield message

    def unread(self, reader: int) -> int:
        """Return the number of messages that the rank `reader` has not read yet."""
        queue = reader * QUEUE_WORDS
        return self._words[queue] - self._words[queue + 1]

    def note_receives(self, reader: int, channel: int, count: int) -> None:
        """Store how many of the sender's messages on a channel the rank `reader` has begun to receive.

        Raises:
            RuntimeError: if the table of channels is full.
        """
        words = self._words
        for place in self._places(reader):
            if words[place] in (channel, 0):
                words[place + 1] = count
                words[place] = channel
                return
        raise RuntimeError(
            f"messages between two ranks use more than {MAX_CHANNELS} pairs of a group and a tag; use fewer tags"
        )

    def receives(self, reader: int, channel: int) -> int:
        """Return how many of the sender's messages on a channel the rank `reader` has begun to receive."""
        words = self._words
        for place in self._places(reader):
            if words[place] == channel:
                return words[place + 1]
            if not words[place]:
                break
        return 0

    def _places(self, reader: int) -> range:
        return range(reader * QUEUE_WORDS + 2, reader * QUEUE_WORDS + RING, 2)


def _aligned(size: int) -> int:
    """Return the bytes of a buffer that a tensor of `size` bytes uses. Tensors are aligned to cache lines."""
    return -(-size // 64) * 64


def message_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a buffer that a message with these tensors uses, without the header."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


class Outbox(SharedMemory):
    """Shared memory that this rank writes. A buffer is reused once all its readers have released it.

    Attributes:
        size: size in bytes.
    """

    def __init__(self, size: int, ranks: int) -> None:
        super().__init__(size, ranks)
        self.size, self._end = size, -(-ranks * 8 * QUEUE_WORDS // MIN_BUFFER_BYTES) * MIN_BUFFER_BYTES
        self._buffers: dict[int, list[tuple[int, Sequence[int]]]] = defaultdict(list)
        self._lock = Lock()

    def put(self, tensors: Sequence[Tensor], readers: Sequence[int]) -> int:
        """Copy tensors into a free buffer and return the buffer's offset. Several threads may call this.

        Raises:
            MemoryError: if the tensors in flight leave no space.
        """
        length = message_bytes(tensors)
        min_size = max(MIN_BUFFER_BYTES, 1 << (self.header_bytes + length - 1).bit_length())
        with self._lock:
            size, offset = self._take_free(min_size) or (min_size, self._end)
            if offset == self._end:
                if offset + size > self.size:
                    raise MemoryError(
                        f"a message of {length:,} bytes does not fit into the {self.size:,} bytes of shared memory"
                    )
                self._end += size
            for rank in readers:
                self.flags[offset + rank] = 0
            self._buffers[size].append((offset, readers))
        for place, tensor in zip(self.tensors(offset, tensors), tensors, strict=True):
            place.copy_(tensor)
        return offset

    def _take_free(self, min_size: int) -> tuple[int, int] | None:
        """Remove a released buffer of at least `min_size` bytes, and return size and offset; None if there is none."""
        for size in sorted(buffer_size for buffer_size in self._buffers if buffer_size >= min_size):
            buffers = self._buffers[size]
            for place, (offset, readers) in enumerate(buffers):
                if all(self.flags[offset + rank] for rank in readers):
                    del buffers[place]
                    return size, offset
        return None


WINDOW_BYTES = 4 * 2**20
"""Bytes that a rank may send on a channel before its reader begins to receive them."""

WINDOW_MESSAGES = 4
"""Messages that a rank may send on a channel before its reader begins to receive them, whatever their size."""


class SendWindow:
    """Send window of a channel between two ranks: a limit on the messages that the reader has not begun to receive.

    The window has `WINDOW_MESSAGES` messages, or more if their total size is at most `WINDOW_BYTES`. The wait of a send
    beyond the window ends when the reader has begun enough receives. On gloo, every send waits for its receive, so a
    program that cannot hang on gloo cannot hang here.
    """

    def __init__(self) -> None:
        self._sent_count = self._bytes = 0
        self._ahead: deque[int] = deque()

    def count(self, size: int) -> int:
        """Add a message of `size` bytes to the window.

        Returns:
            Number of messages that the reader must have begun to receive before the wait of this send may end.
        """
        size = max(size, MIN_BUFFER_BYTES)
        self._sent_count, self._bytes = self._sent_count + 1, self._bytes + size
        self._ahead.append(size)
        while len(self._ahead) > WINDOW_MESSAGES and self._bytes > WINDOW_BYTES:
            self._bytes -= self._ahead.popleft()
        return self._sent_count - len(self._ahead)
