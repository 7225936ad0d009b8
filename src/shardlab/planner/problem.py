"""Problems of the planner: a model, a cluster and a batch, with the limits that a user sets.

`Problem` and `Limits` are the input, and `Candidate` is a plan with its microbatch and precision. `family` names the
kind of a plan in tables. `plan_layers` splits a model into the layers of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from shardlab.common.errors import UserError
from shardlab.common.fields import as_flags, check_field, field_types
from shardlab.language import AXES, Mesh
from shardlab.language.precision import Optimizer, Precision
from shardlab.models import Blocks, cut_for
from shardlab.models.cutting import Repeated, sampled
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.predict.confidence import memory_margin
from shardlab.simulate.predict.recipe import OWN, Recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import ModelLayers, model_layers

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """Plan with its microbatch size and precision.

    Attributes:
        plan: distribution of the model over the ranks.
        micro_batch_size: sequences of a microbatch.
        precision: precision of the step.
    """

    plan: Plan
    micro_batch_size: int
    precision: Precision


@dataclass(frozen=True)
class Limits:
    """User's limits of the search: fixed fields of the plan, and largest values.

    Attributes:
        fixed: values of a plan's fields, and sizes of its mesh's axes.
        maximum: largest size of each axis of the mesh, and of a microbatch (`micro_batch_size`). The limit of
            `dp_shard` applies only if something is sharded over it.
        micro_batch_size: sequences of a microbatch (None: any number that divides those of a data-parallel rank).

    Raises:
        UserError: if a field cannot have its value in any plan, or two limits contradict each other.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    maximum: Mapping[str, int] = field(default_factory=dict[str, int])
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.fields.items():
            check_field(name, value, field_types(Plan)[name], getattr(Plan, name))
        if "schedule" in self.fixed:
            _ = Plan(schedule=self.fixed["schedule"]).order
        settings = {**self.fixed, "micro_batch_size": self.micro_batch_size}
        for name, maximum in self.maximum.items():
            if (value := settings.get(name)) is not None and value > maximum:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {value} is more than --max-{flag} {maximum}; give one of them")
        if "context" in self.fixed and 1 in (self.fixed.get("cp"), self.maximum.get("cp")):
            one = as_flags({"cp" if "cp" in self.fixed else "max_cp": 1})
            raise UserError(
                f"--context {self.fixed['context']} says how context-parallel ranks share a sequence, and {one} leaves "
                "none; give one of them"
            )

    @property
    def fields(self) -> dict[str, Any]:
        """Fixed values of a plan's fields, without the sizes of axes."""
        return {name: value for name, value in self.fixed.items() if name not in AXES}

    def values_to_try(self, name: str, values: Sequence[T]) -> Sequence[T]:
        """Return the values to try for a field or for the size of an axis: the fixed value, or else `values`."""
        return (self.fixed[name],) if name in self.fixed else values

    def allows(self, name: str, size: int) -> bool:
        """Return whether an axis, or a microbatch, may have this size."""
        fixed_size = self.micro_batch_size if name == "micro_batch_size" else self.fixed.get(name)
        return fixed_size in (None, size) and size <= self.maximum.get(name, size)

    def allow(self, plan: Plan) -> bool:
        """Return whether a plan satisfies the limits of axes and fields. The limit of microbatches is not checked."""
        sizes = plan.mesh.sizes()
        values = {**sizes, **{name: getattr(plan, name) for name in self.fields}}
        if any(values[name] != value for name, value in self.fixed.items()):
            return False
        if "dp_shard" not in plan.shard_optimizer:  # its ranks are replicas
            del sizes["dp_shard"]
        return all(size <= self.maximum.get(axis, size) for axis, size in sizes.items())

    def __str__(self) -> str:
        """Return the limits as flags."""
        fixed = {**self.fixed, **({"micro_batch_size": self.micro_batch_size} if self.micro_batch_size else {})}
        return as_flags({**fixed, **{f"max_{name}": maximum for name, maximum in self.maximum.items()}})


