"""Program that follows any plan.

A schedule gives the order of the actions of a rank, and `PlanRunner` has a method for each kind of action: a pass of a
stage on one microbatch, a message, a gather or a reduction. `TracedRunner` adds the messages between pipeline stages.
The runner of compressed steps (`shardlab.simulate.predict.compressed`) is the other subclass.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic

from shardlab.language import Handle, Rank, Strategy, UserError, Value
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.strategies.plan.layer_passes import LayerRunner
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import BoundaryStore, LayerPasses, PlanRank, RankPlan, V
from shardlab.strategies.plan.resolve import resolve
from shardlab.strategies.plan.sharding import GradientReducer, ParameterGatherer
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.steps import Recv, ReduceGrad, Reshard, Send, ShardedStep, Unshard


def program_from_plan(plan: Plan) -> Strategy:
    """Return the strategy that follows a plan. It runs on the plan's mesh only."""

    async def strategy(rank: Rank) -> None:
        if rank.mesh != plan.mesh:
            raise UserError(f"the plan is for the mesh {plan.mesh}, but the ranks stand on {rank.mesh}")
        await TracedRunner(rank, resolve(plan, rank.sizes, len(rank.microbatches), rank.index)).run()

    return strategy


class PlanRunner(Generic[V]):
    """Loop of one rank over the schedule of its plan. Subclasses send and receive the messages of a pipeline.

    Args:
        rank: the rank, with its stores and verbs.
        rank_plan: the plan, resolved for this rank.
        layers: object that runs the passes of single layers.
    """

    def __init__(self, rank: PlanRank[V], rank_plan: RankPlan, layers: LayerPasses[V]) -> None:
        self.rank = rank
        self.plan = rank_plan
        self.layers = layers
        self.weights = ParameterGatherer(rank, rank_plan)
        self.gradients = GradientReducer(rank, rank_plan)
        implicit = () if rank_plan.explicit_reductions else rank_plan.own_stages
        microbatches = len(rank_plan.microbatches)
        self.remaining = {stage: microbatches if stage in implicit else 0 for stage in rank_plan.own_stages}
        """Number of gradients that a stage has yet to compute before it reduces them (0: the schedule reduces them)."""
        self.boundaries = {
            (layer, forward): self.boundary_stores(layer, forward=forward)
            for stage in rank_plan.own_stages
            for layer in (rank_plan.stages[stage].start, rank_plan.stages[stage].stop)
            for forward in (True, False)
        }

    async def run(self) -> None:
        """Load the weights, follow the schedule, and update."""
        self.gradients.load()
        for step in self.plan.steps:
            await self.step(step)
        await self.gradients.update()

    async def step(self, step: ShardedStep) -> None:
        """Run one action of the schedule."""
        microbatches, stages = self.plan.microbatches, self.plan.stages
        match step:  # in a pipeline most steps are messages
            case Send() | Recv():
                await self.communicate(step)
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
        await self.receive(layers[0], m, forward=True)
        for l in layers:
            await self.layers.forward(l, m, await self.weights.fetch_weight(l), plan.layers[l].keeps)

    async def recompute(self, layer: int, m: int) -> None:
        """Run the forward passes again that a layer's backward pass needs, and save their values this time."""
        run = self.plan.layers[layer].recompute
        for l in run:
            await self.layers.forward(l, m, await self.weights.fetch_weight(l), "all", stores_outputs=l != layer)
        for l in run:
            for port in self.plan.model.layers[l].outputs:
                if l < layer < port.layer:  # the first forward pass has passed it to the next layer
                    del self.rank.store(port.kind)[port.layer, m]

    async def backward(self, stage: int, m: int) -> None:
        await self.gradient_of_output(stage, m)
        last = self.remaining[stage] == 1
        for l in reversed(self.plan.stages[stage]):
            if self.plan.layers[l].recompute:
                await self.recompute(l, m)
            weight = await self.weights.fetch_weight(l)
            if l in self.plan.frozen:
                await self.layers.backward_input(l, m, weight)
                self.layers.discard(l, m)
            else:
                await self.gradients.add(l, await self.layers.backward(l, m, weight), last=last)
        self.remaining[stage] -= 1
        if stage == 0:
            del self.rank.grad_activations[0, m]  # nothing reads the gradient of the tokens

    async def backward_input(self, stage: int, m: int) -> None:
        await self.gradient_of_output(stage, m)
        for l in reversed(self.plan.stages[stage]):
            if self.plan.layers[l].recompute:
                await self.recompute(l, m)
            await self.layers.backward_input(l, m, await self.weights.fetch_weight(l))
            if l in self.plan.frozen:
                self.layers.discard(l, m)
        if stage == 0:
            del self.rank.grad_activations[0, m]  # nothing reads the gradient of the tokens

    async def backward_weight(self, stage: int, m: int) -> None:
        last = self.remaining[stage] == 1
        for l in reversed(self.plan.stages[stage]):
            if l not in self.plan.frozen:
                await self.gradients.add(l, self.layers.backward_weight(l, m), last=last)
        self.remaining[stage] -= 1

    async def gradient_of_output(self, stage: int, m: int) -> None:
        """Compute the gradient of the loss, or wait for the gradient that the next stage sends."""
        end = self.plan.stages[stage].stop
        if end == len(self.rank.layers):
            await self.layers.loss(m)
        else:
            await self.receive(end, m, forward=False)

    def boundary_stores(self, layer: int, *, forward: bool) -> list[BoundaryStore[V]]:
        """Return the stores of the values that cross the boundary before `layer` between two pipeline stages."""
        if layer == len(self.rank.layers):
            return []
        kinds = [port.kind for port in self.plan.model.layers[layer].inputs]
        return [self.rank.store(kind if forward else GRADIENT_OF[kind]) for kind in kinds]

    @abstractmethod
    async def communicate(self, step: Send | Recv) -> None:
        """Start to send to another stage, or to receive from it."""

    @abstractmethod
    async def receive(self, layer: int, m: int, *, forward: bool) -> None:
        """Wait for the values that another stage sends. Do nothing if this rank has computed them itself."""


