"""Storages are counted while they live, whoever frees them, and as large as they are."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
from torch import Tensor

from shardlab.measure.side_by_side.contender import LiveStorages, measure_memory

MIB = 2**20


def test_a_storage_counts_once_and_until_it_is_gone() -> None:
    storages = LiveStorages()
    with storages.tracking():
        first = torch.ones(MIB // 4)
        view = first.view(2, -1)[0]
        assert storages.live == MIB
        del first
        assert storages.live == MIB, "the view keeps it"
        del view
    assert (storages.live, storages.peak) == (0, MIB)


def test_a_storage_that_is_emptied_does_not_count() -> None:
    storages = LiveStorages()
    with storages.tracking():
        tensor = torch.ones(MIB // 4)
        tensor.untyped_storage().resize_(0)
        assert storages.live == 0
        tensor.untyped_storage().resize_(2 * MIB)
        assert storages.live == 2 * MIB
    assert storages.peak == 2 * MIB


class Growing:
    """Keeps a MiB, and for a while takes one more in every step than in the one before."""

    def __init__(self) -> None:
        self.tensor, self.steps = torch.ones(MIB // 4), 0

    def step(self) -> Tensor:
        self.steps += 1
        larger = torch.ones(self.steps * MIB // 4)
        return larger.sum()


def test_the_peak_is_of_the_last_step_and_of_what_the_contender_keeps() -> None:
    earlier_tensor = torch.ones(8 * MIB // 4)
    contender, losses, peak = measure_memory(Growing, 3, torch.device("cpu"))
    assert isinstance(contender, Growing)
    assert len(losses) == contender.steps == 3
    assert 4 * MIB <= peak < 5 * MIB < earlier_tensor.nbytes
