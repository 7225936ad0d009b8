"""A communication that has been called: `await` runs it, and forgetting to is told at the line of the call."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from shardlab.puzzles.lines import Line, here
from shardlab.puzzles.refusal import PuzzleRefused, placed

T = TypeVar("T", covariant=True)

_NEVER_AWAITED = re.compile("coroutine '(.*)' was never awaited")


class Call(Coroutine[Any, Any, T]):
    """What `model.allreduce(...)` and its like give until they are awaited; asyncio takes it as the coroutine it is.

    Args:
        place: the rank and the op, for messages.
        verb, argument: what was called, as in `allreduce` and `layer 0`.
        work: makes the coroutine that communicates, given the line of the call.
        forgotten: where a call that is thrown away without an `await` says so.
    """

    def __init__(
        self,
        place: str,
        verb: str,
        argument: str,
        work: Callable[[Line | None], Coroutine[Any, Any, T]],
        forgotten: list[str],
    ) -> None:
        self._place = place
        self._verb = verb
        self._argument = argument
        self._work = work
        self._line = here()
        self._forgotten = forgotten
        self._started: Coroutine[Any, Any, T] | None = None
        self._told = False

    def _run(self) -> Coroutine[Any, Any, T]:
        if self._started is None:
            self._started = self._work(self._line)
        return self._started

    def send(self, value: Any, /) -> Any:
        return self._run().send(value)

    def throw(self, *error: Any) -> Any:
        return self._run().throw(*error)

    def close(self) -> None:
        self._told = True
        if self._started is not None:
            self._started.close()

    def __await__(self) -> Generator[Any, None, T]:
        return self._run().__await__()

    def __del__(self) -> None:
        if self._started is None and not self._told:
            self._forgotten.append(self._sentence())

    def _sentence(self) -> str:
        text = f"{self._place} {self._verb}({self._argument}) was called without `await`, so it has not run"
        return placed(self._line, f"{text}; write `await model.{self._verb}({'...' * bool(self._argument)})`.")

    def __repr__(self) -> str:
        return f"<{self._verb}({self._argument}), not awaited>"

    def refuse(self) -> NoReturn:
        """Say that this is used as if it were what `await` gives."""
        self._told = True
        raise PuzzleRefused(self._sentence())

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "cr_", "gi_", "ag_")):  # Python and asyncio look for these
            raise AttributeError(name)
        self.refuse()

    def __add__(self, other: object) -> NoReturn:
        self.refuse()

    __radd__ = __add__

    def __iter__(self) -> NoReturn:
        self.refuse()


class Dropped(NamedTuple):
    """A coroutine of a student's own `async def` that nobody awaited.

    Attributes:
        sentence: which one, and where.
        warn: shows Python's warning of it.
    """

    sentence: str
    warn: Callable[[], None]


@contextmanager
def dropped_coroutines() -> Generator[list[Dropped]]:
    """Collect Python's warnings of coroutines that nobody awaited; its other ones are shown as ever."""
    dropped: list[Dropped] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _NEVER_AWAITED.pattern, RuntimeWarning)
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], file: str, number: int, *rest: Any) -> None:
            found = _NEVER_AWAITED.match(str(message))
            if found is None:
                show(message, category, file, number, *rest)
                return
            name = found[1].rpartition(".")[2]
            text = f"{name}() was called without `await`, so it has not run; write `await {name}(...)`."
            warn = partial(show, message, category, file, number, *rest)
            dropped.append(Dropped(placed(Line(file, number), text), warn))

        warnings.showwarning = collect
        yield dropped


def refuse_forgotten(forgotten: list[str]) -> None:
    """Refuse to go on after a call that was thrown away without an `await`."""
    if forgotten:
        raise PuzzleRefused(forgotten[0])
