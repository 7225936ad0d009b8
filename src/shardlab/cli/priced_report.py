"""What a priced simulation says to a reader."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import stdout_console
from shardlab.cli.priced import MOST_CHECKED, Result
from shardlab.cli.timeline_text import legend, rank_row
from shardlab.program.values import counted
from shardlab.simulate.traced import rank_of

GIB = 2**30

INDENT = 16

SHOWN_RANKS = 16

DRAWN_OPS = 200_000
"""Of more ops no timeline is drawn in the terminal: it would take longer than the simulation."""

WIDEST = 120


def print_priced(result: Result, written: list[Path], console: Console | None = None) -> None:
    """Print all of it; `written` are the files that were made."""
    console = console or stdout_console()
    workload, estimate = result.workload, result.estimate
    model, cluster = result.names
    console.print(Text.assemble((result.entry.name, "bold cyan"), f" of {model} on {cluster}"), soft_wrap=True)
    axes = " x ".join(f"{axis} {size}" for axis, size in workload.mesh.sizes().items() if size > 1) or "1 rank"
    microbatches, rows = counted(workload.microbatches, "microbatch"), counted(workload.rows, "sequence")
    console.print(
        f"{axes}, {microbatches} of {rows} of {workload.model.block} tokens, {workload.precision.name}",
        style="dim",
        soft_wrap=True,
    )
    console.print()
    step, peak = estimate.step, estimate.peak
    speed = workload.tokens / step
    figures = [
        ("step time", seconds_text(step), ""),
        ("tokens/s", f"{speed:,.0f}", f"{speed / workload.mesh.world:,.0f} on each device"),
        ("MFU", f"{workload.mfu(step):.1%}", f"of {workload.cluster.device.name}'s {workload.precision.compute} peak"),
        ("compute", f"{estimate.compute_share:.1%}", "of the step, the mean over ranks"),
        ("exposed", f"{estimate.exposed_share:.1%}", "compute waits for communication: " + _exposed(result)),
        ("bubble", f"{estimate.bubble_share:.1%}", "a rank waits for others, or has ended"),
        (
            "peak memory",
            f"{peak.bytes / GIB:,.2f} GiB",
            f"of {workload.cluster.device.memory / GIB:,.0f} GiB, on rank {peak.rank}: {peak.cause}",
        ),
    ]
    width = max(len(figure) for _, figure, _ in figures)
    for label, figure, what in figures:
        more = f"  {what}" if what else ""
        text = Text.assemble((label.ljust(INDENT), "dim"), (figure.rjust(width), "bold"), (more, "dim"))
        console.print(text, soft_wrap=True)
    shares = sorted(peak.by_category.items(), key=lambda item: -item[1])
    said = ", ".join(f"{category} {bytes / GIB:,.2f}" for category, bytes in shares if bytes)
    console.print(Text.assemble(("".ljust(INDENT), "dim"), said), soft_wrap=True)
    ops = sum(map(len, estimate.traced.program.tapes))
    console.print(_row("ops", f"{ops:,}, of {_simulated(result)}"), soft_wrap=True)
    console.print(_row("check", _checked(result)), soft_wrap=True)
    for note in result.notes:
        console.print(_row("note", note), soft_wrap=True)
    if ops <= DRAWN_OPS:
        console.print()
        _print_ranks(console, result)
    for path in written:
        console.print(_row("written to", str(path)), soft_wrap=True)


def seconds_text(seconds: float) -> str:
    """`3.46 s`, `125.8 ms`, `93.1 us`."""
    if seconds >= 1:
        return f"{seconds:#,.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"


def _exposed(result: Result) -> str:
    shown = [(key, share) for key, share in result.estimate.exposed.items() if share >= 0.0005][:4]
    return ", ".join(f"{kind.replace('_', '-')} on {axis} {share:.1%}" for (kind, axis), share in shown) or "none"


def _simulated(result: Result) -> str:
    rows, ranks = result.estimate.traced.program.ranks, result.workload.mesh.world
    return counted(ranks, "rank") if rows == ranks else f"{rows} of {ranks} ranks; the others are like one of them"


def _checked(result: Result) -> str:
    if result.checked:
        return "passed"
    return f"left out above {MOST_CHECKED:,} ops on all ranks; fewer ranks, layers or microbatches are checked"


def _row(label: str, text: str) -> Text:
    return Text.assemble((label.ljust(INDENT), "dim"), text)


def _print_ranks(console: Console, result: Result) -> None:
    """A row of signs for each rank, with its peak memory."""
    timeline, peaks = result.estimate.timeline(), result.estimate.peaks
    every = -(-timeline.program.ranks // SHOWN_RANKS)
    width = min(WIDEST, max(20, console.width - 22))
    rows = [rank_row(timeline.events[row], timeline.end, width) for row in range(0, timeline.program.ranks, every)]
    end = seconds_text(timeline.end)
    console.print(Text("  rank  0" + end.rjust(width - 1) + "  peak memory", "dim"), no_wrap=True)
    for place, row in enumerate(rows):
        memory = f"{peaks[place * every].bytes / GIB:,.2f} GiB"
        rank = rank_of(timeline.program, place * every)
        console.print(Text(f"{rank:>6}  ") + row + Text(f"  {memory:>11}"), no_wrap=True)
    console.print(legend(rows))
