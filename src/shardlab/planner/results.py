"""Results of a search, and the queue entries from which it takes the next plan.

`Results` has the simulated plans and what was left out. `QueueEntry` is a shape, a pipeline or a plan that waits in the
search, and `priority_of` decides which comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardlab.planner.problem import Candidate, PlanShape, family, family_order, model_kinds
from shardlab.simulate.predict.forecast import Forecast
from shardlab.strategies.plan.plan import Plan


@dataclass(frozen=True)
class PlanOutcome:
    """Candidate with its predicted time and memory.

    Attributes:
        candidate: the plan, microbatch and precision.
        forecast: predicted time and memory.
        corrected: seconds of a step, corrected by measured steps (None: nothing was measured).
        ran_out: whether it was run and ran out of memory.
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
        """Whether the plan ran, or fits into memory with the margin that the recipe keeps free."""
        fits = self.corrected is not None or (self.forecast.memory.fits and self.forecast.memory.safe)
        return fits and not self.ran_out

    @property
    def seconds(self) -> float:
        return self.forecast.seconds if self.corrected is None else self.corrected

    @property
    def rank(self) -> tuple[float, float, str]:
        """Sort key: fastest first, with a fixed order of equally fast plans."""
        return self.seconds, self.forecast.memory.total, repr(self.candidate)


@dataclass
class Results:
    """Results of a search.

    Attributes:
        outcomes: all candidates that were simulated.
        space: numbers of shapes and candidates that were generated. Candidates of discarded shapes are not.
        refused: candidates that cannot be run.
        left: lowest lower bound of the candidates that were not simulated, 0 if not all shapes were generated (None:
            none of them could be faster).
        seconds: duration of the search.
    """

    outcomes: list[PlanOutcome] = field(default_factory=list[PlanOutcome])
    space: dict[str, int] = field(default_factory=lambda: {"shapes": 0, "candidates": 0})
    refused: list[Candidate] = field(default_factory=list[Candidate])
    left: float | None = None
    seconds: float = 0.0

    @property
    def fitting(self) -> list[PlanOutcome]:
        """Outcomes that fit, fastest first."""
        return sorted((each for each in self.outcomes if each.fits), key=lambda each: each.rank)

    @property
    def best(self) -> PlanOutcome | None:
        fitting = self.fitting
        return fitting[0] if fitting else None

    def families(self) -> dict[str, PlanOutcome]:
        """Return the fastest outcome of each family that fits."""
        best: dict[str, PlanOutcome] = {}
        for each in self.fitting:
            best.setdefault(each.family, each)
        return best

    def misses(self) -> dict[str, tuple[float, Candidate]]:
        """Return bytes and candidate of the smallest plan of each family of which no plan fits."""
        fitting, nearest = self.families(), dict[str, tuple[float, Candidate]]()
        for each in sorted(self.outcomes, key=lambda each: (each.forecast.memory.unlimited, repr(each.candidate))):
            if each.family not in fitting:
                nearest.setdefault(each.family, (each.forecast.memory.unlimited, each.candidate))
        return dict(sorted(nearest.items(), key=lambda miss: family_order(miss[0])))


AHEAD = 0.85
"""Factor on the priority for each level of expansion: from shape to pipeline, and from pipeline to candidate."""

TIGHT = 0.8
"""Share of the room above which a lower bound of bytes lets a plan come later."""

UNLIKELY = 3.0
"""Factor on the priority of a plan that likely does not fit, judging by earlier plans of its family."""

MANY = 2**15
"""Number of microbatch passes of a pipeline that doubles the priority value, since it takes long to simulate."""

Phase = Literal["warm start", "all"]
"""Phase of the search: simulate some plans of each family, or all that may be faster."""


class QueueEntry(NamedTuple):
    """Entry of the queue: a shape, a pipeline of a shape, or a candidate.

    Attributes:
        key: priority; the lowest comes first.
        tie: serial number, which orders equal keys.
        seconds, bytes: lower bounds of the step time and of memory.
        guess: expected seconds of a step, if no communication overlaps with passes.
        shape: the plan shape.
        plan: the pipeline or the candidate (None: the entry is the shape).
        passes: lower bound of the seconds of passes alone; not kept for candidates.
        timed: whether the lower bound includes the order of the schedule.
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
        """Kinds of parallelism other than data parallelism."""
        return model_kinds(self.shape.mesh)

    @property
    def depth(self) -> int:
        """Level of expansion: 0 for a shape, 1 for a pipeline, 2 for a candidate."""
        return 0 if self.plan is None else 1 if isinstance(self.plan, Plan) else 2


def priority_of(waiting: QueueEntry, phase: Phase, full: float, passes: int) -> float:
    """Return the priority of an entry; low values come first.

    Expanded entries, entries with few passes, and entries that leave memory free come early. The warm start takes the
    lowest lower bounds, so that it finds the best plan of each family.

    Args:
        waiting: the entry.
        phase: phase of the search.
        full: expected share of the memory that it needs.
        passes: number of microbatch passes through the ranks of its pipeline.
    """
    if phase == "warm start":
        return waiting.seconds
    tight = (1 + max(0.0, full - TIGHT)) * (UNLIKELY if full > 1 else 1.0)
    return waiting.guess * AHEAD**waiting.depth * (1 + passes / MANY) * tight
