"""Random programs of expert parallelism that are right by construction: exchanges of any number of microbatches.

All ranks agree on which microbatches go together, and in which order they come; each decides for itself which experts
it computes again, and which backward passes it does in halves, the second of them much later. With tensor parallelism
all that is sliced over `tp`, experts too, makes terms, which are reduced before they travel.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

from shardlab.program import Mesh, Program, Rank, Sizes, Store, Strategy, Value, trace
from tests.support.random_plans import routed


class ExpertWriter:
    """Writes one rank's part."""

    def __init__(self, rank: Rank, seed: int) -> None:
        agreed = Random(seed)
        self.rank, self.random = rank, Random(seed * 1000 + rank.index)
        self.all_forward_first = agreed.random() < 0.5
        self.ep, self.here = rank.mesh.ep, rank.coordinate("ep")
        self.tp = rank.mesh.tp
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
        rank = self.rank
        for l in rank.layers:
            shard, of = 0, 1
            for index in rank.sizes.signatures[l].cut:
                axis = "ep" if index == "expert" else "tp"
                shard, of = shard * getattr(rank.mesh, axis) + rank.coordinate(axis), of * getattr(rank.mesh, axis)
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard, of)
        if self.all_forward_first:
            done = [await self.forward(unit) for unit in self.units]
            for inputs, logits in done:
                await self.backward(inputs, logits)
        else:
            for unit in self.units:
                await self.backward(*await self.forward(unit))
        for l, x, gradient in self.random.sample(self.late, len(self.late)):
            self.made[l].append(self.kept(rank.grad_weights, rank.backward_weight(l, x, gradient)))
        for l in rank.layers:
            parts = self.made[l]
            while len(parts) > 1:
                one, other = (parts.pop(self.random.randrange(len(parts))) for _ in range(2))
                parts.append(self.kept(rank.grad_weights, one + other))
            axes = ["dp_shard"] if "expert" in rank.sizes.signatures[l].cut else ["ep", "dp_shard"]
            total = parts[0]
            for axis in axes:
                total = await rank.all_reduce(total, axis=axis)
            rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

    async def forward(self, unit: list[int]) -> tuple[list[Value], Value]:
        """The layers' inputs, and the logits."""
        rank, carried = self.rank, list[Value]()
        x, inputs = rank.load_batch(unit), list[Value]()
        for l in rank.layers:
            is_expert = "expert" in rank.sizes.signatures[l].cut
            if is_expert:
                x = await rank.all_to_all(x, axis="ep")
            inputs.append(self.kept(rank.activations, x))
            if rank.sizes.signatures[l].carries:
                x, *made = rank.forward(l, (x, *carried), rank.weights[l])
                carried = [self.kept(rank.residuals, each) for each in made]
            else:
                x = rank.forward(l, inputs[l], rank.weights[l], save=self.random.random() < 0.6)
                if l < len(rank.layers) - 1:
                    x = await self.reduced(x)
            if is_expert:
                x = await rank.all_to_all(x, axis="ep")
            x = self.kept(rank.activations, x)
        return inputs, x

    async def reduced(self, term: Value) -> Value:
        """All terms together, over the ranks that have slices of a layer."""
        return await self.rank.all_reduce(term, axis="tp") if self.tp > 1 else term

    async def backward(self, inputs: list[Value], logits: Value) -> None:
        rank, above = self.rank, list[Value]()
        stats = await rank.all_gather(rank.loss_stats(logits), axis="tp") if self.tp > 1 else None
        gradient = rank.loss(logits, stats)
        for l in reversed(rank.layers):
            x, weight, halves = inputs[l], rank.weights[l], self.random.random() < 0.4
            carries, grad = rank.sizes.signatures[l].carries, None
            is_expert = "expert" in rank.sizes.signatures[l].cut
            if is_expert:
                gradient = await rank.all_to_all(gradient, axis="ep")
            given = gradient = self.kept(rank.grad_activations, gradient)
            below = (given, *above) if carries else (given,)
            if halves:
                gradient, *made = rank.backward_input(l, x, below, weight)
            else:
                grad, gradient, *made = rank.backward(l, x, below, weight)
            if carries:
                above = [self.kept(rank.grad_residuals, each) for each in made]
            elif l:
                gradient = await self.reduced(gradient)
            if is_expert:
                gradient = await rank.all_to_all(gradient, axis="ep")
            if grad is None:
                self.late.append((l, x, given))
            else:
                self.made[l].append(self.kept(rank.grad_weights, grad))

    def kept(self, store: Store, value: Value) -> Value:
        """Until the step ends."""
        store["kept", next(self.keys)] = value
        return value


def expert_program_of(seed: int) -> Strategy:
    async def strategy(rank: Rank) -> None:
        await ExpertWriter(rank, seed).run()

    return strategy


def random_experts(seed: int) -> Program:
    """The program of a seed: 2-4 ranks of experts, each of 1-2, or 1-2 replicas; 1-2 blocks, 1-4 microbatches each."""
    random = Random(seed)
    ep = random.choice([2, 2, 3, 4])
    mesh = Mesh(ep=ep, dp_shard=random.choice([1, 2]) if ep == 2 else 1)
    blocks, each = random.choice([1, 1, 2]), random.randint(1, 4)
    sizes = Sizes.mixture(blocks)
    if random.random() < 0.4:
        mesh, sizes = replace(mesh, tp=2), routed(blocks + 1)
    return trace(expert_program_of(seed), mesh, sizes, mesh.dp_shard * ep * each)
