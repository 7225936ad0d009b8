"""Checksums of texts."""

from __future__ import annotations

import hashlib
import re

from shardlab.data.checksum import PIECES, checksum

TEXT = bytes(range(256)) * 40


def test_of_a_small_text_it_is_what_sha256sum_prints() -> None:
    found = checksum(TEXT, len(TEXT))
    assert (found.bytes, found.sha256, found.of) == (len(TEXT), hashlib.sha256(TEXT).hexdigest(), "the whole text")


def test_of_a_large_text_it_can_be_computed_again_from_its_own_words() -> None:
    found = checksum(TEXT, 1280)
    words = re.fullmatch(r"(\d+) pieces of (\d+) bytes.* \(bytes - (\d+)\) \* i // (\d+)", found.of)
    assert words
    pieces, size, same_size, steps = map(int, words.groups())
    assert (pieces, size, same_size, steps) == (PIECES, 20, 20, PIECES - 1)
    starts = [(found.bytes - size) * i // steps for i in range(pieces)]
    assert (starts[0], starts[-1]) == (0, len(TEXT) - size)
    assert found.sha256 == hashlib.sha256(b"".join(TEXT[start : start + size] for start in starts)).hexdigest()


def test_texts_that_differ_at_an_end_or_in_length_differ() -> None:
    texts = [TEXT, b"x" + TEXT[1:], TEXT[:-1] + b"x", TEXT + TEXT]
    assert len({checksum(text, 1280) for text in texts}) == 4
