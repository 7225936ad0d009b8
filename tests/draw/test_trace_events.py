"""Traces for viewers: what is read back is the timeline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.draw.trace_events import save_trace_events, trace_events
from shardlab.language import Mesh, OpKind, Rank, Sizes, trace
from shardlab.simulate.predict.estimate import Estimate, estimate
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.timeline import Costs, simulate
from shardlab.simulate.timeline.run import memory_counters
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from tests.draw.trace_format import names_of, require_readable
from tests.simulate.timeline.fakes import FakePrices
from tests.support.random_plans import random_plan
from tests.support.thorough import examples

FSDP, GPIPE = STRATEGIES["fsdp"], STRATEGIES["gpipe"]

PLANS = {
    "3d": Plan(Mesh(pp=2, dp_shard=2, tp=2), shard_optimizer=("dp_shard",)),
    "ring": Plan(Mesh(cp=4)),
    "pipeline": Plan(Mesh(pp=4), "zb-v"),
}


def of_plan(name: str) -> Estimate:
    plan = PLANS[name]
    sizes = Sizes.of_puzzle(max(2, plan.natural_layers()), plan.mesh)
    return estimate(fold(plan, sizes, 4 * plan.data_ranks), FakePrices())


def write_trace(estimate: Estimate, tmp_path: Path) -> list[dict[str, Any]]:
    save_trace_events(
        {"": (estimate.timeline(), memory_counters(estimate.traced, estimate.times))}, tmp_path / "trace.json"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("name", PLANS)
def test_the_spans_are_the_timelines_events(name: str, tmp_path: Path) -> None:
    estimate = of_plan(name)
    stride = estimate.traced.program.mesh.world // estimate.traced.program.ranks
    read = {(span["pid"], span["args"]["op"]): span for span in spans(write_trace(estimate, tmp_path))}
    events = [event for row in estimate.timeline().events for event in row]
    assert len(read) == len(events)
    for event in events:
        span = read[event.rank * stride, event.op]
        assert span["cat"] == event.kind.value
        assert span["ts"] == pytest.approx(event.start * 1e6)
        assert span["ts"] + span["dur"] == pytest.approx(event.end * 1e6)


@pytest.mark.parametrize("name", PLANS)
def test_a_viewer_can_read_it(name: str, tmp_path: Path) -> None:
    require_readable(write_trace(of_plan(name), tmp_path))


@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 2**32), times=st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1 / 3, 2.5]), min_size=5, max_size=5)
)
def test_a_viewer_can_read_any_plan_at_any_costs(seed: int, times: list[float]) -> None:
    forward, backward, collective, send, recv = times
    costs = Costs(forward=forward, backward_input=backward, collective=collective, send=send, recv=recv)
    require_readable(list(trace_events({"": (simulate(check(random_plan(seed).program), costs), None)})))


def test_a_span_names_its_microbatch_and_the_models_layer_and_each_pass_has_a_colour(tmp_path: Path) -> None:
    split = [span for span in spans(write_trace(of_plan("pipeline"), tmp_path)) if span["cat"].startswith("backward")]
    assert {"backward-input 0 (layer 0)", "backward-weight 3 (layer 7)"} <= {span["name"] for span in split}
    assert len({(span["cat"], span["cname"]) for span in split}) == len({span["cname"] for span in split}) >= 2
    finest = spans(write_trace(of_plan("3d"), tmp_path))
    assert {re.sub(r".*layer (\d+).*", r"\1", e["name"]) for e in finest if e["cat"] == "forward"} == {*"01"}


def test_every_track_has_a_name_and_ranks_their_true_numbers(tmp_path: Path) -> None:
    events = write_trace(of_plan("3d"), tmp_path)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(span["pid"], span["tid"]) for span in spans(events)} == set(names)
    assert {rank for rank, _ in names} == {0, 4}
    assert set(names.values()) == {
        "compute",
        "communication on dp_shard",
        "communication on pp",
        "communication on tp",
        "send to rank 4",
        "recv from rank 4",
        "send to rank 0",
        "recv from rank 0",
    }


def arrows_of(events: list[dict[str, Any]], name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The two ends of each arrow of a name."""
    ends = {(event["id"], event["ph"]): event for event in events if event["ph"] in "sf" and event["name"] == name}
    return [(ends[flow, "s"], ends[flow, "f"]) for flow, phase in ends if phase == "s"]


