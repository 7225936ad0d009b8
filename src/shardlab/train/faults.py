"""Ranks that die or hang: their detection, and one report of where every rank was.

`Watch` looks at the ranks of a host. It reads the progress that each rank writes to shared memory, and asks the kernel
for the state of the processes, so it needs no help from a rank. `Watch` only detects and reports.

If `shardlab train` has started the ranks, its own process runs the watch, and then ends the ranks
(`shardlab.train.launch.processes`). Under a launcher such as torchrun there is no such process: each rank has a
`Watchdog`, a thread that watches the ranks of its host. The first rank that still runs reports for the host, and ends
the ranks that cannot end themselves.

`report_text` formats a report. `TapeWaits` finds from the positions on the tapes which rank waits for which others, and
in which op. The last functions read the state of a process and its Python stack.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from traceback import StackSummary
from types import TracebackType

from shardlab.check import Checked, check_forward, forward_only
from shardlab.common.errors import AsSentence
from shardlab.common.text import listed, plural
from shardlab.execute.progress import RankProgress, TapePosition
from shardlab.language import Op, OpKind, UserError
from shardlab.language.ops import COMMUNICATION
from shardlab.language.rules.kinds import microbatches_text

START = 60.0
"""Seconds in addition to the timeout before a rank's first op: it imports packages and initializes its weights."""

LANDING = 0.5
"""Seconds after which all ranks have noticed that one has ended."""

WRITE_STACK = signal.SIGUSR2
"""Signal upon which a rank writes the stack of its main thread. Python's own handler does so inside of any library."""

PATIENCE = 1.0
"""Seconds within which a running process has written its stack."""

LineOf = Callable[[int, int], str]
"""Function that returns the strategy's file and line of an op, by rank and op, as ` (FILE:LINE)`; empty if unknown."""


_LOST = ("Connection closed by peer", "Connection reset by peer", "NCCL error", "Broken pipe", "Timed out waiting")
"""Messages of torch.distributed about another rank that has ended or hangs."""


def is_lost(error: BaseException) -> bool:
    """Return whether a rank failed only because another rank has ended."""
    return isinstance(error, RuntimeError) and sounds_lost(str(error))


def sounds_lost(text: str) -> bool:
    """Return whether a message of a rank is about another rank that has ended."""
    return any(word in text for word in _LOST)


class RankFailed(AsSentence, Exception):
    """Failure of a rank, or a hang. If a rank raised an error, the message ends with its traceback.

    Attributes:
        report: report of where the watched ranks were; empty if no rank was watched.
    """

    def __init__(self, message: str, report: str = "") -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class WatchSettings:
    """Settings of a watch over ranks.

    Attributes:
        timeout: seconds within which every rank must make progress; longer than any step, evaluation or save.
        checked: program whose tapes the ranks run.
        line_of: function that finds the line of the strategy's source from which an op comes (see `LineOf`).
        describe_saved: function that describes in a sentence what the run has saved so far; None: the report leaves
            it out.
    """

    timeout: float
    checked: Checked
    line_of: LineOf
    describe_saved: Callable[[], str] | None = None


