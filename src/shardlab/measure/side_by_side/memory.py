"""Peak memory of a contender: on a CPU all storages that torch makes for it, on a GPU what the allocator gives it.

Both sides are measured so from when they are made, so that what the process had before does not count; neither do
buffers of gloo's and NCCL's own.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlab.execute.neighbours import Neighbours
from shardlab.measure.side_by_side.contender import Contender

Measured = tuple[Contender, list[Tensor], int]
"""A contender, what its first steps gave, and the most bytes during the last of them."""


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage that an op makes while this is entered, for as long as the storage lives.

    As torch's own MemTracker does, which a module that is called twice in a step, as a pipeline's is, makes fail.

    Memory that neighbours share is the messages', as buffers of gloo's are, and is not counted.

    Attributes:
        live: bytes now.
        peak: the most bytes since somebody set it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._shared = {_key(memory.untyped_storage()) for memory in Neighbours.memories()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it calls ops on its local part, which come here
            return NotImplemented
        made = func(*args, **kwargs or {})
        if active_fake_mode() is None:
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor):
                    self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = _key(storage)
        if key in self._shared:
            return
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._resized, key, None)
        self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int | None) -> None:
        self.live += (size or 0) - self._sizes.pop(key)
        if size is not None:
            self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    @contextmanager
    def tracking(self) -> Generator[None]:
        """Within this, storages are tracked, also those whose size changes without an op."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._see(storage)

        with patch.object(torch.UntypedStorage, "resize_", resize_), self:
            yield


def _key(storage: torch.UntypedStorage) -> int:
    """The address of a storage in C++: equal for every Python object that stands for the same storage."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def made_and_measured(make: Callable[[], Contender], steps: int, device: torch.device) -> Measured:
    """Make a contender and have it train some steps, the last of which is measured."""
    return (_by_allocator if device.type == "cuda" else _by_storages)(make, steps)


def _by_storages(make: Callable[[], Contender], steps: int) -> Measured:
    storages = LiveStorages()
    with storages.tracking():
        contender = make()
        losses = [contender.step() for _ in range(steps - 1)]
        storages.peak = storages.live
        losses.append(contender.step())
    return contender, losses, storages.peak


def _by_allocator(make: Callable[[], Contender], steps: int) -> Measured:
    base = torch.cuda.memory_allocated()
    contender = make()
    losses = [contender.step() for _ in range(steps - 1)]
    torch.cuda.reset_peak_memory_stats()
    losses.append(contender.step())
    return contender, losses, torch.cuda.max_memory_allocated() - base
