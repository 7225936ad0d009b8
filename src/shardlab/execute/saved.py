"""What autograd keeps of a layer's forward pass, where the executor must have a hand in it.

The weight that a FORWARD used may be freed before its BACKWARD and gathered again, elsewhere. Autograd would keep it
alive; instead, whatever it saves of the weight's buffer is kept as a place (size, stride, offset) and looked up in the
buffer that BACKWARD is given. And between the two halves of a split backward pass, only what the second one reads stays
(torch.autograd.graph.saved_tensors_hooks does both).
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """A tensor that autograd saved, as its place in the weight's buffer."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Saved:
    """The tensors that autograd saves, in the order in which it does, which is the same for every pass of a layer.

    Attributes:
        flat: the weight's buffer now; None when it may be gone.
        read: numbers of those that were read since it was cleared.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat
        self._begin, self._bytes = flat.data_ptr(), flat.nbytes  # while the layer runs forward
        self.read: set[int] = set()
        self._unknown = flat.new_full((), math.nan)
        self._tensors: list[Tensor | View | None] = []

    def pack(self, tensor: Tensor) -> int:
        """Autograd saves a tensor: its number."""
        offset = tensor.data_ptr() - self._begin
        if 0 <= offset < self._bytes:
            self._tensors.append(View(tensor.shape, tensor.stride(), offset // tensor.itemsize))
        else:
            self._tensors.append(tensor.detach())  # or it would keep the graph, which keeps this, for ever
        return len(self._tensors) - 1

    def unpack(self, number: int) -> Tensor:
        """Autograd reads a tensor."""
        self.read.add(number)
        kept = self._tensors[number]
        assert kept is not None, "every pass of a layer reads the same"
        if isinstance(kept, Tensor):
            return kept
        if self.flat is None:  # an op hands the weight on, but no parameter's gradient depends on it
            return self._unknown.expand(kept.size)
        return self.flat.as_strided(kept.size, kept.stride, self.flat.storage_offset() + kept.offset)

    def keep_only(self, numbers: Set[int]) -> None:
        """Let the others go."""
        self._tensors = [kept if number in numbers else None for number, kept in enumerate(self._tensors)]
