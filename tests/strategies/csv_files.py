"""Built-in schedules as pipeline CSV, and what such a file has, without the messages that reading it adds."""

from __future__ import annotations

from pathlib import Path

from shardlab.strategies.schedules import Schedule
from shardlab.strategies.schedules.pytorch_csv import CsvFormat, export_csv, import_csv
from shardlab.strategies.schedules.steps import Recv, Send, ShardedStep, resolve_schedule


def csv_of(schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int = 1, *, form: CsvFormat) -> str:
    return export_csv(resolve_schedule(schedule, ranks, microbatches, stages_per_rank), form=form)


def read_csv(source: str | Path) -> list[list[ShardedStep]]:
    rows = import_csv(source).of_ranks
    text = source.read_text() if isinstance(source, Path) else source
    return [[step for step in row if "SEND" in text or not isinstance(step, Send | Recv)] for row in rows]
