"""Predicting a published run: its plan is traced, folded and replayed in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardlab.predict.estimate import Estimate, Peak
from shardlab.predict.held import held_memory
from shardlab.published.reading import PublishedRun
from shardlab.strategies.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a run.

    Attributes:
        seconds: of a step (None: there was none).
        bytes: of the fullest GPU's memory, as it was measured: with what the allocator or CUDA adds if that counts.
        fits: whether all that the GPU holds finds room on it.
    """

    seconds: float | None
    bytes: float
    fits: bool


def predict(run: PublishedRun) -> Prediction:
    """Replay a step of a run; of many microbatches only some are replayed (see `enough`)."""
    if run.measured.of_block:
        return Prediction(_block_seconds(run), memory_of(run, _replay(run, 1).peaks)[0], True)  # it ran alone
    few, more = enough(run.plan, run.each)
    first = last = _replay(run, few)
    seconds = first.step
    if few < run.each:
        last = _replay(run, few + more)
        seconds = extended(seconds, last.step, (run.each - few) / more)
    return Prediction(seconds, *memory_of(run, last.peaks))


def memory_of(run: PublishedRun, peaks: Sequence[Peak]) -> tuple[float, bool]:
    """Bytes of the fullest GPU, as the run measured them, and whether they find room on it."""
    held = held_memory(run.workload, peaks)
    as_measured = {"allocated": held.allocated, "reserved": held.reserved}
    return as_measured.get(run.measured.memory, held.total), held.fits


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


def _block_seconds(run: PublishedRun) -> float:
    """What one more block adds to a step of one microbatch, but for its update."""
    recipe = run.workload.recipe
    recipe = replace(recipe, kernels=replace(recipe.kernels, update_bytes=1e-9))  # such a kernel still starts

    def step(blocks: int) -> float:
        model = replace(run.workload.model, layers=blocks)
        return _replay(replace(run, workload=replace(run.workload, model=model, recipe=recipe)), 1).step

    return step(3) - step(2)


def extended(first: float, second: float, times: float) -> float:
    """The time of a step, from those of two shorter ones whose difference comes so many times more."""
    return first + times * (second - first)


def _replay(run: PublishedRun, each: int) -> Estimate:
    return replace(run.workload, microbatches=each * run.plan.data_ranks).estimate()