class Watch:
    """Watch over the ranks of one host.

    Args:
        settings: settings of the watch.
        progresses: progress of each rank on this host, by rank.
    """

    def __init__(self, settings: WatchSettings, progresses: Mapping[int, RankProgress]) -> None:
        self._settings = settings
        self._progresses = progresses
        self._tapes = TapeWaits(settings.checked, settings.line_of)
        self._last_positions: dict[int, TapePosition | None] = dict.fromkeys(progresses)
        self._idle = dict.fromkeys(progresses, 0.0)
        self._looked = time.monotonic()

    @property
    def interval(self) -> float:
        """Seconds between two calls of `look`."""
        return min(1.0, max(0.05, self._settings.timeout / 20))

    def look(self) -> list[int]:
        """Look at all ranks, and return those that have made no progress within the timeout."""
        now = time.monotonic()
        elapsed = min(now - self._looked, 3 * self.interval)  # more time passes only if this process itself was stopped
        self._looked = now
        for rank, progress in self._progresses.items():
            position = progress.position
            has_moved = position != self._last_positions[rank] or progress.has_ended
            self._last_positions[rank], self._idle[rank] = position, 0.0 if has_moved else self._idle[rank] + elapsed
        return [rank for rank, idle in self._idle.items() if idle >= self._patience(rank)]

    def ask_for_stacks(self) -> None:
        """Ask ranks to write their stacks. A rank that is stopped, or has not opened its progress yet, writes none."""
        for progress in self._progresses.values():
            if progress.pid == os.getpid():
                signal.pthread_kill(threading.main_thread().ident or 0, WRITE_STACK)  # os.kill may pick another thread
            elif progress.pid:
                with suppress(ProcessLookupError):
                    os.kill(progress.pid, WRITE_STACK)

    def report(self, fates: Mapping[int, str]) -> str:
        """Return a report of where the ranks of this host are.

        Args:
            fates: by rank, for ranks that have ended: how they ended, such as `was killed (SIGKILL)`.
        """
        self.look()
        return report_text(self._ranks(fates, awaited=False))

    def report_hang(self) -> tuple[str, str]:
        """Return a report of where the ranks of this host hang, and a verdict on which of them is at fault."""
        self.ask_for_stacks()
        fates = {rank: fate for rank in self._progresses if (fate := self._fate(rank))}
        ranks = self._ranks(fates, awaited=True)
        return report_text(ranks), self._verdict(ranks)

    def _patience(self, rank: int) -> float:
        return self._settings.timeout + (START if self._last_positions[rank] is None else 0)

    def _fate(self, rank: int) -> str:
        progress = self._progresses[rank]
        state = process_state(progress.pid) if progress.pid else ProcessState.GONE
        if state is ProcessState.STOPPED:
            return "is stopped (SIGSTOP, or a debugger)"
        if progress.has_ended:
            return "has ended"
        if state is ProcessState.GONE:
            return "has gone" if progress.pid else "never started"
        return "is stuck in the kernel (D)" if state is ProcessState.STUCK else ""

    def _ranks(self, fates: Mapping[int, str], *, awaited: bool) -> dict[int, RankReport]:
        waits = self._tapes.waits({rank: progress.position for rank, progress in self._progresses.items()})
        awaited_ranks = [rank for rank in self._progresses if rank not in fates] if awaited else []
        stacks = read_stacks(self._progresses, awaited_ranks)
        return {
            rank: RankReport(wait, self._idle[rank], fates.get(rank, ""), stacks[rank]) for rank, wait in waits.items()
        }

    def _verdict(self, ranks: Mapping[int, RankReport]) -> str:
        """Return a sentence on the cause: ranks that cannot run, else ranks for which others wait, else the network."""
        timeout_text = f"the run ended after the {self._settings.timeout:g} s of --timeout"
        for fate in dict.fromkeys(report.fate for report in ranks.values()):
            if fate and fate != "has ended":
                members = [rank for rank, report in ranks.items() if report.fate == fate]
                return f"{describe_fate(members, fate)}, and {timeout_text}."
        waits = {rank: report.wait for rank, report in ranks.items()}
        culprits = find_culprits(waits) or [rank for rank, wait in waits.items() if not wait.blockers]
        local_ranks = [rank for rank in culprits if rank in ranks]
        if local_ranks:
            description = waits[local_ranks[0]].description
            return (
                f"no progress on {rank_names(local_ranks)}: {description}; {timeout_text}. "
                "If steps, evaluations or saves of the run take longer, give a larger --timeout."
            )
        if culprits:
            return f"no progress on {rank_names(culprits)} of another host, and {timeout_text}."
        return _network(waits) + f", and {timeout_text}."


