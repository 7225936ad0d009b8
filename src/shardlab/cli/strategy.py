"""Check of STRATEGY on the command line, in which a refusal names the user's own line."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace

from shardlab.check import Checked, check
from shardlab.check.blame import Blame
from shardlab.program import Sizes, trace
from shardlab.program.user_file import file_and_name
from shardlab.strategies.entry import StrategyEntry


def checked(
    entry: StrategyEntry, ranks: int, layers: int | Sizes, microbatches: int, *, whole_matrices: bool = False
) -> Checked:
    """Trace a strategy and check it.

    Args:
        layers: of the puzzles' model, or the sizes of another one.
        whole_matrices: whether the optimizer steps the puzzles' matrices whole.

    Raises:
        Refused: if the program is wrong; for a user's file the line at fault stands before the sentence.
        UserError: if the sizes do not fit.
    """
    path, _ = file_and_name(entry.name)
    mesh = entry.grid(ranks)
    entry.require_ops(ranks, layers if isinstance(layers, int) else layers.layers, microbatches)
    if isinstance(layers, int) and layers > 0:
        layers = replace(entry.puzzle(ranks, layers), whole_matrices=whole_matrices)
    with contextlib.redirect_stdout(sys.stderr):
        if path is None:
            return check(trace(entry.program, mesh, layers, microbatches))
        return Blame(entry.program, str(path)).checked(mesh, layers, microbatches)
