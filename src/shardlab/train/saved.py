"""Remains of a run that ended early, read off its files."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from shardlab.models.weight_files import weights_at
from shardlab.program.files import PART
from shardlab.rules.pieces import counted

CHECKPOINTS = "checkpoints"
"""Name of the folder, in a run's, that has its checkpoints."""

WEIGHTS, AVERAGED = "weights.safetensors", "ema.safetensors"
METRICS, RECORD = "metrics.jsonl", "run.json"

VALIDATION, VALIDATION_EMA = "validation_loss", "validation_loss_ema"
"""Names of losses in records: of the weights, and of their averages."""

TAIL = 1 << 16
"""Bytes at the end of the metrics in which the last line is."""

_UNFINISHED = re.compile(r"step-\d{6,}(\.old)?\.part")


def sweep(out: Path) -> None:
    """Remove what a run's processes were writing when they were killed, and nothing that others have put there."""
    for part in out.glob(f"*{PART}"):
        part.unlink(missing_ok=True)
    for part in (out / CHECKPOINTS).glob("*"):
        if _UNFINISHED.fullmatch(part.name):
            shutil.rmtree(part, ignore_errors=True)


def checkpoints_in(out: Path) -> list[int]:
    """Steps of a run's complete checkpoints, ascending."""
    numbers = (path.parent.name.removeprefix("step-") for path in (out / CHECKPOINTS).glob("step-*/manifest.json"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def last_figures(path: Path) -> dict[str, float | None]:
    """The last whole line of a run's metrics; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):  # the last one may be torn
            return json.loads(line)
    return {}


def saved_in(out: Path) -> str:
    """A sentence on what there is in an output folder, and what is lost."""
    steps = checkpoints_in(out)
    again = f"; go on after step {steps[-1]} with: shardlab train --resume {out}" if steps else ""
    return _left(out) + again


def _left(out: Path) -> str:
    weights, metrics = weights_at(out / WEIGHTS), out / METRICS
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if weights is not None:
        steps = counted(int(last_figures(metrics).get("step", -1) or 0) + 1, "step")
        if weights.stat().st_mtime < _began(out):
            return f"the weights in {weights} are from before the run was resumed; on record are {steps} ({METRICS})"
        return f"the weights after {steps} are in {weights}"
    if lines:
        return f"there are no weights in {out}, only the figures of {counted(len(lines), 'step')} ({METRICS})"
    return "no step had ended, so nothing is saved"


def _began(out: Path) -> float:
    """When a run began, or was resumed for the last time, in seconds since 1970; 0 where its record does not say."""
    try:
        return datetime.fromisoformat(json.loads((out / RECORD).read_text())["began"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
