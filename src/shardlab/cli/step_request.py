"""`StepRequest`: a training step on a cluster, as options describe it.

`simulate` and `plan` make one of their options with `StepRequest.of`. Its properties look up what the options name (the
cluster, the model, the recipe) and choose what they leave out (the precision, the batch, the number of ranks), so that
every command has the same defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shardlab.cli.options import sequences_of_step
from shardlab.cli.plan_options import NO_FLAGS, PlanOptions, cluster_called, recipe_called
from shardlab.language import AXES
from shardlab.language.precision import Optimizer, Precision, find_precision
from shardlab.strategies.load import load
from shardlab.strategies.registry import StrategyEntry, entry_from_plan
from shardlab.train.config import BatchConfig

if TYPE_CHECKING:
    from shardlab.models import Blocks
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.hardware.device import Device
    from shardlab.simulate.predict.recipe import Recipe


@dataclass(frozen=True)
class StepRequest:
    """Training step of a model on a cluster. None stands for an option that is left out.

    Attributes:
        model, cluster: names of the model and the cluster.
        strategy: name of the strategy (None: a plan by flags).
        layout: flags of a plan.
        ranks: number of ranks (default: the plan's, or all devices).
        layers, sequence: layers of the model and tokens of a sequence (default: the model's own).
        global_batch, microbatches, micro_batch_size: size and division of the global batch (see `BatchConfig`).
        tokens_per_step: tokens of a step to plan, instead of its sequences.
        precision: name of the precision, or of several to choose from (default: `default_precision`).
        optimizer: optimizer, for the size of its state.
        ema: whether a moving average of the weights is kept.
        recipe: name of the recipe, which describes how a framework runs a step (default: Shardlab's own).
        memory: memory of each device that the step may use (default: all of it).
        other_machine: whether a profile of another machine is accepted.
    """

    model: str
    cluster: str
    strategy: str | None = None
    layout: PlanOptions = NO_FLAGS
    ranks: int | None = None
    layers: int | None = None
    sequence: int | None = None
    global_batch: int | None = None
    microbatches: int | None = None
    micro_batch_size: int | None = None
    tokens_per_step: str | None = None
    precision: str | None = None
    optimizer: Optimizer = "adamw"
    ema: bool = False
    recipe: str | None = None
    memory: str | None = None
    other_machine: bool = False

    @classmethod
    def of(cls, command: object) -> StepRequest:
        """Return the request of a command, whose options have the names of these fields."""
        given = {each.name: getattr(command, each.name, None) for each in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @cached_property
    def found_cluster(self) -> Cluster:
        """The cluster.

        Raises:
            UserError: if there is no such cluster, or its devices have less memory.
        """
        return cluster_called(self.cluster, other_machine=self.other_machine, memory=self.memory)

    @cached_property
    def found_model(self) -> Blocks:
        """The model, with the requested layers and sequence length.

        Raises:
            UserError: if there is no such model.
        """
        from shardlab.models import find_model
        from shardlab.models.named import with_fields

        changes = {"seq_len": self.sequence, "layers": self.layers}
        given = {name: value for name, value in changes.items() if value is not None}
        return with_fields(find_model(self.model), given, self.model)

    @cached_property
    def found_recipe(self) -> Recipe:
        """The recipe.

        Raises:
            UserError: if there is no such recipe.
        """
        return recipe_called(self.recipe)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions to choose from. `simulate` uses the only one.

        Raises:
            UserError: if there is no such precision, or the devices do not compute in it.
        """
        device = self.found_cluster.device
        names = self.precision or default_precision(self.found_recipe, device)
        precisions = tuple(map(find_precision, names.split(",")))
        for precision in precisions:
            device.peak(precision.compute)
        return precisions

    @property
    def sequences(self) -> int:
        """Number of sequences in the global batch of a step to plan.

        Raises:
            UserError: if options contradict each other, or the tokens are not a whole number of sequences.
        """
        length, devices = self.found_model.seq_len, self.found_cluster.size
        return sequences_of_step(self.tokens_per_step, self.global_batch, length, devices)

    def cut_batch(self, data_ranks: int | None) -> tuple[int, int]:
        """Return the number of microbatches of a step to simulate, and the number of sequences in each.

        Args:
            data_ranks: number of data-parallel ranks that divide the microbatches (None: the strategy is not a plan).

        Raises:
            UserError: if options contradict each other, or the batch does not divide.
        """
        batch = BatchConfig(self.global_batch, self.microbatches, self.micro_batch_size)
        return batch.cut(self.found_cluster.size, data_ranks)

    def entry(self) -> tuple[StrategyEntry, int]:
        """Return the strategy, with the recipe's defaults for what neither flags nor a plan file give, and its ranks.

        Raises:
            UserError: if the flags contradict each other, or the ranks do not fit on the cluster.
        """
        entry, ranks = self.layout.entry(self.strategy, self.ranks or self._default_ranks())
        self.found_cluster.require(ranks)
        return self._as_recipe_does(entry, ranks), ranks

    def _default_ranks(self) -> int | None:
        """Return the size of the cluster, or None if the strategy or the flags determine the number of ranks."""
        named = any(getattr(self.layout, axis) for axis in AXES) or self.layout.plan is not None
        alone = self.strategy is not None and load(self.strategy).ranks == 1
        return None if named or alone else self.found_cluster.size

    def _as_recipe_does(self, entry: StrategyEntry, ranks: int) -> StrategyEntry:
        given, defaults = self.layout.given(), self.found_recipe.defaults
        if entry.plan is None or "plan" in given:
            return entry
        plan, changed = entry.plan(ranks), dict[str, object]()
        sharded = bool(plan.shard_optimizer) or any(name.startswith("shard_") for name in given)
        if "reduce_at" not in given and plan.reduce_at == "layer":
            changed["reduce_at"] = defaults.reduction(sharded=sharded or defaults.zero_stage > 0)
        if defaults.zero_stage and plan.mesh.dp_shard > 1 and not sharded:
            changed["shard_optimizer"] = ("dp_shard",)
        return entry_from_plan(replace(plan, **changed), entry.name) if changed else entry


def default_precision(recipe: Recipe, device: Device) -> str:
    """Return the name of the precision that a framework uses on a device unless it is told otherwise.

    It is bfloat16 if the device has it. The recipe tells whether gradients are then reduced in float32.
    """
    if "bfloat16" not in device.flops:
        return "fp32"
    wide = (recipe.defaults.bf16_gradient_bytes or recipe.defaults.gradient_bytes) == 4
    return "bf16-fp32-grads" if wide else "bf16"
