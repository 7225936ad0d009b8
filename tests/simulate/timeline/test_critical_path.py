"""The critical path: its links follow one another from the step's beginning to its end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from shardlab.check import check
from shardlab.language import Mesh, OpKind, trace
from shardlab.language.precision import find_precision
from shardlab.models import GPT
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline import Costs
from shardlab.simulate.timeline.critical_path import critical_path, path_parts
from shardlab.simulate.timeline.run import Clocks
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan

COSTS = Costs(forward=1, backward_input=1.25, backward_weight=0.75, update=0.5, collective=0.75, send=0.25, recv=0.125)
SHARD = ("dp_shard",)
SHARDED: dict[str, Any] = {"shard_parameters": SHARD, "shard_gradients": SHARD, "shard_optimizer": SHARD}


def adds_up(traced: Any, times: Any) -> None:
    links = critical_path(traced, times)
    assert links[0].start == 0.0
    assert links[-1].end == times.end
    assert all(link.end == next_link.start for link, next_link in pairwise(links))
    assert sum(path_parts(traced, links).values()) == pytest.approx(times.end, rel=1e-12)


@pytest.mark.parametrize(
    "name", ["single", "ddp", "fsdp", "gpipe", "1f1b", "zb-h1", "pipeline-fsdp", "tensor-parallel"]
)
@pytest.mark.parametrize("link_latency", [False, True])
def test_the_links_make_up_the_step_of_a_strategy(name: str, link_latency: bool) -> None:
    entry = STRATEGIES[name]
    sizes = entry.puzzle(entry.ranks)
    proof = check(trace(entry.program, entry.grid(entry.ranks), sizes, 4))
    times = Clocks(proof, replace(COSTS, link_latency=link_latency)).run()
    adds_up(proof, times)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Mesh(pp=4, dp_shard=2), "interleaved-1f1b", **SHARDED),
        Plan(Mesh(pp=2, dp_shard=2, tp=2), "zb-v", sequence_parallel=True),
        Plan(Mesh(dp_replicate=2, dp_shard=2, cp=2), **SHARDED),
    ],
    ids=["interleaved", "3d", "hsdp and cp"],
)
@pytest.mark.parametrize("contention", [0.0, 0.3])
@pytest.mark.parametrize("blocking", [0.0, 1.0])
def test_the_links_make_up_a_priced_step(plan: Plan, contention: float, blocking: float) -> None:
    model = GPT(layers=8, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)
    workload = Workload(plan, model, find_cluster("h100x8"), 8 * plan.data_ranks, 1, find_precision("bf16"))
    recipe = workload.recipe
    overlap = replace(recipe.overlap, contention=contention, blocking_p2p=blocking)
    workload = replace(workload, recipe=replace(recipe, overlap=overlap))
    adds_up(workload.traced, Clocks(workload.traced, workload.prices).run())


def test_the_path_of_one_rank_is_all_that_it_computes() -> None:
    entry = STRATEGIES["single"]
    proof = check(trace(entry.program, Mesh(), entry.puzzle(1), 4))
    times = Clocks(proof, COSTS).run()
    kinds = {proof.program.tapes[link.row][link.op].kind for link in critical_path(proof, times)}
    assert kinds == {OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE}


def test_the_path_of_a_pipeline_goes_through_its_messages() -> None:
    entry = STRATEGIES["gpipe"]
    proof = check(trace(entry.program, entry.grid(4), entry.puzzle(4), 4))
    parts = path_parts(proof, critical_path(proof, Clocks(proof, COSTS).run()))
    assert list(parts)[:2] == ["backward", "forward"]
    assert "message on pp" in parts
