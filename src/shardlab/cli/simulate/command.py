"""`shardlab simulate STRATEGY`: check a strategy, and simulate the time and memory of one step.

`Simulate.run` traces and checks the program, runs passes on it if asked to, simulates it in unit costs, and prints the
figures and a timeline, or JSON (`add_step`). With --model and --cluster, `priced.py` does the same in seconds and
bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from shardlab.check import ChannelModel, Checked, check, drifts_of
from shardlab.cli.console import Report, print_path, table_of
from shardlab.cli.options import (
    NO_PICTURES,
    CostsText,
    Flag,
    Layers,
    MaxOps,
    MaxSeconds,
    Name,
    OptionalCount,
    PictureFlags,
    Ranks,
    StrategyName,
    costs_of,
)
from shardlab.cli.passes import add_passes
from shardlab.cli.plan_options import NO_FLAGS, DeviceMemory, JobFile, Layout, RecipeName, checked
from shardlab.cli.simulate.terminal_timeline import print_strips, print_timeline
from shardlab.cli.step_request import OPTIONS, StepRequest
from shardlab.common.fields import COUNT, check_field
from shardlab.common.text import counted, listed, seconds_text
from shardlab.language import UserError, trace
from shardlab.language.precision import Optimizer
from shardlab.simulate.passes import Goal, PassResult, find_passes, helpful_results, run_named, run_passes
from shardlab.simulate.timeline import TEACHING_COSTS, Timeline, bubble, simulate
from shardlab.simulate.timeline.critical_path import critical_path, path_parts
from shardlab.simulate.timeline.memory import peak_elsewhere
from shardlab.simulate.timeline.prices import Prices
from shardlab.simulate.timeline.run import Clocks, Counter
from shardlab.simulate.timeline.timeline import rank_times
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.registry import StrategyEntry

IN_UNIT_COSTS = ("model", "cluster", "layers", "microbatches")
PRICED_OPTIONS = [option for options in OPTIONS.values() for option in options if option not in IN_UNIT_COSTS]
"""Options that need a model and a cluster. Only the optimizer muon also changes a step in unit costs."""


@dataclass(frozen=True)
class Simulate:
    """Check a strategy, and simulate one step of it: its time and its memory.

    Times are in teaching costs, or in those of --costs: the forward pass of one microbatch through one layer takes 1,
    other passes take time by their FLOPs, updates by their elements, and communication by its bytes. With --model and
    --cluster, times are in seconds and memory is in bytes. Ranks that a plan makes identical are then simulated once.
    """

    strategy: StrategyName = None
    """Built-in name, or path/to/file.py:function. Leave it out for a plan by flags or --plan."""

    ranks: Ranks = None
    """Number of ranks."""

    layers: Layers = None
    """Number of layers of the model."""

    sequence: OptionalCount = None
    """Tokens of a sequence (default: the model's); with --model."""

    microbatches: OptionalCount = None
    """Number of microbatches in the global batch (default: 4; with --model, one for each device, or --global-batch
    divided by --micro-batch-size)."""

    model: Name = None
    """Model such as gpt2-xl or llama3-8b, or path/to/file.py:NAME, or path/to/model.toml; with --cluster."""

    cluster: Name = None
    """Device type and number, such as h100x16, or path/to/cluster.toml; or the results of bench: local, or
    path/to/profile.json; with --model."""

    other_machine: Flag = False
    """Accept a profile that was measured on another machine; with --cluster."""

    memory: DeviceMemory = None
    """Memory of each device that the step may use, such as 72GiB; with --cluster."""

    global_batch: OptionalCount = None
    """Sequences in a step (default: --micro-batch-size for each device of the cluster); with --model."""

    micro_batch_size: OptionalCount = None
    """Sequences of a microbatch (default: 1); with --model."""

    precision: Name = None
    """fp32, bf16, bf16-fp32-grads or fp16 (default: that of the recipe, which is bf16 or bf16-fp32-grads if the device
    has it); with --model."""

    recipe: RecipeName = None

    optimizer: Annotated[Optimizer | None, tyro.conf.arg(help_behavior_hint="(default: adamw)")] = None
    """Optimizer, which determines the size of the optimizer state; with --model. Without --model, only muon makes a
    difference: it gathers directions of whole matrices."""

    ema: Flag = False
    """Keep a moving average of the weights with the optimizer state; with --model."""

    costs: CostsText = None
    """Times of ops: teaching, puzzle (those of the LLM Training Puzzles), or NAME=TIME,... Ops that are left out then
    take no time, an unsplit backward pass takes backward_input + backward_weight, and the time of a send is spent on
    its link, which carries any number of messages at once."""

    max_ops: MaxOps = None
    """Refuse a program with more ops in a step, over all ranks, because it may never end."""

    max_seconds_per_op: MaxSeconds = None
    """Refuse a program or a schedule that needs more CPU time until its next op, because it may loop forever."""

    path: Flag = False
    """Print the critical path of the step: the ops, messages and waits whose times add up to the time of the step."""

    each_pass: Flag = False
    """Print the timelines before the first pass and after each pass, on one axis; with --passes."""

    json: Flag = False
    """Print only JSON."""

    pictures: PictureFlags = NO_PICTURES

    layout: Layout = NO_FLAGS

    config: JobFile = None

    def run(self) -> int:
        self.pictures.check("timeline.svg")
        request = StepRequest.of(self)
        if self._is_priced(request):
            return self._run_priced(request)
        costs = costs_of(self.costs) if self.costs is not None else TEACHING_COSTS
        entry, ranks = self.layout.entry(self.strategy, self.ranks, [request.file])
        layers = request.model_fields.get("layers", entry.default_layers(ranks, at_least=1 if self.costs else 4))
        check_field("layers", layers, COUNT, None)
        microbatches, matrices = request.batch.microbatches or 4, request.optimizer == "muon"
        written = checked(entry, ranks, layers, microbatches, whole_matrices=matrices)
        names = entry.passes_on(ranks)
        passed = run_named(written, names, Goal(costs)) if names != "none" else []
        proof = passed[-1].checked if passed else written
        timeline = simulate(proof, costs)
        stages = self._stages(passed, partial(simulate, costs=costs))
        self._save(timeline, stages, entry.title(ranks))
        without = _without_recompute(entry, proof, costs, names)
        path = path_parts(proof, critical_path(proof, Clocks(proof, costs).run())) if self.path else {}
        report = self._passes_report(entry.name, passed, stages, units_text)
        add_step(report, entry.name, proof, timeline, without, entry.plan and entry.plan(ranks))
        if self.pictures.svg is not None:
            report.line()
            report.draw(partial(print_path, label="drawn in", path=self.pictures.svg))
        add_path(report, path, units_text)
        report.show(json=self.json)
        return 0

    def _passes_report(
        self, name: str, passed: list[PassResult], stages: dict[str, Timeline], time_text: Callable[[float], str]
    ) -> Report:
        """Return a report of the strategy with this name, which begins with the effect of passes, if there are any."""
        report = Report(strategy=name)
        add_passes(report, passed, time_text)
        if self.each_pass:
            report.draw(partial(print_strips, stages, time_text))
        return report

    def _stages(self, passed: list[PassResult], timeline: Callable[[Checked], Timeline]) -> dict[str, Timeline]:
        """Simulate the step before the first pass and after each useful pass, if a picture or --each-pass shows it."""
        if self.each_pass and not passed:
            raise UserError(
                "--each-pass shows the effect of passes, but none is given; give some, such as --passes all"
            )
        if not self.each_pass and not self.pictures.files:
            return {}
        return {name: timeline(each.checked) for name, each in helpful_results(passed).items()}

    def _save(
        self, timeline: Timeline, stages: dict[str, Timeline], name: str, counters: list[Counter] | None = None
    ) -> None:
        """Write the requested pictures of the step or, if passes changed the program, of all its stages."""
        if len(stages) > 1:
            self.pictures.save_each(stages, name)
        else:
            self.pictures.save(timeline, name, counters)

    def _is_priced(self, request: StepRequest) -> bool:
        if request.model and request.cluster:
            if self.costs is not None:
                raise UserError("--costs gives unit costs, but --cluster gives seconds; leave out one of them")
            return True
        if self.model or request.cluster:
            self.layout.entry(self.strategy, self.ranks, [request.file])  # refuses a wrong plan first
            missing = "--cluster, such as h100x16" if self.model else "--model, such as gpt2-xl"
            raise UserError(f"a step in seconds needs a model and a cluster; give {missing}, too")
        for name in PRICED_OPTIONS:
            if (given := getattr(self, name)) and given != "muon":
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} needs a model and a cluster; give --model and --cluster, or leave it out")
        return False

    def _run_priced(self, request: StepRequest) -> int:
        from shardlab.cli.simulate.priced import add_step, price
        from shardlab.simulate.timeline.run import memory_counters

        result = price(request)
        estimate, stages = result.estimate, self._stages(result.passed, result.workload.timeline)
        if self.pictures.files:
            name = f"{result.entry.title(result.workload.mesh.world)} of {request.model} on {request.cluster}"
            self._save(estimate.timeline(), stages, name, memory_counters(estimate.traced, estimate.times))
        path: dict[str, float] = {}
        if self.path:
            path = path_parts(estimate.traced, critical_path(estimate.traced, estimate.times), estimate.place)
        report = self._passes_report(result.entry.name, result.passed, stages, seconds_text)
        add_step(report, result, self.pictures.files)
        add_path(report, path, seconds_text)
        report.show(json=self.json)
        return 0


