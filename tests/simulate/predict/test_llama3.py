"""Llama 3 405B on 16,384 H100 (arXiv 2407.21783, section 3.3.2 and table 4) holds what its tensors add up to."""

from __future__ import annotations

import pytest

from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.models import find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.forecast import Forecast, forecast
from shardlab.simulate.predict.recipe import find_recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan

TP, PP, TOKENS, HIDDEN, KEYS_VALUES, FFN = 8, 16, 8192, 16384, 2 * 1024, 53248
SLICED = 6 * HIDDEN + KEYS_VALUES + 3 * FFN
"""Features that a block keeps of a token where tp gathers again what its matrices read: the inputs of both norms and
their results, queries, keys and values, attention's result, gate, up and their product."""


def step(recipe: str) -> Forecast:
    """tp 8, pp 16, dp 128, 16 sequences for each data-parallel rank; gradients sharded, in float32."""
    shared = ("dp_shard",)
    plan = Plan(
        Mesh(pp=PP, dp_shard=128, tp=TP),
        schedule="interleaved-1f1b",
        stages_per_rank=4,
        sequence_parallel=True,
        shard_gradients=shared,
        shard_optimizer=shared,
    )
    model, cluster, precision = find_model("llama3-405b"), find_cluster("h100x16384"), find_precision("bf16-fp32-grads")
    return forecast(Workload(plan, model, cluster, 2048, 1, precision, recipe=find_recipe(recipe)))


def activations(made: Forecast) -> int:
    return max(made.peaks, key=lambda peak: peak.bytes).by_category["activations"]


def test_the_published_plan_fits_where_gathered_sequences_are_gathered_again() -> None:
    """All 16 microbatches of 8 blocks are kept at once: 64 GiB at 508 MiB a block."""
    made = step("megatron-core")
    assert made.memory.fits
    assert activations(made) == pytest.approx(PP * 8 * 2 * TOKENS * SLICED / TP, rel=0.02)


def test_it_does_not_fit_where_they_are_kept() -> None:
    """Each rank has a block's two gathered inputs whole: 448 MiB more. What SwiGLU makes is made again."""
    made = step("shardlab")
    assert not made.memory.fits
    whole = SLICED - FFN + 2 * (TP - 1) * HIDDEN
    assert activations(made) == pytest.approx(PP * 8 * 2 * TOKENS * whole / TP, rel=0.03)
