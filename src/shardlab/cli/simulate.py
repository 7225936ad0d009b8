"""`shardlab simulate STRATEGY`: check a strategy, and say how long a step takes and how much memory it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import tyro

from shardlab.check import ChannelModel, Checked, check
from shardlab.cli.cluster import DeviceMemory
from shardlab.cli.console import print_json
from shardlab.cli.costs import CostsText, costs_of
from shardlab.cli.options import Flag, Layers, MaxOps, MaxSeconds, Name, OptionalCount, Ranks, StrategyName
from shardlab.cli.pass_strips import print_strips
from shardlab.cli.passes_report import as_json as passes_json
from shardlab.cli.passes_report import print_passed
from shardlab.cli.picture import NO_PICTURES, PictureFlags
from shardlab.cli.plan_options import NO_FLAGS, Layout
from shardlab.cli.recipe_option import RecipeName
from shardlab.cli.report import print_path_parts, print_report
from shardlab.cli.strategy import checked
from shardlab.passes import Goal, Passed, find_passes, helped, run_named, run_passes
from shardlab.program import UserError, trace
from shardlab.program.precision import Optimizer
from shardlab.strategies.entry import StrategyEntry
from shardlab.strategies.planned import planned
from shardlab.timeline import UNIT_COSTS, Costs, Timeline, bubble, simulate
from shardlab.timeline.clocks import Clocks
from shardlab.timeline.counters import Counter
from shardlab.timeline.memory import peak_elsewhere
from shardlab.timeline.path import critical_path, path_parts
from shardlab.timeline.units import seconds_text


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
    """fp32, bf16, bf16-fp32-grads or fp16 (default: bf16 if the device has it); with --model."""

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

    def run(self) -> int:
        self.pictures.check("timeline.svg")
        if self._is_priced():
            return self._run_priced()
        costs = costs_of(self.costs) if self.costs is not None else UNIT_COSTS
        entry, ranks = self.layout.entry(self.strategy, self.ranks)
        layers = self.layers or entry.default_layers(ranks, at_least=1 if self.costs else 4)
        written = checked(entry, ranks, layers, self.microbatches or 4, whole_matrices=self.optimizer == "muon")
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

    def _stages(self, passed: list[Passed], timeline: Callable[[Checked], Timeline]) -> dict[str, Timeline]:
        """The step before the first pass and after each that helped, if that is to be shown."""
        if self.each_pass and not passed:
            raise UserError(
                "--each-pass shows the effect of passes, but none is given; give some, such as --passes all"
            )
        if not self.each_pass and not self.pictures.files:
            return {}
        return {name: timeline(each.checked) for name, each in helped(passed).items()}

    def _save(
        self, timeline: Timeline, stages: dict[str, Timeline], name: str, counters: list[Counter] | None = None
    ) -> None:
        """Write the files that are wanted: of a program that passes have changed, all that they made of it."""
        if len(stages) > 1:
            self.pictures.save_each(stages, name)
        else:
            self.pictures.save(timeline, name, counters)

    def _is_priced(self) -> bool:
        if self.model and self.cluster:
            if self.costs is not None:
                raise UserError("--costs gives unit costs, but --cluster gives seconds; leave out one of them")
            return True
        if self.model or self.cluster:
            self.layout.entry(self.strategy, self.ranks)  # what is wrong with the plan is said first
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

    def _run_priced(self) -> int:
        from shardlab.cli.global_batch import BatchRequest
        from shardlab.cli.priced import as_json as priced_json
        from shardlab.cli.priced import price
        from shardlab.cli.priced_report import print_priced
        from shardlab.timeline.counters import memory_counters

        assert self.model is not None
        assert self.cluster is not None
        result = price(
            self.strategy,
            self.layout,
            self.model,
            self.cluster,
            precision=self.precision,
            recipe=self.recipe,
            optimizer=self.optimizer or "adamw",
            ema=self.ema,
            ranks=self.ranks,
            layers=self.layers,
            sequence=self.sequence,
            memory=self.memory,
            batch=BatchRequest(self.global_batch, self.microbatches, self.micro_batch_size),
            other_machine=self.other_machine,
        )
        stages = self._stages(result.passed, result.workload.timeline)
        if self.pictures.files:
            estimate = result.estimate
            name = f"{result.entry.title(result.workload.mesh.world)} of {self.model} on {self.cluster}"
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


def _without_recompute(entry: StrategyEntry, proof: Checked, costs: Costs, names: str) -> Timeline | None:
    """What a plan that recomputes would be without, on the same layers: other ones are not to be compared with it.

    Args:
        names: passes that have rewritten it, and rewrite that one too.
    """
    program = proof.program
    plan = entry.plan(program.ranks) if entry.plan else None
    if plan is None or plan.recompute in ("none", ()):
        return None
    kept = trace(planned(replace(plan, recompute="none")), plan.mesh, program.sizes, program.microbatches)
    return simulate(run_passes(check(kept), find_passes(names), Goal(costs))[-1].checked, costs)


def as_json(
    entry: StrategyEntry, proof: Checked, timeline: Timeline, without: Timeline | None = None
) -> dict[str, Any]:
    """A strategy's figures as JSON has them; `without` is the same plan's step without recomputation."""
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
        "drifts": [drift.as_dict() for drift in proof.drifts],
    }
