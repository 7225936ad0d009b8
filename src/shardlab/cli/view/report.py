"""Report of `shardlab view`: the six figures of each timeline, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from shardlab.cli.console import Report, table_of
from shardlab.cli.simulate.command import units_text
from shardlab.common.text import seconds_text
from shardlab.simulate.timeline.figures import Figures, IdleCause

UNEQUAL = 0.0005
"""A rank is named as a straggler if its compute time is the longest, and exceeds the mean by at least this share of
the mean."""


def figures_report(
    title: str, note: str, timelines: Mapping[str, Figures], rows: Sequence[str], *, in_seconds: bool
) -> Report:
    """Return a report of the figures of one or several timelines, and of their difference if there are two.

    Args:
        title, note: title of the step, and a sentence about it.
        timelines: figures by the name of the timeline.
        rows: names of the rows.
        in_seconds: whether times are seconds, rather than units.
    """
    report = Report(title=title, unit="seconds" if in_seconds else "units")
    report.data["timelines"] = [{"name": name, **figures.as_dict()} for name, figures in timelines.items()]
    report.line(Text.assemble((title, "bold cyan"), "  ", (note, "dim")), wrap=False)
    report.line()
    all_figures = list(timelines.values())
    several = len(all_figures) > 1
    table = table_of("", *([*timelines, "difference"] if several else [""]))
    table.show_header = several
    time_text = seconds_text if in_seconds else units_text

    def add(label: str, values: list[float | None], text: Callable[[float], str] = _percent, none: str = "-") -> None:
        cells = [none if value is None else text(value) for value in values]
        first, last = values[0], values[-1]
        if several:
            has_values = first is not None and last is not None
            cells.append(_add_sign(last - first, text) if has_values and first is not None and last is not None else "")
        table.add_row(label, *cells)

    add("step", [figures.end for figures in all_figures], time_text)
    add("compute", [figures.compute for figures in all_figures])
    add("exposed communication", [figures.exposed for figures in all_figures])
    add("overlap of communication", [figures.overlap for figures in all_figures], none="no communication")
    add("idle", [sum(figures.idle.values()) for figures in all_figures])
    for cause in IdleCause:
        if any(cause in figures.idle for figures in all_figures):
            add(f"  {cause.value}", [figures.idle.get(cause, 0.0) for figures in all_figures])
    if any(figures.bubble_with_communication is not None for figures in all_figures):
        if all_figures[0].bubble is not None:
            add("bubble", [figures.bubble for figures in all_figures])
        add("bubble with communication", [figures.bubble_with_communication for figures in all_figures])
        if all_figures[0].closed_form is not None:
            add(f"  {all_figures[0].formula}", [figures.closed_form for figures in all_figures])
    excess = [figures.excess if figures.excess >= UNEQUAL else None for figures in all_figures]
    name = f": {rows[all_figures[-1].straggler]}, beyond the mean" if any(excess) else ""
    add(f"straggler{name}", excess, none="none")
    report.draw(lambda console: console.print(table))
    return report


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _add_sign(difference: float, text: Callable[[float], str]) -> str:
    return f"{'-' if difference < 0 else '+'}{text(abs(difference))}"
