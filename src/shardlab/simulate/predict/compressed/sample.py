"""Passes of a plan's layers, measured on a sample of the plan.

All blocks of a model are alike, all microbatches are, and so are the ranks of a pipeline but for their layers. So the
passes of three blocks, on one pipeline rank without data parallelism, tell those of all.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from shardlab.language import Group, Holds, Kind, OpKind, Rank, Sizes, Spec, Value
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.language.rules.spec import Space, form_of
from shardlab.language.tape import compute_op
from shardlab.simulate.predict.folding import Folded, fold
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.memory import CATEGORIES, CATEGORY_OF_KIND, MemoryLedger
from shardlab.simulate.timeline.prices import Bytes, Prices
from shardlab.simulate.timeline.run import Clocks
from shardlab.strategies.plan.layer_passes import LayerRunner
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import TracedRunner
from shardlab.strategies.plan.rank_plan import Keeps, RankPlan, model_layers
from shardlab.strategies.plan.resolve import resolve
from shardlab.strategies.schedules import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule
from shardlab.strategies.schedules.steps import ShardedStep


def passes_of(workload: Workload, done: Collection[type], cuts: Cuts) -> PassTable:
    """Measure the passes of a workload's layers.

    Args:
        workload: a sample, with the plan of the whole model.
        done: the kinds of steps that the plan has.
        cuts: layers of a block that is computed again at which stages begin (None: measure others).
    """
    sample = _on_one_rank(workload, done, cuts)
    cut = sample.plan, sample.model, sample.cut.layers
    numbers = sample.precision, sample.optimizer, sample.ema, sample.micro_batch_size, sample.microbatches
    several, host_seconds = workload.mesh.world > 1, workload.prices.host_seconds
    key = cut, numbers, id(sample.cluster), id(sample.recipe), several, host_seconds
    if key not in _MEASURED:
        if len(_MEASURED) == MOST_MEASURED:
            _MEASURED.clear()
        _MEASURED[key] = sample, _measured(sample, workload.prices, workload.kept_sizes)
    return _MEASURED[key][1]


MOST_MEASURED = 256
"""Samples whose passes are kept: in a search many plans differ in their pipeline and their data parallelism alone."""

_MEASURED: dict[Hashable, tuple[Workload, PassTable]] = {}
"""Passes of each sample, by all that they depend on. A cluster and a recipe count by identity, so the sample is kept
with them: no other object can get their `id` then."""


def _measured(sample: Workload, prices: Prices, kept: Sizes) -> PassTable:
    """Trace and replay a sample, and measure its passes."""
    plan, sizes = sample.plan, sample.sizes
    assert isinstance(plan, Plan)
    marks: list[tuple[int, PassKey]] = []
    borders: dict[tuple[Kind, int], Spec] = {}

    async def strategy(rank: Rank) -> None:
        rank_plan = resolve(plan, rank.sizes, sample.microbatches, rank.index)
        await _MarkedRunner(rank, rank_plan, _MarkedLayers(rank, rank_plan, marks, borders)).run()

    traced = fold(plan, sizes, sample.microbatches, strategy)
    measuring = PassMeter(traced, prices, Bytes(kept))
    by_key = {key: measuring.between(start, stop, key) for (start, key), (stop, _) in pairwise(marks) if key}
    return PassTable(by_key, borders, resolve(plan, sizes, sample.microbatches, 0))


def _on_one_rank(workload: Workload, done: Collection[type], cuts: Cuts) -> Workload:
    """Put a sample of a workload on one pipeline rank, without data parallelism."""
    plan = workload.plan
    assert isinstance(plan, Plan)
    split, both = BackwardInput in done, {Backward, BackwardInput} <= set(done)
    plain = "none" if plan.recompute == "full" or isinstance(plan.recompute, tuple) else plan.recompute
    sampled = replace(
        plan,
        mesh=replace(plan.mesh, pp=1, dp_replicate=1, dp_shard=1),
        schedule=Schedule("sample", _last_in_halves if split else _one_by_one, stages_per_rank=None),
        stages_per_rank=1,
        layers_per_stage=(),
        shard_parameters=(),
        shard_gradients=(),
        shard_optimizer=(),
        reduce_every_microbatch=(),
        reduce_at="step",
        recompute=plain if cuts is None else "full",
    )
    if cuts:
        layers = model_layers(workload.sizes)
        stages = {layers.pipeline_cuts.index(block[0] + cut) for block in layers.recomputable for cut in cuts}
        each = [stop - start for start, stop in pairwise((0, *sorted(stages), layers.pipeline_units))]
        sampled = replace(sampled, stages_per_rank=len(each), layers_per_stage=tuple(each))
    sample = replace(workload, plan=sampled, microbatches=(3 if both else 2) * plan.mesh.ep)
    sample.__dict__["cut"] = workload.cut  # a pipeline may want finer layers than a plan of one rank
    return sample


def _one_by_one(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    for i in range(microbatches):
        yield from (Forward(stage, i) for stage in range(stages_per_rank))
        yield from (Backward(stage, i) for stage in reversed(range(stages_per_rank)))


def _last_in_halves(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    yield from _one_by_one(rank, ranks, microbatches - 1, stages_per_rank)
    yield from (Forward(stage, microbatches - 1) for stage in range(stages_per_rank))
    for stage in reversed(range(stages_per_rank)):
        yield BackwardInput(stage, microbatches - 1)
        yield BackwardWeight(stage, microbatches - 1)


class _MarkedRunner(TracedRunner):
    """A rank that marks where passes begin and end."""

    layers: _MarkedLayers

    async def step(self, step: ShardedStep) -> None:
        await super().step(step)
        self.layers.mark(-1)

    async def forward(self, stage: int, m: int) -> None:
        self.layers.mark(m, "load")
        await super().forward(stage, m)


class _MarkedLayers(LayerRunner):
    """Passes that are marked, and the values between them."""

    def __init__(
        self, rank: Rank, plan: RankPlan, marks: list[tuple[int, PassKey]], borders: dict[tuple[Kind, int], Spec]
    ) -> None:
        super().__init__(rank, plan)
        self.marks = marks
        self.borders = borders
        self.inputs = [[port.kind for port in layer.inputs] for layer in plan.model.layers]

    def mark(self, m: int, *key: object) -> None:
        """Mark a pass's beginning; those of the first microbatch do not count, whose gradients are added to none."""
        self.marks.append((len(self._rank.ops), key if m > 0 else ()))

    def meet(self, layer: int, m: int, kinds: Mapping[Kind, Kind] | None = None) -> None:
        """Note the values with which a layer's pass begins, or the gradients with which it ends."""
        for kind in self.inputs[layer]:
            made = kinds[kind] if kinds else kind
            self.borders[made, layer] = self._rank.store(made)[layer, m].spec

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps, *, stores_outputs: bool = True) -> None:
        self.mark(m, "forward", layer, keeps, stores_outputs)
        self.meet(layer, m)
        await super().forward(layer, m, weight, keeps, stores_outputs=stores_outputs)

    async def loss(self, m: int) -> None:
        self.mark(m, "loss", len(self._rank.layers))
        await super().loss(m)

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        self.mark(m, "backward", layer)
        gradient = await super().backward(layer, m, weight)
        self.meet(layer, m, GRADIENT_OF)
        self.mark(-1)  # the sum of gradients comes next
        return gradient

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        self.mark(m, "backward_input", layer)
        await super().backward_input(layer, m, weight)
        self.meet(layer, m, GRADIENT_OF)
        self.mark(-1)

    def backward_weight(self, layer: int, m: int) -> Value:
        self.mark(m, "backward_weight", layer)
        gradient = super().backward_weight(layer, m)
        self.mark(-1)
        return gradient


