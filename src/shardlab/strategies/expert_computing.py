"""Computation of a plan on a model of dense layers and experts: one microbatch of each `ep` rank at a time."""

from __future__ import annotations

from shardlab.program import LayerKind, Rank, Value
from shardlab.strategies.plan import Plan


class Mixture:
    """Buffers are exchanged before and after every layer's experts, in either direction (Lepikhin et al. 2020, arXiv
    2006.16668, section 3.2): between, a rank has its experts' buffers of the microbatches of its `ep` group.

    A dense layer keeps everything for its backward pass; experts may be computed again.
    """

    def __init__(self, rank: Rank, plan: Plan) -> None:
        self.rank = rank
        self.exchanges = plan.mesh.ep > 1

    async def forward(self, layer: int, m: int, weight: Value, keeps: str) -> None:
        rank, xs = self.rank, self.rank.activations
        if rank.kinds[layer] is LayerKind.EXPERTS:
            xs[layer, m] = await self._exchanged(xs.pop((layer, m)))
            xs[layer + 1, m] = await self._exchanged(rank.forward(layer, xs[layer, m], weight, save=keeps == "all"))
        else:
            carried = rank.residuals.pop((layer, m)) if layer else None
            carried, xs[layer + 1, m] = rank.forward_dense(layer, carried, xs[layer, m], weight)
            if carried is not None:
                rank.residuals[rank.sizes.next_carrying(layer), m] = carried

    async def loss(self, m: int) -> None:
        last = len(self.rank.layers)
        self.rank.grad_activations[last, m] = self.rank.loss(self.rank.activations.pop((last, m)))

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        rank, grads = self.rank, self.rank.grad_activations
        x, gradient = rank.activations.pop((layer, m)), grads.pop((layer + 1, m))
        if rank.kinds[layer] is LayerKind.EXPERTS:
            grad_weight, made = rank.backward(layer, x, await self._exchanged(gradient), weight)
            grads[layer, m] = await self._exchanged(made)
        else:
            above = self._from_above(layer, m)
            grad_weight, grads[layer, m], below = rank.backward_dense(layer, x, gradient, above, weight)
            self._hand_down(layer, m, below)
        return grad_weight

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        rank, x, grads = self.rank, self.rank.activations[layer, m], self.rank.grad_activations
        if rank.kinds[layer] is LayerKind.EXPERTS:
            grads[layer + 1, m] = await self._exchanged(grads.pop((layer + 1, m)))
            made = rank.backward_input(layer, x, grads[layer + 1, m], weight)
            grads[layer, m] = await self._exchanged(made)
        else:
            above = self._from_above(layer, m)
            grads[layer, m], below = rank.backward_dense_input(layer, x, grads[layer + 1, m], above, weight)
            self._hand_down(layer, m, below)

    def backward_weight(self, layer: int, m: int) -> Value:
        rank = self.rank
        return rank.backward_weight(layer, rank.activations.pop((layer, m)), rank.grad_activations.pop((layer + 1, m)))

    def _from_above(self, layer: int, m: int) -> Value | None:
        after = self.rank.sizes.next_carrying(layer)
        return self.rank.grad_residuals.pop((after, m)) if after >= 0 else None

    def _hand_down(self, layer: int, m: int, grad_carried: Value | None) -> None:
        if grad_carried is not None:
            self.rank.grad_residuals[layer, m] = grad_carried

    async def _exchanged(self, buffers: Value) -> Value:
        return await self.rank.all_to_all(buffers, axis="ep") if self.exchanges else buffers
