"""What a search has found: plans with their forecasts, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardlab.planner.families import by_order, family
from shardlab.planner.problem import Candidate
from shardlab.predict.forecast import Forecast


@dataclass(frozen=True)
class PlanOutcome:
    """A candidate and what was found of it.

    Attributes:
        candidate: which.
        forecast: its time and memory.
        corrected: seconds of a step by what was measured, of it or of others (None: nothing was).
        ran_out: whether it was run, and ran out of memory.
    """

    candidate: Candidate
    forecast: Forecast
    corrected: float | None = None
    ran_out: bool = False

    @property
    def family(self) -> str:
        return family(self.candidate.plan)

    @property
    def fits(self) -> bool:
        """Whether there is room, and as much beside it as the recipe wants of a plan that is chosen, or it ran."""
        fits = self.corrected is not None or (self.forecast.memory.fits and self.forecast.memory.safe)
        return fits and not self.ran_out

    @property
    def seconds(self) -> float:
        return self.forecast.seconds if self.corrected is None else self.corrected

    @property
    def rank(self) -> tuple[float, float, str]:
        """A key that sorts the better one first, always the same of those that are equal."""
        return self.seconds, self.forecast.memory.total, repr(self.candidate)


@dataclass
class Found:
    """What a search has found.

    Attributes:
        outcomes: every candidate that was forecast.
        space: how many shapes and candidates were seen; those of shapes that a floor discards were not generated.
        refused: candidates that the code which runs plans does not accept.
        left: the lowest floor of what was not forecast, 0 if not all was generated (None: nothing is left that could be
            faster).
        seconds: how long it took.
    """

    outcomes: list[PlanOutcome] = field(default_factory=list[PlanOutcome])
    space: dict[str, int] = field(default_factory=lambda: {"shapes": 0, "candidates": 0})
    refused: list[Candidate] = field(default_factory=list[Candidate])
    left: float | None = None
    seconds: float = 0.0

    @property
    def fitting(self) -> list[PlanOutcome]:
        """Those that fit, fastest first."""
        return sorted((each for each in self.outcomes if each.fits), key=lambda each: each.rank)

    @property
    def best(self) -> PlanOutcome | None:
        fitting = self.fitting
        return fitting[0] if fitting else None

    def families(self) -> dict[str, PlanOutcome]:
        """The best of each family that fits."""
        best: dict[str, PlanOutcome] = {}
        for each in self.fitting:
            best.setdefault(each.family, each)
        return best

    def misses(self) -> dict[str, tuple[float, Candidate]]:
        """Tell which plan comes nearest, of each family of which none fits, and its bytes; in a table's order."""
        fitting, nearest = self.families(), dict[str, tuple[float, Candidate]]()
        for each in sorted(self.outcomes, key=lambda each: (each.forecast.memory.wanted, repr(each.candidate))):
            if each.family not in fitting:
                nearest.setdefault(each.family, (each.forecast.memory.wanted, each.candidate))
        return dict(sorted(nearest.items(), key=lambda miss: by_order(miss[0])))
