"""Requirements of trace viewers on a file, by the Trace Event Format and by Perfetto's importer.

Google's "Trace Event Format" (see `shardlab.draw.trace_events`): times are microseconds, spans of a thread nest or are
apart, and a flow has one "s" and one "f" of the same id, name and category. Perfetto drops spans that overlap (its
FAQ), and binds a flow's end to the span that is open at its time (flow_tracker.cc), so it must lie within one.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

Json = dict[str, Any]
NUMBER = (int, float)


def nanoseconds(event: Json, field: str = "ts") -> int:
    """Viewers round to nanoseconds."""
    assert isinstance(event[field], NUMBER)
    assert event[field] >= 0
    return round(event[field] * 1000)


def require_readable(events: list[Json]) -> None:
    """Assert all of it."""
    threads, processes = names_of(events, "thread_name"), names_of(events, "process_name")
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[int, dict[str, Json]] = defaultdict(dict)
    for event in events:
        assert event["ph"] in "MXsfC"
        assert event["pid"] in {process for process, _ in processes}
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert track in threads
            assert event["name"]
            tracks[track].append((nanoseconds(event), nanoseconds(event) + nanoseconds(event, "dur")))
        elif event["ph"] in "sf":
            assert flows[event["id"]].setdefault(event["ph"], event) is event, "an end of an arrow stands there twice"
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, NUMBER) and value >= 0 for value in event["args"].values())
    assert len({thread for _, thread in threads}) == len(threads), "a thread's number belongs to one process"
    for spans in tracks.values():
        assert spans == sorted(spans)
        assert all(span[1] <= next_span[0] for span, next_span in pairwise(spans))
    for flow in flows.values():
        assert flow.keys() == {"s", "f"}
        assert {(end["name"], end["cat"]) for end in flow.values()} == {(flow["s"]["name"], flow["s"]["cat"])}
        assert flow["f"]["bp"] == "e"
        assert nanoseconds(flow["s"]) <= nanoseconds(flow["f"])
        assert flow["s"]["tid"] != flow["f"]["tid"]
        for end in flow.values():
            time = nanoseconds(end)
            assert any(start <= time < stop for start, stop in tracks[end["pid"], end["tid"]])
    require_rising_counters(events)


def require_rising_counters(events: list[Json]) -> None:
    counters: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["pid"], event["name"]].append(nanoseconds(event))
    for times in counters.values():
        assert times == sorted(times)


def names_of(events: list[Json], kind: str) -> dict[tuple[int, int], str]:
    """The names of processes or threads, each given once."""
    names: dict[tuple[int, int], str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == kind:
            assert (event["pid"], event["tid"]) not in names
            names[event["pid"], event["tid"]] = event["args"]["name"]
    return names
