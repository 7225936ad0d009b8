"""Memory beside the device, and copies to it and from it that go on while the device computes."""

# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import cast

import torch
from torch import Tensor

from shardlab.execute.transport.collectives import Wait
from shardlab.language.rules.refusals import DISK

SMALL = 2**16
"""Bytes that are copied sooner than a thread wakes up."""


def storage_at(place: str, size: int, device: torch.device) -> torch.UntypedStorage:
    """So many bytes in a place ("": on the device): of the host's memory, pinned where a GPU copies, or of a file.

    The file ends with them. It is among the temporary ones: in the folder that TMPDIR names, else usually in /tmp.

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
    if not place:
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
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
    size = torch.Size(shape)
    return _view_of(storage_at(place, size.numel() * dtype.itemsize, device), dtype).view(size)


def _view_of(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """All of a storage, (elements,)."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return _view_of(storage, torch.uint8)


def copy(into: Tensor, given: Tensor) -> Wait:
    """Start to copy from one place to another: on a GPU in a stream of its own, else in a thread."""
    device = into.device if into.is_cuda else given.device
    if device.type != "cuda":
        if into.nbytes < SMALL:
            into.copy_(given)
            return _nothing
        return _copy_thread().submit(into.copy_, given.detach()).result
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


@cache
def _copy_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "copies")


def _nothing() -> None:
    """A copy that is over when it is issued."""


class Parked:
    """Tensors whose memory is elsewhere for a while; they and all their views stay as they are.

    Room elsewhere is kept from one time to the next, since a file, or pinned memory, takes long to make.
    """

    def __init__(self) -> None:
        self._rooms: dict[torch.UntypedStorage, torch.UntypedStorage] = {}
        self._away = False

    def offload(self, tensors: Sequence[Tensor], room: Callable[[int], torch.UntypedStorage]) -> Wait:
        """Start to copy the memory of some tensors elsewhere, which is freed once that is waited for."""
        if self._away:
            return _nothing
        for here in (tensor.untyped_storage() for tensor in tensors):
            if here not in self._rooms:
                self._rooms[here] = room(here.nbytes())
        leaving = [(here, copy(_bytes(there), _bytes(here))) for here, there in self._rooms.items()]
        self._away = True

        def wait() -> None:
            for here, each in leaving:
                each()
                here.resize_(0)

        return wait

    def reload(self) -> Wait:
        """Start to bring all of it back."""
        if not self._away:
            return _nothing
        self._away = False
        copies: list[Wait] = []
        for here, there in self._rooms.items():
            here.resize_(there.nbytes())
            copies.append(copy(_bytes(here), _bytes(there)))

        def wait() -> None:
            for each in copies:
                each()

        return wait

    def lying(self, tensor: Tensor) -> Tensor:
        """A tensor where it lies now: itself, or a view of its copy elsewhere."""
        there = self._rooms.get(tensor.untyped_storage()) if self._away else None
        if there is None:
            return tensor
        return _view_of(there, tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
