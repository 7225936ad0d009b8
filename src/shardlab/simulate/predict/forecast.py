"""A step's time and memory, by replaying as little of it as tells them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardlab.language.world import gc_paused
from shardlab.simulate.predict.compressed.clocks import step_seconds
from shardlab.simulate.predict.compressed.sample import PricedSample
from shardlab.simulate.predict.compressed.step import Outlines, RankKind
from shardlab.simulate.predict.estimate import Peak
from shardlab.simulate.predict.memory import DeviceMemory, device_memory
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.resolve import resolve


@dataclass(frozen=True)
class Forecast:
    """PricedSample of a step.

    Attributes:
        seconds: of the step.
        peaks: the most that each rank of a pipeline holds at a time.
        memory: what the fullest device holds, as the workload's recipe says.
    """

    seconds: float
    peaks: Sequence[Peak]
    memory: DeviceMemory


def forecast(workload: Workload) -> Forecast:
    """Forecast a step of a plan; of many microbatches only some are replayed (see `enough`).

    Raises:
        UserError: for sizes that do not go together, more ranks than devices, or a dtype that the device does not
            compute in.
    """
    plan = workload.plan
    assert isinstance(plan, Plan), "a program of its own is replayed whole, by `Workload.estimate`"
    workload.require()
    with gc_paused():
        each, rest = divmod(workload.microbatches, plan.data_ranks)
        few, more = (each, 0) if rest else enough(plan, each)
        replayed = Outlined(workload, few) if outlinable(workload) else partial(_replayed, workload)
        seconds, peaks = replayed(few + more)
        if few < each:
            seconds = extended(replayed(few)[0], seconds, (each - few) / more)
        return Forecast(seconds, peaks, device_memory(workload, peaks))


Replayed = tuple[float, Sequence[Peak]]
"""Seconds of a step, and the most that each rank of its pipeline holds."""


def _replayed(workload: Workload, each: int) -> Replayed:
    """Replay every op of a step with so many microbatches for each data-parallel rank."""
    assert isinstance(workload.plan, Plan)
    estimate = replace(workload, microbatches=each * workload.plan.data_ranks).estimate()
    return estimate.step, estimate.peaks


def outlinable(workload: Workload) -> bool:
    """Whether outlines tell a plan's step exactly.

    No pass may rewrite its program, no block may be frozen, and the ranks of all stages must lie alike on the nodes.
    And where communication takes time from compute, none may be hidden within a pass, as a ring of keys and values is.
    """
    plan, cluster = workload.plan, workload.cluster
    assert isinstance(plan, Plan)
    each = plan.mesh.world // plan.mesh.pp
    alike = plan.mesh.pp == 1 or each % cluster.per_node == 0 or cluster.per_node % each == 0
    hides = plan.context == "ring" and plan.mesh.cp > plan.ulysses
    if workload.pass_names != "none" or plan.freeze:
        return False
    return (alike or cluster.profile is not None) and not (hides and workload.sample.prices.slows)


class Outlined:
    """Steps of a workload, outlined; with any number of microbatches for each data-parallel rank.

    Args:
        each: one such number.
    """

    def __init__(self, workload: Workload, each: int) -> None:
        plan = workload.plan
        assert isinstance(plan, Plan)
        self._plan, mesh = plan, plan.mesh
        self._first = range(0, mesh.world, mesh.world // mesh.pp)
        self._plans = [resolve(plan, workload.sizes, each * plan.data_ranks, index) for index in self._first]
        self._figures = PricedSample(workload, {type(step) for step in self._plans[0].steps})
        self._outlines = Outlines(self._figures)
        self._beside = workload.beside

    @property
    def kinds(self) -> Collection[RankKind]:
        """Kinds of ranks, with what was outlined of each."""
        return self._outlines.kinds.values()

    def __call__(self, each: int) -> Replayed:
        steps = self._plan.steps(self._plans[0].model.pipeline_units, each * self._plan.data_ranks)
        plans = [
            replace(plan, steps=mine, microbatches=range(each))
            for plan, mine in zip(self._plans, steps.of_ranks, strict=True)
        ]
        ranks = [self._outlines.of(plan, index) for plan, index in zip(plans, self._first, strict=True)]
        rows = [self._outlines.row(rank, index) for rank, index in zip(ranks, self._first, strict=True)]
        seconds = step_seconds(rows, self._figures.prices.contention, self._figures.prices.lag)
        peaks = [self._outlines.peak(*rank) for rank in zip(ranks, plans, self._first, strict=True)]
        return seconds + self._beside, peaks


STEADY = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v")
"""Schedules that repeat themselves once the pipeline is full, and from then on hold as much."""


def enough(plan: Plan, each: int) -> tuple[int, int]:
    """(how many microbatches to replay, and how many more a second time); all of them, if that is hardly more work.

    Once its pipeline is full a schedule repeats itself, so that the rest take as long as the last ones did. Its rhythm
    is that of one microbatch from each rank, interleaved of two: where messages wait for their receives, a full
    pipeline of n ranks does the same again after n microbatches, not after every one. It is full after as many, but
    where backward passes are split only after three times as many.

    So the time of a step is within 0.1 % of a whole replay's with stages that are alike, or of which the first or last
    differ. A stage in the middle that is slower fills an interleaved pipeline more slowly (up to 2 % were seen).
    """
    ranks, schedule = plan.mesh.pp, plan.schedule if isinstance(plan.schedule, str) else plan.schedule.name
    if schedule not in STEADY:
        return each, 0
    full = max(2, (3 if schedule.startswith("zb") else 1) * ranks)
    more = 2 * ranks if schedule == "interleaved-1f1b" else ranks
    few = full + (each - full) % more
    return (few, more) if 2 * few + more < each else (each, 0)


def extended(first: float, second: float, times: float) -> float:
    """The time of a step, from those of two shorter ones whose difference comes so many times more."""
    return first + times * (second - first)
