"""The complete answer of the planner: the best plan, the best plan of each family, reasons, and possible gains.

`choose` runs the search, and then computes the reasons as long as there is time. `find_contenders` picks the plans that
`shardlab train --plan auto` measures before a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shardlab.common.errors import UserError
from shardlab.common.text import seconds_text
from shardlab.planner.alternatives import Alternative, add_shares, nearest_alternatives
from shardlab.planner.describe import UNTRACED, path_seconds, summary, trace_seconds
from shardlab.planner.error_model import (
    ErrorModel,
    MeasuredStep,
    choose_experiments,
    fit_errors,
    measured_outcomes,
    out_of_memory,
    slack,
)
from shardlab.planner.lines import has_plan
from shardlab.planner.nothing_fits import explain_empty_space, explain_no_fit
from shardlab.planner.problem import Problem, family_order
from shardlab.planner.results import PlanOutcome, Results
from shardlab.planner.search import UNLIMITED, Budget, OnProgress, Search
from shardlab.planner.space import meshes
from shardlab.planner.workers import Answer, Change, Query, TimedQueries, Workers, trace_or_none
from shardlab.simulate.predict.confidence import Confidence, Kind, confidences, may_not_fit, step_confidence

NOTABLE = 0.02
"""A plan for twice the memory is reported only if its step time is shorter by at least this share."""

SEARCHED = 0.75
"""Share of the budget for the search; the rest is for the reasons."""

ROOMY_SHARE = 0.2
"""Share of the budget for the search with twice the memory."""

LIMITS = "what limits a family"


@dataclass(frozen=True)
class PlanChoice:
    """Chosen plan, with its reasons.

    Attributes:
        problem: the problem.
        results: results of the search.
        best: the chosen plan.
        answer: forecast of the chosen plan, with the parts of its step time.
        families: the best plan of each family, with the parts of its step time.
        path: seconds of each part of the critical path (empty: unknown).
        alternatives: the nearest alternative of each choice.
        helps: relative gain in tokens/s if a resource is doubled (0.1: 10% more), by resource. The gain of memory comes
            from the best plan of a second search; for other resources, the plan stays the same.
        missed: questions that were left out because the time was up, as text ("": none).
        error_model: model of the prediction errors (None: no measurements are planned).
    """

    problem: Problem
    results: Results
    best: PlanOutcome
    answer: Answer
    families: list[tuple[PlanOutcome, Answer]]
    path: dict[str, float]
    alternatives: list[Alternative]
    helps: dict[Change, float]
    missed: str = ""
    error_model: ErrorModel | None = None

    def __repr__(self) -> str:
        return f"<PlanChoice of {summary(self.best.candidate)}, {seconds_text(self.best.seconds)} a step>"

    @property
    def confidence(self) -> tuple[Confidence, ...]:
        """Confidence of the chosen plan's time and of its memory, without measured steps."""
        return step_confidence(self.problem.workload(self.best.candidate))

    @property
    def may_not_fit(self) -> str:
        """Warning that the chosen plan may not fit into memory ("": it leaves enough memory free)."""
        memory = self.best.forecast.memory
        return may_not_fit(self.confidence, memory.total, memory.capacity)

    @property
    def expected_error(self) -> float:
        """Expected relative error of the chosen plan's time, given the measured steps if there are any."""
        model = self.error_model
        return model.expected_error_of(self.best.candidate) if model and model.measured else self.confidence[0].error

    @property
    def unknown(self) -> str:
        """Reason why the parts of the step time are unknown."""
        return "the time was up" if self.missed else UNTRACED


def expected_error(problem: Problem) -> float:
    """Return the expected relative error of a plan's time, for any plan of the problem."""
    kind = Kind.of_problem(problem.recipe, problem.cluster, problem.model)
    return confidences(kind, problem.cluster)[0].error


