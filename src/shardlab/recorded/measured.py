"""Timeline of what really happened, from the ranks' records, in the form that simulation produces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low

from shardlab.check import Checked
from shardlab.program import Op
from shardlab.program.matching import stream_of
from shardlab.program.ops import COMMUNICATION
from shardlab.program.record import RankRecord, StepRecord
from shardlab.rules.pieces import counted
from shardlab.timeline.counters import Counter, counter_of
from shardlab.timeline.exposed import RankTimes, rank_times
from shardlab.timeline.timeline import Event, Timeline, is_event

Spans = dict[int, tuple[float, float]]
"""Start and end of ops, by place on the tape."""


def spans(checked: Checked, steps: Mapping[int, StepRecord], offsets: Mapping[int, float]) -> dict[int, Spans]:
    """List for each rank the ops that it finished, in seconds since the first rank began.

    Compute is as it was seen. A communication ends when this rank's part was over, and starts when its last member had
    come, or when the one that was over just before it on the same communicator was, if that is later: what a group has
    in flight at the same time shares its links, and is listed one after the other, as on a stream.

    Args:
        steps: one step, by rank.
        offsets: what to take from each rank's clock.
    """
    zero = min((step.began - offsets[rank] for rank, step in steps.items()), default=0.0)
    shift = {rank: -offsets[rank] - zero for rank in steps}
    found: dict[int, Spans] = {rank: {} for rank in steps}
    arrived: dict[int, float] = {}
    parts: list[tuple[float, int, int, int]] = []  # (over, rank, op, communication)
    for rank, step in steps.items():
        tape = checked.program.tapes[rank]
        for at, moments in step.ops.items():
            if tape[at].kind in COMMUNICATION:
                communication = checked.communication_of[rank][tape[at].handle]
                arrived[communication] = max(arrived.get(communication, 0.0), moments.began + shift[rank])
                if moments.over is not None:
                    parts.append((moments.over + shift[rank], rank, at, communication))
            elif moments.ended is not None:
                found[rank][at] = (moments.began + shift[rank], moments.ended + shift[rank])
    free: dict[tuple[int, object], float] = {}
    for over, rank, at, communication in sorted(parts):
        stream = (rank, stream_of(checked.program, checked.communications[communication]))
        found[rank][at] = (min(over, max(arrived[communication], free.get(stream, 0.0))), over)
        free[stream] = over
    return found


@dataclass(frozen=True)
class Measured:
    """A run's recorded steps.

    Attributes:
        timeline: the step of median length, in seconds and bytes; if no step was whole, the last as far as it came.
        seconds: for each rank, the time of each op, by place on the tape: the mean over the steps of usual length, so
            that the times of several ops add up to what they take in such a step.
        ranks: for each rank, the medians of where its time goes.
        steps: how long each whole step took, from the first rank's beginning to the last one's end.
        live: for each rank, bytes by category where the sum is largest at the start of an op; empty if not measured.
        counters: for each rank, moments of that timeline and the bytes by category that are live from then on.
        peaks: for each rank, the most bytes at any moment, what ops need only while they run included; 0 if not
            measured.
        bound: the most that clocks may be apart, in seconds.
        missing: a sentence for everything that a whole trace has and this one has not.
    """

    timeline: Timeline
    seconds: list[dict[int, float]]
    ranks: list[RankTimes]
    steps: list[float]
    live: list[dict[str, int]]
    counters: list[Counter]
    peaks: list[int]
    bound: float
    missing: list[str]


def measured(checked: Checked, records: Mapping[int, RankRecord]) -> Measured:
    """Put together what the ranks saw; ranks and steps may be missing."""
    ranks = range(checked.program.ranks)
    offsets = {rank: record.offset for rank, record in records.items()}
    numbered = [_step(records, number) for number in range(max((len(r.steps) for r in records.values()), default=0))]
    whole = [steps for steps in numbered if len(steps) == len(records) and all(step.ended for step in steps.values())]
    lengths = [_length(steps, offsets) for steps in whole]
    kept = whole or numbered[-1:] or [{}]
    placed = [spans(checked, steps, offsets) for steps in kept]
    usual = [placed[number] for number in _middle(lengths)] or placed
    timelines = [_timeline(checked, step, records) for step in placed]
    shown = lengths.index(median_low(lengths)) if lengths else 0
    zero = min((step.began - offsets[rank] for rank, step in kept[shown].items()), default=0.0)
    return Measured(
        timelines[shown],
        [_means([step[rank] for step in usual if rank in step]) for rank in ranks],
        [_usual([rank_times(timeline, rank) for timeline in timelines]) for rank in ranks],
        lengths,
        [_fullest(records.get(rank)) for rank in ranks],
        [_counter(records.get(rank), kept[shown].get(rank), zero) for rank in ranks],
        [record.memory.peak if (record := records.get(rank)) and record.memory else 0 for rank in ranks],
        max((record.bound for record in records.values()), default=0.0),
        list(_missing(checked, records, bool(whole))),
    )


def _step(records: Mapping[int, RankRecord], number: int) -> dict[int, StepRecord]:
    return {rank: record.steps[number] for rank, record in records.items() if number < len(record.steps)}


def _length(steps: Mapping[int, StepRecord], offsets: Mapping[int, float]) -> float:
    ends = [step.ended - offsets[rank] for rank, step in steps.items() if step.ended is not None]
    return max(ends) - min(step.began - offsets[rank] for rank, step in steps.items())


def _middle(lengths: Sequence[float]) -> list[int]:
    """The numbers of the steps that are left without the shortest and the longest quarter."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    quarter = len(order) // 4
    return order[quarter : len(order) - quarter]


