"""Passes of a plan through one layer on one microbatch, from store to store by the layer's signature.

A value's key is (layer, microbatch): activations[l, m] enters layer l, grad_activations[l, m] is its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program import Handle, Kind, Rank, Value
from shardlab.rules.layer import GRADIENT_OF
from shardlab.strategies.context import Attention
from shardlab.strategies.rank_plan import Completion, Keeps, RankPlan


class LayerRunner:
    """Passes of one rank through its layers: each finds its inputs in the stores and leaves its results there.

    A pass also completes what other ranks of a tensor- or expert-parallel group have of its values (see `LayerPlan`).
    """

    def __init__(self, rank: Rank, rank_plan: RankPlan) -> None:
        self._rank = rank
        self._plan = rank_plan
        self._layers = rank_plan.model.layers
        self._attention = Attention(rank, rank_plan)

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps, *, hands_on: bool = True) -> None:
        """Activation l to activation l + 1, with what is carried beside them; stored only if it `hands_on` these."""
        rank, signature = self._rank, self._layers[layer]
        completions = self._plan.layers[layer].completions
        if completions.input:
            rank.activations[layer, m] = await self._completed(rank.activations.pop((layer, m)), completions.input)
        given: list[Value] = []
        for port in signature.inputs:
            stays = keeps != "nothing" if port.kind is Kind.ACTIVATION else keeps == "input"
            store = rank.store(port.kind)
            given.append(store[layer, m] if stays else store.pop((layer, m)))
        made = rank.forward(layer, tuple(given), weight, save=keeps == "all", part=self._plan.layers[layer].part)
        if not hands_on:
            return
        for port, value in zip(signature.outputs[1:], made[1:], strict=True):
            rank.store(port.kind)[port.layer, m] = value
        port = signature.outputs[0]
        first = await self._completed(made[0], completions.output) if completions.output else made[0]
        rank.store(port.kind)[port.layer, m] = first
        if layer in self._plan.model.feeding_attention:
            await self._attention.forward(layer, m, keeps=keeps == "all")

    async def loss(self, m: int) -> None:
        """The gradient of the last activation; slices of the logits need the statistics of all slices."""
        rank, last = self._rank, len(self._layers)
        logits = rank.activations[last, m]
        stats = await rank.all_gather(rank.loss_stats(logits), axis="tp") if self._plan.plan.mesh.tp > 1 else None
        rank.grad_activations[last, m] = rank.loss(rank.activations.pop((last, m)), stats)

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        """The gradients of the layer's inputs; the gradient of its weight is given back."""
        await self._before_backward(layer, m)
        rank = self._rank
        x = rank.activations.pop((layer, m))
        gradients = [rank.store(kind).pop(key) for kind, key in self._gradients(layer, m)]
        if completions := self._plan.layers[layer].completions.grad_output:
            gradients[0] = await self._completed(gradients[0], completions)
        made = rank.backward(layer, x, tuple(gradients), weight)
        await self._store_gradients(layer, m, made[1:])
        return made[0]

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        """The gradients of the layer's inputs alone; the first of its outputs' gradients stays for the other half."""
        await self._before_backward(layer, m)
        rank, completions = self._rank, self._plan.layers[layer].completions.grad_output
        (kind, key), *others = self._gradients(layer, m)
        grads = rank.store(kind)
        if completions:
            grads[key] = await self._completed(grads.pop(key), completions)
        gradients = (grads[key], *(rank.store(kind).pop(key) for kind, key in others))
        made = rank.backward_input(layer, rank.activations[layer, m], gradients, weight)
        await self._store_gradients(layer, m, made)

    def backward_weight(self, layer: int, m: int) -> Value:
        """The gradient of the layer's weight."""
        rank, (kind, key) = self._rank, self._gradients(layer, m)[0]
        return rank.backward_weight(layer, rank.activations.pop((layer, m)), rank.store(kind).pop(key))

    async def _before_backward(self, layer: int, m: int) -> None:
        feeds, plan = self._plan.model.feeding_attention, self._plan.layers[layer]
        if layer in feeds:
            await self._attention.backward(layer, m)
        elif layer - 1 in feeds:
            self._attention.keep(layer - 1, m)
        if plan.completions.input and plan.recompute:  # what comes before this layer has been computed again
            activations = self._rank.activations
            activations[layer, m] = await self._completed(activations.pop((layer, m)), plan.completions.input)

    def _gradients(self, layer: int, m: int) -> list[tuple[Kind, tuple[int, int]]]:
        """Stores and keys of the gradients of a layer's outputs."""
        return [(GRADIENT_OF[port.kind], (port.layer, m)) for port in self._layers[layer].outputs]

    async def _store_gradients(self, layer: int, m: int, made: tuple[Value, ...]) -> None:
        """Store the gradients of a layer's inputs, the first of them completed."""
        for port, value in zip(self._layers[layer].inputs[1:], made[1:], strict=True):
            self._rank.store(GRADIENT_OF[port.kind])[layer, m] = value
        completions = self._plan.layers[layer].completions.grad_input
        first = await self._completed(made[0], completions) if completions else made[0]
        self._rank.grad_activations[layer, m] = first

    async def _completed(self, value: Value, completions: Sequence[Completion]) -> Value:
        rank = self._rank
        for verb, axis in completions:
            if verb == "slice":
                value = rank.slice(value, rank.coordinate(axis), len(rank.group(axis).ranks))
            else:
                handle: Handle[Value] = getattr(rank, verb)(value, axis=axis)
                value = await handle
        return value
