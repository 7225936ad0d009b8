"""Attention in parts, put together in any order, equals the whole, forward and backward."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardlab.models.attention import Attend
from shardlab.models.tensors.attention import attend, attend_backward, merge
from tests.support.thorough import examples

HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]


def part_of(tokens: int, heads: int, kv_heads: int) -> Attend:
    return Attend(tokens=tokens, heads=heads, head_dim=3, kv_heads=kv_heads, drops=False)


def inputs(part: Attend, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, and a gradient of what is mixed, for two rows."""
    generator = torch.Generator().manual_seed(seed)
    widths = (part.width, 2 * part.kv_width, part.width)
    q, kv, grad = (torch.randn(2, part.tokens, w, dtype=torch.float64, generator=generator) for w in widths)
    return q, kv, grad


def plain(part: Attend, q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of all tokens as the formula says."""
    size = part.head_dim
    k, v = torch.split(kv, part.kv_width, -1)
    heads: list[Tensor] = [x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (q, k, v)]
    keys, values = (x.repeat_interleave(part.heads // part.kv_heads, 1) for x in heads[1:])
    future = torch.ones(part.tokens, part.tokens, dtype=torch.bool).triu(1)
    weights = (heads[0] @ keys.mT / size**0.5).masked_fill(future, float("-inf")).softmax(-1)
    if mask is not None:
        weights = weights * mask
    return (weights @ values).transpose(1, 2).flatten(2)


def dealt(tokens: int, parts: int, chance: random.Random) -> list[list[int]]:
    """Tokens dealt among some owners, each with at least one."""
    owners = [*range(parts), *(chance.randrange(parts) for _ in range(tokens - parts))]
    chance.shuffle(owners)
    return [[token for token, token_owner in enumerate(owners) if token_owner == owner] for owner in range(parts)]


@settings(max_examples=examples(40))
@given(st.sampled_from(HEADS), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_parts_in_any_order_equal_the_whole_forward_and_backward(
    heads: tuple[int, int], blocks: int, owners: int, drops: bool, seed: int
) -> None:
    chance = random.Random(seed)
    part = part_of(chance.randint(4, 12), *heads)
    q, kv, grad = inputs(part, seed)
    shape = (2, part.heads, part.tokens, part.tokens)
    mask = torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) * 2.0 if drops else None
    leaves = q.clone().requires_grad_(), kv.clone().requires_grad_()
    expected = plain(part, *leaves, mask)
    expected.backward(grad)

    mine, theirs = dealt(part.tokens, owners, chance), dealt(part.tokens, blocks, chance)
    mixed, grad_q, grad_kv = torch.empty_like(grad), torch.zeros_like(q), torch.zeros_like(kv)
    for tokens in mine:
        chance.shuffle(theirs)
        masks = [None if mask is None else mask[:, :, tokens][..., keys] for keys in theirs]
        sums = [attend(part, q[:, tokens], kv[:, k], tokens, k, m) for k, m in zip(theirs, masks, strict=True)]
        while len(sums) > 1:
            sums.append(merge(part, sums.pop(chance.randrange(len(sums))), sums.pop(chance.randrange(len(sums)))))
        mixed[:, tokens] = sums[0][..., : part.width]
        for keys, key_mask in zip(theirs, masks, strict=True):
            for_q, for_kv = attend_backward(
                part, q[:, tokens], kv[:, keys], sums[0], grad[:, tokens], tokens, keys, key_mask
            )
            grad_q[:, tokens] += for_q
            grad_kv[:, keys] += for_kv
    for ours, theirs_ in ((mixed, expected), (grad_q, leaves[0].grad), (grad_kv, leaves[1].grad)):
        assert theirs_ is not None
        torch.testing.assert_close(ours, theirs_, rtol=0, atol=1e-13)


def test_queries_make_nothing_of_keys_that_come_after_them() -> None:
    part = part_of(8, 2, 2)
    q, kv, grad = inputs(part, 0)
    late, early = list(range(4, 8)), list(range(4))
    unseen = attend(part, q[:, early], kv[:, late], early, late)
    assert not unseen[..., : part.width].any()
    assert unseen[..., part.width :].isneginf().all()
    assert merge(part, unseen, unseen)[..., : part.width].eq(0).all()
    whole = attend(part, q[:, early], kv[:, early], early, early)
    assert torch.equal(merge(part, unseen, whole), whole)
    for gradient in attend_backward(part, q[:, early], kv[:, late], whole, grad[:, early], early, late):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_partial_attention_is_in_float32_at_least(dtype: torch.dtype) -> None:
    part = part_of(6, 2, 1)
    q, kv, grad = (x.to(dtype) for x in inputs(part, 1))
    mixed = attend(part, q, kv, range(6), range(6))
    assert mixed.dtype is torch.float32
    gradients = attend_backward(part, q, kv, mixed, grad.float(), range(6), range(6))
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]


def test_large_scores_do_not_overflow() -> None:
    part = part_of(6, 2, 2)
    q, kv, _ = inputs(part, 2)
    halves = [attend(part, q * 1e3, kv[:, a:b], range(6), range(a, b)) for a, b in pairwise((0, 2, 6))]
    mixed = merge(part, *halves)[..., : part.width]
    torch.testing.assert_close(mixed, plain(part, q * 1e3, kv, None), rtol=0, atol=1e-12)
