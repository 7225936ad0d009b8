"""Passes of a plan through one layer on one microbatch, from store to store by the layer's signature.

A value's key is (layer, microbatch): activations[l, m] enters layer l, grad_activations[l, m] is its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardlab.language import Handle, Rank, Value
from shardlab.language.rules.layer_graph import Layer, Port
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.language.values import Store
from shardlab.strategies.plan.rank_plan import Completion, Keeps, RankPlan


class Places(NamedTuple):
    """Stores of a layer's values on one rank.

    Attributes:
        inputs, grad_inputs: of its inputs beside the activation, and of their gradients; keys begin with the layer.
        outputs, grad_outputs: of its outputs and their gradients, with the number that their keys begin with.
    """

    inputs: tuple[Store, ...]
    grad_inputs: tuple[Store, ...]
    outputs: tuple[tuple[Store, int], ...]
    grad_outputs: tuple[tuple[Store, int], ...]


def places_of(rank: Rank, layer: Layer) -> Places:
    """Find the stores of a layer's values."""

    def gradient(port: Port) -> Store:
        return rank.store(GRADIENT_OF[port.kind])

    return Places(
        inputs=tuple(rank.store(port.kind) for port in layer.inputs[1:]),
        grad_inputs=tuple(gradient(port) for port in layer.inputs[1:]),
        outputs=tuple((rank.store(port.kind), port.layer) for port in layer.outputs),
        grad_outputs=tuple((gradient(port), port.layer) for port in layer.outputs),
    )


class LayerRunner:
    """Passes of one rank through its layers: each finds its inputs in the stores and leaves its results there.

    A pass also completes what other ranks of a tensor- or expert-parallel group have of its values (see `LayerPlan`).
    """

    def __init__(self, rank: Rank, rank_plan: RankPlan) -> None:
        self._rank = rank
        self._plan = rank_plan
        self._plans = rank_plan.layers
        self._places = {layer: places_of(rank, rank_plan.model.layers[layer]) for layer in rank_plan.layers}
        self._feeds_attention = rank_plan.model.feeding_attention
        self._attention = Attention(rank, rank_plan)

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps, *, hands_on: bool = True) -> None:
        """Activation l to activation l + 1, with what is carried beside them; stored only if it `hands_on` these."""
        rank, places, plan, key = self._rank, self._places[layer], self._plans[layer], (layer, m)
        activations, completions = rank.activations, plan.completions
        if completions.input:
            activations[key] = await self._completed(activations.pop(key), completions.input)
        given = (activations.pop(key) if keeps == "nothing" else activations[key],)
        if places.inputs:
            given += tuple([store[key] if keeps == "input" else store.pop(key) for store in places.inputs])
        made = rank.forward(layer, given, weight, save=keeps == "all", part=plan.part)
        if not hands_on:
            return
        for place in range(1, len(made)):
            store, after = places.outputs[place]
            store[after, m] = made[place]
        store, after = places.outputs[0]
        store[after, m] = await self._completed(made[0], completions.output) if completions.output else made[0]
        if layer in self._feeds_attention:
            await self._attention.forward(layer, m, keeps=keeps == "all")

    async def loss(self, m: int) -> None:
        """The gradient of the last activation; slices of the logits need the statistics of all slices."""
        rank, last = self._rank, len(self._rank.layers)
        logits = rank.activations[last, m]
        stats = await rank.all_gather(rank.loss_stats(logits), axis="tp") if self._plan.plan.mesh.tp > 1 else None
        rank.grad_activations[last, m] = rank.loss(rank.activations.pop((last, m)), stats)

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        """The gradients of the layer's inputs; the gradient of its weight is given back."""
        if self._feeds_attention or self._plans[layer].recompute:
            await self._before_backward(layer, m)
        rank, completions = self._rank, self._plans[layer].completions
        x = rank.activations.pop((layer, m))
        gradients: list[Value] = []
        for store, after in self._places[layer].grad_outputs:  # no comprehension: on Python 3.11 it is a call
            gradients.append(store.pop((after, m)))
        if completions.grad_output:
            gradients[0] = await self._completed(gradients[0], completions.grad_output)
        made = rank.backward(layer, x, tuple(gradients), weight)
        self._store_gradients(layer, m, made[1:])
        if completions.grad_input:
            await self._complete_gradient(layer, m)
        return made[0]

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        """The gradients of the layer's inputs alone; the first of its outputs' gradients stays for the other half."""
        if self._feeds_attention or self._plans[layer].recompute:
            await self._before_backward(layer, m)
        rank, completions = self._rank, self._plans[layer].completions
        (store, after), *others = self._places[layer].grad_outputs
        key = after, m
        if completions.grad_output:
            store[key] = await self._completed(store.pop(key), completions.grad_output)
        gradients = (store[key], *[other.pop((number, m)) for other, number in others])
        made = rank.backward_input(layer, rank.activations[layer, m], gradients, weight)
        self._store_gradients(layer, m, made)
        if completions.grad_input:
            await self._complete_gradient(layer, m)

    def backward_weight(self, layer: int, m: int) -> Value:
        """The gradient of the layer's weight."""
        store, after = self._places[layer].grad_outputs[0]
        return self._rank.backward_weight(layer, self._rank.activations.pop((layer, m)), store.pop((after, m)))

    def discard(self, layer: int, m: int) -> None:
        """Free what the gradient of the layer's weight would be computed from."""
        store, after = self._places[layer].grad_outputs[0]
        del self._rank.activations[layer, m], store[after, m]

    async def _before_backward(self, layer: int, m: int) -> None:
        feeds, plan = self._feeds_attention, self._plans[layer]
        if layer in feeds:
            await self._attention.backward(layer, m)
        elif layer - 1 in feeds:
            self._attention.keep(layer - 1, m)
        if plan.recompute and plan.completions.input:  # what comes before this layer has been computed again
            activations = self._rank.activations
            activations[layer, m] = await self._completed(activations.pop((layer, m)), plan.completions.input)

    def _store_gradients(self, layer: int, m: int, made: Sequence[Value]) -> None:
        """Store the gradients of a layer's inputs."""
        for place, store in enumerate(self._places[layer].grad_inputs, 1):
            store[layer, m] = made[place]
        self._rank.grad_activations[layer, m] = made[0]

    async def _complete_gradient(self, layer: int, m: int) -> None:
        """Complete the gradient of a layer's first input."""
        grads = self._rank.grad_activations
        completions = self._plans[layer].completions.grad_input
        grads[layer, m] = await self._completed(grads.pop((layer, m)), completions)

    async def _completed(self, value: Value, completions: Sequence[Completion]) -> Value:
        rank = self._rank
        for verb, axis in completions:
            if verb == "slice":
                value = rank.slice(value, rank.coordinate(axis), len(rank.group(axis).ranks))
            else:
                handle: Handle[Value] = getattr(rank, verb)(value, axis=axis)
                value = await handle
        return value


# Attention as a step of its own between a PROJECT layer and a row, for plans that cut sequences or recompute it.
#
# It keeps queries, keys and values and computes scores and softmax again in the backward pass, which is what
# selective recomputation means (Korthikanti et al. 2022, arXiv 2205.05198, section 5). Sequences may be cut over
# `cp`.
#
# Each rank has the tokens of some slices of every sequence, so that causal attention is as much work on each, or
# nearly (see `dealt`). Its queries stay; keys and values come from the others. With tensor parallelism all of them
# are of the rank's own heads.


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
