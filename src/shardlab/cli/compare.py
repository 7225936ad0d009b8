"""`shardlab compare RUN ...`: compare a traced run with its prediction, or several runs with each other.

One run: `read_trace` reads the trace, `shardlab.simulate` predicts the times of its tapes, and `comparison_report`
compares the step, each rank and its kinds of op. Several runs: `run_figures` and `common_steps` collect the figures of
the runs (no trace is needed), and `runs_report` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.text import Text

from shardlab.cli.console import Report, print_path
from shardlab.cli.options import NO_PICTURES, Flag, PictureFlags, writing
from shardlab.cli.plan_options import RecipeName, cluster_called
from shardlab.cli.train.this_machine import workload_of
from shardlab.common.text import counted
from shardlab.language import UserError
from shardlab.simulate.hardware.profile import default_path
from shardlab.simulate.predict.estimate import estimate as estimate_of
from shardlab.simulate.predict.limits import broken_limit
from shardlab.simulate.timeline.measured import Comparison, KindRow, Pair, compare, read_trace
from shardlab.simulate.timeline.run import memory_counters
from shardlab.train.history import VALIDATION

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.simulate.predict.estimate import Estimate
    from shardlab.simulate.timeline import Timeline
    from shardlab.simulate.timeline.measured import Measured
    from shardlab.simulate.timeline.prices import Prices
    from shardlab.train.history import PastRun
    from shardlab.train.job import Job


SHOWN_RANKS = 8
"""Largest number of ranks that are shown. --json has all."""

SHOWN_RUNS = 3
"""Largest number of runs that are named because they are in the same parent folder as the compared run."""

SHOWN_STEPS = 6
"""Number of steps for which the losses of several runs are shown. --json has all."""

NOTE = (
    "exposed communication: a rank waits for communication; idle: it waits for other ranks or a core; these and its "
    "computing add up to the step; an op's time is its total in a step; measured: means over the steps of usual length"
)

NEGLIGIBLE = 1e-3
"""Share of a rank's time. A kind of op is left out if its predicted and its measured share are smaller."""

_SIDES = ("predicted", "measured")


@dataclass(frozen=True)
class Compare:
    """Compare the prediction and the measurement of a run: time per rank and kind of op, the step, memory.

    The run needs a trace (shardlab train --trace); of a run that stopped early, the steps so far are shown. Several
    runs, which need no trace, are compared by loss, speed and memory, and --svg draws their curves into one picture.
    """

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")
    ] = ()
    """Folder of a run, or of several."""

    cluster: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: local, if it is there)")
    ] = None
    """Cluster of the prediction: a name; local, which is this machine as shardlab bench measured it; or
    path/to/profile.json, the file of bench --profile."""

    other_machine: Flag = False
    """Accept a profile that was measured on another machine."""

    recipe: RecipeName = None

    json: Flag = False
    """Print only JSON."""

    pictures: PictureFlags = NO_PICTURES

    def run(self) -> int:
        self.pictures.check("comparison.svg")
        if not self.folders:
            raise UserError("no run is given; give the folder of a run, or of several, such as runs/fsdp-1 runs/ddp-1")
        return self._beside_prediction(self.folders[0]) if len(self.folders) == 1 else self._beside_each_other()

    def _beside_each_other(self) -> int:
        """Compare several runs."""
        from shardlab.train.history import read_records, read_run

        single_options = {"--cluster": self.cluster, "--other-machine": self.other_machine or None}
        single_options |= {"--recipe": self.recipe, "--trace": self.pictures.trace}
        if conflicts := [name for name, value in single_options.items() if value is not None]:
            raise UserError(f"{conflicts[0]} is for the prediction of one run, but {len(self.folders)} runs are given")
        if len({folder.resolve() for folder in self.folders}) < len(self.folders):
            raise UserError("a run is given twice; give different runs")
        runs = [read_run(folder) for folder in self.folders]
        records = {str(folder): read_records(folder) for folder in self.folders}
        for folder, steps in records.items():
            if not steps:
                raise UserError(f"{folder} has no recorded steps yet; give runs that have some")
        if self.pictures.svg is not None:
            from shardlab.train.report import draw_runs

            with writing("--svg", self.pictures.svg):
                draw_runs(records, self.pictures.svg)
        figures = [run_figures(run, steps) for run, steps in zip(runs, records.values(), strict=True)]
        rows = common_steps(list(records.values()))
        runs_report(figures, rows, self.pictures.files).show(json=self.json)
        return 0

    def _beside_prediction(self, folder: Path) -> int:
        """Compare one run with its prediction, and name other runs in its parent folder."""
        note = _sentence_about_runs_beside(folder)
        if note and not any(folder.glob("measured*.jsonl")):
            raise UserError(f"{folder} has no trace (shardlab train --trace) to compare with a prediction; {note}")
        run = traced_run(folder, self.cluster, self.recipe, other_machine=self.other_machine)
        measured, estimate = run.measured, run.estimate
        predicted = estimate.timeline() if estimate else None
        comparison = compare(
            measured, predicted, [max(memory.before_ops) for memory in estimate.memory] if estimate else None
        )
        self._draw(predicted, measured, run.job)
        timelines = {"measured": (measured.timeline, measured.counters)}
        if self.pictures.trace and estimate and predicted:
            timelines = {"predicted": (predicted, memory_counters(estimate.traced, estimate.times)), **timelines}
        self.pictures.save_trace(timelines)
        data = as_json(run.settings, run.checked, comparison, measured, run.limit)
        report = comparison_report(comparison, run.title, data, self.pictures.files)
        if note:
            report.line(Text(note, "dim"), wrap=False)
        report.show(json=self.json)
        return 0

    def _draw(self, predicted: Timeline | None, measured: Measured, job: Job) -> None:
        if self.pictures.svg is None:
            return
        from shardlab.draw import save_comparison  # matplotlib takes long to import

        timelines = {**({"predicted": predicted} if predicted else {}), "measured": measured.timeline}
        with writing("--svg", self.pictures.svg):
            save_comparison(timelines, self.pictures.svg, f"{job.title}: one optimizer step", self.pictures.color_by)


