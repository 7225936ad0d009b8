"""Memory of one rank that the other ranks of its host read: what it sends them lies there until they have taken it."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 4096
"""Bytes of a room; larger ones have twice as many, four times, and so on."""


class SharedMemory:
    """A memory that several processes have mapped: what nobody wrote of it takes none.

    It is a file without a name, so nothing of it stays whoever is killed. Each tensor in it lies in a room, which
    begins with a byte for every rank: a rank sets its own when it has read what is there.

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
        self.head = -(-ranks // 64) * 64  # tensors begin at whole lines of a cache

    def tensor(self, room: int, like: Tensor) -> Tensor:
        """What lies in the room that begins at a byte, as a tensor of this shape and dtype."""
        begin = room + self.head
        return self.bytes[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


class Outbox(SharedMemory):
    """A rank's own: rooms that it writes into, each of which is used again when all who read it have.

    Attributes:
        size: bytes that it may hold.
    """

    def __init__(self, size: int, ranks: int) -> None:
        super().__init__(size, ranks)
        self.size, self._end = size, 0
        self._rooms: dict[int, list[tuple[int, Sequence[int]]]] = defaultdict(list)

    def put(self, tensor: Tensor, readers: Sequence[int]) -> int:
        """Copy a tensor into a room that nobody reads any more: the byte at which it begins.

        Raises:
            MemoryError: when more is under way than this memory can hold.
        """
        size = max(SMALLEST, 1 << (self.head + tensor.nbytes - 1).bit_length())
        room = self._free(size)
        if room is None:
            room, self._end = self._end, self._end + size
            if self._end > self.size:
                raise MemoryError(f"{self._end:,} bytes are sent and not yet received; there is room for {self.size:,}")
        self._rooms[size].append((room, readers))
        for rank in readers:
            self.flags[room + rank] = 0
        self.tensor(room, tensor).copy_(tensor)
        return room

    def _free(self, size: int) -> int | None:
        """Take a room of this size that all have read, the oldest first."""
        rooms = self._rooms[size]
        for place, (room, readers) in enumerate(rooms):
            if all(self.flags[room + rank] for rank in readers):
                del rooms[place]
                return room
        return None
