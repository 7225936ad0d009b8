"""What a prediction takes for granted is said, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from shardlab.published.reading import read_run
from tests.published.test_reading import ROWS, changed

NAME = "zb-t12-6.2B-p8-m8-1f1b"


def test_a_run_that_says_all_is_taken_at_its_word() -> None:
    assert read_run(ROWS["korthikanti-t5-22B-full"]).assumed == ()


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("model", {"kv_heads": None}, "key and value heads: as many as heads"),
        ("model", {"ffn_hidden": None}, "feed-forward width: 16384, four times the model's"),
        ("model", {"ffn_type": None}, "activation function: GELU"),
        ("parallelism", {"schedule": None}, "schedule: 1f1b"),
        ("parallelism", {"cp": None}, "context parallelism: none"),
        ("parallelism", {"dp": None}, "data-parallel ranks: 1, what the other axes leave of the GPUs"),
        ("parallelism", {"zero_stage": None}, "ZeRO stage: 0"),
        ("hardware", {"gpus_per_node": None}, "GPUs of a node: 8"),
        (
            "hardware",
            {"network": None, "nics": None, "interconnect": "a network of our own", "gpus_per_node": 4},
            "network: 4 x infiniband-hdr a node, since a network of our own is none that is known here",
        ),
    ],
)
def test_what_a_run_leaves_open_is_said(section: str, fields: dict[str, Any], said: str) -> None:
    before, after = read_run(ROWS[NAME]).assumed, read_run(changed(NAME, section, **fields)).assumed
    assert set(after) - set(before) == {said}


def test_a_vocabulary_that_is_not_said_is_the_recipes() -> None:
    assert "vocabulary: 32000, the framework's usual one, padded" in read_run(ROWS[NAME]).assumed


def test_recomputation_and_precision_have_defaults() -> None:
    silent = ROWS[NAME] | {"recompute": None, "precision": None}
    assert {"recompute: none", "precision: fp16"} <= set(read_run(silent).assumed)
