"""Scouts of a search: which few plans of each family are forecast before all others, so that each is seen."""

from __future__ import annotations

from collections import Counter

from shardlab.planner.families import family
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate
from shardlab.planner.waiting import Waiting

SCOUTS = 6
"""Forecasts of each family before all others; the lowest floors come first."""

SCOUTED = 48
"""Pipelines of each family at most whose candidates are made for those; where hardly any fits, there is no end."""

ROOMY = 0.9
"""Share of the room that the floor of bytes of every second scout may take: what comes closer often does not fit."""


class Scouts:
    """What scouts have seen, and what they are yet to see.

    Args:
        room: bytes of each device.
    """

    def __init__(self, room: float) -> None:
        self._room = room
        self._forecasts = Counter[str]()
        self._dealt = Counter[str]()
        self._shapes: set[PlanShape] = set()

    def note_forecast(self, candidate: Candidate) -> None:
        """Note that a candidate's forecast is asked for."""
        self._forecasts[family(candidate.plan)] += 1

    def note_dealt(self, pipeline: Waiting) -> None:
        """Note that the candidates with a pipeline are made."""
        self._dealt[pipeline.kinds] += 1

    def note_shape(self, shape: PlanShape) -> None:
        """Note that a scout has one of a shape's candidates."""
        self._shapes.add(shape)

    def want(self, waiting: Waiting) -> bool:
        """Whether scouts look at this: more is to be known of its family, and half of them need no luck to fit."""
        name = family(waiting.plan.plan) if isinstance(waiting.plan, Candidate) else waiting.kinds
        known = self._forecasts[name]
        if known >= SCOUTS or (known >= SCOUTS // 2 and waiting.bytes > ROOMY * self._room):
            return False
        if isinstance(waiting.plan, Candidate) and waiting.kinds:  # those of one shape are much alike
            return waiting.shape not in self._shapes
        return isinstance(waiting.plan, Candidate) or self._dealt[name] < SCOUTED
