"""Passes of a plan through one layer on one microbatch, with the collectives of tensor, context and expert parallelism.

`LayerRunner` reads the inputs of a layer from the rank's stores and writes its outputs to them. The key of a value is
(layer, microbatch): activations[l, m] is the input of layer l, and grad_activations[l, m] is its gradient.

Attention as a separate step between two layers is in `context_parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardlab.language import Handle, Rank, Value
from shardlab.language.rules.layer_graph import Layer, Port
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.language.values import Store
from shardlab.strategies.plan.context_parallel import Attention
from shardlab.strategies.plan.rank_plan import Completion, Keeps, RankPlan


class LayerRunner:
    """Passes of one rank through its layers, from store to store, with the collectives of `LayerPlan.completions`."""

    def __init__(self, rank: Rank, rank_plan: RankPlan) -> None:
        self._rank = rank
        self._plan = rank_plan
        self._plans = rank_plan.layers
        self._stores = {layer: find_layer_stores(rank, rank_plan.model.layers[layer]) for layer in rank_plan.layers}
        self._feeds_attention = rank_plan.model.feeding_attention
        self._attention = Attention(rank, rank_plan)

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps, *, stores_outputs: bool = True) -> None:
        """Compute activation l + 1, and the values carried beside it, from activation l.

        Args:
            keeps: values that stay for the backward pass.
            stores_outputs: whether another layer reads the outputs; they are not stored otherwise.
        """
        rank, stores, plan, key = self._rank, self._stores[layer], self._plans[layer], (layer, m)
        activations, completions = rank.activations, plan.completions
        if completions.input:
            activations[key] = await self._completed(activations.pop(key), completions.input)
        inputs = (activations.pop(key) if keeps == "nothing" else activations[key],)
        if stores.inputs:
            inputs += tuple([store[key] if keeps == "input" else store.pop(key) for store in stores.inputs])
        outputs = rank.forward(layer, inputs, weight, save=keeps == "all", part=plan.part)
        if not stores_outputs:
            return
        for place in range(1, len(outputs)):
            store, reader = stores.outputs[place]
            store[reader, m] = outputs[place]
        store, reader = stores.outputs[0]
        store[reader, m] = await self._completed(outputs[0], completions.output) if completions.output else outputs[0]
        if layer in self._feeds_attention:
            await self._attention.forward(layer, m, keeps=keeps == "all")

    async def loss(self, m: int) -> None:
        """Compute the gradient of the last activation. With tensor parallelism, gather the statistics of all slices."""
        rank, last = self._rank, len(self._rank.layers)
        logits = rank.activations[last, m]
        stats = await rank.all_gather(rank.loss_stats(logits), axis="tp") if self._plan.plan.mesh.tp > 1 else None
        rank.grad_activations[last, m] = rank.loss(rank.activations.pop((last, m)), stats)

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        """Compute the gradients of the layer's inputs, and return the gradient of its weight."""
        if self._feeds_attention or self._plans[layer].recompute:
            await self._before_backward(layer, m)
        rank, completions = self._rank, self._plans[layer].completions
        x = rank.activations.pop((layer, m))
        gradients: list[Value] = []
        for store, reader in self._stores[layer].grad_outputs:  # no comprehension: on Python 3.11 it is a call
            gradients.append(store.pop((reader, m)))
        if completions.grad_output:
            gradients[0] = await self._completed(gradients[0], completions.grad_output)
        grad_weight, *grad_inputs = rank.backward(layer, x, tuple(gradients), weight)
        self._store_gradients(layer, m, grad_inputs)
        if completions.grad_input:
            await self._complete_gradient(layer, m)
        return grad_weight

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        """Compute the gradients of the layer's inputs only. Keep the inputs of `backward_weight`."""
        if self._feeds_attention or self._plans[layer].recompute:
            await self._before_backward(layer, m)
        rank, completions = self._rank, self._plans[layer].completions
        (store, reader), *others = self._stores[layer].grad_outputs
        key = reader, m
        if completions.grad_output:
            store[key] = await self._completed(store.pop(key), completions.grad_output)
        gradients = (store[key], *[other.pop((number, m)) for other, number in others])
        grad_inputs = rank.backward_input(layer, rank.activations[layer, m], gradients, weight)
        self._store_gradients(layer, m, grad_inputs)
        if completions.grad_input:
            await self._complete_gradient(layer, m)

    def backward_weight(self, layer: int, m: int) -> Value:
        """Return the gradient of the layer's weight, after `backward_input`."""
        store, reader = self._stores[layer].grad_outputs[0]
        return self._rank.backward_weight(layer, self._rank.activations.pop((layer, m)), store.pop((reader, m)))

    def discard(self, layer: int, m: int) -> None:
        """Free the inputs of `backward_weight` of a frozen layer."""
        store, reader = self._stores[layer].grad_outputs[0]
        del self._rank.activations[layer, m], store[reader, m]

    async def _before_backward(self, layer: int, m: int) -> None:
        feeds, plan = self._feeds_attention, self._plans[layer]
        if layer in feeds:
            await self._attention.backward(layer, m)
        elif layer - 1 in feeds:
            self._attention.keep(layer - 1, m)
        if plan.recompute and plan.completions.input:  # the layers before this one have been recomputed
            activations = self._rank.activations
            activations[layer, m] = await self._completed(activations.pop((layer, m)), plan.completions.input)

    def _store_gradients(self, layer: int, m: int, gradients: Sequence[Value]) -> None:
        """Store the gradients of a layer's inputs."""
        for place, store in enumerate(self._stores[layer].grad_inputs, 1):
            store[layer, m] = gradients[place]
        self._rank.grad_activations[layer, m] = gradients[0]

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


class LayerStores(NamedTuple):
    """Stores of a layer's inputs and outputs on one rank.

    Attributes:
        inputs, grad_inputs: stores of the inputs other than the activation, and of their gradients.
        outputs, grad_outputs: stores of the outputs and of their gradients, each with the layer that reads the output.
            Keys begin with that layer.
    """

    inputs: tuple[Store, ...]
    grad_inputs: tuple[Store, ...]
    outputs: tuple[tuple[Store, int], ...]
    grad_outputs: tuple[tuple[Store, int], ...]


def find_layer_stores(rank: Rank, layer: Layer) -> LayerStores:
    """Return the stores of a layer's inputs and outputs."""

    def gradient(port: Port) -> Store:
        return rank.store(GRADIENT_OF[port.kind])

    return LayerStores(
        inputs=tuple(rank.store(port.kind) for port in layer.inputs[1:]),
        grad_inputs=tuple(gradient(port) for port in layer.inputs[1:]),
        outputs=tuple((rank.store(port.kind), port.layer) for port in layer.outputs),
        grad_outputs=tuple((gradient(port), port.layer) for port in layer.outputs),
    )
