"""Passes that rewrite a checked program into one that computes the same in less time or memory.

From a checked program and a setting, such as a number of buckets, a pass makes new tapes (`Tapes`). `run` tries the
settings, checks every candidate like any program, replays it, and keeps the best. Read `run` first, for the table of
passes at its end; then `reorder`, which moves ops of a tape as far as their dependences allow, and has the passes that
only move ops; then the passes that change more: `bucket`, `offload`, `fuse_steps` and `tile`.
"""

from shardlab.simulate.passes.run import (
    GAIN,
    PASSES,
    Goal,
    PassResult,
    TapePass,
    apply_passes,
    find_passes,
    helpful_names,
    helpful_results,
    run_named,
    run_passes,
)

__all__ = [
    "GAIN",
    "PASSES",
    "Goal",
    "PassResult",
    "TapePass",
    "apply_passes",
    "find_passes",
    "helpful_names",
    "helpful_results",
    "run_named",
    "run_passes",
]
