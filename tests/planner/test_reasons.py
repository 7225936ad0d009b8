"""Reasons tell what an alternative costs, and name a better one."""

from __future__ import annotations

from dataclasses import replace

from shardlab.models import Llama
from shardlab.planner.alternatives import Alternative, better_than
from shardlab.planner.found import PlanOutcome
from shardlab.planner.problem import Candidate
from shardlab.planner.reasons import sentence
from shardlab.planner.shares import StepShares
from shardlab.planner.workers import Answer, Asked, answer
from shardlab.program import Mesh
from shardlab.program.precision import find_precision
from shardlab.strategies.plan import Plan
from tests.planner.problems import problem

SMALL = Llama(layers=1, heads=2, kv_heads=2, hidden_size=64, ffn_hidden_size=1536, vocab_size=1000, seq_len=128)


def test_memory_is_as_much_only_where_a_hundredth_differs() -> None:
    """Whatever the size of the model."""
    asked = replace(problem(2, 4), model=SMALL)
    cluster = replace(asked.cluster, device=replace(asked.cluster.device, memory=2.0**40))
    plain = replace(
        asked, cluster=cluster, recipe=replace(asked.recipe, memory=replace(asked.recipe.memory, context_bytes=0.0))
    )
    one, two = (Candidate(Plan(Mesh(dp_shard=2)), size, find_precision("bf16")) for size in (1, 2))
    chosen, other = (answer(plain, Asked(each, shares=True)) for each in (one, two))
    assert isinstance(chosen, Answer)
    assert isinstance(other, Answer)
    assert sentence(Alternative("batch", "", two, other), chosen, plain).startswith("+")
    assert sentence(Alternative("batch", "", one, chosen), chosen, plain).startswith("as much memory")


def test_shares_below_nothing_are_said_to_be_nothing() -> None:
    """As parts of a step are when they are extended to all microbatches."""
    asked = problem(2, 4)
    one = Candidate(Plan(Mesh(dp_shard=2)), 1, find_precision("bf16"))
    made = answer(asked, Asked(one, shares=True))
    assert isinstance(made, Answer)
    chosen = replace(made, shares=StepShares({"compute": 1.0004, "bubble": -0.0004}))
    other = replace(made, shares=StepShares({"compute": 0.891, "bubble": 0.109 + 0.002}))
    assert sentence(Alternative("speed", "", one, other), chosen, asked).endswith("(bubble 0.0% → 11.1%)")


def test_a_plan_found_with_as_many_ranks_along_an_axis_is_named_where_it_is_faster() -> None:
    asked = problem(4, 8)
    bf16 = find_precision("bf16")
    chosen, alone = Candidate(Plan(Mesh(dp_shard=4)), 1, bf16), Candidate(Plan(Mesh(dp_shard=2, tp=2)), 1, bf16)
    with_more = Candidate(Plan(Mesh(dp_shard=2, tp=2), sequence_parallel=True), 4, bf16)
    made = answer(asked, Asked(chosen))
    assert isinstance(made, Answer)
    slow, fast = (replace(made.forecast, seconds=made.forecast.seconds * times) for times in (1.8, 1.012))
    found = [PlanOutcome(chosen, made.forecast), PlanOutcome(with_more, fast), PlanOutcome(alone, slow)]
    better = better_than(alone, chosen, found)
    assert better == found[1]
    assert better_than(with_more, chosen, found) is None
    assert better_than(replace(chosen, micro_batch_size=2), chosen, found) is None, "it names no axis"
    told = sentence(Alternative("speed", "", alone, Answer(slow, None), better), made, asked)
    assert told == "as much memory, step +80.0%; with others changed too, step +1.2%: replicate 2, tp 2, mb 4"
    assert "others changed" not in sentence(Alternative("speed", "", alone, Answer(fast, None), better), made, asked)
