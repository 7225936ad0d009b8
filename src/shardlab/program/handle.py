"""A communication under way: awaiting it waits for the result."""

from __future__ import annotations

from collections.abc import Generator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardlab.program.waiting import Wait

if TYPE_CHECKING:
    from shardlab.program.tracer import Tracer
    from shardlab.program.value import Value

Result = TypeVar("Result", covariant=True)


class Handle(Generic[Result]):
    """What a communication call returns at once. `await` it for the result.

    That is None for a send and a barrier, and where another rank is the root that alone receives.

    Attributes:
        rank, number, op: the rank that issued it, its number there, and the index of its op on the tape.
        result: what awaiting gives; the value that was read itself, where a root has broadcast it.
        read: the value that the communication reads until it completes.
        others: handles that are awaited with this one, since they were issued together.
        ready: whether everybody needed has issued their part.
        waited: whether its WAIT stands on the tape.
    """

    __slots__ = ("number", "op", "others", "rank", "read", "ready", "result", "waited")

    def _begin(self, rank: Tracer, result: Any, read: Value | None, *, ready: bool = False) -> None:
        """What each kind of handle begins with; a plain call, where `super` would make an object."""
        self.rank = rank
        self.number = rank.handles
        self.op = len(rank.ops)
        self.result: Result = result
        self.read = read
        self.others: tuple[Handle[Any], ...] = ()
        self.ready, self.waited = ready, False

    def wait(self) -> Wait:
        """What this handle waits for, in words."""
        raise AssertionError("every kind of handle says what it waits for")

    def __repr__(self) -> str:  # asyncio shows it when a strategy is awaited by hand
        return f"<{type(self).__name__} of rank {self.rank.index}; only `trace` drives a strategy>"

    def __await__(self) -> Generator[Any, None, Result]:
        if not self.ready:
            yield self
        if self.others:
            yield from self._await_others()
        if not self.waited:
            self.rank.emit_wait(self)
        return self.result

    def _await_others(self) -> Generator[Any, None, None]:
        """Wait until all are ready, then for those that were issued before this one, for it, and for the rest."""
        for handle in self.others:
            if not handle.ready:
                yield handle
        for handle in sorted((self, *self.others), key=attrgetter("number")):
            if not handle.waited:
                self.rank.emit_wait(handle)
