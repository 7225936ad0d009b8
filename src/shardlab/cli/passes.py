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
                    {"name": each.name, "number": each.means, "tried": each.settings, "does": each.does}
                    for each in PASSES.values()
                ]
            )
            return 0
        console = stdout_console()
        table = table_of("pass", "its number", "tried", words=3)
        table.add_column("what it does")
        for each in PASSES.values():
            tried = ", ".join(map(str, each.settings)) if each.means else ""
            table.add_row(each.name, "" if each.name == OFFLOAD else each.means, tried, each.does)
        console.print(table, "")
        print_fact(console, "all of them", "shardlab simulate NAME --passes all")
        print_fact(console, "some", "--passes prefetch,bucket=4")
        print_fact(console, "offload", "--offload optimizer=host activations=disk")
        print_fact(console, "or", "--passes offload=optimizer:host+activations:disk,copy-early")
        return 0


def add_passes(report: Report, passed: Sequence[PassResult], time_text: Callable[[float], str]) -> None:
    """Add to a report the end of the step and the peak memory, before the first pass and after each pass.

    The JSON field `settled` is a value of --passes that gives the same program with any prices.

    Args:
        passed: program as written, and after each pass. If it is empty, nothing is added.
        time_text: function that formats a time.
    """
    if not passed:
        return
    report.data |= {"passes": [_pass_as_json(*pair) for pair in pairwise(passed)], "settled": helpful_names(passed)}
    table = table_of("pass", "step ends", "peak memory")
    table.add_column("what it does")
    for each in passed:
        figures = time_text(each.end), bytes_text(each.peak)
        if not each.name:
            table.add_row("as written", *figures, "")
        else:
            what = Text(PASSES[each.name].does) if each.setting else Text(f"nothing: {each.why_not}", "dim")
            table.add_row(helpful_names([each]) if each.setting else each.name, *figures, what)
    report.draw(lambda console: console.print(table, ""))
    if useless := useless_offload(passed):
        report.fact("warning", useless, style="yellow")
        report.line()


def useless_offload(passed: Sequence[PassResult]) -> str:
    """Return a warning if offloading does not lower the peak memory ("": it does, or nothing is offloaded)."""
    for before, after in pairwise(passed):
        if after.name == OFFLOAD and after.setting and after.peak >= before.peak:
            return (
                f"offloading {after.setting} does not lower the peak: the fullest rank holds "
                f"{bytes_text(after.peak)} on its device with it and {bytes_text(before.peak)} without it, "
                "because other tensors take its place"
            )
    return ""


def _pass_as_json(before: PassResult, after: PassResult) -> dict[str, Any]:
    return {
        "pass": after.name,
        "does": PASSES[after.name].does,
        "number": str(after.setting) if isinstance(after.setting, EarlyStart | OffloadTargets) else after.setting or 0,
        "why_not": after.why_not,
        "end": float(f"{after.end:.9g}"),
        "end_before": float(f"{before.end:.9g}"),
        "peak_bytes": after.peak,
        "peak_bytes_before": before.peak,
    }
