"""Random programs that are right by construction: data parallel, sharded and pipelined at once, with random choices.

Choices that all ranks must share (the split of layers and microbatches, the schedule, the order of collectives) are
drawn from one seed. Choices of a rank (when to await, which keys to use, what to store, free or recompute, when to run
the backward half for the weight) are drawn from a seed of the rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from shardlab.language import Deadlock, Handle, Mesh, Program, Rank, Strategy, Value, trace
from shardlab.language.rules.kinds import ONE
from tests.support.random_plans import Plan, Shape, random_shape, schedule, shapes
from tests.support.refused_calls import Detour

__all__ = ["Shape", "program_of", "random_program", "random_shape", "shapes"]


class Writer:
    """Writes one rank's part, with random choices."""

    def __init__(self, rank: Rank, shape: Shape, plan: Plan) -> None:
        self.rank = rank
        self.plan = plan
        self.random = Random(shape.seed * 1000 + rank.index)
        self.column = rank.group("pp").ranks
        self.position = rank.coordinate("pp")
        self.stage = plan.stages[self.position]
        self.batches = plan.batches[rank.coordinate("dp_replicate") * shape.dp_shard + rank.coordinate("dp_shard")]
        self.is_first, self.is_last = self.position == 0, self.position == len(self.column) - 1
        self.full: dict[int, Handle[Value]] = {}
        self.grads: dict[int, list[Value | Handle[Value]]] = {l: [] for l in self.stage}
        self.halves: list[tuple[int, int]] = []
        """(layer, unit) of the backward passes whose half for the weight is pending."""
        self.loose: list[Handle[None]] = []
        self.receives: dict[str, list[Handle[Value]]] = {"activations": [], "grad_activations": []}
        self.key_count = 0
        self.calls = Detour(rank, shape.seed, plan.by_root, plan.by_hand)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    async def settle_some(self) -> None:
        """Await some of the sends under way, in any order."""
        while self.loose and self.maybe():
            await self.loose.pop(self.random.randrange(len(self.loose)))

    def new_key(self) -> tuple[str, int]:
        self.key_count += 1
        return "key", self.key_count

    async def run(self) -> None:
        rank, plan = self.rank, self.plan
        for l in self.random.sample(self.stage, len(self.stage)):
            rank.weights[l] = rank.load_weight(l, *self.slice_of(plan.cuts[l].weight))
            rank.opt_states[l] = rank.load_opt_state(l, *self.slice_of(plan.cuts[l].state))
            if self.maybe(0.2):
                rank.weights[l, "second key"] = rank.weights[l]
        for l in self.stage:
            if plan.cuts[l].weight and plan.gather_once[l]:
                self.full[l] = await self.gather(rank.weights[l], plan.cuts[l].weight)
        for action, unit in schedule(plan, self.position):
            await (self.forward(unit) if action == "F" else self.backward(unit))
            await self.settle_some()
            while self.halves and self.maybe(0.3):
                self.backward_weight(*self.halves.pop(self.random.randrange(len(self.halves))))
        for l, unit in self.random.sample(self.halves, len(self.halves)):
            self.backward_weight(l, unit)
        for l in self.stage:
            if not plan.reduce_each_unit[l]:
                if self.maybe(0.1):
                    zero = rank.zero_gradient(l)
                    self.keep_gradient(l, zero if plan.factor is ONE else rank.scale(zero, plan.factor))
                total = await self.summed(l, finished=False)
                self.grads[l] = [await self.reduce(l, total)]
        mine = [l for l in plan.update_order if l in self.stage]
        if plan.clips:
            await self.norm(mine)
        handles = {l: await self.update(l) for l in mine}
        for l, handle in self.random.sample(list(handles.items()), len(mine)):
            if handle is not None:
                rank.weights[l] = await handle

    # Weights.

    def slice_of(self, cut: Sequence[str | None]) -> tuple[int, int]:
        """This rank's slice of a tensor that is cut along some axes, one after the other."""
        shard, of = 0, 1
        for axis in cut:
            group = self.rank.group(axis).ranks
            shard, of = shard * len(group) + group.index(self.rank.index), of * len(group)
        return shard, of

    async def gather(self, value: Value, cut: Sequence[str | None]) -> Handle[Value]:
        """Gather from the finest slices; the last gather stays in flight."""
        for axis in reversed(cut[1:]):
            value = await (await self.calls.all_gather(value, axis))
        return await self.calls.all_gather(value, cut[0])

    async def weight(self, l: int) -> Value:
        rank, plan = self.rank, self.plan
        if not plan.cuts[l].weight:
            return rank.weights[l]
        if not plan.gather_once[l]:
            return await (await self.gather(rank.weights[l], plan.cuts[l].weight))
        full = await self.full[l]
        if full.keys == 0:
            rank.weights[l, "full"] = full
        return full

    # Passes.

    async def forward(self, unit: int) -> None:
        rank, first, end = self.rank, self.stage[0], self.stage[-1] + 1
        if self.is_first:
            value = rank.load_batch(self.batches[unit])
        else:
            value = await self.received("activations", unit)
        save = not self.plan.checkpoint and self.maybe(0.8)
        rank.activations[first, unit] = value
        for l in self.stage:
            weight = await self.weight(l)
            value = rank.forward(l, value, weight, save=save)
            if l == end - 1 or not self.plan.checkpoint:  # else it lives until the next forward has used it
                rank.activations[l + 1, unit] = value
        if not self.is_last:
            self.send(rank.activations.pop((end, unit)), "grad_activations")

    def send(self, value: Value, back: str) -> None:
        """Send to the neighbour that sends values of kind `back`, perhaps in an exchange with the next one of these."""
        rank = self.rank
        if self.maybe(0.3):
            stores = {"activations": rank.activations, "grad_activations": rank.grad_activations}
            stores[value.spec.kind.value][self.new_key()] = value  # kept until the step's end
        to = self.neighbour(back)
        if self.maybe(0.4) and len(self.receives[back]) < self.plan.units:
            handle = rank.exchange(value, to=to, source=to, expect=self.expected(back))
            self.receives[back].append(handle)
        else:
            self.loose.append(rank.send(value, to=to))

    def neighbour(self, kind: str) -> int:
        return self.column[self.position + (1 if kind == "grad_activations" else -1)]

    def expected(self, kind: str) -> tuple[str, int, list[int]] | None:
        """Return the next expected message of a kind."""
        layer = self.stage[0] if kind == "activations" else self.stage[-1] + 1
        order = self.plan.forwards if kind == "activations" else self.plan.backwards
        return (kind, layer, self.batches[order[len(self.receives[kind])]]) if self.maybe(0.8) else None

    async def received(self, kind: str, unit: int) -> Value:
        """Return the message of a unit; receives are issued in the order of the units, and perhaps early."""
        order = self.plan.forwards if kind == "activations" else self.plan.backwards
        receives = self.receives[kind]
        while len(receives) <= order.index(unit) or (len(receives) < len(order) and self.maybe(0.2)):
            receives.append(self.rank.recv(source=self.neighbour(kind), expect=self.expected(kind)))
        return await receives[order.index(unit)]

    async def backward(self, unit: int) -> None:
        rank, first, end = self.rank, self.stage[0], self.stage[-1] + 1
        if self.is_last:
            gradient = rank.loss(rank.activations.pop((end, unit)))
            if self.plan.factor is not ONE:
                gradient = rank.scale(gradient, self.plan.factor)
        else:
            gradient = await self.received("grad_activations", unit)
        if self.plan.checkpoint:
            value = rank.activations[first, unit]
            for l in self.stage[:-1]:
                value = rank.forward(l, value, await self.weight(l))
                rank.activations[l + 1, unit] = value
        for l in reversed(self.stage):
            weight = await self.weight(l)
            if self.maybe():
                rank.grad_activations[unit] = gradient
                gradient = rank.grad_activations.pop(unit)
            if self.maybe(0.4):
                rank.grad_activations["for weight", l, unit] = gradient
                gradient = rank.backward_input(l, rank.activations[l, unit], gradient, weight)
                if not self.plan.reduce_each_unit[l]:
                    self.halves.append((l, unit))
                    continue
                grad_weight = self.weight_half(l, unit)
            else:
                grad_weight, gradient = rank.backward(l, rank.activations.pop((l, unit)), gradient, weight)
            if self.plan.reduce_each_unit[l]:
                self.grads[l].append(await self.reduce(l, grad_weight))
            else:
                self.keep_gradient(l, grad_weight)
        if not self.is_first:
            self.send(gradient, "activations")

    def weight_half(self, l: int, unit: int) -> Value:
        rank = self.rank
        return rank.backward_weight(
            l, rank.activations.pop((l, unit)), rank.grad_activations.pop(("for weight", l, unit))
        )

    def backward_weight(self, l: int, unit: int) -> None:
        self.keep_gradient(l, self.weight_half(l, unit))

    def keep_gradient(self, l: int, gradient: Value) -> None:
        self.rank.grad_weights[self.new_key()] = gradient
        self.grads[l].append(gradient)

    # Gradients.

    async def reduce(self, l: int, value: Value) -> Value | Handle[Value]:
        """Reduce over the layer's axes in turn, scattering where they cut its gradient; the last stays in flight."""
        cut = self.plan.cuts[l]
        *steps, last = [
            (self.calls.reduce_scatter if place < len(cut.gradient) else self.calls.all_reduce, axis)
            for place, axis in enumerate(cut.axes)
        ]
        for verb, axis in steps:
            value = await (await verb(value, axis))
        verb, axis = last
        return await verb(value, axis)

    async def summed(self, l: int, *, finished: bool = True) -> Value:
        """Add all received gradients in any order, and scale the sum back if it is `finished`."""
        parts: list[Value] = []
        for part in self.grads[l]:
            value = part if isinstance(part, Value) else await part
            factor = value.spec.form.factor
            if finished and factor is not ONE:
                value = self.rank.scale(value, 1 / factor)
            if value.keys == 0:
                self.rank.grad_weights[self.new_key()] = value
            parts.append(value)
        while len(parts) > 1:
            a = parts.pop(self.random.randrange(len(parts)))
            b = parts.pop(self.random.randrange(len(parts)))
            parts.append(a + b)
            self.rank.grad_weights[self.new_key()] = parts[-1]
        return parts[0]

    async def norm(self, layers: list[int]) -> None:
        """The squared norm of the whole model's gradient, in the key 0: each layer's slices, then the stages' sums."""
        rank, plan = self.rank, self.plan
        for l in layers:
            total = await self.summed(l)
            self.grads[l] = [total]
            part = rank.norm(l, total)
            for axis in plan.cuts[l].gradient:
                part = await (await self.calls.all_reduce(part, axis))
            rank.scalars[0] = rank.scalars[0] + part if l != layers[0] else part
        if not plan.norm_by_messages:
            rank.scalars[0] = await (await self.calls.all_reduce(rank.scalars[0], "pp"))
            return
        if not self.is_last:
            rank.scalars[0] = rank.scalars[0] + await rank.recv(source=self.column[self.position + 1])
        if not self.is_first:
            previous = self.column[self.position - 1]
            await rank.send(rank.scalars.pop(0), to=previous)
            rank.scalars[0] = await rank.recv(source=previous, expect=("scalars", 0, None))
        if not self.is_last:
            self.loose.append(rank.send(rank.scalars[0], to=self.column[self.position + 1]))

    async def update(self, l: int) -> Handle[Value] | None:
        """Update the layer; return the gather of its new weight if the state's slice is smaller than the weight's."""
        rank, cut = self.rank, self.plan.cuts[l]
        total = await self.summed(l)
        if self.plan.idle_gather[l]:
            if not cut.weight:  # replicas: their mean is what each has; never awaited, never used
                await self.calls.weight(rank.weights[l], cut.axes[0])
            rank.all_gather(rank.opt_states[l], axis="tp")  # never awaited, and the update must not pass it
            if cut.weight:
                rank.all_gather(rank.weights[l], axis=cut.weight[-1])
        weight = rank.weights.pop(l) if self.maybe() else rank.weights[l]
        norm = (rank.scalars[0],) if self.plan.clips else ()
        if self.plan.chunks[l] == 1 or self.plan.idle_gather[l]:  # what is in flight is not written through a slice
            new, rank.opt_states[l] = rank.update(l, total, weight, rank.opt_states[l], *norm)
        else:
            new, rank.opt_states[l] = self.update_in_chunks(l, total, weight, *norm)
        finer = cut.state[len(cut.weight) :]
        if finer:
            return await self.gather(new, finer)
        rank.weights[l] = new
        return None

    def update_in_chunks(self, l: int, total: Value, weight: Value, *norm: Value) -> tuple[Value, Value]:
        """Update slice after slice, in any order; the update reads the whole gradient and weight, or their slices."""
        rank, chunks, states = self.rank, self.plan.chunks[l], self.rank.opt_states
        old, state, whole = rank.weights, states[l], total.spec.holds
        old["old", l], rank.grad_weights["old", l] = weight, total
        for i in self.random.sample(range(chunks), chunks):
            mine = rank.slice(state, i, chunks)
            same_slices = weight.spec.holds == state.spec.holds
            part = rank.slice(weight, i, chunks) if same_slices and self.maybe() else rank.slice(weight, 0, 1)
            gradient = rank.slice(total, i, chunks) if whole == state.spec.holds and self.maybe() else total
            rank.weights["new", l, i], states["new", l, i] = rank.update(l, gradient, part, mine, *norm)
        del old["old", l], rank.grad_weights["old", l]
        new = rank.concatenate([old.pop(("new", l, i)) for i in range(chunks)])
        return new, rank.concatenate([states.pop(("new", l, i)) for i in range(chunks)])


