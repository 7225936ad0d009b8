"""A watch over ranks: it notices who no longer gets on, and reports where all of them are.

It reads the ranks' words and asks the kernel; nothing needs a rank's help, or a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardlab.check import Checked
from shardlab.execute.progress import RankProgress, TapePosition
from shardlab.faults.process_state import ProcessState, state_of
from shardlab.faults.report import RankReport, names, report_text, said_of
from shardlab.faults.stacks import ask_for_stacks, stacks_of
from shardlab.faults.waits import LineOf, RankWait, Tapes, culprits

START = 60.0
"""Seconds more that a rank has until its first op: it imports, meets the others and makes its weights."""


@dataclass(frozen=True)
class Watching:
    """How ranks are watched.

    Attributes:
        timeout: seconds in which every rank gets on: longer than any step, evaluation or save takes.
        checked: the program whose tapes they run.
        line_of: finds the strategy's line that wrote an op.
        saved: tells what is saved by now, for who reports to a user.
    """

    timeout: float
    checked: Checked
    line_of: LineOf
    saved: Callable[[], str] | None = None


class Watch:
    """Watches ranks.

    Args:
        watching: how.
        progresses: of the ranks on this host, by rank.
    """

    def __init__(self, watching: Watching, progresses: Mapping[int, RankProgress]) -> None:
        self._watching = watching
        self._progresses = progresses
        self._tapes = Tapes(watching.checked, watching.line_of)
        self._seen: dict[int, TapePosition | None] = dict.fromkeys(progresses)
        self._idle = dict.fromkeys(progresses, 0.0)
        self._looked = time.monotonic()

    @property
    def interval(self) -> float:
        """Seconds between looks."""
        return min(1.0, max(0.05, self._watching.timeout / 20))

    def look(self) -> list[int]:
        """Look at all ranks: gives those that have not got on within the timeout."""
        now = time.monotonic()
        passed = min(now - self._looked, 3 * self.interval)  # no more: this process was stopped, as by Ctrl-Z
        self._looked = now
        for rank, progress in self._progresses.items():
            position = progress.position
            moved = position != self._seen[rank] or progress.ended
            self._seen[rank], self._idle[rank] = position, 0.0 if moved else self._idle[rank] + passed
        return [rank for rank, idle in self._idle.items() if idle >= self._patience(rank)]

    def _patience(self, rank: int) -> float:
        return self._watching.timeout + (START if self._seen[rank] is None else 0)

    def ask_for_stacks(self) -> None:
        """Have all that run write their stacks, before they end."""
        ask_for_stacks(self._progresses.values())

    def report(self, fates: Mapping[int, str]) -> str:
        """Report where all ranks are that are seen from here.

        Args:
            fates: what became of ranks that have ended.
        """
        self.look()
        return report_text(self._ranks(fates, awaited=False))

    def report_hang(self) -> tuple[str, str]:
        """Report where all ranks are while they hang, and who is at fault."""
        self.ask_for_stacks()
        fates = {rank: fate for rank in self._progresses if (fate := self._fate(rank))}
        ranks = self._ranks(fates, awaited=True)
        return report_text(ranks), self._verdict(ranks)

    def _fate(self, rank: int) -> str:
        progress = self._progresses[rank]
        state = state_of(progress.pid) if progress.pid else ProcessState.GONE
        if state is ProcessState.STOPPED:
            return "is stopped (SIGSTOP, or a debugger)"
        if progress.ended:
            return "has ended"
        if state is ProcessState.GONE:
            return "has gone" if progress.pid else "never started"
        return "is stuck in the kernel (D)" if state is ProcessState.STUCK else ""

    def _ranks(self, fates: Mapping[int, str], *, awaited: bool) -> dict[int, RankReport]:
        waits = self._tapes.waits({rank: each.position for rank, each in self._progresses.items()})
        running = [rank for rank in self._progresses if rank not in fates] if awaited else []
        stacks = stacks_of(self._progresses, running)
        return {
            rank: RankReport(wait, self._idle[rank], fates.get(rank, ""), stacks[rank]) for rank, wait in waits.items()
        }

    def _verdict(self, ranks: Mapping[int, RankReport]) -> str:
        """Name who is at fault: who cannot run, else who computes while others wait, else what is between them."""
        after = f"the run ended after the {self._watching.timeout:g} s of --timeout"
        for fate in dict.fromkeys(seen.fate for seen in ranks.values()):
            if fate and fate != "has ended":
                return f"{said_of([rank for rank, seen in ranks.items() if seen.fate == fate], fate)}, and {after}."
        waits = {rank: seen.wait for rank, seen in ranks.items()}
        blamed = culprits(waits) or [rank for rank, wait in waits.items() if not wait.blockers]
        here = [rank for rank in blamed if rank in ranks]
        if here:
            what = waits[here[0]].what
            return (
                f"{names(here)} does not get on: {what}; {after}. A run whose steps, evaluations or saves take longer "
                "wants a larger --timeout."
            )
        if blamed:
            return f"{names(blamed)} on another host {'does' if len(blamed) == 1 else 'do'} not get on, and {after}."
        return _network(waits) + f", and {after}."


def _network(waits: Mapping[int, RankWait]) -> str:
    rank, wait = next(((rank, wait) for rank, wait in waits.items() if wait.come), next(iter(waits.items())))
    return f"nothing arrives between {names([rank, *wait.blockers])}, which have all come: the network drops it"
