"""The LLM Training Puzzles under their published names: published solutions run with only the import changed.

>>> from shardlab.learn.puzzles import Dist, Model, WeightGrad, draw, draw_group

A solution is the program of one rank for one optimizer step. The user runs the ranks with `asyncio.gather`, a
`TaskGroup` or a notebook's `await`. A deadlock ends with a report that names the ranks, and a wrong gradient is
refused. `PUZZLES` are the eight puzzles, and `grade` runs a solution of one of them.

Read values.py (weights, activations and gradients), model.py (the methods of a rank), communication.py (collectives and
messages), calls.py (the ranks as asyncio tasks) and grader.py.
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
