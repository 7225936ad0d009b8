"""The rows of a timeline in a terminal: a sign never stands for less than the legend says, and nothing is left out."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shardlab.api import check
from shardlab.cli.plan_options import checked
from shardlab.cli.simulate.terminal_timeline import (
    IDLE,
    MAJORITY,
    MIXED,
    MOST_MISLEADING,
    NAMED_SHARE,
    SIGNS,
    Activity,
    Segment,
    distinct_rows,
    find_steady_state,
    hidden_ops,
    misleading_share,
    partial_segments,
    print_timeline,
    rank_row,
    whole_segments,
)
from shardlab.language import Mesh, OpKind
from shardlab.language.ops import BOOKKEEPING, COMMUNICATION
from shardlab.simulate.timeline import PUZZLE_COSTS, Event, Timeline, simulate
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from tests.simulate.timeline.programs import prefetching
from tests.simulate.timeline.runs import run
from tests.support.thorough import sampled

KINDS = {sign: kind for kind, (sign, _) in SIGNS.items()}
TINY = 1e-6
Spans = list[tuple[float, float]]


@cache
def timeline_of(name: str, microbatches: int) -> Timeline:
    entry = STRATEGIES[name]
    proof = checked(entry, entry.ranks, entry.default_layers(entry.ranks, at_least=4), microbatches)
    return simulate(proof, PUZZLE_COSTS)


def event(kind: OpKind, start: float, end: float) -> Event:
    return Event(0, 0, kind, 0, 1, start, end, 0)


def united(spans: Spans) -> Spans:
    """Apart from one another, and in order."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def within(spans: Spans, start: float, end: float) -> float:
    """Return how much of an interval some spans cover."""
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in united(spans))


def common(some: Spans, others: Spans) -> Spans:
    both = [(max(a, c), min(b, d)) for a, b in united(some) for c, d in united(others) if a < d and c < b]
    return [span for span in both if span[0] < span[1]]


def require_true(row: str, events: list[Event], start: float, end: float) -> None:
    """Every sign of a row says what its legend says, reckoned from the events alone, one by one."""
    length = (end - start) / len(row)
    for cell, sign in enumerate(row):
        first, last = start + cell * length, start + (cell + 1) * length
        overlapping = [event for event in events if event.start < last and event.end > first]
        computes = [(event.start, event.end) for event in overlapping if event.kind not in COMMUNICATION]
        talks = [(event.start, event.end) for event in overlapping if event.kind in COMMUNICATION]
        if sign in (IDLE, MIXED):
            idle = 1 - within(computes + talks, first, last) / length
            assert (idle >= MAJORITY - TINY) == (sign == IDLE)
            continue
        kind = KINDS.get(sign) or KINDS[sign.upper()]
        mine = [(event.start, event.end) for event in overlapping if event.kind is kind]
        if kind in COMMUNICATION:
            alone = within(mine, first, last) - within(common(mine, computes), first, last)
            assert alone / length >= MAJORITY - TINY
        else:
            assert within(mine, first, last) / length >= MAJORITY - TINY
            beside = within(common(computes, talks), first, last) / within(computes, first, last)
            assert (beside >= MAJORITY - TINY) if sign.islower() else (beside <= MAJORITY + TINY)


def shown(timeline: Timeline, width: int) -> list[Segment]:
    ranks = [Activity(events, timeline.end) for events in timeline.events]
    steady = find_steady_state(timeline.events, timeline.end)
    return whole_segments(ranks, timeline.end, width) or partial_segments(ranks, timeline.end, width, steady)


LONGER = ("1f1b", "zb-v", "fsdp", "pipeline-fsdp")
"""Strategies that the suite also shows with more microbatches."""


