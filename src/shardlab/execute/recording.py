"""Recording of real steps: the time of each op, seconds of compute, and live memory.

An executor that is not recorded has no overhead. The parts, in the order to read them:

- `HostStopwatch` and `DeviceStopwatch`, for a CPU and a GPU, are clocks for the beginning and the end of an op, and for
  the completion of a communication.
- `OpTimer` runs steps and records each op; `ComputeClock` only sums the seconds of forward and backward passes.
- `clock_offset` estimates the offset of another process's clock from rank 0's.
- `step_with_memory` runs one step and records the live bytes before each op. Tracking memory slows a step down, so a
  step is either timed or measured.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain, groupby, repeat
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.check.buffers import batches_of
from shardlab.execute.executor import Executor
from shardlab.execute.state import State
from shardlab.execute.transport.collectives import Wait, retained_buffers
from shardlab.execute.update_ops import Instruction
from shardlab.language import Kind, Op, OpKind
from shardlab.language.ops import COMMUNICATION
from shardlab.language.tape import MemoryRecord, OpTimes, StepRecord

Read = Callable[[], float | None]
"""Function that returns the time of an event, in seconds of this process's clock (None: it has not happened). It can be
called after the step."""


class HostStopwatch:
    """Clock of the host, which all its processes share (time.perf_counter, CLOCK_MONOTONIC on Linux).

    Works of torch's collectives on gloo have a future, which calls a function at completion. Works of sends and
    receives have no future, nor do collectives that consist of these (see `torch_transport`), and a second `wait` for
    such a work would never return. Therefore a thread waits for each work without a future, and the rank waits for that
    thread.
    """

    def __init__(self) -> None:
        self._waiters: list[SimpleQueue[tuple[Any, Future[float]]]] = []

    def begin(self) -> None:
        """Prepare for a step that begins now."""

    def now(self) -> Read:
        """Mark the current position in the computation, and return a function that reads its time."""
        moment = time.perf_counter()
        return lambda: moment

    def watch(self, work: Any, *, batched: bool) -> tuple[Wait, Read]:
        """Return a function that waits for a communication in flight, and one that reads the time of its completion.

        Args:
            batched: whether the work is a batch of several messages.
        """
        completion: Future[float] = Future()

        def note(future: Any) -> None:
            with suppress(Exception):  # the rank receives the error when it waits
                future.value()
                completion.set_result(time.perf_counter())

        try:
            work.get_future().add_done_callback(note)
            wait: Wait = work.wait
        except RuntimeError:  # "Work::getFuture not implemented."
            self._waiter().put((work, completion))
            wait = completion.result
        return wait, lambda: completion.result() if completion.done() and completion.exception() is None else None

    def _waiter(self) -> SimpleQueue[tuple[Any, Future[float]]]:
        """Return the queue of an idle thread that waits for works."""
        if self._waiters:
            return self._waiters.pop()
        box: SimpleQueue[tuple[Any, Future[float]]] = SimpleQueue()

        def run() -> None:
            while True:
                work, completion = box.get()
                try:
                    work.wait()
                    completion.set_result(time.perf_counter())
                except Exception as error:
                    completion.set_exception(error)
                del work
                self._waiters.append(box)

        # A daemon thread, since the process of a rank that fails must end although messages never arrive.
        threading.Thread(target=run, daemon=True).start()
        return box


class DeviceStopwatch:
    """Clock of a GPU, with the methods of `HostStopwatch`: events on its streams, converted to the host's seconds.

    The step begins on an idle device, so that both clocks can be read at the same moment.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step_start = 0.0
        self._origin = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        self._step_start = time.perf_counter()
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

        # NCCL completes the future at once, and runs its callback on a stream that waits for the communication. The
        # rank waits for the work itself, because waiting on a stream would release tensors that are still being sent.
        work.get_future().add_done_callback(note)
        return work.wait, lambda: self._read(event)

    def _watch_wait(self, work: Any) -> tuple[Wait, Read]:
        """Return a function that waits for an NCCL batch, and one that reads the time at which this wait returned.

        A batch has no future (endCoalescing) that would be completed with its communication.
        """
        completions: list[Read] = []

        def wait() -> None:
            work.wait()
            completions.append(self.now())

        return wait, lambda: completions[0]() if completions else None

    def _read(self, event: torch.cuda.Event) -> float | None:
        return self._step_start + self._origin.elapsed_time(event) / 1000 if event.query() else None


