"""Runs of one solution on several ranks, for the puzzles' tests."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from shardlab.learn.puzzles import Dist, Model


def models_of(ranks: int, layers: int = 2, batches: int = 1, dist: Dist | None = None) -> list[Model]:
    dist = dist or Dist(ranks)
    return [Model(rank=rank, dist=dist, layers=layers, batches=batches) for rank in range(ranks)]


async def gathered(solution: Callable[[Model], Any], models: list[Model]) -> list[Any]:
    async def one(model: Model) -> Any:
        result = solution(model)
        return await result if inspect.isawaitable(result) else result

    return await asyncio.gather(*[one(model) for model in models])


def run(solution: Callable[[Model], Any], ranks: int, layers: int = 2, batches: int = 1) -> list[Model]:
    """Drive `solution` on every rank to its end."""
    models = models_of(ranks, layers, batches)
    asyncio.run(gathered(solution, models))
    return models


def results(solution: Callable[[Model], Any], ranks: int, layers: int = 2, batches: int = 1) -> list[Any]:
    """Return the result of `solution` on every rank."""
    return asyncio.run(gathered(solution, models_of(ranks, layers, batches)))


def figures(models: list[Model]) -> tuple[float, float, float]:
    """Steps, end and peak memory."""
    events = [event for model in models for event in model.log]
    return max(e.time for e in events), max(e.end for e in events), max(e.memory for e in events)
