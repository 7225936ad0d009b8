"""Floors are floors: of what any recipe holds, and of how long it takes; and they are near it."""

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
from shardlab.planner.bounds import Floors
from shardlab.planner.bounds.step import words
from shardlab.planner.problem import Candidate, Limits, PlanShape, Problem, blocks_of
from shardlab.planner.space import candidates, shapes
from shardlab.planner.workers import Asked, answer, with_memory
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import OWN, find_recipe
from shardlab.strategies.plan.plan import Context, Plan, Reshard
from tests.planner.problems import GIB, SMALL, passes_of, problem

LLAMA = Llama(layers=5, heads=8, kv_heads=4, hidden_size=512, ffn_hidden_size=1536, vocab_size=1000, seq_len=2048)
TIED = GPT(layers=4, heads=8, hidden_size=512, vocab_size=4096, seq_len=512, tied=True)


def test_attention_that_is_not_fused_waits_for_its_host_once_in_a_backward_pass() -> None:
    """It computes its scores again there; more than it waits would be no floor."""
    waiting = replace(OWN, kernels=replace(OWN.kernels, host_seconds=1.5e-5))
    plain = problem(devices=1, sequences=1, limits=Limits(fixed={"recompute": "selective"}))
    asked = replace(plain, recipe=waiting, model=replace(SMALL, dropout=0.1))
    (shape,) = shapes(asked)
    (candidate,) = candidates(asked, shape)
    model, prices = blocks_of(asked, shape).short, asked.workload(candidate).prices
    layer = next(layer for layer in range(model.layers) if model.run(layer).attend is not None)
    kernels = model.attend_kernels(layer, 1, SMALL.seq_len, SMALL.seq_len, 0.5, 1)
    sums = Floors(asked).passes(shape).backward
    together = prices.seconds_of([*kernels, *(back for kernel in kernels for back in kernel.backward_input())])
    assert prices.layer_seconds(OpKind.ATTEND_BACKWARD, kernels) == together
    projected = prices.layer_seconds(OpKind.BACKWARD, model.kernels(layer, 1, SMALL.seq_len, 1))
    assert sums[layer + 1] - sums[layer] == pytest.approx(together + projected)


RECIPES = ("shardlab", "megatron-core", "nanotron", "torchtitan", "deepspeed", "fsdp2")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_floor_never_exceeds_the_forecast(recipe: str) -> None:
    many = replace(problem(devices=8, sequences=16), model=LLAMA, recipe=find_recipe(recipe))
    floors, seen = Floors(many), 0
    all = ((shape, candidate) for shape in shapes(many) for candidate in candidates(many, shape))
    for shape, candidate in itertools.islice(all, RECIPES.index(recipe), None, 301 if recipe == "nanotron" else 6007):
        found = answer(many, Asked(candidate))
        if found is None:
            continue
        seen += 1
        seconds, bytes, bare = found.forecast.seconds, found.forecast.memory.unlimited, _bare(shape, candidate.plan)
        assert floors.seconds(shape, candidate) <= seconds, candidate
        assert passes_of(floors, shape, bare) <= seconds, candidate
        assert floors.steps.of_pipeline(shape, bare) <= seconds, candidate
        least, way = floors.of_shape(shape), least_of_way(floors, shape, candidate)
        assert max(least.passes, least.sharing, least.seconds, way[0]) <= seconds, candidate
        assert floors.memory.of(shape, candidate) <= bytes, candidate
        assert floors.memory.of_pipeline(shape, bare) <= bytes, candidate
        assert least.bytes <= way[1] <= bytes, candidate
        of_ways = dict(zip(floors.sharing.of(shape).ways, floors.bytes_of_ways(shape, bare), strict=True))
        assert of_ways[words(candidate.plan)] <= bytes, candidate
        assert seconds_of_way(floors, shape, candidate) <= seconds, candidate
    assert seen > 2