def test_an_arrow_goes_from_each_send_to_its_receive(tmp_path: Path) -> None:
    estimate = of_plan("pipeline")
    messages = arrows_of(write_trace(estimate, tmp_path), "message")
    assert len(messages) == sum(op.kind is OpKind.SEND for tape in estimate.traced.program.tapes for op in tape)
    assert all(start["pid"] != end["pid"] for start, end in messages)


async def late(rank: Rank) -> None:
    """Ranks meet in an all-reduce to which rank 1 comes last, since it has most microbatches."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    for m in [[0], [1, 2], [3]][rank.index]:
        rank.activations[0] = rank.load_batch([m])
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        grad_weight, _ = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])
        rank.grad_weights[0] = rank.grad_weights[0] + grad_weight if 0 in rank.grad_weights else grad_weight
    total = await rank.all_reduce(rank.grad_weights.pop(0))
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])


def test_arrows_join_a_collective_from_the_rank_that_came_last() -> None:
    timeline = simulate(check(trace(late, 3, 1, 4)))
    joins = arrows_of(list(trace_events({"": (timeline, None)})), "join")
    assert sorted((start["pid"], end["pid"]) for start, end in joins) == [(1, 0), (1, 2)]


def test_messages_that_travel_at_once_have_tracks_of_their_own() -> None:
    costs = Costs(send=5, recv=0.1, link_latency=True)
    timeline = simulate(check(trace(GPIPE.program, GPIPE.grid(4), 4, 4)), costs)
    events = list(trace_events({"": (timeline, None)}))
    require_readable(events)
    assert "send to rank 1 (2)" in names_of(events, "thread_name").values()


def test_several_timelines_stand_in_one_file_rank_beside_rank(tmp_path: Path) -> None:
    timeline = simulate(check(trace(FSDP.program, 2, 2, 2)))
    longer = simulate(check(trace(FSDP.program, 2, 2, 2)), Costs(forward=3))
    save_trace_events({"predicted": (timeline, None), "measured": (longer, None)}, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    require_readable(events)
    processes = sorted(names_of(events, "process_name").items())
    assert [name for _, name in processes] == [
        "predicted rank 0",
        "measured rank 0",
        "predicted rank 1",
        "measured rank 1",
    ]
    ends = [max(span["ts"] + span["dur"] for span in spans(events) if span["pid"] % 2 == side) for side in (0, 1)]
    assert ends == pytest.approx([timeline.end * 1e6, longer.end * 1e6])
    assert all(start["pid"] % 2 == end["pid"] % 2 for start, end in arrows_of(events, "join"))


def test_memory_is_counted_by_category(tmp_path: Path) -> None:
    estimate = of_plan("3d")
    counters = [event for event in write_trace(estimate, tmp_path) if event["ph"] == "C"]
    assert set(counters[0]["args"]) == {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "gathered",
        "communication",
    }
    assert max(sum(event["args"].values()) for event in counters) <= estimate.peak.bytes


def test_a_timeline_in_unit_costs_counts_what_is_live() -> None:
    timeline = simulate(check(trace(FSDP.program, 4, 4, 4)))
    events = list(trace_events({"": (timeline, None)}))
    require_readable(events)
    assert max(e["args"]["live"] for e in events if e["ph"] == "C") == timeline.peak_memory
    assert max(s["ts"] + s["dur"] for s in spans(events)) == pytest.approx(timeline.end * 1e6)
