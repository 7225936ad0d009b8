"""A schedule in a file is the one that the file has now."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.strategies.schedules import SCHEDULES, Schedule
from shardlab.strategies.schedules.find import find_schedule
from shardlab.strategies.schedules.pytorch_csv import export_csv
from shardlab.strategies.schedules.steps import Steps, resolve_schedule

PROGRAM = """
from shardlab.strategies.schedules import Backward, Forward

def mine(rank, ranks, microbatches, stages_per_rank):
    for microbatch in range(microbatches):
        yield Forward(rank, microbatch)
    for microbatch in ORDER:
        yield Backward(rank, microbatch)
"""


def test_the_same_name_in_another_folder_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for microbatches in (4, 6):
        steps = resolve_schedule(SCHEDULES["1f1b"], 2, microbatches, 1)
        folder = tmp_path / str(microbatches)
        folder.mkdir()
        (folder / "schedule.csv").write_text(export_csv(steps, form="compute_only"))
    for microbatches in (4, 6, 4):
        monkeypatch.chdir(tmp_path / str(microbatches))
        schedule = find_schedule("schedule.csv")
        assert isinstance(schedule, Steps)
        assert schedule.microbatches == microbatches


def test_a_changed_program_is_read_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    first_backwards: list[int] = []
    for order in ("range(microbatches)", "range(microbatches)[::-1]"):
        file.write_text(PROGRAM.replace("ORDER", order))
        schedule = find_schedule(f"{file}:mine")
        assert isinstance(schedule, Schedule)
        assert find_schedule(f"{file}:mine") is schedule
        first_backwards.append(list(schedule.actions(0, 1, 2, 1))[2].microbatch)
    assert first_backwards == [0, 1]
