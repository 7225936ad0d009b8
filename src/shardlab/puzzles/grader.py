"""Run a solution, and say how far it gets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from shardlab.program import UserError
from shardlab.program.lines import line_of
from shardlab.program.stoppable import Stoppable, Stopped, run_stoppable
from shardlab.puzzles import native
from shardlab.puzzles.calls import never_awaited
from shardlab.puzzles.dist import Dist
from shardlab.puzzles.grades import Grade
from shardlab.puzzles.puzzle_model import PuzzleModel, verify
from shardlab.puzzles.refusal import PuzzleRefused
from shardlab.puzzles.statements import Puzzle, find

T = TypeVar("T")

Solution = Callable[[Any], Any]
"""`async def solution(model: Model)`, `def solution(model: Model)` where nothing is communicated, or a strategy,
`async def solution(rank: Rank)`."""

SECONDS = 10.0
"""How long a solution may run."""

TICK_SECONDS = 0.05
"""How often the event loop wakes up."""


def grade(puzzle: int | str, solution: Solution, *, seconds: float = SECONDS) -> Grade:
    """Run `solution` on every rank of a puzzle, check what it computes, and compare time and memory with the goals.

    >>> print(grade("ddp", my_solution))

    Memory is what the stores hold, and what a variable holds until its last use.

    Args:
        puzzle: its number or name.
        solution: a program of a `Model` in the puzzles' own names, or of a `Rank` of `shardlab.program`.
        seconds: how long it may run.

    Raises:
        UserError: for a puzzle that does not exist, or a solution that is not a function of a model or a rank.
        Exception: what the solution itself raises, unless it is a refusal.
    """
    task = find(puzzle)
    if not seconds > 0:
        raise UserError(f"a solution was given {seconds:g} s to run; give more than 0")
    kind = _grade_strategy if native.is_strategy(_signature(solution)) else _grade_models
    with never_awaited() as dropped:
        result = kind(task, solution, seconds)
    if dropped and not result.correct:  # it is the likelier reason
        return replace(result, error=str(dropped[0][0]))
    for _, warn in dropped:
        warn()
    return result


def _signature(solution: Solution) -> inspect.Signature:
    """What a solution takes, which must be one argument."""
    try:
        signature = inspect.signature(solution)
        signature.bind(None)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{getattr(solution, '__name__', repr(solution))} is not a solution; write it as "
            f"`async def solution(model): ...` ({error})"
        ) from None
    return signature


def _grade_strategy(task: Puzzle, strategy: Solution, seconds: float) -> Grade:
    try:
        timeline = _run_within(seconds, lambda: native.timeline_of(strategy, task))
    except PuzzleRefused as refusal:
        return Grade(task, str(refusal))
    return Grade(task, "", timeline.steps, timeline.end, timeline.peak_memory, timeline=timeline)


def _grade_models(task: Puzzle, solution: Solution, seconds: float) -> Grade:
    dist = Dist(task.ranks)
    models = [PuzzleModel(rank, dist, task.layers, task.batches) for rank in range(task.ranks)]
    error = ""
    try:
        _run_within(seconds, lambda: _run(solution, models))
        verify(models)
        fakes = [fake for model in models for fake in model.fakes]
        if fakes:
            raise fakes[0]
    except PuzzleRefused as refusal:
        error = str(refusal)
    events = [event for model in models for event in model.log]
    return Grade(
        task,
        error,
        steps=max((event.time for event in events), default=0),
        end=max((event.end for event in events), default=0),
        peak_memory=max((event.memory for event in events), default=0),
        models=models,
    )


def _run_within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns.

    Raises:
        PuzzleRefused: when it has not ended after so many seconds; it names the line that ran.
    """

    def refusal(program: Stoppable) -> PuzzleRefused:
        line = line_of(program.frame())
        where = f", and was at {line}" if line else ""
        given = f"the solution had not ended after {seconds:g} s{where}"
        remedy = f"make its loops end, or give it more time: grade(..., seconds={10 * seconds:g})"
        return PuzzleRefused("stalled", "", given, remedy)

    return run_stoppable(work, seconds, refusal)


def _run(solution: Solution, models: list[PuzzleModel]) -> None:
    """Drive all ranks to their end, in an event loop of their own."""

    async def drive(model: PuzzleModel) -> None:
        result = solution(model)
        if inspect.isawaitable(result):
            await result

    async def tick() -> None:
        while True:  # a thread that sleeps in an idle event loop could not be stopped
            await asyncio.sleep(TICK_SECONDS)

    async def drive_all() -> None:
        ticking = asyncio.create_task(tick())
        try:
            await asyncio.gather(*[drive(model) for model in models])
        except Stopped:
            pass  # it has left the event loop before it comes here
        finally:
            ticking.cancel()

    asyncio.run(drive_all())
