"""Tests of tables that are read into dataclasses, and of their sentences."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.common.fields import COUNT, DURATION, Amount, read_settings
from shardlab.common.files import as_toml
from tests.support.thorough import examples


@dataclass(frozen=True)
class Cable:
    """Settings of a cable."""

    speed: Amount
    kind: Literal["copper", "glass"] = "copper"


@dataclass(frozen=True)
class Rack:
    """Settings of a rack."""

    name: str
    ranks: Annotated[int, COUNT] = 1
    wait: Annotated[float, DURATION] = 5.0
    spare: bool = False
    note: str | None = None
    cable: Cable = Cable(1.0)
    shares: Mapping[str, Amount] = field(default_factory=dict[str, float])
    cables: tuple[Cable, ...] = ()


AMOUNTS = st.floats(0, 1e300)
CABLES = st.builds(Cable, AMOUNTS, st.sampled_from(["copper", "glass"]))
RACKS = st.builds(
    Rack,
    name=st.text(),
    ranks=st.integers(1, 2**62),
    wait=st.floats(1e-9, 1e9),
    spare=st.booleans(),
    note=st.none() | st.text(),
    cable=CABLES,
    shares=st.dictionaries(st.text(), AMOUNTS, max_size=3),
    cables=st.lists(CABLES, max_size=3).map(tuple),
)


@settings(max_examples=examples(50))
@given(RACKS)
def test_settings_that_were_written_as_toml_are_read_as_they_were(rack: Rack) -> None:
    table = tomllib.loads(as_toml({"rack": asdict(rack)}))["rack"]
    assert read_settings(Rack, table, "racks.toml", "rack") == rack


@given(RACKS, CABLES)
def test_a_table_changes_the_fields_of_its_base_that_it_has(base: Rack, cable: Cable) -> None:
    changed = read_settings(Rack, {"cable": {"kind": cable.kind}, "shares": {"tp": 0.5}}, "", base=base)
    assert changed.cable == Cable(base.cable.speed, cable.kind)
    assert changed.shares == {**base.shares, "tp": 0.5}
    assert (changed.name, changed.ranks, changed.cables) == (base.name, base.ranks, base.cables)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "racks.toml: rack does not say name"),
        (3, "racks.toml: rack is 3; give a table"),
        ({"nam": "a"}, "racks.toml: rack has no 'nam'; did you mean name?"),
        ({"name": 3}, "racks.toml: rack.name is 3; give a word in quotes"),
        ({"ranks": 0}, "racks.toml: rack.ranks is 0; give 1 or more"),
        ({"ranks": True}, "racks.toml: rack.ranks is True; give a whole number"),
        ({"wait": "soon"}, "racks.toml: rack.wait is 'soon'; give seconds, above 0, or a time, such as 90s"),
        ({"spare": 1}, "racks.toml: rack.spare is 1; give true or false"),
        ({"note": 1}, "racks.toml: rack.note is 1; give a word in quotes"),
        ({"cable": 1}, "racks.toml: rack.cable is 1; give a table"),
        ({"cable": {"sped": 1}}, "racks.toml: rack.cable has no 'sped'; did you mean speed?"),
        ({"cable": {"kind": "glas"}}, "racks.toml: rack.cable.kind is 'glas'; give one of copper, glass"),
        ({"shares": {"tp": -1}}, "racks.toml: rack.shares.tp is -1; give a number, 0 or more"),
        ({"cables": "a"}, "racks.toml: rack.cables is 'a'; give a list"),
        ({"cables": [{"speed": 1}, {}]}, "racks.toml: rack.cables[1] does not say speed"),
    ],
)
def test_a_wrong_table_is_one_sentence_with_file_key_value_and_what_is_accepted(table: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        read_settings(Rack, table, "racks.toml", "rack")
    assert str(refused.value).startswith(sentence)


def test_keys_of_other_readers_are_left_alone_if_the_reader_says_so() -> None:
    assert read_settings(Cable, {"speed": 2, "colour": "red"}, "", strict=False) == Cable(2)
