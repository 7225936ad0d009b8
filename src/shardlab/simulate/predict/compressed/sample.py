"""Passes of layers, measured on three blocks of the model.

The blocks of a model are identical, and so are microbatches. So a sample of the workload (three blocks on one pipeline
rank, without data parallelism) has every kind of pass that the workload has. `measure_passes` traces the sample with a
runner that marks where passes begin and end, replays its tape, and makes a `MeasuredPass` of each marked part: its
seconds, its collectives, its change of memory and its peaks.

This file contains, in order: the sample and its marks; `PassMeter`, which measures a pass on the sample's tape;
`PricedSample`, which has the passes, sizes and prices of one workload; the records `MeasuredPass` and `PassTable`;
`join_passes`, which joins consecutive passes; and `with_more_bytes`, which corrects a measured pass if its residual
stream or its gradient takes more or less memory on a rank than in the sample.
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
from shardlab.simulate.timeline.memory import CATEGORY_OF_KIND, CategoryBytes, MemoryLedger, MemoryPeak, TapeMemory
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
        cuts: layers at which pipeline stages cut each recomputed block (see `Cuts`; None: no block is recomputed).
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
"""Largest number of cached samples. Plans that differ only in pipeline and data parallelism share a sample."""

_MEASURED: dict[Hashable, tuple[Workload, PassTable]] = {}
"""Each sample with its measured passes, by everything on which the passes depend. The key has the `id` of the cluster
and of the recipe. The stored sample keeps both alive, so no other object gets the same `id`."""


def _measure_sample(sample: Workload, prices: Prices, kept_sizes: Sizes) -> PassTable:
    """Trace and replay a sample, and measure each of its passes."""
    plan, sizes = sample.plan, sample.sizes
    assert isinstance(plan, Plan)
    marks: list[tuple[int, PassKey]] = []
    boundaries: dict[tuple[Kind, int], Spec] = {}

    async def strategy(rank: Rank) -> None:
        rank_plan = resolve(plan, rank.sizes, sample.microbatches, rank.index)
        await _MarkedRunner(rank, rank_plan, _MarkedLayers(rank, rank_plan, marks, boundaries)).run()

    traced = fold(plan, sizes, sample.microbatches, strategy)
    meter = PassMeter(traced, prices, Bytes(kept_sizes))
    by_key = {key: meter.measure(start, stop, key) for (start, key), (stop, _) in pairwise(marks) if key}
    return PassTable(by_key, boundaries, resolve(plan, sizes, sample.microbatches, 0))


def _on_one_rank(workload: Workload, step_types: Collection[type], cuts: Cuts) -> Workload:
    """Return the workload on one pipeline rank without data parallelism, with as few microbatches as possible."""
    plan = workload.plan
    assert isinstance(plan, Plan)
    split, has_both = BackwardInput in step_types, {Backward, BackwardInput} <= set(step_types)
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
        stage_sizes = [stop - start for start, stop in pairwise((0, *sorted(stages), layers.pipeline_units))]
        sampled = replace(sampled, stages_per_rank=len(stage_sizes), layers_per_stage=tuple(stage_sizes))
    sample = replace(workload, plan=sampled, microbatches=(3 if has_both else 2) * plan.mesh.ep)
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
    """Runner that marks the end of each step of the schedule, and the start of loading a batch."""

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
        """Mark the end of the previous pass and, if `m` is positive, the start of a pass with this key.

        Passes of the first microbatch are not measured, since they do not add gradients to older ones.

        Args:
            m: microbatch of the pass that begins (-1: no pass begins).
            key: name of the pass, its layer, and for a forward pass `keeps` and `stores_outputs`.
        """
        self.marks.append((len(self._rank.ops), key if m > 0 else ()))

    def note_boundary(self, layer: int, m: int, kinds: Mapping[Kind, Kind] | None = None) -> None:
        """Record the specs of the values that enter a layer.

        If `kinds` is given, it maps their kinds to those of their gradients, whose specs are recorded instead.
        """
        for kind in self.inputs[layer]:
            boundary_kind = kinds[kind] if kinds else kind
            self.boundaries[boundary_kind, layer] = self._rank.store(boundary_kind)[layer, m].spec

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
    """Meter of passes, which are ranges of ops on the tape of a sample.

    Attributes:
        tape, times: the tape of the sample's only rank, and the replay that has the start and end of each op.
        memory: the bytes that the rank holds at each op.
        arrivals: for each op, the time in seconds at which the compute stream reaches it. A collective may start later.
    """

    def __init__(self, traced: Folded, prices: Prices, size: Bytes) -> None:
        self.tape, self.times = traced.program.tapes[0], Clocks(traced, prices).run()
        self.memory = TapeMemory(self.tape, traced.specs[0], size, real=True, counters=True, sizes=size.sizes).run()
        self.arrivals = self._arrivals(prices.blocking_p2p)
        self._program, self._notes_waits = traced.program, prices.contention > 0

    def _arrivals(self, blocking: float) -> list[float]:
        """Return the time in seconds at which the compute stream reaches each op."""
        arrivals, clock = list[float](), 0.0
        issued: dict[int, int] = {}
        idle_until = {idle.op: idle.until for idle in self.times.idle[0]}
        for index, op in enumerate(self.tape):
            arrivals.append(clock)
            if op.kind is WAIT:
                clock = idle_until.get(issued[op.handle], clock)
            elif op.handle >= 0:
                issued[op.handle] = index
                clock += blocking * self._seconds(index) if op.kind is OpKind.SEND else 0.0
            elif op.kind is not FREE:
                clock = self.times.ends[0][index]
        return arrivals

    def _seconds(self, index: int) -> float:
        return self.times.ends[0][index] - self.times.starts[0][index]

    def measure(self, start: int, stop: int, key: PassKey) -> MeasuredPass:
        """Measure the pass from op `start` up to, but not including, op `stop`."""
        layer = key[1] if len(key) > 1 else 0
        assert isinstance(layer, int)
        tape = self.tape[start:stop]
        main = start + next((index for index, op in enumerate(tape) if op.kind in MAIN), len(tape))
        collectives, rest = self._collectives(start, stop)
        seconds = rest + sum(collective.gap + collective.seconds for collective in collectives)
        if rest < 0:  # communication beside compute, on streams without other communication
            seconds, collectives = self.arrivals[stop] - self.arrivals[start], ()
        begin, end = self.arrivals[start], self.arrivals[stop]
        idle = [interval for interval in self.times.idle[0] if begin <= interval.since and interval.until <= end]
        exposed = [
            (awaited_by(self._program, 0, self.tape[op]), max(0.0, until - max(since, self.times.ready[0][op])))
            for op, since, until in idle
        ]
        if rest >= 0:
            exposed = [((collective.kind, collective.group.axis), collective.seconds) for collective in collectives]
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
            tuple([(interval.since - begin, interval.until - begin) for interval in idle]) if self._notes_waits else (),
            add_exposed(exposed),
        )

    def _peak(self, start: int, ops: range, layer: int) -> MemoryPeak | None:
        candidates = [index for index in ops if self.tape[index].kind not in (FREE, WAIT)]
        if not candidates:
            return None
        index = max(candidates, key=self.memory.during.__getitem__)
        added_bytes = _subtract(self.memory.counters[index], self.memory.at_starts[start])
        return MemoryPeak(sum(added_bytes), added_bytes, self.tape[index].kind, self.tape[index].layer - layer)

    def _collectives(self, start: int, stop: int) -> tuple[tuple[PassCollective, ...], float]:
        """Return the collectives of the pass from op `start` to `stop`, and the seconds of compute after the last one.

        If a collective is not awaited immediately, or the pass has a message, the result is ((), -1.0).
        """
        collectives: list[PassCollective] = []
        compute_seconds, issued = 0.0, -1
        for index in range(start, stop):
            op = self.tape[index]
            if op.kind is FREE:
                continue
            if op.kind is WAIT:
                if op.handle != issued:
                    return (), -1.0
                issued = -1
            elif issued >= 0:
                return (), -1.0
            elif op.handle < 0:
                compute_seconds += self._seconds(index)
            elif op.group is None:
                return (), -1.0
            else:
                collectives.append(PassCollective(compute_seconds, op.group, self._seconds(index), op.kind))
                compute_seconds, issued = 0.0, op.handle
        return tuple(collectives), compute_seconds


def _subtract(later: CategoryBytes, earlier: CategoryBytes) -> CategoryBytes:
    return tuple([a - b for a, b in zip(later, earlier, strict=True)])


@dataclass(frozen=True, eq=False, slots=True)
class SizedPart:
    """Value or part of a value, with its sizes: an activation, or a slice of a weight, gradient or optimizer state.

    A `PricedSample` has each part once, so parts are compared by identity, which is quick.

    Attributes:
        wire_bytes, held_bytes: bytes in communication, and in memory.
        slot: index of its memory category in `CATEGORIES`.
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
        merges: whether collectives that are awaited immediately can be merged with the compute before and after them.
            This is not possible if ranks lose additional time at each wait (`Prices.lag`).
        notes_waits: whether the intervals of merged collectives are recorded. They are needed if communication slows
            compute down (`Prices.contention`).
        joined_passes: cache of two kinds of passes: those of whole stages, by the keys of their layers' passes, and
            those that also hold the memory of their gradient, by name and key.
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
        """Return the measured passes of the sample's layers.

        Args:
            cuts: layers at which pipeline stages cut each recomputed block (see `Cuts`; None: no block is recomputed).
        """
        table = self._passes.get(cuts)
        if table is None:
            table = self._passes[cuts] = measure_passes(self._sample, self._step_types, cuts)
        return table

    def shared_residuals(self, plan: RankPlan) -> frozenset[int]:
        """Return the layers of a rank whose incoming residual lies in the value that the previous layer saves."""
        return shared_residual_layers(plan, self.sample_layer, self._saves)

    def sample_shared_residuals(self, cuts: Cuts) -> frozenset[int]:
        """Return the layers of the sample whose incoming residual lies in the value that the previous layer saves."""
        layers = self._shared_residuals.get(cuts)
        if layers is None:
            plan = self.passes(cuts).plan
            all_layers = range(len(plan.model.layers))
            layers = self._shared_residuals[cuts] = shared_residual_layers(plan, all_layers, self._saves)
        return layers

    def part(self, kind: Kind, layer: int, pieces: int = 1, of: int = 1) -> SizedPart:
        """Return `pieces` of the `of` pieces into which a layer's parameters, gradient or optimizer state are cut."""
        sample_layer = self.sample_layer[layer]
        key = (kind, sample_layer, pieces, of)
        part = self._parts.get(key)
        if part is None:
            spec = Spec(form_of(kind, sample_layer, 0, Space(0), Holds((1 << pieces) - 1, of)))
            part = self._parts[key] = self.size(spec)
        return part

    def boundary(self, kind: Kind, layer: int) -> SizedPart:
        """Return the value of a kind that enters a layer, or the gradient of such a value."""
        key = (kind, self.sample_layer[layer])
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = self.size(self.passes().boundaries[key])
        return part

    def size(self, spec: Spec) -> SizedPart:
        return SizedPart(spec, self._wire_bytes(spec), self._held_bytes(spec), CATEGORY_OF_KIND[spec.kind])

    def compute(self, kind: OpKind, part: SizedPart) -> float:
        """Return the seconds of an op on parameters, a gradient or a scalar."""
        form = part.spec.form
        key = (kind, form)
        seconds = self._seconds.get(key)
        if seconds is None:
            op = compute_op(kind, form.layer, (0,), (0,))
            seconds = self._seconds[key] = self.prices.compute_time(op, {0: part.spec}, self.sizes)
        return seconds

    def collective(self, kind: OpKind, bytes: int, group: Group) -> float:
        """Return the seconds of a collective from the arrival of its last member."""
        key = (kind, bytes, group)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self.prices.collective_time(kind, bytes, group)
        return seconds

    def message(self, part: SizedPart, source: int, target: int) -> float:
        """Return the seconds in which a message with this value is transferred between two ranks."""
        key = (part.spec.form, part.wire_bytes, source, target)
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self.prices.message_times(part.spec.kind, part.wire_bytes, source, target)[0]
        return seconds


