"""What an outlined rank does: a plan's order of work, with passes from a sample."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast

from shardlab.predict.outline import Outline
from shardlab.predict.outline_entries import OutlinedStep
from shardlab.predict.outline_state import RankMoments
from shardlab.predict.outline_values import Borders, OutlineValue
from shardlab.predict.outline_words import Border, StagePass, Token, block_cuts
from shardlab.predict.passes import NO_CRESTS, NOTHING, Crest, Cuts, Meeting, Pass
from shardlab.predict.residuals import corrected
from shardlab.program import Kind, OpKind
from shardlab.strategies.gathering import uses
from shardlab.strategies.planned import PlanRunner
from shardlab.strategies.rank_plan import Keeps, RankPlan
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.messages import Send
from shardlab.strategies.schedules.sharding import ShardedStep


class _Layers:
    """Passes of an outlined rank, in the place of a `LayerRunner`."""

    def __init__(self, rank: Outline, rank_plan: RankPlan) -> None:
        self.rank, self.figures = rank, rank.figures
        self.plan = rank_plan
        sizes = rank_plan.plan.mesh.sizes()
        self.slices = {l: math.prod(sizes[axis] for axis in w.cut_axes) for l, w in rank_plan.weights.items()}
        self.cuts = {l: block_cuts(rank_plan, l) for l in rank_plan.layers}
        self.given_kept = self.figures.given_kept(rank_plan)
        self.forwards: dict[tuple[int, Keeps, bool], Pass] = {}

    def key(self, layer: int) -> tuple[Cuts, int, bool]:
        """Which sample's pass a layer takes, of which of the sample's layers, and whether it is given what is kept."""
        return self.cuts[layer], self.figures.alike[layer], layer in self.given_kept

    def of(self, name: str, layer: int, *rest: object) -> Pass:
        """A layer's pass, by its name and what else tells it apart."""
        return self.figures.passes(self.cuts[layer]).by_key[name, self.figures.alike[layer], *rest]

    def forward_of(self, layer: int, keeps: Keeps, hands_on: bool) -> Pass:
        """A layer's forward pass, with its residual stream where it is on this rank."""
        key = layer, keeps, hands_on
        done = self.forwards.get(key)
        if done is None:
            done = self.of("forward", layer, keeps, hands_on)
            cuts, like, given_kept = self.key(layer)
            more = given_kept - (like in self.figures.measured_given_kept(cuts))
            if more and keeps == self.plan.layers[layer].keeps:  # else it is computed again, as in the sample
                residual = self.figures.border(Kind.RESIDUAL, layer)
                done = corrected(done, keeps, more * residual.room, residual.slot)
            self.forwards[key] = done
        return done

    async def forward(self, layer: int, m: int, weight: OutlineValue, keeps: Keeps, *, hands_on: bool = True) -> None:
        self.rank.passed(self.forward_of(layer, keeps, hands_on), layer, weight)

    async def loss(self, m: int) -> None:
        last = len(self.rank.layers)
        self.rank.passed(self.figures.passes().by_key["loss", self.figures.alike[last]], last)

    async def backward(self, layer: int, m: int, weight: OutlineValue) -> OutlineValue:
        return self.with_gradient(self.of("backward", layer), layer, weight)

    async def backward_input(self, layer: int, m: int, weight: OutlineValue) -> None:
        self.rank.passed(self.of("backward_input", layer), layer, weight)

    def backward_weight(self, layer: int, m: int) -> OutlineValue:
        return self.with_gradient(self.of("backward_weight", layer), layer, None)

    def discard(self, layer: int, m: int) -> None:
        raise NotImplementedError("plans with frozen blocks are replayed, not outlined")

    def gradient(self, layer: int) -> OutlineValue:
        """The gradient that a layer's backward pass makes of its weight."""
        owner = self.plan.weight_of(layer)
        return self.rank.made(Kind.GRAD_WEIGHT, owner, of=self.slices.get(owner, 1))

    def adds(self, layer: int) -> bool:
        """Whether the backward pass itself adds a layer's gradient to an older one."""
        weight = self.plan.weights.get(owner := self.plan.weight_of(layer))
        return weight is not None and not weight.reduce_every_microbatch and owner in self.rank.grad_weights

    def with_gradient(self, done: Pass, layer: int, weight: OutlineValue | None) -> OutlineValue:
        gradient = self.gradient(layer)
        if self.adds(layer):
            gradient.room = 0
        self.rank.passed(done, layer, weight, gradient)
        return gradient


