"""A watch within each rank: who of them reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardlab.errors import UserError
from shardlab.execute.progress import RankProgress
from shardlab.faults import Watching, watchdog
from shardlab.faults.process_state import ProcessState
from shardlab.faults.watchdog import Watchdog
from tests.faults.test_watch import checked


@pytest.fixture
def other() -> Iterator[RankProgress]:
    progress = RankProgress()
    yield progress
    progress.close()


def made(rank: int, other: RankProgress, monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    """The watchdog of one of two ranks of this host."""
    monkeypatch.setattr(RankProgress, "words", RankProgress.words)

    def gathered(mine: tuple[str, str]) -> list[tuple[str, str]]:
        theirs = mine[0], other.path
        return [mine, theirs] if rank == 0 else [theirs, mine]

    watching = Watching(10.0, checked(), lambda rank, op: "")
    return Watchdog(rank, watching, gathered, lambda verdict, report: RuntimeError(verdict), lambda _: False, UserError)


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
def test_the_first_rank_reports_where_all_are_stuck_in_the_kernel(
    rank: int, speaks: bool, other: RankProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = made(rank, other, monkeypatch)
    monkeypatch.setattr(watchdog, "state_of", lambda pid: ProcessState.STUCK)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert watching._speaks() is speaks  # pyright: ignore[reportPrivateUsage]
