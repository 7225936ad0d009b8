"""Cross-entropy over slices of the vocabulary is cross-entropy."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.models.tensors import combined_loss, loss_gradient, loss_of, loss_stats
from tests.models.tensors.comparing import gradient_of

ROWS, LENGTH = 2, 5


def by_slices(logits: Tensor, targets: Tensor, slices: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient from `slices` slices of the logits, padded at the end."""
    vocab_size = logits.shape[-1]
    size = -(-vocab_size // slices)
    padded = F.pad(logits, (0, size * slices - vocab_size), value=float("-inf"))
    cut = list(zip(padded.chunk(slices, -1), range(0, size * slices, size), strict=True))
    stats = torch.stack([loss_stats(each, targets, first) for each, first in cut])
    assert stats.shape == (slices, ROWS, LENGTH, 3)
    gradients = [loss_gradient(each, stats, targets, first) for each, first in cut]
    gradient = torch.cat(gradients, -1)
    assert not gradient[..., vocab_size:].any()
    return combined_loss(stats, targets), gradient[..., :vocab_size]


@given(st.integers(1, 30), st.integers(1, 7), st.sampled_from([1e-3, 1.0, 300.0]), st.integers(0, 1000))
def test_loss_and_gradient_of_slices_are_cross_entropys(vocab_size: int, slices: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(ROWS, LENGTH, vocab_size, dtype=torch.float64, generator=generator)
    targets = torch.randint(-1, vocab_size, (ROWS, LENGTH), generator=generator)
    logits.requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    expected.backward()
    loss, gradient = by_slices(logits.detach(), targets, slices)
    assert abs(loss - expected).item() <= 1e-14 * max(1.0, expected.item())
    assert (gradient - gradient_of(logits)).abs().max().item() <= 2e-15


def test_logits_are_left_as_they_were() -> None:
    logits, targets = torch.randn(ROWS, LENGTH, 6, dtype=torch.float64), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    before = logits.clone()
    stats = loss_stats(logits, targets, 0)[None]
    loss_gradient(logits, stats, targets, 0)
    combined_loss(stats, targets)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics_are_in_single_precision_at_least_and_gradients_in_the_logits(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(ROWS, LENGTH, 6).to(dtype), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    stats = loss_stats(logits, targets, 0)[None]
    assert stats.dtype == torch.float32
    assert loss_gradient(logits, stats, targets, 0).dtype == dtype
    torch.testing.assert_close(combined_loss(stats, targets), loss_of(logits, targets))