class TracedRunner(PlanRunner[Value]):
    """Runner of one rank's schedule while its program is traced: a `PlanRunner` with the pipeline's messages.

    Args:
        rank: the rank, with its stores and verbs.
        rank_plan: the plan, resolved for this rank.
        layers: object that runs the passes of single layers (None: a `LayerRunner`).
    """

    rank: Rank

    def __init__(self, rank: Rank, rank_plan: RankPlan, layers: LayerRunner | None = None) -> None:
        super().__init__(rank, rank_plan, layers or LayerRunner(rank, rank_plan))
        self.receives: dict[tuple[int, bool, int], list[Handle[Value]]] = {}
        self.sends: dict[int, list[Handle[None]]] = {}

    async def communicate(self, step: Send | Recv) -> None:
        if isinstance(step, Recv):
            self.recv(step)
            return
        for handle in self.sends.get(step.peer, ()):  # one message per peer bounds the memory
            await handle
        self.send(step)

    async def receive(self, layer: int, m: int, *, forward: bool) -> None:
        handles = self.receives.pop((layer, forward, m), None)
        if handles is not None:
            for store, handle in zip(self.boundaries[layer, forward], handles, strict=True):
                store[layer, m] = await handle

    def send(self, step: Send) -> None:
        """Start to send. The caller has awaited the previous message to this peer."""
        rank, forward, to = self.rank, step.forward, self.plan.pipeline[step.peer]
        m, layer = self.plan.microbatches[step.microbatch], self.boundary(step, up=forward)
        self.sends[step.peer] = [rank.send(store.pop((layer, m)), to=to) for store in self.boundaries[layer, forward]]

    def recv(self, step: Recv) -> None:
        """Start to receive."""
        rank, forward, source = self.rank, step.forward, self.plan.pipeline[step.peer]
        m, layer = self.plan.microbatches[step.microbatch], self.boundary(step, up=not forward)
        stores = self.boundaries[layer, forward]
        self.receives[layer, forward, m] = [rank.recv(source=source, expect=(store.name, layer, m)) for store in stores]

    def boundary(self, step: Send | Recv, *, up: bool) -> int:
        """Return the first layer after the boundary to the next stage (`up`) or to the previous stage."""
        layers = self.plan.stages[step.stage]
        return layers.stop if up else layers.start
