"""Search for schedules of the planner's best pipeline plans, with one and with two stages on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from shardlab.common.errors import UserError
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.results import PlanOutcome, Results
from shardlab.planner.schedule_search.from_workload import problem_of
from shardlab.planner.schedule_search.problem import Placement, ScheduleProblem
from shardlab.planner.schedule_search.search import FoundSchedule, search_schedule

PLANS = 2
"""Number of pipeline plans for which schedules are searched."""

PLACEMENTS: tuple[tuple[Placement, int], ...] = (("vee", 2), ("loop", 1))
"""Placements to try, with the number of stages of each rank."""


@dataclass(frozen=True)
class ScheduledPlan:
    """Pipeline plan with a schedule that was searched for it.

    Attributes:
        candidate: the plan with its published schedule.
        schedule: the schedule (None: none was found).
        published_seconds: predicted seconds of a step with the plan's published schedule.
        seconds: predicted seconds of a step with the found schedule.
        tensors: bytes of tensors on the fullest rank with the found schedule.
        reason: reason why no schedule was found.
    """

    candidate: Candidate
    schedule: FoundSchedule | None = None
    published_seconds: float = 0.0
    seconds: float = 0.0
    tensors: int = 0
    reason: str = ""

    @property
    def gain(self) -> float:
        """Relative gain in steps per second (0.1: 10 % more; 0: the step does not become shorter)."""
        return max(0.0, self.published_seconds / self.seconds - 1) if self.seconds else 0.0


def schedules_for_plans(problem: Problem, results: Results, seconds: float) -> list[ScheduledPlan]:
    """Search for schedules of the fastest pipeline plans that fit, at most one plan for each mesh.

    Args:
        problem: the planning problem.
        results: results of the planner's search.
        seconds: time limit of all searches together.
    """
    outcomes: list[PlanOutcome] = []
    for outcome in results.fitting:
        plan = outcome.candidate.plan
        if plan.mesh.pp > 1 and all(plan.mesh != other.candidate.plan.mesh for other in outcomes):
            outcomes.append(outcome)
        if len(outcomes) == PLANS:
            break
    return [_schedule_plan(problem, outcome, seconds / len(outcomes)) for outcome in outcomes]


def _schedule_plan(problem: Problem, outcome: PlanOutcome, seconds: float) -> ScheduledPlan:
    workload = problem.workload(outcome.candidate)
    best, reason = ScheduledPlan(outcome.candidate), ""
    try:
        plain_step = workload.estimate().step
    except UserError as error:  # too many ops to replay
        return ScheduledPlan(outcome.candidate, reason=str(error))
    for placement, stages_per_rank in PLACEMENTS:
        try:
            step_problem = problem_of(workload, placement=placement, stages_per_rank=stages_per_rank)
            schedule, step = step_problem.search(partial(_search_for, seconds / len(PLACEMENTS)))
        except UserError as error:  # too few layers for so many stages, or no schedule that fits
            reason = str(error)
            continue
        if best.schedule is None or step.step < best.seconds:
            best = ScheduledPlan(outcome.candidate, schedule, plain_step, step.step, step.peak.bytes)
    return best if best.schedule is not None else ScheduledPlan(outcome.candidate, reason=reason)


def _search_for(seconds: float, problem: ScheduleProblem, share: float) -> FoundSchedule:
    return search_schedule(problem, seconds=seconds * share)
