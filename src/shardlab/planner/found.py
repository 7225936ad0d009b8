"""What a search has found: plans with their forecasts, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardlab.planner.families import family, model_kinds
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
        too_large: of each family, the candidate with the lowest floor of bytes that does not fit, and that floor.
        refused: candidates that the code which runs plans does not accept.
        open: kinds of parallelism beside the data's of plans that were not forecast.
        left: the lowest floor of what was not forecast, 0 if not all was generated (None: nothing is left that could be
            faster).
        seconds: how long it took.
    """

    outcomes: list[PlanOutcome] = field(default_factory=list[PlanOutcome])
    space: dict[str, int] = field(default_factory=lambda: {"shapes": 0, "candidates": 0})
    too_large: dict[str, tuple[float, Candidate]] = field(default_factory=dict[str, tuple[float, Candidate]])
    refused: list[Candidate] = field(default_factory=list[Candidate])
    open: set[str] = field(default_factory=set[str])
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
        """Tell which plan comes nearest, of each family of which none fits, and its bytes or a floor of them."""
        nearest = dict(self.too_large)
        for each in self.outcomes:
            known = nearest.get(each.family)
            if not each.fits and (known is None or each.forecast.memory.wanted < known[0]):
                nearest[each.family] = each.forecast.memory.wanted, each.candidate
        fitting, shown = self.families(), {name: miss for name, miss in nearest.items() if name not in self.open}
        return {
            name: miss
            for name, miss in shown.items()
            if name not in fitting and not ("" in self.open and not model_kinds(miss[1].plan.mesh))
        }
