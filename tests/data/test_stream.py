"""Several sources come by turns in the ratio of their weights, each of its sequences once an epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.data.stream import SequenceStream, TokenRun, shares_of

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
    sequences, shares = [list(each) for each in zip(*sources, strict=True)]
    turns = 12
    found = drawn(stream_of(sequences, shares), turns * sum(shares), seed)
    assert Counter(source for source, _ in found) == {s: turns * share for s, share in enumerate(shares)}
    for source, count in enumerate(sequences):
        places = Counter(place // SEQ_LEN for each, place in found if each == source)
        often = [places[number] for number in range(count)]
        assert max(often) - min(often) <= 1


def test_epochs_have_other_orders() -> None:
    stream = stream_of([50], [1])
    found = [place for _, place in drawn(stream, 150, seed=1)]
    assert len({tuple(found[start : start + 50]) for start in (0, 50, 100)}) == 3


def test_epochs_are_counted_for_each_source() -> None:
    assert stream_of([10, 40], [1, 4]).epochs(100, SEQ_LEN) == [2.0, 2.0]
    assert stream_of([10, 40], [1, 1]).epochs(100, SEQ_LEN) == [5.0, 1.25]


def test_no_sequence_comes_twice_in_one_pass_of_the_smallest_source() -> None:
    stream = stream_of([10, 40], [1, 1])
    assert stream.once(SEQ_LEN) == 20
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
    assert shares_of(weights) == shares
