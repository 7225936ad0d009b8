"""Predicting a published run: its plan is traced, folded and replayed in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardlab.simulate.estimate import Estimate
from shardlab.strategies.plan import Plan
from shardlab.validate.reading import Run


@dataclass(frozen=True)
class Prediction:
    """What a run should have taken.

    Attributes:
        seconds: of a step (None: there was none).
        bytes: of the fullest GPU's memory, as it was measured: with what the allocator or CUDA adds if that counts.
        fits: whether all that the GPU holds finds room on it.
    """

    seconds: float | None
    bytes: float
    fits: bool


def predict(run: Run) -> Prediction:
    """Replay a step of a run; of many microbatches only some are replayed (see `enough`)."""
    few, more = enough(run.plan, run.each)
    first = _replay(run, few)
    seconds, taken = first.step, first.peak.bytes
    if few < run.each:
        second = _replay(run, few + more)
        seconds = extended(seconds, second.step, (run.each - few) / more)
        taken = second.peak.bytes
    held = taken * run.stack.reserved + run.stack.context_bytes
    as_measured = {"allocated": taken, "reserved": taken * run.stack.reserved}
    return Prediction(seconds, as_measured.get(run.measured.memory, held), held <= run.workload.cluster.device.memory)


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
    full = max(2, (3 if schedule.startswith("zb") else 1) * ranks)
    more = 2 * ranks if schedule == "interleaved-1f1b" else ranks
    few = full + (each - full) % more
    return (few, more) if 2 * few + more < each else (each, 0)


def extended(first: float, second: float, times: float) -> float:
    """The time of a step, from those of two shorter ones whose difference comes so many times more."""
    return first + times * (second - first)


def _replay(run: Run, each: int) -> Estimate:
    return replace(run.workload, microbatches=each * run.plan.data_ranks).estimate()
