"""Plans at random, each with a model and a number of microbatches that it fits: programs that must be right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st

from shardlab.language import Mesh, Program, Sizes, trace
from shardlab.models import MoE
from shardlab.models.cutting import cut
from shardlab.strategies.plan.plan import CUT_AXES, DATA_AXES, Context, Plan, Recompute
from shardlab.strategies.plan.program import planned
from shardlab.strategies.plan.rank_plan import model_layers
from shardlab.strategies.schedules import SCHEDULES
from tests.support.pieces import WIDTH


def routed(layers: int, *, attention_apart: bool = False) -> Sizes:
    """A mixture in half-blocks, whose experts are cut by their features too."""
    model = MoE(layers=layers - 1, shared_experts=int(attention_apart))
    return cut(model, tp=2, ep=2, attention_apart=attention_apart).sizes(1, 4)


MODELS: dict[str, Callable[[int], Sizes]] = {
    "whole": Sizes.puzzle,
    "halves": lambda layers: Sizes.half_blocks(layers - 1),
    "tied": lambda layers: Sizes.half_blocks(layers - 1, tied=True),
    "context": lambda layers: Sizes.context_blocks(layers - 1),
    "mixture": lambda layers: Sizes.mixture(layers - 1),
    "routed": routed,
    "routed apart": lambda layers: routed(layers, attention_apart=True),
}
"""Of so many whole layers, or of one block fewer in finer ones."""

SLICED_OVER = {
    "halves": ["tp"],
    "tied": ["tp"],
    "context": ["cp", "tp"],
    "mixture": ["ep"],
    "routed": ["ep", "tp"],
    "routed apart": ["ep", "tp", "cp"],
}
"""The axes that cut a model's layers or sequences."""


@dataclass(frozen=True)
class Planned:
    """A plan for one of `MODELS` of some size; with Muon it steps whole matrices."""

    plan: Plan
    layers: int
    model: str
    microbatches: int
    muon: bool = False

    @property
    def program(self) -> Program:
        sizes = replace(self.plan.counted(MODELS[self.model](self.layers)), whole_matrices=self.muon)
        return trace(planned(self.plan), self.plan.mesh, sizes, self.microbatches)


def random_mesh(random: Random, model: str, ranks: int) -> Mesh:
    """One of at most so many ranks; a model's own axes are more often cut than not."""
    while True:
        sizes = {axis: random.choice([1, 1, 2, 2, 4]) for axis in ("pp", "dp_replicate", "dp_shard")}
        for axis in SLICED_OVER.get(model, ()):
            sizes[axis] = random.choice([1, 2, 2, 3, 4])
        divide = WIDTH % (sizes.get("ep", 1) * sizes.get("cp", 1)) == 0  # the judge's experts
        if math.prod(sizes.values()) <= ranks and sizes.get("tp") != 3 and divide:
            return Mesh(**sizes)


def random_plan(seed: int, model: str | None = None, ranks: int = 8) -> Planned:
    """The plan of a seed, of one model or of any."""
    random = Random(seed)
    model = model or random.choice(list(MODELS))
    mesh = random_mesh(random, model, ranks)
    schedule = SCHEDULES[random.choice(list(SCHEDULES))]
    looped = schedule.stages_per_rank is None
    stages = schedule.stages_per_rank or random.choice([1, 2])
    layers = max(mesh.pp * stages + random.randint(0, 2), 1 if model in ("whole", "halves", "tied") else 2)
    units = model_layers(MODELS[model](layers)).pipeline_units
    blocks = layers - (model != "whole")
    of_stages = [1] * (mesh.pp * stages)
    for _ in range(units - len(of_stages)):
        of_stages[random.randrange(len(of_stages))] += 1
    known = CUT_AXES if model == "context" else DATA_AXES
    axes = random.sample(known, random.randint(0, len(known)))
    gradients = axes[: random.randint(0, len(axes))]
    mixes = "ep" in SLICED_OVER.get(model, ())
    each = (*known, "ep") if mixes else known
    most = 2 * mesh.pp if schedule.name == "dualpipe-v" else 1
    again: list[Recompute | tuple[int, ...]] = [
        "none",
        "none",
        "full",
        (random.randrange(max(blocks, 1)),) * (blocks > 0),
    ]
    recompute = random.choice(again)
    if model in ("context", "routed apart") and random.random() < 0.3:
        recompute = "selective"
    contexts: list[Context] = ["ring", "all_gather"]
    if WIDTH % (mesh.cp * mesh.tp) == 0:  # the judge's heads
        contexts.append("ulysses")
    degrees = [None, *(each for each in range(1, mesh.cp + 1) if mesh.cp % each == 0 and contexts[2:])]
    plan = Plan(
        mesh,
        schedule.name,
        stages_per_rank=stages if looped else None,
        layers_per_stage=tuple(of_stages) if random.random() < 0.5 else (),
        shard_parameters=tuple(axes[: random.randint(0, len(axes))]),
        shard_gradients=tuple(gradients),
        shard_optimizer=tuple(axes),
        reduce_every_microbatch=None
        if random.random() < 0.5
        else tuple(axis for axis in each if axis in gradients or random.random() < 0.4),
        reshard_after=random.choice(["layer", "stage", "step"]),
        sequence_parallel=mesh.tp > 1 and random.random() < 0.5,
        recompute=recompute,
        context=random.choice(contexts),
        ulysses_degree=random.choice(degrees),
        stripes=random.choice([None, None, 2, 3]) if mesh.cp > 1 else None,
        reduce_at=random.choice(["layer", "step"]),
    )
    microbatches = plan.data_ranks * random.randint(most, max(3, most))
    return Planned(plan, layers, model, microbatches, muon=random.random() < 0.3)


def plans(model: str | None = None) -> st.SearchStrategy[Planned]:
    """Plans on 1-8 ranks."""
    return st.integers(0, 10**6).map(lambda seed: random_plan(seed, model))
