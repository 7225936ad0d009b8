"""The one program that follows any plan: a schedule says in which order, this says what each step does."""

from __future__ import annotations

from collections import Counter

from shardlab.program import Handle, Rank, Strategy, UserError, Value
from shardlab.strategies.gathering import Weights
from shardlab.strategies.plan import Plan
from shardlab.strategies.reducing import Gradients
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.messages import Recv, Send
from shardlab.strategies.schedules.sharding import ReduceGrad, Reshard, Unshard


def planned(plan: Plan) -> Strategy:
    """The strategy that follows a plan, on the plan's mesh."""

    async def strategy(rank: Rank) -> None:
        await Follower(rank, plan).run()

    return strategy


class Follower:
    """One rank that follows a plan."""

    def __init__(self, rank: Rank, plan: Plan) -> None:
        if rank.mesh != plan.mesh:
            raise UserError(f"the plan is for the mesh {plan.mesh}, but the ranks stand on {rank.mesh}")
        layers, here = len(rank.layers), rank.coordinate("pp")
        steps = plan.steps(layers, len(rank.microbatches))
        first = steps.microbatches * (
            rank.coordinate("dp_replicate") * plan.mesh.dp_shard + rank.coordinate("dp_shard")
        )
        self.rank = rank
        self.plan = plan
        self.microbatches = range(first, first + steps.microbatches)
        self.column = rank.group("pp").ranks
        self.bounds = plan.bounds(layers)
        stages = [stage for stage, place in enumerate(steps.ranks_of_stages) if place == here]
        self.mine = [layer for stage in stages for layer in self.layers(stage)]
        self.steps = steps.of_ranks[here]
        told = any(isinstance(step, ReduceGrad) for step in self.steps)
        self.left = Counter(dict.fromkeys(() if told else stages, steps.microbatches))  # gradients yet to come
        self.weights = Weights(rank, plan, self.steps, self.bounds)
        self.gradients = Gradients(rank, plan)
        self.arriving: dict[tuple[bool, int, int], Handle[Value]] = {}
        self.leaving: dict[int, Handle[None]] = {}

    async def run(self) -> None:
        """Load, follow the schedule, update."""
        self.gradients.load(self.mine)
        for step in self.steps:
            match step:
                case Forward(stage, i):
                    await self.forward(stage, self.microbatches[i])
                case Backward(stage, i):
                    await self.backward(stage, self.microbatches[i])
                case BackwardInput(stage, i):
                    await self.backward_input(stage, self.microbatches[i])
                case BackwardWeight(stage, i):
                    await self.backward_weight(stage, self.microbatches[i])
                case Send():
                    await self.send(step)
                case Recv():
                    self.recv(step)
                case Unshard(stage):
                    self.weights.unshard(self.layers(stage))
                case Reshard(stage):
                    await self.weights.reshard(self.layers(stage))
                case ReduceGrad(stage):
                    for l in reversed(self.layers(stage)):
                        await self.gradients.finish(l)
        await self.gradients.update(self.mine)

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    async def forward(self, stage: int, m: int) -> None:
        rank, layers = self.rank, self.layers(stage)
        if stage == 0:
            rank.activations[0, m] = rank.load_batch([m])
        elif (True, stage, m) in self.arriving:
            rank.activations[layers[0], m] = await self.arriving.pop((True, stage, m))
        save = self.plan.recompute == "none"
        for l in layers:
            weight = await self.weights.next()
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], weight, save=save)

    async def gradient_of_output(self, stage: int, m: int) -> None:
        """What the backward pass of a stage begins with: the loss's gradient, or the next stage's."""
        rank, after = self.rank, self.bounds[stage + 1]
        if after == len(rank.layers):
            rank.grad_activations[after, m] = rank.loss(rank.activations.pop((after, m)))
        elif (False, stage, m) in self.arriving:
            rank.grad_activations[after, m] = await self.arriving.pop((False, stage, m))

    async def backward(self, stage: int, m: int) -> None:
        rank = self.rank
        await self.gradient_of_output(stage, m)
        for l in reversed(self.layers(stage)):
            weight = await self.weights.next()
            grad_weight, rank.grad_activations[l, m] = rank.backward(
                l, rank.activations.pop((l, m)), rank.grad_activations.pop((l + 1, m)), weight
            )
            await self.add(stage, l, grad_weight)
        self.left[stage] -= 1
        self.drop_gradient_of_tokens(stage, m)

    async def backward_input(self, stage: int, m: int) -> None:
        rank = self.rank
        await self.gradient_of_output(stage, m)
        for l in reversed(self.layers(stage)):
            rank.grad_activations[l, m] = rank.backward_input(
                l, rank.activations[l, m], rank.grad_activations[l + 1, m], await self.weights.next()
            )
        self.drop_gradient_of_tokens(stage, m)

    async def backward_weight(self, stage: int, m: int) -> None:
        rank = self.rank
        for l in reversed(self.layers(stage)):
            grad_weight = rank.backward_weight(l, rank.activations.pop((l, m)), rank.grad_activations.pop((l + 1, m)))
            await self.add(stage, l, grad_weight)
        self.left[stage] -= 1

    async def add(self, stage: int, layer: int, gradient: Value) -> None:
        await self.gradients.add(layer, gradient)
        if self.left[stage] == 1:
            await self.gradients.finish(layer)

    def drop_gradient_of_tokens(self, stage: int, m: int) -> None:
        if stage == 0:
            del self.rank.grad_activations[0, m]

    async def send(self, step: Send) -> None:
        """Start to send; the message before it on this channel must have arrived, so that few are held."""
        rank, m = self.rank, self.microbatches[step.microbatch]
        if step.peer in self.leaving:
            await self.leaving.pop(step.peer)
        if step.forward:
            value = rank.activations.pop((self.bounds[step.stage + 1], m))
        else:
            value = rank.grad_activations.pop((self.bounds[step.stage], m))
        self.leaving[step.peer] = rank.send(value, to=self.column[step.peer])

    def recv(self, step: Recv) -> None:
        """Start to receive, as soon as the message is on its way."""
        m = self.microbatches[step.microbatch]
        if step.forward:
            expect = ("activations", self.bounds[step.stage], m)
        else:
            expect = ("grad_activations", self.bounds[step.stage + 1], m)
        handle = self.rank.recv(source=self.column[step.peer], expect=expect)
        self.arriving[step.forward, step.stage, m] = handle
