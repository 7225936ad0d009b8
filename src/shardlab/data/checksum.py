"""Checksums of texts, in a time that does not grow with the text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from shardlab.data.text import Text

PIECES = 64
"""How many pieces of a large text are hashed."""

RECORDED = 256 * 2**20
"""The most bytes that are hashed for a run's record, by one rank: in a second or less."""

COMPARED = 4 * 2**20
"""The most bytes that every rank hashes, to compare its text with the others': in some milliseconds."""


@dataclass(frozen=True)
class Checksum:
    """A SHA-256 of a text.

    Attributes:
        bytes: the text's length.
        sha256: the checksum, in hexadecimal.
        of: what was hashed, in words by which anybody can compute it again.
    """

    bytes: int
    sha256: str
    of: str


def checksum(text: Text, at_most: int) -> Checksum:
    """Hash a text, or pieces spread evenly over it where it has more than `at_most` bytes."""
    size = len(text)
    if size <= at_most:
        return Checksum(size, hashlib.sha256(text).hexdigest(), "the whole text")
    piece = at_most // PIECES
    hashed = hashlib.sha256()
    for number in range(PIECES):
        start = (size - piece) * number // (PIECES - 1)
        hashed.update(text[start : start + piece])
    return Checksum(
        size,
        hashed.hexdigest(),
        f"{PIECES} pieces of {piece} bytes, one after the other: piece i, from 0, starts at byte "
        f"(bytes - {piece}) * i // {PIECES - 1}",
    )
