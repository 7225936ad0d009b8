"""Model of the errors of predicted step times, corrected by measured steps.

The error of a predicted step, log(measured / predicted), is modelled as a sum of random numbers:

- an error that all plans of a problem share;
- an error of each part of a step (compute, communication on an axis), in proportion to the part;
- an error that plans share as far as their ranks compute in the same way;
- an error of the single plan, which two plans share only if their ranks compute in the same way and the parts of their
  steps take nearly equal shares of the time.

Given some measured errors, the best linear prediction of the other errors follows (Rasmussen and Williams 2006,
"Gaussian processes for machine learning", equations 2.25 and 2.26). The common error has a vague prior (section 2.7
there), so the common part of all measured errors applies in full to plans that were not measured. Otherwise, on a
machine that is half as fast as predicted, plans that were not measured would win. One measured step therefore corrects
all plans by the same factor, and several steps separate the parts.

`ErrorModel` is the model. `choose_experiments` picks the plans to measure next, `measured_outcomes` checks measured
steps, and `fit_errors` ranks the results of a search again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import erf, exp, isclose, log, pi, sqrt
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlab.common.errors import UserError
from shardlab.planner.alternatives import TELLING
from shardlab.planner.describe import StepShares, chosen_fields, summary
from shardlab.planner.problem import Candidate, Problem, family
from shardlab.planner.results import PlanOutcome, Results
from shardlab.planner.workers import Query, TimedQueries, Workers, forecast_query
from shardlab.simulate.predict.estimate import COMPUTE, IDLE

Array = NDArray[np.float64]

COMMON, OF_PARTS, OF_COMPUTING, OWN = 0.5, 0.1, 0.25, 0.15
"""Shares of the variance of an error: common to all plans, of parts, of similar computation, and of one plan.

The first share applies only until a step is measured. In the 17 steps of docs/agreement.md, 60 % of the variance was
common to all plans. In 154 good runs of the ultra-scale playbook nothing was common, since the recipe of nanotron was
fitted to them, but 63 % was common to plans that compute in the same way. The share of parts is an assumption.
"""

STEEP = 3
"""Power of the similarity of two plans in their covariance.

