"""The eight puzzles, which `puzzles.toml` states."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from shardlab.errors import unknown
from shardlab.program.files import packaged
from shardlab.rules.pieces import counted


@dataclass(frozen=True, repr=False)
class Puzzle:
    """One puzzle.

    Attributes:
        number: 0 to 7.
        name: the strategy that it asks for, as `grade` takes it.
        title, text: what to write.
        ranks, layers, batches: the sizes that it is graded at.
        target_steps, target_memory: the published targets: when the last op starts, and the peak in elements.
        known_steps, known_memory: what the published solution reaches.
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
        """Number and title, and the sizes that it is graded at."""
        sizes = ((self.ranks, "rank"), (self.layers, "layer"), (self.batches, "microbatch"))
        return f"Puzzle {self.number}: {self.title} ({', '.join(counted(*size) for size in sizes)})"

    def __repr__(self) -> str:
        goal = f"Goal: {self.goal_steps:g} steps, {self.goal_memory:,} elements at most on a rank."
        return "\n".join([self.headline, *wrap(self.text, 80), goal, f'grade("{self.name}", my_solution)'])

    @property
    def goal_steps(self) -> float:
        """Steps that a solution must reach: the target, but no fewer than are known to be possible."""
        return max(self.target_steps, self.known_steps)

    @property
    def goal_memory(self) -> int:
        """Memory that a solution must reach: the target, but no less than is known to be possible."""
        return max(self.target_memory, self.known_memory)


PUZZLES = tuple(Puzzle(**fields) for fields in packaged("puzzles/puzzles.toml")["puzzle"])


def find(puzzle: int | str) -> Puzzle:
    """A puzzle by its number or name.

    Raises:
        UserError: if there is none; the nearest name is suggested.
    """
    for candidate in PUZZLES:
        if puzzle in (candidate.number, candidate.name, str(candidate.number)):
            return candidate
    raise unknown("puzzle", puzzle, [p.name for p in PUZZLES], f", and their numbers, 0 to {len(PUZZLES) - 1}")
