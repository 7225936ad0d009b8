"""Small problems for the planner, whose spaces can be exhausted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from shardlab.language.precision import find_precision
from shardlab.models import GPT
from shardlab.planner.bounds import LowerBounds
from shardlab.planner.problem import Limits, PlanShape, Problem
from shardlab.planner.workers import Answer, Query, answer_request, with_memory
from shardlab.simulate.hardware import find_cluster
from shardlab.strategies.plan.plan import Plan

GIB = 2**30
SMALL = GPT(layers=4, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)


def problem(
    devices: int = 4, sequences: int = 8, memory: float = 80 * GIB, limits: Limits | None = None, **model: int
) -> Problem:
    cluster = with_memory(find_cluster(f"h100x{devices}"), memory)
    return Problem(replace(SMALL, **model), cluster, sequences, (find_precision("bf16"),), limits=limits or Limits())


def passes_of(bounds: LowerBounds, shape: PlanShape, plan: Plan) -> float:
    """Seconds of a pipeline's passes alone, at least."""
    return float(bounds.pipelines.seconds(shape, bounds.pipelines.laid(shape, [plan]))[0])


def asked_at_once(asked: Problem) -> Callable[[Query], Future[Answer | None]]:
    """What answers questions in this process, as they are asked."""

    def ask(question: Query) -> Future[Answer | None]:
        future: Future[Answer | None] = Future()
        future.set_result(answer_request(asked, question))
        return future

    return ask
