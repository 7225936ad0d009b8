"""Files to be written: refused before any work is done if they cannot be, and then written whole or not at all."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from shardlab.program import UserError

OWN_MARKS = (
    b"<dc:title>shardlab</dc:title>",  # SVG
    b'"otherData": {"generator": "shardlab"}',  # a trace
    b"Creator\0shardlab",  # PNG
    b"/Creator (shardlab)",  # PDF
    b"# written by shardlab plan: ",  # TOML
)
"""Marks of the files that Shardlab writes; one stands near the beginning or the end of each."""

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
            f"{option} {path}: this file exists and is {whose}; give another name, or --force to replace it"
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


@contextmanager
def writing(option: str, path: Path) -> Generator[None]:
    """Within this, that a file cannot be written is the user's mistake.

    Raises:
        UserError: with the option, the file and the reason.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: it cannot be written: {error.strerror}") from None
