"""`shardlab strategies`: what is built in."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from shardlab.cli.options import Flag
from shardlab.strategies import STRATEGIES


@dataclass(frozen=True)
class Strategies:
    """List the built-in strategies, in the order in which they are best read."""

    json: Flag = False
    """Print JSON alone."""

    def run(self) -> int:
        rows = [{"name": e.name, "splits": e.splits, "source": e.source} for e in STRATEGIES.values()]
        if self.json:
            print(json_format.dumps(rows, indent=2))
            return 0
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        table.add_column("name", style="cyan", no_wrap=True)
        table.add_column("split over the ranks", min_width=24)
        table.add_column("source", style="dim")
        for row in rows:
            table.add_row(*row.values())
        console = Console(highlight=False)
        console.print(table)
        console.print()
        console.print("[dim]Check, time and draw one with[/] shardlab simulate NAME --svg FILE")
        return 0
