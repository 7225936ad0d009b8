"""Schedules are those of the figures of their papers: the microbatches that each rank takes, in order."""

from __future__ import annotations

import pytest

from shardlab.strategies.schedules import SCHEDULES

FIGURES = {
    # Qi et al. 2023, arXiv 2401.10241: 4 ranks, 8 microbatches, counted from 1
    "zb-h1": [  # fig. 3, top
        "1 2 3 4 1 1 5 2 2 6 3 3 7 4 4 8 5 5 6 6 7 7 8 8",
        "1 2 3 1 4 2 1 5 3 2 6 4 3 7 5 4 8 6 5 7 6 8 7 8",
        "1 2 1 3 2 4 3 1 5 4 2 6 5 3 7 6 4 8 7 5 8 6 7 8",
        "1 1 2 2 3 3 4 4 1 5 5 2 6 6 3 7 7 4 8 8 5 6 7 8",
    ],
    "zb-h2": [  # fig. 3, bottom
        "1 2 3 4 5 6 7 1 1 8 2 2 3 3 4 4 5 5 6 6 7 7 8 8",
        "1 2 3 4 5 1 6 2 7 3 1 8 4 2 5 3 6 4 7 5 8 6 7 8",
        "1 2 3 1 4 2 5 3 6 4 7 5 1 8 6 2 7 3 8 4 5 6 7 8",
        "1 1 2 2 3 3 4 4 5 5 6 6 7 7 1 8 8 2 3 4 5 6 7 8",
    ],
    "zb-v": [  # fig. 8
        "1 2 3 4 5 6 7 1 1 1 2 2 2 3 3 3 4 4 4 8 1 1 5 5 5 2 2 6 6 6 3 3 7 7 7 4 4 8 8 8 5 5 6 6 7 7 8 8",
        "1 2 3 4 5 1 6 2 1 1 3 2 2 4 3 3 7 1 1 5 4 4 8 2 2 6 5 5 3 3 7 6 6 4 4 8 7 7 5 8 6 5 7 8 8 6 7 8",
        "1 2 3 1 4 2 5 3 1 1 4 2 2 6 1 1 5 3 3 7 2 2 6 4 4 8 3 3 7 5 5 4 4 8 6 6 5 7 6 8 7 5 8 7 6 8 7 8",
        "1 1 2 2 3 3 4 4 1 1 5 1 1 5 2 2 6 2 2 6 3 3 7 3 3 7 4 4 8 4 4 8 5 5 5 6 6 7 7 8 8 5 6 6 7 7 8 8",
    ],
}


@pytest.mark.parametrize("name", FIGURES)
def test_each_rank_takes_the_microbatches_of_the_figure_in_its_order(name: str) -> None:
    schedule = SCHEDULES[name]
    for rank, row in enumerate(FIGURES[name]):
        actions = schedule.actions(rank, 4, 8, schedule.stages_per_rank or 1)
        assert [action.microbatch + 1 for action in actions] == [int(word) for word in row.split()]
