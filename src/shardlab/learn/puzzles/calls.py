"""Calls of the puzzles' ranks: awaiting a communication, refusals, the log of events, and the search for deadlocks.

`model.allreduce(...)` returns a `PuzzleCall` to `await`; a forgotten `await` is refused at the line of the call.
`translate_refusals` converts refusals of the shared rules to `PuzzleRefused`. `AsyncioWatch` blocks ranks on futures of
the user's event loop, and notices when no rank can continue.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Generator, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol, Self, TypeVar

from shardlab.common.errors import About
from shardlab.common.user_code import SourceLine, line_now
from shardlab.language import Deadlock, OpKind, Refused
from shardlab.language.values import Wait, deadlock_error
from shardlab.simulate.timeline.costs import PUZZLE_COSTS

T = TypeVar("T", covariant=True)


class PuzzleCall(Coroutine[Any, Any, T]):
    """Communication that was called but not awaited yet. asyncio accepts it as a coroutine.

    Args:
        name: the call, such as `allreduce(layer 0)`.
        refusal: error that is raised if the call is never awaited, or used like its result.
        work: function that creates the coroutine that communicates.
        forgotten: list to which a call adds its refusal if it is dropped without an `await`.
    """

    def __init__(
        self,
        name: str,
        refusal: PuzzleRefused,
        work: Callable[[], Coroutine[Any, Any, T]],
        forgotten: list[PuzzleRefused],
    ) -> None:
        self._name = name
        self._refusal = refusal
        self._work = work
        self._forgotten = forgotten
        self._coroutine: Coroutine[Any, Any, T] | None = None
        self._reported = False

    def send(self, value: Any, /) -> Any:
        return self._run().send(value)

    def throw(self, *error: Any) -> Any:
        return self._run().throw(*error)

    def close(self) -> None:
        self._reported = True
        if self._coroutine is not None:
            self._coroutine.close()

    def __await__(self) -> Generator[Any, None, T]:
        return self._run().__await__()

    def __del__(self) -> None:
        if self._coroutine is None and not self._reported:
            self._forgotten.append(self._refusal)

    def __repr__(self) -> str:
        return f"<{self._name}, not awaited>"

    def refuse(self) -> NoReturn:
        """Raise the refusal for the use of the call like its result."""
        self._reported = True
        raise self._refusal

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "cr_", "gi_", "ag_")):  # Python and asyncio look for these
            raise AttributeError(name)
        self.refuse()

    def __add__(self, other: object) -> NoReturn:
        self.refuse()

    __radd__ = __add__

    def __iter__(self) -> NoReturn:
        self.refuse()

    def _run(self) -> Coroutine[Any, Any, T]:
        self._coroutine = self._coroutine or self._work()
        return self._coroutine


def dropped_coroutine(name: str, line: SourceLine) -> PuzzleRefused:
    """Return the refusal for a coroutine of the student that was never awaited."""
    return unawaited_refusal(f"{name}()", f"{name}(...)").on(line)


def unawaited_refusal(name: str, call: str, layer: int = -1) -> PuzzleRefused:
    """Return the refusal for a call that was not awaited. `call` is the correct form of the call."""
    problem = f"{name} was called without `await`, so it has not run"
    return PuzzleRefused("not awaited", About("", layer), problem, f"write `await {call}`")


def refuse_unawaited(forgotten: list[PuzzleRefused]) -> None:
    """Raise the refusal for a call that was dropped without an `await`."""
    if forgotten:
        raise PuzzleRefused.of(forgotten[0])


Result = TypeVar("Result")


class PuzzleRefused(Refused, AssertionError):
    """Refusal of a solution. It is also an `AssertionError`, which published solutions expect."""

    @classmethod
    def of(cls, refusal: Refused) -> Self:
        """Convert a refusal of the shared rules to one of the puzzles."""
        converted = cls(*refusal.args)
        vars(converted).update(vars(refusal))
        return converted

    def on(self, line: SourceLine | None) -> Self:
        """Set the line of the student's code, if it is known."""
        self.line = "" if line is None else str(line)
        return self


class PuzzleDeadlock(PuzzleRefused, Deadlock):
    """Refusal of ranks that wait for one another for ever. The message names the whole cycle."""


class RunningRank(Protocol):
    """Interface of a rank through which its values are counted in its memory, and refusals name it.

    Attributes:
        rank: number of the rank.
        log: all events of the rank, in order.
    """

    rank: int
    log: list[PuzzleEvent]

    def derive(self, *values: Any) -> None:
        """Count, in the rank's memory, values that the rank created, received or read just now."""


_running_rank: ContextVar[RunningRank | None] = ContextVar("shardlab_puzzle_rank", default=None)


