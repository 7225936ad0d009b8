"""A timeline for trace viewers: ui.perfetto.dev, chrome://tracing.

The format is Google's "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(also perfetto.dev/docs/getting-started/other-formats), as JSON: complete events "X", metadata "M", flows "s" and "f",
counters "C"; times are microseconds. Each rank is a process and each of its streams a thread. In unit costs a unit is
shown as a second.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlab.draw.memory import curve
from shardlab.draw.timeline import rank_name
from shardlab.program import Op, OpKind
from shardlab.program.values import bits, listed
from shardlab.simulate import Event, Timeline
from shardlab.simulate.traced import rank_of

MICRO = 1e6
"""Microseconds of a second, or of a unit."""

Counters = Sequence[Sequence[tuple[float, Mapping[str, int]]]]
"""For each row moments, and what is live from then on, by category."""


def save_trace_events(timeline: Timeline, path: Path, counters: Counters | None = None) -> None:
    """Write a trace; it appears whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for place, event in enumerate(trace_events(timeline, counters)):
                file.write((",\n" if place else "") + json.dumps(event))
            file.write("\n]}\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def trace_events(timeline: Timeline, counters: Counters | None = None) -> Iterator[dict[str, Any]]:
    """The events of a trace, those of one rank after the other; without `counters`, memory is one number."""
    program = timeline.program
    flows = _flows(timeline)
    for row, events in enumerate(timeline.events):
        rank, tape = rank_of(program, row), program.tapes[row]
        yield _named("process_name", rank, 0, rank_name(program, row))
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        threads: dict[str, int] = {}
        for event in events:
            stream = _stream(tape[event.op])
            if stream not in threads:
                threads[stream] = len(threads)
                yield _named("thread_name", rank, threads[stream], stream)
            yield _span(event, rank, threads[stream])
            if (flow := flows.get((row, event.op))) is not None:
                yield _flow(event, rank, threads[stream], flow)
        for time, live in counters[row] if counters else [(t, {"live": n}) for t, n in curve(timeline, row)]:
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": time * MICRO, "args": dict(live)}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _stream(op: Op) -> str:
    """Compute; a group's communication; or that with one other rank, in one direction."""
    if op.group is not None:
        return f"communication on {op.group}"
    if op.kind is OpKind.SEND:
        return f"send to rank {op.peer}"
    return f"recv from rank {op.peer}" if op.kind is OpKind.RECV else "compute"


def _span(event: Event, rank: int, thread: int) -> dict[str, Any]:
    name = event.kind.value.replace("_", "-") + (f" {event.layer}" if event.layer >= 0 else "")
    args: dict[str, Any] = {"op": event.op, "layer": event.layer}
    if event.microbatches:
        args["microbatches"] = listed(bits(event.microbatches))
    return {
        "ph": "X",
        "name": name,
        "cat": event.kind.value,
        "pid": rank,
        "tid": thread,
        "ts": event.start * MICRO,
        "dur": (event.end - event.start) * MICRO,
        "args": args,
    }


def _flow(event: Event, rank: int, thread: int, flow: int) -> dict[str, Any]:
    """An arrow from the start of a send to the end of its receive; it binds to the span that encloses its time."""
    sends = event.kind is OpKind.SEND
    arrow = {"ph": "s"} if sends else {"ph": "f", "bp": "e"}
    time = event.start if sends else event.end
    return {**arrow, "name": "message", "cat": "message", "id": flow, "pid": rank, "tid": thread, "ts": time * MICRO}


def _flows(timeline: Timeline) -> dict[tuple[int, int], int]:
    """(row, op) of each send and receive whose other end is in the timeline, to the message's number."""
    program = timeline.program
    sent: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
    for row, tape in enumerate(program.tapes):
        for at, op in enumerate(tape):
            if op.kind is OpKind.SEND:
                sent[rank_of(program, row), op.peer].append((row, at))
    flows: dict[tuple[int, int], int] = {}
    for row, tape in enumerate(program.tapes):
        for at, op in enumerate(tape):
            channel = sent.get((op.peer, rank_of(program, row))) if op.kind is OpKind.RECV else None
            if channel:
                flows[channel.popleft()] = flows[row, at] = len(flows) // 2
    return flows
