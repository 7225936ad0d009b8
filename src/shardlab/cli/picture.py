"""Files to be written: refused before any work is done if they cannot be, and then written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.program import UserError
from shardlab.program.picture import ColorBy
from shardlab.timeline import Timeline

if TYPE_CHECKING:
    from shardlab.draw.trace import Shown

MOST_DRAWN = 500_000
"""Events in a picture: a matter of seconds."""


OWN_MARKS = (
    b"<dc:title>shardlab</dc:title>",  # SVG
    b'"otherData": {"generator": "shardlab"}',  # a trace
    b"Creator\0shardlab",  # PNG
    b"/Creator (shardlab)",  # PDF
)
"""What stands near the beginning or the end of every file that Shardlab writes."""

NEAR = 4096
"""Bytes."""


def check_new_file(
    option: str, path: Path | None, example: str, *, force: bool = False, content: bytes | None = None
) -> None:
    """Refuse a file that has no folder to go to, or that is there already and is not Shardlab's own.

    Args:
        option: the option that names it.
        path: the file; None if none is wanted.
        example: a name that it could have.
        force: replace whatever file is there.
        content: what will be in it, if that bears no mark of Shardlab's; the same file may be there already.

    Raises:
        UserError: if the folder is missing, the file is one, or it is another program's or a user's.
    """
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; give a file in it, such as {path / example}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
    if path.is_file() and not force and not _may_go(path, content):
        whose = "not what Shardlab would write" if content is not None else "not one of Shardlab's"
        raise UserError(
            f"{option} {path}: this file exists and is {whose}; name another one, or give --force to replace it"
        )


def _may_go(path: Path, content: bytes | None) -> bool:
    """Whether a file can be replaced without loss: it is empty, or Shardlab has written it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if content is not None:
                return size in (0, len(content)) and file.read() in (b"", content)
            ends = file.read(NEAR)
            file.seek(max(0, size - NEAR))
            ends += file.read()
    except OSError:
        return False
    return not size or any(mark in ends for mark in OWN_MARKS)


def check_new_files(svg: Path | None, trace: Path | None, example: str, *, force: bool) -> None:
    """Refuse a picture and a trace that cannot be written, that are one file, or that would replace a user's.

    Raises:
        UserError: if so.
    """
    check_new_file("--svg", svg, example, force=force)
    check_new_file("--trace", trace, "trace.json", force=force)
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
