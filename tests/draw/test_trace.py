"""Traces for viewers: what is read back is the timeline."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from shardlab.check import check
from shardlab.draw.trace import save_trace_events, trace_events
from shardlab.program import Mesh, OpKind, Sizes, trace
from shardlab.simulate import simulate
from shardlab.simulate.counters import memory_counters
from shardlab.simulate.estimate import Estimate, estimate
from shardlab.simulate.folding import fold
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan import Plan
from tests.simulate.fakes import FakePrices

PLANS = {
    "3d": Plan(Mesh(pp=2, dp_shard=2, tp=2), shard_optimizer=("dp_shard",)),
    "ring": Plan(Mesh(cp=4)),
    "pipeline": Plan(Mesh(pp=4), "zb-v"),
}


def of_plan(name: str) -> Estimate:
    plan = PLANS[name]
    sizes = Sizes.of_puzzle(max(2, plan.natural_layers()), plan.mesh)
    return estimate(fold(plan, sizes, 4 * plan.data_ranks), FakePrices())


def written(found: Estimate, tmp_path: Path) -> list[dict[str, Any]]:
    save_trace_events(found.timeline(), tmp_path / "trace.json", memory_counters(found))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("name", PLANS)
def test_the_spans_are_the_timelines_events(name: str, tmp_path: Path) -> None:
    found = of_plan(name)
    stride = found.traced.program.mesh.world // found.traced.program.ranks
    read = {(span["pid"], span["args"]["op"]): span for span in spans(written(found, tmp_path))}
    events = [event for row in found.timeline().events for event in row]
    assert len(read) == len(events)
    for event in events:
        span = read[event.rank * stride, event.op]
        assert span["cat"] == event.kind.value
        assert span["ts"] == pytest.approx(event.start * 1e6)
        assert span["ts"] + span["dur"] == pytest.approx(event.end * 1e6)


@pytest.mark.parametrize("name", PLANS)
def test_on_one_track_nothing_overlaps(name: str, tmp_path: Path) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for span in spans(written(of_plan(name), tmp_path)):
        tracks[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for track in tracks.values():
        for before, after in itertools.pairwise(sorted(track)):
            assert after[0] >= before[1] - 1e-3


def test_every_track_has_a_name_and_ranks_their_true_numbers(tmp_path: Path) -> None:
    events = written(of_plan("3d"), tmp_path)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(span["pid"], span["tid"]) for span in spans(events)} == set(named)
    assert {rank for rank, _ in named} == {0, 4}
    assert set(named.values()) == {
        "compute",
        "communication on dp_shard",
        "communication on pp",
        "communication on tp",
        "send to rank 4",
        "recv from rank 4",
        "send to rank 0",
        "recv from rank 0",
    }


def test_an_arrow_goes_from_each_send_to_its_receive(tmp_path: Path) -> None:
    found = of_plan("pipeline")
    events = written(found, tmp_path)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    sends = sum(op.kind is OpKind.SEND for tape in found.traced.program.tapes for op in tape)
    assert len(starts) == len(ends) == sends
    assert starts.keys() == ends.keys()
    assert all(starts[flow]["pid"] != ends[flow]["pid"] for flow in starts)
    assert all(starts[flow]["ts"] <= ends[flow]["ts"] for flow in starts)
    assert {event["bp"] for event in ends.values()} == {"e"}


def test_memory_is_counted_by_category(tmp_path: Path) -> None:
    found = of_plan("3d")
    counters = [event for event in written(found, tmp_path) if event["ph"] == "C"]
    assert set(counters[0]["args"]) == {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "gathered",
        "communication",
    }
    assert max(sum(event["args"].values()) for event in counters) <= found.peak.bytes


def test_a_timeline_in_unit_costs_counts_what_is_live() -> None:
    entry = STRATEGIES["fsdp"]
    timeline = simulate(check(trace(entry.program, 4, 4, 4)))
    events = list(trace_events(timeline))
    assert max(e["args"]["live"] for e in events if e["ph"] == "C") == timeline.peak_memory
    assert max(s["ts"] + s["dur"] for s in spans(events)) == pytest.approx(timeline.end * 1e6)
