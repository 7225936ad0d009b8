"""Passes of layers, measured on three blocks of the model.

The blocks of a model are identical, and so are microbatches. So a sample of the workload (three blocks on one pipeline
rank, without data parallelism) has every kind of pass that the workload has. `measure_passes` traces the sample with a
runner that marks where passes begin and end, replays its tape, and makes a `MeasuredPass` of each marked part: its
seconds, its collectives, its change of memory and its peaks.

The parts, in order: the sample and its marks; `PassMeter`, which measures a part of its tape; `PricedSample`, which
has the passes, sizes and prices of one workload; the records `MeasuredPass` and `PassTable`; and a correction for
residual streams, whose memory in a pass of the sample may differ from that in the same pass of a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, final

from shardlab.language import Group, Holds, Kind, OpKind, Rank, Sizes, Spec, Value
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.language.rules.spec import Space, form_of
from shardlab.language.tape import compute_op
from shardlab.simulate.predict.folding import Folded, fold
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.event_loop import IdlePattern
from shardlab.simulate.timeline.memory import CATEGORY_OF_KIND, CategoryBytes, MemoryPeak, TapeMemory
from shardlab.simulate.timeline.prices import Awaited, Bytes, Prices, awaited_by
from shardlab.simulate.timeline.run import Clocks
from shardlab.strategies.plan.layer_passes import LayerRunner
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import TracedRunner
from shardlab.strategies.plan.rank_plan import Keeps, RankPlan, model_layers
from shardlab.strategies.plan.resolve import resolve
from shardlab.strategies.schedules import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule
from shardlab.strategies.schedules.steps import ShardedStep


def measure_passes(workload: Workload, step_types: Collection[type], cuts: Cuts) -> PassTable:
    """Return the measured passes of a workload's layers.

    Args:
        workload: a workload with few blocks, and the plan of the whole model.
        step_types: types of the steps in the plan's schedule.
        cuts: layers at which pipeline stages cut a recomputed block (None: measure blocks that are not recomputed).
    """
    sample = _on_one_rank(workload, step_types, cuts)
    cut = sample.plan, sample.model, sample.cut.layers
    numbers = sample.precision, sample.optimizer, sample.ema, sample.micro_batch_size, sample.microbatches
    several, host_seconds = workload.mesh.world > 1, workload.prices.host_seconds
    key = cut, numbers, id(sample.cluster), id(sample.recipe), several, host_seconds
    if key not in _MEASURED:
        if len(_MEASURED) == MOST_MEASURED:
            _MEASURED.clear()
        _MEASURED[key] = sample, _measure_sample(sample, workload.prices, workload.kept_sizes)
    return _MEASURED[key][1]


MOST_MEASURED = 256
"""Number of cached samples: many plans of a search differ only in their pipeline and data parallelism."""

_MEASURED: dict[Hashable, tuple[Workload, PassTable]] = {}
"""Passes of each sample, by everything on which they depend. A cluster and a recipe count by identity; the sample is
stored with them, so that no other object can get their `id`."""


def _measure_sample(sample: Workload, prices: Prices, kept: Sizes) -> PassTable:
    """Trace and replay a sample, and measure each of its passes."""
    plan, sizes = sample.plan, sample.sizes
    assert isinstance(plan, Plan)
    marks: list[tuple[int, PassKey]] = []
    boundaries: dict[tuple[Kind, int], Spec] = {}

    async def strategy(rank: Rank) -> None:
        rank_plan = resolve(plan, rank.sizes, sample.microbatches, rank.index)
        await _MarkedRunner(rank, rank_plan, _MarkedLayers(rank, rank_plan, marks, boundaries)).run()

    traced = fold(plan, sizes, sample.microbatches, strategy)
    meter = PassMeter(traced, prices, Bytes(kept))
    by_key = {key: meter.measure(start, stop, key) for (start, key), (stop, _) in pairwise(marks) if key}
    return PassTable(by_key, boundaries, resolve(plan, sizes, sample.microbatches, 0))


def _on_one_rank(workload: Workload, step_types: Collection[type], cuts: Cuts) -> Workload:
    """Return the workload on one pipeline rank without data parallelism, with as few microbatches as possible."""
    plan = workload.plan
    assert isinstance(plan, Plan)
    split, both = BackwardInput in step_types, {Backward, BackwardInput} <= set(step_types)
    plain = "none" if plan.recomputes_blocks else plan.recompute
    sampled = replace(
        plan,
        mesh=replace(plan.mesh, pp=1, dp_replicate=1, dp_shard=1),
        schedule=Schedule("sample", _last_split_schedule if split else _unsplit_schedule, stages_per_rank=None),
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
    sample.__dict__["cut"] = workload.cut  # a pipeline may need finer layers than a plan of one rank
    return sample


def _unsplit_schedule(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    for i in range(microbatches):
        yield from (Forward(stage, i) for stage in range(stages_per_rank))
        yield from (Backward(stage, i) for stage in reversed(range(stages_per_rank)))


def _last_split_schedule(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    yield from _unsplit_schedule(rank, ranks, microbatches - 1, stages_per_rank)
    yield from (Forward(stage, microbatches - 1) for stage in range(stages_per_rank))
    for stage in reversed(range(stages_per_rank)):
        yield BackwardInput(stage, microbatches - 1)
        yield BackwardWeight(stage, microbatches - 1)


class _MarkedRunner(TracedRunner):
    """Runner that marks the ends of the schedule's steps, and the loading of a batch."""

    layers: _MarkedLayers

    async def step(self, step: ShardedStep) -> None:
        await super().step(step)
        self.layers.mark(-1)

    async def forward(self, stage: int, m: int) -> None:
        self.layers.mark(m, "load")
        await super().forward(stage, m)


