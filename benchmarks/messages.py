"""Collectives by messages from member to member, beside gloo's own: what the executor runs, and why.

    python benchmarks/messages.py

Both ways take turns on the same tensors. `ms` and `ratio` are medians over the turns of rank 0: messages' time by
gloo's.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from shardlab.execute import collectives
from shardlab.train.launch import run_ranks

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Options:
    """Time collectives by messages beside gloo's own."""

    ranks: int = 2
    """Processes."""

    kilobytes: tuple[int, ...] = (16, 256, 1024, 4096, 16384)
    """Sizes of the whole value."""

    turns: int = 20
    """Calls of each way that are timed."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class Row:
    """One collective of one size: seconds."""

    collective: str
    kilobytes: int
    messages: float
    gloo: float
    ratio: float


def timed(rank: int, device: torch.device, options: Options) -> list[Row]:
    """Time all on one rank."""
    size = dist.get_world_size()
    group: Any = dist.new_group(list(range(size)))
    rows: list[Row] = []
    for kilobytes in options.kilobytes:
        whole = torch.ones(256 * kilobytes // size * size)
        piece = whole.chunk(size)[rank].clone()
        starts: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda whole=whole: collectives.all_reduce(whole, dist.ReduceOp.SUM, group),
            "all_gather": lambda whole=whole, piece=piece: collectives.all_gather(whole, piece, group),
            "reduce_scatter": lambda whole=whole, piece=piece: collectives.reduce_scatter(piece, whole, group),
        }
        for name in COLLECTIVES:
            took: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * (options.turns + 2)):
                by_messages = turn % 2 == 0
                with patch.object(collectives, "_by_messages", return_value=by_messages):
                    dist.barrier()
                    began = time.perf_counter()
                    starts[name]().wait()
                    took[by_messages].append(time.perf_counter() - began)
                whole.fill_(1.0)  # or sums of sums would grow
            ours, theirs = took[True][2:], took[False][2:]
            ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
            rows.append(Row(name, kilobytes, median(ours), median(theirs), ratio))
    return rows


def main(options: Options) -> None:
    rows: list[Row] | None = run_ranks(options.ranks, timed, options)
    assert rows is not None
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("collective", box=None, header_style="dim")
    for heading in ("KB", "messages ms", "gloo ms", "ratio"):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: COLLECTIVES.index(row.collective)):
        milliseconds = (f"{1000 * seconds:.2f}" for seconds in (row.messages, row.gloo))
        table.add_row(row.collective, str(row.kilobytes), *milliseconds, f"{row.ratio:.2f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
