"""Bubble rates that were published with the times that they follow from."""

from __future__ import annotations

from typing import NamedTuple

from tests.strategies.action_clock import PassTimes


class Row(NamedTuple):
    """One setting: sizes, times in ms, and the bubble rate of each schedule."""

    ranks: int
    layers_per_rank: int
    microbatches: int
    times: PassTimes
    rates: dict[str, float]


def row(ranks: int, layers_per_rank: int, microbatches: int, times: PassTimes, *rates: float) -> Row:
    names = ["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2"]
    return Row(ranks, layers_per_rank, microbatches, times, dict(zip(names, rates, strict=True)))


TABLE = [
    # Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), tables 3 (layers; the first and the last rank have
    # one fewer), 9 (times: forward, the halves of the backward, a message) and 5 (rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2)
    row(8, 3, 24, PassTimes(18.522, 18.086, 9.337, 0.601), 0.2431, 0.1055, 0.1585, 0.1083),
    row(8, 3, 32, PassTimes(18.513, 18.086, 9.331, 0.626), 0.1985, 0.0818, 0.1242, 0.0837),
    row(8, 3, 64, PassTimes(18.546, 18.097, 9.321, 0.762), 0.1240, 0.0443, 0.0674, 0.0444),
    row(8, 4, 24, PassTimes(29.718, 29.444, 19.927, 0.527), 0.2347, 0.0808, 0.1323, 0.0698),
    row(8, 4, 32, PassTimes(29.802, 29.428, 19.530, 0.577), 0.1898, 0.0628, 0.1045, 0.0559),
    row(8, 4, 64, PassTimes(29.935, 29.621, 19.388, 0.535), 0.1091, 0.0320, 0.0554, 0.0294),
    row(16, 3, 48, PassTimes(11.347, 11.248, 8.132, 0.377), 0.2552, 0.1104, 0.1397, 0.0672),
    row(16, 3, 64, PassTimes(11.307, 11.254, 8.101, 0.379), 0.2082, 0.0852, 0.1088, 0.0516),
    row(16, 3, 128, PassTimes(11.325, 11.308, 8.109, 0.378), 0.1251, 0.0445, 0.0576, 0.0266),
    row(32, 2, 96, PassTimes(10.419, 10.207, 7.715, 0.408), 0.2646, 0.1493, 0.1421, 0.0641),
    row(32, 2, 128, PassTimes(10.408, 10.204, 7.703, 0.408), 0.2168, 0.1164, 0.1106, 0.0490),
    row(32, 2, 256, PassTimes(10.402, 10.248, 7.698, 0.460), 0.1352, 0.0624, 0.0594, 0.0257),
]
