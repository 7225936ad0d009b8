"""Beliefs on how long plans' steps take: predictions, corrected by the steps that were measured.

The error of a predicted step, the logarithm of measured over predicted, is taken for the sum of random numbers: one
that all plans of a problem share; one of each part of a step (compute, communication on an axis), in proportion to the
part; one that plans share to the extent to which their ranks compute alike; and one of its own, which plans share only
if their steps go to the same in nearly the same shares. Given some errors, the others' best linear prediction follows
(Rasmussen and Williams 2006, "Gaussian processes for machine learning", equations 2.25 and 2.26).

The number that all share may be any: what all measured plans have in common counts in full for those that were not
measured (a basis function with a vague prior, section 2.7 there). Else a machine that is twice as slow as predicted
would have plans win that nobody measured. One measured step so corrects all plans by the same factor; more of them tell
parts apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import erf, exp, isclose, log, pi, sqrt
from statistics import median
from typing import Any

import numpy as np

from shardlab.common.errors import UserError
from shardlab.common.files import packaged
from shardlab.language.rules.kinds import counted
from shardlab.planner.alternatives import TELLING
from shardlab.planner.bounds.layers import Array
from shardlab.planner.describe import BUBBLE, COMPUTE, StepShares, chosen_fields, short
from shardlab.planner.problem import Candidate, Problem, family
from shardlab.planner.results import Found, PlanOutcome
from shardlab.planner.workers import Ask, Asked, InTime

COMMON, OF_PARTS, OF_COMPUTING, OWN = 0.5, 0.1, 0.25, 0.15
"""Shares of the variance of an error.

