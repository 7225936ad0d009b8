"""Memory beside the device: in the host's, in a file, and what is parked there for a while."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from shardlab.execute.offload import OffloadableTensors, copy, storage_at, tensor_at
from shardlab.execute.optimizers.flat_slice import Slice
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language.rules.refusals import PLACES
from tests.support.stepped import stepped

CPU = torch.device("cpu")


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_elsewhere_has_the_numbers_that_are_copied_there(place: str) -> None:
    source = torch.arange(6, dtype=torch.float64).view(2, 3)
    target = tensor_at(place, source.shape, source.dtype, CPU)
    copy(target, source)()
    source.zero_()
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert target.dtype is torch.float64


def test_the_disk_has_a_file_of_the_tensors_size_and_no_name_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    storage = storage_at("disk", 5_000_000, CPU)
    assert list(tmp_path.iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    first, last = (int(end, 16) for end in mapped[0].split()[0].split("-"))
    assert last - first >= storage.nbytes() == 5_000_000


def test_a_file_takes_its_room_at_once_also_where_the_system_has_no_call_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(os, "posix_fallocate")
    allocated: list[int] = []
    unlink = os.unlink

    def record_unlink(path: str) -> None:
        allocated.append(512 * os.stat(path).st_blocks)
        unlink(path)

    monkeypatch.setattr(os, "unlink", record_unlink)
    assert storage_at("disk", 3_000_001, CPU).nbytes() == 3_000_001
    assert allocated[0] >= 3_000_001


def test_parked_tensors_have_no_memory_and_get_their_numbers_back() -> None:
    whole = torch.arange(8.0)
    parts, parked = whole.split(4), OffloadableTensors()
    assert torch.equal(parked.current(parts[1]), parts[1])
    parked.offload([*parts], lambda size: storage_at("host", size, CPU))()
    assert whole.untyped_storage().nbytes() == 0
    assert parked.current(parts[1]).tolist() == [4, 5, 6, 7]
    parked.reload()()
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("exact", [False, True])
def test_an_optimizer_goes_on_as_if_its_state_had_never_been_away(exact: bool) -> None:
    """With and without a copy of the weights in more bits; each update is given another tensor with the weights."""

    def optimizer(weights: torch.Tensor) -> Slice:
        return Slice([weights], [0], [(0, 3)], OptimizerConfig(), weights.double() if exact else None)

    stays, moves = torch.linspace(0, 1, 5), torch.linspace(0, 1, 5)
    staying, moving = optimizer(stays), optimizer(moves)
    for step in range(4):
        gradient = torch.full((5,), 0.1 + step)
        stepped(staying, gradient, step)
        moving.reload()()
        copied = moves.clone()
        moving.carry([copied])
        stepped(moving, gradient, step)
        moving.offload(lambda size: storage_at("host", size, CPU))()
        assert all(moment.untyped_storage().nbytes() == 0 for moment in moving.moments if moment.numel() > 1)
        moves = copied
        assert torch.equal(stays, moves)
