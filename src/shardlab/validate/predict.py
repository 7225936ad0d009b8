"""Predicting a published run: its plan is traced, folded and replayed in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardlab.simulate.estimate import Estimate, Peak
from shardlab.validate.beyond import standing_gradients, standing_streams
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
    """Replay a step of a run.

    Once its pipeline is full a schedule repeats itself, so that of many microbatches only some are replayed: the rest
    take as long as the last ones did.
    """
    if run.measured.of_block:
        return Prediction(_block_seconds(run), *memory_of(run, _replay(run, 1).peaks))
    few = _few(run)
    first = last = _replay(run, few)
    seconds = first.step
    if few < run.each:
        more = _period(run)
        last = _replay(run, few + more)
        seconds += (run.each - few) / more * (last.step - first.step)
    return Prediction(seconds, *memory_of(run, last.peaks))


KEPT_WHEN_FULL = 0.5
"""Of what the allocator holds back while there is room, the share that it cannot give up when there is none: before it
fails it frees the blocks in which nothing lies (`c10/cuda/CUDACachingAllocator.cpp`, `release_cached_blocks`). An
assumption; that it is neither 0 nor 1 follows from runs that ended and runs that did not."""


def memory_of(run: Run, peaks: Sequence[Peak]) -> tuple[float, bool]:
    """Bytes of the fullest GPU, as the run measured them, and whether they find room on it."""
    stack, room = run.stack, run.workload.cluster.device.memory
    allocated = max(peak.bytes + stack.gradients_stand * standing_gradients(run.workload, peak) for peak in peaks)
    taken = allocated
    if stack.streams:
        taken = max(peak.bytes + standing_streams(run.workload, peak) for peak in peaks)
    held_back = (stack.reserved - 1) * taken
    fits = taken + KEPT_WHEN_FULL * held_back + stack.context_bytes <= room
    reserved = min(taken + held_back, room - stack.context_bytes) if fits else taken + held_back
    as_measured = {"allocated": allocated, "reserved": reserved}
    return as_measured.get(run.measured.memory, reserved + stack.context_bytes), fits


def _block_seconds(run: Run) -> float:
    """What one more block adds to a step of one microbatch, but for its update."""
    framework = replace(run.workload.framework, update_bytes=1e-9)

    def step(blocks: int) -> float:
        model = replace(run.workload.model, layers=blocks)
        return _replay(replace(run, workload=replace(run.workload, model=model, framework=framework)), 1).step

    return step(3) - step(2)


def _few(run: Run) -> int:
    """How many microbatches are enough to see what one more takes; all, if that is hardly more work."""
    ranks, period = run.plan.mesh.pp, _period(run)
    split = isinstance(run.plan.schedule, str) and run.plan.schedule.startswith("zb")
    few = (3 if split else 2) * ranks + run.each % period
    return few if 2 * few + period < run.each else run.each


def _period(run: Run) -> int:
    """After how many microbatches a full pipeline does the same again: interleaved stages take one from each rank."""
    return run.plan.mesh.pp if run.plan.schedule == "interleaved-1f1b" else max(1, run.plan.mesh.pp // 8)


def _replay(run: Run, each: int) -> Estimate:
    return replace(run.workload, microbatches=each * run.plan.data_ranks).estimate()
