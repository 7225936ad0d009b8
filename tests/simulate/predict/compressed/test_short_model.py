"""Models with fewer blocks: what is left out, and how steps are extended to the whole model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Group, OpKind
from shardlab.language.precision import find_precision
from shardlab.models import find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.compressed.clocks import AwaitCollective, CompressedStep, Compute, LocalCollective
from shardlab.simulate.predict.compressed.short_model import ShortModel, StepSegment, extend_step, shorten
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.memory import MemoryChange, MemoryPeak
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import model_layers

ZERO3 = dict.fromkeys(("shard_optimizer", "shard_gradients", "shard_parameters"), ("dp_shard",))


def workload(**words: object) -> Workload:
    """llama3-70b, which has 80 blocks, on 64 devices."""
    plan = Plan.from_dict(words)
    return Workload(
        plan, find_model("llama3-70b"), find_cluster("h100x64"), 8 * plan.data_ranks, 1, find_precision("bf16")
    )


def short(**words: object) -> ShortModel:
    return shorten(workload(**words), 0)


def left_out(model: ShortModel) -> int:
    return sum(gap.left_out for gap in model.gaps)


@pytest.mark.parametrize("pp", [1, 4, 8])
def test_every_stage_of_a_short_model_keeps_a_few_blocks(pp: int) -> None:
    whole = workload(mesh={"pp": pp, "dp_shard": 8 // pp, "tp": 8}, sequence_parallel=True)
    model = shorten(whole, 0)
    assert len(model.gaps) == pp
    assert len(model.sizes.blocks) - 1 == 80 - left_out(model)
    assert max(gap.run_stop - gap.run_start for gap in model.gaps) <= 10 * whole.repeated.block_layers
    bounds = model.plan.bounds(model_layers(model.sizes).pipeline_units)
    assert len(bounds) == pp + 1
    assert [model.whole_layer[start] for start in model.starts[:-1]] == [stage.start for stage in model.stages]


def test_the_layers_of_a_short_model_are_identical_to_those_that_they_stand_for() -> None:
    whole = workload(mesh={"pp": 4, "dp_shard": 2, "tp": 8}, sequence_parallel=True)
    model = shorten(whole, 0)
    assert left_out(model) > 20
    for layer, number in enumerate(model.whole_layer):
        assert model.sample_layer[layer] == whole.repeated.sample_layers[number]


def test_no_block_is_left_out_of_short_stages_or_without_extra_blocks() -> None:
    assert not short(mesh={"pp": 16, "dp_shard": 4}, schedule="interleaved-1f1b", stages_per_rank=5).gaps
    assert not shorten(workload(mesh={"dp_shard": 64}, **ZERO3), None).gaps


def test_blocks_that_are_recomputed_and_others_have_gaps_of_their_own() -> None:
    model = short(mesh={"dp_shard": 8, "tp": 8}, recompute=tuple(range(30)))
    recomputed_gap, kept_gap = model.gaps
    assert recomputed_gap.run_stop <= kept_gap.run_start
    assert isinstance(model.plan.recompute, tuple)
    assert len(model.plan.recompute) == 30 - recomputed_gap.left_out


GROUP = Group("dp_shard", (0, 1))


def step(seconds: float, bytes: int, peak: int, layer: int) -> CompressedStep:
    memory_peak = MemoryPeak(peak, (peak, 0, 0, 0, 0, 0, 0), OpKind.FORWARD, layer)
    return CompressedStep([Compute(seconds)], MemoryChange(bytes, (bytes, 0, 0, 0, 0, 0, 0), memory_peak))


@given(st.integers(1, 9), st.integers(-3, 3), st.integers(0, 5), st.sampled_from([-4, 4]))
def test_an_extended_step_equals_its_segments_one_after_the_other(
    repetitions: int, bytes: int, peak: int, distance: int
) -> None:
    repeated = step(2.0, bytes, peak, 40)
    extended = extend_step([StepSegment(step(1.0, 7, 9, 3)), StepSegment(repeated, repetitions, distance)])
    one_by_one = [step(1.0, 7, 9, 3), *(step(2.0, bytes, peak, 40 + at * distance) for at in range(repetitions + 1))]
    expected = extend_step([StepSegment(one_step) for one_step in one_by_one])
    assert extended[1:] == expected[1:]
    (entry,) = extended.entries
    assert isinstance(entry, Compute)
    assert entry.seconds == 1.0 + 2.0 * (repetitions + 1)


def test_a_repeated_wait_is_for_the_collective_of_its_own_repetition() -> None:
    """Each repetition of a first segment starts two collectives; later each repetition awaits one of them."""
    no_bytes = (0,) * 7
    starts = CompressedStep([LocalCollective(GROUP, 1.0), LocalCollective(GROUP, 1.0)], MemoryChange(0, no_bytes, None))
    waits = CompressedStep([AwaitCollective(GROUP, 8, OpKind.ALL_GATHER, 2)], MemoryChange(0, no_bytes, None))
    extended = extend_step([StepSegment(starts, 3, 4, {GROUP: 2}), StepSegment(waits, 3, 4, {GROUP: 0})])
    assert [entry.ago for entry in extended.entries if isinstance(entry, AwaitCollective)] == [8, 6, 4, 2]
