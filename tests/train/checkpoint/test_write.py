"""Crashes at any moment: a folder named as a checkpoint is complete, and one of the last two checkpoints exists."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.train.checkpoint.read import CONFIG, STATE, Checkpoint
from shardlab.train.checkpoint.write import MANIFEST, Disk, commit, folder_of, steps_in, write_shard
from tests.support.thorough import examples
from tests.train.checkpoint.crashing_disk import Crash, CrashingDisk

CHECKPOINTS = Path("/run/checkpoints")
STEPS, RANKS, KEEP = (10, 20, 30, 40), 2, 2


def save(disk: Disk, step: int, checkpoints: Path = CHECKPOINTS, keep: int = KEEP) -> None:
    folder = folder_of(checkpoints, step)
    for rank in range(RANKS):
        write_shard(disk, folder, rank, [f"step {step}, ".encode(), f"rank {rank}".encode()], {"tensors": {}})
    commit(disk, folder, RANKS, {STATE: json.dumps({"step": step}), CONFIG: "[train]"}, keep)


def run(disk: CrashingDisk) -> list[int]:
    """Save until the machine stops; the steps whose saving has ended."""
    saved: list[int] = []
    disk.make_folder(CHECKPOINTS)
    disk.sync_folder(Path("/"))
    disk.sync_folder(CHECKPOINTS.parent)
    try:
        for step in STEPS:
            save(disk, step)
            saved.append(step)
    except Crash:
        pass
    return saved


def want_sound(disk: CrashingDisk, saved: list[int], draw: Callable[[int], int]) -> None:
    """Require that the last saved checkpoint, or the one being saved, is there, and no incomplete one."""
    with TemporaryDirectory() as folder:
        disk.left(Path(folder, "disk"), draw)
        checkpoints = Path(folder, "disk", *CHECKPOINTS.parts[1:])
        steps = steps_in(Disk(), checkpoints)
        for step in steps:
            assert Checkpoint.open(folder_of(checkpoints, step)).verify().step == step
        if saved:
            assert steps
            assert steps[-1] >= saved[-1]


def want_sound_everywhere(kind: type[CrashingDisk], draws: list[Callable[[int], int]]) -> None:
    for last, draw in product(range(3, WHOLE + 1), draws):
        disk = kind(last)
        want_sound(disk, run(disk), draw)


def operations() -> int:
    disk = CrashingDisk()
    assert run(disk) == list(STEPS)
    return disk.done


WHOLE = operations()


@settings(max_examples=examples(400), deadline=None)
@given(st.data(), st.integers(3, WHOLE))
def test_a_crash_at_any_point_leaves_the_last_checkpoint_or_the_one_before(data: st.DataObject, last: int) -> None:
    disk = CrashingDisk(last)
    saved = run(disk)
    want_sound(disk, saved, lambda most: data.draw(st.integers(0, most)))


@pytest.mark.parametrize("lost", ["all", "nothing"])
def test_a_crash_at_every_single_point_is_survived(lost: str) -> None:
    for last in range(3, WHOLE + 1):
        disk = CrashingDisk(last)
        want_sound(disk, run(disk), lambda most: 0 if lost == "all" else most)


class Forgetful(CrashingDisk):
    """Says that a file is synced, and does not sync it."""

    name = MANIFEST

    def sync(self, path: Path) -> None:
        if path.name != self.name:
            super().sync(path)


class Hasty(CrashingDisk):
    """Does not sync folders."""

    def sync_folder(self, path: Path) -> None:
        if len(path.parts) > 3:
            return
        super().sync_folder(path)


class Unsynced(Forgetful):
    name = "rank-0001.safetensors"


@pytest.mark.parametrize("broken", [Forgetful, Hasty, Unsynced])
def test_a_protocol_that_forgets_to_wait_for_the_disk_fails_this_test(broken: type[CrashingDisk]) -> None:
    draws: list[Callable[[int], int]] = [lambda most: 0, lambda most: most, lambda most: most // 2]
    with pytest.raises((UserError, AssertionError)):
        want_sound_everywhere(broken, draws)


def test_so_many_checkpoints_are_kept_and_later_ones_of_before_a_resumption_go(tmp_path: Path) -> None:
    disk = Disk()
    for step in STEPS:
        save(disk, step, tmp_path)
    assert steps_in(disk, tmp_path) == [30, 40]
    save(disk, 35, tmp_path)
    assert steps_in(disk, tmp_path) == [30, 35]
    save(disk, 35, tmp_path)
    assert steps_in(disk, tmp_path) == [30, 35]
    assert {path.name for path in tmp_path.iterdir()} == {"step-000030", "step-000035"}


@pytest.mark.parametrize("keep", range(1, 6))
def test_the_newest_checkpoints_are_kept_however_many_they_are(tmp_path: Path, keep: int) -> None:
    steps = [10 * number for number in range(1, 8)]
    for count, step in enumerate(steps, 1):
        save(Disk(), step, tmp_path, keep)
        assert steps_in(Disk(), tmp_path) == steps[max(0, count - keep) : count]


def test_incomplete_checkpoints_are_not_listed(tmp_path: Path) -> None:
    write_shard(Disk(), folder_of(tmp_path, 10), 0, [b"half"], {})
    assert steps_in(Disk(), tmp_path) == []


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_found_and_the_file_is_named(data: st.DataObject) -> None:
    """Also in the manifest, which has a checksum of its own; spaces and the like may change without a meaning."""
    with TemporaryDirectory() as temporary:
        save(Disk(), 10, Path(temporary))
        folder = folder_of(Path(temporary), 10)
        before = Checkpoint.open(folder).verify()
        path = data.draw(st.sampled_from(sorted(folder.iterdir())))
        written = bytearray(path.read_bytes())
        written[data.draw(st.integers(0, len(written) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(written)
        said = ""
        try:
            assert Checkpoint.open(folder).verify() == before
        except UserError as error:
            said = str(error)
        assert path.name in said or "version" in said or path.name == MANIFEST
