"""Attention as a step of its own between a PROJECT layer and a row, for plans that cut sequences or recompute it.

It keeps queries, keys and values and computes scores and softmax again in the backward pass, which is what selective
recomputation means (Korthikanti et al. 2022, arXiv 2205.05198, section 5). Sequences may be cut over `cp`.

Each rank has the tokens of some slices of every sequence, so that causal attention is as much work on each, or nearly
(see `dealt`). Its queries stay; keys and values come from the others. With tensor
parallelism all of them are of the rank's own heads.
"""

from __future__ import annotations

from shardlab.program import Handle, Rank, Value
from shardlab.strategies.rank_plan import RankPlan


def dealt(place: int, ranks: int, pieces: int = 1, stripes: int | None = None) -> tuple[int, ...]:
    """Slices of every sequence that one of several ranks has.

    An early and a late one: so each rank has as much causal attention to compute (Llama 3, arXiv 2407.21783, section
    3.3.2). Or stripes, of which a later rank has more to compute, by 1 in the number of stripes at most (Brandon et al.
    2023, arXiv 2311.09431, section 3). Where sequences are counted in finer slices, each of these is so many `pieces`.

    >>> [dealt(place, 3) for place in range(3)]
    [(0, 5), (1, 4), (2, 3)]
    >>> dealt(0, 2, pieces=2), dealt(1, 2, stripes=4)
    ((0, 1, 6, 7), (1, 3, 5, 7))
    """
    slices = range(place, stripes * ranks, ranks) if stripes else (place, 2 * ranks - 1 - place)
    return tuple(piece for slice in slices for piece in range(slice * pieces, (slice + 1) * pieces))


