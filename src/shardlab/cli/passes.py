"""`shardlab passes`: list the passes, which rewrite programs.

`add_passes` reports the effect of each pass on a program, for `simulate --passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.text import Text

from shardlab.cli.console import Report, print_fact, print_json, stdout_console, table_of
from shardlab.cli.options import Flag
from shardlab.common.text import bytes_text
from shardlab.language.pass_names import OFFLOAD, EarlyStart, OffloadTargets
from shardlab.simulate.passes import PASSES, PassResult, helpful_names


@dataclass(frozen=True)
class PassesCommand:
    """List the passes, which rewrite a checked program for a faster step or for less memory."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        if self.json:
            print_json(
                [
                    {"name": entry.name, "number": entry.means, "tried": entry.settings, "does": entry.does}
                    for entry in PASSES.values()
                ]
            )
            return 0
        console = stdout_console()
        table = table_of("pass", "its number", "tried", words=3)
        table.add_column("what it does")
        for entry in PASSES.values():
            numbers = ", ".join(map(str, entry.settings)) if entry.means else ""
            table.add_row(entry.name, "" if entry.name == OFFLOAD else entry.means, numbers, entry.does)
        console.print(table, "")
        print_fact(console, "all of them", "shardlab simulate NAME --passes all")
        print_fact(console, "some", "--passes prefetch,bucket=4")
        print_fact(console, "offload", "--offload optimizer=host activations=disk")
        print_fact(console, "or", "--passes offload=optimizer:host+activations:disk,copy-early")
        return 0


def add_passes(report: Report, results: Sequence[PassResult], time_text: Callable[[float], str]) -> None:
    """Add to a report the end of the step and the peak memory, before the first pass and after each pass.

    The JSON field `settled` is a value of --passes that gives the same program with any prices.

    Args:
        results: program as written, and after each pass. If it is empty, nothing is added.
        time_text: function that formats a time.
    """
    if not results:
        return
    report.data |= {"passes": [_pass_as_json(*pair) for pair in pairwise(results)], "settled": helpful_names(results)}
    table = table_of("pass", "step ends", "peak memory")
    table.add_column("what it does")
    for result in results:
        figures = time_text(result.end), bytes_text(result.peak)
        if not result.name:
            table.add_row("as written", *figures, "")
        else:
            effect = Text(PASSES[result.name].does) if result.setting else Text(f"nothing: {result.why_not}", "dim")
            table.add_row(helpful_names([result]) if result.setting else result.name, *figures, effect)
    report.draw(lambda console: console.print(table, ""))
    if useless := useless_offload(results):
        report.fact("warning", useless, style="yellow")
        report.line()


def useless_offload(results: Sequence[PassResult]) -> str:
    """Return a warning if offloading does not lower the peak memory ("": it does, or nothing is offloaded)."""
    for previous, result in pairwise(results):
        if result.name == OFFLOAD and result.setting and result.peak >= previous.peak:
            return (
                f"offloading {result.setting} does not lower the peak: the fullest rank holds "
                f"{bytes_text(result.peak)} on its device with it and {bytes_text(previous.peak)} without it, "
                "because other tensors take its place"
            )
    return ""


def _pass_as_json(previous: PassResult, result: PassResult) -> dict[str, Any]:
    return {
        "pass": result.name,
        "does": PASSES[result.name].does,
        "number": str(result.setting)
        if isinstance(result.setting, EarlyStart | OffloadTargets)
        else result.setting or 0,
        "why_not": result.why_not,
        "end": float(f"{result.end:.9g}"),
        "end_before": float(f"{previous.end:.9g}"),
        "peak_bytes": result.peak,
        "peak_bytes_before": previous.peak,
    }