def set_running_rank(rank: RunningRank) -> None:
    """Record the rank that runs in this task. `a + b` and `.combine` need it, and have no argument for it."""
    _running_rank.set(rank)


def record_derived(value: Result, *read: Any) -> Result:
    """Count a new value in the memory of the running rank, and return it.

    Args:
        read: values that were read without an op, as in `a + b`. They count in the rank's memory until now.
    """
    rank = _running_rank.get()
    if rank is not None:
        rank.derive(value, *read)
    return value


@contextmanager
def translate_refusals(rank: RunningRank | None = None, line: SourceLine | None = None) -> Generator[None]:
    """Convert a refusal of the shared rules to a `PuzzleRefused` with the puzzles' names and the line of the mistake.

    Args:
        rank: the rank that runs the op (None: the rank that runs in this task).
        line: line of the student's code (None: the current line).
    """
    try:
        yield
    except PuzzleRefused:
        raise
    except Refused as refusal:
        converted = PuzzleRefused.of(refusal).on(line or line_now())
        for name in ("about", "given", "remedy"):
            for published, kind in COLLECTIVES.items():
                setattr(converted, name, getattr(converted, name).replace(kind.value, published))
        rank = rank or _running_rank.get()
        if rank is not None:
            converted.at(rank.rank, len(rank.log))
        raise converted from None


COLLECTIVES = {"allreduce": OpKind.ALL_REDUCE, "allgather": OpKind.ALL_GATHER, "scatterreduce": OpKind.REDUCE_SCATTER}
"""Kind of op of each collective in `shardlab.language`."""


@dataclass
class PuzzleEvent:
    """Event in the log of a rank.

    Attributes:
        typ: forward, backward, loss, update, allreduce, allgather, scatterreduce or pass (a send or a receive).
        layer: layer of the event; None for update and pass, the number of layers for loss.
        rank: number of the rank.
        time, length: start time and duration, in forward passes of one microbatch through one layer.
        memory: number of live elements of the rank at the start: in its stores, or in variables that it used later.
        batches: microbatches of a forward or backward pass.
        to, source: the other rank of a message.
    """

    typ: str
    layer: int | None
    rank: int
    time: float
    length: float
    memory: float
    batches: Set[int] = frozenset()
    to: int | None = None
    source: int | None = None

    @property
    def kind(self) -> OpKind:
        """Kind of the event in `shardlab.language`."""
        if self.typ == "pass":
            return OpKind.RECV if self.to is None else OpKind.SEND
        return COLLECTIVES.get(self.typ) or OpKind(self.typ)

    @property
    def cost(self) -> float:
        """Duration of the event: proportional to the microbatches of a pass, constant for other events."""
        duration = PUZZLE_COSTS.duration(self.kind, len(self.batches))
        return int(duration) if duration.is_integer() else duration

    @property
    def end(self) -> float:
        """End time, rounded to the decimals of both summands: 19.9, not 19.900000000000002."""
        return round(self.time + self.length, 6)


GRACE_SECONDS = 1.0
"""Seconds without progress of any rank after which the watch stops waiting for ranks that have not started, or that
await something other than a communication."""

STOP = "the other ranks stop, fix it there"
"""Remedy in the refusals of waiting ranks when another rank has raised an error."""

SETTLING_TURNS = 8
"""Number of turns of the event loop without progress after which no rank can continue. A task that can continue does so
in the next turn, and a task that awaits it (`gather`, `wait_for`) does so a few turns later."""


@dataclass(eq=False)
class Blocked:
    """Rank that waits until its future has a result.

    Attributes:
        rank: number of the rank.
        line: line of the student's code at which it waits.
        task: task that waits: the rank's own, or a task that it started (`asyncio.gather` in a program).
    """

    rank: int
    line: SourceLine | None
    task: asyncio.Task[Any] | None = field(init=False, default_factory=asyncio.current_task)
    future: asyncio.Future[Any] = field(init=False, default_factory=lambda: asyncio.get_running_loop().create_future())

    @abstractmethod
    def wait(self) -> Wait:
        """Return a description of the wait."""

    def go_on(self, result: Any = None) -> None:
        """Let the rank continue, unless it already does."""
        if not self.future.done():
            self.future.set_result(result)


