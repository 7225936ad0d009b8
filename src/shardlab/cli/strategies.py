"""`shardlab strategies`: the table of what is built in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.check import check
from shardlab.cli.console import print_json, stdout_console
from shardlab.cli.options import Flag
from shardlab.program import trace
from shardlab.strategies import STRATEGIES, StrategyEntry
from shardlab.timeline import Traffic, traffic

LAYERS = 8
MICROBATCHES = 8
"""The size of the step whose communication is shown; every strategy fits on its usual number of ranks."""

WIDE = 132
"""Characters from which on a row of the table is a line or two; in less, each strategy gets three."""

NOTES = (
    f"sends   the rank that sends most, in a step of {LAYERS} layers and {MICROBATCHES} microbatches, on 4 ranks "
    "(tensor-parallel: 2, 3d and 4d: 8); W is the size of all weights, A that of a microbatch's activation between two "
    "layers",
    "keeps   of weights W, gradients G and optimizer state O, with n ranks, p of them along the pipeline with v stages "
    "each, s along dp_shard and t along tp; activations come on top, and for a while up to three whole layers",
    "zero-3  keeps what fsdp keeps: fsdp is the page to read, which waits for every collective; zero-3 is the plan to "
    "use, which overlaps them with compute, microbatch by microbatch",
)


@dataclass(frozen=True)
class Strategies:
    """List the built-in strategies, in reading order: what each one splits, sends and keeps."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        if self.json:
            print_json([as_json(entry) for entry in STRATEGIES.values()])
        else:
            print_table(stdout_console())
        return 0


@dataclass(frozen=True)
class Sent:
    """Traffic of the rank that sends most in a step.

    Attributes:
        traffic: its bytes, collectives and messages.
        weights: in units of all weights.
        activations: in units of one microbatch's activation.
    """

    traffic: Traffic
    weights: float
    activations: float

    def __str__(self) -> str:
        sizes = [f"{size:.4g} {unit}" for size, unit in ((self.weights, "W"), (self.activations, "A")) if size]
        times = [
            f"{number} {what}{'s' * (number > 1)}"
            for number, what in ((self.traffic.collectives, "collective"), (self.traffic.messages, "message"))
            if number
        ]
        return f"{' + '.join(sizes)} in {' and '.join(times)}" if times else "nothing"


def sent_by(entry: StrategyEntry) -> Sent:
    """Counted on the tapes; elements have 4 bytes."""
    checked = check(trace(entry.program, entry.grid(entry.ranks), entry.puzzle(entry.ranks, LAYERS), MICROBATCHES))
    sizes = checked.program.sizes
    most = max(traffic(checked), key=lambda each: each.bytes)
    return Sent(most, most.weights / 4 / sum(sizes.weights), most.activations / 4 / sizes.activations[0])


def as_json(entry: StrategyEntry) -> dict[str, Any]:
    """A row for other programs."""
    sent = sent_by(entry)
    return {
        "name": entry.name,
        "splits": entry.splits,
        "sends": {
            "ranks": entry.ranks,
            "layers": LAYERS,
            "microbatches": MICROBATCHES,
            "collectives": sent.traffic.collectives,
            "messages": sent.traffic.messages,
            "bytes": round(sent.traffic.bytes),
            "weights": round(sent.weights, 9),
            "activations": round(sent.activations, 9),
        },
        "keeps": entry.memory,
        "source": entry.source,
    }


def print_table(console: Console) -> None:
    """One row for each strategy, as wide as the terminal allows."""
    wide = console.width >= WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=wide)
    table.add_column("name", style="cyan", no_wrap=True)
    if wide:
        for title in ("split over the ranks", "a rank sends", "a rank keeps"):
            table.add_column(title, min_width=22)
        table.add_column("source", style="dim")
    else:
        table.add_column("")
    for entry in STRATEGIES.values():
        cells = [entry.splits, str(sent_by(entry)), entry.memory, entry.source]
        if not wide:
            facts = f"{cells[0]}\nsends {cells[1]}\nkeeps {cells[2]}\n"
            cells = [Text.assemble(facts, (entry.source, "dim"))]
        table.add_row(entry.name, *cells)
    console.print(table)
    console.print()
    for note in NOTES:
        word, text = note[:8], note[8:]
        grid = Table.grid()
        grid.add_row(Text(word, "dim"), Text(text, "dim"))
        console.print(grid)
    console.print("\n[dim]Check, simulate and draw one with[/] shardlab simulate NAME --svg FILE")
