"""Traces for the page, read from a JSON file that `shardlab.draw.trace_events` has written, as for `simulate --trace`.

A trace has the ops of each rank with their times, the arrows between them and the memory over time, but no program. A
page of a trace therefore cannot show the inputs and outputs of an op. It assumes that a rank awaited each communication
that ended while the rank did not compute.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardlab.common.errors import TooDeep, UserError, why_unreadable
from shardlab.common.files import parse_document
from shardlab.draw.viewer.columns import Columns, Numbering
from shardlab.draw.viewer.step_tables import KINDS, add_activity_columns, add_members, add_op_columns, step_header
from shardlab.language import OpKind
from shardlab.simulate.timeline.causes import Activity, Place, TimedOp
from shardlab.simulate.timeline.figures import Figures, figures_of_activity
from shardlab.simulate.timeline.run import Counter

MICRO = 1e6
"""Microseconds in a second or in a unit of time."""

_KINDS = {kind.value: kind for kind in KINDS}
_RANKS = re.compile(r"ranks? \d.*")


@dataclass
class TracedRank:
    """Spans of one rank in a trace.

    Attributes:
        name: name of the rank.
        ops: for each op, by index on the tape: kind, start, end, layer of the program, microbatches as text, and layer
            of the model (-1: none). Times are in seconds or in time units.
        counter: memory over time.
    """

    name: str = ""
    ops: dict[int, tuple[OpKind, float, float, int, str, int]] = field(
        default_factory=dict[int, tuple[OpKind, float, float, int, str, int]]
    )
    counter: Counter = field(default_factory=Counter)


@dataclass(frozen=True)
class TraceTimeline:
    """One timeline of a trace.

    Attributes:
        name: name of the timeline; empty if there is only one.
        ranks: ranks in order.
        links: arrows of the trace. Each has a name and connects two ops that belong to one communication.
    """

    name: str
    ranks: list[TracedRank]
    links: list[tuple[str, Place, Place]]

    @cached_property
    def activity(self) -> Activity:
        """Ops, with the communications that their ranks await."""
        communications = _communications(self.links)
        number_of = {place: number for number, members in enumerate(communications) for place in members}
        rows: list[list[TimedOp]] = []
        places: dict[Place, Place] = {}
        last_waits: list[tuple[int, ...]] = []
        for row, rank in enumerate(self.ranks):
            ops: list[TimedOp] = []
            for index, (kind, start, end, *_) in sorted(rank.ops.items()):
                places[row, index] = row, len(ops)
                ops.append(TimedOp(index, kind, start, end, (), number_of.get((row, index), -1)))
            waits = _find_awaited(ops)
            rows.append([op._replace(waits=waits.get(place, ())) for place, op in enumerate(ops)])
            last_waits.append(waits.get(len(ops), ()))
        members = [[places[place] for place in communication] for communication in communications]
        return Activity(rows, members, last_waits, max((op.end for ops in rows for op in ops), default=0.0))

    @cached_property
    def figures(self) -> Figures:
        """Six figures of the timeline. There is no bubble, because it needs a program."""
        return figures_of_activity(self.activity)


class FlowEnd(NamedTuple):
    """End of an arrow in a trace: the arrow's name, and the process, thread and time of this end."""

    name: str
    process: int
    thread: int
    time: float


def read_trace_file(path: Path) -> list[TraceTimeline]:
    """Read the timelines of a trace that Shardlab wrote.

    Raises:
        UserError: if the file cannot be read, is cut off, or was not written by Shardlab.
    """
    try:
        content: Any = parse_document(json.loads, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TooDeep) as error:
        raise UserError(f"{path} cannot be read as a trace: {why_unreadable(error)}") from None
    except ValueError as error:
        raise UserError(
            f"{path} is cut off or damaged ({error}); write it again, for example with shardlab simulate --trace"
        ) from None
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise UserError(f"{path} is no trace; give a file of shardlab simulate --trace, or of compare --trace")
    other = cast(dict[str, Any], content).get("otherData")
    if not isinstance(other, dict) or cast(dict[str, Any], other).get("generator") != "shardlab":
        raise UserError(
            f"{path} is a trace of another program, whose events are no ops of Shardlab; give a file of shardlab "
            "simulate --trace, or of compare --trace"
        )
    try:
        timelines = _timelines(cast(Any, content)["traceEvents"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} has an event that Shardlab does not write ({type(error).__name__}: {error}); write the trace again"
        ) from None
    if not timelines:
        raise UserError(f"{path} has no ops; write the trace again")
    return timelines


