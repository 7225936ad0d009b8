"""Random programs that are right by construction: data parallel, sharded and pipelined in one, with free choices.

What all ranks must agree on (the split of layers and microbatches, the schedule, the order of collectives) is drawn
from one seed; what each may do as it likes (when to await, which keys to use, what to store, free or recompute, when to
do the weight's half of a backward pass) from a seed of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from shardlab.language import Handle, Program, Rank, Strategy, Value, trace
from shardlab.language.rules.kinds import ONE
from tests.support.random_plan import Plan, Shape, random_shape, schedule, shapes
from tests.support.rooted_calls import Detour

__all__ = ["Shape", "program_of", "random_program", "random_shape", "shapes"]


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
        self.halves: list[tuple[int, int]] = []
        """(layer, unit) of the backward passes whose weight's half is still to be done."""
        self.loose: list[Handle[None]] = []
        self.asked: dict[str, list[Handle[Value]]] = {"activations": [], "grad_activations": []}
        self.taken = 0
        self.calls = Detour(rank, shape.seed, plan.by_root, plan.by_hand)

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
        """This rank's slice of what is cut along some axes, one after the other."""
        shard, of = 0, 1
        for axis in cut:
            group = self.rank.group(axis).ranks
            shard, of = shard * len(group) + group.index(self.rank.index), of * len(group)
        return shard, of

    async def gather(self, value: Value, cut: Sequence[str | None]) -> Handle[Value]:
        """Back from the finest slices; the last gather is left in flight."""
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
        """Over the layer's axes in turn, scattered along those that cut its gradient; the last is left in flight."""
        cut = self.plan.cuts[l]
        *before, last = [
            (self.calls.reduce_scatter if place < len(cut.gradient) else self.calls.all_reduce, axis)
            for place, axis in enumerate(cut.axes)
        ]
        for verb, axis in before:
            value = await (await verb(value, axis))
        verb, axis = last
        return await verb(value, axis)

    async def summed(self, l: int, *, finished: bool = True) -> Value:
        """All that came, scaled back if it is `finished`, added in any order."""
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
            before = self.column[self.position - 1]
            await rank.send(rank.scalars.pop(0), to=before)
            rank.scalars[0] = await rank.recv(source=before, expect=("scalars", 0, None))
        if not self.is_last:
            self.loose.append(rank.send(rank.scalars[0], to=self.column[self.position + 1]))

    async def update(self, l: int) -> Handle[Value] | None:
        """The layer's update; gives the gather of its new weight, if the state's slice is smaller than the weight's."""
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
        """Slice after slice, in any order; the gradient and the weight may be given whole, or their slices."""
        rank, chunks, states = self.rank, self.plan.chunks[l], self.rank.opt_states
        old, state, whole = rank.weights, states[l], total.spec.holds
        old["old", l], rank.grad_weights["old", l] = weight, total
        for i in self.random.sample(range(chunks), chunks):
            mine = rank.slice(state, i, chunks)
            same = weight.spec.holds == state.spec.holds
            part = rank.slice(weight, i, chunks) if same and self.maybe() else rank.slice(weight, 0, 1)
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
