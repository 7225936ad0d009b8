"""`shardlab compare RUN ...`: compare a traced run with its prediction, or several runs with each other.

One run: `read_trace` reads the trace, `shardlab.simulate` predicts the same tapes, and `print_comparison` shows the
step, the ranks and their kinds of op. Several runs: `run_figures` and `common_steps` collect the figures of the runs,
which need no trace, and `runs_report` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import Report, print_json, print_path, stdout_console, table_of
from shardlab.cli.options import NO_PICTURES, Flag, PictureFlags, writing
from shardlab.cli.plan_options import RecipeName, cluster_called
from shardlab.cli.train.this_machine import workload_of
from shardlab.common.text import counted
from shardlab.language import UserError
from shardlab.simulate.hardware.profile import default_path
from shardlab.simulate.predict.estimate import estimate as estimate_of
from shardlab.simulate.predict.memory_advice import broken_limit
from shardlab.simulate.timeline.measured import Comparison, KindRow, Pair, compare, read_trace
from shardlab.simulate.timeline.run import memory_counters
from shardlab.train.history import VALIDATION

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.simulate.predict.estimate import Estimate
    from shardlab.simulate.timeline import Timeline
    from shardlab.simulate.timeline.measured import Measured
    from shardlab.train.history import PastRun
    from shardlab.train.job import Job


SHOWN_RANKS = 8
"""Largest number of ranks that are shown. --json has all."""

SHOWN_STEPS = 6
"""Number of steps for which the losses of several runs are shown. --json has all."""

NOTE = (
    "exposed communication: a rank waits for communication; idle: a rank waits for other ranks; the "
    "time of an op is its total in a step"
)

NEGLIGIBLE = 1e-3
"""Share of a rank's time below which a kind of op is left out, if it is so in the prediction and the measurement."""

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

        alone = {"--cluster": self.cluster, "--recipe": self.recipe, "--trace": self.pictures.trace}
        if given := [name for name, value in alone.items() if value is not None]:
            raise UserError(f"{given[0]} is for the prediction of one run, but {len(self.folders)} runs are given")
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
        compared = [run_figures(run, steps) for run, steps in zip(runs, records.values(), strict=True)]
        rows = common_steps(list(records.values()))
        runs_report(compared, rows, self.pictures.files).show(json=self.json)
        return 0

    def _beside_prediction(self, folder: Path) -> int:
        """Compare one run with its prediction."""
        run = traced_run(folder, self.cluster, self.recipe, other_machine=self.other_machine)
        measured, estimate = run.measured, run.estimate
        predicted = estimate.timeline() if estimate else None
        comparison = compare(
            measured, predicted, [max(memory.before) for memory in estimate.memory] if estimate else None
        )
        self._draw(predicted, measured, run.job)
        shown = {"measured": (measured.timeline, measured.counters)}
        if self.pictures.trace and estimate and predicted:
            shown = {"predicted": (predicted, memory_counters(estimate.traced, estimate.times)), **shown}
        self.pictures.save_trace(shown)
        if self.json:
            print_json(as_json(run.settings, run.checked, comparison, measured, run.limit))
        else:
            print_comparison(comparison, run.title, self.pictures.files, run.limit)
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
        settings, job: what was trained, as written in the trace and as a job.
        checked: the program that ran.
        measured: its measurement.
        estimate: the prediction (None: no cluster is given, and this machine was not measured).
        limit: limit of the recipe's framework that the plan exceeds ("": none).
    """

    settings: dict[str, Any]
    job: Job
    checked: Checked
    measured: Measured
    estimate: Estimate | None
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
        UserError: if there is no trace that can be read, or no such cluster or recipe.
    """
    trace = read_trace(folder)

    from shardlab.train.job import job_from_dict

    job = job_from_dict(trace.job)
    checked = job.checked()
    measured = trace.measured(checked)
    if cluster is None and not default_path().exists():
        return TracedRun(trace.job, job, checked, measured, None, "")
    found = cluster_called(cluster or "local", other_machine=other_machine)
    found.require(job.ranks)
    workload = workload_of(job, found, recipe)
    estimate = estimate_of(checked, workload.prices, workload.kept_sizes)
    return TracedRun(trace.job, job, checked, measured, estimate, broken_limit(workload))


