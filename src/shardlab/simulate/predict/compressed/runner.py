"""What an outlined rank does: a plan's order of work, with passes from a sample."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

from shardlab.language import Group, Kind, OpKind
from shardlab.simulate.predict.compressed.clocks import OutlinedStep
from shardlab.simulate.predict.compressed.rank import Borders, Outline, OutlineHandle, OutlineValue
from shardlab.simulate.predict.compressed.sample import (
    NO_CRESTS,
    NOTHING,
    Crest,
    Cuts,
    Meeting,
    Pass,
    PricedSample,
    SizedPart,
    corrected,
)
from shardlab.strategies.plan.program import PlanRunner
from shardlab.strategies.plan.rank_plan import Keeps, RankPlan
from shardlab.strategies.plan.sharding import GradientReducer, ParameterGatherer, weight_uses
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.steps import Message, Recv, Send, ShardedStep


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

    def forward_of(self, layer: int, keeps: Keeps, stores_outputs: bool) -> Pass:
        """A layer's forward pass, with its residual stream where it is on this rank."""
        key = layer, keeps, stores_outputs
        done = self.forwards.get(key)
        if done is None:
            done = self.of("forward", layer, keeps, stores_outputs)
            cuts, like, given_kept = self.key(layer)
            more = given_kept - (like in self.figures.measured_given_kept(cuts))
            if more and keeps == self.plan.layers[layer].keeps:  # else it is computed again, as in the sample
                residual = self.figures.border(Kind.RESIDUAL, layer)
                done = corrected(done, keeps, more * residual.room, residual.slot)
            self.forwards[key] = done
        return done

    async def forward(
        self, layer: int, m: int, weight: OutlineValue, keeps: Keeps, *, stores_outputs: bool = True
    ) -> None:
        self.rank.passed(self.forward_of(layer, keeps, stores_outputs), layer, weight)

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
            steps = [(Forward if p.forward else Backward)(stages[p.stage], 0) for p in ahead]
            self.weights.set_uses(weight_uses(self.plan, [step, *steps]))
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

    async def receive(self, layer: int, m: int, *, forward: bool) -> None:
        if self.token.takes is not None:
            border, turn = self.token.takes
            for layer, value in self.values(border, sends=False):
                self.outline.received(value, layer, border.further, turn)

    def values(self, border: Border, *, sends: bool) -> list[tuple[int, OutlineValue]]:
        """What passes a border between stages, each with the layer that it enters or whose gradient it is."""
        layers = self.plan.stages[self.plan.own_stages[border.stage]]
        layer = layers.stop if border.forward is sends else layers.start
        return [(layer, cast(Borders, store).coming(layer)) for store in self.boundaries[layer, border.forward]]

    async def forward(self, stage: int, m: int) -> None:
        chain = None if self.plan.gather_axes else self.chain("forward", stage)
        if chain is None or self.outline.busy(chain):
            await super().forward(stage, m)
            return
        layers = self.plan.stages[stage]
        if stage == 0:
            self.outline.load_batch([m], None)
        await self.receive(layers[0], m, forward=True)
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
        weightless = self.plan.weightless
        if not all(self.passes.adds(l) for l in self.plan.stages[stage] if l not in weightless):
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
            if name != "backward_input" and l not in self.plan.weightless and not figures.prices.adds_in_backward:
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


# RankMoments of an outlined rank between two steps: told so that equal ones are equal, and brought back.


class ToldValue(NamedTuple):
    """A value, as of `OutlineValue`; the part by its `id`."""

    part: int
    layer: int
    pieces: int
    of: int
    room: int
    slot: int
    keys: int
    updated: bool


Place = tuple[int, Hashable]
"""Where a value is: in which of the rank's stores, by which key."""


class ToldHandle(NamedTuple):
    """A collective, as of `OutlineHandle`: how many collectives ago it was begun instead of its number."""

    group: Group
    ago: int
    result: ToldValue | None
    read: Place | ToldValue | None


class RankMoment(NamedTuple):
    """All that decides what a rank's next steps do, beside the plan.

    Attributes:
        held: values in stores. Weights that are not gathered and the optimizer's state are left out: no step but the
            update changes them.
        under_way: collectives, in order.
        gathering, reducing: how far these are; handles by their places among the collectives.
    """

    held: frozenset[tuple[int, Hashable, ToldValue]]
    under_way: tuple[ToldHandle, ...]
    gathering: Any
    reducing: Any