@dataclass(frozen=True)
class TracedRun:
    """Traced run of `shardlab train`, with its prediction.

    Attributes:
        settings, job: training job, as the trace stores it and as an object.
        checked: the program that ran.
        measured: measurement of the run.
        estimate: prediction of the step (None: no cluster is given, and this machine was not measured).
        prices: times of ops in the prediction (None: there is no prediction).
        limit: limit of the recipe's framework that the plan exceeds ("": none).
    """

    settings: dict[str, Any]
    job: Job
    checked: Checked
    measured: Measured
    estimate: Estimate | None
    prices: Prices | None
    limit: str

    @property
    def title(self) -> str:
        return f"{self.job.title} on {counted(self.job.ranks, 'rank')}"


def traced_run(folder: Path, cluster: str | None, recipe: str | None, *, other_machine: bool) -> TracedRun:
    """Return a traced run and its prediction.

    Args:
        folder: folder of the run.
        cluster, recipe: names of the cluster and the recipe of the prediction (None: this machine, and Shardlab's own).
        other_machine: whether a profile of another machine is accepted.

    Raises:
        UserError: if the folder has no readable trace, or the cluster or the recipe does not exist.
    """
    trace = read_trace(folder)

    from shardlab.train.history import starting_folder
    from shardlab.train.job import job_from_dict

    job = job_from_dict(trace.job, starting_folder(folder))
    checked = job.checked()
    measured = trace.measured(checked)
    if cluster is None and not default_path().exists():
        return TracedRun(trace.job, job, checked, measured, None, None, "")
    target = cluster_called(cluster or "local", other_machine=other_machine)
    target.require(job.ranks)
    workload = workload_of(job, target, recipe)
    estimate = estimate_of(checked, workload.prices, workload.kept_sizes)
    return TracedRun(trace.job, job, checked, measured, estimate, workload.prices, broken_limit(workload))


