"""The one program that follows any plan: a schedule gives the order, and this file says what each step does."""

from __future__ import annotations

from typing import Generic

from shardlab.language import Handle, Rank, Strategy, UserError, Value
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.strategies.plan.layer_passes import LayerRunner
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import BorderStore, LayerPasses, PlanRank, RankPlan, V
from shardlab.strategies.plan.resolve import resolve
from shardlab.strategies.plan.sharding import GradientReducer, ParameterGatherer
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.steps import Recv, ReduceGrad, Reshard, Send, ShardedStep, Unshard


def planned(plan: Plan) -> Strategy:
    """The strategy that follows a plan, on the plan's mesh."""

    async def strategy(rank: Rank) -> None:
        if rank.mesh != plan.mesh:
            raise UserError(f"the plan is for the mesh {plan.mesh}, but the ranks stand on {rank.mesh}")
        await TracedRunner(rank, resolve(plan, rank.sizes, len(rank.microbatches), rank.index)).run()

    return strategy


class PlanRunner(Generic[V]):
    """A rank that follows a plan made out for it, and meets no other stage: what takes part in a pipeline is added.

    Args:
        layers: what runs its layers' passes.
    """

    def __init__(self, rank: PlanRank[V], rank_plan: RankPlan, layers: LayerPasses[V]) -> None:
        self.rank = rank
        self.plan = rank_plan
        self.layers = layers
        self.weights = ParameterGatherer(rank, rank_plan)
        self.gradients = GradientReducer(rank, rank_plan)
        reduced_by_itself = () if rank_plan.explicit_reductions else rank_plan.own_stages
        microbatches = len(rank_plan.microbatches)
        self.left = {stage: microbatches if stage in reduced_by_itself else 0 for stage in rank_plan.own_stages}
        """Gradients yet to come of each stage that reduces them when it has the last."""
        self.borders = {
            (layer, forward): self.carried(layer, forward=forward)
            for stage in rank_plan.own_stages
            for layer in (rank_plan.stages[stage].start, rank_plan.stages[stage].stop)
            for forward in (True, False)
        }

    async def run(self) -> None:
        """Load, follow the schedule, update."""
        self.gradients.load()
        for step in self.plan.steps:
            await self.step(step)
        await self.gradients.update()

    async def step(self, step: ShardedStep) -> None:
        """Take one step of the schedule."""
        microbatches, stages = self.plan.microbatches, self.plan.stages
        match step:  # in a pipeline most steps are messages
            case Send() | Recv():
                await self.meet(step)
            case Forward(stage, i):
                await self.forward(stage, microbatches[i])
            case Backward(stage, i):
                await self.backward(stage, microbatches[i])
            case BackwardInput(stage, i):
                await self.backward_input(stage, microbatches[i])
            case BackwardWeight(stage, i):
                await self.backward_weight(stage, microbatches[i])
            case Unshard(stage):
                self.weights.unshard(stages[stage])
            case Reshard(stage):
                await self.weights.reshard(stages[stage])
            case ReduceGrad(stage):
                for l in reversed(stages[stage]):
                    await self.gradients.finish(l)

    async def forward(self, stage: int, m: int) -> None:
        rank, plan, layers = self.rank, self.plan, self.plan.stages[stage]
        if stage == 0:
            rank.activations[0, m] = rank.load_batch([m], plan.sequence_slices)
        await self.arrive(layers[0], m, forward=True)
        for l in layers:
            await self.layers.forward(l, m, await self.weights.next(l), plan.layers[l].keeps)

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
        last = self.left[stage] == 1
        for l in reversed(self.plan.stages[stage]):
            if self.plan.layers[l].recompute:
                await self.recompute(l, m)
            weight = await self.weights.next(l)
            if l in self.plan.frozen:
                await self.layers.backward_input(l, m, weight)
                self.layers.discard(l, m)
            else:
                await self.gradients.add(l, await self.layers.backward(l, m, weight), last=last)
        self.left[stage] -= 1
        if stage == 0:
            del self.rank.grad_activations[0, m]  # of the tokens

    async def backward_input(self, stage: int, m: int) -> None:
        await self.gradient_of_output(stage, m)
        for l in reversed(self.plan.stages[stage]):
            if self.plan.layers[l].recompute:
                await self.recompute(l, m)
            await self.layers.backward_input(l, m, await self.weights.next(l))
            if l in self.plan.frozen:
                self.layers.discard(l, m)
        if stage == 0:
            del self.rank.grad_activations[0, m]  # of the tokens

    async def backward_weight(self, stage: int, m: int) -> None:
        last = self.left[stage] == 1
        for l in reversed(self.plan.stages[stage]):
            if l not in self.plan.frozen:
                await self.gradients.add(l, self.layers.backward_weight(l, m), last=last)
        self.left[stage] -= 1

    async def gradient_of_output(self, stage: int, m: int) -> None:
        """Get the gradient with which a stage's backward pass begins: the loss's, or the next stage's."""
        after = self.plan.stages[stage].stop
        if after == len(self.rank.layers):
            await self.layers.loss(m)
        else:
            await self.arrive(after, m, forward=False)

    def carried(self, layer: int, *, forward: bool) -> list[BorderStore[V]]:
        """The stores of what travels between the stages that meet before a layer."""
        if layer == len(self.rank.layers):
            return []
        kinds = [port.kind for port in self.plan.model.layers[layer].inputs]
        return [self.rank.store(kind if forward else GRADIENT_OF[kind]) for kind in kinds]

    async def meet(self, step: Send | Recv) -> None:
        """Send to another stage, or receive from one."""
        raise NotImplementedError

    async def arrive(self, layer: int, m: int, *, forward: bool) -> None:
        """Wait for what comes from another stage, unless this rank has made it itself."""
        raise NotImplementedError


