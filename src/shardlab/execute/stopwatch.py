"""Clocks that tell when an op began and ended, and when a communication was over: the host's, and a GPU's."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from shardlab.execute.communicator import Wait

Read = Callable[[], float | None]
"""A moment, in seconds of this process's clock; None if it has not come. To be called when the step is over."""


class Stopwatch(Protocol):
    """What a recorder needs of a clock."""

    def begin(self) -> None:
        """A step is about to begin."""
        ...

    def now(self) -> Read:
        """This moment, in the order of what is computed."""
        ...

    def watch(self, work: Any, *, batched: bool) -> tuple[Wait, Read]:
        """How to wait for a communication that has started, and when it was over.

        Args:
            batched: whether it stands for several messages that were issued together.
        """
        ...


class HostStopwatch:
    """The host's monotonic clock, which all processes of a host share (time.perf_counter, CLOCK_MONOTONIC on Linux).

    Collectives of torch's own on gloo have a future, which says at once when the work is over. Messages have none, nor
    have the collectives that are made of messages (see `collectives`), and a second `wait` for a message would never
    return: a thread waits for each of them, and the rank for that thread.
    """

    def __init__(self) -> None:
        self._waiters: list[SimpleQueue[tuple[Any, Future[float]]]] = []

    def begin(self) -> None:
        pass

    def now(self) -> Read:
        moment = time.perf_counter()
        return lambda: moment

    def watch(self, work: Any, *, batched: bool) -> tuple[Wait, Read]:
        over: Future[float] = Future()

        def note(future: Any) -> None:
            with suppress(Exception):  # the rank hears of a failure where it waits
                future.value()
                over.set_result(time.perf_counter())

        try:
            work.get_future().add_done_callback(note)
            wait: Wait = work.wait
        except RuntimeError:  # "Work::getFuture not implemented."
            self._waiter().put((work, over))
            wait = over.result
        return wait, lambda: over.result() if over.done() and over.exception() is None else None

    def _waiter(self) -> SimpleQueue[tuple[Any, Future[float]]]:
        """The way to a thread that has nothing to wait for."""
        if self._waiters:
            return self._waiters.pop()
        box: SimpleQueue[tuple[Any, Future[float]]] = SimpleQueue()

        def run() -> None:
            while True:
                work, over = box.get()
                try:
                    work.wait()
                    over.set_result(time.perf_counter())
                except Exception as error:
                    over.set_exception(error)
                del work
                self._waiters.append(box)

        # A daemon: if this rank fails, its process must end although the other ranks' parts never come.
        threading.Thread(target=run, daemon=True).start()
        return box


class DeviceStopwatch:
    """A GPU's own clock, by events on its streams, told in seconds of the host's.

    The step begins on a device that has nothing to do: then both clocks are read at one moment.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = 0.0
        self._origin = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        self._begun = time.perf_counter()
        self._origin.record()

    def now(self) -> Read:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return lambda: self._read(event)

    def watch(self, work: Any, *, batched: bool) -> tuple[Wait, Read]:
        if batched:
            return self._watch_wait(work)
        event = torch.cuda.Event(enable_timing=True)

        def note(_: Any) -> None:
            event.record()

        # NCCL's future has its result at once; what is called with it is put on a stream that the communication holds
        # up. A wait on such a stream would not do: it lets go of tensors that the communication still uses.
        work.get_future().add_done_callback(note)
        return work.wait, lambda: self._read(event)

    def _watch_wait(self, work: Any) -> tuple[Wait, Read]:
        """NCCL's batches have no future (ProcessGroupNCCL::endCoalescing): they are over when nobody waits any more."""
        over: list[Read] = []

        def wait() -> None:
            work.wait()
            over.append(self.now())

        return wait, lambda: over[0]() if over else None

    def _read(self, event: torch.cuda.Event) -> float | None:
        return self._begun + self._origin.elapsed_time(event) / 1000 if event.query() else None


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The clock of what is computed on a device."""
    return DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch()
