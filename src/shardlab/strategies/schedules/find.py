"""Look-up of a schedule by what a user calls it: a built-in name, a generator in a file, or PyTorch's CSV."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path

from shardlab.common.errors import unknown
from shardlab.common.user_code import file_and_name, member, module_of
from shardlab.language import UserError
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.actions import Schedule
from shardlab.strategies.schedules.pytorch_csv import import_csv
from shardlab.strategies.schedules.steps import Steps


@cache
def find_schedule(name: str) -> Schedule | Steps:
    """The schedule called `name`: a built-in one, `path/to/file.py:function` or `path/to/file.csv`.

    In a Python file the name is that of a generator `(rank, ranks, microbatches, stages_per_rank)` with one stage a
    rank, or of a `Schedule`, which can say more.

    Raises:
        UserError: when there is no such schedule, or the file has something else.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    if name.endswith(".csv"):
        try:
            return import_csv(Path(name))
        except UserError as error:
            raise UserError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
    path, function = file_and_name(name)
    if path is None:
        raise unknown("schedule", name, SCHEDULES, ", path/to/file.py:function and file.csv")
    found = member(module_of(path), path, function, ("function", "generators"), inspect.isgeneratorfunction)
    if isinstance(found, Schedule):
        return found
    if not inspect.isgeneratorfunction(found):
        raise UserError(f"{function} in {path} is not a schedule; write it as a generator of actions, or as a Schedule")
    return Schedule(name, found, str(path))
