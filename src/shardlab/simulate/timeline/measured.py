"""Measured steps: the records of a run's ranks, as a timeline in the same form as a simulated one.

`measured` combines the records of all ranks; `compare` puts prediction and measurement side by side. The files of a
traced run come last. Each rank writes one during the run, and at the end one file for all ranks is written. The first
line of a file describes the program. Each of the next lines is one step of one rank, in the order of steps. The last
lines are the memory of each rank. If a file is cut off, all complete lines are still read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median_low
from typing import Any, cast

from shardlab.check import Checked
from shardlab.common.errors import TooDeep
from shardlab.common.files import atomic_file, missing_path, parse_document
from shardlab.common.text import counted
from shardlab.language import Op, OpKind, UserError
from shardlab.language.ops import COMMUNICATION
from shardlab.language.tape import MemoryRecord, OpTimes, RankRecord, StepRecord, queue_key
from shardlab.simulate.timeline.run import Counter, counter_of
from shardlab.simulate.timeline.timeline import Event, RankTimes, Timeline, is_event, rank_times

Spans = dict[int, tuple[float, float]]
"""Start and end of ops, by index on the tape."""


def spans(checked: Checked, steps: Mapping[int, StepRecord], offsets: Mapping[int, float]) -> dict[int, Spans]:
    """Return for each rank the spans of its finished ops, in seconds since the first rank began.

    A compute op has the recorded span. A communication ends when this rank's part was complete. It starts when its last
    member had arrived, or when the previous communication of the same communicator was complete, if that is later. So
    communications on the links of one group do not overlap, as on a stream.

    Args:
        checked: the program that ran.
        steps: one step, by rank.
        offsets: seconds to subtract from each rank's clock.
    """
    zero = min((step.began - offsets[rank] for rank, step in steps.items()), default=0.0)
    shift = {rank: -offsets[rank] - zero for rank in steps}
    spans_by_rank: dict[int, Spans] = {rank: {} for rank in steps}
    arrived: dict[int, float] = {}
    parts: list[tuple[float, int, int, int]] = []  # (completion, rank, op, communication)
    for rank, step in steps.items():
        tape = checked.program.tapes[rank]
        for index, moments in step.ops.items():
            if tape[index].kind in COMMUNICATION:
                communication = checked.communication_of[rank][tape[index].handle]
                arrived[communication] = max(arrived.get(communication, 0.0), moments.start + shift[rank])
                if moments.completion is not None:
                    parts.append((moments.completion + shift[rank], rank, index, communication))
            elif moments.end is not None:
                spans_by_rank[rank][index] = (moments.start + shift[rank], moments.end + shift[rank])
    free: dict[tuple[int, object], float] = {}
    for end, rank, index, communication in sorted(parts):
        stream = (rank, queue_key(checked.program, checked.communications[communication]))
        spans_by_rank[rank][index] = (min(end, max(arrived[communication], free.get(stream, 0.0))), end)
        free[stream] = end
    return spans_by_rank


@dataclass(frozen=True)
class Measured:
    """Recorded steps of a run.

    Attributes:
        timeline: the step of median length, in seconds and bytes; if no step is complete, the last one.
        seconds: for each rank, the time of each op by index on the tape. It is the mean over the steps of usual length:
            all except the shortest and the longest quarter.
        ranks: for each rank, the means of its times over the steps of usual length. They add up to the mean step.
        steps: duration of each complete step, from the start of the first rank to the end of the last.
        live: for each rank, live bytes by category at the op with the largest sum; empty if not measured.
        counters: for each rank, times in the timeline and the live bytes by category from then on.
        peaks: for each rank, the largest number of bytes, including temporary memory of ops; 0 if not measured.
        bound: largest possible error of a rank's clock relative to rank 0's, in seconds, after correction.
        missing: a sentence for each part of a complete trace that is missing.
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
    """Combine the records of the ranks. Ranks and steps may be missing."""
    ranks = range(checked.program.ranks)
    offsets = {rank: record.offset for rank, record in records.items()}
    numbered = [_step(records, number) for number in range(max((len(r.steps) for r in records.values()), default=0))]
    whole_steps = [
        steps for steps in numbered if len(steps) == len(records) and all(step.ended for step in steps.values())
    ]
    lengths = [_length(steps, offsets) for steps in whole_steps]
    shown_steps = whole_steps or numbered[-1:] or [{}]
    step_spans = [spans(checked, steps, offsets) for steps in shown_steps]
    middle = _middle(lengths) or range(len(step_spans))
    middle_spans = [step_spans[number] for number in middle]
    timelines = [_timeline(checked, step, records) for step in step_spans]
    shown_step = lengths.index(median_low(lengths)) if lengths else 0
    zero = min((step.began - offsets[rank] for rank, step in shown_steps[shown_step].items()), default=0.0)
    return Measured(
        timelines[shown_step],
        [_means([step[rank] for step in middle_spans if rank in step]) for rank in ranks],
        [_mean_times([rank_times(timelines[number], rank) for number in middle]) for rank in ranks],
        lengths,
        [_fullest(records.get(rank)) for rank in ranks],
        [_counter(records.get(rank), shown_steps[shown_step].get(rank), zero) for rank in ranks],
        [record.memory.peak if (record := records.get(rank)) and record.memory else 0 for rank in ranks],
        max((record.bound for record in records.values()), default=0.0),
        list(_missing(checked, records, bool(whole_steps))),
    )


