"""Training from a script or a notebook: a function call instead of a command line.

`train` writes its arguments as words of a command line and parses them, so that both accept the same settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardlab.cli import command_of
from shardlab.cli.train.command import Caller, Train
from shardlab.common.user_code import trace_limits
from shardlab.language import UserError
from shardlab.strategies import STRATEGIES

if TYPE_CHECKING:
    from shardlab.train.run import Summary
    from shardlab.train.steps import Callback


OF_THE_COMMAND = ("json", "print_config")
"""Options that only print, which a function call does not have."""


def train(
    strategy: str | Callable[..., Any] | None = None, *, callbacks: Sequence[Callback] = (), **settings: Any
) -> Summary | None:
    """Train as `shardlab train` does, with the options as keyword arguments. `shardlab.train` documents it."""
    given = {**settings, "strategy": _strategy_name(strategy) if callable(strategy) else strategy}
    if unfit := [name for name in OF_THE_COMMAND if given.get(name)]:
        raise UserError(f"{unfit[0]} is an option of the command shardlab train only; leave it out")
    _require_callbacks(callbacks)
    words = [word for name, value in given.items() for word in _words(name, value)]
    call = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    command = cast(Train, command_of(["train", *words]))
    caller = Caller(f"shardlab.train({call})", callbacks, in_python=True)
    with trace_limits(command.max_ops, command.max_seconds_per_op):
        command.train(caller)
    return caller.summaries[0] if caller.summaries else None


def _require_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse objects that are not callbacks.

    Raises:
        UserError: with the first of them.
    """
    if not callbacks:
        return
    from shardlab.train.steps import Callback  # which needs torch

    if unfit := [each for each in callbacks if not isinstance(each, Callback)]:
        raise UserError(
            f"callbacks has {unfit[0]!r}, which is not a callback; give instances of classes derived from "
            "shardlab.train.Callback"
        )


def _strategy_name(strategy: Callable[..., Any]) -> str:
    """Return the name by which ranks find a function: that of a built-in strategy, or `FILE:FUNCTION`.

    Raises:
        UserError: if the function is not in a file.
    """
    for name, entry in STRATEGIES.items():
        if entry.program is strategy:
            return name
    try:
        file = inspect.getsourcefile(strategy)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise UserError(
            f"{strategy.__name__} is not in a file, from which each rank could load it; write it into one (in "
            "a notebook: %%writefile mine.py), and give mine.py:FUNCTION"
        )
    return f"{file}:{strategy.__name__}"


def _words(name: str, value: Any) -> list[str]:
    """Return an option and its value as words of a command line. None gives no words."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, (list, tuple)):
        return [flag, *map(str, cast(Sequence[Any], value))]
    return [f"{flag}={value}"]