In those 154 runs, plans with a share of 0.5, 0.7 and 1 of their choices in common had covariances of 0.1, 0.25 and 0.63
times the variance.
"""

NOISE = 0.01
"""Relative standard deviation of the median of ten steps on an idle machine."""

TO_MEAN = sqrt(2 / pi)
"""Mean absolute value of a normal error, divided by its standard deviation."""


@dataclass(frozen=True)
class ErrorModel:
    """Model of the errors of predicted step times, and the times corrected by measured steps.

    Attributes:
        plans: the plans with their predictions.
        shares: parts of each plan's step time (None: unknown).
        measured: seconds of the measured plans, by their number in `plans`.
        error: mean absolute relative error of a prediction.
    """

    plans: Sequence[PlanOutcome]
    shares: Sequence[StepShares | None]
    measured: Mapping[int, float]
    error: float

    @cached_property
    def prior(self) -> Array:
        """Covariance of the errors before any measurement: (plans, plans)."""
        return self.variance * (COMMON + self.kernel)

    @cached_property
    def variance(self) -> float:
        """Variance of an error: that of earlier predictions, or larger if the measured errors vary more."""
        usual, indices = (self.error / TO_MEAN) ** 2, [*self.measured]
        if len(indices) < 2:
            return usual
        covariance = self._covariance(usual, indices)
        deviations = self.errors - self._common(covariance)
        return usual * max(1.0, float(deviations @ np.linalg.solve(covariance, deviations)) / (len(indices) - 1))

    def _covariance(self, variance: float, indices: Sequence[int]) -> Array:
        """Return the covariance of some measured errors without the common part: (indices, indices)."""
        return variance * self.kernel[np.ix_(indices, indices)] + NOISE**2 * np.eye(len(indices))

    def _common(self, covariance: Array) -> float:
        """Return the common error of the measured plans.

        `covariance` is the covariance of their errors without the common part.
        """
        ones = np.linalg.solve(covariance, np.ones(len(covariance)))
        return float(ones @ self.errors / ones.sum())

    @cached_property
    def kernel(self) -> Array:
        """Covariance of the errors without the common part, as a share of the variance: (plans, plans)."""
        choices = [computation_choices(outcome.candidate) for outcome in self.plans]
        columns = [np.array([repr(choice[name]) for choice in choices]) for name in choices[0]]
        equalities = [values[:, None] == values for values in columns if len({*values}) > 1]
        similarity = np.mean(equalities, axis=0) if equalities else np.ones((len(choices), len(choices)))
        part_shares = np.array(
            [[shares.parts.get(name, 0.0) if shares else 0.0 for name in self.entries] for shares in self.shares]
        )
        squares = (part_shares**2).sum(axis=1)
        distances = squares[:, None] + squares - 2 * part_shares @ part_shares.T
        specific = np.exp(-distances / (2 * TELLING**2)) * (similarity == 1)
        return OF_PARTS * self.parts @ self.parts.T + OF_COMPUTING * similarity**STEEP + OWN * specific

    @cached_property
    def entries(self) -> list[str]:
        """Names of all entries of `shares`, such as "all-gather on tp"."""
        return sorted({name for shares in self.shares if shares for name in shares.parts})

    @cached_property
    def names(self) -> list[str]:
        """Names of the parts to which the entries belong, such as "communication on tp"."""
        return sorted({*map(_part, self.entries)})

    @cached_property
    def parts(self) -> Array:
        """Share of each part in each step, or 0 if unknown: (plans, parts)."""
        table = np.zeros((len(self.plans), len(self.names)))
        for row, shares in zip(table, self.shares, strict=True):
            for name, share in shares.parts.items() if shares else ():
                row[self.names.index(_part(name))] += share
        return table

    def condition_on(self, places: Sequence[int]) -> tuple[Array, Array]:
        """Return the prediction of all errors from the errors of some measured plans.

        Args:
            places: numbers of the measured plans.

        Returns:
            The weights of the measured errors, (plans, places), and the remaining covariance, (plans, plans). The
            weights of a plan sum to 1, so equal errors of all measured plans apply to every plan.
        """
        indices = list(places)
        if not indices:
            return np.zeros((len(self.plans), 0)), self.prior
        kernel, measured_covariance = self.variance * self.kernel, self._covariance(self.variance, indices)
        gain: Array = np.linalg.solve(measured_covariance, kernel[indices]).T.astype(np.float64)
        ones = np.linalg.solve(measured_covariance, np.ones(len(indices)))
        common_weights = 1 - gain.sum(axis=1)  # weight of the common error that similar plans do not provide
        covariance = kernel - gain @ kernel[indices] + np.outer(common_weights, common_weights) / ones.sum()
        return gain + np.outer(common_weights, ones / ones.sum()), covariance

    @cached_property
    def errors(self) -> Array:
        """Measured errors, log(measured / predicted): (measured,)."""
        return np.array([log(seconds / self.plans[index].seconds) for index, seconds in self.measured.items()])

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of each plan's step: measured, or predicted and corrected."""
        corrections = self.condition_on([*self.measured])[0] @ self.errors
        predicted = [
            outcome.seconds * exp(float(correction))
            for outcome, correction in zip(self.plans, corrections, strict=True)
        ]
        return [self.measured.get(index, seconds) for index, seconds in enumerate(predicted)]

    @cached_property
    def expected_errors(self) -> list[float]:
        """Expected relative error of each of `seconds`."""
        variances = np.diag(self.condition_on([*self.measured])[1])
        return [
            TO_MEAN * (NOISE if index in self.measured else sqrt(max(0.0, float(v))))
            for index, v in enumerate(variances)
        ]

    def expected_error_of(self, candidate: Candidate) -> float:
        """Return the expected relative error of one plan's time."""
        index = next(index for index, outcome in enumerate(self.plans) if outcome.candidate == candidate)
        return self.expected_errors[index]

    @cached_property
    def factors(self) -> dict[str, float]:
        """Ratio of measured to predicted time of each part of a step, estimated from the measured steps."""
        indices = [*self.measured]
        if not indices:
            return dict.fromkeys(self.names, 1.0)
        covariance = self._covariance(self.variance, indices)
        common = self._common(covariance)
        solved = self.variance * np.linalg.solve(covariance, self.errors - common)
        of_parts = OF_PARTS * self.parts[indices].T @ solved
        return {name: exp(common + float(error)) for name, error in zip(self.names, of_parts, strict=True)}


def _part(name: str) -> str:
    """Return the part to which an entry of `shares` belongs. Idle time is compute, since other ranks compute then."""
    return COMPUTE if name in (COMPUTE, IDLE) else f"communication{name[name.rindex(' on ') :]}"


COMPUTING = ("schedule", "stages_per_rank", "sequence_parallel", "recompute", "context", "ulysses_degree")
"""Fields of a plan that decide how its ranks compute, in addition to the mesh."""


def computation_choices(candidate: Candidate) -> dict[str, Any]:
    """Return the choices of a candidate that decide how its ranks compute, by name."""
    sizes = {axis: size for axis, size in candidate.plan.mesh.sizes().items() if not axis.startswith("dp_")}
    choices = {name: getattr(candidate.plan, name) for name in COMPUTING}
    return {**sizes, **choices, "micro_batch_size": candidate.micro_batch_size, "precision": candidate.precision.name}


