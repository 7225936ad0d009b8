"""`shardlab simulate STRATEGY`: check a strategy, and simulate the time and memory of one step.

`Simulate.run` traces and checks the program, runs passes on it if asked to, simulates it in unit costs, and prints the
figures and a timeline (`print_report`), or JSON (`as_json`). With --model and --cluster, `priced.py` does the same in
seconds and bytes. Both print the critical path with `print_path_parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from shardlab.check import ChannelModel, Checked, check, drifts_of
from shardlab.cli.console import print_fact, print_figures, print_json, print_path, stdout_console, table_of
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
from shardlab.cli.passes import as_json as passes_json
from shardlab.cli.passes import print_passed
from shardlab.cli.plan_options import NO_FLAGS, DeviceMemory, JobFile, Layout, RecipeName, checked
from shardlab.cli.simulate.terminal_timeline import print_strips, print_timeline
from shardlab.cli.step_request import StepRequest
from shardlab.common.text import counted, listed, seconds_text
from shardlab.language import UserError, trace
from shardlab.language.precision import Optimizer
from shardlab.simulate.passes import Goal, PassResult, find_passes, helpful_results, run_named, run_passes
from shardlab.simulate.timeline import UNIT_COSTS, Costs, Timeline, bubble, simulate
from shardlab.simulate.timeline.critical_path import critical_path, path_parts
from shardlab.simulate.timeline.memory import peak_elsewhere
from shardlab.simulate.timeline.run import Clocks, Counter
from shardlab.simulate.timeline.timeline import rank_times
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.registry import StrategyEntry


@dataclass(frozen=True)
class Simulate:
    """Check a strategy, and simulate one step of it: its time and its memory.

    Times are in the unit costs of the LLM Training Puzzles, or in those of --costs: the forward pass of a microbatch
    through a layer takes 1, an update 0.5, a collective 0.3, a send or a receive 0.2. With --model and --cluster, times
    are in seconds and memory is in bytes. Ranks that a plan makes identical are then simulated once.
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
    """Times of ops; ops that are left out take no time. An unsplit backward pass takes backward_input +
    backward_weight. The time of a send is spent on its link, which carries any number of messages at once."""

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
        costs = costs_of(self.costs) if self.costs is not None else UNIT_COSTS
        entry, ranks = self.layout.entry_of_job(self.strategy, self.ranks, [request.file])
        layers = request.model_fields.get("layers") or entry.default_layers(ranks, at_least=1 if self.costs else 4)
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
        if self.json:
            facts = as_json(entry, proof, timeline, without) | passes_json(passed)
            print_json({**facts, **({"critical_path": path} if path else {})})
        else:
            print_passed(passed, "{:,.9g}".format)
            print_strips(stages if self.each_pass else {}, "{:,.9g}".format)
            print_report(entry.name, proof, timeline, self.pictures.svg, without)
            print_path_parts(path, "{:,.4g}".format)
        return 0

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
            self.layout.entry_of_job(
                self.strategy, self.ranks, [request.file]
            )  # what is wrong with the plan is said first
            missing = "--cluster, such as h100x16" if self.model else "--model, such as gpt2-xl"
            raise UserError(f"a step in seconds needs a model and a cluster; give {missing}, too")
        flags = {
            "sequence": self.sequence,
            "memory": self.memory,
            "global-batch": self.global_batch,
            "micro-batch-size": self.micro_batch_size,
            "precision": self.precision,
            "recipe": self.recipe,
            "optimizer": self.optimizer != "muon" and self.optimizer,
            "ema": self.ema,
            "other-machine": self.other_machine,
        }
        for flag, given in flags.items():
            if given:
                raise UserError(f"--{flag} needs a model and a cluster; give --model and --cluster, or leave it out")
        return False

    def _run_priced(self, request: StepRequest) -> int:
        from shardlab.cli.simulate.priced import as_json as priced_json
        from shardlab.cli.simulate.priced import price, print_priced
        from shardlab.simulate.timeline.run import memory_counters

        result = price(request)
        stages = self._stages(result.passed, result.workload.timeline)
        if self.pictures.files:
            estimate = result.estimate
            name = f"{result.entry.title(result.workload.mesh.world)} of {request.model} on {request.cluster}"
            counters = memory_counters(estimate.traced, estimate.times)
            self._save(estimate.timeline(), stages, name, counters)
        path: dict[str, float] = {}
        if self.path:
            estimate = result.estimate
            path = path_parts(estimate.traced, critical_path(estimate.traced, estimate.times), estimate.place)
        if self.json:
            facts = priced_json(result) | passes_json(result.passed)
            print_json({**facts, **({"critical_path": path} if path else {})})
        else:
            print_passed(result.passed, seconds_text)
            print_strips(stages if self.each_pass else {}, seconds_text)
            print_priced(result, self.pictures.files)
            print_path_parts(path, seconds_text)
        return 0