The first counts only until something is measured. Of the 17 steps of docs/agreement.md 60 % were common to all. Of 154
good runs of the ultra-scale playbook nothing was, since nanotron's recipe was fitted to them, but 63 % to plans that
compute alike. The share of parts is assumed.
"""

STEEP = 3
"""With which power of their likeness plans share errors: in those 154 runs, plans of which half, 0.7 and all that ranks
compute by was the same had covariances of 0.1, 0.25 and 0.63 of the variance."""

NOISE = 0.01
"""Standard deviation of a median over ten steps, as a share of it, on a machine that does nothing else."""

TO_MEAN = sqrt(2 / pi)
"""Mean size of a normal error over its standard deviation."""


@dataclass(frozen=True)
class Beliefs:
    """How long plans' steps take, as far as predictions and measured steps tell.

    Attributes:
        plans: as predicted.
        shares: what each one's step goes to (None: nobody asked).
        measured: seconds of those that were measured, by place.
        error: mean size of a prediction's error, as a share of the step.
    """

    plans: Sequence[PlanOutcome]
    shares: Sequence[StepShares | None]
    measured: Mapping[int, float]
    error: float

    @cached_property
    def prior(self) -> Array:
        """Covariance of the errors before anything is measured: (plans, plans)."""
        return self.variance * (COMMON + self.kernel)

    @cached_property
    def variance(self) -> float:
        """Variance of an error: as predictions were off elsewhere, or more where measured steps differ more from each
        other than that would have it."""
        usual, known = (self.error / TO_MEAN) ** 2, [*self.measured]
        if len(known) < 2:
            return usual
        inner = self._covariance(usual, known)
        apart = self.errors - self._common(inner)
        return usual * max(1.0, float(apart @ np.linalg.solve(inner, apart)) / (len(known) - 1))

    def _covariance(self, variance: float, known: Sequence[int]) -> Array:
        """Covariance of the errors of some measured plans, but for what all plans share: (known, known)."""
        return variance * self.kernel[np.ix_(known, known)] + NOISE**2 * np.eye(len(known))

    def _common(self, inner: Array) -> float:
        """The error that all measured plans have in common, given what they do not share: (known, known)."""
        ones = np.linalg.solve(inner, np.ones(len(inner)))
        return float(ones @ self.errors / ones.sum())

    @cached_property
    def kernel(self) -> Array:
        """What of an error's variance two plans share, beside what all do: (plans, plans)."""
        choices = [computing(each.candidate) for each in self.plans]
        said = [np.array([repr(each[name]) for each in choices]) for name in choices[0]]
        same = [values[:, None] == values for values in said if len({*values}) > 1]
        alike = np.mean(same, axis=0) if same else np.ones((len(choices), len(choices)))
        every = np.array(
            [[each.parts.get(name, 0.0) if each else 0.0 for name in self.entries] for each in self.shares]
        )
        squares = (every**2).sum(axis=1)
        apart = squares[:, None] + squares - 2 * every @ every.T
        own = np.exp(-apart / (2 * TELLING**2)) * (alike == 1)
        return OF_PARTS * self.parts @ self.parts.T + OF_COMPUTING * alike**STEEP + OWN * own

    @cached_property
    def entries(self) -> list[str]:
        """All that steps go to, by the names that shares have."""
        return sorted({name for each in self.shares if each for name in each.parts})

    @cached_property
    def names(self) -> list[str]:
        """The parts of steps."""
        return sorted({*map(_part, self.entries)})

    @cached_property
    def parts(self) -> Array:
        """The share of each part in each step: (plans, parts); nothing where nobody asked."""
        table = np.zeros((len(self.plans), len(self.names)))
        for row, each in zip(table, self.shares, strict=True):
            for name, share in each.parts.items() if each else ():
                row[self.names.index(_part(name))] += share
        return table

    def given(self, places: Sequence[int]) -> tuple[Array, Array]:
        """What steps at some places tell of the error of each plan: how it follows from theirs, (plans, places), and
        the covariance that is left, (plans, plans).

        Each plan's weights sum to 1, so that errors which are all the same are every plan's.
        """
        known = list(places)
        if not known:
            return np.zeros((len(self.plans), 0)), self.prior
        apart, inner = self.variance * self.kernel, self._covariance(self.variance, known)
        gain: Array = np.linalg.solve(inner, apart[known]).T.astype(np.float64)
        ones = np.linalg.solve(inner, np.ones(len(known)))
        rest = 1 - gain.sum(axis=1)  # of what all plans share, as far as the plan's own likes do not tell it
        left = apart - gain @ apart[known] + np.outer(rest, rest) / ones.sum()
        return gain + np.outer(rest, ones / ones.sum()), left

    @cached_property
    def errors(self) -> Array:
        """Errors of the measured plans' predictions: (measured,)."""
        return np.array([log(seconds / self.plans[at].seconds) for at, seconds in self.measured.items()])

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of each plan's step: as measured, or the prediction corrected."""
        off = self.given([*self.measured])[0] @ self.errors
        made = [each.seconds * exp(float(more)) for each, more in zip(self.plans, off, strict=True)]
        return [self.measured.get(at, seconds) for at, seconds in enumerate(made)]

    @cached_property
    def sure(self) -> list[float]:
        """The mean size of what `seconds` may be wrong by, as a share of it."""
        left = np.diag(self.given([*self.measured])[1])
        return [TO_MEAN * (NOISE if at in self.measured else sqrt(max(0.0, float(v)))) for at, v in enumerate(left)]

    def sure_of(self, candidate: Candidate) -> float:
        """How sure the time of one of the plans is."""
        return next(sure for each, sure in zip(self.plans, self.sure, strict=True) if each.candidate == candidate)

    @cached_property
    def factors(self) -> dict[str, float]:
        """How many times as long as predicted each part of a step takes, as far as measured steps tell."""
        known = [*self.measured]
        if not known:
            return dict.fromkeys(self.names, 1.0)
        inner = self._covariance(self.variance, known)
        common = self._common(inner)
        told = self.variance * np.linalg.solve(inner, self.errors - common)
        of_parts = OF_PARTS * self.parts[known].T @ told
        return {name: exp(common + float(more)) for name, more in zip(self.names, of_parts, strict=True)}


def _part(name: str) -> str:
    """The part of a step that an entry of its shares belongs to; a bubble is the others' compute."""
    return COMPUTE if name in (COMPUTE, BUBBLE) else f"communication{name[name.rindex(' on ') :]}"


COMPUTING = ("schedule", "stages_per_rank", "sequence_parallel", "recompute", "context", "ulysses_degree")
"""Fields of a plan on which it depends how its ranks compute, beside the mesh."""