class _MarkedLayers(LayerRunner):
    """Layers that mark the start and the end of their passes, and record the specs of the values between them."""

    def __init__(
        self, rank: Rank, plan: RankPlan, marks: list[tuple[int, PassKey]], boundaries: dict[tuple[Kind, int], Spec]
    ) -> None:
        super().__init__(rank, plan)
        self.marks = marks
        self.boundaries = boundaries
        self.inputs = [[port.kind for port in layer.inputs] for layer in plan.model.layers]

    def mark(self, m: int, *key: object) -> None:
        """Mark that a pass with this key begins here, and that the previous one ends.

        Passes of the first microbatch have no key and are not measured, since they add no gradients to older ones.
        """
        self.marks.append((len(self._rank.ops), key if m > 0 else ()))

    def note_boundary(self, layer: int, m: int, kinds: Mapping[Kind, Kind] | None = None) -> None:
        """Record the specs of the values that enter a layer, or of their gradients."""
        for kind in self.inputs[layer]:
            made = kinds[kind] if kinds else kind
            self.boundaries[made, layer] = self._rank.store(made)[layer, m].spec

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps, *, stores_outputs: bool = True) -> None:
        self.mark(m, "forward", layer, keeps, stores_outputs)
        self.note_boundary(layer, m)
        await super().forward(layer, m, weight, keeps, stores_outputs=stores_outputs)

    async def loss(self, m: int) -> None:
        self.mark(m, "loss", len(self._rank.layers))
        await super().loss(m)

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        self.mark(m, "backward", layer)
        gradient = await super().backward(layer, m, weight)
        self.note_boundary(layer, m, GRADIENT_OF)
        self.mark(-1)  # the sum of gradients comes next
        return gradient

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        self.mark(m, "backward_input", layer)
        await super().backward_input(layer, m, weight)
        self.note_boundary(layer, m, GRADIENT_OF)
        self.mark(-1)

    def backward_weight(self, layer: int, m: int) -> Value:
        self.mark(m, "backward_weight", layer)
        gradient = super().backward_weight(layer, m)
        self.mark(-1)
        return gradient


FREE, WAIT = OpKind.FREE, OpKind.WAIT
MAIN = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})