def program_of(shape: Shape) -> Strategy:
    """The random strategy of a shape."""
    plan = Plan(shape)

    async def strategy(rank: Rank) -> None:
        await Writer(rank, shape, plan).run()

    return strategy


def random_program(shape: Shape) -> Program:
    return trace(program_of(shape), shape.mesh, shape.layers, shape.microbatches)


# Random programs that mostly talk: messages, exchanges and collectives of any ranks, in orders that often cross.


Call = Callable[[Rank], Handle[object]]


def send(to: int) -> Call:
    return lambda rank: rank.send(rank.weights[0], to=to)


def recv(source: int) -> Call:
    return lambda rank: rank.recv(source=source)


def exchange(to: int, source: int) -> Call:
    return lambda rank: rank.exchange(rank.weights[0], to=to, source=source)


def batch(others: list[int]) -> Call:
    """Exchange messages with some ranks in one batch; return the handle of the last one."""

    def call(rank: Rank) -> Handle[object]:
        last: Handle[object] | None = None
        with rank.batch_p2p():
            for other in others:
                rank.send(rank.weights[0], to=other)
                last = rank.recv(source=other)
        assert last is not None
        return last

    return call


def mean(members: list[int]) -> Call:
    return lambda rank: rank.all_reduce(rank.weights[0], reduction="mean", among=members)


