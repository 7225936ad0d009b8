"""How far a solution got, for a terminal and for a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardlab.puzzles.model import Model
from shardlab.puzzles.statements import Puzzle

if TYPE_CHECKING:
    from rich.console import Group

    from shardlab.puzzles.pictures import Picture


@dataclass(frozen=True)
class Grade:
    """How far a solution got.

    Attributes:
        puzzle: what it was run on.
        error: why it is wrong; empty if it updates every weight from the whole batch.
        steps, end: when its last op starts and ends.
        peak_memory: elements, the largest over the ranks.
        note: values that it used while in no store.
        models: the ranks after the run.
    """

    puzzle: Puzzle
    error: str
    steps: float
    end: float
    peak_memory: float
    note: str
    models: list[Model] = field(repr=False)

    @property
    def correct(self) -> bool:
        """Whether it computes the right update."""
        return not self.error

    @property
    def solved(self) -> bool:
        """Whether it is correct and reaches the goals for time and memory."""
        return self.correct and self.steps <= self.puzzle.goal_steps and self.peak_memory <= self.puzzle.goal_memory

    def draw(self) -> Picture:
        """What the solution did: a row for each rank, and memory below."""
        from shardlab.puzzles.pictures import picture_of

        return picture_of(self.models, f"Puzzle {self.puzzle.number}: {self.puzzle.title}")

    def _repr_svg_(self) -> str:
        return self.draw().svg

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

    @property
    def headline(self) -> str:
        """The puzzle, and the sizes that it is graded at."""
        puzzle = self.puzzle
        sizes = f"ranks {puzzle.ranks}, layers {puzzle.layers}, batches {puzzle.batches}"
        return f"Puzzle {puzzle.number}: {puzzle.title} ({sizes})"

    def __str__(self) -> str:
        lines = [self.headline]
        if self.correct:
            lines += [f"  {what:<12}{got:>10}   goal {goal:>10}" for what, got, goal in self.rows()]
        return "\n".join([*lines, self.verdict, *([self.note] if self.note else [])])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Text | Table] = [Text(self.headline, style="bold")]
        if self.correct:
            table = Table("", "yours", "goal")
            for row in self.rows():
                table.add_row(*(Text(cell, justify="left" if cell == row[0] else "right") for cell in row))
            parts.append(table)
        parts.append(Text(self.verdict, style="bold green" if self.solved else "bold red"))
        return Group(*parts, *([Text(self.note)] if self.note else []))
