"""Tiny Shakespeare is that text and no other, from a file or from the net."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from shardlab.data import shakespeare as tiny
from shardlab.data.shakespeare import shakespeare
from shardlab.errors import UserError

TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the one on the net, with its checksum."""
    monkeypatch.setattr(tiny, "URL", (tmp_path / "input.txt").as_uri())
    monkeypatch.setattr(tiny, "SHA256", hashlib.sha256(TEXT).hexdigest())
    return tmp_path / "input.txt"


def test_it_is_downloaded_and_leaves_nothing_behind(server: Path) -> None:
    server.write_bytes(TEXT)
    with shakespeare(None) as path:
        assert path.read_bytes() == TEXT
    assert not path.exists()


def test_a_file_of_the_users_stays(server: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(TEXT)
    with shakespeare(tmp_path / "mine") as path:
        assert path == tmp_path / "mine"
    assert path.exists()


def test_another_text_is_refused_wherever_it_comes_from(server: Path) -> None:
    server.write_bytes(TEXT + b" ")
    for file in (None, server):
        with (
            pytest.raises(UserError, match=r"is not tiny Shakespeare \(62 bytes with the SHA-256 \w{8}\.\.\., not"),
            shakespeare(file),
        ):
            pass


@pytest.mark.usefixtures("server")
def test_without_the_net_it_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"cannot be downloaded \(.*; fetch it by other means"), shakespeare(None):
        pass
