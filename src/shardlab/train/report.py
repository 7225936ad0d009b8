"""Reports of a run: report.md with its plots, and the loggers of TensorBoard and Weights & Biases.

`write_report` runs after the last step. `draw_runs` plots the metrics of one or more runs. `open_loggers` gives the
loggers that a run writes to at each step; their packages are imported only if they are used.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# matplotlib, wandb and tensorboard leave some of their annotations out.

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

from matplotlib.figure import Figure

from shardlab.common.files import atomic_file, write_atomically
from shardlab.common.text import counted
from shardlab.language import UserError
from shardlab.train.config import LoggingConfig
from shardlab.train.history import METRICS, VALIDATION, VALIDATION_EMA, writing
from shardlab.train.run import WARM_UP, Summary, TrainingRun

PLOTS = "plots.svg"


def write_report(run: TrainingRun, summary: Summary, predicted: float | str) -> None:
    """Write report.md and its plots into a run's folder.

    Args:
        run: settings of the run.
        summary: results of the run.
        predicted: predicted seconds of a step, or the reason why there is no prediction.

    Raises:
        UserError: if they cannot be written.
    """
    records = [json.loads(line) for line in (run.out / METRICS).read_text().splitlines()]
    with writing(run.out / PLOTS) as path:
        start_record = {"step": -1, VALIDATION: summary.validation_before}
        end_losses = {VALIDATION: summary.validation_after, VALIDATION_EMA: summary.validation_after_ema}
        ends = [start_record, {"step": summary.steps - 1, **end_losses}]
        draw_runs({run.job.title: records}, path, summary.warm_up, ends)
    with writing(run.out / "report.md") as path:
        write_atomically(path, _text(run, summary, predicted, records))


def usual_times(records: Sequence[Mapping[str, Any]], warm_up: int) -> list[float]:
    """Return the seconds of the recorded steps without the outliers that would hide the rest of a histogram.

    The first `warm_up` steps are left out. An outlier takes more than 1.5 times the median, and lies above the upper
    fence of Tukey 1977 ("Exploratory Data Analysis"): three interquartile ranges above the third quartile.
    """
    times = [record["dt"] for record in records if record["step"] >= warm_up] or [record["dt"] for record in records]
    if len(times) < 2:
        return times
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return [time for time in times if time <= max(1.5 * middle, high + 3 * (high - low))]


def draw_runs(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    path: Path,
    warm_up: int = WARM_UP,
    ends: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Draw the metrics of runs over each other: loss, speed, learning rate, gradient norm, memory and step times.

    Args:
        runs: records of the steps of each run, by its name.
        path: file to write; its suffix is the format.
        warm_up: number of first steps of each run that are not in the histogram.
        ends: records of a single run's validation losses before its first step and after its last one.
    """
    figure = Figure(figsize=(10, 9))
    # A fixed layout, since an automatic one draws everything twice.
    figure.subplots_adjust(0.1, 0.06, 0.98, 0.98, 0.25, 0.25)
    grid = figure.subplots(3, 2)
    several = len(runs) > 1
    for number, (run, records) in enumerate(runs.items()):
        steps, color = [record["step"] for record in records], f"C{number}"
        for axes, name, scale, label in (
            (grid[0][0], "loss", 1.0, "loss (nats per token)"),
            (grid[0][1], "tps", 1.0, "tokens per second"),
            (grid[1][0], "learning_rate", 1.0, "learning rate"),
            (grid[1][1], "grad_norm", 1.0, "norm of the gradient"),
            (grid[2][0], "memory", 2.0**-20, "memory (MiB)"),
        ):
            axes.plot(steps, _column(records, name, scale), linewidth=1.2, color=color, label=run)
            axes.set(xlabel="optimizer step", ylabel=label)
        rows = [*ends, *records]
        finished_steps = [row["step"] + 1 for row in rows]  # a step's validation comes after it
        for name, marker in ((VALIDATION, "o"), (VALIDATION_EMA, "x")):
            grid[0][0].plot(finished_steps, _column(rows, name), marker, markersize=4, color=color)
        smallest, largest = (_column(records, f"memory_{end}", 2.0**-20) for end in ("min", "max"))
        grid[2][0].fill_between(steps, smallest, largest, alpha=0.2, color=color)
        times = usual_times(records, warm_up)
        left_out = "" if len(times) == len(records) else f" ({counted(len(records) - len(times), 'outlier')} left out)"
        milliseconds = [1000 * time for time in times]
        grid[2][1].hist(milliseconds, bins=30, color=color, alpha=0.6 if several else 1.0)
        grid[2][1].set(xlabel="milliseconds of a step" + left_out * (not several), ylabel="steps on record")
    if all(record.get("grad_norm") is None for records in runs.values() for record in records):
        grid[1][1].text(0.5, 0.5, "the program computes none", ha="center", transform=grid[1][1].transAxes)
    grid[2][0].set_ylim(bottom=0)
    for axes in grid.flat[:5]:
        axes.grid(alpha=0.3)
    if several:
        grid[0][0].legend()
    with atomic_file(path) as part:
        figure.savefig(part, format=path.suffix[1:], metadata={"Creator": "shardlab"})