# Seconds and bytes of a sample's passes, from the replay of its tape.


FREE, WAIT = OpKind.FREE, OpKind.WAIT
MAIN = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})


class PassMeter:
    """Measures passes, as parts of a sample's tape."""

    def __init__(self, traced: Folded, prices: Prices, size: Bytes) -> None:
        self.tape, self.times = traced.program.tapes[0], Clocks(traced, prices).run()
        self.memory = MemoryLedger(self.tape, traced.specs[0], size, real=True, counters=True, sizes=size.sizes).run()
        self.moments = self._moments(prices.blocking_p2p)

    def _moments(self, blocking: float) -> list[float]:
        """When compute gets to each op."""
        moments, clock = list[float](), 0.0
        issued: dict[int, int] = {}
        idle_until = {idle.op: idle.until for idle in self.times.idle[0]}
        for at, op in enumerate(self.tape):
            moments.append(clock)
            if op.kind is WAIT:
                clock = idle_until.get(issued[op.handle], clock)
            elif op.handle >= 0:
                issued[op.handle] = at
                clock += blocking * self._seconds(at) if op.kind is OpKind.SEND else 0.0
            elif op.kind is not FREE:
                clock = self.times.ends[0][at]
        return moments

    def _seconds(self, at: int) -> float:
        return self.times.ends[0][at] - self.times.starts[0][at]

    def between(self, start: int, stop: int, key: PassKey) -> Pass:
        """Measure a pass, from one op up to another."""
        layer = key[1] if len(key) > 1 else 0
        assert isinstance(layer, int)
        tape = self.tape[start:stop]
        main = start + next((at for at, op in enumerate(tape) if op.kind in MAIN), len(tape))
        meetings, rest = self._meetings(start, stop)
        seconds = rest + sum(meeting.after + meeting.seconds for meeting in meetings)
        if rest < 0:  # communication beside compute, on streams that nobody else uses
            seconds, meetings = self.moments[stop] - self.moments[start], ()
        return Pass(
            seconds,
            meetings,
            rest if rest >= 0 else seconds,
            _less(self.memory.at_starts[stop], self.memory.at_starts[start]),
            (
                self._crest(start, range(start, main), layer),
                self._crest(start, range(main, min(main + 1, stop)), layer),
                self._crest(start, range(main + 1, stop), layer),
            ),
        )

    def _crest(self, start: int, ops: range, layer: int) -> Crest | None:
        timed = [at for at in ops if self.tape[at].kind not in (FREE, WAIT)]
        if not timed:
            return None
        at = max(timed, key=self.memory.during.__getitem__)
        held = _less(self.memory.counters[at], self.memory.at_starts[start])
        return Crest(sum(held), held, self.tape[at].kind, self.tape[at].layer - layer)

    def _meetings(self, start: int, stop: int) -> tuple[tuple[Meeting, ...], float]:
        """Collectives that are awaited at once, and the seconds after the last one; below 0: others are not."""
        found: list[Meeting] = []
        after, issued = 0.0, -1
        for at in range(start, stop):
            op = self.tape[at]
            if op.kind is FREE:
                continue
            if op.kind is WAIT:
                if op.handle != issued:
                    return (), -1.0
                issued = -1
            elif issued >= 0:
                return (), -1.0
            elif op.handle < 0:
                after += self._seconds(at)
            elif op.group is None:
                return (), -1.0
            else:
                found.append(Meeting(after, op.group, self._seconds(at)))
                after, issued = 0.0, op.handle
        return tuple(found), after


