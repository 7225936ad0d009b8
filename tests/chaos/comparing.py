"""Two runs compared bit by bit: what they saved, and what they wrote of their steps."""

# pyright: reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in a folder, by file and name."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {f"{path.name}: {name}": tensor for name, tensor in load_file(path).items()}
    return found


def different(here: Path, there: Path) -> list[str]:
    """Names of the tensors of two folders that differ in a bit, or that one of them lacks."""
    ours, theirs = tensors_of(here), tensors_of(there)
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if name not in ours or name not in theirs or not _same(ours[name], theirs[name])]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(_bits(a), _bits(b)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def checkpoints(run: Path) -> dict[str, Path]:
    """Complete checkpoints of a run, by name: those that have their name."""
    return {path.name: path for path in sorted((run / "checkpoints").glob("step-*")) if path.suffix != ".part"}


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of each line of its metrics."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def wrong(run: Path, reference: Path, *, ended: bool) -> list[str]:
    """What is wrong with a run, against one that nobody disturbed and that kept all its checkpoints.

    Args:
        ended: whether it has come to its end, with its weights.
    """
    found: list[str] = []
    known = checkpoints(reference)
    for name, folder in checkpoints(run).items():
        if name not in known:  # an interrupted run saves after whichever step it is at
            continue
        if names := different(folder, known[name]):
            found.append(f"{name} differs in {len(names)} tensors, the first {names[0]}")
    if ended:
        if losses(run) != losses(reference):
            found.append("the losses of its steps differ, or steps are missing or there twice")
        if names := different(run, reference):
            found.append(f"its weights differ in {len(names)} tensors, the first {names[0]}")
        if checkpoints(run).keys() != checkpoints(reference).keys() and not checkpoints(run):
            found.append("it has no checkpoint")
    return found
