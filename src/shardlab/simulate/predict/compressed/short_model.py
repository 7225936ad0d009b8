"""Models with fewer blocks, whose compressed steps are extended to those of the whole model.

The blocks of a stage are identical. Once the same collectives are in flight at the start of two consecutive blocks, a
step does the same work for each further block. A `ShortModel` leaves out most middle blocks of each stage (`shorten`);
the place where blocks are missing is a `Gap`. A compressed rank runs the layers of the short model, and cuts each step
into segments at the block before the gap and at the block after it (`StepSegment`). If the same collectives are in
flight at the start of both blocks, `extend_step` repeats the segment of the first one for the missing blocks. Otherwise
the step is not periodic there, and `CompressedReplay` tries again with a short model of more blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from shardlab.language import Group, Sizes
from shardlab.models.cutting import Repeated
from shardlab.simulate.predict.compressed.clocks import AwaitCollective, CompressedStep, Compute, Entry
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.memory import MemoryLedger
from shardlab.strategies.plan.plan import CUT_AXES, Plan
from shardlab.strategies.plan.rank_plan import ModelLayers, model_layers
from shardlab.strategies.plan.resolve import named_blocks, with_named_blocks


class NotPeriodicError(Exception):
    """Error of a short model whose steps cannot be extended to those of the whole model."""


class Gap(NamedTuple):
    """Position in a stage of a short model at which blocks are left out.

    Attributes:
        run_start, run_stop: range of the short model's layers that has the run of identical blocks around the gap.
        block_layers: number of layers of a block.
        next_layer: first layer after the gap, in the short model.
        left_out: number of blocks that are left out.
    """

    run_start: int
    run_stop: int
    block_layers: int
    next_layer: int
    left_out: int


@dataclass(frozen=True)
class ShortModel:
    """Model with fewer blocks, and a plan for it with the same number of stages.

    Attributes:
        plan, sizes: plan and sizes of the short model.
        sample_layer: for each layer of the short model, the identical layer of the sample.
        stages: layers of each stage in the whole model.
        starts: first layer of each stage in the short model, and the end of the last stage.
        gaps: the gaps.
        recomputed: layers of the short model in blocks that the plan names for recomputation.
        whole_layer: for each layer of the short model, its number in the whole model; as last entry, the number of
            layers of the whole model.
    """

    plan: Plan
    sizes: Sizes
    sample_layer: Sequence[int]
    stages: Sequence[range]
    starts: Sequence[int]
    gaps: Sequence[Gap]
    recomputed: Collection[int]
    whole_layer: Sequence[int]

    @cached_property
    def positions(self) -> dict[int, Position]:
        """Position of each layer of the short model that lies in the block before or after a gap."""
        return {
            layer: position
            for gap in self.gaps
            for position, start in (
                (Position(gap, False), gap.next_layer - gap.block_layers),
                (Position(gap, True), gap.next_layer),
            )
            for layer in range(start, start + gap.block_layers)
        }

    def layers_of(self, own_stages: Sequence[int]) -> list[int]:
        """Return the whole model's layers in the stages of a rank, then the layer after each of these stages."""
        stages = [self.stages[stage] for stage in own_stages]
        return [*(layer for stage in stages for layer in stage), *(stage.stop for stage in stages)]

    def rank_key(self, own_stages: Sequence[int]) -> Hashable:
        """Return a key of the rank with these stages. Plans of ranks with equal keys differ only in layer numbers."""
        sample_layer, starts, kinds = self.sample_layer, self.starts, list[Hashable]()
        for stage, following in zip(own_stages, [*own_stages[1:], -1], strict=True):
            layers = range(starts[stage], starts[stage + 1])
            gaps = tuple(
                [(gap.next_layer - layers.start, gap.left_out) for gap in self.gaps if gap.next_layer in layers]
            )
            recomputed = tuple([layer in self.recomputed for layer in layers]) if self.recomputed else ()
            ends = layers.start == 0, layers.stop == starts[-1], following == stage + 1
            kinds.append((tuple(sample_layer[layers.start : layers.stop + 1]), gaps, recomputed, ends))
        return tuple(kinds)


