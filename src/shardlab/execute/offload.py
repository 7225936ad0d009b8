"""Offloading: memory on the host or on disk, and copies to and from it that overlap with computation."""

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
"""Largest size in bytes of a copy that takes less time than waking a thread."""


def storage_at(place: str, size: int, device: torch.device) -> torch.UntypedStorage:
    """Allocate `size` bytes on the device (`place` ""), in the host's memory (pinned if there is a GPU), or in a file.

    The file is temporary, in the folder TMPDIR, and is deleted with the storage.

    Raises:
        OSError: if the file cannot be made, or the disk is full.
    """
    if place == DISK:
        number, name = tempfile.mkstemp(prefix="shardlab-")
        try:
            _reserve(number, max(1, size))
            return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(name, shared=True, nbytes=size))
        finally:
            os.close(number)
            os.unlink(name)  # the file exists as long as it is mapped
    if not place:
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").untyped_storage()


def tensor_at(place: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor on the device, in the host's memory or in a file. `storage_at` explains `place`."""
    size = torch.Size(shape)
    return _view_of(storage_at(place, size.numel() * dtype.itemsize, device), dtype).view(size)


def copy(target: Tensor, source: Tensor) -> Wait:
    """Start to copy a tensor between device, host and disk: to or from a GPU in a separate stream, else in a thread."""
    device = target.device if target.is_cuda else source.device
    if device.type != "cuda":
        if target.nbytes < SMALL:
            target.copy_(source)
            return _do_nothing
        return _copy_thread().submit(target.copy_, source.detach()).result
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    event = stream.record_event()

    def wait() -> None:
        event.synchronize()  # the host may read the copy afterwards
        torch.cuda.current_stream(device).wait_event(event)

    return wait


class OffloadableTensors:
    """Tensors whose memory can be offloaded and reloaded, while the tensors and their views stay valid.

    Memory on the host or disk is kept after a reload, because files and pinned memory are slow to allocate.
    """

    def __init__(self) -> None:
        self._copies: dict[torch.UntypedStorage, torch.UntypedStorage] = {}
        self._is_offloaded = False

    def offload(self, tensors: Sequence[Tensor], allocate: Callable[[int], torch.UntypedStorage]) -> Wait:
        """Start to copy some tensors to memory from `allocate`. The returned wait frees their memory on the device."""
        if self._is_offloaded:
            return _do_nothing
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage not in self._copies:
                self._copies[storage] = allocate(storage.nbytes())
        copies = [(storage, copy(_bytes(backup), _bytes(storage))) for storage, backup in self._copies.items()]
        self._is_offloaded = True

        def wait() -> None:
            for storage, wait_for_copy in copies:
                wait_for_copy()
                storage.resize_(0)

        return wait

    def reload(self) -> Wait:
        """Start to copy all offloaded tensors back to the device."""
        if not self._is_offloaded:
            return _do_nothing
        self._is_offloaded = False
        copies: list[Wait] = []
        for storage, backup in self._copies.items():
            storage.resize_(backup.nbytes())
            copies.append(copy(_bytes(storage), _bytes(backup)))

        def wait() -> None:
            for wait_for_copy in copies:
                wait_for_copy()

        return wait

    def current(self, tensor: Tensor) -> Tensor:
        """Return a tensor where it is now: the tensor itself, or a view of its offloaded copy."""
        backup = self._copies.get(tensor.untyped_storage()) if self._is_offloaded else None
        if backup is None:
            return tensor
        return _view_of(backup, tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _reserve(number: int, size: int) -> None:
    """Reserve a file's disk space, because a full disk would otherwise kill the process later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
        return
    zeros = memoryview(bytes(min(size, 2**20)))  # macOS lacks the call, and sparse files reserve nothing
    while size:
        size -= os.write(number, zeros[:size])


def _view_of(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """View a whole storage as a tensor, (elements,)."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return _view_of(storage, torch.uint8)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _copy_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "copies")


def _do_nothing() -> None:
    """Do nothing: the wait of a copy that has already ended."""
