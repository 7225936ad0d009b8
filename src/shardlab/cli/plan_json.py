"""A planner's choice for other programs; in seconds, bytes and shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardlab.cli.plan_experiments import measured_as_json
from shardlab.planner.explain import decisions
from shardlab.planner.families import family
from shardlab.planner.reasons import sentence
from shardlab.predict.assumed_figures import assumed_figures

if TYPE_CHECKING:
    from shardlab.planner.chosen import PlanChoice
    from shardlab.planner.found import PlanOutcome
    from shardlab.planner.problem import Candidate, Problem
    from shardlab.planner.workers import Answer


def as_json(choice: PlanChoice, model: str, cluster: str, commands: Mapping[str, str], top: int) -> dict[str, Any]:
    """Describe all of it; arguments as of `print_choice`."""
    problem, found = choice.problem, choice.found
    tokens, workload = problem.tokens, problem.workload(choice.best.candidate)
    return {
        "model": model,
        "cluster": cluster,
        "recipe": problem.recipe.name,
        "global_batch": problem.sequences,
        "tokens": tokens,
        "device_memory": problem.cluster.device.memory,
        "chosen": {**_outcome(problem, choice.best), **_shares(choice.answer)},
        "commands": dict(commands),
        "families": [{**_outcome(problem, outcome), **_shares(answer)} for outcome, answer in choice.families],
        "decisions": [vars(decision) for decision in decisions(choice)],
        "runners_up": [_outcome(problem, outcome) for outcome in found.fitting[1 : top + 1]],
        "error_on_published_runs": vars(choice.sure),
        "assumed": {name: asdict(figure) for name, figure in assumed_figures(workload).items()},
        "measured": measured_as_json(choice.beliefs) if choice.beliefs and choice.beliefs.measured else None,
        "critical_path": choice.path,
        "alternatives": [
            {
                "choice": each.choice,
                **_candidate(problem, each.candidate),
                **_forecast(problem, each.answer),
                "text": sentence(each, choice.answer, problem),
            }
            for each in choice.alternatives
            if each.answer is not None
        ],
        "does_not_fit": [
            {
                "family": name,
                "bytes_at_least": bytes,
                "bytes_too_many": bytes - problem.room,
                **_candidate(problem, candidate),
            }
            for name, (bytes, candidate) in found.misses().items()
        ],
        "would_help": choice.helps,
        "searched": {
            **found.space,
            "simulated": len(found.outcomes),
            "refused": len(found.refused),
            "seconds": found.seconds,
            "complete": found.left is None,
            "floor_of_the_rest": found.left,
            "left_out": choice.missed,
        },
    }


def _outcome(problem: Problem, outcome: PlanOutcome) -> dict[str, Any]:
    forecast, seconds = outcome.forecast, outcome.seconds
    peak = max(forecast.peaks, key=lambda peak: peak.bytes)
    return {
        "family": outcome.family,
        **_candidate(problem, outcome.candidate),
        "step_seconds": seconds,
        "tokens_per_second": problem.tokens / seconds,
        "tokens_per_second_per_device": problem.tokens / seconds / problem.cluster.size,
        "mfu": problem.workload(outcome.candidate).mfu(seconds),
        "memory": forecast.memory.total,
        "peak_memory": peak.bytes,
        "peak_memory_by_category": peak.by_category,
        "fits": outcome.fits,
    }


def _candidate(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    return {
        "family": family(candidate.plan),
        "plan": candidate.plan.as_dict(),
        "micro_batch_size": candidate.micro_batch_size,
        "microbatches": problem.sequences // candidate.micro_batch_size,
        "precision": candidate.precision.name,
    }


def _forecast(problem: Problem, answer: Answer) -> dict[str, Any]:
    forecast = answer.forecast
    return {"step_seconds": forecast.seconds, "memory": forecast.memory.total, "fits": forecast.memory.fits}


def _shares(answer: Answer) -> dict[str, Any]:
    return {"shares": answer.shares.parts if answer.shares else {}}
