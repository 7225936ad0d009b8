"""A watch within each rank, where a launcher has started the ranks and no process of Shardlab stands above them.

The ranks of a host read one another's words. One of them, the first that still runs, reports for its host.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shardlab.execute.progress import RankProgress
from shardlab.faults.process_state import ProcessState, state_of
from shardlab.faults.report import ended_with
from shardlab.faults.stacks import PATIENCE, stack_text, write_when_asked
from shardlab.faults.watch import Watch, Watching

LANDING = 0.5
"""Seconds in which all ranks have noticed that one has gone."""


class Watchdog:
    """Watches the ranks of this host from within one of them, inside `with`.

    Args:
        rank: whose process this is.
        watching: how.
        gathered: makes of this rank's word the list of all ranks' words; all ranks call it together.
        failed: makes the failure of a verdict and a report.
        is_lost: whether an error says only that another rank has gone.
        own_words: whether an error is told by who raises it, so that nobody reports.
    """

    def __init__(
        self,
        rank: int,
        watching: Watching,
        gathered: Callable[[tuple[str, str]], list[tuple[str, str]]],
        failed: Callable[[str, str], Exception],
        is_lost: Callable[[BaseException], bool],
        own_words: type[Exception],
    ) -> None:
        self._rank = rank
        self._watching = watching
        self._failed, self._is_lost, self._own_words = failed, is_lost, own_words
        self._mine = RankProgress()
        self._mine.take()
        write_when_asked(self._mine)
        here = f"{socket.gethostname()} {_namespace()}"
        self._ranks: dict[int, RankProgress] = {}
        for other, (host, path) in enumerate(gathered((here, self._mine.path))):
            if host == here:
                with suppress(OSError):
                    self._ranks[other] = self._mine if other == rank else RankProgress.at(path)
        self._watch = Watch(watching, self._ranks)
        self._over = threading.Event()
        gathered((here, ""))  # nobody ends before all have opened its words

    def __enter__(self) -> None:
        threading.Thread(target=self._look, daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if not isinstance(error, Exception):
            self._mine.ended = True
            return
        if isinstance(error, self._own_words):
            self._mine.reported = True
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher has noticed too, and has some patience
        lost = self._is_lost(error)
        self._mine.fail(time.monotonic_ns(), lost, stack_text(traceback.extract_tb(trace)))
        if not lost:
            self._watch.ask_for_stacks()
            time.sleep(LANDING)
            whole = "".join(traceback.format_exception(error))
            self._mine.reported = True
            raise self._failed(
                f"rank {self._rank} failed, and the run ended with it.\n\n{whole}", self._watch.report(self._fates())
            ) from None
        time.sleep(LANDING)
        fates = self._fates()
        gone = [rank for rank, fate in fates.items() if fate == _GONE]
        at_fault = [rank for rank, each in self._ranks.items() if (each.failed and not each.lost) or each.reported]
        if at_fault or not self._speaks():
            self._leave_it_to_others()
        self._mine.reported = True
        verdict = ended_with(*((gone, _GONE) if gone else ([self._rank], "lost its connection to another host")))
        raise self._failed(verdict, self._watch.report(fates)) from None

    def _look(self) -> None:
        while not self._over.wait(self._watch.interval):
            if self._watch.look():
                self._hang()

    def _hang(self) -> None:
        """End this process: after the report, if it is the one that speaks."""
        if not self._speaks():
            deadline = time.monotonic() + 3 * PATIENCE + self._watch.interval
            while time.monotonic() < deadline and not any(each.reported for each in self._ranks.values()):
                time.sleep(0.02)
        if not any(each.reported for each in self._ranks.values()):
            report, verdict = self._watch.report_hang()
            self._mine.reported = True
            saved = f"shardlab: the run failed; {self._watching.saved()}\n" if self._watching.saved else ""
            with suppress(OSError):
                print(f"{saved}{report}\n\nshardlab: {verdict}", file=sys.stderr, flush=True)
            time.sleep(LANDING)
            for rank, each in self._ranks.items():  # one that is stopped would keep the launcher waiting
                if rank != self._rank and each.pid and not each.ended:
                    with suppress(OSError):
                        os.kill(each.pid, signal.SIGKILL)
        os._exit(1)

    def _speaks(self) -> bool:
        """Whether this is the first rank of the host that runs; the first of all where each is stuck in the kernel."""
        running = [rank for rank, each in self._ranks.items() if state_of(each.pid) is ProcessState.RUNS]
        return self._rank == min(running or self._ranks)

    def _leave_it_to_others(self) -> None:
        deadline = time.monotonic() + 3 * PATIENCE
        while time.monotonic() < deadline and not any(each.reported for each in self._ranks.values()):
            time.sleep(0.02)
        raise SystemExit(1)

    def _fates(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        for rank, each in self._ranks.items():
            if each.failed:
                found[rank] = "lost its connection" if each.lost else "failed"
            elif each.ended:
                found[rank] = "has ended"
            elif state_of(each.pid) is ProcessState.GONE:
                found[rank] = _GONE
        return found


_GONE = "has gone (killed?)"


def _namespace() -> str:
    """What tells the process numbers of one container from another's."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
