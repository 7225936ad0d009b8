"""Predicting a published run: the time of a step of its plan, and its memory as the run measured it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardlab.predict.forecast import Forecast, forecast
from shardlab.predict.held import HeldMemory
from shardlab.published.reading import PublishedRun
from shardlab.published.rows import Memory


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
    """Forecast a step of a run."""
    if run.measured.of_block:
        alone = _forecast(run, 1).memory
        return Prediction(_block_seconds(run), measured_as(run.measured.memory, alone), True)
    made = forecast(run.workload)
    return Prediction(made.seconds, measured_as(run.measured.memory, made.memory), made.memory.fits)


def measured_as(memory: Memory, held: HeldMemory) -> float:
    """Bytes of the fullest GPU, as a run measured them."""
    return {"allocated": held.allocated, "reserved": held.logged}.get(memory, held.total)


def _block_seconds(run: PublishedRun) -> float:
    """What one more block adds to a step of one microbatch, but for its update."""
    recipe = run.workload.recipe
    recipe = replace(recipe, kernels=replace(recipe.kernels, update_bytes=1e-9))  # such a kernel still starts

    def step(blocks: int) -> float:
        model = replace(run.workload.model, layers=blocks)
        return _forecast(replace(run, workload=replace(run.workload, model=model, recipe=recipe)), 1).seconds

    return step(3) - step(2)


def _forecast(run: PublishedRun, each: int) -> Forecast:
    return forecast(replace(run.workload, microbatches=each * run.plan.data_ranks))
