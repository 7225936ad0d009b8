"""Run a solution, and say how far it gets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardlab.program import UserError
from shardlab.puzzles.check import loose_note, verify
from shardlab.puzzles.dist import Dist
from shardlab.puzzles.grades import Grade
from shardlab.puzzles.model import Model
from shardlab.puzzles.refusal import PuzzleRefused
from shardlab.puzzles.statements import find

Solution = Callable[[Model], object]
"""`async def solution(model)`, or `def solution(model)` where nothing is communicated."""


def grade(puzzle: int | str, solution: Solution) -> Grade:
    """Run `solution` on every rank of a puzzle, check what it computes, and compare time and memory with the goals.

    >>> print(grade("ddp", my_solution))

    Raises:
        UserError: for a puzzle that does not exist, or a solution that is not a function.
        Exception: what the solution itself raises, unless it is a refusal.
    """
    task = find(puzzle)
    if not callable(solution):
        raise UserError(f"{solution!r} is not a solution; write it as `async def solution(model): ...`")
    dist = Dist(task.ranks)
    models = [Model(rank, dist, task.layers, task.batches) for rank in range(task.ranks)]
    error = ""
    try:
        _run(solution, models)
        verify(models, task.layers)
        fakes = [fake for model in models for fake in model.fakes]
        if fakes:
            raise PuzzleRefused(f"{fakes[0]} was made up; a solution computes its gradients.")
    except PuzzleRefused as refusal:
        error = str(refusal)
    events = [event for model in models for event in model.log]
    return Grade(
        task,
        error,
        steps=max((event.time for event in events), default=0),
        end=max((event.end for event in events), default=0),
        peak_memory=max((event.memory for event in events), default=0),
        note=loose_note(models),
        models=models,
    )


def _run(solution: Solution, models: list[Model]) -> None:
    """Drive all ranks to their end, in an event loop of their own."""

    async def drive(model: Model) -> None:
        result = solution(model)
        if inspect.isawaitable(result):
            await result

    async def drive_all() -> None:
        await asyncio.gather(*[drive(model) for model in models])

    with ThreadPoolExecutor(1) as thread:  # a notebook's own loop runs in this one
        thread.submit(asyncio.run, drive_all()).result()
