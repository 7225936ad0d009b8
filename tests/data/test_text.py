"""Texts as bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardlab.data.text import DEFAULT_BYTES, default_text, map_text
from shardlab.errors import UserError

TEXT = bytes(i % 251 for i in range(5000))


def test_the_default_text_is_python_of_a_few_megabytes_and_always_the_same() -> None:
    text = default_text()
    assert b"import " in text
    assert 1_000_000 < len(text) <= DEFAULT_BYTES
    assert text == default_text()


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    (tmp_path / "empty").touch()
    assert map_text(tmp_path / "text")[:] == TEXT
    assert map_text(tmp_path / "empty")[:] == b""


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.txt does not exist"):
        map_text(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="is a folder"):
        map_text(tmp_path)


def test_what_has_no_random_places_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="fifo is a pipe, but text is read from random places"):
        map_text(tmp_path / "fifo")
    with pytest.raises(UserError, match="/dev/zero is a device"):
        map_text(Path("/dev/zero"))
