"""Options of a step to simulate, shared by `simulate` and `view`, and the step in time units.

`StepOptions` has the options. `is_priced` tells whether they describe a step in seconds, which `priced.py` simulates.
`step_in_units` traces, checks and rewrites the program of a step in time units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from shardlab.check import Checked
from shardlab.cli.model_options import NO_SIZES, SizeFlags
from shardlab.cli.options import (
    CostsText,
    Flag,
    Layers,
    MaxOps,
    MaxSeconds,
    Name,
    OptionalCount,
    Ranks,
    StrategyName,
    costs_of,
)
from shardlab.cli.plan_options import NO_FLAGS, DeviceMemory, JobFile, Layout, RecipeName, SwitchWords, checked
from shardlab.cli.step_request import OPTIONS, StepRequest
from shardlab.common.fields import COUNT, check_field
from shardlab.language import UserError
from shardlab.language.precision import Optimizer
from shardlab.simulate.passes import Goal, PassResult, run_named
from shardlab.simulate.timeline import TEACHING_COSTS
from shardlab.simulate.timeline.prices import Prices
from shardlab.strategies.registry import StrategyEntry

WITHOUT_CLUSTER = ("model", "cluster", "layers", "microbatches")
PRICED_OPTIONS = [option for options in OPTIONS.values() for option in options if option not in WITHOUT_CLUSTER]
"""Options that need a model and a cluster, with one exception: the optimizer muon also changes a step in time units."""


@dataclass(frozen=True)
class UnitStep:
    """Step in time units.

    Attributes:
        entry, ranks: strategy and its number of ranks.
        costs: times of ops.
        names: names of the passes that rewrote the program; "none" without passes.
        pass_results: the program as written, and after each pass (empty: no passes were requested).
        proof: the checked program after all passes.
    """

    entry: StrategyEntry
    ranks: int
    costs: Prices
    names: str
    pass_results: list[PassResult]
    proof: Checked


@dataclass(frozen=True)
class StepOptions:
    """Options of a step: a strategy, its sizes, and the times of its ops."""

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
    """Model such as gpt2-xl or llama3-8b, or path/to/file.py:NAME, path/to/model.toml, path/to/config.json, or a folder
    of transformers; with --cluster."""

    sizes: SizeFlags = NO_SIZES

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
    """fp32, tf32, bf16, bf16-fp32-grads, bf16-params, fp16, fp8 or mxfp8 (default: that of the recipe, which is bf16 or
    bf16-fp32-grads if the device has it); with --model."""

    recipe: RecipeName = None

    as_if: Flag = False
    """Predict a plan that the recipe's framework cannot run as if it could; with --recipe."""

    switch: SwitchWords = ()

    optimizer: Annotated[Optimizer | None, tyro.conf.arg(help_behavior_hint="(default: adamw)")] = None
    """Optimizer, which determines the size of the optimizer state; with --model. Without --model, only muon makes a
    difference: it gathers directions of whole matrices."""

    ema: Flag = False
    """Keep a moving average of the weights with the optimizer state; with --model."""

    costs: CostsText = None
    """Times of ops: teaching, puzzle (those of the LLM Training Puzzles), or NAME=TIME,... In the last form, other ops
    take no time, an unsplit backward pass takes backward_input + backward_weight, and a send occupies its link, which
    carries any number of messages at once."""

    max_ops: MaxOps = None
    """Refuse a program with more ops in a step, over all ranks, because it may never end."""

    max_seconds_per_op: MaxSeconds = None
    """Refuse a program or a schedule that needs more CPU time until its next op, because it may loop forever."""

    layout: Layout = NO_FLAGS

    config: JobFile = None

    def is_priced(self, request: StepRequest) -> bool:
        """Return whether the options describe a step in seconds, rather than in time units.

        Raises:
            UserError: if only one of model and cluster is given, or an option needs both.
        """
        if request.model and request.cluster:
            if self.costs is not None:
                raise UserError("--costs gives times in units, but --cluster gives seconds; leave out one of them")
            return True
        if self.model or request.cluster:
            self.layout.entry(self.strategy, self.ranks, [request.file])  # refuses a wrong plan first
            missing = "--cluster, such as h100x16" if self.model else "--model, such as gpt2-xl"
            raise UserError(f"a step in seconds needs a model and a cluster; give {missing}, too")
        for name in (*PRICED_OPTIONS, "as_if"):
            if (value := getattr(self, name)) and value != "muon":
                raise needs_cluster(f"--{name.replace('_', '-')}")
        if words := self.sizes.words():
            raise needs_cluster(words[0])
        return False

    def step_in_units(self, request: StepRequest) -> UnitStep:
        """Trace and check the program, and run its passes.

        An exercise of the course is traced with the mesh and the sizes for which it is graded, unless options change
        them.

        Raises:
            UserError: if options or sizes do not fit together.
            Refused: if the program is wrong.
        """
        from shardlab.learn.course.folder import exercise_of

        costs = costs_of(self.costs) if self.costs is not None else TEACHING_COSTS
        exercise = exercise_of(self.strategy)
        if exercise is not None and exercise.cluster:
            advice = f"add --model {exercise.model} --cluster {exercise.cluster}"
            raise UserError(f"exercise {exercise.name} is about seconds on a cluster; {advice}")
        size = exercise.mesh.world if exercise is not None else None
        entry, ranks = self.layout.entry(self.strategy, self.ranks, [request.file], otherwise=size)
        if entry.plan is not None and (word := entry.plan(ranks).recompute_inside):
            raise UserError(f"recompute {word} is told apart in bytes alone; give --model and --cluster, or another")
        layers, microbatches = entry.default_layers(ranks, at_least=1 if self.costs else 4), 4
        if exercise is not None:
            layers, microbatches = exercise.layers, exercise.microbatches
            entry = entry.on_mesh(exercise.mesh) if ranks == size and entry.plan is None else entry
        if "layers" in request.model_fields:
            layers = request.model_fields["layers"]
            check_field("layers", layers, COUNT, None)
        microbatches, matrices = request.batch.microbatches or microbatches, request.optimizer == "muon"
        proof = checked(entry, ranks, layers, microbatches, whole_matrices=matrices)
        names = entry.passes_on(ranks)
        results = run_named(proof, names, Goal(costs)) if names != "none" else []
        return UnitStep(entry, ranks, costs, names, results, results[-1].checked if results else proof)


def needs_cluster(flag: str) -> UserError:
    """Return the error about an option that a step in time units does not have."""
    return UserError(f"{flag} needs a model and a cluster; give --model and --cluster, or leave it out")
