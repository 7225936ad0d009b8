"""Grading: run a solution of a puzzle, and compare its time and memory with the goals.

`grade` is the entry point. It runs a solution that takes a `Model` on all ranks, or traces and times a strategy, which
takes a `Rank` (`timeline_of_strategy`). `Grade` is the result, for a terminal and for a notebook (`grade_html`).
`Puzzle` is one of the eight puzzles in `puzzles.toml`.
"""

from __future__ import annotations

import asyncio
import inspect
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from selectors import DefaultSelector, SelectorKey
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from shardlab.check import Checked
from shardlab.check.report import FileCheck
from shardlab.common.errors import About, unknown_name
from shardlab.common.fields import read_value
from shardlab.common.files import load_table
from shardlab.common.text import counted, wrap_words
from shardlab.common.user_code import Stoppable, Stopped, display_path, never_awaited, run_stoppable, user_line_of
from shardlab.language import Mesh, Refused, Sizes, Strategy, UserError
from shardlab.learn.puzzles.calls import PuzzleRefused, dropped_coroutine
from shardlab.learn.puzzles.communication import Dist
from shardlab.learn.puzzles.model import PuzzleModel, timeline_of, verify
from shardlab.learn.puzzles.values import Picture, timeline_picture
from shardlab.simulate.timeline import PUZZLE_COSTS, Timeline, simulate

T = TypeVar("T")

Solution = Callable[[Any], Any]
"""`async def solution(model: Model)`, `def solution(model: Model)` without communication, or a strategy, `async def
solution(rank: Rank)`."""

SECONDS = 10.0
"""Default time limit of a solution in seconds."""

TICK_SECONDS = 0.05
"""Seconds between two wake-ups of the event loop, so that it can be interrupted."""


def grade(puzzle: int | str, solution: Solution, *, seconds: float = SECONDS) -> Grade:
    """Run `solution` on every rank of a puzzle, check its result, and compare time and memory with the goals.

    >>> print(grade("ddp", my_solution))
    Puzzle 2: Distributed data parallel (4 ranks, 2 layers, 4 microbatches)
      steps              4.5   goal        5.1
      peak memory  1,835,008   goal  1,835,008
    Solved.

    Memory includes the values in the stores, and the values of variables until their last use.

    Args:
        puzzle: number or name of the puzzle.
        solution: function of a `Model`, which has the puzzles' own names, or of a `Rank` of `shardlab.language`.
        seconds: time limit of the solution.

    Raises:
        UserError: for a puzzle that does not exist, or a solution that is not a function of a model or a rank.
        Exception: any exception of the solution that is not a refusal.
    """
    task = find(puzzle)
    if not seconds > 0:
        raise UserError(f"a solution was given {seconds:g} s to run; give more than 0")
    grade_function = _grade_strategy if is_strategy(_signature(solution)) else _grade_models
    with never_awaited() as coroutines:
        result = grade_function(task, solution, seconds)
    if coroutines and not result.correct:  # the forgotten `await` is the likelier reason
        return replace(result, error=str(dropped_coroutine(coroutines[0].name, coroutines[0].line)))
    for coroutine in coroutines:
        coroutine.warn()
    return result


TEXT_WIDTH = 80
"""Width in characters of sentences where a puzzle or a grade is shown as plain text."""

MOST_DRAWN = 20_000
"""Largest number of events in a picture. A solution that was stopped may have far more."""


class GoalRow(NamedTuple):
    """Figure of a solution beside its goal.

    Attributes:
        name: name of the figure.
        value: value that the solution reaches.
        goal: largest value that is accepted ("": any value is).
        missed: whether the value exceeds the goal.
    """

    name: str
    value: str
    goal: str
    missed: bool


