"""Compare collectives through shared memory and by point-to-point messages with gloo's.

    python benchmarks/messages.py

The executor's choice between them follows from these times. The implementations take turns on the same tensors. Times
and ratios to gloo's time are medians over the turns of rank 0. Between hosts, there is no shared memory, and large sums
use gloo's algorithm.
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

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from shardlab.execute.transport.collectives import Transport, transport_of
from shardlab.execute.transport.torch_transport import GlooTransport, TorchTransport
from shardlab.train.launch.ranks import run_ranks

WAYS = ("shared", "messages", "gloo")

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Options:
    """Time collectives through shared memory and by messages beside gloo's own."""

    ranks: int = 2
    """Processes."""

    kilobytes: tuple[int, ...] = (16, 256, 1024, 4096, 16384)
    """Sizes of the full tensor."""

    turns: int = 20
    """Timed calls of each implementation."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class Row:
    """Seconds of one collective of one size."""

    collective: str
    kilobytes: int
    shared: float
    messages: float
    gloo: float
    shared_ratio: float
    messages_ratio: float


def timed(rank: int, device: torch.device, options: Options) -> list[Row]:
    """Time all on one rank."""
    size = dist.get_world_size()
    group: Any = dist.new_group(list(range(size)))
    transports: dict[str, Transport] = {
        "shared": transport_of(group),
        "messages": GlooTransport(group),
        "gloo": TorchTransport(group),
    }
    rows: list[Row] = []
    for kilobytes in options.kilobytes:
        whole = torch.ones(256 * kilobytes // size * size)
        piece = whole.chunk(size)[rank].clone()
        calls: dict[str, Callable[[Transport], Any]] = {
            "all_reduce": lambda transport, whole=whole: transport.all_reduce([whole]),
            "all_gather": lambda transport, whole=whole, piece=piece: transport.all_gather([whole], [piece]),
            "reduce_scatter": lambda transport, whole=whole, piece=piece: transport.reduce_scatter([piece], [whole]),
        }
        for name, start in calls.items():
            took: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(len(WAYS) * (options.turns + 2)):
                way = WAYS[turn % len(WAYS)]
                dist.barrier()
                began = time.perf_counter()
                start(transports[way]).wait()
                took[way].append(time.perf_counter() - began)
                whole.fill_(1.0)  # or sums of sums would grow
            seconds = {way: times[2:] for way, times in took.items()}
            ratios = (
                median(a / b for a, b in zip(seconds[way], seconds["gloo"], strict=True))
                for way in ("shared", "messages")
            )
            rows.append(Row(name, kilobytes, *(median(seconds[way]) for way in WAYS), *ratios))
    return rows


def main(options: Options) -> None:
    rows: list[Row] | None = run_ranks(options.ranks, timed, options)
    assert rows is not None
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("collective", box=None, header_style="dim")
    for heading in ("KB", "shared ms", "messages ms", "gloo ms", "shared ratio", "messages ratio"):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: COLLECTIVES.index(row.collective)):
        milliseconds = (f"{1000 * seconds:.2f}" for seconds in (row.shared, row.messages, row.gloo))
        ratios = (f"{ratio:.2f}" for ratio in (row.shared_ratio, row.messages_ratio))
        table.add_row(row.collective, str(row.kilobytes), *milliseconds, *ratios)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
