"""Passes: from a checked program to a better one that computes the same. Each is checked again like any program."""

from shardlab.simulate.passes.run import (
    GAIN,
    PASSES,
    Goal,
    Passed,
    TapePass,
    find_passes,
    helped,
    passed,
    run_named,
    run_passes,
    settled,
)

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
