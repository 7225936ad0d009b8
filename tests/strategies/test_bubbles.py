"""Bubbles that were published: the Zero Bubble paper's Table 5 follows from the times in its Table 9."""

from __future__ import annotations

import pytest

from shardlab.strategies.schedules import SCHEDULES
from tests.strategies.action_clock import PassTimes, cost

PUBLISHED = [
    # Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), Table 9: stages, microbatches, in ms the forward, the
    # two halves of the backward, and a message; then Table 5: bubble rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2
    (8, 24, PassTimes(18.522, 18.086, 9.337, 0.601), 0.2431, 0.1055, 0.1585, 0.1083),
    (8, 32, PassTimes(18.513, 18.086, 9.331, 0.626), 0.1985, 0.0818, 0.1242, 0.0837),
    (8, 64, PassTimes(18.546, 18.097, 9.321, 0.762), 0.1240, 0.0443, 0.0674, 0.0444),
    (16, 48, PassTimes(11.347, 11.248, 8.132, 0.377), 0.2552, 0.1104, 0.1397, 0.0672),
    (16, 64, PassTimes(11.307, 11.254, 8.101, 0.379), 0.2082, 0.0852, 0.1088, 0.0516),
    (16, 128, PassTimes(11.325, 11.308, 8.109, 0.378), 0.1251, 0.0445, 0.0576, 0.0266),
]


def bubble(name: str, ranks: int, microbatches: int, stages_per_rank: int, times: PassTimes) -> float:
    """The paper's bubble rate; each of a rank's stages takes its part of the times."""
    part = PassTimes(
        times.forward / stages_per_rank,
        times.backward_input / stages_per_rank,
        times.backward_weight / stages_per_rank,
        times.latency,
    )
    total = cost(SCHEDULES[name], ranks, microbatches, stages_per_rank, part)
    return 1 - microbatches * (times.forward + times.backward_input + times.backward_weight) / total


@pytest.mark.parametrize(("ranks", "microbatches", "times", "plain", "interleaved", "h1", "h2"), PUBLISHED)
def test_the_zero_bubble_papers_table_follows_from_its_times(
    ranks: int, microbatches: int, times: PassTimes, plain: float, interleaved: float, h1: float, h2: float
) -> None:
    assert round(bubble("1f1b", ranks, microbatches, 1, times), 4) == plain
    assert round(bubble("zb-h1", ranks, microbatches, 1, times), 4) == h1
    assert round(bubble("zb-h2", ranks, microbatches, 1, times), 4) == h2
    # in the paper every layer is a stage, 3 on a rank but 2 on the first and the last: nearly 3 equal ones (section 5.1)
    assert bubble("interleaved-1f1b", ranks, microbatches, 3, times) == pytest.approx(interleaved, abs=0.004)
