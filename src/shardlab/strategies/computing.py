"""Passes of a plan through one layer on one microbatch, from store to store by the layer's signature.

A value's key is (layer, microbatch): activations[l, m] enters layer l, grad_activations[l, m] is its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardlab.program import Handle, Rank, Value
from shardlab.program.values import Store
from shardlab.rules.layer import GRADIENT_OF
from shardlab.rules.node import Layer, Port
from shardlab.strategies.context import Attention
from shardlab.strategies.rank_plan import Completion, Keeps, RankPlan


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
