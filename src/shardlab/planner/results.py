"""Results of a search: the simulated plans, and the progress of the search."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardlab.planner.problem import Candidate, family, family_order
from shardlab.simulate.predict.forecast import Forecast


@dataclass(frozen=True)
class PlanOutcome:
    """Candidate with its predicted time and memory.

    Attributes:
        candidate: the plan, microbatch and precision.
        forecast: predicted time and memory.
        corrected: seconds of a step, measured or corrected by measured steps (None: no step was measured, or the plan
            neither ran nor is predicted to fit).
        ran_out: whether the plan ran out of memory in a measured run.
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
        """Whether the plan fits: it ran, or is predicted to leave the margin of memory free."""
        fits = self.corrected is not None or (self.forecast.memory.fits and self.forecast.memory.safe)
        return fits and not self.ran_out

    @property
    def seconds(self) -> float:
        return self.forecast.seconds if self.corrected is None else self.corrected

    @property
    def rank(self) -> tuple[float, float, str]:
        """Sort key: fastest first, with a fixed order of equally fast plans."""
        return self.seconds, self.forecast.memory.total, repr(self.candidate)


@dataclass(frozen=True)
class Improvement:
    """Improvement of the best plan during a search.

    Attributes:
        elapsed_seconds: seconds from the beginning of the search.
        forecasts: number of forecasts until then.
        seconds: predicted seconds of a step of the new best plan.
    """

    elapsed_seconds: float
    forecasts: int
    seconds: float


@dataclass
class Results:
    """Results of a search.

    Attributes:
        outcomes: all candidates that were simulated.
        lines: number of lines that were considered (see `shardlab.planner.lines`).
        refused: candidates that cannot be run.
        improvements: improvements of the best plan, in order.
        searched: families whose search ended before the budget was used up.
        complete: whether the search for the fastest plan ended before the budget was used up: no known line promises to
            be faster, or no plan fits and enough lines were tried.
        seconds: duration of the search.
    """

    outcomes: list[PlanOutcome] = field(default_factory=list[PlanOutcome])
    lines: int = 0
    refused: list[Candidate] = field(default_factory=list[Candidate])
    improvements: list[Improvement] = field(default_factory=list[Improvement])
    searched: set[str] = field(default_factory=set[str])
    complete: bool = False
    seconds: float = 0.0

    @property
    def fitting(self) -> list[PlanOutcome]:
        """Outcomes that fit, fastest first."""
        return sorted((outcome for outcome in self.outcomes if outcome.fits), key=lambda outcome: outcome.rank)

    @property
    def best(self) -> PlanOutcome | None:
        fitting = self.fitting
        return fitting[0] if fitting else None

    @property
    def unimproved_seconds(self) -> float:
        """Seconds from the last improvement to the end of the search."""
        return self.seconds - (self.improvements[-1].elapsed_seconds if self.improvements else 0.0)

    def families(self) -> dict[str, PlanOutcome]:
        """Return the fastest fitting outcome of each family. A family without a fitting outcome is left out."""
        best: dict[str, PlanOutcome] = {}
        for outcome in self.fitting:
            best.setdefault(outcome.family, outcome)
        return best

    def misses(self) -> dict[str, tuple[float, Candidate]]:
        """Return, for each family of which no plan fits, the fewest bytes of a simulated plan, and this plan."""
        fitting, nearest = self.families(), dict[str, tuple[float, Candidate]]()
        for outcome in sorted(
            self.outcomes, key=lambda outcome: (outcome.forecast.memory.unlimited, repr(outcome.candidate))
        ):
            if outcome.family not in fitting:
                nearest.setdefault(outcome.family, (outcome.forecast.memory.unlimited, outcome.candidate))
        return dict(sorted(nearest.items(), key=lambda miss: family_order(miss[0])))
