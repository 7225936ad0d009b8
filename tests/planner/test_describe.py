"""A plan in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.models import Llama
from shardlab.planner.describe import describe, summary
from shardlab.planner.problem import Candidate, Limits, family
from shardlab.strategies.plan.plan import Plan
from tests.planner.enumeration import candidates, shapes
from tests.planner.problems import problem

LLAMA = Llama(layers=8, heads=8, kv_heads=8, hidden_size=512, ffn_hidden_size=1536, vocab_size=1000, seq_len=4096)


def test_plans_that_differ_read_otherwise_in_a_table() -> None:
    maxima = {"pp": 2, "micro_batch_size": 2}
    search_problem = replace(problem(8, 8, limits=Limits({"recompute": "none"}, maxima)), model=LLAMA)
    all_candidates = [candidate for shape in shapes(search_problem) for candidate in candidates(search_problem, shape)]
    texts = Counter(f"{family(one.plan)}: {summary(one)}" for one in all_candidates)
    assert len(all_candidates) > 1000
    assert [text for text, times in texts.items() if times > 1] == []


def test_the_ranks_that_share_the_model_are_named() -> None:
    shared = ("dp_shard", "cp")
    plan = Plan(Mesh(cp=4), shard_parameters=shared, shard_gradients=shared, shard_optimizer=shared)
    candidate = Candidate(plan, 1, find_precision("bf16"))
    assert describe(problem(4), candidate)[0] == "ZeRO-3 over the 4 ranks of cp, weights gathered for each use"


def test_ranks_that_share_nothing_are_replicas() -> None:
    bf16 = find_precision("bf16")
    assert summary(Candidate(Plan(Mesh(dp_shard=8)), 2, bf16)) == "replicate 8, mb 2"
    assert (
        summary(Candidate(Plan(Mesh(dp_shard=4, tp=2)), 1, bf16)) == "replicate 4, tp 2, no sequence parallelism, mb 1"
    )
    assert summary(Candidate(Plan(Mesh(dp_shard=8), shard_optimizer=("dp_shard",)), 2, bf16)) == "shard 8, mb 2"
