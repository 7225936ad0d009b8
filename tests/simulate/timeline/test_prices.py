"""Prices other than costs: streams of their own for communicators, transfers that wait for both ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardlab.check import check
from shardlab.language import Mesh, Op, OpKind, Rank, Sizes, Spec, UserError, trace
from shardlab.language.mesh import group_of
from shardlab.language.ops import Stream
from shardlab.simulate.timeline import PUZZLE_COSTS, Costs
from shardlab.simulate.timeline.prices import Bytes, PriceList
from shardlab.simulate.timeline.run import Clocks
from shardlab.strategies import STRATEGIES
from tests.simulate.timeline.fakes import FakePrices
from tests.simulate.timeline.runs import SQUARE, run
from tests.support.passing import gradients


async def reduces_twice(rank: Rank) -> None:
    """Two reductions at once, each on a group of its own."""
    for l, grad_weight in gradients(rank):
        rank.grad_weights[l] = grad_weight
    first = [rank.all_reduce(rank.grad_weights.pop(l), axis=axis) for l, axis in AXES_OF.items()]
    half = [await handle for handle in first]
    for (l, axis), gradient in zip(AXES_OF.items(), half, strict=True):
        other = "dp_shard" if axis == "dp_replicate" else "dp_replicate"
        total = await rank.all_reduce(gradient, axis=other)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


AXES_OF = {0: "dp_shard", 1: "dp_replicate"}

MESH = Mesh(dp_replicate=2, dp_shard=2)


def reductions(one_stream: bool) -> list[tuple[float, float]]:
    checked = check(trace(reduces_twice, MESH, 2, 4))
    times = Clocks(checked, FakePrices(one_stream=one_stream)).run()
    at = [at for at, op in enumerate(checked.program.tapes[0]) if op.kind is OpKind.ALL_REDUCE][:2]
    return [(times.starts[0][op], times.ends[0][op]) for op in at]


def test_groups_do_not_queue_behind_one_another() -> None:
    first, second = reductions(one_stream=False)
    assert first == second


def test_on_one_stream_they_do() -> None:
    first, second = reductions(one_stream=True)
    assert second[0] == first[1]


def test_a_transfer_starts_when_both_ends_have_come_and_ends_for_both_at_once() -> None:
    entry = STRATEGIES["pipeline"]
    checked = check(trace(entry.program, entry.mesh(2), 2, 2))
    times = Clocks(checked, FakePrices()).run()
    for message in (operation for operation in checked.communications if operation.stream is Stream.MESSAGE):
        (sender, _, send), (receiver, _, receive) = message.participants
        assert times.starts[sender][send] == times.starts[receiver][receive]
        assert times.ends[sender][send] == times.ends[receiver][receive]


async def both_send_first(rank: Rank) -> None:
    """Two ranks that send their batch to each other and only then receive."""
    other = 1 - rank.index
    batch = rank.load_batch([rank.index])
    rank.activations[0] = batch
    await rank.send(batch, to=other)
    rank.activations["theirs"] = await rank.recv(source=other)
    await STRATEGIES["ddp"].program(rank)


def test_a_program_that_hangs_without_buffers_is_refused() -> None:
    checked = check(trace(both_send_first, 2, 1, 2))
    Clocks(checked, Costs()).run()
    with pytest.raises(UserError, match=r"rank \d waits in send to rank \d.*exchange"):
        Clocks(checked, FakePrices()).run()


def test_the_whole_value_is_priced_whichever_way_it_is_cut() -> None:
    bytes_of: dict[OpKind, float] = {}

    class Noting(FakePrices):
        def collective_time(self, kind: OpKind, bytes: float, group: object) -> float:
            bytes_of[kind] = bytes
            return 0.0

    Clocks(check(trace(STRATEGIES["fsdp"].program, 4, 2, 4)), Noting()).run()
    assert bytes_of == {OpKind.ALL_GATHER: 4 * SQUARE, OpKind.REDUCE_SCATTER: 4 * SQUARE}


def test_identical_work_is_priced_once() -> None:
    priced_kinds: list[OpKind] = []

    class Counting(FakePrices):
        def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
            priced_kinds.append(op.kind)
            return 1.0

    entry = STRATEGIES["gpipe"]
    Clocks(check(trace(entry.program, entry.mesh(4), 4, 16)), Counting()).run()
    assert priced_kinds.count(OpKind.FORWARD) == priced_kinds.count(OpKind.BACKWARD) == 4  # of 64


def test_the_price_list_knows_the_sizes_that_the_table_says() -> None:
    checked = check(trace(STRATEGIES["3d"].program, STRATEGIES["3d"].mesh(8), 2, 4))
    sizes = replace(checked.program.sizes, saved=tuple(range(1000, 1000 + checked.program.layers)))
    bytes_of = Bytes(sizes)
    for specs in checked.specs:
        for spec in specs.values():
            assert bytes_of(spec) == sizes.bytes(spec)
    assert PriceList(checked, Costs()).compute(checked.program.tapes[0][0], checked.specs[0]) == 0.0


def test_unit_costs_are_one_kind_of_prices() -> None:
    assert Costs().one_stream
    assert Costs().messages == "buffered"
    assert Costs(link_latency=True).messages == "link"
    assert Costs(collective=3).collective_time(OpKind.ALL_REDUCE, 10, group_of("tp", (0, 1))) == 3


# What ops cost.


def test_the_halves_of_a_backward_pass_are_the_whole() -> None:
    assert PUZZLE_COSTS.backward == PUZZLE_COSTS.forward == 1
    assert Costs(backward_input=18.086, backward_weight=9.337).backward == 18.086 + 9.337


def test_passes_are_paid_for_each_microbatch_and_other_ops_once() -> None:
    costs = Costs(forward=2, recompute=3, backward_input=1, backward_weight=4, loss=6, add=7, update=8)
    microbatch_seconds = {OpKind.FORWARD: 2, OpKind.RECOMPUTE: 3, OpKind.BACKWARD: 5}
    step_seconds = {OpKind.LOSS: 6, OpKind.ADD: 7, OpKind.UPDATE: 8}
    for kind in OpKind:
        if kind in microbatch_seconds:
            assert costs.duration(kind, 3) == 3 * microbatch_seconds[kind]
        elif kind in step_seconds:
            assert costs.duration(kind, 3) == step_seconds[kind]


def test_loading_and_bookkeeping_are_free() -> None:
    loads = {kind for kind in OpKind if kind.value.startswith("load")}
    assert loads
    for kind in {*loads, OpKind.WAIT, OpKind.FREE}:
        assert PUZZLE_COSTS.duration(kind, 3) == 0


# The published puzzle solutions, and the native strategies beside them.


TABLE = [
    # strategy, ranks, layers, microbatches; steps, end and peak memory of the published solution
    ("single", 1, 2, 4, 16.5, 17.0, 2621440),
    ("grad-accum", 1, 2, 4, 16.5, 17.0, 1966080),
    ("ddp", 4, 2, 4, 5.1, 5.6, 1835008),
    ("wsdp", 4, 6, 4, 19.9, 20.4, 2752512),
    ("fsdp", 4, 6, 4, 19.9, 20.4, 2359296),
    ("pipeline", 4, 8, 4, 66.9, 67.4, 3145728),
    ("gpipe", 4, 8, 4, 33.3, 33.8, 4194304),
    ("pipeline-fsdp", 16, 4, 4, 15.5, 16.0, 966656),
]


@pytest.mark.parametrize(("name", "ranks", "layers", "microbatches", "steps", "end", "peak"), TABLE)
def test_no_strategy_is_slower_or_larger_than_the_published_solution(
    name: str, ranks: int, layers: int, microbatches: int, steps: float, end: float, peak: int
) -> None:
    entry = STRATEGIES[name]
    timeline = run(entry.program, entry.mesh(ranks), layers, microbatches)
    assert timeline.steps <= steps
    assert timeline.end <= end
    assert timeline.peak_memory <= peak


def test_the_table_has_a_row_for_every_strategy_of_the_puzzles() -> None:
    ours = {"column-parallel", "tensor-parallel", "expert-parallel"}
    puzzles = {name for name, entry in STRATEGIES.items() if not entry.plan} - ours
    assert [row[0] for row in TABLE] == [n for n in STRATEGIES if n in puzzles | {"gpipe", "pipeline-fsdp"}]


def test_one_device_takes_exactly_what_the_puzzle_says() -> None:
    timeline = run(STRATEGIES["single"].program, 1, 2, 4)
    assert (timeline.steps, timeline.end, timeline.peak_memory) == (16.5, 17.0, 2621440)


def test_steps_is_when_the_last_op_starts_and_end_when_it_ends() -> None:
    timeline = run(STRATEGIES["fsdp"].program, 4, 6, 4)
    all_events = [event for events in timeline.events for event in events]
    assert timeline.steps == pytest.approx(max(event.start for event in all_events))
    assert timeline.end == pytest.approx(max(event.end for event in all_events))


def test_peak_memory_is_the_largest_over_the_ranks() -> None:
    timeline = run(STRATEGIES["gpipe"].program, STRATEGIES["gpipe"].mesh(4), 8, 4)
    assert timeline.peak_memory == max(timeline.peak_memory_by_rank)
    assert len(set(timeline.peak_memory_by_rank)) > 1