@pytest.mark.parametrize(
    ("recipe", "model", "cluster", "mesh", "micro_batch_size"),
    [
        ("fsdp2", TIED, "a100x32", Mesh(pp=4, tp=8), 32),
        ("deepspeed", replace(LLAMA, layers=6, seq_len=1024), "h100x16", Mesh(pp=4, dp_shard=4), 2),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_messages_are_no_longer_to_a_floor_than_they_are(
    recipe: str, model: Blocks, cluster: str, mesh: Mesh, micro_batch_size: int, schedule: str
) -> None:
    """What is sent is less than is kept where sequences are gathered, and begins before its sender may go on."""
    rich = with_memory(find_cluster(cluster), 800 * GIB)
    asked = Problem(model, rich, 16 * micro_batch_size, (find_precision("bf16"),), find_recipe(recipe))
    floors = Floors(asked)
    seen = 0
    for shape in shapes(asked):
        if (shape.mesh, shape.micro_batch_size, shape.recompute) != (mesh, micro_batch_size, "none") or shape.share:
            continue
        found = next((each for each in candidates(asked, shape) if each.plan.schedule == schedule), None)
        answered = None if found is None else answer(asked, Asked(found))
        if found is not None and answered is not None:
            seen += 1
            assert floors.steps.of_pipeline(shape, _bare(shape, found.plan)) <= answered.forecast.seconds, found
    assert seen


def least_of_way(floors: Floors, shape: PlanShape, candidate: Candidate) -> tuple[float, float]:
    """Seconds and bytes below which no candidate of a shape is that shares the model as this one does."""
    table, passes = floors.sharing.of(shape), floors.passes_of(shape)
    bytes = floors.memory.reserved(table.bytes(floors.memory.kept_of_shape(shape)))
    place = list(table.ways).index(words(candidate.plan))
    return floors.ways(shape).seconds(passes)[place], bytes[place]


def seconds_of_way(floors: Floors, shape: PlanShape, candidate: Candidate) -> float:
    """Seconds below which no candidate with this one's pipeline is that shares the model as this one does."""
    ways = list(floors.sharing.of(shape).ways)
    places = np.array([0, ways.index(words(candidate.plan))])
    return float(floors.seconds_of_ways(shape, _bare(shape, candidate.plan), places)[1])


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
def test_floors_count_gathered_weights_and_gradients_on_their_way(schedule: str, reshard_after: Reshard) -> None:
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
    found = answer(asked, Asked(candidate))
    assert found is not None
    held = found.forecast.memory.unlimited
    assert 0.5 * held <= least_of_way(Floors(asked), shape, candidate)[1] <= held or reshard_after != "step"
    assert 0.8 * held <= Floors(asked).memory.of(shape, candidate) <= held


def test_gathers_that_take_longer_than_all_passes_are_a_floor_of_the_step() -> None:
    """Weights are gathered for each use, over more nodes than their few microbatches of work take time."""
    asked = replace(problem(devices=512, sequences=512), model=replace(LLAMA, hidden_size=2048, ffn_hidden_size=8192))
    shape = PlanShape(Mesh(dp_shard=512), 1, find_precision("bf16"))
    shard = ("dp_shard",)
    plan = replace(shape.candidate.plan, shard_parameters=shard, shard_optimizer=shard)
    floors, candidate = Floors(asked), Candidate(plan, 1, shape.precision)
    found = answer(asked, Asked(candidate))
    assert found is not None
    least = floors.seconds(shape, candidate)
    assert 1.5 * passes_of(floors, shape, plan) < least <= found.forecast.seconds
    assert 1.1 * passes_of(floors, shape, plan) < least_of_way(floors, shape, candidate)[0] <= least


@pytest.mark.parametrize(("context", "degree"), [("ring", None), ("ring", 2), ("all_gather", None), ("ulysses", None)])
def test_floors_count_what_context_parallel_ranks_wait_for(context: Context, degree: int | None) -> None:
    """Without it floors are 0.73 of the forecast at most, and many such plans would have to be forecast."""
    asked = replace(problem(devices=8, sequences=8), model=replace(LLAMA, kv_heads=8, seq_len=8192))
    shape = PlanShape(Mesh(cp=8), 1, find_precision("bf16"), context=context, ulysses_degree=degree)
    candidate = shape.candidate
    found = answer(asked, Asked(candidate))
    assert found is not None
    seconds = found.forecast.seconds
    assert 0.8 * seconds <= Floors(asked).seconds(shape, candidate) <= seconds


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("shared", ["nothing", "state", "gathered once"])
def test_floors_follow_the_order_of_a_pipeline(schedule: str, shared: str) -> None:
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
    found, floors = answer(asked, Asked(candidate)), Floors(asked)
    assert found is not None
    seconds = found.forecast.seconds
    assert 0.93 * seconds <= floors.seconds(shape, candidate) <= seconds
    assert 0.75 * seconds <= seconds_of_way(floors, shape, candidate) <= seconds