FORWARD = frozenset({OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.ATTEND, OpKind.LOSS_STATS, OpKind.LOSS})
"""Ops that count as forward pass. LOSS also computes the gradient of the logits."""

BACKWARD = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT, OpKind.ATTEND_BACKWARD})


class ComputeClock:
    """Clock of the forward and backward ops of an executor's steps.

    Consecutive ops of one kind are timed together, by the host's clock or by a GPU's events, which are read after the
    step. Replays of a CUDA graph overwrite the same events, so `read` multiplies the time of the last replay by the
    number of replays since its previous call.
    """

    def __init__(self, executor: Executor) -> None:
        self._device = executor.state.settings.device
        self._seconds = [0.0, 0.0]
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._captured: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._graph = executor.graph
        self._replays = 0
        around = self._by_events if self._device.type == "cuda" else self._by_host
        directions = [_direction(op.kind) for op in executor.state.tape]
        for direction, places in groupby(range(len(directions)), directions.__getitem__):
            run = list(places)
            if direction is not None:
                around(executor.instructions, run[0], run[-1], direction)

    def read(self) -> tuple[float, float]:
        """Return the seconds of forward and of backward passes since the last call."""
        if self._events:
            torch.cuda.synchronize(self._device)
            for direction, start, end in self._events:
                self._seconds[direction] += start.elapsed_time(end) / 1000
            self._events.clear()
        if self._graph is not None and (replays := self._graph.replays - self._replays):
            torch.cuda.synchronize(self._device)
            self._replays += replays
            for direction, start, end in self._captured:
                self._seconds[direction] += replays * start.elapsed_time(end) / 1000
        forward, backward = self._seconds
        self._seconds[:] = 0.0, 0.0
        return forward, backward

    def _by_host(self, instructions: list[Instruction], first: int, last: int, direction: int) -> None:
        start, seconds, now = 0.0, self._seconds, time.perf_counter

        def begin() -> None:
            nonlocal start
            start = now()

        def end() -> None:
            seconds[direction] += now() - start

        _put_around(instructions, first, last, begin, end)

    def _by_events(self, instructions: list[Instruction], first: int, last: int, direction: int) -> None:
        def begin() -> None:
            captures = torch.cuda.is_current_stream_capturing()
            start_event, end_event = (torch.cuda.Event(enable_timing=True, external=captures) for _ in range(2))
            start_event.record()
            (self._captured if captures else self._events).append((direction, start_event, end_event))

        def end() -> None:
            (self._captured if torch.cuda.is_current_stream_capturing() else self._events)[-1][2].record()

        _put_around(instructions, first, last, begin, end)


