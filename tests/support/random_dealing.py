"""What the ranks of a random attention program agree on: who has which slices, what goes together, what is gathered."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

from shardlab.language import Mesh


@dataclass(frozen=True)
class AttentionShape:
    """How large a program is; `seed` decides everything else."""

    cp: int
    dp_shard: int
    blocks: int
    microbatches: int
    seed: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(cp=self.cp, dp_shard=self.dp_shard)


def random_attention_shape(seed: int) -> AttentionShape:
    """2-4 ranks of sequences, 1-2 replicas, 1-2 blocks, 1-3 microbatches each."""
    random = Random(seed)
    cp = random.choice([2, 2, 3, 4])
    replicas = random.choice([1, 2]) if cp == 2 else 1
    return AttentionShape(cp, replicas, random.choice([1, 1, 2]), replicas * random.randint(1, 3), seed)


class Agreed:
    """What all ranks know: who has which slices, which microbatches go together, what is gathered."""

    def __init__(self, shape: AttentionShape) -> None:
        random, count = Random(shape.seed), 2 * shape.cp
        self.dealt = [sorted((place, count - 1 - place)) for place in range(shape.cp)]
        if random.random() < 0.6:
            order, cuts = random.sample(range(count), count), sorted(random.sample(range(1, count), shape.cp - 1))
            self.dealt = [order[a:b] for a, b in itertools.pairwise([0, *cuts, count])]
        self.is_balanced = all(sorted(mine) == [i, count - 1 - i] for i, mine in enumerate(self.dealt))
        each = shape.microbatches // shape.dp_shard
        microbatches = random.sample(range(shape.microbatches), shape.microbatches)
        size = random.choice([size for size in range(1, each + 1) if each % size == 0])
        units = [microbatches[i : i + size] for i in range(0, shape.microbatches, size)]
        self.units = [units[i :: shape.dp_shard] for i in range(shape.dp_shard)]
        self.gathers = [random.random() < 0.3 for _ in range(2 + 3 * shape.blocks + 1)]
        self.gathers_back = [gathers and self.is_balanced and random.random() < 0.7 for gathers in self.gathers]
        self.reduces = random.sample(["cp", "dp_shard"], 2)
        is_even = len({len(mine) for mine in self.dealt}) == 1
        self.exchanges = [is_even and random.random() < 0.4 for _ in self.gathers]
        """Layers whose queries, keys and values are exchanged: slices of sequences for heads."""

    def sees(self, one: int, other: int) -> bool:
        """Whether queries of one rank see keys of the other."""
        return min(self.dealt[other]) <= max(self.dealt[one])
