"""Lines of the user's own program, by which messages are found again in it."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType, TracebackType
from typing import Any, NamedTuple

_PATHS = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}

INSTALLED = (*_PATHS, "<frozen ")
"""How names of files begin that are the standard library's, or a package's that pip installed."""

IMPORTING = "<frozen importlib._bootstrap>"
"""The file of a frame that imports a module."""


class SourceLine(NamedTuple):
    """A line of a file, or of a notebook's cell."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{shown(self.file)}:{self.number}"


def at(line: SourceLine | None) -> str:
    """Where somebody waits, to be put after it; empty if that is not known."""
    return "" if line is None else f" ({line})"


def here() -> SourceLine | None:
    """The innermost line of the user that runs now; None if there is none."""
    return line_of(sys._getframe())  # pyright: ignore[reportPrivateUsage]


def line_of(frame: FrameType | None) -> SourceLine | None:
    """The innermost line of the user among a frame and its callers; None if there is none."""
    while frame is not None and is_machinery(frame):
        frame = frame.f_back
    return None if frame is None else SourceLine(frame.f_code.co_filename, frame.f_lineno)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a frame, or one of its callers, imports a module."""
    while frame is not None and frame.f_code.co_filename != IMPORTING:
        frame = frame.f_back
    return frame is not None


def own_part(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames by which Shardlab came to the user's program."""
    while traceback is not None and traceback.tb_next is not None and is_machinery(traceback.tb_frame):
        traceback = traceback.tb_next
    return traceback


def is_machinery(frame: FrameType) -> bool:
    """Whether a frame is Shardlab's, a package's or the standard library's (also in named tuples, made as text)."""
    ours = str(frame.f_globals.get("__name__")).startswith(("shardlab.", "namedtuple_"))
    return ours or frame.f_code.co_filename.startswith(INSTALLED)


def shown(file: str) -> str:
    """A file as a reader knows it: from the working directory, and a notebook's cell by its number, as `In[3]`."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    cell = shell.compile.format_code_name(file) if shell else None
    if cell:
        return str(cell[1])
    inside = file.startswith(os.getcwd() + os.sep)
    return os.path.relpath(file) if inside else file
