"""The six figures of a step that are shown beside its timeline, for simulated and measured steps.

1. Compute: the share of the step in which a rank computes.
2. Exposed communication: the share in which it communicates and does not compute.
3. Overlap: the share of its communication that runs beside compute.
4. Idle time by cause: the share in which it does neither, by what it waits for (`IdleCause`).
5. Bubble: the bubble of the pipeline's schedule, the bubble with communication (`shardlab.simulate.timeline.bubble`),
   and the value of the schedule's formula.
6. Straggler: the rank that computes longest, and by how much it exceeds the mean.

The first four are means over ranks; `RankFigures` has them for each rank. Compute, exposed communication and idle time
add up to the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import itemgetter
from statistics import fmean
from typing import Any

from shardlab.language import OpKind
from shardlab.language.ops import COLLECTIVES, POINT_TO_POINT
from shardlab.simulate.timeline.bubble import bubble
from shardlab.simulate.timeline.causes import TOLERANCE, Activity, ComputeGap, activity_of, find_arrivals, find_gaps
from shardlab.simulate.timeline.timeline import Timeline, covered

Span = tuple[float, float]


class IdleCause(Enum):
    """Causes of idle time.

    MESSAGE: the sender of an awaited message has not reached the send yet, as in the bubble of a pipeline. MEMBER:
    another member of a collective has not reached it yet. TRANSFER: a message is on its way, and its receive has not
    begun. QUEUE: an awaited communication is ready, but its stream is busy. ENDED: the rank has done all its ops, and
    other ranks have not. UNKNOWN: no recorded cause; in a real run, launching ops and other work of Python.
    """

    MESSAGE = "waits for the sender of a message"
    MEMBER = "waits for the last member of a collective"
    TRANSFER = "waits for a message on its way"
    QUEUE = "waits for a stream"
    ENDED = "has ended"
    UNKNOWN = "no recorded cause"


@dataclass(frozen=True)
class RankFigures:
    """Times of one rank, in the unit of the timeline.

    Attributes:
        computing: time in which the rank computes.
        exposed: time in which it communicates and does not compute.
        idle: time in which it does neither, until the last rank has ended.
        communicating: time in which a communication of the rank is in flight.
        idle_by_cause: idle time by cause, without causes that take no time.
        waited_for: time for which other ranks are idle until this rank arrives, summed over these ranks.
    """

    computing: float
    exposed: float
    idle: float
    communicating: float
    idle_by_cause: dict[IdleCause, float]
    waited_for: float


@dataclass(frozen=True)
class Figures:
    """The six figures of one step.

    Attributes:
        end: end of the step, in the unit of the timeline.
        ranks: times of each row: of one rank, or in a folded program of all ranks of a pipeline stage.
        bubble: bubble of the pipeline's schedule without communication, from 0 to 1 (None: there is no pipeline, or the
            step was measured).
        bubble_with_communication: bubble of the timeline, which includes communication (None: there is no pipeline).
        closed_form: bubble by the formula of the schedule (None: there is none).
        formula: this formula as text.
        straggler: row that computes longest.
    """

    end: float
    ranks: list[RankFigures]
    bubble: float | None
    bubble_with_communication: float | None
    closed_form: float | None
    formula: str
    straggler: int

    @property
    def compute(self) -> float:
        """Share of the step in which a rank computes, the mean over ranks."""
        return self._share([rank.computing for rank in self.ranks])

    @property
    def exposed(self) -> float:
        """Share of the step in which a rank communicates and does not compute, the mean over ranks."""
        return self._share([rank.exposed for rank in self.ranks])

    @property
    def overlap(self) -> float | None:
        """Share of all communication that runs beside compute; None without communication."""
        communicating = sum(rank.communicating for rank in self.ranks)
        return 1.0 - sum(rank.exposed for rank in self.ranks) / communicating if communicating > 0 else None

    @property
    def idle(self) -> dict[IdleCause, float]:
        """Share of the step in which a rank is idle, by cause, largest first, the mean over ranks."""
        total = {cause: self._share([rank.idle_by_cause.get(cause, 0.0) for rank in self.ranks]) for cause in IdleCause}
        return dict(sorted(((cause, share) for cause, share in total.items() if share > 0), key=lambda item: -item[1]))

    @property
    def excess(self) -> float:
        """Time that the straggler computes beyond the mean of all ranks, as a share of the mean."""
        mean = fmean(rank.computing for rank in self.ranks)
        return self.ranks[self.straggler].computing / mean - 1.0 if mean else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON. Times are in the unit of the timeline; all other figures are shares."""
        return {
            "end": self.end,
            "compute": self.compute,
            "exposed_communication": self.exposed,
            "overlap": self.overlap,
            "idle": {cause.value: share for cause, share in self.idle.items()},
            "bubble": self.bubble,
            "bubble_with_communication": self.bubble_with_communication,
            "bubble_closed_form": self.closed_form,
            "bubble_formula": self.formula,
            "straggler": {"row": self.straggler, "excess": self.excess},
            "ranks": [
                vars(rank) | {"idle_by_cause": {cause.value: time for cause, time in rank.idle_by_cause.items()}}
                for rank in self.ranks
            ],
        }

    def _share(self, times: Sequence[float]) -> float:
        return fmean(times) / self.end if times and self.end else 0.0


