"""A plan that does not fit: by how much, what most of it is, and which change would help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.language import Mesh, UserError
from shardlab.language.precision import find_precision
from shardlab.models import GPT
from shardlab.simulate.hardware import Cluster, find_cluster
from shardlab.simulate.predict.memory import device_memory
from shardlab.simulate.predict.memory_advice import MOST_MICROBATCHES, advice, changes, require_memory
from shardlab.simulate.predict.recipe import Recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from tests.support.thorough import examples

MODEL = GPT(layers=8, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)

SHARD = ("dp_shard",)


def cluster_with(bytes: float) -> Cluster:
    cluster = find_cluster("h100x8")
    return replace(cluster, device=replace(cluster.device, memory=bytes))


def workload(plan: Plan | Mesh, memory: float, micro_batch_size: int = 1) -> Workload:
    return Workload(plan, MODEL, cluster_with(memory), 8, micro_batch_size, find_precision("bf16"), recipe=Recipe())


def refusal(plan: Plan, memory: float, micro_batch_size: int = 1) -> str:
    step = workload(plan, memory, micro_batch_size)
    with pytest.raises(UserError) as error:
        require_memory(step, step.estimate().peaks)
    return str(error.value)


def test_what_fits_is_let_through() -> None:
    step = workload(Plan(Mesh(dp_shard=8)), 80 * 2**30)
    require_memory(step, step.estimate().peaks)


def test_the_sentence_says_by_how_much_and_what_dominates() -> None:
    step = workload(Plan(Mesh(dp_shard=8)), 2**28)
    peak = step.estimate().peak
    sentence = refusal(Plan(Mesh(dp_shard=8)), 2**28)
    needed, excess = peak.bytes / 2**20, (peak.bytes - 2**28) / 2**20
    assert f"{needed:.1f} MiB but has 256.0 MiB: {excess:.1f} MiB too much" in sentence
    assert "most of it is optimizer" in sentence


def test_amounts_that_are_nearly_equal_are_distinguished() -> None:
    peak = workload(Plan(Mesh(dp_shard=8)), 2**28).estimate().peak
    sentence = refusal(Plan(Mesh(dp_shard=8)), peak.bytes - 2**12)
    amounts = re.search(r"would need ([\d.]+ \w+) but has ([\d.]+ \w+)", sentence)
    assert amounts
    assert amounts[1] != amounts[2]


def test_a_change_that_is_advised_does_fit() -> None:
    plan = Plan(Mesh(dp_shard=8))
    capacity = 300 * 2**20
    sentence = refusal(plan, capacity)
    assert "--shard-optimizer dp_shard would fit" in sentence
    changed = workload(replace(plan, shard_optimizer=SHARD), capacity)
    require_memory(changed, changed.estimate().peaks)


def test_many_activations_are_recomputed_or_taken_in_smaller_microbatches() -> None:
    plan = Plan(Mesh(dp_shard=8), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)
    assert "--recompute full would fit" in refusal(plan, 2**29, micro_batch_size=8)
    recomputing = replace(plan, recompute="full")
    capacity = 0.7 * workload(recomputing, 2**40, micro_batch_size=8).peak_bytes()
    assert "--micro-batch-size 1 --microbatches 64 would fit" in refusal(recomputing, capacity, micro_batch_size=8)


def test_when_nothing_helps_the_least_is_named() -> None:
    assert "takes least" in refusal(Plan(Mesh(dp_shard=8)), 2**20)
    assert refusal(Plan(Mesh(dp_shard=8)), 2**20).endswith("take more devices, or larger ones")


def test_what_saves_nothing_is_not_named() -> None:
    sharded = Plan(Mesh(), recompute="full")
    step = replace(workload(sharded, 2**20), cluster=replace(cluster_with(2**20), nodes=1, per_node=1))
    assert "nothing that was tried saves memory" in advice(step, device_memory(step))


def flags_of(step: Workload) -> list[str]:
    return [change.flags for change in changes(step)]


def test_a_program_of_its_own_gets_advice_on_plans() -> None:
    flags = flags_of(workload(Mesh(dp_shard=8), 2**30))
    assert flags[:2] == ["a plan, --dp-shard 8,", "a plan, --dp-shard 8 --shard-optimizer dp_shard,"]
    assert flags_of(workload(Mesh(pp=8), 2**30))[0] == "a plan, --pp 8,"


@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate", "cp"])
def test_every_axis_whose_ranks_see_other_tokens_is_tried_for_sharding(axis: str) -> None:
    assert f"--shard-optimizer {axis}" in flags_of(workload(Plan(Mesh(**{axis: 8})), 2**30))


def test_a_schedule_that_holds_all_microbatches_gets_advice_on_one_that_does_not() -> None:
    assert flags_of(workload(Plan(Mesh(pp=8), "gpipe"), 2**30))[0] == "--schedule 1f1b"
    assert flags_of(workload(Plan(Mesh(pp=4), "breadth-first"), 2**30))[0] == "--schedule interleaved-1f1b"


def test_idle_devices_are_used() -> None:
    flags = flags_of(workload(Plan(Mesh(tp=2)), 2**30))
    assert (
        "--dp-shard 4 --tp 2 --microbatches 8 --shard-optimizer dp_shard, which uses the 6 devices that are idle,"
        in flags
    )
    assert not any("idle" in flag for flag in flags_of(workload(Plan(Mesh(tp=8)), 2**30)))


@given(st.integers(1, 10**7), st.integers(1, 64))
def test_a_batch_is_never_cut_into_absurdly_many_microbatches(micro_batch_size: int, microbatches: int) -> None:
    step = replace(workload(Mesh(dp_shard=8), 2**30, micro_batch_size), microbatches=8 * microbatches)
    assert max(change.workload.microbatches for change in changes(step)) <= 8 * MOST_MICROBATCHES
    same_batch = [change.workload for change in changes(step) if "smaller batch" not in change.flags]
    assert {changed.microbatches * changed.micro_batch_size for changed in same_batch} == {
        8 * microbatches * micro_batch_size
    }


@settings(max_examples=examples(25), deadline=None)
@given(
    st.sampled_from([Mesh(dp_shard=2), Mesh(cp=2), Mesh(pp=2), Mesh(pp=4), Mesh(pp=2, dp_replicate=2), Mesh(tp=2)]),
    st.sampled_from(["1f1b", "gpipe", "zb-h2", "interleaved-1f1b", "breadth-first", "zb-v"]),
    st.sampled_from([1, 6]),
    st.integers(0, 40),
)
def test_a_change_is_accepted_by_the_peak_that_it_really_has(
    mesh: Mesh, schedule: str, micro_batch_size: int, number: int
) -> None:
    """To half a percent, though fewer microbatches are traced for it."""
    step = replace(workload(Plan(mesh, schedule), 2**30, micro_batch_size), microbatches=8 * Plan(mesh).data_ranks)
    all_changes = list(changes(step))
    change = all_changes[number % len(all_changes)]
    try:
        short = change.short.peak_bytes()
    except UserError:
        return
    assert short == pytest.approx(change.workload.peak_bytes(), rel=5e-3)


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(UserError, match="16 ranks do not fit on 8 devices"):
        workload(Plan(Mesh(dp_shard=16)), 2**40).estimate()


def test_flops_are_those_of_forward_and_backward_and_mfu_their_share_of_the_peak() -> None:
    step = workload(Plan(Mesh(dp_shard=8), recompute="full"), 2**40)
    assert step.tokens == 8 * 512
    assert step.flops == 3 * 8 * sum(MODEL.forward_flops(layer) for layer in range(8))
    assert step.mfu(1.0) == step.flops / (8 * step.cluster.device.peak("bfloat16"))


def test_smaller_microbatches_come_with_a_schedule_that_does_not_hold_them_all() -> None:
    flags = flags_of(workload(Plan(Mesh(pp=8), "gpipe"), 2**30, micro_batch_size=4))
    assert "--micro-batch-size 1 --microbatches 32 --schedule 1f1b" in flags
    assert "--micro-batch-size 1 --microbatches 32" not in flags
