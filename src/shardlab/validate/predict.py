"""Predicting a published run: its plan is traced, folded and replayed in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardlab.simulate.estimate import Estimate
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
    few = _few(run)
    first = _replay(run, few)
    seconds, taken = first.step, first.peak.bytes
    if few < run.each:
        more = _period(run)
        second = _replay(run, few + more)
        seconds += (run.each - few) / more * (second.step - first.step)
        taken = second.peak.bytes
    held = taken * run.stack.reserved + run.stack.context_bytes
    as_measured = {"allocated": taken, "reserved": taken * run.stack.reserved}
    return Prediction(seconds, as_measured.get(run.measured.memory, held), held <= run.workload.cluster.device.memory)


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
