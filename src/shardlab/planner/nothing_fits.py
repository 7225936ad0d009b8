"""Error messages for problems without a solution.

`explain_no_fit` is for a search in which no plan fits: it names the nearest plan, the missing memory, and a limit to
drop. `explain_empty_space` is for a problem without any plan: it looks for the size or limit that cannot be met. It
checks the given axes against the devices first, then what model, plan and framework allow, and last the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, prod
from typing import TypeVar

from shardlab.common.errors import Refused, UserError
from shardlab.common.fields import as_flags
from shardlab.common.text import bytes_text, counted
from shardlab.language import AXES, Kind, Mesh
from shardlab.models.architectures import MoE
from shardlab.planner.describe import summary
from shardlab.planner.lines import has_plan
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.results import Results
from shardlab.planner.space import meshes, splits
from shardlab.simulate.predict.forecast import forecast
from shardlab.simulate.predict.memory_advice import broken_limit
from shardlab.strategies.plan.plan import Plan


def explain_no_fit(problem: Problem, found: Results) -> str:
    """Return the error message of a search in which no plan fits."""
    room, margin, misses = problem.room, problem.margin, found.misses()
    nearest = min(misses.items(), key=lambda miss: miss[1][0], default=None)
    if found.refused and not found.outcomes:
        return refusal_text(problem, refusal_reason(problem, found.refused[0]))
    if not found.complete or nearest is None:
        seen = f"of {counted(found.lines, 'kind')} of plans {counted(len(found.outcomes), 'plan')} were simulated"
        if nearest is not None:
            over = bytes_text(nearest[1][0] - room, 1)
            seen = f"{seen}, and {nearest[0]} ({summary(nearest[1][1])}) comes nearest, with {over} too many"
        return f"no plan that fits was found in the time ({seen}); give more --seconds, or limits such as --max-tp 8"
    name, (bytes, candidate) = nearest
    limits, more = str(problem.limits), "more devices"
    under = f" under the limits {limits}" if limits else ""
    free = f" and leaves a margin of {bytes_text(margin, 1)} for the error of the prediction" if margin else ""
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
        f"({summary(candidate)}) and takes {bytes_text(bytes, 1)}, {bytes_text(bytes - room, 1)} too many"
        f"{state}; take {more}, or larger ones{f', or leave out {lifted}' if lifted else ''}"
    )


def _state(problem: Problem, candidate: Candidate) -> float:
    """Return the bytes of weights and optimizer state on each device, if they are sharded over all devices."""
    precision = candidate.precision
    each = precision.bytes(Kind.WEIGHT) + precision.under(problem.optimizer).optimizer
    return problem.model.parameter_count * each / problem.cluster.size


SAVING = ("recompute", "micro_batch_size", "shard_parameters", "shard_gradients", "shard_optimizer")
"""Choices that save memory, cheapest first."""


def _lifted(limits: Limits, candidate: Candidate) -> str:
    """Return the limit without which a step could need less memory ("": none)."""
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


T = TypeVar("T")


def explain_empty_space(problem: Problem) -> str:
    """Return the error message of a problem without any plan."""
    if reason := _wrong_axes(problem):
        return reason
    roomy = _with_room(problem)
    least = least_data_ranks(roomy)
    if least is not None:
        return _wrong_batch(problem, least)
    reasons = [*_reasons(roomy)]
    if not reasons:
        return refusal_text(problem, f"no plan divides {counted(problem.cluster.size, 'device')}; give other limits")
    mesh, reason = reasons[0]
    if any(other != reason for _, other in reasons):
        reason = f"{reason} (with {mesh})"
    return refusal_text(problem, reason)


def refusal_text(problem: Problem, reason: str) -> str:
    """Return the message that no plan can be run under the limits, with a reason."""
    under = f" under the limits {problem.limits}" if str(problem.limits) else ""
    return f"no plan{under} can be run: {reason or 'give other limits or another --global-batch'}"


def refusal_reason(problem: Problem, candidate: Candidate) -> str:
    """Return why a candidate cannot be run ("": it can)."""
    workload = problem.workload(candidate)
    try:
        if not (reason := broken_limit(workload)):
            forecast(workload)
        return reason
    except (UserError, Refused) as error:
        return str(error)


def least_data_ranks(problem: Problem) -> int | None:
    """Return the smallest number of data-parallel ranks of any plan (None: there is no plan)."""
    found = sorted(meshes(problem), key=_data_ranks)
    return next((_data_ranks(mesh) for mesh in found if has_plan(problem, mesh)), None)


def _data_ranks(mesh: Mesh) -> int:
    return mesh.dp_replicate * mesh.dp_shard * mesh.ep


def _with_room(problem: Problem) -> Problem:
    """Return the problem with a batch that every mesh can share: a sequence per device, in microbatches of one."""
    limits = replace(problem.limits, most=_without(problem.limits.most, "micro_batch_size"), micro_batch_size=1)
    return replace(problem, sequences=problem.cluster.size, limits=limits)


def _without(table: Mapping[str, T], name: str) -> dict[str, T]:
    return {key: value for key, value in table.items() if key != name}


def _wrong_axes(problem: Problem) -> str:
    """Return the error message for axis sizes that do not fit the devices ("": they fit)."""
    limits, model, devices = problem.limits, problem.model, problem.cluster.size
    fixed = {axis: limits.fixed[axis] for axis in AXES if axis in limits.fixed}
    ranks, there = prod(fixed.values()), counted(devices, "device")
    if fixed.get("ep", 1) > 1 and not isinstance(model, MoE):
        return f"--ep {fixed['ep']} deals experts to ranks, and this model has none; leave it out"
    if devices % ranks:
        one = next((axis for axis in fixed if devices % fixed[axis]), None)
        if one is not None:
            flag = as_flags({one: fixed[one]})
            return f"{flag} does not divide {there}; give a size that does, or another number of devices"
        return (
            f"{as_flags(fixed)} are {ranks} ranks, which do not divide {there}; give sizes whose product does, or "
            "another number of devices"
        )
    if fixed.get("pp", 1) > (stages := 2 * model.layers + 1):
        return f"--pp {fixed['pp']} is more than {stages}, the most stages that {model.layers} layers make; give fewer"
    most = {"ep": 1} if not isinstance(model, MoE) else {}
    most = {**most, **{axis: size for axis, size in limits.most.items() if axis != "dp_shard"}, **fixed}
    if all(axis in most for axis in AXES) and (ranks := prod(most[axis] for axis in AXES)) < devices:
        return (
            f"{limits} leave {counted(ranks, 'rank')} at most, and there are {there}, which are all used; give others"
        )
    return ""


def _reasons(problem: Problem) -> Iterator[tuple[Mesh, str]]:
    """Yield (mesh, reason) for plans that set only the fixed values and cannot be run."""
    limits = problem.limits
    for mesh in meshes(problem):
        try:
            replicas, shards = next(splits(problem, mesh.dp_shard), (1, mesh.dp_shard))
            plan = Plan(replace(mesh, dp_replicate=replicas, dp_shard=shards), **limits.fields)
            candidate = Candidate(plan, limits.micro_batch_size or 1, problem.precisions[0])
        except UserError as error:
            yield mesh, str(error)
        else:
            if reason := refusal_reason(problem, candidate):
                yield mesh, reason


def _wrong_batch(problem: Problem, least: int) -> str:
    """Return the error message for a batch that data-parallel ranks cannot share in whole microbatches.

    Args:
        least: smallest number of data-parallel ranks of any plan.
    """
    sequences, size, limits = problem.sequences, problem.limits.micro_batch_size or 1, str(problem.limits)
    there, ranks = counted(sequences, "sequence"), counted(least, "data-parallel rank")
    multiple = f"a --global-batch that is a multiple of {least * size}"
    if sequences % size:
        return f"--micro-batch-size {size} does not divide {there}; give a size that does, or {multiple}"
    if sequences % least:
        under, other = (f" under the limits {limits}", "other limits") if limits else ("", "fewer devices")
        return (
            f"no plan divides {counted(problem.cluster.size, 'device')} and {there}{under}: every plan has at least "
            f"{ranks}, which share a batch evenly; give {multiple}, or {other}"
        )
    each = sequences // least
    if each % size:
        return (
            f"{each} of {there} for each of {ranks}, the fewest of any plan, are no whole microbatches of {size}; "
            f"give a --micro-batch-size that divides {each}, or {multiple}"
        )
    reasons = [*_reasons(problem)]
    fewest = min((_data_ranks(mesh) for mesh, _ in reasons), default=0)
    return refusal_text(problem, next((reason for mesh, reason in reasons if _data_ranks(mesh) == fewest), ""))