def run_figures(run: PastRun, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run for a comparison: those at its end, and medians of its steps after the warm-up."""
    from shardlab.train.run import WARM_UP

    later = records[min(WARM_UP, len(records) - 1) :]
    medians = {name: median(record[name] for record in later) for name in ("dt", "tps") if name in later[0]}
    known = [record["mfu"] for record in later if record.get("mfu") is not None]
    return {
        "folder": str(run.folder),
        "strategy": run.strategy,
        "ranks": run.record.get("ranks"),
        "ended": run.ended,
        "steps": run.steps,
        "loss": records[-1]["loss"],
        "validation_loss": run.validation_loss,
        **medians,
        "mfu": median(known) if known else None,
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
                **{name: _pair(each) if isinstance(each, Pair) else each for name, each in vars(row).items()},
                "memory_by_category": measured.live[row.rank],
                "memory_at_any_moment": measured.peaks[row.rank] or None,
            }
            for row in comparison.ranks
        ],
        "ops": [
            {"rank": row.rank, "op": row.kind.value, "ops": row.ops, "seen": row.seen, **_pair(row.seconds)}
            for row in comparison.kinds
        ],
        "missing": comparison.missing,
        "notes": [limit] if limit else [],
    }


def print_comparison(
    comparison: Comparison,
    title: str,
    written: Sequence[Path] = (),
    limit: str = "",
    console: Console | None = None,
) -> None:
    """Print the step, the ranks and their ops.

    Args:
        written: files that were written.
        limit: limit of the recipe's framework that the plan exceeds ("": none).
    """
    console = console or stdout_console()
    console.print(Text.assemble((title, "bold cyan")), soft_wrap=True)
    for sentence in comparison.missing:
        console.print(Text(f"incomplete: {sentence}", "yellow"), soft_wrap=True)
    if limit:
        console.print(Text(f"note: {limit}", "yellow"), soft_wrap=True)
    if comparison.step.predicted is None:
        _print_how_to_predict(console, max(2, len(comparison.ranks)))
    console.print()
    console.print(_step_table(comparison))
    console.print()
    console.print(_op_table(comparison))
    console.print()
    ratio = "" if comparison.step.predicted is None else "; ratio: predicted over measured"
    console.print(f"{NOTE}{ratio}", style="dim")
    if len(comparison.ranks) > SHOWN_RANKS:
        console.print(Text(f"ranks 0-{SHOWN_RANKS - 1} of {len(comparison.ranks)}; --json has all", "dim"))
    if written:
        console.print()
    for path in written:
        print_path(console, "written to", path)


def runs_report(
    runs: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], written: Sequence[Path]
) -> Report:
    """Return a report of several runs: a row for each, and their losses at some of the steps that all runs recorded.

    Args:
        runs: figures of each run, from `run_figures`.
        steps: losses of all runs, from `common_steps`.
        written: files that were written.
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
        shown = sorted({round(at * (len(steps) - 1) / (SHOWN_STEPS - 1)) for at in range(SHOWN_STEPS)})
        losses = [[str(steps[at]["step"] + 1), *(_cell(loss, ".4f") for loss in steps[at]["loss"])] for at in shown]
        headings = ["loss of step", *map(str, range(1, len(runs) + 1))]
        report.table({name: itemgetter(at) for at, name in enumerate(headings)}, losses, words=0, folded=0)
        report.line()
        report.line("tokens/s, ms/step: medians of the recorded steps after the first 3", "dim")
    for path in written:
        report.draw(partial(print_path, label="written to", path=path))
    return report


def _pair(pair: Pair) -> dict[str, float | None]:
    return {"predicted": pair.predicted, "measured": pair.measured, "ratio": pair.ratio}


def _cell(figure: float | None, form: str, times: float = 1.0) -> str:
    return "-" if figure is None else format(figure * times, form)


def _print_how_to_predict(console: Console, ranks: int) -> None:
    console.print(
        Text("there is no prediction, because this machine is not measured yet; to measure it, run", "yellow")
    )
    for what in ("collectives", "compute"):
        console.print(Text(f"  shardlab bench {what} --ranks {ranks}", "bold"), soft_wrap=True)
    console.print(Text("or give another cluster, such as --cluster h100x8", "yellow"))


class _Pairs:
    """Table of predicted and measured values, or only of measured values.

    Args:
        left: headings of the first columns, which contain words.
        predicted: whether there is a prediction.
    """

    def __init__(self, *left: str, predicted: bool) -> None:
        self._predicted = predicted
        figures = ("predicted", "measured", "ratio") if predicted else ("measured",)
        self.table = table_of(*left, *figures, words=len(left))

    def add(self, *words: str, pair: Pair, times: float = 1e3, unit: str = "ms") -> None:
        """Add a row.

        Args:
            words: cells of the first columns.
            pair: predicted and measured value, in seconds unless `unit` is given.
            times: factor from the values to `unit`.
        """

        def cell(figure: float | None) -> str:
            return "-" if figure is None else f"{figure * times:,.2f} {unit}"

        ratio = "-" if pair.ratio is None else f"{pair.ratio:.2f}"
        cells = (cell(pair.predicted), cell(pair.measured), ratio) if self._predicted else (cell(pair.measured),)
        self.table.add_row(*words, *cells)


def _step_table(comparison: Comparison) -> Table:
    pairs = _Pairs("", "rank", predicted=comparison.step.predicted is not None)
    pairs.add("step", "all", pair=comparison.step)
    rows = comparison.ranks[:SHOWN_RANKS]
    for words, name in (("computes", "computing"), ("exposed communication", "exposed"), ("idle", "idle")):
        for row in rows:
            pairs.add(words, str(row.rank), pair=getattr(row, name))
    for row in rows:
        pairs.add("peak memory", str(row.rank), pair=row.memory, times=2**-20, unit="MiB")
    return pairs.table


def _op_table(comparison: Comparison) -> Table:
    pairs = _Pairs("rank", "op", "count", predicted=comparison.step.predicted is not None)
    for rank in range(min(len(comparison.ranks), SHOWN_RANKS)):
        rows = [row for row in comparison.kinds if row.rank == rank]
        whole = [sum(_either(row, side) for row in rows) for side in _SIDES]
        for row in rows:
            shares = [_either(row, side) > NEGLIGIBLE * all_ for side, all_ in zip(_SIDES, whole, strict=True)]
            if any(shares) or row.seen < row.ops:
                count = str(row.ops) if row.seen == row.ops else f"{row.seen} of {row.ops}"
                pairs.add(str(rank), row.kind.value.replace("_", "-"), count, pair=row.seconds)
    return pairs.table


def _either(row: KindRow, side: str) -> float:
    return getattr(row.seconds, side) or 0.0
