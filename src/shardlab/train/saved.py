"""Remains of a run that ended early, read off its files."""

from __future__ import annotations

import json
from pathlib import Path

from shardlab.rules.pieces import counted

WEIGHTS, AVERAGED = "weights.safetensors", "ema.safetensors"
METRICS = "metrics.jsonl"


def sweep(out: Path) -> None:
    """Remove the files that were being written when a run's processes were killed: safetensors has its own name."""
    for part in (*out.glob("*.part"), *out.glob(".tmp*")):
        part.unlink(missing_ok=True)


def saved_in(out: Path) -> str:
    """A sentence on what there is in an output folder, and what is lost."""
    weights, metrics = out / WEIGHTS, out / METRICS
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if weights.exists():
        steps = json.loads(lines[-1])["step"] + 1 if lines else 0
        return f"the weights after {counted(steps, 'step')} are in {weights}"
    if lines:
        return f"there are no weights in {out}, only the figures of {counted(len(lines), 'step')} ({METRICS})"
    return "no step had ended, so nothing is saved"
