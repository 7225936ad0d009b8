"""Alternatives to a plan: the nearest alternative for each of its choices, with the predicted cost.

`neighbours` generates candidates that differ in one choice, and in the fields that must change with it.
`nearest_alternatives` simulates them, and `alternative_text` describes the cost of an alternative in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from shardlab.common.errors import UserError
from shardlab.common.fields import as_flags
from shardlab.common.text import bytes_text
from shardlab.planner.describe import summary
from shardlab.planner.lines import change_line
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.results import PlanOutcome
from shardlab.planner.space import MODEL_AXES, SHARDED
from shardlab.planner.workers import Answer, Query, TimedQueries
from shardlab.simulate.predict.estimate import COMPUTE, IDLE
from shardlab.strategies.plan.plan import Plan


@dataclass(frozen=True)
class Alternative:
    """Plan that differs from the chosen one in one choice.

    Attributes:
        topic: topic of the choice.
        choice: the choice in words, such as `tp 4 instead of 8`.
        candidate: the plan.
        answer: its forecast, with the parts of its step time.
        better: the fastest plan of the search that fits and has the alternative's size on the axis that the choice
            changes, such as tp 4 (None: it is the alternative itself, there is none, or no axis of `MODEL_AXES`
            changes).
    """

    topic: Topic
    choice: str
    candidate: Candidate
    answer: Answer
    better: PlanOutcome | None = None


def nearest_alternatives(
    problem: Problem, best: Candidate, queries: TimedQueries, fitting: Sequence[PlanOutcome] = ()
) -> list[Alternative]:
    """Return the nearest alternatives of each choice that can be run, with their forecasts.

    Args:
        fitting: plans of the search that fit, the fastest first.
    """
    changes = [change for change in neighbours(problem, best) if problem.limits.allow(change[2].plan)]
    pending = [(*change, queries.ask(Query(change[2]))) for change in changes]
    return [
        Alternative(topic, choice, other, answer, better_than(other, best, fitting))
        for topic, choice, other, future in pending
        if (answer := queries.answer(future, "an alternative")) is not None
    ]


def better_than(other: Candidate, best: Candidate, fitting: Sequence[PlanOutcome]) -> PlanOutcome | None:
    """Return the fastest plan that fits and has an alternative's size (tp 4) on the axis that the alternative changes.

    Returns None if that plan is the alternative itself, if there is none, or if no axis of `MODEL_AXES` changes.
    """
    best_mesh, mesh = best.plan.mesh, other.plan.mesh
    axis = next((axis for axis in MODEL_AXES if getattr(mesh, axis) != getattr(best_mesh, axis)), None)
    if axis is None:
        return None
    same_size = (outcome for outcome in fitting if getattr(outcome.candidate.plan.mesh, axis) == getattr(mesh, axis))
    nearest = next(same_size, None)
    return nearest if nearest and nearest.candidate != other else None


def add_shares(alternatives: Sequence[Alternative], queries: TimedQueries) -> Callable[[], list[Alternative]]:
    """Query the parts of the alternatives' step times.

    Returns:
        Function that waits for the answers, and returns the alternatives with them.
    """
    pending = [
        queries.ask(Query(alternative.candidate, alternative.answer.forecast, shares=True))
        for alternative in alternatives
    ]
    return lambda: [
        replace(alternative, answer=queries.answer(future, "why an alternative differs") or alternative.answer)
        for alternative, future in zip(alternatives, pending, strict=True)
    ]


ZERO = ("data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3")
"""Names of the stages of ZeRO."""

Topic = Literal["fit", "batch", "speed"]
"""Question that a choice affects: whether the model fits, which batch a rank has, or how fast a step is."""


def neighbours(problem: Problem, best: Candidate) -> Iterator[tuple[Topic, str, Candidate]]:
    """Yield (topic, choice in words, candidate) for each change of one choice and of the fields that depend on it."""
    for topic, choice, arguments in (*_meshes(best.plan), *_sharing(best.plan), *_words(problem, best)):
        recompute = arguments.pop("recompute", best.plan.recompute)
        other = change_line(problem, best, **arguments)
        if other is None:
            continue
        with suppress(UserError):
            other = replace(other, plan=replace(other.plan, recompute=recompute))
            yield topic, f"{choice}{_dependent_fields(best.plan, other.plan, arguments)}", other


def _dependent_fields(plan: Plan, other: Plan, arguments: Mapping[str, Any]) -> str:
    """Return the other fields that had to change with a choice, as flags in brackets ("": none)."""
    named_fields = {"recompute", next(iter(arguments), ""), *(SHARDED if {"zero", "wide"} & arguments.keys() else ())}
    changed = {field.name: getattr(other, field.name) for field in fields(Plan) if field.name not in named_fields}
    flags = {name: value for name, value in changed.items() if value not in (getattr(plan, name), None, ())}
    if not other.shard_parameters:
        flags.pop("reshard_after", None)
    return f" ({as_flags(flags)})" if flags else ""


Choice = tuple[Topic, str, dict[str, Any]]
"""(topic, choice in words, keyword arguments of `change_line` and `recompute`)."""


def _meshes(plan: Plan) -> Iterator[Choice]:
    """Yield meshes with twice or half as many ranks along an axis, and half or twice as many along `dp_shard`."""
    mesh = plan.mesh
    for axis in MODEL_AXES:
        size = getattr(mesh, axis)
        for other in (size * 2, size // 2):
            if other and (mesh.dp_shard * size) % other == 0:
                new_mesh = replace(mesh, **{axis: other, "dp_shard": mesh.dp_shard * size // other})
                schedule_fields = (
                    {"schedule": "1f1b", "stages_per_rank": None} if axis == "pp" and 1 in (size, other) else {}
                )
                yield "speed", f"{axis} {other} instead of {size}", {"mesh": new_mesh, **schedule_fields}


def _sharing(plan: Plan) -> Iterator[Choice]:
    """Yield the next higher and lower stage of ZeRO, and other numbers of replicas."""
    mesh, stage = plan.mesh, plan.zero_stage
    if mesh.dp_shard == mesh.cp == 1:
        return
    for other in (stage - 1, stage + 1):
        if 0 <= other <= 3 and not (mesh.dp_replicate > 1 and other == 0):
            yield "fit", f"{ZERO[other]} instead of {ZERO[stage]}", {"zero": other}
    if stage and mesh.dp_shard > 2 and mesh.dp_shard % 2 == 0:
        split = replace(mesh, dp_replicate=mesh.dp_replicate * 2, dp_shard=mesh.dp_shard // 2)
        yield "fit", f"{split.dp_replicate} replicas of {split.dp_shard} shards each", {"mesh": split, "wide": False}
    if mesh.dp_replicate > 1:
        merged = replace(mesh, dp_replicate=1, dp_shard=mesh.dp_shard * mesh.dp_replicate)
        yield "fit", f"shards over all {merged.dp_shard} ranks, no replicas", {"mesh": merged, "wide": False}


def _words(problem: Problem, best: Candidate) -> Iterator[Choice]:
    """Yield other values of recomputation, gathering, microbatch, sequence parallelism, schedule and context."""
    plan, size = best.plan, best.micro_batch_size
    if plan.recompute != "none":
        yield "fit", "without recomputation", {"recompute": "none"}
    if plan.recompute != "full":
        yield "fit", "every block computed again", {"recompute": "full"}
    if plan.shard_parameters:
        other = "step" if plan.reshard_after != "step" else "layer"
        texts = {"step": "weights gathered once a step", "layer": "weights gathered for each use"}
        yield "fit", texts[other], {"reshard_after": other}
    for other in (size * 2, size // 2):
        if other and (problem.sequences // plan.data_ranks) % other == 0:
            yield "batch", f"microbatches of {other} instead of {size}", {"size": other}
    if plan.mesh.tp > 1:
        enabled = plan.sequence_parallel
        yield "speed", f"with{'out' * enabled} sequence parallelism", {"sequence_parallel": not enabled}
    if plan.mesh.pp > 1:
        for schedule, stages in (("1f1b", None), ("interleaved-1f1b", 2), ("zb-h1", None), ("gpipe", None)):
            if schedule != plan.schedule:
                arguments = {"schedule": schedule, "stages_per_rank": stages}
                yield "speed", f"{schedule} instead of {plan.schedule}", arguments
    if plan.mesh.cp > 1:
        for context in ("ring", "all_gather", "ulysses"):
            if context != plan.context:
                arguments = {"context": context, "ulysses_degree": None}
                yield "speed", f"context {context} instead of {plan.context}", arguments


TELLING = 0.005
"""Smallest reported difference in a part of the step time, as a share of the step."""


def alternative_text(alternative: Alternative, best: Answer, problem: Problem) -> str:
    """Return the cost of an alternative in one line: `+3.1 GiB, step -6.0% (compute 88.1% → 82.0%)`."""
    capacity, margin = problem.cluster.device.memory, problem.margin
    answer = alternative.answer
    memory = answer.forecast.memory
    extra_bytes = memory.total - best.forecast.memory.total
    step = answer.forecast.seconds / best.forecast.seconds - 1
    if not memory.fits:
        peak = max(answer.forecast.peaks, key=lambda peak: peak.bytes)
        largest = max(peak.by_category, key=lambda category: peak.by_category[category])
        excess = max(memory.total - capacity, 0.0)
        largest_text = f"{largest} {bytes_text(peak.by_category[largest], 1)}"
        return f"{bytes_text(excess, 1)} too many: {largest_text}{_better(alternative, best)}"
    sign = "+" if extra_bytes >= 0 else "-"
    threshold = min(2**26, 0.01 * best.forecast.memory.total)
    size = f"{sign}{bytes_text(abs(extra_bytes), 1)}" if abs(extra_bytes) >= threshold else "as much memory"
    margin_text = f"leaves less than the {bytes_text(margin, 0)} that must stay free: "
    reserve_text = "fits only if the allocator gives back what it holds in reserve: "
    warning = "" if memory.safe else reserve_text if memory.unlimited > capacity else margin_text
    return f"{warning}{size}, step {step:+.1%}{_difference_text(answer, best)}{_better(alternative, best)}"


def _better(alternative: Alternative, best: Answer) -> str:
    """Return a clause about the alternative's `better` plan if its step is shorter, else ""."""
    better, answer = alternative.better, alternative.answer
    if better is None:
        return ""
    seconds, old = better.forecast.seconds, answer.forecast.seconds if answer.forecast.memory.fits else float("inf")
    if seconds > old * (1 - TELLING):
        return ""
    return f"; with others changed too, step {seconds / best.forecast.seconds - 1:+.1%}: {summary(better.candidate)}"


def _difference_text(answer: Answer, best: Answer) -> str:
    """Return the part of the step time that differs most, before and after, as shares of the chosen plan's step."""
    if answer.shares is None or best.shares is None:
        return ""
    parts, best_parts = answer.shares.parts, best.shares.parts
    times = answer.forecast.seconds / best.forecast.seconds
    differences = {name: parts.get(name, 0.0) * times - best_parts.get(name, 0.0) for name in {*parts, *best_parts}}
    if not differences:
        return ""
    name = max(sorted(differences), key=lambda name: abs(differences[name]))
    if abs(differences[name]) < TELLING:
        return ""
    part = name if name in (COMPUTE, IDLE) else f"exposed {name}"
    old, new = (max(0.0, share) for share in (best_parts.get(name, 0.0), parts.get(name, 0.0) * times))  # of rounding
    return f" ({part} {old:.1%} → {new:.1%})"
