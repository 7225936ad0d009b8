"""What the ranks of a random program agree on: the split of layers and microbatches, the schedule, the slices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from hypothesis import strategies as st

from shardlab.language import Mesh
from shardlab.language.rules.kinds import ONE, factor_of


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
    """Into which slices a layer is cut: everything of it along the first so many of some axes, in their order.

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
    """What all ranks agree on."""

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
        """The chance of each collective to go by way of a root."""
        few = shape.pp * columns <= 4  # more slices than those the judge's layers cannot be cut into
        self.by_hand = random.choice([0.0, 0.3, 0.8]) * few
        """The chance of each collective to be written out, as messages between slices."""
        tokens = factor_of(Fraction(2, 3), ((1, 2), ((1 << shape.microbatches) - 1, -1)))
        self.factor = random.choice([ONE, ONE, ONE, factor_of(shape.microbatches), tokens])
        """By what every loss is multiplied."""
        self.chunks = [random.choice([1, 1, 2, 3]) if few else 1 for _ in range(shape.layers)]
        """In how many slices each layer is updated, one after the other."""


def schedule(plan: Plan, position: int) -> Iterator[tuple[str, int]]:
    """Some forwards ahead, then in turns: never fewer ahead than the next stage, so nobody starves."""
    ahead = plan.warmups[position]
    for i in range(plan.units + ahead):
        if i < plan.units:
            yield "F", plan.forwards[i]
        if i >= ahead - 1 and i - ahead + 1 < plan.units:
            yield "B", plan.backwards[i - ahead + 1]
