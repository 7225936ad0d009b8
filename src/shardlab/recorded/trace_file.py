"""The files that a traced run leaves: one for each rank while it goes on, and in the end one for all.

Each is a line that says what ran, then one for each rank's first step, each rank's second, ..., and for its memory: of
a file that was cut off, the lines before are read.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from shardlab.check import Checked
from shardlab.errors import TooDeep
from shardlab.program import UserError
from shardlab.program.files import whole_file
from shardlab.program.nesting import parsed
from shardlab.program.record import MemoryRecord, Moments, RankRecord, StepRecord
from shardlab.recorded.measured import Measured, measured

FORMAT = 3
MEASURED = "measured.jsonl"
"""The name of the file for all ranks."""


@dataclass(frozen=True)
class TraceFile:
    """Trace of a run, as much as its folder has of it.

    Attributes:
        job: what was trained, in words (see `shardlab.train.described`).
        fingerprint: of the tapes that ran.
        records: what the ranks saw, by rank.
        lost: a sentence for each file that cannot be read to its end.
    """

    job: dict[str, Any]
    fingerprint: str
    records: dict[int, RankRecord]
    lost: list[str]

    def measured(self, checked: Checked) -> Measured:
        """Put together what was measured, for the tapes that the job stands for.

        Raises:
            UserError: when these are not the tapes that ran.
        """
        if checked.program.fingerprint() != self.fingerprint:
            raise UserError(
                "this trace is of another program than its job stands for now; compare it with the files and the "
                "version of Shardlab that recorded it"
            )
        with _complaining("this trace"):
            seen = measured(checked, self.records)
        return replace(seen, missing=[*self.lost, *seen.missing])


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes what it saw."""
    return folder / f"measured-rank-{rank}.jsonl"


def write_rank(folder: Path, job: Mapping[str, Any], fingerprint: str, record: RankRecord) -> None:
    """Write what one rank has seen so far; the file is whole at any moment."""
    _write(rank_file(folder, record.rank), job, fingerprint, {record.rank: record})


def write_trace(folder: Path, job: Mapping[str, Any], checked: Checked, records: Mapping[int, RankRecord]) -> Measured:
    """Write the file for all ranks; what is in it."""
    _write(folder / MEASURED, job, checked.program.fingerprint(), records)
    return measured(checked, records)


def read_trace(folder: Path) -> TraceFile:
    """The trace of a run: the file for all ranks, or else those of its ranks, as much as there is.

    Raises:
        UserError: when there is none, or none that can be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the folder of a run, as in runs/fsdp-1")
    whole = folder / MEASURED
    paths = [whole] if whole.exists() else sorted(folder.glob("measured-rank-*.jsonl"))
    if not paths:
        raise UserError(f"{folder} has no trace; run shardlab train with --trace")
    found: list[TraceFile] = []
    lost: list[str] = []
    for path in paths:
        try:
            found.append(_read(path))
        except (OSError, json.JSONDecodeError, TooDeep) as error:
            lost.append(f"{path} cannot be read as a trace: {error}")
    if not found:
        raise UserError("; ".join(lost))
    records = {rank: record for file in found for rank, record in file.records.items()}
    lost += [sentence for file in found for sentence in file.lost]
    return TraceFile(found[0].job, found[0].fingerprint, records, lost)


@contextmanager
def _complaining(name: str) -> Generator[None, None, None]:
    """Name the file in any error about a file that is not as it was written."""
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
    with whole_file(path) as part, part.open("w", encoding="utf-8") as file:
        for entry in (head, *entries):
            file.write(json.dumps(entry) + "\n")


def _entries(records: Mapping[int, RankRecord]) -> Iterator[dict[str, Any]]:
    """Step after step, each of all ranks, and then their memory."""
    for number in range(max((len(record.steps) for record in records.values()), default=0)):
        for rank, record in records.items():
            if number < len(record.steps):
                yield {"rank": rank, "step": asdict(record.steps[number])}
    for rank, record in records.items():
        if record.memory is not None:
            yield {"rank": rank, "memory": asdict(record.memory)}


def _read(path: Path) -> TraceFile:
    """Read one file, as far as its lines can be read.

    Raises:
        OSError, JSONDecodeError, TooDeep: not even its first line can be.
        UserError: it is of another format, or an entry is not as it was written.
    """
    first, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    content: Any = parsed(json.loads, first)
    head = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    if (found := head.get("format")) != FORMAT:
        raise UserError(f"{path} is a trace of format {found!r}, but this version of Shardlab reads format {FORMAT}")
    with _complaining(str(path)):
        records = {rank: RankRecord(rank, offset, bound) for rank, offset, bound in head["clocks"]}
        count = 0
        for line in lines:
            try:
                entry = parsed(json.loads, line)
            except ValueError:
                break
            _add(records[entry["rank"]], entry)
            count += 1
        whole = count == head["entries"]
        lost = [] if whole else [f"{path} is cut off: {count} of its {head['entries']} entries can be read"]
        return TraceFile(head["job"], head["fingerprint"], records, lost)


def _add(record: RankRecord, entry: Mapping[str, Any]) -> None:
    """Put an entry where it belongs. In JSON numbers that are keys are text, and tuples lists."""
    if "step" in entry:
        step = entry["step"]
        ops = {int(at): Moments(*each) for at, each in step["ops"].items()}
        record.steps.append(StepRecord(step["began"], step["ended"], ops))
    else:
        memory = entry["memory"]
        record.memory = MemoryRecord({int(at): live for at, live in memory["live"].items()}, memory["peak"])
