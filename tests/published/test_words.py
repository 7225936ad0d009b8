"""The table that reads the prose of published runs."""

from __future__ import annotations

import pytest

from shardlab.hardware.devices import DEVICES
from shardlab.hardware.links import LINKS
from shardlab.predict.recipe import recipes
from shardlab.published import words
from shardlab.strategies.schedules import SCHEDULES


@pytest.mark.parametrize(
    ("what", "text", "key", "value"),
    [
        ("gpu", "A100_40GB", "device", "a100-40gb"),
        ("gpu", "A100 (80 GB)", "device", "a100-80gb"),
        ("gpu", "GB200", "device", "gb200"),
        ("gpu", "H1000", "device", None),
        ("schedule", "Interleaved-1F1B (flexible)", "name", "interleaved-1f1b"),
        ("schedule", "ZB-1P", "name", "zb-h1"),
        ("network", "8x HDR InfiniBand 200 Gb/s per node", "link", None),
        ("network", "4x Omni-Path", "link", "omni-path-100"),
        ("network", "EFA inter-node (AWS p5.48xlarge)", "link", "efa-100"),
        ("precision", "amp_fp8", "compute", "float8"),
        ("precision", "bfloat16", "compute", "bfloat16"),
        ("gradients", "bf16 (fp32 grad accumulation)", "bytes", 4),
        ("source", "NVIDIA-NeMo/Megatron-Bridge docs", "title", "Megatron-Bridge"),
        ("source", "a friend", "recipe", None),
    ],
)
def test_words_count_where_they_stand_whole_in_any_case(what: str, text: str, key: str, value: object) -> None:
    assert words.read(what, text).get(key) == value


def test_what_a_run_says_in_fields_may_choose_among_recipes() -> None:
    source = "pytorch/torchtitan benchmarks"
    assert words.read("source", source)["recipe"] == "torchtitan"
    assert words.read("source", source, {"compile": False})["recipe"] == "fsdp2"
    assert words.read("source", source, {"async_tp": True})["recipe"] == "torchtitan-async-tp"
    assert words.read("gradients", "mixed_precision=DEFAULT", {"zero_stage": 2}) == {}


def test_what_the_table_names_is_there() -> None:
    table = words._table()  # pyright: ignore[reportPrivateUsage]
    assert {entry["recipe"] for entry in table["source"] if "recipe" in entry} == recipes().keys() - {
        "shardlab",
        "pytorch-eager",
    }
    assert {entry["device"] for entry in table["gpu"]} <= DEVICES.keys()
    assert {entry["link"] for entry in table["network"] if "link" in entry} <= LINKS.keys()
    assert {entry["name"] for entry in table["schedule"]} <= SCHEDULES.keys()
