"""Problems that the planner solves: a model, a cluster and a batch, and the limits that a user sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardlab.errors import UserError
from shardlab.hardware import Cluster
from shardlab.models import Blocks
from shardlab.predict.recipe import OWN, Recipe
from shardlab.predict.workload import Workload
from shardlab.program import AXES
from shardlab.program.field_types import as_flags, check_field, field_types
from shardlab.program.precision import Optimizer, Precision
from shardlab.strategies.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Candidate:
    """A plan, and what a job says beside it.

    Attributes:
        plan: how the model is laid over the ranks.
        micro_batch_size: sequences of a microbatch.
        precision: in which numbers.
    """

    plan: Plan
    micro_batch_size: int
    precision: Precision


@dataclass(frozen=True)
class Limits:
    """What a user does not leave open.

    Attributes:
        fixed: values of a plan's fields, and sizes of its mesh's axes.
        most: the largest size of an axis of the mesh, and of a microbatch, `micro_batch_size`; that of `dp_shard` is of
            ranks that share something.
        micro_batch_size: sequences of a microbatch (None: any number that divides).

    Raises:
        UserError: a field cannot have its value in any plan, or two limits contradict each other.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    most: Mapping[str, int] = field(default_factory=dict[str, int])
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.fields.items():
            check_field(name, value, field_types(Plan)[name], getattr(Plan, name))
        if "schedule" in self.fixed:
            _ = Plan(schedule=self.fixed["schedule"]).order
        given = {**self.fixed, "micro_batch_size": self.micro_batch_size}
        for name, most in self.most.items():
            if (value := given.get(name)) is not None and value > most:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} {value} is more than --max-{flag} {most}; give one of them")
        if "context" in self.fixed and 1 in (self.fixed.get("cp"), self.most.get("cp")):
            one = as_flags({"cp" if "cp" in self.fixed else "max_cp": 1})
            raise UserError(
                f"--context {self.fixed['context']} says how context-parallel ranks share a sequence, and {one} leaves "
                "none; give one of them"
            )

    @property
    def fields(self) -> dict[str, Any]:
        """The values of a plan's fields, without the sizes of axes."""
        return {name: value for name, value in self.fixed.items() if name not in AXES}

    def tried(self, name: str, values: Sequence[T]) -> Sequence[T]:
        """The values of a field, or sizes of an axis, that are tried: the one that is fixed, or else these."""
        return (self.fixed[name],) if name in self.fixed else values

    def allows(self, name: str, size: int) -> bool:
        """Whether an axis, or a microbatch, may have this size."""
        wanted = self.micro_batch_size if name == "micro_batch_size" else self.fixed.get(name)
        return wanted in (None, size) and size <= self.most.get(name, size)

    def allow(self, plan: Plan) -> bool:
        """Whether a plan's mesh and all its fields are as they must be."""
        sizes = plan.mesh.sizes()
        values = {**sizes, **{name: getattr(plan, name) for name in self.fields}}
        if any(values[name] != value for name, value in self.fixed.items()):
            return False
        if "dp_shard" not in plan.shard_optimizer:  # its ranks are replicas
            del sizes["dp_shard"]
        return all(size <= self.most.get(axis, size) for axis, size in sizes.items())

    def __str__(self) -> str:
        """The limits, as flags."""
        fixed = {**self.fixed, **({"micro_batch_size": self.micro_batch_size} if self.micro_batch_size else {})}
        return as_flags({**fixed, **{f"max_{name}": most for name, most in self.most.items()}})


@dataclass(frozen=True)
class Problem:
    """A step that any plan may run.

    Attributes:
        model: what is trained, whole.
        cluster: on what; all of its devices are used.
        sequences: of the global batch.
        precisions: the numbers that may be chosen.
        recipe: how the framework that runs it does so.
        optimizer: what makes a step of a gradient.
        limits: what is not left open.
    """

    model: Blocks
    cluster: Cluster
    sequences: int
    precisions: tuple[Precision, ...]
    recipe: Recipe = OWN
    optimizer: Optimizer = "adamw"
    limits: Limits = field(default_factory=Limits)

    def workload(self, candidate: Candidate) -> Workload:
        """The step under a candidate."""
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

    @property
    def room(self) -> float:
        """Bytes of a device that a plan which is chosen may take: all but the recipe's margin."""
        return self.cluster.device.memory - self.recipe.memory.margin_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.model.seq_len
