"""`shardlab passes`: the table of what rewrites programs."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.cli.console import print_fact, print_json, stdout_console, table_of
from shardlab.cli.options import Flag
from shardlab.passes import PASSES
from shardlab.program.pass_names import OFFLOAD


@dataclass(frozen=True)
class PassesCommand:
    """List the passes, which rewrite a checked program for a faster step or for less memory."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        if self.json:
            print_json(
                [
                    {"name": each.name, "number": each.means, "tried": each.tried, "does": each.does}
                    for each in PASSES.values()
                ]
            )
            return 0
        console = stdout_console()
        table = table_of("pass", "its number", "tried", words=3)
        table.add_column("what it does")
        for each in PASSES.values():
            tried = ", ".join(map(str, each.tried)) if each.means else ""
            table.add_row(each.name, "" if each.name == OFFLOAD else each.means, tried, each.does)
        console.print(table, "")
        print_fact(console, "all of them", "shardlab simulate NAME --passes all")
        print_fact(console, "some", "--passes prefetch,bucket=4")
        print_fact(console, "offload", "--offload optimizer=host activations=disk")
        print_fact(console, "or", "--passes offload=optimizer:host+activations:disk,copy-early")
        return 0