def _step(records: Mapping[int, RankRecord], number: int) -> dict[int, StepRecord]:
    return {rank: record.steps[number] for rank, record in records.items() if number < len(record.steps)}


def _length(steps: Mapping[int, StepRecord], offsets: Mapping[int, float]) -> float:
    ends = [step.ended - offsets[rank] for rank, step in steps.items() if step.ended is not None]
    return max(ends) - min(step.began - offsets[rank] for rank, step in steps.items())


def _middle(lengths: Sequence[float]) -> list[int]:
    """Return the numbers of all steps except the shortest and the longest quarter."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    quarter = len(order) // 4
    return order[quarter : len(order) - quarter]


def _means(spans_of_steps: Sequence[Spans]) -> dict[int, float]:
    """Return the mean duration of each op.

    Medians would add up to less than a step, since a communication is usually fast and sometimes slow.
    """
    places = sorted({index for spans in spans_of_steps for index in spans})
    return {
        index: fmean(end - start for spans in spans_of_steps if index in spans for start, end in [spans[index]])
        for index in places
    }


def _mean_times(times_of_steps: Sequence[RankTimes]) -> RankTimes:
    return RankTimes(*map(fmean, zip(*times_of_steps, strict=True)))


def _timeline(checked: Checked, step: Mapping[int, Spans], records: Mapping[int, RankRecord]) -> Timeline:
    ranks = range(checked.program.ranks)
    events = [_events(checked, rank, step.get(rank, {}), records.get(rank)) for rank in ranks]
    return Timeline(checked.program, events, in_seconds=True)


def _events(checked: Checked, rank: int, spans: Spans, record: RankRecord | None) -> list[Event]:
    live = record.memory.live if record is not None and record.memory is not None else {}
    events: list[Event] = []
    for index, op in enumerate(checked.program.tapes[rank]):
        if is_event(op.kind) and index in spans:
            first_value = (*op.inputs, *op.outputs)[:1]
            microbatches = checked.specs[rank][first_value[0]].microbatches if first_value else 0
            memory = sum(live.get(index, {}).values())
            events.append(Event(rank, index, op.kind, op.layer, microbatches, *spans[index], memory))
    return events


def _fullest(record: RankRecord | None) -> dict[str, int]:
    if record is None or record.memory is None or not record.memory.live:
        return {}
    return max(record.memory.live.values(), key=lambda live: sum(live.values()))


def _counter(record: RankRecord | None, step: StepRecord | None, zero: float) -> Counter:
    """Return the live memory when the rank reached each op. It was measured in a separate step with the same ops."""
    if record is None or record.memory is None or step is None:
        return []
    live, ops = record.memory.live, step.ops
    return counter_of(
        (ops[index].start - record.offset - zero, live[index]) for index in sorted(live.keys() & ops.keys())
    )


def _missing(checked: Checked, records: Mapping[int, RankRecord], whole: bool) -> list[str]:
    tapes = checked.program.tapes
    sentences = [f"rank {rank} left no record" for rank in range(len(tapes)) if rank not in records]
    if not whole:
        sentences.append("no step was recorded to its end on all ranks")
    most_steps = max((len(record.steps) for record in records.values()), default=0)
    for rank, record in sorted(records.items()):
        if len(record.steps) < most_steps:
            sentences.append(f"rank {rank} recorded {counted(len(record.steps), 'step')} and another {most_steps}")
        elif record.steps and record.steps[-1].ended is None:
            place = _place(tapes[rank], record.steps[-1].ops)
            sentences.append(f"rank {rank} came no further than {place} of recorded step {most_steps - 1}")
        if record.memory is not None and len(record.memory.live) < len(tapes[rank]):
            sentences.append(f"rank {rank} measured memory no further than {_place(tapes[rank], record.memory.live)}")
    unmeasured = [str(rank) for rank, record in sorted(records.items()) if record.memory is None]
    if unmeasured:
        sentences.append(f"memory was not measured on rank {', '.join(unmeasured)}")
    return sentences


def _place(tape: Sequence[Op], ops: Iterable[int]) -> str:
    index = max(ops, default=0)
    return f"op {index} {tape[index]}"


@dataclass(frozen=True)
class Pair:
    """A figure, predicted and measured (None: unknown)."""

    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; below 1 if the prediction is too small (None: one of them is unknown)."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured


@dataclass(frozen=True)
class KindRow:
    """All ops of one kind on one rank.

    Attributes:
        rank, kind: the rank, and the kind of op.
        ops: number of these ops on the tape.
        measured_ops: number of these ops that were measured; smaller if the run was interrupted.
        seconds: total time of the measured ops.
    """

    rank: int
    kind: OpKind
    ops: int
    measured_ops: int
    seconds: Pair


@dataclass(frozen=True)
class RankRow:
    """Step of one rank.

    Attributes:
        rank: number of the rank.
        computing: seconds in which it computes.
        exposed: seconds in which it communicates and does not compute.
        idle: seconds in which it does neither, until the last rank has ended.
        memory: largest number of live bytes at the start of an op.
    """

    rank: int
    computing: Pair
    exposed: Pair
    idle: Pair
    memory: Pair


@dataclass(frozen=True)
class Comparison:
    """Comparison of a predicted and a measured step.

    Attributes:
        step: seconds of the step; the measured figure is the mean of the steps of usual length (see `Measured`).
        ranks, kinds: rows by rank, and by rank and kind of op.
        missing: a sentence for each part of a complete trace that is missing.
    """

    step: Pair
    ranks: list[RankRow]
    kinds: list[KindRow]
    missing: list[str]


def compare(
    measured: Measured, predicted: Timeline | None = None, predicted_memory: Sequence[int] | None = None
) -> Comparison:
    """Compare a measurement with a prediction.

    Args:
        measured: the measurement.
        predicted: timeline of the same program in seconds (None: show only the measurement).
        predicted_memory: for each rank, the largest number of live bytes at the start of an op.
    """
    ranks = range(len(measured.timeline.events))
    return Comparison(
        Pair(predicted and predicted.end, sum(measured.ranks[0]) if measured.steps else None),
        [_rank(measured, predicted, predicted_memory, rank) for rank in ranks],
        [row for rank in ranks for row in _kinds(measured, predicted, rank)],
        measured.missing,
    )


def _rank(measured: Measured, predicted: Timeline | None, predicted_memory: Sequence[int] | None, rank: int) -> RankRow:
    expected, times = rank_times(predicted, rank) if predicted else None, measured.ranks[rank]
    return RankRow(
        rank,
        Pair(expected and expected.computing, times.computing),
        Pair(expected and expected.exposed, times.exposed),
        Pair(expected and expected.idle, times.idle),
        Pair(predicted_memory[rank] if predicted_memory else None, sum(measured.live[rank].values()) or None),
    )


def _kinds(measured: Measured, predicted: Timeline | None, rank: int) -> list[KindRow]:
    seconds = measured.seconds[rank]
    expected = {event.op: event.end - event.start for event in predicted.events[rank]} if predicted else None
    places: dict[OpKind, list[int]] = defaultdict(list)
    for index, op in enumerate(measured.timeline.program.tapes[rank]):
        if is_event(op.kind):
            places[op.kind].append(index)
    rows: list[KindRow] = []
    for kind, ops in places.items():
        timed_ops = [index for index in ops if index in seconds]
        total = None if expected is None else sum(expected[index] for index in timed_ops)
        rows.append(
            KindRow(rank, kind, len(ops), len(timed_ops), Pair(total, sum(seconds[index] for index in timed_ops)))
        )
    return rows


FORMAT = 3
MEASURED = "measured.jsonl"
"""The name of the file for all ranks."""


@dataclass(frozen=True)
class TraceFile:
    """Trace of a run, as far as it is in the run's folder.

    Attributes:
        job: the settings of the training (see `shardlab.train.job`).
        fingerprint: fingerprint of the tapes that ran.
        records: records of the ranks.
        problems: a sentence for each file that is incomplete or cannot be read.
    """

    job: dict[str, Any]
    fingerprint: str
    records: dict[int, RankRecord]
    problems: list[str]

    def measured(self, checked: Checked) -> Measured:
        """Combine the records of all ranks.

        Args:
            checked: the program that the job describes.

        Raises:
            UserError: if another program ran, or if the records are invalid.
        """
        if checked.program.fingerprint() != self.fingerprint:
            raise UserError(
                "this trace is of another program than its job stands for now; compare it with the files and the "
                "version of Shardlab that recorded it"
            )
        with _complaining("this trace"):
            combined = measured(checked, self.records)
        return replace(combined, missing=[*self.problems, *combined.missing])


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"measured-rank-{rank}.jsonl"


def write_rank(folder: Path, job: Mapping[str, Any], fingerprint: str, record: RankRecord) -> None:
    """Write the record of one rank so far. The rank's file is replaced atomically."""
    _write(rank_file(folder, record.rank), job, fingerprint, {record.rank: record})


