"""AdamW on a slice is AdamW on the parameters that lie in it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute.optimizer import AdamW, Slice


@given(st.integers(1, 6), st.integers(0, 60), st.integers(0, 5))
def test_slices_updated_apart_equal_the_whole_updated_at_once(cuts: int, decayed: int, shift: int) -> None:
    torch.manual_seed(cuts)
    size = 10 * cuts
    config = AdamW(learning_rate=0.1, warmup=1, steps=5)
    start = torch.randn(size, dtype=torch.float64)
    whole = Slice([start.clone()], [0], decayed, config)
    ranges = [(10 * i, 10 * (i + 1)) for i in range(cuts)]
    order = ranges[shift % cuts :] + ranges[: shift % cuts]
    parts = [Slice([start[a:b].clone()], [a], decayed, config) for a, b in order]
    for step in range(3):
        gradient = torch.randn(size, dtype=torch.float64)
        whole.update(gradient, step)
        for part, (a, b) in zip(parts, order, strict=True):
            part.update(gradient[a:b], step)
    for part, (a, b) in zip(parts, order, strict=True):
        assert torch.allclose(part.flat, whole.flat[a:b], rtol=0, atol=1e-14)


def test_only_the_front_of_a_buffer_decays() -> None:
    config = AdamW(learning_rate=0.1, weight_decay=0.5, warmup=1, steps=5)
    kept = Slice([torch.ones(6, dtype=torch.float64)], [0], 4, config)
    kept.update(torch.zeros(6, dtype=torch.float64), 0)
    assert torch.allclose(kept.flat, torch.tensor([0.95] * 4 + [1.0] * 2, dtype=torch.float64))


def test_a_slice_of_two_ranges_decays_each_where_it_lies() -> None:
    config = AdamW(learning_rate=0.1, weight_decay=0.5, warmup=1, steps=5)
    kept = Slice([torch.ones(2, dtype=torch.float64) for _ in range(2)], [0, 6], 7, config)
    kept.update(torch.zeros(4, dtype=torch.float64), 0)
    assert torch.allclose(kept.flat, torch.tensor([0.95, 0.95, 0.95, 1.0], dtype=torch.float64))
