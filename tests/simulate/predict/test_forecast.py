"""A step's time and memory, told by less than all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from shardlab.language import Kind, Mesh, Op, OpKind, Sizes, Spec
from shardlab.language.precision import find_precision
from shardlab.models import GPT
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.estimate import estimate
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.predict.forecast import (
    LEAST_EFFECT,
    extrapolate,
    forecast,
    microbatches_to_replay,
    switch_effects,
)
from shardlab.simulate.predict.recipe import Kernels, Recipe, find_recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from tests.simulate.timeline.fakes import FakePrices
from tests.support.thorough import sampled

SHARES = {OpKind.BACKWARD: 2.0, OpKind.BACKWARD_WEIGHT: 0.9, OpKind.LOSS: 0.1, OpKind.UPDATE: 0.1}
"""What an op takes, if a forward pass takes 1."""


@dataclass(frozen=True)
class StagePrices(FakePrices):
    """Stages of one layer, the first and the last with times of their own."""

    last: int = 0
    ends: tuple[float, float] = (1.0, 1.0)
    message: float = 0.03
    adds_in_backward: bool = True

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        stage = {0: self.ends[0], self.last: self.ends[1]}.get(op.layer, 1.0)
        return stage * SHARES.get(op.kind, 1.0) if op.inputs else 0.0

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        return self.message, self.message


SCHEDULES = [
    ("1f1b", 1),
    ("interleaved-1f1b", 3),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("v-half", 2),
    ("v-min", 2),
    ("dualpipe-v", 2),
]
ENDS = [(1.0, 1.0), (1.0, 1.5), (0.7, 0.7)]


@pytest.mark.parametrize(
    ("blocks", "ends", "schedule", "chunks"),
    sampled(
        [(blocks, ends, *schedule) for schedule in SCHEDULES for ends in ENDS for blocks in (0.0, 1.0)],
        lambda case: (case[0], case[1]) in ((0.0, ENDS[1]), (1.0, ENDS[2])),
    ),
)
def test_a_few_microbatches_tell_the_time_of_many(
    blocks: float, ends: tuple[float, float], schedule: str, chunks: int
) -> None:
    plan, count = Plan(Mesh(pp=4), schedule, stages_per_rank=chunks), 44
    layers = 4 * chunks
    prices = StagePrices(last=layers - 1, ends=ends, blocking_p2p=blocks)

    def step(microbatches: int) -> float:
        return estimate(fold(plan, Sizes.puzzle(layers), microbatches), prices).step

    shorter, extra = microbatches_to_replay(plan, count)
    assert 2 * shorter + extra < count
    assert extrapolate(step(shorter), step(shorter + extra), (count - shorter) / extra) == pytest.approx(
        step(count), rel=1e-3
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_all_of_a_few_microbatches_are_replayed(schedule: str) -> None:
    assert microbatches_to_replay(Plan(Mesh(pp=4), schedule), 12) == (12, 0)


def test_what_a_step_takes_beside_its_ops_is_counted_once() -> None:
    plan, devices = Plan(Mesh(pp=2, dp_shard=2)), find_cluster("h100x4")
    step = Workload(plan, GPT(), devices, 64, 1, find_precision("bf16"), recipe=Recipe())
    slow = replace(step, recipe=Recipe(kernels=Kernels(step_seconds=0.5)))
    assert forecast(slow).seconds == pytest.approx(forecast(step).seconds + 0.5)


def test_the_switches_that_matter_are_named_with_their_effect() -> None:
    """Each is the time of the step with that value, over its time now."""
    plan = Plan(Mesh(dp_shard=8), shard_parameters=("dp_shard",), shard_optimizer=("dp_shard",))
    model = GPT(layers=4, hidden_size=1024, heads=8, seq_len=4096, vocab_size=50304)
    recipe = find_recipe("torchtitan")
    step = Workload(plan, model, find_cluster("h100x8"), 16, 1, find_precision("bf16"), recipe=recipe)
    seconds = forecast(step).seconds
    effects = {(effect.name, effect.value): effect for effect in switch_effects(step, seconds)}
    slower = forecast(replace(step, recipe=find_recipe("torchtitan", {"attention": "flash2"}))).seconds
    assert effects["attention", "flash2"].change == pytest.approx(slower / seconds - 1)
    assert effects["attention", "flash2"].now == "cudnn"
    assert ("async_tp", "on") not in effects, "there is no tensor parallelism"
    assert all(abs(effect.change) >= LEAST_EFFECT for effect in effects.values())


def test_a_recipe_without_switches_has_no_effects() -> None:
    model = GPT(layers=2, hidden_size=64, heads=2, seq_len=64, vocab_size=256)
    step = Workload(Plan(Mesh(dp_shard=2)), model, find_cluster("h100x2"), 2, 1, find_precision("bf16"))
    assert switch_effects(step, forecast(step).seconds) == []