class AsyncioWatch:
    """Scheduler of the ranks' tasks. It blocks them on futures, and finds deadlocks without sleeping or polling.

    A rank may wait for several operations at once (`asyncio.gather` in a program), one task may run several ranks one
    after the other, and a run may use several event loops one after the other.

    Args:
        ranks: number of ranks.
        when_quiet: function that is called when every rank waits or has ended. It returns True if it let a rank
            continue.

    Attributes:
        forgotten: refusals of communications that were called without an `await`.
    """

    def __init__(self, ranks: int, when_quiet: Callable[[], bool]) -> None:
        self.ranks, self._when_quiet = ranks, when_quiet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._blocked: dict[asyncio.Future[Any], Blocked] = {}
        self._failure: PuzzleRefused | None = None
        self._progress = 0
        self._check_scheduled = False
        self.forgotten: list[PuzzleRefused] = []

    def enter(self, rank: int) -> None:
        """Record the task that runs `rank`, if there is one. The rank ends with the task."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop is running
            return
        if task is None or self._tasks.get(rank) is task:
            return
        if task.get_loop() is not self._loop:
            self._loop = task.get_loop()
            self._tasks, self._blocked, self._failure, self._check_scheduled = {}, {}, None, False
        self._tasks[rank] = task
        task.add_done_callback(partial(self._handle_end, rank))

    async def block(self, blocked: Blocked) -> Any:
        """Suspend a rank until its future has a result, and return the result.

        Raises:
            PuzzleDeadlock: if no rank can continue.
            PuzzleRefused: if another rank raised an error, or an `await` was forgotten.
        """
        if self._failure:
            raise PuzzleRefused.of(self._failure)
        self._blocked[blocked.future] = blocked
        blocked.future.add_done_callback(self._unblock)
        self._record_progress()
        return await blocked.future

    def waiting_ranks(self) -> set[int]:
        """Return the ranks that wait."""
        return {blocked.rank for future, blocked in self._blocked.items() if not future.done()}

    def ended_ranks(self) -> list[int]:
        """Return the ranks whose task has ended."""
        return sorted(rank for rank, task in self._tasks.items() if task.done())

    def _unblock(self, future: asyncio.Future[Any]) -> None:
        self._blocked.pop(future, None)
        self._record_progress()

    def _handle_end(self, rank: int, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(rank) is not task:
            return
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            reason = "was cancelled" if error is None else f"raised {type(error).__name__}: {error}"
            self._failure = PuzzleRefused("the program raised", "", f"rank {rank} {reason}", STOP)
            self._fail(self._failure)
        else:
            self._record_progress()

    def _record_progress(self) -> None:
        """Record progress, and check again when the event loop has nothing else to run."""
        self._progress += 1
        if self._loop is not None and not self._check_scheduled:
            self._check_scheduled = True
            self._loop.call_soon(self._look, self._progress, 0)

    def _look(self, count: int, idle_turns: int) -> None:
        assert self._loop is not None
        if count != self._progress or idle_turns < SETTLING_TURNS:
            self._loop.call_soon(self._look, self._progress, idle_turns + 1 if count == self._progress else 0)
            return
        self._check_scheduled = False
        running_ranks = self._running_ranks()
        if not self.waiting_ranks() or (not running_ranks and self._when_quiet()):
            return
        if running_ranks or len(self._tasks) < self.ranks:
            self._loop.call_later(GRACE_SECONDS, self._give_up, count)
        else:
            self._report()

    def _running_ranks(self) -> list[int]:
        """Return the ranks that neither wait nor have ended."""
        ranks, tasks = self.waiting_ranks(), {blocked.task for blocked in self._blocked.values()}
        return [r for r, task in self._tasks.items() if r not in ranks and task not in tasks and not task.done()]

    def _give_up(self, count: int) -> None:
        """Continue without the missing ranks if there was no progress during the grace period."""
        if count == self._progress and self.waiting_ranks() and not self._when_quiet():
            self._report()

    def _report(self) -> None:
        """Report the deadlock, or the forgotten `await` that caused it, to every waiting rank."""
        if self.forgotten:
            self._fail(self.forgotten[0])
            return
        waits: dict[int, Wait] = {}
        for blocked in self._blocked.values():
            waits.setdefault(blocked.rank, blocked.wait())
        refusal = PuzzleDeadlock.of(deadlock_error(waits))
        missing, running_ranks = [rank for rank in range(self.ranks) if rank not in self._tasks], self._running_ranks()
        if missing:
            names = ", ".join(map(str, missing))
            refusal.trail += (
                f" Missing: rank {names} started no communication within {GRACE_SECONDS:g} s; is every rank driven?"
            )
        for rank in running_ranks:
            refusal.trail += f" Rank {rank} awaits something else than a communication; await only those."
        for rank in [*missing, *running_ranks]:
            ended_text, not_come_text = f"rank {rank} has ended without it", f"rank {rank} has not come to it"
            refusal.given = refusal.given.replace(ended_text, not_come_text)
        self._fail(refusal)

    def _fail(self, refusal: PuzzleRefused) -> None:
        """Raise a copy of the refusal in every waiting rank."""
        for future in self._blocked:
            if not future.done():
                future.set_exception(type(refusal).of(refusal))
