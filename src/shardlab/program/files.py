"""Files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """Write a file beside `path`: it takes the place of `path` when the block ends, and goes if the block raises.

    Yields:
        where to write.

    Raises:
        OSError: when it cannot be written; what was at `path` before is still there.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
