"""Plans that are worth running next: those whose measured steps could change the choice, and that tell of different
things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf, exp, isclose, pi, sqrt
from typing import Any

from shardlab.planner.arrays import Array
from shardlab.planner.beliefs import Beliefs, computing
from shardlab.planner.found import PlanOutcome
from shardlab.planner.reasons import TELLING
from shardlab.planner.words import chosen_fields

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
