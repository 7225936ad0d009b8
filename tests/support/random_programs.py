"""Random programs that are right by construction: data parallel, sharded and pipelined in one, with free choices.

What all ranks must agree on (the split of layers and microbatches, the schedule, the order of collectives) is drawn
from one seed; what each may do as it likes (when to await, which keys to use, what to store, free or recompute)
from a seed of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from shardlab.program import Handle, Mesh, Program, Rank, Strategy, Value, trace


@dataclass(frozen=True)
class Shape:
    """How large a random program is; `seed` decides everything else."""

    pp: int
    dp_replicate: int
    dp_shard: int
    layers: int
    microbatches: int
    seed: int

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """1-4 ranks, 1-4 layers, 1-6 microbatches; at least a layer a stage and a microbatch a data-parallel rank."""
    pp, replicate, shard = draw(
        st.sampled_from([(p, r, s) for p in range(1, 5) for r in range(1, 5) for s in range(1, 5) if p * r * s <= 4])
    )
    layers = draw(st.integers(pp, 4))
    microbatches = draw(st.integers(replicate * shard, 6))
    return Shape(pp, replicate, shard, layers, microbatches, draw(st.integers(0, 10**6)))


class Plan:
    """What all ranks agree on."""

    def __init__(self, shape: Shape) -> None:
        random = Random(shape.seed)
        columns = shape.dp_replicate * shape.dp_shard
        cuts = sorted(random.sample(range(1, shape.layers), shape.pp - 1))
        bounds = [0, *cuts, shape.layers]
        self.stages = [range(a, b) for a, b in itertools.pairwise(bounds)]
        self.units = random.randint(1, shape.microbatches // columns)
        order = random.sample(range(shape.microbatches), shape.microbatches)
        cuts = sorted(random.sample(range(1, shape.microbatches), columns * self.units - 1))
        parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, shape.microbatches], strict=True)]
        self.batches = [parts[c * self.units : (c + 1) * self.units] for c in range(columns)]
        self.forwards = random.sample(range(self.units), self.units)
        self.backwards = self.forwards
        self.warmups = sorted((random.randint(1, self.units) for _ in range(shape.pp)), reverse=True)
        if shape.pp == 1 and random.random() < 0.5:
            self.backwards, self.warmups = random.sample(range(self.units), self.units), [self.units]
        axes: list[str | None] = ["dp_shard", "dp_replicate"] + ([None] if shape.pp == 1 else [])
        self.sharded = [random.choice([True, True, False]) for _ in range(shape.layers)]
        self.axis = [random.choice(axes) for _ in range(shape.layers)]
        """The axis over which a layer is sharded; its gradient is reduced over this one, then over the rest."""
        self.gather_once = [random.random() < 0.3 for _ in range(shape.layers)]
        self.reduce_each_unit = [random.random() < 0.4 for _ in range(shape.layers)]
        self.scatter = [random.random() < 0.7 for _ in range(shape.layers)]
        self.idle_gather = [random.random() < 0.2 for _ in range(shape.layers)]
        self.checkpoint = random.random() < 0.3
        self.update_order = random.sample(range(shape.layers), shape.layers)


class Writer:
    """Writes one rank's part, taking its own choices at random."""

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
        self.loose: list[Handle[None]] = []
        self.asked: dict[str, list[Handle[Value]]] = {"activations": [], "grad_activations": []}
        self.taken = 0

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    async def settle_some(self) -> None:
        """Await some of the sends under way, in any order."""
        while self.loose and self.maybe():
            await self.loose.pop(self.random.randrange(len(self.loose)))

    def new_key(self) -> tuple[str, int]:
        self.taken += 1
        return "key", self.taken

    async def run(self) -> None:
        rank, plan = self.rank, self.plan
        for l in self.random.sample(self.stage, len(self.stage)):
            shard, of = 0, 1
            if plan.sharded[l]:
                group = rank.group(plan.axis[l]).ranks
                shard, of = group.index(rank.index), len(group)
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=shard, of=of)
            if self.maybe(0.2):
                rank.weights[l, "second key"] = rank.weights[l]
        for l in self.stage:
            if plan.sharded[l] and plan.gather_once[l]:
                self.full[l] = rank.all_gather(rank.weights[l], axis=plan.axis[l])
        for action, unit in schedule(plan, self.position):
            await (self.forward(unit) if action == "F" else self.backward(unit))
            await self.settle_some()
        for l in self.stage:
            if not plan.reduce_each_unit[l]:
                total = await self.summed(l)
                self.grads[l] = [await self.reduce(l, total)]
        for l in plan.update_order:
            if l in self.stage:
                await self.update(l)

    # Weights.

    async def weight(self, l: int) -> Value:
        rank, plan = self.rank, self.plan
        if not plan.sharded[l]:
            return rank.weights[l]
        if not plan.gather_once[l]:
            return await rank.all_gather(rank.weights[l], axis=plan.axis[l])
        full = await self.full[l]
        if full.keys == 0:
            rank.weights[l, "full"] = full
        return full

    # Passes.

    async def forward(self, unit: int) -> None:
        rank, first, after = self.rank, self.stage[0], self.stage[-1] + 1
        if self.is_first:
            value = rank.load_batch(self.batches[unit])
        else:
            value = await self.received("activations", unit)
        save = not self.plan.checkpoint and self.maybe(0.8)
        rank.activations[first, unit] = value
        for l in self.stage:
            weight = await self.weight(l)
            value = rank.forward(l, value, weight, save=save)
            if l == after - 1 or not self.plan.checkpoint:  # else it lives until the next forward has used it
                rank.activations[l + 1, unit] = value
        if not self.is_last:
            self.send(rank.activations.pop((after, unit)), "grad_activations")

    def send(self, value: Value, back: str) -> None:
        """To the neighbour from which the kind `back` comes, perhaps crossing with the next one of that kind."""
        rank = self.rank
        if self.maybe(0.3):
            stores = {"activations": rank.activations, "grad_activations": rank.grad_activations}
            stores[value.spec.kind.value][self.new_key()] = value  # kept until the step's end
        to = self.neighbour(back)
        if self.maybe(0.4) and len(self.asked[back]) < self.plan.units:
            handle = rank.exchange(value, to=to, source=to, expect=self.expected(back))
            self.asked[back].append(handle)
        else:
            self.loose.append(rank.send(value, to=to))

    def neighbour(self, kind: str) -> int:
        return self.column[self.position + (1 if kind == "grad_activations" else -1)]

    def expected(self, kind: str) -> tuple[str, int, list[int]] | None:
        """The next message of a kind."""
        layer = self.stage[0] if kind == "activations" else self.stage[-1] + 1
        order = self.plan.forwards if kind == "activations" else self.plan.backwards
        return (kind, layer, self.batches[order[len(self.asked[kind])]]) if self.maybe(0.8) else None

    async def received(self, kind: str, unit: int) -> Value:
        """A unit's message; receives are issued in the order of the units, and may be issued early."""
        order = self.plan.forwards if kind == "activations" else self.plan.backwards
        asked = self.asked[kind]
        while len(asked) <= order.index(unit) or (len(asked) < len(order) and self.maybe(0.2)):
            asked.append(self.rank.recv(source=self.neighbour(kind), expect=self.expected(kind)))
        return await asked[order.index(unit)]

    async def backward(self, unit: int) -> None:
        rank, first, after = self.rank, self.stage[0], self.stage[-1] + 1
        if self.is_last:
            gradient = rank.loss(rank.activations.pop((after, unit)))
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
            grad_weight, gradient = rank.backward(l, rank.activations.pop((l, unit)), gradient, weight)
            if self.plan.reduce_each_unit[l]:
                self.grads[l].append(await self.reduce(l, grad_weight))
            else:
                rank.grad_weights[self.new_key()] = grad_weight
                self.grads[l].append(grad_weight)
        if not self.is_first:
            self.send(gradient, "activations")

    # Gradients.

    async def reduce(self, l: int, value: Value) -> Value | Handle[Value]:
        """Over the axis that shards the layer, then over the other one; the last is left in flight."""
        rank, axis = self.rank, self.plan.axis[l]
        reduce = rank.reduce_scatter if self.plan.sharded[l] and self.plan.scatter[l] else rank.all_reduce
        handle = reduce(value, axis=axis)
        if axis is None:
            return handle
        other = "dp_replicate" if axis == "dp_shard" else "dp_shard"
        return rank.all_reduce(await handle, axis=other)

    async def summed(self, l: int) -> Value:
        """All that came, added in any order."""
        parts: list[Value] = []
        for part in self.grads[l]:
            value = part if isinstance(part, Value) else await part
            if value.keys == 0:
                self.rank.grad_weights[self.new_key()] = value
            parts.append(value)
        while len(parts) > 1:
            a = parts.pop(self.random.randrange(len(parts)))
            b = parts.pop(self.random.randrange(len(parts)))
            parts.append(a + b)
            self.rank.grad_weights[self.new_key()] = parts[-1]
        return parts[0]

    async def update(self, l: int) -> None:
        rank = self.rank
        total = await self.summed(l)
        if self.plan.idle_gather[l]:
            rank.all_gather(rank.opt_states[l], axis="tp")  # never awaited, and the update must not pass it
            if self.plan.sharded[l]:
                rank.all_gather(rank.weights[l], axis=self.plan.axis[l])
        weight = rank.weights.pop(l) if self.maybe() else rank.weights[l]
        made = rank.update(l, total, weight, rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = made


def schedule(plan: Plan, position: int) -> Iterator[tuple[str, int]]:
    """Some forwards ahead, then in turns: never fewer ahead than the next stage, so nobody starves."""
    ahead = plan.warmups[position]
    for i in range(plan.units + ahead):
        if i < plan.units:
            yield "F", plan.forwards[i]
        if i >= ahead - 1 and i - ahead + 1 < plan.units:
            yield "B", plan.backwards[i - ahead + 1]


def program_of(shape: Shape) -> Strategy:
    """The random strategy of a shape."""
    plan = Plan(shape)

    async def strategy(rank: Rank) -> None:
        await Writer(rank, shape, plan).run()

    return strategy


def random_program(shape: Shape) -> Program:
    return trace(program_of(shape), shape.mesh, shape.layers, shape.microbatches)
