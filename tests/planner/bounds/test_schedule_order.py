"""Orders of work are timed as pipelines run: closed forms, and no slower than forecasts."""

from __future__ import annotations

import numpy as np
import pytest

from shardlab.planner.bounds.schedule_order import LaidOrder
from shardlab.strategies.schedules.find import find_schedule
from shardlab.strategies.schedules.steps import resolve_schedule


def laid(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> LaidOrder:
    return LaidOrder(resolve_schedule(find_schedule(name), ranks, microbatches, stages_per_rank))


def timed(order: LaidOrder, *passes: float, message: float = 0.0, blocks: float = 0.0) -> float:
    """Seconds of all passes; of a forward pass, a backward pass, and the halves of that."""
    stages = int(order.stage.max()) + 1
    times = order.times(np.array(passes)[order.kind], np.full((2, stages), message), blocks)
    return float(times.done.max())


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipeline_takes_its_microbatches_and_a_bubble_of_one_for_each_rank_but_one(name: str) -> None:
    assert timed(laid(name, 4, 8), 1.0, 2.0, 1.0, 1.0) == (8 + 3) * 3


def test_several_stages_on_a_rank_shorten_the_bubble() -> None:
    assert timed(laid("interleaved-1f1b", 4, 8, 2), 1.0, 2.0, 1.0, 1.0) == 2 * 8 * 3 + 3 * 3


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_vee_with_split_backward_passes_has_a_smaller_bubble_than_stages_in_a_loop(name: str) -> None:
    work = 2 * 16 * 3
    looped = timed(laid("interleaved-1f1b", 4, 16, 2), 1.0, 2.0, 1.0, 1.0)
    assert work <= timed(laid(name, 4, 16, 2), 1.0, 2.0, 1.0, 1.0) < looped == work + 3 * 3


def test_messages_are_waited_for_on_the_way_up_and_down() -> None:
    """The first microbatch alone, or with sends that stop their sender."""
    assert timed(laid("1f1b", 4, 1), 1.0, 2.0, 1.0, 1.0, message=0.25) == 4 * 3 + 6 * 0.25
    order = laid("gpipe", 2, 8)
    free, blocked = (timed(order, 1.0, 2.0, 1.0, 1.0, message=0.25, blocks=blocks) for blocks in (0.0, 1.0))
    assert blocked > free


def test_passes_are_told_apart_by_what_came_before_them() -> None:
    order = laid("interleaved-1f1b", 2, 4, 2)
    passes = 2 * 4 * 4
    assert len(order.kind) == passes
    assert order.begins.sum() == 2
    assert order.opens.sum() == 4
    assert order.sums.sum() == passes // 2 - 4
    times = order.times(np.ones(passes), np.zeros((2, 4)))
    assert (times.last < times.done.max()).all()
    assert (times.first > 0).all()


def test_passes_of_different_lengths_are_timed_together_as_one_by_one() -> None:
    order = laid("interleaved-1f1b", 4, 8, 2)
    each = [np.random.default_rng(seed).random(len(order.kind)) for seed in range(3)]
    messages = np.random.default_rng(3).random((2, 8))
    for seconds, together in zip(each, order.all_times(each, messages, 0.5), strict=True):
        for alone, among in zip(order.times(seconds, messages, 0.5), together, strict=True):
            assert (alone == among).all()
