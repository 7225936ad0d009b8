"""The whole answer: the best plan, the families' best, the reasons, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.errors import UserError
from shardlab.planner.families import by_order
from shardlab.planner.nothing import nothing_found, nothing_to_search
from shardlab.planner.problem import Problem
from shardlab.planner.reasons import Alternative, alternatives
from shardlab.planner.search import Found, PlanOutcome, Search, Told
from shardlab.planner.shares import path_of
from shardlab.planner.space import candidates, shapes
from shardlab.planner.sure import RunErrors, errors_of
from shardlab.planner.workers import Answer, Ask, Asked, Change, changed, traced
from shardlab.program.toml import toml_value
from shardlab.rules.pieces import counted

EQUAL = 0.005
"""Share of a step by which what is left may be faster when the search ends: predictions are not so exact."""

NOTABLE = 0.02
"""Share of a step that more memory must save to be looked for."""


@dataclass(frozen=True)
class PlanChoice:
    """A plan that was chosen, and why.

    Attributes:
        problem: what was planned.
        found: what the search has found.
        best: the chosen plan.
        answer: its forecast, and what its step's time goes to.
        families: the best of each family that was seen, and what its step's time goes to.
        path: seconds of the step by what its critical path is made of (empty: it has more ops than are traced).
        alternatives: the nearest alternative of each choice.
        helps: seconds of a step with twice as much of something: of this plan, or with more memory of the best one, if
            that was searched to the end or is faster.
    """

    problem: Problem
    found: Found
    best: PlanOutcome
    answer: Answer
    families: list[tuple[PlanOutcome, Answer]]
    path: dict[str, float]
    alternatives: list[Alternative]
    helps: dict[Change, float]

    @property
    def sure(self) -> RunErrors | None:
        """How far such predictions were off; of a measured machine nothing is published."""
        cluster = self.problem.cluster
        return None if cluster.profile is not None else errors_of(self.problem.recipe.name, cluster.device.name)

    def as_toml(self) -> str:
        """The chosen plan, as a file that --plan takes."""
        plan, model = self.best.candidate.plan, type(self.problem.model).__name__
        lines = [f"{name} = {toml_value(value)}\n" for name, value in plan.as_dict().items()]
        candidate, sequences = self.best.candidate, self.problem.sequences
        batch = f"{counted(sequences, 'sequence')} a step in microbatches of {candidate.micro_batch_size}"
        told = f"# a plan for {model} on {self.problem.cluster}: {batch}, in {candidate.precision.name}"
        return f"{told}\n{''.join(lines)}"


def choose(
    problem: Problem, ask: Ask, *, seconds: float = float("inf"), ahead: int = 1, told: Told | None = None
) -> PlanChoice:
    """Search, and derive the reasons.

    Args:
        seconds: that the search may take.
        ahead: how many forecasts are asked for at a time.
        told: is told of the search's progress.

    Raises:
        UserError: when no plan fits, or none divides.
    """
    if not any(True for shape in shapes(problem) for _ in candidates(problem, shape)):
        raise UserError(nothing_to_search(problem))
    found = Search(problem, ask, deadline=seconds, ahead=ahead, told=told, within=EQUAL).run()
    best = found.best
    if best is None:
        raise UserError(nothing_found(problem, found))
    rows = sorted(found.families().values(), key=lambda each: by_order(each.family))
    coming = [(each, ask(Asked(each.candidate, each.forecast, shares=True))) for each in rows]
    doubled: list[Change] = ["links", "batch"] if problem.cluster.nodes > 1 else ["batch"]
    more = {change: ask(Asked(best.candidate, change=change)) for change in doubled}
    roomy = Search(
        changed(problem, "memory"),
        ask,
        deadline=seconds / 4,
        ahead=ahead,
        change="memory",
        best=best.seconds,
        within=NOTABLE,
    ).run()
    others = alternatives(problem, best.candidate, ask)
    studied = [(each, future.result() or Answer(each.forecast, None)) for each, future in coming]
    (answer,) = (study for each, study in studied if each.candidate == best.candidate)
    helps: dict[Change, float] = {}
    for change in doubled:
        if (study := more[change].result()) is not None:
            helps[change] = study.forecast.seconds
    if roomy.fitting or roomy.left is None:
        helps["memory"] = min([best.seconds, *(each.seconds for each in roomy.fitting)])
    path = traced(lambda: path_of(problem.workload(best.candidate))) or {}
    return PlanChoice(problem, found, best, answer, studied, path, others, helps)
