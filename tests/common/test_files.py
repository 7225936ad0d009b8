"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from shardlab.common.errors import UserError
from shardlab.common.files import (
    atomic_file,
    atomic_folder,
    missing_path,
    nearest_path,
    path_from_here,
    write_atomically,
)


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with suppress(ValueError), atomic_file(path) as part:
        part.write_text("ne")
        assert path.read_text() == "old"
        raise ValueError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "no part is left"
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_folder_appears_when_it_is_full_and_not_at_all_if_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    with suppress(ValueError), atomic_folder(path) as part:
        (part / "file").touch()
        raise ValueError
    assert not list((tmp_path / "deep").iterdir()), "no part is left"
    with atomic_folder(path) as part:
        (part / "file").touch()
        assert not path.exists()
    assert [file.name for file in path.iterdir()] == ["file"]
    assert list((tmp_path / "deep").iterdir()) == [path]


def test_an_existing_path_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file exists; name a new folder"), atomic_folder(tmp_path / "file"):
        pass
    with (
        pytest.raises(UserError, match=r"cannot be written \(Not a directory"),
        atomic_folder(tmp_path / "file" / "in"),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_a_relative_path_is_found_from_another_folder_with_what_stands_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "here", tmp_path / "there"
    for folder, names in ((first, ["a.txt", "a:0.5"]), (second, ["a.txt", "own.txt"])):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    monkeypatch.chdir(second)
    assert path_from_here("a.txt", str(first)) == f"{first}/a.txt"
    assert path_from_here("a.txt:0.7", str(first)) == f"{first}/a.txt:0.7"
    assert path_from_here("a:0.5", str(first)) == f"{first}/a:0.5"
    assert path_from_here("gone.py:Name", str(first)) == f"{first}/gone.py:Name"
    assert path_from_here("own.txt", str(first)) == "own.txt"
    assert path_from_here(f"{second}/own.txt:2", str(first)) == f"{second}/own.txt:2"
    assert path_from_here("a.txt", str(second)) == path_from_here("a.txt", None) == "a.txt"


def test_a_mistyped_path_is_answered_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    (tmp_path / "data" / "input.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert nearest_path(Path("dta/shakespear")) == Path("data/shakespeare")
    assert nearest_path(tmp_path / "data" / "inptu.txt") == tmp_path / "data" / "input.txt"
    assert nearest_path(Path("data/input.txt/x")) is None
    assert nearest_path(Path("quite/another")) is None
    assert str(missing_path(Path("data/inputs.txt"), "name a file")).endswith("; did you mean data/input.txt?")
    assert str(missing_path(Path("data/z"), "name a file")) == "data/z does not exist; name a file"


def test_a_folder_that_another_process_sweeps_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process finds the new folder unlocked, and takes it for what a killed one has left."""
    opened, swept = os.open, list[str]()

    def open_swept(path: str | Path, flags: int, *rest: int) -> int:
        place = opened(path, flags, *rest)
        if ".part-" in str(path) and not swept:
            os.rmdir(path)
            swept.append(str(path))
        return place

    monkeypatch.setattr(os, "open", open_swept)
    with atomic_folder(tmp_path / "new") as part:
        (part / "file").write_text("text")
    assert len(swept) == 1
    assert (tmp_path / "new" / "file").read_text() == "text"