def computing(candidate: Candidate) -> dict[str, Any]:
    """The choices of a candidate on which it depends how its ranks compute, by name."""
    sizes = {axis: size for axis, size in candidate.plan.mesh.sizes().items() if not axis.startswith("dp_")}
    said = {name: getattr(candidate.plan, name) for name in COMPUTING}
    return {**sizes, **said, "micro_batch_size": candidate.micro_batch_size, "precision": candidate.precision.name}


# Plans that are worth running next: those whose measured steps could change the choice, and that tell of different
# things.


WORTH = 0.001
"""Share of the step that a run is to be expected to save, at least."""


@dataclass(frozen=True)
class Experiment:
    """A plan to run.

    Attributes:
        outcome: the plan, and what is predicted of it.
        why: what its measured step can tell.
    """

    outcome: PlanOutcome
    why: str


def experiments(beliefs: Beliefs, count: int) -> list[Experiment]:
    """Choose plans to run next, at most so many.

    The first is the fastest, unless it has been measured: the others are compared with it. Each of the others is the
    one that, given that those before it are measured, is expected to save most of the fastest one's step (expected
    improvement: Jones et al. 1998, "Efficient global optimization of expensive black-box functions"). What is much like
    a plan that is measured has little uncertainty left of its own, and so is not chosen.
    """
    best = min(range(len(beliefs.plans)), key=lambda at: (beliefs.seconds[at], at))
    known, chosen = [*beliefs.measured], list[Experiment]()
    if best not in beliefs.measured:
        known.append(best)
        chosen.append(Experiment(beliefs.plans[best], "the fastest so far: what others are compared with"))
    while len(chosen) < count:
        left = beliefs.given(known)[1]
        near = [
            at
            for at, seconds in enumerate(beliefs.seconds)
            if seconds <= beliefs.seconds[best] * (1 + beliefs.error)
            and not any(_same(beliefs, at, one) for one in known)
        ]
        gains = {at: _improvement(beliefs, best, at, left)[0] for at in near}
        at = max(gains, key=lambda place: (gains[place], -place), default=best)
        if at == best or gains[at] < WORTH:
            break
        chance = _improvement(beliefs, best, at, left)[1]
        chosen.append(Experiment(beliefs.plans[at], _why(beliefs, best, at, chance)))
        known.append(at)
    return chosen


def _same(beliefs: Beliefs, one: int, other: int) -> bool:
    """Whether two plans do the same, such as schedules of a single microbatch: to the last digit."""
    return isclose(beliefs.plans[one].seconds, beliefs.plans[other].seconds, rel_tol=1e-9)


def _improvement(beliefs: Beliefs, best: int, at: int, left: Array) -> tuple[float, float]:
    """By how much, as a share of its step, a plan is expected to be below the best one, and its chance to be.

    Args:
        left: covariance of the errors.
    """
    slower = beliefs.seconds[at] / beliefs.seconds[best] - 1
    spread = sqrt(max(1e-12, float(left[at, at] + left[best, best] - 2 * left[at, best])))
    chance = 0.5 * (1 + erf(-slower / spread / sqrt(2)))
    return spread * exp(-0.5 * (slower / spread) ** 2) / sqrt(2 * pi) - slower * chance, chance


