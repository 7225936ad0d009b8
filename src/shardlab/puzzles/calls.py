"""A communication that has been called: `await` runs it, and forgetting to is told at the line of the call."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

from shardlab.errors import About
from shardlab.program.lines import SourceLine
from shardlab.puzzles.refusal import PuzzleRefused

T = TypeVar("T", covariant=True)

_NEVER_AWAITED = re.compile("coroutine '(.*)' was never awaited")


class PuzzleCall(Coroutine[Any, Any, T]):
    """What `model.allreduce(...)` and its like give until they are awaited; asyncio takes it as the coroutine it is.

    Args:
        name: what was called, as in `allreduce(layer 0)`.
        refusal: what to say if it is never awaited, or used as if it had been.
        work: makes the coroutine that communicates.
        forgotten: where a call that is thrown away without an `await` says so.
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
        self._started: Coroutine[Any, Any, T] | None = None
        self._told = False

    def _run(self) -> Coroutine[Any, Any, T]:
        self._started = self._started or self._work()
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
            self._forgotten.append(self._refusal)

    def __repr__(self) -> str:
        return f"<{self._name}, not awaited>"

    def refuse(self) -> NoReturn:
        """Say that this is used as if it were what `await` gives."""
        self._told = True
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


@contextmanager
def never_awaited() -> Generator[list[tuple[PuzzleRefused, Callable[[], None]]]]:
    """Collect, for each coroutine of a student's own that nobody awaited, a refusal and what shows Python's warning.

    Other warnings are shown as ever.
    """
    dropped: list[tuple[PuzzleRefused, Callable[[], None]]] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _NEVER_AWAITED.pattern, RuntimeWarning)
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], file: str, number: int, *rest: Any) -> None:
            warn = partial(show, message, category, file, number, *rest)
            if found := _NEVER_AWAITED.match(str(message)):
                name = found[1].rpartition(".")[2]
                refusal = without_await(f"{name}()", f"{name}(...)").on(SourceLine(file, number))
                dropped.append((refusal, warn))
            else:
                warn()

        warnings.showwarning = collect
        yield dropped


def without_await(name: str, call: str, layer: int = -1) -> PuzzleRefused:
    """The refusal of a call that was not awaited; `call` is how to write it."""
    given = f"{name} was called without `await`, so it has not run"
    return PuzzleRefused("not awaited", About("", layer), given, f"write `await {call}`")


def refuse_forgotten(forgotten: list[PuzzleRefused]) -> None:
    """Refuse to go on after a call that was thrown away without an `await`."""
    if forgotten:
        raise PuzzleRefused.of(forgotten[0])
