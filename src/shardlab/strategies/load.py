"""Loading of a strategy by name: a built-in name, a function in a Python file, or a plan."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

from shardlab.common.user_code import file_and_name, find_member, load_module
from shardlab.language import UserError
from shardlab.strategies import find
from shardlab.strategies.plan.plan import UNNAMED, Plan
from shardlab.strategies.registry import StrategyEntry, data_parallel_mesh, entry_from_plan


def load(name: str | Plan, passes: str | None = None) -> StrategyEntry:
    """Return the strategy with this name, or the strategy that follows this plan.

    By default a strategy of a file runs on one axis of data-parallel ranks. If it needs another mesh, the file defines
    a second function `<strategy>_mesh(ranks) -> Mesh`.

    Args:
        name: a built-in name, `path/to/file.py:function`, `path/to/file.py` if the file has one strategy, or a plan.
        passes: names of the tape passes (None: the plan's passes, if it is a plan).

    Raises:
        UserError: if the name, pass, file or function does not exist, the file cannot be run, or the function is not
            async.
    """
    if isinstance(name, Plan):
        return replace(entry_from_plan(name, UNNAMED), passes=passes)
    path, function = file_and_name(name)
    return replace(find(name) if path is None else _from_file(name, path, function), passes=passes)


def _from_file(name: str, path: Path, function: str) -> StrategyEntry:
    module = load_module(path)
    if not function and not any(map(inspect.iscoroutinefunction, vars(module).values())):
        hint = f"write the strategy as `async def f(rank): ...`, or give a schedule as --pp N --schedule {path}"
        raise UserError(f"{path} has no async function; {hint}")
    what, is_one = ("function", "async functions"), inspect.iscoroutinefunction
    function, program = find_member(module, path, function, what, is_one)
    if not inspect.iscoroutinefunction(program):
        raise UserError(f"{function} in {path} is not a strategy; write it as `async def {function}(rank): ...`")
    name = name if name.endswith(f":{function}") else f"{path}:{function}"
    mesh = getattr(module, f"{function}_mesh", data_parallel_mesh)
    return StrategyEntry(name, program, "as its program says", str(path), mesh)
