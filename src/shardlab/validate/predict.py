"""Predicting a published run: its plan is traced, folded and replayed in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardlab.simulate.estimate import Estimate
from shardlab.validate.reading import Run


@dataclass(frozen=True)
class Prediction:
    """What a run should have taken.

    Attributes:
        seconds: of a step.
        bytes: of the fullest GPU's memory, as it was measured: with what the allocator or CUDA adds if that counts.
        fits: whether all that the GPU holds finds room on it.
    """

    seconds: float
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
    ranks = run.plan.mesh.pp
    if few < run.each:
        second = _replay(run, few + ranks)
        seconds += (run.each - few) / ranks * (second.step - first.step)
        taken = second.peak.bytes
    held = taken * run.stack.reserved + run.stack.context_bytes
    as_measured = {"allocated": taken, "reserved": taken * run.stack.reserved}
    return Prediction(seconds, as_measured.get(run.measured.memory, held), held <= run.workload.cluster.device.memory)


def _few(run: Run) -> int:
    """How many microbatches are enough to see what one more takes; all, if that is hardly more work."""
    ranks = run.plan.mesh.pp
    few = 3 * ranks + run.each % ranks
    return few if 2 * few + ranks < run.each else run.each


def _replay(run: Run, each: int) -> Estimate:
    return replace(run.workload, microbatches=each * run.plan.data_ranks).estimate()
