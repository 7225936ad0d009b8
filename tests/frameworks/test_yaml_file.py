"""YAML and JSON files as settings."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.frameworks.settings import Setting
from shardlab.frameworks.yaml_file import read_json, read_yaml, resolve


def test_anchors_and_merges_are_resolved_and_keep_their_lines() -> None:
    text = "base: &sizes\n  hidden: 64\n  layers: 2\nmodel:\n  <<: *sizes\n  layers: 4\nsame: *sizes\n"
    _, settings = read_yaml(text, "a.yaml")
    assert Setting("model.hidden", 64, 2) in settings
    assert Setting("model.layers", 4, 6) in settings
    assert Setting("same.layers", 2, 3) in settings


def test_unknown_tags_are_read_as_plain_values() -> None:
    assert read_yaml("a: !path /x\nb: !obj {c: 1}\n", "a.yaml")[0] == {"a": "/x", "b": {"c": 1}}


def test_json_has_lines() -> None:
    assert read_json('{\n"a": {\n\t"b": "auto"}}', "a.json")[1] == [Setting("a.b", "auto", 3)]


def test_interpolations_are_resolved() -> None:
    _, settings = read_yaml(
        "model:\n  hidden: 64\n  ffn: ${multiply:4, ${.hidden}}\n  seq: ${model.hidden}\n  data: ${oc.env:X}\n",
        "a.yaml",
    )
    values = {setting.key: setting.value for setting in resolve(settings)}
    assert (values["model.ffn"], values["model.seq"]) == (256, 64)
    assert values["model.data"] == "${oc.env:X}"


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "a: b: c", "", "\t- x"])
def test_other_text_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match=r"a\.yaml"):
        read_yaml(text, "a.yaml")


@given(st.text(st.sampled_from("a:&*<!-[]{} \n$|>'\"1.,#"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(UserError):
        resolve(read_yaml(text, "a.yaml")[1])