class Attention:
    """Attention of one rank, from queries, keys and values to what they mix, and back; keys are (layer, microbatch).

    In a ring, each block of keys and values is passed on while queries meet it; on the way back its gradient follows
    it, a hop behind, and comes home when all ranks have added to it (Liu et al. 2023, arXiv 2310.01889, section 3).
    Or all blocks are gathered, in both directions, and the gradients of all are reduce-scattered.
    Or, with DeepSpeed-Ulysses, ranks exchange slices of sequences for heads: each has whole sequences of some heads
    while they meet, and everything is exchanged back (Jacobs et al. 2023, arXiv 2309.14509, section 3). If neighbours
    alone do so, each has their tokens of some heads, and meets those of the others in one of the first two ways (USP:
    Fang and Zhao 2024, arXiv 2405.07719).
    """

    def __init__(self, rank: Rank, rank_plan: RankPlan) -> None:
        ranks, dealt = rank.group("cp").ranks, rank_plan.plan.ulysses
        here, inner = divmod(rank.coordinate("cp"), dealt)
        ring = self._ring_ranks = ranks[inner::dealt]
        self._neighbours = ranks[here * dealt : (here + 1) * dealt]
        self._rank = rank
        self._hops = len(ring)
        self._next, self._previous = ring[(here + 1) % len(ring)], ring[here - 1]
        self._gathers = rank_plan.plan.context == "all_gather"
        self._by_heads = dealt > 1

    async def forward(self, layer: int, m: int, *, keeps: bool) -> None:
        """Mix keys and values by a layer's queries; all three stay for the backward pass if it `keeps` them."""
        rank = self._rank
        if self._by_heads:
            for store in (rank.queries, rank.keys_values):
                store[layer, m] = await self._exchanged(store.pop((layer, m)))
        attention_output = await self._attend(layer, m)
        if self._by_heads:
            rank.activations["attention_output", layer, m] = attention_output
            attention_output = await self._exchanged(attention_output)
        rank.activations[layer + 1, m] = attention_output
        if not keeps:
            del rank.queries[layer, m], rank.keys_values[layer, m]
            if self._by_heads:
                del rank.activations["attention_output", layer, m]

    def keep(self, layer: int, m: int) -> None:
        """Keep what `layer` has mixed for its backward pass, before the layer that reads it ends it."""
        if not self._by_heads:
            self._rank.activations["attention_output", layer, m] = self._rank.activations[layer + 1, m]

    async def backward(self, layer: int, m: int) -> None:
        """The gradients of a layer's queries, and of its keys and values."""
        rank, grads = self._rank, self._rank.grad_activations
        if self._by_heads:
            grads[layer + 1, m] = await self._exchanged(grads.pop((layer + 1, m)))
        if self._hops == 1:
            made = self._attend_backward(layer, m, rank.keys_values[layer, m])
        else:
            made = await (self._gathered_backward if self._gathers else self._ring_backward)(layer, m)
        if self._by_heads:
            made = await self._exchanged(made[0]), await self._exchanged(made[1])
        rank.grad_queries[layer, m], rank.grad_keys_values[layer, m] = made
        del rank.queries[layer, m], rank.keys_values[layer, m]
        del rank.activations["attention_output", layer, m], rank.grad_activations[layer + 1, m]

    def _exchanged(self, value: Value) -> Handle[Value]:
        """Slices of sequences for heads, or heads for slices of sequences."""
        return self._rank.all_to_all(value, axis="cp", among=self._neighbours)

    async def _attend(self, layer: int, m: int) -> Value:
        if self._hops == 1:
            return self._rank.attend(layer, self._rank.queries[layer, m], self._rank.keys_values[layer, m])
        return await (self._gathered if self._gathers else self._ring)(layer, m)

    async def _ring(self, layer: int, m: int) -> Value:
        rank, queries, block = self._rank, self._rank.queries[layer, m], self._rank.keys_values[layer, m]
        coming = self._pass_on(block, layer, m)
        mixed = rank.attend(layer, queries, block)
        for hop in range(1, self._hops):
            block = await coming
            if hop < self._hops - 1:
                coming = self._pass_on(block, layer, m)
            mixed = mixed + rank.attend(layer, queries, block)
        return mixed

    async def _ring_backward(self, layer: int, m: int) -> tuple[Value, Value]:
        block = self._rank.keys_values[layer, m]
        coming = self._pass_on(block, layer, m)
        grad_queries, gradient = self._attend_backward(layer, m, block)
        following = self._pass_on(gradient, layer, m)
        for hop in range(1, self._hops):
            block = await coming
            if hop < self._hops - 1:
                coming = self._pass_on(block, layer, m)
            more, gradient = self._attend_backward(layer, m, block)
            grad_queries = grad_queries + more
            following = self._pass_on(await following + gradient, layer, m)
        return grad_queries, await following

    async def _gathered(self, layer: int, m: int) -> Value:
        rank = self._rank
        blocks = await rank.all_gather(rank.keys_values[layer, m], axis="cp", among=self._ring_ranks)
        return rank.attend(layer, rank.queries[layer, m], blocks)

    async def _gathered_backward(self, layer: int, m: int) -> tuple[Value, Value]:
        rank = self._rank
        whole = await rank.all_gather(rank.keys_values[layer, m], axis="cp", among=self._ring_ranks)
        grad_queries, gradients = self._attend_backward(layer, m, whole)
        return grad_queries, await rank.reduce_scatter(gradients, axis="cp", among=self._ring_ranks)

    def _attend_backward(self, layer: int, m: int, block: Value) -> tuple[Value, Value]:
        """What a block gives to the queries' gradient, and they to its."""
        rank = self._rank
        attention_output, gradient = rank.activations["attention_output", layer, m], rank.grad_activations[layer + 1, m]
        return rank.attend_backward(layer, rank.queries[layer, m], block, attention_output, gradient)

    def _pass_on(self, value: Value, layer: int, m: int) -> Handle[Value]:
        expected = (value.spec.kind.value, layer, m)
        return self._rank.exchange(value, to=self._next, source=self._previous, expect=expected)
