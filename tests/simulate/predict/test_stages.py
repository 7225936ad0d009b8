"""Stages of equal cost, as nanotron deals modules."""

from __future__ import annotations

import pytest

from shardlab.models import Llama
from shardlab.simulate.predict.stages import modules_of_stages, stages_by_cost

SMALL = Llama(layers=16, hidden_size=2048, heads=32, ffn_hidden_size=8192, vocab_size=131072, tied=True)
LARGE = Llama(layers=32, hidden_size=4096, heads=32, ffn_hidden_size=14336, vocab_size=131072)


def blocks(model: Llama, stages: int) -> list[int]:
    stages_modules = modules_of_stages(model, stages)
    assert stages_modules is not None
    assert [module for modules in stages_modules for module in modules] == [
        "embedding",
        *["block"] * model.layers,
        "norm",
        "head",
        "cast",
        "loss",
    ]
    return [modules.count("block") for modules in stages_modules]


def test_a_stage_ends_with_the_module_that_takes_it_beyond_its_share() -> None:
    assert blocks(LARGE, 2) == [18, 14]
    assert blocks(LARGE, 8) == [5, 4, 4, 5, 4, 4, 4, 2]
    assert blocks(SMALL, 4) == [6, 5, 5, 0]


def test_a_pipeline_may_be_so_deep_that_its_last_stage_has_nothing() -> None:
    assert modules_of_stages(SMALL, 8) is not None
    assert modules_of_stages(SMALL, 16) is None
    assert stages_by_cost(SMALL, 16, halves=True) == ()


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_plan_of_half_blocks_has_the_head_on_its_last_stage(stages: int) -> None:
    dealt = stages_by_cost(SMALL, stages, halves=True)
    assert sum(dealt) == 2 * SMALL.layers + 1
    assert min(dealt) >= 1


def test_the_last_stage_of_whole_blocks_has_one() -> None:
    assert stages_by_cost(LARGE, 4, halves=False) == (9, 9, 8, 6)
    assert stages_by_cost(LARGE, 32, halves=False) == (1,) * 32