class TracedRunner(PlanRunner[Value]):
    """A rank of a program that follows a plan, with the messages of its pipeline.

    Args:
        layers: what runs its layers' passes (None: a runner of their own).
    """

    rank: Rank

    def __init__(self, rank: Rank, rank_plan: RankPlan, layers: LayerRunner | None = None) -> None:
        super().__init__(rank, rank_plan, layers or LayerRunner(rank, rank_plan))
        self.arriving: dict[tuple[int, bool, int], list[Handle[Value]]] = {}
        self.leaving: dict[int, list[Handle[None]]] = {}

    async def meet(self, step: Send | Recv) -> None:
        if isinstance(step, Recv):
            self.recv(step)
            return
        for handle in self.leaving.get(step.peer, ()):  # so little is held
            await handle
        self.send(step)

    async def arrive(self, layer: int, m: int, *, forward: bool) -> None:
        handles = self.arriving.pop((layer, forward, m), None)
        if handles is not None:
            for store, handle in zip(self.borders[layer, forward], handles, strict=True):
                store[layer, m] = await handle

    def send(self, step: Send) -> None:
        """Start to send; what was sent before on this channel has arrived."""
        rank, peer, forward = self.rank, step.peer, step.forward
        m, layer, to = self.plan.microbatches[step.microbatch], self.border(step, up=forward), self.plan.pipeline[peer]
        leaving: list[Handle[None]] = []
        self.leaving[peer] = leaving
        for store in self.borders[layer, forward]:
            leaving.append(rank.send(store.pop((layer, m)), to=to))

    def recv(self, step: Recv) -> None:
        """Start to receive, as soon as the message is on its way."""
        rank, forward, source = self.rank, step.forward, self.plan.pipeline[step.peer]
        m, layer = self.plan.microbatches[step.microbatch], self.border(step, up=not forward)
        arriving: list[Handle[Value]] = []
        self.arriving[layer, forward, m] = arriving
        for store in self.borders[layer, forward]:
            arriving.append(rank.recv(source=source, expect=(store.name, layer, m)))

    def border(self, step: Send | Recv, *, up: bool) -> int:
        """The layer before which a stage meets the next one, or the one before."""
        layers = self.plan.stages[step.stage]
        return layers.stop if up else layers.start
