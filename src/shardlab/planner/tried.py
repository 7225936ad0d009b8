"""A configuration that others have tried, with what is predicted of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from shardlab.predict.forecast import forecast
from shardlab.predict.limits import broken_limit
from shardlab.predict.recipe import Recipe
from shardlab.program import Refused, UserError
from shardlab.published.assumed import assumptions
from shardlab.published.predict import measured_as
from shardlab.published.reading import recipe_of, workload_of
from shardlab.published.records import Incomplete, Unknown, record_of
from shardlab.published.rows import measured_of, wrong_measurement


@dataclass(frozen=True)
class TriedPlan:
    """A configuration that was tried.

    Attributes:
        id, model, devices, nodes: which, of what, and on how many.
        measured: tokens/s of each device (None: it did not run).
        measured_bytes: of the fullest device (None: not given).
        predicted: tokens/s of each device (None: there is no prediction).
        bytes: predicted, of the fullest device, as they were measured.
        fits: whether they find room.
        safe: whether they leave free what the recipe wants free of a plan that is chosen.
        assumed: what the prediction takes for granted because the row does not say it.
        reason: why there is no prediction.
        breaks_limit: whether the reason is a limit of the framework; else it is that the row's numbers make no plan.
        seconds: that the prediction took.
    """

    id: str
    model: str
    devices: int
    nodes: int
    measured: float | None
    measured_bytes: float | None = None
    predicted: float | None = None
    bytes: float | None = None
    fits: bool = False
    safe: bool = False
    assumed: tuple[str, ...] = ()
    reason: str = ""
    breaks_limit: bool = False
    seconds: float = 0.0

    @property
    def legal(self) -> bool:
        """Whether the row is a plan at all, and the framework runs it."""
        return not self.reason


def candidate_of(row: dict[str, Any], recipe: Recipe | None = None) -> TriedPlan:
    """Predict one row of a file of runs, as this recipe runs it (None: as the row's framework does).

    Raises:
        UserError: it says too little to be graded, names what is unknown here, or has a speed that is none.
    """
    try:
        record = record_of(row)
    except Incomplete as error:
        raise UserError(f"run {row['id']} {error}; every run that is graded needs it") from None
    if wrong := wrong_measurement(row):
        raise UserError(f"run {row['id']} {wrong}")
    measured, written = measured_of(row), row["model"]
    devices, tokens = record.hardware.gpus, record.batch.global_sequences * record.model.seq_len
    name = str(written.get("name") or f"{written['layers']} layers of {written['hidden']}")
    nodes = math.ceil(devices / (record.hardware.gpus_per_node or 8))
    speed = tokens / measured.seconds / devices if measured.seconds else None
    found = TriedPlan(record.id, name, devices, nodes, speed, measured.bytes)
    began = time.process_time()
    try:
        workload = workload_of(record, recipe or recipe_of(record))
        found = replace(found, assumed=assumptions(record, workload, told=recipe is not None))
        if reason := broken_limit(workload):
            return replace(found, reason=reason, breaks_limit=True)
        made = forecast(workload)
    except Unknown as error:
        raise UserError(f"run {row['id']} {error}") from None
    except (Incomplete, UserError, Refused) as error:
        return replace(found, reason=str(error))
    return replace(
        found,
        predicted=tokens / made.seconds / devices,
        bytes=measured_as(measured.memory if measured.bytes else "reserved", made.memory),
        fits=made.memory.fits,
        safe=made.memory.safe,
        seconds=time.process_time() - began,
    )
