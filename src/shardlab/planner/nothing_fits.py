"""Error messages for problems without a solution.

`explain_no_fit` is for a search in which no plan fits: it names the nearest plan and the missing memory.
`explain_empty_space` is for a problem without any plan: it names an axis whose size does not divide the devices. If
there is no such axis, it names the batch if there is a plan for another batch, or else the first reason why the code
that runs plans refuses a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from shardlab.common.errors import Refused, UserError
from shardlab.common.text import bytes_text, counted
from shardlab.language import AXES
from shardlab.planner.describe import summary
from shardlab.planner.lines import has_plan
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.results import Results
from shardlab.planner.space import meshes, splits
from shardlab.simulate.predict.forecast import forecast
from shardlab.simulate.predict.limits import broken_limit
from shardlab.simulate.predict.memory import model_state, zero_plan
from shardlab.strategies.plan.plan import Plan


def explain_no_fit(problem: Problem, results: Results) -> str:
    """Return the error message for a search in which no plan fits."""
    usable, margin = problem.usable_bytes, problem.margin
    nearest = min(results.misses().items(), key=lambda miss: miss[1][0], default=None)
    if results.refused and not results.outcomes:
        return _refusal_text(problem, _refusal_of(problem, results.refused[0]))
    if not results.complete or nearest is None:
        progress = (
            f"of {counted(results.lines, 'kind')} of plans {counted(len(results.outcomes), 'plan')} were simulated"
        )
        if nearest is not None:
            excess = bytes_text(nearest[1][0] - usable, 1)
            progress = f"{progress}, and {nearest[0]} ({summary(nearest[1][1])}) comes nearest, with {excess} too many"
        return (
            f"no plan that fits was found in the time ({progress}); give more --seconds, or limits such as --max-tp 8"
        )
    name, (bytes, candidate) = nearest
    free = f" and leaves a margin of {bytes_text(margin, 1)} for the error of the prediction" if margin else ""
    return (
        f"no plan{_limits(problem)} fits into {bytes_text(usable + margin, 1)} a device{free}: {name} comes nearest "
        f"({summary(candidate)}) and takes {bytes_text(bytes, 1)}, {bytes_text(bytes - usable, 1)} too many"
        f"{_advice(problem, candidate)}"
    )


def _advice(problem: Problem, candidate: Candidate) -> str:
    """Return the advice if no plan fits: fewer limits, or more devices.

    The number of devices is given if weights and optimizer state alone do not fit.
    """
    sharded = zero_plan(problem.cluster.size, 3)
    state = model_state(sharded, problem.model.parameter_count, candidate.precision, problem.recipe, problem.optimizer)
    context = 0.0 if problem.cluster.on_cpu else problem.recipe.memory.context_bytes
    state_bytes, available_bytes = state.parameters + state.optimizer, problem.usable_bytes - context
    if state_bytes <= available_bytes:
        return f"; take more devices, or larger ones{', or fewer limits' * bool(_limits(problem))}"
    context_text = ", and CUDA's context," if context else ","
    devices_text = (
        f"at least {ceil(problem.cluster.size * state_bytes / available_bytes):,} devices"
        if available_bytes > 0
        else "more devices"
    )
    return (
        f"; weights and {problem.optimizer}'s state, shared over all devices{context_text} alone take "
        f"{bytes_text(state_bytes + context, 1)}; take {devices_text}, or larger ones"
    )


def _limits(problem: Problem) -> str:
    limits = str(problem.limits)
    return f" under the limits {limits}" if limits else ""


def explain_empty_space(problem: Problem) -> str:
    """Return the error message for a problem without any plan."""
    limits, devices = problem.limits, problem.cluster.size
    for axis in AXES:
        if devices % (size := limits.fixed.get(axis, 1)):
            flag, devices_text = f"--{axis.replace('_', '-')} {size}", counted(devices, "device")
            return f"{flag} does not divide {devices_text}; give a size that does, or another number of devices"
    size = limits.micro_batch_size or 1
    relaxed = replace(problem, sequences=devices * size)  # a batch that the ranks of every mesh can share
    candidates = list(meshes(relaxed))
    if not candidates:
        return (
            f"no mesh of {counted(devices, 'device')}, which are all used, has {limits}; the sizes of its axes "
            f"multiply to {devices:,}: give others, or another number of devices"
        )
    fewest = min((m.dp_replicate * m.dp_shard * m.ep for m in candidates if has_plan(relaxed, m)), default=None)
    if fewest is None or problem.sequences % (fewest * size) == 0:
        return _refusal_text(problem, next(_refusals(relaxed if fewest is None else problem), ""))
    batches = f" in microbatches of {size}" if size > 1 else ""
    return (
        f"no plan divides {counted(devices, 'device')} and {counted(problem.sequences, 'sequence')}{_limits(problem)}: "
        f"every plan has at least {counted(fewest, 'data-parallel rank')}, and ranks share a batch evenly{batches}; "
        f"give a --global-batch that is a multiple of {fewest * size}, or "
        f"{'other limits' if str(limits) else 'fewer devices'}"
    )


def _refusals(problem: Problem) -> Iterator[str]:
    """Yield the reasons why plans with the user's fixed values, and defaults for all else, cannot be run."""
    limits = problem.limits
    for mesh in meshes(problem):
        replicas, shards = next(splits(problem, mesh.dp_shard), (1, mesh.dp_shard))
        try:
            plan = Plan(replace(mesh, dp_replicate=replicas, dp_shard=shards), **limits.fields)
        except UserError as error:
            yield str(error)
        else:
            candidate = Candidate(plan, limits.micro_batch_size or 1, problem.precisions[0])
            if reason := _refusal_of(problem, candidate):
                yield reason


def _refusal_of(problem: Problem, candidate: Candidate) -> str:
    """Return the reason why a candidate cannot be run ("": it can)."""
    workload = problem.workload(candidate)
    try:
        if not (reason := broken_limit(workload)):
            forecast(workload)
        return reason
    except (UserError, Refused) as error:
        return str(error)


def _refusal_text(problem: Problem, reason: str) -> str:
    """Return the message that no plan can be run under the limits, with a reason."""
    return f"no plan{_limits(problem)} can be run: {reason or 'give other limits or another --global-batch'}"
