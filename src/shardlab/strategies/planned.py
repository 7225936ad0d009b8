"""The one program that follows any plan: a schedule gives the order, and this file says what each step does."""

from __future__ import annotations

from collections import Counter

from shardlab.program import Handle, Kind, Rank, Strategy, UserError, Value
from shardlab.rules.layer import GRADIENT_OF
from shardlab.strategies.computing import LayerRunner
from shardlab.strategies.gathering import ParameterGatherer
from shardlab.strategies.plan import Plan
from shardlab.strategies.rank_plan import RankPlan
from shardlab.strategies.reducing import GradientReducer
from shardlab.strategies.resolve import resolve
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.messages import Recv, Send
from shardlab.strategies.schedules.sharding import ReduceGrad, Reshard, Unshard


def planned(plan: Plan) -> Strategy:
    """The strategy that follows a plan, on the plan's mesh."""

    async def strategy(rank: Rank) -> None:
        if rank.mesh != plan.mesh:
            raise UserError(f"the plan is for the mesh {plan.mesh}, but the ranks stand on {rank.mesh}")
        await PlanRunner(rank, resolve(plan, rank.sizes, len(rank.microbatches), rank.index)).run()

    return strategy


class PlanRunner:
    """A rank that follows a plan made out for it."""

    def __init__(self, rank: Rank, rank_plan: RankPlan) -> None:
        self.rank = rank
        self.plan = rank_plan
        self.layers = LayerRunner(rank, rank_plan)
        self.weights = ParameterGatherer(rank, rank_plan)
        self.gradients = GradientReducer(rank, rank_plan)
        reduced_by_itself = () if rank_plan.explicit_reductions else rank_plan.own_stages
        self.left = Counter(dict.fromkeys(reduced_by_itself, len(rank_plan.microbatches)))  # gradients yet to come
        self.arriving: dict[tuple[Kind, int, int], Handle[Value]] = {}
        self.leaving: dict[int, list[Handle[None]]] = {}

    async def run(self) -> None:
        """Load, follow the schedule, update."""
        self.gradients.load()
        microbatches, stages = self.plan.microbatches, self.plan.stages
        for step in self.plan.steps:
            match step:
                case Forward(stage, i):
                    await self.forward(stage, microbatches[i])
                case Backward(stage, i):
                    await self.backward(stage, microbatches[i])
                case BackwardInput(stage, i):
                    await self.backward_input(stage, microbatches[i])
                case BackwardWeight(stage, i):
                    await self.backward_weight(stage, microbatches[i])
                case Send():
                    await self.send(step)
                case Recv():
                    self.recv(step)
                case Unshard(stage):
                    self.weights.unshard(stages[stage])
                case Reshard(stage):
                    await self.weights.reshard(stages[stage])
                case ReduceGrad(stage):
                    for l in reversed(stages[stage]):
                        await self.gradients.finish(l)
        await self.gradients.update()

    async def forward(self, stage: int, m: int) -> None:
        rank, layers = self.rank, self.plan.stages[stage]
        if stage == 0:
            rank.activations[0, m] = rank.load_batch([m], self.plan.sequence_slices)
        for kind in self.carried(layers[0], forward=True):
            await self.arrive(kind, layers[0], m)
        for l in layers:
            await self.layers.forward(l, m, await self.weights.next(l), self.plan.layers[l].keeps)

    async def recompute(self, layer: int, m: int) -> None:
        """Run the layers forward again that must be before a layer's backward pass; now they keep all."""
        run = self.plan.layers[layer].recompute
        for l in run:
            await self.layers.forward(l, m, await self.weights.next(l), "all", hands_on=l != layer)
        for l in run:
            for port in self.plan.model.layers[l].outputs:
                if l < layer < port.layer:  # was handed on before
                    del self.rank.store(port.kind)[port.layer, m]

    async def backward(self, stage: int, m: int) -> None:
        await self.gradient_of_output(stage, m)
        for l in reversed(self.plan.stages[stage]):
            await self.recompute(l, m)
            await self.add(stage, l, await self.layers.backward(l, m, await self.weights.next(l)))
        self.left[stage] -= 1
        if stage == 0:
            del self.rank.grad_activations[0, m]  # of the tokens

    async def backward_input(self, stage: int, m: int) -> None:
        await self.gradient_of_output(stage, m)
        for l in reversed(self.plan.stages[stage]):
            await self.recompute(l, m)
            await self.layers.backward_input(l, m, await self.weights.next(l))
        if stage == 0:
            del self.rank.grad_activations[0, m]  # of the tokens

    async def backward_weight(self, stage: int, m: int) -> None:
        for l in reversed(self.plan.stages[stage]):
            await self.add(stage, l, self.layers.backward_weight(l, m))
        self.left[stage] -= 1

    async def gradient_of_output(self, stage: int, m: int) -> None:
        """Get the gradient with which a stage's backward pass begins: the loss's, or the next stage's."""
        after = self.plan.stages[stage].stop
        if after == len(self.rank.layers):
            await self.layers.loss(m)
        else:
            for kind in self.carried(after, forward=False):
                await self.arrive(kind, after, m)

    async def add(self, stage: int, layer: int, gradient: Value) -> None:
        await self.gradients.add(layer, gradient)
        if self.left[stage] == 1:
            await self.gradients.finish(layer)

    def carried(self, layer: int, *, forward: bool) -> list[Kind]:
        """The kinds of value that travel between the stages that meet before a layer."""
        kinds = [port.kind for port in self.plan.model.layers[layer].inputs]
        return kinds if forward else [GRADIENT_OF[kind] for kind in kinds]

    async def arrive(self, kind: Kind, layer: int, m: int) -> None:
        """Wait for a value, unless this rank has made it itself."""
        if (kind, layer, m) in self.arriving:
            self.rank.store(kind)[layer, m] = await self.arriving.pop((kind, layer, m))

    async def send(self, step: Send) -> None:
        """Start to send; what was sent before on this channel must have arrived, so that little is held."""
        for handle in self.leaving.pop(step.peer, []):
            await handle
        rank, m, layer = self.rank, self.plan.microbatches[step.microbatch], self.border(step.stage, up=step.forward)
        values = [rank.store(kind).pop((layer, m)) for kind in self.carried(layer, forward=step.forward)]
        self.leaving[step.peer] = [rank.send(value, to=self.plan.pipeline[step.peer]) for value in values]

    def recv(self, step: Recv) -> None:
        """Start to receive, as soon as the message is on its way."""
        m, layer = self.plan.microbatches[step.microbatch], self.border(step.stage, up=not step.forward)
        for kind in self.carried(layer, forward=step.forward):
            handle = self.rank.recv(source=self.plan.pipeline[step.peer], expect=(kind.value, layer, m))
            self.arriving[kind, layer, m] = handle

    def border(self, stage: int, *, up: bool) -> int:
        """The layer before which a stage meets the next one, or the one before."""
        layers = self.plan.stages[stage]
        return layers.stop if up else layers.start
