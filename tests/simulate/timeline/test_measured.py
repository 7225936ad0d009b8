"""Records of ranks become a timeline: on one clock, with starts as simulated clocks have them, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import Checked, check
from shardlab.language import OpKind, UserError, trace
from shardlab.language.ops import COMMUNICATION
from shardlab.language.tape import MemoryRecord, OpTimes, RankRecord, StepRecord
from shardlab.simulate.timeline import TEACHING_COSTS, simulate
from shardlab.simulate.timeline.measured import compare, measured, read_trace, write_rank, write_trace
from shardlab.simulate.timeline.prices import Prices
from shardlab.simulate.timeline.timeline import covered, rank_times
from shardlab.strategies.ddp import ddp
from shardlab.strategies.fsdp import fsdp

DDP, FSDP = (check(trace(strategy, ranks=2, layers=3, microbatches=2)) for strategy in (ddp, fsdp))


def step_as_simulated(
    checked: Checked, rank: int, begin: float, times: float = 1.0, costs: Prices = TEACHING_COSTS
) -> StepRecord:
    """What a rank would see of a step that goes as the simulator says, on a clock that shows `begin` at its start."""
    timeline = simulate(checked, costs)
    events = {event.op: event for event in timeline.events[rank]}
    step, clock = StepRecord(begin, begin + times * timeline.end), 0.0
    communication_ends: dict[int, float] = {}
    for at, op in enumerate(checked.program.tapes[rank]):
        event = events.get(at)
        if op.kind in COMMUNICATION and event is not None:
            communication_ends[op.handle] = event.end
            step.ops[at] = OpTimes(begin + times * clock, begin + times * clock, begin + times * event.end)
            continue
        start = clock if event is None else event.start
        clock = max(start, communication_ends.get(op.handle, 0.0)) if event is None else event.end
        step.ops[at] = OpTimes(begin + times * start, begin + times * clock)
    return step


def records(
    checked: Checked, *times: float, lead: float = 0.0, costs: Prices = TEACHING_COSTS
) -> dict[int, RankRecord]:
    """Steps that take so many times as long as simulated; rank 1's clock is ahead by `lead`."""
    return {
        rank: RankRecord(
            rank,
            rank * lead,
            1e-6,
            [
                step_as_simulated(checked, rank, 100.0 * number + rank * lead, factor, costs)
                for number, factor in enumerate(times)
            ],
            MemoryRecord({key: {"parameters": 8, "activations": 6} for key in range(len(tape))}, 20),
        )
        for rank, tape in enumerate(checked.program.tapes)
    }


@pytest.mark.parametrize("checked", [DDP, FSDP])
@given(lead=st.floats(-1e6, 1e6))
def test_a_step_that_goes_as_simulated_is_measured_as_it_was_simulated(checked: Checked, lead: float) -> None:
    measured_timeline, simulated = measured(checked, records(checked, 1.0, lead=lead)).timeline, simulate(checked)
    for ours, theirs in zip(measured_timeline.events, simulated.events, strict=True):
        assert [event[:5] for event in ours] == [event[:5] for event in theirs]
        assert [event.end for event in ours] == pytest.approx([event.end for event in theirs], abs=1e-6)
        assert [event.start for event in ours] == pytest.approx([event.start for event in theirs], abs=1e-6)


def test_of_several_steps_the_median_one_is_shown_and_ops_take_the_mean_of_the_middle_half() -> None:
    result, simulated = measured(DDP, records(DDP, 4.0, 1.0, 2.0, 9.0, 3.0)), simulate(DDP)
    assert result.timeline.end == pytest.approx(3 * simulated.end)
    assert result.steps == pytest.approx([times * simulated.end for times in (4, 1, 2, 9, 3)])
    for event in simulated.events[0]:
        assert result.seconds[0][event.op] == pytest.approx(3 * (event.end - event.start))
    assert result.live == [{"parameters": 8, "activations": 6}] * 2
    assert (result.peaks, result.bound) == ([20, 20], 1e-6)


def test_what_takes_twice_as_long_as_predicted_has_a_ratio_of_a_half_everywhere() -> None:
    output = simulate(DDP)
    comparison = compare(measured(DDP, records(DDP, 2.0, 2.0)), output, [28, 28])
    assert (comparison.step.predicted, comparison.step.measured) == pytest.approx((output.end, 2 * output.end))
    ratios = [row.seconds.ratio for row in comparison.kinds if row.seconds.measured]
    pairs = [pair for row in comparison.ranks for pair in (row.computing, row.exposed)]
    ratios += [pair.ratio for pair in pairs if pair.measured and pair.measured > 1e-6]
    assert ratios == [pytest.approx(0.5)] * len(ratios)
    assert [row.memory.ratio for row in comparison.ranks] == [2.0, 2.0]
    forward = next(row for row in comparison.kinds if row.kind is OpKind.FORWARD)
    assert (forward.rank, forward.ops, forward.measured_ops, forward.seconds.predicted) == (0, 3, 3, pytest.approx(3.0))


def broken() -> dict[int, RankRecord]:
    """Rank 1 failed in the second step, and nobody measured memory."""
    rank_records = records(DDP, 1.0, 1.0)
    for record in rank_records.values():
        record.memory = None
    step = rank_records[1].steps[1]
    step.ended, step.ops = None, {at: moments for at, moments in step.ops.items() if at < 12}
    step.ops[11] = step.ops[11]._replace(end=None)
    return rank_records


