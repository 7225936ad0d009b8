"""Who waits for whom, in a sentence."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardlab.program.waiting import Wait, explain


def test_a_cycle_is_named_whole() -> None:
    waits = {0: Wait("a for rank 2", [2]), 1: Wait("b for rank 0", [0]), 2: Wait("c for rank 1", [1])}
    assert explain(waits) == (
        "deadlock: rank 0 waits in a for rank 2; rank 2 waits in c for rank 1; rank 1 waits in b for rank 0."
    )


def test_ranks_on_the_way_to_a_cycle_are_counted_not_listed() -> None:
    waits = {0: Wait("a", [1]), 1: Wait("b", [2]), 2: Wait("c", [1])}
    assert explain(waits) == "deadlock: rank 1 waits in b; rank 2 waits in c (1 more rank waits behind them)."


def test_several_ranks_behind_are_counted_in_the_plural() -> None:
    waits = {0: Wait("a", [1]), 1: Wait("b", [0]), 2: Wait("c", [0]), 3: Wait("d", [2])}
    assert explain(waits) == "deadlock: rank 0 waits in a; rank 1 waits in b (2 more ranks wait behind them)."


def test_a_chain_ends_at_the_rank_that_has_ended() -> None:
    waits = {0: Wait("a", [1]), 1: Wait("b", [3])}
    assert explain(waits) == "deadlock: rank 0 waits in a; rank 1 waits in b; rank 3 has ended without it."


def test_a_blocker_that_has_ended_is_the_cause_before_one_that_waits() -> None:
    waits = {0: Wait("a", [1, 2]), 1: Wait("b", [0])}
    assert explain(waits) == (
        "deadlock: rank 0 waits in a; rank 2 has ended without it (1 more rank waits behind them)."
    )


def test_a_rank_may_wait_for_itself() -> None:
    assert explain({4: Wait("a", [4])}) == "deadlock: rank 4 waits in a."


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 9), min_size=1))
def test_every_waiting_rank_is_shown_or_counted_and_the_links_follow(blocker: dict[int, int]) -> None:
    text = explain({rank: Wait(f"w{rank} for {to}", [to]) for rank, to in blocker.items()})
    body, _, after = text.removeprefix("deadlock: ").removesuffix(".").partition(" (")
    sentences = body.split("; ")
    ended = sentences.pop() if sentences[-1].endswith("has ended without it") else None
    shown = [int(sentence.split()[1]) for sentence in sentences]
    assert len(set(shown)) == len(shown)
    assert all(blocker[a] == b for a, b in itertools.pairwise(shown))
    assert len(shown) + (int(after.split()[0]) if after else 0) == len(blocker)
    if ended is None:
        assert blocker[shown[-1]] == shown[0], "a cycle closes"
    else:
        assert blocker[shown[-1]] == int(ended.split()[1]) not in blocker