def shorten(workload: Workload, extra: int | None) -> ShortModel:
    """Return the short model of a workload.

    Args:
        workload: the whole workload.
        extra: number of blocks to keep in each run of identical blocks beyond the smallest number with which steps are
            expected to be periodic (None: keep all blocks).

    Raises:
        UserError: if the plan's stages or recomputed blocks do not fit the model.
    """
    sizes, repeated = workload.sizes, workload.repeated
    assert isinstance(workload.plan, Plan)
    model = model_layers(sizes)
    plan = with_named_blocks(workload.plan, model)
    bounds = plan.bounds(model.pipeline_units, model.units_text)
    stages = [range(model.pipeline_cuts[start], model.pipeline_cuts[stop]) for start, stop in pairwise(bounds)]
    gaps = (
        [] if extra is None or not repeated.missing_blocks else list(_gaps(plan, sizes, model, repeated, stages, extra))
    )
    if 4 * sum(gap.left_out * gap.block_layers for gap in gaps) < len(model.layers):  # saves little work
        starts = [*(stage.start for stage in stages), len(model.layers)]
        whole_layer = range(len(model.layers) + 1)
        return ShortModel(
            plan, sizes, repeated.sample_layers, stages, starts, (), _recomputed(plan, model), whole_layer
        )
    left_out = sum(gap.left_out for gap in gaps)
    fewer = Repeated(repeated.sample, repeated.missing_blocks - left_out)
    begins = {gap.next_layer: gap.left_out * gap.block_layers for gap in gaps}
    shifts = accumulate(
        begins.get(layer, 0) for layer in range(len(model.layers) + 1 - left_out * repeated.block_layers)
    )
    whole_layer = [layer + shift for layer, shift in enumerate(shifts)]
    kept_layers = set(whole_layer)
    units = [sum(cut in kept_layers for cut in model.pipeline_cuts[start:stop]) for start, stop in pairwise(bounds)]
    short = replace(plan, layers_per_stage=tuple(units))
    if isinstance(plan.recompute, tuple):
        numbers = [number for number, block in enumerate(model.recomputable) if block.start in kept_layers]
        short = replace(
            short, recompute=tuple([index for index, number in enumerate(numbers) if number in plan.recompute])
        )
    starts = [bisect_left(whole_layer, start) for start in (*(stage.start for stage in stages), len(model.layers))]
    recomputed_layers = _recomputed(plan, model)
    recomputed = {layer for layer, whole in enumerate(whole_layer) if whole in recomputed_layers}
    fewer_sizes = fewer.sizes(workload.sample.sizes)
    return ShortModel(short, fewer_sizes, fewer.sample_layers, stages, starts, gaps, recomputed, whole_layer)


def _gaps(
    plan: Plan, sizes: Sizes, model: ModelLayers, repeated: Repeated, stages: Sequence[range], extra: int
) -> Iterator[Gap]:
    """Yield the gaps of a short model. Around each, as many blocks stay as a step needs to become periodic."""
    left_out_layers, block_layers = 0, repeated.block_layers
    in_flight = _blocks_in_flight(plan, sizes, model, block_layers, stages)
    for stage, blocks in _identical_blocks(plan, model, repeated, stages):
        # the stage may cut the first block, and the second one may be gathered during the previous stage
        blocks_before = 3 if plan.shard_parameters and stages[stage].start == blocks.start else 2
        blocks_after = 1 + extra + in_flight[stage if len(stages) == plan.mesh.pp else -1]
        left_out = len(blocks) // block_layers - blocks_before - blocks_after
        if left_out > 0:
            start = blocks.start - left_out_layers
            left_out_layers += left_out * block_layers
            next_layer = start + blocks_before * block_layers
            yield Gap(start, blocks.stop - left_out_layers, block_layers, next_layer, left_out)


def _recomputed(plan: Plan, model: ModelLayers) -> set[int]:
    """Return the layers of the blocks that a plan names for recomputation (empty: it names none)."""
    block_numbers = plan.recompute if isinstance(plan.recompute, tuple) else ()
    return {layer for block in named_blocks(block_numbers, model) for layer in block}


def _blocks_in_flight(
    plan: Plan, sizes: Sizes, model: ModelLayers, block_layers: int, stages: Sequence[range]
) -> list[int]:
    """Return the largest number of blocks whose gradients are reduced at the same time, for each stage.

    The last entry is the maximum over stages.
    """
    # a gradient is reduced over one axis at a time
    axis_count = max(1, sum(plan.mesh.sizes()[axis] > 1 for axis in CUT_AXES))
    tp_reductions = int(plan.sequence_parallel)  # the gradients of norms are then reduced over tp
    in_flight: list[int] = []
    for stage in stages:
        elements = Counter[int]()
        for layer in stage:
            elements[model.reduced_with(layer)] += sizes.weights[layer]
        middle = stage.start + (len(stage) - block_layers) // 2
        block = sum(sizes.weights[max(stage.start, middle) : middle + block_layers])
        blocks_per_buffer = max(elements.values()) / block if block else 1.0
        in_flight.append(axis_count * math.ceil(blocks_per_buffer) + tp_reductions + (blocks_per_buffer > 1))
    return [*in_flight, max(in_flight)]