WORTH = 0.001
"""Smallest expected gain of an experiment, as a share of the step time."""


@dataclass(frozen=True)
class Experiment:
    """Plan to measure.

    Attributes:
        outcome: the plan with its prediction.
        reason: reason to measure it, in words.
    """

    outcome: PlanOutcome
    reason: str


def choose_experiments(model: ErrorModel, count: int) -> list[Experiment]:
    """Return at most `count` plans to measure next.

    The first is the fastest plan, unless it has been measured, because the other plans are compared with it. Each
    further plan has the largest expected improvement over the fastest plan, given that the plans before it are measured
    (Jones et al. 1998, "Efficient global optimization of expensive black-box functions"). Little is uncertain about a
    plan that is similar to a measured one, so it is not chosen.
    """
    best = min(range(len(model.plans)), key=lambda index: (model.seconds[index], index))
    observations, experiments = [*model.measured], list[Experiment]()
    if best not in model.measured:
        observations.append(best)
        experiments.append(Experiment(model.plans[best], "the fastest so far; the others are compared with it"))
    while len(experiments) < count:
        covariance = model.condition_on(observations)[1]
        candidates = [
            index
            for index, seconds in enumerate(model.seconds)
            if seconds <= model.seconds[best] * (1 + model.error)
            and not any(_are_equally_fast(model, index, other) for other in observations)
        ]
        gains = {index: _improvement(model, best, index, covariance) for index in candidates}
        index = max(gains, key=lambda place: (gains[place][0], -place), default=best)
        if index == best or gains[index][0] < WORTH:
            break
        experiments.append(Experiment(model.plans[index], _reason_text(model, best, index, gains[index][1])))
        observations.append(index)
    return experiments


def _are_equally_fast(model: ErrorModel, one: int, other: int) -> bool:
    """Return whether two plans are equally fast up to rounding, such as schedules of a single microbatch."""
    return isclose(model.plans[one].seconds, model.plans[other].seconds, rel_tol=1e-9)


def _improvement(model: ErrorModel, best: int, index: int, covariance: Array) -> tuple[float, float]:
    """Return a plan's expected improvement over the best one, as a share of the step, and the chance that it is faster.

    Args:
        covariance: covariance of the errors, given the plans that are measured or chosen so far: (plans, plans).
    """
    slower = model.seconds[index] / model.seconds[best] - 1
    spread = sqrt(max(1e-12, float(covariance[index, index] + covariance[best, best] - 2 * covariance[index, best])))
    chance = 0.5 * (1 + erf(-slower / spread / sqrt(2)))
    return spread * exp(-0.5 * (slower / spread) ** 2) / sqrt(2 * pi) - slower * chance, chance


def _reason_text(model: ErrorModel, best: int, index: int, chance: float) -> str:
    """Return in words how likely a plan is to be faster than the best one, and in which uncertain parts they differ."""
    slower = model.seconds[index] / model.seconds[best] - 1
    fastest, candidate = model.plans[best].candidate, model.plans[index].candidate
    subjects = _differing(computation_choices(fastest), computation_choices(candidate))
    best_shares, shares = model.shares[best], model.shares[index]
    if best_shares and shares:
        differences = {
            name: shares.parts.get(name, 0.0) - best_shares.parts.get(name, 0.0)
            for name in {*best_shares.parts, *shares.parts}
        }
        name = max(sorted(differences), key=lambda name: differences[name])
        if differences[name] >= TELLING:
            subjects.append(
                f"{name} ({shares.parts[name]:.1%} of its step instead of {best_shares.parts.get(name, 0.0):.1%})"
            )
    subjects = subjects or _differing(chosen_fields(fastest.plan), chosen_fields(candidate.plan))
    subject_text = f"; it differs in {', '.join(subjects)}" if subjects else ""
    return f"expected {slower:.1%} slower, and faster with a chance of {chance:.0%}{subject_text}"


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that differ, written with hyphens."""
    return [name.replace("_", "-") for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]


FARTHEST = 10
"""Largest ratio between a step time that a user wrote and its prediction. Beyond it, the unit must be wrong."""


@dataclass(frozen=True)
class MeasuredStep:
    """Measured step of a plan.

    Attributes:
        candidate: the plan.
        seconds: seconds of a step (None: it ran out of memory).
        source: file or folder of the measurement.
        by_hand: whether a user wrote the seconds, so that the unit may be wrong.
    """

    candidate: Candidate
    seconds: float | None
    source: str
    by_hand: bool = False


MeasuredOutcome = tuple[PlanOutcome, float]
"""Plan with its prediction, and the measured seconds of a step."""


def out_of_memory(measured: Sequence[MeasuredStep]) -> frozenset[Candidate]:
    """Return the plans that ran out of memory in any of their runs."""
    return frozenset(step.candidate for step in measured if step.seconds is None)


def measured_outcomes(problem: Problem, measured: Sequence[MeasuredStep], workers: Workers) -> list[MeasuredOutcome]:
    """Return the predictions of measured plans that fit, with the median of their measured seconds.

    Raises:
        UserError: if a plan is not in the space of the problem, or a time is so far off that its unit must be wrong.
    """
    failures, steps_of = out_of_memory(measured), dict[Candidate, list[MeasuredStep]]()
    for step in measured:
        _require_in_space(problem, step)
        if step.candidate not in failures:
            steps_of.setdefault(step.candidate, []).append(step)
    futures = [workers.submit(partial(forecast_query, Query(candidate))) for candidate in steps_of]
    outcomes: list[MeasuredOutcome] = []
    for (candidate, steps), future in zip(steps_of.items(), futures, strict=True):
        if (answer := future.result()) is None:
            name, cluster = problem.recipe.name, problem.cluster
            raise UserError(f"{steps[0].source}: {name} cannot run this plan on {cluster}; leave it out")
        for step in steps:
            _require_seconds(step, answer.forecast.seconds)
        seconds = median(step.seconds for step in steps if step.seconds)
        outcomes.append((PlanOutcome(candidate, answer.forecast), seconds))
    return outcomes


def _require_in_space(problem: Problem, step: MeasuredStep) -> None:
    """Check that a measured plan is in the space of a problem.

    Raises:
        UserError: if it is not, with the reason.
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


