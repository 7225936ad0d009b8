"""AdamW on a slice is AdamW on the parameters that lie in it."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute.optimizers.flat_slice import Slice
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language.precision import Optimizer
from tests.support.stepped import stepped


@given(st.integers(1, 6), st.integers(0, 60), st.integers(0, 5))
def test_slices_updated_apart_equal_the_whole_updated_at_once(cuts: int, decayed: int, shift: int) -> None:
    torch.manual_seed(cuts)
    size = 10 * cuts
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=1, schedule_steps=5)
    start = torch.randn(size, dtype=torch.float64)
    whole = Slice([start.clone()], [0], [(0, decayed)], config)
    ranges = [(10 * i, 10 * (i + 1)) for i in range(cuts)]
    order = ranges[shift % cuts :] + ranges[: shift % cuts]
    parts = [Slice([start[a:b].clone()], [a], [(0, decayed)], config) for a, b in order]
    for step in range(3):
        gradient = torch.randn(size, dtype=torch.float64)
        stepped(whole, gradient, step)
        for part, (a, b) in zip(parts, order, strict=True):
            stepped(part, gradient[a:b], step)
    for part, (a, b) in zip(parts, order, strict=True):
        assert torch.allclose(part.flat, whole.flat[a:b], rtol=0, atol=1e-14)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "muon"])
def test_a_layer_without_parameters_is_stepped(optimizer: Optimizer) -> None:
    empty = torch.empty(0)
    weight_slice = Slice([empty], [0], [], OptimizerConfig(optimizer, clip=1.0, ema=0.9))
    stepped(weight_slice, torch.empty(0, dtype=torch.bfloat16), 0, 4.0)
    weight_slice.make_moments(1)
    weight_slice.carry([torch.empty(0)])
    assert not len(weight_slice.flat)
    assert not weight_slice.moments


def test_only_the_front_of_a_buffer_decays() -> None:
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=1, schedule_steps=5)
    weight_slice = Slice([torch.ones(6, dtype=torch.float64)], [0], [(0, 4)], config)
    stepped(weight_slice, torch.zeros(6, dtype=torch.float64), 0)
    assert torch.allclose(weight_slice.flat, torch.tensor([0.95] * 4 + [1.0] * 2, dtype=torch.float64))


def test_a_slice_of_two_ranges_decays_each_where_it_lies() -> None:
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=1, schedule_steps=5)
    weight_slice = Slice([torch.ones(2, dtype=torch.float64) for _ in range(2)], [0, 6], [(0, 7)], config)
    stepped(weight_slice, torch.zeros(4, dtype=torch.float64), 0)
    assert torch.allclose(weight_slice.flat, torch.tensor([0.95, 0.95, 0.95, 1.0], dtype=torch.float64))


def test_every_decayed_run_decays() -> None:
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=1, schedule_steps=5)
    weight_slice = Slice([torch.ones(8, dtype=torch.float64)], [0], [(0, 1), (4, 6)], config)
    stepped(weight_slice, torch.zeros(8, dtype=torch.float64), 0)
    assert torch.allclose(weight_slice.flat, torch.tensor([0.95, 1, 1, 1, 0.95, 0.95, 1, 1], dtype=torch.float64))


def given_to_the_optimizer(
    weight_slice: Slice, gradient: torch.Tensor, squared_norm: float | None
) -> torch.Tensor | None:
    """The gradient that an update's optimizer sees; None if it sees none."""
    step_gradients: list[torch.Tensor] = []

    def step() -> None:
        gradients = [
            p.grad for optimizer in weight_slice.optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        step_gradients.append(torch.cat(gradients).clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_slice.optimizers[0], "step", step)
        stepped(weight_slice, gradient, 0, squared_norm)
    return step_gradients[0] if step_gradients else None


@given(st.floats(0.01, 100), st.integers(1, 20), st.floats(0, 1000))
def test_clipping_is_that_of_torch(clip: float, size: int, others: float) -> None:
    """`others` is the part of the squared norm that lies in other slices and layers."""
    torch.manual_seed(size)
    mine, theirs = torch.randn(size, dtype=torch.float64), torch.tensor([others**0.5], dtype=torch.float64)
    weight_slice = Slice([torch.zeros_like(mine)], [0], [(0, size)], OptimizerConfig(clip=clip))
    clipped = given_to_the_optimizer(weight_slice, mine, float(mine.square().sum() + theirs.square().sum()))
    parameters = [torch.zeros_like(tensor).requires_grad_() for tensor in (mine, theirs)]
    for parameter, gradient in zip(parameters, (mine, theirs), strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, clip)
    assert clipped is not None
    assert parameters[0].grad is not None
    assert torch.allclose(clipped, parameters[0].grad, rtol=1e-14, atol=0)
    assert float(clipped.norm()) <= clip


def test_a_small_gradient_and_one_without_a_limit_stay_as_they_are() -> None:
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for config in (OptimizerConfig(clip=5.1), OptimizerConfig()):
        weight_slice = Slice([torch.zeros_like(gradient)], [0], [], config)
        clipped = given_to_the_optimizer(weight_slice, gradient, 25.0)
        assert clipped is not None
        assert torch.equal(clipped, gradient)


@pytest.mark.parametrize("squared_norm", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_update_is_left_out_if_the_norm_is_not_finite(squared_norm: float, clip: float | None) -> None:
    weight_slice = Slice([torch.ones(4, dtype=torch.float64)], [0], [(0, 4)], OptimizerConfig(clip=clip))
    stepped(weight_slice, torch.ones(4, dtype=torch.float64), 0, squared_norm)
    assert torch.equal(weight_slice.flat, torch.ones(4, dtype=torch.float64))
    assert not weight_slice.moments


def test_an_update_writes_where_the_weights_lie() -> None:
    whole = torch.ones(8, dtype=torch.float64)
    weight_slice = Slice([whole[2:4], whole[6:7]], [2, 6], [(0, 8)], OptimizerConfig(learning_rate=0.1, warmup_steps=1))
    stepped(weight_slice, torch.ones(3, dtype=torch.float64), 0)
    assert [i for i, w in enumerate(whole) if w != 1] == [2, 3, 6]
