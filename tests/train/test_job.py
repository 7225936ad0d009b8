"""Settings that contradict each other are refused in one sentence before any process starts."""

from __future__ import annotations

import pytest

from shardlab.language import Mesh, UserError
from shardlab.models import GPT, Blocks
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job

MISTAKES: list[tuple[str | Plan, Blocks, str]] = [
    ("column-parallel", GPT(), "column-parallel layers are matrices one after the other, but GPT has more"),
    (Plan(Mesh(dp_shard=2), recompute="per-op"), GPT(layers=2), "recompute per-op is for predictions, with simulate"),
    (Plan(Mesh(ep=2)), GPT(layers=2), "ep 2, which cuts mixtures of experts, but GPT has none; train a MoE"),
]


@pytest.mark.parametrize(("strategy", "model", "sentence"), MISTAKES)
def test_a_model_that_a_strategy_cannot_cut_is_refused(strategy: str | Plan, model: Blocks, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Job(strategy, 2, 2, model, 2).checked()