def _less(held: Held, other: Held) -> Held:
    return tuple([more - less for more, less in zip(held, other, strict=True)])


# PricedSample that the outlines of one workload's ranks share: sizes, prices and passes, each found out once.


class SizedPart(NamedTuple):
    """A part of a weight, of its gradient or of its optimizer's state, of a layer of the sample.

    Attributes:
        wire, room: its bytes where it is communicated, and where it is held.
        slot: the category that these count in, by its place.
    """

    spec: Spec
    wire: int
    room: int
    slot: int


class PricedSample:
    """Sizes, prices and passes of a workload, from its sample.

    Args:
        done: the kinds of steps that its plan has.

    Attributes:
        alike: for each layer the sample's layer that it is like.
        apart: how far one rank of a pipeline is from the next.
        merges: whether communication that is awaited at once takes as long as compute does.
        chains: passes of whole stages, by the passes in them.
    """

    def __init__(self, workload: Workload, done: Collection[type]) -> None:
        self._sample, self._done = workload.sample, done
        self.alike = workload.repeated.alike
        self.place = workload.repeated.place
        self.apart = workload.mesh.world // workload.mesh.pp
        self.sizes, self.prices = self._sample.sizes, self._sample.prices
        self.merges = not self.prices.slows
        self.chains: dict[Hashable, Pass] = {}
        self._wire, self._room = Bytes(self.sizes), Bytes(self._sample.kept_sizes)
        self._saves = self._sample.kept_sizes.saves_residual
        self._passes: dict[Cuts, PassTable] = {}
        self._given_kept: dict[Cuts, frozenset[int]] = {}
        self._parts: dict[Hashable, SizedPart] = {}
        self._seconds: dict[Hashable, float] = {}

    def passes(self, cuts: Cuts = None) -> PassTable:
        """Passes of blocks that are computed again and are cut so by stages (None: of others)."""
        known = self._passes.get(cuts)
        if known is None:
            known = self._passes[cuts] = passes_of(self._sample, self._done, cuts)
        return known

    def given_kept(self, plan: RankPlan) -> frozenset[int]:
        """The layers of a rank that are given a residual stream in what is kept of the layer before (`residuals`)."""
        return layers_given_kept(plan, self.alike, self._saves)

    def measured_given_kept(self, cuts: Cuts) -> frozenset[int]:
        """The layers of the sample that were given one so when its passes were measured."""
        known = self._given_kept.get(cuts)
        if known is None:
            plan = self.passes(cuts).plan
            known = self._given_kept[cuts] = layers_given_kept(plan, range(len(plan.model.layers)), self._saves)
        return known

    def part(self, kind: Kind, layer: int, pieces: int = 1, of: int = 1) -> SizedPart:
        """So many of so many pieces of a layer's parameters, or of something as large."""
        like = self.alike[layer]
        key = (kind, like, pieces, of)
        known = self._parts.get(key)
        if known is None:
            spec = Spec(form_of(kind, like, 0, Space(0), Holds((1 << pieces) - 1, of)))
            known = self._parts[key] = self.measured(spec)
        return known

    def border(self, kind: Kind, layer: int) -> SizedPart:
        """The value of a kind that enters a layer, or its gradient."""
        key = (kind, self.alike[layer])
        known = self._parts.get(key)
        if known is None:
            known = self._parts[key] = self.measured(self.passes().borders[key])
        return known

    def measured(self, spec: Spec) -> SizedPart:
        return SizedPart(spec, self._wire(spec), self._room(spec), CATEGORY_OF_KIND[spec.kind])

    def compute(self, kind: OpKind, part: SizedPart) -> float:
        """Seconds of an op on parameters, their gradient or a scalar."""
        form = part.spec.form
        key = (kind, form)
        known = self._seconds.get(key)
        if known is None:
            op = compute_op(kind, form.layer, (0,), (0,))
            known = self._seconds[key] = self.prices.compute_time(op, {0: part.spec}, self.sizes)
        return known

    def collective(self, kind: OpKind, bytes: int, group: Group) -> float:
        """Seconds of a collective, from its last member's arrival."""
        key = (kind, bytes, group)
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = self.prices.collective_time(kind, bytes, group)
        return known

    def message(self, part: SizedPart, source: int, target: int) -> float:
        """Seconds of a message."""
        key = (part.spec.form, part.wire, source, target)
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = self.prices.message_times(part.spec.kind, part.wire, source, target)[0]
        return known


