"""Look-up of a strategy by what a user calls it: a built-in name, a function in a file, or a plan."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

from shardlab.common.user_code import file_and_name, member, module_of
from shardlab.language import UserError
from shardlab.strategies import find
from shardlab.strategies.plan.plan import UNNAMED, Plan
from shardlab.strategies.registry import StrategyEntry, data_parallel_mesh, planned_entry


def load(name: str | Plan, passes: str | None = None) -> StrategyEntry:
    """The strategy called `name`: a built-in name or `path/to/file.py:function`; or the one that follows a plan.

    A file whose strategy needs another grid than one axis of data-parallel ranks says so with a second function,
    `<strategy>_mesh(ranks) -> Mesh`.

    Args:
        passes: what rewrites its program, by name (None: what the plan says, or else nothing).

    Raises:
        UserError: when there is no such name, pass, file or function, the file cannot be run, or the function is not
            async.
    """
    if isinstance(name, Plan):
        return replace(planned_entry(name, UNNAMED), passes=passes)
    path, function = file_and_name(name)
    return replace(find(name) if path is None else _from_file(name, path, function), passes=passes)


def _from_file(name: str, path: Path, function: str) -> StrategyEntry:
    module = module_of(path)
    program = member(module, path, function, ("function", "async functions"), inspect.iscoroutinefunction)
    if not inspect.iscoroutinefunction(program):
        raise UserError(f"{function} in {path} is not a strategy; write it as `async def {function}(rank): ...`")
    mesh = getattr(module, f"{function}_mesh", data_parallel_mesh)
    return StrategyEntry(name, program, "as its program says", str(path), mesh)
