"""Memory beside the device, and copies to it and from it that go on while the device computes."""

# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from shardlab.execute.communicator import Wait
from shardlab.rules.place import DISK


def storage_at(place: str, size: int, device: torch.device) -> torch.UntypedStorage:
    """So many bytes in a place: of the host's memory, pinned where a GPU copies; or of a file that ends with them.

    The file is among the temporary ones: in the folder that TMPDIR names, else usually in /tmp.

    Raises:
        OSError: when the file cannot be made, or has no room.
    """
    if place == DISK:
        number, name = tempfile.mkstemp(prefix="shardlab-")
        try:
            _reserve(number, max(1, size))
            return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(name, shared=True, nbytes=size))
        finally:
            os.close(number)
            os.unlink(name)  # the file stays as long as it is mapped
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").untyped_storage()


def _reserve(number: int, size: int) -> None:
    """Have a file take its room on the disk now: a disk that is full later would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
        return
    zeros = memoryview(bytes(min(size, 2**20)))  # macOS has no such call; holes take no room, so bytes are written
    while size:
        size -= os.write(number, zeros[:size])


def tensor_at(place: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a tensor in a place, as `storage_at` makes it."""
    empty = torch.empty(0, dtype=dtype)
    size = torch.Size(shape)
    return empty.set_(storage_at(place, size.numel() * dtype.itemsize, device)).view(size)


def copy(into: Tensor | torch.UntypedStorage, given: Any, device: torch.device) -> Wait:
    """Start to copy between a device and a place beside it; on a GPU, on a stream of its own."""
    if device.type != "cuda":
        into.copy_(given)
        return _nothing
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        into.copy_(given, non_blocking=True)
    event = stream.record_event()

    def wait() -> None:
        event.synchronize()  # the host may read what has come
        torch.cuda.current_stream(device).wait_event(event)

    return wait


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _nothing() -> None:
    """A copy that is over when it is issued."""


class Parked:
    """Tensors of a device whose memory is elsewhere for a while; they and all their views stay as they are."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def offload(self, tensors: Sequence[Tensor], room: Callable[[int], torch.UntypedStorage]) -> None:
        """Copy the memory of some tensors into new room, and free it."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        for here in storages.values():
            there = room(here.nbytes())
            there.copy_(here)
            self._away.append((here, there))
            here.resize_(0)

    @contextmanager
    def back(self) -> Generator[None]:
        """Have all of it here for a while; what is then changed is changed there too."""
        away = list(self._away)
        self.reload()
        try:
            yield
        finally:
            for here, there in away:
                there.copy_(here)
                here.resize_(0)
            self._away = away

    def reload(self) -> None:
        """Bring all of it back."""
        for here, there in self._away:
            here.resize_(there.nbytes())
            here.copy_(there)
        self._away.clear()