# Passes: what a layer's forward or backward pass takes in seconds and bytes.


Held = tuple[int, ...]
"""Bytes, in the order of `CATEGORIES`."""

NOTHING: Held = (0,) * len(CATEGORIES)


class Crest(NamedTuple):
    """The most that a pass holds beyond what was held when it began.

    Attributes:
        bytes, held: how much, in all and by category.
        op, layer: during which op, on which layer, counted from the pass's own.
    """

    bytes: int
    held: Held
    op: OpKind
    layer: int


class Meeting(NamedTuple):
    """A collective that is awaited at once.

    Attributes:
        after: seconds of compute before it, since the one before.
        group, seconds: who meets, for how long.
    """

    after: float
    group: Group
    seconds: float


NO_CRESTS = (None, None, None)


@dataclass(frozen=True)
class Pass:
    """A layer's pass, or several one after the other.

    Attributes:
        seconds: from its beginning to its end, on idle streams.
        meetings: its collectives, where all are awaited at once.
        rest: seconds of compute after the last of these.
        held: what it leaves behind, less what was there before.
        crests: the most that it holds before, at and after the op that computes with the weight.
        bytes, changes: `held` in all, and by those categories of which it is not 0.
        groups: those that meet.
    """

    seconds: float
    meetings: tuple[Meeting, ...]
    rest: float
    held: Held
    crests: tuple[Crest | None, Crest | None, Crest | None]
    bytes: int = field(init=False)
    changes: tuple[tuple[int, int], ...] = field(init=False)
    groups: frozenset[Group] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", sum(self.held))
        object.__setattr__(self, "changes", tuple([(slot, change) for slot, change in enumerate(self.held) if change]))
        object.__setattr__(self, "groups", frozenset(meeting.group for meeting in self.meetings))


