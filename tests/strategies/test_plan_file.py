"""Plans in TOML files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.program import Mesh, UserError
from shardlab.strategies import Plan
from shardlab.strategies.plan_file import read_plan

WRITTEN = """
schedule = "breadth-first"
stages_per_rank = 3
layers_per_stage = [1, 1, 1, 1, 1, 2]
shard_parameters = ["dp_shard"]
shard_optimizer = ["dp_shard", "dp_replicate"]
reshard_after = "stage"

[mesh]
pp = 2
dp_shard = 2
dp_replicate = 2
"""


def test_a_file_has_the_fields_of_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(WRITTEN)
    assert read_plan(file) == Plan(
        Mesh(pp=2, dp_shard=2, dp_replicate=2),
        "breadth-first",
        3,
        (1, 1, 1, 1, 1, 2),
        shard_parameters=("dp_shard",),
        shard_optimizer=("dp_shard", "dp_replicate"),
        reshard_after="stage",
    )


def test_an_empty_file_is_one_device(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("")
    assert read_plan(file) == Plan()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("shedule = '1f1b'", "a plan has no field 'shedule'; did you mean schedule?"),
        ("colour = 'red'", "a plan has no field 'colour'; there are mesh, schedule"),
        ("mesh = 4", "mesh is 4; write a table, as in mesh = { pp = 2, dp_shard = 2 }"),
        ("mesh = { dpshard = 4 }", "a plan has no axis 'dpshard'; did you mean dp_shard?"),
        ("mesh = { pp = 0 }", "axis pp has 0 ranks"),
        ("mesh = { pp = '2' }", "pp is '2'; give a whole number"),
        ("mesh = { pp = true }", "pp is True; give a whole number"),
        ("stages_per_rank = 1.5", "stages_per_rank is 1.5; give a whole number"),
        ("layers_per_stage = ['a']", "layers_per_stage is a; give numbers"),
        ("shard_parameters = 'dp_shard'", "shard_parameters is 'dp_shard'; give a list of axes"),
        ("shard_optimizer = ['pp']", "shard_optimizer is pp; give some of dp_shard, dp_replicate, cp, each once"),
        ("shard_optimizer = [1]", "shard_optimizer is 1; give some of dp_shard, dp_replicate, cp, each once"),
        ("sequence_parallel = 1", "sequence_parallel is 1; give true or false"),
        ("context = 3", "context is 3; give one of ring, all_gather"),
        ("recompute = ['a']", "recompute is a; give one of none, selective, full, or the numbers of blocks"),
        ("schedule = 3", "schedule is 3; give a word in quotes"),
        ("recompute = 'half'", "recompute is 'half'; give one of none, selective, full"),
        ("mesh = ", "is not TOML: "),
    ],
)
def test_what_is_no_plan_is_one_sentence_with_the_file(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_plan(file)
    assert str(refused.value).startswith(f"{file}")
    assert sentence in str(refused.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_plan(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read: it is not text"):
        read_plan(tmp_path / "bytes.toml")