def write_trace(folder: Path, job: Mapping[str, Any], checked: Checked, records: Mapping[int, RankRecord]) -> Measured:
    """Write the file for all ranks, and return the measurement in it."""
    _write(folder / MEASURED, job, checked.program.fingerprint(), records)
    return measured(checked, records)


def read_trace(folder: Path) -> TraceFile:
    """Read the trace of a run: the file for all ranks, or else the files of single ranks.

    Raises:
        UserError: if no file can be read.
    """
    if not folder.is_dir():
        advice = "give the folder of a run, as in runs/fsdp-1"
        raise UserError(f"{folder} is no folder; {advice}") if folder.exists() else missing_path(folder, advice)
    whole = folder / MEASURED
    paths = [whole] if whole.exists() else sorted(folder.glob("measured-rank-*.jsonl"))
    if not paths:
        raise UserError(f"{folder} has no trace; run shardlab train with --trace")
    files: list[TraceFile] = []
    problems: list[str] = []
    for path in paths:
        try:
            files.append(_read(path))
        except (OSError, json.JSONDecodeError, TooDeep) as error:
            problems.append(f"{path} cannot be read as a trace: {error}")
    if not files:
        raise UserError("; ".join(problems))
    records = {rank: record for file in files for rank, record in file.records.items()}
    problems += [sentence for file in files for sentence in file.problems]
    return TraceFile(files[0].job, files[0].fingerprint, records, problems)


