"""Every plan of the space of a small problem, enumerated without the search."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.language.precision import Precision
from shardlab.planner.problem import SHARES, Candidate, Problem, plan_layers
from shardlab.planner.space import (
    SHARDED,
    divisors,
    is_legal,
    layers_of_stages,
    meshes,
    recomputed_blocks,
    splits,
    stage_counts,
)
from shardlab.strategies.plan.plan import Context, Plan, Recompute
from shardlab.strategies.plan.rank_plan import ModelLayers
from shardlab.strategies.schedules import SCHEDULES, Schedule

Axes = tuple[str, ...]


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


def shape_of(line: Candidate) -> PlanShape:
    """Return the shape of a line's plans."""
    plan, mesh = line.plan, line.plan.mesh
    return PlanShape(
        replace(mesh, dp_replicate=1, dp_shard=mesh.dp_replicate * mesh.dp_shard),
        line.micro_batch_size,
        line.precision,
        plan.sequence_parallel,
        plan.context,
        plan.ulysses_degree,
        "selective" if plan.recompute == "selective" else "none",
        plan.stripes,
    )


def blocks_of(problem: Problem, shape: PlanShape) -> ModelLayers:
    """The model in the layers of a shape's plans."""
    recompute = "selective" if shape.recompute == "selective" else "none"
    return plan_layers(problem.model, replace(shape.candidate.plan, recompute=recompute))


def shapes(problem: Problem) -> Iterator[PlanShape]:
    """Every shape whose mesh divides the devices, the batch and the model."""
    for mesh in meshes(problem):
        cuttings = [shape for shape in _of_mesh(problem, mesh) if divides(problem, shape)]
        per_rank = problem.sequences // (mesh.dp_shard * mesh.ep)
        for size in divisors(per_rank):
            if not problem.limits.allows("micro_batch_size", size):
                continue
            for precision in problem.precisions:
                for shape in cuttings:
                    yield replace(shape, micro_batch_size=size, precision=precision)


def _of_mesh(problem: Problem, mesh: Mesh) -> Iterator[PlanShape]:
    """Shapes with a mesh, of microbatches of one sequence: what is tried of all that they say beside."""
    limits, precision = problem.limits, problem.precisions[0]
    words: tuple[Context, ...] = get_args(Context) if mesh.cp > 1 else ("ring",)
    contexts = limits.values_to_try("context", words)
    degrees = limits.values_to_try(
        "ulysses_degree", (None, *(degree for degree in divisors(mesh.cp) if 1 < degree < mesh.cp))
    )
    either = {"context", "ulysses_degree"} & set(limits.fixed)
    recomputes: tuple[str | tuple[int, ...], ...] = (*SHARES, *(["selective"] if problem.model.dropout else []))
    for sequence_parallel in limits.values_to_try("sequence_parallel", (True, False) if mesh.tp > 1 else (False,)):
        for context in contexts:
            for degree in degrees if context == "ring" or either else (None,):
                for recompute in limits.values_to_try("recompute", recomputes):
                    for stripes in limits.values_to_try("stripes", (None,)):
                        yield PlanShape(mesh, 1, precision, sequence_parallel, context, degree, recompute, stripes)


def candidates(problem: Problem, shape: PlanShape) -> Iterator[Candidate]:
    """Every candidate of a shape."""
    for plan in pipelined(problem, shape):
        if follows(problem, shape, plan):
            yield from candidates_of_pipeline(problem, shape, plan)


def candidates_of_pipeline(problem: Problem, shape: PlanShape, plan: Plan) -> Iterator[Candidate]:
    """Every candidate of a shape's plan that shards nothing yet, and that the recipe's framework runs."""
    for sharded_plan in sharded(problem, plan):
        candidate = Candidate(sharded_plan, shape.micro_batch_size, shape.precision)
        if is_legal(problem, candidate):
            yield candidate


