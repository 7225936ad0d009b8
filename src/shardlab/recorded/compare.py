"""Prediction and measurement of one step side by side: per rank and kind of op, and the step as a whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardlab.program import OpKind
from shardlab.recorded.measured import Measured
from shardlab.timeline.exposed import rank_times
from shardlab.timeline.timeline import Timeline, is_event


@dataclass(frozen=True)
class Pair:
    """One figure, predicted and measured; None where there is none."""

    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured: 1 is right, less is too little (None: one of them is unknown)."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured


@dataclass(frozen=True)
class KindRow:
    """All ops of a kind on one rank.

    Attributes:
        rank, kind: which.
        ops: how many are on the tape.
        seen: how many of them were measured; fewer if the run broke off.
        seconds: of those that were measured, together.
    """

    rank: int
    kind: OpKind
    ops: int
    seen: int
    seconds: Pair


@dataclass(frozen=True)
class RankRow:
    """One rank's step.

    Attributes:
        rank: which.
        computing: seconds in which it computes.
        exposed: seconds in which it communicates and does not compute.
        idle: seconds in which it does neither, until the last rank has ended.
        memory: bytes live at the start of an op, the most in the step.
    """

    rank: int
    computing: Pair
    exposed: Pair
    idle: Pair
    memory: Pair


@dataclass(frozen=True)
class Comparison:
    """A step, predicted and measured.

    Attributes:
        step: seconds; measured, the median of the whole steps.
        ranks, kinds: the rows of the tables.
        missing: what a whole trace has and this one has not, in sentences.
    """

    step: Pair
    ranks: list[RankRow]
    kinds: list[KindRow]
    missing: list[str]


def compare(
    measured: Measured, predicted: Timeline | None = None, predicted_memory: Sequence[int] | None = None
) -> Comparison:
    """Lay both side by side.

    Args:
        measured: what happened.
        predicted: the same program's timeline in seconds; None to show the measurement alone.
        predicted_memory: for each rank the most bytes that are live at the start of an op.
    """
    ranks = range(len(measured.timeline.events))
    return Comparison(
        Pair(predicted and predicted.end, median(measured.steps) if measured.steps else None),
        [_rank(measured, predicted, predicted_memory, rank) for rank in ranks],
        [row for rank in ranks for row in _kinds(measured, predicted, rank)],
        measured.missing,
    )


def _rank(measured: Measured, predicted: Timeline | None, predicted_memory: Sequence[int] | None, rank: int) -> RankRow:
    expected, seen = rank_times(predicted, rank) if predicted else None, measured.ranks[rank]
    return RankRow(
        rank,
        Pair(expected and expected.computing, seen.computing),
        Pair(expected and expected.exposed, seen.exposed),
        Pair(expected and expected.idle, seen.idle),
        Pair(predicted_memory[rank] if predicted_memory else None, sum(measured.live[rank].values()) or None),
    )


def _kinds(measured: Measured, predicted: Timeline | None, rank: int) -> list[KindRow]:
    seconds = measured.seconds[rank]
    expected = {event.op: event.end - event.start for event in predicted.events[rank]} if predicted else None
    places: dict[OpKind, list[int]] = defaultdict(list)
    for at, op in enumerate(measured.timeline.program.tapes[rank]):
        if is_event(op.kind):
            places[op.kind].append(at)
    rows: list[KindRow] = []
    for kind, ops in places.items():
        seen = [at for at in ops if at in seconds]
        total = None if expected is None else sum(expected[at] for at in seen)
        rows.append(KindRow(rank, kind, len(ops), len(seen), Pair(total, sum(seconds[at] for at in seen))))
    return rows
