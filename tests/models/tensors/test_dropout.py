"""Dropout's masks: a function of seed, step, layer, microbatch and place."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from dataclasses import replace

import pytest
import torch

from shardlab.models.primitives import DropoutSite
from shardlab.models.tensors import Dropout

LIKE = torch.zeros((), dtype=torch.float64)
DROPOUT = Dropout(probability=0.25, seed=1, step=2, layer=3, microbatches=(4,))


@pytest.mark.parametrize("site", DropoutSite)
@pytest.mark.parametrize("shape", [(2, 7), (1, 33, 5), (3, 2, 9, 9)])
def test_masks_of_microbatches_together_are_those_of_each_alone(site: DropoutSite, shape: tuple[int, ...]) -> None:
    numbers = (0, 4, 9)
    together = replace(DROPOUT, microbatches=numbers).mask(site, (3 * shape[0], *shape[1:]), LIKE)
    alone = [replace(DROPOUT, microbatches=(number,)).mask(site, shape, LIKE) for number in numbers]
    assert torch.equal(together, torch.cat(alone))


def test_a_recomputation_draws_the_same_mask_whatever_was_drawn_in_between() -> None:
    first = DROPOUT.mask(DropoutSite.ATTENTION, (8, 8), LIKE)
    torch.rand(100)
    assert torch.equal(first, DROPOUT.mask(DropoutSite.ATTENTION, (8, 8), LIKE))


def test_masks_leave_torchs_own_random_state_alone() -> None:
    state = torch.get_rng_state()
    DROPOUT.mask(DropoutSite.ATTENTION, (8, 8), LIKE)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("change", [{"seed": 2}, {"step": 3}, {"layer": 2}, {"microbatches": (5,)}, {}])
def test_masks_differ_by_seed_step_layer_microbatch_and_site(change: dict[str, int]) -> None:
    other = replace(DROPOUT, **change)
    site = DropoutSite.ATTENTION if change else DropoutSite.EMBEDDING
    assert not torch.equal(DROPOUT.mask(DropoutSite.ATTENTION, (8, 8), LIKE), other.mask(site, (8, 8), LIKE))


def test_a_mask_keeps_the_mean() -> None:
    mask = DROPOUT.mask(DropoutSite.EMBEDDING, (1000, 100), LIKE)
    torch.testing.assert_close(mask.unique(), torch.tensor([0, 4 / 3], dtype=torch.float64))
    assert abs(mask.mean().item() - 1) < 0.01


def test_a_mask_is_the_same_in_every_dtype() -> None:
    single, double = (
        DROPOUT.mask(DropoutSite.EMBEDDING, (20, 20), LIKE.to(dtype)) for dtype in (torch.float32, torch.float64)
    )
    assert single.dtype == torch.float32
    assert torch.equal(single > 0, double > 0)