def sharded(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """A plan with its data-parallel ranks split into replicas and shards, and who keeps what, in every way."""
    limits = problem.limits
    for mesh in (replace(plan.mesh, dp_replicate=r, dp_shard=s) for r, s in splits(problem, plan.mesh.dp_shard)):
        for sharding in _shardings(problem, mesh):
            reshards = ("layer", *(["stage"] if mesh.pp > 1 else []), "step") if sharding[0] else ("layer",)
            for reshard in limits.values_to_try("reshard_after", reshards):
                words = {
                    **dict(zip(SHARDED, sharding, strict=True)),
                    "reshard_after": reshard,
                    "reduce_at": problem.recipe.defaults.reduction(3 if sharding[0] else sum(map(bool, sharding))),
                }
                try:
                    yield replace(plan, mesh=mesh, **(words | limits.fields))
                except UserError:
                    continue


def _shardings(problem: Problem, mesh: Mesh) -> list[tuple[Axes, ...]]:
    """Axes over which parameters, gradients and the optimizer's state are cut, each over two ranks or more."""
    fixed, sizes = problem.limits.fixed, mesh.sizes()
    options = [
        tuple(fixed.get(name, axes) for name, axes in zip(SHARDED, option, strict=True))
        for option in _usual(mesh, fixed)
    ]
    return [option for option in dict.fromkeys(options) if all(sizes[axis] > 1 for axes in option for axis in axes)]


def _usual(mesh: Mesh, fixed: Container[str]) -> Iterator[tuple[Axes, Axes, Axes]]:
    """Axes over which parameters, gradients and the optimizer's state are cut, unless some are fixed."""
    if mesh.dp_replicate == 1 or mesh.dp_shard == 1 or "dp_replicate" in fixed or "dp_shard" in fixed:
        yield (), (), ()
    for along in ((), ("cp",)) if mesh.cp > 1 else ((),):
        shard = (*(("dp_shard",) if mesh.dp_shard > 1 else ()), *along)
        if not shard:
            continue
        for parameters in ((), shard):
            for gradients in ((), shard):
                yield parameters, gradients, shard
                if mesh.dp_replicate > 1 and (parameters or gradients):
                    yield parameters, gradients, (*shard, "dp_replicate")


def pipelined(problem: Problem, shape: PlanShape) -> Iterator[Plan]:
    """The plans of a shape with every schedule and number of stages, that shard nothing; `follows` knows the legal."""
    model, limits, pp = blocks_of(problem, shape), problem.limits, shape.mesh.pp
    bare = shape.candidate.plan
    base = replace(bare, layers_per_stage=layers_of_stages(problem, bare))
    for schedule in limits.values_to_try("schedule", tuple(SCHEDULES) if pp > 1 else ("1f1b",)):
        order = replace(base, schedule=schedule).order
        looped = pp > 1 and isinstance(order, Schedule) and order.stages_per_rank is None
        for stages in limits.values_to_try(
            "stages_per_rank", stage_counts(problem.model.layers, pp) if looped else (None,)
        ):
            try:
                plan = replace(base, schedule=schedule, stages_per_rank=stages)
                recompute = recomputed_blocks(shape.recompute, model, plan.bounds(model.pipeline_units))
                yield plan if plan.recompute == recompute else replace(plan, recompute=recompute)
            except UserError:
                continue


def follows(problem: Problem, shape: PlanShape, plan: Plan) -> bool:
    """Whether a plan's schedule can be followed with as many microbatches as there are."""
    microbatches = problem.sequences // (plan.data_ranks * shape.micro_batch_size)
    units = blocks_of(problem, shape).pipeline_units
    try:
        plan.steps(units, few_of(microbatches, shape.mesh.pp) * plan.data_ranks)
    except UserError:
        return False
    return True


def few_of(microbatches: int, pp: int) -> int:
    """Fewer microbatches for each data-parallel rank, with which a schedule is legal if it is with all of them; some of
    them are neither the first nor the last."""
    return microbatches if microbatches <= 4 * pp else max(4, 2 * pp) + microbatches % (2 * pp)


def divides(problem: Problem, shape: PlanShape) -> bool:
    """Whether `Plan` and the code that cuts models accept a shape."""
    try:
        return bool(blocks_of(problem, shape))
    except UserError:
        return False