@dataclass(frozen=True)
class Problem:
    """Planning problem: a step for which a plan is searched.

    Attributes:
        model: the model, not split.
        cluster: the cluster, all of whose devices are used.
        sequences: sequences of the global batch.
        precisions: precisions that a plan may use.
        recipe: recipe of the framework that runs the step.
        optimizer: name of the optimizer.
        limits: the user's limits.
    """

    model: Blocks
    cluster: Cluster
    sequences: int
    precisions: tuple[Precision, ...]
    recipe: Recipe = OWN
    optimizer: Optimizer = "adamw"
    limits: Limits = field(default_factory=Limits)

    def workload(self, candidate: Candidate) -> Workload:
        """Return the step with a candidate's plan, microbatch size and precision."""
        return Workload(
            candidate.plan,
            self.model,
            self.cluster,
            self.sequences // candidate.micro_batch_size,
            candidate.micro_batch_size,
            candidate.precision,
            recipe=self.recipe,
            optimizer=self.optimizer,
        )

    @cached_property
    def margin(self) -> float:
        """Bytes of a device that must stay free, because predictions of memory have errors; 0 for CPUs."""
        return memory_margin(self.recipe, self.cluster, self.model)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that the chosen plan may use: all but the margin."""
        return self.cluster.device.memory - self.margin

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.model.seq_len


SHARES = {"none": 0.0, "1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "3/4": 0.75, "7/8": 0.875, "full": 1.0}
"""Shares of a stage's blocks that are recomputed, by name."""

ORDER = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "HSDP")
"""Families with only data parallelism, in the order of tables. Other families follow."""


def family(plan: Plan) -> str:
    """Return the family of a plan: its parallelism besides data parallelism, or if it has none, its `sharding_name`.

    >>> family(Plan(Mesh(dp_shard=8), shard_optimizer=("dp_shard",)))
    'ZeRO-1'
    >>> family(Plan(Mesh(dp_shard=2, tp=2, pp=2)))
    '3D: TP + PP'
    """
    return model_kinds(plan.mesh) or (sharding_name(plan) if plan.mesh.world > 1 else "one device")


def sharding_name(plan: Plan) -> str:
    """Return the name of a plan's data parallelism by what is sharded: its stage of ZeRO, or HSDP."""
    stage = plan.zero_stage
    return "HSDP" if stage == 3 and plan.mesh.dp_replicate > 1 else f"ZeRO-{stage}" if stage else "data parallel"


def model_kinds(mesh: Mesh) -> str:
    """Return the kinds of parallelism besides data parallelism, such as `3D: TP + CP` ("": none)."""
    used = [axis.upper() for axis in ("tp", "pp", "cp", "ep") if getattr(mesh, axis) > 1]
    kinds = " + ".join(used)
    return f"{len(used) + 1}D: {kinds}" if len(used) > 1 and mesh.dp_shard * mesh.dp_replicate > 1 else kinds


def family_order(name: str) -> tuple[int, str]:
    """Return a sort key for the order of families in tables."""
    places = [place for place, prefix in enumerate(ORDER) if name.startswith(prefix)]
    return (places[-1] if places else len(ORDER) + name.count("+"), name)


def plan_layers(model: Blocks, plan: Plan) -> ModelLayers:
    """Return the layers into which a plan splits a model. Three blocks represent all identical ones (see `sampled`).

    Raises:
        UserError: if the axes of the mesh do not divide the model.
    """
    mesh = Mesh(pp=min(plan.mesh.pp, 2), cp=plan.mesh.cp, tp=plan.mesh.tp, ep=plan.mesh.ep)
    return _plan_layers(model, mesh, plan.attention_apart, plan.ulysses)


@lru_cache(maxsize=256)
def _plan_layers(model: Blocks, mesh: Mesh, attention_apart: bool, ulysses: int) -> ModelLayers:
    sample = sampled(model)
    cut = cut_for(sample, mesh, planned=True, attention_apart=attention_apart, ulysses=ulysses)
    return model_layers(Repeated(cut, model.layers - sample.layers).sizes(cut.sizes(1, 1)))