@contextmanager
def _complaining(name: str) -> Generator[None, None, None]:
    """Within the context, turn errors about invalid contents into a `UserError` that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"{name} cannot be read ({type(error).__name__}: {error}); record the run again with shardlab train --trace"
        ) from None


def _write(path: Path, job: Mapping[str, Any], fingerprint: str, records: Mapping[int, RankRecord]) -> None:
    entries = list(_entries(records))
    clocks = [[record.rank, record.offset, record.bound] for record in records.values()]
    head = {"format": FORMAT, "job": dict(job), "fingerprint": fingerprint, "clocks": clocks, "entries": len(entries)}
    with atomic_file(path) as part, part.open("w", encoding="utf-8") as file:
        for entry in (head, *entries):
            file.write(json.dumps(entry) + "\n")


def _entries(records: Mapping[int, RankRecord]) -> Iterator[dict[str, Any]]:
    """Yield the entries of a file: the steps in order, each for all ranks, and then the memory."""
    for number in range(max((len(record.steps) for record in records.values()), default=0)):
        for rank, record in records.items():
            if number < len(record.steps):
                yield {"rank": rank, "step": asdict(record.steps[number])}
    for rank, record in records.items():
        if record.memory is not None:
            yield {"rank": rank, "memory": asdict(record.memory)}


def _read(path: Path) -> TraceFile:
    """Read the lines of one file up to the first that cannot be read.

    Raises:
        OSError, JSONDecodeError, TooDeep: if its first line cannot be read.
        UserError: if it has another format, or an entry is invalid.
    """
    first, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    content: Any = parse_document(json.loads, first)
    head = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    if (file_format := head.get("format")) != FORMAT:
        raise UserError(
            f"{path} is a trace of format {file_format!r}, but this version of Shardlab reads format {FORMAT}"
        )
    with _complaining(str(path)):
        records = {rank: RankRecord(rank, offset, bound) for rank, offset, bound in head["clocks"]}
        count = 0
        for line in lines:
            try:
                entry = parse_document(json.loads, line)
            except ValueError:
                break
            _add(records[entry["rank"]], entry)
            count += 1
        whole = count == head["entries"]
        problems = [] if whole else [f"{path} is cut off: {count} of its {head['entries']} entries can be read"]
        return TraceFile(head["job"], head["fingerprint"], records, problems)


def _add(record: RankRecord, entry: Mapping[str, Any]) -> None:
    """Add an entry of a file to a record. JSON has text instead of numbers as keys, and lists instead of tuples."""
    if "step" in entry:
        step = entry["step"]
        ops = {int(index): OpTimes(*times) for index, times in step["ops"].items()}
        record.steps.append(StepRecord(step["began"], step["ended"], ops))
    else:
        memory = entry["memory"]
        record.memory = MemoryRecord({int(index): live for index, live in memory["live"].items()}, memory["peak"])
