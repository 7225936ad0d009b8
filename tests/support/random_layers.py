"""Random programs of context parallelism that are right by construction, without a ring and without a plan.

The slices of sequences are assigned to the ranks at random. Each block is sent to the ranks whose queries see it, or
all are gathered; queries attend to blocks in any order, and the results are added in any order. The backward pass is
random as well: a block's gradients are sent to its rank one by one, or reduce-scattered where the slices are balanced.
Or slices of sequences are exchanged for heads, if all ranks have equally many.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

from shardlab.language import Handle, Kind, Mesh, Program, Rank, Sizes, Store, Strategy, Value, trace
from shardlab.language.rules.layer_rules import GRADIENT_OF
from tests.support.random_plans import routed
from tests.support.random_programs import Agreed, AttentionShape, random_attention_shape


class AttentionWriter:
    """Writes one rank's part."""

    def __init__(self, rank: Rank, shape: AttentionShape) -> None:
        self.rank, self.agreed = rank, Agreed(shape)
        self.random = Random(shape.seed * 1000 + rank.index)
        self.ring, self.cp_place = rank.group("cp").ranks, rank.coordinate("cp")
        self.loose: list[Handle[None]] = []
        self.gradients: dict[int, list[Value]] = {l: [] for l in rank.layers}
        self.keys = itertools.count()

    async def run(self) -> None:
        rank = self.rank
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        for unit in self.agreed.units[rank.coordinate("dp_shard")]:
            await self.passes(unit)
        for l in self.random.sample(list(rank.layers), len(rank.layers)) if rank.world == 1 else rank.layers:
            total = self.added(rank.grad_weights, self.gradients[l])
            for axis in self.agreed.reduces:
                total = await rank.all_reduce(total, axis=axis)
            rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

    async def passes(self, unit: list[int]) -> None:
        """Write the forward and backward pass of some microbatches."""
        rank, residual = self.rank, list[Value]()
        x = rank.load_batch(unit, self.agreed.dealt[self.cp_place])
        inputs: list[Value] = []
        met: dict[int, tuple[Value, Value, Value]] = {}
        for l in rank.layers:
            inputs.append(self.keep(rank.activations, x))
            if rank.sizes.signatures[l].carries:
                x, *outputs = rank.forward(l, (x, *residual), rank.weights[l])
                residual = [self.keep(rank.residuals, value) for value in outputs]
            elif rank.sizes.signatures[l].projects:
                outputs = rank.forward(l, (x,), rank.weights[l])
                queries, own_block = self.keep(rank.queries, outputs[0]), self.keep(rank.keys_values, outputs[1])
                if self.agreed.exchanges[l]:
                    queries = self.keep(rank.queries, await rank.all_to_all(queries, axis="cp"))
                    own_block = self.keep(rank.keys_values, await rank.all_to_all(own_block, axis="cp"))
                mixed = self.keep(rank.activations, await self.attended(l, queries, own_block))
                met[l] = queries, own_block, mixed
                x = await rank.all_to_all(mixed, axis="cp") if self.agreed.exchanges[l] else mixed
            else:
                x = rank.forward(l, x, rank.weights[l], save=self.random.random() < 0.7)
        gradient, grad_residuals = rank.loss(x), list[Value]()
        for l in reversed(rank.layers):
            x, weight = inputs[l], rank.weights[l]
            gradient = self.keep(rank.grad_activations, gradient)
            if rank.sizes.signatures[l].carries:
                grad, gradient, *carried = rank.backward(l, x, (gradient, *grad_residuals), weight)
                grad_residuals = [self.keep(rank.grad_residuals, value) for value in carried]
            elif rank.sizes.signatures[l].projects:
                gradients = await self.went_back(l, *met[l], gradient)
                if self.random.random() < 0.5:
                    grad, gradient = rank.backward(l, x, gradients, weight)
                else:
                    (gradient,) = rank.backward_input(l, x, gradients, weight)
                    grad = rank.backward_weight(l, x, gradients[0])
            else:
                grad, gradient = rank.backward(l, x, gradient, weight)
            self.gradients[l].append(self.keep(rank.grad_weights, grad))

    def keep(self, store: Store, value: Value) -> Value:
        """Until the step ends."""
        store["kept", next(self.keys)] = value
        return value

    def added(self, store: Store, parts: list[Value]) -> Value:
        """Add all parts, in any order."""
        parts = [self.keep(store, part) for part in parts]
        while len(parts) > 1:
            one, other = (parts.pop(self.random.randrange(len(parts))) for _ in range(2))
            parts.append(self.keep(store, one + other))
        return parts[0]

    async def blocks(self, l: int, own_block: Value) -> list[tuple[int, Value]]:
        """(rank, keys and values) of all blocks that this rank's queries see, in any order."""
        rank, agreed = self.rank, self.agreed
        others = [place for place in range(len(self.ring)) if place != self.cp_place]
        for place in self.random.sample(others, len(others)):
            if agreed.sees(place, self.cp_place):
                self.loose.append(rank.send(own_block, to=self.ring[place]))
        sources = [place for place in others if agreed.sees(self.cp_place, place)]
        receives = {place: rank.recv(source=self.ring[place]) for place in self.random.sample(sources, len(sources))}
        pairs = [(self.cp_place, own_block)] if agreed.sees(self.cp_place, self.cp_place) else []
        pairs += [(place, self.keep(rank.keys_values, await handle)) for place, handle in receives.items()]
        return self.random.sample(pairs, len(pairs))

    async def attended(self, l: int, queries: Value, own_block: Value) -> Value:
        rank = self.rank
        if self.agreed.exchanges[l]:
            return rank.attend(l, queries, own_block)
        if self.agreed.gathers[l]:
            return rank.attend(l, queries, await rank.all_gather(own_block, axis="cp"))
        return self.added(rank.activations, [rank.attend(l, queries, kv) for _, kv in await self.blocks(l, own_block)])

    async def went_back(
        self, l: int, queries: Value, own_block: Value, attended: Value, grad: Value
    ) -> tuple[Value, Value]:
        """The gradients of this rank's queries, and of its block."""
        rank, agreed = self.rank, self.agreed
        if agreed.exchanges[l]:
            whole = self.keep(rank.grad_activations, await rank.all_to_all(grad, axis="cp"))
            of_queries, of_blocks = rank.attend_backward(l, queries, own_block, attended, whole)
            of_queries = self.keep(rank.grad_queries, await rank.all_to_all(of_queries, axis="cp"))
            return of_queries, self.keep(rank.grad_keys_values, await rank.all_to_all(of_blocks, axis="cp"))
        if agreed.gathers_back[l]:
            block = await rank.all_gather(own_block, axis="cp")
            of_queries, of_blocks = rank.attend_backward(l, queries, block, attended, grad)
            of_queries = self.keep(rank.grad_queries, of_queries)
            return of_queries, self.keep(rank.grad_keys_values, await rank.reduce_scatter(of_blocks, axis="cp"))
        mine: list[Value] = []
        parts: list[Value] = []
        for place, block in await self.blocks(l, own_block):
            part, home = rank.attend_backward(l, queries, block, attended, grad)
            parts.append(self.keep(rank.grad_queries, part))
            if place == self.cp_place:
                mine.append(self.keep(rank.grad_keys_values, home))
            else:
                self.loose.append(rank.send(home, to=self.ring[place]))
        for place in range(len(self.ring)):
            if place != self.cp_place and agreed.sees(place, self.cp_place):
                mine.append(self.keep(rank.grad_keys_values, await rank.recv(source=self.ring[place])))
        return self.added(rank.grad_queries, parts), self.added(rank.grad_keys_values, mine)


