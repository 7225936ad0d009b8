"""Lower bounds of sharding options are lower bounds, whatever recipe, schedule and sharing come together."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from shardlab.language import UserError
from shardlab.language.precision import find_precision
from shardlab.models import GPT, Llama
from shardlab.planner.bounds import LowerBounds
from shardlab.planner.bounds.step import with_sharding_option
from shardlab.planner.problem import Candidate, Limits, PlanShape, Problem
from shardlab.planner.space import follows, legal, pipelined, shapes
from shardlab.planner.workers import Query, answer_request, with_memory
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import find_recipe
from tests.planner.problems import GIB

RECIPES = ("shardlab", "megatron-core", "nanotron", "torchtitan", "deepspeed", "fsdp2")

MODELS = (
    Llama(layers=16, heads=8, kv_heads=4, hidden_size=512, ffn_hidden_size=1536, vocab_size=1000, seq_len=1024),
    Llama(layers=17, heads=16, kv_heads=16, hidden_size=2048, ffn_hidden_size=4096, vocab_size=32000, seq_len=2048),
    GPT(layers=16, heads=8, hidden_size=1024, vocab_size=4096, seq_len=1024, tied=True),
)


def sampled(seed: int) -> tuple[LowerBounds, PlanShape, Candidate, float]:
    """Lower bounds of a problem and, of one of its pipelines, a candidate and its lower bound; drawn at random."""
    draw = random.Random(seed)
    cluster = with_memory(find_cluster(draw.choice(("h100x16", "a100x32", "h100x8"))), 800 * GIB)
    sequences = cluster.size * draw.choice((1, 2, 4, 8))
    pp = draw.choice((2, 4, 8))
    limits = Limits(fixed={"pp": pp}, most={"micro_batch_size": 2})
    model, recipe = draw.choice(MODELS), find_recipe(draw.choice(RECIPES))
    asked = Problem(model, cluster, sequences, (find_precision("bf16"),), recipe, limits=limits)
    bounds, all = LowerBounds(asked), list(shapes(asked))
    while True:
        shape = draw.choice(all)
        plans = [plan for plan in pipelined(asked, shape) if follows(asked, shape, plan)]
        if not plans:
            continue
        plan, options = draw.choice(plans), bounds.options(shape).plans
        place = draw.randrange(len(options))
        try:
            candidate = legal(asked, shape, with_sharding_option(plan, options[place]))
        except UserError:
            continue
        if candidate is not None:
            return bounds, shape, candidate, float(bounds.seconds_of_options(shape, plan, np.array([place]))[0])


@pytest.mark.parametrize("seed", range(48))
def test_the_lower_bound_of_a_sharding_option_never_exceeds_the_forecast(seed: int) -> None:
    bounds, shape, candidate, bound = sampled(seed)
    found = answer_request(bounds.problem, Query(candidate))
    assert found is None or max(bound, bounds.seconds(shape, candidate)) <= found.forecast.seconds, candidate


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"])
def test_a_sharding_option_that_shares_nothing_has_nearly_the_lower_bound_of_the_whole_step(schedule: str) -> None:
    """Messages, and forward passes after a rank's first backward pass, were left out before."""
    cluster = with_memory(find_cluster("h100x64"), 800 * GIB)
    asked = Problem(replace(MODELS[1], layers=32), cluster, 64, (find_precision("bf16"),))
    shape = next(each for each in shapes(asked) if each.mesh.pp == 8 and each.mesh.tp == each.mesh.cp == 1)
    bounds = LowerBounds(asked)
    plan = next(each for each in pipelined(asked, shape) if each.schedule == schedule)
    option = float(bounds.seconds_of_options(shape, plan, np.array([0]))[0])
    assert 0.9 * bounds.steps.of_pipeline(shape, plan) <= option