class PassCollective(NamedTuple):
    """Collective of a pass that is awaited immediately.

    Attributes:
        gap: seconds of compute between the previous collective and this one.
        group: the ranks that take part.
        seconds: duration of the collective.
        kind: kind of the collective.
    """

    gap: float
    group: Group
    seconds: float
    kind: OpKind


def add_exposed(parts: Iterable[tuple[Awaited, float]]) -> tuple[tuple[Awaited, float], ...]:
    """Add up the seconds of waits for communication of equal kind and axis."""
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
        seconds: duration of the pass if no other communication uses the streams of its collectives.
        collectives: its collectives in order, if each is awaited immediately; otherwise (), and their time is in
            `rest`.
        rest: seconds of the pass after the last of `collectives`, or the whole duration if there are none.
        delta: by category, bytes held after the pass minus bytes held before it.
        peaks: memory peaks of the ops before the one that computes with the weight, of that op, and of the ops after it
            (None: no such op). Bytes are relative to the start of the pass, and layers to the pass's first layer. A
            pass of several layers has only one peak, the first of the three.
        waits: if communication slows compute down, the intervals in which the pass does not compute, in seconds from
            its start.
        exposed: the seconds in which the pass waits for communication, by kind and axis. They are part of `seconds`.
        bytes, changes: total of `delta`, and its nonzero entries as (category, bytes).
        groups: groups of `collectives`.
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
"""Layers at which pipeline stages cut a recomputed block, counted from the block's first layer.

None stands for a block that is not recomputed, and () for a recomputed block that lies in one stage.
"""


