"""What the order of a pipeline rank's work says of its memory, whatever its layers are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.sharding import ShardedStep

Part = Literal["whole", "input", "weight"]
"""A backward pass, or a half of one: the gradient of its input, or of its weights."""


PARTS: dict[type, Part] = {Backward: "whole", BackwardInput: "input", BackwardWeight: "weight"}


class Moment(NamedTuple):
    """The beginning of a backward pass, when activations are kept of many microbatches; stages count from 0 on a rank.

    Attributes:
        stage, part: whose pass it is, and which half.
        flight: microbatches of which each stage keeps activations for a backward pass.
        halves: microbatches of which each stage keeps what the second half of that needs.
        resumed: whether the rank's last pass was on the same stage.
        ends: whether the stage's gradients have all microbatches after it.
        summed: the stages that have gradients of some microbatches already.
        ended: those that have them of all.
    """

    stage: int
    part: Part
    flight: tuple[int, ...]
    halves: tuple[int, ...]
    resumed: bool
    ends: bool
    summed: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()

    def with_more(self, microbatches: int) -> Moment:
        """This moment with so many microbatches more, on every stage that keeps any: all have passed forward, as those
        that are kept have."""
        return self._replace(flight=tuple(count + microbatches if count else 0 for count in self.flight))


@dataclass(frozen=True)
class RankOrder:
    """A pipeline rank's order of work.

    Attributes:
        rank: its place.
        stages: its stages, by number.
        moments: when it keeps most, before and after all of its stages have gradients.
    """

    rank: int
    stages: list[int]
    moments: list[Moment]


def rank_order(rank: int, stages: list[int], order: Sequence[ShardedStep], more: int) -> RankOrder:
    """Go through a rank's order of work, and note when it keeps most.

    Args:
        rank: its place.
        stages: its stages, by number.
        order: its work, with few microbatches.
        more: microbatches that every moment keeps beside.
    """
    place = {stage: number for number, stage in enumerate(stages)}
    work = [step for step in order if isinstance(step, Work)]
    left = Counter(place[step.stage] for step in work if isinstance(step, Backward | BackwardWeight))
    most = _MostKept()
    flight, halves = [0] * len(stages), [0] * len(stages)
    summed, ended = frozenset[int](), frozenset[int]()
    before: Work | None = None
    for step in work:
        at, forward = place[step.stage], isinstance(step, Forward)
        resumed = before is not None and before.stage == step.stage
        if not isinstance(step, BackwardWeight):  # which needs no weight
            before = step
        if forward:
            flight[at] += 1
            continue
        part = PARTS[type(step)]
        ends = part != "input" and left[at] == 1
        most.note(Moment(at, part, tuple(flight), tuple(halves), resumed, ends, summed, ended))
        flight[at] -= part != "weight"
        halves[at] += {"whole": 0, "input": 1, "weight": -1}[part]
        if part != "input":
            left[at] -= 1
            summed, ended = (summed - {at}, ended | {at}) if ends else (summed | {at}, ended)
    return RankOrder(rank, stages, [moment.with_more(more) for moment in most.moments])


class _MostKept:
    """The moments at which most is kept: microbatches, or halves of them; before and after all stages have gradients.

    Of moments that are alike otherwise, the last one has most gradients.
    """

    def __init__(self) -> None:
        self._most: dict[Hashable, int] = {}
        self._found: dict[Hashable, dict[Moment, Moment]] = {}

    def note(self, moment: Moment) -> None:
        halves = sum(moment.halves)
        for key, count in (("all", sum(moment.flight) + halves), ("halves", halves)):
            if key == "halves" and not halves:
                continue
            group = key, len(moment.summed) + len(moment.ended) == len(moment.flight)
            if count > self._most.get(group, 0):
                self._most[group], self._found[group] = count, {}
            if count == self._most[group]:
                alike = moment._replace(summed=frozenset(), ended=frozenset())
                self._found[group][alike] = moment

    @property
    def moments(self) -> list[Moment]:
        return list(dict.fromkeys(moment for found in self._found.values() for moment in found.values()))
