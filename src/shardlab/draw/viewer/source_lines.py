"""Source lines of a program: the line of the strategy that issued each op of its tapes.

The strategy is traced again on tapes that record a line for each op: the innermost line of the call stack that is in
the user's code or, for a built-in strategy, in `shardlab.strategies`.
"""

from __future__ import annotations

import inspect
from pathlib import PurePath
from types import FrameType

from shardlab.common.user_code import display_path, is_library_frame
from shardlab.language import Op, Program, Strategy, World

STRATEGIES = "shardlab.strategies."

SourcePlace = tuple[str, int]
"""Name of a file, and the number of a line."""


def source_lines(strategy: Strategy, program: Program) -> list[list[SourcePlace | None]]:
    """Return the file and line of each op of each tape.

    The result is empty if `program` has other tapes than the strategy, because passes have rewritten it.

    Args:
        strategy: strategy that the program was traced from.
        program: tapes of the strategy.
    """
    world = World(program.mesh, program.sizes, program.microbatches)
    tapes = [_PlaceTape() for _ in world.ranks]
    for rank, tape in zip(world.ranks, tapes, strict=True):
        rank.ops = tape
    world.run(strategy)
    is_unchanged = len(tapes) == program.ranks and all(
        list(tape) == other for tape, other in zip(tapes, program.tapes, strict=True)
    )
    return [tape.places for tape in tapes] if is_unchanged else []


class _PlaceTape(list[Op]):
    def __init__(self) -> None:
        super().__init__()
        self.places: list[SourcePlace | None] = []
        self._names: dict[str, str] = {}

    def append(self, op: Op, /) -> None:
        super().append(op)
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and not self._is_strategy(frame):
            frame = frame.f_back
        self.places.append(frame and (self._name(frame), frame.f_lineno))

    @staticmethod
    def _is_strategy(frame: FrameType) -> bool:
        return str(frame.f_globals.get("__name__")).startswith(STRATEGIES) or not is_library_frame(frame)

    def _name(self, frame: FrameType) -> str:
        """Return the name of a frame's file: as the user gave it, or, inside Shardlab, relative to the package."""
        file = frame.f_code.co_filename
        if file not in self._names:
            parts = PurePath(file).parts
            is_own = is_library_frame(frame) and "shardlab" in parts
            place = len(parts) - 1 - parts[::-1].index("shardlab") if is_own else 0
            self._names[file] = "/".join(parts[place:]) if is_own else display_path(file)
        return self._names[file]
