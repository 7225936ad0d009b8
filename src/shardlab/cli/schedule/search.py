"""`shardlab schedule search`: search a pipeline schedule for given costs of stages, or for a model on a cluster."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import tyro
from rich.console import Console

from shardlab.cli.console import Report
from shardlab.cli.model_options import OptionalNumber
from shardlab.cli.options import Flag, Name, NewFile, OptionalCount, check_new_file, writing
from shardlab.cli.plan_options import NO_FLAGS, DeviceMemory, JobFile, Layout, RecipeName, SwitchWords
from shardlab.cli.schedule.costs import read_costs
from shardlab.cli.simulate.step_options import PRICED_OPTIONS, needs_cluster
from shardlab.cli.step_request import StepRequest
from shardlab.common.errors import UserError
from shardlab.common.files import write_atomically
from shardlab.common.text import bytes_text, counted, percent_text, seconds_text
from shardlab.language.precision import Optimizer
from shardlab.planner.schedule_search.exact import Proof, prove
from shardlab.planner.schedule_search.from_workload import StepProblem, problem_of
from shardlab.planner.schedule_search.problem import Objective, Placement, ScheduleProblem
from shardlab.planner.schedule_search.search import FoundSchedule, search_schedule
from shardlab.simulate.predict.estimate import Estimate
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules.files import schedule_files


@dataclass(frozen=True)
class ScheduleSearch:
    """Search a pipeline schedule: the order of passes that makes a step fastest within a memory limit.

    The costs of the stages come from --costs, or are predicted for --model and --cluster. The result is never slower
    than a published schedule that fits in the same memory. Ctrl-C ends the search and keeps the best schedule so far.
    """

    config: JobFile = None

    costs: Annotated[str | None, tyro.conf.arg(metavar="NAME=VALUE,...|FILE.toml", help_behavior_hint="")] = None
    """Costs of a rank's passes: forward, input, weight, message, activation, kept (default: 1 each, message 0); or a
    file with lists that have a number for each stage."""

    limit: Annotated[OptionalNumber, tyro.conf.arg(help_behavior_hint="(default: none)")] = None
    """Memory of activations on each rank, in the unit of --costs: without a file, in microbatches."""

    placement: Annotated[Placement, tyro.conf.arg(help_behavior_hint="(default: vee)")] = "vee"
    """Placement of the stages on the ranks: a loop over the ranks, or a V with two stages on each rank."""

    microbatches: OptionalCount = None
    """Number of microbatches of a step (default: 4 for each rank; with --model, as simulate does)."""

    model: Name = None
    """Model such as llama3-8b, or a file; with --cluster."""

    cluster: Name = None
    """Device type and number, such as h100x16; or the results of bench: local, or path/to/profile.json; with
    --model."""

    other_machine: Flag = False
    """Accept a profile that was measured on another machine."""

    memory: DeviceMemory = None
    """Memory of each device that the step may use, such as 72GiB; with --model."""

    sequence: OptionalCount = None
    """Tokens of a sequence; with --model."""

    global_batch: OptionalCount = None
    """Sequences in a step; with --model."""

    micro_batch_size: OptionalCount = None
    """Sequences of a microbatch; with --model."""

    precision: Name = None
    """Precision (default: that of the recipe); with --model."""

    recipe: RecipeName = None

    switch: SwitchWords = ()

    optimizer: Annotated[Optimizer | None, tyro.conf.arg(help_behavior_hint="(default: adamw)")] = None
    """Optimizer, which determines the size of the optimizer state; with --model."""

    objective: Annotated[Objective, tyro.conf.arg(help_behavior_hint="(default: step)")] = "step"
    """Time to minimize: that of the whole step, or the longest time on a rank from the start of its first pass to the
    end of its last pass (span). Use span if ranks start the next step without waiting for each other."""

    seconds: Annotated[float, tyro.conf.arg(help_behavior_hint="(default: 10)")] = 10.0
    """Time for the search."""

    proposals: OptionalCount = None
    """Number of proposals of the local search, in place of --seconds. The result then does not depend on the machine's
    speed."""

    exact: Annotated[OptionalNumber, tyro.conf.arg(help_behavior_hint="")] = None
    """Afterwards, run an exact solver for this many seconds to prove a bound (needs OR-tools: shardlab[search])."""

    csv: NewFile = None
    """Write the schedule into this file, for --schedule: as a CSV of PyTorch with messages, or, if the name ends in
    .py, as Python."""

    force: Flag = False
    """Replace a file with other contents."""

    json: Flag = False
    """Print only JSON."""

    layout: Layout = NO_FLAGS

    def run(self) -> int:
        if self.force and self.csv is None:
            raise UserError("--force replaces the file of --csv; give it, or leave --force out")
        check_new_file("--csv", self.csv, "schedule.csv", force=True)
        if not math.isfinite(self.seconds) or self.seconds <= 0:
            raise UserError(f"--seconds is {self.seconds:g}; give a number above 0")
        if self.exact is not None and not 0 < self.exact < math.inf:
            raise UserError(f"--exact is {self.exact:g}; give a number of seconds above 0")
        problem = self._problem
        console = Console(stderr=True)
        spinner = console.status("searching") if console.is_terminal and not self.json else nullcontext()
        with spinner as status:

            def show(seconds: float, time: float) -> None:
                if status is not None:
                    status.update(f"searching  {self._time_text(time)} after {seconds:.1f} s")

            def search(problem: ScheduleProblem, share: float = 1.0) -> FoundSchedule:
                seconds = share * self.seconds
                return search_schedule(problem, seconds=seconds, evaluations=self.proposals, on_progress=show)

            result, step = problem.search(search) if isinstance(problem, StepProblem) else (search(problem), None)
            proof = None if self.exact is None else prove(result.timing, self.exact)
        if proof is not None:
            result = replace(result, lower_bound=proof.lower_bound)
            if proof.timing is not None:
                proved_result = replace(result, timing=proof.timing, placed=None)
                if isinstance(problem, StepProblem) and step is not None:
                    result, step = problem.faster((result, step), proved_result)
                else:
                    result = proved_result
        text = self._write(result)
        report = self._report(result, proof)
        if step is not None and self._workload is not None:
            self._compare_steps(report, result, step, self._workload)
        if text is not None:
            report.line()
            report.fact("written", f"{self.csv}, for --schedule {self.csv} of simulate, verify and train")
        report.show(json=self.json)
        return 0

    @cached_property
    def _request(self) -> StepRequest:
        return StepRequest.of(self)

    @cached_property
    def _workload(self) -> Workload | None:
        """Step of --model on --cluster, or None without them."""
        request = self._request
        if not request.model and not request.cluster:
            for name in PRICED_OPTIONS:
                if getattr(self, name, None):
                    raise needs_cluster(f"--{name.replace('_', '-')}")
            return None
        if not request.model or not request.cluster:
            raise UserError("costs are predicted for a model on a cluster; give both --model and --cluster")
        for name in ("costs", "limit"):
            if getattr(self, name) is not None:
                raise UserError(f"--{name} is for costs that are given, but --model has them predicted; leave it out")
        if self.layout.plan is None and "plan" not in request.file.sections and self.layout.values().get("pp", 1) < 2:
            raise UserError("a schedule is for a pipeline; give --pp 2 or more")
        entry, ranks = request.entry()
        plan = entry.plan(ranks) if entry.plan is not None else None
        if not isinstance(plan, Plan) or plan.mesh.pp < 2:
            raise UserError("a schedule is for a pipeline; give --pp 2 or more")
        precision = request.step_precision
        microbatches, size = request.cut_batch(plan.data_ranks)
        return Workload(
            plan,
            request.found_model,
            request.found_cluster,
            microbatches,
            size,
            precision,
            recipe=request.found_recipe,
            optimizer=request.optimizer,
            passes="none",
        )

    @cached_property
    def _problem(self) -> StepProblem | ScheduleProblem:
        workload = self._workload
        stage_count = int(self.layout.values().get("stages_per_rank") or (2 if self.placement == "vee" else 1))
        if workload is not None:
            return problem_of(workload, placement=self.placement, stages_per_rank=stage_count, objective=self.objective)
        sizes = {axis: size for axis, size in self.layout.values().items() if axis != "stages_per_rank"}
        ranks = int(sizes.pop("pp", 4))
        if sizes:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sizes)
            raise UserError(f"{flags} needs a model and a cluster; without them, give --pp and --stages-per-rank only")
        if ranks < 2:
            raise UserError("a schedule is for a pipeline; give --pp 2 or more")
        stages, message = read_costs(self.costs, ranks, stage_count)
        limit = math.inf if self.limit is None else self.limit
        return ScheduleProblem(
            ranks, self.microbatches or 4 * ranks, stages, message, limit, self.placement, self.objective
        )

    def _write(self, result: FoundSchedule) -> str | None:
        """Write the file of --csv, and return its text."""
        if self.csv is None:
            return None
        files = schedule_files(result.steps)
        text = files["schedule.py" if self.csv.suffix == ".py" else "schedule-with-messages.csv"]
        check_new_file("--csv", self.csv, "schedule.csv", force=self.force, content=text.encode())
        with writing("--csv", self.csv):
            write_atomically(self.csv, text)
        return text

    def _time_text(self, time: float) -> str:
        return f"{time:.6g}" if self._workload is None else seconds_text(time)

    def _memory_text(self, memory: float) -> str:
        return f"{memory:.4g}" if self._workload is None else bytes_text(memory)

    def _report(self, result: FoundSchedule, proof: Proof | None) -> Report:
        problem, timing, best = result.problem, result.timing, result.best_published
        report = Report(
            ranks=problem.ranks,
            microbatches=problem.microbatches,
            stages_per_rank=problem.stages_per_rank,
            placement=problem.placement,
            objective=problem.objective,
            evaluations=result.evaluations,
        )
        shape = f"{counted(problem.ranks, 'rank')}, {counted(problem.stages_per_rank, 'stage')} each in a "
        shape += f"{'V' if problem.placement == 'vee' else 'loop'}, {counted(problem.microbatches, 'microbatch')}"
        report.fact("pipeline", shape)
        limits = sorted(set(problem.limits))
        if limits[0] < math.inf:
            text = " to ".join(self._memory_text(limit) for limit in dict.fromkeys((limits[0], limits[-1])))
            report.fact("memory limit", f"{text} of activations on a rank", limits=list(problem.limits))
        report.line()
        rows = [
            {"schedule": "found", "time": timing.time, "memory": max(timing.peaks), "fits": True},
            *({"schedule": p.name, "time": p.time, "memory": p.memory, "fits": p.fits} for p in result.published),
        ]
        report.table(
            {
                "schedule": lambda row: row["schedule"],
                "time": lambda row: self._time_text(row["time"]),
                "memory": lambda row: self._memory_text(row["memory"]),
                "fits": lambda row: "yes" if row["fits"] else "no",
            },
            rows,
            "schedules",
            style=lambda row: "" if row["fits"] else "dim",
        )
        report.line()
        if best is not None:
            gain = best.time / timing.time - 1
            words = f"{percent_text(gain)} faster than {best.name}" if gain > 1e-6 else f"as fast as {best.name}"
            report.fact("found", f"{words}, the fastest published schedule that fits", gain=gain, best=best.name)
        else:
            words = f"no published schedule {'fits in this memory' if result.published else 'has these stages'}"
            report.fact("found", words, gain=None, best=None)
        report.fact("quality", _quality(result, proof), lower_bound=result.lower_bound, gap=result.gap)
        idle_times = timing.idle_by_cause()
        parts = ", ".join(f"{percent_text(share)} {cause}" for cause, share in idle_times.items())
        bubble = percent_text(result.bubble)
        report.fact("bubble", f"{bubble} of the step on the busiest rank; mean over ranks: {parts}")
        report.data |= {"bubble": result.bubble, "idle": idle_times, "memory_by_rank": timing.peaks}
        memory = " ".join(self._memory_text(peak) for peak in timing.peaks)
        report.fact("memory by rank", memory)
        return report

    def _compare_steps(self, report: Report, result: FoundSchedule, step: Estimate, workload: Workload) -> None:
        """Add predicted whole steps (with updates and reductions) of the found and of the best published schedule."""
        text = f"{seconds_text(step.step)}, {bytes_text(step.peak.bytes)} of tensors on the fullest rank"
        report.fact("whole step", f"{text} (with updates and reductions)", step=step.step, tensors=step.peak.bytes)
        if (best := result.best_published) is not None:
            plan = workload.plan
            assert isinstance(plan, Plan)
            other = replace(workload, plan=replace(plan, schedule=best.name)).estimate()
            text = f"{seconds_text(other.step)}, {bytes_text(other.peak.bytes)}"
            report.fact(f"with {best.name}", text, best_step=other.step, best_tensors=other.peak.bytes)


def _quality(result: FoundSchedule, proof: Proof | None) -> str:
    if result.is_optimal or (proof is not None and proof.is_complete):
        passes = "backward passes in halves" if result.problem.has_halves else "whole backward passes"
        return f"optimal: no schedule with {passes} is faster"
    return f"at most {percent_text(result.gap)} above the lower bound"