def chatter(seed: int) -> Program | None:
    """Data parallelism of one layer on 2-4 ranks that first communicate; None if it hangs even with buffered sends.

    Calls are drawn in one order for all ranks. Then each rank issues some of its calls later or earlier, and awaits
    each one at once or later.
    """
    random = Random(seed)
    ranks = random.randint(2, 4)
    calls: list[list[Call]] = [[] for _ in range(ranks)]
    for _ in range(random.randint(1, 8)):
        for rank, some in draw_communication(random, ranks):
            calls[rank] += some
    for mine in calls:
        for at in range(len(mine) - 1):
            if random.random() < 0.15:
                mine[at], mine[at + 1] = mine[at + 1], mine[at]
    patience = random.choice([0.2, 0.5, 0.8])

    async def program(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([rank.index])
        rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
        grad_weight, _ = rank.backward(0, rank.activations[0], rank.loss(rank.activations[1]), rank.weights[0])
        rank.grad_weights[0] = grad_weight
        choice = Random(seed * 100 + rank.index)
        loose: list[Handle[Any]] = []
        for call in calls[rank.index]:
            loose.append(call(rank))
            while loose and choice.random() > patience:
                await loose.pop(choice.randrange(len(loose)))
        for handle in loose:
            await handle
        total = await rank.all_reduce(rank.grad_weights.pop(0))
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])

    try:
        return trace(program, ranks, 1, ranks)
    except Deadlock:
        return None