@pytest.mark.parametrize(
    ("name", "microbatches", "width"),
    sampled(
        [(name, *sizes) for name in STRATEGIES for sizes in ((4, 49), (16, 120), (64, 49))],
        lambda case: case[1] == 4 or (case[1] == 16 and case[0] in LONGER),
    ),
)
def test_rows_of_every_strategy_say_what_is_done(name: str, microbatches: int, width: int) -> None:
    timeline = timeline_of(name, microbatches)
    for events in timeline.events:
        activity = Activity(events, timeline.end)
        for segment in shown(timeline, width):
            row = rank_row(activity, *segment, width).plain
            require_true(row, [event for event in events if event.end > event.start], *segment)
            assert misleading_share(activity, *segment, width) <= MOST_MISLEADING


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_kind_of_op_is_left_out_of_the_legend(name: str) -> None:
    timeline = timeline_of(name, 16)
    text = printed(timeline)
    for kind, (sign, _) in SIGNS.items():
        shares = [
            within([(e.start, e.end) for e in events if e.kind is kind], 0, timeline.end) / timeline.end
            for events in timeline.events
        ]
        if max(shares) >= NAMED_SHARE:
            (percent,) = re.findall(
                rf"(?:^| ){re.escape(sign)} {kind.value.replace('_', '-')} ((?:up to )?[\d<%-]+)", text, re.M
            )
            ends = [float(number) for number in re.findall(r"\d+", percent.replace("up to", "0"))]
            assert 100 * max(shares) == pytest.approx(ends[-1], abs=0.51)
            assert 100 * min(shares) == pytest.approx(ends[0], abs=1)


@given(
    st.lists(st.tuples(st.sampled_from([*SIGNS]), st.integers(0, 60), st.integers(0, 12), st.booleans()), max_size=30),
    st.integers(1, 40),
)
def test_any_row_is_true(ops: list[tuple[OpKind, int, int, bool]], width: int) -> None:
    events: list[Event] = []
    now = 0
    for kind, start, length, waits in ops:
        if kind in COMMUNICATION:
            events.append(event(kind, start, start + length))
        else:  # a rank computes one thing at a time
            now += start % 3 if waits else 0
            events.append(event(kind, now, now + length))
            now += length
    end = max([1, *(op_event.end for op_event in events)])
    activity = Activity(events, end)
    lasting_events = [op_event for op_event in events if op_event.end > op_event.start]
    row = rank_row(activity, 0, end, width).plain
    if not any(width * op_event.start % end or width * op_event.end % end for op_event in lasting_events):
        assert MIXED not in row or any(op_event.kind in COMMUNICATION for op_event in lasting_events)
    require_true(row, lasting_events, 0, end)


def printed(timeline: Timeline, width: int = 80) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False)
    memory = [f"{memory:,}" for memory in timeline.peak_memory_by_rank]
    print_timeline(console, timeline, [("peak memory", memory)])
    return text.getvalue()


def test_a_step_of_more_ops_than_cells_is_shown_in_parts_with_their_places() -> None:
    lines = printed(timeline_of("1f1b", 64)).splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith("rank")] == [
        ["0", "20"],
        ["82.2", "102.2"],
        ["154.8", "174.8"],
    ]
    assert "of the step are shown; from 9.4 to 167.4 it repeats itself every 10.4." in " ".join(" ".join(lines).split())


def test_a_step_that_a_few_rows_show_is_shown_whole() -> None:
    lines = printed(timeline_of("zb-v", 4)).splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith("rank")] == [["0", "13"], ["13", "26"]]
    assert "are shown" not in lines[-1]


@pytest.mark.parametrize("width", [20, 80, 160])
@pytest.mark.parametrize(("name", "microbatches"), [("1f1b", 64), ("context-parallel", 16), ("4d", 16), ("fsdp", 4)])
def test_the_rows_fit_the_terminal(name: str, microbatches: int, width: int) -> None:
    lines = printed(timeline_of(name, microbatches), width).splitlines()
    if width >= 80:
        assert max(map(len, lines)) <= width
        assert len(lines) <= 32


def rows_of(text: str) -> dict[str, str]:
    """Return the signs of each row by the ranks of the row."""
    return {line.split()[0]: line.split()[1] for line in text.splitlines() if re.match(r" *\d", line)}


