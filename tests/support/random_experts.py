"""Random programs of expert parallelism that are right by construction: exchanges of any number of microbatches.

All ranks agree on which microbatches go together, and in which order they come; each decides for itself which experts
it computes again, and which backward passes it does in halves, the second of them much later. With tensor parallelism
all that is sliced over `tp`, experts too, makes terms, which are reduced before they travel. Ranks of `cp` are given
the same tokens, which each dispatches to its own part of the experts.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

from shardlab.language import Kind, Mesh, Program, Rank, Sizes, Store, Strategy, Value, trace
from shardlab.language.rules.layer_rules import GRADIENT_OF
from tests.support.random_plans import routed


class ExpertWriter:
    """Writes one rank's part."""

    def __init__(self, rank: Rank, seed: int) -> None:
        agreed = Random(seed)
        self.rank, self.random = rank, Random(seed * 1000 + rank.index)
        self.all_forward_first = agreed.random() < 0.5
        self.ep, self.here = rank.mesh.ep, rank.coordinate("ep")
        self.tp = rank.mesh.tp
        self.part = (rank.coordinate("cp"), rank.mesh.cp) if rank.mesh.cp > 1 else None
        columns = rank.mesh.dp_shard
        each = len(rank.microbatches) // (columns * self.ep)
        dealt = agreed.sample(list(rank.microbatches), each * columns * self.ep)
        size = agreed.choice([size for size in range(1, each + 1) if each % size == 0])
        rounds = [dealt[i : i + size * columns * self.ep] for i in range(0, len(dealt), size * columns * self.ep)]
        place = rank.coordinate("dp_shard")
        of_groups = [sorted(each_round[place::columns]) for each_round in rounds]  # an ep group's, dealt in order
        self.units = [group[self.here * size : (self.here + 1) * size] for group in of_groups]
        self.made: dict[int, list[Value]] = {l: [] for l in rank.layers}
        self.late: list[tuple[int, Value, Value]] = []
        self.keys = itertools.count()

    async def run(self) -> None:
        rank, bare = self.rank, [l for l in self.rank.layers if not self.rank.sizes.weights[l]]
        for l in rank.layers:
            shard, of = 0, 1
            for axis in self.axes_of(l):
                size = getattr(rank.mesh, axis)
                shard, of = shard * size + rank.coordinate(axis), of * size
            rank.weights[l] = rank.load_weight(l, shard, of)
            if l not in bare:
                rank.opt_states[l] = rank.load_opt_state(l, shard, of)
        if self.all_forward_first:
            done = [await self.forward(unit) for unit in self.units]
            for inputs, logits in done:
                await self.backward(inputs, logits)
        else:
            for unit in self.units:
                await self.backward(*await self.forward(unit))
        for l, x, gradient in self.random.sample(self.late, len(self.late)):
            self.made[l].append(self.kept(rank.grad_weights, rank.backward_weight(l, x, gradient)))
        for l in (l for l in rank.layers if l not in bare):
            parts = self.made[l]
            while len(parts) > 1:
                one, other = (parts.pop(self.random.randrange(len(parts))) for _ in range(2))
                parts.append(self.kept(rank.grad_weights, one + other))
            total, signature = parts[0], rank.sizes.signatures[l]
            axes = ["dp_shard"] if "expert" in signature.cut else ["ep", "dp_shard"]
            for axis in ["cp", *axes] if signature.deals and self.part else axes:
                total = await rank.all_reduce(total, axis=axis)
            rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

    def axes_of(self, layer: int) -> list[str]:
        """Those that cut a layer, outermost first."""
        cut = self.rank.sizes.signatures[layer].cut
        return [axis for index in cut for axis in (["cp", "ep"] if index == "expert" else ["tp"])]

    async def forward(self, unit: list[int]) -> tuple[list[Value], Value]:
        """The layers' inputs, and the logits."""
        rank, carried = self.rank, dict[Kind, Value]()
        x, inputs = rank.load_batch(unit), list[Value]()
        for l, signature in enumerate(rank.sizes.signatures):
            if "expert" in signature.cut:
                x = await rank.all_to_all(x, axis="ep")
            inputs.append(self.kept(rank.activations, x))
            if signature.recomputed:
                x = rank.forward(l, inputs[l], rank.weights[l], save=self.random.random() < 0.6)
            else:
                given = (x, *(carried.pop(port.kind) for port in signature.inputs[1:]))
                x, *made = rank.forward(l, given, rank.weights[l], part=self.part if signature.deals else None)
                for port, value in zip(signature.outputs[1:], made, strict=True):
                    carried[port.kind] = self.kept(rank.store(port.kind), value)
            x = await self.completed(x, l, forward=True)
            if "expert" in signature.cut:
                x = await rank.all_to_all(x, axis="ep")
            x = self.kept(rank.activations, x)
        return inputs, x

    async def completed(self, value: Value, layer: int, *, forward: bool) -> Value:
        """A layer's result, or its input's gradient, reduced over the ranks that have slices of the layer or parts."""
        signature = self.rank.sizes.signatures[layer]
        if "tp" in self.axes_of(layer) and layer != (len(self.rank.layers) - 1 if forward else 0):
            value = await self.rank.all_reduce(value, axis="tp") if self.tp > 1 else value
        if self.part and signature.routes and bool(signature.deals) != forward:
            value = await self.rank.all_reduce(value, axis="cp")
        return value

    async def backward(self, inputs: list[Value], logits: Value) -> None:
        rank, above = self.rank, dict[Kind, Value]()
        stats = await rank.all_gather(rank.loss_stats(logits), axis="tp") if self.tp > 1 else None
        gradient = rank.loss(logits, stats)
        for l, signature in reversed(list(enumerate(rank.sizes.signatures))):
            x, weight = inputs[l], rank.weights[l]
            if "expert" in signature.cut:
                gradient = await rank.all_to_all(gradient, axis="ep")
            given = self.kept(rank.grad_activations, gradient)
            gradients = (given, *(above.pop(port.kind) for port in signature.outputs[1:]))
            if self.random.random() < 0.4 and rank.sizes.weights[l]:
                gradient, *made = rank.backward_input(l, x, gradients, weight)
                self.late.append((l, x, given))
            else:
                grad, gradient, *made = rank.backward(l, x, gradients, weight)
                self.made[l].append(self.kept(rank.grad_weights, grad))
            for port, value in zip(signature.inputs[1:], made, strict=True):
                above[port.kind] = self.kept(rank.store(GRADIENT_OF[port.kind]), value)
            gradient = await self.completed(gradient, l, forward=False)
            if "expert" in signature.cut:
                gradient = await rank.all_to_all(gradient, axis="ep")

    def kept(self, store: Store, value: Value) -> Value:
        """Until the step ends."""
        store["kept", next(self.keys)] = value
        return value


def expert_program_of(seed: int) -> Strategy:
    async def strategy(rank: Rank) -> None:
        await ExpertWriter(rank, seed).run()

    return strategy


def random_experts(seed: int) -> Program:
    """The program of a seed: 2-4 ranks of experts, each of 1-4, or 1-2 replicas; 1-2 blocks, 1-4 microbatches each."""
    random = Random(seed)
    ep = random.choice([2, 2, 3, 4])
    mesh = Mesh(ep=ep, dp_shard=random.choice([1, 2]) if ep == 2 else 1)
    blocks, each = random.choice([1, 1, 2]), random.randint(1, 4)
    sizes = Sizes.mixture(blocks)
    if random.random() < 0.4:
        cp, tp = random.choice([(1, 2), (2, 1), (2, 2)]) if mesh.world == 2 else (1, 2)
        mesh, sizes = replace(mesh, tp=tp, cp=cp), routed(blocks + 1)
    return trace(expert_program_of(seed), mesh, sizes, mesh.dp_shard * ep * each)
