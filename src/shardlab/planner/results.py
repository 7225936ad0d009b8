"""What a search has found: plans with their forecasts, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardlab.planner.problem import Candidate, PlanShape, by_order, family, model_kinds
from shardlab.simulate.predict.forecast import Forecast
from shardlab.strategies.plan.plan import Plan


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
        for each in sorted(self.outcomes, key=lambda each: (each.forecast.memory.unlimited, repr(each.candidate))):
            if each.family not in fitting:
                nearest.setdefault(each.family, (each.forecast.memory.unlimited, each.candidate))
        return dict(sorted(nearest.items(), key=lambda miss: by_order(miss[0])))


# What waits in a search, and what comes first: shapes, the pipelines of shapes, and candidates.


AHEAD = 0.85
"""By how much what was worked out further comes earlier than its guess: a shape, its pipelines, their candidates."""

TIGHT = 0.8
"""Share of the room above which a floor of bytes lets a plan come later."""

UNLIKELY = 3.0
"""So many times later comes a plan that would not fit if its floor were as far below as the nearest one was."""

MANY = 2**15
"""Microbatches' passes through a pipeline's ranks for which a plan comes as late as one of twice the time."""

Phase = Literal["scouts", "all"]
"""A phase of the search: it forecasts some plans of each family, or all that may be faster."""


class Waiting(NamedTuple):
    """What waits, first by its key: a shape, a shape's pipeline, or a candidate.

    Attributes:
        key: what comes first has the least.
        tie: its number.
        seconds, bytes: its floors.
        guess: seconds, if nothing ran beside passes.
        shape: whose it is.
        plan: the pipeline or the candidate (None: the shape itself).
        passes: seconds of passes alone, at least; of a candidate they are not kept.
        timed: whether its order of work is in its floor.
    """

    key: float
    tie: int
    seconds: float
    bytes: float
    guess: float
    shape: PlanShape
    plan: Candidate | Plan | None = None
    passes: float = 0.0
    timed: bool = False

    @property
    def kinds(self) -> str:
        """The kinds of parallelism beside the data's."""
        return model_kinds(self.shape.mesh)

    @property
    def depth(self) -> int:
        """How far it was worked out: a shape, its pipeline, that one's candidate."""
        return 0 if self.plan is None else 1 if isinstance(self.plan, Plan) else 2


def key_of(waiting: Waiting, phase: Phase, full: float, passes: int) -> float:
    """The key of what waits: soon comes what is worked out further, takes few passes, or leaves room.

    Scouts take the lowest floors, so that they tell the best of each family.

    Args:
        waiting: what.
        phase: of the search.
        full: the share of the room that it takes, likely.
        passes: microbatches' passes through its pipeline's ranks.
    """
    if phase == "scouts":
        return waiting.seconds
    tight = (1 + max(0.0, full - TIGHT)) * (UNLIKELY if full > 1 else 1.0)
    return waiting.guess * AHEAD**waiting.depth * (1 + passes / MANY) * tight