@dataclass(frozen=True, repr=False)
class Grade:
    """Result of a solution: whether it is correct, and its time and memory.

    Attributes:
        puzzle: the puzzle.
        error: reason why the solution is wrong ("": it updates every weight from the whole batch).
        steps, end: time at which its last op starts, and at which its last op ends, in units of `PUZZLE_COSTS`.
        peak_memory: largest number of elements on any rank.
        models: ranks after the run (empty for a strategy of a `Rank`).
        timeline: timeline of a strategy of a `Rank` (None if it is wrong, or the solution takes a `Model`).
    """

    puzzle: Puzzle
    error: str
    steps: float = 0
    end: float = 0
    peak_memory: float = 0
    models: list[PuzzleModel] = field(default_factory=lambda: [])
    timeline: Timeline | None = None

    @property
    def correct(self) -> bool:
        """Whether it computes the right update."""
        return not self.error

    @property
    def solved(self) -> bool:
        """Whether it is correct and reaches the goals for time and memory."""
        return self.correct and self.steps <= self.puzzle.goal_steps and self.peak_memory <= self.puzzle.goal_memory

    def draw(self) -> Picture:
        """Return a picture: a row for each rank, and memory below.

        Raises:
            UserError: if nothing was timed, or if there are more than `MOST_DRAWN` events.
        """
        count = sum(len(model.log) for model in self.models)
        if self.timeline is None and not count:
            raise UserError("nothing was timed before the solution ended, so there is nothing to draw")
        if count > MOST_DRAWN:
            raise UserError(f"{count:,} events are too many for a picture of at most {MOST_DRAWN:,}")
        return timeline_picture(self.timeline or timeline_of(self.models))

    def _repr_html_(self) -> str:
        try:
            picture = self.draw()
        except UserError:
            picture = None
        return grade_html(self.puzzle.headline, self.verdict, self.rows() if self.correct else [], picture)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.error:
            return f"Wrong: {self.error}"
        if self.solved:
            return "Solved."
        late, large = (row.missed for row in self.rows())
        faults = " and ".join(["too slow"] * late + ["too much memory"] * large)
        return f"Correct, but {faults}."

    def rows(self) -> list[GoalRow]:
        """Return the figures with their goals."""
        steps, memory = self.puzzle.goal_steps, self.puzzle.goal_memory
        return [
            GoalRow("steps", f"{self.steps:g}", f"{steps:g}", self.steps > steps),
            GoalRow("peak memory", f"{self.peak_memory:,.0f}", f"{memory:,}", self.peak_memory > memory),
        ]

    def __repr__(self) -> str:
        lines = [self.puzzle.headline]
        if self.correct:
            lines += [f"  {row.name:<12}{row.value:>10}   goal {row.goal:>10}" for row in self.rows()]
        return "\n".join([*lines, wrap_words(self.verdict, TEXT_WIDTH)])


def grade_html(title: str, verdict: str, rows: Sequence[GoalRow], picture: Picture | None) -> str:
    """Return a grade as HTML for a notebook: title, verdict and goals as text in the notebook's colours, and a picture.

    The picture is an image of its own, since the styles and identifiers of an SVG element would reach other cells.
    """
    parts = [f"<p><b>{escape(title)}</b></p>"]
    parts += [f'<p style="white-space: pre-wrap; overflow-wrap: anywhere">{escape(verdict)}</p>']
    if rows:
        parts += ['<table style="text-align: right"><tr><td></td><th>value</th><th>goal</th><td></td></tr>']
        for name, *figures, missed in rows:
            cells = "".join(f"<td>{text or 'none'}</td>" for text in figures)
            parts.append(f"<tr><th>{name}</th>{cells}<td>{'<b>missed</b>' if missed else ''}</td></tr>")
        parts += ["</table>"]
    if picture is not None:
        source = f"data:image/svg+xml;base64,{b64encode(picture.svg.encode()).decode()}"
        parts += [f'<img alt="timeline of the ranks and their memory" style="max-width: 100%" src="{source}">']
    return "\n".join(parts)


def is_strategy(signature: inspect.Signature) -> bool:
    """Return whether a function's first argument is a `Rank`: by its annotation, or without one by the name `rank`."""
    first = next(iter(signature.parameters.values()), None)
    if first is None:
        return False
    if first.annotation is inspect.Parameter.empty:
        return first.name == "rank"
    name = first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
    return name.rpartition(".")[2] == "Rank"


def timeline_of_strategy(strategy: Strategy, puzzle: Puzzle) -> Timeline:
    """Trace, check and time a strategy at a puzzle's sizes.

    The mesh is one axis of ranks, unless the strategy's file has a function `<strategy>_mesh(ranks)`, which returns
    another one.

    Raises:
        PuzzleRefused: if the strategy is wrong. The message names the line at fault.
        UserError: if it is not an async function of a rank.
    """
    function = function_of(strategy)
    make_mesh = function.__globals__.get(f"{function.__name__}_mesh")
    mesh = make_mesh(puzzle.ranks) if make_mesh else Mesh(dp_shard=puzzle.ranks)
    try:
        return simulate(checked_strategy(strategy, mesh, puzzle.layers, puzzle.batches), PUZZLE_COSTS)
    except Refused as refusal:
        raise PuzzleRefused.of(refusal) from None


def checked_strategy(strategy: Strategy, mesh: Mesh, layers: int | Sizes, microbatches: int) -> Checked:
    """Trace and check a student's strategy, which must train every layer.

    Raises:
        Refused: if it is wrong, with the line at fault.
        UserError: if it is not an async function of a rank.
    """
    file = function_of(strategy).__code__.co_filename
    try:
        checked = FileCheck(strategy, file).check(mesh, layers, microbatches)
    except Refused as refusal:
        refusal.line = refusal.line.replace(f"{file}:", f"{display_path(file)}:")
        refusal.trail = refusal.trail.replace(f"{file}:", f"{display_path(file)}:")
        raise
    if checked.frozen:
        layer = checked.frozen[0]
        problem = f"no rank loads an optimizer state of layer {layer}, so it is frozen"
        raise Refused("frozen", About("", layer), problem, "all layers are trained, load it")
    return checked


