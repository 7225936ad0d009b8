"""`shardlab passes`: the table of what rewrites programs."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.cli.console import print_json, stdout_console, table_of
from shardlab.cli.options import Flag
from shardlab.passes import PASSES


@dataclass(frozen=True)
class PassesCommand:
    """List the passes, which rewrite a checked program for a faster step, or one of less memory."""

    json: Flag = False
    """Print JSON alone."""

    def run(self) -> int:
        if self.json:
            print_json([{"name": each.name, "number": each.means, "does": each.does} for each in PASSES.values()])
            return 0
        console = stdout_console()
        table = table_of("pass", "its number", words=2)
        table.add_column("what it does")
        for each in PASSES.values():
            table.add_row(each.name, each.means, each.does)
        console.print(table)
        console.print("\n[dim]See what they make of a strategy with[/] shardlab simulate NAME --passes all")
        return 0
