"""Plans at random, each with a model and a number of microbatches that it fits: programs that must be right."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from shardlab.program import Mesh, Program, Sizes, trace
from shardlab.strategies.plan import DATA_AXES, Plan, cuts
from shardlab.strategies.planned import planned
from shardlab.strategies.schedules import SCHEDULES


@dataclass(frozen=True)
class Planned:
    """A plan for a model of so many whole layers, or of one block fewer in half-blocks."""

    plan: Plan
    layers: int
    halves: bool
    microbatches: int

    @property
    def program(self) -> Program:
        model = Sizes.half_blocks(self.layers - 1) if self.halves else self.layers
        return trace(planned(self.plan), self.plan.mesh, model, self.microbatches)


MESHES = [
    (pp, replicate, shard, tp)
    for pp in (1, 2, 4)
    for replicate in (1, 2, 4)
    for shard in (1, 2, 4)
    for tp in (1, 2, 4)
    if pp * replicate * shard * tp <= 8
]


def random_plan(seed: int, halves: bool | None = None, ranks: int = 8) -> Planned:
    """The plan of a seed; of a model in half-blocks or of whole layers, or either."""
    random = Random(seed)
    halves = random.random() < 0.75 if halves is None else halves
    meshes = [mesh for mesh in MESHES if mesh[0] * mesh[1] * mesh[2] * mesh[3] <= ranks and (halves or mesh[3] == 1)]
    pp, replicate, shard, tp = random.choice(meshes)
    schedule = SCHEDULES[random.choice(list(SCHEDULES))]
    looped = schedule.stages_per_rank is None
    stages = schedule.stages_per_rank or random.choice([1, 2])
    layers = pp * stages + random.randint(0, 2)
    units = len(cuts(Sizes.half_blocks(layers - 1).kinds)) - 1 if halves else layers
    of_stages = [1] * (pp * stages)
    for _ in range(units - len(of_stages)):
        of_stages[random.randrange(len(of_stages))] += 1
    axes = random.sample(DATA_AXES, random.randint(0, 2))
    parameters = axes[: random.randint(0, len(axes))]
    gradients = axes[: random.randint(0, len(axes))]
    each = [axis for axis in DATA_AXES if axis in gradients or random.random() < 0.4]
    most = 2 * pp if schedule.name == "dualpipe-v" else 1
    plan = Plan(
        Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp),
        schedule.name,
        stages_per_rank=stages if looped else None,
        layers_per_stage=tuple(of_stages) if random.random() < 0.5 else (),
        shard_parameters=tuple(parameters),
        shard_gradients=tuple(gradients),
        shard_optimizer=tuple(axes),
        reduce_each=None if random.random() < 0.5 else tuple(each),
        reshard_after=random.choice(["layer", "stage", "step"]),
        sequence_parallel=tp > 1 and random.random() < 0.5,
        recompute=random.choice(["none", "none", "full"]),
    )
    microbatches = replicate * shard * random.randint(most, max(3, most))
    return Planned(plan, layers, halves, microbatches)


def plans() -> st.SearchStrategy[Planned]:
    """Plans on 1-8 ranks."""
    return st.integers(0, 10**6).map(random_plan)
