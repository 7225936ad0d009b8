"""The file of a rendezvous is removed with the process that named it, however that ended."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardlab.common.errors import UserError
from shardlab.train.launch.ranks import PREFIX, rendezvous_file

KILLED = """
import os, signal
from shardlab.train.launch.ranks import rendezvous_file
with rendezvous_file() as store:
    store.write_bytes(b"met")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def left(folder: Path) -> int:
    return len([*folder.glob(f"{PREFIX}*")])


def test_folders_of_killed_processes_are_removed_and_those_of_live_ones_stay(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert left(folder) == 1
    with rendezvous_file() as first:
        assert left(folder) == 1
        assert not first.exists()
        with rendezvous_file() as second:
            assert first.parent != second.parent
            assert left(folder) == 2
        assert left(folder) == 1
    assert left(folder) == 0


def test_a_full_temporary_folder_is_reported_in_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    told = r"cannot be written \(.*: No space left on device\); free some space there, or name another folder"
    with pytest.raises(UserError, match=told), rendezvous_file():
        pass
    assert left(folder) == 0


def test_a_missing_temporary_folder_is_reported_in_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
    told = r"cannot be written \(.*gone.*: No such file or directory\)"
    with pytest.raises(UserError, match=told), rendezvous_file():
        pass
