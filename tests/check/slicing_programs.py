"""Programs that cut values and put them together on a rank: all are right."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, cast

from shardlab.language import Handle, Mesh, Rank, Value
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan


def forward(rank: Rank, microbatches: range, weights: dict[int, Value] | None = None) -> Value:
    """All layers, and the gradient of the loss."""
    rank.activations[0] = rank.load_batch(microbatches)
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], (weights or rank.weights)[l])
    return rank.loss(rank.activations.pop(len(rank.layers)))


async def updates_in_chunks(rank: Rank) -> None:
    """Weight, state and gradient are cut on the rank, and stepped slice by slice."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    grad, chunks = forward(rank, rank.share()), range(3)
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        rank.grad_weights[l] = await rank.all_reduce(grad_weight)
        for i in chunks:
            weight, state = rank.slice(rank.weights[l], i, 3), rank.slice(rank.opt_states[l], i, 3)
            gradient = rank.slice(rank.grad_weights[l], i, 3)
            rank.weights[l, i], rank.opt_states[l, i] = rank.update(l, gradient, weight, state)
        rank.weights[l] = rank.concatenate(rank.weights.pop((l, i)) for i in chunks)
        rank.opt_states[l] = rank.concatenate(rank.opt_states.pop((l, i)) for i in chunks)
        del rank.grad_weights[l]


async def updates_as_chunks_come(rank: Rank) -> None:
    """Weights are kept in slices, put together for the passes; each slice is updated when its gradient is summed."""
    chunks = range(4)
    for l in rank.layers:
        for i in chunks:
            rank.weights[l, i], rank.opt_states[l, i] = rank.load_weights(l, i, 4)
        rank.weights[l] = rank.concatenate(rank.weights[l, i] for i in chunks)
    grad = forward(rank, rank.share())
    totals: dict[tuple[int, int], Handle[Value]] = {}
    for l in reversed(rank.layers):
        rank.grad_weights[l], grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        totals |= {(l, i): rank.all_reduce(rank.slice(rank.grad_weights[l], i, 4)) for i in chunks}
        del rank.weights[l]
    for (l, i), total in totals.items():
        update = rank.update(l, await total, rank.weights[l, i], rank.opt_states[l, i])
        rank.weights[l, i], rank.opt_states[l, i] = update


async def slices_of_a_gathered_weight(rank: Rank) -> None:
    """The state's slice of a weight that was gathered is updated in its place, after the rest of it has gone."""
    for l in rank.layers:
        rank.weights[l, "mine"], rank.opt_states[l] = rank.load_weights(l, rank.index, rank.world)
    for l in rank.layers:
        rank.weights[l] = await rank.all_gather(rank.weights[l, "mine"])
    grad = forward(rank, rank.share())
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        total = await rank.reduce_scatter(grad_weight)
        part = rank.weights["part"] = rank.slice(rank.weights.pop(l), rank.index, rank.world)
        rank.weights[l, "mine"], rank.opt_states[l] = rank.update(l, total, part, rank.opt_states[l])
        del rank.weights["part"]


async def all_pairs_at_once(rank: Rank) -> None:
    """Each rank sums its slice of all gradients, and updates it; all messages of a round are issued together."""
    n, others = rank.world, [other for other in range(rank.world) if other != rank.index]
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weight(l), rank.load_opt_state(l, rank.index, n)
    grad = forward(rank, rank.share())
    for l in reversed(rank.layers):
        rank.grad_weights[l], grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        total = rank.slice(rank.grad_weights[l], rank.index, n)
        with rank.batch_p2p():
            for other in others:
                rank.send(rank.slice(rank.grad_weights[l], other, n), to=other)
            receives = [rank.recv(source=other) for other in others]
        for handle in receives:
            total = await handle + total
        new, rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])
        pieces = rank.weights
        pieces[l, rank.index] = new
        with rank.batch_p2p():
            handles = {other: rank.recv(source=other, expect=("weights", l, None)) for other in others}
            for other in others:
                rank.send(new, to=other)
        for other, handle in handles.items():
            pieces[l, other] = await handle
        pieces[l] = rank.concatenate(pieces.pop((l, i)) for i in range(n))
        del rank.grad_weights[l]