def test_of_a_run_that_broke_off_what_there_is_is_shown() -> None:
    rank_records = broken()
    result = measured(DDP, rank_records)
    assert result.steps == [pytest.approx(simulate(DDP).end)]
    assert result.missing == [
        f"rank 1 came no further than op 11 {DDP.program.tapes[1][11]} of recorded step 1",
        "memory was not measured on rank 0, 1",
    ]
    for record in rank_records.values():
        del record.steps[0]
    result = measured(DDP, rank_records)
    assert result.steps == []
    assert [event.op for event in result.timeline.events[1]] == [
        at for at in range(11) if DDP.program.tapes[1][at].kind not in (OpKind.WAIT, OpKind.FREE)
    ]
    assert "no step was recorded to its end on all ranks" in result.missing
    rows = compare(result, simulate(DDP)).kinds
    assert any(row.measured_ops < row.ops for row in rows if row.rank == 1)
    assert all(row.measured_ops == row.ops for row in rows if row.rank == 0 and row.kind not in COMMUNICATION)


@pytest.mark.parametrize("checked", [DDP, FSDP])
def test_the_measured_times_of_a_rank_add_up_to_the_step_and_its_ops_to_the_time_it_computes(checked: Checked) -> None:
    comparison = compare(measured(checked, records(checked, 4.0, 1.0, 2.0, 9.0, 3.0, 2.5)))
    for row in comparison.ranks:
        times = [pair.measured or 0.0 for pair in (row.computing, row.exposed, row.idle)]
        assert sum(times) == pytest.approx(comparison.step.measured)
        ops = [
            kind_row
            for kind_row in comparison.kinds
            if kind_row.rank == row.rank and kind_row.kind not in COMMUNICATION
        ]
        assert sum(kind_row.seconds.measured or 0.0 for kind_row in ops) == pytest.approx(times[0])


def test_a_rank_without_a_record_is_named_and_the_others_are_shown() -> None:
    rank_records = records(DDP, 1.0)
    del rank_records[0]
    result = measured(DDP, rank_records)
    assert result.missing == ["rank 0 left no record"]
    assert (result.timeline.events[0], len(result.steps)) == ([], 1)
    assert measured(DDP, {}).missing[-1] == "no step was recorded to its end on all ranks"


def test_both_kinds_of_file_give_back_what_was_written(tmp_path: Path) -> None:
    rank_records, job = records(FSDP, 1.0, 3.0, lead=5.0), {"strategy": "fsdp"}
    expected = measured(FSDP, rank_records)
    for record in rank_records.values():
        write_rank(tmp_path, job, FSDP.program.fingerprint(), record)
    parts = read_trace(tmp_path)
    assert (parts.job, parts.records) == (job, rank_records)
    write_trace(tmp_path, job, FSDP, rank_records)
    for trace_file in (parts, read_trace(tmp_path)):
        restored = trace_file.measured(FSDP)
        assert restored.timeline.events == expected.timeline.events
        assert {**vars(restored), "timeline": 0} == {**vars(expected), "timeline": 0}


def test_a_trace_of_other_tapes_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path, {}, FSDP, records(FSDP, 1.0))
    with pytest.raises(UserError, match="another program than its job stands for"):
        read_trace(tmp_path).measured(DDP)


def test_of_a_file_that_was_cut_off_the_steps_before_are_shown(tmp_path: Path) -> None:
    """Its lines are what ran, two steps of two ranks, and two memories."""
    rank_records = records(FSDP, 1.0, 3.0)
    write_trace(tmp_path, {"strategy": "fsdp"}, FSDP, rank_records)
    path = tmp_path / "measured.jsonl"
    whole = path.read_text()
    lengths = [len(line) for line in whole.splitlines(keepends=True)]
    for cut in range(lengths[0], len(whole), 97):
        path.write_text(whole[:cut])
        result = read_trace(tmp_path).measured(FSDP)
        readable = sum(sum(lengths[: end + 1]) <= cut + 1 for end in range(1, len(lengths)))
        if readable < len(lengths) - 1:
            assert result.missing[0] == f"{path} is cut off: {readable} of its 6 entries can be read"
        assert len(result.steps) == min(2, readable // 2)


def test_a_ranks_file_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    rank_records = records(FSDP, 1.0)
    for record in rank_records.values():
        write_rank(tmp_path, {}, FSDP.program.fingerprint(), record)
    (tmp_path / "measured-rank-0.jsonl").write_bytes(b"\xff\x00{")
    result = read_trace(tmp_path).measured(FSDP)
    assert "measured-rank-0.jsonl cannot be read as a trace" in result.missing[0]
    assert result.missing[1] == "rank 0 left no record"
    assert (result.timeline.events[0], len(result.steps)) == ([], 1)


BAD = {
    "": "cannot be read as a trace",
    "{": "cannot be read as a trace",
    "[]": "format None",
    '{"format": 7}': "format 7",
    '{"format": 3}': "KeyError: 'clocks'",
}


@pytest.mark.parametrize(("content", "message"), BAD.items())
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "measured.jsonl").write_text(content)
    with pytest.raises(UserError, match=rf"measured\.jsonl.*{message}"):
        read_trace(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_covered_time_counts_every_moment_once(spans: list[tuple[int, int]]) -> None:
    moments = {moment for start, length in spans for moment in range(start, start + length)}
    assert covered((start, start + length) for start, length in spans) == len(moments)


@pytest.mark.parametrize("checked", [DDP, FSDP])
def test_where_a_ranks_time_goes_adds_up_to_the_step(checked: Checked) -> None:
    timeline = simulate(checked)
    for rank in range(2):
        times = rank_times(timeline, rank)
        assert sum(times) == pytest.approx(timeline.end)
        assert min(times) >= 0
