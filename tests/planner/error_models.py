"""Plans of two ranks with made-up times, for tests of what measured steps tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from shardlab.language import Mesh
from shardlab.language.precision import PRECISIONS
from shardlab.planner.describe import StepShares
from shardlab.planner.error_model import ErrorModel
from shardlab.planner.problem import Candidate
from shardlab.planner.results import PlanOutcome
from shardlab.simulate.predict.forecast import Forecast
from shardlab.strategies.plan.plan import Plan

DDP = Plan(Mesh(dp_shard=2))
ZERO_1 = Plan(Mesh(dp_shard=2), shard_optimizer=("dp_shard",))
TP, PP, GPIPE = Plan(Mesh(tp=2)), Plan(Mesh(pp=2)), Plan(Mesh(pp=2), schedule="gpipe")


Row = tuple[Plan, float, dict[str, float]]
"""A plan, the seconds of its step, and what they go to beside compute."""

D: Row = (DDP, 1.0, {})
"""Data parallelism, which takes a second."""


def outcome(plan: Plan, seconds: float, size: int = 1) -> PlanOutcome:
    """A plan that is predicted to take so long."""
    return PlanOutcome(Candidate(plan, size, PRECISIONS["fp32"]), Forecast(seconds, [], cast(Any, None)))


def error_model_of(
    plans: Sequence[Row],
    measured: Mapping[int, float] | None = None,
    error: float = 0.05,
) -> ErrorModel:
    """Return an error model of plans."""
    outcomes = [outcome(plan, seconds) for plan, seconds, _ in plans]
    shares = [StepShares({"compute": 1 - sum(parts.values()), **parts}) for *_, parts in plans]
    return ErrorModel(outcomes, shares, measured or {}, error)
