"""Context parallelism of a plan: attention as a separate step, and the slices of every sequence that a rank has.

`Attention` computes attention between the layer that outputs queries, keys and values and the next layer. Plans that
split sequences over `cp` or recompute attention need this. Queries, keys and values stay for the backward pass, which
recomputes scores and softmax (selective recomputation, Korthikanti et al. 2022, arXiv 2205.05198, section 5). Each rank
has the tokens of some slices of every sequence (`slices_of_rank`). Their queries stay on the rank, or in Ulysses are
exchanged for other heads; the keys and values of the other ranks are sent to it. With tensor parallelism, queries, keys
and values are those of the rank's slice of the heads.
"""

from __future__ import annotations

from shardlab.language import Handle, Rank, Value
from shardlab.strategies.plan.rank_plan import RankPlan


class Attention:
    """Attention of one rank as a separate step, in one of three forms of context parallelism.

    - Ring: each rank passes its block of keys and values on while its queries attend to it. In the backward pass, the
      gradient of the block follows one hop behind, and returns when all ranks have added to it (Liu et al. 2023, arXiv
      2310.01889, section 3).
    - All-gather: all blocks are gathered in both passes, and their gradients are reduce-scattered.
    - Ulysses: ranks exchange slices of sequences for heads, so that each has whole sequences of some heads. After the
      attention, they exchange its result back (Jacobs et al. 2023, arXiv 2309.14509, section 3). If only neighbours
      exchange (`ulysses_degree`), keys and values of the other ranks come by a ring or all-gather (USP: Fang and Zhao
      2024, arXiv 2405.07719).

    Keys of stores are (layer, microbatch).
    """

    def __init__(self, rank: Rank, rank_plan: RankPlan) -> None:
        ranks, degree = rank.group("cp").ranks, rank_plan.plan.ulysses
        outer, inner = divmod(rank.coordinate("cp"), degree)
        ring = self._ring_ranks = ranks[inner::degree]
        self._neighbours = ranks[outer * degree : (outer + 1) * degree]
        self._rank = rank
        self._hops = len(ring)
        self._next, self._previous = ring[(outer + 1) % len(ring)], ring[outer - 1]
        self._gathers = rank_plan.plan.context == "all_gather"
        self._by_heads = degree > 1

    async def forward(self, layer: int, m: int, *, keeps: bool) -> None:
        """Compute the attention after a layer. If `keeps`, store queries, keys and values for the backward pass."""
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
        """Store the attention output for the backward pass, before the next layer frees it."""
        if not self._by_heads:
            self._rank.activations["attention_output", layer, m] = self._rank.activations[layer + 1, m]

    async def backward(self, layer: int, m: int) -> None:
        """Compute the gradients of a layer's queries, keys and values."""
        rank, grads = self._rank, self._rank.grad_activations
        if self._by_heads:
            grads[layer + 1, m] = await self._exchanged(grads.pop((layer + 1, m)))
        if self._hops == 1:
            gradients = self._attend_backward(layer, m, rank.keys_values[layer, m])
        else:
            gradients = await (self._gathered_backward if self._gathers else self._ring_backward)(layer, m)
        if self._by_heads:
            gradients = await self._exchanged(gradients[0]), await self._exchanged(gradients[1])
        rank.grad_queries[layer, m], rank.grad_keys_values[layer, m] = gradients
        del rank.queries[layer, m], rank.keys_values[layer, m]
        del rank.activations["attention_output", layer, m], rank.grad_activations[layer + 1, m]

    def _exchanged(self, value: Value) -> Handle[Value]:
        """Exchange slices of sequences for heads, or back."""
        return self._rank.all_to_all(value, axis="cp", among=self._neighbours)

    async def _attend(self, layer: int, m: int) -> Value:
        if self._hops == 1:
            return self._rank.attend(layer, self._rank.queries[layer, m], self._rank.keys_values[layer, m])
        return await (self._gathered if self._gathers else self._ring)(layer, m)

    async def _ring(self, layer: int, m: int) -> Value:
        rank, queries, block = self._rank, self._rank.queries[layer, m], self._rank.keys_values[layer, m]
        transfer = self._pass_on(block, layer, m)
        output = rank.attend(layer, queries, block)
        for hop in range(1, self._hops):
            block = await transfer
            if hop < self._hops - 1:
                transfer = self._pass_on(block, layer, m)
            output = output + rank.attend(layer, queries, block)
        return output

    async def _ring_backward(self, layer: int, m: int) -> tuple[Value, Value]:
        block = self._rank.keys_values[layer, m]
        transfer = self._pass_on(block, layer, m)
        grad_queries, gradient = self._attend_backward(layer, m, block)
        grad_transfer = self._pass_on(gradient, layer, m)
        for hop in range(1, self._hops):
            block = await transfer
            if hop < self._hops - 1:
                transfer = self._pass_on(block, layer, m)
            grad_part, gradient = self._attend_backward(layer, m, block)
            grad_queries = grad_queries + grad_part
            grad_transfer = self._pass_on(await grad_transfer + gradient, layer, m)
        return grad_queries, await grad_transfer

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
        """Return two terms: of the queries' gradient, from this block; of the block's gradient, from these queries."""
        rank = self._rank
        attention_output, gradient = rank.activations["attention_output", layer, m], rank.grad_activations[layer + 1, m]
        return rank.attend_backward(layer, rank.queries[layer, m], block, attention_output, gradient)

    def _pass_on(self, value: Value, layer: int, m: int) -> Handle[Value]:
        expected = (value.spec.kind.value, layer, m)
        return self._rank.exchange(value, to=self._next, source=self._previous, expect=expected)


def slices_of_rank(place: int, ranks: int, pieces: int = 1, stripes: int | None = None) -> tuple[int, ...]:
    """Return the slices of every sequence that a context-parallel rank has.

    By default these are an early and a late slice, which gives all ranks the same work in causal attention (Llama 3,
    arXiv 2407.21783, section 3.3.2). With stripes, rank i has slices i, i + ranks, i + 2 * ranks, ... Later ranks have
    more work, at most 1 + 1 / stripes times the mean (Brandon et al. 2023, arXiv 2311.09431, section 3).

    Args:
        place: coordinate of the rank along `cp`.
        ranks: number of context-parallel ranks.
        pieces: number of finer slices into which each of these is divided.
        stripes: number of slices per rank, dealt in turn (None: an early and a late slice).

    >>> [slices_of_rank(place, 3) for place in range(3)]
    [(0, 5), (1, 4), (2, 3)]
    >>> slices_of_rank(0, 2, pieces=2), slices_of_rank(1, 2, stripes=4)
    ((0, 1, 6, 7), (1, 3, 5, 7))
    """
    slices = range(place, stripes * ranks, ranks) if stripes else (place, 2 * ranks - 1 - place)
    return tuple(piece for slice in slices for piece in range(slice * pieces, (slice + 1) * pieces))
