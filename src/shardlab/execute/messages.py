"""What communication gives that has started: how to wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Messages:
    """Messages that have started, as one work of torch.distributed.

    Args:
        works: of each message that torch.distributed has started.
        then: what is left to do once all are over.
    """

    def __init__(self, works: Sequence[Any] = (), then: Callable[[], object] | None = None) -> None:
        self._works = list(works)
        self._then = then

    def wait(self) -> None:
        """Wait for all of them, once."""
        while self._works:
            self._works.pop(0).wait()
        if self._then is not None:
            self._then()
            self._then = None

    def get_future(self) -> Any:
        """There is none, as for every message of gloo.

        Raises:
            RuntimeError: always, as torch's works do that have none.
        """
        raise RuntimeError("messages have no future")
