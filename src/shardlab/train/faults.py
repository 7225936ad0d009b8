"""Ranks that die or hang: who has noticed what, and one report of where all of them were."""

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
from shardlab.execute.progress import RankProgress, TapePosition
from shardlab.language import Op, OpKind
from shardlab.language.ops import COMMUNICATION
from shardlab.language.rules.kinds import listed, microbatches_text, plural

__all__ = ["Watch", "Watching"]


# A watch over ranks: it notices who no longer gets on, and reports where all of them are.
#
# It reads the ranks' words and asks the kernel; nothing needs a rank's help, or a store.


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


# A watch within each rank, where a launcher has started the ranks and no process of Shardlab stands above them.
#
# The ranks of a host read one another's words. One of them, the first that still runs, reports for its host.


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


# Report of a run that failed or hangs: where every rank was, and its stack; ranks that agree have one line.


@dataclass(frozen=True)
class RankReport:
    """A rank's part of a report: where it stands, and since when.

    Attributes:
        wait: where it is.
        idle: seconds in which it has not got on.
        fate: what became of its process (`was killed (SIGKILL)`, `is stopped`); empty if it just runs.
        stack: its frames, the innermost last; none where it gave none.
    """

    wait: RankWait
    idle: float
    fate: str
    stack: list[str]


def names(ranks: tuple[int, ...] | list[int]) -> str:
    """`rank 1` or `ranks 0-2`."""
    return f"{plural('rank', len(ranks))} {listed(sorted(ranks))}"


def ended_with(ranks: list[int], fate: str) -> str:
    """`rank 1 was killed (SIGKILL), and the run ended with it.`"""
    return f"{said_of(ranks, fate)}, and the run ended with {'it' if len(ranks) == 1 else 'them'}."


def said_of(ranks: list[int], fate: str) -> str:
    """`rank 1 is stopped`, `ranks 0-1 are stopped`."""
    verb, _, rest = fate.partition(" ")
    several = {"is": "are", "was": "were", "has": "have"}.get(verb, verb)
    return f"{names(ranks)} {verb if len(ranks) == 1 else several} {rest}"


def report_text(ranks: Mapping[int, RankReport]) -> str:
    """The report, without a verdict: that is for who knows why the run ended."""
    lines = ["where each rank was:"]
    alike: dict[tuple[RankWait, str], list[int]] = defaultdict(list)
    for rank, seen in ranks.items():
        alike[seen.wait, seen.fate].append(rank)
    for (wait, fate), members in alike.items():
        lines.append(f"  {names(members)}: {_sentence(wait, max(ranks[rank].idle for rank in members), fate)}")
    lines += ["", "stacks, innermost call last:"]
    stacks: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, seen in ranks.items():
        stacks[tuple(seen.stack) or (seen.fate or "gave none in time",)].append(rank)
    for frames, members in stacks.items():
        if ranks[members[0]].stack:
            lines += [f"  {names(members)}:", *(f"    {frame}" for frame in frames)]
        else:
            lines.append(f"  {names(members)}: none, it {frames[0]}")
    return "\n".join(lines)


def _sentence(wait: RankWait, idle: float, fate: str) -> str:
    whom = f" for {names(wait.blockers)}" if wait.blockers else ""
    come = ", which came as well" if wait.come and wait.blockers else ""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - idle))
    return f"{wait.what}{whom}{come}, since {since} ({idle:.0f} s)" + (f"; it {fate}" if fate else "")


# Who waits for whom in what, from the ranks' positions on their tapes: nobody has to be asked.


LineOf = Callable[[int, int], str]
"""The strategy's file and line that wrote an op, by rank and op, as ` (FILE:LINE)`; empty where that is not known."""


@dataclass(frozen=True)
class RankWait:
    """Where a rank is, in words.

    Attributes:
        what: the op; `waits in ...`, `is in ...`.
        blockers: ranks that it waits for; none where it computes.
        come: whether all that it waits for have issued their part, so that the network is to deliver it.
    """

    what: str
    blockers: tuple[int, ...] = ()
    come: bool = False


class Tapes:
    """The tapes that positions are on.

    Args:
        checked: the program that trains.
        line_of: see `LineOf`.
    """

    def __init__(self, checked: Checked, line_of: LineOf) -> None:
        self._checked = checked
        self._line_of = line_of

    @cached_property
    def _half(self) -> Checked:
        return check_forward(forward_only(self._checked))

    def waits(self, positions: Mapping[int, TapePosition | None]) -> dict[int, RankWait]:
        """Say of each rank what it waits in for whom.

        Args:
            positions: of the ranks that can be seen; None before the first tape.
        """
        return {rank: self._wait(rank, positions) for rank in positions}

    def _wait(self, rank: int, positions: Mapping[int, TapePosition | None]) -> RankWait:
        here = positions[rank]
        if here is None:
            return RankWait("has not begun")
        checked = self._half if here.evaluates else self._checked
        tape = checked.program.tapes[rank]
        if here.op >= here.length:
            behind = tuple(
                other for other in positions if other != rank and self._not_done(other, positions, here.round)
            )
            return RankWait(
                f"is at the end of {'an evaluation' if here.evaluates else f'step {here.step + 1}'}", behind
            )
        if here.length != len(tape):  # of a batch ramp's earlier steps, or a sample
            return RankWait(f"is in op {here.op} of {here.length} of another program")
        line = "" if here.evaluates else self._line_of(rank, here.op)
        name = "evaluation" if here.evaluates else "step"
        where = f"{name} {here.step + 1}, op {here.op} of {len(tape)}{line}: "
        op = tape[here.op]
        if op.kind is not OpKind.WAIT:
            verb = "starts" if op.kind in COMMUNICATION else "is in"
            return RankWait(f"{where}{verb} {op_text(checked, rank, op)}")
        communication = checked.communications[checked.communication_of[rank][op.handle]]
        issued = next(each.op for each in communication.participants if each.rank == rank)
        others = [each for each in communication.participants if each.rank != rank]
        missing = tuple(
            each.rank
            for each in others
            if each.rank not in positions or _before(positions[each.rank], here.round, each.op)
        )
        what = f"{where}waits in {op_text(checked, rank, tape[issued])}"
        return RankWait(what, missing or tuple(each.rank for each in others), not missing)

    @staticmethod
    def _not_done(rank: int, positions: Mapping[int, TapePosition | None], tape_round: int) -> bool:
        """Whether a rank is still in a round, or before it."""
        at = positions[rank]
        if at is None or at.round != tape_round:
            return at is None or at.round < tape_round
        return at.op < at.length