def draw_communication(random: Random, ranks: int) -> list[tuple[int, list[Call]]]:
    """Draw a communication of some ranks: a message, two opposite messages, a ring of exchanges or a collective."""
    a, b = random.sample(range(ranks), 2)
    kind = random.choice(["message", "message", "message", "crossing", "ring", "collective", "all pairs"])
    if kind == "message":
        return [(a, [send(b)]), (b, [recv(a)])]
    if kind == "crossing":
        apart = random.random() < 0.3
        return [(a, [exchange(b, b)]), (b, [send(a), recv(a)] if apart else [exchange(a, a)])]
    members = sorted(random.sample(range(ranks), random.randint(2, ranks)))
    if kind == "collective":
        return [(rank, [mean(members)]) for rank in members]
    if kind == "all pairs":
        return [(rank, [batch([other for other in members if other != rank])]) for rank in members]
    ring = [(members[i - 1], members[i], members[(i + 1) % len(members)]) for i in range(len(members))]
    return [(member, [exchange(following, previous)]) for previous, member, following in ring]


# What the ranks of a random attention program agree on: who has which slices, what goes together, what is gathered.


@dataclass(frozen=True)
class AttentionShape:
    """How large a program is; `seed` decides everything else."""

    cp: int
    dp_shard: int
    blocks: int
    microbatches: int
    seed: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(cp=self.cp, dp_shard=self.dp_shard)