def trace_tables(title: str, note: str, timelines: Sequence[TraceTimeline]) -> bytes:
    """Return the packed tables of a trace.

    Raises:
        UserError: if the timelines have different ops, such as those before and after a pass.
    """
    columns, texts = Columns(), Numbering[str]()
    first = timelines[0]
    texts("")
    ops: dict[str, list[int]] = {name: [] for name in ("kind", "layer", "modelLayer", "text", "first", "communication")}
    starts = [0]
    for row in range(len(first.ranks)):
        count = max(max(timeline.ranks[row].ops, default=-1) for timeline in timelines if row < len(timeline.ranks)) + 1
        row_ops = {
            index: op
            for timeline in timelines
            if row < len(timeline.ranks)
            for index, op in timeline.ranks[row].ops.items()
        }
        _require_same(timelines, row)
        for index in range(count):
            kind, _, _, layer, microbatches, model_layer = row_ops.get(index, (OpKind.FREE, 0.0, 0.0, -1, "", -1))
            ops["kind"].append(KINDS.index(kind))
            ops["layer"].append(layer)
            ops["modelLayer"].append(model_layer)
            ops["text"].append(texts(microbatches))
            number = re.match(r"\d+", microbatches)
            ops["first"].append(int(number[0]) if number else -1)
        starts.append(len(ops["kind"]))
    communications = _communications([link for timeline in timelines[:1] for link in timeline.links])
    number_of = {place: number for number, members in enumerate(communications) for place in members}
    ops["communication"] = [
        number_of.get((row, index), -1)
        for row in range(len(first.ranks))
        for index in range(starts[row + 1] - starts[row])
    ]
    add_op_columns(columns, ops)
    columns.add("rowStart", "u32", starts)
    add_members(columns, communications)
    header = step_header(title, note, in_seconds=True)
    header |= {"remarks": ["A trace has no program, so the page does not know what an op reads and makes."]}
    header |= {"texts": texts.items, "rows": [{"name": rank.name, "rank": row} for row, rank in enumerate(first.ranks)]}
    header |= {"layers": max(ops["modelLayer"], default=0) + 1, "microbatches": max(ops["first"], default=0) + 1}
    entries: list[dict[str, Any]] = []
    for number, timeline in enumerate(timelines):
        activity = timeline.activity
        counters = [rank.counter for rank in timeline.ranks]
        categories = add_activity_columns(columns, number, activity, starts, counters)
        figures = timeline.figures.as_dict()
        entries.append(
            {"name": timeline.name, "end": activity.end, "categories": categories, "path": False, "figures": figures}
        )
    return columns.pack({**header, "timelines": entries})


def _timelines(events: Sequence[Mapping[str, Any]]) -> list[TraceTimeline]:
    names: dict[int, tuple[str, str]] = {}
    ranks: dict[int, TracedRank] = defaultdict(TracedRank)
    spans: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    flows: dict[int, dict[str, FlowEnd]] = defaultdict(dict)
    for event in events:
        phase, process = event["ph"], event["pid"]
        if phase == "M" and event["name"] == "process_name":
            text = event["args"]["name"]
            place = _RANKS.search(text)
            names[process] = (text[: place.start()].strip(), place[0]) if place else ("", text)
        elif phase == "X":
            args, start = event["args"], event["ts"] / MICRO
            end = start + event["dur"] / MICRO
            layer = re.search(r"\(layer (\d+)\)$", event["name"])
            details = args["layer"], args.get("microbatches", ""), int(layer[1]) if layer else -1
            ranks[process].ops[args["op"]] = (_KINDS[event["cat"]], start, end, *details)
            spans[process, event["tid"]].append((start, end, args["op"]))
        elif phase == "C":
            ranks[process].counter.append((event["ts"] / MICRO, event["args"]))
        elif phase in ("s", "f"):
            flows[event["id"]][phase] = FlowEnd(event["name"], process, event["tid"], event["ts"] / MICRO)
    for thread_spans in spans.values():
        thread_spans.sort()
    order = sorted(ranks)
    groups: dict[str, list[int]] = {}
    for process in order:
        groups.setdefault(names[process][0], []).append(process)
    row_of = {process: row for processes in groups.values() for row, process in enumerate(processes)}
    links: dict[str, list[tuple[str, Place, Place]]] = defaultdict(list)
    for ends in flows.values():
        source, target = ends["s"], ends["f"]
        one, other = (_op_at(spans[end.process, end.thread], end.time) for end in (source, target))
        if one is not None and other is not None:
            places = (row_of[source.process], one), (row_of[target.process], other)
            links[names[source.process][0]].append((source.name, *places))
    for process in order:
        ranks[process].name = names[process][1]
    return [TraceTimeline(name, [ranks[process] for process in group], links[name]) for name, group in groups.items()]


def _op_at(spans: Sequence[tuple[float, float, int]], time: float) -> int | None:
    """Return the op of a thread at a time. The spans must be in order and must not overlap."""
    place = bisect_right(spans, (time, math.inf)) - 1
    return spans[place][2] if place >= 0 and time <= spans[place][1] else None


def _communications(links: Sequence[tuple[str, Place, Place]]) -> list[list[Place]]:
    """Group the arrows of a trace by communication. A message is one arrow; joins of a collective share a source."""
    collectives: dict[Place, list[Place]] = {}
    messages: list[list[Place]] = []
    for name, source, target in links:
        if name == "message":
            messages.append([source, target])
        else:
            collectives.setdefault(source, [source]).append(target)
    return [*messages, *collectives.values()]


def _find_awaited(ops: Sequence[TimedOp]) -> dict[int, tuple[int, ...]]:
    """Return the communications that a rank awaits before each op: those that end while it does not compute."""
    waits: dict[int, tuple[int, ...]] = {}
    ends = sorted((op.end, place) for place, op in enumerate(ops) if not op.computes and op.end > op.start)
    clock = 0.0
    for place, op in enumerate(ops):
        if op.computes:
            if op.start > clock:
                awaited_ends = ends[bisect_right(ends, (clock, len(ops))) : bisect_right(ends, (op.start, len(ops)))]
                waits[place] = tuple(index for _, index in awaited_ends if index < place)
            clock = max(clock, op.end)
    waits[len(ops)] = tuple(index for _, index in ends[bisect_right(ends, (clock, len(ops))) :])
    return waits


def _require_same(timelines: Sequence[TraceTimeline], row: int) -> None:
    first = timelines[0]
    for other in timelines[1:]:
        is_same = len(other.ranks) == len(first.ranks)
        if is_same:
            one, two = first.ranks[row].ops, other.ranks[row].ops
            is_same = all(
                one[index][0] is two[index][0] and one[index][3] == two[index][3] for index in one.keys() & two.keys()
            )
        if not is_same:
            raise UserError(
                f"the timelines {first.name!r} and {other.name!r} of this trace have different ops, so they have no "
                "common page; write a trace of one of them"
            )