def attention_program_of(shape: AttentionShape) -> Strategy:
    async def strategy(rank: Rank) -> None:
        await AttentionWriter(rank, shape).run()

    return strategy


def random_attention(seed: int) -> Program:
    """The program of a seed."""
    shape = random_attention_shape(seed)
    return trace(attention_program_of(shape), shape.mesh, Sizes.context_blocks(shape.blocks), shape.microbatches)


# Random programs of expert parallelism that are right by construction: exchanges of any number of microbatches.
#
# All ranks agree on which microbatches go together, and in which order they come; each decides for itself which
# experts it computes again, and which backward passes it does in halves, the second of them much later. With tensor
# parallelism all that is sliced over `tp`, experts too, makes terms, which are reduced before they travel. Ranks of
# `cp` are given the same tokens, which each dispatches to its own part of the experts.


class ExpertWriter:
    """Writes one rank's part."""

    def __init__(self, rank: Rank, seed: int) -> None:
        agreed = Random(seed)
        self.rank, self.random = rank, Random(seed * 1000 + rank.index)
        self.all_forward_first = agreed.random() < 0.5
        self.ep, self.ep_place = rank.mesh.ep, rank.coordinate("ep")
        self.tp = rank.mesh.tp
        self.part = (rank.coordinate("cp"), rank.mesh.cp) if rank.mesh.cp > 1 else None
        columns = rank.mesh.dp_shard
        share = len(rank.microbatches) // (columns * self.ep)
        dealt = agreed.sample(list(rank.microbatches), share * columns * self.ep)
        size = agreed.choice([size for size in range(1, share + 1) if share % size == 0])
        rounds = [dealt[i : i + size * columns * self.ep] for i in range(0, len(dealt), size * columns * self.ep)]
        place = rank.coordinate("dp_shard")
        of_groups = [sorted(each_round[place::columns]) for each_round in rounds]  # an ep group's, dealt in order
        self.units = [group[self.ep_place * size : (self.ep_place + 1) * size] for group in of_groups]
        self.gradients: dict[int, list[Value]] = {l: [] for l in rank.layers}
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
            passes = [await self.forward(unit) for unit in self.units]
            for inputs, logits in passes:
                await self.backward(inputs, logits)
        else:
            for unit in self.units:
                await self.backward(*await self.forward(unit))
        for l, x, gradient in self.random.sample(self.late, len(self.late)):
            self.gradients[l].append(self.keep(rank.grad_weights, rank.backward_weight(l, x, gradient)))
        for l in (l for l in rank.layers if l not in bare):
            parts = self.gradients[l]
            while len(parts) > 1:
                one, other = (parts.pop(self.random.randrange(len(parts))) for _ in range(2))
                parts.append(self.keep(rank.grad_weights, one + other))
            total, signature = parts[0], rank.sizes.signatures[l]
            axes = ["dp_shard"] if "expert" in signature.cut else ["ep", "dp_shard"]
            for axis in ["cp", *axes] if signature.deals and self.part else axes:
                total = await rank.all_reduce(total, axis=axis)
            rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

    def axes_of(self, layer: int) -> list[str]:
        """Axes that cut a layer, outermost first."""
        cut = self.rank.sizes.signatures[layer].cut
        return [axis for index in cut for axis in (["cp", "ep"] if index == "expert" else ["tp"])]

    async def forward(self, unit: list[int]) -> tuple[list[Value], Value]:
        """The layers' inputs, and the logits."""
        rank, carried = self.rank, dict[Kind, Value]()
        x, inputs = rank.load_batch(unit), list[Value]()
        for l, signature in enumerate(rank.sizes.signatures):
            if "expert" in signature.cut:
                x = await rank.all_to_all(x, axis="ep")
            inputs.append(self.keep(rank.activations, x))
            if signature.recomputed:
                x = rank.forward(l, inputs[l], rank.weights[l], save=self.random.random() < 0.6)
            else:
                arguments = (x, *(carried.pop(port.kind) for port in signature.inputs[1:]))
                x, *outputs = rank.forward(l, arguments, rank.weights[l], part=self.part if signature.deals else None)
                for port, value in zip(signature.outputs[1:], outputs, strict=True):
                    carried[port.kind] = self.keep(rank.store(port.kind), value)
            x = await self.completed(x, l, forward=True)
            if "expert" in signature.cut:
                x = await rank.all_to_all(x, axis="ep")
            x = self.keep(rank.activations, x)
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
        rank, carried = self.rank, dict[Kind, Value]()
        stats = await rank.all_gather(rank.loss_stats(logits), axis="tp") if self.tp > 1 else None
        gradient = rank.loss(logits, stats)
        for l, signature in reversed(list(enumerate(rank.sizes.signatures))):
            x, weight = inputs[l], rank.weights[l]
            if "expert" in signature.cut:
                gradient = await rank.all_to_all(gradient, axis="ep")
            grad_output = self.keep(rank.grad_activations, gradient)
            gradients = (grad_output, *(carried.pop(port.kind) for port in signature.outputs[1:]))
            if self.random.random() < 0.4 and rank.sizes.weights[l]:
                gradient, *outputs = rank.backward_input(l, x, gradients, weight)
                self.late.append((l, x, grad_output))
            else:
                grad, gradient, *outputs = rank.backward(l, x, gradients, weight)
                self.gradients[l].append(self.keep(rank.grad_weights, grad))
            for port, value in zip(signature.inputs[1:], outputs, strict=True):
                carried[port.kind] = self.keep(rank.store(GRADIENT_OF[port.kind]), value)
            gradient = await self.completed(gradient, l, forward=False)
            if "expert" in signature.cut:
                gradient = await rank.all_to_all(gradient, axis="ep")

    def keep(self, store: Store, value: Value) -> Value:
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
    blocks, share = random.choice([1, 1, 2]), random.randint(1, 4)
    sizes = Sizes.mixture(blocks)
    if random.random() < 0.4:
        cp, tp = random.choice([(1, 2), (2, 1), (2, 2)]) if mesh.world == 2 else (1, 2)
        mesh, sizes = replace(mesh, tp=tp, cp=cp), routed(blocks + 1)
    return trace(expert_program_of(seed), mesh, sizes, mesh.dp_shard * ep * share)
