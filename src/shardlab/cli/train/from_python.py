"""Commands as function calls, for scripts and notebooks.

`command_from` converts the arguments of a call into a command line and parses it, so that both accept the same
settings. `train` calls it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardlab.cli import COMMANDS, Command, command_of
from shardlab.cli.options import option_values
from shardlab.cli.train.command import Caller, Train
from shardlab.common.calls import refuse_argument
from shardlab.common.errors import closest_name
from shardlab.common.user_code import display_path, trace_limits
from shardlab.language import UserError
from shardlab.strategies import STRATEGIES

if TYPE_CHECKING:
    from shardlab.train.run import Summary
    from shardlab.train.steps import Callback

_LINE = re.compile(r"[^\s(]+(?=:\d+[):])")
"""Pattern of a file name in a message that is followed by the number of a line."""

OF_THE_COMMAND = (
    "help",
    "json",
    "print_config",
    "out",
    "write",
    "force",
    "grade",
    "measure",
    "measured",
    "search_schedule",
    "all",
)
"""Options that a function call does not have, because they print, write files or start other work."""


def train(
    strategy: str | Callable[..., Any] | None = None, *, callbacks: Sequence[Callback] = (), **settings: Any
) -> Summary | None:
    """Train as `shardlab train` does, with the options as keyword arguments. `shardlab.train` documents it."""
    strategy_option = strategy if strategy is None or isinstance(strategy, str) else strategy_name(strategy)
    options = {**settings, "strategy": strategy_option}
    _require_callbacks(callbacks)
    command = cast(Train, command_from("train", [], options, allowed=("out", "force")))
    call = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
    caller = Caller(f"shardlab.train({call})", callbacks, in_python=True)
    with trace_limits(command.max_ops, command.max_seconds_per_op):
        try:
            command.train(caller)
        except UserError as error:  # of a rank, which does not know the names of a notebook's cells
            raise UserError(_LINE.sub(lambda line: display_path(line[0]), str(error))) from error
    return caller.summaries[0] if caller.summaries else None


def command_from(
    name: str, words: Sequence[str], settings: Mapping[str, Any], *, allowed: Sequence[str] = ()
) -> Command:
    """Return the command with these settings.

    Args:
        name: name of the command.
        words: first arguments of the command line, such as a strategy.
        settings: options by name, with `_` for `-`.
        allowed: names of `OF_THE_COMMAND` that this call accepts nevertheless.

    Raises:
        UserError: for an unknown option, a wrong value, or an option that the call does not accept.
    """
    arguments = {option: value for option, value in settings.items() if value is not None}
    if unfit := [key for key in OF_THE_COMMAND if arguments.get(key, False) is not False and key not in allowed]:
        raise UserError(f"{unfit[0]} is an option of the command shardlab {name} only; leave it out")
    defaults = option_values(COMMANDS[name]())
    flags = {option for option, default in defaults.items() if isinstance(default, bool)}
    for option, value in arguments.items():
        if option in defaults and isinstance(value, bool) != (option in flags):
            refuse_argument(option, value, "True or False" if option in flags else "its value, or leave it out")
    for option, value in arguments.items():
        parts = value if type(value) in (list, tuple) else (value,)
        if option in defaults and not all(isinstance(part, str | int | float | Path) for part in parts):
            refuse_argument(option, value, "a text or a number, as on the command line")
    options = [word for option, value in arguments.items() for word in _words(option, value, flags)]
    return command_of([name, *words, *options])


def _require_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse objects that are not callbacks, and methods that cannot be called.

    Raises:
        UserError: with the first such object or method.
    """
    if isinstance(callbacks, list | tuple) and not callbacks:
        return
    from shardlab.train.steps import Callback  # which needs torch

    if not isinstance(callbacks, list | tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse_argument("callbacks", callbacks, "a list of callbacks, such as callbacks=[WeightNorm()]")
    if non_callbacks := [candidate for candidate in callbacks if not isinstance(candidate, Callback)]:
        raise UserError(
            f"callbacks has {non_callbacks[0]!r}, which is not a callback; give instances of classes derived from "
            "shardlab.train.Callback"
        )
    methods = {name: method for name, method in vars(Callback).items() if callable(method)}
    for callback in callbacks:
        kind = type(callback).__name__
        for name in dir(callback):
            if name.startswith("on_") and name not in methods and (near := closest_name(name, methods, cutoff=0.8)):
                raise UserError(f"the callback {kind} has {name}, which is never called; did you mean {near}?")
        for name, method in methods.items():
            names = list(inspect.signature(method).parameters)
            try:
                inspect.signature(getattr(callback, name)).bind(*names[1:])
            except TypeError:
                parameters = ", ".join(inspect.signature(getattr(type(callback), name)).parameters)
                raise UserError(
                    f"the callback {kind} has {name}({parameters}); write it as {name}({', '.join(names)})"
                ) from None


def strategy_name(strategy: Callable[..., Any]) -> str:
    """Return the name by which ranks load a strategy: its built-in name, or `FILE:FUNCTION`.

    Raises:
        UserError: if it is not a function in a file.
    """
    if not inspect.isfunction(strategy):
        accepted = (
            "a name, path/to/file.py:function, or a function in a file; a plan is given by its fields, as dp_shard=2"
        )
        refuse_argument("strategy", strategy, accepted)
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


def _words(name: str, value: Any, flags: Collection[str]) -> list[str]:
    """Return an option and its value as arguments of a command line.

    Args:
        flags: names of options without a value. A flag without an opposite is off if it is left out.
    """
    flag = f"--{name.replace('_', '-')}"
    if value is False and name in flags:
        opposite = "untied" if name == "tied" else f"no_{name}"
        return [f"--{opposite.replace('_', '-')}"] if opposite in flags else []
    if isinstance(value, bool):
        return [flag]
    if isinstance(value, (list, tuple)):
        return [flag, *map(str, cast(Sequence[Any], value))]
    return [f"{flag}={value}"]