def random_attention_shape(seed: int) -> AttentionShape:
    """2-4 ranks of sequences, 1-2 replicas, 1-2 blocks, 1-3 microbatches each."""
    random = Random(seed)
    cp = random.choice([2, 2, 3, 4])
    replicas = random.choice([1, 2]) if cp == 2 else 1
    return AttentionShape(cp, replicas, random.choice([1, 1, 2]), replicas * random.randint(1, 3), seed)


class Agreed:
    """Choices that all ranks share: owners of slices, groups of microbatches, and gathers."""

    def __init__(self, shape: AttentionShape) -> None:
        random, count = Random(shape.seed), 2 * shape.cp
        self.dealt = [sorted((place, count - 1 - place)) for place in range(shape.cp)]
        if random.random() < 0.6:
            order, cuts = random.sample(range(count), count), sorted(random.sample(range(1, count), shape.cp - 1))
            self.dealt = [order[a:b] for a, b in itertools.pairwise([0, *cuts, count])]
        self.is_balanced = all(sorted(mine) == [i, count - 1 - i] for i, mine in enumerate(self.dealt))
        share = shape.microbatches // shape.dp_shard
        microbatches = random.sample(range(shape.microbatches), shape.microbatches)
        size = random.choice([size for size in range(1, share + 1) if share % size == 0])
        units = [microbatches[i : i + size] for i in range(0, shape.microbatches, size)]
        self.units = [units[i :: shape.dp_shard] for i in range(shape.dp_shard)]
        self.gathers = [random.random() < 0.3 for _ in range(2 + 3 * shape.blocks + 1)]
        self.gathers_back = [gathers and self.is_balanced and random.random() < 0.7 for gathers in self.gathers]
        self.reduces = random.sample(["cp", "dp_shard"], 2)
        is_even = len({len(mine) for mine in self.dealt}) == 1
        self.exchanges = [is_even and random.random() < 0.4 for _ in self.gathers]
        """Layers whose queries, keys and values are exchanged from slices of sequences to heads."""

    def sees(self, one: int, other: int) -> bool:
        """Whether queries of one rank see keys of another."""
        return min(self.dealt[other]) <= max(self.dealt[one])
