"""Functions that the measurement tests run on every rank."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from pathlib import Path

import torch

from shardlab.measure.collectives import CollectiveBench, MeasuringRanks, make_case, measure_collectives
from shardlab.measure.fits import KINDS
from shardlab.measure.layers import ComputeBench, measure_compute


def collectives(rank: int, bench: CollectiveBench, file: Path) -> bool:
    return measure_collectives(rank, torch.device("cpu"), bench, file)


def compute(rank: int, bench: ComputeBench, file: Path) -> bool:
    return measure_compute(rank, torch.device("cpu"), bench, file)


def wrong_elements(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """Return the wrong elements of every collective, as it is, and with one expected element changed."""
    team = MeasuringRanks(rank, torch.device("cpu")).team(size)
    counts: dict[str, tuple[int, int]] = {}
    for kind in KINDS:
        if kind == "send_recv" and size != 2:
            continue
        right = make_case(kind, 96, team).wrong()
        case = make_case(kind, 96, team)
        if case.expected is not None:
            case.expected[-1] += 1
        counts[kind] = right, case.wrong()
    return counts


def teams(rank: int) -> list[tuple[int, ...]]:
    """The teams of two of this rank's world, and the sum over it of its members' ranks."""
    team = MeasuringRanks(rank, torch.device("cpu")).team(2)
    x = torch.tensor([rank])
    torch.distributed.all_reduce(x, group=team.group)
    return [team.ranks, (int(x),)]
