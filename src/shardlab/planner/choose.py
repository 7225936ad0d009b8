"""The whole answer: the best plan, the families' best, the reasons, and what would help."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardlab.common.errors import UserError
from shardlab.common.files import toml_value
from shardlab.language.rules.kinds import counted
from shardlab.planner.alternatives import Alternative, explained, nearest
from shardlab.planner.describe import UNTRACED, path_of, trace_seconds
from shardlab.planner.error_model import (
    ON_PROFILES,
    Beliefs,
    MeasuredStep,
    RunErrors,
    corrected,
    errors_of,
    experiments,
    measured_outcomes,
    ran_out,
    slack,
)
from shardlab.planner.nothing_fits import nothing_found, nothing_to_search
from shardlab.planner.problem import Problem, by_order
from shardlab.planner.results import Found, PlanOutcome
from shardlab.planner.search import Search, Told
from shardlab.planner.space import candidates, shapes
from shardlab.planner.workers import Answer, Ask, Asked, Change, InTime, Workers, changed, traced

EQUAL = 0.005
"""Share of a step by which what is left may be faster when the search ends: predictions are not so exact."""

NOTABLE = 0.02
"""Share of a step that more memory must save to be looked for."""

SEARCHED = 0.75
"""Share of the time that the search may take; the rest is for reasons."""

LIMITS = "what limits a family"


@dataclass(frozen=True)
class PlanChoice:
    """A plan that was chosen, and why.

    Attributes:
        problem: what was planned.
        found: what the search has found.
        best: the chosen plan.
        answer: its forecast, and what its step's time goes to.
        families: the best of each family that was seen, and what its step's time goes to.
        path: seconds of the step by what its critical path is made of (empty: it is not known).
        alternatives: the nearest alternative of each choice.
        helps: share of tokens/s that twice as much of something gains: this plan, or with more memory the best one, if
            that was searched to the end or is faster.
        missed: what was not found out in time ("": nothing).
        beliefs: what is believed of plans, and measured (None: nobody asks).
    """

    problem: Problem
    found: Found
    best: PlanOutcome
    answer: Answer
    families: list[tuple[PlanOutcome, Answer]]
    path: dict[str, float]
    alternatives: list[Alternative]
    helps: dict[Change, float]
    missed: str = ""
    beliefs: Beliefs | None = None

    @property
    def sure(self) -> RunErrors:
        """How far such predictions were off."""
        return sure_of(self.problem)

    @property
    def sure_now(self) -> float:
        """How far the chosen plan's time may be off: the mean size of the error, by what was measured too."""
        return self.beliefs.sure_of(self.best.candidate) if self.beliefs and self.beliefs.measured else self.sure.mean

    @property
    def unknown(self) -> str:
        """Why it is not known what the step's time goes to, where it is not."""
        return "time was up" if self.missed else UNTRACED

    def as_toml(self, commands: Iterable[str]) -> str:
        """The chosen plan, as a file that --plan takes.

        Args:
            commands: that run it. The file says them, since model, batch and precision are theirs.
        """
        candidate, sequences = self.best.candidate, self.problem.sequences
        batch = f"{counted(sequences, 'sequence')} a step in microbatches of {candidate.micro_batch_size}"
        told = (
            f"for {type(self.problem.model).__name__} on {self.problem.cluster}: {batch}, in {candidate.precision.name}"
        )
        lines = [f"# written by shardlab plan: {told}\n", *(f"# {command}\n" for command in commands)]
        return "".join(lines + [f"{name} = {toml_value(value)}\n" for name, value in candidate.plan.as_dict().items()])


def sure_of(problem: Problem) -> RunErrors:
    """How far such predictions were off: of published runs, or of steps on a machine that was measured."""
    cluster = problem.cluster
    return ON_PROFILES if cluster.profile is not None else errors_of(problem.recipe.name, cluster.device.name)