class PassMeter:
    """Meter of passes (ranges of ops) of the tape of a sample, which is a model with three blocks.

    Attributes:
        tape, times: the tape, and the start and end of its ops.
        memory: the bytes held at each op.
        arrivals: for each op, the time in seconds at which the compute stream gets to it. A collective may start later.
    """

    def __init__(self, traced: Folded, prices: Prices, size: Bytes) -> None:
        self.tape, self.times = traced.program.tapes[0], Clocks(traced, prices).run()
        self.memory = TapeMemory(self.tape, traced.specs[0], size, real=True, counters=True, sizes=size.sizes).run()
        self.arrivals = self._arrivals(prices.blocking_p2p)
        self._program, self._notes_waits = traced.program, prices.contention > 0

    def _arrivals(self, blocking: float) -> list[float]:
        """Return the time in seconds at which the compute stream gets to each op."""
        arrivals, clock = list[float](), 0.0
        issued: dict[int, int] = {}
        idle_until = {idle.op: idle.until for idle in self.times.idle[0]}
        for at, op in enumerate(self.tape):
            arrivals.append(clock)
            if op.kind is WAIT:
                clock = idle_until.get(issued[op.handle], clock)
            elif op.handle >= 0:
                issued[op.handle] = at
                clock += blocking * self._seconds(at) if op.kind is OpKind.SEND else 0.0
            elif op.kind is not FREE:
                clock = self.times.ends[0][at]
        return arrivals

    def _seconds(self, at: int) -> float:
        return self.times.ends[0][at] - self.times.starts[0][at]

    def measure(self, start: int, stop: int, key: PassKey) -> MeasuredPass:
        """Measure the pass from op `start` up to, but not including, op `stop`."""
        layer = key[1] if len(key) > 1 else 0
        assert isinstance(layer, int)
        tape = self.tape[start:stop]
        main = start + next((at for at, op in enumerate(tape) if op.kind in MAIN), len(tape))
        collectives, rest = self._collectives(start, stop)
        seconds = rest + sum(collective.after + collective.seconds for collective in collectives)
        if rest < 0:  # communication beside compute, on streams without other communication
            seconds, collectives = self.arrivals[stop] - self.arrivals[start], ()
        began, ended = self.arrivals[start], self.arrivals[stop]
        idle = [each for each in self.times.idle[0] if began <= each.since and each.until <= ended]
        exposed = [
            (awaited_by(self._program, 0, self.tape[op]), max(0.0, until - max(since, self.times.ready[0][op])))
            for op, since, until in idle
        ]
        if rest >= 0:
            exposed = [((each.kind, each.group.axis), each.seconds) for each in collectives]
        return MeasuredPass(
            seconds,
            collectives,
            rest if rest >= 0 else seconds,
            _subtract(self.memory.at_starts[stop], self.memory.at_starts[start]),
            (
                self._peak(start, range(start, main), layer),
                self._peak(start, range(main, min(main + 1, stop)), layer),
                self._peak(start, range(main + 1, stop), layer),
            ),
            tuple([(each.since - began, each.until - began) for each in idle]) if self._notes_waits else (),
            add_exposed(exposed),
        )

    def _peak(self, start: int, ops: range, layer: int) -> MemoryPeak | None:
        timed = [at for at in ops if self.tape[at].kind not in (FREE, WAIT)]
        if not timed:
            return None
        at = max(timed, key=self.memory.during.__getitem__)
        held = _subtract(self.memory.counters[at], self.memory.at_starts[start])
        return MemoryPeak(sum(held), held, self.tape[at].kind, self.tape[at].layer - layer)

    def _collectives(self, start: int, stop: int) -> tuple[tuple[PassCollective, ...], float]:
        """Return a pass's collectives, and the seconds of compute after the last one.

        If a collective is not awaited immediately, or the pass has a message, the result is ((), -1.0).
        """
        found: list[PassCollective] = []
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
                found.append(PassCollective(after, op.group, self._seconds(at), op.kind))
                after, issued = 0.0, op.handle
        return tuple(found), after


def _subtract(held: CategoryBytes, other: CategoryBytes) -> CategoryBytes:
    return tuple([more - less for more, less in zip(held, other, strict=True)])


@dataclass(frozen=True, eq=False, slots=True)
class SizedPart:
    """Value or part of a value, with its sizes: an activation, or a slice of a weight, gradient or optimizer state.

    A `PricedSample` has each part once, so parts are compared by identity, which is quick.

    Attributes:
        wire_bytes, held_bytes: bytes in communication, and in memory.
        slot: index of the memory category.
    """

    spec: Spec
    wire_bytes: int
    held_bytes: int
    slot: int


