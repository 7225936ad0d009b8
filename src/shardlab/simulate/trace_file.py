"""The files that a traced run leaves: one for each rank while it goes on, and in the end one for all."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from shardlab.check import Checked
from shardlab.program import OpKind, UserError
from shardlab.program.record import MemoryRecord, Moments, RankRecord, StepRecord
from shardlab.simulate.exposed import RankTimes
from shardlab.simulate.measured import Measured, measured
from shardlab.simulate.timeline import Event, Timeline

FORMAT = 2
MEASURED = "measured.json"
"""The name of the file for all ranks."""


@dataclass(frozen=True)
class TraceFile:
    """What a run's folder has of its trace.

    Attributes:
        job: what was trained, in words (see `shardlab.train.described`).
        fingerprint: of the tapes that ran.
        whole: the file for all ranks, if there is one.
        records: the ranks' own files, by rank, if there is not.
    """

    job: dict[str, Any]
    fingerprint: str
    whole: dict[str, Any] | None
    records: dict[int, RankRecord]

    def measured(self, checked: Checked) -> Measured:
        """What was measured, of the tapes that the job stands for.

        Raises:
            UserError: when these are not the tapes that ran.
        """
        if checked.program.fingerprint() != self.fingerprint:
            raise UserError(
                "this trace is of another program than its job stands for now; compare it with the files and the "
                "version of Shardlab that recorded it"
            )
        with _complaining("this trace"):
            return measured(checked, self.records) if self.whole is None else _measured_of(checked, self.whole)


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes what it saw."""
    return folder / f"measured-rank-{rank}.json"


def write_rank(folder: Path, job: Mapping[str, Any], fingerprint: str, record: RankRecord) -> None:
    """What one rank has seen so far; the file is whole at any moment."""
    _write(rank_file(folder, record.rank), {**_head(job, fingerprint), "record": asdict(record)})


def write_trace(folder: Path, job: Mapping[str, Any], checked: Checked, records: Mapping[int, RankRecord]) -> Measured:
    """Write the file for all ranks; what is in it."""
    seen = measured(checked, records)
    events = [[*event._replace(kind=event.kind.value)] for rank in seen.timeline.events for event in rank]
    others = {name: value for name, value in vars(seen).items() if name != "timeline"}
    head = _head(job, checked.program.fingerprint())
    _write(folder / MEASURED, {**head, "fields": Event._fields, "events": events, **others})
    return seen


def read_trace(folder: Path) -> TraceFile:
    """The trace of a run: the file for all ranks, or else those of its ranks, as many as there are.

    Raises:
        UserError: when there is none, or it cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of a run, as in runs/fsdp-1")
    if (folder / MEASURED).exists():
        whole = _read(folder / MEASURED)
        with _complaining(str(folder / MEASURED)):
            return TraceFile(whole["job"], whole["fingerprint"], whole, {})
    paths = sorted(folder.glob("measured-rank-*.json"))
    if not paths:
        raise UserError(f"{folder} has no trace; run shardlab train with --trace")
    files = [_read(path) for path in paths]
    with _complaining(f"the traces of ranks in {folder}"):
        records = [_record(file["record"]) for file in files]
        return TraceFile(files[0]["job"], files[0]["fingerprint"], None, {record.rank: record for record in records})


@contextmanager
def _complaining(name: str) -> Generator[None, None, None]:
    """Within this, a file that is not as it was written is named."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"{name} cannot be read ({type(error).__name__}: {error}); record the run again with shardlab train --trace"
        ) from None


def _head(job: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
    return {"format": FORMAT, "job": dict(job), "fingerprint": fingerprint}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a trace: {error}") from None
    written = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    found = written.get("format")
    if found != FORMAT:
        raise UserError(f"{path} is a trace of format {found!r}, but this version of Shardlab reads format {FORMAT}")
    return written


def _record(words: Mapping[str, Any]) -> RankRecord:
    """Of what JSON makes of a record: numbers that are keys come as text, tuples as lists."""
    steps = [
        StepRecord(step["began"], step["ended"], {int(at): Moments(*each) for at, each in step["ops"].items()})
        for step in words["steps"]
    ]
    memory = words["memory"]
    if memory is not None:
        memory = MemoryRecord({int(at): live for at, live in memory["live"].items()}, memory["peak"])
    return RankRecord(words["rank"], words["offset"], words["bound"], steps, memory)


def _measured_of(checked: Checked, whole: Mapping[str, Any]) -> Measured:
    events: list[list[Event]] = [[] for _ in checked.program.tapes]
    for written in whole["events"]:
        event = Event(*written)
        events[event.rank].append(event._replace(kind=OpKind(event.kind)))
    seconds = [{int(at): time for at, time in rank.items()} for rank in whole["seconds"]]
    times = [RankTimes(*rank) for rank in whole["ranks"]]
    counters = [[(time, live) for time, live in counter] for counter in whole["counters"]]
    others: dict[str, Any] = {name: whole[name] for name in ("steps", "live", "peaks", "bound", "missing")}
    return Measured(Timeline(checked.program, events, in_seconds=True), seconds, times, counters=counters, **others)
