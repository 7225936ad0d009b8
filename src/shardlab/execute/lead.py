"""How far a rank may run ahead of another one that it sends messages."""

from __future__ import annotations

from collections import deque

from shardlab.execute.shared_memory import SMALLEST

BYTES = 4 * 2**20
"""Bytes of messages that a rank may have sent before its reader begins to receive them."""

MESSAGES = 4
"""Messages that it may have sent so, however large they are."""


class MessageLead:
    """The messages of one rank to another, of which the last may be sent before the reader begins to receive them.

    What may go ahead is `MESSAGES`, or as many as have at most `BYTES` together. The wait of any other send lasts until
    its receive has begun, as that of each does on gloo: so what cannot hang there cannot hang here.
    """

    def __init__(self) -> None:
        self._sent = self._bytes = 0
        self._ahead: deque[int] = deque()

    def count(self, size: int) -> int:
        """Count a message of so many bytes.

        Returns:
            How many messages the reader must have begun to receive when the wait of this one's send ends.
        """
        size = max(size, SMALLEST)
        self._sent, self._bytes = self._sent + 1, self._bytes + size
        self._ahead.append(size)
        while len(self._ahead) > MESSAGES and self._bytes > BYTES:
            self._bytes -= self._ahead.popleft()
        return self._sent - len(self._ahead)