def _why(beliefs: Beliefs, best: int, at: int, chance: float) -> str:
    """How likely a plan is the faster one, and what the two of them differ in that is unsure."""
    slower = beliefs.seconds[at] / beliefs.seconds[best] - 1
    one, another = beliefs.plans[best].candidate, beliefs.plans[at].candidate
    tells = _differing(computing(one), computing(another))
    mine, other = beliefs.shares[best], beliefs.shares[at]
    if mine and other:
        apart = {name: other.parts.get(name, 0.0) - mine.parts.get(name, 0.0) for name in {*mine.parts, *other.parts}}
        name = max(sorted(apart), key=lambda name: apart[name])
        if apart[name] >= TELLING:
            tells.append(f"{name} ({other.parts[name]:.1%} of its step instead of {mine.parts.get(name, 0.0):.1%})")
    tells = tells or _differing(chosen_fields(one.plan), chosen_fields(another.plan))
    about = f"; it tells of {', '.join(tells)}" if tells else ""
    return f"expected {slower:.1%} slower, and faster with a chance of {chance:.0%}{about}"


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what differs, as flags have them."""
    return [name.replace("_", "-") for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]


# How sure a prediction is: errors on published runs that its constants were not fitted to.


FEW = 5
"""Runs of a kind below which those of a wider kind are taken."""

NAMED = 3
"""Recipes that are named at most; more are counted."""


@dataclass(frozen=True)
class RunErrors:
    """Errors of predicted step times, of runs of one kind.

    Attributes:
        recipes: that ran them (none: they are no published runs).
        device: of the runs ("": of several).
        runs: how many.
        mean, worst: of the sizes of their errors, predicted over measured, less 1.
        what: the runs.
    """

    recipes: tuple[str, ...]
    device: str
    runs: int
    mean: float
    worst: float
    what: str = "published run"

    def __str__(self) -> str:
        """Words for these runs: `± 13.1% over 27 published runs of llm-foundry on h100, ..., at most 38%`."""
        where = f" on {self.device}" if self.device else ""
        names = self.recipes if len(self.recipes) <= NAMED else (counted(len(self.recipes), "recipe"),)
        whose = f" of {', '.join(names)}" if names else ""
        unseen = ", each source left out of the fit" if self.recipes else ""
        size = f"± {self.mean:.1%} over {counted(self.runs, self.what)}"
        return f"{size}{whose}{where}{unseen}, at most {self.worst:.0%}"


ON_PROFILES = RunErrors((), "two CPU cores", 34, 0.061, 0.192, "step")
"""Errors on a machine that is planned by its own profile: the steps of runs 7 and 8 of docs/agreement.md."""


@cache
def known_errors() -> tuple[RunErrors, ...]:
    """Errors of every recipe on every device of which there are published runs."""
    return tuple(
        RunErrors((row["recipe"],), row["device"], row["runs"], row["mean"], row["worst"])
        for row in packaged("planner/errors.toml")["error"]
    )


def errors_of(recipe: str, device: str) -> RunErrors:
    """Errors of the runs that are most like a step: of its recipe on its device; of all recipes on its device, if those
    are few; of all, if those are few too."""
    known = known_errors()
    here = [row for row in known if row.device == device]
    own = [row for row in here if row.recipes == (recipe,)]
    some = next((rows for rows in (own, here) if sum(row.runs for row in rows) >= FEW), known)
    runs = sum(row.runs for row in some)
    return RunErrors(
        tuple(sorted({name for row in some for name in row.recipes})),
        "" if some is known else device,
        runs,
        sum(row.runs * row.mean for row in some) / runs,
        max(row.worst for row in some),
    )


# Measured steps of plans that were run, and why some are refused.


FARTHEST = 10
"""How many times longer or shorter than predicted a step may be said to take: what is further off has another unit."""


@dataclass(frozen=True)
class MeasuredStep:
    """A plan that was run.

    Attributes:
        candidate: which.
        seconds: of a step (None: it ran out of memory).
        source: the file or folder that says so.
        by_hand: whether somebody has written the seconds, maybe in another unit; a run's own record is in seconds.
    """

    candidate: Candidate
    seconds: float | None
    source: str
    by_hand: bool = False


MeasuredOutcome = tuple[PlanOutcome, float]
"""A plan as predicted, and the seconds of a step that were measured."""


def ran_out(measured: Sequence[MeasuredStep]) -> frozenset[Candidate]:
    """Plans that have run out of memory, whatever they took where they had not."""
    return frozenset(each.candidate for each in measured if each.seconds is None)


def measured_outcomes(problem: Problem, measured: Sequence[MeasuredStep], ask: Ask) -> list[MeasuredOutcome]:
    """Forecasts of plans that were measured and fit, and the seconds of a step; of several measurements the median.

    Raises:
        UserError: when a plan is not one that the problem has, or a time is so far off that its unit must be another.
    """
    candidates = [each.candidate for each in measured if _is_of(problem, each)]
    coming = {each: ask(Asked(each)) for each in candidates if each not in ran_out(measured)}
    found: list[MeasuredOutcome] = []
    for candidate, future in coming.items():
        own = [(each.seconds, each.source) for each in measured if each.candidate == candidate and each.seconds]
        if (answer := future.result()) is None:
            raise UserError(
                f"{own[0][1]}: this plan is none that {problem.recipe.name} runs on {problem.cluster}; leave it out"
            )
        for step in (each for each in measured if each.candidate == candidate):
            _want_seconds(step, answer.forecast.seconds)
        found.append((PlanOutcome(candidate, answer.forecast), median(seconds for seconds, _ in own)))
    return found


def _is_of(problem: Problem, step: MeasuredStep) -> bool:
    """See that a measured plan is one of a problem's.

    Raises:
        UserError: saying why it is not.
    """
    plan, limits, source = step.candidate.plan, problem.limits, step.source
    ranks, devices, size = plan.mesh.world, problem.cluster.size, step.candidate.micro_batch_size
    if ranks != devices:
        raise UserError(f"{source} was measured on {ranks} ranks, and the plan is for {devices}; leave it out")
    if problem.sequences % (plan.data_ranks * size):
        raise UserError(
            f"{source}: {plan.data_ranks} data-parallel ranks with microbatches of {size} cannot share "
            f"{problem.sequences} sequences; leave it out, or give its --global-batch"
        )
    if not limits.allow(plan) or not limits.allows("micro_batch_size", size):
        raise UserError(f"{source} is a plan that the limits {limits} leave out; give other limits, or leave it out")
    if step.candidate.precision not in problem.precisions:
        name = step.candidate.precision.name
        raise UserError(f"{source} was measured in {name}; add it to --precision, or leave it out")
    return True


def _want_seconds(step: MeasuredStep, predicted: float) -> None:
    """Refuse a time that somebody wrote and that cannot be in seconds.

    Raises:
        UserError: with the plan, and with both times.
    """
    if step.by_hand and step.seconds and not 1 / FARTHEST <= step.seconds / predicted <= FARTHEST:
        plan = f"{family(step.candidate.plan)}, {short(step.candidate)}"
        raise UserError(
            f"{step.source}: {plan} is said to take {step.seconds:g} s, and {predicted:.3g} s are predicted, more than "
            f"{FARTHEST} times off; is it in seconds? give those of one step, or leave it out"
        )


# Corrections of what a search has found, by the steps that were measured.


LOOKED_FOR = "what a plan's time goes to"
"""What reports say is left out, if time is up before it is known."""

LOOKED_AT = 24
"""How many plans, the fastest ones, are asked what their time goes to."""


def slack(measured: Sequence[MeasuredOutcome], error: float) -> float:
    """How much slower than the fastest one a plan may be predicted, as a share, that corrections may make the fastest.

    Args:
        error: mean size of a prediction's.
    """
    times = [seconds / outcome.seconds for outcome, seconds in measured]
    return max(error, max(times, default=1.0) / min(times, default=1.0) - 1)


def corrected(found: Found, measured: Sequence[MeasuredOutcome], error: float, timed: InTime) -> Beliefs:
    """Rank again what was found, by what was measured: outcomes then have corrected seconds.

    Args:
        measured: plans that fit, since they ran; they are added to those that were found.
        error: mean size of a prediction's.
        timed: tells what steps' time goes to, as long as there is time; of other plans it is not known.
    """
    ran = [outcome for outcome, _ in measured]
    others = [each for each in found.outcomes if each.candidate not in {one.candidate for one in ran}]
    plans = [*ran, *sorted((each for each in others if each.fits), key=lambda each: each.rank)]
    known: dict[int, StepShares | None] = {}
    places = {at: seconds for at, (_, seconds) in enumerate(measured)}
    while True:
        beliefs = Beliefs(plans, [known.get(at) for at in range(len(plans))], places, error)
        fastest = sorted(range(len(plans)), key=lambda at: beliefs.seconds[at])[:LOOKED_AT]
        if not (unknown := {*places, *fastest} - known.keys()):
            break
        coming = {at: timed.ask(Asked(plans[at].candidate, plans[at].forecast, shares=True)) for at in unknown}
        answers = {at: timed.answer(future, LOOKED_FOR) for at, future in coming.items()}
        known |= {at: answer and answer.shares for at, answer in answers.items()}
    if measured:
        again = [replace(each, corrected=seconds) for each, seconds in zip(plans, beliefs.seconds, strict=True)]
        found.outcomes = [*again, *(each for each in others if not each.fits)]
    return beliefs
