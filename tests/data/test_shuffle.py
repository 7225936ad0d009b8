"""Shuffles that are computed number by number are permutations, other ones in every epoch and for every seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data.shuffle import shuffled


def order(size: int, seed: int = 0, epoch: int = 0, purpose: str = "test") -> list[int]:
    return shuffled(np.arange(size), size, purpose, seed, np.full(size, epoch)).tolist()


@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
def test_every_number_comes_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(order(size, seed, epoch)) == list(range(size))


def test_other_epochs_seeds_and_purposes_have_other_orders() -> None:
    orders = [order(100), order(100, epoch=1), order(100, seed=1), order(100, purpose="other")]
    assert len({tuple(each) for each in orders}) == 4
    assert order(100) == orders[0]


def test_each_number_is_computed_alone() -> None:
    whole = order(1000, epoch=3)
    some = np.array([7, 999, 0])
    assert shuffled(some, 1000, "test", 0, np.full(3, 3)).tolist() == [whole[number] for number in some]


def test_trillions_of_numbers_need_no_table() -> None:
    numbers = np.arange(10**12, 10**12 + 1000)
    found = shuffled(numbers, 3 * 10**12 + 7, "test", 0, np.zeros(1000, np.int64))
    assert len(set(found.tolist())) == 1000
    assert 0 <= found.min() <= found.max() < 3 * 10**12 + 7
    assert found.std() > 10**11


def test_every_order_of_three_comes_about_as_often_as_any_other() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6000):
        each = tuple(order(3, epoch=epoch))
        counts[each] = counts.get(each, 0) + 1
    assert len(counts) == 6
    assert max(counts.values()) < 1.25 * min(counts.values())


def test_neighbours_do_not_stay_neighbours() -> None:
    found = np.array(order(4096))
    assert np.mean(np.abs(np.diff(found)) == 1) < 0.01
    assert abs(np.corrcoef(np.arange(4096), found)[0, 1]) < 0.06
