"""The LLM Training Puzzles' own names: published solutions run with only the import changed.

>>> from shardlab.puzzles import Dist, Model, WeightGrad, draw, draw_group

A solution says what one rank does in one optimizer step; ranks are driven with `asyncio.gather`, a `TaskGroup` or a
notebook's `await`. What would hang ends with a report that names the ranks, and what would compute a wrong gradient is
refused. `PUZZLES` are the eight puzzles, and `grade` runs a solution to one of them.
"""

from shardlab.puzzles.dist import Dist
from shardlab.puzzles.drawing import draw
from shardlab.puzzles.grader import grade
from shardlab.puzzles.grades import Grade
from shardlab.puzzles.log import PuzzleEvent as Event
from shardlab.puzzles.pictures import Picture
from shardlab.puzzles.puzzle_model import PuzzleModel as Model
from shardlab.puzzles.refusal import PuzzleDeadlock, PuzzleRefused
from shardlab.puzzles.statements import PUZZLES, Puzzle, find
from shardlab.puzzles.values import Activation, ActivationGrad, OptState, Weight, WeightGrad, draw_group

__all__ = [
    "PUZZLES",
    "Activation",
    "ActivationGrad",
    "Dist",
    "Event",
    "Grade",
    "Model",
    "OptState",
    "Picture",
    "Puzzle",
    "PuzzleDeadlock",
    "PuzzleRefused",
    "Weight",
    "WeightGrad",
    "draw",
    "draw_group",
    "find",
    "grade",
]
