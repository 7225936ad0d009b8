"""The LLM Training Puzzles' own names: published solutions run with only the import changed.

>>> from shardlab.learn.puzzles import Dist, Model, WeightGrad, draw, draw_group

A solution says what one rank does in one optimizer step; ranks are driven with `asyncio.gather`, a `TaskGroup` or a
notebook's `await`. What would hang ends with a report that names the ranks, and what would compute a wrong gradient is
refused. `PUZZLES` are the eight puzzles, and `grade` runs a solution to one of them.
"""

from shardlab.learn.puzzles.calls import PuzzleDeadlock, PuzzleRefused
from shardlab.learn.puzzles.calls import PuzzleEvent as Event
from shardlab.learn.puzzles.communication import Dist
from shardlab.learn.puzzles.grader import PUZZLES, Grade, Puzzle, find, grade
from shardlab.learn.puzzles.model import PuzzleModel as Model
from shardlab.learn.puzzles.model import draw
from shardlab.learn.puzzles.values import Activation, ActivationGrad, OptState, Picture, Weight, WeightGrad, draw_group

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
