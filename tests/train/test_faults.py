"""A watch sees from outside that a rank no longer gets on, and that alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardlab.check import Checked, check
from shardlab.execute.progress import OP_BITS, RankProgress
from shardlab.language import OpKind, trace
from shardlab.strategies.load import load
from shardlab.train import faults
from shardlab.train import faults as module
from shardlab.train.faults import (
    ProcessState,
    RankReport,
    RankWait,
    TapeWaits,
    Watch,
    Watchdog,
    WatchSettings,
    describe_end,
    find_culprits,
    parse_frames,
    report_text,
)


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def progresses() -> Iterator[dict[int, RankProgress]]:
    by_rank = {rank: RankProgress() for rank in range(2)}
    yield by_rank
    for progress in by_rank.values():
        progress.close()


def checked(strategy: str = "ddp") -> Checked:
    entry = load(strategy)
    return check(trace(entry.program, entry.grid(2), entry.puzzle(2, 3), 2))


def put(progress: RankProgress, tape: int, op: int, length: int = 100, *, evaluates: bool = False) -> None:
    """Write what a rank at an op of its so many-th tape writes."""
    progress._words[3] = length  # pyright: ignore[reportPrivateUsage]
    progress._words[1], progress._words[2] = tape - 1, evaluates  # pyright: ignore[reportPrivateUsage]
    progress._words[0] = (tape << OP_BITS) + op  # pyright: ignore[reportPrivateUsage]


def watched(progresses: dict[int, RankProgress], timeout: float = 10.0) -> Watch:
    return Watch(WatchSettings(timeout, checked(), lambda rank, op: ""), progresses)


def late_after(watch: Watch, clock: Clock, seconds: float) -> list[int]:
    """Return the late ranks after a watch has looked for some time."""
    late: list[int] = []
    end = clock.now + seconds
    while clock.now < end:
        clock.now += watch.interval
        late = watch.look()
    return late


def test_a_rank_that_stays_at_an_op_is_late_after_the_timeout(
    clock: Clock, progresses: dict[int, RankProgress]
) -> None:
    watch = watched(progresses)
    put(progresses[0], 1, 5)
    put(progresses[1], 1, 5)
    assert late_after(watch, clock, 9) == []
    put(progresses[0], 1, 6)
    assert late_after(watch, clock, 2) == [1]


def test_a_rank_that_has_ended_is_never_late(clock: Clock, progresses: dict[int, RankProgress]) -> None:
    watch = watched(progresses)
    for progress in progresses.values():
        put(progress, 1, 5)
        progress.has_ended = True
    assert late_after(watch, clock, 100) == []


def test_until_its_first_op_a_rank_has_a_minute_more(clock: Clock, progresses: dict[int, RankProgress]) -> None:
    watch = watched(progresses)
    assert late_after(watch, clock, 65) == []
    assert late_after(watch, clock, 10) == [0, 1]


def test_time_in_which_nobody_watched_does_not_count(clock: Clock, progresses: dict[int, RankProgress]) -> None:
    """Ctrl-Z stops the watch as well as the ranks."""
    watch = watched(progresses)
    for progress in progresses.values():
        put(progress, 1, 5)
    watch.look()
    clock.now += 3600
    assert watch.look() == []


def test_progress_is_seen_from_another_opening_of_the_file(progresses: dict[int, RankProgress]) -> None:
    put(progresses[0], 3, 7, evaluates=True)
    other = RankProgress.at(progresses[0].path)
    assert other.position == progresses[0].position
    assert other.position is not None
    assert (other.position.round, other.position.op, other.position.step) == (3, 7, 2)
    assert other.position.evaluates
    other.close()


def test_waits_follow_from_positions_alone(progresses: dict[int, RankProgress]) -> None:
    proof = checked()
    tape = proof.program.tapes[0]
    wait = next(at for at, op in enumerate(tape) if op.kind is OpKind.WAIT)
    put(progresses[0], 4, wait, len(tape))
    put(progresses[1], 4, 2, len(tape))
    waits = TapeWaits(proof, lambda rank, op: f" (file:{op})").waits(
        {rank: progress.position for rank, progress in progresses.items()}
    )
    assert waits[0].description.startswith(
        f"step 4, op {wait} of {len(tape)} (file:{wait}): waits in all_reduce(layer "
    )
    assert waits[0].blockers == (1,)
    assert waits[1].blockers == ()
    assert find_culprits(waits) == [1]


def test_a_rank_at_the_end_of_a_step_waits_for_those_that_are_not() -> None:
    proof = checked()
    progress = [RankProgress(), RankProgress()]
    length = len(proof.program.tapes[0])
    put(progress[0], 4, length, length)
    put(progress[1], 4, 2, length)
    waits = TapeWaits(proof, lambda rank, op: "").waits(
        {rank: rank_progress.position for rank, rank_progress in enumerate(progress)}
    )
    assert waits[0] == RankWait("is at the end of step 4", (1,))
    for rank_progress in progress:
        rank_progress.close()


def test_ranks_that_agree_share_a_line_and_a_stack() -> None:
    there, gone = RankWait("waits in x", (2,)), RankWait("is in y")
    stack = ['File "a.py", line 1 in f']
    ranks = {
        0: RankReport(there, 5, "", stack),
        1: RankReport(there, 6, "", stack),
        2: RankReport(gone, 7, "failed", []),
    }
    text = report_text(ranks)
    assert "  ranks 0-1: waits in x for rank 2, since " in text
    assert "(6 s)" in text
    assert '  ranks 0-1:\n    File "a.py", line 1 in f\n  rank 2: none, it failed' in text


def test_a_verdict_names_all_ranks_that_are_stopped(
    progresses: dict[int, RankProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    for progress in progresses.values():
        put(progress, 1, 5)
        progress._words[4] = 1  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(Watch, "ask_for_stacks", lambda self: None)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    monkeypatch.setattr(module, "process_state", lambda pid: ProcessState.STOPPED)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    _, verdict = watched(progresses).report_hang()
    assert verdict.startswith("ranks 0-1 are stopped (SIGSTOP, or a debugger), and the run ended after the 10 s of")


def test_a_sentence_of_several_ranks_is_in_the_plural() -> None:
    assert describe_end([1], "was killed (SIGKILL)") == "rank 1 was killed (SIGKILL), and the run ended with it."
    assert describe_end([2, 0], "has gone") == "ranks 0, 2 have gone, and the run ended with them."


def test_a_stack_begins_where_the_tape_is_run() -> None:
    text = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "x.py", line 3 in inner\n  File "execute/executor.py", line 9 in _run\n'
        '  File "loop.py", line 1 in train\n'
    )
    assert parse_frames(text) == ['File "execute/executor.py", line 9 in _run', 'File "x.py", line 3 in inner']
    assert parse_frames("nothing") == []


# A watch within each rank: who of them reports.


@pytest.fixture
def other() -> Iterator[RankProgress]:
    progress = RankProgress()
    yield progress
    progress.close()


def make_watchdog(rank: int, other: RankProgress, monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """The watchdog of one of two ranks of this host."""
    monkeypatch.setattr(RankProgress, "words", RankProgress.words)

    def gathered(mine: tuple[str, str]) -> list[tuple[str, str]]:
        theirs = mine[0], other.path
        return [mine, theirs] if rank == 0 else [theirs, mine]

    watching = WatchSettings(10.0, checked(), lambda rank, op: "")
    return Watchdog(rank, watching, gathered)


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
def test_the_first_rank_reports_where_all_are_stuck_in_the_kernel(
    rank: int, speaks: bool, other: RankProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = make_watchdog(rank, other, monkeypatch)
    monkeypatch.setattr(faults, "process_state", lambda pid: ProcessState.STUCK)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert watching._reports() is speaks  # pyright: ignore[reportPrivateUsage]
