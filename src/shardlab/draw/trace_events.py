"""Timelines for trace viewers such as ui.perfetto.dev and chrome://tracing.

The format is the JSON of Google's "Trace Event Format",
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (also
perfetto.dev/docs/getting-started/other-formats), with complete events "X", metadata "M", flows "s" and "f", and
counters "C". Times are in microseconds; a timeline without seconds is shown with 1 s for each of its time units.

Each rank is shown as a process, and each of its streams as a thread. Spans of one thread may not overlap
(perfetto.dev/docs/faq), so a stream with overlapping ops gets several threads, called its lanes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.common.files import atomic_file
from shardlab.common.text import listed
from shardlab.draw.canvas import model_layer
from shardlab.draw.panels import curve
from shardlab.draw.rows import rank_name
from shardlab.language import Op, OpKind
from shardlab.language.ops import HUES, Stream
from shardlab.language.rules.kinds import bits
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.timeline.prices import rank_of
from shardlab.simulate.timeline.run import Counter, moments_of

Place = tuple[int, int]
"""Row of a timeline, and index of an op on the tape of that row."""

NANO = 1e9
"""Nanoseconds in a second or a time unit. Viewers have no finer resolution, so times are rounded before comparisons."""

TimelineWithMemory = tuple[Timeline, Sequence[Counter] | None]
"""Timeline, with the memory of each row by category (None: the trace shows only the total)."""


def save_trace_events(timelines: Mapping[str, TimelineWithMemory], path: Path) -> None:
    """Write a trace of timelines, by name, to a file atomically."""
    with atomic_file(path) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": {"generator": "shardlab"}, "traceEvents": [\n')
        for place, event in enumerate(trace_events(timelines)):
            file.write((",\n" if place else "") + json.dumps(event))
        file.write("\n]}\n")


def trace_events(timelines: Mapping[str, TimelineWithMemory]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace of some timelines.

    A rank has a process for each timeline. The processes of a rank are adjacent in a viewer, and each is named after
    the rank and the timeline.
    """
    first = len(timelines) * max(timeline.program.mesh.world for timeline, _ in timelines.values())
    threads, flows = count(first), count(1)  # a thread with its process's number would be its main thread
    for place, (name, (timeline, counters)) in enumerate(timelines.items()):
        program = timeline.program
        spans: dict[tuple[int, int], TraceSpan] = {}
        for row, events in enumerate(timeline.events):
            process = rank_of(program, row) * len(timelines) + place
            yield _meta("process_name", process, 0, name=f"{name} {rank_name(program, row)}".strip())
            yield _meta("process_sort_index", process, 0, sort_index=process)
            lanes: dict[str, list[TraceSpan]] = defaultdict(list)
            for event in sorted(events, key=lambda event: (event.start, event.end)):
                stream = _stream(program.tapes[row][event.op])
                lane, span = _place_in_lane(event, lanes[stream], process, threads)
                if lane == len(lanes[stream]):
                    title = f"{stream} ({lane + 1})" if lane else stream
                    yield _meta("thread_name", process, span.thread, name=title)
                    yield _meta("thread_sort_index", process, span.thread, sort_index=span.thread)
                lanes[stream][lane:] = [span]
                spans[row, event.op] = span
                yield _complete(event, span, model_layer(program.sizes, event.layer))
            for time, live in counters[row] if counters else [(t, {"live": n}) for t, n in curve(timeline, row)]:
                yield {"ph": "C", "name": "memory", "pid": process, "ts": _micro(round(time * NANO)), "args": live}
        for arrow in arrows(timeline):  # after all spans, because viewers process simultaneous events in file order
            yield from _flow(arrow, spans, flows)


class Arrow(NamedTuple):
    """Arrow from one event to another, named `message` or `join`."""

    name: str
    source: Place
    target: Place


def arrows(timeline: Timeline) -> Iterator[Arrow]:
    """Yield the arrows between the rows of a timeline.

    A message has an arrow from its send to its receive. A collective has an arrow, named `join`, from the member that
    arrived last to each other member. Arrows to ranks without a row are left out.
    """
    moments = [moments_of(timeline, row) for row in range(len(timeline.events))]
    for communication in timeline.communications:
        places = [(row, index) for row, _, index in communication.participants]
        if communication.stream is Stream.MESSAGE:
            yield Arrow("message", *places)
        else:
            last = max(places, key=lambda place: moments[place[0]][place[1]])
            yield from (Arrow("join", last, place) for place in places if place != last)


class TraceSpan(NamedTuple):
    """Position of an event in the trace: its process, its thread, and its times in nanoseconds."""

    process: int
    thread: int
    start: int
    end: int


def _place_in_lane(
    event: Event, lanes: Sequence[TraceSpan], process: int, threads: Iterator[int]
) -> tuple[int, TraceSpan]:
    """Return the lane of an event, and the event's span in it.

    Args:
        lanes: last span of each lane of the event's stream.
    """
    start, end = round(event.start * NANO), round(event.end * NANO)
    lane = next((lane for lane, last in enumerate(lanes) if last.end <= start), len(lanes))
    thread = lanes[lane].thread if lane < len(lanes) else next(threads)
    return lane, TraceSpan(process, thread, start, end)


def _stream(op: Op) -> str:
    """Return the name of an op's stream: compute, a group's communication, or messages to or from one rank."""
    stream = op.kind.row.stream
    if stream is Stream.COLLECTIVE:
        return f"communication on {op.group}"
    if stream is Stream.MESSAGE:
        return f"send to rank {op.peer}" if op.kind is OpKind.SEND else f"recv from rank {op.peer}"
    return stream.value


def _micro(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _meta(event_name: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": event_name, "pid": process, "tid": thread, "args": args}


def _complete(event: Event, span: TraceSpan, layer: int) -> dict[str, Any]:
    """Return a complete event named such as `forward 0 (layer 3)`, with its microbatches and the model's layer.

    Perfetto chooses a colour by the name without its numbers. Chrome takes the colour in `cname`.
    """
    name = event.kind.row.hyphenated
    args: dict[str, Any] = {"op": event.op, "layer": event.layer}
    if event.microbatches:
        args["microbatches"] = listed(bits(event.microbatches))
        name += f" {args['microbatches']}"
    if event.layer >= 0:
        name += f" (layer {layer})"
    color = HUES[event.kind.row.color].chrome
    return {
        **({"cname": color} if color else {}),
        "ph": "X",
        "name": name,
        "cat": event.kind.value,
        "pid": span.process,
        "tid": span.thread,
        "ts": _micro(span.start),
        "dur": _micro(span.end - span.start),
        "args": args,
    }


def _flow(arrow: Arrow, spans: Mapping[tuple[int, int], TraceSpan], flows: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield the two events of an arrow, from the start of its source to the last nanosecond of its target.

    Viewers attach each end to the span that encloses it, so a span of no duration gets no arrow. An arrow is also left
    out if its target ended before its source began, which happens if the clocks of two hosts differ.
    """
    source, target = spans.get(arrow.source), spans.get(arrow.target)
    if source is None or target is None or source.start == source.end or target.start == target.end:
        return
    if target.end <= source.start:
        return
    common_fields, flow = {"name": arrow.name, "cat": arrow.name}, next(flows)
    ends = ({"ph": "s"}, source, source.start), ({"ph": "f", "bp": "e"}, target, target.end - 1)
    for phase, span, time in ends:
        yield {**phase, **common_fields, "id": flow, "pid": span.process, "tid": span.thread, "ts": _micro(time)}
