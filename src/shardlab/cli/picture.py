"""Files to be written: refused before any work is done if they cannot be, and then written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.program import UserError
from shardlab.program.picture import ColorBy
from shardlab.simulate import Timeline

if TYPE_CHECKING:
    from shardlab.draw.trace import Shown

MOST_DRAWN = 500_000
"""Events in a picture: a matter of seconds."""


def check_new_file(option: str, path: Path | None, example: str) -> None:
    """Refuse a file that has no folder to go to.

    Args:
        option: the option that names it.
        path: the file; None if none is wanted.
        example: a name that it could have.

    Raises:
        UserError: if the folder is missing, or the file is one.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; give a file in it, such as {path / example}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist; make it first")


def check_new_files(svg: Path | None, trace: Path | None, example: str) -> None:
    """Refuse a picture and a trace that cannot be written, or that are one file.

    Raises:
        UserError: if so.
    """
    check_new_file("--svg", svg, example)
    check_new_file("--trace", trace, "trace.json")
    if svg is not None and trace is not None and svg.resolve() == trace.resolve():
        raise UserError(f"--svg and --trace are both {svg}; give each a file of its own")


def save_picture(timeline: Timeline, path: Path | None, name: str, color_by: ColorBy) -> None:
    """Draw a timeline of what has such a name into a file, if one is wanted."""
    if path is None:
        return
    from shardlab.draw import save_timeline  # matplotlib takes longer to import than most simulations take

    if (count := sum(map(len, timeline.events))) > MOST_DRAWN:
        raise UserError(
            f"--svg {path}: {count:,} events are too many for a picture of at most {MOST_DRAWN:,}; write --trace, or "
            "take fewer microbatches"
        )
    try:
        title = f"{name}: one optimizer step"
        if timeline.in_seconds:
            save_timeline(timeline, path, title, "time (seconds)", color_by)
        else:
            save_timeline(timeline, path, title, color_by=color_by)
    except OSError as error:
        raise UserError(f"--svg {path}: it cannot be written: {error.strerror}") from None


def save_trace(shown: Mapping[str, Shown], path: Path | None) -> None:
    """Write timelines for trace viewers, each under its name, if that is wanted."""
    if path is None:
        return
    from shardlab.draw.trace import save_trace_events

    try:
        save_trace_events(shown, path)
    except OSError as error:
        raise UserError(f"--trace {path}: it cannot be written: {error.strerror}") from None