def _identical_blocks(
    plan: Plan, model: ModelLayers, repeated: Repeated, stages: Sequence[range]
) -> Iterator[tuple[int, range]]:
    """Yield (number of a stage, layers) for each run of identical blocks in the stage.

    If the plan names the blocks to recompute, a run has either only named blocks or only other blocks.
    """
    block_layers, first = repeated.block_layers, repeated.first
    stop = first + (repeated.missing_blocks + 1) * block_layers
    recomputed = _recomputed(plan, model)
    for number, stage in enumerate(stages):
        start, end = max(stage.start, first), min(stage.stop, stop)
        for layer in range(start + block_layers, end):
            if (layer in recomputed) != (layer - block_layers in recomputed) and layer - block_layers >= start:
                yield number, range(start, layer)
                start = layer
        yield number, range(start, end)


class Position(NamedTuple):
    """Position of a layer beside a gap: in the block before it, or in the block after it."""

    gap: Gap
    after_gap: bool


NOTHING_STARTED: Mapping[Group, int] = Counter()


class StepSegment(NamedTuple):
    """Part of a step of the short model, and how often the whole model repeats it.

    Attributes:
        step: entries and memory of the part.
        repetitions: number of repetitions for missing blocks, in addition to the part itself.
        distance: number of layers from one repetition to the next (negative in a backward pass).
        started: by group, number of collectives that the part starts.
    """

    step: CompressedStep
    repetitions: int = 0
    distance: int = 0
    started: Mapping[Group, int] = NOTHING_STARTED


class Repetition(NamedTuple):
    """Collectives of one group that a repeated segment leaves in flight. Each repetition leaves as many.

    Attributes:
        repetitions: number of repetitions for missing blocks.
        distance: number of layers from one repetition to the next (negative in a backward pass).
        stride: number of collectives of the group that the segment starts.
        handles: number of these collectives that stay in flight.
    """

    repetitions: int
    distance: int
    stride: int
    handles: int


def extend_step(segments: Sequence[StepSegment]) -> CompressedStep:
    """Return the whole model's step from the segments of a short model's step."""
    if len(segments) == 1:
        return segments[0].step
    extended = _ExtendedStep()
    for segment in segments:
        extended.add(segment.step)
        if segment.repetitions:
            extended.repeat(segment)
    return extended.step()


class _ExtendedStep:
    """Segments that are joined to one step."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._memory = MemoryLedger()
        self._joined: Compute | None = None  # the latest compute entry, if this object created it

    def add(self, step: CompressedStep) -> None:
        """Add a step."""
        self._add_entries(step.entries)
        self._memory.apply(step.memory)

    def repeat(self, segment: StepSegment) -> None:
        """Add the repetitions of a segment that was just added."""
        step, repetitions, distance, started = segment
        awaits = any(isinstance(entry, AwaitCollective) and entry.stride for entry in step.entries)
        for number in range(1, repetitions + 1):
            self._add_entries(_awaiting_later(step.entries, number, started) if awaits else step.entries)
        self._memory.apply(step.memory, repetitions, distance)

    def _add_entries(self, entries: Sequence[Entry]) -> None:
        last = self._entries[-1] if self._entries else None
        if entries and isinstance(last, Compute) and isinstance(entries[0], Compute):
            if last is not self._joined:
                last = self._joined = self._entries[-1] = Compute(last.seconds, last.waits, last.exposed)
            last.extend(entries[0].seconds, entries[0].waits, entries[0].exposed)
            self._entries += entries[1:]
        else:
            self._entries += entries

    def step(self) -> CompressedStep:
        return CompressedStep(self._entries, self._memory.change)


def _awaiting_later(entries: Sequence[Entry], number: int, started: Mapping[Group, int]) -> list[Entry]:
    """Return the entries of the repetition `number` of a segment that starts the collectives `started`.

    Its waits are for the collectives that an earlier segment started in its repetition of the same number.
    """
    return [
        entry._replace(ago=entry.ago - number * (entry.stride - started[entry.group]), stride=0)
        if isinstance(entry, AwaitCollective) and entry.stride
        else entry
        for entry in entries
    ]
