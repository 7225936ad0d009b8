"""Sentences for a search in which no plan fits: what hinders, what comes nearest, and which limit could go."""

from __future__ import annotations

from math import ceil

from shardlab.planner.found import Found
from shardlab.planner.nothing_divides import reason_of, refused
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.words import short
from shardlab.program import AXES, Kind
from shardlab.program.field_types import as_flags
from shardlab.rules.pieces import counted
from shardlab.timeline.units import bytes_text


def nothing_found(problem: Problem, found: Found) -> str:
    """Say what comes nearest, and what is missing, where no plan of a search fits."""
    room, margin, misses = problem.room, problem.recipe.memory.margin_bytes, found.misses()
    nearest = min(misses.items(), key=lambda miss: miss[1][0], default=None)
    if found.refused and not found.outcomes:
        return refused(problem, reason_of(problem, found.refused[0]))
    if found.left is not None or nearest is None:
        seen = f"of {counted(found.space['shapes'], 'shape')} {counted(len(found.outcomes), 'plan')} were simulated"
        if nearest is not None:
            over = bytes_text(nearest[1][0] - room, 1)
            seen = f"{seen}, and {nearest[0]} ({short(nearest[1][1])}) comes nearest, with {over} too many"
        return f"no plan that fits was found in the time ({seen}); give more --seconds, or limits such as --max-tp 8"
    name, (bytes, candidate) = nearest
    limits, more = str(problem.limits), "more devices"
    under = f" under the limits {limits}" if limits else ""
    free = f" and leaves {problem.recipe.name}'s margin of {bytes_text(margin, 1)}" if margin else ""
    reused = ""
    if not margin and next(each.forecast.memory.fits for each in found.outcomes if each.candidate == candidate):
        free = " with all that the allocator may hold in reserve"
        reused = "; it runs if the allocator gives that back"
    lifted, state = _lifted(problem.limits, candidate), ""
    context = 0.0 if problem.cluster.on_cpu else problem.recipe.memory.context_bytes
    if (alone := _state(problem, candidate) + context) > room:
        beside = ", and CUDA's context," if context else ","
        state = (
            f"; weights and {problem.optimizer}'s state, shared over all devices{beside} alone take "
            f"{bytes_text(alone, 1)}"
        )
        lifted = ""  # no limit hinders that
        if room > context:
            least = ceil(problem.cluster.size * (alone - context) / (room - context))
            more = f"at least {least:,} devices"
    return (
        f"no plan{under} fits into {bytes_text(room + margin, 1)} a device{free}: {name} comes nearest "
        f"({short(candidate)}) and takes at least {bytes_text(bytes, 1)}, {bytes_text(bytes - room, 1)} too many"
        f"{reused}{state}; take {more}, or larger ones{f', or leave out {lifted}' if lifted else ''}"
    )


def _state(problem: Problem, candidate: Candidate) -> float:
    """Bytes on each device of the weights and of the optimizer's state, if all devices share them."""
    precision = candidate.precision
    each = precision.bytes(Kind.WEIGHT) + precision.under(problem.optimizer).optimizer
    return problem.model.parameter_count * each / problem.cluster.size


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
