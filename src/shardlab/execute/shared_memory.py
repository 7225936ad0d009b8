"""Memory of one rank that the other ranks of its host read: what it sends them lies there until they have taken it.

No lock guards it, but the order of each process: a tensor is written before its letter, a letter before it is counted,
and what somebody reads is read before its byte or its count says so. Python has no barrier that would have other
processes see that order, and a bell is no substitute: a rank looks for letters before the bell has come. x86 has them
see it: there, writes become visible in the order of the program, and none before what the program has read earlier
(Intel's manual of software developers, volume 3A, "Memory Ordering"). ARM promises neither, so that a rank might read
a room before the tensor is there. So ranks share memory on the processors of `IN_ORDER` alone (see `connecting`).
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

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
