"""Plans, outlined: every rank of a pipeline, from the passes of a sample and the plan's own order of work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardlab.language import OpKind
from shardlab.simulate.predict.compressed.clocks import Entry, Join, OutlinedStep, Row, Way
from shardlab.simulate.predict.compressed.rank import Outline
from shardlab.simulate.predict.compressed.runner import OutlineRunner, RankMoment, Token, kind_of, word_of
from shardlab.simulate.predict.compressed.sample import NOTHING, Crest, PricedSample, SizedPart
from shardlab.simulate.predict.estimate import Peak
from shardlab.simulate.timeline.memory import CATEGORIES
from shardlab.strategies.plan.rank_plan import RankPlan


class RankOutline(NamedTuple):
    """A rank's step, outlined.

    Attributes:
        kind: the ranks like it, of which one was outlined.
        stretches: what it does, in order.
    """

    kind: RankKind
    stretches: list[OutlinedStep]


class Outlines:
    """Outlines of a workload's ranks, for any number of microbatches."""

    def __init__(self, figures: PricedSample) -> None:
        self._figures = figures
        self.kinds: dict[Hashable, RankKind] = {}

    def of(self, plan: RankPlan, index: int) -> RankOutline:
        """Outline the step of a rank, by its number and the plan made out for it."""
        key = kind_of(self._figures, plan)
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = RankKind(self._figures, plan, index)
        gathers = bool(plan.gather_axes) and not plan.explicit_gathers
        return RankOutline(
            kind, kind.follow(word_of(plan.steps, plan.own_stages, plan.pipeline.index(index), gathers=gathers))
        )

    def row(self, rank: RankOutline, index: int) -> Row:
        """What a rank does and when it meets others."""
        entries: list[Entry] = []
        for stretch in rank.stretches:
            entries += stretch.entries
        return entries, [self._join(way, index) for way in rank.kind.ways]

    def _join(self, way: Way, index: int) -> Join:
        further = index + way.further * self._figures.apart
        source, target = (index, further) if way.sends else (further, index)
        seconds = self._figures.message(way.part, source, target)
        blocks = self._figures.prices.blocking_p2p * seconds if way.sends else 0.0
        return Join((source, target), frozenset((source, target)), 2, seconds, blocks)

    def peak(self, rank: RankOutline, plan: RankPlan, index: int) -> Peak:
        """The most that a rank holds."""
        held = most = 0
        crest, before = None, 0
        for at, stretch in enumerate(rank.stretches):
            if stretch.crest is not None and held + stretch.crest.bytes > most:
                most, crest, before = held + stretch.crest.bytes, stretch.crest, at
            held += stretch.bytes
        if crest is None:
            crest = Crest(0, NOTHING, OpKind.LOAD_WEIGHT, 0)
        each = zip(crest.held, *[stretch.held for stretch in rank.stretches[:before]], strict=True)
        by_category = {category.value: sum(bytes) for category, bytes in zip(CATEGORIES, each, strict=True)}
        layer = crest.layer if crest.layer < 0 else _layers(plan)[_layers(rank.kind.plan).index(crest.layer)]
        part = "" if layer < 0 else "head" if layer == len(plan.model.layers) else self._figures.place(layer)
        return Peak(index, most, by_category, crest.op, layer, 0, part)


def _layers(plan: RankPlan) -> list[int]:
    """A rank's layers, and those that follow its stages."""
    return [*plan.layers, *(plan.stages[stage].stop for stage in plan.own_stages)]


class RankKind:
    """Ranks that are alike but for the order of their steps.

    What a step does follows from the moment before it. So one is outlined of each moment and step that is met anywhere;
    moments are brought back for that.

    Attributes:
        plan: made out for the one that is outlined.
        ways: its messages.
        known: what a step does from a moment, and the moment after it.
    """

    def __init__(self, figures: PricedSample, plan: RankPlan, index: int) -> None:
        self._figures, self._index = figures, index
        self.plan = replace(plan, steps=tuple({type(step): step for step in plan.steps}.values()))
        self.ways: list[Way] = []
        self._parts: dict[int, SizedPart] = {}
        self._numbers: dict[RankMoment, int] = {}
        self._moments: list[RankMoment] = []
        self.known: dict[tuple[int, Token], tuple[OutlinedStep, int]] = {}
        self._messages: dict[Token, OutlinedStep] = {}
        self._load()

    def _load(self) -> None:
        """Begin with the weights alone."""
        self._runner = OutlineRunner(Outline(self._index, self.plan.plan.mesh, self._figures, self.ways), self.plan)
        self._runner.gradients.load()
        self._loaded = self._runner.outline.stretch()
        self._moment = self._number()

    def follow(self, word: Sequence[Token]) -> list[OutlinedStep]:
        """Take a rank's steps."""
        stretches, moment = [self._loaded], 0
        for token in word:
            if token.border is not None:
                stretch = self._messages.get(token)
                if stretch is None:
                    stretch = self._messages[token] = self._runner.message(token)
            else:
                known = self.known.get((moment, token))
                if known is None:
                    known = self.known[moment, token] = self._step(moment, token)
                stretch, moment = known
            stretches.append(stretch)
        return stretches

    def _step(self, moment: int, token: Token) -> tuple[OutlinedStep, int]:
        if self._moment < 0:
            self._load()
        if self._moment != moment:
            self._runner.moments.back(self._moments[moment], self._parts)
        stretch = self._runner.take(token)
        self._moment = self._number() if token.kind else -1  # the update changes what no moment tells
        return stretch, self._moment

    def _number(self) -> int:
        moment = self._runner.moments.now(self._parts)
        number = self._numbers.setdefault(moment, len(self._moments))
        if number == len(self._moments):
            self._moments.append(moment)
        return number
