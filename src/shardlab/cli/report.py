"""Report of `shardlab simulate`: the figures, what the channel models say, and the timelines of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shardlab.check import ChannelModel, Checked
from shardlab.cli.console import print_fact, print_figures, print_path, stdout_console, table_of
from shardlab.cli.timeline_rows import print_timeline
from shardlab.rules.pieces import counted, listed
from shardlab.timeline import Timeline, bubble
from shardlab.timeline.exposed import rank_times
from shardlab.timeline.memory import peak_elsewhere


def print_report(
    name: str,
    checked: Checked,
    timeline: Timeline,
    picture: Path | None = None,
    without: Timeline | None = None,
    console: Console | None = None,
) -> None:
    """Print all of it.

    Args:
        picture: the file that was drawn.
        without: the same plan's timeline on the same layers without recomputation, if it recomputes.
    """
    console = console or stdout_console()
    console.print(Text.assemble((name, "bold cyan"), "  ", (sizes_text(checked), "dim")), soft_wrap=True)
    console.print()
    _print_figures(console, checked, timeline, without)
    console.print()
    _print_ranks(console, timeline)
    if picture is not None:
        console.print()
        print_path(console, "drawn in", picture)


def print_path_parts(path: dict[str, float], text: Callable[[float], str], console: Console | None = None) -> None:
    """Print what a critical path is made of, if there is one; all of it is the step."""
    if not path:
        return
    console, step = console or stdout_console(), sum(path.values())
    table = table_of("critical path", "", "of the step")
    for name, seconds in path.items():
        table.add_row(name, text(seconds), f"{seconds / step:.1%}")
    table.add_row("step", text(step), "100.0%", style="bold")
    console.print()
    console.print(table)


def sizes_text(checked: Checked) -> str:
    """`16 ranks (pp 4 x dp_shard 4), 4 layers, 4 microbatches`."""
    program = checked.program
    grid = f" ({program.mesh})" if len(program.mesh.used) > 1 else ""
    return (
        f"{counted(program.ranks, 'rank')}{grid}, {counted(program.layers, 'layer')}, "
        f"{counted(program.microbatches, 'microbatch')}"
    )


def _frozen(checked: Checked) -> list[tuple[str, str, str]]:
    """The layers that are not trained, if there are any."""
    frozen = checked.frozen
    return [("frozen", str(len(frozen)), f"layer{'s' * (len(frozen) > 1)} {listed(frozen)}")] if frozen else []


def _print_figures(console: Console, checked: Checked, timeline: Timeline, without: Timeline | None) -> None:
    elsewhere = peak_elsewhere(checked)
    peak = [rank for rank, live in enumerate(timeline.peak_memory_by_rank) if live == timeline.peak_memory]
    figures = [
        ("steps", f"{timeline.steps:,.9g}", "when the last op starts"),
        ("end", f"{timeline.end:,.9g}", "when the last op ends"),
        *_bubble(timeline),
        ("peak memory", f"{timeline.peak_memory:,}", f"elements, on rank{'s' * (len(peak) > 1)} {listed(peak)}"),
        *((f"on the {place}", f"{most:,}", "elements at most, of a rank") for place, most in elsewhere.items()),
        *_recomputed(timeline, without),
        *_layers(checked),
        *_frozen(checked),
        ("ops", f"{sum(map(len, checked.program.tapes)):,}", "on the tapes of all ranks"),
    ]
    print_figures(console, figures)
    passed = [model.value for model in ChannelModel if checked.models[model] is None]
    print_fact(console, "channel models", ", ".join(passed) + ": passed", "green")
    for model, why in checked.models.items():
        if why is not None:
            print_fact(console, "", f"{model.value}: refused", "red")
            print_fact(console, "", why)
    print_fact(console, "runs on", ", ".join(checked.backends()) or "no backend", "bold")
    print_drifts(console, checked)


def print_drifts(console: Console, checked: Checked) -> None:
    """A warning for each kind of replicas that may drift; nothing if there are none."""
    for drift in checked.drifts:
        print_fact(console, "warning", "equal only up to rounding", "yellow")
        print_fact(console, "", str(drift))


def _bubble(timeline: Timeline) -> list[tuple[str, str, str]]:
    if timeline.program.mesh.sizes()["pp"] == 1:
        return []
    return [("bubble", f"{bubble(timeline):.2%}", "of the time between a rank's first and last pass")]


def _recomputed(timeline: Timeline, without: Timeline | None) -> list[tuple[str, str, str]]:
    if without is None or not without.end or not without.peak_memory:
        return []
    if (timeline.end, timeline.peak_memory) == (without.end, without.peak_memory):
        return [("recompute", "+0.0%", "changes nothing: no attention scores are kept")]
    memory = timeline.peak_memory / without.peak_memory - 1
    longer = f"{timeline.end / without.end - 1:+.1%}"
    return [("recompute", longer, f"time, {memory:+.1%} peak memory, against none")]


def _layers(checked: Checked) -> list[tuple[str, str, str]]:
    """Name the layers. Each takes a unit, however fine it is, so steps of finer and of whole layers are not to be
    compared."""
    signatures = checked.program.sizes.signatures
    if not any(layer.sliced for layer in signatures):
        return []
    names = sorted({layer.name for layer in signatures})
    return [("layers", str(checked.program.layers), f"{', '.join(names)}; each timed as a layer")]


def _print_ranks(console: Console, timeline: Timeline) -> None:
    """A row of signs for each rank, with the share of the time that it computes and its peak memory."""
    busy = [rank_times(timeline, rank).computing / (timeline.end or 1) for rank in range(len(timeline.events))]
    columns = [
        ("computes", [f"{share:.0%}" for share in busy]),
        ("peak memory", [f"{memory:,}" for memory in timeline.peak_memory_by_rank]),
    ]
    print_timeline(console, timeline, lambda row: row, columns, label=4)
