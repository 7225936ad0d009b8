"""Remains of a run that ended early, read off its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from shardlab.rules.pieces import counted

CHECKPOINTS = "checkpoints"
"""Name of the folder, in a run's, that has its checkpoints."""

WEIGHTS, AVERAGED = "weights.safetensors", "ema.safetensors"
METRICS = "metrics.jsonl"


def sweep(out: Path) -> None:
    """Remove the files that were being written when a run's processes were killed: safetensors has its own name."""
    for part in (*out.glob("*.part"), *out.glob(".tmp*")):
        part.unlink(missing_ok=True)
    for part in (out / CHECKPOINTS).glob("*.part"):
        shutil.rmtree(part, ignore_errors=True)


def saved_in(out: Path) -> str:
    """A sentence on what there is in an output folder, and what is lost."""
    steps = [int(path.name[5:]) for path in (out / CHECKPOINTS).glob("step-*") if path.name[5:].isdecimal()]
    again = f"; go on after step {max(steps)} with: shardlab train --resume {out}" if steps else ""
    return _left(out) + again


def _left(out: Path) -> str:
    weights, metrics = out / WEIGHTS, out / METRICS
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if weights.exists():
        steps = json.loads(lines[-1])["step"] + 1 if lines else 0
        return f"the weights after {counted(steps, 'step')} are in {weights}"
    if lines:
        return f"there are no weights in {out}, only the figures of {counted(len(lines), 'step')} ({METRICS})"
    return "no step had ended, so nothing is saved"
