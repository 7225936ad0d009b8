"""The whole answer: the best plan, the families' best, the reasons, and what would help."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.errors import UserError
from shardlab.planner.families import by_order
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.reasons import Alternative, alternatives
from shardlab.planner.search import Found, PlanOutcome, Search, Told
from shardlab.planner.shares import path_of
from shardlab.planner.space import meshes
from shardlab.planner.sure import RunErrors, errors_of
from shardlab.planner.words import short
from shardlab.planner.workers import Answer, Ask, Asked, Change, changed
from shardlab.program import AXES
from shardlab.program.field_types import as_flags
from shardlab.program.toml import toml_value
from shardlab.rules.pieces import counted
from shardlab.timeline.units import bytes_text

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
        path: seconds of the step by what its critical path is made of.
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
    if not any(meshes(problem)):
        raise UserError(_undivided(problem))
    found = Search(problem, ask, deadline=seconds, ahead=ahead, told=told, within=EQUAL).run()
    best = found.best
    if best is None:
        raise UserError(_nothing(problem, found))
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
    studied = [(each, study) for each, future in coming if (study := future.result()) is not None]
    answer = next(study for each, study in studied if each.candidate == best.candidate)
    helps: dict[Change, float] = {}
    for change in doubled:
        if (study := more[change].result()) is not None:
            helps[change] = study.forecast.seconds
    if roomy.fitting or roomy.left is None:
        helps["memory"] = min([best.seconds, *(each.seconds for each in roomy.fitting)])
    return PlanChoice(problem, found, best, answer, studied, path_of(problem.workload(best.candidate)), others, helps)


def _undivided(problem: Problem) -> str:
    devices, limits = problem.cluster.size, str(problem.limits)
    what = f"no plan divides {counted(devices, 'device')} and {counted(problem.sequences, 'sequence')}"
    if limits:
        return f"{what} under the limits {limits}; give others, or a --global-batch that is a multiple of {devices}"
    return f"{what}; give a --global-batch that is a multiple of {devices}"


def _nothing(problem: Problem, found: Found) -> str:
    """What comes nearest, and what is missing."""
    room, margin, misses = problem.room, problem.recipe.memory.margin_bytes, found.misses()
    if not misses:
        if found.left is not None:
            return "nothing was simulated in the time that was given; give more --seconds, or limits such as --max-tp 8"
        under = f" under the limits {problem.limits}" if str(problem.limits) else ""
        return f"no plan{under} is accepted by the code that runs plans; give other limits or another --global-batch"
    name, (bytes, candidate) = min(misses.items(), key=lambda miss: miss[1][0])
    if found.left is not None:
        return (
            "no plan that fits was found in the time that was given; give more --seconds, or limits such as --max-tp 8"
        )
    times, limits = (bytes / room if room > 0 else 1.0), str(problem.limits)
    more = f"about {times:.1f} times as many devices" if times >= 1.5 else "more devices"
    under = f" under the limits {limits}" if limits else ""
    free = f" and leaves {problem.recipe.name}'s margin of {bytes_text(margin, 1)}" if margin else ""
    lifted = _lifted(problem.limits, candidate)
    return (
        f"no plan{under} fits into {bytes_text(room + margin, 1)} a device{free}: {name} comes nearest "
        f"({short(candidate)}) and takes at least {bytes_text(bytes, 1)}, {bytes_text(bytes - room, 1)} too many; take "
        f"{more}, or larger ones{f', or leave out {lifted}' if lifted else ''}"
    )


SAVING = ("recompute", "micro_batch_size", "shard_parameters", "shard_gradients", "shard_optimizer")
"""Choices that save memory, those that cost least first."""


def _lifted(limits: Limits, candidate: Candidate) -> str:
    """The limit without which a step could take less memory ("": there is none)."""
    fixed = {**limits.fixed, **({"micro_batch_size": size} if (size := limits.micro_batch_size) else {})}
    least = {"recompute": "full", "micro_batch_size": 1}
    for name in SAVING:
        if name in fixed and fixed[name] != least.get(name) and not (name.startswith("shard") and fixed[name]):
            return as_flags({name: fixed[name]})
    sizes = candidate.plan.mesh.sizes()
    for axis in AXES:
        if axis in limits.fixed:
            return as_flags({axis: sizes[axis]})
        if axis in limits.most:
            return as_flags({f"max_{axis}": limits.most[axis]})
    return ""
