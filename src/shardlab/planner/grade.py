"""Choices graded: how good the configuration is that predictions choose among measured ones.

A cell is a model on a number of devices, with all the configurations of it that were tried. Those that crashed count as
not run: they can be chosen, but have no speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from shardlab.planner.tried import TriedPlan

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
