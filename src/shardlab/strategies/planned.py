"""The one program that follows any plan: a schedule gives the order, and this file says what each step does."""

from __future__ import annotations

from collections import Counter

from shardlab.program import Handle, LayerKind, Rank, Strategy, UserError, Value
from shardlab.program.sizes import CARRYING
from shardlab.strategies.computing import Keeps, computing
from shardlab.strategies.context import balanced
from shardlab.strategies.gathering import Weights
from shardlab.strategies.plan import Plan
from shardlab.strategies.recomputing import recomputed
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
    """A rank that follows a plan."""

    def __init__(self, rank: Rank, plan: Plan) -> None:
        if rank.mesh != plan.mesh:
            raise UserError(f"the plan is for the mesh {plan.mesh}, but the ranks stand on {rank.mesh}")
        if plan.mesh.tp > 1 and LayerKind.NORM not in rank.kinds:
            raise UserError(
                f"the mesh has tp {plan.mesh.tp}, which works on half-blocks, but this model's layers are whole; give "
                "Sizes.half_blocks or those of models.Halves"
            )
        if plan.mesh.ep > 1 and LayerKind.EXPERTS not in rank.kinds:
            raise UserError(
                f"the mesh has ep {plan.mesh.ep}, which cuts mixtures of experts, but this model has none; give "
                "Sizes.mixture or those of models.ExpertLayers"
            )
        if plan.attention_apart and LayerKind.TOKENWISE not in rank.kinds:
            cuts = f"the mesh has cp {plan.mesh.cp}, which cuts sequences"
            what = cuts if plan.mesh.cp > 1 else "selective recomputation was asked for"
            raise UserError(
                f"{what}, but attention is not a step of its own in this model's layers; give Sizes.context_blocks or "
                "those of models.Halves with context=True"
            )
        here = rank.coordinate("pp")
        steps = plan.steps(rank.kinds, len(rank.microbatches))
        dealt = 0
        for axis in ("dp_replicate", "dp_shard", "ep"):
            dealt = dealt * len(rank.group(axis).ranks) + rank.coordinate(axis)
        first = steps.microbatches * dealt
        self.rank = rank
        self.plan = plan
        self.microbatches = range(first, first + steps.microbatches)
        ring = plan.mesh.cp
        self.slices = balanced(rank.coordinate("cp"), ring, plan.mesh.tp) if ring > 1 else None
        self.column = rank.group("pp").ranks
        self.bounds = plan.bounds(rank.kinds, max(0, len(rank.sizes.blocks) - 1))
        stages = [stage for stage, place in enumerate(steps.ranks_of_stages) if place == here]
        self.mine = [layer for stage in stages for layer in self.layers(stage)]
        self.steps = steps.of_ranks[here]
        told = any(isinstance(step, ReduceGrad) for step in self.steps)
        self.left = Counter(dict.fromkeys(() if told else stages, steps.microbatches))  # gradients yet to come
        self.compute = computing(rank, plan)
        self.runs = recomputed(plan, rank.sizes, [self.layers(stage) for stage in stages])
        self.keeps: dict[int, Keeps] = {}
        for run in self.runs.values():
            self.keeps |= {l: "input" if l == run[0] else "nothing" for l in run}
        self.weights = Weights(rank, plan, self.steps, self.bounds, self.runs)
        ends = self.column[steps.ranks_of_stages[0]], self.column[steps.ranks_of_stages[-1]]
        self.gradients = Gradients(rank, plan, self.mine, ends)
        self.arriving: dict[tuple[str, int, int], Handle[Value]] = {}
        self.leaving: dict[int, list[Handle[None]]] = {}

    async def run(self) -> None:
        """Load, follow the schedule, update."""
        self.gradients.load()
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
        await self.gradients.update()

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    async def forward(self, stage: int, m: int) -> None:
        rank, layers = self.rank, self.layers(stage)
        if stage == 0:
            rank.activations[0, m] = rank.load_batch([m], self.slices)
        for store in self.carried(layers[0], forward=True):
            await self.arrive(store, layers[0], m)
        for l in layers:
            await self.compute.forward(l, m, await self.weights.next(l), self.keeps.get(l, "all"))

    async def again(self, layer: int, m: int) -> None:
        """Before the backward pass of a run's last layer, the forward pass of the others, which now keep all."""
        run = self.runs.get(layer, range(0))
        for l in run[:-1]:
            await self.compute.forward(l, m, await self.weights.next(l), "all")
        if len(run) > 1:  # the last norm's residual has been handed on before
            del self.rank.residuals[self.rank.sizes.next_carrying(layer), m]

    async def backward(self, stage: int, m: int) -> None:
        await self.gradient_of_output(stage, m)
        for l in reversed(self.layers(stage)):
            await self.again(l, m)
            await self.add(stage, l, await self.compute.backward(l, m, await self.weights.next(l)))
        self.left[stage] -= 1
        if stage == 0:
            del self.rank.grad_activations[0, m]  # of the tokens

    async def backward_input(self, stage: int, m: int) -> None:
        await self.gradient_of_output(stage, m)
        for l in reversed(self.layers(stage)):
            await self.again(l, m)
            await self.compute.backward_input(l, m, await self.weights.next(l))
        if stage == 0:
            del self.rank.grad_activations[0, m]  # of the tokens

    async def backward_weight(self, stage: int, m: int) -> None:
        for l in reversed(self.layers(stage)):
            await self.add(stage, l, self.compute.backward_weight(l, m))
        self.left[stage] -= 1

    async def gradient_of_output(self, stage: int, m: int) -> None:
        """Get the gradient with which a stage's backward pass begins: the loss's, or the next stage's."""
        after = self.bounds[stage + 1]
        if after == len(self.rank.layers):
            await self.compute.loss(m)
        else:
            for store in self.carried(after, forward=False):
                await self.arrive(store, after, m)

    async def add(self, stage: int, layer: int, gradient: Value) -> None:
        await self.gradients.add(layer, gradient)
        if self.left[stage] == 1:
            await self.gradients.finish(layer)

    def carried(self, layer: int, *, forward: bool) -> list[str]:
        """The stores whose values travel between the stages that meet before a layer."""
        stores = ["activations", "residuals"] if self.rank.kinds[layer] in CARRYING else ["activations"]
        return stores if forward else [f"grad_{store}" for store in stores]

    async def arrive(self, store: str, layer: int, m: int) -> None:
        """Wait for a value, unless this rank has made it itself."""
        if (store, layer, m) in self.arriving:
            getattr(self.rank, store)[layer, m] = await self.arriving.pop((store, layer, m))

    async def send(self, step: Send) -> None:
        """Start to send; what was sent before on this channel must have arrived, so that little is held."""
        for handle in self.leaving.pop(step.peer, []):
            await handle
        m, layer = self.microbatches[step.microbatch], self.bounds[step.stage + step.forward]
        values = [getattr(self.rank, store).pop((layer, m)) for store in self.carried(layer, forward=step.forward)]
        self.leaving[step.peer] = [self.rank.send(value, to=self.column[step.peer]) for value in values]

    def recv(self, step: Recv) -> None:
        """Start to receive, as soon as the message is on its way."""
        m, layer = self.microbatches[step.microbatch], self.bounds[step.stage + (not step.forward)]
        for store in self.carried(layer, forward=step.forward):
            handle = self.rank.recv(source=self.column[step.peer], expect=(store, layer, m))
            self.arriving[store, layer, m] = handle
