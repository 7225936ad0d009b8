"""A rank's steps as a word, in which equal tokens are equal steps: of any microbatch, of any rank of its kind."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from shardlab.predict.passes import Cuts
from shardlab.predict.priced_sample import PricedSample
from shardlab.strategies.rank_plan import RankPlan
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.messages import Message, Recv
from shardlab.strategies.schedules.sharding import ShardedStep

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
            l in plan.bare,
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
    return tuple(layers), tuple(weights), tuple(around), tuple(adjacent), axes, plan.room
