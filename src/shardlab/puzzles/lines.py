"""Lines of the student's own program, by which messages are found again in it."""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType
from typing import Any, NamedTuple

STANDARD_LIBRARY = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
"""How names of its files begin."""


class Line(NamedTuple):
    """A line of a file, or of a notebook's cell."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.number}"


def at(line: Line | None) -> str:
    """Where somebody waits, to be put after it; empty if that is not known."""
    return "" if line is None else f" ({line})"


def here() -> Line | None:
    """The innermost line of the student that runs now; None if there is none."""
    return line_of(sys._getframe())  # pyright: ignore[reportPrivateUsage]


def line_of(frame: FrameType | None) -> Line | None:
    """The innermost line of the student among a frame and its callers; None if there is none."""
    while frame is not None and is_machinery(frame):
        frame = frame.f_back
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno)


def own_part(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames by which Shardlab came to the student's program."""
    while traceback is not None and traceback.tb_next is not None and is_machinery(traceback.tb_frame):
        traceback = traceback.tb_next
    return traceback


def is_machinery(frame: FrameType) -> bool:
    """Whether a frame is Shardlab's or the standard library's, which generates the code of named tuples."""
    ours = str(frame.f_globals.get("__name__")).startswith(("shardlab.", "namedtuple_"))
    return ours or frame.f_code.co_filename.startswith(STANDARD_LIBRARY)


def shown(file: str) -> str:
    """A file as a reader knows it: from the working directory, and a notebook's cell by its number, as `In[3]`."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    cell = shell.compile.format_code_name(file) if shell else None
    if cell:
        return str(cell[1])
    inside = file.startswith(os.getcwd() + os.sep)
    return os.path.relpath(file) if inside else file
