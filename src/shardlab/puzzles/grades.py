"""How far a solution got, for a terminal and for a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardlab.program import UserError
from shardlab.puzzles.model import Model
from shardlab.puzzles.statements import Puzzle
from shardlab.simulate import Timeline

if TYPE_CHECKING:
    from rich.console import Group

    from shardlab.puzzles.pictures import Picture

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
    models: list[Model] = field(default_factory=lambda: [])
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
        from shardlab.puzzles.pictures import Picture
        from shardlab.puzzles.timeline import timeline_of

        count = sum(len(model.log) for model in self.models)
        if self.timeline is None and not count:
            raise UserError("nothing was timed before the solution ended, so there is nothing to draw")
        timeline = self.timeline or timeline_of(self.models)
        if count > MOST_DRAWN:
            raise UserError(f"{count:,} events are too many for a picture of at most {MOST_DRAWN:,}")

        def make() -> str:
            from shardlab.draw import timeline_svg

            return timeline_svg(timeline, f"Puzzle {self.puzzle.number}: {self.puzzle.title}", note=self._note())

        return Picture(make)

    def _note(self) -> str:
        """The verdict, and what was reached, in a line."""
        reached = "; ".join(f"{what} {got}, goal {goal}" for what, got, goal in self.rows())
        return f"{self.verdict} {reached.capitalize()}." if self.correct else self.verdict

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

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Text | Table] = [Text(self.puzzle.headline, style="bold")]
        if self.correct:
            table = Table("", "yours", "goal")
            for row in self.rows():
                table.add_row(*(Text(cell, justify="left" if cell == row[0] else "right") for cell in row))
            parts.append(table)
        parts.append(Text(self.verdict, style="bold green" if self.solved else "bold red"))
        return Group(*parts)