async def a_rank_without_a_microbatch(rank: Rank) -> None:
    """The last rank only sums and updates: where the others give a gradient it gives zeros."""
    idle = rank.index == rank.world - 1
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    mine = [m for m in rank.microbatches if m % (rank.world - 1) == rank.index] if not idle else []
    for l in rank.layers:
        rank.grad_weights[l] = rank.zero_gradient(l)
    for m in mine:
        grad = forward(rank, range(m, m + 1))
        for l in reversed(rank.layers):
            grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
            rank.grad_weights[l] += grad_weight
    for l in rank.layers:
        total = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def microbatches_apart_and_together(rank: Rank) -> None:
    """Some layers compute all of a rank's microbatches at once, some one by one: forward and backward."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    first, *others = rank.layers
    count, last = len(rank.share()), len(rank.layers)
    rank.activations[0] = rank.load_batch(rank.share())
    rank.activations[1] = rank.forward(first, rank.activations[0], rank.weights[first])
    for m in range(count):
        rank.activations[1, m] = rank.slice(rank.activations[1], m, count)
        for l in others:
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], rank.weights[l])
    del rank.activations[1]
    logits = rank.activations["logits"] = rank.concatenate(rank.activations.pop((last, m)) for m in range(count))
    grads = rank.grad_activations
    grads["logits"] = rank.loss(logits)
    for m in reversed(range(count)):
        grads[m] = rank.slice(grads["logits"], m, count)
        for l in reversed(others):
            grad_weight, grads[m] = rank.backward(l, rank.activations.pop((l, m)), grads[m], rank.weights[l])
            rank.grad_weights[l] = rank.grad_weights[l] + grad_weight if l in rank.grad_weights else grad_weight
    grad = rank.concatenate(grads.pop(m) for m in range(count))
    rank.grad_weights[first], _ = rank.backward(first, rank.activations.pop(0), grad, rank.weights[first])
    for l in rank.layers:
        total = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


PROGRAMS = (
    updates_in_chunks,
    updates_as_chunks_come,
    slices_of_a_gathered_weight,
    a_rank_without_a_microbatch,
    all_pairs_at_once,
    microbatches_apart_and_together,
)


class ByHand:
    """A rank whose activations are gathered and scattered by messages and slices of its own."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._hops = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def reduce_scatter(self, value: Value, *, axis: str, among: Sequence[int] | None = None) -> Awaitable[Value]:
        assert among is None or set(among) == set(self._rank.group(axis).ranks), "all ranks of an axis sum here"
        if value.spec.kind not in ROW_KINDS:
            return self._rank.reduce_scatter(value, axis=axis)
        return self._scattered(value, axis)

    def all_gather(self, value: Value, *, axis: str, among: Sequence[int] | None = None) -> Awaitable[Value]:
        assert among is None or set(among) == set(self._rank.group(axis).ranks), "all ranks of an axis gather here"
        if value.spec.kind not in ROW_KINDS:
            return self._rank.all_gather(value, axis=axis)
        return self._gathered(value, axis)

    async def _scattered(self, value: Value, axis: str) -> Value:
        total = await self._rank.all_reduce(value, axis=axis)
        return self._rank.slice(total, self._rank.coordinate(axis), len(self._rank.group(axis).ranks))

    async def _gathered(self, value: Value, axis: str) -> Value:
        rank, ranks = self._rank, self._rank.group(axis).ranks
        store, at = getattr(rank, value.spec.kind.value), rank.coordinate(axis)
        keys: list[object] = []
        for hop in range(len(ranks)):
            self._hops += 1
            keys.append(("by hand", self._hops))
            store[keys[-1]] = value
            if hop < len(ranks) - 1:
                value = await rank.exchange(value, to=ranks[(at + 1) % len(ranks)], source=ranks[at - 1])
        return rank.concatenate([store.pop(key) for key in keys])


async def sequence_parallel(rank: Rank) -> None:
    """Sequence parallelism whose gathers and scatters are written out."""
    await program_from_plan(SEQUENCE_PARALLEL)(cast(Rank, ByHand(rank)))


async def context_parallel(rank: Rank) -> None:
    """Context parallelism of which keys and values are put together by hand."""
    await program_from_plan(CONTEXT_PARALLEL)(cast(Rank, ByHand(rank)))


SEQUENCE_PARALLEL = Plan(Mesh(tp=2), sequence_parallel=True)
CONTEXT_PARALLEL = Plan(Mesh(cp=2), context="all_gather")


def sequence_parallel_mesh(ranks: int) -> Mesh:
    return Mesh(tp=ranks)


def context_parallel_mesh(ranks: int) -> Mesh:
    return Mesh(cp=ranks)
