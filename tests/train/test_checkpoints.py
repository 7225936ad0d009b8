"""Saving beside the steps: when, at what cost, and what happens when it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.language import UserError
from shardlab.models import GPT
from shardlab.train.batches import Batches
from shardlab.train.checkpoint.write import Disk
from shardlab.train.checkpoints import Saver
from shardlab.train.config import SavingConfig
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.launch.interrupt import StopRequest
from shardlab.train.loop import fit
from shardlab.train.steps import Training
from shardlab.train.tracing import RampedExecutor
from tests.support.ranks import Ranks
from tests.train.checkpoint.runs import saving_run, trained

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
JOB = Job("fsdp", 2, 4, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2)


class Full(Disk):
    """A disk on which there is no room for one rank's second file."""

    def __init__(self, rank: int) -> None:
        self._left = 1 if rank == 1 else 100

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        if path.suffix == ".safetensors":
            self._left -= 1
        if self._left < 0:
            raise OSError(28, "No space left on device", str(path))
        super().write(path, chunks)


def saved(
    rank: int,
    out: Path,
    *,
    full: bool = False,
    disk: Disk | None = None,
    poisoned: int = -1,
    every: Any = 2,
    stop: int = -1,
) -> list[str]:
    """Take the steps of a run; the folders of its checkpoints."""
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, 4, 0)

    class Poisoned(Executor):
        def step(self) -> Tensor:
            step, loss = self.state.step, super().step()
            if rank == 1 and step == poisoned:
                loss[0] = torch.nan
            if rank == 1 and step == stop:
                request.is_requested = True
            return loss

    run = saving_run(JOB, out)
    run = replace(run, config=replace(run.config, saving=SavingConfig(every)))
    executor = Poisoned(JOB.checked(), rank, JOB.cut, batches, Settings(optimizer=run.config.optimizer))
    ramped = RampedExecutor({JOB.microbatches: executor}, run)
    saver = Saver(ramped, run, batches, Full(rank) if full else disk)
    with StopRequest(None) as request, suppress(UserError):
        fit(Training(ramped, run, request, batches, [saver]))
    folder = out / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_step_that_saves_tells_how_long_it_stood_still(ranks: World, tmp_path: Path) -> None:
    ranks(2).call(trained, saving_run(JOB, tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "save_stall" in line] == [1, 3]
    assert all(0 < line["save_stall"] < 10 for line in lines if "save_stall" in line)


class Unnamed(Disk):
    """A disk that writes files, and fails when a checkpoint is to have its name, or a folder is to go."""

    def rename(self, old: Path, new: Path) -> None:
        raise OSError(5, "Input/output error", str(old))


def test_a_checkpoint_that_cannot_be_completed_keeps_no_room(ranks: World, tmp_path: Path) -> None:
    assert ranks(2).call(partial(saved, out=tmp_path / "run", disk=Unnamed()))[0] == []


class Odd(Disk):
    """A disk whose notes are no JSON, which is no error of the system's."""

    def read(self, path: Path) -> bytes:
        return b"{"


class Wordless(Disk):
    """A disk whose error has no words of the system's."""

    def read(self, path: Path) -> bytes:
        raise OSError("it hums")


def words(rank: int, out: Path, disk: type[Disk] = Odd) -> list[str]:
    """Return the output of a rank that trains on a faulty disk."""
    said: list[str] = []
    with patch("shardlab.train.checkpoints.say", said.append):
        saved(rank, out, disk=disk())
    return said


def test_any_error_of_completing_a_checkpoint_is_reported(ranks: World, tmp_path: Path) -> None:
    first, other = ranks(2).call(partial(words, out=tmp_path / "run"))
    assert len(first) == 3
    assert all("line" in message and "in commit" in message for message in first)
    assert "the checkpoint after step 2 cannot be written, and training goes on without it (rank 0: JSON" in first[0]
    assert other == []
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_error_without_a_text_of_the_system_is_reported_by_its_own(ranks: World, tmp_path: Path) -> None:
    first, _ = ranks(2).call(partial(words, out=tmp_path / "run", disk=Wordless))
    assert all(message.endswith("training goes on without it (rank 0: it hums)") for message in first)


def test_a_folder_that_cannot_be_made_ends_no_training(ranks: World, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    assert ranks(2).call(partial(saved, out=tmp_path / "run", poisoned=2))[0] == []


def test_a_rank_without_room_loses_that_checkpoint_alone(ranks: World, tmp_path: Path) -> None:
    assert ranks(2).call(partial(saved, out=tmp_path / "run", full=True))[0] == ["step-000002"]


@pytest.mark.parametrize(
    ("poisoned", "kept_names"), [(1, []), (2, ["step-000002"]), (4, ["step-000002", "step-000004"])]
)
def test_weights_of_a_step_that_diverged_are_not_saved(
    poisoned: int, kept_names: list[str], ranks: World, tmp_path: Path
) -> None:
    assert ranks(2).call(partial(saved, out=tmp_path / "run", poisoned=poisoned))[0] == kept_names


def test_a_clock_can_ask_for_checkpoints(ranks: World, tmp_path: Path) -> None:
    names = ranks(2).call(partial(saved, out=tmp_path / "run", every="1s"))[0]
    assert names[-1] == "step-000005"


def test_every_run_saves_its_end_and_one_that_is_interrupted(ranks: World, tmp_path: Path) -> None:
    assert ranks(2).call(partial(saved, out=tmp_path / "one", every=None))[0] == ["step-000005"]
    assert ranks(2).call(partial(saved, out=tmp_path / "two", every=None, stop=1))[0] == ["step-000003"]


class Own(Disk):
    """A disk of each host's own: rank 0 sees nothing of what others write."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def read(self, path: Path) -> bytes:
        if not self._rank and "rank-0000" not in path.name:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return super().read(path)

    def remove(self, path: Path) -> None:
        """Remove what this host has."""
        for file in path.glob(f"rank-{self._rank:04}*"):
            file.unlink()


def saved_apart(rank: int, out: Path) -> list[str]:
    return saved(rank, out, disk=Own(rank))


def test_leftovers_of_a_failed_save_are_removed_by_their_rank(ranks: World, tmp_path: Path) -> None:
    ranks(2).call(partial(saved_apart, out=tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()
