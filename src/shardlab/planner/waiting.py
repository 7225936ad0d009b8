"""What waits in a search, and what comes first: shapes, the pipelines of shapes, and candidates."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardlab.planner.families import model_kinds
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate
from shardlab.strategies.plan import Plan

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