class OpTimer:
    """Recorder of the times of all ops in an executor's steps.

    Attributes:
        steps: the recorded steps. If a step has failed, the last one is incomplete.
    """

    def __init__(self, executor: Executor) -> None:
        self.steps: list[StepRecord] = []
        self._executor = executor
        device = executor.state.settings.device
        self._watch = DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch()
        self._starts: dict[int, Read] = {}
        self._ends: dict[int, Read] = {}
        self._completions: dict[int, list[Read]] = defaultdict(list)
        self._issuing: Iterator[int] = iter(())
        self._batches = batches_of(executor.state.tape, COMMUNICATION)
        self._batched = frozenset(chain(*self._batches.values()))
        plain = zip(executor.state.tape, executor.instructions, strict=True)
        self._timed_instructions = [
            self._around(index, op, instruction) for index, (op, instruction) in enumerate(plain)
        ]

    def step(self) -> Tensor:
        """Run one step as `Executor.step` does, and record it, even if it fails."""
        executor, watch = self._executor, self._watch
        plain, wait_of = executor.instructions, executor.links.wait_of
        executor.instructions, executor.links.wait_of = self._timed_instructions, self._watch_work
        self._starts, self._ends, self._completions = {}, {}, defaultdict(list)
        watch.begin()
        read_start, read_end = watch.now(), None
        try:
            loss = executor.step()
            read_end = watch.now()
            if executor.state.settings.device.type == "cuda":
                torch.cuda.synchronize(executor.state.settings.device)
        finally:
            executor.instructions, executor.links.wait_of = plain, wait_of
            self._keep(read_start, read_end)
        return loss

    def _around(self, index: int, op: Op, instruction: Instruction) -> Instruction:
        now, communicates = self._watch.now, op.kind in COMMUNICATION
        issued = (
            [index] if self._executor.links.starts_alone(op.peer, op.batch) else self._batches.get(op.batch, [index])
        )

        def run() -> None:
            self._starts[index] = now()
            if communicates:
                self._issuing = chain(issued, repeat(issued[-1]))
            instruction()
            self._ends[index] = now()

        return run

    def _watch_work(self, work: Any) -> Wait:
        """Return the function that waits for a work, and record when the work ends. It replaces `Communicator.wait_of`.

        It is called for the works of the step in tape order.
        """
        index = next(self._issuing)
        wait, completion = self._watch.watch(work, batched=index in self._batched)
        self._completions[index].append(completion)
        return wait

    def _keep(self, read_start: Read, read_end: Read | None) -> None:
        for ops in self._batches.values():  # a single work may be a whole batch
            for index in ops[1:]:
                if index in self._starts:
                    self._completions[index] = self._completions[index] or self._completions[ops[0]]
        start = read_start()
        if start is None:
            return
        record = StepRecord(start, read_end and read_end())
        for index, read in self._starts.items():
            moment = read()
            if moment is not None:
                completions = [completion() for completion in self._completions[index]]
                last = max((completion for completion in completions if completion is not None), default=None)
                end = self._ends.get(index)
                record.ops[index] = OpTimes(moment, end and end(), None if None in completions else last)
        self.steps.append(record)


ROUNDS = 16


class ClockOffset(NamedTuple):
    """Offset of a process's clock (time.perf_counter) from rank 0's, in seconds.

    Attributes:
        seconds: the offset; 0 if it is smaller than the bound, since processes of one host share a clock.
        bound: largest error of the estimate: half of the shortest round-trip time.
    """

    seconds: float
    bound: float


def clock_offset(rank: int, ranks: int, device: torch.device) -> ClockOffset:
    """Return the offset of this rank's clock. All ranks of the default process group call this together.

    The fastest of several round trips is used, since its two directions differ least (Mills 1991, "Internet time
    synchronization: the Network Time Protocol").
    """
    if rank:
        for _ in range(ROUNDS):
            _receive(0, 1, device)
            _send([time.perf_counter()], 0, device)
        return ClockOffset(*_receive(0, 2, device))
    for peer in range(1, ranks):
        rounds: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            send_time = time.perf_counter()
            _send([send_time], peer, device)
            (peer_time,) = _receive(peer, 1, device)
            receive_time = time.perf_counter()
            rounds.append((receive_time - send_time, peer_time - (send_time + receive_time) / 2))
        _send(list(estimate(rounds)), peer, device)
    return ClockOffset(0.0, 0.0)


def estimate(rounds: list[tuple[float, float]]) -> ClockOffset:
    """Estimate the offset of another clock. A round is (round-trip time, other clock minus this clock at mid-trip)."""
    round_trip, offset = min(rounds)
    bound = round_trip / 2
    return ClockOffset(offset if abs(offset) > bound else 0.0, bound)


NAMED = ("parameters", "optimizer", "arena", "gathered", "gradients")
"""Categories of memory whose tensors are known. All other bytes are activations, including tensors saved by layers."""

VALUE_CATEGORIES = {Kind.WEIGHT: "gathered", Kind.GRAD_WEIGHT: "gradients"}
"""Categories of values, by kind. Values of all other kinds count as activations."""


