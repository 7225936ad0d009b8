"""The stretch of an outline that is being written: its entries, and the bytes that are held meanwhile."""

from __future__ import annotations

import math

from shardlab.predict.outline_entries import Compute, Entry, OutlinedStep
from shardlab.predict.outline_values import OutlineValue
from shardlab.predict.passes import Crest
from shardlab.program import OpKind
from shardlab.timeline.memory import CATEGORIES


class OpenStep:
    """Entries and bytes since a stretch began.

    Attributes:
        entries: in order.
        held, total: bytes held beyond what was held then, by category and in all.
        peak: the most of these that was noted.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.entries: list[Entry] = []
        self.held = [0] * len(CATEGORIES)
        self.total = 0
        self._crest: Crest | None = None
        self.peak = -math.inf

    def stretch(self) -> OutlinedStep:
        """End the present stretch and begin another."""
        ended = OutlinedStep(self.entries, self.total, tuple(self.held), self._crest)
        self._begin()
        return ended

    def hold(self, value: OutlineValue) -> None:
        self.held[value.slot] += value.room
        self.total += value.room

    def drop(self, value: OutlineValue) -> None:
        self.held[value.slot] -= value.room
        self.total -= value.room

    def note(self, op: OpKind, layer: int) -> None:
        """Compare what is held during an op with the stretch's peak."""
        if self.total > self.peak:
            self.peak, self._crest = self.total, Crest(self.total, tuple(self.held), op, layer)

    def run(self, seconds: float) -> None:
        """Compute for so long."""
        if not seconds:
            return
        last = self.entries[-1] if self.entries else None
        if isinstance(last, Compute):
            last.seconds += seconds
        else:
            self.entries.append(Compute(seconds))

    def rise(self, crest: Crest, layer: int) -> None:
        """Note a new peak: the most that a pass holds, beyond what is held now."""
        held = tuple([a + b for a, b in zip(self.held, crest.held, strict=True)])
        self.peak = self.total + crest.bytes
        self._crest = Crest(self.peak, held, crest.op, layer + crest.layer)