def _means(each: Sequence[Spans]) -> dict[int, float]:
    """Mean of each op's durations. A communication is fast most times and slow at others: medians would add up to less
    than a step has."""
    places = sorted({at for spans in each for at in spans})
    return {at: fmean(end - start for spans in each if at in spans for start, end in [spans[at]]) for at in places}


def _usual(each: Sequence[RankTimes]) -> RankTimes:
    return RankTimes(*map(median, zip(*each, strict=True)))


def _timeline(checked: Checked, step: Mapping[int, Spans], records: Mapping[int, RankRecord]) -> Timeline:
    ranks = range(checked.program.ranks)
    events = [_events(checked, rank, step.get(rank, {}), records.get(rank)) for rank in ranks]
    return Timeline(checked.program, events, in_seconds=True)


def _events(checked: Checked, rank: int, spans: Spans, record: RankRecord | None) -> list[Event]:
    live = record.memory.live if record is not None and record.memory is not None else {}
    events: list[Event] = []
    for at, op in enumerate(checked.program.tapes[rank]):
        if is_event(op.kind) and at in spans:
            about = (*op.inputs, *op.outputs)[:1]
            microbatches = checked.specs[rank][about[0]].microbatches if about else 0
            memory = sum(live.get(at, {}).values())
            events.append(Event(rank, at, op.kind, op.layer, microbatches, *spans[at], memory))
    return events


def _fullest(record: RankRecord | None) -> dict[str, int]:
    if record is None or record.memory is None or not record.memory.live:
        return {}
    return max(record.memory.live.values(), key=lambda live: sum(live.values()))


def _counter(record: RankRecord | None, step: StepRecord | None, zero: float) -> Counter:
    """What was live when the rank came to each op; memory is of another step, which does the same."""
    if record is None or record.memory is None or step is None:
        return []
    live, ops = record.memory.live, step.ops
    return counter_of((ops[at].began - record.offset - zero, live[at]) for at in sorted(live.keys() & ops.keys()))


def _missing(checked: Checked, records: Mapping[int, RankRecord], whole: bool) -> list[str]:
    tapes = checked.program.tapes
    sentences = [f"rank {rank} left no record" for rank in range(len(tapes)) if rank not in records]
    if not whole:
        sentences.append("no step was recorded to its end on all ranks")
    most = max((len(record.steps) for record in records.values()), default=0)
    for rank, record in sorted(records.items()):
        if len(record.steps) < most:
            sentences.append(f"rank {rank} recorded {counted(len(record.steps), 'step')} and another {most}")
        elif record.steps and record.steps[-1].ended is None:
            place = _place(tapes[rank], record.steps[-1].ops)
            sentences.append(f"rank {rank} came no further than {place} of recorded step {most - 1}")
        if record.memory is not None and len(record.memory.live) < len(tapes[rank]):
            sentences.append(f"rank {rank} measured memory no further than {_place(tapes[rank], record.memory.live)}")
    unmeasured = [str(rank) for rank, record in sorted(records.items()) if record.memory is None]
    if unmeasured:
        sentences.append(f"memory was not measured on rank {', '.join(unmeasured)}")
    return sentences


def _place(tape: Sequence[Op], ops: Iterable[int]) -> str:
    at = max(ops, default=0)
    return f"op {at} {tape[at]}"
