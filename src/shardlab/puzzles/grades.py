"""How far a solution got, for a terminal and for a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardlab.program import UserError
from shardlab.puzzles.drawing import timeline_of
from shardlab.puzzles.pictures import Picture, timeline_picture
from shardlab.puzzles.puzzle_model import PuzzleModel
from shardlab.puzzles.statements import Puzzle
from shardlab.timeline import Timeline

MOST_DRAWN = 20_000
"""Events in a picture: a solution that was stopped may have far more."""


@dataclass(frozen=True, repr=False)
class Grade:
    """How far a solution got.

    Attributes:
        puzzle: what it was run on.
        error: why it is wrong; empty if it updates every weight from the whole batch.
        steps, end: when its last op starts and ends.
        peak_memory: elements, the largest over the ranks.
        models: the ranks after the run; none for a strategy of `Rank`.
        timeline: what such a strategy did; None if it is wrong.
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
        """How far it got, above what it did: a row for each rank, and memory below.

        Raises:
            UserError: if there is nothing to draw, or too much.
        """
        count = sum(len(model.log) for model in self.models)
        if self.timeline is None and not count:
            raise UserError("nothing was timed before the solution ended, so there is nothing to draw")
        if count > MOST_DRAWN:
            raise UserError(f"{count:,} events are too many for a picture of at most {MOST_DRAWN:,}")
        note = self.verdict
        if self.correct:
            note += f" {'; '.join(f'{what} {got}, goal {goal}' for what, got, goal in self.rows()).capitalize()}."
        title = f"Puzzle {self.puzzle.number}: {self.puzzle.title}"
        return timeline_picture(self.timeline or timeline_of(self.models), title, note)

    def _repr_svg_(self) -> str | None:
        try:
            return self.draw().svg
        except UserError:
            return None  # a notebook then shows the text

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.error:
            return f"Wrong: {self.error}"
        if self.solved:
            return "Solved."
        late, large = self.steps > self.puzzle.goal_steps, self.peak_memory > self.puzzle.goal_memory
        what = " and ".join(["too slow"] * late + ["too much memory"] * large)
        return f"Correct, but {what}."

    def rows(self) -> list[tuple[str, str, str]]:
        """What is compared: its name, what was reached, and the goal."""
        return [
            ("steps", f"{self.steps:g}", f"{self.puzzle.goal_steps:g}"),
            ("peak memory", f"{self.peak_memory:,.0f}", f"{self.puzzle.goal_memory:,}"),
        ]

    def __repr__(self) -> str:
        lines = [self.puzzle.headline]
        if self.correct:
            lines += [f"  {what:<12}{got:>10}   goal {goal:>10}" for what, got, goal in self.rows()]
        return "\n".join([*lines, self.verdict])
