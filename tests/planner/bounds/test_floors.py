"""Lower bounds are lower bounds: of what any recipe holds, and of how long it takes; and they are near it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardlab.language import Mesh, OpKind
from shardlab.language.precision import find_precision
from shardlab.models import GPT, Llama
from shardlab.models.model import Blocks
from shardlab.planner.bounds import LowerBounds
from shardlab.planner.bounds.step import sharding_key
from shardlab.planner.problem import Candidate, Limits, PlanShape, Problem, blocks_of
from shardlab.planner.space import candidates, shapes
from shardlab.planner.workers import Query, answer_request, with_memory
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import OWN, find_recipe
from shardlab.strategies.plan.plan import Context, Plan, Reshard
from tests.planner.problems import GIB, SMALL, passes_of, problem

LLAMA = Llama(layers=5, heads=8, kv_heads=4, hidden_size=512, ffn_hidden_size=1536, vocab_size=1000, seq_len=2048)
TIED = GPT(layers=4, heads=8, hidden_size=512, vocab_size=4096, seq_len=512, tied=True)


def test_attention_that_is_not_fused_waits_for_its_host_once_in_a_backward_pass() -> None:
    """It computes its scores again there; more than it waits would be no lower bound."""
    waiting = replace(OWN, kernels=replace(OWN.kernels, host_seconds=1.5e-5))
    plain = problem(devices=1, sequences=1, limits=Limits(fixed={"recompute": "selective"}))
    asked = replace(plain, recipe=waiting, model=replace(SMALL, dropout=0.1))
    (shape,) = shapes(asked)
    (candidate,) = candidates(asked, shape)
    model, prices = blocks_of(asked, shape).short, asked.workload(candidate).prices
    layer = next(layer for layer in range(model.layers) if model.run(layer).attend is not None)
    kernels = model.attend_kernels(layer, 1, SMALL.seq_len, SMALL.seq_len, 0.5, 1)
    sums = LowerBounds(asked).passes(shape).backward
    together = prices.seconds_of([*kernels, *(back for kernel in kernels for back in kernel.backward_input())])
    assert prices.layer_seconds(OpKind.ATTEND_BACKWARD, kernels) == together
    projected = prices.layer_seconds(OpKind.BACKWARD, model.kernels(layer, 1, SMALL.seq_len, 1))
    assert sums[layer + 1] - sums[layer] == pytest.approx(together + projected)


RECIPES = ("shardlab", "megatron-core", "nanotron", "torchtitan", "deepspeed", "fsdp2")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_lower_bound_never_exceeds_the_forecast(recipe: str) -> None:
    many = replace(problem(devices=8, sequences=16), model=LLAMA, recipe=find_recipe(recipe))
    bounds, seen = LowerBounds(many), 0
    all = ((shape, candidate) for shape in shapes(many) for candidate in candidates(many, shape))
    for shape, candidate in itertools.islice(all, RECIPES.index(recipe), None, 301 if recipe == "nanotron" else 6007):
        found = answer_request(many, Query(candidate))
        if found is None:
            continue
        seen += 1
        seconds, bytes, bare = found.forecast.seconds, found.forecast.memory.unlimited, _bare(shape, candidate.plan)
        assert bounds.seconds(shape, candidate) <= seconds, candidate
        assert passes_of(bounds, shape, bare) <= seconds, candidate
        assert bounds.steps.of_pipeline(shape, bare) <= seconds, candidate
        least, option = bounds.of_shape(shape), least_of_option(bounds, shape, candidate)
        assert max(least.passes, least.sharing, least.seconds, option[0]) <= seconds, candidate
        assert bounds.memory.of(shape, candidate) <= bytes, candidate
        assert bounds.memory.of_pipeline(shape, bare) <= bytes, candidate
        assert least.bytes <= option[1] <= bytes, candidate
        of_options = dict(zip(bounds.sharing.of(shape).options, bounds.bytes_of_options(shape, bare), strict=True))
        assert of_options[sharding_key(candidate.plan)] <= bytes, candidate
        assert seconds_of_option(bounds, shape, candidate) <= seconds, candidate
    assert seen > 2


@pytest.mark.parametrize(
    ("recipe", "model", "cluster", "mesh", "micro_batch_size"),
    [
        ("fsdp2", TIED, "a100x32", Mesh(pp=4, tp=8), 32),
        ("deepspeed", replace(LLAMA, layers=6, seq_len=1024), "h100x16", Mesh(pp=4, dp_shard=4), 2),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_messages_are_no_longer_to_a_lower_bound_than_they_are(
    recipe: str, model: Blocks, cluster: str, mesh: Mesh, micro_batch_size: int, schedule: str
) -> None:
    """What is sent is less than is kept where sequences are gathered, and begins before its sender may go on."""
    rich = with_memory(find_cluster(cluster), 800 * GIB)
    asked = Problem(model, rich, 16 * micro_batch_size, (find_precision("bf16"),), find_recipe(recipe))
    bounds = LowerBounds(asked)
    seen = 0
    for shape in shapes(asked):
        if (shape.mesh, shape.micro_batch_size, shape.recompute) != (mesh, micro_batch_size, "none") or shape.share:
            continue
        found = next((each for each in candidates(asked, shape) if each.plan.schedule == schedule), None)
        answered = None if found is None else answer_request(asked, Query(found))
        if found is not None and answered is not None:
            seen += 1
            assert bounds.steps.of_pipeline(shape, _bare(shape, found.plan)) <= answered.forecast.seconds, found
    assert seen


def least_of_option(bounds: LowerBounds, shape: PlanShape, candidate: Candidate) -> tuple[float, float]:
    """Seconds and bytes below which no candidate of a shape is that shares the model as this one does."""
    table, passes = bounds.sharing.of(shape), bounds.passes_of(shape)
    bytes = bounds.memory.reserved(table.bytes(bounds.memory.kept_of_shape(shape)))
    place = list(table.options).index(sharding_key(candidate.plan))
    return bounds.options(shape).seconds(passes)[place], bytes[place]


def seconds_of_option(bounds: LowerBounds, shape: PlanShape, candidate: Candidate) -> float:
    """Seconds below which no candidate with this one's pipeline is that shares the model as this one does."""
    options = list(bounds.sharing.of(shape).options)
    places = np.array([0, options.index(sharding_key(candidate.plan))])
    return float(bounds.seconds_of_options(shape, _bare(shape, candidate.plan), places)[1])