def _require_seconds(step: MeasuredStep, predicted: float) -> None:
    """Check that a time that a user wrote can be in seconds.

    Raises:
        UserError: if not, with the plan and both times.
    """
    if step.by_hand and step.seconds and not 1 / FARTHEST <= step.seconds / predicted <= FARTHEST:
        plan = f"{family(step.candidate.plan)}, {summary(step.candidate)}"
        raise UserError(
            f"{step.source}: {plan} is said to take {step.seconds:g} s, and {predicted:.3g} s are predicted, more than "
            f"{FARTHEST} times off; is it in seconds? give those of one step, or leave it out"
        )


LOOKED_FOR = "what a plan's time goes to"
"""Subject of a missing answer in reports, if the time is up."""

LOOKED_AT = 24
"""Number of fastest plans whose parts of the step time are computed."""


def slack(measured: Sequence[MeasuredOutcome], error: float) -> float:
    """Return the share by which a plan may be predicted to be slower than the fastest plan and still be faster.

    It is `error`, or the spread of measured / predicted seconds among the measured plans if that is larger.

    Args:
        error: mean absolute relative error of a prediction.
    """
    times = [seconds / outcome.seconds for outcome, seconds in measured]
    return max(error, max(times, default=1.0) / min(times, default=1.0) - 1)


def fit_errors(
    results: Results, measured: Sequence[MeasuredOutcome], error: float, queries: TimedQueries
) -> ErrorModel:
    """Fit an error model to measured steps, and correct the seconds of the results of a search.

    Args:
        results: results of the search. Measured plans are added to them, and their order changes.
        measured: measured plans that fit.
        error: mean absolute relative error of a prediction.
        queries: queries for the parts of step times, as long as there is time.
    """
    runs = [outcome for outcome, _ in measured]
    others = [outcome for outcome in results.outcomes if outcome.candidate not in {run.candidate for run in runs}]
    plans = [*runs, *sorted((outcome for outcome in others if outcome.fits), key=lambda outcome: outcome.rank)]
    shares: dict[int, StepShares | None] = {}
    places = {index: seconds for index, (_, seconds) in enumerate(measured)}
    while True:
        model = ErrorModel(plans, [shares.get(index) for index in range(len(plans))], places, error)
        fastest = sorted(range(len(plans)), key=lambda index: model.seconds[index])[:LOOKED_AT]
        if not (unknown := {*places, *fastest} - shares.keys()):
            break
        pending = {
            index: queries.ask(Query(plans[index].candidate, plans[index].forecast, shares=True)) for index in unknown
        }
        answers = {index: queries.answer(future, LOOKED_FOR) for index, future in pending.items()}
        shares |= {index: answer and answer.shares for index, answer in answers.items()}
    if measured:
        corrected = [replace(outcome, corrected=seconds) for outcome, seconds in zip(plans, model.seconds, strict=True)]
        results.outcomes = [*corrected, *(outcome for outcome in others if not outcome.fits)]
    return model