def run_figures(run: PastRun, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a run's figures: last losses, largest memory, and medians over its steps after the warm-up."""
    from shardlab.train.run import WARM_UP

    later = records[min(WARM_UP, len(records) - 1) :]
    medians = {name: median(record[name] for record in later) for name in ("dt", "tps") if name in later[0]}
    mfus = [record["mfu"] for record in later if record.get("mfu") is not None]
    return {
        "folder": str(run.folder),
        "strategy": run.strategy,
        "ranks": run.record.get("ranks"),
        "ended": run.ended,
        "steps": run.steps,
        "loss": records[-1]["loss"],
        "validation_loss": run.validation_loss,
        **medians,
        "mfu": median(mfus) if mfus else None,
        "memory": max((record["memory_max"] for record in records if "memory_max" in record), default=None),
    }


def common_steps(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the loss, validation loss and gradient norm of every run at each step that all runs recorded."""
    by_step = [{record["step"]: record for record in records} for records in runs]
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))
    names = ("loss", VALIDATION, "grad_norm")
    return [
        {"step": step, **{name: [records[step].get(name) for records in by_step] for name in names}} for step in common
    ]


def as_json(
    job: dict[str, Any], checked: Checked, comparison: Comparison, measured: Measured, limit: str = ""
) -> dict[str, Any]:
    """Return all figures for --json, with times in seconds and memory in bytes.

    Args:
        limit: limit of the recipe's framework that the plan exceeds ("": none).
    """
    return {
        "job": job,
        "fingerprint": checked.program.fingerprint(),
        "step": _pair(comparison.step),
        "steps": measured.steps,
        "clock_bound": measured.bound,
        "ranks": [
            {
                **{name: _pair(value) if isinstance(value, Pair) else value for name, value in vars(row).items()},
                "memory_by_category": measured.live[row.rank],
                "memory_at_any_moment": measured.peaks[row.rank] or None,
            }
            for row in comparison.ranks
        ],
        "ops": [
            {"rank": row.rank, "op": row.kind.value, "ops": row.ops, "seen": row.measured_ops, **_pair(row.seconds)}
            for row in comparison.kinds
        ],
        "missing": comparison.missing,
        "notes": [limit] if limit else [],
    }


def comparison_report(
    comparison: Comparison, title: str, data: Mapping[str, Any], files: Sequence[Path] = ()
) -> Report:
    """Return a report of the step, the ranks and their ops.

    Args:
        data: all figures, from `as_json`.
        files: files that were written.
    """
    report = Report(**data)
    report.line(Text(title, "bold cyan"), wrap=False)
    for sentence in comparison.missing:
        report.line(Text(f"incomplete: {sentence}", "yellow"), wrap=False)
    for note in data["notes"]:
        report.line(Text(f"note: {note}", "yellow"), wrap=False)
    predicted = comparison.step.predicted is not None
    if not predicted:
        _add_how_to_predict(report, max(2, len(comparison.ranks)))
    report.line()
    _add_pairs(report, ("", "rank"), [*_step_rows(comparison)], predicted=predicted)
    _add_pairs(report, ("rank", "op", "count"), [*_op_rows(comparison)], predicted=predicted)
    report.line(f"{NOTE}{'; ratio: predicted over measured' * predicted}", "dim")
    if len(comparison.ranks) > SHOWN_RANKS:
        report.line(Text(f"ranks 0-{SHOWN_RANKS - 1} of {len(comparison.ranks)}; --json has all", "dim"))
    if files:
        report.line()
    for path in files:
        report.draw(partial(print_path, label="written to", path=path))
    return report


def runs_report(runs: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> Report:
    """Return a report of several runs: a row for each, and their losses at some of the steps that all runs recorded.

    Args:
        runs: figures of each run, from `run_figures`.
        steps: losses of all runs, from `common_steps`.
        files: files that were written.
    """
    report = Report(steps=steps)
    columns: dict[str, Callable[[Any], str | Text]] = {
        "": lambda run: str(runs.index(run) + 1),
        "run": lambda run: Text(run["folder"]),
        "strategy": lambda run: Text(run["strategy"]),
        "steps": lambda run: str(run["steps"]),
        "loss": lambda run: _cell(run["loss"], ".3f"),
        "validation": lambda run: _cell(run[VALIDATION], ".3f"),
        "tokens/s": lambda run: _cell(run.get("tps"), ",.0f"),
        "ms/step": lambda run: _cell(run.get("dt"), ",.1f", 1e3),
        "MiB": lambda run: _cell(run["memory"], ",.0f", 2**-20),
    }
    report.table(columns, runs, "runs", words=3, folded=1)
    report.line()
    if not steps:
        report.line("no step is recorded in all of the runs")
    else:
        indices = sorted({round(index * (len(steps) - 1) / (SHOWN_STEPS - 1)) for index in range(SHOWN_STEPS)})
        losses = [
            [str(steps[index]["step"] + 1), *(_cell(loss, ".4f") for loss in steps[index]["loss"])] for index in indices
        ]
        headings = ["loss of step", *map(str, range(1, len(runs) + 1))]
        report.table({name: itemgetter(index) for index, name in enumerate(headings)}, losses, words=0, folded=0)
        report.line()
        report.line("tokens/s, ms/step: medians of the recorded steps after the first 3", "dim")
    for path in files:
        report.draw(partial(print_path, label="written to", path=path))
    return report


def _sentence_about_runs_beside(folder: Path) -> str:
    """Return a sentence that names the newest other runs in a run's parent folder, and the command that compares them.

    It is empty if there are none.
    """
    from shardlab.train.history import runs_beside

    runs = runs_beside(folder) if folder.is_dir() else []
    if not runs:
        return ""
    names = ", ".join(map(str, runs[:SHOWN_RUNS])) + (f" and {len(runs) - SHOWN_RUNS} more" * (len(runs) > SHOWN_RUNS))
    return f"beside it {'lies' if len(runs) == 1 else 'lie'} {names}: shardlab compare {folder} {runs[0]}"


def _pair(pair: Pair) -> dict[str, float | None]:
    return {"predicted": pair.predicted, "measured": pair.measured, "ratio": pair.ratio}


def _cell(figure: float | None, form: str, times: float = 1.0) -> str:
    return "-" if figure is None else format(figure * times, form)


def _add_how_to_predict(report: Report, ranks: int) -> None:
    report.line("there is no prediction, because this machine is not measured yet; to measure it, run", "yellow")
    for kind in ("collectives", "compute"):
        report.line(Text(f"  shardlab bench {kind} --ranks {ranks}", "bold"), wrap=False)
    report.line("or give another cluster, such as --cluster h100x8", "yellow")


Row = tuple[tuple[str, ...], Pair, float, str]
"""Row of a table of pairs: its words, a predicted and a measured value, the factor that converts both into the shown
unit, and the name of this unit."""


def _add_pairs(report: Report, headings: Sequence[str], rows: Sequence[Row], *, predicted: bool) -> None:
    """Add a table of predicted and measured values, or only of measured values, and an empty line."""

    def cell(row: Row, side: str) -> str:
        _, pair, times, unit = row
        figure: float | None = getattr(pair, side)
        return "-" if figure is None else f"{figure * times:,.2f} {unit}"

    columns: dict[str, Callable[[Any], str]] = {
        heading: lambda row, index=index: row[0][index] for index, heading in enumerate(headings)
    }
    columns |= {side: partial(cell, side=side) for side in _SIDES[not predicted :]}
    if predicted:
        columns["ratio"] = lambda row: _cell(row[1].ratio, ".2f")
    report.table(columns, rows, words=len(headings))
    report.line()


def _step_rows(comparison: Comparison) -> Iterator[Row]:
    yield ("step", "all"), comparison.step, 1e3, "ms"
    for words, name in (("computes", "computing"), ("exposed communication", "exposed"), ("idle", "idle")):
        for row in comparison.ranks[:SHOWN_RANKS]:
            yield (words, str(row.rank)), getattr(row, name), 1e3, "ms"
    for row in comparison.ranks[:SHOWN_RANKS]:
        yield ("peak memory", str(row.rank)), row.memory, 2**-20, "MiB"


def _op_rows(comparison: Comparison) -> Iterator[Row]:
    for rank in range(min(len(comparison.ranks), SHOWN_RANKS)):
        rows = [row for row in comparison.kinds if row.rank == rank]
        whole = [sum(_side_seconds(row, side) for row in rows) for side in _SIDES]
        for row in rows:
            shares = [_side_seconds(row, side) > NEGLIGIBLE * all_ for side, all_ in zip(_SIDES, whole, strict=True)]
            if any(shares) or row.measured_ops < row.ops:
                count = str(row.ops) if row.measured_ops == row.ops else f"{row.measured_ops} of {row.ops}"
                yield (str(rank), row.kind.row.hyphenated, count), row.seconds, 1e3, "ms"


def _side_seconds(row: KindRow, side: str) -> float:
    return getattr(row.seconds, side) or 0.0