class RankMoments:
    """RankMoments of one rank."""

    def __init__(
        self, rank: Outline, weights: ParameterGatherer[OutlineValue], gradients: GradientReducer[OutlineValue]
    ) -> None:
        self._rank, self._weights, self._gradients = rank, weights, gradients
        self._stores = (rank.weights, rank.grad_weights, rank.scalars)
        self._lasting = frozenset(rank.weights)

    def now(self, parts: dict[int, SizedPart]) -> RankMoment:
        """Tell the present moment.

        Args:
            parts: gets all that are told by their `id`.
        """
        rank = self._rank

        def told(value: OutlineValue) -> ToldValue:
            part = value.part
            parts[id(part)] = part
            return ToldValue(
                id(part), value.layer, value.pieces, value.of, value.room, value.slot, value.keys, value.updated
            )

        places: dict[int, Place] = {}
        held: list[tuple[int, Hashable, ToldValue]] = []
        for number, store in enumerate(self._stores):
            for key, value in store.items():
                places[id(value)] = (number, key)
                if number or key not in self._lasting:
                    held.append((number, key, told(value)))
        under_way = tuple(
            [
                ToldHandle(
                    each.group,
                    rank.collectives - each.number,
                    each.result and told(each.result),
                    each.read and (places.get(id(each.read)) or told(each.read)),
                )
                for each in rank.outstanding
            ]
        )
        numbers: dict[Any, int] = {handle: number for number, handle in enumerate(rank.outstanding)}
        told_by = numbers.__getitem__
        return RankMoment(frozenset(held), under_way, self._weights.state(told_by), self._gradients.state(told_by))

    def back(self, moment: RankMoment, parts: dict[int, SizedPart]) -> None:
        """Bring a moment back."""
        rank = self._rank

        def made(told: ToldValue) -> OutlineValue:
            value = OutlineValue(rank, parts[told.part], told.layer, told.pieces, told.of)
            value.room, value.slot, value.keys, value.updated = told[4:]
            return value

        for handle in rank.outstanding:
            if handle.read is not None:
                handle.read.reading = ()
        for number, store in enumerate(self._stores):
            store.reset({key: value for key, value in store.items() if not number and key in self._lasting})
        for number, key, told in moment.held:
            self._stores[number].put(key, made(told))
        rank.outstanding.clear()
        rank.open.clear()
        rank.collectives = max((told.ago for told in moment.under_way), default=0)
        for told in moment.under_way:
            read = told.read
            value = made(read) if isinstance(read, ToldValue) else read and self._stores[read[0]][read[1]]
            result = told.result and made(told.result)
            rank.begin(OutlineHandle(rank, told.group, rank.collectives - told.ago, result, value))
        handles: list[Any] = list(rank.outstanding)
        self._weights.restore(moment.gathering, handles.__getitem__)
        self._gradients.restore(moment.reducing, handles.__getitem__)


# A rank's steps as a word, in which equal tokens are equal steps: of any microbatch, of any rank of its kind.


USES = (Forward, Backward, BackwardInput)
"""Steps that want weights."""


class Border(NamedTuple):
    """Where messages pass: the place of a stage among the rank's own, whether forward, the peer's place further on."""

    stage: int
    forward: bool
    further: int


class StagePass(NamedTuple):
    """A stage's pass, as those that gather weights ahead see it."""

    stage: int
    forward: bool


Ahead = tuple[tuple[StagePass | None, StagePass | None], frozenset[int]]
"""What comes after a pass, as of `Token`."""

ALONE: Ahead = ((None, None), frozenset())


class Token(NamedTuple):
    """A step.

    Attributes:
        kind: its type (None: the end, after the last one).
        stage: its place among the rank's own.
        border: of a message.
        over: messages that were sent before, and have to be there by now.
        takes: the message with which a pass begins, and its turn among those that have come.
        last: whether it makes the stage's last gradient.
        ahead: the pass that is next, and the next one of another stage.
        later: stages that have passes still to come.
    """

    kind: type | None
    stage: int = 0
    border: Border | None = None
    over: tuple[Border, ...] = ()
    takes: tuple[Border, int] | None = None
    last: bool = False
    ahead: tuple[StagePass | None, StagePass | None] = (None, None)
    later: frozenset[int] = frozenset()