class PricedSample:
    """Sizes, prices and measured passes of a workload, computed from its sample and cached.

    Args:
        workload: the whole workload.
        step_types: types of the steps in its schedule.
        sample_layer: for each layer of the short model, the layer of the sample that is identical to it.

    Attributes:
        rank_stride: difference between the numbers of adjacent ranks of a pipeline.
        merges: whether communication that is awaited immediately can count as compute. It cannot if ranks lose time
            beyond contention at each wait.
        notes_waits: whether the moments of such communication count, since compute is slower beside other
            communication.
        joined_passes: passes of whole stages by the keys of their layers' passes, and passes with their gradients.
    """

    def __init__(self, workload: Workload, step_types: Collection[type], sample_layer: Sequence[int]) -> None:
        self._sample, self._step_types = workload.sample, step_types
        self.sample_layer = sample_layer
        self.place = workload.repeated.place
        self.rank_stride = workload.mesh.world // workload.mesh.pp
        self.sizes, self.prices = self._sample.sizes, self._sample.prices
        self.merges, self.notes_waits = not self.prices.lag.most, self.prices.contention > 0
        self.joined_passes: dict[Hashable, MeasuredPass] = {}
        self._wire_bytes, self._held_bytes = Bytes(self.sizes), Bytes(self._sample.kept_sizes)
        self._saves = self._sample.kept_sizes.saves_residual
        self._passes: dict[Cuts, PassTable] = {}
        self._shared_residuals: dict[Cuts, frozenset[int]] = {}
        self._parts: dict[Hashable, SizedPart] = {}
        self._seconds: dict[Hashable, float] = {}

    def passes(self, cuts: Cuts = None) -> PassTable:
        """Return the passes of the sample if pipeline stages cut recomputed blocks at these layers.

        Args:
            cuts: the layers (None: no block is recomputed).
        """
        known = self._passes.get(cuts)
        if known is None:
            known = self._passes[cuts] = measure_passes(self._sample, self._step_types, cuts)
        return known

    def shared_residuals(self, plan: RankPlan) -> frozenset[int]:
        """Return the layers of a rank whose incoming residual lies in the value that the previous layer saves."""
        return shared_residual_layers(plan, self.sample_layer, self._saves)

    def sample_shared_residuals(self, cuts: Cuts) -> frozenset[int]:
        """Return the layers of the sample whose incoming residual lies in the value that the previous layer saves."""
        known = self._shared_residuals.get(cuts)
        if known is None:
            plan = self.passes(cuts).plan
            layers = range(len(plan.model.layers))
            known = self._shared_residuals[cuts] = shared_residual_layers(plan, layers, self._saves)
        return known

    def part(self, kind: Kind, layer: int, pieces: int = 1, of: int = 1) -> SizedPart:
        """Return `pieces` of the `of` pieces of a layer's parameters, gradient or optimizer state."""
        like = self.sample_layer[layer]
        key = (kind, like, pieces, of)
        known = self._parts.get(key)
        if known is None:
            spec = Spec(form_of(kind, like, 0, Space(0), Holds((1 << pieces) - 1, of)))
            known = self._parts[key] = self.size(spec)
        return known

    def boundary(self, kind: Kind, layer: int) -> SizedPart:
        """Return the value of a kind that enters a layer, or the gradient of such a value."""
        key = (kind, self.sample_layer[layer])
        known = self._parts.get(key)
        if known is None:
            known = self._parts[key] = self.size(self.passes().boundaries[key])
        return known

    def size(self, spec: Spec) -> SizedPart:
        return SizedPart(spec, self._wire_bytes(spec), self._held_bytes(spec), CATEGORY_OF_KIND[spec.kind])

    def compute(self, kind: OpKind, part: SizedPart) -> float:
        """Return the seconds of an op on parameters, a gradient or a scalar."""
        form = part.spec.form
        key = (kind, form)
        known = self._seconds.get(key)
        if known is None:
            op = compute_op(kind, form.layer, (0,), (0,))
            known = self._seconds[key] = self.prices.compute_time(op, {0: part.spec}, self.sizes)
        return known

    def collective(self, kind: OpKind, bytes: int, group: Group) -> float:
        """Return the seconds of a collective from the arrival of its last member."""
        key = (kind, bytes, group)
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = self.prices.collective_time(kind, bytes, group)
        return known

    def message(self, part: SizedPart, source: int, target: int) -> float:
        """Return the seconds of a message."""
        key = (part.spec.form, part.wire_bytes, source, target)
        known = self._seconds.get(key)
        if known is None:
            known = self._seconds[key] = self.prices.message_times(part.spec.kind, part.wire_bytes, source, target)[0]
        return known


class PassCollective(NamedTuple):
    """Collective of a pass that is awaited immediately.

    Attributes:
        after: seconds of compute between the previous collective and this one.
        group, seconds, kind: the group, the duration, and the kind.
    """

    after: float
    group: Group
    seconds: float
    kind: OpKind


def add_exposed(parts: Iterable[tuple[Awaited, float]]) -> tuple[tuple[Awaited, float], ...]:
    """Return seconds of waits by kind and axis, those of equal kind and axis added up."""
    sums = dict[Awaited, float]()
    for awaited, seconds in parts:
        sums[awaited] = sums.get(awaited, 0.0) + seconds
    return tuple(sums.items())


NO_PEAKS = (None, None, None)


