"""`shardlab compare FOLDER`: what a traced run measured, beside what the simulator says of the same tapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardlab.cli.cluster import cluster_called
from shardlab.cli.comparison_table import print_comparison
from shardlab.cli.console import print_json
from shardlab.cli.expected import workload_of
from shardlab.cli.new_file import writing
from shardlab.cli.options import Flag
from shardlab.cli.picture import NO_PICTURES, PictureFlags
from shardlab.cli.recipe_option import RecipeName
from shardlab.hardware.profile import default_path
from shardlab.predict.estimate import estimate as estimate_of
from shardlab.predict.limits import broken_limit
from shardlab.recorded.compare import Comparison, Pair, compare
from shardlab.recorded.trace_file import read_trace
from shardlab.rules.pieces import counted
from shardlab.timeline.counters import memory_counters

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.predict.workload import Workload
    from shardlab.recorded.measured import Measured
    from shardlab.timeline import Timeline
    from shardlab.train.job import Job


@dataclass(frozen=True)
class Compare:
    """Lay the prediction and the measurement of a run side by side: time per rank and kind of op, the step, memory.

    The run is one of shardlab train --trace; of one that broke off, what there is is shown.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder of a run."""

    cluster: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: local, if it is there)")
    ] = None
    """On what the prediction is made; local is this machine as shardlab bench measured it, and so is the
    path/to/profile.json of its --profile."""

    other_machine: Flag = False
    """Take a profile from another machine."""

    recipe: RecipeName = None

    json: Flag = False
    """Print JSON alone."""

    pictures: PictureFlags = NO_PICTURES

    def run(self) -> int:
        self.pictures.check("comparison.svg")
        trace = read_trace(self.folder)

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
