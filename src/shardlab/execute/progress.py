"""Progress of a rank, in shared memory that other processes can read even if the rank hangs or has died.

A rank writes the number of each op before it runs it, which takes far less than a microsecond. It does not read a
clock: a watching process polls the memory, and measures how long it has not changed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

OP_BITS = 24
"""Number of low bits of the first word that have the index of the op. The higher bits count the tapes begun."""

_WHERE, _STEP, _EVALUATES, _LENGTH, _PID, _ENDED, _FAILED, _LOST, _REPORTED = range(9)


class TapePosition(NamedTuple):
    """Position of a rank on its tape.

    Attributes:
        round: number of tapes that the rank has begun. The ranks run their tapes in the same order, so rounds are
            comparable between ranks.
        op: index of the op that the rank runs or waits for; after the last op, the length of the tape.
        step: number of the optimizer step, from 0; in an evaluation, number of the evaluation's step.
        evaluates: whether the tape is that of an evaluation, which has only forward passes.
        length: number of ops of the tape.
    """

    round: int
    op: int
    step: int
    evaluates: bool
    length: int


class RankProgress:
    """Progress of one rank in a file that other processes map: a page of 64-bit words, followed by text.

    The text has the rank's stacks, which it writes on request or on failure. The file is anonymous, so nothing remains
    when a process is killed. A started process receives it from the process that starts it. Other processes of the host
    open it by `path`.

    Attributes:
        words: words that this process writes, one at a time: those of its file after `take`, until then private ones.
    """

    words: ClassVar[Any] = array("q", bytes(72))

    def __init__(self, file: int | None = None) -> None:
        """Make the file, or use an open one by its descriptor."""
        if file is None:
            memory = Path("/dev/shm")
            with tempfile.TemporaryFile(dir=memory if os.access(memory, os.W_OK) else None) as new:
                file = os.dup(new.fileno())
            os.ftruncate(file, mmap.PAGESIZE)
            os.lseek(file, mmap.PAGESIZE, os.SEEK_SET)  # the text begins here
        self.file = file
        self._memory = mmap.mmap(file, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("q")

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _received, (DupFd(self.file),)

    def close(self) -> None:
        """Close the file in this process."""
        self._words.release()
        self._memory.close()
        os.close(self.file)

    @property
    def path(self) -> str:
        """Path by which processes of this host can open the file while this process runs."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @classmethod
    def at(cls, path: str) -> Self:
        """Open the file of another process by its path.

        Raises:
            OSError: if that process is on another host, or the file does not exist any more.
        """
        return cls(os.open(path, os.O_RDWR))

    def take(self) -> None:
        """Let this process record its progress here."""
        RankProgress.words = self._words
        self._words[_PID] = os.getpid()

    @property
    def pid(self) -> int:
        """ID of the process that records its progress here; 0 before it does."""
        return self._words[_PID]

    @property
    def position(self) -> TapePosition | None:
        """Return the position of the rank; None before its first tape."""
        word = self._words[_WHERE]
        if not word:
            return None
        tape_round, op = word >> OP_BITS, word & ((1 << OP_BITS) - 1)
        step, evaluates, length = self._words[_STEP], bool(self._words[_EVALUATES]), self._words[_LENGTH]
        return TapePosition(tape_round, op, step, evaluates, length)

    @property
    def has_ended(self) -> bool:
        """Whether the rank has completed its work."""
        return bool(self._words[_ENDED])

    @has_ended.setter
    def has_ended(self, value: bool) -> None:
        self._words[_ENDED] = value

    @property
    def failed(self) -> int:
        """Time at which the rank failed, in nanoseconds of a monotonic clock; 0 if it did not fail."""
        return self._words[_FAILED]

    @property
    def lost_connection(self) -> bool:
        """Whether the rank failed because of another rank."""
        return bool(self._words[_LOST])

    def fail(self, time: int, lost_connection: bool, stack: str) -> None:
        """Record that the rank has failed, and its stack."""
        self._words[_LOST], self._words[_FAILED] = lost_connection, time
        os.write(self.file, stack.encode())

    @property
    def reported(self) -> bool:
        """Whether this rank has reported why the run failed, so that the other ranks need not."""
        return bool(self._words[_REPORTED])

    @reported.setter
    def reported(self, value: bool) -> None:
        self._words[_REPORTED] = value

    @property
    def text(self) -> str:
        """Return the text of the stacks; empty if the rank has written none."""
        length = os.fstat(self.file).st_size - mmap.PAGESIZE
        return os.pread(self.file, length, mmap.PAGESIZE).decode(errors="replace")


def begin_tape(step: int, length: int, *, evaluates: bool) -> tuple[Any, int]:
    """Record the start of a tape.

    Returns the words, and the value that the first word has during op 0. During op i, its value is larger by i.
    """
    words = RankProgress.words
    base = ((words[_WHERE] >> OP_BITS) + 1) << OP_BITS
    words[_STEP], words[_EVALUATES], words[_LENGTH], words[_WHERE] = step, evaluates, length, base
    return words, base


def _received(file: Any) -> RankProgress:
    return RankProgress(file.detach())