class OutlineRunner(PlanRunner[OutlineValue]):
    """A plan's order of work; where a stage only computes, and adds to gradients, its passes are taken at once."""

    def __init__(self, rank: Outline, rank_plan: RankPlan) -> None:
        self.passes = _Layers(rank, rank_plan)
        super().__init__(rank, rank_plan, self.passes)
        self.outline = rank
        self.chains: dict[tuple[str, int], Pass] = {}
        self.token = Token(None)
        self.counts = {stage for stage, left in self.left.items() if left}  # stages that reduce by themselves

    @cached_property
    def moments(self) -> RankMoments:
        """RankMoments of this rank, whose weights are loaded."""
        return RankMoments(self.outline, self.weights, self.gradients)

    def take(self, token: Token) -> OutlinedStep:
        """Take a step that is no message, or the end."""
        self.token = token
        running = self.end(token) if token.kind is None else self.step(self.step_of(token))
        try:
            running.send(None)
        except StopIteration:
            return self.outline.stretch()
        raise AssertionError("an outline never waits for other ranks")

    def step_of(self, token: Token) -> ShardedStep:
        """A step like those that a token stands for; what follows it decides which weights are gathered."""
        kind, stage = token.kind, self.plan.own_stages[token.stage]
        if kind not in (Forward, Backward, BackwardInput, BackwardWeight):
            return cast(Any, kind)(stage)
        if stage in self.counts:
            self.left[stage] = 1 if token.last else 2
        step = cast(Any, kind)(stage, 0)
        if self.plan.gather_axes:
            ahead = [
                *(each for each in token.ahead if each is not None),
                *(StagePass(place, True) for place in token.later),
            ]
            stages = self.plan.own_stages
            self.weights.follow(
                uses(self.plan, [step, *((Forward if p.forward else Backward)(stages[p.stage], 0) for p in ahead)])
            )
        return step

    async def end(self, token: Token) -> None:
        """Update, and wait for all messages."""
        await self.gradients.update()
        self.over(token)
        self.outline.end()

    def message(self, token: Token) -> OutlinedStep:
        """Send or receive."""
        border = token.border
        assert border is not None
        self.over(token)
        for layer, value in self.values(border, sends=token.kind is Send):
            if token.kind is Send:
                if value.kind is Kind.RESIDUAL and layer in self.passes.given_kept:  # now it counts by itself
                    self.outline.hold(value)
                    self.outline.note(OpKind.SEND, layer)
                self.outline.send(value, border.further)
            else:
                self.outline.receive(value, layer, border.further)
        return self.outline.stretch()

    def over(self, token: Token) -> None:
        """Wait for messages that were sent before."""
        for border in token.over:
            for _, value in self.values(border, sends=True):
                self.outline.sent(value, border.further)

    async def arrive(self, layer: int, m: int, *, forward: bool) -> None:
        if self.token.takes is not None:
            border, turn = self.token.takes
            for layer, value in self.values(border, sends=False):
                self.outline.received(value, layer, border.further, turn)

    def values(self, border: Border, *, sends: bool) -> list[tuple[int, OutlineValue]]:
        """What passes a border between stages, each with the layer that it enters or whose gradient it is."""
        layers = self.plan.stages[self.plan.own_stages[border.stage]]
        layer = layers.stop if border.forward is sends else layers.start
        return [(layer, cast(Borders, store).coming(layer)) for store in self.borders[layer, border.forward]]

    async def forward(self, stage: int, m: int) -> None:
        chain = None if self.plan.gather_axes else self.chain("forward", stage)
        if chain is None or self.outline.busy(chain):
            await super().forward(stage, m)
            return
        layers = self.plan.stages[stage]
        if stage == 0:
            self.outline.load_batch([m], None)
        await self.arrive(layers[0], m, forward=True)
        self.outline.passed(chain, layers[0])

    async def backward(self, stage: int, m: int) -> None:
        chain = self.chain_of_gradients("backward", stage)
        if chain is None:
            await super().backward(stage, m)
            return
        await self.gradient_of_output(stage, m)
        self.outline.passed(chain, self.plan.stages[stage][0])
        self.left[stage] -= 1
        if stage == 0:
            del self.rank.grad_activations[0, m]

    async def backward_input(self, stage: int, m: int) -> None:
        chain = None if self.plan.gather_axes else self.chain("backward_input", stage)
        if chain is None or self.outline.busy(chain):
            await super().backward_input(stage, m)
            return
        await self.gradient_of_output(stage, m)
        self.outline.passed(chain, self.plan.stages[stage][0])
        if stage == 0:
            del self.rank.grad_activations[0, m]

    async def backward_weight(self, stage: int, m: int) -> None:
        chain = self.chain_of_gradients("backward_weight", stage)
        if chain is None:
            await super().backward_weight(stage, m)
            return
        self.outline.passed(chain, self.plan.stages[stage][0])
        self.left[stage] -= 1

    def chain_of_gradients(self, name: str, stage: int) -> Pass | None:
        """A stage's passes, if all that is done with the gradients is that they are added to older ones."""
        if self.plan.gather_axes or self.left[stage] == 1:
            return None
        bare = self.plan.bare
        if not all(self.passes.adds(l) for l in self.plan.stages[stage] if l not in bare):
            return None
        chain = self.chain(name, stage)
        return None if self.outline.busy(chain) else chain

    def chain(self, name: str, stage: int) -> Pass:
        chain = self.chains.get((name, stage))
        if chain is None:
            known, layers = self.outline.figures.chains, self.plan.stages[stage]
            key = (name, *map(self.passes.key, layers))
            chain = known.get(key)
            if chain is None:
                chain = known[key] = chained(list(self.parts(name, layers)))
            self.chains[name, stage] = chain
        return chain

    def parts(self, name: str, layers: range) -> Iterator[tuple[Pass, int]]:
        """A stage's passes in order, each with its layer's place in the stage."""
        figures, of, first = self.outline.figures, self.passes.of, layers[0]
        forward_of = self.passes.forward_of
        if name == "forward":
            for l in layers:
                yield forward_of(l, self.plan.layers[l].keeps, True), l - first
            return
        for l in reversed(layers):
            if name != "backward_weight":
                for again in self.plan.layers[l].recompute:
                    yield forward_of(again, "all", again != l), again - first
            yield of(name, l), l - first
            if name != "backward_input" and l not in self.plan.bare and not figures.prices.adds_in_backward:
                seconds = figures.compute(OpKind.ADD, self.passes.gradient(l).part)
                yield Pass(seconds, (), seconds, NOTHING, NO_CRESTS), l - first


def chained(parts: Sequence[tuple[Pass, int]]) -> Pass:
    """Passes one after the other as one, each with its layer's place from the first one's."""
    held, crest, after = list(NOTHING), None, 0.0
    meetings: list[Meeting] = []
    for each, place in parts:
        for meeting in each.meetings:
            meetings.append(meeting._replace(after=after + meeting.after))
            after = 0.0
        after += each.rest
        for found in each.crests:
            if found is not None and (crest is None or sum(held) + found.bytes > crest.bytes):
                most = tuple([a + b for a, b in zip(held, found.held, strict=True)])
                crest = Crest(sum(most), most, found.op, found.layer + place)
        held = [a + b for a, b in zip(held, each.held, strict=True)]
    return Pass(sum(each.seconds for each, _ in parts), tuple(meetings), after, tuple(held), (crest, None, None))