class PassTable(NamedTuple):
    """Measured passes of a sample.

    Attributes:
        by_key: passes by name, layer of the sample, and for a forward pass the values that it keeps for the backward
            pass and whether it stores its outputs.
        boundaries: specs of the values that enter layers and of their gradients, by kind and layer of the sample.
        plan: plan of the sample's rank.
    """

    by_key: Mapping[PassKey, MeasuredPass]
    boundaries: Mapping[tuple[Kind, int], Spec]
    plan: RankPlan


def shared_residual_layers(plan: RankPlan, sample_layer: Sequence[int], saves: Sequence[bool]) -> frozenset[int]:
    """Return the layers whose incoming residual stream lies in the saved value of the layer that outputs it.

    Such a residual takes no additional memory (see `shardlab.simulate.timeline.memory.TapeMemory`).

    Args:
        plan: plan of the rank that has both layers.
        sample_layer: for each layer of the model, the identical layer of the sample.
        saves: for each layer of the sample, whether its saved value includes the residual stream that it outputs (see
            `Sizes.saves_residual`; empty: no layer's value does).
    """
    return frozenset(
        port.layer
        for number, layer in plan.layers.items()
        if saves and saves[sample_layer[number]] and layer.keeps == "all"
        for port in plan.model.layers[number].outputs
        if port.kind is Kind.RESIDUAL
    )


