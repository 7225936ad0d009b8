"""Shares of any stretch of time that a rank spends on each kind of op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.program import OpKind
from shardlab.program.ops import COMMUNICATION
from shardlab.timeline import Event

Array = NDArray[np.float64]


class Shares(NamedTuple):
    """Shares of equally long cells of time that a rank spends on each thing.

    Attributes:
        compute: of each kind of compute, (cells,).
        exposed: of each kind of communication while nothing is computed, (cells,); several may go on at once.
        hidden: computes and communicates at once, (cells,).
        idle: does neither, (cells,).
    """

    compute: dict[OpKind, Array]
    exposed: dict[OpKind, Array]
    hidden: Array
    idle: Array


class Activity:
    """Work of one rank at every moment of a step.

    Args:
        events: the rank's events, in any order; those that take no time count for nothing.
        end: when the step ends.
    """

    def __init__(self, events: Sequence[Event], end: float) -> None:
        lasting = [event for event in events if event.end > event.start]
        starts = np.array([event.start for event in lasting])
        ends = np.array([event.end for event in lasting])
        self._moments: Array = np.unique(np.concatenate([[0.0, end], starts, ends]))
        self._lengths = np.diff(self._moments)
        of_kind: dict[OpKind, list[int]] = {}
        for place, event in enumerate(lasting):
            of_kind.setdefault(event.kind, []).append(place)
        under_way = {kind: self._under_way(starts[places], ends[places]) for kind, places in of_kind.items()}
        computes = self._any([on for kind, on in under_way.items() if kind not in COMMUNICATION])
        talks = self._any([on for kind, on in under_way.items() if kind in COMMUNICATION])
        self._under_way_until = {kind: self._until(on) for kind, on in under_way.items()}
        self._exposed_until = {
            kind: self._until(on & ~computes) for kind, on in under_way.items() if kind in COMMUNICATION
        }
        self._hidden_until, self._idle_until = self._until(computes & talks), self._until(~computes & ~talks)
        self.end = end

    def shares(self, start: float, end: float, cells: int) -> Shares:
        """A row's work between two moments, in so many cells."""
        edges, length = np.linspace(start, end, cells + 1), (end - start) / cells

        def of(until: Array) -> Array:
            return np.diff(np.interp(edges, self._moments, until)) / length

        return Shares(
            {kind: of(until) for kind, until in self._under_way_until.items() if kind not in COMMUNICATION},
            {kind: of(until) for kind, until in self._exposed_until.items()},
            of(self._hidden_until),
            of(self._idle_until),
        )

    def totals(self) -> dict[OpKind, float]:
        """The share of the whole step in which each kind of op is under way; they overlap."""
        return {kind: float(until[-1]) / self.end for kind, until in self._under_way_until.items()}

    @property
    def hidden(self) -> float:
        """The share of the step in which the rank computes and communicates at once."""
        return float(self._hidden_until[-1]) / self.end

    @property
    def idle(self) -> float:
        """The share of the step in which the rank does nothing."""
        return float(self._idle_until[-1]) / self.end

    def _under_way(self, starts: Array, ends: Array) -> NDArray[np.bool_]:
        """Whether any of some ops is under way, between each moment and the next."""
        change = np.zeros(len(self._moments), dtype=np.int64)
        np.add.at(change, np.searchsorted(self._moments, starts), 1)
        np.add.at(change, np.searchsorted(self._moments, ends), -1)
        return np.cumsum(change)[:-1] > 0

    def _any(self, each: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
        return np.any(each, axis=0) if each else np.zeros(len(self._lengths), dtype=bool)

    def _until(self, on: NDArray[np.bool_]) -> Array:
        """Seconds in which it was so, from the start until each moment."""
        return np.concatenate([[0.0], np.cumsum(self._lengths * on)])
