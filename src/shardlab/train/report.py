"""report.md: what a run came to, with plots, for people who were not there."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves some of its annotations out.

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from shardlab.program.files import whole_file, write_whole
from shardlab.rules.pieces import counted
from shardlab.train.run import Summary, TrainingRun
from shardlab.train.saved import METRICS
from shardlab.train.written import written

PLOTS = "plots.svg"


def write_report(run: TrainingRun, summary: Summary, predicted: float | str) -> None:
    """Write report.md and its plots into a run's folder.

    Args:
        predicted: seconds that a step should take, or why that cannot be said.

    Raises:
        UserError: when they cannot be written.
    """
    records = [json.loads(line) for line in (run.out / METRICS).read_text().splitlines()]
    with written(run.out / PLOTS) as path:
        _plot(records, summary.warm_up, path)
    with written(run.out / "report.md") as path:
        write_whole(path, _text(run, summary, predicted, records))


def _text(run: TrainingRun, summary: Summary, predicted: float | str, records: list[dict[str, Any]]) -> str:
    job, record = run.job, json.loads((run.out / "run.json").read_text())
    last = records[-1]
    mfu = None if run.peak is None or last["mfu"] is None else last["mfu"] * last["dt"] / summary.dt
    hours = summary.seconds * job.ranks / 3600
    rows = {
        "steps": f"{summary.steps}" + (", interrupted" if summary.interrupted else ""),
        "validation loss": f"{summary.validation_before:.4f} before, {summary.validation_after:.4f} after",
        "bits per byte": f"{summary.validation_after * last['bits_per_byte'] / last['loss']:.4f} (validation, after)",
        "step": f"{summary.dt:.4f} s (median after {summary.warm_up} steps)",
        "predicted step": predicted if isinstance(predicted, str) else _prediction(predicted, summary.dt),
        "tokens per second": f"{summary.tps:,.0f}, {summary.tps / job.ranks:,.0f} a rank",
        "MFU": "the device's peak is not known" if mfu is None else f"{mfu:.1%}",
        "memory of the fullest rank": f"{last['memory_max'] / 2**20:,.0f} MiB",
        "device-hours": f"{hours:.4f} ({summary.seconds:.1f} s on {counted(job.ranks, 'device')})",
        "cost": _cost(run.config.logging.price, hours),
    }
    if summary.validation_after_ema is not None:
        rows["validation loss of averages"] = f"{summary.validation_after_ema:.4f} after"
    places = [f"| {each['rank']} | {each['host']} | {each['device']} | {_mesh(each)} |" for each in record["places"]]
    return "\n".join(
        [
            f"# {job.title} on {counted(job.ranks, 'rank')}",
            "",
            f"`{run.command}`, begun {record['began']}.",
            "",
            "| what | figure |",
            "| --- | --- |",
            *(f"| {name} | {figure} |" for name, figure in rows.items()),
            "",
            "![training and validation loss](loss.svg)",
            "",
            f"![bits per byte, tokens per second, memory, step times]({PLOTS})",
            "",
            "## Configuration and plan",
            "",
            "```toml",
            run.config.as_toml().strip(),
            "```",
            "",
            "![one optimizer step in unit costs](strategy.svg)",
            "",
            "## World",
            "",
            f"{record['backend']}, started by {record['launcher']}.",
            "",
            "| rank | host | device | mesh |",
            "| --- | --- | --- | --- |",
            *places,
            "",
        ]
    )


def _prediction(predicted: float, measured: float) -> str:
    return f"{predicted:.4f} s, {predicted / measured:.2f} of what was measured"


def _cost(price: float | None, hours: float) -> str:
    return "give --price, for a device-hour" if price is None else f"{hours * price:.4f} at {price:g} a device-hour"


def _mesh(place: dict[str, Any]) -> str:
    return ", ".join(f"{axis} {number}" for axis, number in place["mesh"].items())


def _plot(records: list[dict[str, Any]], warm_up: int, path: Path) -> None:
    """Four plots over the steps that are on record; the first steps are in no histogram."""
    figure = Figure(figsize=(10, 7))
    FigureCanvasSVG(figure)
    figure.subplots_adjust(0.1, 0.07, 0.98, 0.98, 0.25, 0.18)  # a layout by what is drawn would draw it twice
    steps = [record["step"] for record in records]

    def column(name: str, scale: float = 1.0) -> list[float]:
        return [math.nan if record[name] is None else record[name] * scale for record in records]

    grid = figure.subplots(2, 2)
    for axes, name, scale, label in (
        (grid[0][0], "bits_per_byte", 1.0, "bits per byte (training)"),
        (grid[0][1], "tps", 1.0, "tokens per second"),
        (grid[1][0], "memory", 2.0**-20, "memory (MiB)"),
    ):
        axes.plot(steps, column(name, scale), linewidth=1.2)
        axes.set(xlabel="optimizer step", ylabel=label)
        axes.grid(alpha=0.3)
    grid[1][0].fill_between(steps, column("memory_min", 2**-20), column("memory_max", 2**-20), alpha=0.2)
    times = [record["dt"] for record in records if record["step"] >= warm_up] or column("dt")
    grid[1][1].hist([1000 * time for time in times], bins=30)
    grid[1][1].set(xlabel="milliseconds of a step", ylabel="steps on record")
    with whole_file(path) as part:
        figure.savefig(part, format="svg")
