"""Table of the ranks."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardlab.language import Mesh, UserError
from shardlab.train import world
from shardlab.train.world import RankPlace, RunningWorld, ranks_without_folder
from tests.support.ranks import Ranks


def gathered(rank: int) -> RunningWorld:
    return RunningWorld.gather(rank, torch.device("cpu"), Mesh(dp_shard=2))


@pytest.mark.starts_ranks
def test_every_rank_knows_all_places(ranks: Callable[[int], Ranks]) -> None:
    here, there = ranks(2).call(gathered)
    assert here == there
    assert [(place.rank, place.mesh) for place in here.places] == [(0, {"dp_shard": 0}), (1, {"dp_shard": 1})]
    assert (here.backend, here.launcher) == ("gloo", "shardlab")
    assert here.versions["torch"]


def seen(rank: int, folders: list[Path]) -> str:
    return ranks_without_folder(folders[rank], 0.2)


@pytest.mark.starts_ranks
def test_a_folder_that_is_not_the_same_one_for_all_is_named_on_every_rank(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    one, other = ranks(2).call(seen, folders)
    assert one == other.replace(str(folders[1]), str(folders[0]))
    assert one.startswith(f"{folders[0]}, which rank 0 has made on ")
    assert " is not seen by rank 1 (on " in one
    assert ranks(2).call(seen, [folders[0]] * 2) == ["", ""]
    assert not [*folders[0].iterdir(), *folders[1].iterdir()]


def test_a_folder_that_cannot_be_written_gets_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(world.dist, "get_rank", lambda: 0)
    with pytest.raises(UserError, match=r"missing.* cannot be written \(No such file or directory\); free some space"):
        ranks_without_folder(tmp_path / "missing", 0.2)


def printed(places: list[RankPlace], backend: str = "nccl", *, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=20 if terminal else 80, force_terminal=terminal, color_system=None)
    RunningWorld(places, backend, "torchrun", {"python": "3.11", "shardlab": None}).print(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_row_tells_where_a_rank_is() -> None:
    lines = printed(
        [RankPlace(0, "a", "cuda:0 (H100)", {"pp": 0}), RankPlace(1, "b", "cuda:0 (H100)", {"pp": 1})]
    ).splitlines()
    assert [line.split() for line in lines] == [
        ["rank", "host", "device", "pp"],
        ["0", "a", "cuda:0", "(H100)", "0"],
        ["1", "b", "cuda:0", "(H100)", "1"],
        ["nccl,", "started", "by", "torchrun;", "python", "3.11"],
    ]


def test_a_terminal_that_is_too_narrow_cuts_no_word() -> None:
    lines = printed([RankPlace(0, "a", "cpu", {})], terminal=True).splitlines()
    assert [line.strip() for line in lines[-3:]] == ["nccl, started by", "torchrun; python", "3.11"]


def test_of_many_ranks_some_are_shown() -> None:
    lines = printed([RankPlace(rank, "a", "cpu", {}) for rank in range(64)]).splitlines()
    assert "and 48 more, in run.json" in lines
    assert len(lines) == 1 + 16 + 2


def test_the_table_has_cpus_where_ranks_of_a_host_have_their_own() -> None:
    bound = printed([RankPlace(0, "a", "cpu", {}, "0-3"), RankPlace(1, "a", "cpu", {}, "4-7")])
    assert bound.splitlines()[:2] == ["rank  host  device  cpus", "   0  a     cpu      0-3"]
    assert "cpus" not in printed([RankPlace(0, "a", "cpu", {}, "0-7"), RankPlace(1, "a", "cpu", {}, "0-7")])


@pytest.mark.parametrize(
    ("load", "threads", "variable", "noted"),
    [(1.4, 2, "", True), (7.0, 2, "", True), (0.9, 2, "", False), (1.4, 1, "", False), (1.4, 2, "2", False)],
)
def test_several_threads_beside_other_programs_get_a_note(
    monkeypatch: pytest.MonkeyPatch, load: float, threads: int, variable: str, noted: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(world.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(world.os, "cpu_count", lambda: 2)
    text = printed([RankPlace(0, "a", "cpu", {}, threads=threads)], "gloo")
    note = (
        f"about {min(load, 2.0)} of 2 CPUs were busy in the last minute; if that was other work, each op waits for the "
    )
    assert (note in text and "OMP_NUM_THREADS=1 may be faster" in text) is noted


def test_ranks_that_leave_a_gpu_idle_get_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [RankPlace(rank, "a", "cpu", {}) for rank in range(4)]
    monkeypatch.setattr("shardlab.train.world.gpu_count", lambda: 1)
    assert printed(places, "gloo").splitlines()[-1] == (
        "4 ranks on 1 GPU: all compute on the CPU; --ranks 1 takes the GPU"
    )
    assert "all compute" not in printed(places, "nccl")
    monkeypatch.setattr("shardlab.train.world.gpu_count", lambda: 0)
    assert "all compute" not in printed(places, "gloo")