def as_json(
    entry: StrategyEntry, proof: Checked, timeline: Timeline, without: Timeline | None = None
) -> dict[str, Any]:
    """Return the figures of a step for --json.

    Args:
        without: timeline of the same plan without recomputation, if the plan recomputes.
    """
    program = proof.program
    return {
        "strategy": entry.name,
        **({"plan": entry.plan(program.ranks).as_dict()} if entry.plan else {}),
        "ranks": program.ranks,
        "mesh": program.mesh.used,
        "layers": program.layers,
        "microbatches": program.microbatches,
        "steps": timeline.steps,
        "end": timeline.end,
        "bubble": bubble(timeline),
        **({"frozen": list(proof.frozen)} if proof.frozen else {}),
        "peak_memory": timeline.peak_memory,
        "peak_memory_by_rank": timeline.peak_memory_by_rank,
        **{f"peak_memory_on_{place}": most for place, most in peak_elsewhere(proof).items()},
        **(
            {"without_recompute": {"steps": without.steps, "end": without.end, "peak_memory": without.peak_memory}}
            if without
            else {}
        ),
        "ops": sum(map(len, program.tapes)),
        "channel_models": {model.value: proof.models[model] is None for model in ChannelModel},
        "deadlocks": {model.value: why for model, why in proof.models.items() if why is not None},
        "backends": proof.backends(),
        "drifts": [drift.as_dict() for drift in drifts_of(proof)],
    }


def print_report(
    name: str,
    checked: Checked,
    timeline: Timeline,
    picture: Path | None = None,
    without: Timeline | None = None,
    console: Console | None = None,
) -> None:
    """Print the figures, the verdicts of the channel models, and the timelines of the ranks.

    Args:
        picture: file with the drawing, if one was written.
        without: timeline of the same plan without recomputation, if the plan recomputes.
    """
    console = console or stdout_console()
    console.print(Text.assemble((name, "bold cyan"), "  ", (sizes_text(checked), "dim")), soft_wrap=True)
    console.print()
    _print_figures(console, checked, timeline, without)
    console.print()
    _print_ranks(console, timeline)
    if picture is not None:
        console.print()
        print_path(console, "drawn in", picture)


def print_path_parts(path: dict[str, float], text: Callable[[float], str], console: Console | None = None) -> None:
    """Print the parts of a critical path, if there is one. Their times add up to the time of the step."""
    if not path:
        return
    console, step = console or stdout_console(), sum(path.values())
    table = table_of("critical path", "", "of the step")
    for name, seconds in path.items():
        table.add_row(name, text(seconds), f"{seconds / step:.1%}")
    table.add_row("step", text(step), "100.0%", style="bold")
    console.print()
    console.print(table)


def sizes_text(checked: Checked) -> str:
    """Return the sizes of a program, such as `16 ranks (pp 4 x dp_shard 4), 4 layers, 4 microbatches`."""
    program = checked.program
    grid = f" ({program.mesh})" if len(program.mesh.used) > 1 else ""
    return (
        f"{counted(program.ranks, 'rank')}{grid}, {counted(program.layers, 'layer')}, "
        f"{counted(program.microbatches, 'microbatch')}"
    )


