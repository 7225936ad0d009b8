"""`shardlab compare RUN ...`: a traced run beside the prediction of its tapes, or several runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardlab.cli.cluster import cluster_called
from shardlab.cli.comparison_table import print_comparison, print_runs
from shardlab.cli.console import print_json, stdout_console
from shardlab.cli.expected import workload_of
from shardlab.cli.new_file import writing
from shardlab.cli.options import Flag
from shardlab.cli.picture import NO_PICTURES, PictureFlags
from shardlab.cli.recipe_option import RecipeName
from shardlab.hardware.profile import default_path
from shardlab.predict.estimate import estimate as estimate_of
from shardlab.predict.limits import broken_limit
from shardlab.program import UserError
from shardlab.recorded.compare import Comparison, Pair, compare
from shardlab.recorded.trace_file import read_trace
from shardlab.rules.pieces import counted
from shardlab.timeline.counters import memory_counters
from shardlab.train.saved import VALIDATION

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.predict.workload import Workload
    from shardlab.recorded.measured import Measured
    from shardlab.timeline import Timeline
    from shardlab.train.history import PastRun
    from shardlab.train.job import Job


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
        """Several runs."""
        from shardlab.train.history import past_run, records_of

        alone = {"--cluster": self.cluster, "--recipe": self.recipe, "--trace": self.pictures.trace}
        if given := [name for name, value in alone.items() if value is not None]:
            raise UserError(f"{given[0]} is for the prediction of one run, but {len(self.folders)} runs are given")
        if len({folder.resolve() for folder in self.folders}) < len(self.folders):
            raise UserError("a run is given twice; give different runs")
        runs = [past_run(folder) for folder in self.folders]
        records = {str(folder): records_of(folder) for folder in self.folders}
        for folder, steps in records.items():
            if not steps:
                raise UserError(f"{folder} has no recorded steps yet; give runs that have some")
        if self.pictures.svg is not None:
            from shardlab.train.report import draw_runs

            with writing("--svg", self.pictures.svg):
                draw_runs(records, self.pictures.svg)
        compared = [of_run(run, steps) for run, steps in zip(runs, records.values(), strict=True)]
        rows = common_steps(list(records.values()))
        if self.json:
            print_json({"runs": compared, "steps": rows})
        else:
            print_runs(stdout_console(), compared, rows, self.pictures.files)
        return 0

    def _beside_prediction(self, folder: Path) -> int:
        """One run."""
        trace = read_trace(folder)

        from shardlab.train.described import job_of

        job = job_of(trace.job)
        checked = job.checked()
        measured = trace.measured(checked)
        workload = self._workload(job)
        estimate = estimate_of(checked, workload.prices, workload.kept_sizes) if workload else None
        limit = broken_limit(workload) if workload else ""
        predicted = estimate.timeline() if estimate else None
        comparison = compare(
            measured, predicted, [max(memory.before) for memory in estimate.memory] if estimate else None
        )
        self._draw(predicted, measured, job)
        shown = {"measured": (measured.timeline, measured.counters)}
        if self.pictures.trace and estimate and predicted:
            shown = {"predicted": (predicted, memory_counters(estimate.traced, estimate.times)), **shown}
        self.pictures.save_trace(shown)
        if self.json:
            print_json(as_json(trace.job, checked, comparison, measured, limit))
        else:
            print_comparison(comparison, f"{job.title} on {counted(job.ranks, 'rank')}", self.pictures.files, limit)
        return 0

    def _workload(self, job: Job) -> Workload | None:
        """What is predicted; None if this machine has not been measured and no cluster is named."""
        if self.cluster is None and not default_path().exists():
            return None
        name = self.cluster or "local"
        cluster = cluster_called(name, other_machine=self.other_machine)
        cluster.require(job.ranks)
        return workload_of(job, cluster, self.recipe)

    def _draw(self, predicted: Timeline | None, measured: Measured, job: Job) -> None:
        if self.pictures.svg is None:
            return
        from shardlab.draw import save_comparison  # matplotlib takes long to import

        timelines = {**({"predicted": predicted} if predicted else {}), "measured": measured.timeline}
        with writing("--svg", self.pictures.svg):
            save_comparison(timelines, self.pictures.svg, f"{job.title}: one optimizer step", self.pictures.color_by)


def of_run(run: PastRun, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures by which a run is compared with others: at its end, and medians of its steps after the first ones."""
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
    """Loss, validation loss and gradient norm of every run at each step that all have on record."""
    by_step = [{record["step"]: record for record in records} for records in runs]
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))
    names = ("loss", VALIDATION, "grad_norm")
    return [
        {"step": step, **{name: [records[step].get(name) for records in by_step] for name in names}} for step in common
    ]


def as_json(
    job: dict[str, Any], checked: Checked, comparison: Comparison, measured: Measured, limit: str = ""
) -> dict[str, Any]:
    """Describe all figures for other programs; times in seconds, memory in bytes.

    Args:
        limit: of the recipe's framework, which does not run the plan ("": it does).
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


def _pair(pair: Pair) -> dict[str, float | None]:
    return {"predicted": pair.predicted, "measured": pair.measured, "ratio": pair.ratio}
