"""Files to be written: refused before any work is done if they cannot be, and then written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from shardlab.program import UserError
from shardlab.simulate import Timeline


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


def save_picture(timeline: Timeline, path: Path | None, title: str) -> None:
    """Draw a timeline into a file, if one is wanted."""
    if path is None:
        return
    from shardlab.draw import save_timeline  # matplotlib takes longer to import than most simulations take

    try:
        save_timeline(timeline, path, title)
    except OSError as error:
        raise UserError(f"--svg {path}: it cannot be written: {error.strerror}") from None