def figures_of(
    timeline: Timeline, schedule: str = "", activity: Activity | None = None, free: float | None = None
) -> Figures:
    """Return the six figures of a timeline.

    Args:
        timeline: a simulated or a measured step.
        schedule: name of the pipeline's schedule, for the closed form of its bubble.
        activity: `activity_of(timeline)`, if already computed.
        free: result of `schedule_bubble` (None: unknown, as for a measured step).
    """
    activity = activity or activity_of(timeline)
    stages = timeline.program.mesh.sizes()["pp"]
    if stages < 2:
        return figures_of_activity(activity)
    formula, closed = closed_form(timeline, schedule)
    return figures_of_activity(activity, (free, bubble(timeline)), closed, formula)


def figures_of_activity(
    activity: Activity,
    bubbles: tuple[float | None, float | None] = (None, None),
    closed: float | None = None,
    formula: str = "",
) -> Figures:
    """Return the six figures of an activity, which may come from a trace file (`shardlab.draw.viewer.trace_file`).

    Args:
        activity: ops and communications of a step.
        bubbles: bubble of the pipeline's schedule, and bubble with communication (None: unknown).
        closed, formula: value of the bubble by the schedule's formula, and the formula as text.
    """
    gaps: list[list[ComputeGap]] = [[] for _ in activity.rows]
    for gap in find_gaps(activity):
        gaps[gap.row].append(gap)
    arrivals, waited_for = find_arrivals(activity), [0.0] * len(activity.rows)
    ranks: list[RankFigures] = []
    for row, ops in enumerate(activity.rows):
        work = covered((op.start, op.end) for op in ops if op.computes)
        busy = covered((op.start, op.end) for op in ops)
        talking = _merged([(op.start, op.end) for op in ops if not op.computes and op.end > op.start])
        idle: dict[IdleCause, float] = defaultdict(float)
        for gap in gaps[row]:
            for cause, time, late in _idle_parts(activity, arrivals, gap, talking):
                if time > TOLERANCE * activity.end:
                    idle[cause] += time
                if late is not None:
                    waited_for[late] += time
        communicating = sum(end - start for start, end in talking)
        exposed, standing = max(0.0, busy - work), max(0.0, activity.end - busy)
        ranks.append(RankFigures(work, exposed, standing, communicating, dict(idle), 0.0))
    longest = max(range(len(ranks)), key=lambda row: ranks[row].computing, default=0)
    complete = [replace(rank, waited_for=waited) for rank, waited in zip(ranks, waited_for, strict=True)]
    return Figures(activity.end, complete, *bubbles, closed, formula, longest)


