"""Costs of stages: from words of the command line, and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.cli.schedule.costs import read_costs
from shardlab.language import UserError
from shardlab.planner.schedule_search.problem import StageCosts

FILE = """
source = "measured"
forward = [1, 1, 1, 3]
input = [1, 1, 1, 3]
weight = [1, 1, 1, 2.5]
activation = [2, 1, 1, 1]
message = 0.25
"""


def test_words_are_costs_of_a_rank_that_its_stages_share() -> None:
    stages, message = read_costs("forward=2,weight=0.5,message=0.1", 2, 2)
    assert stages == (StageCosts(1.0, 0.5, 0.25, 0.5, 0.5),) * 4
    assert message == 0.1
    assert read_costs(None, 2, 1) == ((StageCosts(1, 1, 1, 1, 1),) * 2, 0.0)


def test_a_file_has_the_costs_of_each_stage(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text(FILE)
    stages, message = read_costs(str(tmp_path / "costs.toml"), 4, 1)
    assert stages[3] == StageCosts(3, 3, 2.5, 1, 1)
    assert stages[0].activation == 2
    assert message == 0.25


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("forwrd=1", "--costs has no 'forwrd'; did you mean forward"),
        ("forward=fast", "--costs gives forward as 'fast'; give a number, such as forward=1.5"),
        ("forward", "--costs gives forward as ''; give a number"),
    ],
)
def test_a_wrong_word_is_named(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_costs(text, 2, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FILE.replace("[1, 1, 1, 2.5]", "[1, 1]"), "weight has 2 numbers, but 4 ranks with 1 stages each have 4"),
        (FILE.replace("message = 0.25", "massage = 0.25"), "massage"),
        (FILE.replace("input = [1, 1, 1, 3]", ""), "input"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text(text)
    with pytest.raises(UserError, match=words):
        read_costs(str(tmp_path / "costs.toml"), 4, 1)
