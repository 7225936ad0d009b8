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
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, pi, sqrt
from typing import Any

import numpy as np

from shardlab.planner.arrays import Array
from shardlab.planner.found import PlanOutcome
from shardlab.planner.problem import Candidate
from shardlab.planner.reasons import TELLING
from shardlab.planner.shares import BUBBLE, COMPUTE, StepShares

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
