"""Processes of this machine that begin together and end together.

`run_processes` calls a function in several processes and waits for them: `RankProcesses` collects their reports,
forwards requests to stop to all, kills those that do not end in time, and finally decides which failure is the cause.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

from shardlab.common.processes import end_with_starter
from shardlab.execute.progress import RankProgress
from shardlab.language import UserError
from shardlab.train.faults import (
    RankFailed,
    Watch,
    WatchSettings,
    describe_end,
    is_lost,
    rank_names,
    stack_text,
    write_stack_on_signal,
)
from shardlab.train.launch.interrupt import (
    GRACE,
    KILL_SIGNALS,
    STOP_SIGNALS,
    StopRequest,
    catch_signals,
    grace_of,
    ignore_errors,
    stop_signals,
)

Result = TypeVar("Result")

REPORT_SECONDS = 3.0
"""Seconds in which the other ranks may still report after one has failed."""

REPEAT_SECONDS = 0.5
"""Seconds in which a second signal counts as a copy of the first: timeout(1) signals the process and then its group."""


@dataclass(frozen=True)
class _Report:
    """Report of a rank before it ends.

    Attributes:
        result: result of its function.
        time: time of its failure, in nanoseconds of a monotonic clock; 0 if it did not fail.
        lost_peer: whether it failed because another rank had ended.
        sentence: message of a `UserError`; empty for other errors.
        trace: the traceback.
    """

    result: Any = None
    time: int = 0
    lost_peer: bool = False
    sentence: str = ""
    trace: str = ""


def run_processes(
    count: int,
    preload: Sequence[str],
    function: Callable[..., Result],
    *arguments: Any,
    watching: WatchSettings | None = None,
) -> Result:
    """Call `function(rank, *arguments)` in `count` processes, and return rank 0's result.

    If one process fails, all are ended. If one of them, or this process, receives SIGINT, SIGTERM or SIGHUP, all
    receive SIGTERM. SIGUSR1 is forwarded as SIGUSR1. A second SIGINT or SIGTERM to this process ends them at once. If
    this process is killed, they receive SIGTERM.

    Args:
        preload: names of modules that are imported once for all processes.
        function: function that is importable by name.
        watching: settings of the watch for hangs (None: no watch).

    Raises:
        RankFailed: if a rank raised, was killed, or made no progress in time.
        UserError: if a rank raised one.
        KeyboardInterrupt: if the processes were asked to end and returned no result. The message has the reason if they
            were killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    hear, tell = context.Pipe(duplex=False)
    progresses = {} if watching is None else {rank: RankProgress() for rank in range(count)}
    with catch_signals() as signals, hear, tell, ExitStack() as files:
        for progress in progresses.values():
            files.callback(progress.close)
        _start_forkserver()
        ranks = RankProcesses(Watch(watching, progresses) if watching else None)
        try:
            for rank in range(count):
                reader, writer = context.Pipe(duplex=False)
                with writer, _without_main(function, *arguments):
                    process = context.Process(
                        target=_run_rank,
                        args=(rank, writer, tell, sys.stderr is sys.stdout, progresses.get(rank), function, arguments),
                        name=f"rank-{rank}",
                    )
                    process.start()
                ranks.add(process, reader)
            while ranks.alive():
                ready = ranks.wait([signals, hear])
                if hear in ready:
                    ranks.ask(int(hear.recv_bytes()))
                if signals in ready:
                    for number in stop_signals(signals, 64) or ():
                        ranks.ask(grace_of(number), kill_on_repeat=number in KILL_SIGNALS)
        finally:
            ranks.kill()
        return ranks.outcome()


