"""Look-up of a schedule by name: a built-in name, a generator in a Python file, or a CSV file of PyTorch."""

from __future__ import annotations

import inspect
import os
from functools import lru_cache
from pathlib import Path

from shardlab.common.errors import unknown_name
from shardlab.common.user_code import file_and_name, find_member, load_module
from shardlab.language import UserError
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.actions import Schedule
from shardlab.strategies.schedules.pytorch_csv import import_csv
from shardlab.strategies.schedules.steps import Steps


def find_schedule(name: str) -> Schedule | Steps:
    """Return the schedule with a built-in name, `path/to/file.py:function` or `path/to/file.csv`.

    The function in a Python file is a generator `(rank, ranks, microbatches, stages_per_rank)`, for one stage on each
    rank. The name may also stand for a `Schedule` in the file, which can have another placement and number of stages.

    A file is read again if its text has changed, or if the name now refers to another file.

    Raises:
        UserError: if there is no such schedule, or the file has something else.
    """
    path = schedule_file(name)
    if path is None:
        return SCHEDULES[name]
    try:
        version = (os.path.realpath(path), path.read_bytes())
    except OSError:
        return _read(name)  # its error says what is wrong with the file
    return _read_version(name, version)


def schedule_file(name: str) -> Path | None:
    """Return the file that the name of a schedule refers to, which need not exist (None: the schedule is built in).

    Raises:
        UserError: if the name is neither that of a file nor of a built-in schedule.
    """
    if name in SCHEDULES:
        return None
    path = Path(name) if name.endswith(".csv") else file_and_name(name)[0]
    if path is None:
        raise unknown_name("schedule", name, SCHEDULES, ", path/to/file.py:function and file.csv")
    return path


@lru_cache(maxsize=16)
def _read_version(name: str, version: tuple[str, bytes]) -> Schedule | Steps:
    return _read(name)


def _read(name: str) -> Schedule | Steps:
    if name.endswith(".csv"):
        try:
            return import_csv(Path(name))
        except UserError as error:
            raise UserError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
    path, function = file_and_name(name)
    assert path is not None
    nouns, is_one = ("function", "generators"), inspect.isgeneratorfunction
    function, schedule = find_member(load_module(path), path, function, nouns, is_one)
    if isinstance(schedule, Schedule):
        return schedule
    if not inspect.isgeneratorfunction(schedule):
        raise UserError(f"{function} in {path} is not a schedule; write it as a generator of actions, or as a Schedule")
    return Schedule(name, schedule, str(path))
