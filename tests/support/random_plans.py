"""Random plans, each with a model and a number of microbatches that fit it; their programs must be right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random

from hypothesis import strategies as st

from shardlab.language import Mesh, Program, Sizes, trace
from shardlab.language.rules.kinds import ONE, factor_of
from shardlab.models import MoE
from shardlab.models.cutting import cut
from shardlab.strategies.plan.plan import CUT_AXES, DATA_AXES, Context, Recompute
from shardlab.strategies.plan.plan import Plan as Plan_imported
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.plan.rank_plan import model_layers
from shardlab.strategies.schedules import SCHEDULES
from tests.support.pieces import WIDTH


def routed(layers: int, *, attention_apart: bool = False) -> Sizes:
    """A mixture of experts in half-blocks, whose experts may also be cut along their features."""
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
"""Models with this many whole layers, or with one block fewer in finer layers."""

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
    """A plan for one of `MODELS` of some size; with Muon, the optimizer updates whole matrices."""

    plan: Plan_imported
    layers: int
    model: str
    microbatches: int
    muon: bool = False

    @property
    def program(self) -> Program:
        sizes = replace(self.plan.counted(MODELS[self.model](self.layers)), whole_matrices=self.muon)
        return trace(program_from_plan(self.plan), self.plan.mesh, sizes, self.microbatches)


def random_mesh(random: Random, model: str, ranks: int) -> Mesh:
    """Return a mesh of at most this many ranks; the axes of the model are more often cut than not."""
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
    data_axes = CUT_AXES if model == "context" else DATA_AXES
    axes = random.sample(data_axes, random.randint(0, len(data_axes)))
    gradients = axes[: random.randint(0, len(axes))]
    mixes = "ep" in SLICED_OVER.get(model, ())
    reduce_axes = (*data_axes, "ep") if mixes else data_axes
    minimum = 2 * mesh.pp if schedule.name == "dualpipe-v" else 1
    recomputes: list[Recompute | tuple[int, ...]] = [
        "none",
        "none",
        "full",
        (random.randrange(max(blocks, 1)),) * (blocks > 0),
    ]
    recompute = random.choice(recomputes)
    if model in ("context", "routed apart") and random.random() < 0.3:
        recompute = "selective"
    contexts: list[Context] = ["ring", "all_gather"]
    if WIDTH % (mesh.cp * mesh.tp) == 0:  # the judge's heads
        contexts.append("ulysses")
    degrees = [None, *(degree for degree in range(1, mesh.cp + 1) if mesh.cp % degree == 0 and contexts[2:])]
    plan = Plan_imported(
        mesh,
        schedule.name,
        stages_per_rank=stages if looped else None,
        layers_per_stage=tuple(of_stages) if random.random() < 0.5 else (),
        shard_parameters=tuple(axes[: random.randint(0, len(axes))]),
        shard_gradients=tuple(gradients),
        shard_optimizer=tuple(axes),
        reduce_every_microbatch=None
        if random.random() < 0.5
        else tuple(axis for axis in reduce_axes if axis in gradients or random.random() < 0.4),
        reshard_after=random.choice(["layer", "stage", "step"]),
        sequence_parallel=mesh.tp > 1 and random.random() < 0.5,
        recompute=recompute,
        context=random.choice(contexts),
        ulysses_degree=random.choice(degrees),
        stripes=random.choice([None, None, 2, 3]) if mesh.cp > 1 else None,
        reduce_at=random.choice(["layer", "step"]),
    )
    microbatches = plan.data_ranks * random.randint(minimum, max(3, minimum))
    return Planned(plan, layers, model, microbatches, muon=random.random() < 0.3)


def plans(model: str | None = None) -> st.SearchStrategy[Planned]:
    """Plans on 1-8 ranks."""
    return st.integers(0, 10**6).map(lambda seed: random_plan(seed, model))


# What the ranks of a random program agree on: the split of layers and microbatches, the schedule, the slices.


@dataclass(frozen=True)
class Shape:
    """How large a random program is; `seed` decides everything else."""

    pp: int
    dp_replicate: int
    dp_shard: int
    layers: int
    microbatches: int
    seed: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard)


GRIDS = [(p, r, s) for p in range(1, 5) for r in range(1, 5) for s in range(1, 5) if p * r * s <= 4]
"""Pipeline ranks, replicas and shards."""


def random_shape(seed: int) -> Shape:
    """1-4 ranks, 1-4 layers, 1-6 microbatches; at least a layer a stage and a microbatch a data-parallel rank."""
    random = Random(seed)
    pp, replicate, shard = random.choice(GRIDS)
    return Shape(pp, replicate, shard, random.randint(pp, 4), random.randint(replicate * shard, 6), seed)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Shapes as `random_shape` makes them, from small ones on."""
    pp, replicate, shard = draw(st.sampled_from(GRIDS))
    layers = draw(st.integers(pp, 4))
    microbatches = draw(st.integers(replicate * shard, 6))
    return Shape(pp, replicate, shard, layers, microbatches, draw(st.integers(0, 10**6)))


