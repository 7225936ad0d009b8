"""Passes: from a checked program to a better one that computes the same. Each is checked again like any program."""

from shardlab.passes.run import GAIN, Goal, Passed, helped, passed, run_named, run_passes, settled
from shardlab.passes.table import PASSES, TapePass, find_passes

__all__ = [
    "GAIN",
    "PASSES",
    "Goal",
    "Passed",
    "TapePass",
    "find_passes",
    "helped",
    "passed",
    "run_named",
    "run_passes",
    "settled",
]
