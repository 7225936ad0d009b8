"""What a framework does to a step: each of its choices, alone, in the direction that it stands for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from shardlab.hardware import find_cluster
from shardlab.models import GPT, Llama
from shardlab.models.kept import Kept
from shardlab.program import Mesh
from shardlab.simulate.estimate import Estimate
from shardlab.simulate.framework import OWN, Framework
from shardlab.simulate.precision import find_precision
from shardlab.simulate.workload import Workload
from shardlab.strategies.plan import Plan

PLAN = Plan(Mesh(pp=2, dp_shard=4, tp=2), "1f1b", shard_optimizer=("dp_shard",))
"""With messages, and collectives inside a node and between nodes."""


def step(
    framework: Framework, model: GPT | Llama | None = None, plan: Plan = PLAN, cluster: str = "h100x16"
) -> Estimate:
    model = model or GPT(layers=4, width=1024, heads=16, block=1024, vocabulary=50304)
    return Workload(plan, model, find_cluster(cluster), 16, 1, find_precision("bf16"), framework=framework).estimate()


LONGER: dict[str, Framework] = {
    "attention": Framework(attention="flash1"),
    "passes": Framework(passes={"layer_norm": (3.0, 3.0)}),
    "blocking_p2p": Framework(blocking_p2p=1.0),
    "all_reduces": Framework(all_reduces=True),
    "one_card": Framework(one_card=True),
    "contention": Framework(contention=0.5),
    "update_bytes": Framework(update_bytes=200.0),
}
SHORTER: dict[str, Framework] = {
    "fused_accumulation": Framework(fused_accumulation=True),
    "hidden": Framework(hidden={"tp": 0.5}),
    "scatters_messages": Framework(scatters_messages=True),
    "carries_sum": Framework(carries_sum=True),
    "bucket": Framework(bucket=400e6),
}
MEMORY: dict[str, Framework] = {
    "kept": Framework(kept=Kept(branch=False)),
    "logit_bytes": Framework(logit_bytes=14.0),
    "sliced_logit_bytes": Framework(logit_bytes=4.0, sliced_logit_bytes=18.0),
    "half_gradients": Framework(half_gradients=True),
}
ELSEWHERE = {"attends"}
"""What needs another mesh to matter, and has a test of its own."""


@pytest.mark.parametrize("field", LONGER)
def test_what_costs_time_makes_the_step_longer_and_leaves_memory_alone(field: str) -> None:
    changed, own = step(LONGER[field]), step(OWN)
    assert changed.step > own.step
    assert changed.peak.bytes == own.peak.bytes


@pytest.mark.parametrize("field", SHORTER)
def test_what_saves_time_makes_the_step_shorter_and_leaves_memory_alone(field: str) -> None:
    changed, own = step(SHORTER[field]), step(OWN)
    assert changed.step < own.step
    assert changed.peak.bytes == own.peak.bytes


def test_every_field_that_says_what_is_done_is_tried() -> None:
    said = {field.name for field in fields(Framework)} - {"name", "source"}
    assert said == {*LONGER, *SHORTER, *MEMORY, *ELSEWHERE}


def test_what_is_not_kept_lowers_the_peak_and_takes_no_time() -> None:
    changed, own = step(MEMORY["kept"]), step(OWN)
    assert changed.peak.bytes < own.peak.bytes
    assert changed.step == own.step


def test_a_loss_that_holds_more_for_each_logit_has_a_higher_peak() -> None:
    """Logits and their gradient of 2 bytes each make 4; of so small a model they are the peak."""
    model = GPT(layers=1, width=32, heads=2, block=256, vocabulary=50304)
    peaks = [step(Framework(logit_bytes=bytes), model, Plan(Mesh()), "h100x1").peak.bytes for bytes in (0.0, 4.0, 14.0)]
    assert peaks[0] == peaks[1]
    assert peaks[2] - peaks[1] == (14 - 4) * 256 * 50304


def test_a_loss_of_sliced_logits_may_hold_more_of_each() -> None:
    model = GPT(layers=1, width=32, heads=2, block=256, vocabulary=50304)
    tensor, single = Plan(Mesh(tp=2)), Plan(Mesh())
    whole, sliced = Framework(logit_bytes=4.0), MEMORY["sliced_logit_bytes"]
    more = step(sliced, model, tensor, "h100x2").peak.bytes - step(whole, model, tensor, "h100x2").peak.bytes
    assert more == (18 - 4) * 256 * 50304 / 2
    assert step(sliced, model, single, "h100x1").peak.bytes == step(whole, model, single, "h100x1").peak.bytes


@pytest.mark.parametrize(("precision", "bytes"), [("bf16-fp32-grads", 2), ("bf16", 0)])
def test_half_gradients_stay_beside_their_float32_sum_and_nowhere_else(precision: str, bytes: int) -> None:
    model = GPT(layers=2, width=256, heads=4, block=16, vocabulary=512)

    def gradients(framework: Framework) -> int:
        workload = Workload(Plan(Mesh()), model, find_cluster("h100x1"), 1, 1, find_precision(precision))
        return replace(workload, framework=framework).estimate().peak.by_category["gradients"]

    own = gradients(OWN)
    assert gradients(MEMORY["half_gradients"]) == own * (4 + bytes) // 4


def test_without_balance_the_busiest_context_parallel_rank_attends_longer() -> None:
    plan = Plan(Mesh(cp=2), context="all_gather")
    changed, own = step(Framework(attends=1.5), plan=plan), step(OWN, plan=plan)
    assert changed.step > own.step
    assert changed.peak.bytes == own.peak.bytes
    assert step(Framework(attends=1.5)).step == step(OWN).step, "nobody is context-parallel"


def test_a_message_is_scattered_only_among_ranks_that_have_the_same() -> None:
    plan = Plan(Mesh(pp=2, dp_shard=8), "1f1b")
    assert step(SHORTER["scatters_messages"], plan=plan).step == step(OWN, plan=plan).step


def test_what_is_hidden_is_hidden_on_its_axis_alone() -> None:
    assert step(Framework(hidden={"ep": 0.9})).step == step(OWN).step


def test_what_is_computed_again_every_second_product_takes_time_and_saves_memory() -> None:
    changed, own = step(Framework(kept=Kept(per_op=True)), LLAMA), step(OWN, LLAMA)
    assert changed.step > own.step
    assert changed.peak.bytes < own.peak.bytes


LLAMA = Llama(layers=4, width=1024, heads=16, kv_heads=8, ffn_hidden=2816, block=1024, vocabulary=32000)