def choose(
    problem: Problem,
    workers: Workers,
    *,
    budget: Budget = UNLIMITED,
    on_progress: OnProgress | None = None,
    measured: Sequence[MeasuredStep] | None = None,
    families: bool = True,
) -> PlanChoice:
    """Search for the best plan, and compute the reasons for it.

    Args:
        problem: the problem.
        workers: processes that guess and simulate plans.
        budget: limits of the search and the reasons together. Most of the time is for the search.
        on_progress: callback for progress of the search.
        measured: measured steps, which may be an empty list (None: no measurements are planned). If it is not None, the
            search also keeps plans that are predicted to be slower but may be the fastest.
        families: whether to search for the best plan of each family as well.

    Raises:
        UserError: if no plan fits, no plan divides the devices and the batch, or a measured plan is not in the space.
    """
    began = time.monotonic()
    if not any(has_plan(problem, mesh) for mesh in meshes(problem)):
        raise UserError(explain_empty_space(problem))
    error, runs = expected_error(problem), measured_outcomes(problem, measured or (), workers)
    results = Search(
        problem,
        workers,
        budget=budget.part(SEARCHED),
        on_progress=on_progress,
        slack=0.0 if measured is None else slack(runs, error),
        families=families,
        ran_out=out_of_memory(measured or ()),
    ).run()
    queries = TimedQueries(problem, workers, began + budget.seconds)
    model = None if measured is None or not (results.best or runs) else fit_errors(results, runs, error, queries)
    if results.best is None:
        raise UserError(explain_no_fit(problem, results))
    return _give_reasons(results, results.best, queries, budget, model)


def _give_reasons(
    results: Results, best: PlanOutcome, queries: TimedQueries, budget: Budget, model: ErrorModel | None
) -> PlanChoice:
    """Compute why the best plan is the best and what would make it faster, the most important questions first."""
    problem = queries.problem
    pending = queries.ask(Query(best.candidate, best.forecast, shares=True))
    resources: list[Change] = ["links", "batch"] if problem.cluster.nodes > 1 else ["batch"]
    gain_futures = [queries.ask(Query(best.candidate), change) for change in resources]
    alternatives = nearest_alternatives(problem, best.candidate, queries, results.fitting)
    rows = sorted(results.families().values(), key=lambda outcome: family_order(outcome.family))
    helps = _gain_of_memory(best, queries, budget)
    others = [outcome for outcome in rows if outcome.candidate != best.candidate and outcome.family in results.searched]
    share_futures = {
        outcome.family: queries.ask(Query(outcome.candidate, outcome.forecast, shares=True)) for outcome in others
    }
    reasons = add_shares(alternatives, queries)
    answer = queries.answer(pending, "what the step's time goes to") or Answer(best.forecast, None)
    workload, path = problem.workload(best.candidate), dict[str, float]()
    if queries.remaining_seconds > trace_seconds(workload):
        path = trace_or_none(lambda: path_seconds(workload)) or {}
    answers = {name: queries.answer(future, LIMITS) for name, future in share_futures.items()} | {best.family: answer}
    for change, future in zip(resources, gain_futures, strict=True):
        if (study := queries.answer(future, "what would help")) is not None:
            helps[change] = (2 if change == "batch" else 1) * best.forecast.seconds / study.forecast.seconds - 1
    families = [(outcome, answers.get(outcome.family) or Answer(outcome.forecast, None)) for outcome in rows]
    return PlanChoice(problem, results, best, answer, families, path, reasons(), helps, str(queries), model)


def _gain_of_memory(best: PlanOutcome, queries: TimedQueries, budget: Budget) -> dict[Change, float]:
    """Return the gain from twice the memory, by a search for a clearly faster plan (empty: the time was too short)."""
    results = Search(
        queries.problem,
        queries.workers,
        budget=Budget(min(ROOMY_SHARE * budget.seconds, queries.remaining_seconds / 2), ROOMY_SHARE * budget.forecasts),
        change="memory",
        best=(1 - NOTABLE) * best.forecast.seconds,
    ).run()
    fastest = min([best.forecast.seconds, *(outcome.seconds for outcome in results.fitting)])
    conclusive = results.complete or fastest < best.forecast.seconds
    return {"memory": best.forecast.seconds / fastest - 1} if conclusive else {}


MOST = 6
"""Largest number of plans that are measured before a run."""

STEPS = 7
"""Smallest number of measured steps of a plan: one at first, and two in each of three rounds."""


def find_contenders(choice: PlanChoice, seconds: float) -> list[PlanOutcome]:
    """Return the plans to measure before a run: the predicted fastest plan, and plans that may be faster.

    Args:
        choice: a choice with an error model and without measured steps.
        seconds: time for all measured steps. All plans must fit into memory together. The first plan is always kept.
    """
    assert choice.error_model is not None, "it was asked what may be measured"
    plans = [experiment.outcome for experiment in choose_experiments(choice.error_model, MOST)]
    while len(plans) > 1 and not (
        least_seconds(plans) <= seconds
        and sum(outcome.forecast.memory.total for outcome in plans) <= choice.problem.usable_bytes
    ):
        plans.pop()
    return plans


def least_seconds(outcomes: Sequence[PlanOutcome]) -> float:
    """Return the predicted seconds to run all plans, each for `STEPS` steps, the fewest that are measured."""
    return STEPS * sum(outcome.seconds for outcome in outcomes)
