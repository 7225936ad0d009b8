"""The arena of a step: memory that is taken once, and a tensor in it for each value that lies there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.check import Checked
from shardlab.check.rooms import RoomBytes, arenas_of
from shardlab.execute.shapes import Shapes
from shardlab.program import Spec


class ArenaTensors:
    """One rank's arena.

    Args:
        of: the arena of another program, whose memory this one takes, since they never run at one time; it grows if
            need be.

    Attributes:
        whole: (bytes,) uint8.
        tensors: by number of a value; every step writes them again.
        side_by_side: number of each value that lies beside others, to one tensor of all of these.
    """

    def __init__(
        self,
        checked: Checked,
        rank: int,
        shapes: Shapes,
        dtype: Callable[[Spec], torch.dtype],
        device: torch.device,
        of: ArenaTensors | None,
    ) -> None:
        specs, arena = checked.specs[rank], arenas_of(checked.program, checked.specs)[rank]
        size = RoomBytes(checked.program, checked.specs)
        # In float64 casts are to float64 as well (see `Settings`): what is cast is then wider than on the tape.
        wider = 1
        for room, _ in arena.rooms:
            for spec in (specs[number] for number in room.values):
                if size(spec):  # a bucket may have layers without parameters among others
                    wider = max(wider, -(-math.prod(shapes.shape(spec)) * dtype(spec).itemsize // size(spec)))
        bytes = wider * arena.bytes
        self.whole = torch.empty(bytes, dtype=torch.uint8, device=device) if of is None else of.whole
        if self.whole.nbytes < bytes:
            self.whole.resize_(bytes)  # the other program's tensors are where this memory goes
        self.tensors: dict[int, Tensor] = {}
        self.side_by_side: dict[int, Tensor] = {}
        for room, begin in arena.rooms:
            at = wider * begin
            for number in room.values:  # side by side by their own bytes, which are not as much wider in every room
                self.tensors[number] = self._at(at, shapes.shape(specs[number]), dtype(specs[number]))
                at += self.tensors[number].nbytes
            if len(room.values) > 1:
                length, first = sum(len(self.tensors[number]) for number in room.values), specs[room.values[0]]
                whole = self._at(wider * begin, (length,), dtype(first))
                self.side_by_side |= dict.fromkeys(room.values, whole)

    def _at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that begins at a byte; no view of `whole`, or autograd would take writing another for its change."""
        empty: Any = torch.empty(0, dtype=dtype, device=self.whole.device)
        return empty.set_(self.whole.untyped_storage(), offset // dtype.itemsize, shape)
