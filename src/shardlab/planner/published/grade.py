"""Grades of the planner: how fast is the configuration that predictions choose, compared with the fastest one?

A cell is a model on a number of devices, with all configurations that a source has tried for it. Configurations that
crashed are ranked too, but have no measured speed. `predict_plan` predicts one configuration, `group_cells` groups
configurations into cells, and `Grades.of` computes the figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import StatisticsError, correlation, mean
from typing import Any

from shardlab.language import Refused, UserError
from shardlab.planner.published.predict import measured_as
from shardlab.planner.published.reading import assumptions, recipe_of, workload_of
from shardlab.planner.published.records import Incomplete, Unknown, read_figures, read_record, wrong_measurement
from shardlab.simulate.predict.forecast import forecast
from shardlab.simulate.predict.limits import broken_limit
from shardlab.simulate.predict.recipe import Recipe

GOOD = 0.5
"""A good configuration reaches at least this share of the best speed of its cell."""

FIRST = 3
"""Number of configurations that a user would try, in the predicted order."""


@dataclass(frozen=True)
class GradedCell:
    """Model on a number of devices, with all configurations that were tried.

    Attributes:
        model, devices, nodes: the model, and the numbers of devices and nodes.
        candidates: the configurations, of which at least one ran.
    """

    model: str
    devices: int
    nodes: int
    candidates: Sequence[TriedPlan]

    @property
    def ranking(self) -> list[TriedPlan]:
        """Configurations with a prediction, fastest first: the safe ones; if none is safe, those that fit; else all."""
        legal = [plan for plan in self.candidates if plan.predicted]
        plans = [plan for plan in legal if plan.safe] or [plan for plan in legal if plan.fits] or legal
        return sorted(plans, key=lambda plan: -(plan.predicted or 0.0))

    @property
    def best(self) -> TriedPlan:
        """Configuration with the highest measured speed."""
        return max(self.candidates, key=lambda plan: plan.measured or 0.0)

    @property
    def choice(self) -> TriedPlan | None:
        """First configuration of the ranking that ran (None: none ran)."""
        return next(iter(self._ran), None)

    @property
    def first_runs(self) -> bool:
        """Whether the first configuration of the ranking ran."""
        return bool(self.ranking) and self.ranking[0].measured is not None

    @property
    def regret(self) -> float:
        """Best speed minus the speed of the chosen configuration, as a share of the best speed."""
        return self._regret_of(self._ran[:1])

    @property
    def regret_of_first(self) -> float:
        """Regret if the chosen configuration is the fastest of the first `FIRST` of the ranking that ran."""
        return self._regret_of(self._ran[:FIRST])

    @property
    def rank_correlation(self) -> float | None:
        """Spearman correlation of predicted and measured speeds (None: fewer than two ran, or all are equally fast)."""
        speeds = [(plan.predicted, plan.measured) for plan in self.candidates if plan.predicted and plan.measured]
        with suppress(StatisticsError):  # fewer than two ran, or all are equally fast
            return correlation(
                _ranks([predicted for predicted, _ in speeds]), _ranks([measured for _, measured in speeds])
            )

    @property
    def good(self) -> list[TriedPlan]:
        """Configurations that have a prediction, and a measured speed of at least `GOOD` times the best speed."""
        threshold = GOOD * (self.best.measured or 0.0)
        return [plan for plan in self.candidates if plan.measured and plan.predicted and plan.measured >= threshold]

    @property
    def _ran(self) -> list[TriedPlan]:
        return [plan for plan in self.ranking if plan.measured is not None]

    def _regret_of(self, plans: Iterable[TriedPlan]) -> float:
        return 1 - max((plan.measured or 0.0 for plan in plans), default=0.0) / (self.best.measured or 1.0)


def group_cells(candidates: Iterable[TriedPlan]) -> list[GradedCell]:
    """Group candidates into cells, in their order. Cells in which no configuration ran are left out."""
    by_cell: dict[tuple[str, int], list[TriedPlan]] = {}
    for candidate in candidates:
        by_cell.setdefault((candidate.model, candidate.devices), []).append(candidate)
    cells = [GradedCell(model, devices, plans[0].nodes, plans) for (model, devices), plans in by_cell.items()]
    return [cell for cell in cells if cell.best.measured]


@dataclass(frozen=True)
class Grades:
    """Mean figures over some cells, as shares of 1.

    Attributes:
        cells: number of cells.
        regret, regret_of_first: mean of `GradedCell.regret`, and of `GradedCell.regret_of_first`.
        first_runs: number of cells in which the first configuration of the ranking ran.
        time, memory: mean sizes of the relative errors of the predicted time and memory of good configurations.
        time_bias, memory_bias: means of the same errors with their signs, positive if predictions are too large.
        refused: number of configurations that ran although they are predicted not to fit, as a share of all that ran.
        seconds: mean CPU seconds of a prediction.
    """

    cells: int
    regret: float
    regret_of_first: float
    first_runs: int
    time: float
    time_bias: float
    memory: float
    memory_bias: float
    refused: float
    seconds: float

    @classmethod
    def of(cls, cells: Sequence[GradedCell]) -> Grades:
        """Return the figures of one or more cells."""
        good = [plan for cell in cells for plan in cell.good]
        plans = [plan for cell in cells for plan in cell.candidates]
        measured_plans = [plan for plan in plans if plan.measured and plan.predicted]
        time_errors = [(plan.measured or 0.0) / (plan.predicted or 1.0) - 1 for plan in good]
        memory_errors = [plan.bytes / plan.measured_bytes - 1 for plan in good if plan.bytes and plan.measured_bytes]
        return cls(
            cells=len(cells),
            regret=mean(cell.regret for cell in cells),
            regret_of_first=mean(cell.regret_of_first for cell in cells),
            first_runs=sum(cell.first_runs for cell in cells),
            time=_mean(map(abs, time_errors)),
            time_bias=_mean(time_errors),
            memory=_mean(map(abs, memory_errors)),
            memory_bias=_mean(memory_errors),
            refused=sum(not plan.fits for plan in measured_plans) / max(1, len(measured_plans)),
            seconds=_mean(plan.seconds for plan in plans if plan.predicted),
        )


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return mean(numbers) if numbers else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value. Equal values share their mean rank."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [mean(places[value]) for value in values]


@dataclass(frozen=True)
class TriedPlan:
    """Configuration that was tried, with its prediction.

    Attributes:
        id, model, devices, nodes: name of the run, the model, and the numbers of devices and nodes.
        measured: tokens/s of each device (None: the configuration did not run).
        measured_bytes: bytes of the fullest device (None: not given).
        predicted: predicted tokens/s of each device (None: there is no prediction).
        bytes: predicted bytes of the fullest device, counted in the same way as the measured ones.
        fits: whether the predicted bytes fit into memory.
        safe: whether the prediction leaves the margin of memory free that a plan must leave to be chosen.
        assumed: assumptions of the prediction about values that the row does not have.
        reason: why there is no prediction.
        breaks_limit: whether the reason is a limit of the framework. Otherwise, the numbers of the row do not form a
            plan.
        seconds: CPU seconds of the prediction.
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
        """Whether the row is a valid plan that the framework can run."""
        return not self.reason