class TrackedStorages:
    """Counter of the bytes of the tensors that outlive a step, and of all tensors that are created while it tracks.

    The memory that communication keeps (`retained_buffers`) is not counted: it is reused, and torch's tracker would see
    it only in some steps.
    """

    def __init__(self, state: State) -> None:
        from torch.distributed._tools.mem_tracker import MemTracker  # imports torch's compiler, which is slow

        self._tracker = MemTracker()
        self._device = state.settings.device
        for _, tensors in _persistent_tensors(state):
            self._tracker.track_external(*tensors)
        self._tracker.track_external(*(retained := retained_buffers()))
        self._retained_bytes = sum(tensor.nbytes for tensor in retained)

    def tracking(self) -> AbstractContextManager[object]:
        """Return a context manager inside of which bytes are counted."""
        return self._tracker

    def live(self) -> int:
        """Return the number of live bytes now."""
        return self._total("current")

    def peak(self) -> int:
        """Return the largest number of live bytes since tracking began."""
        return self._total("peak")

    def _total(self, moment: str) -> int:
        total = self._tracker.get_tracker_snapshot(moment).get(self._device, {}).get("Total", 0)
        return total - self._retained_bytes


class Allocator:
    """Counter of live bytes by a GPU's allocator, with the methods of `TrackedStorages`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def tracking(self) -> AbstractContextManager[object]:
        torch.cuda.reset_peak_memory_stats(self._device)
        return nullcontext()

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


def step_with_memory(executor: Executor, record: MemoryRecord) -> Tensor:
    """Run a step with `Executor.step`, and record the live bytes before each op and the peak of the step."""
    state, device = executor.state, executor.state.settings.device
    account = Allocator(device) if device.type == "cuda" else TrackedStorages(state)
    categories = [
        (number, VALUE_CATEGORIES[spec.kind])
        for number, spec in sorted(state.specs.items())
        if spec.kind in VALUE_CATEGORIES
    ]

    def around(index: int, instruction: Instruction) -> Instruction:
        def run() -> None:
            record.live[index] = _by_category(state, categories, account.live())
            instruction()

        return run

    plain = executor.instructions
    executor.instructions = [around(index, instruction) for index, instruction in enumerate(executor.instructions)]
    try:
        with account.tracking():
            return executor.step()
    finally:
        executor.instructions = plain
        record.peak = account.peak()


def _direction(kind: OpKind) -> int | None:
    return 0 if kind in FORWARD else 1 if kind in BACKWARD else None


def _put_around(instructions: list[Instruction], first: int, last: int, begin: Instruction, end: Instruction) -> None:
    opening = instructions[first]

    def first_of_all() -> None:
        begin()
        opening()

    instructions[first] = first_of_all
    closing = instructions[last]

    def last_of_all() -> None:
        closing()
        end()

    instructions[last] = last_of_all


def _send(numbers: list[float], to: int, device: torch.device) -> None:
    dist.send(torch.tensor(numbers, dtype=torch.float64, device=device), to)


def _receive(source: int, count: int, device: torch.device) -> list[float]:
    numbers = torch.empty(count, dtype=torch.float64, device=device)
    dist.recv(numbers, source)
    return [float(number) for number in numbers]


def _by_category(state: State, categories: list[tuple[int, str]], total: int) -> dict[str, int]:
    values = ((category, state.values[number]) for number, category in categories)
    step_tensors = ((category, [value]) for category, value in values if isinstance(value, Tensor))
    counted: set[int] = set()
    sizes: dict[str, int] = dict.fromkeys(NAMED, 0)
    for category, tensors in (*_persistent_tensors(state), *step_tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == state.settings.device and storage.nbytes() and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                sizes[category] += storage.nbytes()
    return {**sizes, "activations": total - sum(sizes.values())}


def _persistent_tensors(state: State) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Yield the tensors that outlive the step, by category."""
    yield "parameters", state.kept.values()
    for part in state.opt_states.values():
        yield "parameters", part.weights
        yield "optimizer", part.exact
        yield "optimizer", part.moments
    yield "gathered", state.buffers
    yield "arena", [state.arena.whole]