def choose(
    problem: Problem,
    ask: Ask | Workers,
    *,
    seconds: float = float("inf"),
    ahead: int = 1,
    told: Told | None = None,
    measured: Sequence[MeasuredStep] | None = None,
) -> PlanChoice:
    """Search, and derive the reasons.

    Args:
        seconds: that all may take: the search most of them, the reasons the rest.
        ahead: how many forecasts are asked for at a time.
        told: is told of the search's progress.
        measured: steps that were measured, if there are any yet (None: nothing is to be measured). Then plans are
            found, too, that may be the fastest although they are predicted slower.

    Raises:
        UserError: when no plan fits, or none divides, or what was measured is no plan of the problem.
    """
    began = time.monotonic()
    if not any(True for shape in shapes(problem) for _ in candidates(problem, shape)):
        raise UserError(nothing_to_search(problem))
    error, ran = sure_of(problem).mean, measured_outcomes(problem, measured or (), ask)
    within = EQUAL if measured is None else -slack(ran, error)
    unfit = ran_out(measured or ())
    searched = SEARCHED * seconds
    found = Search(problem, ask, deadline=searched, ahead=ahead, told=told, within=within, ran_out=unfit).run()
    timed = InTime(problem, ask, began + seconds)
    beliefs = None if measured is None or not (found.best or ran) else corrected(found, ran, error, timed)
    best = found.best
    if best is None:
        raise UserError(nothing_found(problem, found))
    own = timed.ask(Asked(best.candidate, best.forecast, shares=True))
    doubled: list[Change] = ["links", "batch"] if problem.cluster.nodes > 1 else ["batch"]
    more = [timed.ask(Asked(best.candidate, change=change)) for change in doubled]
    near = nearest(problem, best.candidate, timed, found.fitting)
    rows = sorted(found.families().values(), key=lambda each: by_order(each.family))
    others = [each for each in rows if each.candidate != best.candidate]
    roomy = Search(
        changed(problem, "memory"),
        ask,
        deadline=min(seconds / 4, timed.left / 2),
        ahead=ahead,
        change="memory",
        best=best.forecast.seconds,
        within=NOTABLE,
    ).run()
    coming = [timed.ask(Asked(each.candidate, each.forecast, shares=True)) for each in others]
    reasons = explained(near, timed)
    answer = timed.answer(own, "what the step's time goes to") or Answer(best.forecast, None)
    workload, path = problem.workload(best.candidate), dict[str, float]()
    if timed.left > trace_seconds(workload):
        path = traced(lambda: path_of(workload)) or {}
    studied = {each.family: timed.answer(future, LIMITS) for each, future in zip(others, coming, strict=True)}
    helps: dict[Change, float] = {}
    for change, future in zip(doubled, more, strict=True):
        if (study := timed.answer(future, "what would help")) is not None:
            helps[change] = (2 if change == "batch" else 1) * best.forecast.seconds / study.forecast.seconds - 1
    least = min([best.forecast.seconds, *(each.seconds for each in roomy.fitting)])
    if least < best.forecast.seconds or roomy.left is None:
        helps["memory"] = best.forecast.seconds / least - 1
    families = [
        (each, answer if each is best else studied.get(each.family) or Answer(each.forecast, None)) for each in rows
    ]
    return PlanChoice(problem, found, best, answer, families, path, reasons(), helps, str(timed), beliefs)


# Plans that take turns before a run begins: the one that is predicted fastest, and those that may be faster.


MOST = 6
"""How many take turns at most."""

STEPS = 7
"""How many steps each takes at least: one at first, and two in each of three rounds."""


def contenders(choice: PlanChoice, seconds: float) -> list[PlanOutcome]:
    """Find what is worth measuring before a run: the plan that is predicted fastest, and then those that may be faster.

    Args:
        choice: what was planned, with beliefs; nothing was measured.
        seconds: that their steps may take; with too little the first plan is alone. All lie in memory at once.
    """
    assert choice.beliefs is not None, "it was asked what may be measured"
    found = [each.outcome for each in experiments(choice.beliefs, MOST)]
    while len(found) > 1 and not (
        least_seconds(found) <= seconds and sum(each.forecast.memory.total for each in found) <= choice.problem.room
    ):
        found.pop()
    return found


def least_seconds(found: Sequence[PlanOutcome]) -> float:
    """Seconds of the least steps that contenders take, as predicted."""
    return STEPS * sum(each.seconds for each in found)