def add_step(
    report: Report,
    name: str,
    checked: Checked,
    timeline: Timeline,
    without: Timeline | None = None,
    plan: Plan | None = None,
) -> None:
    """Add the figures of a step, the verdicts of the channel models, and the timelines of the ranks to a report.

    Args:
        name: name of the strategy.
        without: timeline of the same plan without recomputation, if the plan recomputes.
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
    report.data["bubble"] = bubble(timeline)
    if program.mesh.sizes()["pp"] > 1:
        report.fact("bubble", "of the time between a rank's first and last pass", f"{bubble(timeline):.2%}")
    peak, by_rank = timeline.peak_memory, timeline.peak_memory_by_rank
    fullest = [rank for rank, live in enumerate(by_rank) if live == peak]
    text = f"elements, on rank{'s' * (len(fullest) > 1)} {listed(fullest)}"
    report.fact("peak memory", text, f"{peak:,}", peak_memory=peak, peak_memory_by_rank=by_rank)
    for place, most in peak_elsewhere(checked).items():
        report.fact(f"on the {place}", "elements at most, of a rank", f"{most:,}")
        report.data[f"peak_memory_on_{place}"] = most
    if without is not None:
        figures = {"steps": without.steps, "end": without.end, "peak_memory": without.peak_memory}
        report.data["without_recompute"] = figures
        if without.end and without.peak_memory:
            longer, text = _recomputed(timeline, without)
            report.fact("recompute", text, longer)
    if any(layer.sliced for layer in program.sizes.signatures):
        names = sorted({layer.name for layer in program.sizes.signatures})
        report.fact("layers", ", ".join(names), str(program.layers))
    if frozen := checked.frozen:
        text = f"layer{'s' * (len(frozen) > 1)} {listed(frozen)}"
        report.fact("frozen", text, str(len(frozen)), frozen=list(frozen))
    ops = sum(map(len, program.tapes))
    report.fact("ops", "on the tapes of all ranks", f"{ops:,}", ops=ops)
    refused = {model.value: why for model, why in checked.models.items() if why is not None}
    models = {model.value: model.value not in refused for model in ChannelModel}
    passed = ", ".join(model for model, passes in models.items() if passes)
    report.fact("channel models", f"{passed}: passed", style="green", channel_models=models, deadlocks=refused)
    for model, why in refused.items():
        report.fact("", f"{model}: refused", style="red")
        report.fact("", why)
    backends = checked.backends()
    report.fact("runs on", ", ".join(backends) or "no backend", style="bold", backends=backends)
    add_drifts(report, checked)
    report.line()
    report.draw(partial(_print_ranks, timeline=timeline))


def add_path(report: Report, path: dict[str, float], text: Callable[[float], str]) -> None:
    """Add the parts of a critical path to a report, if there are any. Their times add up to the time of the step."""
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
    """Simulate the same plan without recomputation, on the same layers; return None if the plan does not recompute.

    Args:
        names: passes that rewrote the program, which rewrite this one as well.
    """
    program = proof.program
    plan = entry.plan(program.ranks) if entry.plan else None
    if plan is None or plan.recompute in ("none", ()):
        return None
    kept = trace(program_from_plan(replace(plan, recompute="none")), plan.mesh, program.sizes, program.microbatches)
    return simulate(run_passes(check(kept), find_passes(names), Goal(costs))[-1].checked, costs)


def _recomputed(timeline: Timeline, without: Timeline) -> tuple[str, str]:
    """Return by how much recomputation makes the step longer, and what it does to the memory."""
    if (timeline.end, timeline.peak_memory) == (without.end, without.peak_memory):
        return "+0.0%", "changes nothing: no attention scores are kept"
    memory = timeline.peak_memory / without.peak_memory - 1
    return f"{timeline.end / without.end - 1:+.1%}", f"time, {memory:+.1%} peak memory, against none"


def _print_ranks(console: Console, timeline: Timeline) -> None:
    """Print the timeline of each rank, with its share of compute and its peak memory."""
    busy = [rank_times(timeline, rank).computing / (timeline.end or 1) for rank in range(len(timeline.events))]
    columns = [
        ("computes", [f"{share:.0%}" for share in busy]),
        ("peak memory", [f"{memory:,}" for memory in timeline.peak_memory_by_rank]),
    ]
    print_timeline(console, timeline, lambda row: row, columns, label=4)
