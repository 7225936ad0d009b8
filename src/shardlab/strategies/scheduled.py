"""One program for every pipeline schedule: the schedule says in which order, this says what each action does."""

from __future__ import annotations

from shardlab.program import Handle, Rank, Strategy, UserError, Value
from shardlab.strategies.schedules.actions import Forward, Schedule
from shardlab.strategies.schedules.messages import Recv, Send, with_messages


def scheduled(schedule: Schedule) -> Strategy:
    """The strategy that follows a schedule; a looped one gets as many stages on each rank as there are layers for."""

    async def strategy(rank: Rank) -> None:
        await Pipeline(rank, schedule, schedule.stages_per_rank or len(rank.layers) // rank.world).run()

    return strategy


class Pipeline:
    """One rank of a pipeline. Stage s has layers s L / S up to (s + 1) L / S."""

    def __init__(self, rank: Rank, schedule: Schedule, stages_per_rank: int) -> None:
        layers, ranks = len(rank.layers), rank.world
        if layers < ranks * stages_per_rank:
            raise UserError(f"{layers} layers do not reach {ranks} pipeline ranks; give at least one layer a rank")
        stages = ranks * stages_per_rank
        self.rank = rank
        self.bounds = [stage * layers // stages for stage in range(stages + 1)]
        self.mine = [stage for stage in range(stages) if schedule.placement(stage, ranks) == rank.index]
        todo = [list(schedule.actions(r, ranks, len(rank.microbatches), stages_per_rank)) for r in range(ranks)]
        self.steps = with_messages(todo, stages, lambda stage: schedule.placement(stage, ranks))[rank.index]
        self.arriving: dict[tuple[bool, int, int], Handle[Value]] = {}
        self.leaving: dict[int, Handle[None]] = {}

    async def run(self) -> None:
        """Load, follow the schedule, update."""
        rank = self.rank
        mine = [layer for stage in self.mine for layer in self.layers(stage)]
        for l in mine:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        for step in self.steps:
            if isinstance(step, Send):
                await self.send(step)
            elif isinstance(step, Recv):
                self.arriving[step.forward, step.stage, step.microbatch] = self.recv(step)
            elif isinstance(step, Forward):
                await self.forward(step.stage, step.microbatch)
            else:
                await self.backward(step.stage, step.microbatch)
        for l in mine:
            rank.weights[l], rank.opt_states[l] = rank.update(
                l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
            )

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    async def forward(self, stage: int, m: int) -> None:
        rank, layers = self.rank, self.layers(stage)
        if stage == 0:
            rank.activations[0, m] = rank.load_batch([m])
        elif (True, stage, m) in self.arriving:
            rank.activations[layers[0], m] = await self.arriving.pop((True, stage, m))
        for l in layers:
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], rank.weights[l])

    async def backward(self, stage: int, m: int) -> None:
        rank, layers = self.rank, self.layers(stage)
        after = layers[-1] + 1
        if after == len(rank.layers):
            rank.grad_activations[after, m] = rank.loss(rank.activations.pop((after, m)))
        elif (False, stage, m) in self.arriving:
            rank.grad_activations[after, m] = await self.arriving.pop((False, stage, m))
        for l in reversed(layers):
            grad_weight, rank.grad_activations[l, m] = rank.backward(
                l, rank.activations.pop((l, m)), rank.grad_activations.pop((l + 1, m)), rank.weights[l]
            )
            rank.grad_weights[l] = rank.grad_weights[l] + grad_weight if l in rank.grad_weights else grad_weight
        if stage == 0:
            del rank.grad_activations[0, m]

    async def send(self, step: Send) -> None:
        """Start to send; the message before it on this channel must have arrived, so that few are held."""
        rank, m = self.rank, step.microbatch
        if step.peer in self.leaving:
            await self.leaving.pop(step.peer)
        if step.forward:
            value = rank.activations.pop((self.bounds[step.stage + 1], m))
        else:
            value = rank.grad_activations.pop((self.bounds[step.stage], m))
        self.leaving[step.peer] = rank.send(value, to=step.peer)

    def recv(self, step: Recv) -> Handle[Value]:
        """Start to receive, as soon as the message is on its way."""
        if step.forward:
            expect = ("activations", self.bounds[step.stage], step.microbatch)
        else:
            expect = ("grad_activations", self.bounds[step.stage + 1], step.microbatch)
        return self.rank.recv(source=step.peer, expect=expect)