class RankProcesses:
    """Started processes of the ranks, their reports and their ends.

    If a rank fails or is killed, the other ranks are killed after `REPORT_SECONDS`, and `outcome` raises the rank's
    `UserError`, or else an error that names the rank at fault. If a rank hangs, all are killed at once.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self._hang: tuple[str, str] | None = None  # the report, and its verdict
        self._processes: list[BaseProcess] = []
        self._pipes: dict[Connection, int] = {}
        self._answers: dict[int, _Report] = {}
        self._codes: dict[int, int] = {}  # exit codes, in the order in which they ended
        self._killed: set[int] = set()  # ranks that did not end by themselves
        self._request_time = self._end = float("inf")  # times of the request to end, and of the kill of the rest
        self._grace = GRACE
        self._late = ""

    def add(self, process: BaseProcess, answers: Connection) -> None:
        self._processes.append(process)
        self._pipes[answers] = len(self._processes) - 1

    def alive(self) -> bool:
        return len(self._codes) < len(self._processes)

    def wait(self, others: Sequence[Any]) -> list[Any]:
        """Wait for the next event, and record reports and ends of ranks.

        Returns:
            The connections that are ready, those in `others` included.
        """
        remaining = None if self._end == float("inf") else max(0.0, self._end - time.monotonic())
        watch = self._watch if remaining is None else None
        ready: list[Any] = wait([*others, *self._pipes], remaining if watch is None else watch.interval)
        if watch is not None and watch.look():
            self._hang = watch.report_hang()
            self.kill()
        elif not ready and watch is None:
            late = [rank for rank in range(len(self._processes)) if rank not in self._codes]
            self._late = _late(late, self._grace)
            self.kill()
        for pipe in [pipe for pipe in self._pipes if pipe in ready]:
            try:
                self._answers[self._pipes[pipe]] = answer = pipe.recv()
                if answer.time:
                    self._look_at_others()
            except (EOFError, OSError):
                self._note_end(self._pipes.pop(pipe))
                pipe.close()
        return ready

    def ask(self, grace: int, *, kill_on_repeat: bool = False) -> None:
        """Ask all ranks to end within `grace` seconds.

        A later request with a longer `grace` extends the time. Any other later request kills the ranks if
        `kill_on_repeat` is set.
        """
        now = time.monotonic()
        if self._request_time == float("inf"):
            self._request_time, self._grace, self._end = now, grace, min(self._end, now + grace + 1)
            number = signal.SIGTERM if grace == GRACE else signal.SIGUSR1
            for pid in (process.pid for process in self._processes if process.exitcode is None):
                assert pid is not None, "it was started"
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif grace > self._grace and self._end == self._request_time + self._grace + 1:
            self._grace, self._end = grace, self._request_time + grace + 1
        elif kill_on_repeat and now - self._request_time > REPEAT_SECONDS:
            self._late = "at once, since it was asked twice"
            self.kill()

    def kill(self) -> None:
        """Kill the ranks that have not ended."""
        remaining_ranks = [rank for rank in range(len(self._processes)) if rank not in self._codes]
        self._killed.update(remaining_ranks)
        for rank in remaining_ranks:
            self._processes[rank].kill()
        for rank in remaining_ranks:
            self._processes[rank].join()
            self._codes[rank] = 0
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()

    def outcome(self) -> Any:
        """Return rank 0's result, or raise the cause of the failure."""
        if self._hang is not None:
            report, verdict = self._hang
            raise RankFailed(verdict, report)
        failed = {rank: answer for rank, answer in self._answers.items() if answer.time}
        causes = {rank: answer for rank, answer in failed.items() if not answer.lost_peer}
        if causes:
            rank = min(causes, key=lambda rank: causes[rank].time)
            if causes[rank].sentence:
                raise UserError(causes[rank].sentence)
            raise self._failure(f"rank {rank} failed, and the run ended with it.\n\n{causes[rank].trace}")
        requested = self._request_time < float("inf")
        unexplained = self._codes.keys() - self._answers.keys() - (self._killed if failed else set())
        silent = [rank for rank in self._codes if rank in unexplained]
        if 0 in self._answers and 0 not in failed and (requested or (not silent and not failed)):
            return self._answers[0].result
        if requested:
            late = [rank for rank, code in self._codes.items() if code == -signal.SIGALRM]
            raise KeyboardInterrupt(self._late or (_late(late, self._grace) if late else ""))
        for rank in silent:
            if -self._codes[rank] in STOP_SIGNALS:
                raise KeyboardInterrupt(f"rank {rank} got {signal.Signals(-self._codes[rank]).name}")
        if silent:  # later errors of other ranks are only consequences
            code = next((self._codes[rank] for rank in silent if self._codes[rank] < 0), self._codes[silent[0]])
            same_code = [rank for rank in silent if self._codes[rank] == code]
            raise self._failure(describe_end(same_code, how_ended(code)))
        rank = min(failed, key=lambda rank: failed[rank].time)
        raise self._failure(f"rank {rank} lost its connection, and the run ended with it.\n\n{failed[rank].trace}")

    def _note_end(self, rank: int) -> None:
        """Record the end of a rank. If it failed, the others have REPORT_SECONDS to end too.

        A rank's end is noticed by its pipe, which the kernel closes even if the fork server has ended.
        """
        process = self._processes[rank]
        process.join(REPORT_SECONDS)  # the exit code comes from the server that forked it, if the server still runs
        self._codes[rank] = process.exitcode or 0
        if self._codes[rank] or rank not in self._answers:
            self._look_at_others()
            self._end = min(self._end, time.monotonic() + REPORT_SECONDS)

    def _look_at_others(self) -> None:
        """Ask the other ranks for their stacks after a failure, while they still wait for the failed one."""
        if self._watch is not None and self._end == float("inf"):
            self._watch.ask_for_stacks()

    def _failure(self, verdict: str) -> RankFailed:
        """Return the error for a failure, with a report on all ranks."""
        if self._watch is None:
            return RankFailed(verdict)
        fates = {rank: how_ended(code) for rank, code in self._codes.items() if rank not in self._answers and code}
        for rank, answer in self._answers.items():
            fates[rank] = "lost its connection" if answer.lost_peer else "failed" if answer.time else "has ended"
        return RankFailed(verdict, self._watch.report(fates))


