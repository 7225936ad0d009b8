"""Time as a device spends it: events on a GPU's stream, the wall clock on a CPU."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardlab.program.duration import TICK


class Clock:
    """Marks moments of a device's current stream, and says what lies between them.

    >>> clock = Clock(torch.device("cpu"))
    >>> clock.mark(); clock.mark()
    >>> len(clock.gaps())
    1
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Now, in the order of what the device has been given to do."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Seconds from each mark to the next, above 0; waits until the device is at the last, and forgets them."""
        marks, self._marks = self._marks, []
        if self._cuda:
            torch.cuda.synchronize()
            return [max(TICK, first.elapsed_time(second) / 1000) for first, second in pairwise(marks)]
        return [max(TICK, second - first) for first, second in pairwise(marks)]

    def seconds(self, run: Callable[[], Any], iterations: int) -> float:
        """Seconds of one call, as the mean over so many, one after the other."""
        self.mark()
        for _ in range(iterations):
            run()
        self.mark()
        return self.gaps()[0] / iterations


def iterations_for(seconds: float, budget: float, at_least: int = 5, at_most: int = 2000) -> int:
    """How many calls of so many seconds fill a budget of seconds."""
    return max(at_least, min(at_most, int(budget / max(seconds, TICK))))


def batches(iterations: int, count: int) -> Sequence[int]:
    """Split iterations into `count` batches, as even as can be; fewer batches if there are fewer iterations."""
    count = min(count, iterations)
    return [iterations // count + (i < iterations % count) for i in range(count)]