PassKey = tuple[object, ...]

Cuts = tuple[int, ...] | None
"""Layers of a block, from its first one, at which stages begin, where it is computed again; None where it is not."""


class PassTable(NamedTuple):
    """Passes of a sample's layers.

    Attributes:
        by_key: each pass, by its name, its layer, and what else tells it apart.
        borders: the value of a kind that enters a layer, or its gradient.
        plan: of the sample's rank.
    """

    by_key: Mapping[PassKey, Pass]
    borders: Mapping[tuple[Kind, int], Spec]
    plan: RankPlan


# Residual streams that lie in what layers keep, and so take no room of their own.
#
# `shardlab.simulate.timeline.memory.MemoryLedger` says when that is. A pass of a sample is measured beside the
# sample's other layers, so it is corrected where the layer before it, on the rank that is outlined, keeps more or
# less.


def layers_given_kept(plan: RankPlan, alike: Sequence[int], saves: Sequence[bool]) -> frozenset[int]:
    """The layers that are given a residual stream which lies in what the layer that makes it keeps.

    Args:
        plan: of the rank that has both layers.
        alike: for each layer, the one whose sizes it has.
        saves: whether a layer's saved activations have the residual stream in them (see `Sizes.saves_residual`).
    """
    return frozenset(
        port.layer
        for number, layer in plan.layers.items()
        if saves and saves[alike[number]] and layer.keeps == "all"
        for port in plan.model.layers[number].outputs
        if port.kind is Kind.RESIDUAL
    )


def corrected(done: Pass, keeps: Keeps, bytes: int, slot: int) -> Pass:
    """A forward pass at whose end so many bytes more are held, since its residual stream was not measured as it is.

    A layer that keeps all has read the residual by then. Others read it as something that may be there for longer than
    what layers keep, so that it takes room from the layer's own op on.

    Args:
        done: the pass of a sample.
        keeps: what the layer keeps.
        bytes: of the residual stream; below 0 where the sample's takes room that the rank's does not.
        slot: the category that these count in, by its place.
    """
    before, main, after = done.crests
    crests = before, main if keeps == "all" else _higher(main, bytes, slot), _higher(after, bytes, slot)
    return replace(done, held=_more(done.held, bytes, slot), crests=crests)


def _higher(crest: Crest | None, bytes: int, slot: int) -> Crest | None:
    return crest and crest._replace(bytes=crest.bytes + bytes, held=_more(crest.held, bytes, slot))


def _more(held: Held, bytes: int, slot: int) -> Held:
    return (*held[:slot], held[slot] + bytes, *held[slot + 1 :])
