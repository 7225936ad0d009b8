"""Text as bytes: a user's file, or one that every machine has."""

from __future__ import annotations

import mmap
import os
import sysconfig
from pathlib import Path

from shardlab.errors import UserError
from shardlab.program.files import want_file

UTF8_MARK = b"\xef\xbb\xbf"
"""Editors of Windows write it at the beginning of UTF-8; it is no text."""

DEFAULT_BYTES = 4_000_000
"""The default text ends here at the latest: enough for minutes of training, and read at once."""

Text = bytes | mmap.mmap | memoryview
"""Bytes; those of a user's file stay in it, mapped into memory, so that no rank reads more than it trains on."""


def default_text() -> bytes:
    """A text that every machine has: the source of Python's standard library, module after module by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py"), key=lambda file: file.name):
        text += file.read_bytes()
        if len(text) >= DEFAULT_BYTES:
            break
    if not text:
        raise UserError(f"the source of Python's standard library is not in {folder}; name a text of your own instead")
    return bytes(text[:DEFAULT_BYTES])


def map_text(path: Path) -> Text:
    """Map a user's text into memory, without the mark that some editors write at the beginning of UTF-8.

    Raises:
        UserError: when it is no file, or cannot be read or mapped.
    """
    want_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return b""
            text = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            return memoryview(text)[len(UTF8_MARK) :] if text[: len(UTF8_MARK)] == UTF8_MARK else text
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); name a text file that can") from error
