"""Files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """Write a file beside `path`: it takes the place of `path` when the block ends, and goes if the block raises.

    A link stays, and the file that it names is replaced. A device or a pipe, such as /dev/stdout, is written into.

    Yields:
        where to write.

    Raises:
        OSError: when it cannot be written; what was at `path` before is still there.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
