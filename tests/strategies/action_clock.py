"""A clock over a schedule's actions alone, without tapes: it judges schedules, and the simulation, independently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardlab.strategies.schedules import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule

Turn = Sequence[Action]
"""Passes that a rank makes as one: they start when all can, and are done when all are."""


@dataclass(frozen=True)
class PassTimes:
    """Durations of a stage's passes of one microbatch, and of a message."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    latency: float = 0

    @property
    def passes(self) -> tuple[float, float, float]:
        return self.forward, self.backward_input, self.backward_weight

    def of(self, action: Action) -> float:
        if isinstance(action, Forward):
            return self.forward
        first = 0 if isinstance(action, BackwardWeight) else self.backward_input
        return first + (0 if isinstance(action, BackwardInput) else self.backward_weight)


def actions_of(schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Return the actions of each rank."""
    return [list(schedule.actions(rank, ranks, microbatches, stages_per_rank)) for rank in range(ranks)]


def one_by_one(actions: Iterable[Action]) -> list[Turn]:
    return [[action] for action in actions]


def in_pairs(actions: Iterable[Action]) -> list[Turn]:
    """A forward pass and a whole backward pass that follows it are made as one."""
    turns: list[Turn] = []
    for action in actions:
        if isinstance(action, Backward) and turns and len(turns[-1]) == 1 and isinstance(turns[-1][0], Forward):
            turns[-1] = [*turns[-1], action]
        else:
            turns.append([action])
    return turns


class Clock:
    """When each rank makes its passes; a message takes time on its way, but no rank's time."""

    def __init__(self, schedule: Schedule, todo: Sequence[Sequence[Turn]], stages: int, times: PassTimes) -> None:
        self.schedule, self.todo, self.stages, self.times = schedule, todo, stages, times
        self.ends: dict[tuple[bool, int, int], float] = {}
        self.first: list[float | None] = [None for _ in todo]
        self.clock = [0.0 for _ in todo]
        places = [0 for _ in todo]
        while any(place < len(turns) for place, turns in zip(places, todo, strict=True)):
            old_places = list(places)
            for rank, turns in enumerate(todo):
                while places[rank] < len(turns) and self._make(rank, turns[places[rank]]):
                    places[rank] += 1
            assert places != old_places, "the schedule waits for itself"

    @property
    def cost(self) -> float:
        """The longest time, over the ranks, from the start of the first pass to the end of the last."""
        return max(end - (first or 0.0) for first, end in zip(self.first, self.clock, strict=True))

    def _make(self, rank: int, turn: Turn) -> bool:
        come = [self._come(rank, action) for action in turn]
        if None in come:
            return False
        start = max(self.clock[rank], *(time for time in come if time is not None))
        self.clock[rank] = start + sum(map(self.times.of, turn))
        if self.first[rank] is None:
            self.first[rank] = start
        for action in turn:
            if not isinstance(action, BackwardWeight):
                self.ends[isinstance(action, Forward), action.stage, action.microbatch] = self.clock[rank]
        return True

    def _come(self, rank: int, action: Action) -> float | None:
        """When what a pass reads from another stage has come; None as long as it has not been made."""
        forward = isinstance(action, Forward)
        source = action.stage + (-1 if forward else 1)
        if isinstance(action, BackwardWeight) or not 0 <= source < self.stages:
            return 0.0
        end = self.ends.get((forward, source, action.microbatch))
        away = self.schedule.placement(source, len(self.todo)) != rank
        return None if end is None else end + self.times.latency * away


def cost(
    schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int, times: PassTimes, *, pairs: bool = False
) -> float:
    """The longest time, over the ranks, from the start of the first pass to the end of the last."""
    todo = map(in_pairs if pairs else one_by_one, actions_of(schedule, ranks, microbatches, stages_per_rank))
    return Clock(schedule, list(todo), ranks * stages_per_rank, times).cost


def peak_live(schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int) -> float:
    """The most that a rank holds, in microbatches of its whole share: each from its forward to its last pass."""
    return max(map(most_held, actions_of(schedule, ranks, microbatches, stages_per_rank))) / stages_per_rank


def most_held(actions: Iterable[Action]) -> int:
    """The most (stage, microbatch) pairs that wait for their backward, or its second half, at once."""
    changes = (1 if isinstance(a, Forward) else 0 if isinstance(a, BackwardInput) else -1 for a in actions)
    return max(accumulate(changes))