def _sharing(shape: PlanShape, schedule: str, **shared: Any) -> Candidate:
    """A candidate with a schedule, whose data-parallel ranks share the model so."""
    stages = 2 if schedule in ("interleaved-1f1b", "breadth-first") else None
    plan = replace(shape.candidate.plan, schedule=schedule, stages_per_rank=stages, **shared)
    return Candidate(plan, 1, shape.precision)


def _bare(shape: PlanShape, plan: Plan) -> Plan:
    """A candidate's pipeline, before it is said how the model is shared."""
    nobody: dict[str, tuple[str, ...]] = dict.fromkeys(("shard_parameters", "shard_gradients", "shard_optimizer"), ())
    return replace(plan, mesh=shape.mesh, reshard_after="layer", **nobody)


@pytest.mark.parametrize("reshard_after", ["layer", "stage", "step"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "breadth-first", "zb-h1"])
def test_lower_bounds_count_gathered_weights_and_gradients_on_their_way(schedule: str, reshard_after: Reshard) -> None:
    """Nearly all that is held of a large model that is shared by many is what was left out before."""
    wide = replace(LLAMA, layers=16, hidden_size=4096, ffn_hidden_size=16384, heads=32, kv_heads=8)
    asked = replace(problem(devices=32, sequences=64), model=wide)
    shape = PlanShape(Mesh(pp=2, dp_shard=16), 1, find_precision("bf16"))
    shard = ("dp_shard",)
    candidate = _sharing(
        shape,
        schedule,
        shard_parameters=shard,
        shard_gradients=shard,
        shard_optimizer=shard,
        reshard_after=reshard_after,
    )
    found = answer_request(asked, Query(candidate))
    assert found is not None
    held = found.forecast.memory.unlimited
    assert 0.5 * held <= least_of_option(LowerBounds(asked), shape, candidate)[1] <= held or reshard_after != "step"
    assert 0.8 * held <= LowerBounds(asked).memory.of(shape, candidate) <= held


def test_gathers_that_take_longer_than_all_passes_are_a_lower_bound_of_the_step() -> None:
    """Weights are gathered for each use, over more nodes than their few microbatches of work take time."""
    asked = replace(problem(devices=512, sequences=512), model=replace(LLAMA, hidden_size=2048, ffn_hidden_size=8192))
    shape = PlanShape(Mesh(dp_shard=512), 1, find_precision("bf16"))
    shard = ("dp_shard",)
    plan = replace(shape.candidate.plan, shard_parameters=shard, shard_optimizer=shard)
    bounds, candidate = LowerBounds(asked), Candidate(plan, 1, shape.precision)
    found = answer_request(asked, Query(candidate))
    assert found is not None
    least = bounds.seconds(shape, candidate)
    assert 1.5 * passes_of(bounds, shape, plan) < least <= found.forecast.seconds
    assert 1.1 * passes_of(bounds, shape, plan) < least_of_option(bounds, shape, candidate)[0] <= least


@pytest.mark.parametrize(("context", "degree"), [("ring", None), ("ring", 2), ("all_gather", None), ("ulysses", None)])
def test_lower_bounds_count_what_context_parallel_ranks_wait_for(context: Context, degree: int | None) -> None:
    """Without it lower bounds are 0.73 of the forecast at most, and many such plans would have to be forecast."""
    asked = replace(problem(devices=8, sequences=8), model=replace(LLAMA, kv_heads=8, seq_len=8192))
    shape = PlanShape(Mesh(cp=8), 1, find_precision("bf16"), context=context, ulysses_degree=degree)
    candidate = shape.candidate
    found = answer_request(asked, Query(candidate))
    assert found is not None
    seconds = found.forecast.seconds
    assert 0.8 * seconds <= LowerBounds(asked).seconds(shape, candidate) <= seconds


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("shared", ["nothing", "state", "gathered once"])
def test_lower_bounds_follow_the_order_of_a_pipeline(schedule: str, shared: str) -> None:
    """Its bubble, its messages, what is gathered before its first passes and reduced after its last."""
    wide = replace(LLAMA, layers=32, hidden_size=4096, ffn_hidden_size=16384, heads=32, kv_heads=8)
    asked = replace(problem(devices=64, sequences=128), model=wide)
    shape = PlanShape(Mesh(pp=8, dp_shard=8), 1, find_precision("bf16"))
    shard = ("dp_shard",)
    candidate = _sharing(
        shape,
        schedule,
        shard_parameters=shard if shared == "gathered once" else (),
        shard_optimizer=() if shared == "nothing" else shard,
        reshard_after="step" if shared == "gathered once" else "layer",
    )
    found, bounds = answer_request(asked, Query(candidate)), LowerBounds(asked)
    assert found is not None
    seconds = found.forecast.seconds
    assert 0.93 * seconds <= bounds.seconds(shape, candidate) <= seconds
    assert 0.75 * seconds <= seconds_of_option(bounds, shape, candidate) <= seconds