class Cut:
    """Slices of a layer: each of its tensors is cut along a number of first axes, in their order.

    The optimizer state is cut finest; the weight and the reduced gradient along as many axes as it, or fewer.
    """

    def __init__(self, random: Random, whole_world: bool) -> None:
        choices: list[list[str | None]] = [["dp_shard", "dp_replicate"], ["dp_replicate", "dp_shard"]]
        self.axes = random.choice(choices + ([[None]] if whole_world else []))
        state = random.randint(0, len(self.axes))
        self.state = self.axes[:state]
        self.weight = self.axes[: random.choice([0, state, random.randint(0, state)])]
        self.gradient = self.axes[: random.choice([0, state, random.randint(0, state)])]


class Plan:
    """Choices that all ranks share."""

    def __init__(self, shape: Shape) -> None:
        random = Random(shape.seed)
        columns = shape.dp_replicate * shape.dp_shard
        cuts = sorted(random.sample(range(1, shape.layers), shape.pp - 1))
        bounds = [0, *cuts, shape.layers]
        self.stages = [range(a, b) for a, b in itertools.pairwise(bounds)]
        self.units = random.randint(1, shape.microbatches // columns)
        order = random.sample(range(shape.microbatches), shape.microbatches)
        cuts = sorted(random.sample(range(1, shape.microbatches), columns * self.units - 1))
        parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, shape.microbatches], strict=True)]
        self.batches = [parts[c * self.units : (c + 1) * self.units] for c in range(columns)]
        self.forwards = random.sample(range(self.units), self.units)
        self.backwards = self.forwards
        self.warmups = sorted((random.randint(1, self.units) for _ in range(shape.pp)), reverse=True)
        if shape.pp == 1 and random.random() < 0.5:
            self.backwards, self.warmups = random.sample(range(self.units), self.units), [self.units]
        self.cuts = [Cut(random, whole_world=shape.pp == 1) for _ in range(shape.layers)]
        self.gather_once = [random.random() < 0.3 for _ in range(shape.layers)]
        self.reduce_each_unit = [random.random() < 0.4 for _ in range(shape.layers)]
        self.clips = random.random() < 0.5
        self.norm_by_messages = random.random() < 0.5
        self.idle_gather = [random.random() < 0.2 for _ in range(shape.layers)]
        self.checkpoint = random.random() < 0.3
        self.update_order = random.sample(range(shape.layers), shape.layers)
        self.by_root = random.choice([0.0, 0.3, 0.8])
        """Probability of each collective to run by way of a root."""
        is_small = shape.pp * columns <= 4  # more slices than those the judge's layers cannot be cut into
        self.by_hand = random.choice([0.0, 0.3, 0.8]) * is_small
        """Probability of each collective to be replaced by messages between slices."""
        tokens = factor_of(Fraction(2, 3), ((1, 2), ((1 << shape.microbatches) - 1, -1)))
        self.factor = random.choice([ONE, ONE, ONE, factor_of(shape.microbatches), tokens])
        """Factor of every loss."""
        self.chunks = [random.choice([1, 1, 2, 3]) if is_small else 1 for _ in range(shape.layers)]
        """Number of slices in which each layer is updated, one after the other."""


def schedule(plan: Plan, position: int) -> Iterator[tuple[str, int]]:
    """Some forward passes first, at least as many as on the next stage, then forward and backward passes in turn."""
    ahead = plan.warmups[position]
    for i in range(plan.units + ahead):
        if i < plan.units:
            yield "F", plan.forwards[i]
        if i >= ahead - 1 and i - ahead + 1 < plan.units:
            yield "B", plan.backwards[i - ahead + 1]