def print_drifts(console: Console, checked: Checked) -> None:
    """Print a warning for each kind of replicas that may drift."""
    for drift in drifts_of(checked):
        print_fact(console, "warning", "equal only up to rounding", "yellow")
        print_fact(console, "", str(drift))


def _without_recompute(entry: StrategyEntry, proof: Checked, costs: Costs, names: str) -> Timeline | None:
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


def _frozen(checked: Checked) -> list[tuple[str, str, str]]:
    """Return a row with the frozen layers, if there are any."""
    frozen = checked.frozen
    return [("frozen", str(len(frozen)), f"layer{'s' * (len(frozen) > 1)} {listed(frozen)}")] if frozen else []


def _print_figures(console: Console, checked: Checked, timeline: Timeline, without: Timeline | None) -> None:
    elsewhere = peak_elsewhere(checked)
    peak = [rank for rank, live in enumerate(timeline.peak_memory_by_rank) if live == timeline.peak_memory]
    figures = [
        ("steps", f"{timeline.steps:,.9g}", "when the last op starts"),
        ("end", f"{timeline.end:,.9g}", "when the last op ends"),
        *_bubble(timeline),
        ("peak memory", f"{timeline.peak_memory:,}", f"elements, on rank{'s' * (len(peak) > 1)} {listed(peak)}"),
        *((f"on the {place}", f"{most:,}", "elements at most, of a rank") for place, most in elsewhere.items()),
        *_recomputed(timeline, without),
        *_divided_layers(checked),
        *_frozen(checked),
        ("ops", f"{sum(map(len, checked.program.tapes)):,}", "on the tapes of all ranks"),
    ]
    print_figures(console, figures)
    passed = [model.value for model in ChannelModel if checked.models[model] is None]
    print_fact(console, "channel models", ", ".join(passed) + ": passed", "green")
    for model, why in checked.models.items():
        if why is not None:
            print_fact(console, "", f"{model.value}: refused", "red")
            print_fact(console, "", why)
    print_fact(console, "runs on", ", ".join(checked.backends()) or "no backend", "bold")
    print_drifts(console, checked)


def _bubble(timeline: Timeline) -> list[tuple[str, str, str]]:
    if timeline.program.mesh.sizes()["pp"] == 1:
        return []
    return [("bubble", f"{bubble(timeline):.2%}", "of the time between a rank's first and last pass")]


def _recomputed(timeline: Timeline, without: Timeline | None) -> list[tuple[str, str, str]]:
    if without is None or not without.end or not without.peak_memory:
        return []
    if (timeline.end, timeline.peak_memory) == (without.end, without.peak_memory):
        return [("recompute", "+0.0%", "changes nothing: no attention scores are kept")]
    memory = timeline.peak_memory / without.peak_memory - 1
    longer = f"{timeline.end / without.end - 1:+.1%}"
    return [("recompute", longer, f"time, {memory:+.1%} peak memory, against none")]


def _divided_layers(checked: Checked) -> list[tuple[str, str, str]]:
    """Return a row with the names of the layers, if the model's layers are divided.

    In unit costs, each part takes as long as a whole layer, so such steps cannot be compared with others.
    """
    signatures = checked.program.sizes.signatures
    if not any(layer.sliced for layer in signatures):
        return []
    names = sorted({layer.name for layer in signatures})
    return [("layers", str(checked.program.layers), f"{', '.join(names)}; each timed as a layer")]


def _print_ranks(console: Console, timeline: Timeline) -> None:
    """Print the timeline of each rank, with its share of compute and its peak memory."""
    busy = [rank_times(timeline, rank).computing / (timeline.end or 1) for rank in range(len(timeline.events))]
    columns = [
        ("computes", [f"{share:.0%}" for share in busy]),
        ("peak memory", [f"{memory:,}" for memory in timeline.peak_memory_by_rank]),
    ]
    print_timeline(console, timeline, lambda row: row, columns, label=4)
