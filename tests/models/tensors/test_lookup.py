"""The look-up in one slice of the vocabulary."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from shardlab.models.tensors.lookup import look_up
from tests.models.tensors.comparing import gradient_of


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 100))
def test_slices_sum_to_the_whole_look_up_and_their_gradients_are_its_slices(size: int, slices: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(size * slices, 3, dtype=torch.float64, generator=generator).requires_grad_()
    tokens = torch.randint(size * slices, (2, 7), generator=generator)
    gradient = torch.randn(2, 7, 3, dtype=torch.float64, generator=generator)
    expected = F.embedding(tokens, whole)
    expected.backward(gradient)

    parts = [part.requires_grad_() for part in whole.detach().clone().chunk(slices)]
    results = [look_up(part, tokens, i * size) for i, part in enumerate(parts)]
    assert torch.equal(torch.stack(results).sum(0), expected)
    torch.autograd.backward(results, [gradient] * slices)
    torch.testing.assert_close(torch.cat([gradient_of(part) for part in parts]), gradient_of(whole), rtol=0, atol=1e-14)
