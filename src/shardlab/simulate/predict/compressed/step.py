"""Steps of pipeline ranks, each computed once per kind of rank, state of the rank, and key of the step.

A step is one action of a rank's schedule here. `StepCompressor.compress` turns a schedule into a list of
`CompressedStep`s. `StepCompressor.row` returns their timed events (entries), from which the clocks compute the time of
the optimizer step, and `StepCompressor.peak` returns the most bytes that the rank holds. Ranks with the same kinds of
layers, weights and neighbours share one `RankKind`, which runs a single rank and caches the result of each step. With
more microbatches the schedule is longer, but few of its steps are new.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardlab.language import OpKind
from shardlab.simulate.predict.compressed.clocks import CompressedStep, Entry, Rendezvous, Route, Row
from shardlab.simulate.predict.compressed.rank import CompressedRank
from shardlab.simulate.predict.compressed.runner import CompressedRunner, KeySequence, RankState, StepKey, step_keys
from shardlab.simulate.predict.compressed.sample import PricedSample
from shardlab.simulate.predict.compressed.short_model import ShortModel
from shardlab.simulate.predict.estimate import Peak
from shardlab.simulate.timeline.memory import CATEGORIES, NO_BYTES, MemoryLedger, MemoryPeak
from shardlab.strategies.plan.rank_plan import RankPlan
from shardlab.strategies.schedules.steps import ShardedStep


class PipelineRank(NamedTuple):
    """Rank of a pipeline.

    Attributes:
        number, place: number of the rank, and its position in the pipeline.
        own_stages: numbers of its stages.
        kind: the `RankKind` that runs its steps.
    """

    number: int
    place: int
    own_stages: Sequence[int]
    kind: RankKind


class StepCompressor:
    """Steps of a workload's ranks for any number of microbatches. Repeated parts are computed once.

    Args:
        sample: bytes and seconds of each pass, measured on a three-block part of the workload (see `sample`).
        model: the workload's model with fewer blocks. Ranks run its plan, and their steps are extended to the whole
            model.

    Attributes:
        kinds: the kinds of ranks seen so far.
    """

    def __init__(self, sample: PricedSample, model: ShortModel) -> None:
        self._sample, self._model = sample, model
        self.kinds: dict[Hashable, RankKind] = {}

    def rank(self, own_stages: Sequence[int], place: int, number: int, resolve: Callable[[], RankPlan]) -> PipelineRank:
        """Return a rank of the pipeline, with the `RankKind` of all ranks of its kind.

        Args:
            own_stages: numbers of the rank's stages.
            place: its position in the pipeline.
            number: number of the rank.
            resolve: function that resolves the plan of the short model for the rank. It is called only for the first
                rank of a kind.
        """
        key = self._model.rank_key(own_stages)
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = RankKind(self._sample, self._model, resolve(), number)
        return PipelineRank(number, place, own_stages, kind)

    def compress(self, rank: PipelineRank, steps: Sequence[ShardedStep]) -> list[CompressedStep]:
        """Return the compressed steps of a rank's schedule; the first loads the weights, the last updates them.

        Raises:
            NotPeriodicError: if a step cannot be extended to that of the whole model.
        """
        plan = rank.kind.plan
        gathers = bool(plan.gather_axes) and not plan.explicit_gathers
        return rank.kind.steps_for(step_keys(steps, rank.own_stages, rank.place, gathers=gathers))

    def row(self, rank: PipelineRank, steps: Sequence[CompressedStep]) -> Row:
        """Return a rank's row: the entries of its steps, and its part in the messages of each route."""
        entries: list[Entry] = []
        for step in steps:
            entries += step.entries
        return entries, [self._rendezvous(route, rank.number) for route in rank.kind.routes]

    def _rendezvous(self, route: Route, index: int) -> Rendezvous:
        peer = index + route.offset * self._sample.rank_stride
        source, target = (index, peer) if route.sends else (peer, index)
        seconds = [self._sample.message(part, source, target) for part in route.parts]
        blocks = self._sample.prices.blocking_p2p * sum(seconds) if route.sends else 0.0
        return Rendezvous((source, target), frozenset((source, target)), 2, seconds, blocks)

    def peak(self, rank: PipelineRank, steps: Sequence[CompressedStep]) -> Peak:
        """Return the peak of a rank's memory in an optimizer step, from its compressed steps in order."""
        bytes_before, peak_bytes, peak_step = 0, -1, 0
        for place, (_, (change, _, step_peak)) in enumerate(steps):
            if bytes_before + (step_peak[0] if step_peak else -bytes_before) > peak_bytes:
                peak_bytes, peak_step = bytes_before + (step_peak[0] if step_peak else -bytes_before), place
            bytes_before += change
        ledger = MemoryLedger()
        for category, bytes in enumerate(
            zip(NO_BYTES, *[step.memory.by_category for step in steps[:peak_step]], strict=True)
        ):
            ledger.hold(category, sum(bytes))
        ledger.raise_peak(steps[peak_step].memory.peak)
        peak = ledger.peak or MemoryPeak(0, NO_BYTES, OpKind.LOAD_WEIGHT, 0)
        by_category = {category.value: bytes for category, bytes in zip(CATEGORIES, peak.by_category, strict=True)}
        layer, layers_of = peak.layer, self._model.layers_of
        if layer >= 0:
            layer = layers_of(rank.own_stages)[layers_of(rank.kind.plan.own_stages).index(layer)]
        part = "" if layer < 0 else "head" if layer == self._model.whole_layer[-1] else self._sample.place(layer)
        return Peak(rank.number, peak.bytes, by_category, peak.op, layer, 0, part)


