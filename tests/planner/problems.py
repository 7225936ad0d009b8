"""Small problems for the planner, whose spaces can be exhausted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from shardlab.language.precision import find_precision
from shardlab.models import GPT
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.workers import Answer, Query, answer_request
from shardlab.simulate.hardware import find_cluster
from tests.planner.enumeration import candidates, shapes

GIB = 2**30
SMALL = GPT(layers=4, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)


def problem(
    devices: int = 4, sequences: int = 8, memory: float = 80 * GIB, limits: Limits | None = None, **model: int
) -> Problem:
    cluster = find_cluster(f"h100x{devices}")
    cluster = replace(cluster, device=replace(cluster.device, memory=memory))
    return Problem(replace(SMALL, **model), cluster, sequences, (find_precision("bf16"),), limits=limits or Limits())


def every_candidate(problem: Problem) -> list[Candidate]:
    return [candidate for shape in shapes(problem) for candidate in candidates(problem, shape)]


@cache
def every_answer(name: str) -> list[tuple[Candidate, Answer]]:
    """Every candidate of a problem of `EXHAUSTED` that can be run, and its forecast."""
    problem = EXHAUSTED[name]
    answers = [(candidate, answer_request(problem, Query(candidate))) for candidate in every_candidate(problem)]
    return [(candidate, answer) for candidate, answer in answers if answer is not None]


@cache
def fastest_seconds(name: str) -> float:
    """Return the seconds of the fastest plan that fits of a problem of `EXHAUSTED`, from the forecasts of all plans."""
    return min(
        answer.forecast.seconds
        for _, answer in every_answer(name)
        if answer.forecast.memory.fits and answer.forecast.memory.safe
    )


EXHAUSTED = {
    "all kinds": problem(
        sequences=4, limits=Limits(fixed={"recompute": "none"}, maximum={"tp": 2, "micro_batch_size": 2})
    ),
    "little memory": problem(
        memory=1.41 * GIB, limits=Limits(maximum={"pp": 1, "micro_batch_size": 1}), hidden_size=1024
    ),
    "3d": problem(devices=8, limits=Limits(fixed={"tp": 2, "pp": 2, "recompute": "full"}, micro_batch_size=1)),
    "pipelines": problem(limits=Limits(fixed={"pp": 4, "recompute": "none"}, micro_batch_size=1), sequences=32),
}
"""Problems of which a test simulates every plan."""
