"""`shardlab compare FOLDER`: what a traced run measured, beside what the simulator says of the same tapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardlab.cli.cluster import cluster_called
from shardlab.cli.comparison_table import print_comparison
from shardlab.cli.console import print_json
from shardlab.cli.options import Colors, Flag, NewFile
from shardlab.cli.picture import check_new_files, save_trace
from shardlab.hardware.clusters import is_measured
from shardlab.hardware.profile import default_path
from shardlab.predict.estimate import Estimate, estimate
from shardlab.predict.precision import PRECISIONS
from shardlab.predict.priced import ClusterPrices
from shardlab.program import UserError
from shardlab.recorded.compare import Comparison, Pair, compare
from shardlab.recorded.trace_file import read_trace
from shardlab.rules.pieces import counted
from shardlab.timeline.counters import memory_counters

if TYPE_CHECKING:
    from shardlab.check import Checked
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

    force: Flag = False
    """Take a profile from another machine; replace files that Shardlab did not write."""

    svg: NewFile = None
    """Draw both timelines into this file."""

    color_by: Colors = "pass"
    """What the drawing's colours tell: the pass (forward, backward, input gradient, weight gradient), or the layer."""

    trace: NewFile = None
    """Write both timelines into this file, in the format that Perfetto (ui.perfetto.dev) and Chrome read."""

    json: Flag = False
    """Print JSON alone."""

    def run(self) -> int:
        check_new_files(self.svg, self.trace, "comparison.svg", force=self.force)
        trace = read_trace(self.folder)

        from shardlab.train.described import job_of

        job = job_of(trace.job)
        checked = job.checked()
        measured = trace.measured(checked)
        estimate = self._estimate(job, checked)
        predicted = estimate.timeline() if estimate else None
        comparison = compare(
            measured, predicted, [max(memory.before) for memory in estimate.memory] if estimate else None
        )
        self._draw(predicted, measured, job)
        if self.trace:
            shown = {"measured": (measured.timeline, measured.counters)}
            if estimate and predicted:
                shown = {"predicted": (predicted, memory_counters(estimate.traced, estimate.times)), **shown}
            save_trace(shown, self.trace)
        if self.json:
            print_json(as_json(trace.job, checked, comparison, measured))
        else:
            written = [path for path in (self.svg, self.trace) if path is not None]
            print_comparison(comparison, f"{job.title} on {counted(job.ranks, 'rank')}", written)
        return 0

    def _estimate(self, job: Job, checked: Checked) -> Estimate | None:
        """The prediction; None if this machine has not been measured and no cluster is named."""
        if self.cluster is None and not default_path().exists():
            return None
        name = self.cluster or "local"
        cluster = cluster_called(name, force=self.force and (is_measured(name) or not (self.svg or self.trace)))
        dtype = str(job.dtype).removeprefix("torch.")
        precision = next((each for each in PRECISIONS.values() if each.compute == dtype), None)
        if precision is None:
            raise UserError(f"the run computed in {dtype}, which has no prices; leave out --cluster")
        cluster.require(job.ranks)
        return estimate(checked, ClusterPrices(job.cut, job.micro_batch_size, cluster.at_work(job.ranks), precision))

    def _draw(self, predicted: Timeline | None, measured: Measured, job: Job) -> None:
        if self.svg is None:
            return
        from shardlab.draw import save_comparison  # matplotlib takes long to import

        timelines = {**({"predicted": predicted} if predicted else {}), "measured": measured.timeline}
        try:
            save_comparison(timelines, self.svg, f"{job.title}: one optimizer step", self.color_by)
        except OSError as error:
            raise UserError(f"--svg {self.svg}: it cannot be written: {error.strerror}") from None


def as_json(job: dict[str, Any], checked: Checked, comparison: Comparison, measured: Measured) -> dict[str, Any]:
    """Describe all figures for other programs; times in seconds, memory in bytes."""
    return {
        "job": job,
        "fingerprint": checked.program.fingerprint(),
        "step": _pair(comparison.step),
        "steps": measured.steps,
        "clock_bound": measured.bound,
        "ranks": [
            {
                "rank": row.rank,
                "computing": _pair(row.computing),
                "exposed": _pair(row.exposed),
                "idle": _pair(row.idle),
                "memory": _pair(row.memory),
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
    }


def _pair(pair: Pair) -> dict[str, float | None]:
    return {"predicted": pair.predicted, "measured": pair.measured, "ratio": pair.ratio}
