"""Passes: from a checked program to a better one that computes the same. Each is checked again like any program."""

from shardlab.passes.run import Goal, Passed, run_passes, settled
from shardlab.passes.table import PASSES, Pass, find_passes

__all__ = ["PASSES", "Goal", "Pass", "Passed", "find_passes", "run_passes", "settled"]
