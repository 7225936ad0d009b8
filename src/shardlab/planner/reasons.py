"""Reasons for a plan: what each alternative to it would cost, in a sentence."""

from __future__ import annotations

from shardlab.planner.alternatives import Alternative
from shardlab.planner.problem import Problem
from shardlab.planner.words import short
from shardlab.planner.workers import Answer
from shardlab.timeline.units import bytes_text

TELLING = 0.005
"""A share of the step that differs by less is not named."""


def sentence(alternative: Alternative, chosen: Answer, problem: Problem) -> str:
    """What an alternative would cost, in one line: `+3.1 GiB, step -6.0% (compute 88.1% → 82.0%)`."""
    room, margin = problem.cluster.device.memory, problem.recipe.memory.margin_bytes
    answer = alternative.answer
    assert answer is not None, "it can be run"
    memory = answer.forecast.memory
    more = memory.total - chosen.forecast.memory.total
    step = answer.forecast.seconds / chosen.forecast.seconds - 1
    if not memory.fits:
        peak = max(answer.forecast.peaks, key=lambda peak: peak.bytes)
        most = max(peak.by_category, key=lambda category: peak.by_category[category])
        over = max(memory.total - room, 0.0)
        much = f"{most} {bytes_text(peak.by_category[most], 1)}"
        return f"{bytes_text(over, 1)} too many: {much}{_better(alternative, chosen)}"
    sign = "+" if more >= 0 else "-"
    least = min(2**26, 0.01 * chosen.forecast.memory.total)
    size = f"{sign}{bytes_text(abs(more), 1)}" if abs(more) >= least else "as much memory"
    kept = f"leaves less than the {bytes_text(margin, 0)} that the recipe keeps free: "
    reused = "fits only if the allocator gives back what it holds in reserve: "
    full = "" if memory.safe else reused if memory.wanted > room else kept
    return f"{full}{size}, step {step:+.1%}{_why(answer, chosen)}{_better(alternative, chosen)}"


def _better(alternative: Alternative, chosen: Answer) -> str:
    """The plan found with as many ranks along that axis, and other choices changed too, where its step is shorter."""
    better, answer = alternative.better, alternative.answer
    if better is None or answer is None:
        return ""
    seconds, own = better.forecast.seconds, answer.forecast.seconds if answer.forecast.memory.fits else float("inf")
    if seconds > own * (1 - TELLING):
        return ""
    return f"; with others changed too, step {seconds / chosen.forecast.seconds - 1:+.1%}: {short(better.candidate)}"


def _why(answer: Answer, chosen: Answer) -> str:
    """The part of the step, in seconds, that differs most, if both are known: before and after, of the chosen step."""
    if answer.shares is None or chosen.shares is None:
        return ""
    theirs, ours = answer.shares.parts, chosen.shares.parts
    times = answer.forecast.seconds / chosen.forecast.seconds
    apart = {name: theirs.get(name, 0.0) * times - ours.get(name, 0.0) for name in {*theirs, *ours}}
    if not apart:
        return ""
    name = max(sorted(apart), key=lambda name: abs(apart[name]))
    if abs(apart[name]) < TELLING:
        return ""
    what = "compute" if name == "compute" else "bubble" if name == "bubble" else f"exposed {name}"
    before, after = (max(0.0, share) for share in (ours.get(name, 0.0), theirs.get(name, 0.0) * times))  # of rounding
    return f" ({what} {before:.1%} → {after:.1%})"