def join_passes(parts: Sequence[tuple[MeasuredPass, int]]) -> MeasuredPass:
    """Return several consecutive passes as one.

    Args:
        parts: the passes, each with a number to add to the layers' numbers in its peaks.
    """
    memory, compute_seconds, seconds = MemoryLedger(), 0.0, 0.0
    collectives: list[PassCollective] = []
    waits: list[tuple[float, float]] = []
    for measured_pass, layer_offset in parts:
        if measured_pass.waits:
            waits += [(seconds + start, seconds + end) for start, end in measured_pass.waits]
        seconds += measured_pass.seconds
        if measured_pass.collectives:
            first, *later_collectives = measured_pass.collectives
            collectives += [first._replace(gap=compute_seconds + first.gap), *later_collectives]
            compute_seconds = 0.0
        compute_seconds += measured_pass.rest
        for peak in measured_pass.peaks:
            memory.raise_peak(peak, layer_offset)
        for slot, bytes in measured_pass.changes:
            memory.hold(slot, bytes)
    peaks = memory.peak, None, None
    exposed = add_exposed(part for measured_pass, _ in parts for part in measured_pass.exposed)
    return MeasuredPass(
        seconds, tuple(collectives), compute_seconds, tuple(memory.by_category), peaks, tuple(waits), exposed
    )


def with_more_bytes(measured_pass: MeasuredPass, bytes: int, slot: int, *, during: bool = True) -> MeasuredPass:
    """Return a measured pass that ends with more bytes, or with fewer, than in the sample.

    There are two cases. In the sample, a backward pass adds its gradient to an older one, so the gradient takes no
    memory. The first backward pass of an optimizer step on a rank stores the gradient, which takes memory.

    The other case is a forward pass. Its incoming residual stream lies inside the value that the previous layer saves,
    if that layer keeps everything for its backward pass and is on the same rank. This may be true on the rank and not
    in the sample, or the reverse. Inside a saved value, the residual takes no memory, and reading it frees none.
    Otherwise it has separate memory, which is freed after the op of a layer that keeps everything. If the layer keeps
    less, a residual inside a saved value moves to separate memory when the op starts.

    Args:
        measured_pass: the pass of the sample.
        bytes: number of bytes to add. It is negative if the residual has separate memory on the rank, but not in the
            sample.
        slot: index of the memory category of these bytes.
        during: whether the op that computes with the weight also holds them, and not only the ops after it.
    """
    first_peak, main_peak, last_peak = measured_pass.peaks
    peaks = (
        first_peak,
        _higher_peak(main_peak, bytes, slot) if during else main_peak,
        _higher_peak(last_peak, bytes, slot),
    )
    return replace(measured_pass, delta=_add_bytes(measured_pass.delta, bytes, slot), peaks=peaks)


def _higher_peak(peak: MemoryPeak | None, bytes: int, slot: int) -> MemoryPeak | None:
    return peak and peak._replace(bytes=peak.bytes + bytes, by_category=_add_bytes(peak.by_category, bytes, slot))


def _add_bytes(by_category: CategoryBytes, bytes: int, slot: int) -> CategoryBytes:
    return (*by_category[:slot], by_category[slot] + bytes, *by_category[slot + 1 :])
