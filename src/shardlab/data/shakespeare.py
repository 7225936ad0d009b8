"""Tiny Shakespeare: a million characters from his plays, on which small language models are tried out."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from shardlab.errors import UserError
from shardlab.program.files import want_file

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
"""Checksum of the 1,115,394 bytes at that address."""

PATIENCE = 30
"""Seconds for which a download may stand still."""


@contextmanager
def shakespeare(file: Path | None) -> Generator[Path, None, None]:
    """The text as a file: the user's, or one that is downloaded and goes when the block ends.

    Raises:
        UserError: it cannot be had, or is another text.
    """
    if file is not None:
        want_file(file)
        _want_text(file.read_bytes(), str(file))
        yield file
        return
    import urllib.request  # which imports much else

    try:
        with urllib.request.urlopen(URL, timeout=PATIENCE) as answer:
            text = answer.read()
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"{URL} cannot be downloaded ({reason}); fetch it by other means, and name it with --file"
        ) from None
    _want_text(text, URL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.txt")
        path.write_bytes(text)
        yield path


def _want_text(text: bytes, name: str) -> None:
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        raise UserError(
            f"{name} is not tiny Shakespeare ({len(text):,} bytes with the SHA-256 {found[:8]}..., not 1,115,394 with "
            f"{SHA256[:8]}...); fetch {URL} again"
        )