def how_ended(code: int) -> str:
    """Describe how a process ended, given its exit code or the negative number of the signal that ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed ({signal.Signals(-code).name}" + ("; out of memory?)" if -code == signal.SIGKILL else ")")


@contextmanager
def _without_main(*objects: object) -> Generator[None]:
    """Keep processes that the block starts from importing the main module, unless it defines one of the objects.

    Otherwise, a script that trains without `if __name__ == "__main__":` would start a training in every rank.
    """
    main = sys.modules["__main__"]
    if any(getattr(item, "__module__", "") == "__main__" for item in objects):
        yield
        return
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_forkserver() -> None:
    """Start the server that forks the ranks. Signals do not end it, so that it reports exit codes."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the resource tracker has unblocked some
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _run_rank(
    rank: int,
    answers: Connection,
    starter: Connection,
    on_stdout: bool,
    progress: RankProgress | None,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    """Call the function in a started process, and report its result.

    Args:
        on_stdout: whether to print on stdout what is for stderr, as the starter does in a notebook.
    """
    gc.freeze()  # a garbage collection would write to, and so copy, the memory that is shared with the server
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # ranks print no tracebacks: the process that started them reports
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the server's settings are inherited
    end_with_starter()
    StopRequest.starter = starter
    if progress is not None:
        progress.take()
        write_stack_on_signal(progress)
    sys.stdout, sys.stderr = ignore_errors(sys.stdout), ignore_errors(sys.stdout if on_stdout else sys.stderr)
    try:
        answer = _Report(function(rank, *arguments))
        if progress is not None:
            progress.has_ended = True
    except Exception as error:
        sentence = str(error) if isinstance(error, UserError) else ""
        answer = _Report(
            time=time.monotonic_ns(), lost_peer=is_lost(error), sentence=sentence, trace=traceback.format_exc()
        )
        if progress is not None:
            progress.fail(answer.time, answer.lost_peer, stack_text(traceback.extract_tb(error.__traceback__)))
    try:
        answers.send(answer)
    except BrokenPipeError:  # the process that started this one has ended
        sys.exit(1)
    sys.exit(bool(answer.time))


def _late(ranks: Sequence[int], grace: int) -> str:
    return f"{rank_names([*ranks])} did not end within {grace} s"
