"""The usual collectives by way of a root, or by hand: what random programs issue now and then instead of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Generator
from random import Random
from typing import cast

from shardlab.language import Handle, Kind, Rank, Value


class Done:
    """What awaits nothing any more."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def __await__(self) -> Generator[None, None, Value]:
        yield from ()
        return self.value


class Detour:
    """Issues collectives as they are, by way of one rank of their group, or as messages between slices.

    What all members must agree on is drawn from the seed and from how many calls the group has made.
    """

    def __init__(self, rank: Rank, seed: int, chance: float, by_hand: float) -> None:
        self.rank = rank
        self.seed = seed
        self.chance = chance
        self.chance_by_hand = by_hand
        self.calls: Counter[str | None] = Counter()
        self.hand = 0

    def by_hand(self, axis: str | None) -> bool:
        """Whether the call that comes next is written out."""
        ranks = self.rank.group(axis).ranks
        return len(ranks) > 1 and Random(f"{self.seed} {axis} {self.calls[axis]} hand").random() < self.chance_by_hand

    def peers(self, axis: str | None, shift: int) -> tuple[int, int]:
        """The ranks so many places after and before this one."""
        ranks = self.rank.group(axis).ranks
        place = ranks.index(self.rank.index)
        return ranks[(place + shift) % len(ranks)], ranks[place - shift]

    async def gathered(self, value: Value, axis: str | None) -> Value:
        """All pieces, each sent on and on around a ring."""
        rank = self.rank
        store = rank.weights if value.spec.kind is Kind.WEIGHT else rank.grad_weights
        self.hand += 1
        keys = [("by hand", self.hand, hop) for hop in range(len(rank.group(axis).ranks))]
        store[keys[0]] = value
        to, source = self.peers(axis, 1)
        for key, after in itertools.pairwise(keys):
            store[after] = await rank.exchange(store[key], to=to, source=source)
        return rank.concatenate([store.pop(key) for key in keys])

    async def scattered(self, value: Value, axis: str | None) -> Value:
        """Each member's slice of the sum: every pair exchanges slices."""
        rank, ranks = self.rank, self.rank.group(axis).ranks
        self.hand += 1
        whole, mine = ("by hand", self.hand), ranks.index(rank.index)
        rank.grad_weights[whole] = value
        total = rank.slice(value, mine, len(ranks))
        pairs = [self.peers(axis, shift) for shift in range(1, len(ranks))]
        given = [rank.slice(value, ranks.index(to), len(ranks)) for to, _ in pairs]
        if self.hand % 2:
            with rank.batch_p2p():
                for part, (to, _) in zip(given, pairs, strict=True):
                    rank.send(part, to=to)
                coming = [rank.recv(source=source) for _, source in pairs]
            for handle in coming:
                total = await handle + total
        else:
            for part, (to, source) in zip(given, pairs, strict=True):
                total = await rank.exchange(part, to=to, source=source) + total
        del rank.grad_weights[whole]
        return total

    def next_random(self, axis: str | None) -> Random:
        self.calls[axis] += 1
        return Random(f"{self.seed} {axis} {self.calls[axis]}")

    def root(self, axis: str | None) -> int:
        """A rank of the group by whose way a call goes (-1: none)."""
        random = self.next_random(axis)
        return random.choice(self.rank.group(axis).ranks) if random.random() < self.chance else -1

    async def all_gather(self, value: Value, axis: str | None) -> Handle[Value]:
        if self.by_hand(axis):
            return cast("Handle[Value]", Done(await self.gathered(value, axis)))
        root = self.root(axis)
        if root < 0:
            return self.rank.all_gather(value, axis=axis)
        return self.rank.broadcast(await self.rank.gather(value, root=root, axis=axis), root=root, axis=axis)

    async def all_reduce(self, value: Value, axis: str | None) -> Handle[Value]:
        if value.spec.kind is Kind.GRAD_WEIGHT and self.by_hand(axis):
            return cast("Handle[Value]", Done(await self.gathered(await self.scattered(value, axis), axis)))
        root = self.root(axis)
        if root < 0:
            mean = value.spec.kind is Kind.GRAD_WEIGHT and self.calls[axis] % 3 == 0
            return self.rank.all_reduce(value, axis=axis, reduction="mean" if mean else "sum")
        total = await self.rank.reduce(value, root=root, axis=axis)
        if root % 2:
            await self.rank.barrier(axis=axis)
        return self.rank.broadcast(total, root=root, axis=axis)

    async def reduce_scatter(self, value: Value, axis: str | None) -> Handle[Value]:
        if self.by_hand(axis):
            return cast("Handle[Value]", Done(await self.scattered(value, axis)))
        root = self.root(axis)
        if root < 0:
            return self.rank.reduce_scatter(value, axis=axis)
        return self.rank.scatter(await self.rank.reduce(value, root=root, axis=axis), root=root, axis=axis)

    async def weight(self, value: Value, axis: str | None) -> Handle[Value]:
        """A whole weight that all members have: their mean, least or largest, which is the same."""
        by = self.next_random(axis).choice(("mean", "min", "max"))
        return self.rank.all_reduce(value, axis=axis, reduction=by)
