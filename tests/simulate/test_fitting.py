"""A plan that does not fit: by how much, what most of it is, and which change would help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.hardware import Cluster, find_cluster
from shardlab.models import GPT
from shardlab.program import Mesh, UserError
from shardlab.simulate.fitting import changes, require_memory
from shardlab.simulate.precision import find_precision
from shardlab.simulate.workload import Workload
from shardlab.strategies.plan import Plan

MODEL = GPT(layers=8, heads=8, width=512, vocabulary=1024, block=512)

SHARD = ("dp_shard",)


def cluster_with(bytes: float) -> Cluster:
    cluster = find_cluster("h100x8")
    return replace(cluster, device=replace(cluster.device, memory=bytes))


def workload(plan: Plan | Mesh, memory: float, rows: int = 1) -> Workload:
    return Workload(plan, MODEL, cluster_with(memory), 8, rows, find_precision("bf16"))


def refusal(plan: Plan, memory: float, rows: int = 1) -> str:
    step = workload(plan, memory, rows)
    with pytest.raises(UserError) as error:
        require_memory(step, step.estimate())
    return str(error.value)


def test_what_fits_is_let_through() -> None:
    step = workload(Plan(Mesh(dp_shard=8)), 80 * 2**30)
    require_memory(step, step.estimate())


def test_the_sentence_says_by_how_much_and_what_dominates() -> None:
    step = workload(Plan(Mesh(dp_shard=8)), 2**28)
    peak = step.estimate().peak
    said = refusal(Plan(Mesh(dp_shard=8)), 2**28)
    assert f"{peak.bytes / 2**30:.1f} GiB of 0 GiB, {(peak.bytes - 2**28) / 2**30:.1f} GiB too much" in said
    assert "most of it is optimizer" in said


def test_a_change_that_is_advised_does_fit() -> None:
    plan = Plan(Mesh(dp_shard=8))
    room = 300 * 2**20
    said = refusal(plan, room)
    assert "--shard-optimizer dp_shard would fit" in said
    changed = workload(replace(plan, shard_optimizer=SHARD), room)
    require_memory(changed, changed.estimate())


def test_many_activations_are_recomputed_or_taken_in_smaller_microbatches() -> None:
    plan = Plan(Mesh(dp_shard=8), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)
    assert "--recompute full would fit" in refusal(plan, 2**29, rows=8)
    recomputing = replace(plan, recompute="full")
    room = 0.7 * workload(recomputing, 2**40, rows=8).peak_bytes()
    assert "--rows 1 --microbatches 64 would fit" in refusal(recomputing, room, rows=8)


def test_when_nothing_helps_the_least_is_named() -> None:
    assert "takes least" in refusal(Plan(Mesh(dp_shard=8)), 2**20)
    assert refusal(Plan(Mesh()), 2**20).endswith("take more devices")


def test_a_program_of_its_own_is_told_of_plans() -> None:
    said = [said for said, _ in changes(workload(Mesh(dp_shard=8), 2**30))]
    assert said[0] == "a plan, --dp-shard 8 --shard-optimizer dp_shard,"
    assert [said for said, _ in changes(workload(Mesh(pp=8), 2**30))] == []


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(UserError, match="16 ranks do not fit on 8 devices"):
        workload(Plan(Mesh(dp_shard=16)), 2**40).estimate()


def test_flops_are_those_of_forward_and_backward_and_mfu_their_share_of_the_peak() -> None:
    step = workload(Plan(Mesh(dp_shard=8), recompute="full"), 2**40)
    assert step.tokens == 8 * 512
    assert step.flops == 3 * 8 * sum(MODEL.forward_flops(layer) for layer in range(8))
    assert step.mfu(1.0) == step.flops / (8 * step.cluster.device.peak("bfloat16"))
