"""Bubble rates that were published with the times that they follow from."""

from __future__ import annotations

from typing import NamedTuple

from tests.strategies.action_clock import PassTimes


class Row(NamedTuple):
    """One setting: sizes, times in ms, and the bubble rate of each schedule."""

    ranks: int
    microbatches: int
    times: PassTimes
    rates: dict[str, float]


def row(ranks: int, microbatches: int, times: PassTimes, *rates: float) -> Row:
    return Row(
        ranks, microbatches, times, dict(zip(["1f1b", "interleaved-1f1b", "zb-h1", "zb-h2"], rates, strict=True))
    )


TABLE = [
    # Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024, arXiv 2401.10241), tables 9 (times: forward, the halves of
    # the backward, a message) and 5 (rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2)
    row(8, 24, PassTimes(18.522, 18.086, 9.337, 0.601), 0.2431, 0.1055, 0.1585, 0.1083),
    row(8, 32, PassTimes(18.513, 18.086, 9.331, 0.626), 0.1985, 0.0818, 0.1242, 0.0837),
    row(8, 64, PassTimes(18.546, 18.097, 9.321, 0.762), 0.1240, 0.0443, 0.0674, 0.0444),
    row(16, 48, PassTimes(11.347, 11.248, 8.132, 0.377), 0.2552, 0.1104, 0.1397, 0.0672),
    row(16, 64, PassTimes(11.307, 11.254, 8.101, 0.379), 0.2082, 0.0852, 0.1088, 0.0516),
    row(16, 128, PassTimes(11.325, 11.308, 8.109, 0.378), 0.1251, 0.0445, 0.0576, 0.0266),
]
