"""The usual collectives by way of a root: what random programs issue now and then instead of them."""

from __future__ import annotations

from collections import Counter
from random import Random

from shardlab.program import Handle, Rank, Value


class Detour:
    """Issues collectives as they are, or by way of one rank of their group.

    What all members must agree on is drawn from the seed and from how many calls the group has made.
    """

    def __init__(self, rank: Rank, seed: int, chance: float) -> None:
        self.rank = rank
        self.seed = seed
        self.chance = chance
        self.calls: Counter[str | None] = Counter()

    def next_random(self, axis: str | None) -> Random:
        self.calls[axis] += 1
        return Random(f"{self.seed} {axis} {self.calls[axis]}")

    def root(self, axis: str | None) -> int:
        """A rank of the group by whose way a call goes (-1: none)."""
        random = self.next_random(axis)
        return random.choice(self.rank.group(axis).ranks) if random.random() < self.chance else -1

    async def all_gather(self, value: Value, axis: str | None) -> Handle[Value]:
        root = self.root(axis)
        if root < 0:
            return self.rank.all_gather(value, axis=axis)
        return self.rank.broadcast(await self.rank.gather(value, root=root, axis=axis), root=root, axis=axis)

    async def all_reduce(self, value: Value, axis: str | None) -> Handle[Value]:
        root = self.root(axis)
        if root < 0:
            return self.rank.all_reduce(value, axis=axis)
        total = await self.rank.reduce(value, root=root, axis=axis)
        if root % 2:
            await self.rank.barrier(axis=axis)
        return self.rank.broadcast(total, root=root, axis=axis)

    async def reduce_scatter(self, value: Value, axis: str | None) -> Handle[Value]:
        root = self.root(axis)
        if root < 0:
            return self.rank.reduce_scatter(value, axis=axis)
        return self.rank.scatter(await self.rank.reduce(value, root=root, axis=axis), root=root, axis=axis)

    async def weight(self, value: Value, axis: str | None) -> Handle[Value]:
        """A whole weight that all members have: their mean, least or largest, which is the same."""
        by = self.next_random(axis).choice(("mean", "min", "max"))
        return self.rank.all_reduce(value, axis=axis, reduction=by)
