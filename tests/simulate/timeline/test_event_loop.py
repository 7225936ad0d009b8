"""The event loop: communications start in the order of time, and waits cost what communication takes from compute."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.simulate.timeline.event_loop import (
    PENDING,
    EventLoop,
    IdleLog,
    IdlePattern,
    StartEnd,
)


class Messages(EventLoop[str]):
    """Rows that join messages of one second at given moments, and wait for each.

    Attributes:
        rows: for each row the names of messages, each with the seconds that the row computes before it joins.
    """

    def __init__(self, *rows: list[tuple[str, float]]) -> None:
        super().__init__(len(rows), 0.0, NO_LAG)
        self.rows = rows
        self.joined: list[dict[str, StartEnd]] = [{} for _ in rows]

    def advance(self, row: int, now: float) -> None:
        clock = self.clocks[row]
        for at in range(self.next_ops[row], len(self.rows[row])):
            name, seconds = self.rows[row][at]
            if name not in self.joined[row]:
                clock += seconds
                self.joined[row][name] = self.join(name, 2, row, clock).times
            times = self.joined[row][name]
            if times[1] == PENDING:
                self.wait(row, at, clock, times)
                return
            clock = max(clock, times[1])
        self.next_ops[row], self.clocks[row] = len(self.rows[row]), clock

    def start(self, communication: str, ready: float) -> None:
        joined = self.pending.pop(communication)
        joined.times[:] = ready, ready + 1.0
        for row in joined.rows:
            self.wake(row, joined.times, ready)


def test_a_message_starts_when_its_last_member_has_arrived() -> None:
    loop = Messages([("a", 1.0), ("b", 0.0)], [("a", 3.0)], [("b", 2.0)])
    assert loop.run_rows() == []
    assert loop.clocks == [5.0, 4.0, 5.0]


def test_rows_that_wait_for_each_other_are_reported() -> None:
    assert Messages([("a", 0.0), ("b", 0.0)], [("b", 0.0), ("a", 0.0)]).run_rows() == [0, 1]


def idle_log(*intervals: tuple[float, float]) -> IdleLog:
    log = IdleLog()
    for since, until in intervals:
        log.append(since, until)
    return log


def stood() -> IdleLog:
    """A rank that has computed since 2."""
    return idle_log((1.0, 2.0))


@pytest.mark.parametrize(("limit", "until"), [(9.0, 7.5), (1.0, 7.0)])
def test_a_rank_that_waits_loses_a_share_of_what_it_computed_and_no_more_than_the_most(
    limit: float, until: float
) -> None:
    assert stood().wait(5.0, 4.0, 6.0, 0.0, Lag(0.5, limit)) == until


def test_what_was_over_before_costs_the_part_that_is_not_hidden() -> None:
    assert stood().wait(5.0, 3.0, 4.0, 0.0, Lag(0.5, 9.0)) == 5.0
    assert stood().wait(5.0, 3.0, 4.0, 0.0, Lag(0.5, 9.0, hidden=0.5)) == 5.75
    assert idle_log().wait(5.0, 5.0, 5.0, 0.0, Lag(0.5, 9.0, hidden=0.5)) == 5.0


def test_what_is_computed_beside_communication_takes_longer() -> None:
    assert stood().wait(5.0, 1.5, 6.0, 0.5) == 6.0 + 0.5 * 3.0


@given(st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=6), max_size=5), st.integers(0, 80))
def test_an_idle_log_counts_the_idle_seconds_before_a_moment(passes: list[list[int]], moment: int) -> None:
    """Passes are added whole to one log, and interval by interval to another."""
    whole, single, at = IdleLog(), IdleLog(), 0.0
    expected = 0.0
    for lengths in passes:
        ends = list(itertools.accumulate(lengths))
        intervals = [(float(ends[place]), float(ends[place + 1])) for place in range(0, len(ends) - 1, 2)]
        whole.append_pass(at, IdlePattern.from_intervals(intervals))
        for since, until in intervals:
            single.append(at + since, at + until)
            expected += max(0.0, min(at + until, moment) - (at + since))
        at += ends[-1]
    assert whole.seconds_before(moment) == single.seconds_before(moment) == expected
    assert whole.until == single.until