def predict_plan(row: dict[str, Any], recipe: Recipe | None = None) -> TriedPlan:
    """Predict one row of a file of runs.

    Args:
        row: the row.
        recipe: recipe of the prediction (None: the recipe of the row's framework).

    Raises:
        UserError: if the row is incomplete, has an unknown name, or has a speed that is not a number.
    """
    try:
        record = read_record(row)
    except Incomplete as error:
        raise UserError(f"run {row['id']} {error}; every run that is graded needs it") from None
    if wrong := wrong_measurement(row):
        raise UserError(f"run {row['id']} {wrong}")
    measured, model = read_figures(row), row["model"]
    devices, tokens = record.hardware.gpus, record.batch.global_sequences * record.model.seq_len
    name = str(model.get("name") or f"{model['layers']} layers of {model['hidden']}")
    nodes = math.ceil(devices / (record.hardware.gpus_per_node or 8))
    speed = tokens / measured.seconds / devices if measured.seconds else None
    outcome = TriedPlan(record.id, name, devices, nodes, speed, measured.bytes)
    began = time.process_time()
    try:
        workload = workload_of(record, recipe or recipe_of(record))
        outcome = replace(outcome, assumed=assumptions(record, workload, has_recipe=recipe is not None))
        if reason := broken_limit(workload):
            return replace(outcome, reason=reason, breaks_limit=True)
        predicted = forecast(workload)
    except Unknown as error:
        raise UserError(f"run {row['id']} {error}") from None
    except (Incomplete, UserError, Refused) as error:
        return replace(outcome, reason=str(error))
    return replace(
        outcome,
        predicted=tokens / predicted.seconds / devices,
        bytes=measured_as(measured.memory if measured.bytes else "reserved", predicted.memory),
        fits=predicted.memory.fits,
        safe=predicted.memory.safe,
        seconds=time.process_time() - began,
    )