def test_ranks_that_do_the_same_have_one_row_with_their_numbers() -> None:
    text = printed(timeline_of("fsdp", 4))
    assert list(rows_of(text)) == ["0-3"]
    assert "Ranks in one row do the same at the same time." in text
    assert list(rows_of(printed(TWO_STAGES))) == ["0-1", "2-3"]
    text = printed(timeline_of("gpipe", 4))
    assert list(rows_of(text)) == ["0", "1", "2", "3"]
    assert "Ranks in one row" not in text


def test_ranks_share_a_row_only_if_their_columns_agree_and_their_list_is_short() -> None:
    timeline = timeline_of("fsdp", 4)
    assert distinct_rows(timeline, [["a", "b", "a", "a"]]) == {0: "0, 2-3", 1: "1"}
    program = replace(timeline.program, mesh=Mesh(dp_shard=12), tapes=timeline.program.tapes * 3)
    every_second = [events if rank % 2 else [] for rank, events in enumerate(timeline.events * 3)]
    assert distinct_rows(Timeline(program, every_second)) == {rank: str(rank) for rank in range(12)}


def test_ops_that_no_sign_shows_are_counted() -> None:
    ops = [(OpKind.FORWARD, 0, 10), (OpKind.UPDATE, 4.1, 4.3), (OpKind.SEND, 3, 4), (OpKind.RECV, 12.4, 12.6)]
    events = [event(*op) for op in ops]
    row = rank_row(Activity(events, 20.0), 0, 20.0, 20).plain
    assert row == "FFFfFFFFFF.........."
    assert hidden_ops(events, Segment(0, 20.0), row) == {OpKind.UPDATE: 1, OpKind.RECV: 1}, "the small letter sends"
    assert hidden_ops(events, Segment(10, 20), row[10:]) == {OpKind.RECV: 1}
    assert "Without a sign above: all-reduce (4), update (4), send (1), reduce-scatter (1), recv (1)." in " ".join(
        printed(TWO_STAGES).split()
    )
    assert "Without a sign" not in printed(timeline_of("1f1b", 64)), "only parts of the step are shown"


TWO_STAGES = simulate(check(Plan(Mesh(pp=2, dp_shard=2), schedule="zb-h1", shard_optimizer=("dp_shard",))))


def test_a_steady_state_is_the_shortest_period_of_all_ranks() -> None:
    turns = [event(kind, at + since, at + since + 1) for at in range(0, 60, 3) for since, kind in TURN]
    steady = find_steady_state([turns, [turn._replace(start=turn.start + 1, end=turn.end + 1) for turn in turns]], 60.0)
    assert steady is not None
    assert (steady.period, steady.since) == (3.0, 1.0)
    assert find_steady_state([turns[:30], turns[:7]], 60.0) is None, "a rank that has ended repeats nothing"


TURN = ((0, OpKind.FORWARD), (1, OpKind.BACKWARD))


def test_every_kind_of_op_has_a_sign_of_its_own() -> None:
    assert set(SIGNS) == set(OpKind) - BOOKKEEPING
    signs = [sign for sign, _ in SIGNS.values()]
    assert len({*signs, *(sign.lower() for sign in signs if sign.isupper()), IDLE, MIXED}) == 2 + len(signs) + sum(
        sign.isupper() for sign in signs
    )
    assert all((sign.isupper()) == (kind not in COMMUNICATION) for kind, (sign, _) in SIGNS.items())


def test_small_letters_are_compute_that_hides_communication() -> None:
    timeline = run(prefetching, 2, 3, 2)
    row = rank_row(Activity(timeline.events[0], timeline.end), 0, timeline.end, 120).plain
    assert {"f", "F", "+"} <= set(row)


def test_a_rank_that_computes_a_little_in_every_cell_shows_its_share() -> None:
    events = [event(OpKind.FORWARD, at, at + 0.1) for at in range(10)]
    activity = Activity(events, 10.0)
    assert rank_row(activity, 0, 10.0, 10).plain == IDLE * 10
    assert activity.totals()[OpKind.FORWARD] == pytest.approx(0.1)
    assert np.isclose(activity.idle, 0.9)
