"""Choices graded: how good the configuration is that predictions choose among measured ones.

A cell is a model on a number of devices, with all the configurations of it that were tried. Those that crashed count as
not run: they can be chosen, but have no speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from shardlab.language import Refused, UserError
from shardlab.planner.published.predict import measured_as
from shardlab.planner.published.reading import assumptions, recipe_of, workload_of
from shardlab.planner.published.records import Incomplete, Unknown, measured_of, record_of, wrong_measurement
from shardlab.simulate.predict.forecast import forecast
from shardlab.simulate.predict.memory_advice import broken_limit
from shardlab.simulate.predict.recipe import Recipe

GOOD = 0.5
"""A configuration is good that reaches this share of the best speed of its cell."""

FIRST = 3
"""How many of the configurations that are predicted fastest are tried."""


@dataclass(frozen=True)
class GradedCell:
    """A model on a number of devices.

    Attributes:
        model, devices, nodes: which.
        candidates: all configurations that were tried, at least one of which ran.
    """

    model: str
    devices: int
    nodes: int
    candidates: Sequence[TriedPlan]

    @property
    def ranking(self) -> list[TriedPlan]:
        """All that can be chosen, the predicted fastest first: legal, and safe; if none is, all that fit."""
        legal = [each for each in self.candidates if each.predicted]
        some = [each for each in legal if each.safe] or [each for each in legal if each.fits] or legal
        return sorted(some, key=lambda each: -(each.predicted or 0.0))

    @property
    def best(self) -> TriedPlan:
        """The measured fastest."""
        return max(self.candidates, key=lambda each: each.measured or 0.0)

    @property
    def chosen(self) -> TriedPlan | None:
        """The first of the ranking that ran."""
        return next(iter(self._ran), None)

    @property
    def first_runs(self) -> bool:
        """Whether the very first of the ranking ran."""
        return bool(self.ranking) and self.ranking[0].measured is not None

    @property
    def regret(self) -> float:
        """Share of the best speed that is lost with the one chosen."""
        return self._lost(self._ran[:1])

    @property
    def regret_of_first(self) -> float:
        """Share of the best speed that is lost with the best of the first few."""
        return self._lost(self._ran[:FIRST])

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of predicted and measured speeds of what ran (None: of fewer than two)."""
        ran = [(each.predicted, each.measured) for each in self.candidates if each.predicted and each.measured]
        return _correlation(_ranks([one for one, _ in ran]), _ranks([other for _, other in ran]))

    @property
    def good(self) -> list[TriedPlan]:
        """Configurations that ran nearly as fast as the best, and have a prediction."""
        least = GOOD * (self.best.measured or 0.0)
        return [each for each in self.candidates if each.measured and each.predicted and each.measured >= least]

    @property
    def _ran(self) -> list[TriedPlan]:
        return [each for each in self.ranking if each.measured is not None]

    def _lost(self, some: Iterable[TriedPlan]) -> float:
        return 1 - max((each.measured or 0.0 for each in some), default=0.0) / (self.best.measured or 1.0)


def cells_of(candidates: Iterable[TriedPlan]) -> list[GradedCell]:
    """Cells of some candidates, in the order in which they come; those in which nothing ran are left out."""
    found: dict[tuple[str, int], list[TriedPlan]] = {}
    for each in candidates:
        found.setdefault((each.model, each.devices), []).append(each)
    cells = [GradedCell(model, devices, some[0].nodes, some) for (model, devices), some in found.items()]
    return [cell for cell in cells if cell.best.measured]


@dataclass(frozen=True)
class Grades:
    """Figures over some cells; shares of 1, and means.

    Attributes:
        cells: how many.
        regret, regret_of_first: of the one chosen, and of the best of the first few.
        first_runs: of how many cells the very first choice ran.
        time, memory: sizes of the errors of good configurations.
        time_bias, memory_bias: the same with signs.
        refused: share of what ran that is said not to fit.
        seconds: of a prediction.
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
        """Grade some cells, at least one."""
        good = [each for cell in cells for each in cell.good]
        all = [each for cell in cells for each in cell.candidates]
        ran = [each for each in all if each.measured and each.predicted]
        times = [(each.measured or 0.0) / (each.predicted or 1.0) - 1 for each in good]
        room = [each.bytes / each.measured_bytes - 1 for each in good if each.bytes and each.measured_bytes]
        return cls(
            cells=len(cells),
            regret=mean(cell.regret for cell in cells),
            regret_of_first=mean(cell.regret_of_first for cell in cells),
            first_runs=sum(cell.first_runs for cell in cells),
            time=_mean(map(abs, times)),
            time_bias=_mean(times),
            memory=_mean(map(abs, room)),
            memory_bias=_mean(room),
            refused=sum(not each.fits for each in ran) / max(1, len(ran)),
            seconds=_mean(each.seconds for each in all if each.predicted),
        )


def _mean(values: Iterable[float]) -> float:
    some = list(values)
    return mean(some) if some else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Each value's place; equal ones share the mean of theirs."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [mean(places[value]) for value in values]


def _correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    a, b = mean(one), mean(other)
    products = sum((x - a) * (y - b) for x, y in zip(one, other, strict=True))
    return products / (sum((x - a) ** 2 for x in one) * sum((y - b) ** 2 for y in other)) ** 0.5


# A configuration that others have tried, with what is predicted of it.


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
