"""Where there is no plan, the size or limit is named that cannot be met."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlab.language.precision import PRECISIONS
from shardlab.models import find_model
from shardlab.planner.nothing_fits import explain_empty_space
from shardlab.planner.problem import Limits, Problem
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import find_recipe
from tests.planner.enumeration import candidates, shapes
from tests.support.thorough import sampled


def problem(
    model: str,
    cluster: str,
    sequences: int,
    *,
    size: int | None = None,
    maxima: dict[str, int] | None = None,
    **fixed: Any,
) -> Problem:
    limits = Limits(fixed, maxima or {}, size)
    return Problem(find_model(model), find_cluster(cluster), sequences, (PRECISIONS["bf16"],), limits=limits)


def has_plan(problem: Problem) -> bool:
    return any(True for shape in shapes(problem) for _ in candidates(problem, shape))


def refusal_of(problem: Problem) -> str:
    assert not has_plan(problem)
    return explain_empty_space(problem)


@pytest.mark.parametrize(
    ("model", "cluster", "sequences", "fixed", "reason"),
    [
        ("llama3-8b", "h100x32", 512, {"pp": 3}, "--pp 3 does not divide 32 devices; give a size that does"),
        ("llama3-8b", "h100x32", 512, {"tp": 64}, "--tp 64 does not divide 32 devices; give a size that does"),
        ("llama3-8b", "h100x32", 512, {"tp": 3}, "--tp 3 does not divide 32 devices; give a size that does"),
        (
            "llama3-8b",
            "h100x32",
            512,
            {"ep": 4},
            "no plan under the limits --ep 4 can be run: the mesh has ep 4, which cuts mixtures of experts, but",
        ),
        (
            "llama3-8b",
            "h100x8",
            128,
            {"dp_shard": 4, "dp_replicate": 4},
            "no mesh of 8 devices, which are all used, has --dp-shard 4 --dp-replicate 4; the sizes of its axes",
        ),
        (
            "gpt2",
            "h100x128",
            512,
            {"pp": 64},
            "no plan under the limits --pp 64 can be run: 24 half-blocks of 12 blocks, and the head, do not reach 64",
        ),
        (
            "llama3-8b",
            "h100x32",
            512,
            {"tp": 16},
            "no plan under the limits --tp 16 can be run: 8 key/value heads do not divide into 16 tensor-parallel",
        ),
    ],
)
def test_an_axis_that_cannot_be_is_the_reason(
    model: str, cluster: str, sequences: int, fixed: dict[str, Any], reason: str
) -> None:
    assert refusal_of(problem(model, cluster, sequences, **fixed)).startswith(reason)


def test_limits_that_leave_devices_over_are_the_reason() -> None:
    search_problem = problem(
        "llama3-8b", "h100x32", 512, maxima={"tp": 1, "pp": 1, "cp": 1}, dp_shard=2, dp_replicate=2
    )
    assert refusal_of(search_problem) == (
        "no mesh of 32 devices, which are all used, has --dp-shard 2 --dp-replicate 2 --max-tp 1 --max-pp 1 --max-cp "
        "1; the sizes of its axes multiply to 32: give others, or another number of devices"
    )


def test_microbatches_that_do_not_divide_the_batch_are_the_reason() -> None:
    assert refusal_of(problem("llama3-8b", "h100x32", 512, size=3)) == (
        "no plan divides 32 devices and 512 sequences under the limits --micro-batch-size 3: every plan has at least 1 "
        "data-parallel rank, and ranks share a batch evenly in microbatches of 3; give a --global-batch that is a "
        "multiple of 3, or other limits"
    )


def test_microbatches_larger_than_a_ranks_share_are_the_reason() -> None:
    search_problem = problem("llama3-8b", "h100x32", 512, size=32, dp_shard=32)
    assert refusal_of(search_problem) == (
        "no plan divides 32 devices and 512 sequences under the limits --dp-shard 32 --micro-batch-size 32: every plan "
        "has at least 32 data-parallel ranks, and ranks share a batch evenly in microbatches of 32; give a "
        "--global-batch that is a multiple of 1024, or other limits"
    )
    assert has_plan(replace(search_problem, sequences=1024))
    assert has_plan(replace(search_problem, limits=replace(search_problem.limits, micro_batch_size=16)))


@pytest.mark.parametrize(
    ("devices", "sequences", "ranks"),
    sampled([(4096, 16, 64), (1024, 17, 16), (232, 5, 29)], lambda case: case[0] < 4096),
)
def test_a_batch_that_is_too_small_is_the_reason_and_the_advice_helps(devices: int, sequences: int, ranks: int) -> None:
    """gpt2 has 12 heads and 12 layers, of 1,024 tokens: tensor and pipeline parallelism cut it no further."""
    search_problem = problem("gpt2", f"h100x{devices}", sequences)
    assert refusal_of(search_problem) == (
        f"no plan divides {devices:,} devices and {sequences} sequences: every plan has at least {ranks} data-parallel "
        f"ranks, and ranks share a batch evenly; give a --global-batch that is a multiple of {ranks}, or fewer devices"
    )
    assert has_plan(replace(search_problem, sequences=ranks))


def test_too_few_microbatches_for_the_framework_are_the_reason() -> None:
    search_problem = replace(problem("llama3-8b", "h100x32", 8, pp=8, schedule="1f1b"), recipe=find_recipe("nanotron"))
    search_problem = replace(
        search_problem, limits=replace(search_problem.limits, fixed={**search_problem.limits.fixed, "dp_shard": 4})
    )
    assert refusal_of(search_problem).endswith("with pp 8 give at least 7 to each data-parallel rank, not 2")