class Watchdog:
    """Watch over the ranks of a host from a thread in each of them, as a context manager.

    It is used if a launcher has started the ranks, so that their parent is no process of Shardlab.

    Args:
        rank: rank of this process.
        settings: settings of the watch.
        gather: function that all ranks call together. It returns the arguments of all ranks, by rank.
    """

    def __init__(
        self, rank: int, settings: WatchSettings, gather: Callable[[tuple[str, str]], list[tuple[str, str]]]
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._mine = RankProgress()
        self._mine.take()
        write_stack_on_signal(self._mine)
        this_host = f"{socket.gethostname()} {_namespace()}"
        self._ranks: dict[int, RankProgress] = {}
        for other, (host, path) in enumerate(gather((this_host, self._mine.path))):
            if host == this_host:
                with suppress(OSError):
                    self._ranks[other] = self._mine if other == rank else RankProgress.at(path)
        self._watch = Watch(settings, self._ranks)
        self._end_event = threading.Event()
        gather((this_host, ""))  # no rank may end before all ranks have opened its progress file

    def __enter__(self) -> None:
        threading.Thread(target=self._look, daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_event.set()
        if not isinstance(error, Exception):
            self._mine.has_ended = True
            return
        if isinstance(error, UserError):  # shown to the user without a report
            self._mine.reported = True
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher terminates this rank, but the report comes first
        lost_peer = is_lost(error)
        self._mine.fail(time.monotonic_ns(), lost_peer, stack_text(traceback.extract_tb(trace)))
        if not lost_peer:
            self._watch.ask_for_stacks()
            time.sleep(LANDING)
            whole = "".join(traceback.format_exception(error))
            self._mine.reported = True
            raise RankFailed(
                f"rank {self._rank} failed, and the run ended with it.\n\n{whole}", self._watch.report(self._fates())
            ) from None
        time.sleep(LANDING)
        fates = self._fates()
        killed_ranks = [rank for rank, fate in fates.items() if fate == _GONE]
        at_fault = [
            rank
            for rank, progress in self._ranks.items()
            if (progress.failed and not progress.lost_connection) or progress.reported
        ]
        if at_fault or not self._reports():
            self._await_report(0.0)
            raise SystemExit(1)
        self._mine.reported = True
        verdict = describe_end(
            *((killed_ranks, _GONE) if killed_ranks else ([self._rank], "lost its connection to another host"))
        )
        raise RankFailed(verdict, self._watch.report(fates)) from None

    def _look(self) -> None:
        while not self._end_event.wait(self._watch.interval):
            if self._watch.look():
                self._end_hang()

    def _end_hang(self) -> None:
        """Print the report, unless another rank of the host prints it, and end this process."""
        if not self._reports():
            self._await_report(self._watch.interval)
        if not any(progress.reported for progress in self._ranks.values()):
            report, verdict = self._watch.report_hang()
            self._mine.reported = True
            saved_text = (
                f"shardlab: the run failed; {self._settings.describe_saved()}\n"
                if self._settings.describe_saved
                else ""
            )
            with suppress(OSError):
                print(f"{saved_text}{report}\n\nshardlab: {verdict}", file=sys.stderr, flush=True)
            time.sleep(LANDING)
            for rank, progress in self._ranks.items():  # the launcher would wait for a rank that is stopped
                if rank != self._rank and progress.pid and not progress.has_ended:
                    with suppress(OSError):
                        os.kill(progress.pid, signal.SIGKILL)
        os._exit(1)

    def _reports(self) -> bool:
        """Return whether this rank reports for its host: the lowest rank that runs, or the lowest of all."""
        alive = [rank for rank, progress in self._ranks.items() if process_state(progress.pid) is ProcessState.RUNS]
        return self._rank == min(alive or self._ranks)

    def _await_report(self, seconds: float) -> None:
        """Wait until a rank of this host has reported, for at most 3 * PATIENCE + `seconds` seconds."""
        deadline = time.monotonic() + 3 * PATIENCE + seconds
        while time.monotonic() < deadline and not any(progress.reported for progress in self._ranks.values()):
            time.sleep(0.02)

    def _fates(self) -> Mapping[int, str]:
        fates: dict[int, str] = {}
        for rank, progress in self._ranks.items():
            if progress.failed:
                fates[rank] = "lost its connection" if progress.lost_connection else "failed"
            elif progress.has_ended:
                fates[rank] = "has ended"
            elif process_state(progress.pid) is ProcessState.GONE:
                fates[rank] = _GONE
        return fates


_GONE = "has gone (killed?)"


@dataclass(frozen=True)
class RankReport:
    """A rank's part of a report.

    Attributes:
        wait: op in which the rank is, and the ranks that it waits for.
        idle: seconds since its last progress.
        fate: what became of its process (`was killed (SIGKILL)`, `is stopped`); empty if it runs.
        stack: frames of its Python stack, the innermost last; empty if it wrote none.
    """

    wait: RankWait
    idle: float
    fate: str
    stack: list[str]


def rank_names(ranks: tuple[int, ...] | list[int]) -> str:
    """Return the names of ranks, such as `rank 1` or `ranks 0-2`."""
    return f"{plural('rank', len(ranks))} {listed(sorted(ranks))}"


def describe_end(ranks: list[int], fate: str) -> str:
    """Return a sentence such as `rank 1 was killed (SIGKILL), and the run ended with it.`"""
    return f"{describe_fate(ranks, fate)}, and the run ended with {'it' if len(ranks) == 1 else 'them'}."


def describe_fate(ranks: list[int], fate: str) -> str:
    """Return a clause such as `rank 1 is stopped` or `ranks 0-1 are stopped`."""
    verb, _, rest = fate.partition(" ")
    several = {"is": "are", "was": "were", "has": "have"}.get(verb, verb)
    return f"{rank_names(ranks)} {verb if len(ranks) == 1 else several} {rest}"


def report_text(ranks: Mapping[int, RankReport]) -> str:
    """Return a report of the position and the stack of every rank.

    Ranks with the same position and fate share a line, and ranks with the same stack share that stack.
    """
    lines = ["where each rank was:"]
    positions: dict[tuple[RankWait, str], list[int]] = defaultdict(list)
    for rank, report in ranks.items():
        positions[report.wait, report.fate].append(rank)
    for (wait, fate), members in positions.items():
        lines.append(f"  {rank_names(members)}: {_sentence(wait, max(ranks[rank].idle for rank in members), fate)}")
    lines += ["", "stacks, innermost call last:"]
    stacks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, report in ranks.items():
        stacks[tuple(report.stack) or (report.fate or "wrote none in time",)].append(rank)
    for frames, members in stacks.items():
        if ranks[members[0]].stack:
            lines += [f"  {rank_names(members)}:", *(f"    {frame}" for frame in frames)]
        else:
            lines.append(f"  {rank_names(members)}: none, it {frames[0]}")
    return "\n".join(lines)


@dataclass(frozen=True)
class RankWait:
    """Place of a rank in its program, and the ranks that it waits for.

    Attributes:
        description: the op in words, such as `waits in ...` or `is in ...`.
        blockers: ranks that it waits for; empty if it computes.
        all_issued: whether all blockers have issued their part too, so that only the network can be the cause.
    """

    description: str
    blockers: tuple[int, ...] = ()
    all_issued: bool = False


class TapeWaits:
    """Waits of ranks for one another, from their positions on the tapes of a program.

    Args:
        checked: program of the training.
        line_of: see `LineOf`.
    """

    def __init__(self, checked: Checked, line_of: LineOf) -> None:
        self._checked = checked
        self._line_of = line_of

    def waits(self, positions: Mapping[int, TapePosition | None]) -> dict[int, RankWait]:
        """Return for each rank the op in which it is and the ranks that it waits for.

        Args:
            positions: position of each rank of this host; None before its first tape.
        """
        return {rank: self._wait(rank, positions) for rank in positions}

    @cached_property
    def _forward(self) -> Checked:
        return check_forward(forward_only(self._checked))

    def _wait(self, rank: int, positions: Mapping[int, TapePosition | None]) -> RankWait:
        position = positions[rank]
        if position is None:
            return RankWait("has not begun")
        checked = self._forward if position.evaluates else self._checked
        tape = checked.program.tapes[rank]
        if position.op >= position.length:
            slower = tuple(
                other
                for other in positions
                if other != rank and self._is_round_pending(other, positions, position.round)
            )
            return RankWait(
                f"is at the end of {'an evaluation' if position.evaluates else f'step {position.step + 1}'}", slower
            )
        if position.length != len(tape):  # the rank runs an earlier stage of a batch ramp, or a sample
            return RankWait(f"is in op {position.op} of {position.length} of another program")
        line = "" if position.evaluates else self._line_of(rank, position.op)
        name = "evaluation" if position.evaluates else "step"
        location = f"{name} {position.step + 1}, op {position.op} of {len(tape)}{line}: "
        op = tape[position.op]
        if op.kind is not OpKind.WAIT:
            verb = "starts" if op.kind in COMMUNICATION else "is in"
            return RankWait(f"{location}{verb} {op_text(checked, rank, op)}")
        communication = checked.communications[checked.communication_of[rank][op.handle]]
        issue = next(member.op for member in communication.participants if member.rank == rank)
        others = [member for member in communication.participants if member.rank != rank]
        late_ranks = tuple(
            member.rank
            for member in others
            if member.rank not in positions or _is_op_pending(positions[member.rank], position.round, member.op)
        )
        description = f"{location}waits in {op_text(checked, rank, tape[issue])}"
        return RankWait(description, late_ranks or tuple(member.rank for member in others), not late_ranks)

    @staticmethod
    def _is_round_pending(rank: int, positions: Mapping[int, TapePosition | None], tape_round: int) -> bool:
        """Return whether a rank has not ended a round (`TapePosition.round`) yet."""
        position = positions[rank]
        if position is None or position.round != tape_round:
            return position is None or position.round < tape_round
        return position.op < position.length


def op_text(checked: Checked, rank: int, op: Op) -> str:
    """Return an op with its layer and microbatches, such as `backward(layer 3) of microbatch 1`."""
    numbers = [*op.inputs, *op.outputs]
    microbatches = [checked.specs[rank][number].microbatches for number in numbers if number in checked.specs[rank]]
    first_mask = next((mask for mask in microbatches if mask), 0)
    text = str(op)
    return text if not first_mask or "microbatch" in text else f"{text} of {microbatches_text(first_mask)}"


def find_culprits(waits: Mapping[int, RankWait]) -> list[int]:
    """Return the ranks that others wait for and that do not wait themselves; empty if all wait in a cycle."""
    awaited = {rank for wait in waits.values() if not wait.all_issued for rank in wait.blockers}
    return sorted(rank for rank in awaited if rank not in waits or not waits[rank].blockers)


class ProcessState(Enum):
    """State of a process, with the kernel's letters for it."""

    RUNS = ""
    STOPPED = "Tt"
    STUCK = "D"
    GONE = "ZX"


def process_state(pid: int) -> ProcessState:
    """Return the state of a process of this host, as reported by the kernel."""
    try:
        state_code = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:  # the process has gone, or the system has no /proc
        try:
            os.kill(pid, 0)
        except OSError:
            return ProcessState.GONE
        return ProcessState.RUNS
    return next((state for state in ProcessState if state_code in state.value), ProcessState.RUNS)


_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ENTERED = re.compile(r'executor\.py", line \d+ in _run$')
"""Pattern of the frame that runs a tape. The frames outside of it do not depend on the current op."""


def write_stack_on_signal(progress: RankProgress) -> None:
    """Make this process write its stack to its progress file upon WRITE_STACK."""
    faulthandler.register(WRITE_STACK, file=progress.file, all_threads=False)


def stack_text(frames: StackSummary) -> str:
    """Format the frames of a traceback as `faulthandler` does."""
    lines = [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n' for frame in reversed(frames)]
    return "".join(["Current thread when it failed\n", *lines])


def read_stacks(progresses: Mapping[int, RankProgress], awaited: Iterable[int]) -> dict[int, list[str]]:
    """Return the stacks that ranks have written, innermost call last.

    Args:
        progresses: progress of each rank.
        awaited: ranks whose stacks are awaited for PATIENCE seconds.
    """
    deadline, texts = time.monotonic() + PATIENCE, dict.fromkeys(awaited, "")
    while texts and time.monotonic() < deadline:
        time.sleep(0.02)
        now = {rank: progresses[rank].text for rank in texts}
        texts = {rank: text for rank, text in now.items() if not text or text != texts[rank]}  # still being written
    return {rank: parse_frames(progress.text) for rank, progress in progresses.items()}


def parse_frames(text: str) -> list[str]:
    """Return the frames of the last stack in a text, outermost first.

    If the stack shows that a tape was running, only the frames of the current op are returned.
    """
    last = re.split(r"^Current thread .*$", text, flags=re.MULTILINE)[-1]
    frames = [f'File "{file}", line {line} in {name}' for file, line, name in _FRAME.findall(last)][::-1]
    tape_starts = [index for index, frame in enumerate(frames) if _ENTERED.search(frame)]
    return frames[tape_starts[-1] :] if tape_starts else frames


def _network(waits: Mapping[int, RankWait]) -> str:
    rank, wait = next(((rank, wait) for rank, wait in waits.items() if wait.all_issued), next(iter(waits.items())))
    members = rank_names([rank, *wait.blockers])
    return f"no data arrive between {members}, although all of them have issued their part: the network drops the data"


def _namespace() -> str:
    """Return a name of this process's PID namespace, since two containers may have equal process numbers."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _sentence(wait: RankWait, idle: float, fate: str) -> str:
    peers = f" for {rank_names(wait.blockers)}" if wait.blockers else ""
    also_issued = ", which issued their part too" if wait.all_issued and wait.blockers else ""
    start = time.strftime("%H:%M:%S", time.localtime(time.time() - idle))
    return f"{wait.description}{peers}{also_issued}, since {start} ({idle:.0f} s)" + (f"; it {fate}" if fate else "")


def _is_op_pending(position: TapePosition | None, tape_round: int, op: int) -> bool:
    """Return whether a rank has not ended op `op` of a round (`TapePosition.round`) yet."""
    return position is None or (position.round, position.op) <= (tape_round, op)
