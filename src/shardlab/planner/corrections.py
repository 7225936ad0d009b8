"""Corrections of what a search has found, by the steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardlab.planner.beliefs import Beliefs
from shardlab.planner.found import Found
from shardlab.planner.in_time import InTime
from shardlab.planner.measured import MeasuredOutcome
from shardlab.planner.shares import StepShares
from shardlab.planner.workers import Asked

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
