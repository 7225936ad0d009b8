"""Several sources come by turns in the ratio of their weights, each of its sequences once an epoch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.train.data.stream import LOCATED, SequenceStream, TokenRun, shares_from_weights, shuffle

SEQ_LEN = 4


def stream_of(sequences: list[int], shares: list[int]) -> SequenceStream:
    """Sources of so many sequences; token t of source s is 10,000 s + t."""
    runs = [TokenRun(np.arange(SEQ_LEN * count + 1, dtype=np.uint32) + 10_000 * s) for s, count in enumerate(sequences)]
    return SequenceStream(tuple(runs), tuple(shares))


def drawn(stream: SequenceStream, count: int, seed: int | None) -> list[tuple[int, int]]:
    """DataSource and place of the first sequences."""
    tokens, targets = stream.cut(np.arange(count), SEQ_LEN, seed)
    assert (targets == tokens + 1).all()
    return [divmod(int(first), 10_000) for first in tokens[:, 0]]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=4), st.integers(0, 99) | st.none()
)
def test_each_source_has_its_share_and_all_its_sequences_come_equally_often(
    sources: list[tuple[int, int]], seed: int | None
) -> None:
    sequences, shares = [list(column) for column in zip(*sources, strict=True)]
    turns = 12
    pairs = drawn(stream_of(sequences, shares), turns * sum(shares), seed)
    assert Counter(source for source, _ in pairs) == {s: turns * share for s, share in enumerate(shares)}
    for source, count in enumerate(sequences):
        places = Counter(place // SEQ_LEN for number, place in pairs if number == source)
        often = [places[number] for number in range(count)]
        assert max(often) - min(often) <= 1


@given(st.lists(st.integers(0, 3 * LOCATED), max_size=6), st.integers(0, 99) | st.none(), st.integers(1, 3))
def test_a_sequence_is_the_same_alone_and_with_others(numbers: list[int], seed: int | None, share: int) -> None:
    sequences, shares = [50, 7], [share, 2]
    tokens, targets = stream_of(sequences, shares).cut(np.array(numbers, np.int64), SEQ_LEN, seed)
    stream = stream_of(sequences, shares)
    for number, *row in zip(numbers, tokens, targets, strict=True):
        for together, alone in zip(row, stream.cut(np.array([number]), SEQ_LEN, seed), strict=True):
            assert (together == alone[0]).all()


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.sets(st.integers(1, 20)),
    st.sampled_from([np.uint8, np.uint16, np.int64]),
)
def test_targets_are_the_next_tokens_but_where_a_document_begins(
    numbers: list[int], starts: set[int], dtype: Any
) -> None:
    run = TokenRun(np.arange(100, 121).astype(dtype), np.array(sorted(starts), np.int64))
    tokens, targets = run.cut(np.array(numbers), SEQ_LEN)
    for number, row, next_tokens in zip(numbers, tokens.tolist(), targets.tolist(), strict=True):
        places = range(number * SEQ_LEN, (number + 1) * SEQ_LEN)
        assert row == [100 + place for place in places]
        assert next_tokens == [-1 if place + 1 in starts else 101 + place for place in places]


def test_epochs_have_other_orders() -> None:
    stream = stream_of([50], [1])
    places = [place for _, place in drawn(stream, 150, seed=1)]
    assert len({tuple(places[start : start + 50]) for start in (0, 50, 100)}) == 3


def test_epochs_are_counted_for_each_source() -> None:
    assert stream_of([10, 40], [1, 4]).epochs(100, SEQ_LEN) == [2.0, 2.0]
    assert stream_of([10, 40], [1, 1]).epochs(100, SEQ_LEN) == [5.0, 1.25]


def test_no_sequence_comes_twice_in_one_pass_of_the_smallest_source() -> None:
    stream = stream_of([10, 40], [1, 1])
    assert stream.sequences_before_repeat(SEQ_LEN) == 20
    assert len(set(drawn(stream, 20, None))) == 20


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((0.7, 0.3), (7, 3)),
        ((1, 1), (1, 1)),
        ((5, 3, 2), (5, 3, 2)),
        ((1, 2), (333, 667)),
        ((1, 1e-5), (1, 0)),
        ((3,), (1,)),
    ],
)
def test_weights_become_the_smallest_whole_numbers(weights: tuple[float, ...], shares: tuple[int, ...]) -> None:
    assert shares_from_weights(weights) == shares


# Shuffles that are computed number by number are permutations, other ones in every epoch and for every seed.


def order(size: int, seed: int = 0, epoch: int = 0, purpose: str = "test") -> list[int]:
    return shuffle(np.arange(size), size, purpose, seed, np.full(size, epoch)).tolist()


@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
def test_every_number_comes_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(order(size, seed, epoch)) == list(range(size))


def test_other_epochs_seeds_and_purposes_have_other_orders() -> None:
    orders = [order(100), order(100, epoch=1), order(100, seed=1), order(100, purpose="other")]
    assert len({tuple(numbers) for numbers in orders}) == 4
    assert order(100) == orders[0]


def test_each_number_is_computed_alone() -> None:
    whole = order(1000, epoch=3)
    some = np.array([7, 999, 0])
    assert shuffle(some, 1000, "test", 0, np.full(3, 3)).tolist() == [whole[number] for number in some]


def test_trillions_of_numbers_need_no_table() -> None:
    numbers = np.arange(10**12, 10**12 + 1000)
    shuffled = shuffle(numbers, 3 * 10**12 + 7, "test", 0, np.zeros(1000, np.int64))
    assert len(set(shuffled.tolist())) == 1000
    assert 0 <= shuffled.min() <= shuffled.max() < 3 * 10**12 + 7
    assert shuffled.std() > 10**11


def test_every_order_of_three_comes_about_as_often_as_any_other() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(6000):
        numbers = tuple(order(3, epoch=epoch))
        counts[numbers] = counts.get(numbers, 0) + 1
    assert len(counts) == 6
    assert max(counts.values()) < 1.25 * min(counts.values())


def test_neighbours_do_not_stay_neighbours() -> None:
    numbers = np.array(order(4096))
    assert np.mean(np.abs(np.diff(numbers)) == 1) < 0.01
    assert abs(np.corrcoef(np.arange(4096), numbers)[0, 1]) < 0.06
