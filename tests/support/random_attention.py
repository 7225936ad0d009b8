"""Random programs of context parallelism that are right by construction: no ring and no plan, but any way to meet.

The slices of sequences are dealt to the ranks at random. Each block goes straight to the ranks whose queries see it, or
all are gathered; queries meet blocks in any order, and what each gives is added up in any order. The way back is free
as well: a block's gradients are sent home one by one, or reduce-scattered where the slices happen to be balanced. Or
slices of sequences are exchanged for heads, if all ranks have equally many.
"""

from __future__ import annotations

import itertools
from random import Random

from shardlab.language import Handle, Program, Rank, Sizes, Store, Strategy, Value, trace
from tests.support.random_dealing import Agreed, AttentionShape, random_attention_shape


class AttentionWriter:
    """Writes one rank's part."""

    def __init__(self, rank: Rank, shape: AttentionShape) -> None:
        self.rank, self.agreed = rank, Agreed(shape)
        self.random = Random(shape.seed * 1000 + rank.index)
        self.ring, self.here = rank.group("cp").ranks, rank.coordinate("cp")
        self.loose: list[Handle[None]] = []
        self.made: dict[int, list[Value]] = {l: [] for l in rank.layers}
        self.keys = itertools.count()

    async def run(self) -> None:
        rank = self.rank
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        for unit in self.agreed.units[rank.coordinate("dp_shard")]:
            await self.passes(unit)
        for l in self.random.sample(list(rank.layers), len(rank.layers)) if rank.world == 1 else rank.layers:
            total = self.added(rank.grad_weights, self.made[l])
            for axis in self.agreed.reduces:
                total = await rank.all_reduce(total, axis=axis)
            rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

    async def passes(self, unit: list[int]) -> None:
        """Forward and back with some microbatches."""
        rank, residual = self.rank, list[Value]()
        x = rank.load_batch(unit, self.agreed.dealt[self.here])
        inputs: list[Value] = []
        met: dict[int, tuple[Value, Value, Value]] = {}
        for l in rank.layers:
            inputs.append(self.kept(rank.activations, x))
            if rank.sizes.signatures[l].carries:
                x, *made = rank.forward(l, (x, *residual), rank.weights[l])
                residual = [self.kept(rank.residuals, each) for each in made]
            elif rank.sizes.signatures[l].projects:
                made = rank.forward(l, (x,), rank.weights[l])
                queries, own = self.kept(rank.queries, made[0]), self.kept(rank.keys_values, made[1])
                if self.agreed.exchanges[l]:
                    queries = self.kept(rank.queries, await rank.all_to_all(queries, axis="cp"))
                    own = self.kept(rank.keys_values, await rank.all_to_all(own, axis="cp"))
                mixed = self.kept(rank.activations, await self.attended(l, queries, own))
                met[l] = queries, own, mixed
                x = await rank.all_to_all(mixed, axis="cp") if self.agreed.exchanges[l] else mixed
            else:
                x = rank.forward(l, x, rank.weights[l], save=self.random.random() < 0.7)
        gradient, above = rank.loss(x), list[Value]()
        for l in reversed(rank.layers):
            x, weight = inputs[l], rank.weights[l]
            gradient = self.kept(rank.grad_activations, gradient)
            if rank.sizes.signatures[l].carries:
                grad, gradient, *below = rank.backward(l, x, (gradient, *above), weight)
                above = [self.kept(rank.grad_residuals, each) for each in below]
            elif rank.sizes.signatures[l].projects:
                gradients = await self.went_back(l, *met[l], gradient)
                if self.random.random() < 0.5:
                    grad, gradient = rank.backward(l, x, gradients, weight)
                else:
                    (gradient,) = rank.backward_input(l, x, gradients, weight)
                    grad = rank.backward_weight(l, x, gradients[0])
            else:
                grad, gradient = rank.backward(l, x, gradient, weight)
            self.made[l].append(self.kept(rank.grad_weights, grad))

    def kept(self, store: Store, value: Value) -> Value:
        """Until the step ends."""
        store["kept", next(self.keys)] = value
        return value

    def added(self, store: Store, parts: list[Value]) -> Value:
        """All parts, in any order."""
        parts = [self.kept(store, part) for part in parts]
        while len(parts) > 1:
            one, other = (parts.pop(self.random.randrange(len(parts))) for _ in range(2))
            parts.append(self.kept(store, one + other))
        return parts[0]

    async def blocks(self, l: int, own: Value) -> list[tuple[int, Value]]:
        """(whose, keys and values) of all that this rank's queries see, in any order."""
        rank, agreed = self.rank, self.agreed
        others = [place for place in range(len(self.ring)) if place != self.here]
        for place in self.random.sample(others, len(others)):
            if agreed.sees(place, self.here):
                self.loose.append(rank.send(own, to=self.ring[place]))
        seen = [place for place in others if agreed.sees(self.here, place)]
        coming = {place: rank.recv(source=self.ring[place]) for place in self.random.sample(seen, len(seen))}
        found = [(self.here, own)] if agreed.sees(self.here, self.here) else []
        found += [(place, self.kept(rank.keys_values, await handle)) for place, handle in coming.items()]
        return self.random.sample(found, len(found))

    async def attended(self, l: int, queries: Value, own: Value) -> Value:
        rank = self.rank
        if self.agreed.exchanges[l]:
            return rank.attend(l, queries, own)
        if self.agreed.gathers[l]:
            return rank.attend(l, queries, await rank.all_gather(own, axis="cp"))
        return self.added(rank.activations, [rank.attend(l, queries, kv) for _, kv in await self.blocks(l, own)])

    async def went_back(self, l: int, queries: Value, own: Value, attended: Value, grad: Value) -> tuple[Value, Value]:
        """The gradients of this rank's queries, and of its block."""
        rank, agreed = self.rank, self.agreed
        if agreed.exchanges[l]:
            whole = self.kept(rank.grad_activations, await rank.all_to_all(grad, axis="cp"))
            of_queries, of_blocks = rank.attend_backward(l, queries, own, attended, whole)
            of_queries = self.kept(rank.grad_queries, await rank.all_to_all(of_queries, axis="cp"))
            return of_queries, self.kept(rank.grad_keys_values, await rank.all_to_all(of_blocks, axis="cp"))
        if agreed.gathers_back[l]:
            block = await rank.all_gather(own, axis="cp")
            of_queries, of_blocks = rank.attend_backward(l, queries, block, attended, grad)
            of_queries = self.kept(rank.grad_queries, of_queries)
            return of_queries, self.kept(rank.grad_keys_values, await rank.reduce_scatter(of_blocks, axis="cp"))
        mine: list[Value] = []
        parts: list[Value] = []
        for place, block in await self.blocks(l, own):
            part, home = rank.attend_backward(l, queries, block, attended, grad)
            parts.append(self.kept(rank.grad_queries, part))
            if place == self.here:
                mine.append(self.kept(rank.grad_keys_values, home))
            else:
                self.loose.append(rank.send(home, to=self.ring[place]))
        for place in range(len(self.ring)):
            if place != self.here and agreed.sees(place, self.here):
                mine.append(self.kept(rank.grad_keys_values, await rank.recv(source=self.ring[place])))
        return self.added(rank.grad_queries, parts), self.added(rank.grad_keys_values, mine)


def attention_program_of(shape: AttentionShape) -> Strategy:
    async def strategy(rank: Rank) -> None:
        await AttentionWriter(rank, shape).run()

    return strategy


def random_attention(seed: int) -> Program:
    """The program of a seed."""
    shape = random_attention_shape(seed)
    return trace(attention_program_of(shape), shape.mesh, Sizes.context_blocks(shape.blocks), shape.microbatches)
