"""A step's time and memory, by replaying as little of it as tells them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardlab.predict.estimate import Peak
from shardlab.predict.held import HeldMemory, held_memory
from shardlab.predict.workload import Workload
from shardlab.strategies.plan import Plan


@dataclass(frozen=True)
class Forecast:
    """Figures of a step.

    Attributes:
        seconds: of the step.
        peaks: the most that each rank of a pipeline holds at a time.
        memory: what the fullest device holds, as the workload's recipe says.
    """

    seconds: float
    peaks: Sequence[Peak]
    memory: HeldMemory


def forecast(workload: Workload) -> Forecast:
    """Forecast a step of a plan; of many microbatches only some are replayed (see `enough`).

    Raises:
        UserError: for sizes that do not go together, more ranks than devices, or a dtype that the device does not
            compute in.
    """
    plan = workload.plan
    assert isinstance(plan, Plan), "a program of its own is replayed whole, by `Workload.estimate`"
    each, rest = divmod(workload.microbatches, plan.data_ranks)
    few, more = (each, 0) if rest else enough(plan, each)
    if few == each:
        whole = workload.estimate()
        return Forecast(whole.step, whole.peaks, held_memory(workload, whole.peaks))
    first, last = (replace(workload, microbatches=n * plan.data_ranks).estimate() for n in (few, few + more))
    return Forecast(extended(first.step, last.step, (each - few) / more), last.peaks, held_memory(workload, last.peaks))


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
