"""Programs whose groups, statistics, losses or parts are unusual: all give the numbers of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from shardlab.language import Handle, Mesh, Rank, Value
from shardlab.strategies.fsdp import fsdp
from tests.check import right_programs, sliced_programs

# Groups whose ranks are not in ascending order.


class Descending:
    """A rank that counts the ranks from the last one, and meets them in this order."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.index = rank.world - 1 - rank.index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def all_reduce(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        return self._rank.all_reduce(value, axis=axis, among=self._descending(axis))

    def all_gather(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        return self._rank.all_gather(value, axis=axis, among=self._descending(axis))

    def reduce_scatter(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        return self._rank.reduce_scatter(value, axis=axis, among=self._descending(axis))

    def all_to_all(self, value: Value, *, axis: str | None = None) -> Handle[Value]:
        return self._rank.all_to_all(value, axis=axis, among=self._descending(axis))

    def _descending(self, axis: str | None) -> list[int]:
        return [*reversed(self._rank.group(axis).ranks)]


async def zero_1_descending(rank: Rank) -> None:
    """Each rank updates its slice of the weights, which are gathered in descending order."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weight(l), rank.load_opt_state(l, rank.index, rank.world)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    gradient = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
        total = await rank.all_reduce(grad_weight)
        new, rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])
        rank.weights[l] = await rank.all_gather(new, among=[*reversed(range(rank.world))])


tensor_parallel_mesh = sliced_programs.microbatches_together_mesh
microbatches_descending_mesh = tensor_parallel_mesh
experts_descending_mesh = right_programs.experts_interleaved_batch_mesh
context_descending_mesh = right_programs.striped_context_mesh


async def shards_descending(rank: Rank) -> None:
    """Shards of weights are gathered and their gradients reduce-scattered in descending order."""
    await fsdp(cast(Rank, Descending(rank)))


async def microbatches_descending(rank: Rank) -> None:
    """Microbatches are gathered, and terms of all reduce-scattered, in descending order; statistics as well."""
    await sliced_programs.microbatches_together(cast(Rank, Descending(rank)))


async def experts_descending(rank: Rank) -> None:
    """Buffers go to the experts and come home in descending order."""
    await right_programs.experts_interleaved_batch(cast(Rank, Descending(rank)))


async def context_descending(rank: Rank) -> None:
    """Keys and values are gathered, and their gradients reduce-scattered, in descending order."""
    await right_programs.striped_context(cast(Rank, Descending(rank)))


# Statistics of the loss, which are put together and cut as other rows are.


def load(rank: Rank) -> None:
    place, of = rank.coordinate("tp"), len(rank.group("tp").ranks)
    for l in rank.layers:
        cut = (0, 1) if rank.signatures[l].carries else (place, of)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)


async def forward(rank: Rank, key: object, batch: Value, *, scatters: bool = False) -> None:
    """Compute all layers, up to this rank's slice of the logits, `activations[last, key]`.

    Args:
        scatters: whether terms are reduce-scattered and their sums gathered again, in place of an all-reduce.
    """
    xs, last, residual = rank.activations, rank.layers[-1], list[Value]()
    xs[0, key] = batch
    for l in rank.layers:
        if rank.signatures[l].carries:
            xs[l + 1, key], *residual = rank.forward(l, (xs[l, key], *residual), rank.weights[l])
            continue
        terms = rank.forward(l, xs[l, key], rank.weights[l])
        if l == last:
            xs[l + 1, key] = terms
        elif scatters:
            xs[l + 1, key] = await rank.all_gather(await rank.reduce_scatter(terms, axis="tp"), axis="tp")
        else:
            xs[l + 1, key] = await rank.all_reduce(terms, axis="tp")


async def backward(rank: Rank, key: object, gradient: Value) -> None:
    residual = list[Value]()
    for l in reversed(rank.layers):
        x = rank.activations.pop((l, key))
        if rank.signatures[l].carries:
            grad_weight, gradient, *residual = rank.backward(l, x, (gradient, *residual), rank.weights[l])
        else:
            grad_weight, terms = rank.backward(l, x, gradient, rank.weights[l])
            gradient = await rank.all_reduce(terms, axis="tp") if l else terms
        rank.accumulate(grad_weight)


def update(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


async def _one_loss_of_all(rank: Rank, *, gathers_first: bool) -> None:
    """Microbatches are computed one by one, but for the loss; their statistics are concatenated."""
    load(rank)
    last, xs, stats = len(rank.layers), rank.activations, rank.stats
    for m in rank.microbatches:
        await forward(rank, m, rank.load_batch([m]))
        stats[m] = rank.loss_stats(xs[last, m])
        if gathers_first:
            stats[m] = await rank.all_gather(stats.pop(m), axis="tp")
    logits = rank.concatenate([xs.pop((last, m)) for m in rank.microbatches])
    whole = rank.concatenate([stats.pop(m) for m in rank.microbatches])
    if not gathers_first:
        whole = await rank.all_gather(whole, axis="tp")
    grads = rank.grad_activations
    grads["all"] = rank.loss(logits, whole)
    for m in rank.microbatches:
        await backward(rank, m, rank.slice(grads["all"], m, len(rank.microbatches)))
    update(rank)


async def statistics_concatenated(rank: Rank) -> None:
    """Statistics of each microbatch are gathered, then all concatenated."""
    await _one_loss_of_all(rank, gathers_first=True)


async def statistics_concatenated_in_slices(rank: Rank) -> None:
    """Statistics of each slice of the vocabulary are concatenated, then gathered."""
    await _one_loss_of_all(rank, gathers_first=False)


async def statistics_sliced(rank: Rank) -> None:
    """A batch is put together from unequal parts; its losses take these parts of the logits and of the statistics."""
    load(rank)
    last, parts, grads = len(rank.layers), (rank.microbatches[:1], rank.microbatches[1:]), rank.grad_activations
    batch = rank.concatenate([rank.load_batch(part) for part in parts])
    await forward(rank, "all", batch)
    logits = rank.activations["logits"] = rank.activations.pop((last, "all"))
    rank.stats["all"] = await rank.all_gather(rank.loss_stats(logits), axis="tp")
    for i in range(len(parts)):
        grads[i] = rank.loss(rank.slice(logits, i, len(parts)), rank.slice(rank.stats["all"], i, len(parts)))
    await backward(rank, "all", rank.concatenate([grads.pop(i) for i in range(len(parts))]))
    update(rank)


def statistics_gathered_twice_mesh(ranks: int) -> Mesh:
    return Mesh(dp_shard=ranks // 2, tp=2)


async def statistics_gathered_twice(rank: Rank) -> None:
    """Logits and statistics of all data-parallel ranks are gathered; each rank computes the loss of the whole batch."""
    load(rank)
    last, xs = len(rank.layers), rank.activations
    await forward(rank, 0, rank.load_batch(rank.share("dp_shard")))
    stats = await rank.all_gather(rank.loss_stats(xs[last, 0]), axis="tp")
    stats = await rank.all_gather(stats, axis="dp_shard")
    logits = await rank.all_gather(xs.pop((last, 0)), axis="dp_shard")
    replicas = len(rank.group("dp_shard").ranks)
    await backward(rank, 0, rank.slice(rank.loss(logits, stats), rank.coordinate("dp_shard"), replicas))
    for l in rank.layers:
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights[l], axis="dp_shard")
    update(rank)


statistics_concatenated_mesh = statistics_concatenated_in_slices_mesh = statistics_sliced_mesh = tensor_parallel_mesh

# Losses of slices beside those of whole sequences.


def losses_of_slices_first_mesh(ranks: int) -> Mesh:
    return Mesh(cp=ranks)


async def losses_of_slices_first(rank: Rank) -> None:
    """Rank 0 computes losses of slices that overlap, and uses none; the last rank those of whole sequences."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    if rank.index == 0:
        for slices in ([0], [0, 1], [2]):
            rank.loss(_tokenwise(rank, rank.load_batch([0, 2], slices)))
            for l in rank.layers:
                del rank.activations[l]
    if rank.index == rank.world - 1:
        gradient = rank.loss(_tokenwise(rank, rank.load_batch(rank.microbatches)))
        residual: Sequence[Value] = ()
        for l in reversed(rank.layers):
            x = rank.activations.pop(l)
            if rank.signatures[l].carries:
                rank.grad_weights[l], gradient, *residual = rank.backward(l, x, (gradient, *residual), rank.weights[l])
            else:
                rank.grad_weights[l], gradient = rank.backward(l, x, gradient, rank.weights[l])
    for l in rank.layers:
        term = rank.grad_weights.pop(l) if l in rank.grad_weights else rank.zero_gradient(l)
        total = await rank.all_reduce(term)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


def _tokenwise(rank: Rank, batch: Value) -> Value:
    """The last activation of a model without attention."""
    xs, residual = rank.activations, list[Value]()
    xs[0] = batch
    for l in rank.layers:
        if rank.signatures[l].carries:
            xs[l + 1], *residual = rank.forward(l, (xs[l], *residual), rank.weights[l])
        else:
            xs[l + 1] = rank.forward(l, xs[l], rank.weights[l])
    return xs.pop(len(rank.layers))


# Values that were put together from unequal parts, which ranks cannot be dealt.


async def unequal_parts_scattered(rank: Rank) -> None:
    """Terms of a batch of one microbatch and three others are reduce-scattered, and their sums gathered."""
    load(rank)
    last = len(rank.layers)
    parts = rank.microbatches[:1], rank.microbatches[1:]
    await forward(rank, 0, rank.concatenate([rank.load_batch(part) for part in parts]), scatters=True)
    stats = await rank.all_gather(rank.loss_stats(rank.activations[last, 0]), axis="tp")
    await backward(rank, 0, rank.loss(rank.activations.pop((last, 0)), stats))
    update(rank)