def word_of(steps: Sequence[ShardedStep], own_stages: Sequence[int], here: int, *, gathers: bool) -> list[Token]:
    """A rank's steps, and the end.

    Args:
        own_stages: the rank's.
        here: its place in the pipeline.
        gathers: whether it gathers weights ahead.
    """
    places = {stage: place for place, stage in enumerate(own_stages)}
    last = {step.stage: at for at, step in enumerate(steps) if isinstance(step, Backward | BackwardWeight)}
    ahead = _ahead(steps, places) if gathers else {}
    coming: dict[tuple[int, bool], list[tuple[int, Border]]] = defaultdict(list)
    leaving: dict[int, Border] = {}
    word: list[Token] = []
    for at, step in enumerate(steps):
        kind, stage = type(step), places[step.stage]
        if isinstance(step, Message):
            border = Border(stage, step.forward, step.peer - here)
            if kind is Recv:
                coming[stage, step.forward].append((step.microbatch, border))
                word.append(Token(kind, stage, border))
            else:
                before = leaving.pop(step.peer, None)
                leaving[step.peer] = border
                word.append(Token(kind, stage, border, () if before is None else (before,)))
        elif isinstance(step, USES):
            waiting, takes = coming[stage, kind is Forward], None
            turn = next((turn for turn, (m, _) in enumerate(waiting) if m == step.microbatch), None)
            if turn is not None:
                takes = waiting.pop(turn)[1], turn
            word.append(Token(kind, stage, None, (), takes, last.get(step.stage) == at, *ahead.get(at, ALONE)))
        else:
            word.append(Token(kind, stage, last=last.get(step.stage) == at))
    return [*word, Token(None, over=tuple(leaving.values()))]


def _ahead(steps: Sequence[ShardedStep], places: dict[int, int]) -> dict[int, Ahead]:
    """Find what comes after each pass."""
    found: dict[int, Ahead] = {}
    after: StagePass | None = None
    other: StagePass | None = None
    later: frozenset[int] = frozenset()
    for at in range(len(steps) - 1, -1, -1):
        step = steps[at]
        if isinstance(step, USES):
            here = StagePass(places[step.stage], isinstance(step, Forward))
            if after is not None and after.stage != here.stage:
                other = after
            found[at] = (after, other), later
            after = here
            later |= {here.stage}
    return found


def block_cuts(plan: RankPlan, layer: int) -> Cuts:
    """Where stages cut the block of a layer that is computed again."""
    if plan.layers[layer].keeps == "all":
        return None if plan.plan.recompute != "full" else ()
    blocks = plan.model.recomputable
    block = blocks[bisect_right(blocks, layer, key=lambda block: block.start) - 1]
    return tuple(stage[0] - block[0] for stage in plan.stages if block[0] < stage[0] <= block[-1])


def kind_of(figures: PricedSample, plan: RankPlan) -> Hashable:
    """Everything about a rank but its steps that its outline depends on; ranks of one kind have alike layers."""
    model, stages = plan.model, [plan.stages[stage] for stage in plan.own_stages]
    given_kept = figures.given_kept(plan)
    places = {layer: place for place, layer in enumerate(plan.layers)}
    layers = [
        (
            layer.keeps,
            layer.recompute.start - l if layer.recompute else None,
            len(layer.recompute),
            block_cuts(plan, l),
            l in given_kept,
            l in plan.weightless,
            places.get(plan.weight_of(l), -1),
            model.gathered_with(plan.weight_of(l)) - model.gathered_with(stage.start),
        )
        for stage in stages
        for l, layer in ((l, plan.layers[l]) for l in stage)
    ]
    weights = [
        (
            places.get(l, l),
            weight.parameters[1],
            weight.optimizer[1],
            weight.users,
            weight.cut_axes,
            weight.elements,
            weight.reduce_every_microbatch,
            weight.reduce_once,
            weight.direction_axes,
            weight.shared_by,
            weight.counted,
        )
        for l, weight in plan.weights.items()
    ]
    around = [
        (stage.start == 0, stage.stop == len(model.layers), figures.alike[stage.start : stage.stop + 1])
        for stage in stages
    ]
    adjacent = [after == before + 1 for before, after in zip(plan.own_stages, plan.own_stages[1:], strict=False)]
    axes = plan.gather_axes, plan.scatter_axes, plan.update_axes
    return tuple(layers), tuple(weights), tuple(around), tuple(adjacent), axes, plan.reduction_buffer