@final
@dataclass(frozen=True)
class MeasuredPass:
    """Forward or backward pass of a layer, or of several layers one after the other.

    Attributes:
        seconds: duration, if streams are idle.
        collectives: its collectives, if each is awaited immediately; otherwise their time is in `rest`.
        rest: seconds of compute after the last of these.
        delta: by category, bytes held after the pass minus bytes held before it.
        peaks: peak of the ops before the one that computes with the weight, of that op, and of the ops after it. Layers
            count from the pass's first one.
        waits: if communication slows compute down, the intervals in which the pass does not compute.
        exposed: seconds of `seconds` in which the pass waits for communication, by kind and axis.
        bytes, changes: total of `delta`, and (category, bytes) for entries other than 0.
        groups: groups of the collectives.
    """

    seconds: float
    collectives: tuple[PassCollective, ...]
    rest: float
    delta: CategoryBytes
    peaks: tuple[MemoryPeak | None, MemoryPeak | None, MemoryPeak | None]
    waits: tuple[tuple[float, float], ...] = ()
    exposed: tuple[tuple[Awaited, float], ...] = ()
    bytes: int = field(init=False)
    changes: tuple[tuple[int, int], ...] = field(init=False)
    groups: frozenset[Group] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", sum(self.delta))
        object.__setattr__(self, "changes", tuple([(slot, change) for slot, change in enumerate(self.delta) if change]))
        object.__setattr__(self, "groups", frozenset(collective.group for collective in self.collectives))

    @cached_property
    def idle(self) -> IdlePattern:
        """`waits` as an `IdlePattern`."""
        return IdlePattern.from_intervals(self.waits)


PassKey = tuple[object, ...]

Cuts = tuple[int, ...] | None
"""Layers at which pipeline stages cut a recomputed block, counted from its first (None: it is not recomputed)."""


class PassTable(NamedTuple):
    """Measured passes of a sample.

    Attributes:
        by_key: passes by name, layer of the sample, and for a forward pass what is kept and whether it is the last op.
        boundaries: specs of the values that enter layers and of their gradients, by kind and layer.
        plan: plan of the sample's rank.
    """

    by_key: Mapping[PassKey, MeasuredPass]
    boundaries: Mapping[tuple[Kind, int], Spec]
    plan: RankPlan


def shared_residual_layers(plan: RankPlan, alike: Sequence[int], saves: Sequence[bool]) -> frozenset[int]:
    """Return the layers whose incoming residual stream lies in the saved value of the layer that outputs it.

    Such a residual takes no additional memory (see `shardlab.simulate.timeline.memory.TapeMemory`).

    Args:
        plan: plan of the rank that has both layers.
        alike: for each layer, the layer of the sample with its sizes.
        saves: whether a layer's saved value includes the residual stream (see `Sizes.saves_residual`).
    """
    return frozenset(
        port.layer
        for number, layer in plan.layers.items()
        if saves and saves[alike[number]] and layer.keeps == "all"
        for port in plan.model.layers[number].outputs
        if port.kind is Kind.RESIDUAL
    )


def with_more_bytes(done: MeasuredPass, bytes: int, slot: int, *, during: bool = True) -> MeasuredPass:
    """Return a pass with the bytes of a gradient, or of an incoming residual, that the sample's pass does not hold.

    Two properties of a rank can differ from the sample. In the sample, a backward pass adds its gradient to an older
    one, so the gradient takes no memory. And a residual shares memory with the activations that the layer before saves,
    if that layer saves all of them, which may hold on only one of the two. A layer that keeps all has read the residual
    when its op ends. A layer that keeps less reads it as a value that may live longer, so from the layer's op on the
    residual has separate memory.

    Args:
        done: the pass of the sample.
        bytes: negative if the sample's residual takes memory of its own and the rank's does not.
        slot: index of the category in which these count.
        during: whether the op that computes with the weight holds them too, not only the ops after it.
    """
    before, main, after = done.peaks
    peaks = before, _higher_peak(main, bytes, slot) if during else main, _higher_peak(after, bytes, slot)
    return replace(done, delta=_add_bytes(done.delta, bytes, slot), peaks=peaks)


def _higher_peak(peak: MemoryPeak | None, bytes: int, slot: int) -> MemoryPeak | None:
    return peak and peak._replace(bytes=peak.bytes + bytes, by_category=_add_bytes(peak.by_category, bytes, slot))


def _add_bytes(held: CategoryBytes, bytes: int, slot: int) -> CategoryBytes:
    return (*held[:slot], held[slot] + bytes, *held[slot + 1 :])