def _before(position: TapePosition | None, tape_round: int, op: int) -> bool:
    """Whether a rank has not done an op of a round yet."""
    return position is None or (position.round, position.op) <= (tape_round, op)


def op_text(checked: Checked, rank: int, op: Op) -> str:
    """An op with its layer and microbatches: `backward(layer 3) of microbatch 1`."""
    numbers = [*op.inputs, *op.outputs]
    found = [checked.specs[rank][number].microbatches for number in numbers if number in checked.specs[rank]]
    about = next((mask for mask in found if mask), 0)
    text = str(op)
    return text if not about or "microbatch" in text else f"{text} of {microbatches_text(about)}"


def culprits(waits: Mapping[int, RankWait]) -> list[int]:
    """Ranks for which others wait and that wait for nobody themselves; none where all wait in a circle."""
    wanted = {rank for wait in waits.values() if not wait.come for rank in wait.blockers}
    return sorted(rank for rank in wanted if rank not in waits or not waits[rank].blockers)


# State of a process of this host, as its kernel tells it.


class ProcessState(Enum):
    """What a process can do now: the words stand in a report."""

    RUNS = "runs"
    STOPPED = "stopped"
    STUCK = "stuck in the kernel"
    GONE = "gone"


_LETTERS = {
    "T": ProcessState.STOPPED,
    "t": ProcessState.STOPPED,
    "D": ProcessState.STUCK,
    "Z": ProcessState.GONE,
    "X": ProcessState.GONE,
}


def state_of(pid: int) -> ProcessState:
    """Look a process up, without asking it anything."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:  # gone, or a system that has no /proc
        try:
            os.kill(pid, 0)
        except OSError:
            return ProcessState.GONE
        return ProcessState.RUNS
    return _LETTERS.get(letter, ProcessState.RUNS)


# Python stacks of other processes: a signal has each write its own, also one that is deep in a library.


WRITE_STACK = signal.SIGUSR2
"""Has a rank write its main thread's stack; Python's own handler does it, wherever the thread is."""

PATIENCE = 1.0
"""Seconds in which a process that runs has written its stack."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ENTERED = re.compile(r'executor\.py", line \d+ in _run$')
"""The frame that runs a tape: which rank called it from where tells nothing of what it waits in."""


def write_when_asked(progress: RankProgress) -> None:
    """Write this process's stack behind its words, whenever it is asked to."""
    faulthandler.register(WRITE_STACK, file=progress.file, all_threads=False)


def stack_text(frames: StackSummary) -> str:
    """A traceback's frames as a stack is written here."""
    lines = [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n' for frame in reversed(frames)]
    return "".join(["Current thread when it failed\n", *lines])


def ask_for_stacks(progresses: Iterable[RankProgress]) -> None:
    """Ask processes that run; one that is stopped, or has not taken its words yet, gives none."""
    for progress in progresses:
        if progress.pid == os.getpid():
            signal.pthread_kill(threading.main_thread().ident or 0, WRITE_STACK)  # a kernel prefers who asks
        elif progress.pid:
            with suppress(ProcessLookupError):
                os.kill(progress.pid, WRITE_STACK)


def stacks_of(progresses: Mapping[int, RankProgress], awaited: Iterable[int]) -> dict[int, list[str]]:
    """What ranks have written, innermost call last; waits a little for those that are awaited."""
    deadline, found = time.monotonic() + PATIENCE, dict.fromkeys(awaited, "")
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        now = {rank: progresses[rank].text for rank in found}
        found = {rank: text for rank, text in now.items() if not text or text != found[rank]}  # it still writes
    return {rank: frames_of(progress.text) for rank, progress in progresses.items()}


def frames_of(text: str) -> list[str]:
    """The frames of the last stack in a text, outermost first; of a rank on its tape, those that run the op."""
    last = re.split(r"^Current thread .*$", text, flags=re.MULTILINE)[-1]
    frames = [f'File "{file}", line {line} in {name}' for file, line, name in _FRAME.findall(last)][::-1]
    entered = [place for place, frame in enumerate(frames) if _ENTERED.search(frame)]
    return frames[entered[-1] :] if entered else frames
