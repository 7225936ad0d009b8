"""Loading of a strategy by name: a built-in name, a function in a Python file, or a plan."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

from shardlab.common.user_code import file_and_name, find_member, load_module, reporting_errors_of
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
            The function is a strategy, `async def f(rank)`, or it returns a plan, `def f() -> Plan`.
        passes: names of the tape passes (None: the plan's passes, if it is a plan).

    Raises:
        UserError: if the name, pass, file or function does not exist, the file cannot be run, or the function is
            neither async nor returns a plan.
    """
    if isinstance(name, Plan):
        return replace(entry_from_plan(name, UNNAMED), passes=passes)
    path, function = file_and_name(name)
    return replace(find(name) if path is None else _from_file(name, path, function), passes=passes)


def _from_file(name: str, path: Path, function: str) -> StrategyEntry:
    module = load_module(path)
    if not function and not any(map(_is_strategy, vars(module).values())):
        raise UserError(
            f"{path} has no async function; write the strategy as `async def f(rank): ...`, or as `def f() -> Plan: "
            f"...`, or give a schedule as --pp N --schedule {path}"
        )
    members = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    is_one = inspect.iscoroutinefunction if any(map(inspect.iscoroutinefunction, members)) else _returns_plan
    function, program = find_member(module, path, function, ("function", "strategies"), is_one)
    name = name if name.endswith(f":{function}") else f"{path}:{function}"
    if _returns_plan(program):
        with reporting_errors_of(path):
            plan = program()
        if not isinstance(plan, Plan):
            raise UserError(f"{function} in {path} returned {plan!r:.60}; return a Plan")
        return entry_from_plan(plan, name)
    if not inspect.iscoroutinefunction(program):
        forms = f"`async def {function}(rank): ...` or `def {function}() -> Plan: ...`"
        raise UserError(f"{function} in {path} is not a strategy; write it as {forms}")
    mesh = getattr(module, f"{function}_mesh", data_parallel_mesh)
    return StrategyEntry(name, program, "as its program says", str(path), mesh)


def _is_strategy(value: object) -> bool:
    return inspect.iscoroutinefunction(value) or _returns_plan(value)


def _returns_plan(value: object) -> bool:
    """Return whether a value is a function without parameters whose annotation says that it returns a plan."""
    if not inspect.isfunction(value) or inspect.signature(value).parameters:
        return False
    annotation = value.__annotations__.get("return")  # a text under `from __future__ import annotations`
    return annotation is Plan or str(annotation).strip("'\"").rpartition(".")[2] == Plan.__name__
