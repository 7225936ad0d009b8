"""Learning rates over a run."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.execute.optimizers.flat_slice import torch_optimizers
from shardlab.execute.optimizers.settings import (
    CALM,
    FIRST,
    USED_WITH,
    LossScale,
    OptimizerConfig,
    Schedule,
    rate_factor,
)
from shardlab.language import UserError
from shardlab.language.precision import Optimizer

SCHEDULES: tuple[Schedule, ...] = ("cosine", "linear", "wsd", "constant")


def rates(optimizer: OptimizerConfig, *steps: int) -> list[float]:
    return [optimizer.rate(step) for step in steps]


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_learning_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(UserError, match="learning_rate is"):
        OptimizerConfig(learning_rate=rate)


def test_the_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, schedule_steps=104)
    assert rates(config, 0, 1, 2, 3) == [0.25, 0.5, 0.75, 1.0]
    assert rates(config, 54, 104, 1000) == pytest.approx([0.55, 0.1, 0.1])


def test_cosine_is_that_of_nanogpt() -> None:
    """Its get_lr, with lr_decay_iters 2000, min_lr a tenth and 100 warm-up steps, which it begins a little lower."""
    config = OptimizerConfig(learning_rate=1e-3, warmup_steps=100, schedule_steps=2000)
    for step in (100, 500, 1999):
        expected = 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / 1900)) * 9e-4
        assert config.rate(step) == pytest.approx(expected, rel=1e-12)


def test_linear_is_that_of_torch() -> None:
    config = OptimizerConfig(
        learning_rate=1.0,
        learning_rate_schedule="linear",
        warmup_steps=0,
        schedule_steps=10,
        min_learning_rate_ratio=0.2,
    )
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=10)
    for step in range(12):
        assert config.rate(step) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_wsd_is_stable_until_its_last_tenth_and_then_decays_exponentially() -> None:
    config = OptimizerConfig(learning_rate=1.0, learning_rate_schedule="wsd", warmup_steps=10, schedule_steps=200)
    assert rates(config, 9, 10, 100, 180) == [1.0] * 4
    assert rates(config, 190, 200) == pytest.approx([math.sqrt(0.1), 0.1])


def test_a_decay_may_be_shorter_than_the_rest_of_the_schedule() -> None:
    config = OptimizerConfig(
        learning_rate=1.0, learning_rate_schedule="linear", warmup_steps=2, decay_steps=4, schedule_steps=10,
        min_learning_rate_ratio=0.0,
    )  # fmt: skip
    assert rates(config, 5, 6, 8, 10) == [1.0, 1.0, 0.5, 0.0]


def test_constant_stays() -> None:
    config = OptimizerConfig(learning_rate=1.0, learning_rate_schedule="constant", warmup_steps=1)
    assert rates(config, 0, 199, 10_000) == [1.0] * 3


@given(st.sampled_from(SCHEDULES), st.integers(0, 50), st.integers(1, 200), st.integers(0, 200), st.floats(0.01, 1))
def test_every_schedule_rises_then_falls_between_its_bounds(
    schedule: Schedule, warmup: int, other_steps: int, decay: int, lowest: float
) -> None:
    steps = warmup + other_steps
    factors = [rate_factor(schedule, step, steps, warmup, min(decay, other_steps), lowest) for step in range(steps + 3)]
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[-1] == pytest.approx(1.0 if schedule == "constant" or not decay else lowest)


@pytest.mark.parametrize(
    ("name", "value"), [("betas", (0.5, 0.95)), ("betas", (0.9, 0.5)), ("momentum", 0.5), ("eps", 0.1)]
)
@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_an_optimizer_uses_the_settings_of_its_rows(optimizer: Optimizer, name: str, value: Any) -> None:
    def trained(config: OptimizerConfig) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [torch.randn(4, 4), torch.randn(4), torch.randn(4, 4)]
        matrices = weights[2:] if config.optimizer == "muon" else []
        decayed = weights[:1] if matrices else [weights[0], weights[2]]
        optimizers = torch_optimizers(config, decayed, weights[1:2], matrices, fused=False)
        for _ in range(9):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            for tensor_optimizer in optimizers:
                tensor_optimizer.step()
        return weights

    default = OptimizerConfig(optimizer, learning_rate=0.1)
    changed = replace(default, **{name: value})
    is_same = all(map(torch.equal, trained(default), trained(changed)))
    assert USED_WITH[name][0] == "optimizer"
    assert is_same == (optimizer not in USED_WITH[name][1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_uses_the_settings_of_its_rows(schedule: Schedule) -> None:
    default = OptimizerConfig(learning_rate_schedule=schedule)
    (name,) = (name for name, (decider, _) in USED_WITH.items() if decider == "learning_rate_schedule")
    is_same = rates(default, *range(200)) == rates(replace(default, **{name: 0.5}), *range(200))
    assert is_same == (schedule not in USED_WITH[name][1])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"warmup_steps": 201}, "warmup_steps is 201, but the learning rate's schedule has 200 steps"),
        ({"warmup_steps": 150, "decay_steps": 100}, "warmup_steps is 150 and decay_steps is 100, but the learning"),
        ({"learning_rate_schedule": "constant", "decay_steps": 9}, "constant has no decay, but decay_steps is 9"),
        ({"learning_rate_schedule": "wsd", "min_learning_rate_ratio": 0}, "never comes down to a min_learning_rate"),
        ({"learning_rate_schedule": "sine"}, "is 'sine'; give one of cosine, linear, wsd, constant"),
        ({"betas": (0.9, 1.0)}, "betas is 0.9, 1.0; give two numbers from 0 up to but not including 1"),
        ({"eps": 0.0}, "eps is 0.0; give a positive number"),
        ({"clip": -1.0}, "clip is -1.0; give a positive norm, or none at all"),
    ],
)
def test_settings_that_cannot_be_or_contradict_each_other_are_one_sentence(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as refusal:
        OptimizerConfig(**fields)
    assert sentence in str(refusal.value)


# The scale of losses in float16.


def test_an_overflow_halves_the_scale_and_calm_doubles_it() -> None:
    scale = LossScale()
    scale.update(finite=False)
    assert scale.scale == FIRST / 2
    for _ in range(CALM - 1):
        scale.update(finite=True)
    assert scale.scale == FIRST / 2
    scale.update(finite=True)
    assert scale.scale == FIRST
    assert scale.calm == 0


@given(st.lists(st.booleans(), max_size=50))
def test_the_scale_is_a_power_of_two(steps: list[bool]) -> None:
    """So that it rounds nothing."""
    scale = LossScale()
    for finite in steps:
        scale.update(finite)
    assert scale.scale == FIRST / 2 ** steps.count(False)