_START = re.compile(r"(?:offline-)?run-(\d+_\d+)-(.+?)(?:-\d+)?")
"""Name of the folder that wandb makes for each start of a run: date and time, and the id of the run."""


class TensorBoard:
    """Logger that writes event files into the run's folder, for `tensorboard --logdir`.

    Args:
        folder: folder of the run.
        step: step at which the run is resumed, if it is. TensorBoard drops the figures of this and later steps.
    """

    def __init__(self, folder: Path, step: int | None = None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def log(self, metrics: Mapping[str, float | None]) -> None:
        """Log the figures of a step. None stands for a figure that is not known, or not finite."""
        for name, figure in known_figures(metrics).items():
            self._writer.add_scalar(name, figure, int(metrics["step"] or 0))

    def close(self) -> None:
        """End the log."""
        self._writer.close()


class WeightsAndBiases:
    """Logger to a run of Weights & Biases. The variables of wandb apply: WANDB_MODE=offline sends nothing.

    Args:
        folder: folder of the run. wandb makes a subfolder for each start, whose name contains wandb's id of the run.
        record: settings of the run.
        step: step at which the run is resumed, if it is. The run's history at wandb continues.
        rewinds: whether `step` or a later step was logged before. If so, the history is cut off at `step`.
    """

    def __init__(
        self, folder: Path, record: Mapping[str, Any], step: int | None = None, *, rewinds: bool = False
    ) -> None:
        import wandb

        starts = sorted(match.groups() for path in folder.glob("wandb/*") if (match := _START.fullmatch(path.name)))
        extra: dict[str, Any] = {}
        if starts and step and rewinds:
            extra = {"resume_from": f"{starts[-1][1]}?_step={step - 1}"}
        elif starts and step:
            extra = {"id": starts[-1][1], "resume": "allow"}
        try:
            self._run = wandb.init(project="shardlab", name=folder.name, dir=str(folder), config=dict(record), **extra)
        except wandb.Error as error:
            raise UserError(f"--wandb: {error}; log in with wandb login, or set WANDB_MODE=offline") from error

    def log(self, metrics: Mapping[str, float | None]) -> None:
        self._run.log(known_figures(metrics), step=int(metrics["step"] or 0))

    def close(self) -> None:
        self._run.finish()


Logger = TensorBoard | WeightsAndBiases
"""Receiver of a run's figures."""


def open_loggers(
    config: LoggingConfig, folder: Path, record: Mapping[str, Any], step: int | None = None, *, rewinds: bool = False
) -> list[Logger]:
    """Open the loggers that a configuration asks for.

    Args:
        config: section `logging` of the configuration.
        folder: folder of the run.
        record: settings of the run.
        step: step at which the run is resumed, if it is.
        rewinds: whether `step` or a later step was logged before.
    """
    loggers: list[Logger] = [TensorBoard(folder, step)] if config.tensorboard else []
    return [*loggers, WeightsAndBiases(folder, record, step, rewinds=rewinds)] if config.wandb else loggers


def require_loggers(config: LoggingConfig) -> None:
    """Check that the packages of the loggers are installed, before anything is started.

    Raises:
        UserError: if one is missing.
    """
    for name, enabled in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if enabled and find_spec(name) is None:
            raise UserError(f"--{name} needs the package {name}, which is missing: pip install {name}")


def known_figures(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the figures that are known, without the number of the step."""
    return {name: figure for name, figure in metrics.items() if figure is not None and name != "step"}


def _text(run: TrainingRun, summary: Summary, predicted: float | str, records: list[dict[str, Any]]) -> str:
    job, record = run.job, json.loads((run.out / "run.json").read_text())
    last = records[-1]
    hours = summary.seconds * job.ranks / 3600
    rows = {
        "steps": f"{summary.steps}" + (", interrupted" if summary.interrupted else ""),
        "validation loss": f"{summary.validation_before:.4f} before, {summary.validation_after:.4f} after",
        "bits per byte": f"{summary.validation_after * last['bits_per_byte'] / last['loss']:.4f} (validation, after)",
        "step": f"{summary.dt:.4f} s (median after {summary.warm_up} steps)",
        "predicted step": predicted if isinstance(predicted, str) else _prediction(predicted, summary.dt),
        "tokens per second": f"{summary.tps:,.0f}, {summary.tps / job.ranks:,.0f} a rank",
        "MFU": _mfu(run, summary, records),
        "memory of the fullest rank": f"{last['memory_max'] / 2**20:,.0f} MiB",
        "device-hours": f"{hours:.4f} ({summary.seconds:.1f} s on {counted(job.ranks, 'device')})",
        "cost": _cost(run.config.logging.price, hours),
    }
    if summary.validation_after_ema is not None:
        rows["validation loss of averages"] = f"{summary.validation_after_ema:.4f} after"
    rank_rows = [f"| {rank['rank']} | {rank['host']} | {rank['device']} | {_mesh(rank)} |" for rank in record["places"]]
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
            f"![loss, tokens per second, learning rate, gradient norm, memory, step times]({PLOTS})",
            "",
            "Dots are validation losses, crosses those of averaged weights.",
            "",
            "## Configuration and plan",
            "",
            "```toml",
            run.config.as_toml().strip(),
            "```",
            "",
            "![one optimizer step in teaching costs](strategy.svg)",
            "",
            "## World",
            "",
            f"{record['backend']}, started by {record['launcher']}.",
            "",
            "| rank | host | device | mesh |",
            "| --- | --- | --- | --- |",
            *rank_rows,
            "",
        ]
    )


def _mfu(run: TrainingRun, summary: Summary, records: Sequence[Mapping[str, Any]]) -> str:
    """Return the model FLOPs utilization of a step of median duration, or the reason why it is not known."""
    if run.peak is None:
        return "the device's peak FLOP/s are not known; shardlab bench compute measures them"
    utilizations = [record["mfu"] * record["dt"] / summary.dt for record in records if record["mfu"] is not None]
    if not utilizations or utilizations[-1] > 1:
        return "steps were faster than the measured peak FLOP/s; shardlab bench compute measures them again"
    return f"{utilizations[-1]:.1%}"


def _prediction(predicted: float, measured: float) -> str:
    return f"{predicted:.4f} s, {predicted / measured:.2f} of the measured time"


def _cost(price: float | None, hours: float) -> str:
    return "give --price, for a device-hour" if price is None else f"{hours * price:.4f} at {price:g} a device-hour"


def _mesh(rank: dict[str, Any]) -> str:
    return ", ".join(f"{axis} {number}" for axis, number in rank["mesh"].items())


def _column(records: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0) -> list[float]:
    """Return a figure of every record; NaN for records without it."""
    return [math.nan if record.get(name) is None else record[name] * scale for record in records]