def function_of(strategy: Any) -> FunctionType:
    """Return the function of a strategy, which may be a partial or wrapped.

    Raises:
        UserError: if it is not a function.
    """
    function: Any = inspect.unwrap(getattr(strategy, "func", strategy))
    if not inspect.isfunction(function):
        raise UserError(f"{strategy!r} is not a strategy; write it as `async def f(rank): ...`")
    return function


@dataclass(frozen=True, repr=False)
class Puzzle:
    """One of the eight puzzles.

    Attributes:
        number: 0 to 7.
        name: name of the puzzle, for `grade`.
        title, text: the task.
        ranks, layers, batches: numbers of ranks, layers and microbatches with which it is graded.
        target_steps, target_memory: published targets: latest start of an op, and peak memory in elements of any rank.
        known_steps, known_memory: the same figures of the published solution.
    """

    number: int
    name: str
    title: str
    text: str
    ranks: int
    layers: int
    batches: int
    target_steps: float
    target_memory: int
    known_steps: float
    known_memory: int

    @property
    def headline(self) -> str:
        """Number, title and sizes."""
        sizes = ((self.ranks, "rank"), (self.layers, "layer"), (self.batches, "microbatch"))
        return f"Puzzle {self.number}: {self.title} ({', '.join(counted(*size) for size in sizes)})"

    def __repr__(self) -> str:
        goal = f"Goal: {self.goal_steps:g} steps, {self.goal_memory:,} elements at most on a rank."
        return "\n".join([self.headline, wrap_words(self.text, TEXT_WIDTH), goal, f'grade("{self.name}", my_solution)'])

    @property
    def goal_steps(self) -> float:
        """Goal for time: the published target, but not less than the published solution needs."""
        return max(self.target_steps, self.known_steps)

    @property
    def goal_memory(self) -> int:
        """Goal for memory: the published target, but not less than the published solution needs."""
        return max(self.target_memory, self.known_memory)


PUZZLES = read_value(tuple[Puzzle, ...], load_table("learn/puzzles/puzzles.toml")["puzzle"], "puzzles.toml", "puzzle")


def find(puzzle: int | str) -> Puzzle:
    """Return a puzzle by its number or name.

    Raises:
        UserError: if there is none. The message suggests the nearest name.
    """
    for candidate in PUZZLES:
        if puzzle in (candidate.number, candidate.name, str(candidate.number)):
            return candidate
    raise unknown_name("puzzle", puzzle, [p.name for p in PUZZLES], f", and their numbers, 0 to {len(PUZZLES) - 1}")


def _signature(solution: Solution) -> inspect.Signature:
    """Return the signature of a solution, which must have one argument."""
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
        timeline = _run_within(seconds, lambda: timeline_of_strategy(strategy, task))
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
    """Return the result of `work`, which is stopped at the time limit.

    Raises:
        PuzzleRefused: if it has not ended after `seconds`. The message names the line that was running.
    """

    def refusal(program: Stoppable) -> PuzzleRefused:
        line = user_line_of(program.frame())
        location = f", and was at {line}" if line else ""
        problem = f"the solution had not ended after {seconds:g} s{location}"
        remedy = f"make its loops end, or give it more time: grade(..., seconds={10 * seconds:g})"
        return PuzzleRefused("stalled", "", problem, remedy)

    return run_stoppable(work, seconds, refusal)


class _WakingSelector(DefaultSelector):
    """Selector that waits at most `TICK_SECONDS`, because a thread that waits in an idle event loop cannot be stopped.

    A task or a timer that wakes the loop would not do: if `Stopped` were raised when the loop is about to run it, the
    exception would end only the task or timer.
    """

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        return super().select(TICK_SECONDS if timeout is None else min(timeout, TICK_SECONDS))


def _say_nothing(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Print nothing."""


def _run(solution: Solution, models: list[PuzzleModel]) -> None:
    """Run all ranks to their end, in a new event loop."""

    async def drive(model: PuzzleModel) -> None:
        result = solution(model)
        if inspect.isawaitable(result):
            await result

    async def drive_all() -> None:
        with suppress(Stopped):  # the event loop has already raised the exception
            await asyncio.gather(*[drive(model) for model in models])

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_WakingSelector())) as runner:
        try:
            runner.run(drive_all())
        except Stopped:
            runner.get_loop().set_exception_handler(_say_nothing)  # of tasks that cannot be cancelled
            raise
