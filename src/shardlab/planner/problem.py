"""Problems of the planner: a model, a cluster and a batch, with the limits that a user sets.

`Problem` and `Limits` are the input, and `Candidate` is a plan with its microbatch and precision. `PlanShape` is the
part of a candidate that decides the time of a microbatch's passes. `family` names the kind of a plan in tables.
`IdenticalBlocks` represents a model by three blocks, since all blocks in the middle are identical.
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
from shardlab.simulate.predict.recipe import OWN, Recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Context, Plan, Recompute
from shardlab.strategies.plan.rank_plan import ModelLayers, model_layers

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
    def margin(self) -> float:
        """Bytes of a device that must stay free, because predictions of memory err. CPUs need none."""
        memory = self.cluster.device.memory
        return 0.0 if self.cluster.on_cpu else self.recipe.memory.margin(memory)

    @property
    def room(self) -> float:
        """Bytes of a device that a plan which is chosen may take: all but the recipe's margin."""
        return self.cluster.device.memory - self.margin

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.model.seq_len


SHARES = {"none": 0.0, "1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "3/4": 0.75, "7/8": 0.875, "full": 1.0}
"""Shares of a stage's blocks that are computed again."""

WORDS: dict[str | tuple[int, ...], Recompute] = {"selective": "selective", "full": "full"}
"""Recomputation that is the same for every number of stages."""


@dataclass(frozen=True)
class PlanShape:
    """What the time of a microbatch's own passes depends on.

    Attributes:
        mesh: the ranks; those of the data-parallel axes are all on `dp_shard`.
        micro_batch_size: sequences of a microbatch.
        precision: in which numbers.
        sequence_parallel, context, ulysses_degree, stripes: as in a plan.
        recompute: which share of blocks is computed again, of `SHARES`; or "selective", or blocks by number.
    """

    mesh: Mesh
    micro_batch_size: int
    precision: Precision
    sequence_parallel: bool = False
    context: Context = "ring"
    ulysses_degree: int | None = None
    recompute: str | tuple[int, ...] = "none"
    stripes: int | None = None

    @property
    def candidate(self) -> Candidate:
        """The candidate that shards nothing, of one pipeline stage if blocks by number are computed again.

        Raises:
            UserError: the mesh does not go together with the rest.
        """
        plan = Plan(
            self.mesh,
            sequence_parallel=self.sequence_parallel,
            context=self.context,
            ulysses_degree=self.ulysses_degree,
            recompute=WORDS.get(self.recompute, "none"),
            stripes=self.stripes,
        )
        return Candidate(plan, self.micro_batch_size, self.precision)


def blocks_of(problem: Problem, shape: PlanShape) -> IdenticalBlocks:
    """The model in the layers of a shape's plans."""
    ulysses = shape.ulysses_degree or (shape.mesh.cp if shape.context == "ulysses" else 1)
    found = identical_blocks(problem.model, shape.mesh, apart=shape.recompute == "selective", ulysses=ulysses)
    assert found is not None, "shapes are of models that divide"
    return found


ORDER = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "HSDP")
"""The families of data parallelism alone, in the order of a table; others follow."""


def family(plan: Plan) -> str:
    """The family of a plan: how data parallelism shares the model, if there is no other; else the other kinds.

    >>> family(Plan(Mesh(dp_shard=8), shard_optimizer=("dp_shard",)))
    'ZeRO-1'
    >>> family(Plan(Mesh(dp_shard=2, tp=2, pp=2)))
    '3D: TP + PP'
    """
    kinds = model_kinds(plan.mesh)
    if kinds:
        return kinds
    if plan.mesh.world == 1:
        return "one device"
    stage = plan.zero_stage
    return "HSDP" if stage == 3 and plan.mesh.dp_replicate > 1 else f"ZeRO-{stage}" if stage else "data parallel"


def model_kinds(mesh: Mesh) -> str:
    """The kinds of parallelism beside the data's: `TP + CP`; "": none."""
    used = [axis.upper() for axis in ("tp", "pp", "cp", "ep") if getattr(mesh, axis) > 1]
    named = " + ".join(used)
    return f"{len(used) + 1}D: {named}" if len(used) > 1 and mesh.dp_shard * mesh.dp_replicate > 1 else named


def family_order(name: str) -> tuple[int, str]:
    """A key that sorts families as a table has them."""
    known = [place for place, each in enumerate(ORDER) if name.startswith(each)]
    return (known[-1] if known else len(ORDER) + name.count("+"), name)


class IdenticalBlocks:
    """A model in the layers of a plan.

    Args:
        model: whole.
        mesh: whose tp, cp and ep cut it, and the blocks of a tied model if it has pp.
        apart, ulysses: as `cut_for` takes them.

    Attributes:
        whole, short: the same model with three blocks, and what it is when it is cut.

    Raises:
        UserError: when the model does not divide.
    """

    def __init__(self, model: Blocks, mesh: Mesh, apart: bool, ulysses: int) -> None:
        self.whole = sampled(model)
        self.short = cut_for(self.whole, mesh, planned=True, attention_apart=apart, ulysses=ulysses)
        self._repeated = Repeated(self.short, model.layers - self.whole.layers)

    def all(self, known: Sequence[T]) -> list[T]:
        """Extend a list with an entry for each layer of the short model to all layers of the whole one."""
        return [known[layer] for layer in self._repeated.alike[:-1]]

    @cached_property
    def layers(self) -> ModelLayers:
        """The whole model's layers, as a plan needs to know them."""
        return model_layers(self._repeated.sizes(self.short.sizes(1, 1)))


@lru_cache(maxsize=256)
def _alike(model: Any, mesh: Mesh, apart: bool, ulysses: int) -> IdenticalBlocks | None:
    try:
        return IdenticalBlocks(model, mesh, apart, ulysses)
    except UserError:
        return None


def identical_blocks(model: Blocks, mesh: Mesh, *, apart: bool = False, ulysses: int = 1) -> IdenticalBlocks | None:
    """The model in the layers of plans on a mesh; None: the code that cuts models does not accept it."""
    return _alike(model, Mesh(pp=min(mesh.pp, 2), cp=mesh.cp, tp=mesh.tp, ep=mesh.ep), apart or mesh.cp > 1, ulysses)