class RankKind:
    """Kind of ranks, which differ only in their numbers and in the order of their steps.

    The seconds and bytes of a step depend on its key and on the rank's state before it. So each pair of state and key
    is run once, on one rank of this kind. To run a step from an earlier state, that state is restored first.

    Attributes:
        plan: plan of the rank that is run, with one step of each type.
        routes: kinds of messages that the rank sends and receives. Entries refer to a route by its position here.
        transitions: map from (number of a state, step key) to (compressed step, number of the next state).
    """

    def __init__(self, sample: PricedSample, model: ShortModel, plan: RankPlan, number: int) -> None:
        self._sample, self._model, self._first = sample, model, number
        self.plan = replace(plan, steps=tuple({type(step): step for step in plan.steps}.values()))
        self.routes: list[Route] = []
        self._state_numbers: dict[RankState, int] = {}
        self._states: list[RankState] = []
        self.transitions: dict[tuple[int, StepKey], tuple[CompressedStep, int]] = {}
        self._messages: dict[StepKey, CompressedStep] = {}
        self._load()

    def _load(self) -> None:
        """Create a rank that has loaded its weights and has run no step."""
        mesh = self.plan.plan.mesh
        rank = CompressedRank(self._first, mesh, self._sample, self.routes, self._model)
        self._runner = CompressedRunner(rank, self.plan)
        self._runner.gradients.load()
        self._load_step = self._runner.compressed.finish_step()
        self._state = self._number()

    def steps_for(self, sequence: KeySequence) -> list[CompressedStep]:
        """Return the compressed steps of a sequence of step keys."""
        steps, state = [self._load_step], 0
        transitions: dict[tuple[int, int], tuple[CompressedStep, int]] = {}  # by state and number of a key
        for number in sequence.order:
            place = state, number
            if place not in transitions:
                transitions[place] = self._transition(state, sequence.keys[number])
            step, state = transitions[place]
            steps.append(step)
        return steps

    def _transition(self, state: int, key: StepKey) -> tuple[CompressedStep, int]:
        """Return the compressed step of a key in a state, and the number of the next state.

        Messages do not change the state.
        """
        if key.boundary is not None:
            if key not in self._messages:
                self._messages[key] = self._runner.message(key)
            return self._messages[key], state
        if (state, key) not in self.transitions:
            self.transitions[state, key] = self._step(state, key)
        return self.transitions[state, key]

    def _step(self, state: int, key: StepKey) -> tuple[CompressedStep, int]:
        if self._state < 0:
            self._load()
        if self._state != state:
            self._runner.snapshots.restore(self._states[state])
            self._state = state
        rank = self._runner.compressed
        changes, in_flight = rank.changes, bool(rank.outstanding)
        step = self._runner.run_step(key)
        if key.kind is None:
            self._state = -1  # the update changes values that states do not include
        elif key.last or in_flight or rank.outstanding or rank.changes != changes:
            self._state = self._number()
        return step, self._state

    def _number(self) -> int:
        state = self._runner.snapshots.capture()
        number = self._state_numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number
