"""`StepRequest`: a training step on a cluster, as options and a job file describe it.

`simulate` and `plan` make one with `StepRequest.of` from their options and the file of --config. Its properties look up
the cluster, the model and the recipe by name, and choose defaults for the precision, the batch and the number of ranks.
All commands therefore have the same defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from shardlab.cli.model_options import noted_model
from shardlab.cli.options import sequences_of_step
from shardlab.cli.plan_options import (
    NO_FLAGS,
    PlanOptions,
    cluster_called,
    job_source,
    limit_memory,
    recipe_called,
    switches_of,
)
from shardlab.common.errors import UserError
from shardlab.language.precision import BF16, FP32, Optimizer, Precision
from shardlab.strategies.load import load
from shardlab.strategies.registry import StrategyEntry, entry_from_plan
from shardlab.train.config import BatchConfig
from shardlab.train.config_sources import ConfigSource, batch_of, merge_fields, plan_settings

if TYPE_CHECKING:
    from shardlab.models import Blocks
    from shardlab.planner.problem import Limits, Problem
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.hardware.device import Device
    from shardlab.simulate.predict.recipe import Recipe
    from shardlab.simulate.predict.workload import Workload
    from shardlab.strategies.plan.plan import Plan


OPTIONS = {
    "model": {"model": "model", "layers": "layers", "sequence": "seq_len"},
    "cluster": {
        **{"cluster": "cluster", "recipe": "recipe", "switch": "switches"},
        **{"memory": "memory", "other_machine": "other_machine"},
    },
    "batch": {each.name: each.name for each in fields(BatchConfig)},
    "precision": {"precision": "precision"},
    "optimizer": {"optimizer": "optimizer", "ema": "ema"},
}
"""Options of a request by table of a job file, each with the field of the table that it overrides."""


@dataclass(frozen=True)
class StepRequest:
    """Training step of a model on a cluster. None stands for a value that is not given.

    Attributes:
        model, cluster: the model and the cluster, or their names.
        strategy: name of the strategy (default: that of the file, or a plan by flags).
        layout: flags of a plan.
        ranks: number of ranks (default: the plan's, or all devices).
        model_fields: fields of the model that are changed.
        batch: size and division of the global batch.
        tokens_per_step: tokens of a step to plan, instead of its sequences.
        precision: name of the precision, or of several to choose from (default: `default_precision`).
        optimizer: optimizer, for the size of its state.
        ema: whether a moving average of the weights is kept.
        recipe: name of the recipe, which describes how a framework runs a step (default: Shardlab's own).
        switches: values of the recipe's switches by name (default: those of the framework).
        memory: memory of each device that the step may use (default: all of it).
        other_machine: whether a profile of another machine is accepted.
        as_if: whether a plan that the recipe's framework cannot run is predicted as if it could.
        file: job file. Its plan is used if neither a strategy, a plan nor a mesh is given.
    """

    model: str | Blocks | None = None
    cluster: str | Cluster | None = None
    strategy: str | None = None
    layout: PlanOptions = NO_FLAGS
    ranks: int | None = None
    model_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch: BatchConfig = field(default_factory=BatchConfig)
    tokens_per_step: str | None = None
    precision: str | None = None
    optimizer: Optimizer = "adamw"
    ema: bool = False
    recipe: str | None = None
    switches: Mapping[str, str] = field(default_factory=dict[str, str])
    memory: str | None = None
    other_machine: bool = False
    as_if: bool = False
    file: ConfigSource = field(default_factory=partial(job_source, None))

    @classmethod
    def of(cls, command: Any) -> StepRequest:
        """Return the request of a command. The job file of --config supplies values for options that are left out.

        Raises:
            UserError: if the file cannot be read, or has an unknown table or field.
        """
        file = job_source(getattr(command, "config", None))
        flags = {
            table: {key: value for option, key in options.items() if (value := getattr(command, option, None))}
            for table, options in OPTIONS.items()
        }
        if hasattr(command, "sizes"):
            flags["model"] |= command.sizes.flag_values()
        if words := flags["cluster"].pop("switches", None):
            in_file = file.sections.get("cluster", {}).get("switches", {})
            flags["cluster"]["switches"] = {**in_file, **switches_of(words)}
        sources = [file, ConfigSource("flags", flags)]
        tables = {table: merge_fields(sources, table) for table in OPTIONS if table != "batch"}
        optimizer, names = tables["optimizer"], ("strategy", "layout", "ranks", "tokens_per_step", "as_if")
        return cls(
            model=tables["model"].pop("model", None),
            model_fields=tables["model"],
            batch=BatchConfig(**flags["batch"]).fill(batch_of(file)),
            precision=tables["precision"].get("precision"),
            optimizer=optimizer.get("optimizer", "adamw"),
            ema=optimizer.get("ema") is not None,
            file=file,
            **tables["cluster"],
            **{name: getattr(command, name) for name in names if hasattr(command, name)},
        )

    @cached_property
    def found_cluster(self) -> Cluster:
        """Cluster of the request.

        Raises:
            UserError: if there is no such cluster, or its devices have less memory than `memory`.
        """
        assert self.cluster is not None
        cluster = self.cluster
        if isinstance(cluster, str):
            cluster = cluster_called(cluster, other_machine=self.other_machine)
        return limit_memory(cluster, self.memory)

    @cached_property
    def found_model(self) -> Blocks:
        """Model of the request, with its changed fields.

        Raises:
            UserError: if there is no such model.
        """
        from shardlab.models.named import with_written

        assert self.model is not None
        model = self.model
        if isinstance(model, str):
            model = with_written(noted_model(model), self.model_fields, model)
        return self.found_recipe.model_as_run(model)

    @cached_property
    def found_recipe(self) -> Recipe:
        """Recipe of the request.

        Raises:
            UserError: if there is no such recipe.
        """
        return recipe_called(self.recipe, self.switches)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions to choose from.

        Raises:
            UserError: if there is no such precision, or the devices do not compute in it.
        """
        device, recipe = self.found_cluster.device, self.found_recipe
        if self.precision is None:
            return (default_precision(recipe, device),)
        precisions = tuple(recipe.defaults.precision_called(name) for name in self.precision.split(","))
        for precision in precisions:
            device.peak(precision.compute)
        return precisions

    @property
    def step_precision(self) -> Precision:
        """The precision of a step whose plan is given.

        Raises:
            UserError: as for `precisions`, or if there are several.
        """
        first, *others = self.precisions
        if others:
            names = f"precision {self.precision} names {len(others) + 1} precisions"
            raise UserError(f"{names}, among which only a search of plans (`shardlab plan`) chooses; give one")
        return first

    @property
    def sequences(self) -> int:
        """Number of sequences in the global batch.

        Raises:
            UserError: if options contradict each other, or the tokens are not a whole number of sequences.
        """
        length, devices = self.found_model.seq_len, self.found_cluster.size
        sequences = self.batch.global_batch
        if self.tokens_per_step is None and sequences is None and (size := self.batch.micro_batch_size):
            sequences = self.batch.microbatches and self.batch.microbatches * size
        return sequences_of_step(self.tokens_per_step, sequences, length, devices)

    def cut_batch(self, data_ranks: int | None) -> tuple[int, int]:
        """Return the number of microbatches of a step, and the number of sequences in each.

        Args:
            data_ranks: number of data-parallel ranks, among which microbatches are divided (None: the strategy is no
                plan).

        Raises:
            UserError: if options contradict each other, or the batch does not divide.
        """
        batch = replace(self.batch, global_batch=self.sequences) if self.tokens_per_step else self.batch
        return batch.cut(self.found_cluster.size, data_ranks)

    def require_limits(self, workload: Workload) -> None:
        """Refuse a plan that the recipe's framework cannot run, unless `as_if` is set.

        Raises:
            UserError: for such a plan, or if `as_if` is set without a recipe.
        """
        from shardlab.simulate.predict.limits import broken_limit

        if self.as_if and self.recipe is None:
            raise UserError("--as-if is for the recipe of a framework; give --recipe NAME, or leave it out")
        if not self.as_if and (limit := broken_limit(workload)):
            raise UserError(f"{limit}, or --as-if to predict it as if {workload.recipe.name} could run it")

    def problem(self, limits: Limits) -> Problem:
        """Return the problem of choosing a plan for this step.

        Args:
            limits: limits of the plans to choose from.
        """
        from shardlab.planner.problem import Problem

        model, cluster, recipe = self.found_model, self.found_cluster, self.found_recipe
        return Problem(model, cluster, self.sequences, self.precisions, recipe, self.optimizer, limits)

    def as_tables(self, plan: Plan, precision: str, sequences: int, micro_batch_size: int) -> dict[str, dict[str, Any]]:
        """Return the tables of a job file with which `simulate`, `verify` and `train` run a plan for this request.

        Args:
            plan, precision: plan and precision that were chosen.
            sequences, micro_batch_size: sequences of the global batch and of a microbatch.
        """
        return {
            "model": {"model": self.model, **self.model_fields},
            "cluster": {name: getattr(self, name) or None for name in OPTIONS["cluster"].values()},
            "batch": {"global_batch": sequences, "micro_batch_size": micro_batch_size},
            "precision": {"precision": precision},
            "optimizer": {"optimizer": self.optimizer},
            "plan": plan.as_dict(),
        }

    def entry(self) -> tuple[StrategyEntry, int]:
        """Return the strategy and its number of ranks. Fields of a plan that are not given have the recipe's values.

        Raises:
            UserError: if the flags contradict each other, or the ranks do not fit on the cluster.
        """
        entry, ranks = self.layout.entry(self.strategy, self.ranks, [self.file], otherwise=self._default_ranks())
        self.found_cluster.require(ranks)
        return self._as_recipe_does(entry, ranks), ranks

    def _default_ranks(self) -> int | None:
        """Return the size of the cluster, or None if the strategy or the flags determine the number of ranks."""
        name, _, plan, _ = plan_settings([self.file]) if self.strategy is None else (self.strategy, None, None, None)
        fixes_ranks = self.layout.names_mesh or self.layout.plan is not None or plan is not None
        return None if fixes_ranks or (name is not None and load(name).ranks == 1) else self.found_cluster.size

    def _as_recipe_does(self, entry: StrategyEntry, ranks: int) -> StrategyEntry:
        flags, defaults, support = self.layout.flag_values(), self.found_recipe.defaults, self.found_recipe.can_run
        from_file = self.strategy is None and not self.layout.names_mesh
        if entry.plan is None or "plan" in flags or (from_file and "mesh" in self.file.sections.get("plan", {})):
            return entry
        plan, changes = entry.plan(ranks), dict[str, object]()
        is_sharded = bool(plan.shard_optimizer) or any(name.startswith("shard_") for name in flags)
        zero, mesh = support.conform_stage(defaults.zero_stage, plan.mesh.pp), plan.mesh
        if "reduce_at" not in flags and plan.reduce_at == "layer":
            changes["reduce_at"] = defaults.reduction(plan.zero_stage if is_sharded else zero)
        if "recompute" not in flags and plan.recompute == "none":
            changes["recompute"] = defaults.recompute
        if defaults.zero_stage and zero and mesh.dp_shard > 1 and not is_sharded:
            axes = ("dp_shard", *(("cp",) if mesh.cp > 1 and support.shards_over_cp == "always" else ()))
            whole = defaults.gradient_sync == "last" or (support.gradients_with_pp == "whole" and mesh.pp > 1)
            changes["shard_optimizer"] = axes
            changes["shard_gradients"] = axes if zero == 2 or (zero == 3 and not whole) else ()
            changes["shard_parameters"] = axes if zero == 3 else ()
            if zero == 3 and "reshard_after" not in flags and (choices := support.reshards(mesh.pp)):
                changes["reshard_after"] = choices[0]
        changes = {name: value for name, value in changes.items() if value != getattr(plan, name)}
        return entry_from_plan(replace(plan, **changes), entry.name) if changes else entry


def default_precision(recipe: Recipe, device: Device) -> Precision:
    """Return the precision that a framework uses on a device by default.

    It is bfloat16 if the device supports it, else float32. With bfloat16, the recipe says whether gradients are reduced
    in float32.
    """
    return recipe.defaults.with_gradients(BF16) if "bfloat16" in device.flops else FP32
