"""`shardlab simulate STRATEGY`: check a strategy, and simulate the time and memory of one step.

`Simulate.run` traces and checks the program, runs passes on it if asked to, simulates it in time units, and prints the
figures and a timeline, or JSON (`add_step`). With --model and --cluster, `priced.py` does the same in seconds and
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.text import Text

from shardlab.check import ChannelModel, Checked, check, drifts_of
from shardlab.cli.console import Report, print_path, table_of
from shardlab.cli.options import NO_PICTURES, Flag, PictureFlags
from shardlab.cli.passes import add_passes
from shardlab.cli.simulate.priced import add_bubble
from shardlab.cli.simulate.step_options import StepOptions
from shardlab.cli.simulate.terminal_timeline import print_strips, print_timeline
from shardlab.cli.step_request import StepRequest
from shardlab.common.text import counted, listed, seconds_text
from shardlab.language import UserError, trace
from shardlab.simulate.passes import Goal, PassResult, find_passes, helpful_results, run_passes
from shardlab.simulate.timeline import Timeline, bubble, schedule_bubble, simulate
from shardlab.simulate.timeline.critical_path import critical_path, path_parts
from shardlab.simulate.timeline.memory import peak_elsewhere
from shardlab.simulate.timeline.prices import Prices
from shardlab.simulate.timeline.run import Clocks, Counter
from shardlab.simulate.timeline.timeline import rank_times
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.registry import StrategyEntry


@dataclass(frozen=True)
class Simulate(StepOptions):
    """Check a strategy, and simulate one step of it: its time and its memory.

    Times are in teaching costs, unless --costs gives others: the forward pass of one microbatch through one layer takes
    1, other passes take time by their FLOPs, updates by their elements, and communication by its bytes. With --model
    and --cluster, times are in seconds and memory is in bytes. Ranks that a plan makes identical are then simulated
    once.
    """

    path: Flag = False
    """Print the critical path of the step: the ops, messages and waits whose times add up to the time of the step."""

    each_pass: Flag = False
    """Print the timelines before the first pass and after each pass, on one axis; with --passes."""

    json: Flag = False
    """Print only JSON."""

    pictures: PictureFlags = NO_PICTURES

    def run(self) -> int:
        self.pictures.check("timeline.svg")
        request = StepRequest.of(self)
        if self.is_priced(request):
            return self._run_priced(request)
        step = self.step_in_units(request)
        entry, ranks, costs, results, proof = step.entry, step.ranks, step.costs, step.pass_results, step.proof
        timeline = simulate(proof, costs)
        stages = self._stages(results, partial(simulate, costs=costs))
        self._save(timeline, stages, entry.title(ranks))
        baseline = _without_recompute(entry, proof, costs, step.names)
        path = path_parts(proof, critical_path(proof, Clocks(proof, costs).run())) if self.path else {}
        report = self._passes_report(entry.name, results, stages, units_text)
        add_step(report, entry.name, proof, timeline, costs, baseline, entry.plan and entry.plan(ranks))
        if self.pictures.svg is not None:
            report.line()
            report.draw(partial(print_path, label="drawn in", path=self.pictures.svg))
        add_path(report, path, units_text)
        report.show(json=self.json)
        return 0

    def _passes_report(
        self, name: str, results: list[PassResult], stages: dict[str, Timeline], time_text: Callable[[float], str]
    ) -> Report:
        """Return a new report of a strategy. It begins with the effects of the passes, if any were run."""
        report = Report(strategy=name)
        add_passes(report, results, time_text)
        if self.each_pass:
            report.draw(partial(print_strips, stages, time_text))
        return report

    def _stages(self, results: list[PassResult], timeline: Callable[[Checked], Timeline]) -> dict[str, Timeline]:
        """Simulate the step before the first pass and after each useful pass, if a picture or --each-pass shows it."""
        if self.each_pass and not results:
            raise UserError(
                "--each-pass shows the effect of passes, but none is given; give some, such as --passes all"
            )
        if not self.each_pass and not self.pictures.files:
            return {}
        return {name: timeline(result.checked) for name, result in helpful_results(results).items()}

    def _save(
        self, timeline: Timeline, stages: dict[str, Timeline], name: str, counters: list[Counter] | None = None
    ) -> None:
        """Write the requested pictures: of the step, or, if passes changed it, of each of its versions."""
        if len(stages) > 1:
            self.pictures.save_each(stages, name)
        else:
            self.pictures.save(timeline, name, counters)

    def _run_priced(self, request: StepRequest) -> int:
        from shardlab.cli.simulate.priced import add_step, price, traced_estimate
        from shardlab.simulate.timeline.run import memory_counters

        result = price(request)
        stages = self._stages(result.pass_results, result.workload.timeline)
        if self.pictures.files:
            estimate = traced_estimate(result, "a picture")
            name = f"{result.entry.title(result.workload.mesh.world)} of {request.model} on {request.cluster}"
            self._save(estimate.timeline(), stages, name, memory_counters(estimate.traced, estimate.times))
        path: dict[str, float] = {}
        if self.path:
            estimate = traced_estimate(result, "--path")
            path = path_parts(estimate.traced, critical_path(estimate.traced, estimate.times), estimate.place)
        report = self._passes_report(result.entry.name, result.pass_results, stages, seconds_text)
        add_step(report, result, self.pictures.files)
        add_path(report, path, seconds_text)
        report.show(json=self.json)
        return 0


def add_step(
    report: Report,
    name: str,
    checked: Checked,
    timeline: Timeline,
    costs: Prices,
    baseline: Timeline | None = None,
    plan: Plan | None = None,
) -> None:
    """Add the figures of a step, the results of the channel models, and the timelines of the ranks to a report.

    Args:
        name: name of the strategy.
        costs: costs of the timeline's ops.
        baseline: timeline of the same plan without recomputation, if the plan recomputes.
        plan: plan of the strategy, if it has one.
    """
    program = checked.program
    report.data |= {"strategy": name, **({"plan": plan.as_dict()} if plan else {})}
    report.data |= {"ranks": program.ranks, "mesh": program.mesh.used}
    report.data |= {"layers": program.layers, "microbatches": program.microbatches}
    report.line(Text.assemble((name, "bold cyan"), "  ", (sizes_text(checked), "dim")), wrap=False)
    report.line()
    report.fact("steps", "when the last op starts", units_text(timeline.steps), steps=timeline.steps)
    report.fact("end", "when the last op ends", units_text(timeline.end), end=timeline.end)
    if program.mesh.pp > 1:
        add_bubble(report, schedule_bubble(checked, costs), bubble(timeline))
    peak, by_rank = timeline.peak_memory, timeline.peak_memory_by_rank
    fullest_ranks = [rank for rank, memory in enumerate(by_rank) if memory == peak]
    text = f"elements, on rank{'s' * (len(fullest_ranks) > 1)} {listed(fullest_ranks)}"
    report.fact("peak memory", text, f"{peak:,}", peak_memory=peak, peak_memory_by_rank=by_rank)
    for place, elements in peak_elsewhere(checked).items():
        report.fact(f"on the {place}", "elements at most, of a rank", f"{elements:,}")
        report.data[f"peak_memory_on_{place}"] = elements
    if baseline is not None:
        figures = {"steps": baseline.steps, "end": baseline.end, "peak_memory": baseline.peak_memory}
        report.data["without_recompute"] = figures
        if baseline.end and baseline.peak_memory:
            longer, text = _recompute_text(timeline, baseline)
            report.fact("recompute", text, longer)
    if any(layer.sliced for layer in program.sizes.signatures):
        names = sorted({layer.name for layer in program.sizes.signatures})
        report.fact("layers", ", ".join(names), str(program.layers))
    if frozen_layers := checked.frozen:
        text = f"layer{'s' * (len(frozen_layers) > 1)} {listed(frozen_layers)}"
        report.fact("frozen", text, str(len(frozen_layers)), frozen=list(frozen_layers))
    ops = sum(map(len, program.tapes))
    report.fact("ops", "on the tapes of all ranks", f"{ops:,}", ops=ops)
    refusals = {model.value: reason for model, reason in checked.models.items() if reason is not None}
    models = {model.value: model.value not in refusals for model in ChannelModel}
    passed_models = ", ".join(model for model, passes in models.items() if passes)
    report.fact("channel models", f"{passed_models}: passed", style="green", channel_models=models, deadlocks=refusals)
    for model, reason in refusals.items():
        report.fact("", f"{model}: refused", style="red")
        report.fact("", reason)
    backends = checked.backends()
    report.fact("runs on", ", ".join(backends) or "no backend", style="bold", backends=backends)
    add_drifts(report, checked)
    report.line()
    report.draw(partial(_print_ranks, timeline=timeline))


def add_path(report: Report, path: dict[str, float], text: Callable[[float], str]) -> None:
    """Add the parts of a critical path to a report. Their times add up to the time of the step."""
    if not path:
        return
    step = sum(path.values())
    table = table_of("critical path", "", "of the step")
    for name, seconds in path.items():
        table.add_row(name, text(seconds), f"{seconds / step:.1%}")
    table.add_row("step", text(step), "100.0%", style="bold")
    report.line()
    report.draw(lambda console: console.print(table))
    report.data["critical_path"] = path


def units_text(time: float) -> str:
    """Return a time in units as text, with up to two decimals."""
    return f"{round(time, 2):,.9g}"


def sizes_text(checked: Checked) -> str:
    """Return the sizes of a program, such as `16 ranks (pp 4 x dp_shard 4), 4 layers, 4 microbatches`."""
    program = checked.program
    grid = f" ({program.mesh})" if len(program.mesh.used) > 1 else ""
    return (
        f"{counted(program.ranks, 'rank')}{grid}, {counted(program.layers, 'layer')}, "
        f"{counted(program.microbatches, 'microbatch')}"
    )


def add_drifts(report: Report, checked: Checked) -> None:
    """Add a warning for each kind of replicas that may drift."""
    drifts = drifts_of(checked)
    report.data["drifts"] = [drift.as_dict() for drift in drifts]
    for drift in drifts:
        report.fact("warning", "equal only up to rounding", style="yellow")
        report.fact("", str(drift))


def _without_recompute(entry: StrategyEntry, proof: Checked, costs: Prices, names: str) -> Timeline | None:
    """Simulate the same plan and layers without recomputation. Return None if the plan does not recompute.

    Args:
        names: passes that rewrote the program. They are applied to the one without recomputation as well.
    """
    program = proof.program
    plan = entry.plan(program.ranks) if entry.plan else None
    if plan is None or plan.recompute in ("none", ()):
        return None
    baseline = trace(program_from_plan(replace(plan, recompute="none")), plan.mesh, program.sizes, program.microbatches)
    return simulate(run_passes(check(baseline), find_passes(names), Goal(costs))[-1].checked, costs)


def _recompute_text(timeline: Timeline, baseline: Timeline) -> tuple[str, str]:
    """Return the relative changes of step time and peak memory due to recomputation, as text."""
    if (timeline.end, timeline.peak_memory) == (baseline.end, baseline.peak_memory):
        return "+0.0%", "changes nothing: no attention scores are kept"
    memory = timeline.peak_memory / baseline.peak_memory - 1
    return f"{timeline.end / baseline.end - 1:+.1%}", f"time, {memory:+.1%} peak memory, against none"


def _print_ranks(console: Console, timeline: Timeline) -> None:
    """Print the timeline of each rank, with its share of compute and its peak memory."""
    busy_shares = [rank_times(timeline, rank).computing / (timeline.end or 1) for rank in range(len(timeline.events))]
    columns = [
        ("computes", [f"{share:.0%}" for share in busy_shares]),
        ("peak memory", [f"{memory:,}" for memory in timeline.peak_memory_by_rank]),
    ]
    print_timeline(console, timeline, columns)