def closed_form(timeline: Timeline, schedule: str) -> tuple[str, float | None]:
    """Return the formula of a schedule's bubble as text, and its value for a timeline; ("", None) if there is none.

    It holds for p ranks with equal stages, m microbatches, v stages on each rank, and messages that take no time. F, B
    and W are the times of a forward pass, of the gradient of the input and of the gradient of the weights. In the
    formula of ZB-H1 they are means over the timeline.

    Sources: GPipe and 1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1. Interleaved: section 2.2.2.
    Breadth-first: Lamy-Poirier 2022, arXiv 2211.05953, section 3. ZB-H1, ZB-H2 and ZB-V: Qi et al. 2023, arXiv
    2401.10241, table 2 and section 6.
    """
    p = timeline.program.mesh.sizes()["pp"]
    forwards = [[event for event in events if event.kind is OpKind.FORWARD] for events in timeline.events]
    m = max((len({event.microbatches for event in row}) for row in forwards), default=0)
    if not m:
        return "", None
    v = max(_chunks({event.layer for event in row}) for row in forwards)
    match schedule:
        case "gpipe" | "1f1b":
            return "(p - 1) / (m + p - 1)", (p - 1) / (m + p - 1)
        case "interleaved-1f1b" | "breadth-first":
            return "(p - 1) / (v m + p - 1)", (p - 1) / (v * m + p - 1)
        case "zb-h1":
            chain, weight = (OpKind.FORWARD, OpKind.BACKWARD_INPUT), OpKind.BACKWARD_WEIGHT
            bubble = (p - 1) * (_mean(timeline, *chain) - _mean(timeline, weight))
            work = m * _mean(timeline, *chain, weight)
            return "(p - 1) (F + B - W) / (m (F + B + W) + (p - 1) (F + B - W))", bubble / (work + bubble)
        case "zb-h2" | "zb-v":
            return "0, if F = B = W and m is large enough", 0.0
        case _:
            return "", None


def _idle_parts(
    activity: Activity, arrivals: Sequence[Sequence[float]], gap: ComputeGap, talking: Sequence[Span]
) -> Iterator[tuple[IdleCause, float, int | None]]:
    """Yield the idle parts of a gap: the cause, the duration, and the row for which the rank waits."""
    row = gap.row
    if gap.awaited is None:
        cause = IdleCause.ENDED if gap.next_compute is None else IdleCause.UNKNOWN
        yield cause, _quiet(talking, gap.start, gap.end), None
        return
    awaited = activity.rows[row][gap.awaited]
    members = activity.communications[awaited.communication] if awaited.communication >= 0 else []
    if awaited.kind in POINT_TO_POINT and len(members) == 2:
        peer = next((member for member in members if member[0] != row), members[0])
    else:
        peer = max(members, key=lambda member: arrivals[member[0]][member[1]], default=(row, gap.awaited))
    arrival = min(max(gap.start, arrivals[peer[0]][peer[1]]), gap.end)
    begin = min(max(arrival, awaited.start), gap.end)
    late = IdleCause.MEMBER if awaited.kind in COLLECTIVES else IdleCause.MESSAGE
    yield late, _quiet(talking, gap.start, arrival), peer[0] if peer[0] != row else None
    send = activity.rows[peer[0]][peer[1]] if awaited.kind is OpKind.RECV else awaited
    send_start = min(max(arrival, send.start), begin)
    yield IdleCause.QUEUE, _quiet(talking, arrival, send_start), None
    yield IdleCause.TRANSFER, _quiet(talking, send_start, begin), None
    yield IdleCause.UNKNOWN, _quiet(talking, begin, gap.end), None


def _quiet(talking: Sequence[Span], since: float, until: float) -> float:
    """Return how much time of an interval lies outside all spans. The spans must be sorted and disjoint."""
    covered = sum(max(0.0, min(end, until) - max(start, since)) for start, end in _near(talking, since, until))
    return max(0.0, until - since - covered)


def _near(talking: Sequence[Span], since: float, until: float) -> Iterator[Span]:
    """Yield the spans that overlap an interval."""
    for span in talking[bisect_right(talking, since, key=itemgetter(1)) :]:
        if span[0] >= until:
            return
        yield span


def _merged(spans: list[Span]) -> list[Span]:
    """Return the union of some spans as sorted, disjoint spans."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _chunks(layers: set[int]) -> int:
    """Return the number of model chunks of a rank, that is, of runs of adjacent layers."""
    return sum(layer - 1 not in layers for layer in layers)


def _mean(timeline: Timeline, *kinds: OpKind) -> float:
    """Return the mean over ranks of the time per microbatch in ops of some kinds."""
    times = [
        sum(event.end - event.start for event in events if event.kind in kinds)
        / max(1, len({event.microbatches for event in events if event.kind is OpKind.FORWARD}))
        for events in timeline.events
    ]
    return fmean(times) if times else 0.0
