"""`shardlab compare FOLDER`: what a traced run measured, beside what the simulator says of the same tapes."""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardlab.cli.comparison_table import print_comparison
from shardlab.cli.costs import CostsText, costs_of
from shardlab.cli.options import Flag, NewFile
from shardlab.cli.picture import check_new_file
from shardlab.program import UserError
from shardlab.simulate import live_memory, simulate
from shardlab.simulate.compare import Comparison, Pair, compare
from shardlab.simulate.trace_file import read_trace

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.simulate import Timeline
    from shardlab.simulate.measured import Measured
    from shardlab.train.job import Job


@dataclass(frozen=True)
class Compare:
    """Lay the prediction and the measurement of a run side by side: time per rank and kind of op, the step, memory.

    The run is one of shardlab train --trace; of one that broke off, what there is is shown.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder of a run."""

    costs: CostsText = None
    """What ops are predicted to take, in seconds (see shardlab simulate); without it only the measurement is shown."""

    svg: NewFile = None
    """Draw both timelines into this file."""

    json: Flag = False
    """Print JSON alone."""

    def run(self) -> int:
        check_new_file("--svg", self.svg, "comparison.svg")
        costs = costs_of(self.costs) if self.costs is not None else None
        trace = read_trace(self.folder)

        from shardlab.train.described import job_of

        job = job_of(trace.job)
        checked = job.checked()
        measured = trace.measured(checked)
        predicted = simulate(checked, costs) if costs else None
        comparison = compare(measured, predicted, _memory(checked, job) if predicted else None)
        self._draw(predicted, measured, job)
        if self.json:
            print(json_format.dumps(as_json(trace.job, checked, comparison, measured), indent=2))
        else:
            print_comparison(comparison, f"{job.title} on {job.ranks} ranks", self.svg)
        return 0

    def _draw(self, predicted: Timeline | None, measured: Measured, job: Job) -> None:
        if self.svg is None:
            return
        from shardlab.draw import save_comparison  # matplotlib takes long to import

        timelines = {"predicted": predicted} if predicted else {}
        try:
            save_comparison({**timelines, "measured": measured.timeline}, self.svg, f"{job.title}: one optimizer step")
        except OSError as error:
            raise UserError(f"--svg {self.svg}: it cannot be written: {error.strerror}") from None


def _memory(checked: Checked, job: Job) -> list[int]:
    """For each rank the most bytes that are live at the start of an op."""
    return [max(live, default=0) * job.dtype.itemsize for live in live_memory(checked)]


def as_json(job: dict[str, Any], checked: Checked, comparison: Comparison, measured: Measured) -> dict[str, Any]:
    """All figures, for other programs; times in seconds, memory in bytes."""
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
