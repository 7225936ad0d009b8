"""Grading a strategy of `shardlab.program`: the same puzzles, written as `async def f(rank: Rank)`."""

from __future__ import annotations

import inspect
from typing import Any

from shardlab.check.blame import Blame
from shardlab.errors import About
from shardlab.program import Mesh, Refused, Strategy, UserError
from shardlab.program.lines import shown
from shardlab.puzzles.refusal import PuzzleRefused
from shardlab.puzzles.statements import Puzzle
from shardlab.timeline import Timeline, simulate


def is_strategy(signature: inspect.Signature) -> bool:
    """Whether a function takes a `Rank`, as its annotation says, or without one its argument's name."""
    first = next(iter(signature.parameters.values()), None)
    if first is None:
        return False
    if first.annotation is inspect.Parameter.empty:
        return first.name == "rank"
    name = first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
    return name.rpartition(".")[2] == "Rank"


def timeline_of(strategy: Strategy, puzzle: Puzzle) -> Timeline:
    """Trace, check and time a strategy at a puzzle's sizes.

    Its grid is one axis of ranks, or what a function `<strategy>_mesh(ranks)` beside it says.

    Raises:
        PuzzleRefused: if it is wrong, with the line at fault.
        UserError: if it is no async function of a rank.
    """
    own: Any = inspect.unwrap(getattr(strategy, "func", strategy))  # a partial's function, and a wrapper's
    if not inspect.isfunction(own):
        raise UserError(f"{strategy!r} is not a strategy; write it as `async def f(rank): ...`")
    file = own.__code__.co_filename
    make_mesh = own.__globals__.get(f"{own.__name__}_mesh")
    mesh = make_mesh(puzzle.ranks) if make_mesh else Mesh(dp_shard=puzzle.ranks)
    try:
        checked = Blame(strategy, file).checked(mesh, puzzle.layers, puzzle.batches)
    except Refused as refusal:
        refusal.line = refusal.line.replace(f"{file}:", f"{shown(file)}:")
        refusal.trail = refusal.trail.replace(f"{file}:", f"{shown(file)}:")
        raise PuzzleRefused.of(refusal) from None
    if checked.frozen:
        layer = checked.frozen[0]
        given = f"no rank loads an optimizer state of layer {layer}, so it is frozen"
        raise PuzzleRefused("frozen", About("", layer), given, "a puzzle trains all, load it")
    return simulate(checked)
